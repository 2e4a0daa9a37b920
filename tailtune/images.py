"""References of the two images. `pipeline.py --image-registry` compiles with another registry."""

import os

from tailtune import __version__

INTERNAL = "image-registry.openshift-image-registry.svc:5000/lyric-professor"
REGISTRY = os.environ.get("TAILTUNE_IMAGE_REGISTRY") or INTERNAL
PIPELINE = f"{REGISTRY}/tailtune-pipeline:{__version__}"
"""Runs the steps that need no GPU."""
TRAINER = f"{REGISTRY}/tailtune-trainer:{__version__}"
"""Runs the pods of the training job and the steps that load models; has CUDA."""


def both(registry: str | None = None) -> tuple[str, str]:
    """Return the references of the pipeline's and the trainer's image, in another registry if given."""
    return tuple(image.replace(REGISTRY, registry or REGISTRY, 1) for image in (PIPELINE, TRAINER))  # type: ignore[return-value]
