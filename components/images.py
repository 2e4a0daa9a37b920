"""Every image reference, once."""

from tailtune import __version__

REGISTRY = "image-registry.openshift-image-registry.svc:5000/lyric-professor"
PIPELINE = f"{REGISTRY}/tailtune-pipeline:{__version__}"
