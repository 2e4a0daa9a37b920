"""Which exceptions of a rank would recur, and so are not retried."""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from tailtune.errors import UserError, one_line
from tailtune.files import read_json, write_json

GPU_MEMORY = r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure .*'out of memory'"
HOST_MEMORY = r"DefaultCPUAllocator: .*(not enough|can't allocate) memory"
FROM_OUTSIDE = (
    r"[Gg]loo|NCCL|[Cc]onnection (refused|reset|closed)|[Tt]imed out|[Tt]imeout|is killed by signal"
    r"|CUDA error(?!: device-side assert)|I/O error|os error|PytorchStreamWriter|No space left|Stale file handle"
)
"""Messages of errors that another rank, the network, a volume, a GPU or its driver has caused."""
NO_SPACE = r"No space left|Disk quota exceeded"
BROKEN_VOLUME = r"Input/output error|Stale file handle|No space left"
FAULTY_INPUT = (
    *(ValueError, TypeError, ImportError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, NotImplementedError),
)
"""Before the first step, these come from the model, the rows or the trainer arguments."""


@contextmanager
def stop_repeated_faults(output: Path, rank: int, step: Callable[[], int]) -> Iterator[None]:
    """Raise UserError for an exception inside the block that would occur again, after printing its traceback.

    These are: too little memory on the GPU or host, a full disk, and, unless the cause is outside this process, a
    FAULTY_INPUT before the first step, and an exception from the same line at the same step as in the attempt before,
    which `last_error-RANK.json` in `output` remembers.
    """
    last_path = output / f"last_error-{rank}.json"
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if permanent := _explain(error, last_path, step()):
            traceback.print_exc()
            raise permanent from None
        raise
    last_path.unlink(missing_ok=True)


def _explain(error: Exception, last_path: Path, step: int) -> UserError | None:
    text = f"{type(error).__name__}: {one_line(error)}"
    if _lacks_gpu_memory(error):
        return UserError(
            f"out of memory on the GPU at step {step}: {text}",
            "lower batch_size and raise stages.0.trainer.gradient_accumulation_steps, then lower max_length",
        )
    if _lacks_host_memory(error):
        return UserError(
            f"out of memory on the host at step {step}: {text}",
            "raise the job's resources.memory, or set stages.0.tail.cache=disk",
        )
    if re.search(NO_SPACE, text):
        return UserError(
            f"the disk is full at step {step}: {text}",
            "make room on the volume of the models and run again; training resumes from its last checkpoint",
        )
    if any(isinstance(each, OSError | dist.DistError) or re.search(FROM_OUTSIDE, str(each)) for each in _causes(error)):
        return None
    if step == 0 and isinstance(error, FAULTY_INPUT):
        return UserError(f"the training cannot begin: {text}", "its traceback is above")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    fault = {"step": step, "type": type(error).__name__, "line": f"{frame.filename}:{frame.lineno}"}
    if read_json(last_path) == fault:
        return UserError(f"the same error at step {step} in two attempts: {text}", "its traceback is above")
    write_json(last_path, fault)
    return None


def is_of_machine(error: Exception) -> bool:
    """Whether too little memory or a broken volume has caused an error, and not the content of the files it read."""
    return (
        _lacks_gpu_memory(error)
        or _lacks_host_memory(error)
        or (type(error) is OSError and error.errno is not None)  # Transformers raises it too, with a text alone
        or bool(re.search(BROKEN_VOLUME, str(error)))
    )


def _lacks_gpu_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or bool(re.search(GPU_MEMORY, str(error)))


def _lacks_host_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or bool(re.search(HOST_MEMORY, str(error)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
