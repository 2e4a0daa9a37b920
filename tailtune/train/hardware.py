"""What each device can do: one table, so that a new GPU is one entry.

A profile sets precision, attention and the largest micro-batch. The effective batch per rank comes from the recipe and
never changes. The plan is logged; what actually took effect is read back from the loaded model.

The module imports without torch: `hardware.profile` is checked where a run is submitted, too.
"""

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailtune.errors import UserError
from tailtune.recipe.schema import Hardware

if TYPE_CHECKING:
    import torch

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Profile:
    name: str
    pattern: str
    """Regular expression on the device's name."""
    precision: str
    max_batch_size: int
    """Rows in one micro-batch, at most."""


PROFILES = (
    Profile("T4", r"\bT4\b", "fp16", 4),
    Profile("L4", r"\bL4\b", "bf16", 8),
    Profile("A40", r"\bA40\b", "bf16", 16),
    Profile("L40S", r"\bL40S?\b", "bf16", 16),
    Profile("A100", r"\bA100\b", "bf16", 32),
    Profile("H100", r"\bH100\b", "bf16", 32),
    Profile("H200", r"\bH200\b", "bf16", 64),
    Profile("CPU", r"^cpu$", "fp32", 64),
)
GENERIC = Profile("generic", r"", "bf16", 8)


@dataclass(frozen=True)
class HardwarePlan:
    """Device, precision, attention and batch sizes of a run."""

    profile: str
    device: str
    precision: str
    attention: str
    per_device_train_batch_size: int
    gradient_accumulation_steps: int

    @property
    def dtype(self) -> "torch.dtype":
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.precision])
        return dtype

    def describe(self) -> str:
        return (
            f"{self.device} (profile {self.profile}), {self.precision}, {self.attention}, "
            f"batch {self.per_device_train_batch_size} x {self.gradient_accumulation_steps} per rank"
        )


def device_name() -> str:
    """Return `cpu`, or the name of the GPU that this rank uses."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def find_profile(device: str, name: str = "auto") -> Profile:
    """Return the profile with this name, or for `auto` the one that fits the device.

    Raises UserError for an unknown name.
    """
    if name != "auto":
        for profile in (*PROFILES, GENERIC):
            if profile.name.lower() == name.lower():
                return profile
        names = ", ".join(p.name for p in (*PROFILES, GENERIC))
        raise UserError(f"hardware.profile '{name}' is not known", f"use auto or one of {names}")
    return next((p for p in PROFILES if re.search(p.pattern, device)), GENERIC)


def plan_hardware(hardware: Hardware, batch_size: int, accumulation_steps: int) -> HardwarePlan:
    """Plan profile, precision, attention and micro-batch for the device of this process."""
    import torch

    device = device_name()
    profile = find_profile(device, hardware.profile)
    precision = profile.precision if hardware.precision == "auto" else hardware.precision
    if device == "cpu" and precision == "fp16":
        precision = "fp32"  # on a CPU, accelerate accepts fp16 and silently computes in fp32
    if device != "cpu" and precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        precision = "fp16"
    attention = hardware.attention
    if attention == "auto":
        flash = device != "cpu" and precision != "fp32" and importlib.util.find_spec("flash_attn") is not None
        attention = "flash_attention_2" if flash else "sdpa"
    effective = batch_size * accumulation_steps
    micro = largest_divisor(effective, min(batch_size, profile.max_batch_size))
    return HardwarePlan(profile.name, device, precision, attention, micro, effective // micro)


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def keep_freed_memory() -> None:
    """Let glibc keep the memory that torch frees on the CPU, for tensors of up to 32 MiB.

    Every step allocates the same sizes; getting fresh pages for them took 5 to 10 % of the time (BENCHMARKS.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only glibc has it
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: glibc's largest
