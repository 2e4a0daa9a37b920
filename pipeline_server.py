"""The pipeline server of OpenShift AI: find it, upload, start, watch, schedule.

Everything goes through kfp's own client. What it does wrong is done here: it waits for ever for a cancelled
run, and it asks for a Google token after a 401.
"""

import contextlib
import io
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tenacity
from urllib3.exceptions import HTTPError

from tailtune.errors import UserError
from tailtune.log import log

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DSPA = "dspa"
"""Default name of the DataSciencePipelinesApplication."""
ENDED = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")
POLL_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
"""How long the server may fail in a row."""
TEMPORARY = (408, 429, 500, 502, 503, 504)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Connection:
    endpoint: str
    namespace: str
    token: str | None
    ca_file: str | None

    def __repr__(self) -> str:  # a token is never printed
        return f"Connection({self.endpoint}, {self.namespace})"


def find_connection(endpoint: str | None, namespace: str | None) -> Connection:
    """Endpoint, project, token and CA: from the flags, the environment, the kubeconfig's context, or the pod.

    The environment's names are TAILTUNE_ENDPOINT, TAILTUNE_NAMESPACE, TAILTUNE_TOKEN and TAILTUNE_CA_FILE.
    Raises UserError.
    """
    environment = {name: os.environ.get(f"TAILTUNE_{name}") for name in ("ENDPOINT", "NAMESPACE", "TOKEN", "CA_FILE")}
    endpoint, namespace = endpoint or environment["ENDPOINT"], namespace or environment["NAMESPACE"]
    token, ca_file = environment["TOKEN"], environment["CA_FILE"]
    in_pod = (SERVICE_ACCOUNT / "token").is_file()
    if in_pod and not _kubeconfig_is_there():
        namespace = namespace or (SERVICE_ACCOUNT / "namespace").read_text().strip()
        endpoint = endpoint or f"https://ds-pipeline-{DSPA}.{namespace}.svc:8443"
        token = token or (SERVICE_ACCOUNT / "token").read_text().strip()
        ca_file = ca_file or str(SERVICE_ACCOUNT / "service-ca.crt")
        return Connection(endpoint, namespace, token, ca_file)
    if endpoint and namespace and token:
        return Connection(endpoint, namespace, token, ca_file)
    from tailtune.jobs.kubernetes import KubernetesClient

    cluster = KubernetesClient(namespace, api_seconds=PATIENCE_SECONDS)
    token = token or _bearer(cluster.configuration)
    return Connection(endpoint or _route(cluster), cluster.namespace, token, ca_file)


def _kubeconfig_is_there() -> bool:
    paths = os.environ.get("KUBECONFIG", str(Path.home() / ".kube" / "config")).split(os.pathsep)
    return any(Path(path).is_file() for path in paths)


def _bearer(configuration: Any) -> str | None:
    value = configuration.get_api_key_with_prefix("authorization") or ""
    return value.removeprefix("Bearer ") or None


def _route(cluster: Any) -> str:
    """The server's address as the project's DataSciencePipelinesApplication says it."""
    from kubernetes import client

    try:
        found = cluster.call(lambda: cluster.custom.list_namespaced_custom_object(
            "datasciencepipelinesapplications.opendatahub.io", "v1", cluster.namespace,
            "datasciencepipelinesapplications"))["items"]  # fmt: skip
    except client.ApiException as error:
        raise UserError(f"cannot ask project {cluster.namespace} for its pipeline server ({error.status} "
                        f"{error.reason}); give --endpoint") from None  # fmt: skip
    addresses = [
        one["status"]["components"]["apiServer"]["externalUrl"]
        for one in found
        if (one.get("status") or {}).get("components", {}).get("apiServer", {}).get("externalUrl")
    ]
    if not addresses:
        raise UserError(f"project {cluster.namespace} has no pipeline server; configure one in the dashboard "
                        "(Data Science Projects, Pipelines), or give --endpoint")  # fmt: skip
    return str(addresses[0])


@dataclass(frozen=True)
class ActiveRun:
    """A run that goes on."""

    id: str
    run_name: str
    """The parameter, by which its training job is labelled; empty for runs that go by their id."""


class PipelineServer:
    def __init__(self, connection: Connection) -> None:
        import kfp

        self.connection = connection
        with _quiet():
            self.client = kfp.Client(host=connection.endpoint, namespace=connection.namespace,
                                     existing_token=connection.token, ssl_ca_cert=connection.ca_file)  # fmt: skip

    def call(self, function: Callable[..., Result], *args: Any, patience: float | None = None, **kwargs: Any) -> Result:
        """The function's result; tried again for `patience` seconds (a minute) while the server is in trouble.

        None for what would be made twice if an answer was lost: runs and schedules.
        """
        from kfp_server_api import ApiException

        def temporary(error: BaseException) -> bool:
            return isinstance(error, HTTPError | ConnectionError | TimeoutError) or (
                isinstance(error, ApiException) and error.status in TEMPORARY
            )

        try:
            with _quiet():
                return tenacity.Retrying(
                    retry=tenacity.retry_if_exception(temporary),
                    wait=tenacity.wait_random_exponential(multiplier=0.5, max=15),
                    stop=tenacity.stop_after_delay(PATIENCE_SECONDS if patience is None else patience),
                    reraise=True,
                )(function, *args, **kwargs)
        except ApiException as error:
            if error.status in (401, 403):
                raise UserError(f"the pipeline server refuses the token ({error.status}); log in with oc login, "
                                f"or check your rights in {self.connection.namespace}") from None  # fmt: skip
            body = " ".join(str(error.body or error.reason).split())[:300]
            raise UserError(f"the pipeline server refuses: {error.status} {body}") from None
        except (HTTPError, ConnectionError, TimeoutError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{self.connection.endpoint} does not answer: {reason}; check --endpoint, and "
                            "TAILTUNE_CA_FILE where the certificate is the cluster's own") from None  # fmt: skip

    def upload(self, path: Path, name: str, version: str) -> tuple[str, str]:
        """(pipeline, version) ids of this very file; a version of this name is taken as it is."""
        import kfp_server_api

        pipeline = self.call(self.client.get_pipeline_id, name)
        if pipeline is None:  # without a version yet: kfp's upload_pipeline would choose the first one's name
            body = kfp_server_api.V2beta1Pipeline(display_name=name, namespace=self.connection.namespace)
            pipeline = self.call(self.client._pipelines_api.pipeline_service_create_pipeline, body).pipeline_id
        for one in self._versions(pipeline):
            if one.display_name == version:
                return pipeline, one.pipeline_version_id
        uploaded = self.call(self.client.upload_pipeline_version, str(path), version, pipeline_id=pipeline)
        return pipeline, uploaded.pipeline_version_id

    def _versions(self, pipeline: str) -> list[Any]:
        return list(_pages(lambda token: self.call(self.client.list_pipeline_versions, pipeline, page_token=token,
                                                   page_size=100), "pipeline_versions"))  # fmt: skip

    def start(self, pipeline: str, version: str, *, experiment: str, run_name: str, parameters: dict[str, Any]) -> str:
        """The id of a new run. It is asked for once: what did not answer may have made it all the same."""
        group = self.call(self.client.create_experiment, experiment, namespace=self.connection.namespace)
        try:
            run = self.call(self.client.run_pipeline, group.experiment_id, run_name, params=parameters,
                            pipeline_id=pipeline, version_id=version, patience=0)  # fmt: skip
        except UserError as error:
            told = f"{error}; see in the dashboard that '{run_name}' is not there before you try again"
            raise UserError(told) from None
        return str(run.run_id)

    def address(self, run: str) -> str:
        """Where a browser shows the run: OpenShift AI's dashboard, when TAILTUNE_DASHBOARD names it.

        Source of its path: opendatahub-io/odh-dashboard, frontend/src/routes/pipelines/runs.ts, 2026.
        """
        if dashboard := os.environ.get("TAILTUNE_DASHBOARD"):
            return f"{dashboard.rstrip('/')}/develop-train/pipelines/runs/{self.connection.namespace}/runs/{run}"
        return f"{self.connection.endpoint}/#/runs/details/{run}"

    def terminate(self, name: str) -> list[ActiveRun]:
        """End the runs that go on and that have this name or id; which they are."""
        runs = _pages(lambda token: self.call(self.client.list_runs, page_token=token, page_size=100,
                                              namespace=self.connection.namespace), "runs")  # fmt: skip
        found = []
        for one in runs:
            parameters = one.runtime_config.parameters if one.runtime_config else None
            going = ActiveRun(one.run_id, str((parameters or {}).get("run_name") or ""))
            if name in (one.display_name, going.id, going.run_name) and one.state not in ENDED:
                found.append(going)
                if one.state != "CANCELING":
                    self._terminate(going.id)
        return found

    def _terminate(self, run: str) -> None:
        try:
            self.call(self.client.terminate_run, run)
        except UserError as error:
            if self.call(self.client.get_run, run).state not in (*ENDED, "CANCELING"):
                raise
            log.info("run: %s has ended meanwhile (%s)", run, error)

    def watch(self, run: str, timeout_seconds: float | None) -> str:
        """The run's last state; says each change. Raises UserError when it takes longer than the timeout."""
        give_up = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        said: dict[str, str] = {}
        while True:
            found = self.call(self.client.get_run, run, patience=600)
            tasks = (found.run_details.task_details or []) if found.run_details else []
            for task in tasks:
                if task.display_name and task.state and said.get(task.display_name) != task.state:
                    said[task.display_name] = task.state
                    log.info("run: %s %s", task.display_name, task.state.lower())
            if found.state in ENDED:
                return str(found.state)
            if give_up is not None and time.monotonic() > give_up:
                raise UserError(f"the run goes on after {timeout_seconds:.0f} s; look at {self.address(run)}")
            time.sleep(POLL_SECONDS)

    # ---- schedules ----

    def schedules(self) -> list[Any]:
        return list(_pages(lambda token: self.call(self.client.list_recurring_runs, page_token=token, page_size=100,
                                                   namespace=self.connection.namespace), "recurring_runs"))  # fmt: skip

    def schedule(self, name: str, when: str, *, pipeline: str, version: str | None, experiment: str,
                 parameters: dict[str, Any], max_concurrency: int, catch_up: bool) -> str:  # fmt: skip
        """Make the one schedule of this name be so; the id. `version` None is the pipeline's latest, whenever it runs.

        The API cannot change a schedule: another one is created first, then those of the same name go.
        """
        import kfp_server_api as api

        group = self.call(self.client.create_experiment, experiment, namespace=self.connection.namespace)
        reference = {"pipeline_id": pipeline} | ({"pipeline_version_id": version} if version else {})
        body = api.V2beta1RecurringRun(
            display_name=name,
            experiment_id=group.experiment_id,
            mode=api.RecurringRunMode.ENABLE,
            pipeline_version_reference=api.V2beta1PipelineVersionReference(**reference),
            runtime_config=api.V2beta1RuntimeConfig(parameters=parameters),
            trigger=trigger(when),
            max_concurrency=str(max_concurrency),
            no_catchup=not catch_up,
        )
        old = [one.recurring_run_id for one in self.schedules() if one.display_name == name]
        created = self.call(self.client._recurring_run_api.recurring_run_service_create_recurring_run, body, patience=0)
        for one in old:
            self.call(self.client.delete_recurring_run, one)
        return str(created.recurring_run_id)

    def list_schedules(self) -> list[str]:
        """A line each: name, when, on or off, id."""
        lines = []
        for one in self.schedules():
            cron, period = one.trigger.cron_schedule, one.trigger.periodic_schedule
            when = cron.cron if cron else f"every {period.interval_second} s"
            lines.append(f"{one.display_name}\t{when}\t{str(one.status).lower()}\t{one.recurring_run_id}")
        return lines

    def unschedule(self, name: str) -> int:
        """The number of schedules of this name that were deleted."""
        found = [one.recurring_run_id for one in self.schedules() if one.display_name == name]
        for one in found:
            self.call(self.client.delete_recurring_run, one)
        return len(found)


INTERVAL = re.compile(r"every (\d+) ?(second|minute|hour|day)s?")
SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}


def trigger(when: str) -> Any:
    """Of `0 2 * * *` (minute first), `0 0 2 * * *` (second first) or `every 6 hours`. Raises UserError."""
    import kfp_server_api as api

    if found := INTERVAL.fullmatch(when.strip()):
        seconds = str(int(found[1]) * SECONDS[found[2]])
        return api.V2beta1Trigger(periodic_schedule=api.V2beta1PeriodicSchedule(interval_second=seconds))
    return api.V2beta1Trigger(cron_schedule=api.V2beta1CronSchedule(cron=six_fields(when)))


RANGES = (("second", 0, 59), ("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 6))


def six_fields(when: str) -> str:
    """The server's notation, seconds first. Raises UserError that names the field which is wrong."""
    fields = when.split()
    if len(fields) == 5:
        fields.insert(0, "0")
    if len(fields) != 6:
        raise UserError(
            f"schedule '{when}': give five or six fields of cron, for example '0 2 * * *', or 'every 6 hours'"
        )
    for text, (name, lowest, highest) in zip(fields, RANGES, strict=True):
        for part in text.split(","):
            found = re.fullmatch(r"(\*|\?|(\d+)(?:-(\d+))?)(?:/(\d+))?", part)
            numbers = [int(n) for n in (found[2], found[3]) if n] if found else []
            if found is None or any(not lowest <= n <= highest for n in numbers) or found[4] == "0":
                raise UserError(f"schedule '{when}': {name} is '{part}'; give {lowest} to {highest}, a range, or *")
    return " ".join(fields)


def _pages(fetch: Callable[[str], Any], field: str) -> Iterator[Any]:
    token = ""
    while True:
        page = fetch(token)
        yield from getattr(page, field) or []
        token = page.next_page_token or ""
        if not token:
            return


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """kfp's client prints its own addresses to stdout, which is the user's, and warns of its own future."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
