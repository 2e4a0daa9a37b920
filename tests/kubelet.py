"""Runs the containers of pods as a node does: with their image's environment and user, and with the pod's volumes.

The images are those that images/ builds. Their files are this checkout and the Python of the tests. Like on a node, a
container sees a volume only where its pod mounts it, the credentials of its service account only if they are mounted,
and nothing of the tests' own environment.
"""

import base64
import re
import string
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from admission import INTERNAL_REGISTRY
from container import Container

from tailtune import __version__

if TYPE_CHECKING:
    from kubernetes_server import Pod, Server

Manifest = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Added to that of all images: where tailtune is, no hub, and two cores that several tests share."""


class Kubelet:
    def __init__(self, server: "Server", certificate: Path, registry: str = "", tag: str = __version__) -> None:
        """`certificate` is that of the API server. The images are in `registry`, by default the cluster's own, with the
        one tag."""
        self.server, self.certificate, self.tag = server, certificate, tag
        self.registry = registry or f"{INTERNAL_REGISTRY}/{server.namespace}"

    def claim(self, name: str) -> Path:
        """Where the files of a claim's volume are."""
        return self._directory("claims", name)

    def scratch(self, pod: "Pod", path: str) -> Path:
        """Where the files are that the pod's container sees at a path."""
        for target, source in sorted(self._mounts(pod).items(), reverse=True):
            if path == target or path.startswith(f"{target}/"):
                return Path(source) / path[len(target) + 1 :]
        raise FileNotFoundError(path)

    def why_waiting(self, pod: "Pod") -> tuple[str, str] | None:
        """Reason and message for which the container cannot be started, and waits."""
        image = pod.container["image"]
        if self._containerfile(image) is None:
            return "ImagePullBackOff", f'Back-off pulling image "{image}"'
        if self._security(pod, "runAsNonRoot") and self._user(pod) == 0:
            return "CreateContainerConfigError", "container has runAsNonRoot and image will run as root"
        for volume in pod.manifest["spec"].get("volumes") or []:
            for kind in ("secret", "configMap"):
                if kind in volume and not volume[kind].get("optional") and self._data(volume) is None:
                    return "ContainerCreating", f'MountVolume.SetUp failed for volume "{volume["name"]}": not found'
        return None

    def prepare(self, pod: "Pod", termination_log: Path) -> tuple[list[str], dict[str, str]]:
        """The command line and the environment of the pod's container."""
        termination_log.touch()
        mounts = {**self._mounts(pod), "/dev/termination-log": str(termination_log)}
        container = Container(root=str(self._of(pod, "root")), user=self._user(pod), mounts=mounts,
                              image=[str(ROOT), sys.prefix, sys.base_prefix])  # fmt: skip
        api, metadata = urlsplit(self.server.url), pod.manifest["metadata"]
        fields = {"metadata.name": pod.name, "metadata.uid": metadata["uid"], "status.podIP": "127.0.0.1"}
        environment = {
            **self._image_environment(pod.container["image"]),
            "HOSTNAME": pod.name, "KUBERNETES_SERVICE_HOST": str(api.hostname),
            "KUBERNETES_SERVICE_PORT": str(api.port),
        }  # fmt: skip
        for variable in pod.container.get("env") or []:
            value = variable.get("value") or ""
            environment[variable["name"]] = (
                fields[variable["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in variable else value
            )
        command = [*pod.container["command"], *(pod.container.get("args") or [])]
        return container.command(pod.program or command), {**environment, **pod.environment}

    # ---- images ----

    def _containerfile(self, image: str) -> str | None:
        """The file that the image was built from; None if no registry has the image."""
        registry, _, name = image.rpartition("/")
        name, _, tag = name.partition(":")
        path = ROOT / "images" / name.removeprefix("tailtune-") / "Containerfile"
        return path.read_text() if (registry, tag) == (self.registry, self.tag) and path.is_file() else None

    def _image_environment(self, image: str) -> dict[str, str]:
        """What the instructions ENV of the image set."""
        text = (self._containerfile(image) or "").replace("\\\n", " ")
        arguments = dict(re.findall(r'^ARG (\w+)=("[^"]*"|\S*)', text, re.MULTILINE))
        set_there = dict(re.findall(r'(\w+)=("[^"]*"|\S*)', " ".join(re.findall(r"^ENV (.*)", text, re.MULTILINE))))
        values = {name: string.Template(value).safe_substitute(arguments) for name, value in set_there.items()}
        return {**values, **ENVIRONMENT, "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"}

    def _user(self, pod: "Pod") -> int:
        users = re.findall(r"^USER (\d+)", self._containerfile(pod.container["image"]) or "", re.MULTILINE)
        user = self._security(pod, "runAsUser")
        return int(users[-1] if user is None else user)

    def _security(self, pod: "Pod", name: str) -> Any:
        """A setting of the container, or else of its pod."""
        contexts = (pod.container, pod.manifest["spec"])
        return next((context["securityContext"][name] for context in contexts
                     if (context.get("securityContext") or {}).get(name) is not None), None)  # fmt: skip

    # ---- volumes ----

    def _mounts(self, pod: "Pod") -> dict[str, str]:
        volumes = {volume["name"]: volume for volume in pod.manifest["spec"].get("volumes") or []}
        mounts = {mount["mountPath"]: str(self._volume(pod, volumes[mount["name"]]) / mount.get("subPath", ""))
                  for mount in pod.container.get("volumeMounts") or []}  # fmt: skip
        if not self._security(pod, "readOnlyRootFilesystem"):
            mounts.setdefault("/tmp", str(self._of(pod, "tmp")))
        mounts.setdefault("/dev/shm", str(self._of(pod, "shm")))
        return mounts

    def _volume(self, pod: "Pod", volume: Manifest) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.claim(volume["persistentVolumeClaim"]["claimName"])
        path = self._of(pod, volume["name"])
        if "secret" in volume or "configMap" in volume:
            for name, value in (self._data(volume) or {}).items():
                (path / name).write_bytes(value)
        elif "projected" in volume:  # the token of its service account; the tests know the runner's alone
            account = pod.manifest["spec"].get("serviceAccountName", "default")
            is_runner = self.server.user.endswith(f":{account}")
            (path / "token").write_text(self.server.token if is_runner else f"token of {account}")
            (path / "namespace").write_text(self.server.namespace)
            (path / "ca.crt").write_bytes(self.certificate.read_bytes())
        elif "emptyDir" not in volume:
            raise NotImplementedError(f"volume {volume}")
        return path

    def _data(self, volume: Manifest) -> dict[str, bytes] | None:
        """The files of a secret or ConfigMap; None if it does not exist."""
        if "secret" in volume:
            resource, name = "secrets", volume["secret"]["secretName"]
        else:
            resource, name = "configmaps", volume["configMap"]["name"]
        found = self.server.objects.get((resource, f"{self.server.namespace}/{name}"))
        if found is None:
            return None
        data = found.get("data") or {}
        return {key: base64.b64decode(text) if resource == "secrets" else text.encode() for key, text in data.items()}

    def _of(self, pod: "Pod", name: str) -> Path:
        return self._directory("pods", pod.name, name)

    def _directory(self, *names: str) -> Path:
        path = self.server.folder.joinpath(*names)
        path.mkdir(parents=True, exist_ok=True)
        return path
