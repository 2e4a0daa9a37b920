"""What would stop a run on this machine: Python, packages, GPU, ports, disk."""

import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Iterator
from importlib import metadata

from tailtune.doctor.findings import BLOCKS, GIGABYTE, OK, WARNING, Finding
from tailtune.imports import INSTALL, INSTALL_TRAIN, installed_version, missing_packages, requirements
from tailtune.jobs.local import count_gpus


def local_findings() -> Iterator[Finding]:
    yield Finding("python", OK, platform.python_version())
    missing = missing_packages("train")
    yield from _packages(missing)
    if missing:
        return  # what follows is for local runs
    num_gpus = count_gpus()
    if not num_gpus:
        yield Finding("gpu", OK, "no NVIDIA GPU here: local runs train a small model on the CPU")
    else:
        import torch

        if torch.cuda.is_available():
            names = ", ".join(torch.cuda.get_device_name(i) for i in range(num_gpus))
            yield Finding("gpu", OK, f"{names}; CUDA {torch.version.cuda}")
        else:
            yield Finding("gpu", BLOCKS, f"{num_gpus} GPUs, but torch {torch.__version__} does not see them",
                          "install a CUDA build of torch, or a driver that is new enough: nvidia-smi")  # fmt: skip
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        yield Finding("ports", OK, "ranks can listen on this machine")
    except OSError as error:
        yield Finding("ports", BLOCKS, f"ranks cannot listen: {error.strerror}", "allow local sockets")
    free = shutil.disk_usage(".").free
    status = OK if free > 5 * GIGABYTE else WARNING
    yield Finding("disk", status, f"{free / GIGABYTE:.0f} GB free here", "" if status == OK else "free some space")


def _packages(missing: str) -> Iterator[Finding]:
    """Compare the installed versions with those that tailtune requires.

    Only in an image must all packages be there: elsewhere `missing`, those of local runs, may be.
    """
    complete = not missing or "TAILTUNE_IMAGE" in os.environ
    if faults := [*_faults(), *(_faults("train") if complete else ())]:
        yield Finding("packages", BLOCKS, "; ".join(faults), INSTALL_TRAIN if complete else INSTALL)
    elif complete:
        shown = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "trl", "kfp"))
        yield Finding("packages", OK, shown)
    elif importlib.util.find_spec("torch"):
        yield Finding("packages", WARNING, f"enough to submit; local runs also need {missing}", INSTALL_TRAIN)
    else:
        yield Finding("packages", OK, f"kfp {metadata.version('kfp')}, enough to submit; for local runs: "
                                      f"{INSTALL_TRAIN}")  # fmt: skip


def _faults(extra: str = "") -> Iterator[str]:
    for requirement in requirements(extra):
        version = installed_version(requirement.name)
        if version is None:
            yield f"{requirement.name} is missing"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} is {version}, needed {requirement.specifier}"
