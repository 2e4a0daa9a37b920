"""How answers are written: their length, numbered steps, warnings. The same for rows and models; imports no torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailtune.config import fill_template, template_fields
from tailtune.kinds.chat.config import Prompt

WORD = r"\S+"
STEPS = r"(?is)(?:\bstep 1\b|(?:^|[\s*#(])1[.):][\s*]).*(?:\bstep 2\b|[\s*#(]2[.):][\s*])"
"""A numbered list: `1.`, `1)`, `1:` or `step 1`, and after it the same with 2; Markdown's marks may stand around."""
WARNING = (
    r"(?i)\b(?:warning|caution|beware|danger(?:ous)?|unsafe|hazard(?:s|ous)?|never|do not|don['’]t|avoid|be careful"
    r"|emergency services|medical (?:attention|help|care)|call (?:911|112|999))\b"
)
"""English words that warn, forbid or send for help. A warning light is no warning, so a share is an upper bound."""


def measure_texts(batches: Iterable[pa.Array]) -> dict[str, float]:
    """Median number of words, share with numbered steps and share with a warning, over all texts (at least one).

    A word is what stands between white space, so in a script without spaces a text has few.
    """
    lengths: list[np.ndarray] = []
    num_steps = num_warnings = 0
    for texts in batches:
        lengths.append(pc.count_substring_regex(texts, pattern=WORD).to_numpy(zero_copy_only=False))
        num_steps += pc.sum(pc.match_substring_regex(texts, pattern=STEPS)).as_py() or 0
        num_warnings += pc.sum(pc.match_substring_regex(texts, pattern=WARNING)).as_py() or 0
    words = np.concatenate(lengths)
    return {
        "answer_words": float(np.median(words)),
        "answers_with_steps": num_steps / len(words),
        "answers_with_warnings": num_warnings / len(words),
    }


def measure_data(prompt: Prompt, path: Path) -> dict[str, float]:
    """The same for the answers of all rows of a Parquet file, training and validation alike.

    In a conversation, all turns of the assistant are answers.
    """
    columns = template_fields(prompt.assistant or "") if prompt.messages is None else [prompt.messages]
    batches = pq.ParquetFile(path).iter_batches(columns=columns)
    return measure_texts(
        pa.array([text for row in batch.to_pylist() for text in _answers(prompt, row)], pa.string())
        for batch in batches
    )


def _answers(prompt: Prompt, row: Mapping[str, Any]) -> list[str]:
    if prompt.messages is None:
        return [fill_template(prompt.assistant or "", row)]
    return [message["content"] for message in row[prompt.messages] if message["role"] == "assistant"]
