"""Chat: a causal language model learns to answer questions.

- `config.py`: prompt, generation, evaluation and demo settings; the metrics.
- `prompt.py`: from a row to messages and token ids, by one frozen chat template.
- `inference.py`: load a model and ask it; the same for evaluation, demo and `tailtune ask`.
- `evaluate.py`: metrics of one model, and the unigram floor.
- `style.py`: how answers are written: words, numbered steps, warnings; of models, references and data.
- `sections.py`: the demo questions, answered by base and tuned model.
"""
