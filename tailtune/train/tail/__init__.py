"""Tail training: computes the frozen layers once and trains the last layers and the head on their hidden states.

Reading order:

- `tokenized_rows`: the rows, the prefix that they share, and the tokens to predict;
- `layout`, `attention`: the rows of a batch in one sequence without padding, and causal attention over it;
- `decoder`: a model split at its first trainable layer;
- `cache`, `placement`: the hidden states of all rows, and where they are kept;
- `loss`, `module`: the loss, and the module that Trainer trains;
- `check`: when the whole model has to train instead;
- `trainer`: the connection to TRL's SFTTrainer;
- `savings`: switches for benchmarks.
"""
