"""The part of a cluster that the launcher uses, over HTTP, for the real clients: API server, kubelet, and the operators
of operators.py.

It runs the pods: one process per replica, with the environment that the operator sets. It is as strict as a real
cluster: unknown fields are rejected (by the models that `kubernetes`, `kubeflow-training` and `kubeflow-trainer-api`
ship), names have to be DNS labels, a name is taken (409) until the job is deleted (404), and the pipeline's service
account has only the permissions that it has on OpenShift AI and those of deploy/cluster-admin (403), in its own project
alone. `Faults` simulates what goes wrong on real clusters.

By default, a pod is a plain process with this machine's files. With a `Kubelet` it is a container, and with an
`Admission` it has to be one that a real server admits.
"""

import copy
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import psutil
import yaml
from admission import Admission
from http_server import NAMESPACE, HttpServer, Refused, check_fields, send_json
from https_server import wrap
from kubelet import Kubelet
from kubernetes.client import models as kubernetes_models
from operators import DNS_LABEL, INIT_CONTAINER, Template, Trainer, TrainingOperator, admitted, may, now, rules
from websocket_server import EXEC_PROTOCOL, accept, finish, send

from tailtune import __version__

PATCHES = ("application/json-patch+json", "application/merge-patch+json", "application/apply-patch+yaml")
"""Content types of patches to custom resources: no strategic merge."""
REVIEWS = {"selfsubjectaccessreviews": "V1SelfSubjectAccessReview",
           "localsubjectaccessreviews": "V1LocalSubjectAccessReview"}  # fmt: skip
OBJECT = re.compile(
    r"/(?:api/v1|apis/([a-z0-9.-]+)/v[0-9a-z]+)/namespaces/([a-z0-9-]+)/"
    r"(secrets|resourcequotas|limitranges|serviceaccounts|imagestreamtags|localqueues|datasciencepipelinesapplications)"
    r"(?:/([^/]+))?"
)
DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
RUNNER = "pipeline-runner-dspa"
EVERYBODY = (
    # (verb, group, resource): Kubernetes' ClusterRole system:basic-user
    ("create", "authorization.k8s.io", "selfsubjectaccessreviews"),
    ("create", "authentication.k8s.io", "selfsubjectreviews"),
)
RUNNER_ROLE = (
    # config/internal/apiserver/default/role_pipeline-runner.yaml.tmpl of data-science-pipelines-operator, as Red Hat's
    # branches rhoai-3.3 to 3.5 have had it since August 2026: of kubeflow.org only scheduledworkflows, before that `*`
    ("get", "", "secrets"), ("list", "", "secrets"), ("get", "", "configmaps"), ("list", "", "configmaps"),
    ("watch", "", "configmaps"), ("*", "", "persistentvolumeclaims"), ("*", "", "pods"), ("*", "", "pods/exec"),
    ("*", "", "pods/log"), ("*", "", "services"), ("*", "batch", "jobs"), ("*", "kubeflow.org", "scheduledworkflows"),
    ("get", "argoproj.io", "workflows"), ("list", "argoproj.io", "workflows"), ("watch", "argoproj.io", "workflows"),
    ("update", "argoproj.io", "workflows"), ("patch", "argoproj.io", "workflows"),
)  # fmt: skip
EDIT_ROLE = tuple(
    # the part that the tests need of the role `edit` of a project on OpenShift. It has no rights on training jobs:
    # manifests/rhoai/kubeflow-training-roles.yaml of Red Hat's training-operator no longer adds any to `edit`
    (verb, group, resource)
    for group, resource, verbs in (
        ("", "pods", "create delete get list"), ("", "pods/log", "get"), ("", "events", "list"),
        ("", "pods/exec", "create get"), ("", "pods/eviction", "create"),  # kubernetes, bootstrappolicy/policy.go
        ("", "persistentvolumeclaims", "create delete get list"), ("", "secrets", "create delete get list"),
        ("", "resourcequotas", "get list"), ("", "limitranges", "get list"),
        ("image.openshift.io", "imagestreamtags", "create delete get list"),
    )
    for verb in verbs.split()
)  # fmt: skip
ADMIN_ROLE = (*EDIT_ROLE, ("create", "authorization.k8s.io", "localsubjectaccessreviews"))
"""The role `admin` of a project: it may also ask what others are allowed to do."""
RESOURCE = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/[^/]+(?:/namespaces/(?P<namespace>[^/]+))?/(?P<resource>(?!namespaces/)[^/]+)"
    r"(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?"
)
CLUSTER_WIDE = ("selfsubjectaccessreviews", "selfsubjectreviews", "clustertrainingruntimes")
"""Resources to which ClusterRoleBindings give access, those of Kubernetes and of deploy/cluster-admin."""
VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


def granted_by(folder: Path) -> dict[str, list[tuple[str, str, str]]]:
    """The rules that the roles in a folder give, by subject; `edit` is who has that role, or `admin`."""
    manifests = [each for path in sorted(folder.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    roles = {each["metadata"]["name"]: rules(each) for each in manifests if "rules" in each}
    granted: dict[str, list[tuple[str, str, str]]] = {}
    for manifest in manifests:
        for subject in manifest.get("subjects", []):
            granted.setdefault(subject["name"], []).extend(roles[manifest["roleRef"]["name"]])
        labels = manifest.get("metadata", {}).get("labels") or {}
        if all(labels.get(f"rbac.authorization.k8s.io/aggregate-to-{role}") == "true" for role in ("edit", "admin")):
            granted.setdefault("edit", []).extend(rules(manifest))
    return granted


@dataclass
class Faults:
    """Simulated problems."""

    statuses: list[int] = field(default_factory=list)
    """Statuses with which the next requests fail; 0 breaks the connection."""
    lost_answers: int = 0
    """For the next so many jobs, the connection breaks after the creation and before the response."""
    hanging_answers: int = 0
    """For the next so many jobs, there is never a response to the creation."""
    drop_streams: list[int] = field(default_factory=list)
    """Numbers of lines after which the next log streams break, in the middle of the following line."""
    suspended: threading.Event = field(default_factory=threading.Event)
    """While set, a TrainJob waits for admission by a queue."""
    pending: threading.Event = field(default_factory=threading.Event)
    """While set, pods find no node."""
    image: bool = False
    """If true, images cannot be pulled."""
    kill_pods: list[str] = field(default_factory=list)
    """Pods (such as `worker-0`) that are killed with SIGKILL once they have printed `kill_at`."""
    kill_at: str = "step 2/"
    init_restarts: int = 0
    """How often the init container of each worker restarts, because the first node is not there yet."""
    exit_codes: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By pod: exit code and reason (such as 137, OOMKilled) with which its container ends instead of running."""
    init_waiting: tuple[str, str] | None = None
    """Reason and message with which the init container of each worker waits and never starts."""
    refused_evictions: int = 0
    """How many evictions a disruption budget does not allow."""
    mounts_fail: str = ""
    """The message of an event FailedMount: the pods then wait for their volumes. Only events show the cause."""


class Pod:
    """A pod and its one container, which is a process on this machine."""

    def __init__(self, server: "Server", job: str, template: Template) -> None:
        self.server, self.job, self.role, self.name = server, job, template.role, template.name
        self.environment = template.environment
        self.manifest: dict[str, Any] = {
            "metadata": {"name": self.name, "namespace": server.namespace, "uid": str(uuid.uuid4()),
                         "labels": template.labels, "creationTimestamp": now()},
            "spec": template.spec,
            "status": {"phase": "Pending", "conditions": [], "containerStatuses": []},
        }  # fmt: skip
        containers = template.spec["containers"]
        self.container = next((each for each in containers if each["name"] == "main"), containers[0])
        self.program: list[str] = []
        """What a launcher runs in the container in the end, if its command is one."""
        self.init_restarts = 0
        self.lines: list[list[str]] = [[]]
        """For each start of the container, its lines with timestamps."""
        self.changed = threading.Condition()
        self.process: subprocess.Popen[bytes] | None = None
        self.deleted = threading.Event()
        self.is_gone = False
        """Whether someone has deleted this pod, not the job, and its processes have ended."""

    @property
    def restarts(self) -> int:
        return len(self.lines) - 1

    def set_state(self, phase: str, state: dict[str, Any], last: dict[str, Any] | None = None) -> None:
        status = {"name": self.container["name"], "ready": phase == "Running", "restartCount": self.restarts,
                  "image": self.container["image"], "imageID": "", "state": state, "lastState": last or {}}  # fmt: skip
        with self.changed:
            self.manifest["status"] |= {"phase": phase, "containerStatuses": [status]}
            self.changed.notify_all()

    def run(self) -> int:
        """Schedule and run the container, with restarts, and return its last exit code."""
        faults = self.server.faults
        while faults.pending.is_set() and not self.deleted.wait(0.05):
            self.manifest["status"]["conditions"] = [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                 "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."}]  # fmt: skip
        for volume in self.manifest["spec"].get("volumes") or []:
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            while claim and claim not in self.server.claims and not self.deleted.wait(0.05):
                self.manifest["status"]["conditions"] = [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                     "message": f'persistentvolumeclaim "{claim}" not found'}]  # fmt: skip
        self.manifest["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        while faults.image and not self.deleted.wait(0.05):
            message = f"Back-off pulling image {self.container['image']}"
            self.set_state("Pending", {"waiting": {"reason": "ImagePullBackOff", "message": message}})
        while faults.mounts_fail and not self.deleted.wait(0.05):
            self.set_state("Pending", {"waiting": {"reason": "ContainerCreating"}})
        kubelet = self.server.kubelet
        while kubelet and (waiting := kubelet.why_waiting(self)) and not self.deleted.wait(0.05):
            self.set_state("Pending", {"waiting": {"reason": waiting[0], "message": waiting[1]}})
        if self.role.startswith("worker"):  # the operator's init-pytorch waits for the first node
            self.init_restarts = faults.init_restarts
            while (waiting := self._why_init_waits()) and not self.deleted.wait(0.05):
                self._set_init_state({"waiting": {"reason": waiting[0], "message": waiting[1]}})
                self.set_state("Pending", {"waiting": {"reason": "PodInitializing"}})
            self._set_init_state({"terminated": {"exitCode": 0, "reason": "Completed"}})
        last = None
        while not self.deleted.is_set():
            started = now()
            code, reason, message = self._run_once(last)
            ended = {"terminated": {"exitCode": code, "reason": reason, "message": message, "startedAt": started,
                                    "finishedAt": now()}}  # fmt: skip
            is_final = self.manifest["spec"].get("restartPolicy") == "Never" or self.server.too_many_restarts(self)
            if code == 0 or is_final or self.deleted.is_set():
                self.set_state("Succeeded" if code == 0 else "Failed", ended, last)
                return code
            last = ended
            with self.changed:
                self.lines.append([])
            self.set_state("Running", {"waiting": {"reason": "CrashLoopBackOff"}}, last)
            self.server.restarts[self.role] = self.restarts
            self.deleted.wait(1)  # 10 s, and twice as long each time, on a real node
        return 143

    def _set_init_state(self, state: dict[str, Any]) -> None:
        self.manifest["status"]["initContainerStatuses"] = [
            {"name": INIT_CONTAINER, "ready": "terminated" in state, "restartCount": self.init_restarts,
             "image": "alpine:3.10", "imageID": "", "state": state, "lastState": {}}]  # fmt: skip

    def _why_init_waits(self) -> tuple[str, str] | None:
        """Why the operator's init container cannot start: kubernetes, pkg/kubelet/kuberuntime/security_context.go.

        The image that the operator gives it (training-operator 1.9, pkg/config/config.go) runs as root. OpenShift's
        admission gives every container a user of the project, and marks it as non-root itself: apiserver-library-go,
        pkg/securitycontextconstraints/sccmatching/provider.go.
        """
        must_be_non_root = (self.manifest["spec"].get("securityContext") or {}).get("runAsNonRoot")
        if must_be_non_root and not self.server.is_openshift:
            return "CreateContainerConfigError", "container has runAsNonRoot and image will run as root"
        return self.server.faults.init_waiting

    def _run_once(self, last: dict[str, Any] | None) -> tuple[int, str, str]:
        faults = self.server.faults
        if self.role in faults.exit_codes:
            self.set_state("Running", {"running": {"startedAt": now()}}, last)
            code, reason = faults.exit_codes[self.role]
            return code, reason, ""
        termination_log = self.server.folder / f"{uuid.uuid4().hex}.termination-log"
        command = [sys.executable if part == "python" else part for part in self.container["command"]]
        environment = {**self._container_environment(), "TERMINATION_LOG": str(termination_log)}
        if self.server.kubelet:
            command, environment = self.server.kubelet.prepare(self, termination_log)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        self.set_state("Running", {"running": {"startedAt": now()}}, last)
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            with self.changed:
                self.lines[-1].append(f"{now()} {line}")
                self.changed.notify_all()
            if self.role in faults.kill_pods and faults.kill_at in line:
                faults.kill_pods.remove(self.role)
                self.signal(signal.SIGKILL)
        code = self.process.wait()
        code = 128 - code if code < 0 else code
        message = termination_log.read_text()[:4096] if termination_log.is_file() else ""
        if not message and code:
            message = "\n".join(line.split(" ", 1)[1] for line in self.lines[-1][-10:])
        return code, "Error" if code else "Completed", message

    def signal(self, number: int) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        processes: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            main = psutil.Process(self.process.pid)
            # the kubelet sends SIGTERM only to the container's main process, and SIGKILL to all
            processes = [*(main.children(recursive=True) if number == signal.SIGKILL else []), main]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def execute(self, command: list[str]) -> "subprocess.CompletedProcess[bytes]":
        """Run another command in the container."""
        return subprocess.run([sys.executable if part == "python" else part for part in command], capture_output=True,
                              env=self._container_environment(), timeout=60)  # fmt: skip

    def _container_environment(self) -> dict[str, str]:
        own = {e["name"]: e["value"] for e in self.container.get("env") or [] if "value" in e}
        return {**self.server.node_environment, **own, **self.environment}

    def evict(self, grace_seconds: float | None = None) -> None:
        """End this pod alone, so that its controller makes another."""
        self.manifest["metadata"]["deletionTimestamp"] = now()
        self.delete(grace_seconds)
        if grace_seconds != 0:  # the kubelet writes how it ended first: pkg/kubelet/status/status_manager.go
            time.sleep(0.5)
        self.is_gone = True

    def delete(self, grace_seconds: float | None = None) -> None:
        self.deleted.set()
        self.signal(signal.SIGTERM)
        if grace_seconds is None:
            grace_seconds = self.manifest["spec"].get("terminationGracePeriodSeconds", 30)
        give_up_at = time.monotonic() + grace_seconds
        while self.process and self.process.poll() is None and time.monotonic() < give_up_at:
            time.sleep(0.05)
        self.signal(signal.SIGKILL)


class StepPod:
    """A pod of a pipeline's step as Argo makes it: containers `main` and `wait`. Tests set what happens in it.

    Source: argo-workflows, workflow/controller/workflowpod.go; kubeflow/pipelines adds the label of the run.
    """

    restarts = 0

    def __init__(
        self,
        pipeline_run: str,
        step: str,
        attempt: int,
        lines: list[str],
        *,
        phase: str = "Failed",
        end: dict[str, Any] | None = None,
        created: str | None = None,
        node: str = "",
        **status: Any,
    ) -> None:
        self.step = step
        self.name = f"survival-x7k2p-system-container-impl-{uuid.uuid4().int % 10**10}"
        self.changed, self.deleted = threading.Condition(), threading.Event()
        created = created or now()
        self.lines = [[f"{now()} {line}" for line in lines]]
        node = node or f"survival-x7k2p.root.run.{step}.executor({attempt - 1})"
        state = {"Running": {"running": {"startedAt": created}}, "Pending": {"waiting": {"reason": "PodInitializing"}}}
        ended = {"terminated": {"exitCode": int(phase == "Failed"), "reason": "Error", **(end or {})}}
        containers = [{"name": name, "image": "i", "imageID": "", "ready": False, "restartCount": 0,
                       "state": state.get(phase, ended)} for name in ("main", "wait")]  # fmt: skip
        self.manifest = {
            "metadata": {"name": self.name, "namespace": NAMESPACE, "creationTimestamp": created,
                         "labels": {"pipeline/runid": pipeline_run, "workflows.argoproj.io/workflow": "survival-x7k2p"},
                         "annotations": {"workflows.argoproj.io/node-name": node}},
            "spec": {"containers": [{"name": "main", "resources": {"limits": {"memory": "512Mi"}}}, {"name": "wait"}]},
            "status": {"phase": phase, "containerStatuses": containers, **status},
        }  # fmt: skip

    def delete(self) -> None:
        self.deleted.set()

    def evict(self, grace_seconds: float | None = None) -> None:
        self.delete()


class Server(HttpServer):
    """The cluster. Tests change its attributes to set up what they need."""

    def __init__(self, folder: Path, node_environment: dict[str, str], namespace: str = NAMESPACE) -> None:
        self.folder, self.node_environment, self.namespace = folder, node_environment, namespace
        self.faults = Faults()
        self.token, self.runner_token = "first-token", "runner-token"
        self._caller = threading.local()
        self.claims = {"training-data-pvc", "trained-models-pvc", "workspace-pvc"}
        self.access_mode = "ReadWriteMany"
        self.operator, self.trainer = TrainingOperator(), Trainer()
        self.operators: list[TrainingOperator | Trainer] = [self.operator]
        self.groups = ["kubeflow.org", "authorization.k8s.io", "image.openshift.io",
                       "datasciencepipelinesapplications.opendatahub.io"]  # fmt: skip
        self.allowed = [*EVERYBODY, *RUNNER_ROLE]
        """The rights of the runner."""
        self.person: list[tuple[str, str, str]] | None = None
        """The rights of a person, if `token` is not the runner's but theirs; `runner_token` is always the runner's."""
        self.apply_cluster_admin()
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, list[Pod]] = {}
        self.requests: list[str] = []
        self.reviewed: str | None = None
        """The user of the last access review that was about another user than the client's own."""
        self.objects: dict[tuple[str, str], dict[str, Any]] = {
            ("imagestreamtags", f"{self.namespace}/tailtune-{image}:{__version__}"): {"lookupPolicy": {"local": True}}
            for image in ("pipeline", "trainer")
        }
        """Other objects that can be read, by (resource, project/name)."""
        self.restarts: dict[str, int] = {}
        """How often each pod's container was restarted, the pods of deleted jobs included."""
        self.is_openshift = False
        """Whether admission gives each container a user of the project."""
        self.admission: Admission | None = None
        """The whole admission of pods; None for their service accounts alone."""
        self.kubelet: Kubelet | None = None
        """Runs containers as such; None for plain processes with this machine's environment and files."""
        self.refused_pods: list[str] = []
        """Why pods were not admitted."""
        self.workflows: dict[str, str] = {}
        """Argo's phase of the workflow of each pipeline run, by the run's id."""
        self.terminated: set[str] = set()
        """Ids of the pipeline runs that a user has terminated."""
        self.step_pods: dict[str, str] = {}
        """Phase of each pod of a pipeline step that exists."""
        self.pods_of_steps: list[StepPod] = []
        """The same, with their logs."""
        self.lock = threading.RLock()
        self.version = 0
        self._limits: dict[str, int] = {}
        super().__init__()
        self.kubeconfig, self.runner_kubeconfig = folder / "kubeconfig", folder / "runner-kubeconfig"
        self.write_kubeconfig()

    def install_trainer(self, *, only: bool = False) -> None:
        """Install Kubeflow Trainer; with `only`, instead of the Training Operator."""
        self.operators = [self.trainer] if only else [self.operator, self.trainer]
        self.groups.append(self.trainer.group)  # kubeflow.org remains: notebooks belong to that group too

    def apply_cluster_admin(self) -> None:
        """Grant what deploy/cluster-admin grants."""
        granted = granted_by(DEPLOY / "cluster-admin")
        for rights, who in ((self.allowed, RUNNER), (self.person, "edit")):
            if rights is not None:
                rights += [rule for rule in granted[who] + granted["system:authenticated"] if rule not in rights]

    def log_in(self, *role: tuple[str, str, str]) -> None:
        """From now on, the token is that of a person with this role, who has nothing of deploy/cluster-admin."""
        self.person = [*EVERYBODY, *role]

    @property
    def rights(self) -> list[tuple[str, str, str]]:
        """What the owner of the request's token may do."""
        return self.allowed if self.person is None or self._caller.is_runner else self.person

    @property
    def user(self) -> str:
        """Whose token the request has."""
        return f"system:serviceaccount:{self.namespace}:{RUNNER}" if self.rights is self.allowed else "alice"

    def _authorize(self, method: str, path: str) -> None:
        """Refuse what the token's owner has no right to; as in a cluster, before it is known whether it exists."""
        if match := RESOURCE.fullmatch(path):
            verb = VERBS.get(method, "get" if match["name"] else "list")
            group, resource = match["group"] or "", "/".join(filter(None, (match["resource"], match["sub"])))
            scope = f'in the namespace "{match["namespace"]}"' if match["namespace"] else "at the cluster scope"
            may_do = may(self.rights, verb, group, resource, match["name"] or "")
            if not (self._has_roles(match["namespace"], resource) and may_do):
                raise Refused(403, f'{".".join(filter(None, (resource, group)))} is forbidden: User "{self.user}" '
                                   f'cannot {verb} resource "{resource}" in API group "{group}" {scope}')  # fmt: skip

    def _has_roles(self, namespace: str | None, resource: str) -> bool:
        """Whether the rights apply there: in the project, or for resources that ClusterRoleBindings grant.

        In another project of which a test has created objects, they count as well.
        """
        if namespace is None:
            return resource in CLUSTER_WIDE
        others = {key.partition("/")[0] for _, key in self.objects}
        return namespace in {self.namespace, *others}

    def serve_tls(self, certificate: Path, key: Path) -> None:
        """From now on, answer only over TLS, as pods expect. The certificate is its own authority."""
        wrap(self.http, certificate, key)
        self.url = self.url.replace("http:", "https:")

    def write_kubeconfig(self) -> None:
        """Write the kubeconfig as `oc login` does, and another one for the runner."""
        for path, token in ((self.kubeconfig, self.token), (self.runner_kubeconfig, self.runner_token)):
            path.write_text(yaml.safe_dump({
                "apiVersion": "v1", "kind": "Config", "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": self.url}}],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": self.namespace}}],
            }))  # fmt: skip

    def close(self) -> None:
        for name in list(self.jobs):
            self.delete_job(name)
        super().close()

    # ---- the API ----

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length)) if length else None
        url = urlsplit(request.path)
        self.requests.append(f"{request.command} {url.path}")
        try:
            if self.faults.statuses:
                status = self.faults.statuses.pop(0)
                if status == 0:
                    _break_off(request)
                    return
                raise Refused(status, "the server is failing")
            # in a pod, the client writes `bearer`: apiserver, pkg/authentication/request/bearertoken, takes both
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or token not in (self.token, self.runner_token):
                raise Refused(401, "Unauthorized")
            self._caller.is_runner = token == self.runner_token
            self._authorize(request.command, unquote(url.path))
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            log = re.fullmatch(rf"/api/v1/namespaces/{self.namespace}/pods/([^/]+)/log", url.path)
            if log and request.command == "GET":
                self._stream_log(request, log[1], query)
                return
            if match := re.fullmatch(rf"/api/v1/namespaces/{self.namespace}/pods/([^/]+)/exec", url.path):
                self._execute(request, self._pod(match[1]), parse_qs(url.query))
                return
            kind = request.headers.get("Content-Type", "")
            if request.command == "PATCH" and kind not in PATCHES:
                raise Refused(415, f"the body of the request was in an unknown format - {kind}: accepted {PATCHES}")
            status, answer = 200, self._route(request.command, url.path, query, body)
            if request.command == "POST":
                status = 201
                if self.faults.hanging_answers and url.path.endswith("jobs"):
                    self.faults.hanging_answers -= 1
                    request.connection.recv(1)  # until the client gives up
                    _break_off(request)
                    return
                if self.faults.lost_answers and url.path.endswith("jobs"):
                    self.faults.lost_answers -= 1
                    _break_off(request)
                    return
        except Refused as refusal:
            status = refusal.status
            answer = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "message": str(refusal),
                "code": status,
            }
        send_json(request, status, answer, **({"Retry-After": "1"} if status == 429 else {}))

    def _route(self, method: str, path: str, query: dict[str, str], body: Any) -> dict[str, Any]:
        for operator in self.operators:
            if path.startswith(f"/apis/{operator.group}/{operator.version}"):
                return self._route_jobs(operator, method, path, query, body)
        if path == f"/openapi/v3/apis/{self.trainer.group}/{self.trainer.version}" and self.trainer in self.operators:
            return {"openapi": "3.0.0", "components": {"schemas": self.trainer.schemas()}}
        if path == "/version/" and method == "GET":
            return {"major": "1", "minor": "31", "gitVersion": "v1.31.5", "gitCommit": "", "gitTreeState": "clean",
                    "buildDate": "", "goVersion": "", "compiler": "gc", "platform": "linux/amd64"}  # fmt: skip
        if path == "/apis/" and method == "GET":
            known = {operator.group: operator.version for operator in self.operators}
            versions = {group: known.get(group, "v1") for group in self.groups}
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
                {"name": group, "versions": [{"groupVersion": f"{group}/{version}", "version": version}]}
                for group, version in versions.items()
            ]}  # fmt: skip
        if match := re.fullmatch(rf"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims/([^/]+)", path):
            if match[1] not in self.claims:
                raise Refused(404, f'persistentvolumeclaims "{match[1]}" not found')
            annotations = {"volume.kubernetes.io/selected-node": "node-7"}
            return {"kind": "PersistentVolumeClaim", "apiVersion": "v1",
                    "metadata": {"name": match[1], "annotations": annotations},
                    "spec": {"accessModes": [self.access_mode], "resources": {"requests": {"storage": "20Gi"}}},
                    "status": {"phase": "Bound", "capacity": {"storage": "20Gi"}}}  # fmt: skip
        here = f"namespaces/{self.namespace}/"
        reviews = re.fullmatch(rf"/apis/authorization.k8s.io/v1/(?:{here})?(\w+accessreviews)", path)
        if path == "/apis/authentication.k8s.io/v1/selfsubjectreviews" and method == "POST":
            return {**body, "status": {"userInfo": {"username": self.user}}}
        if reviews and method == "POST":
            check_fields(body, REVIEWS[reviews[1]], [kubernetes_models])
            self.reviewed = body["spec"].get("user") or self.reviewed
            attributes = body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (attributes["resource"], attributes.get("subresource"))))
            user = body["spec"].get("user") or self.user
            if user.startswith("system:serviceaccount:"):
                known = self.allowed if user.endswith(f":{self.namespace}:{RUNNER}") else []
            else:
                known = self.person or []
            group, name = attributes.get("group", ""), attributes.get("name", "")
            permitted = may(known, attributes["verb"], group, resource, name)
            allowed = permitted and self._has_roles(attributes.get("namespace"), resource)
            return {**body, "status": {"allowed": allowed}}
        if method == "GET" and (match := OBJECT.fullmatch(unquote(path))):
            return self._read_object(*match.groups())
        if re.fullmatch(r"(/openapi/v3)?/apis/[^/]+/[^/]+", path):  # everyone has access to discovery
            raise Refused(404, "404 page not found")
        if path == f"/apis/argoproj.io/v1alpha1/namespaces/{self.namespace}/workflows" and method == "GET":
            # KFP terminates a run with a deadline of 0: kubeflow/pipelines, backend/src/common/util/execution_spec.go
            workflows = [
                {"metadata": {"labels": {"pipeline/runid": run}}, "status": {"phase": phase},
                 "spec": {"activeDeadlineSeconds": 0} if run in self.terminated else {}}
                for run, phase in self.workflows.items()
            ]  # fmt: skip
            return {"kind": "WorkflowList", "items": [each for each in workflows if _matches(each, query)]}
        if path == f"/api/v1/namespaces/{self.namespace}/pods" and method == "GET":
            with self.lock:
                pods = [pod.manifest for pods in [*self.pods.values(), self.pods_of_steps] for pod in pods]
            matching = [pod for pod in pods if _matches(pod, query)]
            return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": matching}
        if path == f"/api/v1/namespaces/{self.namespace}/events" and method == "GET":
            return {"kind": "EventList", "apiVersion": "v1", "metadata": {}, "items": self._events(query)}
        if match := re.fullmatch(rf"/api/v1/namespaces/{self.namespace}/pods/([^/]+)(/eviction)?", path):
            if method == "GET" and match[1] in self.step_pods:
                return {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": match[1]},
                        "status": {"phase": self.step_pods[match[1]]}}  # fmt: skip
            return self._route_pod(method, self._pod(match[1]), bool(match[2]), query, body)
        raise Refused(403, f'{method} {path} is forbidden: User "{self.user}" may not do it')

    def _pod(self, name: str) -> Pod | StepPod:
        with self.lock:
            pods: list[Any] = [*(pod for pods in self.pods.values() for pod in pods), *self.pods_of_steps]
        pod = next((pod for pod in pods if pod.name == name), None)
        if pod is None:
            raise Refused(404, f'pods "{name}" not found')
        return pod

    def _route_pod(self, method: str, pod: Pod | StepPod, is_eviction: bool, query: dict[str, str],
                   body: Any) -> dict[str, Any]:  # fmt: skip
        """Read, delete or evict a pod. Evictions: kubernetes, pkg/registry/core/pod/storage/eviction.go."""
        if is_eviction:
            check_fields(body, "V1Eviction", [kubernetes_models])
            if body["metadata"]["name"] != pod.name:
                raise Refused(400, "name in URL does not match name in Eviction object")
            if self.faults.refused_evictions and pod.manifest["status"]["phase"] == "Running":
                self.faults.refused_evictions -= 1
                raise Refused(429, "Cannot evict pod as it would violate the pod's disruption budget.")
        elif method == "GET":
            return {"kind": "Pod", "apiVersion": "v1", **pod.manifest}
        grace_seconds = float(query["gracePeriodSeconds"]) if "gracePeriodSeconds" in query else None
        threading.Thread(target=pod.evict, args=(grace_seconds,), daemon=True).start()
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"} if is_eviction else pod.manifest

    def _execute(self, request: BaseHTTPRequestHandler, pod: Any, query: dict[str, list[str]]) -> None:
        """Run a command in a pod: kubernetes, staging/src/k8s.io/kubelet/pkg/cri/streaming/remotecommand."""
        containers = [container["name"] for container in pod.manifest["spec"]["containers"]]
        if query.get("container", containers[:1]) != [pod.container["name"]]:
            raise Refused(400, f"container {query['container'][0]} is not valid for pod {pod.name}")
        if pod.process is None or pod.process.poll() is not None:
            raise Refused(500, "container not found")
        accept(request, EXEC_PROTOCOL)
        done = pod.execute(query["command"])
        status: dict[str, Any] = {"metadata": {}, "status": "Success"}
        if done.returncode:
            causes = [{"reason": "ExitCode", "message": str(done.returncode)}]
            status = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
        for stream, data in ((1, done.stdout), (2, done.stderr), (3, json.dumps(status).encode())):
            if data:
                send(request, bytes([stream]) + data)
        finish(request)

    def _events(self, query: dict[str, str]) -> list[dict[str, Any]]:
        """The events of the pod that the field selector names."""
        name = dict(part.split("=") for part in query["fieldSelector"].split(","))["involvedObject.name"]
        with self.lock:
            exists = any(pod.name == name for pods in self.pods.values() for pod in pods)
        message = self.faults.mounts_fail if exists else ""
        return [
            {"metadata": {"name": f"{name}.{i}", "namespace": self.namespace}, "type": kind, "reason": reason,
             "message": text, "involvedObject": {"kind": "Pod", "name": name}, "lastTimestamp": now()}
            for i, (kind, reason, text) in enumerate(
                [("Normal", "Scheduled", "Successfully assigned"), ("Warning", "FailedMount", message)])
            if text
        ]  # fmt: skip

    def _read_object(self, group: str | None, namespace: str, resource: str, name: str | None) -> dict[str, Any]:
        """One of `objects`, or all of a resource."""
        if group and group not in self.groups:
            raise Refused(404, "404 page not found")
        if name is None:
            return {"items": [manifest for (kind, _), manifest in self.objects.items() if kind == resource]}
        if (resource, f"{namespace}/{name}") not in self.objects:
            raise Refused(404, f'{resource} "{name}" not found')
        return self.objects[resource, f"{namespace}/{name}"]

    def _route_jobs(self, operator: TrainingOperator | Trainer, method: str, path: str, query: dict[str, str],
                    body: Any) -> dict[str, Any]:  # fmt: skip
        root = f"/apis/{operator.group}/{operator.version}"
        if path == root and method == "GET":
            kinds = [{"name": operator.plural, "kind": operator.kind, "namespaced": True}]
            return {"kind": "APIResourceList", "groupVersion": root.removeprefix("/apis/"), "resources": kinds}
        match = re.fullmatch(rf"{root}/(?:namespaces/{self.namespace}/)?([a-z]+)(?:/([^/]+))?", path)
        if match is None:
            raise Refused(404, "404 page not found")
        resource, name = match.groups()
        verb = VERBS.get(method, "get" if name else "list")
        if operator is self.trainer and resource == "clustertrainingruntimes" and method == "GET":
            runtimes = [self.trainer.runtime(each) for each in sorted(self.trainer.runtimes) if name in (None, each)]
            if name and not runtimes:
                raise Refused(404, f'{resource}.{operator.group} "{name}" not found')
            return runtimes[0] if name else {"kind": "ClusterTrainingRuntimeList", "items": runtimes}
        if resource != operator.plural:
            raise Refused(404, "404 page not found")
        if verb == "create":
            return self.create_job(operator, body)
        with self.lock:
            if verb == "list":
                jobs = [job for job in self.jobs.values() if job["kind"] == operator.kind and _matches(job, query)]
                return {"kind": f"{operator.kind}List", "items": copy.deepcopy(jobs)}
            if name not in self.jobs or self.jobs[name]["kind"] != operator.kind:
                raise Refused(404, f'{operator.plural}.{operator.group} "{name}" not found')
            job = self.jobs[name]
            if verb == "patch":  # application/merge-patch+json
                job["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
            if verb == "delete":
                job["metadata"]["deletionTimestamp"] = now()
                threading.Thread(target=self.delete_job, args=(name,), daemon=True).start()
                return {"kind": "Status", "status": "Success"}
            return copy.deepcopy(job)

    def _stream_log(self, request: BaseHTTPRequestHandler, name: str, query: dict[str, str]) -> None:
        every: list[Any] = [*(pod for pods in list(self.pods.values()) for pod in pods), *self.pods_of_steps]
        pod = next((pod for pod in every if pod.name == name), None)
        if pod is None:
            raise Refused(404, f'pods "{name}" not found')
        names = [container["name"] for container in pod.manifest["spec"]["containers"]]
        if query.get("container", names[0] if len(names) == 1 else "") not in names:
            raise Refused(400, f"a container name must be specified for pod {name}, choose one of: {names}")
        start = pod.restarts - (query.get("previous") == "true")
        if start < 0:
            raise Refused(400, f'previous terminated container "{query.get("container")}" in pod "{name}" not found')
        if "containerStatuses" not in pod.manifest["status"] or not pod.manifest["status"]["containerStatuses"]:
            raise Refused(400, f'container "{query.get("container")}" in pod "{name}" is waiting to start')
        since = datetime.fromisoformat(query["sinceTime"]).timestamp() if "sinceTime" in query else 0.0
        limit = self.faults.drop_streams.pop(0) if self.faults.drop_streams else None
        request.send_response(200)
        request.send_header("Content-Type", "text/plain")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        sent, shown = max(0, len(pod.lines[start]) - int(query.get("tailLines", 10**9))), 0
        with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
            while True:
                with pod.changed:
                    running = (
                        pod.restarts == start and "running" in pod.manifest["status"]["containerStatuses"][0]["state"]
                    )
                    new = pod.lines[start][sent:]
                    if not new and query.get("follow") == "true" and running and not pod.deleted.is_set():
                        pod.changed.wait(0.2)
                        continue
                if not new:
                    break
                for line in new:
                    sent += 1
                    stamp = line.split(" ", 1)[0]
                    if datetime.fromisoformat(stamp).timestamp() < since:
                        continue
                    text = line if query.get("timestamps") == "true" else line.split(" ", 1)[1]
                    data = f"{text}\n".encode()
                    if shown == limit:
                        request.wfile.write(f"{len(data):x}\r\n".encode() + data[: len(data) // 2])  # half of the line
                        _break_off(request)
                        return
                    request.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    shown += 1
            request.wfile.write(b"0\r\n\r\n")

    # ---- the operators ----

    def create_job(self, operator: TrainingOperator | Trainer, job: dict[str, Any]) -> dict[str, Any]:
        name = job["metadata"]["name"]
        if job["metadata"].get("namespace") not in (None, self.namespace):
            raise Refused(400, "the namespace of the provided object does not match the namespace sent on the request")
        if not DNS_LABEL.fullmatch(name):
            raise Refused(422, f"metadata.name: Invalid value: {name!r}: a DNS-1035 label")
        operator.check(job)
        with self.lock:
            if name in self.jobs:
                raise Refused(409, f'{operator.plural}.{operator.group} "{name}" already exists')
            self.version += 1
            job["metadata"] |= {"namespace": self.namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now(),
                                "resourceVersion": str(self.version), "generation": 1}  # fmt: skip
            self.jobs[name] = job
            operator.status(job, "created")
            answer = copy.deepcopy(job)
        threading.Thread(target=self._operate, args=(operator, job), daemon=True).start()
        return answer

    def _operate(self, operator: TrainingOperator | Trainer, job: dict[str, Any]) -> None:
        name = job["metadata"]["name"]
        if operator is self.trainer and self.faults.suspended.is_set():
            with self.lock:
                operator.status(job, "suspended")
            while self.faults.suspended.is_set() and self.jobs.get(name) is job:
                time.sleep(0.05)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._limits[name] = operator.limit(job)
        pods: list[Pod] = []
        codes: dict[str, int] = {}

        def make(template: Template) -> Pod:
            return Pod(self, name, self.admit(template))

        def start(pod: Pod) -> None:
            def run() -> None:
                code = pod.run()
                if not pod.deleted.is_set():
                    codes[pod.role] = code

            threading.Thread(target=run, daemon=True).start()

        try:
            pods += map(make, operator.templates(job, port))
        except Refused:  # the controller tries again for ever, and the job has no pods
            return
        with self.lock:
            if self.jobs.get(name) is not job or job["metadata"].get("deletionTimestamp"):
                return
            self.pods[name] = pods
        for pod in pods:
            start(pod)
        running, num_deleted = False, 0
        while len(codes) < len(pods) and not any(codes.values()):  # a pod that is not restarted any more ends the job
            with self.lock:
                if self.jobs.get(name) is not job or job["metadata"].get("deletionTimestamp"):
                    return
                lost = [i for i, pod in enumerate(pods) if pod.is_gone]
                num_deleted += len(lost)
                if num_deleted > operator.max_deleted_pods(job):
                    break
                for i in lost:
                    pods[i] = make(list(operator.templates(job, port))[i])
                    start(pods[i])
                if not running and {pod.manifest["status"]["phase"] for pod in pods} == {"Running"}:
                    running = True
                    operator.status(job, "running")
            time.sleep(0.05)
        failed = [pod for pod in pods if codes.get(pod.role) or pod.is_gone]
        if failed and operator.deletes_failed_pods:
            self._delete_pods(name)
        with self.lock:
            operator.status(job, "failed" if failed else "succeeded", failed[0].role if failed else "")
        for pod in pods:  # cleanPodPolicy: Running
            if pod.role not in codes:
                pod.delete()

    def admit(self, template: Template) -> Template:
        """The pod as the API server stores it. Raises Refused."""
        try:
            if self.admission is None:
                return replace(template, spec=admitted(template.spec, self.accounts()))
            with self.lock:
                others = [pod.manifest for pods in [*self.pods.values(), self.pods_of_steps] for pod in pods
                          if pod.manifest["status"]["phase"] in ("Pending", "Running")]  # fmt: skip
            pod = {"metadata": {"name": template.name, "labels": template.labels}, "spec": template.spec}
            return replace(template, spec=self.admission.admit(pod, self.accounts(), self.objects, others)["spec"])
        except Refused as refusal:
            self.refused_pods.append(str(refusal))
            raise

    def accounts(self) -> dict[str, dict[str, Any]]:
        """The service accounts of the namespace by name."""
        prefix = f"{self.namespace}/"
        created = {key.removeprefix(prefix): account for (resource, key), account in self.objects.items()
                   if resource == "serviceaccounts" and key.startswith(prefix)}  # fmt: skip
        return {"default": {}, RUNNER: {}, **created}

    def _delete_pods(self, name: str) -> None:
        threads = [threading.Thread(target=pod.delete, daemon=True) for pod in self.pods.get(name, [])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self.lock:
            self.pods.pop(name, None)

    def too_many_restarts(self, pod: Pod) -> bool:
        """The sum over all containers, init containers included: training-operator 1.9, pkg/core/job.go."""
        return sum(p.restarts + p.init_restarts for p in self.pods.get(pod.job, [])) >= self._limits.get(pod.job, 0)

    def delete_job(self, name: str) -> None:
        with self.lock:
            if name not in self.jobs:
                return
            self.jobs[name]["metadata"]["deletionTimestamp"] = now()
        self._delete_pods(name)
        with self.lock:
            self.jobs.pop(name, None)


def _break_off(request: BaseHTTPRequestHandler) -> None:
    request.close_connection = True
    request.connection.shutdown(socket.SHUT_RDWR)


def _matches(manifest: dict[str, Any], query: dict[str, str]) -> bool:
    selector = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
    return selector.items() <= (manifest["metadata"].get("labels") or {}).items()


@contextmanager
def cluster(folder: Path, *, namespace: str = NAMESPACE, **environment: str) -> Iterator[Server]:
    """A running cluster with one project; `environment` is added to that of its pods."""
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(folder, {**os.environ, **environment}, namespace)
    try:
        yield server
    finally:
        server.close()
