"""A client for one namespace of a cluster. It survives API failures and expired tokens during runs of many hours."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config
from urllib3.exceptions import HTTPError

from tailtune.errors import UserError, one_line
from tailtune.log import log
from tailtune.retry import TEMPORARY_STATUSES, retry

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_SECONDS = 600
"""How long to keep retrying a failing API. The job itself keeps running."""
TOKEN_SECONDS = 30
"""How long to keep retrying while the token of a pod is refused."""
CALL_TIMEOUT_SECONDS = (10, 60)
"""Timeouts for connecting and for reading."""
WORKFLOW_RUN_LABEL = "pipeline/runid"
"""KFP's label of a run's workflow: backend/src/common/util/consts.go, LabelKeyWorkflowRunId, of kubeflow/pipelines."""
WORKFLOW_ENDED = ("Succeeded", "Failed", "Error")
"""Argo's final phases: pkg/apis/workflow/v1alpha1/workflow_types.go, WorkflowPhase.Completed."""
LOG_IN = ("the cluster refuses the token", "log in again with oc login")
STALE_TOKEN = (
    "the cluster refuses the token of this step's service account, and there is no newer one",
    "start the run again, and if that does not help, see whether the account was recreated: oc get serviceaccounts",
)
Result = TypeVar("Result")


class KubernetesClient:
    """The API clients of one namespace."""

    def __init__(self, namespace: str | None = None, api_seconds: float = API_SECONDS) -> None:
        self.api_seconds = api_seconds
        self.in_pod = bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and (SERVICE_ACCOUNT / "token").is_file()
        """Whether the credentials are those of a pod's service account, and not of a login."""
        self._has_answered = False
        self._failing_since: float | None = None
        """Since when the API has failed. An outage is one line when it begins, one when it ends, and one if the token
        is refused meanwhile."""
        self._token_is_refused = False
        self.configuration = client.Configuration()
        self._connect()
        self.namespace = namespace or _namespace()

    def _connect(self) -> None:
        """Read address and credentials again, because tokens expire."""
        try:
            if self.in_pod:
                config.load_incluster_config(client_configuration=self.configuration)
            else:
                config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=self.configuration)
        except config.ConfigException as error:
            raise UserError(
                f"no cluster to talk to: {one_line(error)}", "log in with oc login, or set KUBECONFIG"
            ) from None
        api = client.ApiClient(self.configuration)
        self.core, self.custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self.authorization = client.AuthorizationV1Api(api)

    def call(self, function: Callable[[], Result], seconds: float | None = None) -> Result:
        """Return `function()`, called again for `seconds` (by default `api_seconds`) while the API fails temporarily.

        Before each further attempt, address and credentials are read again. Raises UserError when the API has not
        recovered in time; all other errors are raised as they are.
        """
        patience_seconds = self.api_seconds if seconds is None else seconds
        refused_since: dict[str, float] = {}  # by token
        num_attempts = 0

        def attempt() -> Result:
            nonlocal num_attempts
            num_attempts += 1
            if num_attempts > 1:
                self._connect()
            return function()

        def is_temporary(error: BaseException) -> bool:
            cause = _cause(error)
            if not isinstance(cause, client.ApiException):
                return isinstance(cause, HTTPError | ConnectionError | TimeoutError)
            if cause.status == 401:
                if not self.in_pod:
                    return self._has_answered  # the user can log in again while the launcher follows a job
                # the kubelet renews a pod's token before it expires, so waiting does not help if one stays refused
                now = time.monotonic()
                return now - refused_since.setdefault(self._token(), now) < TOKEN_SECONDS
            return cause.status in TEMPORARY_STATUSES

        def log_failure(error: BaseException, attempt: int, wait_seconds: float) -> None:
            is_refused = getattr(_cause(error), "status", None) == 401
            if self._failing_since is None or is_refused > self._token_is_refused:
                self._failing_since = self._failing_since or time.monotonic()
                self._token_is_refused = is_refused
                give_up_seconds = TOKEN_SECONDS if is_refused and self.in_pod else patience_seconds
                log.warning("the cluster's API fails (%s), trying again for %.0f s", in_words(error), give_up_seconds)

        try:
            result = retry(
                attempt,
                is_temporary=is_temporary,
                seconds=patience_seconds,
                longest_wait_seconds=min(30, patience_seconds / 5),
                on_retry=log_failure,
            )
            self._has_answered = True
            if self._failing_since is not None:
                log.info("the cluster's API answers again, after %.0f s", time.monotonic() - self._failing_since)
                self._failing_since, self._token_is_refused = None, False
            return result
        except (RuntimeError, HTTPError, OSError, client.ApiException) as error:
            cause = _cause(error)
            if isinstance(cause, client.ApiException) and cause.status == 401:
                raise UserError(*(STALE_TOKEN if self.in_pod else LOG_IN)) from None
            if isinstance(cause, client.ApiException) and cause.status not in TEMPORARY_STATUSES:
                self._has_answered, self._failing_since = True, None
                raise cause from None
            if not is_temporary(error):
                raise
            raise UserError(
                f"the cluster's API has not answered for {patience_seconds:.0f} s: {in_words(error)}",
                "a running job continues; try again",
            ) from None

    def _token(self) -> str:
        return str(self.configuration.api_key.get("authorization"))

    def get_json(self, path: str) -> Any:
        """GET a path for which the client has no function. Raises client.ApiException."""
        response = self.call(
            lambda: self.core.api_client.call_api(
                path, "GET", response_type="object", auth_settings=["BearerToken"],
                _request_timeout=CALL_TIMEOUT_SECONDS,
            )
        )  # fmt: skip
        return response[0]

    def may(self, verb: str, group: str, resource: str, user: str | None = None) -> bool:
        """Whether this account, or `user`, has the permission in the namespace.

        Raises client.ApiException if this account is not allowed to ask about other users.
        """
        name, _, sub = resource.partition("/")
        attributes = client.V1ResourceAttributes(
            namespace=self.namespace, verb=verb, group=group, resource=name, subresource=sub or None
        )
        if user is None:
            own_access = client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
            review = client.V1SelfSubjectAccessReview(spec=own_access)
            answer = self.call(lambda: self.authorization.create_self_subject_access_review(review))
        else:
            groups = ["system:authenticated"]
            if user.startswith("system:serviceaccount:"):
                groups += ["system:serviceaccounts", f"system:serviceaccounts:{self.namespace}"]
            access = client.V1SubjectAccessReviewSpec(resource_attributes=attributes, user=user, groups=groups)
            review = client.V1LocalSubjectAccessReview(
                api_version="authorization.k8s.io/v1", kind="LocalSubjectAccessReview",
                metadata=client.V1ObjectMeta(namespace=self.namespace), spec=access)  # fmt: skip
            answer = self.call(
                lambda: self.authorization.create_namespaced_local_subject_access_review(self.namespace, review)
            )
        return bool(answer.status.allowed)

    def pod_is_alive(self, name: str) -> bool:
        """Whether the pod exists and has not ended yet."""
        try:
            pod = self.call(
                lambda: self.core.read_namespaced_pod(name, self.namespace, _request_timeout=CALL_TIMEOUT_SECONDS)
            )
        except client.ApiException as error:
            if error.status == 404:
                return False
            raise
        return pod.status.phase in ("Pending", "Running")

    def pipeline_run_is_active(self, run_id: str) -> bool:
        """Whether a run of the pipeline server has not ended, according to its workflow.

        An account that is not allowed to list workflows cannot know: the run then counts as ended, with a warning.
        """
        try:
            return self.workflow_is_active(run_id)
        except client.ApiException as error:
            if error.status not in (403, 404):
                raise
            log.warning("whether pipeline run %s has ended is unknown (%s)", run_id, in_words(error))
            return False

    def workflow_is_active(self, run_id: str) -> bool:
        """Whether a run of the pipeline server has a workflow that has not ended. Raises client.ApiException."""
        workflows = self._workflows(run_id)
        return any((each.get("status") or {}).get("phase") not in WORKFLOW_ENDED for each in workflows)

    def pipeline_run_is_terminated(self, run_id: str, seconds: float | None = None) -> bool:
        """Whether someone has ended the run, or deleted its workflow. Asks for `seconds` while the API fails.

        KFP ends a run with a deadline of 0 (kubeflow/pipelines, backend/src/common/util/execution_spec.go), argo with
        `shutdown`. Raises UserError when the API does not answer, and client.ApiException when it refuses.
        """
        workflows = self._workflows(run_id, seconds)
        return not workflows or any(
            each["metadata"].get("deletionTimestamp")
            or each["spec"].get("shutdown")
            or each["spec"].get("activeDeadlineSeconds") == 0
            for each in workflows
        )

    def _workflows(self, run_id: str, seconds: float | None = None) -> list[dict[str, Any]]:
        path = ("argoproj.io", "v1alpha1", self.namespace, "workflows")
        selector = f"{WORKFLOW_RUN_LABEL}={run_id}"
        answer = self.call(
            lambda: self.custom.list_namespaced_custom_object(
                *path, label_selector=selector, _request_timeout=CALL_TIMEOUT_SECONDS
            ),
            seconds,
        )
        return list(answer["items"])


def pipeline_run_is_active(run_id: str) -> bool:
    """Whether a run of the pipeline server in this namespace has not ended."""
    return KubernetesClient().pipeline_run_is_active(run_id)


def _cause(error: BaseException) -> BaseException:
    """The client's own error: the training SDK wraps it in a RuntimeError."""
    return (error.__cause__ or error.__context__ or error) if isinstance(error, RuntimeError) else error


def in_words(error: BaseException) -> str:
    """The error on one line: status and message of the API, or type and text of another error."""
    error = _cause(error)
    if isinstance(error, client.ApiException):
        try:
            message = json.loads(error.body or "{}").get("message", "")
        except (ValueError, AttributeError):
            message = ""
        return f"{error.status} {message or error.reason}"
    return f"{type(error).__name__}: {one_line(error, 200)}"


def _namespace() -> str:
    """The namespace of this pod, or of the kubeconfig's context."""
    path = SERVICE_ACCOUNT / "namespace"
    if path.is_file():
        return path.read_text().strip()
    _, active = config.list_kube_config_contexts(os.environ.get("KUBECONFIG"))
    namespace = active["context"].get("namespace")
    if not namespace:
        raise UserError("the cluster's context names no project", "choose one with oc project, or give --namespace")
    return str(namespace)
