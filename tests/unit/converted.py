"""What the tests of the conversion to Parquet share: rows, and the conversion of a file that contains them."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tailtune.parquet.write import ParquetFacts, write_parquet
from tailtune.recipe.schema import Data

SURVIVAL = {"full-question": "For {topic}, {question}", "answer": "{answer}"}
GOOD = {"topic": "Knots", "question": "How do I tie a bowline?", "answer": "Make a loop – then pass the end."}


def data_of(columns: dict[str, str] = SURVIVAL, **values: Any) -> Data:
    return Data(**{"source": "x", "columns": columns, "split_by": next(iter(columns)), **values})


def texts(**values: Any) -> Data:
    """Return the data section of a recipe with only the column `a`, in which any share of rows can be bad."""
    return data_of({"a": "{a}"}, **{"max_rejected_share": 1.0, **values})


def rows_of(facts: ParquetFacts) -> list[dict[str, str]]:
    return list(pq.read_table(facts.path).to_pylist())


def rejects_of(facts: ParquetFacts) -> list[tuple[int, str]]:
    lines = (facts.path.parent / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    return [(bad["line"], bad["reason"]) for bad in map(json.loads, lines)]


def convert(tmp_path: Path, name: str, content: bytes | str, data: Data) -> ParquetFacts:
    source = tmp_path / name
    source.write_bytes(content.encode() if isinstance(content, str) else content)
    return write_parquet(source, tmp_path / "out", data)


def make_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    words = [
        "rope",
        "knot",
        "fire",
        "water",
        "boil",
        "never",
        "three minutes",
        "wound –",
        "press",
        "café",
        "火",
    ]
    pick = random.Random(seed).choices
    return [
        {
            "topic": " ".join(pick(words, k=2)),
            "question": f"{' '.join(pick(words, k=6))} {number}?",
            "answer": ' "'.join(pick(words, k=14)) + "\\ \t.",
        }
        for number in range(count)
    ]


def as_csv(rows_: list[dict[str, str]]) -> bytes:
    def quoted(value: str) -> str:
        return '"' + value.replace('"', '""') + '"'

    lines = [",".join(rows_[0])] + [",".join(quoted(value) for value in row.values()) for row in rows_]
    return ("\r\n".join(lines) + "\r\n").encode()


def as_parquet(rows_: list[dict[str, str]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows_), sink)
    return bytes(sink.getvalue().to_pybytes())


ENCODINGS: dict[str, Callable[[list[dict[str, str]]], bytes]] = {
    "jsonl": lambda rows_: "".join(json.dumps(row) + "\n" for row in rows_).encode(),
    "unicode.jsonl": lambda rows_: "\n".join(json.dumps(row, ensure_ascii=False) for row in rows_).encode(),
    "crlf.jsonl": lambda rows_: "\r\n".join(json.dumps(row) for row in rows_).encode(),
    "blank-lines.jsonl": lambda rows_: "\n \n\n".join("  " + json.dumps(row) + "\t" for row in rows_).encode(),
    "bom.jsonl": lambda rows_: b"\xef\xbb\xbf" + "\n".join(json.dumps(row) for row in rows_).encode(),
    "json": lambda rows_: json.dumps(rows_).encode(),
    "pretty.json": lambda rows_: json.dumps(rows_, indent=2, ensure_ascii=False).encode(),
    "crlf.json": lambda rows_: json.dumps(rows_, indent="\t").replace("\n", "\r\n").encode(),
    "compact.json": lambda rows_: b"\xef\xbb\xbf\n\n" + json.dumps(rows_, separators=(",", ":")).encode() + b"\n \n",
    "lines.json": lambda rows_: "".join(json.dumps(row) + "\n" for row in rows_).encode(),
    "csv": as_csv,
    "bom.csv": lambda rows_: b"\xef\xbb\xbf" + as_csv(rows_),
    "parquet": as_parquet,
}
