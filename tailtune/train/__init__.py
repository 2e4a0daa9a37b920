"""Training: `torchrun … -m tailtune.train`. One readable file per kind of stage (`sft.py`)."""
