"""The launcher on a cluster, over HTTP: what it does and reports when things go wrong as they do on clusters."""

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
from launchers import in_background, line_numbers, make_job, run, start_job, stop_step, wait_until

from components.stop_jobs import stop_jobs
from tailtune.errors import UserError
from tailtune.jobs import follow as launcher
from tailtune.jobs import kubernetes as api
from tailtune.jobs import objects, pytorchjob
from tailtune.jobs.cleanup import cancel, collect_garbage, delete_jobs_of_ended_runs, end_of_run
from tailtune.jobs.job import JobFailed, job_name, label_value
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.jobs.objects import Jobs

MANAGED = {"app.kubernetes.io/managed-by": "tailtune"}


@pytest.mark.torchrun
def test_the_lines_of_all_ranks_arrive_once_and_in_order(server: Server, shown: Callable[[], str]) -> None:
    run(make_job("lines"))
    err = shown()
    assert line_numbers(err, 0) == line_numbers(err, 1) == list(range(40))
    assert "job a-run-sft-" in err and "created; nodes: 2, ranks per node: 1" in err


def test_no_line_is_lost_or_repeated_when_streams_break_in_the_middle_of_a_line(
    server: Server, shown: Callable[[], str]
) -> None:
    server.faults.drop_streams = [3, 9, 1, 20, 0, 15, 30] * 2
    run(make_job("lines"))
    err = shown()
    assert line_numbers(err, 0) == line_numbers(err, 1) == list(range(40))


@pytest.mark.parametrize("statuses", [
    pytest.param([500, 503, 502], id="5xx"),
    pytest.param([429, 429], id="429", marks=pytest.mark.slow),
    pytest.param([0, 0], id="reset", marks=pytest.mark.slow),
])  # fmt: skip
def test_calls_are_retried_while_the_api_fails(server: Server, statuses: list[int], shown: Callable[[], str]) -> None:
    server.faults.statuses = list(statuses)  # for the first calls, including the creation
    timer = in_background(lambda: (time.sleep(2), server.faults.statuses.extend(statuses)))  # and again later
    run(make_job("lines"))
    timer.join()
    lines = [line for line in shown().splitlines() if "the cluster's API" in line]
    assert all("trying again for 30 s" in line for line in lines[::2])
    assert ["fails" in line for line in lines] == [True, False] * (len(lines) // 2), lines
    assert len(lines) // 2 <= 2
    if 0 not in statuses:  # urllib3 itself repeats a request whose connection was reset
        assert "the cluster's API answers again, after " in lines[1]
    assert server.requests.count(f"POST /apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs") >= 1


def test_an_expired_token_is_replaced_by_the_new_one(server: Server, shown: Callable[[], str]) -> None:
    def expire() -> None:
        time.sleep(1)
        server.token = "second-token"
        time.sleep(1)
        server.write_kubeconfig()

    thread = in_background(expire)
    run(make_job("lines"))
    thread.join()
    err = shown()
    assert line_numbers(err, 0) == list(range(40)) and "-token" not in err


def test_a_refused_login_is_reported_at_once(server: Server) -> None:
    server.token = "another"
    started = time.monotonic()
    with pytest.raises(ValueError, match="refuses the token; log in again with oc login"):
        run(make_job("lines"), api_seconds=600)
    assert time.monotonic() - started < 20, "the first call is not retried"


def test_a_pods_token_is_retried_only_for_a_short_time(
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
    run(make_job("lines", num_nodes=1))  # meanwhile the kubelet has renewed the token
    timer.join()
    assert "401 Unauthorized" in shown()
    server.token = "another"
    monkeypatch.setattr(api, "TOKEN_SECONDS", 1)
    started = time.monotonic()
    with pytest.raises(ValueError, match="refuses the token of this step's service account, and there is no newer"):
        run(make_job("lines"), api_seconds=600)
    assert time.monotonic() - started < 20


def test_the_reason_for_pending_pods_is_reported(server: Server, shown: Callable[[], str]) -> None:
    server.faults.pending.set()
    timer = in_background(lambda: (time.sleep(1.5), server.faults.pending.clear()))
    run(make_job("lines"))
    timer.join()
    assert "-worker-0 is waiting (scheduling): 0/4 nodes are available: 4 Insufficient" in shown()


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
def test_a_job_that_cannot_run_or_takes_too_long_is_deleted_and_explained(
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


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("raises", r"\(code\) in pod \S+-(master|worker)-0, Error: rank 1 failed first, .*disk is on fire"),
        pytest.param("gpu", r"\(out of memory on the GPU\).*lower batch_size", marks=pytest.mark.slow),
        ("user", r"^the data are no data; give data$"),
    ],
)  # fmt: skip
def test_the_error_of_a_failed_job_names_rank_class_and_remedy(server: Server, module: str, message: str) -> None:
    with pytest.raises(JobFailed, match=message):
        run(make_job(module))


def test_a_container_that_runs_out_of_memory_is_explained(server: Server) -> None:
    server.faults.exit_codes = {"worker-0": (137, "OOMKilled")}
    with pytest.raises(
        JobFailed, match=r"\(out of memory on the host\) in pod .*worker-0, OOMKilled: .*resources.memory"
    ):
        run(make_job("long"))


def test_the_operators_init_container_may_run_as_root(server: Server) -> None:
    """On plain Kubernetes nothing gives it another user; the image runs as root."""
    run(make_job("lines", start_seconds=20))


@pytest.mark.parametrize(
    ("reason", "message", "failure_class"),
    [("ImagePullBackOff", "Back-off pulling image alpine:3.10", "image"),
     ("CreateContainerConfigError", "container has runAsNonRoot and image will run as root", "configuration")],
)  # fmt: skip
def test_an_init_container_that_cannot_start_is_reported_and_given_up(
    server: Server, shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch, reason: str, message: str,
    failure_class: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(launcher, "STUCK_SECONDS", 2)
    server.faults.init_waiting = reason, message
    with pytest.raises(
        JobFailed, match=rf"\({failure_class}\): was stuck for 2 s: .*init-pytorch: {reason}: {message}"
    ):
        run(make_job("long"))
    assert re.search(rf"pod \S+ is waiting \(\w+\): init-pytorch: {reason}: {message}", shown())


def test_a_volume_that_cannot_be_mounted_is_found_in_the_pods_events(
    server: Server, shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "EVENTS_SECONDS", 0.5)
    server.faults.mounts_fail = "Multi-Attach error for volume: already used by pod other"
    with pytest.raises(JobFailed, match=r"\(volume\): did not start within 4 s: .*FailedMount: Multi-Attach error"):
        run(make_job("long", start_seconds=4))
    assert shown().count("is waiting (volume): ContainerCreating; FailedMount: Multi-Attach error") == 2, "once per pod"


def test_an_account_that_may_not_read_events_says_so_once(
    server: Server, shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "EVENTS_SECONDS", 0.5)
    server.faults.mounts_fail = "Multi-Attach error for volume: already used by pod other"
    server.allowed.remove(("list", "", "events"))
    with pytest.raises(JobFailed, match=r"did not start within 3 s: .*ContainerCreating"):
        run(make_job("long", start_seconds=3))
    assert shown().count("is not allowed to read events") == 1


def test_the_deadline_counts_from_the_admission_by_a_queue() -> None:
    job = {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}
    assert launcher.started_at(job) == "2026-01-01T00:00:00Z"
    admitted = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-01-02T00:00:00Z"}
    assert launcher.started_at({**job, "status": {"conditions": [admitted]}}) == "2026-01-02T00:00:00Z"
    assert launcher.started_at({**job, "status": {"startTime": "2026-01-03T00:00:00Z"}}) == "2026-01-03T00:00:00Z"


def test_init_containers_may_wait_for_the_first_node_as_long_as_the_job_may(server: Server) -> None:
    """Each of 15 workers restarts its init container every 200 s, for `start_seconds`."""
    job = make_job("long", num_nodes=16, start_seconds=14400, max_restarts=3)
    limit = pytorchjob.build(job, {}).spec.run_policy.backoff_limit
    assert limit > 15 * 14400 / 200 + 16 * 3


def test_a_job_without_a_deadline_is_not_left_without_its_launcher(server: Server) -> None:
    """Older versions of TrainJob have none; such a job could hold its GPUs for ever."""
    server.workflows = {"mine": "Running"}
    client = KubernetesClient()
    labels = {**MANAGED, "tailtune.io/pipeline-run": "mine"}
    for name, has_deadline in (("bounded", True), ("unbounded", False)):
        Jobs(client, pytorchjob).create(make_job("long", name=name, labels=labels))
        if not has_deadline:
            del server.jobs[name]["spec"]["runPolicy"]["activeDeadlineSeconds"]
    assert end_of_run(client, "mine") == (["unbounded"], ["bounded"])


@pytest.mark.torchrun
def test_a_killed_pod_restarts_and_so_do_the_ranks_of_the_others(server: Server) -> None:
    server.faults.kill_pods = ["worker-0"]
    run(make_job("once", max_restarts=2))
    assert server.faults.kill_pods == []


@pytest.mark.torchrun
def test_restarts_of_init_containers_do_not_count(server: Server) -> None:
    """Workers wait for the first node in an init container, which is restarted while that node pulls its image."""
    server.faults.init_restarts = 3
    server.faults.kill_pods = ["worker-0"]
    run(make_job("once", max_restarts=1))
    assert server.faults.kill_pods == []


@pytest.mark.torchrun
@pytest.mark.parametrize("num_nodes", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_always_dies_is_started_again_as_often_as_the_recipe_says(server: Server, num_nodes: int) -> None:
    """And not as often again for each restart of its container."""
    starts = server.folder / "starts"
    job = make_job("dies", num_nodes=num_nodes, max_restarts=1, environment={"STARTS": str(starts)})
    with pytest.raises(JobFailed, match=r"\(killed from outside\) in pod \S+, Error: rank 0 failed first"):
        run(job)
    assert starts.read_text() == "xx"


def test_a_fault_that_ends_all_pods_counts_once(server: Server) -> None:
    """A reboot of the node, for example."""
    server.faults.exit_codes = {"master-0": (137, "Error"), "worker-0": (137, "Error")}
    with pytest.raises(JobFailed, match=r"\(killed from outside\) in pod \S+, Error: exit status 137"):
        run(make_job("long", max_restarts=2))
    created = [r for r in server.requests if r.startswith("POST") and r.endswith("pytorchjobs")]
    assert len(created) == 1 and {*server.restarts.values()} == {3}, "more than max_restarts"


def test_a_container_that_ran_out_of_memory_is_not_started_again(server: Server) -> None:
    server.faults.exit_codes = {"worker-0": (137, "OOMKilled")}
    with pytest.raises(JobFailed, match="out of memory on the host"):
        run(make_job("long", max_restarts=3))
    wait_until(lambda: not server.jobs)
    assert server.restarts == {"worker-0": 1}


def test_a_job_that_someone_deletes_is_a_failure(server: Server) -> None:
    job = make_job("long")
    timer = in_background(lambda: (time.sleep(3), server.delete_job(job.name)))
    with pytest.raises(JobFailed, match="was deleted while it ran; run again to resume"):
        run(job)
    timer.join()


@pytest.mark.torchrun
def test_a_stopped_launcher_leaves_no_job_behind(server: Server) -> None:
    process = start_job(server)
    pods = [p.process for pods in server.pods.values() for p in pods]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "was stopped by signal 15 and deleted" in err
    wait_until(lambda: not server.jobs and all(p is None or p.poll() is not None for p in pods))


@pytest.mark.parametrize("end", ["terminated", "its schedule was deleted, and its workflow with it"])
def test_the_step_of_a_run_that_is_ended_deletes_the_job_within_a_second(server: Server, end: str) -> None:
    server.workflows = {"mine": "Running"}
    process = start_job(server, pipeline_run="mine")
    wait_until(lambda: any(request.endswith("/log") for request in server.requests))  # which stay open
    if end == "terminated":
        server.terminated.add("mine")
    else:
        del server.workflows["mine"]
    stop_step(process)
    wait_until(lambda: not server.jobs, seconds=15)


def test_a_drained_step_leaves_the_job_which_the_next_attempt_follows(server: Server, shown: Callable[[], str]) -> None:
    """The node on which the step only waits is drained; the run is not ended, and training goes on."""
    server.workflows = {"mine": "Running"}
    process = start_job(server, pipeline_run="mine")
    (job,) = server.jobs
    err = stop_step(process)
    assert f"but its run was not; job '{job}' keeps running; if the step is not retried automatically: python " in err
    assert "deletionTimestamp" not in server.jobs[job]["metadata"]
    deleted, going_on = end_of_run(KubernetesClient(), "mine")  # the run has failed, and its last step runs
    assert not deleted and going_on == [job]
    stop_jobs.python_func(job_id="mine")
    assert f"job {job} goes on training; python pipeline.py --retry mine follows it again" in shown()
    timer = in_background(lambda: (time.sleep(1), server.delete_job(job)))
    with pytest.raises(JobFailed, match="was deleted while it ran"):
        run(make_job("long", labels={**MANAGED, "tailtune.io/pipeline-run": "mine"}))
    timer.join()
    assert "already exists and is" in shown()


@pytest.mark.parametrize("trouble", [503, pytest.param(0, marks=pytest.mark.slow)], ids=["5xx", "reset"])
def test_a_step_that_is_cancelled_while_the_api_fails_does_not_wait_for_the_api(server: Server, trouble: int) -> None:
    process = start_job(server)
    before = len(server.requests)
    server.faults.statuses = [trouble] * 1000
    wait_until(lambda: len(server.requests) > before + 5)  # the waits between attempts grow to 30 s
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.requests[-1].startswith("DELETE"), seconds=5)
    server.faults.statuses = []
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "was stopped by signal 15 and deleted" in err
    wait_until(lambda: not server.jobs)


def test_a_step_that_cannot_delete_its_job_reports_it(server: Server) -> None:
    process = start_job(server)
    server.faults.statuses = [503] * 1000
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)  # the time that a pod has
    assert process.returncode == 1 and "was stopped by signal 15 but could not be deleted: the cluster's API" in err


def test_a_job_is_followed_although_the_response_to_its_creation_was_lost(
    server: Server, shown: Callable[[], str]
) -> None:
    server.faults.lost_answers = 1
    run(make_job("lines"))
    err = shown()
    assert line_numbers(err, 0) == list(range(40)) and "already exists and is" in err
    assert sum(r.startswith("POST") and r.endswith("pytorchjobs") for r in server.requests) == 2


def test_a_creation_that_is_never_answered_is_given_up(
    server: Server, shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "CALL_TIMEOUT_SECONDS", (1, 1))
    server.faults.hanging_answers = 1
    end = server.folder / "end"
    in_background(lambda: (time.sleep(8), end.write_text("0")))  # the job is there until the creation is tried again
    run(make_job("until", environment={"FILE": str(end)}))
    assert "already exists and is" in shown()


def test_lines_that_cannot_be_printed_are_reported_and_do_not_end_the_job(
    server: Server, shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_line = launcher.Follower._print_line

    def fail(self: launcher.Follower, prefix: str, line: str) -> None:
        if line.endswith(("line 7", "line 9")):
            raise ValueError("no such colour")
        print_line(self, prefix, line)

    monkeypatch.setattr(launcher.Follower, "_print_line", fail)
    run(make_job("lines", num_nodes=1))
    err = shown()
    assert err.count("lines may be missing (ValueError: no such colour)") == 1
    assert line_numbers(err, 0) == [i for i in range(40) if i not in (7, 9)]


def test_a_retried_step_adopts_the_running_job(server: Server, tmp_path: Path, shown: Callable[[], str]) -> None:
    first = start_job(server)
    first.kill()  # SIGKILL: no time to delete the job
    first.wait()
    assert list(server.jobs) == [make_job("long").name]
    timer = in_background(
        lambda: (time.sleep(2), [p.signal(signal.SIGKILL) for ps in server.pods.values() for p in ps])
    )
    (tmp_path / "progress.json").write_text("of the running job")
    with pytest.raises(JobFailed):  # the pods are killed: the adopted job fails, and no other one is created
        run(make_job("long", labels=MANAGED, progress_path=tmp_path / "progress.json"))
    timer.join()
    assert "already exists and is" in shown() and (tmp_path / "progress.json").is_file()
    assert sum(r.startswith("POST") and r.endswith("pytorchjobs") for r in server.requests) == 1


def test_after_a_reboot_the_next_attempt_follows_the_same_job(server: Server, shown: Callable[[], str]) -> None:
    """Everything is killed at the same moment: the pods, and the step that waits for them."""
    end = server.folder / "end"
    changes: dict[str, Any] = {"max_restarts": 1, "environment": {"FILE": str(end)}}
    first = start_job(server, "until", **changes)
    first.kill()
    for pods in server.pods.values():
        for pod in pods:
            pod.signal(signal.SIGKILL)
    first.wait()
    wait_until(lambda: server.restarts == {"master-0": 1, "worker-0": 1})
    end.write_text("0")
    run(make_job("until", labels=MANAGED, **changes))
    assert "already exists and is" in shown()
    assert sum(r.startswith("POST") and r.endswith("pytorchjobs") for r in server.requests) == 1


def test_a_failed_job_of_an_earlier_attempt_is_replaced(
    server: Server, tmp_path: Path, shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.operator, "limit", lambda job: 0)  # else the launcher deletes the job
    server.faults.exit_codes = {"worker-0": (1, "Error")}
    with pytest.raises(JobFailed):
        run(make_job("long"))
    server.faults.exit_codes = {}
    (tmp_path / "progress.json").write_text("of the failed job")
    run(replace(make_job("lines"), name=make_job("long").name, progress_path=tmp_path / "progress.json"))
    assert "from an earlier attempt (failed)" in shown() and not (tmp_path / "progress.json").exists()


def test_a_live_job_of_another_run_is_left_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pipeline runs of the same name give their jobs the same name."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "set as in a pod, but without a token, so that the login is used")
    monkeypatch.setenv("HOSTNAME", "step-of-the-first")
    first, second = (make_job("long", labels={"tailtune.io/pipeline-run": run}) for run in ("first", "second"))
    Jobs(KubernetesClient(), pytorchjob).create(first)
    monkeypatch.setenv("HOSTNAME", "step-of-the-second")
    server.step_pods = {"step-of-the-first": "Running", "step-of-the-second": "Running"}
    with pytest.raises(JobFailed, match=r"is (waiting|running) and belongs to pipeline run first; wait for that run"):
        run(second)
    (job,) = server.jobs.values()
    assert (
        job["metadata"]["labels"]["tailtune.io/pipeline-run"] == "first" and "deletionTimestamp" not in job["metadata"]
    )
    server.step_pods["step-of-the-first"] = "Failed"  # without the launcher, nobody follows the job any more
    run(replace(second, module="pod_lines"))
    (job,) = server.jobs.values()
    assert job["metadata"]["labels"]["tailtune.io/pipeline-run"] == "second"


def test_a_step_that_is_stopped_before_it_has_a_job_leaves_that_of_another_run(server: Server) -> None:
    first, second = (make_job("long", labels={"tailtune.io/pipeline-run": run}) for run in ("first", "second"))
    client = KubernetesClient()
    jobs = Jobs(client, pytorchjob)
    jobs.create(first)
    is_deleted, outcome, _ = launcher._delete_at_once(second, client, jobs, is_own=False)
    assert not is_deleted and outcome == "before it could be created"
    assert "deletionTimestamp" not in server.jobs[first.name]["metadata"]
    assert launcher._delete_at_once(first, client, jobs, is_own=False)[0]


def test_a_run_does_not_follow_the_job_that_replaced_its_own(server: Server) -> None:
    job = make_job("long", labels={"tailtune.io/pipeline-run": "first"}, deadline_seconds=60)

    def replace_job() -> None:
        wait_until(lambda: server.jobs)
        server.jobs[job.name]["metadata"]["labels"]["tailtune.io/pipeline-run"] = "second"

    timer = in_background(replace_job)
    with pytest.raises(JobFailed, match="was replaced by that of pipeline run second, which has the same name"):
        run(job)
    timer.join()
    assert list(server.jobs) == [job.name]


def test_orphaned_jobs_are_found_and_deleted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "set as in a pod, but without a token, so that the login is used")
    client = KubernetesClient()
    jobs = Jobs(client, pytorchjob)
    for run_name, pod in (("one", "step-one"), ("two", "step-two")):
        monkeypatch.setenv("HOSTNAME", pod)
        job = make_job("long", name=job_name(run_name, "sft"))
        jobs.create(replace(job, labels={"tailtune.io/run": run_name, "app.kubernetes.io/managed-by": "tailtune"}))
    server.step_pods = {"step-one": "Running", "step-two": "Running"}
    assert collect_garbage(client) == []
    server.step_pods["step-one"] = "Failed"
    del server.step_pods["step-two"]
    orphans = [job_name("one", "sft"), job_name("two", "sft")]
    assert sorted(collect_garbage(client, dry_run=True)) == sorted(orphans) == sorted(server.jobs)
    assert cancel(client, run="two") == [job_name("two", "sft")]
    assert collect_garbage(client) == [job_name("one", "sft")]
    wait_until(lambda: not server.jobs)


def test_the_last_step_of_a_run_deletes_only_its_own_jobs(server: Server) -> None:
    client = KubernetesClient()
    for name, pipeline_run in (("a", "one"), ("b", "another of the same name")):
        labels = {"tailtune.io/run": "mine", "tailtune.io/pipeline-run": label_value(pipeline_run)}
        job = make_job("long", name=f"job-{name}", labels={**labels, **MANAGED})
        Jobs(client, pytorchjob).create(job)
    server.workflows, server.terminated = {"one": "Running"}, {"one"}
    stop_jobs.python_func(job_id="one")
    wait_until(lambda: list(server.jobs) == ["job-b"])
    stop_jobs.python_func(job_id="one")
    assert list(server.jobs) == ["job-b"]


def test_the_first_step_of_a_run_deletes_the_jobs_of_runs_that_were_ended(server: Server) -> None:
    """A run that was retried has no last step any more, so a job can outlive its end between two attempts."""
    client = KubernetesClient()
    for pipeline_run in ("ended", "failed", "in-progress"):
        labels = {"tailtune.io/pipeline-run": pipeline_run, **MANAGED}
        Jobs(client, pytorchjob).create(make_job("long", name=f"job-{pipeline_run}", labels=labels))
    Jobs(client, pytorchjob).create(make_job("long", name="job-by-hand", labels=MANAGED))
    server.workflows = {"ended": "Failed", "failed": "Failed", "in-progress": "Running"}
    server.terminated = {"ended"}
    assert delete_jobs_of_ended_runs(client) == ["job-ended"]
    wait_until(lambda: sorted(server.jobs) == ["job-by-hand", "job-failed", "job-in-progress"])


def test_missing_permission_to_list_jobs_is_an_error(server: Server) -> None:
    server.allowed = [rule for rule in server.allowed if rule[1] != "kubeflow.org"]
    with pytest.raises(UserError, match="this account is not allowed to list training jobs in lyric-professor: 403"):
        cancel(KubernetesClient(), run="mine")


@pytest.mark.parametrize(("first", "second"), [("a" * 70, "a" * 71), ("a", "a_"), ("a b", "a-b"), ("A/B", "A-B")])
def test_different_names_have_different_labels(first: str, second: str) -> None:
    values = label_value(first), label_value(second)
    assert values[0] != values[1]
    assert all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", value) for value in values)


def test_the_test_server_is_strict(server: Server) -> None:
    url = f"{server.url}/apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs"
    headers = {"Authorization": f"Bearer {server.token}"}
    body = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "a"},
            "spec": {"pytorchReplicaSpecs": {}, "runPolicy": {"cleanPods": "All"}}}  # fmt: skip
    answer = requests.post(url, json=body, headers=headers, timeout=5)
    assert answer.status_code == 400 and 'unknown field "spec.runPolicy.cleanPods"' in answer.json()["message"]
    nodes = f"{server.url}/api/v1/namespaces/{NAMESPACE}/nodes"
    assert requests.get(nodes, headers=headers, timeout=5).status_code == 403
    assert requests.get(url, timeout=5).status_code == 401


@pytest.mark.parametrize("run_name", ["demo", "A_very.Long name " * 8, "7-of-9", "ünïcode", "-"])
def test_names_are_valid_and_unique(run_name: str) -> None:
    name = job_name(run_name, "sft")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(f"{name}-worker-12") <= 63
    assert name == job_name(run_name, "sft") != job_name(f"{run_name}x", "sft")
    assert re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", label_value(run_name))
