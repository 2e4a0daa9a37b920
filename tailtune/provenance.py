"""Record where a result comes from: code, packages, GPUs."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("tailtune", "torch", "transformers", "trl", "accelerate", "datasets", "pyarrow", "kfp")


def collect() -> dict[str, Any]:
    """Return git commit, Python, package versions, GPUs and image; None for what is not known."""
    import torch

    return {
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "image": os.environ.get("TAILTUNE_IMAGE"),
    }


def git_commit() -> str | None:
    """Return the commit of the image, or that of the checkout, with `-dirty` when it has changes; None if not known."""
    # OpenShift sets the second variable in the images that it builds.
    if commit := os.environ.get("TAILTUNE_GIT_COMMIT") or os.environ.get("OPENSHIFT_BUILD_COMMIT"):
        return commit
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
