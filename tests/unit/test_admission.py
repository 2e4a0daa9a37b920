"""The admission of pods of the tests' cluster: what a real one refuses, and what it sets."""

from typing import Any

import pytest
from admission import Admission
from http_server import Refused

UIDS = range(1000100000, 1000110000)
PLAIN: dict[str, Any] = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "main", "image": "i"}]}}
QUOTA = {("resourcequotas", "other-name/q"): {"status": {"hard": {"limits.cpu": "3"}}}}


def pod(container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    containers = [{"name": "main", "image": "i", **(container or {})}]
    return {"metadata": {"name": "p"}, "spec": {**spec, "containers": containers}}


def admit(
    manifest: dict[str, Any], *, level: str = "restricted", uids: range | None = UIDS, objects: Any = None,
    others: tuple[Any, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    return Admission("other-name", level, uids).admit(manifest, {"default": {}}, objects or {}, others)


def test_restricted_v2_gives_a_pod_what_the_restricted_standard_wants() -> None:
    with pytest.raises(Refused, match=r'violates PodSecurity "restricted:latest": .*runAsNonRoot'):
        admit(PLAIN, uids=None)
    admit(PLAIN, uids=None, level="baseline")
    spec = admit(PLAIN)["spec"]
    assert spec["securityContext"] == {"fsGroup": UIDS[0], "seccompProfile": {"type": "RuntimeDefault"}}
    assert spec["containers"][0]["securityContext"] == {
        "runAsUser": UIDS[0],
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "securityContext" not in PLAIN["spec"], "the pod that was sent is not changed"


CLAIM, SECRET = {"persistentVolumeClaim": {"claimName": "c"}}, {"secret": {"secretName": "s"}}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (pod({"securityContext": {"runAsUser": 1001}}), "runAsUser: Invalid value: 1001: must be in the ranges"),
        (pod({"securityContext": {"privileged": True}}), "Privileged containers are not allowed"),
        (pod({"securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}), "SYS_PTRACE"),
        (pod(volumes=[{"name": "v", "hostPath": {"path": "/"}}]), "hostPath volumes are not allowed"),
        (pod(securityContext={"fsGroup": 0}), "fsGroup: Invalid value: 0"),
        (pod(securityContext={"seccompProfile": {"type": "Unconfined"}}), "seccompProfile: Forbidden"),
        (pod(volumes=[{"name": "v", **CLAIM, **SECRET}]), "may not specify more than 1"),
        (pod(volumes=[{"name": "v", **CLAIM}, {"name": "v", **SECRET}]), "Duplicate value"),
        (pod(volumes=[{"name": "a.b", **CLAIM}]), "a lowercase RFC 1123 label"),
        (pod({"volumeMounts": [{"name": "v", "mountPath": "/a"}]}), "volumeMounts: Not found: v"),
        (pod({"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}), "must not exceed the cpu limit"),
        (pod({"resources": {"requests": {"nvidia.com/gpu": "1"}}}), "limit must be set and equal the request"),
        (pod({"imagePolicy": "Always"}), "unknown field"),
        (pod(serviceAccountName="nobody"), 'serviceaccount "nobody" not found'),
        ({"metadata": {"name": "p", "namespace": "lyric-professor"}, "spec": PLAIN["spec"]}, "does not match"),
    ],
)
def test_a_pod_is_refused(manifest: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        admit(manifest)


def test_a_quota_counts_the_pods_that_have_not_ended() -> None:
    def asking(cpu: str) -> dict[str, Any]:
        return pod({"resources": {"limits": {"cpu": cpu}}})

    admit(asking("2"), objects=QUOTA, others=(asking("1"),))
    with pytest.raises(Refused, match=r"must specify limits\.cpu for: main"):
        admit(PLAIN, objects=QUOTA)
    with pytest.raises(Refused, match=r"exceeded quota: q, requested: limits\.cpu=2, used: limits\.cpu=2, "):
        admit(asking("2"), objects=QUOTA, others=(asking("1"), asking("1")))


@pytest.mark.parametrize(
    ("name", "resource"),
    [("requests.nvidia.com/gpu", "nvidia.com/gpu"), ("requests.cpu", "cpu"), ("cpu", "cpu"), ("memory", "memory")],
)
def test_a_quota_on_requests_counts_limits_too(name: str, resource: str) -> None:
    asking = pod({"resources": {"limits": {resource: "2"}}})
    objects = {("resourcequotas", "other-name/q"): {"status": {"hard": {name: "3"}}}}
    stored = admit(asking, objects=objects)
    with pytest.raises(Refused, match=f"exceeded quota: q, requested: {name}=2, used: {name}=2, limited: {name}=3"):
        admit(asking, objects=objects, others=(stored,))


def test_a_pod_need_not_name_the_extended_resources_of_a_quota() -> None:
    admit(PLAIN, objects={("resourcequotas", "other-name/q"): {"status": {"hard": {"requests.nvidia.com/gpu": "0"}}}})


def limit_range(**limit: Any) -> dict[Any, Any]:
    return {("limitranges", "other-name/l"): {"spec": {"limits": [{"type": "Container", **limit}]}}}


def test_a_limit_range_gives_containers_what_a_quota_counts() -> None:
    objects = QUOTA | limit_range(default={"cpu": "1"}, defaultRequest={"cpu": "100m"})
    resources = admit(PLAIN, objects=objects)["spec"]["containers"][0]["resources"]
    assert resources == {"limits": {"cpu": "1"}, "requests": {"cpu": "100m"}}
    own = admit(pod({"resources": {"limits": {"cpu": "2"}}}), objects=objects)
    assert own["spec"]["containers"][0]["resources"] == {"limits": {"cpu": "2"}, "requests": {"cpu": "2"}}


@pytest.mark.parametrize(
    ("limit", "limits", "requests"),
    [
        ({"max": {"cpu": "2"}}, "2", "2"),
        ({"default": {"cpu": "1"}, "max": {"cpu": "2"}}, "1", "1"),
        ({"defaultRequest": {"cpu": "1"}, "max": {"cpu": "2"}}, "2", "1"),
    ],
)
def test_a_limit_range_without_defaults_makes_them_of_its_bounds(
    limit: dict[str, Any], limits: str, requests: str
) -> None:
    resources = admit(PLAIN, objects=limit_range(**limit))["spec"]["containers"][0]["resources"]
    assert resources == {"limits": {"cpu": limits}, "requests": {"cpu": requests}}


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"min": {"cpu": "600m"}}, "minimum cpu usage per Container is 600m, but request is 0.500, limit 2"),
        ({"max": {"cpu": "1"}}, "maximum cpu usage per Container is 1, but request is 0.500, limit 2"),
        ({"max": {"cpu": "1"}, "type": "Pod"}, "maximum cpu usage per Pod is 1"),
        ({"maxLimitRequestRatio": {"cpu": "3"}}, "cpu max limit to request ratio per Container is 3"),
        ({"max": {"memory": "1Gi"}, "type": "Pod"}, "maximum memory usage per Pod is 1Gi, but request is 0"),
    ],
    ids=str,
)
def test_a_container_outside_of_a_limit_range_is_refused(limit: dict[str, Any], message: str) -> None:
    container = {"resources": {"limits": {"cpu": "2"}, "requests": {"cpu": "500m"}}}
    with pytest.raises(Refused, match=message):
        admit(pod(container), objects=limit_range(**limit))
    bounds = {"min": {"cpu": "500m"}, "max": {"cpu": "2"}, "maxLimitRequestRatio": {"cpu": "4"}}
    admit(pod(container), objects=limit_range(**bounds))


def test_a_short_image_name_is_that_of_an_image_stream_with_a_local_look_up() -> None:
    stream = {("imagestreamtags", "other-name/i"): {"lookupPolicy": {"local": True}}}
    image = admit(PLAIN, objects=stream)["spec"]["containers"][0]["image"]
    assert image == "image-registry.openshift-image-registry.svc:5000/other-name/i"
    stream["imagestreamtags", "other-name/i"]["lookupPolicy"]["local"] = False
    assert admit(PLAIN, objects=stream)["spec"]["containers"][0]["image"] == "i"
