"""As much of a cluster as the launcher meets, over HTTP, for the real clients: API server, Training Operator, kubelet.

It runs the pods: one process per replica, with the environment that the operator sets. It is strict where the real
one is: unknown fields are refused (by the models that `kubernetes` and `kubeflow-training` ship), names have to be
DNS labels, a name is taken (409) until it is gone (404), and the pipeline's service account may do no more than on
OpenShift AI (403). `Faults` switches on what goes wrong on real clusters.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import yaml
from http_server import NAMESPACE, HttpServer, Refused, check_fields, send_json
from kubeflow.training import models as training_models
from kubernetes.client import models as kubernetes_models

MODELS = (training_models, kubernetes_models)
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
ALLOWED = (
    # verbs, group, resource: what the role of pipeline-runner-dspa gives, as far as the tests ask
    ("*", "kubeflow.org", "*"), ("*", "", "pods"), ("*", "", "pods/log"), ("*", "", "persistentvolumeclaims"),
    ("*", "", "services"), ("get", "", "secrets"), ("list", "", "secrets"), ("get", "", "configmaps"),
    ("create", "authorization.k8s.io", "selfsubjectaccessreviews"),
)  # fmt: skip


@dataclass
class Faults:
    statuses: list[int] = field(default_factory=list)
    """Answers to the next requests, instead of their own."""
    lost_answers: int = 0
    """So many jobs are made, and the connection breaks before the answer."""
    drop_streams: list[int] = field(default_factory=list)
    """The next streams of logs are cut after so many lines, in the middle of the line that follows."""
    pending: threading.Event = field(default_factory=threading.Event)
    """While set, pods find no node."""
    image: bool = False
    """Images cannot be pulled."""
    kill_pods: list[str] = field(default_factory=list)
    """Pods (as `worker-0`) that are killed with SIGKILL once they have written `kill_at`."""
    kill_at: str = "step 2/"
    exit_codes: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Pod → exit code and reason that its container ends with instead of running, for example 137 OOMKilled."""


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class Pod:
    """A pod and its one container, which is a process of this machine."""

    def __init__(self, server: "Server", job: dict[str, Any], role: str, index: int, template: dict[str, Any],
                 environment: dict[str, str]) -> None:  # fmt: skip
        self.server, self.role, self.environment = server, f"{role.lower()}-{index}", environment
        self.name = f"{job['metadata']['name']}-{self.role}"
        labels = {
            **(template["metadata"].get("labels") or {}),
            "training.kubeflow.org/job-name": job["metadata"]["name"],
            "training.kubeflow.org/replica-type": role.lower(),
            "training.kubeflow.org/replica-index": str(index),
        }
        self.manifest: dict[str, Any] = {
            "metadata": {"name": self.name, "namespace": NAMESPACE, "uid": str(uuid.uuid4()), "labels": labels,
                         "creationTimestamp": now()},
            "spec": template["spec"],
            "status": {"phase": "Pending", "conditions": [], "containerStatuses": []},
        }  # fmt: skip
        self.container = template["spec"]["containers"][0]
        self.lines: list[list[str]] = [[]]
        """Per start of the container, its lines with timestamps."""
        self.changed = threading.Condition()
        self.process: subprocess.Popen[bytes] | None = None
        self.deleted = threading.Event()

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
        """The container's life, from its node to its last exit code."""
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
        last = None
        while not self.deleted.is_set():
            started = now()
            code, reason, message = self._run_once(last)
            ended = {"terminated": {"exitCode": code, "reason": reason, "message": message, "startedAt": started,
                                    "finishedAt": now()}}  # fmt: skip
            if code == 0 or self.server.too_many_restarts(self) or self.deleted.is_set():
                self.set_state("Succeeded" if code == 0 else "Failed", ended, last)
                return code
            last = ended
            with self.changed:
                self.lines.append([])
            self.set_state("Running", {"waiting": {"reason": "CrashLoopBackOff"}}, last)
            self.deleted.wait(0.2)
        return 143

    def _run_once(self, last: dict[str, Any] | None) -> tuple[int, str, str]:
        faults = self.server.faults
        if self.role in faults.exit_codes:
            self.set_state("Running", {"running": {"startedAt": now()}}, last)
            code, reason = faults.exit_codes[self.role]
            return code, reason, ""
        words = self.server.folder / f"{uuid.uuid4().hex}.words"
        environment = {e["name"]: e["value"] for e in self.container.get("env") or [] if "value" in e}
        command = [sys.executable if part == "python" else part for part in self.container["command"]]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**self.server.node_environment, **environment, **self.environment, "TERMINATION_LOG": str(words)},
        )  # fmt: skip
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
        message = words.read_text()[:4096] if words.is_file() else ""
        if not message and code:
            message = "\n".join(line.split(" ", 1)[1] for line in self.lines[-1][-10:])
        return code, "Error" if code else "Completed", message

    def signal(self, number: int) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        first = psutil.Process(self.process.pid)
        # the kubelet asks the container's first process to end; SIGKILL ends them all
        for one in [*(first.children(recursive=True) if number == signal.SIGKILL else []), first]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def delete(self) -> None:
        self.deleted.set()
        self.signal(signal.SIGTERM)
        give_up = time.monotonic() + self.manifest["spec"].get("terminationGracePeriodSeconds", 30)
        while self.process and self.process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.05)
        self.signal(signal.SIGKILL)


class Server(HttpServer):
    def __init__(self, folder: Path, node_environment: dict[str, str]) -> None:
        self.folder, self.node_environment = folder, node_environment
        self.faults = Faults()
        self.token = "first-token"
        self.claims = {"training-data-pvc", "trained-models-pvc", "workspace-pvc"}
        self.access_mode = "ReadWriteMany"
        self.groups = ["kubeflow.org", "authorization.k8s.io"]
        self.allowed = list(ALLOWED)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, list[Pod]] = {}
        self.requests: list[str] = []
        self.step_pods: dict[str, str] = {}
        """Pods of pipeline steps that are there, with their phase."""
        self.lock = threading.RLock()
        self.version = 0
        self._limits: dict[str, int] = {}
        super().__init__()
        self.kubeconfig = folder / "kubeconfig"
        self.write_kubeconfig()

    def write_kubeconfig(self) -> None:
        """As `oc login` leaves it."""
        self.kubeconfig.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": self.token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
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
                raise Refused(status, "the server is in trouble")
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized")
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            log = re.fullmatch(rf"/api/v1/namespaces/{NAMESPACE}/pods/([^/]+)/log", url.path)
            if log and request.command == "GET":
                self._stream_log(request, log[1], query)
                return
            status, answer = 200, self._route(request.command, url.path, query, body)
            if request.command == "POST":
                status = 201
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
        jobs = f"/apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs"
        if path == "/apis/kubeflow.org/v1" and method == "GET":
            return {"kind": "APIResourceList", "groupVersion": "kubeflow.org/v1",
                    "resources": [{"name": "pytorchjobs", "kind": "PyTorchJob", "namespaced": True}]}  # fmt: skip
        if path == "/version/" and method == "GET":
            return {"major": "1", "minor": "31", "gitVersion": "v1.31.5", "gitCommit": "", "gitTreeState": "clean",
                    "buildDate": "", "goVersion": "", "compiler": "gc", "platform": "linux/amd64"}  # fmt: skip
        if path == "/apis/" and method == "GET":
            versions = [{"groupVersion": f"{group}/v1", "version": "v1"} for group in self.groups]
            groups = [{"name": group, "versions": [one]} for group, one in zip(self.groups, versions, strict=True)]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        if match := re.fullmatch(rf"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims/([^/]+)", path):
            if match[1] not in self.claims:
                raise Refused(404, f'persistentvolumeclaims "{match[1]}" not found')
            return {"kind": "PersistentVolumeClaim", "apiVersion": "v1", "metadata": {"name": match[1]},
                    "spec": {"accessModes": [self.access_mode], "resources": {"requests": {"storage": "20Gi"}}},
                    "status": {"phase": "Bound", "capacity": {"storage": "20Gi"}}}  # fmt: skip
        if path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews" and method == "POST":
            check_fields(body, "V1SelfSubjectAccessReview", MODELS)
            asked = body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
            wanted = (asked["verb"], asked.get("group", ""), resource)
            allowed = any(
                all(rule in ("*", one) for rule, one in zip(rules, wanted, strict=True)) for rules in self.allowed
            )
            return {**body, "status": {"allowed": allowed}}
        if path.startswith("/apis/trainer.kubeflow.org"):
            raise Refused(404, "404 page not found")
        if path == jobs and method == "POST":
            return self.create_job(body)
        if path == jobs and method == "GET":
            with self.lock:
                found = [job for job in self.jobs.values() if _matches(job, query)]
                return {"kind": "PyTorchJobList", "items": json.loads(json.dumps(found))}
        if path.startswith(f"{jobs}/"):
            name = path.removeprefix(f"{jobs}/")
            with self.lock:
                if name not in self.jobs:
                    raise Refused(404, f'pytorchjobs.kubeflow.org "{name}" not found')
                if method == "GET":
                    return json.loads(json.dumps(self.jobs[name]))
            if method == "PATCH":  # application/merge-patch+json
                with self.lock:
                    annotations = self.jobs[name]["metadata"].setdefault("annotations", {})
                    annotations |= body["metadata"]["annotations"]
                    return json.loads(json.dumps(self.jobs[name]))
            if method == "DELETE":
                self.jobs[name]["metadata"]["deletionTimestamp"] = now()
                threading.Thread(target=self.delete_job, args=(name,), daemon=True).start()
                return {"kind": "Status", "status": "Success"}
        if path == f"/api/v1/namespaces/{NAMESPACE}/pods" and method == "GET":
            with self.lock:
                pods = [pod.manifest for pods in self.pods.values() for pod in pods]
            matching = [pod for pod in pods if _matches(pod, query)]
            return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": matching}
        if match := re.fullmatch(rf"/api/v1/namespaces/{NAMESPACE}/pods/([^/]+)", path):
            if match[1] not in self.step_pods:
                raise Refused(404, f'pods "{match[1]}" not found')
            return {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": match[1]},
                    "status": {"phase": self.step_pods[match[1]]}}  # fmt: skip
        raise Refused(403, f'{method} {path} is forbidden: User "pipeline-runner-dspa" may not do it')

    def _stream_log(self, request: BaseHTTPRequestHandler, name: str, query: dict[str, str]) -> None:
        pod = next((pod for pods in list(self.pods.values()) for pod in pods if pod.name == name), None)
        if pod is None:
            raise Refused(404, f'pods "{name}" not found')
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
        sent, shown = 0, 0
        with suppress(BrokenPipeError, ConnectionResetError):
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
                        request.wfile.write(f"{len(data):x}\r\n".encode() + data[: len(data) // 2])  # in mid-line
                        _break_off(request)
                        return
                    request.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    shown += 1
            request.wfile.write(b"0\r\n\r\n")

    # ---- the Training Operator ----

    def create_job(self, job: dict[str, Any]) -> dict[str, Any]:
        check_fields(job, "KubeflowOrgV1PyTorchJob", MODELS)
        name = job["metadata"]["name"]
        if not DNS_LABEL.fullmatch(name):
            raise Refused(422, f"metadata.name: Invalid value: {name!r}: a DNS-1035 label")
        specs = job["spec"]["pytorchReplicaSpecs"]
        if "Master" not in specs or specs["Master"].get("replicas") != 1 or set(specs) - {"Master", "Worker"}:
            raise Refused(422, "spec.pytorchReplicaSpecs: one Master is required")
        for spec in specs.values():
            containers = spec["template"]["spec"]["containers"]
            if not any(c["name"] == "pytorch" for c in containers):
                raise Refused(422, "there is no container named pytorch")
            known = {v["name"] for v in spec["template"]["spec"].get("volumes") or []}
            for mount in containers[0].get("volumeMounts") or []:
                if mount["name"] not in known:
                    raise Refused(422, f"volumeMounts: {mount['name']} not found")
        with self.lock:
            if name in self.jobs:
                raise Refused(409, f'pytorchjobs.kubeflow.org "{name}" already exists')
            self.version += 1
            job["metadata"] |= {"namespace": NAMESPACE, "uid": str(uuid.uuid4()), "creationTimestamp": now(),
                                "resourceVersion": str(self.version), "generation": 1}  # fmt: skip
            job["status"] = {"conditions": []}
            self.jobs[name] = job
            self._condition(name, "Created", f"PyTorchJob {name} is created.")
        threading.Thread(target=self._operate, args=(name,), daemon=True).start()
        return job

    def _condition(self, name: str, kind: str, message: str) -> None:
        with self.lock:
            if name not in self.jobs:
                return
            conditions = self.jobs[name]["status"]["conditions"]
            for condition in conditions:
                if condition["type"] in ("Running", "Restarting"):
                    condition["status"] = "False"
            conditions[:] = [c for c in conditions if c["type"] != kind]
            conditions.append({"type": kind, "status": "True", "reason": f"PyTorchJob{kind}", "message": message,
                               "lastUpdateTime": now(), "lastTransitionTime": now()})  # fmt: skip

    def _operate(self, name: str) -> None:
        job = self.jobs[name]
        specs = job["spec"]["pytorchReplicaSpecs"]
        counts = {role: specs[role]["replicas"] for role in ("Master", "Worker") if role in specs}
        nodes, ranks = sum(counts.values()), int(job["spec"]["nprocPerNode"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._limits[name] = job["spec"]["runPolicy"].get("backoffLimit", 6)
        pods = []
        places = [(role, i) for role, count in counts.items() for i in range(count)]
        for node, (role, index) in enumerate(places):
            environment = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(nodes * ranks),
                "RANK": str(node), "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(ranks),
                "PET_NODE_RANK": str(node), "PYTHONUNBUFFERED": "1", "POD_IP": "127.0.0.1",
            }  # fmt: skip
            pods.append(Pod(self, job, role, index, specs[role]["template"], environment))
        with self.lock:
            if name not in self.jobs:
                return
            self.pods[name] = pods
        codes: dict[str, int] = {}
        threads = [
            threading.Thread(target=lambda pod=pod: codes.update({pod.role: pod.run()}), daemon=True) for pod in pods
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if any(codes.get(pod.role) for pod in pods):  # a pod that may not start again ends the job
                break
            phases = {pod.manifest["status"]["phase"] for pod in pods}
            if phases == {"Running"}:
                with self.lock:
                    current = self.jobs.get(name, {}).get("status", {}).get("conditions", [])
                    said = any(c["type"] == "Running" and c["status"] == "True" for c in current)
                if not said:
                    self._condition(name, "Running", f"PyTorchJob {name} is running.")
            time.sleep(0.05)
        if any(pod.deleted.is_set() for pod in pods):
            return
        failed = [pod for pod in pods if codes.get(pod.role)]
        if failed:
            self._condition(
                name, "Failed", f"PyTorchJob {name} is failed because 1 {failed[0].role} replica(s) failed."
            )
        else:
            self._condition(name, "Succeeded", f"PyTorchJob {name} is successfully completed.")
        for pod in pods:  # cleanPodPolicy: Running
            if pod.role not in codes:
                pod.delete()

    def too_many_restarts(self, pod: Pod) -> bool:
        name = pod.manifest["metadata"]["labels"]["training.kubeflow.org/job-name"]
        return sum(p.restarts for p in self.pods.get(name, [])) >= self._limits.get(name, 0)

    def delete_job(self, name: str) -> None:
        with self.lock:
            if name not in self.jobs:
                return
            self.jobs[name]["metadata"]["deletionTimestamp"] = now()
            pods = self.pods.get(name, [])
        threads = [threading.Thread(target=pod.delete, daemon=True) for pod in pods]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self.lock:
            self.pods.pop(name, None)
            self.jobs.pop(name, None)


def _break_off(request: BaseHTTPRequestHandler) -> None:
    request.close_connection = True
    request.connection.shutdown(socket.SHUT_RDWR)


def _matches(manifest: dict[str, Any], query: dict[str, str]) -> bool:
    wanted = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
    return wanted.items() <= (manifest["metadata"].get("labels") or {}).items()


@contextmanager
def cluster(folder: Path, **environment: str) -> Iterator[Server]:
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(folder, {**os.environ, **environment})
    try:
        yield server
    finally:
        server.close()
