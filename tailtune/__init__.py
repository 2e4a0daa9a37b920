"""tailtune: fine-tune language models as real jobs. The package says HOW; it never imports kfp."""

__version__ = "0.1.0"
