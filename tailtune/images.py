"""Every image reference, once. `pipeline.py --image-registry` compiles with another registry."""

import os

from tailtune import __version__

REGISTRY = os.environ.get("TAILTUNE_IMAGE_REGISTRY") or (
    "image-registry.openshift-image-registry.svc:5000/lyric-professor"
)
PIPELINE = f"{REGISTRY}/tailtune-pipeline:{__version__}"
"""Of the steps that need no GPU."""
TRAINER = f"{REGISTRY}/tailtune-trainer:{__version__}"
"""Of the training job's pods, and of the steps that run models: CUDA."""
