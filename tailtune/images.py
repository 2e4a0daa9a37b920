"""References of the two images.

Without a registry they are the short names of image streams, which OpenShift resolves in the run's own project.
"""

import os

from tailtune import __version__

PIPELINE = f"tailtune-pipeline:{__version__}"
"""Runs the steps that need no GPU."""
TRAINER = f"tailtune-trainer:{__version__}"
"""Runs the pods of the training job and the steps that load models; has CUDA."""


def in_registry(registry: str | None = None) -> dict[str, str]:
    """Return the run parameters for images in a registry: `{"pipeline_image": "quay.io/me/tailtune-pipeline:…", …}`.

    Without an argument it is the one in the environment's TAILTUNE_IMAGE_REGISTRY; empty without that, too.
    """
    registry = registry or os.environ.get("TAILTUNE_IMAGE_REGISTRY")
    if not registry:
        return {}
    return {"pipeline_image": f"{registry}/{PIPELINE}", "trainer_image": f"{registry}/{TRAINER}"}
