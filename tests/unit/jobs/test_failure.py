"""Explaining a failed job from its pods' status and logs: class, rank, lines, remedy."""

import json
from typing import Any

import pytest

from tailtune.errors import UserError
from tailtune.jobs.failure import NUM_SHOWN_LINES, classify, explain, would_recur
from tailtune.jobs.job import PermanentFailure
from tailtune.jobs.logs import LineDeduplicator, split_timestamp
from tailtune.jobs.node import termination_message
from tailtune.jobs.pods import failures, why_pending
from tailtune.jobs.torchrun import TorchrunResult


def pod(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": status}


def ended(code: int, reason: str, at: str, message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at, "message": message}}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of memory on the GPU"),
        ("RuntimeError: CUDA error: out of memory", "out of memory on the GPU"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
         "out of memory on the GPU"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error\n"
         "Last error:\nCuda failure 2 'out of memory'", "out of memory on the GPU"),
        ("RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's "
         "workers are out of shared memory.", "shared memory"),
        ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
         "shared memory"),
        ("misc/shmutils.cc:132 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888)"
         ", error: No space left on device (28)", "shared memory"),
        ("OOMKilled\nexit status 137", "out of memory on the host"),
        ("RuntimeError: DataLoader worker (pid 1234) is killed by signal: Killed.", "killed from outside"),
        ("rank 3 failed first, exit status -9 (SIGKILL)", "killed from outside"),
        ("Error\nexit status 137", "killed from outside"),
        ("CUDA error: uncorrectable ECC error encountered", "a GPU or its driver"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "a GPU or its driver"),
        ("CUDA driver version is insufficient for CUDA runtime version", "a GPU or its driver"),
        ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled system error (run with "
         "NCCL_DEBUG=INFO for details), NCCL version 2.21.5", "network between the ranks"),
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, "
         "Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out.", "network between the ranks"),
        ("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
         "network between the ranks"),
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.4]:1089",
         "network between the ranks"),
        ("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms"
         " for recv operation to complete", "network between the ranks"),
        ("RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
         "network between the ranks"),
        ("torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to connect to"
         " (036c56dce41b, 41331).", "network between the ranks"),
        ("torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
         "network between the ranks"),
        ("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has "
         "failed.", "network between the ranks"),
        ("Evicted: The node was low on resource: ephemeral-storage", "preempted"),
        ("OSError: [Errno 28] No space left on device", "a full volume"),
        ("pod a: ErrImagePull: not found", "image"),
        ("did not start within 60 s: no pod exists", "scheduling"),
        ("KeyError: 'answer'", "code"),
        ("rank 0 failed first, exit status -91", "code"),
        ("IndexError: list index out of range\n[W ProcessGroupNCCL.cpp:1250] Warning: process group has NOT been "
         "destroyed before we destruct ProcessGroupNCCL.", "code"),
        ("RuntimeError: CUDA error: device-side assert triggered", "code"),
    ],
)  # fmt: skip
def test_failures_are_classified(text: str, name: str) -> None:
    assert classify(text).name == name


def test_the_first_failure_is_reported_not_its_consequences() -> None:
    report = {"status": 1, "user_error": None, "failure": "rank 2 failed first, exit status 1: KeyError: 'a'",
              "lines": [f"line {i}" for i in range(40)]}  # fmt: skip
    pods = [
        pod("a-master-0", containerStatuses=[{"state": ended(1, "Error", "2026-01-01T00:00:09Z", "NCCL abort")}]),
        pod("a-worker-0", containerStatuses=[{"state": ended(1, "Error", "2026-01-01T00:00:01Z", json.dumps(report))}]),
    ]
    error = explain("a", failures(pods), "1 replica failed")
    message = str(error)
    assert message.startswith("job 'a' failed (code) in pod a-worker-0, Error: rank 2 failed first")
    assert len(error.details) == 1 + NUM_SHOWN_LINES and error.details[-1] == "line 39"
    assert "NCCL" not in message and "\n" not in message


def test_the_last_failure_of_a_restarted_container_is_used() -> None:
    status = {"state": {"running": {}}, "lastState": ended(137, "OOMKilled", "2026-01-01T00:00:01Z")}
    (failure,) = failures([pod("a-worker-0", containerStatuses=[status])])
    assert (failure.exit_code, failure.reason) == (137, "OOMKilled")
    assert "out of memory on the host" in str(explain("a", [failure], ""))


def test_an_evicted_pod_without_containers_is_a_failure() -> None:
    evictions = failures([pod("a-worker-0", phase="Failed", reason="Evicted", message="low on memory")])
    assert "(preempted) in pod a-worker-0, Evicted: low on memory" in str(explain("a", evictions, ""))


@pytest.mark.parametrize(
    ("reason", "message", "recurs"),
    [("OOMKilled", "", True), ("Error", "torch.OutOfMemoryError: CUDA out of memory.", True), ("Error", "", False)],
)
def test_too_little_memory_would_recur_even_after_another_failure(reason: str, message: str, recurs: bool) -> None:
    first, second = (
        pod(name, containerStatuses=[{"lastState": ended(137, why, at, text)}])
        for name, why, at, text in (("a", "Error", "1", ""), ("b", reason, "2", message))
    )
    both = failures([first, second])
    assert would_recur(both) is recurs
    error = explain("a", both, "")
    assert isinstance(error, PermanentFailure) is recurs and f"in pod {'b' if recurs else 'a'}," in str(error)


def test_a_user_error_of_a_rank_is_the_whole_message() -> None:
    result = TorchrunResult(
        1, UserError("the data are no data; none", "give data"), False, "rank 0 failed", False, ("x",)
    )
    state = ended(1, "Error", "", termination_message(result))
    error = explain("a", failures([pod("a", containerStatuses=[{"state": state}])]), "failed")
    assert isinstance(error, PermanentFailure)
    assert (error.problem, error.remedy) == ("the data are no data; none", "give data")


@pytest.mark.parametrize("message", ["", "no JSON", "[]", '{"user_error": null}', '{"user_error": "text"}',
                                     '{"user_error": {"remedy": "without a problem"}}'])  # fmt: skip
def test_a_termination_message_without_a_user_error_is_another_failure(message: str) -> None:
    status = {"state": ended(1, "Error", "", message)}
    error = explain("a", failures([pod("a", containerStatuses=[status])]), "failed")
    assert not isinstance(error, PermanentFailure) and "job 'a' failed (code)" in str(error)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"phase": "Running"}, None),
        ({"phase": "Pending"}, ("scheduling", "waiting for a node")),
        ({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}]},
         ("scheduling", "0/3 nodes")),
        ({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
                                              "message": 'persistentvolumeclaim "a" not found'}]},
         ("volume", 'persistentvolumeclaim "a" not found')),
        ({"phase": "Pending",
          "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}]},
         ("image", "ErrImagePull: no")),
        ({"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
         ("starting", "ContainerCreating")),
    ],
)  # fmt: skip
def test_the_reason_why_a_pod_is_pending(status: dict[str, Any], expected: tuple[str, str] | None) -> None:
    assert why_pending(pod("a", **status)) == expected


def test_only_new_lines_pass_when_a_log_is_read_again() -> None:
    deduplicate = LineDeduplicator()
    lines = ["2026-01-01T00:00:00.5Z a", "2026-01-01T00:00:00.5Z b", "2026-01-01T00:00:00.123456789Z early",
             "2026-01-01T00:00:01Z c"]  # fmt: skip
    assert [deduplicate(line) for line in lines] == ["a", "b", "early", "c"]
    deduplicate.restart()
    again = ["2026-01-01T00:00:00.5Z b", "2026-01-01T00:00:01Z c", "2026-01-01T00:00:01Z c", "2026-01-01T00:00:01.1Z d"]
    assert [deduplicate(line) for line in again] == [None, None, "c", "d"], (
        "equal lines with equal timestamps are two lines"
    )
    deduplicate.restart()
    burst = [f"2026-01-01T00:00:01.1Z {text}" for text in "defg"]
    assert [deduplicate(line) for line in burst] == [None, "e", "f", "g"], "a burst with one timestamp is whole"
    deduplicate.restart()
    assert [deduplicate(line) for line in burst] == [None] * 4
    assert split_timestamp("no timestamp") is None and deduplicate("no timestamp") == "no timestamp"
