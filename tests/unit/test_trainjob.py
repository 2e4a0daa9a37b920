"""TrainJob's manifest against the models that the project of Kubeflow Trainer ships, and what its status means."""

from typing import Any

import pytest
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from test_cluster import make_job

from tailtune.jobs import trainjob


def without_empty(value: Any) -> Any:
    """As a client sends it: without fields that are None."""
    if isinstance(value, dict):
        return {key: without_empty(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_empty(one) for one in value]
    return value


def test_the_manifest_has_no_field_that_the_models_do_not_know() -> None:
    job = make_job("lines")
    manifest = trainjob.build(job, {"a": "b"}, ("runtimePatches", "activeDeadlineSeconds"))
    again = without_empty(TrainerV1alpha1TrainJob.from_dict(manifest).to_dict())
    assert again == without_empty(manifest)
    assert manifest["spec"]["runtimeRef"]["name"] == "torch-distributed-cpu"
    assert manifest["spec"]["trainer"]["numNodes"] == 2 and manifest["spec"]["trainer"]["numProcPerNode"] == 1


def test_an_older_cluster_gets_the_fields_that_it_knows() -> None:
    spec = trainjob.build(make_job("lines"), {}, ("podTemplateOverrides",))["spec"]
    (override,) = spec["podTemplateOverrides"]
    assert "runtimePatches" not in spec and "activeDeadlineSeconds" not in spec
    assert override["targetJobs"] == [{"name": "node"}]
    assert override["metadata"]["labels"] == {"tailtune.io/run": "a-run"}
    assert set(override["spec"]) == {"nodeSelector", "tolerations", "volumes", "containers"}
    assert set(override["spec"]["containers"][0]) == {"name", "volumeMounts"}
    with pytest.raises(ValueError, match="neither runtimePatches nor podTemplateOverrides"):
        trainjob.build(make_job("lines"), {}, ("suspend",))


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, "waiting"),
        ({"conditions": [{"type": "Suspended", "status": "True", "message": "m"}]}, "waiting"),
        ({"jobsStatus": [{"name": "node", "active": 2}]}, "running"),
        ({"conditions": [{"type": "Suspended", "status": "False"}], "jobsStatus": [{"active": 1}]}, "running"),
        ({"conditions": [{"type": "Complete", "status": "True", "message": "m"}]}, "succeeded"),
        ({"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}, "failed"),
    ],
)
def test_what_its_status_means(status: dict[str, Any], expected: str) -> None:
    assert trainjob.state({"status": status})[0] == expected
