"""What an API server does with a pod before it exists: validation, service account, OpenShift's constraint
restricted-v2, Pod Security Standards, limit ranges, quotas.

Sources: kubernetes, pkg/apis/core/validation/validation.go, plugin/pkg/admission/serviceaccount/admission.go,
plugin/pkg/admission/limitranger/admission.go, pkg/quota/v1/evaluator/core/pods.go,
staging/src/k8s.io/pod-security-admission/policy; OpenShift's apiserver-library-go, pkg/securitycontextconstraints, and
its constraint restricted-v2; image names: openshift-apiserver's plugin ImagePolicy.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from http_server import Refused, check_fields
from kubernetes.client import models
from kubernetes.utils.quantity import parse_quantity
from operators import admitted

Manifest = dict[str, Any]
CONTAINER_KINDS = ("initContainers", "containers", "ephemeralContainers")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
VOLUME_TYPES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected",
                "secret"}  # fmt: skip
"""Allowed by the restricted Pod Security Standard, and by restricted-v2."""
SECCOMP_TYPES = ("RuntimeDefault", "Localhost")
SELINUX_TYPES = (None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
BASELINE_CAPABILITIES = {"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD",
                         "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}  # fmt: skip
INTERNAL_REGISTRY = "image-registry.openshift-image-registry.svc:5000"
COMPUTE = ("cpu", "memory")
SIZE_RULES = {"min": "minimum {} usage", "max": "maximum {} usage",
              "maxLimitRequestRatio": "{} max limit to request ratio"}  # fmt: skip
"""What limit ranges enforce."""


def containers_of(spec: Manifest) -> list[Manifest]:
    return [container for kind in CONTAINER_KINDS for container in spec.get(kind) or []]


def violations(template: Manifest, level: str = "restricted") -> list[str]:
    """Return what violates a Pod Security Standard, `baseline` or `restricted`.

    See kubernetes.io/docs/concepts/security/pod-security-standards.
    """
    spec, is_restricted = template["spec"], level == "restricted"
    pod = spec.get("securityContext") or {}
    broken_rules = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    for volume in spec.get("volumes") or []:
        types = set(volume) - {"name"}
        if not types <= VOLUME_TYPES if is_restricted else "hostPath" in types:
            broken_rules.append(f"volume {volume['name']}")
    broken_rules += ["sysctls"] if pod.get("sysctls") else []  # the standard allows a few
    containers = containers_of(spec)
    contexts = [container.get("securityContext") or {} for container in containers]
    for context in (pod, *contexts):
        selinux = context.get("seLinuxOptions") or {}
        if selinux.get("type") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
            broken_rules.append("seLinuxOptions")
        if (context.get("appArmorProfile") or {}).get("type") == "Unconfined":
            broken_rules.append("appArmorProfile")
        if (context.get("windowsOptions") or {}).get("hostProcess"):
            broken_rules.append("hostProcess")
        if is_restricted and context.get("runAsUser") == 0:
            broken_rules.append("runAsUser")
    for container, context in zip(containers, contexts, strict=True):
        capabilities = context.get("capabilities") or {}
        effective = {**pod, **context}
        added, seccomp = set(capabilities.get("add") or []), (effective.get("seccompProfile") or {}).get("type")
        checks = {
            "privileged": bool(context.get("privileged")),
            "capabilities.add": not added <= ({"NET_BIND_SERVICE"} if is_restricted else BASELINE_CAPABILITIES),
            "seccompProfile": seccomp not in SECCOMP_TYPES if is_restricted else seccomp == "Unconfined",
            "procMount": context.get("procMount") not in (None, "Default"),
            "hostPort": any(port.get("hostPort") for port in container.get("ports") or []),
        }
        if is_restricted:
            checks |= {
                "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is not False,
                "capabilities.drop": "ALL" not in (capabilities.get("drop") or []),
                "runAsNonRoot": effective.get("runAsNonRoot") is not True,
            }
        broken_rules += [name for name, is_broken in checks.items() if is_broken]
    return broken_rules


@dataclass
class Admission:
    """The admission of one namespace."""

    namespace: str
    level: str
    """The Pod Security Standard that the namespace enforces."""
    uids: range | None = None
    """The users of the project, on OpenShift, where pods get the constraint restricted-v2."""

    def admit(self, pod: Manifest, accounts: dict[str, Manifest], objects: dict[tuple[str, str], Manifest],
              others: Sequence[Manifest]) -> Manifest:  # fmt: skip
        """Return the pod as it is stored. Raises Refused.

        `objects` are the image streams, quotas and limit ranges of the cluster by (resource, project/name), and
        `others` the pods of the namespace that have not ended: what a quota has used, whatever its status says.
        """
        pod = copy.deepcopy(pod)
        name = pod["metadata"]["name"]
        if pod["metadata"].setdefault("namespace", self.namespace) != self.namespace:
            raise Refused(400, "the namespace of the provided object does not match the namespace sent on the request")
        check_fields(pod, "V1Pod", [models])
        pod["spec"] = admitted(pod["spec"], accounts)
        limits = [limit for (resource, key), limit_range in objects.items()
                  if resource == "limitranges" and key.startswith(f"{self.namespace}/")
                  for limit in limit_range["spec"]["limits"]]  # fmt: skip
        _set_defaults(pod["spec"], limits)
        if self.uids and (problems := list(self._constrain(pod["spec"], self.uids))):
            raise Refused(403, f'pods "{name}" is forbidden: unable to validate against any security context '
                               f'constraint: [provider restricted-v2: {", ".join(problems)}]')  # fmt: skip
        if self.uids:
            self._resolve_images(pod["spec"], objects)
        if problems := list(_invalid(pod["spec"])):
            raise Refused(422, f'Pod "{name}" is invalid: {"; ".join(problems)}')
        if problems := list(_outside(pod, limits)):
            raise Refused(403, f'pods "{name}" is forbidden: [{", ".join(problems)}]')
        if broken_rules := violations(pod, self.level):
            raise Refused(403, f'pods "{name}" is forbidden: violates PodSecurity "{self.level}:latest": '
                               f'{", ".join(broken_rules)}')  # fmt: skip
        for (resource, key), quota in objects.items():
            namespace, _, quota_name = key.partition("/")
            if (resource, namespace) == ("resourcequotas", self.namespace) and (
                problem := _over_quota(pod, quota["status"].get("hard") or {}, others)
            ):
                raise Refused(403, f'pods "{name}" is forbidden: {problem.format(quota=quota_name)}')
        return pod

    def _constrain(self, spec: Manifest, uids: range) -> Iterator[str]:
        """Set what restricted-v2 sets where the pod sets nothing, and yield what it does not allow."""
        pod = spec.setdefault("securityContext", {})
        yield from (f"{name} is not allowed to be used" for name in ("hostNetwork", "hostPID", "hostIPC")
                    if spec.get(name))  # fmt: skip
        if pod.setdefault("fsGroup", uids[0]) not in uids:
            yield f".spec.securityContext.fsGroup: Invalid value: {pod['fsGroup']} is not an allowed group"
        if pod.setdefault("seccompProfile", {"type": "RuntimeDefault"})["type"] != "RuntimeDefault":
            yield f"pod.spec.securityContext.seccompProfile: Forbidden: {pod['seccompProfile']}"
        for volume in spec.get("volumes") or []:
            yield from (f"spec.volumes: Invalid value: {kind} volumes are not allowed to be used"
                        for kind in set(volume) - {"name"} - VOLUME_TYPES)  # fmt: skip
        for container in containers_of(spec):
            context, where = container.setdefault("securityContext", {}), f"spec.containers[{container['name']}]"
            user = context.setdefault("runAsUser", pod.get("runAsUser", uids[0]))
            if user not in uids:
                yield (f"{where}.securityContext.runAsUser: Invalid value: {user}: must be in the ranges: "
                       f"[{uids[0]}, {uids[-1]}]")  # fmt: skip
            context.setdefault("runAsNonRoot", pod.get("runAsNonRoot", True))
            if context.get("privileged"):
                yield f"{where}.securityContext.privileged: Invalid value: true: Privileged containers are not allowed"
            if context.setdefault("allowPrivilegeEscalation", False):
                yield f"{where}.securityContext.allowPrivilegeEscalation: Invalid value: true: not allowed"
            capabilities = context.setdefault("capabilities", {})
            capabilities["drop"] = sorted({*(capabilities.get("drop") or []), "ALL"})
            if forbidden := set(capabilities.get("add") or []) - {"NET_BIND_SERVICE"}:
                yield f"{where}.capabilities.add: Invalid value: {min(forbidden)}: capability may not be added"
            if "seccompProfile" in context and context["seccompProfile"]["type"] != "RuntimeDefault":
                yield f"{where}.securityContext.seccompProfile: Forbidden: {context['seccompProfile']}"
            if any(port.get("hostPort") for port in container.get("ports") or []):
                yield f"{where}.ports: Invalid value: Host ports are not allowed to be used"

    def _resolve_images(self, spec: Manifest, objects: dict[tuple[str, str], Manifest]) -> None:
        """Point short names of image streams with a local look-up to the cluster's own registry."""
        for container in containers_of(spec):
            tag = objects.get(("imagestreamtags", f"{self.namespace}/{container['image']}"), {})
            if (tag.get("lookupPolicy") or {}).get("local"):
                container["image"] = f"{INTERNAL_REGISTRY}/{self.namespace}/{container['image']}"


def _invalid(spec: Manifest) -> Iterator[str]:
    """What makes a pod invalid, of the rules that a pipeline or a job can break."""
    volumes = spec.get("volumes") or []
    names = [volume["name"] for volume in volumes]
    for volume in volumes:
        if len(types := sorted(set(volume) - {"name"})) != 1:
            yield f"volumes[{volume['name']}]: must have one volume type, may not specify more than 1: {types}"
        if not DNS_LABEL.fullmatch(volume["name"]):
            yield f"volumes[{volume['name']}].name: Invalid value: a lowercase RFC 1123 label"
        if names.count(volume["name"]) > 1:
            yield f"volumes[{volume['name']}].name: Duplicate value"
    for container in containers_of(spec):
        where = f"containers[{container['name']}]"
        if not container.get("image"):
            yield f"{where}.image: Required value"
        mounts = container.get("volumeMounts") or []
        for mount in mounts:
            if mount["name"] not in names:
                yield f"{where}.volumeMounts: Not found: {mount['name']}"
            if [other["mountPath"] for other in mounts].count(mount["mountPath"]) > 1:
                yield f"{where}.volumeMounts.mountPath: Invalid value: {mount['mountPath']}: must be unique"
        limits = (container.get("resources") or {}).get("limits") or {}
        requests = (container.get("resources") or {}).get("requests") or {}
        for name in {*limits, *requests}:
            is_extended = "/" in name
            limit, request = (parse_quantity(each[name]) if name in each else None for each in (limits, requests))
            if limit is not None and request is not None and request > limit:
                yield f"{where}.resources.requests: Invalid value: {requests[name]}: must not exceed the {name} limit"
            if is_extended and (limit is None or (request is not None and request != limit)):
                yield f"{where}.resources.limits: Required value: {name}: limit must be set and equal the request"


def _set_defaults(spec: Manifest, limits: list[Manifest]) -> None:
    """Give containers what they lack: pkg/apis/core/v1/defaults.go, SetDefaults_Pod and SetDefaults_LimitRangeItem, and
    then the limit ranges: plugin/pkg/admission/limitranger/admission.go, mergeContainerResources."""
    for container in containers_of(spec):
        if own := (container.get("resources") or {}).get("limits"):
            container["resources"]["requests"] = {**own, **(container["resources"].get("requests") or {})}
    for limit in limits:
        default = {**limit.get("max", {}), **limit.get("default", {})}
        default_request = {**limit.get("min", {}), **default, **limit.get("defaultRequest", {})}
        for container in containers_of(spec) if limit["type"] == "Container" else ():
            resources = container.setdefault("resources", {})
            resources["limits"] = {**default, **(resources.get("limits") or {})}
            resources["requests"] = {**default_request, **(resources.get("requests") or {})}


def _outside(pod: Manifest, limits: list[Manifest]) -> Iterator[str]:
    """Why limit ranges do not admit a pod: limitranger/admission.go, PodValidateLimitFunc. An amount of 0 is none."""
    pods_of_one = [{"spec": {"containers": [container]}} for container in containers_of(pod["spec"])]
    sized = {"Container": pods_of_one, "Pod": [pod]}
    rules = [(limit["type"], rule, name, bound) for limit in limits for rule in SIZE_RULES
             for name, bound in limit.get(rule, {}).items()]  # fmt: skip
    for kind, rule, name, text in rules:
        bound = parse_quantity(text)
        for each in sized.get(kind, []):
            request, limit = _amount(each, "requests", name), _amount(each, "limits", name)
            is_broken = {
                "min": request < bound or 0 < limit < bound,
                "max": not limit or max(limit, request) > bound,
                "maxLimitRequestRatio": not limit or not request or limit > bound * request,
            }
            if is_broken[rule]:
                yield f"{SIZE_RULES[rule].format(name)} per {kind} is {text}, but request is {request}, limit {limit}"


def _amount(pod: Manifest, kind: str, name: str) -> Any:
    """What a pod asks for; its init containers run before the others."""

    def of(container: Manifest) -> Any:
        return parse_quantity(((container.get("resources") or {}).get(kind) or {}).get(name, "0"))

    spec = pod["spec"]
    return max([sum(map(of, spec["containers"])), *map(of, spec.get("initContainers") or [])])


def _counted(key: str) -> tuple[str, str]:
    """What a name in a quota counts, as ("requests" or "limits", resource); of extended resources there are only the
    requests. Names of other objects count nothing: pkg/quota/v1/evaluator/core/pods.go, podComputeUsageHelper."""
    kind, _, name = key.partition(".")
    if key in COMPUTE:
        return "requests", key
    is_counted = (kind in ("requests", "limits") and name in COMPUTE) or (kind == "requests" and "/" in name)
    return (kind, name) if is_counted else ("", "")


def _over_quota(pod: Manifest, hard: Manifest, others: Sequence[Manifest]) -> str:
    """Why a quota does not admit the pod, with `{quota}` for its name; empty if it does."""
    counted = {key: _counted(key) for key in hard}
    for key, (kind, name) in counted.items():
        missing = [container["name"] for container in containers_of(pod["spec"])
                   if name not in ((container.get("resources") or {}).get(kind) or {})]  # fmt: skip
        if name in COMPUTE and missing:
            return f"failed quota: {{quota}}: must specify {key} for: {','.join(missing)}"
    for key, (kind, name) in counted.items():
        amount, *taken = [int(key == "pods") if not kind else _amount(each, kind, name) for each in (pod, *others)]
        if amount and sum(taken) + amount > parse_quantity(hard[key]):
            return (f"exceeded quota: {{quota}}, requested: {key}={amount}, used: {key}={sum(taken)}, limited: "
                    f"{key}={hard[key]}")  # fmt: skip
    return ""
