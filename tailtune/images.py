"""Every image reference, once. `pipeline.py --image-registry` compiles with another registry."""

import os

from tailtune import __version__

INTERNAL = "image-registry.openshift-image-registry.svc:5000/lyric-professor"
REGISTRY = os.environ.get("TAILTUNE_IMAGE_REGISTRY") or INTERNAL
PIPELINE = f"{REGISTRY}/tailtune-pipeline:{__version__}"
"""Of the steps that need no GPU."""
TRAINER = f"{REGISTRY}/tailtune-trainer:{__version__}"
"""Of the training job's pods, and of the steps that run models: CUDA."""


def both(registry: str | None = None) -> tuple[str, str]:
    """The pipeline's and the trainer's image, also in another registry."""
    return tuple(image.replace(REGISTRY, registry or REGISTRY, 1) for image in (PIPELINE, TRAINER))  # type: ignore[return-value]
