"""Tail training: the frozen layers are computed once, the last layers and the head train on their states.

Read in this order: `rows` (what trains, and the shared prompt), `layout` and `attention` (rows without
padding, on top of one prompt), `split` (a decoder cut in two), `cache` (the states of all rows) and
`placement` (where they are kept), `loss`, `module` (what Trainer trains), `check` (when not to),
`trainer` (how it attaches to TRL's SFTTrainer).
"""
