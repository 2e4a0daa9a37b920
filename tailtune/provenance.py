"""Where a result comes from: code, packages, machine."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("tailtune", "torch", "transformers", "trl", "accelerate", "datasets", "pyarrow", "kfp")


def collect() -> dict[str, Any]:
    """Git commit, Python, package versions, GPUs and image; None where something is not known."""
    import torch

    return {
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "image": os.environ.get("TAILTUNE_IMAGE"),
    }


def git_commit() -> str | None:
    """Commit that the image was built from, or of the checkout that runs, `-dirty` when it has changes."""
    # The second is set in images that OpenShift builds.
    if commit := os.environ.get("TAILTUNE_GIT_COMMIT") or os.environ.get("OPENSHIFT_BUILD_COMMIT"):
        return commit
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
