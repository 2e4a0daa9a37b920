"""Runs a compiled pipeline as Kubeflow Pipelines does on a cluster: its compiler and driver, Argo, and its launcher.

It takes what a person uploads, both documents of the compiled file, and makes every step's pod on the tests' cluster,
where it has to pass the admission and runs as a container. What this pipeline does not use is refused.

Sources: kubeflow/pipelines, backend/src/v2: compiler/argocompiler/dag.go and container.go (order of tasks, exit hook,
the pod's template), driver/resolve.go, driver.go and k8s.go (parameters, the pod's patch), component/launcher_v2.go
(placeholders, outputs); backend/src/apiserver/template/v2_template.go (parameters of a run); argo-workflows,
workflow/controller/workflowpod.go and operator.go (the pod, retries).
"""

import json
import re
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import yaml
from http_server import Refused
from kubernetes_server import RUNNER, Pod, Server
from operators import Template

Manifest = dict[str, Any]
T = TypeVar("T")
TYPES: dict[str, Any] = {"STRING": str, "NUMBER_DOUBLE": (int, float), "NUMBER_INTEGER": (int, float), "BOOLEAN": bool}
CONDITION = re.compile(r"inputs\.parameter_values\['([^']+)'\]\s+(==|!=)\s+'([^']*)'")
CHANNEL = re.compile(r"\{\{\$\.inputs\.parameters\['(.+?)'\]\}\}")
LAUNCHER_RESOURCES = {"limits": {"cpu": "500m", "memory": "128Mi"}, "requests": {"cpu": "100m"}}
SCRATCH = {"gcs-scratch": "/gcs", "s3-scratch": "/s3", "minio-scratch": "/minio", "dot-local-scratch": "/.local",
           "dot-cache-scratch": "/.cache", "dot-config-scratch": "/.config",
           "kfp-launcher": "/kfp-launcher"}  # fmt: skip
"""KFP's own volumes in every step's pod."""
ARGO_VOLUMES = ("var-run-argo", "tmp-dir-argo")
CA_VOLUME, CA_FOLDER, CA_KEY = "ca-bundle", "/dsp-custom-certs", "dsp-ca.crt"
"""Of KFP before 2.16, with the key that data-science-pipelines-operator gives it: controllers/config/defaults.go."""
DRIVER_RESOURCES = {"limits": {"cpu": "500m", "memory": "512Mi"}, "requests": {"cpu": "100m", "memory": "64Mi"}}
OUTPUT_FILE = "/tmp/kfp_outputs/output_metadata.json"
RETRY_SECONDS = 0.2
"""Instead of the backoff of the retry policy."""


class Workflow:
    """One run of a compiled pipeline."""

    def __init__(self, server: Server, compiled: str, parameters: Manifest, *,
                 executor_resources: Manifest | None = None, ca_config_map: str = "") -> None:  # fmt: skip
        """`executor_resources` are those of Argo's own containers, which its configuration sets; OpenShift AI's does
        not. `ca_config_map` is what KFP before 2.16, of OpenShift AI 3.0 to 3.3, mounts in every step. Raises
        ValueError for parameters that the API server refuses."""
        self.server, self.executor_resources, self.ca_config_map = server, executor_resources, ca_config_map
        self.spec, platform = yaml.safe_load_all(compiled)
        self.kubernetes = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        self.run_id, self.name = str(uuid.uuid4()), f"{self.spec['pipelineInfo']['name']}-{uuid.uuid4().hex[:5]}"
        self.phases: dict[str, str] = {}
        """Argo's phase of each task that was reached, in the order in which they ended."""
        self.steps: list[Pod] = []
        """Every pod that was created."""
        self.driver_errors: list[str] = []
        """Why tasks have no pod, by the driver."""
        self.artifacts: dict[str, bytes] = {}
        """What was uploaded, by task/artifact."""
        self._has_expired = threading.Event()
        self._parameters = self._checked(parameters)

    def run(self, seconds: float) -> str:
        """Return the final phase. After so many seconds, pods that have not ended are deleted."""
        self.server.workflows[self.run_id] = "Running"
        timer = threading.Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            self._drive(f"{self.name}.root")
            phase = self._dag(self.spec["root"], self._parameters, f"{self.name}.root")
        except Refused:
            phase = "Failed"
        finally:
            timer.cancel()
        self.server.workflows[self.run_id] = phase
        return phase

    def log(self) -> str:
        """What all steps have printed, for failures of tests."""
        return "\n".join(
            f"==== {pod.manifest['metadata']['annotations']['workflows.argoproj.io/node-name']}: "
            f"{pod.manifest['status']['phase']}\n" + "\n".join(line.split(" ", 1)[1] for line in pod.lines[-1])
            for pod in self.steps
        ) + "\n".join(["", *self.driver_errors, *self.server.refused_pods])  # fmt: skip

    def _expire(self) -> None:
        self._has_expired.set()
        for pod in list(self.steps):
            pod.delete()

    # ---- the API server and the drivers ----

    def _checked(self, parameters: Manifest) -> Manifest:
        """The parameters of the run with the defaults. Raises ValueError for unknown, missing and mistyped ones."""
        known = self.spec["root"]["inputDefinitions"]["parameters"]
        if unknown := set(parameters) - set(known):
            raise ValueError(f"the pipeline has no parameter {min(unknown)}")
        values = {name: each["defaultValue"] for name, each in known.items() if "defaultValue" in each} | parameters
        _check_types(values, known)
        return values

    def _dag(self, component: Manifest, inputs: Manifest, node: str) -> str:
        """Run the tasks of a DAG, each after those it depends on have succeeded, and return the DAG's phase.

        No task starts that depends on a skipped or failed one; after a failure, none starts at all (failFast).
        """
        tasks: dict[str, Manifest] = component["dag"]["tasks"]
        exits = {name for name, task in tasks.items() if "strategy" in task.get("triggerPolicy", {})}
        outputs: dict[str, Manifest] = {}
        phases: dict[str, str] = {}
        running: dict[Future[str], str] = {}
        with ThreadPoolExecutor() as pool:
            while True:
                for name in tasks.keys() - exits - phases.keys() - set(running.values()):
                    is_ready = all(phases.get(other) == "Succeeded" for other in _dependencies(tasks[name]))
                    if is_ready and not {"Failed", "Error"} & set(phases.values()):
                        future = pool.submit(self._task, name, tasks[name], inputs, outputs, f"{node}.{name}")
                        running[future] = name
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    phases[name := running.pop(future)] = future.result()
                    for end in exits:  # an exit hook: it runs however the task has ended
                        if name in tasks[end]["dependentTasks"]:
                            assert tasks[end]["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
                            phases[end] = self._task(end, tasks[end], inputs, outputs, f"{node}.{name}.onExit.{end}")
        return "Failed" if {"Failed", "Error"} & set(phases.values()) else "Succeeded"

    def _task(self, name: str, task: Manifest, inputs: Manifest, outputs: dict[str, Manifest], node: str) -> str:
        component = self.spec["components"][task["componentRef"]["name"]]
        try:
            self._drive(node)
            values = {key: self._resolve(each, name, inputs, outputs)
                      for key, each in task.get("inputs", {}).get("parameters", {}).items()}  # fmt: skip
            _check_types(values, component.get("inputDefinitions", {}).get("parameters", {}))
            if not _is_true(task.get("triggerPolicy", {}).get("condition"), values):
                phase = "Skipped"
            elif "dag" in component:
                phase = self._dag(component, values, node)
            else:
                phase, outputs[name] = self._container(name, task, component, values, inputs, node)
        except ValueError as error:  # the driver fails, and the task has no pod
            self.driver_errors.append(f"{name}: {error}")
            phase = "Failed"
        except Refused:  # the driver's pod; that of the step is handled there
            phase = "Error"
        self.phases[name] = phase
        return phase

    def _drive(self, node: str) -> None:
        """Have the pod of a driver admitted, which does here what it does there. Raises Refused.

        Such pods are those of KFP 2.14 to 2.16, with neither volumes nor a security context.
        """
        main = {"image": "ghcr.io/kubeflow/kfp-driver:2.16.1", "command": ["driver"], "resources": DRIVER_RESOURCES}
        spec = self._with_argo(main, {name: {"emptyDir": {}} for name in ARGO_VOLUMES})
        name = f"{self.name}-system-driver-{uuid.uuid4().int % 10**10}"
        self._when_quota_allows(lambda: self.server.admit(Template(f"{node}-driver", name, {}, spec, {})))

    def _resolve(self, source: Manifest, task: str, inputs: Manifest, outputs: dict[str, Manifest]) -> Any:
        ((kind, value),) = source.items()
        if kind == "componentInputParameter":
            if value not in inputs:
                raise ValueError(f"parent DAG does not have input parameter {value}")
            return inputs[value]
        if kind == "taskOutputParameter":
            return outputs[value["producerTask"]][value["outputParameterKey"]]
        if kind == "runtimeValue":
            constant = value["constant"]
            known = {"{{$.pipeline_job_uuid}}": self.run_id, "{{$.pipeline_job_resource_name}}": self.name,
                     "{{$.pipeline_task_name}}": task}  # fmt: skip
            return known.get(constant, constant) if isinstance(constant, str) else constant
        raise NotImplementedError(f"an input from {kind}")

    def _container(self, name: str, task: Manifest, component: Manifest, values: Manifest, inputs: Manifest,
                   node: str) -> tuple[str, Manifest]:  # fmt: skip
        """Run a step's pod, again as often as its policy allows, and return its phase and output parameters.

        Argo retries a pod that has failed, but neither one that was deleted nor one that could not be created.
        """
        definitions = component.get("outputDefinitions", {})
        parameters = definitions.get("parameters", {})
        artifacts = {key: each["artifactType"] for key, each in definitions.get("artifacts", {}).items()}
        artifacts["executor-logs"] = {"schemaTitle": "system.Artifact"}
        root = f"s3://bucket/{self.spec['pipelineInfo']['name']}/{self.run_id}/{name}/{uuid.uuid4()}"
        executor_input = {
            "inputs": {"parameterValues": values},
            "outputs": {
                "parameters": {key: {"outputFile": f"/tmp/kfp/outputs/{key}"} for key in parameters},
                "artifacts": {key: {"artifacts": [{"type": kind, "uri": f"{root}/{key}", "metadata": {}}]}
                              for key, kind in artifacts.items()},
                "outputFile": OUTPUT_FILE,
            },
        }  # fmt: skip
        executor = self.spec["deploymentSpec"]["executors"][component["executorLabel"]]["container"]
        config = self.kubernetes.get(component["executorLabel"], {})
        policy = task.get("retryPolicy")
        for attempt in range(1 + (policy or {}).get("maxRetryCount", 0)):
            time.sleep(RETRY_SECONDS * min(attempt, 1))
            spec = self._pod_spec(executor, config, values, inputs, executor_input)
            node_name = f"{node}.executor" + (f"({attempt})" if policy else "")
            try:
                pod = self._create(spec, config, node_name, "retry-" if policy else "")
            except Refused:
                return "Error", {}
            phase = self._launch(pod, executor, executor_input)
            if phase == "Succeeded":
                return phase, self._collect(pod, name, executor_input, parameters)
            if phase == "Error":
                break
        return phase, {}

    def _pod_spec(self, executor: Manifest, config: Manifest, values: Manifest, inputs: Manifest,
                  executor_input: Manifest) -> Manifest:  # fmt: skip
        """The pod's template of KFP, with Argo's containers, and the driver's patch for this step."""
        if unknown := set(config) - {"pvcMount", "secretAsVolume", "nodeSelector", "tolerations", "podMetadata"}:
            raise NotImplementedError(f"settings for Kubernetes: {unknown}")
        volumes: dict[str, Manifest] = {name: {"emptyDir": {}} for name in (*SCRATCH, *ARGO_VOLUMES)}
        mounts = [_mount(name, path) for name, path in SCRATCH.items()]
        certificates: list[Manifest] = []
        if self.ca_config_map:
            file = f"{CA_FOLDER}/{CA_KEY}"
            volumes[CA_VOLUME] = {"configMap": {"name": self.ca_config_map}}
            mounts.append({**_mount(CA_VOLUME, file), "subPath": CA_KEY})
            names = ("REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE", "SSL_CERT_FILE")
            certificates = [{"name": name, "value": file} for name in names]
        added = [
            *((self._name(each, "pvcNameParameter", inputs), each, "persistentVolumeClaim", "claimName", {})
              for each in config.get("pvcMount", [])),
            *((self._name(each, "secretNameParameter", inputs), each, "secret", "secretName",
               {"optional": each.get("optional", False)}) for each in config.get("secretAsVolume", [])),
        ]  # fmt: skip
        for name, each, kind, field, more in added:
            # a strategic merge patch: a volume of KFP with this name keeps its own type beside the new one
            volumes.setdefault(name, {})[kind] = {field: name, **more}
            mounts.append(_mount(name, each["mountPath"]))
        launcher = ["/kfp-launcher/launch", "--run_id", self.run_id, "--executor_input", _to_json(executor_input), "--"]
        own_fields = {"KFP_POD_NAME": "metadata.name", "KFP_POD_UID": "metadata.uid"}
        own = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in own_fields.items()]
        main = {
            "image": _from_channel(executor["image"], values), "volumeMounts": mounts,
            "command": ["/var/run/argo/argoexec", "emissary", "--", *launcher],
            "args": [*executor["command"], *executor["args"]],
            "resources": _resources(executor.get("resources", {}), values),
            "env": [*own, *certificates, *executor.get("env", [])],
        }  # fmt: skip
        launcher_copy = {
            "name": "kfp-launcher", "image": "ghcr.io/kubeflow/kfp-launcher:2.16.1", "command": ["launcher-v2"],
            "args": ["--copy", "/kfp-launcher/launch"], "resources": LAUNCHER_RESOURCES,
            "volumeMounts": [_mount("kfp-launcher", SCRATCH["kfp-launcher"])],
        }  # fmt: skip
        spec = self._with_argo(main, volumes, launcher_copy)
        if "nodeSelector" in config:
            spec["nodeSelector"] = config["nodeSelector"]["labels"]
        return spec | ({"tolerations": config["tolerations"]} if "tolerations" in config else {})

    def _with_argo(self, main: Manifest, volumes: dict[str, Manifest], *init: Manifest) -> Manifest:
        """The pod in which Argo runs the container of a template, between its own."""
        shared = _mount("var-run-argo", "/var/run/argo")
        argo: Manifest = {"image": "quay.io/argoproj/argoexec:v3.7.14", "volumeMounts": [shared]}
        if self.executor_resources:
            argo["resources"] = self.executor_resources
        sidecar = {**argo, "name": "wait", "command": ["argoexec", "wait"],
                   "volumeMounts": [shared, _mount("tmp-dir-argo", "/tmp")]}  # fmt: skip
        return {
            "restartPolicy": "Never",
            "serviceAccountName": RUNNER,
            "initContainers": [{**argo, "name": "init", "command": ["argoexec", "init"]}, *init],
            "containers": [sidecar, {**main, "name": "main", "volumeMounts": [shared, *main.get("volumeMounts", [])]}],
            "volumes": [{"name": name, **volume} for name, volume in volumes.items()],
        }

    def _name(self, source: Manifest, key: str, inputs: Manifest) -> str:
        """The name of a claim or secret. Raises ValueError for an empty one."""
        name = self._resolve(source[key], "", inputs, {})
        if not isinstance(name, str) or not name:
            raise ValueError(f"{source}: expected a non-empty string")
        return name

    # ---- Argo and the launcher ----

    def _create(self, spec: Manifest, config: Manifest, node: str, prefix: str) -> Pod:
        """Create the pod of a step. Raises Refused."""
        own = {"pipeline/runid": self.run_id, "workflows.argoproj.io/workflow": self.name,
               "workflows.argoproj.io/completed": "false"}  # fmt: skip
        labels = {**config.get("podMetadata", {}).get("labels", {}), **own}
        name = f"{self.name}-{prefix}system-container-impl-{uuid.uuid4().int % 10**10}"

        def create() -> Pod:
            pod = Pod(self.server, "", self.server.admit(Template(node, name, labels, spec, {})))
            pod.manifest["metadata"]["annotations"] = {"workflows.argoproj.io/node-name": node}
            self.server.pods_of_steps.append(pod)
            self.steps.append(pod)
            return pod

        return self._when_quota_allows(create)

    def _when_quota_allows(self, create: Callable[[], T]) -> T:
        """Create a pod. While a quota is exhausted, Argo tries again. Raises Refused, for any other reason."""
        while True:
            try:
                with self.server.lock:
                    return create()
            except Refused as refusal:
                if "exceeded quota" not in str(refusal) or self._has_expired.wait(RETRY_SECONDS):
                    raise

    def _launch(self, pod: Pod, executor: Manifest, executor_input: Manifest) -> str:
        """Run the step's program in the pod as the launcher does, and return the phase of its node."""
        inputs, outputs = executor_input["inputs"]["parameterValues"], executor_input["outputs"]
        placeholders = {"{{$}}": _to_json(executor_input)} | {
            f"{{{{$.inputs.parameters['{name}']}}}}": value if isinstance(value, str) else _to_json(value)
            for name, value in inputs.items()
        }
        for part in (*executor["command"], *executor["args"]):
            for placeholder, value in placeholders.items():
                part = part.replace(placeholder, value)
            pod.program.append(part)
        kubelet = self.server.kubelet
        assert kubelet is not None, "steps run in containers"
        files = [each["outputFile"] for each in outputs["parameters"].values()]
        for path in (*files, *_artifact_paths(outputs).values()):
            kubelet.scratch(pod, path).parent.mkdir(parents=True, exist_ok=True)
        if self._has_expired.is_set():
            pod.delete()
        pod.run()
        if pod.deleted.is_set():
            return "Error"
        return str(pod.manifest["status"]["phase"])

    def _collect(self, pod: Pod, task: str, executor_input: Manifest, parameters: Manifest) -> Manifest:
        """Upload the step's artifacts, those that exist, and return its output parameters."""
        kubelet, outputs = self.server.kubelet, executor_input["outputs"]
        assert kubelet is not None
        for name, path in _artifact_paths(outputs).items():
            if (file := kubelet.scratch(pod, path)).is_file():
                self.artifacts[f"{task}/{name}"] = file.read_bytes()
        metadata = kubelet.scratch(pod, OUTPUT_FILE)
        values = json.loads(metadata.read_text()).get("parameterValues", {}) if metadata.is_file() else {}
        for name, definition in parameters.items():
            if name not in values:
                text = kubelet.scratch(pod, outputs["parameters"][name]["outputFile"]).read_text()
                values[name] = text if definition["parameterType"] == "STRING" else json.loads(text)
        _check_types(values, parameters)
        return dict(values)


def _dependencies(task: Manifest) -> set[str]:
    """The tasks that a task depends on, those whose outputs it takes included."""
    sources = task.get("inputs", {}).get("parameters", {}).values()
    producers = {each["taskOutputParameter"]["producerTask"] for each in sources if "taskOutputParameter" in each}
    return {*task.get("dependentTasks", []), *producers}


def _check_types(values: Manifest, definitions: Manifest) -> None:
    """Raises ValueError for a parameter that is missing or of another type."""
    for name, definition in definitions.items():
        if name not in values:
            raise ValueError(f"neither value nor default value provided for parameter {name}")
        kind, is_boolean = definition["parameterType"], isinstance(values[name], bool)
        if not isinstance(values[name], TYPES[kind]) or is_boolean != (kind == "BOOLEAN"):
            raise ValueError(f"input parameter {name} type mismatch: expect {kind}, got {values[name]!r}")


def _is_true(condition: str | None, values: Manifest) -> bool:
    if not condition:
        return True
    match = CONDITION.fullmatch(condition)
    if match is None:
        raise NotImplementedError(f"the condition {condition}")
    return (values[match[1]] == match[3]) == (match[2] == "==")


def _from_channel(value: str, values: Manifest) -> str:
    """A field of a pod's spec that may be an input parameter of the step. Only text can be."""
    match = CHANNEL.fullmatch(value)
    return str(values[match[1]] if isinstance(values[match[1]], str) else "") if match else value


def _resources(resources: Manifest, values: Manifest) -> Manifest:
    found: Manifest = {"limits": {}, "requests": {}}
    for kind in found:
        for name in ("cpu", "memory"):
            if value := resources.get(f"resource{name.capitalize()}{kind.capitalize()[:-1]}"):
                found[kind][name] = _from_channel(value, values)
    if accelerator := resources.get("accelerator"):
        name, count = (_from_channel(accelerator[key], values) for key in ("resourceType", "resourceCount"))
        if name and count:
            found["limits"][name] = count
    return found


def _artifact_paths(outputs: Manifest) -> dict[str, str]:
    """Where a step finds each of its output artifacts."""
    uris = {name: each["artifacts"][0]["uri"] for name, each in outputs["artifacts"].items()}
    return {name: "/s3/" + uri.removeprefix("s3://") for name, uri in uris.items()}


def _mount(name: str, path: str) -> Manifest:
    return {"name": name, "mountPath": path}


def _to_json(value: Any) -> str:
    """JSON as protobuf writes it: whole numbers without a fraction."""

    def plain(each: Any) -> Any:
        if isinstance(each, dict):
            return {key: plain(inner) for key, inner in each.items()}
        if isinstance(each, list):
            return [plain(inner) for inner in each]
        return int(each) if isinstance(each, float) and each.is_integer() else each

    return json.dumps(plain(value))
