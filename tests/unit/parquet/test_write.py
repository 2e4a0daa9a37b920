"""The Parquet file that a conversion writes: its rows, limits, manifest and size."""

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from converted import ENCODINGS, GOOD, convert, data_of, make_rows, rows_of, texts

from tailtune import manifest
from tailtune.errors import UserError
from tailtune.files import sha256_file
from tailtune.manifest import publish
from tailtune.parquet import lines as source_lines
from tailtune.parquet import write
from tailtune.parquet.write import write_parquet


def test_template_keeps_escaped_braces_and_repeated_columns(tmp_path: Path) -> None:
    data = data_of({"q": "{{{a}}} {a}: {b c}", "plain": "{a}"})
    assert rows_of(convert(tmp_path, "data.jsonl", '{"b c": "y", "a": "x", "z": [1]}', data)) == [
        {"q": "{x} x: y", "plain": "x"}
    ]


def test_rejects_file_shows_a_short_text(tmp_path: Path) -> None:
    facts = convert(tmp_path, "data.jsonl", '{"a": "x"}\n' + "é" * 5000 + '\n\xff{"a"\n', texts())
    first = json.loads((facts.path.parent / "rejects.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["text"] == "é" * 500


def lines_with_bad(total: int, bad: Iterable[int]) -> str:
    return "".join(
        "broken\n" if i in bad else json.dumps({**GOOD, "topic": f"t{i}"}) + "\n" for i in range(1, total + 1)
    )


def test_too_many_rejects_fail_and_leave_the_rejects_file(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        convert(tmp_path, "data.jsonl", lines_with_bad(200, range(3, 15)), data_of())
    kept = tmp_path / "out.rejects.jsonl"
    assert str(caught.value) == (
        "12 of 200 rows (6.0 %) were rejected, above data.max_rejected_share 1 %; "
        f"first: line 3: broken JSON (Expecting value at character 1); see {kept}"
    )
    assert [json.loads(line)["line"] for line in kept.read_text().splitlines()] == list(range(3, 15))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "out.rejects.jsonl"]
    facts = write_parquet(tmp_path / "data.jsonl", tmp_path / "out", data_of(max_rejected_share=0.06))
    assert (facts.num_rows, facts.num_rejected) == (188, 12)
    assert len(facts.rejected_examples) == 5
    assert not kept.exists(), "a file of an earlier failure would mislead"


def test_failure_leaves_an_earlier_result_unchanged(tmp_path: Path) -> None:
    before = convert(tmp_path, "data.jsonl", lines_with_bad(10, []), data_of())
    with pytest.raises(UserError):
        convert(tmp_path, "data.jsonl", lines_with_bad(10, [1]), data_of())
    assert before.path.exists()


def test_duplicates_are_removed_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_lines, "BATCH_BYTES", 2000)
    source = make_rows(300)
    planted = source + source[:7] + [source[-1], {**source[0], "other": "column"}, {**source[0], "answer": "else"}]
    random.Random(1).shuffle(planted)
    facts = convert(tmp_path, "data.jsonl", ENCODINGS["jsonl"](planted), data_of())
    assert (facts.num_rows, facts.num_duplicates, facts.num_rejected) == (301, 9, 0)
    unique = dict.fromkeys((row["topic"], row["question"], row["answer"]) for row in planted)
    assert [row["answer"] for row in rows_of(facts)] == [answer for _, _, answer in unique], "the first one is kept"


def test_rows_that_join_to_the_same_text_are_not_duplicates(tmp_path: Path) -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("a\\u0000b", "c"), ("a", "b\\u0000c"), ("aÿ", "c"), ("a", "ÿc")]
    content = "".join(f'{{"a": "{a}", "b": "{b}"}}\n' for a, b in pairs)
    assert convert(tmp_path, "data.jsonl", content, data_of({"a": "{a}", "b": "{b}"})).num_duplicates == 0


@pytest.mark.parametrize("batch_bytes", [1 << 20, 300])
def test_max_rows_counts_the_same_in_any_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    monkeypatch.setattr(source_lines, "BATCH_BYTES", batch_bytes)
    good = [json.dumps({"a": f"row {i}"}) for i in range(50)]
    content = "\n".join([*good[:5], "bad", *good[2:10], "bad", good[9], *good[10:], "bad"])
    facts = convert(tmp_path, "data.jsonl", content, texts(max_rows=10))
    assert [row["a"] for row in rows_of(facts)] == [f"row {i}" for i in range(10)]
    assert (facts.num_rejected, facts.num_duplicates) == (1, 3)


COLUMN_MISSING = r"column 'topic' is not in the data; found: artist, lyrics, song; map your columns in data.columns"


@pytest.mark.parametrize("encoding", ["jsonl", "json", "csv", "parquet"])
def test_missing_column_is_reported_with_the_existing_ones(tmp_path: Path, encoding: str) -> None:
    source = [{"artist": "A", "lyrics": f"la {i}", "song": "S"} for i in range(30)]
    with pytest.raises(UserError, match=COLUMN_MISSING):
        convert(tmp_path, f"data.{encoding}", ENCODINGS[encoding](source), data_of())


def test_second_call_changes_no_file(tmp_path: Path) -> None:
    first = convert(tmp_path, "data.jsonl", lines_with_bad(200, [2]), data_of())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert write_parquet(tmp_path / "data.jsonl", tmp_path / "out", data_of()) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    content = ENCODINGS["jsonl"](make_rows(500))
    first = convert(tmp_path, "data.jsonl", content, data_of())
    (tmp_path / "other").mkdir()
    assert convert(tmp_path / "other", "data.jsonl", content, data_of()).content_sha256 == first.content_sha256


@pytest.mark.parametrize(
    "change",
    [
        {"columns": {"full-question": "{question}", "answer": "{answer}"}},
        {"max_rows": 3},
        {"max_rejected_share": 0.5},
    ],
    ids=str,
)
def test_changed_recipe_converts_again(tmp_path: Path, change: dict[str, Any]) -> None:
    convert(tmp_path, "data.jsonl", ENCODINGS["jsonl"](make_rows(20)), data_of())
    before = (tmp_path / "out" / "manifest.json").read_text()
    write_parquet(tmp_path / "data.jsonl", tmp_path / "out", data_of(**change))
    assert (tmp_path / "out" / "manifest.json").read_text() != before


def test_changed_content_converts_again(tmp_path: Path) -> None:
    convert(tmp_path, "data.jsonl", ENCODINGS["jsonl"](make_rows(20)), data_of())
    assert convert(tmp_path, "data.jsonl", ENCODINGS["jsonl"](make_rows(21)), data_of()).num_rows == 21


def test_hash_of_the_fetch_step_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with publish(tmp_path / "raw", {"step": "fetch"}, {}) as partial:
        (partial / "data.jsonl").write_bytes(ENCODINGS["jsonl"](make_rows(20)))

    def hash_other_files(path: Path) -> str:
        assert path.name != "data.jsonl", "the source was hashed again"
        return sha256_file(path)

    monkeypatch.setattr(manifest, "sha256_file", hash_other_files)
    assert write_parquet(tmp_path / "raw" / "data.jsonl", tmp_path / "out", data_of()).num_rows == 20


def test_manifest_of_another_program_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    assert convert(tmp_path, "data.jsonl", ENCODINGS["jsonl"](make_rows(20)), data_of()).num_rows == 20


def test_survival_data_takes_at_most_80_kb(tmp_path: Path) -> None:
    source = os.environ.get("TAILTUNE_SURVIVAL_DATA")
    if not source:
        pytest.skip("TAILTUNE_SURVIVAL_DATA does not name the 2,845-row survival file")
    facts = write_parquet(Path(source), tmp_path / "out", data_of())
    assert (facts.num_rows, facts.num_rejected, facts.num_duplicates) == (2845, 0, 0)
    assert facts.parquet_bytes <= 80_000


def test_small_file_is_compressed_better_than_by_default(tmp_path: Path) -> None:
    facts = convert(tmp_path, "data.jsonl", ENCODINGS["jsonl"](make_rows(2845)), data_of())
    pq.write_table(pq.read_table(facts.path), tmp_path / "default.parquet", compression="zstd")
    assert facts.parquet_bytes < 0.9 * (tmp_path / "default.parquet").stat().st_size


def test_several_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "ROW_GROUP_BYTES", 50_000)
    monkeypatch.setattr(source_lines, "BATCH_BYTES", 10_000)
    source = make_rows(2000)
    facts = convert(tmp_path, "data.jsonl", ENCODINGS["jsonl"](source), data_of())
    assert pq.ParquetFile(facts.path).num_row_groups > 3
    assert [row["answer"] for row in rows_of(facts)] == [row["answer"] for row in source]
