"""The launcher on a cluster, over HTTP: what it does, and what it says when a cluster does what clusters do."""

import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from http_server import NAMESPACE
from kubernetes_server import Server
from launchers import in_background, make_job, numbered, run, start_job, wait_until

from components.stop_jobs import stop_jobs
from tailtune.errors import UserError
from tailtune.jobs import follow as launcher
from tailtune.jobs import kubernetes as api
from tailtune.jobs import pytorchjob
from tailtune.jobs.cleanup import cancel, collect_garbage
from tailtune.jobs.job import JobFailed, job_name, label_value
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.jobs.objects import Jobs


def test_all_ranks_lines_arrive_once_and_in_order(server: Server, shown: Callable[[], str]) -> None:
    run(make_job("lines"))
    err = shown()
    assert numbered(err, 0) == numbered(err, 1) == list(range(40))
    assert "job a-run-sft-" in err and "created, 2 nodes x 1 ranks" in err


def test_streams_that_break_in_mid_line_lose_and_repeat_nothing(server: Server, shown: Callable[[], str]) -> None:
    server.faults.drop_streams = [3, 9, 1, 20, 0, 15, 30] * 2
    run(make_job("lines"))
    err = shown()
    assert numbered(err, 0) == numbered(err, 1) == list(range(40))


@pytest.mark.parametrize("statuses", [[500, 503, 502], [429, 429], [0, 0]], ids=["5xx", "429", "reset"])
def test_an_api_in_trouble_is_waited_for(server: Server, statuses: list[int]) -> None:
    server.faults.statuses = list(statuses)  # at the first calls, creation among them
    timer = in_background(lambda: (time.sleep(2), server.faults.statuses.extend(statuses)))  # and later
    run(make_job("lines"))
    timer.join()
    assert server.requests.count(f"POST /apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs") >= 1


def test_an_expired_token_is_read_again(server: Server, shown: Callable[[], str]) -> None:
    def expire() -> None:
        time.sleep(1)
        server.token = "second-token"
        time.sleep(1)
        server.write_kubeconfig()

    thread = in_background(expire)
    run(make_job("lines"))
    thread.join()
    err = shown()
    assert numbered(err, 0) == list(range(40)) and "-token" not in err


def test_a_token_that_stays_refused_asks_for_a_login(server: Server) -> None:
    server.token = "another"
    started = time.monotonic()
    with pytest.raises(ValueError, match="refuses the token; log in again with oc login"):
        run(make_job("lines"), api_seconds=600)
    assert time.monotonic() - started < 20, "it is not waited for at the first call"


def test_a_pods_token_that_stays_refused_ends_the_waiting_soon(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shown: Callable[[], str]
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "as in a pod")
    monkeypatch.setattr(api, "SERVICE_ACCOUNT", tmp_path)
    for name, text in (("token", "the kubelet's"), ("namespace", NAMESPACE)):
        (tmp_path / name).write_text(text)
    login = api.config.load_kube_config
    monkeypatch.setattr(api.config, "load_incluster_config", lambda **kwargs: login(str(server.kubeconfig), **kwargs))
    server.token = "a newer one"
    timer = in_background(lambda: (time.sleep(1), server.write_kubeconfig()))
    run(make_job("lines", num_nodes=1))  # the kubelet has brought the newer one meanwhile
    timer.join()
    assert "401 Unauthorized" in shown()
    server.token = "another"
    monkeypatch.setattr(api, "TOKEN_SECONDS", 1)
    started = time.monotonic()
    with pytest.raises(ValueError, match="refuses the token of this step's service account, and there is no newer"):
        run(make_job("lines"), api_seconds=600)
    assert time.monotonic() - started < 20


def test_pods_that_wait_say_why_and_then_run(server: Server, shown: Callable[[], str]) -> None:
    server.faults.pending.set()
    timer = in_background(lambda: (time.sleep(1.5), server.faults.pending.clear()))
    run(make_job("lines"))
    timer.join()
    assert "-worker-0 waits (scheduling): 0/4 nodes are available: 4 Insufficient" in shown()


@pytest.mark.parametrize(
    ("fault", "changes", "message"),
    [
        (lambda s: s.faults.pending.set(), {"start_seconds": 1},
         r"\(scheduling\): did not start within 1 s: .*Insufficient"),
        (lambda s: setattr(s.faults, "image", True), {},
         r"\(image\): .*ImagePullBackOff.*check --image-registry"),
        (lambda s: s.claims.clear(), {"start_seconds": 1}, r'persistentvolumeclaim "training-data-pvc" not found'),
        (lambda s: None, {"module": "pod_long", "deadline_seconds": 6},
         r"took longer than 6 s and was deleted; raise"),
    ],
    ids=["no node", "no image", "no volume", "too long"],
)  # fmt: skip
def test_a_job_that_comes_to_nothing_is_deleted_and_explained(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Server], None],
    changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(launcher, "STUCK_SECONDS", 1)
    fault(server)
    with pytest.raises(JobFailed, match=message):
        run(replace(make_job("lines"), **changes))
    wait_until(lambda: not server.jobs)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("raises", r"\(code\) in pod \S+-(master|worker)-0, Error: rank 1 failed first, .*disk is on fire"),
        ("gpu", r"\(out of memory on the GPU\).*lower batch_size"),
        ("user", r"^the data are no data; give data$"),
    ],
)  # fmt: skip
def test_a_failed_job_is_a_failure_that_names_rank_class_and_remedy(server: Server, module: str, message: str) -> None:
    with pytest.raises(JobFailed, match=message):
        run(make_job(module))


def test_a_container_without_memory_is_explained(server: Server) -> None:
    server.faults.exit_codes = {"worker-0": (137, "OOMKilled")}
    with pytest.raises(
        JobFailed, match=r"\(out of memory on the host\) in pod .*worker-0, OOMKilled: .*resources.memory"
    ):
        run(make_job("long"))


def test_a_pod_that_is_killed_starts_again_and_the_others_with_it(server: Server) -> None:
    server.faults.kill_pods = ["worker-0"]
    run(make_job("once", max_restarts=2))
    assert server.faults.kill_pods == []


def test_a_job_that_somebody_deletes_is_a_failure(server: Server) -> None:
    job = make_job("long")
    timer = in_background(lambda: (time.sleep(3), server.delete_job(job.name)))
    with pytest.raises(JobFailed, match="was deleted while it ran; run again to resume"):
        run(job)
    timer.join()


def test_a_cancelled_step_leaves_no_job_behind(server: Server) -> None:
    process = start_job(server)
    pods = [p.process for pods in server.pods.values() for p in pods]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "was stopped by signal 15 and deleted" in err
    wait_until(lambda: not server.jobs and all(p is None or p.poll() is not None for p in pods))


@pytest.mark.parametrize("trouble", [503, 0], ids=["5xx", "reset"])
def test_a_step_that_is_cancelled_while_the_api_fails_does_not_wait_for_it(server: Server, trouble: int) -> None:
    process = start_job(server)
    before = len(server.requests)
    server.faults.statuses = [trouble] * 1000
    wait_until(lambda: len(server.requests) > before + 5)  # the waits between the tries grow to 30 s
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.requests[-1].startswith("DELETE"), seconds=5)
    server.faults.statuses = []
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "was stopped by signal 15 and deleted" in err
    wait_until(lambda: not server.jobs)


def test_a_step_that_cannot_delete_its_job_says_so(server: Server) -> None:
    process = start_job(server)
    server.faults.statuses = [503] * 1000
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)  # as long as a pod has
    assert process.returncode == 1 and "was stopped by signal 15 but could not be deleted: the cluster's API" in err


def test_a_job_whose_creation_was_answered_by_nothing_is_followed(server: Server, shown: Callable[[], str]) -> None:
    server.faults.lost_answers = 1
    run(make_job("lines"))
    err = shown()
    assert numbered(err, 0) == list(range(40)) and "is there already and" in err
    assert sum(r.startswith("POST") and r.endswith("pytorchjobs") for r in server.requests) == 2


def test_lines_that_cannot_be_shown_are_no_secret_and_no_end(
    server: Server, shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show = launcher.Follower._show

    def fail(self: launcher.Follower, prefix: str, line: str) -> None:
        if line.endswith(("line 7", "line 9")):
            raise ValueError("no such colour")
        show(self, prefix, line)

    monkeypatch.setattr(launcher.Follower, "_show", fail)
    run(make_job("lines", num_nodes=1))
    err = shown()
    assert err.count("lines may be missing (ValueError: no such colour)") == 1
    assert numbered(err, 0) == [i for i in range(40) if i not in (7, 9)]


def test_a_retried_step_follows_the_job_that_is_there(server: Server, shown: Callable[[], str]) -> None:
    first = start_job(server)
    first.kill()  # no time to delete anything
    first.wait()
    assert list(server.jobs) == [make_job("long").name]
    timer = in_background(
        lambda: (time.sleep(2), [p.signal(signal.SIGKILL) for ps in server.pods.values() for p in ps])
    )
    with pytest.raises(JobFailed):  # the pods are killed: the job that is followed fails, and no other was made
        run(make_job("long"))
    timer.join()
    assert "is there already and" in shown()
    assert sum(r.startswith("POST") and r.endswith("pytorchjobs") for r in server.requests) == 1


def test_a_failed_job_of_an_earlier_attempt_is_replaced(server: Server, shown: Callable[[], str]) -> None:
    with pytest.raises(JobFailed):
        run(make_job("raises"))
    run(replace(make_job("lines"), name=make_job("raises").name))
    assert "of an earlier attempt (failed) is replaced" in shown()


def test_a_job_that_nobody_waits_for_is_found_and_deleted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "set, as in a pod; its token is not there, so the login is used")
    there = KubernetesClient()
    jobs = Jobs(there, pytorchjob)
    for run_name, pod in (("one", "step-one"), ("two", "step-two")):
        monkeypatch.setenv("HOSTNAME", pod)
        job = make_job("long", name=job_name(run_name, "sft"))
        jobs.create(replace(job, labels={"tailtune.io/run": run_name, "app.kubernetes.io/managed-by": "tailtune"}))
    server.step_pods = {"step-one": "Running", "step-two": "Running"}
    assert collect_garbage(there) == []
    server.step_pods["step-one"] = "Failed"
    del server.step_pods["step-two"]
    orphans = [job_name("one", "sft"), job_name("two", "sft")]
    assert sorted(collect_garbage(there, dry_run=True)) == sorted(orphans) == sorted(server.jobs)
    assert cancel(there, run="two") == [job_name("two", "sft")]
    assert collect_garbage(there) == [job_name("one", "sft")]
    wait_until(lambda: not server.jobs)


def test_the_last_step_of_a_run_deletes_its_own_jobs_alone(server: Server) -> None:
    there = KubernetesClient()
    for name, pipeline_run in (("a", "one"), ("b", "another of the same name")):
        labels = {"tailtune.io/run": "mine", "tailtune.io/pipeline-run": label_value(pipeline_run)}
        job = make_job("long", name=f"job-{name}", labels={**labels, "app.kubernetes.io/managed-by": "tailtune"})
        Jobs(there, pytorchjob).create(job)
    stop_jobs.python_func(job_id="one")
    wait_until(lambda: list(server.jobs) == ["job-b"])
    stop_jobs.python_func(job_id="one")
    assert list(server.jobs) == ["job-b"]


def test_an_account_that_may_not_look_does_not_see_nothing(server: Server) -> None:
    server.allowed = [one for one in server.allowed if one[1] != "kubeflow.org"]
    with pytest.raises(UserError, match="this account may not see training jobs in lyric-professor: 403"):
        cancel(KubernetesClient(), run="mine")


@pytest.mark.parametrize(("one", "other"), [("a" * 70, "a" * 71), ("a", "a_"), ("a b", "a-b"), ("A/B", "A-B")])
def test_names_that_differ_have_labels_that_differ(one: str, other: str) -> None:
    values = label_value(one), label_value(other)
    assert values[0] != values[1]
    assert all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", value) for value in values)


def test_the_server_is_strict(server: Server) -> None:
    url = f"{server.url}/apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs"
    headers = {"Authorization": f"Bearer {server.token}"}
    body = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "a"},
            "spec": {"pytorchReplicaSpecs": {}, "runPolicy": {"cleanPods": "All"}}}  # fmt: skip
    answer = requests.post(url, json=body, headers=headers, timeout=5)
    assert answer.status_code == 400 and 'unknown field "spec.runPolicy.cleanPods"' in answer.json()["message"]
    assert (
        requests.get(f"{server.url}/api/v1/namespaces/{NAMESPACE}/events", headers=headers, timeout=5).status_code
        == 403
    )
    assert requests.get(url, timeout=5).status_code == 401


@pytest.mark.parametrize("run_name", ["demo", "A_very.Long name " * 8, "7-of-9", "ünïcode", "-"])
def test_names_are_valid_and_their_own(run_name: str) -> None:
    name = job_name(run_name, "sft")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(f"{name}-worker-12") <= 63
    assert name == job_name(run_name, "sft") != job_name(f"{run_name}x", "sft")
    assert re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", label_value(run_name))
