"""What would stop a run on this machine: Python, packages, GPU, ports, disk."""

import platform
import shutil
import socket
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from tailtune.doctor.findings import BLOCKS, GIGABYTE, OK, WARNING, Finding
from tailtune.jobs.local import count_gpus


def local_findings() -> Iterator[Finding]:
    yield Finding("python", OK, platform.python_version())
    yield from _packages()
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


def _packages() -> Iterator[Finding]:
    """Compare the installed versions with those that tailtune requires."""
    mismatches = []
    for text in metadata.requires("tailtune") or []:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            mismatches.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            mismatches.append(f"{requirement.name} is {version}, needed {requirement.specifier}")
    if mismatches:
        yield Finding("packages", BLOCKS, "; ".join(mismatches), "pip install -c constraints.txt -e .")
    else:
        shown = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "trl", "kfp"))
        yield Finding("packages", OK, shown)
