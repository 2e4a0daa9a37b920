"""The pipeline server of OpenShift AI: find it, upload, start, ask for runs, schedule.

Uses kfp's own client and works around two of its faults: it waits forever for a cancelled run, and it asks for a
Google token after a 401.
"""

import contextlib
import io
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from urllib3.exceptions import HTTPError

from tailtune.errors import UserError, one_line
from tailtune.log import log
from tailtune.owner import WORKFLOW_GONE
from tailtune.retry import TEMPORARY_STATUSES, retry

DSPA = "dspa"
"""Default name of the DataSciencePipelinesApplication."""
ENDED = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")
"""States of a run that do not change any more."""
POLL_SECONDS = 5.0
RETRY_SECONDS = 60.0
"""How long to keep retrying a failing server."""
WATCH_RETRY_SECONDS = 600.0
"""The same while a run is watched."""
SETTLE_SECONDS = 15.0
"""After this, the server lists a run that a schedule has just started. A workflow made by the schedule's controller is
unknown to the server until its persistence agent reports it: kubeflow/pipelines, backend/src/agent/persistence."""
LOGIN_SECONDS = 12 * 3600.0
"""How long a watched run waits for another login: the token of `oc login` expires after a day."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Connection:
    endpoint: str
    namespace: str
    token: str | None
    ca_file: str | None
    has_pages: bool = True
    """Whether the server shows runs on pages of its own: OpenShift AI's has none."""

    def __repr__(self) -> str:  # a token is never printed
        return f"Connection({self.endpoint}, {self.namespace})"


def find_connection(endpoint: str | None, namespace: str | None) -> Connection:
    """Return endpoint, project, token and CA: from the flags, the environment, the kubeconfig's context, or the pod.

    The environment's names are TAILTUNE_ENDPOINT, TAILTUNE_NAMESPACE, TAILTUNE_TOKEN and TAILTUNE_CA_FILE.
    Raises UserError.
    """
    from tailtune.jobs.kubernetes import SERVICE_ACCOUNT, KubernetesClient

    environment = {name: os.environ.get(f"TAILTUNE_{name}") for name in ("ENDPOINT", "NAMESPACE", "TOKEN", "CA_FILE")}
    endpoint, namespace = endpoint or environment["ENDPOINT"], namespace or environment["NAMESPACE"]
    token, ca_file = environment["TOKEN"], environment["CA_FILE"]
    in_pod = (SERVICE_ACCOUNT / "token").is_file()
    if in_pod and not _has_kubeconfig():
        namespace = namespace or (SERVICE_ACCOUNT / "namespace").read_text().strip()
        has_pages = bool(endpoint)
        endpoint = endpoint or f"https://ds-pipeline-{DSPA}.{namespace}.svc:8443"
        token = token or (SERVICE_ACCOUNT / "token").read_text().strip()
        ca_file = ca_file or str(SERVICE_ACCOUNT / "service-ca.crt")
        return Connection(endpoint, namespace, token, ca_file, has_pages)
    if endpoint and namespace and token:
        return Connection(endpoint, namespace, token, ca_file)
    cluster = KubernetesClient(namespace, api_seconds=RETRY_SECONDS)
    token = token or _bearer_token(cluster.configuration)
    return Connection(endpoint or _route(cluster), cluster.namespace, token, ca_file, has_pages=bool(endpoint))


def _has_kubeconfig() -> bool:
    paths = os.environ.get("KUBECONFIG", str(Path.home() / ".kube" / "config")).split(os.pathsep)
    return any(Path(path).is_file() for path in paths)


def _bearer_token(configuration: Any) -> str | None:
    value = configuration.get_api_key_with_prefix("authorization") or ""
    return value.removeprefix("Bearer ") or None


def _route(cluster: Any) -> str:
    """Return the address of the project's pipeline server. Raises UserError."""
    from kubernetes import client

    from tailtune.doctor.cluster import find_pipeline_server

    try:
        address = find_pipeline_server(cluster)
    except client.ApiException as error:
        raise UserError(f"cannot ask project {cluster.namespace} for its pipeline server ({error.status} "
                        f"{error.reason})", "give --endpoint") from None  # fmt: skip
    if address is None:
        raise UserError(f"project {cluster.namespace} has no pipeline server", "create one with "
                        "deploy/components/pipeline-server/ or in the dashboard, or give --endpoint")  # fmt: skip
    return address


@dataclass(frozen=True)
class ActiveRun:
    """A run that has not ended."""

    id: str
    display_name: str
    run_name: str
    """The parameter `run_name`, with which its training job is labelled. Empty for runs that are named by their id."""
    state: str
    schedule_id: str
    """Empty for a run that no schedule has started."""


class PipelineServer:
    """A pipeline server, through kfp's client. Its methods raise UserError."""

    def __init__(self, connection: Connection) -> None:
        self._connect(connection)

    def _connect(self, connection: Connection) -> None:
        import kfp

        self.connection = connection
        with _quiet():
            self.client = kfp.Client(host=connection.endpoint, namespace=connection.namespace,
                                     existing_token=connection.token, ssl_ca_cert=connection.ca_file)  # fmt: skip

    def call(
        self, function: Callable[..., Result], *args: Any, retry_seconds: float | None = None, **kwargs: Any
    ) -> Result:
        """Return `function(*args, **kwargs)`, retried for `retry_seconds` (a minute) while the server fails.

        Use 0 for calls that create a run or a schedule: if only the answer was lost, a retry would create another.
        """
        with self._errors_in_words(), _quiet():
            return retry(
                lambda: function(*args, **kwargs),
                is_temporary=_is_temporary,
                seconds=RETRY_SECONDS if retry_seconds is None else retry_seconds,
                longest_wait_seconds=15,
            )

    @contextlib.contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        from kfp_server_api import ApiException

        try:
            yield
        except ApiException as error:
            if error.status in (401, 403):
                raise UserError(f"the pipeline server refuses the token ({error.status})", "log in with oc login, "
                                f"or check your rights in {self.connection.namespace}") from None  # fmt: skip
            body = " ".join(str(error.body or error.reason).split())[:300]
            raise UserError(f"the pipeline server refuses: {error.status} {body}") from None
        except (HTTPError, ConnectionError, TimeoutError) as error:
            raise UserError(f"{self.connection.endpoint} does not answer: {one_line(error, 200)}", "check --endpoint, "
                            "and TAILTUNE_CA_FILE where the certificate is the cluster's own") from None  # fmt: skip

    def get_run_patiently(self, run_id: str, give_up_at: float = math.inf) -> Any:
        """Return the run, asked for again while the server fails or the login has expired, until `give_up_at`.

        Before each further attempt, the login is read again. An outage is one line when it begins and one when it ends.
        Raises UserError.
        """
        from kfp_server_api import ApiException

        failing_since: float | None = None
        is_refused = False

        def attempt() -> Any:
            if failing_since is not None:
                self._read_login_again()
            return self.client.get_run(run_id)

        def is_temporary(error: BaseException) -> bool:
            now = time.monotonic()
            seconds = now - (now if failing_since is None else failing_since)
            if isinstance(error, ApiException) and error.status == 401:
                return seconds < LOGIN_SECONDS and now < give_up_at
            return _is_temporary(error) and seconds < WATCH_RETRY_SECONDS and now < give_up_at

        def log_failure(error: BaseException, attempt: int, wait_seconds: float) -> None:
            nonlocal failing_since, is_refused
            was_refused, is_refused = is_refused, getattr(error, "status", None) == 401
            if is_refused and not was_refused:
                log.warning("run: the login has expired; log in again with oc login within %.0f hours, and watching "
                            "continues", LOGIN_SECONDS / 3600)  # fmt: skip
            elif failing_since is None:
                words = f"{error.status} {error.reason}" if isinstance(error, ApiException) else one_line(error, 100)
                seconds = min(WATCH_RETRY_SECONDS, give_up_at - time.monotonic())
                log.warning("run: the pipeline server does not answer (%s), trying again for %.0f s", words, seconds)
            failing_since = failing_since or time.monotonic()

        with self._errors_in_words(), _quiet():
            run = retry(attempt, is_temporary=is_temporary, longest_wait_seconds=15, on_retry=log_failure)
        if failing_since is not None:
            log.info("run: the pipeline server answers again, after %.0f s", time.monotonic() - failing_since)
        return run

    def _read_login_again(self) -> None:
        try:
            token = find_connection(self.connection.endpoint, self.connection.namespace).token
        except UserError:  # logged out: the old token goes on failing, until the login is there
            return
        if token != self.connection.token:
            self._connect(replace(self.connection, token=token))

    def upload(self, path: Path, name: str, version: str) -> tuple[str, str]:
        """Upload a compiled file. Return the ids of the pipeline and the version; an existing version is kept."""
        import kfp_server_api

        pipeline = self.call(self.client.get_pipeline_id, name)
        if pipeline is None:  # created without a version: kfp's upload_pipeline would choose the first version's name
            body = kfp_server_api.V2beta1Pipeline(display_name=name, namespace=self.connection.namespace)
            pipeline = self.call(self.client._pipelines_api.pipeline_service_create_pipeline, body).pipeline_id
        for existing in self._versions(pipeline):
            if existing.display_name == version:
                return pipeline, existing.pipeline_version_id
        uploaded = self.call(self.client.upload_pipeline_version, str(path), version, pipeline_id=pipeline)
        return pipeline, uploaded.pipeline_version_id

    def _versions(self, pipeline: str) -> list[Any]:
        return list(_pages(lambda token: self.call(self.client.list_pipeline_versions, pipeline, page_token=token,
                                                   page_size=100), "pipeline_versions"))  # fmt: skip

    def start(self, pipeline: str, version: str, *, experiment: str, run_name: str, parameters: dict[str, Any]) -> str:
        """Start a run and return its id. It is requested only once: a lost answer may belong to a run that exists."""
        group = self._experiment(experiment)
        try:
            run = self.call(self.client.run_pipeline, group, run_name, params=parameters,
                            pipeline_id=pipeline, version_id=version, retry_seconds=0)  # fmt: skip
        except UserError as error:
            check = f"see in the dashboard that '{run_name}' is not there before you try again"
            raise UserError(error.problem, "; ".join(filter(None, (error.remedy, check)))) from None
        return str(run.run_id)

    def _experiment(self, name: str) -> str:
        """Return the id of the experiment with this name, which is created if there is none."""
        group = self.call(self.client.create_experiment, name, namespace=self.connection.namespace)
        if group.storage_state == "ARCHIVED":  # the client takes it although it is archived
            log.warning("run: experiment '%s' is archived, so the dashboard hides its runs; restore it there, or give "
                        "another --experiment", name)  # fmt: skip
        return str(group.experiment_id)

    def address(self, run: str) -> str:
        """Return the run's page: in OpenShift AI's dashboard if TAILTUNE_DASHBOARD is set, else in the server's own.

        Where it has none, return only the run's id. Source of the dashboard's path: opendatahub-io/odh-dashboard,
        frontend/src/routes/pipelines/runs.ts, 2026.
        """
        if dashboard := os.environ.get("TAILTUNE_DASHBOARD"):
            return f"{dashboard.rstrip('/')}/develop-train/pipelines/runs/{self.connection.namespace}/runs/{run}"
        return f"{self.connection.endpoint}/#/runs/details/{run}" if self.connection.has_pages else run

    def runs(self) -> Iterator[Any]:
        """Yield the runs of the project, newest first, without their tasks."""
        return _pages(lambda token: self.call(self.client.list_runs, page_token=token, page_size=100,
                                              sort_by="created_at desc", namespace=self.connection.namespace),
                      "runs")  # fmt: skip

    def find_runs(self, name: str) -> list[Any]:
        """Return the runs with this name or id, or of the schedules with this name, newest first."""
        schedule_ids = self._schedule_ids(name)
        return [run for run in self.runs() if name in (run.run_id, run.display_name, run_name(run))
                or run.recurring_run_id in schedule_ids]  # fmt: skip

    def get_run(self, run_id: str) -> Any:
        return self.call(self.client.get_run, run_id)

    def retry_run(self, run_id: str) -> None:
        """Start the failed steps of a run that has failed again. Requested only once."""
        self.call(self.client._run_api.run_service_retry_run, run_id, retry_seconds=0)

    def pipeline_spec(self, run: Any) -> dict[str, Any] | None:
        """Return the compiled pipeline of a run; None if the server does not have it any more."""
        reference, spec = run.pipeline_version_reference, run.pipeline_spec
        if reference:
            try:
                spec = self.call(self.client.get_pipeline_version, reference.pipeline_id,
                                 reference.pipeline_version_id).pipeline_spec  # fmt: skip
            except UserError:  # the version was deleted
                return None
        return (spec.get("pipeline_spec") or spec) if spec else None

    def pipeline_names(self) -> dict[str, str]:
        """Return the pipelines' names by id."""
        pipelines = _pages(lambda token: self.call(self.client.list_pipelines, page_token=token, page_size=100,
                                                   namespace=self.connection.namespace), "pipelines")  # fmt: skip
        return {pipeline.pipeline_id: pipeline.display_name for pipeline in pipelines}

    def active_runs(self, name: str, *, by_parameter: bool = False) -> list[ActiveRun]:
        """Return the runs that have not ended and have this name or id, or belong to the schedules with this name.

        With `by_parameter`, only the run parameter `run_name` counts, which names the run's directories. The server
        makes the names of a schedule's runs from the first 25 characters of its own: kubeflow/pipelines,
        backend/src/apiserver/template/template.go.
        """
        if by_parameter:
            return [run for run in self._active_runs() if run.run_name == name]
        schedule_ids = self._schedule_ids(name)
        return [
            run
            for run in self._active_runs()
            if name in (run.id, run.display_name, run.run_name) or run.schedule_id in schedule_ids
        ]

    def _active_runs(self) -> list[ActiveRun]:
        return [
            ActiveRun(
                id=run.run_id,
                display_name=run.display_name,
                run_name=run_name(run),
                state=run.state,
                schedule_id=run.recurring_run_id or "",
            )
            for run in self.runs()
            if run.state not in ENDED
        ]

    def terminate(self, runs: Collection[ActiveRun]) -> None:
        """Terminate the runs that are not being terminated yet."""
        for run in runs:
            if run.state != "CANCELING":
                self._terminate(run.id)

    def _terminate(self, run: str) -> None:
        try:
            self.call(self.client.terminate_run, run)
        except UserError as error:
            if self.call(self.client.get_run, run).state not in (*ENDED, "CANCELING"):
                raise
            log.info("run: %s has ended meanwhile (%s)", run, error)

    # ---- schedules ----

    def schedules(self) -> list[Any]:
        return list(_pages(lambda token: self.call(self.client.list_recurring_runs, page_token=token, page_size=100,
                                                   namespace=self.connection.namespace), "recurring_runs"))  # fmt: skip

    def schedule(self, name: str, when: str, *, pipeline: str, version: str | None, experiment: str,
                 parameters: dict[str, Any], max_concurrency: int, catch_up: bool) -> list[ActiveRun]:  # fmt: skip
        """Create or replace the schedule with this name. Return the runs of earlier ones that are in progress.

        With `version=None`, each run uses the pipeline's latest version. The API cannot change a schedule: the new one
        is created before those with the same name are removed.
        """
        import kfp_server_api as api

        group = self._experiment(experiment)
        reference = {"pipeline_id": pipeline} | ({"pipeline_version_id": version} if version else {})
        body = api.V2beta1RecurringRun(
            display_name=name,
            experiment_id=group,
            mode=api.RecurringRunMode.ENABLE,
            pipeline_version_reference=api.V2beta1PipelineVersionReference(**reference),
            runtime_config=api.V2beta1RuntimeConfig(parameters=parameters),
            trigger=trigger(when),
            max_concurrency=str(max_concurrency),
            no_catchup=not catch_up,
        )
        replaced = self._schedule_ids(name)
        self.call(self.client._recurring_run_api.recurring_run_service_create_recurring_run, body, retry_seconds=0)
        return self._remove_schedules(replaced)

    def _schedule_ids(self, name: str) -> list[str]:
        return [schedule.recurring_run_id for schedule in self.schedules() if schedule.display_name == name]

    def _remove_schedules(self, schedule_ids: Collection[str]) -> list[ActiveRun]:
        """Disable schedules, and delete those without runs in progress; return these runs.

        With a schedule, Kubernetes deletes the workflows that it owns, at once and without their last step:
        kubeflow/pipelines, backend/src/crd/controller/scheduledworkflow (owner references of a workflow).
        """
        for schedule_id in schedule_ids:
            self.call(self.client.disable_recurring_run, schedule_id)
        if schedule_ids:
            time.sleep(SETTLE_SECONDS)
        active = [run for run in self._active_runs() if run.schedule_id in schedule_ids] if schedule_ids else []
        for schedule_id in {*schedule_ids} - {run.schedule_id for run in active}:
            self.call(self.client.delete_recurring_run, schedule_id)
        return active

    def list_schedules(self) -> list[str]:
        """Return one line for each schedule: name, when, enabled or disabled, id."""
        lines = []
        for schedule in self.schedules():
            cron, period = schedule.trigger.cron_schedule, schedule.trigger.periodic_schedule
            when = cron.cron if cron else f"every {period.interval_second} s"
            status = str(schedule.status).lower()
            lines.append(f"{schedule.display_name}\t{when}\t{status}\t{schedule.recurring_run_id}")
        return lines

    def unschedule(self, name: str) -> list[ActiveRun]:
        """Disable the schedules with this name, and delete those without active runs. Return the active runs.

        Raises UserError if there is no schedule with this name.
        """
        schedule_ids = self._schedule_ids(name)
        if not schedule_ids:
            raise UserError(f"there is no schedule '{name}'", "see --list-schedules")
        return self._remove_schedules(schedule_ids)

    def wait_until_ended(self, runs: Collection[ActiveRun], seconds: float) -> None:
        """Wait for the ends of terminated runs. Raises UserError after `seconds`."""
        give_up_at = time.monotonic() + seconds
        for run in runs:
            while self.call(self.client.get_run, run.id).state not in ENDED:
                if time.monotonic() > give_up_at:
                    raise UserError(
                        f"run {run.id} has not ended after {seconds:.0f} s", f"try again later, or {WORKFLOW_GONE}"
                    )
                time.sleep(POLL_SECONDS)


INTERVAL = re.compile(r"every (\d+) ?(second|minute|hour|day)s?")
SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}


def trigger(when: str) -> Any:
    """Return the trigger for `0 2 * * *` (minute first), `0 0 2 * * *` (second first) or `every 6 hours`.

    Raises UserError.
    """
    import kfp_server_api as api

    if interval := INTERVAL.fullmatch(when.strip()):
        seconds = str(int(interval[1]) * SECONDS[interval[2]])
        return api.V2beta1Trigger(periodic_schedule=api.V2beta1PeriodicSchedule(interval_second=seconds))
    return api.V2beta1Trigger(cron_schedule=api.V2beta1CronSchedule(cron=six_fields(when)))


RANGES = (("second", 0, 59), ("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 6))


def six_fields(when: str) -> str:
    """Return cron in the server's notation, seconds first. Raises UserError that names the wrong field."""
    fields = when.split()
    if len(fields) == 5:
        fields.insert(0, "0")
    if len(fields) != 6:
        raise UserError(
            f"schedule '{when}': give five or six fields of cron, for example '0 2 * * *', or 'every 6 hours'"
        )
    for text, (name, lowest, highest) in zip(fields, RANGES, strict=True):
        for part in text.split(","):
            match = re.fullmatch(r"(\*|\?|(\d+)(?:-(\d+))?)(?:/(\d+))?", part)
            numbers = [int(number) for number in (match[2], match[3]) if number] if match else []
            if match is None or any(not lowest <= number <= highest for number in numbers) or match[4] == "0":
                raise UserError(f"schedule '{when}': {name} is '{part}'", f"give {lowest} to {highest}, a range, or *")
    return " ".join(fields)


def _pages(fetch: Callable[[str], Any], field: str) -> Iterator[Any]:
    """Yield the entries of all pages. `fetch` takes a page's token; `field` is the entries' name in the answer."""
    token = ""
    while True:
        page = fetch(token)
        yield from getattr(page, field) or []
        token = page.next_page_token or ""
        if not token:
            return


def run_name(run: Any) -> str:
    """Return the run's parameter `run_name`; empty for runs that are named by their id."""
    return str(((run.runtime_config and run.runtime_config.parameters) or {}).get("run_name") or "")


def _is_temporary(error: BaseException) -> bool:
    from kfp_server_api import ApiException

    return isinstance(error, HTTPError | ConnectionError | TimeoutError) or (
        isinstance(error, ApiException) and error.status in TEMPORARY_STATUSES
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what kfp's client prints to stdout, and its warnings about its own future versions."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
