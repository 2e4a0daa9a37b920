"""What a run tells while it trains, and how it stops when it is asked to."""

import resource
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pynvml
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerState

from tailtune.log import log


class StopOnSignal(TrainerCallback):
    """SIGTERM or SIGINT: finish the step, save a checkpoint, stop. All ranks stop at the same step.

    The signal reaches the ranks at different moments; a rank that stopped one step early would leave
    the others waiting in the all-reduce. So the ranks agree after each step, over gloo on the CPU:
    NCCL would cost a device synchronisation.
    """

    def __init__(self) -> None:
        self.requested = False
        self.stopped_at: int | None = None
        self._group: Any = None

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # not earlier: before, there is nothing to save
            signal.signal(number, self._request)
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        flag = torch.tensor(int(self.requested))
        if self._group is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        if flag.item() and state.global_step < state.max_steps:
            self.stopped_at = state.global_step
            control.should_save = True
            control.should_training_stop = True


@dataclass
class Meter:
    """Throughput and memory between two log lines."""

    time: float = field(default_factory=time.monotonic)
    tokens: int = 0

    def read(self, tokens_seen: int) -> dict[str, float]:
        """Tokens per second since the last call (not counting pads), memory in bytes, GPU use in percent."""
        now = time.monotonic()
        values: dict[str, float] = {"tokens_per_second": (tokens_seen - self.tokens) / max(now - self.time, 1e-9)}
        self.time, self.tokens = now, tokens_seen
        values["peak_memory_bytes"] = peak_memory_bytes()
        if torch.cuda.is_available():
            with suppress(pynvml.NVMLError):  # slices of a GPU (MIG) report none
                values["gpu_utilisation_percent"] = float(torch.cuda.utilization())
        return values


class Metered:
    """Mixin of Trainer whose log entries carry throughput and memory, so that every reporter has them."""

    meter: Meter
    state: TrainerState

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self.meter.read(self.state.num_input_tokens_seen))
        super().log(logs, start_time)  # type: ignore[misc]


def peak_memory_bytes() -> int:
    """Largest memory of this rank so far: on the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes on Linux


class LogLines(TrainerCallback):
    """One plain line per logging step, for pods and pipes; a terminal has Trainer's progress bar."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start, self.first_step = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        where = f"train: step {state.global_step}/{state.max_steps}"
        if "loss" in logs:
            done = max(1, state.global_step - self.first_step)
            left = (time.monotonic() - self.start) / done * (state.max_steps - state.global_step)
            log.info(
                "%s loss %.4f lr %.2e grad_norm %.3f %.0f tokens/s ETA %.0f s",
                where, logs["loss"], logs["learning_rate"], logs["grad_norm"], logs["tokens_per_second"], left,
            )  # fmt: skip
        elif "eval_loss" in logs:
            log.info("%s eval_loss %.4f", where, logs["eval_loss"])
