"""Coverage-guided fuzzing of the reader of JSON: `python tests/fuzz/json_reader.py -max_total_time=60`.

Every input is a file, whose first byte says how it is read. Only a UserError may be raised, and no line may be lost.
The arguments are libFuzzer's (atheris passes them on); an input that fails is written to a file and shown.
"""

import io
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import atheris

with atheris.instrument_imports(include=["tailtune.parquet.json_reader", "tailtune.parquet.conversation", "json"]):
    from tailtune.parquet import json_reader

from tailtune.errors import UserError
from tailtune.parquet import lines
from tailtune.parquet.lines import BadRow, Columns, Source

WANTED = [Columns(["a", "b"]), Columns(["a"], frozenset("a")), Columns(["a"], messages="a"),
          Columns(["a"], types={"a": "of lists and objects"}), None]  # fmt: skip
MAX_ROW_BYTES = 100
SEEDS = [
    b'\0{"a": "x", "b": 1.50}\n{"a": "\\ud800", "b": NaN}\n\n{"a": "x", "a": "y", "b": -1e999}',
    b'\1[{"a": "x", "b": "y"},\n{"a": "[\\"]", "b": [{}]}, null]',
    b'\4{"a": [{"role": "user", "content": "?"}, {"from": "gpt", "value": "!", "weight": 0}]}',
    b'\6{"a": {"b": [[[[[[[[[[1]]]]]]]]]]}}\n{\n"a": "x"\n}',
    b'\7[]\n,"\\\\"}',
]


def fuzz(check: Callable[[bytes], None], seeds: list[bytes]) -> None:
    """Run a target with the arguments of this program, until it fails or their time is over."""
    corpus = Path(sys.argv.pop(1)) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None
    if corpus:
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds):
            (corpus / f"seed-{number}").write_bytes(seed)
        sys.argv.append(str(corpus))
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


def check_reader(content: bytes) -> None:
    how, content = content[0] if content else 0, content[1:]
    source = Source(Path("x"), ("jsonl", "json")[how % 2], None, Path(), MAX_ROW_BYTES, 1000)
    columns = WANTED[how // 2 % len(WANTED)]

    @contextmanager
    def open_source(_: Source):
        yield io.BufferedReader(io.BytesIO(content))

    with patch.object(json_reader, "open_source", open_source), patch.object(lines, "BATCH_BYTES", 1 + how // 10):
        try:
            records = list(json_reader.read_json(source, columns))
        except UserError:
            return
    num_values = len(columns.names) if columns else 1
    assert all(isinstance(each.values, BadRow) or len(each.values) == num_values for each in records)
    if source.format == "jsonl":
        parts = enumerate(content.split(b"\n"), 1)
        filled = [number for number, line in parts if line.strip(b" \t\r") or len(line) > MAX_ROW_BYTES]
        assert [each.line for each in records] == filled, "a line is lost"


if __name__ == "__main__":
    fuzz(check_reader, SEEDS)
