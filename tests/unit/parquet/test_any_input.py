"""Whatever a file contains: the reader gives the rows that were written, counts bad ones, or says why in one line."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import tiny_recipe
from converted import data_of, texts
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tailtune.errors import UserError, printable
from tailtune.inspection import inspect_sources
from tailtune.parquet.lines import Columns
from tailtune.parquet.readers import read_rows, source_of
from tailtune.parquet.write import write_parquet

Row = dict[str, Any]
FEW = settings(max_examples=40, derandomize=True, deadline=None, database=None,
               suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
MANY = settings(FEW, max_examples=1500, derandomize=False, print_blob=True)
EFFORT = pytest.mark.parametrize("effort", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
TEXTS = st.text(st.characters(codec="utf-8"))
VALUES = st.one_of(
    TEXTS, st.integers(), st.floats(), st.none(), st.booleans(), st.lists(TEXTS), st.dictionaries(TEXTS, st.none())
)


def is_good(value: Any) -> bool:
    """Whether JSON with this value in a column of text is a good row."""
    if isinstance(value, str):
        return not (value.isspace() or value == "")
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def outcome(path: Path, columns: Columns) -> tuple[list[Row], int] | None:
    """The rows of a file and the number of bad ones, or None for a UserError."""
    try:
        batches = list(read_rows(source_of(path, texts(), path.parent), columns))
    except UserError:
        return None
    rows = [row for batch in batches for row in batch.columns.to_pylist()]
    rejects = [reject for batch in batches for reject in batch.rejects]
    assert all(len(reject.reason) < 400 and len(reject.text) <= 500 for reject in rejects)
    lines = [int(line) for batch in batches for line in batch.lines] + [reject.line for reject in rejects]
    assert ".json." in f"{path}." or len(set(lines)) == len(lines), "each line is one row"
    return rows, len(rejects)


# -- values that were written ------------------------------------------------------------------------


def as_csv(rows: list[Row], delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["a", "b"], delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows({name: as_text(value) for name, value in row.items()} for row in rows)
    return file.getvalue().encode()


def as_parquet(rows: list[Row]) -> bytes:
    sink = pa.BufferOutputStream()
    columns = {name: [None if row[name] is None else as_text(row[name]) for row in rows] for name in ("a", "b")}
    pq.write_table(pa.table(columns, pa.schema([("a", pa.string()), ("b", pa.string())])), sink, row_group_size=3)
    return bytes(sink.getvalue().to_pybytes())


WRITERS: dict[str, Callable[[list[Row]], bytes]] = {
    "x.jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode(),
    "x.ndjson": lambda rows: "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode(),
    "x.json": lambda rows: json.dumps(rows).encode(),
    "indented.json": lambda rows: json.dumps(rows, indent=1, ensure_ascii=False).encode("utf-8-sig"),
}


@EFFORT
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", WRITERS)
def test_json_values(name: str, compression: str, effort: settings, tmp_path: Path) -> None:
    @effort
    @given(st.lists(st.fixed_dictionaries({"a": VALUES, "b": VALUES})))
    def check(rows: list[Row]) -> None:
        path = tmp_path / f"{name}{compression}"
        codec = {"": lambda content: content, ".gz": gzip.compress,
                 ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True)}[compression]  # fmt: skip
        path.write_bytes(codec(WRITERS[name](rows)))
        good = [row for row in rows if is_good(row["a"]) and is_good(row["b"])]
        expected = [{each: as_text(value) for each, value in row.items()} for row in good]
        assert outcome(path, Columns(["a", "b"])) == (expected, len(rows) - len(good))

    check()


@EFFORT
@pytest.mark.parametrize("name", ["x.csv", "x.parquet", "x.csv.gz", "x.parquet.gz"])
def test_table_values(name: str, effort: settings, tmp_path: Path) -> None:
    @effort
    @given(st.lists(st.fixed_dictionaries({"a": TEXTS, "b": TEXTS})))
    @example([{"a": "\r", "b": '"\r\n,'}])
    @example([{"a": "\x85\u2028", "b": "\0"}])
    def check(rows: list[Row]) -> None:
        content = as_csv(rows) if "csv" in name else as_parquet(rows)
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        good = [row for row in rows if is_good(row["a"]) and is_good(row["b"])]
        assert outcome(tmp_path / name, Columns(["a", "b"])) == (good, len(rows) - len(good))

    check()


@FEW
@given(rows=st.lists(st.fixed_dictionaries({"a": TEXTS, "b": TEXTS})), delimiter=st.sampled_from("\t;|"))
def test_other_delimiters_are_named(rows: list[Row], delimiter: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(as_csv(rows, delimiter))
    with pytest.raises(UserError, match=r"are separated by (tabs|semicolons|vertical bars), not commas"):
        list(read_rows(source_of(tmp_path / "x.csv", texts(), tmp_path), Columns(["a", "b"])))


@EFFORT
def test_lines_of_text(effort: settings, tmp_path: Path) -> None:
    @effort
    @given(st.lists(TEXTS.filter(lambda text: "\n" not in text)))
    def check(lines: list[str]) -> None:
        (tmp_path / "x.txt").write_text("\n".join(lines), encoding="utf-8", newline="")
        found = outcome(tmp_path / "x.txt", Columns(["text"]))
        first = lines[0].removeprefix("\ufeff") if lines else ""
        expected = [{"text": line.removesuffix("\r")} for line in [first, *lines[1:]] if line.strip()]
        assert found is None or found == (expected, 0)

    check()


# -- anything else -----------------------------------------------------------------------------------

PARTS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\n", b"\r\n", b" ", b"\t", b";", b"\0", b"\xff", b"\xc3", b"a",
    b"b", b"text", b'{"a": "x"}', b'{"a": "x", "b": 1}', b'"a"', b"1", b"-1e999", b"NaN", b"null", b"\\ud800", b"\\u00",
    b"a,b\n", b'"a","b"', b"[[", b"\xef\xbb\xbf", b"\xff\xfe", b"PAR1", b"\x1f\x8b", "é\u2028\x85".encode(),
]  # fmt: skip
ANYTHING = st.one_of(st.binary(), st.lists(st.sampled_from(PARTS)).map(b"".join))


@EFFORT
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt", "x.parquet", "x.jsonl.gz", "x.json.zst"])
def test_any_bytes(name: str, effort: settings, tmp_path: Path) -> None:
    columns = Columns(["text"] if name == "x.txt" else ["a"])

    @effort
    @given(ANYTHING)
    def check(content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        outcome(tmp_path / name, columns)

    check()


@EFFORT
@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.csv.gz", "x.json.gz", "x.parquet", "x.parquet.gz"])
def test_files_that_are_damaged(name: str, effort: settings, tmp_path: Path) -> None:
    rows = [{"a": f"row {i}", "b": "é" * i} for i in range(20)]
    writer = as_csv if "csv" in name else as_parquet if "parquet" in name else WRITERS[name.removesuffix(".gz")]
    whole = gzip.compress(writer(rows)) if name.endswith(".gz") else writer(rows)

    @effort
    @given(st.integers(0, len(whole)), st.binary(max_size=4), st.integers(0, 4))
    def check(at: int, inserted: bytes, left_out: int) -> None:
        (tmp_path / name).write_bytes(whole[:at] + inserted + whole[at + left_out :])
        outcome(tmp_path / name, Columns(["a", "b"]))

    check()


JSON = st.recursive(
    st.one_of(TEXTS, st.integers(), st.floats(), st.none(), st.booleans()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "from", "value", "weight"]),
                                    st.sampled_from(["user", "assistant", "gpt", "x", "", 0]), max_size=3))  # fmt: skip


@EFFORT
def test_lists_and_objects(effort: settings, tmp_path: Path) -> None:
    @effort
    @given(st.lists(st.fixed_dictionaries({"a": TEXTS}, optional={"b": st.one_of(JSON, MESSAGES)})))
    @example([{"a": "x", "b": [{}, {}]}, {"a": "y", "b": [{"": None}]}])
    def check(rows: list[Row]) -> None:
        path = tmp_path / "x.jsonl"
        path.write_bytes(WRITERS["x.jsonl"](rows))
        data = data_of({"a": "{a}", "b": "{b}"}, max_rejected_share=1)
        try:
            facts = write_parquet(path, tmp_path / "out", data)
            assert facts.num_rows + facts.num_rejected + facts.num_duplicates == len(rows)
        except UserError:
            pass  # no row is left, or no type fits
        try:
            lines = list(inspect_sources([str(path)], tiny_recipe()))
        except UserError:
            return
        assert lines == [printable(line, newline=False) for line in lines]

    check()


def test_what_is_raised_for_a_broken_checksum(tmp_path: Path) -> None:
    """The case of a damaged file that only the end of it shows."""
    content = gzip.compress(b'{"a": "x", "b": "y"}\n' * 1000)
    (tmp_path / "x.jsonl.gz").write_bytes(content[:-8] + zlib.crc32(b"").to_bytes(4, "little") + content[-4:])
    assert outcome(tmp_path / "x.jsonl.gz", Columns(["a", "b"])) is None
