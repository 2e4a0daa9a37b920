"""What a run reports while it trains, and how it stops when asked to."""

import math
import resource
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import pynvml
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerState

from tailtune.files import write_json
from tailtune.progress import Progress
from tailtune.signals import handled_signals

FIRST_CHECKPOINT_SECONDS = 60


class SaveByTime(TrainerCallback):
    """Saves a checkpoint after a minute and then every `checkpoint_seconds`, in addition to Trainer's own.

    On a stop signal, it finishes the step, saves a checkpoint and stops. Both happen at the same step on all ranks:
    their clocks differ and the signal reaches them at different moments, and a rank that stopped one step early would
    leave the others waiting in the all-reduce. So the ranks agree after each step, over gloo on the CPU: with NCCL,
    that would cost a device synchronisation.
    """

    def __init__(self, checkpoint_seconds: float) -> None:
        self.checkpoint_seconds = checkpoint_seconds
        self.requested = False
        self.stopped_at: int | None = None
        self.step = 0
        """Training steps that are done."""
        self._save_at = math.inf
        self._group: Any = None

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number in handled_signals():  # not earlier: before training there is nothing to save
            signal.signal(number, self._request)
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        self.step = state.global_step
        self._save_at = time.monotonic() + min(FIRST_CHECKPOINT_SECONDS, self.checkpoint_seconds)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step
        flags = torch.tensor([self.requested, time.monotonic() >= self._save_at], dtype=torch.uint8)
        if self._group is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        stop, save = flags.tolist()
        if state.global_step == state.max_steps:
            return  # Trainer saves and stops anyway
        if save or stop:
            control.should_save = True
        if stop:
            self.stopped_at = state.global_step
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save_at = time.monotonic() + self.checkpoint_seconds


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
    """Mixin of every kind's Trainer: its log entries carry throughput and memory, so that every reporter has them."""

    state: TrainerState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._meter = Meter()
        self.add_callback(_StartMeter(self._meter))  # type: ignore[attr-defined]

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self._meter.read(self.state.num_input_tokens_seen))
        super().log(logs, start_time)  # type: ignore[misc]


class _StartMeter(TrainerCallback):
    """Starts the meter when training starts, counting from the tokens that a resumed run has already seen."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.time, self.meter.tokens = time.monotonic(), state.num_input_tokens_seen


def peak_memory_bytes() -> int:
    """Largest memory of this rank so far: on the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes on Linux


class LogLines(TrainerCallback):
    """Counts the steps, and logs one line for each of Trainer's log entries."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.restart(state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.done = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        where = f"train: step {state.global_step:,}/{state.max_steps:,}"
        if "loss" in logs:
            self.progress.note = f"loss {logs['loss']:.4f}"
            self.progress.log(
                f"{where} {self.progress.note} lr {logs['learning_rate']:.2e} grad_norm {logs['grad_norm']:.3f} "
                f"{logs['tokens_per_second']:,.0f} tokens/s {self.progress.eta()}"
            )
        elif "eval_loss" in logs:
            self.progress.log(f"{where} eval_loss {logs['eval_loss']:.4f}")


PROGRESS_METRICS = {"train": ("loss", "learning_rate", "grad_norm", "tokens_per_second"), "eval": ("eval_loss",)}
"""What `progress.json` holds of Trainer's log entries."""


class WriteProgress(TrainerCallback):
    """Keeps `progress.json` up to date, which the launcher reads: log lines are for people only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, dict[str, float | None]] = {}
        self._start, self._first_step = time.monotonic(), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start, self._first_step = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        for side, names in PROGRESS_METRICS.items():
            values = {name: _finite(logs[name]) for name in names if name in logs}
            if values:
                self._values[side] = self._values.get(side, {}) | values
        write_json(self.path, {
            "step": state.global_step,
            "max_steps": state.max_steps,
            "remaining_seconds": self._remaining_seconds(state),
            **self._values,
            "updated_at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        })  # fmt: skip

    def _remaining_seconds(self, state: Any) -> float:
        """Estimate the remaining time from the steps of this attempt."""
        steps = max(1, state.global_step - self._first_step)
        return (time.monotonic() - self._start) / steps * (state.max_steps - state.global_step)


def _finite(value: Any) -> float | None:
    """The number, or None for NaN and infinity, which JSON cannot represent."""
    return float(value) if math.isfinite(value) else None
