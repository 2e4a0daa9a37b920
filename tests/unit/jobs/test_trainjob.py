"""TrainJob: its manifest, checked against the models that Kubeflow Trainer ships, and the launcher with it."""

import copy
import json
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1ClusterTrainingRuntime, TrainerV1alpha1TrainJob
from kubernetes_server import DEPLOY, Pod, Server
from launchers import in_background, line_numbers, make_job, run, start_job, wait_until
from operators import Trainer, first_lost

from tailtune.jobs import progress, trainjob
from tailtune.jobs.job import Job, JobFailed
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.jobs.objects import choose_kind


def without_empty(value: Any) -> Any:
    """The value as a client sends it: without fields that are None."""
    if isinstance(value, dict):
        return {key: without_empty(field) for key, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_empty(item) for item in value]
    return value


def api_of(server: Trainer) -> trainjob.Api:
    """What tailtune reads from the server's schema."""
    return trainjob.read_api(server.schemas()["org.kubeflow.trainer.v1alpha1.TrainJob"])


def test_the_manifest_has_only_fields_of_the_models() -> None:
    job = make_job("lines", shutdown_seconds=300)
    manifest = trainjob.build(job, {"a": "b"}, api_of(Trainer()))
    parsed = without_empty(TrainerV1alpha1TrainJob.from_dict(manifest).to_dict())
    assert parsed == without_empty(manifest)
    assert manifest["spec"]["trainer"]["numNodes"] == 2 and manifest["spec"]["trainer"]["numProcPerNode"] == 1
    assert "--shutdown-seconds=300" in manifest["spec"]["trainer"]["command"]
    (patch,) = manifest["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 330
    assert set(pod["containers"][0]) == {"name", "securityContext", "volumeMounts"}


def test_an_older_cluster_gets_the_fields_that_its_version_has() -> None:
    older = Trainer()
    older.install_version_2_1()
    spec = trainjob.build(make_job("lines", shutdown_seconds=300), {}, api_of(older))["spec"]
    (override,) = spec["podTemplateOverrides"]
    assert "runtimePatches" not in spec and "activeDeadlineSeconds" not in spec
    assert override["targetJobs"] == [{"name": "node"}]
    assert override["metadata"]["labels"] == {"tailtune.io/run": "a-run"}
    assert set(override["spec"]) == {"nodeSelector", "tolerations", "volumes", "containers"}
    assert set(override["spec"]["containers"][0]) == {"name", "volumeMounts"}
    assert "--shutdown-seconds=25" in spec["trainer"]["command"], "the pods have 30 s"
    older.fields.remove("podTemplateOverrides")
    with pytest.raises(ValueError, match="neither runtimePatches nor podTemplateOverrides"):
        trainjob.build(make_job("lines"), {}, api_of(older))


def test_a_version_in_between_has_patches_without_a_grace_period() -> None:
    """red-hat-data-services/trainer, pkg/apis/trainer/v1alpha1/trainjob_types.go, has had such a version."""
    between = Trainer()
    between.pod_fields.remove("terminationGracePeriodSeconds")
    between.fields |= {"podTemplateOverrides"}
    manifest = trainjob.build(make_job("lines", shutdown_seconds=300), {}, api_of(between))
    between.check(manifest)
    assert "podTemplateOverrides" not in manifest["spec"]
    assert "--shutdown-seconds=25" in manifest["spec"]["trainer"]["command"]


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
def test_the_state_is_read_from_the_status(status: dict[str, Any], expected: str) -> None:
    assert trainjob.state({"status": status})[0] == expected


@pytest.fixture
def trainer(server: Server) -> Server:
    """A cluster that has only TrainJob, with the roles of deploy/."""
    server.install_trainer(only=True)
    return server


@pytest.mark.torchrun
def test_a_job_runs_on_two_nodes_after_its_admission(trainer: Server, shown: Callable[[], str]) -> None:
    trainer.faults.suspended.set()
    states = []

    def admit() -> None:
        wait_until(lambda: any(job["status"]["conditions"] for job in trainer.jobs.values()))
        states.append(trainjob.state(next(iter(trainer.jobs.values()))))
        time.sleep(1)  # meanwhile the launcher polls
        trainer.faults.suspended.clear()
        wait_until(lambda: trainer.pods)
        states.append([pod.manifest["metadata"]["labels"] for pods in trainer.pods.values() for pod in pods])

    timer = in_background(admit)
    run(make_job("lines"))
    timer.join()
    err = shown()
    assert "the job is a TrainJob (chosen automatically; PyTorchJob does not exist here)" in err
    assert line_numbers(err, 0) == line_numbers(err, 1) == list(range(40)) and "train: pods running: 2 of 2" in err
    assert err.count(f"train: job {next(iter(trainer.jobs))} is held back: waiting for admission by the queue\n") == 1
    assert states[0] == ("waiting", "waiting for admission by the queue")
    assert [labels["batch.kubernetes.io/job-completion-index"] for labels in states[1]] == ["0", "1"]
    assert all(labels["tailtune.io/run"] == "a-run" for labels in states[1])
    (job,) = trainer.jobs.values()
    assert trainjob.state(job)[0] == "succeeded" and "runtimePatches" in job["spec"]
    TrainerV1alpha1TrainJob.from_dict(job)


def test_a_failed_job_is_explained_after_its_pods_were_deleted(trainer: Server) -> None:
    trainer.trainer.backoff_limit = 1
    trainer.faults.exit_codes = {"node-0-1": (137, "Error")}
    with pytest.raises(JobFailed, match=r"\(killed from outside\) in pod \S+-node-0-1-\w+, Error: exit status 137"):
        run(make_job("long", max_restarts=3))
    assert not trainer.pods and trainjob.state(next(iter(trainer.jobs.values())))[0] == "failed"


def delete_pods(server: Server, job: Job, count: int, grace_seconds: float, then_exit_with: int) -> None:
    """Delete the pod of a job of one node, and those that replace it; let the last one end."""
    deleted: list[Pod] = []
    for _ in range(count):
        wait_until(lambda: (pods := server.pods.get(job.name)) and pods[0].process and pods[0] not in deleted)
        deleted.append(server.pods[job.name][0])
        deleted[-1].evict(grace_seconds)
    new = server.folder / "new"
    new.write_text(str(then_exit_with))
    new.rename(server.folder / "end")


@pytest.mark.parametrize(
    ("num_deleted", "grace_seconds", "exit_code", "ended"),
    [
        (2, 5, 0, ""),
        (3, 5, 0, r"\(killed from outside\) in pod \S+, Error: exit status 143"),
        # whichever the launcher sees first: the pod's end, or that it is gone
        (3, 0, 0, r"\((unknown\): jobset failed due to one or more job failures|killed from outside\))"),
        (1, 5, 3, r"\(code\) in pod \S+, Error: .*status 3"),
    ],
)
def test_a_deleted_pod_is_made_again_and_counts_as_a_failed_one(
    trainer: Server, num_deleted: int, grace_seconds: float, exit_code: int, ended: str
) -> None:
    trainer.trainer.backoff_limit = 2
    job = make_job("until", num_nodes=1, environment={"FILE": str(trainer.folder / "end")})
    thread = in_background(lambda: delete_pods(trainer, job, num_deleted, grace_seconds, exit_code))
    with pytest.raises(JobFailed, match=ended) if ended else nullcontext():
        run(job)
    thread.join()


def test_a_cancelled_step_leaves_no_trainjob_behind(trainer: Server) -> None:
    process = start_job(trainer, kind="trainjob")
    pods = [p.process for pods in trainer.pods.values() for p in pods]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "was stopped by signal 15 and deleted" in err
    wait_until(lambda: not trainer.jobs and all(p is None or p.poll() is not None for p in pods))


def job_with_progress(folder: Path, **changes: Any) -> Job:
    path = folder / "progress.json"
    return make_job("steps", progress_path=path, environment={"PROGRESS": str(path)}, **changes)


def test_the_dashboard_shows_the_progress(
    trainer: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: Callable[[], str]
) -> None:
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.5)
    seen: set[int] = set()

    def watch() -> None:
        while not seen or max(seen) < 100:
            for job in list(trainer.jobs.values()):
                text = job["metadata"]["annotations"].get("trainer.opendatahub.io/trainerStatus", "{}")
                seen.add(json.loads(text).get("progressPercentage", 0))
            time.sleep(0.05)

    timer = in_background(watch)
    run(job_with_progress(tmp_path))
    timer.join(10)
    assert 100 in seen and len(seen) > 2, "not only at the end"
    (job,) = trainer.jobs.values()
    status = json.loads(job["metadata"]["annotations"]["trainer.opendatahub.io/trainerStatus"])
    assert (status["currentStep"], status["totalSteps"], status["estimatedRemainingTimeSummary"]) == (
        30,
        30,
        "complete",
    )
    assert status["trainMetrics"]["tokens_per_second"] == 3000 and status["trainMetrics"]["loss"] == 0.1
    assert "shows no progress" not in shown()


def test_a_job_succeeds_without_permission_to_report_progress(
    trainer: Server, tmp_path: Path, shown: Callable[[], str]
) -> None:
    trainer.allowed.remove(("patch", "trainer.kubeflow.org", "trainjobs"))
    run(job_with_progress(tmp_path, num_nodes=1))
    assert shown().count("the dashboard shows no progress (403") == 1


def test_what_an_older_version_cannot_do_is_said_once(trainer: Server, shown: Callable[[], str]) -> None:
    trainer.trainer.install_version_2_1()
    jobs, _ = choose_kind(KubernetesClient(), "auto")
    assert jobs.api and jobs.api.spec == trainer.trainer.fields and jobs.api.pod == trainer.trainer.pod_fields
    run(make_job("lines", num_nodes=1, shutdown_seconds=300))
    (job,) = trainer.jobs.values()
    assert "podTemplateOverrides" in job["spec"] and "activeDeadlineSeconds" not in job["spec"]
    err = shown()
    assert line_numbers(err, 0) == list(range(40))
    assert err.count("train: this cluster's TrainJob gives pods 30 s to stop, so a checkpoint that takes longer than "
                     "25 s is not saved when they are stopped") == 1  # fmt: skip


@pytest.mark.parametrize("version", ["2.1", "2.3"])
def test_the_deadline_counts_from_the_jobs_creation(trainer: Server, shown: Callable[[], str], version: str) -> None:
    """Version 2.1 has no `activeDeadlineSeconds`: only the launcher ends the job, in whichever attempt of its step."""
    if version == "2.1":
        trainer.trainer.install_version_2_1()
    job = make_job("long", num_nodes=1, deadline_seconds=3600)
    jobs, _ = choose_kind(KubernetesClient(), "auto")
    jobs.create(job)
    trainer.jobs[job.name]["metadata"]["creationTimestamp"] = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
    with pytest.raises(JobFailed, match="took longer than 3600 s and was deleted; raise the job's resources"):
        run(job)
    assert "already exists and is" in shown()
    wait_until(lambda: not trainer.jobs)


def has_token(pod: Pod) -> bool:
    return any("projected" in volume for volume in pod.manifest["spec"]["volumes"])


@pytest.mark.parametrize("version", ["2.1", "2.3"])
def test_pods_have_no_token_of_a_service_account(trainer: Server, shown: Callable[[], str], version: str) -> None:
    if version == "2.1":
        trainer.trainer.install_version_2_1()
    account = yaml.safe_load((DEPLOY / "base" / "service-account.yaml").read_text())
    trainer.objects["serviceaccounts", "lyric-professor/tailtune-training"] = account
    run(make_job("lines"))
    pods = [pod for pods in trainer.pods.values() for pod in pods]
    assert {pod.manifest["spec"]["serviceAccountName"] for pod in pods} == {"tailtune-training"}
    assert not any(map(has_token, pods)) and "service account" not in shown()


@pytest.mark.parametrize("may_read", [True, False])
def test_a_missing_service_account_is_said_and_not_used(
    trainer: Server, shown: Callable[[], str], may_read: bool
) -> None:
    if not may_read:
        trainer.allowed.remove(("get", "", "serviceaccounts:tailtune-training"))
    run(make_job("lines", num_nodes=1))
    assert all(has_token(pod) for pods in trainer.pods.values() for pod in pods), "what the line says"
    said = "mount the token of the project's default service account: the account tailtune-training of deploy/"
    assert shown().count(said) == 1


@pytest.mark.parametrize(
    ("runtimes", "may_read", "expected"),
    [
        ({"torch-distributed", "torch-distributed-cpu"}, True, "torch-distributed"),
        ({"torch-distributed"}, False, "torch-distributed"),
        ({"torch-distributed-cpu"}, True, "torch-distributed-cpu"),
    ],
)
def test_a_runtime_that_exists_is_used(trainer: Server, runtimes: set[str], may_read: bool, expected: str) -> None:
    """OpenShift AI has `torch-distributed-cpu` only since 3.4: red-hat-data-services/trainer, manifests/rhoai."""
    trainer.trainer.runtimes = runtimes
    if not may_read:
        trainer.allowed.remove(("get", "trainer.kubeflow.org", "clustertrainingruntimes"))
    run(make_job("lines", num_nodes=1))
    (job,) = trainer.jobs.values()
    assert job["spec"]["runtimeRef"]["name"] == expected


def test_the_error_names_what_is_missing_for_a_trainjob(trainer: Server) -> None:
    trainer.trainer.runtimes.clear()
    with pytest.raises(JobFailed, match=r'was refused: 403 .*ClusterTrainingRuntime.* "torch-distributed" not found'):
        run(make_job("lines"))
    trainer.allowed = [rule for rule in trainer.allowed if rule[1] != "trainer.kubeflow.org"]
    with pytest.raises(
        ValueError, match="PyTorchJob does not exist here; this account is not allowed to create TrainJob"
    ):
        run(make_job("lines"))


def test_trainjob_is_chosen_only_if_requested_or_if_it_is_the_only_kind(server: Server) -> None:
    client = KubernetesClient()
    with pytest.raises(ValueError, match="TrainJob does not exist here"):
        choose_kind(client, "trainjob")
    server.install_trainer()
    assert choose_kind(client, "auto")[1] == "PyTorchJob (chosen automatically)"
    assert choose_kind(client, "trainjob")[1] == "TrainJob (set by the recipe)"


def test_the_test_server_is_strict_about_trainjobs(trainer: Server) -> None:
    root = f"{trainer.url}/apis/trainer.kubeflow.org/v1alpha1"
    headers = {"Authorization": f"Bearer {trainer.token}"}
    url = f"{root}/namespaces/lyric-professor/trainjobs"
    body = trainjob.build(make_job("lines"), {}, api_of(trainer.trainer))
    trainer.trainer.install_version_2_1()
    older = trainjob.build(make_job("lines"), {}, api_of(trainer.trainer))
    for field in ("terminationGracePeriodSeconds", "automountServiceAccountToken"):
        (override,) = copy.deepcopy(older)["spec"]["podTemplateOverrides"]
        override["spec"][field] = 0
        changed = {**older, "spec": {**older["spec"], "podTemplateOverrides": [override]}}
        answer = requests.post(url, json=changed, headers=headers, timeout=5)
        assert answer.status_code == 400 and f'unknown field "spec.{field}"' in answer.json()["message"]
    trainer.trainer = trainer.operators[0] = Trainer()
    body["spec"]["trainer"]["replicas"] = 2
    answer = requests.post(url, json=body, headers=headers, timeout=5)
    assert answer.status_code == 400 and 'unknown field "spec.trainer.replicas"' in answer.json()["message"]
    body["spec"]["trainer"] = {"numNodes": "two"}
    assert requests.post(url, json=body, headers=headers, timeout=5).status_code == 422
    runtime = requests.get(f"{root}/clustertrainingruntimes/torch-distributed", headers=headers, timeout=5).json()
    assert not first_lost(runtime, TrainerV1alpha1ClusterTrainingRuntime.from_dict(runtime).to_dict())
    assert requests.get(f"{root}/clustertrainingruntimes/none", headers=headers, timeout=5).status_code == 404
    assert requests.delete(f"{root}/clustertrainingruntimes/none", headers=headers, timeout=5).status_code == 403
