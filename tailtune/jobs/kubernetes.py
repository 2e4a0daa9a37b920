"""A namespace of a cluster, by a client that survives what an API server does in a long night."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tenacity
from kubernetes import client, config
from urllib3.exceptions import HTTPError

from tailtune.errors import UserError
from tailtune.log import log

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_SECONDS = 600
"""How long the API may fail in a row. The job itself goes on meanwhile."""
TOKEN_SECONDS = 30
"""How long a pod's own token may be refused."""
CALL_TIMEOUT = (10, 60)
LOG_IN = "the cluster refuses the token; log in again with oc login"
STALE_TOKEN = (
    "the cluster refuses the token of this step's service account, and there is no newer one; start the run again, and "
    "if that is no help, see whether the account was made anew: oc describe serviceaccount pipeline-runner-dspa"
)
TEMPORARY = (401, 408, 429, 500, 502, 503, 504)
Result = TypeVar("Result")


class KubernetesClient:
    """One namespace, with its clients."""

    def __init__(self, namespace: str | None = None, api_seconds: float = API_SECONDS) -> None:
        self.api_seconds = api_seconds
        self.in_pod = bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and (SERVICE_ACCOUNT / "token").is_file()
        """Whether the credentials are those of a pod's service account, not of a login."""
        self._answered = False
        self.configuration = client.Configuration()
        self._connect()
        self.namespace = namespace or _namespace()

    def _connect(self) -> None:
        """Read address and credentials again: tokens expire."""
        try:
            if self.in_pod:
                config.load_incluster_config(client_configuration=self.configuration)
            else:
                config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=self.configuration)
        except config.ConfigException as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise UserError(f"no cluster to talk to: {reason}; log in with oc login, or set KUBECONFIG") from None
        api = client.ApiClient(self.configuration)
        self.core, self.custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self.authorization = client.AuthorizationV1Api(api)

    def call(self, function: Callable[[], Result], seconds: float | None = None) -> Result:
        """The function's result, tried again for `seconds` while the API is in trouble. Other errors are raised as
        they are. Raises UserError when the trouble does not end.
        """
        patience = self.api_seconds if seconds is None else seconds
        refused: dict[str, float] = {}  # token → since when

        def temporary(error: BaseException) -> bool:
            cause = _cause(error)
            if not isinstance(cause, client.ApiException):
                return isinstance(cause, HTTPError | ConnectionError | TimeoutError)
            if cause.status == 401:
                if not self.in_pod:
                    return self._answered  # somebody may log in again while a job is followed
                # a pod's token is renewed before it expires: one that stays refused is no question of time
                now = time.monotonic()
                return now - refused.setdefault(self._token(), now) < TOKEN_SECONDS
            return cause.status in TEMPORARY

        def before_sleep(attempt: tenacity.RetryCallState) -> None:
            error = attempt.outcome.exception() if attempt.outcome else None
            log.warning("the cluster's API fails (%s), trying again", in_words(error))

        def before(attempt: tenacity.RetryCallState) -> None:
            if attempt.attempt_number > 1:
                self._connect()

        try:
            result = tenacity.Retrying(
                retry=tenacity.retry_if_exception(temporary),
                wait=tenacity.wait_random_exponential(multiplier=0.5, max=min(30, patience / 5)),
                stop=tenacity.stop_after_delay(patience),
                before_sleep=before_sleep,
                before=before,
                reraise=True,
            )(function)
            self._answered = True
            return result
        except (RuntimeError, HTTPError, OSError, client.ApiException) as error:
            cause = _cause(error)
            if isinstance(cause, client.ApiException) and cause.status == 401:
                raise UserError(STALE_TOKEN if self.in_pod else LOG_IN) from None
            if isinstance(cause, client.ApiException) and cause.status not in TEMPORARY:
                self._answered = True
                raise cause from None
            if not temporary(error):
                raise
            raise UserError(f"the cluster's API has not answered for {patience:.0f} s: {in_words(error)}; "
                            "a job that runs goes on; try again") from None  # fmt: skip

    def _token(self) -> str:
        return str(self.configuration.api_key.get("authorization"))

    def get_json(self, path: str) -> Any:
        """What the API answers at a path that the client has no function for. Raises client.ApiException."""
        return self.call(lambda: self.core.api_client.call_api(
            path, "GET", response_type="object", auth_settings=["BearerToken"], _request_timeout=CALL_TIMEOUT,
        ))[0]  # fmt: skip

    def may(self, verb: str, group: str, resource: str, user: str | None = None) -> bool:
        """Whether this account, or another user, may do it in the namespace. Few may ask about others: ApiException."""
        name, _, sub = resource.partition("/")
        attributes = client.V1ResourceAttributes(
            namespace=self.namespace, verb=verb, group=group, resource=name, subresource=sub or None
        )
        if user is None:
            mine = client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
            review = client.V1SelfSubjectAccessReview(spec=mine)
            answer = self.call(lambda: self.authorization.create_self_subject_access_review(review))
        else:
            groups = ["system:authenticated"]
            if user.startswith("system:serviceaccount:"):
                groups += ["system:serviceaccounts", f"system:serviceaccounts:{self.namespace}"]
            theirs = client.V1SubjectAccessReviewSpec(resource_attributes=attributes, user=user, groups=groups)
            review = client.V1LocalSubjectAccessReview(
                api_version="authorization.k8s.io/v1", kind="LocalSubjectAccessReview",
                metadata=client.V1ObjectMeta(namespace=self.namespace), spec=theirs)  # fmt: skip
            answer = self.call(
                lambda: self.authorization.create_namespaced_local_subject_access_review(self.namespace, review)
            )
        return bool(answer.status.allowed)

    def pod_is_alive(self, name: str) -> bool:
        """Whether the pod exists and has not ended."""
        try:
            pod = self.call(lambda: self.core.read_namespaced_pod(name, self.namespace, _request_timeout=CALL_TIMEOUT))
        except client.ApiException as error:
            if error.status == 404:
                return False
            raise
        return pod.status.phase in ("Pending", "Running")


def _cause(error: BaseException) -> BaseException:
    """The training SDK wraps the client's errors."""
    return (error.__cause__ or error.__context__ or error) if isinstance(error, RuntimeError) else error


def in_words(error: BaseException | None) -> str:
    """One line: the status and message of the API, or the error's kind and text."""
    error = _cause(error) if error else None
    if isinstance(error, client.ApiException):
        try:
            message = json.loads(error.body or "{}").get("message", "")
        except (ValueError, AttributeError):
            message = ""
        return f"{error.status} {message or error.reason}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _namespace() -> str:
    """Of the pod, or of the kubeconfig's context."""
    path = SERVICE_ACCOUNT / "namespace"
    if path.is_file():
        return path.read_text().strip()
    _, active = config.list_kube_config_contexts(os.environ.get("KUBECONFIG"))
    namespace = active["context"].get("namespace")
    if not namespace:
        raise UserError("the cluster's context names no project; choose one with oc project, or give --namespace")
    return str(namespace)
