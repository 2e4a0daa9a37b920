"""Training, run by every rank: `torchrun … -m tailtune.train`.

Each kind's own part is in `tailtune/kinds/KIND/train.py`.
"""
