"""Source files of every format: good rows, and bad ones with their line and reason."""

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from converted import ENCODINGS, convert, data_of, make_rows, rejects_of, rows_of, texts

from tailtune.errors import UserError
from tailtune.parquet import lines as source_lines
from tailtune.parquet import parquet_reader, readers
from tailtune.parquet.lines import Columns
from tailtune.parquet.write import write_parquet

COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": lambda content: bytes(pa.compress(content, codec="zstd", asbytes=True)),
}


@pytest.mark.parametrize("compression", COMPRESSED)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("batch_bytes", [1 << 20, 700])
def test_every_format_and_compression_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, compression: str, batch_bytes: int
) -> None:
    monkeypatch.setattr(source_lines, "BATCH_BYTES", batch_bytes)
    source = make_rows(60)
    content = COMPRESSED[compression](ENCODINGS[encoding](source))
    facts = convert(tmp_path, f"data.{encoding}{compression}", content, data_of())
    assert rows_of(facts) == [
        {"full-question": f"For {row['topic']}, {row['question']}", "answer": row["answer"]} for row in source
    ]
    assert (facts.num_rows, facts.num_rejected, facts.num_duplicates) == (60, 0, 0)
    assert facts.source_bytes == len(content)
    assert facts.parquet_bytes == facts.path.stat().st_size
    assert sorted(path.name for path in facts.path.parent.iterdir()) == [
        "data.parquet",
        "manifest.json",
        "rejects.jsonl",
    ]


@pytest.mark.parametrize("compression", COMPRESSED)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_progress_of_a_conversion(
    tmp_path: Path, encoding: str, compression: str, last_lines: Callable[[], list[str]]
) -> None:
    name, content = f"data.{encoding}{compression}", COMPRESSED[compression](ENCODINGS[encoding](make_rows(60)))
    convert(tmp_path, name, content, data_of())
    whole = f"parquet: {name} {len(content) / 1000:.1f}/{len(content) / 1000:.1f} kB"
    assert whole in last_lines() or (encoding == "parquet" and not compression), last_lines()
    assert encoding != "parquet" or "parquet: row 60/60" in last_lines()


def test_txt_has_one_row_per_line_that_is_not_blank(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfThe first line \r\n\r\n \t\nbad \xff byte\n\x00 nul\n   indented\nlast"
    facts = convert(tmp_path, "data.txt", content, data_of({"text": "{text}"}, max_rejected_share=0.5))
    assert [row["text"] for row in rows_of(facts)] == ["The first line ", "\x00 nul", "   indented", "last"]
    assert rejects_of(facts) == [(4, "invalid UTF-8")]


def test_declared_format_wins_over_the_name(tmp_path: Path) -> None:
    facts = convert(tmp_path, "data.bin.gz", gzip.compress(b'{"a": "x"}\n', mtime=0), texts(format="jsonl"))
    assert rows_of(facts) == [{"a": "x"}]


def test_values_stay_as_they_are_written(tmp_path: Path) -> None:
    content = '{"a": "007"}\n{"a": 1.50}\n{"a": 12345678901234567890123}\n{"a": -1e5}\n{"a": " x\\u0000é😀 "}\n'
    facts = convert(tmp_path, "data.jsonl", content, texts())
    assert [row["a"] for row in rows_of(facts)] == [
        "007",
        "1.50",
        "12345678901234567890123",
        "-1e5",
        " x\0é😀 ",
    ]
    facts = convert(tmp_path, "data.csv", 'a,b\n007,"1\n2"\n1.50,\n', texts())
    assert [row["a"] for row in rows_of(facts)] == ["007", "1.50"]


BAD_JSON_LINES: dict[str, tuple[bytes, str]] = {
    "not json": (b"hello", "broken JSON (Expecting value at character 1)"),
    "cut off": (b'{"a": "x', "broken JSON (Unterminated string starting at character 7)"),
    "trailing comma": (b'{"a": "x",}', "broken JSON"),
    "two objects": (b'{"a": "x"}{"a": "y"}', "broken JSON (Extra data at character 11)"),
    "text behind": (b'{"a": "x"} ]', "broken JSON (Extra data at character 12)"),
    "single quotes": (b"{'a': 'x'}", "broken JSON"),
    "bare control character": (
        b'{"a": "x\x01y"}',
        "broken JSON (Invalid control character at character 9)",
    ),
    "NUL in a string": (b'{"a": "x\x00y"}', "broken JSON"),
    "NUL between objects": (b'{"a": "x"}\x00{"a": "y"}', "broken JSON (Extra data at character 11)"),
    "NUL line": (b"\x00\x00", "broken JSON"),
    "a number": (b"5", "not a JSON object but a number"),
    "a string": (b'"x"', "not a JSON object but a string"),
    "a list": (b'[{"a": "x"}]', "not a JSON object but a list"),
    "null": (b"null", "not a JSON object but null"),
    "missing": (b'{"b": "x"}', "column 'a' is missing"),
    "no columns": (b"{}", "column 'a' is missing"),
    "null value": (b'{"a": null}', "column 'a' is null, not text"),
    "empty": (b'{"a": ""}', "column 'a' is empty"),
    "blank": (b'{"a": " \\n\\u3000"}', "column 'a' is empty"),
    "boolean": (b'{"a": true}', "column 'a' is a boolean, not text"),
    "list value": (b'{"a": ["x"]}', "column 'a' is a list, not text"),
    "object value": (b'{"a": {"a": "x"}}', "column 'a' is an object, not text"),
    "NaN": (b'{"a": NaN}', "column 'a' is NaN or Infinity, not text"),
    "key twice": (b'{"a": "x", "a": "y"}', "column 'a' appears more than once"),
    "lone surrogate": (b'{"a": "\\ud800"}', "column 'a' contains a lone surrogate, which is not valid Unicode"),
    "invalid UTF-8": (b'{"a": "caf\xe9"}', "invalid UTF-8 (byte 11)"),
    "invalid UTF-8 elsewhere": (b'{"a": "x", "b": "\xff"}', "invalid UTF-8 (byte 18)"),
    "deep": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "JSON nested too deeply"),
    "too long": (b'{"a": "' + b"x" * 300_000 + b'"}', "row longer than data.max_row_bytes 250,000"),
}


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("case", BAD_JSON_LINES)
def test_bad_json_line_is_rejected_with_its_line_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, line_end: bytes
) -> None:
    monkeypatch.setattr(source_lines, "BATCH_BYTES", 100_000)
    bad, reason = BAD_JSON_LINES[case]
    good = [b'{"a": "row %d"}' % number for number in range(6)]
    content = line_end.join([*good[:2], b"", bad, *good[2:4], bad, *good[4:]])
    facts = convert(tmp_path, "data.jsonl", content, texts(max_row_bytes=250_000))
    assert [row["a"] for row in rows_of(facts)] == [f"row {number}" for number in range(6)]
    assert [line for line, _ in rejects_of(facts)] == [4, 7]
    assert all(text.startswith(reason) for _, text in rejects_of(facts)), rejects_of(facts)
    assert facts.num_rejected == 2
    assert [example["line"] for example in facts.rejected_examples] == [4, 7]


@pytest.mark.parametrize("case", sorted(set(BAD_JSON_LINES) - {"NUL line"}))
@pytest.mark.parametrize("pretty", [False, True])
def test_bad_element_of_a_json_array_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, pretty: bool
) -> None:
    if case == "cut off":
        pytest.skip("an open quote leaves the array without an end: test_array_that_does_not_end")
    if case == "text behind":
        pytest.skip("a bracket too many ends the array: test_text_after_the_array")
    monkeypatch.setattr(source_lines, "BATCH_BYTES", 10_000)
    data = texts(max_row_bytes=250_000)
    bad, reason = BAD_JSON_LINES[case]
    good = [b'{"a":\n "row %d, [}"}' % number for number in range(4)]
    comma = b"\r\n,\n\t" if pretty else b","
    facts = convert(tmp_path, "data.json", b"[" + comma.join([*good[:2], bad, *good[2:], bad]) + b"]\n", data)
    assert [row["a"] for row in rows_of(facts)] == [f"row {number}, [}}" for number in range(4)]
    assert [line for line, _ in rejects_of(facts)] == ([7, 15] if pretty else [3, 5])
    assert all(text.startswith(reason) for _, text in rejects_of(facts)), rejects_of(facts)


def test_array_of_scalars(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no row is left: 3 of 3 rows.*line 2: not a JSON object but a number"):
        convert(tmp_path, "data.json", '[\n1, "x",\n null]', texts())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": "x"},\n{"a": "y"', "does not end.*after line 1"),
        ('[{"a": "x"},\n{"a": "y},\n{"a": "z"}]', "does not end.*after line 1"),
        ('[{"a": "x"},\n{"a": ["y"}]', "does not end"),
        ('[{"a": "x\\\\', "does not end"),
        ("[", "does not end"),
        ('[{"a": "x"}]\n\n[{"a": "y"}]', "line 3: text follows the end"),
        ('[{"a": "x"}] ]', "line 1: text follows the end"),
        ('[{"a": "x"}]\\', "line 1: text follows the end"),
        ("[]", "contains no rows"),
        ("[ , ]", "contains no rows"),
    ],
)
def test_array_that_is_broken_as_a_whole(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        convert(tmp_path, "data.json", content, texts())
    assert not (tmp_path / "out").exists()


def test_bad_csv_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_lines, "BATCH_BYTES", 500)
    content = b"\n".join(
        [
            b"a,b",
            b'"two\nlines",1',
            b"",
            b"one value",
            b"x,2,3",
            b",4",
            b'" ",5',
            b'"caf\xe9",6',
            b"x" * 3000 + b",7",
            b'"closed" badly,8',
            b'say ""hi"",9',
            b"nul \x00,10",
            b'"never closed,11',
            b"still a row,12",
            *[b"row %d,%d" % (number, number) for number in range(14, 400)],
        ]
    )
    facts = convert(tmp_path, "data.csv", content, texts(max_row_bytes=2000))
    assert [row["a"] for row in rows_of(facts)][:4] == ["two\nlines", 'say ""hi""', "nul \0", "still a row"]
    assert facts.num_rows == 4 + 386
    assert rejects_of(facts) == [
        (5, "1 values, but the header has 2 columns"),
        (6, "3 values, but the header has 2 columns"),
        (7, "column 'a' is empty"),
        (8, "column 'a' is empty"),
        (9, "invalid UTF-8"),
        (10, "row longer than data.max_row_bytes 2,000"),
        (11, "broken CSV (',' expected after '\"')"),
        (14, "broken CSV (a quote is opened and never closed)"),
    ]


def test_unclosed_quote_at_the_end_of_a_csv_file_costs_one_row(tmp_path: Path) -> None:
    facts = convert(tmp_path, "data.csv", 'a,b\nx,1\n"y,2\nz,3\n', texts())
    assert [row["a"] for row in rows_of(facts)] == ["x", "z"]
    assert rejects_of(facts) == [(3, "broken CSV (a quote is opened and never closed)")]


def test_bad_parquet_rows(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([b"x", None, b"", b"\xff", b"caf\xc3\xa9"]), "n": [1.5, 2.0, 3.0, 4.0, None]})
    pq.write_table(table, tmp_path / "data.parquet")
    facts = write_parquet(tmp_path / "data.parquet", tmp_path / "out", data_of({"t": "{a}{n}"}, max_rejected_share=1))
    assert rows_of(facts) == [{"t": "x1.5"}]
    assert rejects_of(facts) == [
        (2, "column 'a' is null"),
        (3, "column 'a' is empty"),
        (4, "invalid UTF-8"),
        (5, "column 'n' is null"),
    ]


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["x", "y"]).dictionary_encode(),
        pa.array(["x", "y"], pa.large_string()),
        pa.array(["x", "y"], pa.string_view()),
        pa.array([b"x", b"y"], pa.large_binary()),
    ],
    ids=lambda values: str(values.type),
)
def test_parquet_texts_of_any_type(tmp_path: Path, values: pa.Array) -> None:
    pq.write_table(pa.table({"a": values}), tmp_path / "data.parquet")
    assert rows_of(write_parquet(tmp_path / "data.parquet", tmp_path / "out", texts())) == [
        {"a": "x"},
        {"a": "y"},
    ]


def test_parquet_column_that_is_neither_text_nor_a_list_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [True]}), tmp_path / "data.parquet")
    with pytest.raises(UserError, match=r"column 'a' is bool, not text or numbers"):
        write_parquet(tmp_path / "data.parquet", tmp_path / "out", texts())


@pytest.mark.parametrize("seed", range(30))
def test_batches_of_any_size_give_the_same_rows_and_rejects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random_ = random.Random(seed)
    bad = [case for name, (case, _) in BAD_JSON_LINES.items() if name not in ("deep", "too long")]
    good = [json.dumps(row, ensure_ascii=seed % 2 == 0).encode() for row in make_rows(40, seed)]
    good = [line.replace(b'"answer"', b'"a"') for line in good]
    pool = good * 4 + [b"", b"  \t", b'  {"a": 5} ', b'{"a": "dup"}'] + bad * (seed % 3)
    lines = [random_.choice(pool) for _ in range(random_.randrange(1, 3000))]
    content = (b"\r\n" if seed % 5 == 0 else b"\n").join(lines)
    (tmp_path / "data.jsonl").write_bytes(content)

    def outcome() -> Any:
        source = readers.source_of(tmp_path / "data.jsonl", texts(), tmp_path)
        batches = list(readers.read_rows(source, Columns(["a"])))
        return (
            [value for batch in batches for value in batch.columns["a"].to_pylist()],
            [int(line) for batch in batches for line in batch.lines],
            [reject for batch in batches for reject in batch.rejects],
        )

    one_batch = outcome()
    monkeypatch.setattr(
        source_lines, "BATCH_BYTES", random_.choice([1, 7, 100, 1000]) if len(content) < 50_000 else 1000
    )
    assert outcome() == one_batch
    monkeypatch.setattr(source_lines, "BATCH_ROWS", random_.choice([1, 3, 50]))
    assert outcome() == one_batch
    expected = [number for number, line in enumerate(lines, 1) if line.strip()]
    assert sorted(one_batch[1] + [reject.line for reject in one_batch[2]]) == expected, "nothing is dropped silently"


@pytest.mark.parametrize("seed", range(20))
def test_array_and_lines_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random_ = random.Random(seed)
    nasty = ['\\"', "[", "}", ",", "\\\\", "\n", '"', "\\n]", "é", " "]
    source = [{"a": "x" + "".join(random_.choices(nasty, k=6)) + str(number)} for number in range(200)]
    space = random_.choice(["", "\n", " \r\n\t"])
    array = "[" + space + f"{space},{space}".join(json.dumps(row) for row in source) + space + "]"
    monkeypatch.setattr(source_lines, "BATCH_BYTES", random_.choice([1, 3, 64, 5000]))
    assert rows_of(convert(tmp_path, "data.json", array, texts())) == source


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.csv", "data.txt", "data.jsonl.gz", "data.csv.zst"])
@pytest.mark.parametrize("content", [b"", b" \n\t\n\r\n", b"\xef\xbb\xbf"], ids=["empty", "blank", "BOM"])
def test_file_without_rows_is_an_error(tmp_path: Path, name: str, content: bytes) -> None:
    data = data_of({"text": "{text}"})
    with pytest.raises(UserError, match="contains no rows"):
        convert(tmp_path, name, COMPRESSED[Path(name).suffix if name.count(".") > 1 else ""](content), data)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.jsonl.gz", gzip.compress(os.urandom(5000))[:-20], "cannot be read as jsonl, gzip: Truncated"),
        ("data.jsonl.gz", b"no gzip", "cannot be read as jsonl, gzip"),
        ("data.csv.zst", b"no zstd", "cannot be read as csv, zstd"),
        ("data.parquet", b"no parquet", "cannot be read as parquet"),
        ("data.parquet.gz", gzip.compress(b"no parquet", mtime=0), "cannot be read as parquet, gzip"),
        ("data.parquet", b"", "cannot be read as parquet"),
        (
            "data.xlsx",
            b"x",
            r"format of data.xlsx is unknown.*json, .jsonl, .csv, .txt, .parquet.*data.format",
        ),
        ("data", b"x", "format of data is unknown"),
        ("data.gz", b"x", "format of data.gz is unknown"),
        ("data.csv", b'"a', "CSV header cannot be read"),
        ("data.csv", b"a,a\nx,y\n", "column 'a' appears 2 times in the header"),
        ("data.txt", b"x\n", "column 'a' is not in the data; found: text"),
    ],
)
def test_file_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        convert(tmp_path, name, content, texts())
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_missing_source(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not exist; check data\.source"):
        write_parquet(tmp_path / "data.jsonl", tmp_path / "out", texts())


def test_elements_of_an_array_that_any_part_of_the_file_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [{"a": "x\\"}, {"a": '"[,'}, {"a": "y", "b": [{"c": "]"}]}]
    elements = [*map(json.dumps, good), "", json.dumps({"a": "long " * 9})]
    array = "\n [" + ",\n".join(elements) + "]\n\n"
    for num_bytes in range(1, len(array) + 1):
        monkeypatch.setattr(source_lines, "BATCH_BYTES", num_bytes)
        facts = convert(tmp_path, "data.json", array, texts(max_row_bytes=40))
        assert [row["a"] for row in rows_of(facts)] == ["x\\", '"[,', "y"], num_bytes
        assert rejects_of(facts) == [(6, "row longer than data.max_row_bytes 40")], num_bytes
        (facts.path.parent / "manifest.json").unlink()  # convert again


def test_a_row_behind_too_much_white_space_is_not_lost(tmp_path: Path) -> None:
    facts = convert(tmp_path, "data.jsonl", '{"a": "x"}\n' + " " * 300 + '{"a": "y"}\n', texts(max_row_bytes=200))
    assert rejects_of(facts) == [(2, "row longer than data.max_row_bytes 200")]


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data.json.zst", "data.csv.gz", "data.txt.zst", "data.parquet.gz"])
def test_what_decompression_yields_is_limited(tmp_path: Path, name: str) -> None:
    content = b"PAR1" + b"\0" * 200_000
    compressed = gzip.compress(content) if name.endswith("gz") else pa.compress(content, codec="zstd", asbytes=True)
    words = r"has more bytes than data.max_file_bytes 100,000, decompressed; raise it, or split the file"
    with pytest.raises(UserError, match=words):
        data = data_of({"text": "{text}"}, max_file_bytes=100_000, **({} if "txt" in name else {"format": "jsonl"}))
        if "parquet" in name:
            data = data.model_copy(update={"format": "auto"})
        convert(tmp_path, name, compressed[:1] + compressed[1:], data)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_compressed_parquet_that_would_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_reader, "free_bytes", lambda _: 100_000)
    words = r"does not fit decompressed into half of the 100,000 free bytes of .*; decompress it where there is space"
    with pytest.raises(UserError, match=words):
        convert(tmp_path, "data.parquet.gz", gzip.compress(b"PAR1" + b"\0" * 60_000), texts())
    assert not (tmp_path / "out.partial").exists()


def test_long_parquet_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_lines, "BATCH_BYTES", 100)
    values = ["x", "y" * 90, "z" * 90, "v" * 1000, "w", "u" * 201]
    pq.write_table(pa.table({"a": values}), tmp_path / "data.parquet")
    facts = write_parquet(tmp_path / "data.parquet", tmp_path / "out", texts(max_row_bytes=200))
    assert [row["a"] for row in rows_of(facts)] == ["x", "y" * 90, "z" * 90, "w"]
    reason = "row longer than data.max_row_bytes 200"
    assert rejects_of(facts) == [(4, reason), (6, reason)]


def test_numbers_of_parquet_that_are_none(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1.5, float("nan"), float("inf"), float("-inf")]}), tmp_path / "data.parquet")
    data = data_of({"a": "{a}{a}"}, optional_columns=["a"], max_rejected_share=1)
    facts = write_parquet(tmp_path / "data.parquet", tmp_path / "out", data.model_copy(update={"optional_columns": []}))
    assert rejects_of(facts) == [(2, "column 'a' is null"), (3, "a number is infinite"), (4, "a number is infinite")]
    facts = write_parquet(tmp_path / "data.parquet", tmp_path / "optional", data)
    assert facts.num_rejected == 2, "an infinite number is no missing value"


def test_numbers_that_are_too_large(tmp_path: Path) -> None:
    rows = '{"a": [1.5]}\n{"a": [1e999]}\n{"a": [-1' + "0" * 400 + "]}\n"
    facts = convert(tmp_path, "data.jsonl", rows, texts())
    reason = "column 'a' contains a number that is too large"
    assert rejects_of(facts) == [(2, reason), (3, reason)]


def test_values_that_are_nested_deeply(tmp_path: Path) -> None:
    """Parquet has a limit of its own, and so has Python's JSON for what is not read."""
    deep: Any = "x"
    for _ in range(70):
        deep = [deep]
    facts = convert(tmp_path, "data.jsonl", json.dumps({"a": ["x"]}) + "\n" + json.dumps({"a": deep}), texts())
    assert rejects_of(facts) == [(2, "column 'a' is nested more than 64 levels deep")]
    pq.write_table(pa.table({"a": [deep]}), tmp_path / "data.parquet")
    with pytest.raises(UserError, match="schema too deeply nested"):
        write_parquet(tmp_path / "data.parquet", tmp_path / "other", texts())


def test_texts_that_stand_for_a_missing_value_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "tailtune")
    rows = [{"a": f"q{i}", "b": text} for i, text in enumerate(["None", "None ", "NaN", "Nanny", "-Infinity", "x"])]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    convert(tmp_path, "data.jsonl", content, data_of({"a": "{a}", "b": "{b}"}))
    assert [message for message in caplog.messages if "says only" in message] == [
        f"parquet: column 'b' says only '{text}' in {count} rows: if that means a missing value, leave them out"
        for text, count in (("-Infinity", 1), ("NaN", 1), ("None", 2))
    ]


def test_reasons_and_names_of_any_length_are_cut(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="column 'a' is not in the data") as caught:
        convert(tmp_path, "data.jsonl", json.dumps({"x" * 100_000: 1}), texts())
    assert len(str(caught.value)) < 300
    assert len(source_lines.BadRow("x" * 100_000).reason) < 400


def test_quotes_that_are_never_closed_end_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line can open a quote in which all that follow stay: reading all of them again would take hours."""
    monkeypatch.setattr(readers, "REREAD_BYTES", 100_000)
    with pytest.raises(UserError, match=r"line \d+ and many before it have a quote that is never closed"):
        convert(tmp_path, "data.csv", "a,b\n" + 'a","\n' * 10_000, texts())


LIMITED = """
import resource, sys
from pathlib import Path
from tailtune.errors import UserError
from tailtune.parquet.write import write_parquet
from tailtune.recipe.schema import Data
data = Data(source="x", columns={"a": "{a}"}, split_by="a", max_rejected_share=1, max_row_bytes=1_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    facts = write_parquet(Path(sys.argv[1]), Path(sys.argv[2]), data)
    print(facts.num_rows, facts.num_rejected, end=" ")
except UserError as error:
    print(str(error).partition(":")[0], end=" ")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def repeated(path: Path) -> None:
    """2 GB of rows, which a dictionary of four values repeats."""
    dictionary = pa.array([str(i) * 10_000_000 for i in range(4)])
    values = pa.DictionaryArray.from_arrays(pa.array([i % 4 for i in range(200)], pa.int32()), dictionary)
    pq.write_table(pa.table({"a": values}), path, compression="zstd", dictionary_pagesize_limit=1 << 30)


def zipped(first: bytes, part: bytes, last: bytes) -> Callable[[Path], None]:
    """200 MB of a part."""

    def write(path: Path) -> None:
        with gzip.open(path, "wb", 1) as file:
            file.write(first)
            for _ in range(200):
                file.write(part * (1_000_000 // len(part)))
            file.write(last)

    return write


ROW_OF_100_KB = b'{"b": 1, "a": "' + b"x" * 100_000 + b'"},'
BOMBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "spaces.json.gz": (zipped(b"", b" ", b""), "no row is left"),
    "repeated.parquet": (repeated, "no row is left"),
    "spaces.jsonl.gz": (zipped(b"", b" ", b'{"a": "x"}'), "no row is left"),
    "before.json.gz": (zipped(b"", b"\n", b'[{"a": "x"}]'), "1 0"),
    "within.json.gz": (zipped(b'[{"a": "x"},', b" ", b'{"a": "y"}]'), "2 0"),
    "array.json.gz": (zipped(b"[", ROW_OF_100_KB, b"]"), "1 0"),
    "lists.jsonl.gz": (zipped(b'{"a": "x"}\n{"b":', b"[", b"\n"), "1 1"),
    "text.txt.gz": (zipped(b"", b"x", b""), "no row is left"),
    "zeros.parquet.gz": (zipped(b"", b"\0", b""), "zeros.parquet.gz cannot be read as parquet, gzip"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if index > 1 else ()) for index, name in enumerate(BOMBS)]
)
def test_memory_is_bounded_by_the_longest_row(tmp_path: Path, name: str) -> None:
    write, outcome = BOMBS[name]
    write(tmp_path / name)
    program = LIMITED.replace('"{a}"', '"{text}"') if "txt" in name else LIMITED
    command = [sys.executable, "-c", program, str(tmp_path / name), str(tmp_path / "out")]
    shown, grown_mib = subprocess.run(command, check=True, capture_output=True, text=True).stdout.rsplit(" ", 1)
    assert shown.removeprefix(f"{tmp_path}/") == outcome
    assert float(grown_mib) < (600 if name == "repeated.parquet" else 150)


MEMORY = """
import resource, sys
from pathlib import Path
from tailtune.parquet.write import write_parquet
from tailtune.recipe.schema import Data
data = Data(source="x", columns={"a": "{a}"}, split_by="a", max_rejected_share=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
facts = write_parquet(Path(sys.argv[1]), Path(sys.argv[2]), data)
assert (facts.num_rows, facts.num_rejected) == (2, 1), facts
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("name", ["data.jsonl.zst", "data.json.zst", "data.csv.zst"])
def test_line_of_1_gb_is_not_held_in_memory(tmp_path: Path, name: str) -> None:
    before, after = {
        "data.jsonl.zst": (b'{"a": "x"}\n{"a": "', b'"}\n{"a": "y"}\n'),
        "data.json.zst": (b'[{"a": "x"},{"a": "', b'"},\n{"a": "y"}]'),
        "data.csv.zst": (b'a\nx\n"', b'"\ny\n'),
    }[name]
    num_mib = 1000 if name == "data.jsonl.zst" else 100
    with pa.output_stream(tmp_path / name, compression="zstd") as stream:
        stream.write(before)
        for _ in range(num_mib):
            stream.write(b"z" * (1 << 20))
        stream.write(after)
    command = [sys.executable, "-c", MEMORY, str(tmp_path / name), str(tmp_path / "out")]
    grown_mib = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown_mib < 300
