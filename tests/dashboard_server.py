"""The part of the pipeline server's REST API (v2beta1) that `pipeline_server` uses, for the real kfp client.

As strict as the real one: unknown fields are refused by the models of `kfp_server_api`, pipelines have unique names, a
version needs its pipeline, cron needs six fields, and every request needs the token. It behaves as kubeflow/pipelines
2.14 to 2.17 where that surprises: a run's tasks are all nodes of its workflow (backend/src/apiserver/server/
api_converter.go); a terminated run ends as FAILED (backend/src/common/util/execution_spec.go); the names of a
schedule's runs begin with 25 characters of its name (backend/src/apiserver/template/template.go); and the workflows
that a schedule owns are deleted with it, so that their runs stay RUNNING for ever.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kfp_server_api
import yaml
from http_server import HttpServer, Refused, check_fields, send_json


class Server(HttpServer):
    def __init__(self) -> None:
        self.token, self.version = "a-token", "2.16.1"
        self.statuses: list[int] = []
        """Statuses of the next answers, which are errors."""
        self.pipelines: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.experiments: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.recurring: dict[str, dict[str, Any]] = {}
        self.terminated: list[str] = []
        self.lost: list[str] = []
        """Runs whose workflow was deleted with its schedule while it was in progress."""
        self.on_run: Callable[[dict[str, Any]], None] = lambda run: None
        """Called with every run that is started directly, not by a schedule."""
        self.states: list[str] = ["SUCCEEDED"]
        """A run's state at each request; the last one stays."""
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        content = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        url = urlsplit(request.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        try:
            if self.statuses:
                raise Refused(self.statuses.pop(0), "the server is in trouble")
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized")
            status, answer = 200, self._route(request, url.path.removeprefix("/apis/v2beta1/"), query, content)
        except Refused as refusal:
            status, answer = refusal.status, {"error": str(refusal), "message": str(refusal)}
        send_json(request, status, answer)

    def _route(self, request: BaseHTTPRequestHandler, path: str, query: dict[str, str], content: bytes) -> Any:
        method, parts = request.command, path.split("/")
        match method, parts:
            case "GET", ["", "apis", "v1beta1", "healthz"]:
                return {"tag_name": self.version, "commit_sha": "", "multi_user": False}
            case "GET", ["healthz"]:
                return {"multi_user": False}
            case "POST", ["pipelines"]:
                body = self._body(content, "V2beta1Pipeline")
                if body["display_name"] in (entry["display_name"] for entry in self.pipelines.values()):
                    raise Refused(409, f"the name {body['display_name']} already exists")
                return self._add(self.pipelines, "pipeline_id", body)
            case "POST", ["pipelines", "upload_version"]:
                return self._add_version(query["pipelineid"], query["name"], request, content)
            case "GET", ["pipelines"]:
                return {"pipelines": _filtered(self.pipelines, query)}
            case "GET", ["pipelines", pipeline, "versions"]:
                return {"pipeline_versions": [v for v in self.versions.values() if v["pipeline_id"] == pipeline]}
            case "GET", ["experiments"]:
                return {"experiments": _filtered(self.experiments, query)}
            case "POST", ["experiments"]:
                return self._add(self.experiments, "experiment_id", self._body(content, "V2beta1Experiment"))
            case "POST", ["runs"]:
                body = self._body(content, "V2beta1Run")
                self._check_version(body["pipeline_version_reference"], latest=False)
                run = self._add(self.runs, "run_id", body)
                self.on_run(run)
                return run
            case "GET", ["runs"]:
                return {"runs": [{"state": "RUNNING", **run} for run in self.runs.values()]}
            case "POST", ["runs", run] if run.endswith(":terminate"):
                run = run.removesuffix(":terminate")
                if self.runs.get(run, {}).get("state", "RUNNING") not in ("PENDING", "RUNNING", "PAUSED"):
                    raise Refused(400, f"InvalidInputError: Failed to terminate run {run}. Row not found")
                self.terminated.append(run)
                if run in self.runs:
                    self.runs[run]["state"] = "CANCELING"
                return {}
            case "GET", ["runs", run]:
                if run not in self.runs:
                    raise Refused(404, f"run {run} not found")
                state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
                history = [{"state": "RUNNING"}]
                if self.runs[run].get("state") == "CANCELING":
                    self.runs[run]["state"] = "FAILED"
                    history.append({"state": "CANCELING"})
                return {"state": state, **self.runs[run], "state_history": history,
                        "run_details": {"task_details": _workflow_nodes(state)}}  # fmt: skip
            case "POST", ["recurringruns"]:
                body = self._body(content, "V2beta1RecurringRun")
                self._check_version(body["pipeline_version_reference"], latest=True)
                cron = body["trigger"].get("cron_schedule")
                if cron and len(cron["cron"].split()) != 6:
                    raise Refused(400, "cron: six fields expected")
                if not 1 <= int(body["max_concurrency"]) <= 10:
                    raise Refused(400, "max_concurrency: 1 to 10")
                schedule = self._add(self.recurring, "recurring_run_id", {**body, "status": "ENABLED"})
                if body["trigger"].get("periodic_schedule"):  # its first run starts at once
                    self.start_scheduled_run(schedule["recurring_run_id"])
                return schedule
            case "POST", ["recurringruns", schedule] if schedule.endswith(":disable"):
                self.recurring[schedule.removesuffix(":disable")]["status"] = "DISABLED"
                return {}
            case "GET", ["recurringruns"]:
                return {"recurringRuns": list(self.recurring.values())}
            case "DELETE", ["recurringruns", schedule]:
                if self.recurring.pop(schedule, None) is None:
                    raise Refused(404, f"recurring run {schedule} not found")
                self.lost += [
                    key
                    for key, run in self.runs.items()
                    if run.get("recurring_run_id") == schedule and run["state"] in ("PENDING", "RUNNING", "CANCELING")
                ]
                return {}
        raise Refused(404, f"{method} {path} not found")

    def _body(self, content: bytes, kind: str) -> dict[str, Any]:
        body = json.loads(content)
        check_fields(body, kind, [kfp_server_api])
        return dict(body)

    def start_scheduled_run(self, schedule_id: str) -> str:
        """Start a run of the schedule and return its id."""
        schedule = self.recurring[schedule_id]
        name = f"{schedule['display_name'][:25]}trpbr-1-1482128149"
        run = {"display_name": name, "recurring_run_id": schedule_id, "state": "RUNNING",
               "runtime_config": schedule["runtime_config"]}  # fmt: skip
        return str(self._add(self.runs, "run_id", run)["run_id"])

    def _check_version(self, reference: dict[str, Any], *, latest: bool) -> None:
        if reference["pipeline_id"] not in self.pipelines:
            raise Refused(404, "pipeline not found")
        version = reference.get("pipeline_version_id")
        if version is None and latest:
            return
        if version not in self.versions:
            raise Refused(400, "pipeline version not found")

    def _add(self, entries: dict[str, Any], key: str, content: dict[str, Any]) -> dict[str, Any]:
        entry = {**content, key: str(uuid.uuid4())}
        entries[entry[key]] = entry
        return entry

    def _add_version(self, pipeline: str, name: str, request: Any, content: bytes) -> dict[str, Any]:
        if pipeline not in self.pipelines:
            raise Refused(404, "pipeline not found")
        if any(v["display_name"] == name and v["pipeline_id"] == pipeline for v in self.versions.values()):
            raise Refused(409, f"version {name} already exists")
        boundary = re.search(r'boundary="?([^";]+)', request.headers["Content-Type"])
        assert boundary is not None
        part = content.split(f"--{boundary[1]}".encode())[1]
        file = part.split(b"\r\n\r\n", 1)[1].removesuffix(b"\r\n")
        list(yaml.safe_load_all(file))
        version = self._add(self.versions, "pipeline_version_id", {"pipeline_id": pipeline, "display_name": name})
        self.files[version["pipeline_version_id"]] = file
        return version


def _workflow_nodes(state: str) -> list[dict[str, Any]]:
    """The nodes of a workflow that has come to the train step; the pod of each step is called `executor`."""
    steps = {"resolve-recipe": "SUCCEEDED", "train-stage": state}
    nodes = [("survival-x7k2p", state), ("root-driver", "SUCCEEDED"), ("root", state), ("run", state)]
    for step, step_state in steps.items():
        nodes += [(f"{step}-driver", "SUCCEEDED"), (step, step_state), ("executor", step_state)]
    return [{"task_id": f"node-{number}", "display_name": name, "state": node_state}
            for number, (name, node_state) in enumerate(nodes)]  # fmt: skip


def _filtered(entries: dict[str, dict[str, Any]], query: dict[str, str]) -> list[dict[str, Any]]:
    """The entries that match a request's filter."""
    predicates = json.loads(query.get("filter", "{}") or "{}").get("predicates", [])
    return [
        entry
        for entry in entries.values()
        if all(entry[predicate["key"]] == predicate["stringValue"] for predicate in predicates)
    ]


@contextmanager
def dashboard() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.close()
