"""Faults during the training, on a real cluster: the run succeeds all the same, and its training resumes or goes on."""

import pytest
from cluster_commands import (
    LONGER,
    RESUMED,
    RUN_SECONDS,
    FollowedLog,
    assert_succeeds,
    pipeline,
    submit,
    training_job,
    wait_for,
)
from kubernetes import client
from kubernetes.stream import stream

from pipeline_server import PipelineServer
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.jobs.step_pods import StepPod, find_step_pods

pytestmark = pytest.mark.cluster

KILL_A_RANK = """
import os, signal, sys
from pathlib import Path

def environment(process):
    try:
        return (process / "environ").read_bytes().split(bytes(1))
    except OSError:
        return []

mark = f"TORCHELASTIC_RUN_ID={sys.argv[1]}".encode()  # only torchrun's ranks have it
ranks = [int(process.name) for process in Path("/proc").glob("[0-9]*") if mark in environment(process)]
os.kill(min(ranks), signal.SIGKILL)
print("killed", min(ranks))
"""


def test_after_a_rank_is_killed_the_training_resumes(
    name: str, parameters: list[str], server: PipelineServer, cluster: KubernetesClient
) -> None:
    run = submit(f"{name}-rank", *parameters, *LONGER)
    with FollowedLog(run) as log:
        log.wait_until_a_checkpoint_is_complete()
        job = training_job(cluster, run)
        done = stream(
            cluster.core.connect_get_namespaced_pod_exec, job.first_pod()["metadata"]["name"], cluster.namespace,
            container=job.jobs.kind.CONTAINER, command=["python", "-c", KILL_A_RANK, job.name],
            stdin=False, stdout=True, stderr=True, tty=False, _request_timeout=60,
        )  # fmt: skip
        assert done.startswith("killed"), done
        log.wait_until_training_resumes()
    assert_succeeds(server, run)
    assert job.is_the_same()


def test_after_node_0_is_killed_the_training_resumes(
    name: str, parameters: list[str], server: PipelineServer, cluster: KubernetesClient
) -> None:
    run = submit(f"{name}-node", *parameters, *LONGER)
    with FollowedLog(run) as log:
        log.wait_until_a_checkpoint_is_complete()
        job = training_job(cluster, run)
        killed = job.first_pod()["metadata"]
        cluster.core.delete_namespaced_pod(killed["name"], cluster.namespace, grace_period_seconds=0)
        log.wait_until_training_resumes()
        assert job.first_pod()["metadata"]["uid"] != killed["uid"], "its controller has made another pod"
    assert_succeeds(server, run)
    assert job.is_the_same()


def test_after_the_step_is_drained_the_job_goes_on_and_a_retry_follows_it(
    name: str, parameters: list[str], cluster: KubernetesClient
) -> None:
    run = submit(f"{name}-drained", *parameters, *LONGER)
    with FollowedLog(run) as log:
        log.wait_until_a_checkpoint_is_complete()
        job, step = training_job(cluster, run), running_train_step(cluster, run)
        assert step, "the step waits for its job"
        wait_for(lambda: evict(cluster, step.name))
        wait_for(lambda: not cluster.pod_is_alive(step.name))
        assert job.is_training(), "only the step was drained"
    watched = pipeline("--watch", run, "--timeout", str(RUN_SECONDS))
    if watched.returncode:  # where Argo sees the step fail before its pod is gone, it starts it again by itself
        assert "train-stage failed" in watched.stderr
        assert pipeline("--retry", run, "--watch", "--timeout", str(RUN_SECONDS)).returncode == 0
    assert job.is_the_same() and RESUMED not in pipeline("--logs", run).stdout, "nothing was trained twice"


def running_train_step(cluster: KubernetesClient, run: str) -> StepPod | None:
    steps = find_step_pods(cluster, run)
    return next((step for step in steps if step.step == "train-stage" and step.phase == "Running"), None)


def evict(cluster: KubernetesClient, pod: str) -> bool:
    """Ask for the pod's eviction, as a drain does; return whether its disruption budget allows it now."""
    eviction = client.V1Eviction(metadata=client.V1ObjectMeta(name=pod, namespace=cluster.namespace))
    try:
        cluster.core.create_namespaced_pod_eviction(pod, cluster.namespace, eviction)
    except client.ApiException as error:
        if error.status != 429:
            raise
        return False
    return True
