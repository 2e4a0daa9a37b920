"""The part of the pipeline server's REST API (v2beta1) that `pipeline_server` uses, for the real kfp client.

As strict as the real one: unknown fields are refused by the models of `kfp_server_api`, pipelines have unique names, a
version needs its pipeline, cron needs six fields, and every request needs the token. It behaves as kubeflow/pipelines
2.14 to 2.17 where that surprises:
- A run's tasks are all nodes of its workflow, sorted by the nodes' ids, without the names of their pods: `child_tasks`
  has ids of nodes. What has not ended, ended in the year 1, or 1970 if it is a run. A node that Argo has omitted has no
  state (backend/src/apiserver/server/api_converter.go, model/run.go, backend/src/common/util/workflow.go).
- A terminated run ends as FAILED (backend/src/common/util/execution_spec.go); only FAILED runs can be retried, and the
  pods of the failed steps are deleted (GenerateRetryExecution in backend/src/common/util/workflow.go).
- The names of a schedule's runs begin with 25 characters of its name (backend/src/apiserver/template/template.go), and
  the workflows that a schedule owns are deleted with it, so that their runs stay RUNNING for ever.
- The spec of a version with settings for Kubernetes is in a field of its own (YamlStringToPipelineSpecStruct in
  backend/src/apiserver/server/api_util.go).
- kfp's client takes an archived experiment as it is.
"""

import json
import re
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kfp_server_api
import pytest
import yaml
from http_server import NAMESPACE, HttpServer, Refused, check_fields, send_json

NEVER = "0001-01-01T00:00:00Z"
"""When a task ended that has not: the zero of Go's time."""


class Server(HttpServer):
    def __init__(self) -> None:
        self.token = "a-token"
        self.version = "unknown"
        """No image of OpenShift AI's sets TAG_NAME: kubeflow/pipelines, backend/src/apiserver/common/config.go."""
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
        """Called with every run that is started, also by a schedule."""
        self.on_terminate: Callable[[str], None] = lambda run: None
        """Called with the id of every run that is terminated."""
        self.on_lose: Callable[[str], None] = lambda run: None
        """Called with the id of every run whose workflow is deleted while it is in progress."""
        self.on_retry: Callable[[str], None] = lambda run: None
        """Called with the id of every run that is retried."""
        self.states: list[str] = ["SUCCEEDED"]
        """A run's state at each request; the last one stays."""
        self.steps: dict[str, dict[str, str]] = {}
        """By the run's id: Argo's phase of each step that its workflow has come to, in order."""
        self.report_seconds = 0.0
        """How long after its start a scheduled run is reported to the server, which then lists it."""
        self._reported_at: dict[str, float] = {}
        self.requests: list[str] = []
        """Method and path of each request with a token."""
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
            self.requests.append(f"{request.command} {url.path}")
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
            case "GET", ["pipelines", pipeline, "versions", version]:
                if version not in self.versions:
                    raise Refused(404, f"version {version} not found")
                spec, *platform = yaml.load_all(self.files[version], getattr(yaml, "CSafeLoader", yaml.SafeLoader))
                spec = {"pipeline_spec": spec, "platform_spec": platform[0]} if platform else spec
                return {**self.versions[version], "pipeline_spec": spec}
            case "GET", ["experiments"]:
                return {"experiments": _filtered(self.experiments, query)}
            case "POST", ["experiments"]:
                body = {**self._body(content, "V2beta1Experiment"), "storage_state": "AVAILABLE"}
                return self._add(self.experiments, "experiment_id", body)
            case "POST", ["runs"]:
                body = self._body(content, "V2beta1Run")
                self._check_version(body["pipeline_version_reference"], latest=False)
                run = self._add_run(body)
                self.on_run(run)
                return run
            case "GET", ["runs"]:
                order = (
                    reversed(self.runs.values()) if query.get("sort_by") == "created_at desc" else self.runs.values()
                )
                now = time.monotonic()
                listed = [run for run in order if self._reported_at.get(run["run_id"], now) <= now]
                return {"runs": [{"state": "RUNNING", **run} for run in listed]}
            case "POST", ["runs", run] if run.endswith(":retry"):
                run = run.removesuffix(":retry")
                if self.runs[run].get("state") != "FAILED":
                    raise Refused(400, "Failed to retry run: Workflow must be Failed/Error to retry")
                self.runs[run] |= {"state": "RUNNING", "finished_at": "1970-01-01T00:00:00Z"}
                self.runs[run]["state_history"] += [{"state": "FAILED"}, {"state": "RUNNING"}]
                phases = {step: phase for step, phase in self.steps.get(run, {}).items() if phase != "Omitted"}
                self.steps[run] = {step: phase if phase == "Succeeded" else "Running" for step, phase in phases.items()}
                self.on_retry(run)
                return {}
            case "POST", ["runs", run] if run.endswith(":terminate"):
                run = run.removesuffix(":terminate")
                if self.runs.get(run, {}).get("state", "RUNNING") not in ("PENDING", "RUNNING", "PAUSED"):
                    raise Refused(400, f"InvalidInputError: Failed to terminate run {run}. Row not found")
                self.terminated.append(run)
                if run in self.runs:
                    self.runs[run]["state"] = "CANCELING"
                self.on_terminate(run)
                return {}
            case "GET", ["runs", run]:
                if run not in self.runs:
                    raise Refused(404, f"run {run} not found")
                state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
                if self.runs[run].get("state") == "CANCELING":
                    self.runs[run]["state"] = "FAILED"
                    self.runs[run]["state_history"].append({"state": "CANCELING"})
                answer = {"state": state, **self.runs[run]}
                if answer["state"] in ("SUCCEEDED", "FAILED"):
                    answer["state_history"] = [*answer["state_history"], {"state": answer["state"]}]
                phase = answer["state"].capitalize()
                steps = self.steps.get(run) or {"resolve-recipe": "Succeeded", "train-stage": phase}
                return {**answer, "run_details": {"task_details": _workflow_nodes(phase, steps)}}
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
                lost = [
                    key
                    for key, run in self.runs.items()
                    if run.get("recurring_run_id") == schedule and run["state"] in ("PENDING", "RUNNING", "CANCELING")
                ]
                self.lost += lost
                for run in lost:
                    self.on_lose(run)
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
               "runtime_config": schedule["runtime_config"],
               "pipeline_version_reference": schedule["pipeline_version_reference"]}  # fmt: skip
        run = self._add_run(run)
        self._reported_at[run["run_id"]] = time.monotonic() + self.report_seconds
        self.on_run(run)
        return str(run["run_id"])

    def _add_run(self, body: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat()
        times = {"created_at": now, "scheduled_at": now, "finished_at": "1970-01-01T00:00:00Z"}
        history = [{"state": "PENDING"}, {"state": "RUNNING"}]
        return self._add(self.runs, "run_id", {**times, "storage_state": "AVAILABLE", "state_history": history, **body})

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


def _workflow_nodes(phase: str, steps: dict[str, str]) -> list[dict[str, Any]]:
    """The nodes of a workflow in this phase of Argo's; the pod of each step is called `executor`."""
    name = "survival-x7k2p"
    nodes: dict[str, str] = {name: phase, f"{name}.root-driver": "Succeeded", f"{name}.root": phase,
                             f"{name}.root.run-driver": "Succeeded", f"{name}.root.run": phase}  # fmt: skip
    for step, step_phase in steps.items():
        path = f"{name}.root.run.{step}"
        omitted = step_phase == "Omitted"
        nodes |= {f"{path}-driver": "Omitted" if omitted else "Succeeded", path: step_phase}
        nodes |= {} if omitted else {f"{path}.executor": step_phase, f"{path}.executor(0)": step_phase}
    start = datetime.now(UTC) - timedelta(minutes=len(nodes))
    tasks = {}
    for number, (path, node_phase) in enumerate(nodes.items()):
        begin = start + timedelta(minutes=number)
        end = begin + timedelta(seconds=0 if node_phase == "Omitted" else 12)
        children = [node for node in nodes if node.rpartition(".")[0] == path]
        tasks[_node_id(name, path)] = {
            "task_id": str(uuid.uuid5(uuid.NAMESPACE_OID, path)),
            "display_name": path.rpartition(".")[2],
            "state": {"Omitted": "RUNTIME_STATE_UNSPECIFIED", "Error": "FAILED"}.get(node_phase, node_phase.upper()),
            "create_time": begin.isoformat(),
            "start_time": begin.isoformat(),
            "end_time": NEVER if node_phase in ("Pending", "Running") else end.isoformat(),
            "child_tasks": [{"pod_name": _node_id(name, child)} for child in children],
        }
    return [tasks[node] for node in sorted(tasks)]


def _node_id(workflow: str, path: str) -> str:
    """Argo hashes the path of a node with FNV-1a; here, another hash of 32 bits stands for it."""
    return f"{workflow}-{zlib.crc32(path.encode())}"


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


@contextmanager
def logged_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A running server, which the environment names."""
    with dashboard() as running:
        for name, value in (("ENDPOINT", running.url), ("NAMESPACE", NAMESPACE), ("TOKEN", running.token)):
            monkeypatch.setenv(f"TAILTUNE_{name}", value)
        monkeypatch.setattr("pipeline_server.SETTLE_SECONDS", 0.0)
        yield running
