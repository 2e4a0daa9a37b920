"""Which exceptions of a rank are not repeated."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tailtune.errors import UserError
from tailtune.train.faults import stop_repeated_faults


def attempt(fault: Callable[[], None], folder: Path, step: int = 7, rank: int = 1) -> Exception:
    """Return what one attempt raises."""
    try:
        with stop_repeated_faults(folder, rank, lambda: step):
            fault()
    except Exception as error:
        return error
    raise AssertionError("the fault is gone")


def divide() -> None:
    raise ZeroDivisionError("division by zero")


def test_the_same_error_at_the_same_step_is_not_tried_a_third_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(attempt(divide, tmp_path), ZeroDivisionError), "the first time may be chance"
    assert isinstance(attempt(divide, tmp_path, step=8), ZeroDivisionError), "at another step"
    assert isinstance(attempt(divide, tmp_path, step=8, rank=0), ZeroDivisionError), "on another rank"
    error = attempt(divide, tmp_path, step=8)
    assert isinstance(error, UserError)
    assert error.problem == "the same error at step 8 in two attempts: ZeroDivisionError: division by zero"
    assert "in divide" in capsys.readouterr().err, "the traceback is not lost"


def test_another_line_is_another_error(tmp_path: Path) -> None:
    def divide_elsewhere() -> None:
        raise ZeroDivisionError("division by zero")

    assert isinstance(attempt(divide, tmp_path), ZeroDivisionError)
    assert isinstance(attempt(divide_elsewhere, tmp_path), ZeroDivisionError)


@pytest.mark.parametrize(
    ("error", "message"),
    [(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory on the GPU at step 7: "),
     (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "out of memory on the GPU"),
     (MemoryError(), "out of memory on the host at step 7: MemoryError"),
     (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
      "out of memory on the host"),
     (OSError(28, "No space left on device"), "the disk is full at step 7: OSError: [Errno 28] No space"),
     (RuntimeError("I/O error: No space left on device (os error 28)"), "the disk is full at step 7: ")],
)  # fmt: skip
def test_too_little_memory_or_disk_is_not_repeated_at_all(tmp_path: Path, error: Exception, message: str) -> None:
    def fault() -> None:
        raise error

    raised = attempt(fault, tmp_path)
    assert isinstance(raised, UserError) and raised.problem.startswith(message) and raised.remedy


@pytest.mark.parametrize(
    "error",
    [ValueError("Seed must be between 0 and 2**32 - 1"), ImportError("no bitsandbytes"), KeyError("lr"),
     AttributeError("no such thing"), TypeError("'int' is not callable"), NotImplementedError(), AssertionError()],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_what_the_input_has_caused_before_the_first_step_is_not_repeated(tmp_path: Path, error: Exception) -> None:
    def fault() -> None:
        raise error

    raised = attempt(fault, tmp_path, step=0)
    assert isinstance(raised, UserError) and raised.remedy
    assert raised.problem.startswith(f"the training cannot begin: {type(error).__name__}")
    assert attempt(fault, tmp_path, step=1) is error, "later, it may be chance"


@pytest.mark.parametrize(
    "error",
    [OSError(5, "Input/output error"), dist.DistBackendError("NCCL error"), UserError("bad", "data"),
     RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.4]:28671"),
     RuntimeError("CUDA error: uncorrectable ECC error encountered"),
     ValueError("[gloo] Timed out waiting for the other ranks"), RuntimeError("chance"),
     RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed.")],
    ids=lambda error: str(error)[:20],
)  # fmt: skip
def test_faults_from_outside_are_left_to_the_restarts(tmp_path: Path, error: Exception) -> None:
    def fault() -> None:
        raise error

    for step in (0, 1, 2):
        assert attempt(fault, tmp_path, step) is error
