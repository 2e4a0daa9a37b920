"""Several files, and validation rows of their own: what the fetch step leaves, converted and split."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import tiny_recipe
from converted import SURVIVAL, data_of, make_rows, rejects_of, rows_of

from tailtune.errors import UserError
from tailtune.fetch.dataset import fetch_dataset
from tailtune.kinds.chat.config import Prompt
from tailtune.parquet.split import read_split
from tailtune.parquet.write import ParquetFacts, write_parquet
from tailtune.recipe.schema import Data


def lines(rows: list[Any]) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def own_validation(columns: dict[str, str] = SURVIVAL, **values: Any) -> Data:
    return Data(source="x", validation_source="y", columns=columns, **values)


def convert_files(
    tmp_path: Path,
    files: dict[str, list[Any]],
    data: Data,
    validation: dict[str, list[Any]] | None = None,
    prompt: Prompt | None = None,
) -> ParquetFacts:
    """Fetch and convert JSON Lines of these names."""
    for name, rows in {**files, **(validation or {})}.items():
        (tmp_path / name).write_text(lines(rows))
    fetched = fetch_dataset([str(tmp_path / name) for name in files], tmp_path / "raw",
                            validation_source=[str(tmp_path / name) for name in validation or {}] or None)  # fmt: skip
    return write_parquet(fetched.path, tmp_path / "out", data, prompt)


def test_three_files_give_the_rows_of_one(tmp_path: Path) -> None:
    rows = make_rows(60)
    (tmp_path / "one").mkdir()
    one = convert_files(tmp_path / "one", {"all.jsonl": rows}, data_of())
    three = convert_files(tmp_path, {"b.jsonl": rows[:30], "a.jsonl": rows[30:31], "c.jsonl": rows[31:]}, data_of())
    assert three.path.read_bytes() == one.path.read_bytes() and (one.num_files, three.num_files) == (1, 3)
    again = write_parquet(tmp_path / "raw", tmp_path / "out", data_of())
    assert again == three


def test_files_of_different_formats(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,x\n")
    (tmp_path / "b.jsonl").write_text('{"a": 2}\n')
    pq.write_table(pa.table({"a": [3]}), tmp_path / "c.parquet")
    fetched = fetch_dataset([str(tmp_path / name) for name in ("a.csv", "b.jsonl", "c.parquet")], tmp_path / "raw")
    assert rows_of(write_parquet(fetched.path, tmp_path / "out", data_of({"a": "{a}"}))) == [
        {"a": "1"}, {"a": "2"}, {"a": "3"}]  # fmt: skip


def test_rejects_and_duplicates_name_their_file(tmp_path: Path) -> None:
    files = {"one.jsonl": [{"a": "x"}, {"a": "y"}], "two.jsonl": [{"a": "x"}, "broken", {"a": ""}]}
    facts = convert_files(tmp_path, files, data_of({"a": "{a}"}, max_rejected_share=0.5))
    assert (facts.num_rows, facts.num_duplicates, facts.num_rejected) == (2, 1, 2)
    two = str(tmp_path / "two.jsonl")
    assert facts.rejected_examples[1] == {"line": 3, "reason": "column 'a' is empty", "file": two}
    written = [json.loads(line) for line in (facts.path.parent / "rejects.jsonl").read_text().splitlines()]
    assert [(each["file"], each["line"]) for each in written] == [(two, 2), (two, 3)]
    with pytest.raises(UserError, match=rf"2 of 5 rows \(40.0 %\) were rejected.*first: {two}, line 2: broken JSON"):
        convert_files(tmp_path, files, data_of({"a": "{a}"}))
    assert len(rejects_of(facts)) == 2, "the earlier result is unchanged"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_the_file_that_lacks_a_column_is_named(kind: str, tmp_path: Path) -> None:
    for name, column in (("one", "topic"), ("two", "subject")):
        rows = [{column: "t", "question": f"q{i}", "answer": "a"} for i in range(3)]
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.{kind}")
        elif kind == "csv":
            (tmp_path / f"{name}.{kind}").write_text(f"{column},question,answer\nt,q,a\n")
        else:
            (tmp_path / f"{name}.{kind}").write_text(lines(rows))
    fetched = fetch_dataset(str(tmp_path / f"*.{kind}"), tmp_path / "raw")
    two = tmp_path / f"two.{kind}"
    with pytest.raises(UserError, match=rf"column 'topic' is not in {two}; found: .*subject.*; map your columns"):
        write_parquet(fetched.path, tmp_path / "out", data_of(max_rejected_share=1))


def test_a_column_of_lists_in_one_file_and_of_text_in_another_is_refused(tmp_path: Path) -> None:
    files = {"one.jsonl": [{"a": ["x"]}], "two.jsonl": [{"a": "x"}]}
    one, two = (tmp_path / name for name in files)
    with pytest.raises(UserError, match=f"column 'a' holds lists or objects in {one}, but not in {two}; make"):
        convert_files(tmp_path, files, data_of({"a": "{a}"}))


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_file_in_which_every_list_is_null_goes_with_the_others(kind: str, where: str, tmp_path: Path) -> None:
    with_lists = [{"q": "a", "tags": ["x"], "meta": {"n": 1}}]
    without = [{"q": "b", "tags": None, "meta": None}, {"q": "c", "tags": None, "meta": None}]
    both = [with_lists, without] if where == "last" else [without, with_lists]
    for number, rows in enumerate(both):
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{number}.parquet")
        else:
            (tmp_path / f"{number}.{kind}").write_text(json.dumps(rows) if kind == "json" else lines(rows))
    fetched = fetch_dataset(f"{tmp_path}/?.{kind}", tmp_path / "raw")
    columns = {name: f"{{{name}}}" for name in ("q", "tags", "meta")}
    optional = data_of(columns, optional_columns=["tags", "meta"])
    assert rows_of(write_parquet(fetched.path, tmp_path / "out", optional)) == [row for rows in both for row in rows]
    with pytest.raises(UserError, match=r"2 of 3 rows .*: column '(tags|meta)' is null"):
        write_parquet(fetched.path, tmp_path / "out", data_of(columns))


def test_a_parquet_file_in_which_every_text_is_null_loses_its_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.nulls(2)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": ["x", "y"]}), tmp_path / "b.parquet")
    fetched = fetch_dataset(f"{tmp_path}/?.parquet", tmp_path / "raw")
    facts = write_parquet(fetched.path, tmp_path / "out", data_of({"a": "{a}"}, max_rejected_share=0.5))
    assert [row["a"] for row in rows_of(facts)] == ["x", "y"]
    assert rejects_of(facts) == [(1, "column 'a' is null"), (2, "column 'a' is null")]


def test_the_work_for_each_file_does_not_grow_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_file = Path.is_file

    def num_looks(num_files: int) -> int:
        folder = tmp_path / str(num_files)
        folder.mkdir()
        for number in range(num_files):
            (folder / f"{number}.jsonl").write_text(lines([{"a": str(number)}]))
        raw = fetch_dataset(str(folder), folder / "raw").path
        looks: list[Path] = []
        monkeypatch.setattr(Path, "is_file", lambda path: looks.append(path) or is_file(path))
        write_parquet(raw, folder / "out", data_of({"a": "{a}"}))
        monkeypatch.undo()
        return len(looks)

    assert num_looks(40) < 5 * num_looks(10)


def test_lists_of_several_files_have_a_common_type(tmp_path: Path) -> None:
    files = {"one.jsonl": [{"a": [1]}], "two.jsonl": [{"a": [0.5]}, {"a": []}]}
    assert rows_of(convert_files(tmp_path, files, data_of({"a": "{a}"}))) == [{"a": [1.0]}, {"a": [0.5]}, {"a": []}]


def test_max_rows_ends_in_the_middle_of_a_file(tmp_path: Path) -> None:
    files = {f"{name}.jsonl": [{"a": f"{name}{i}"} for i in range(3)] for name in "xyz"}
    facts = convert_files(tmp_path, files, data_of({"a": "{a}"}, max_rows=4))
    assert [row["a"] for row in rows_of(facts)] == ["x0", "x1", "x2", "y0"]


def test_own_validation_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = make_rows(40)
    validation = {"v.jsonl": [*rows[:2], rows[0], *make_rows(5, seed=9)]}
    caplog.set_level("INFO", "tailtune")
    facts = convert_files(tmp_path, {"t.jsonl": rows, "u.jsonl": rows[:3]}, own_validation(), validation)
    assert (facts.num_rows, facts.num_duplicates, facts.num_on_both_sides) == (47, 4, 2)
    assert "7 validation rows, of which 2 have the question of a training row" in caplog.text
    recipe = tiny_recipe(**{"data.validation_source": "y", "data.split_by": None, "data.validation_share": None})
    train, held_out = read_split(recipe, facts.path)
    assert train.column_names == held_out.column_names == list(SURVIVAL)
    assert [row["answer"] for row in train.to_pylist()] == [row["answer"] for row in rows]
    assert [row["answer"] for row in held_out.to_pylist()] == [
        row["answer"] for row in [*rows[:2], *make_rows(5, seed=9)]]  # fmt: skip


QUESTIONS = Prompt(system="s", user="{topic}: {q}", assistant="{a}")


def test_an_equal_question_counts_whatever_its_answer(tmp_path: Path) -> None:
    data = own_validation({name: f"{{{name}}}" for name in ("id", "topic", "q", "a")})
    train = [{"id": str(i), "topic": "Knots", "q": f"Q {i}?", "a": "one"} for i in range(5)]
    validation = [
        {"id": "100", "topic": "Knots", "q": "Q 1?", "a": "two"},
        {"id": "101", "topic": "KNOTS", "q": " q  2?\n", "a": "one"},
        {"id": "102", "topic": "Fire", "q": "Q 3?", "a": "one"},
        {"id": "103", "topic": "Knots", "q": "Q 9?", "a": "one"},
    ]
    facts = convert_files(tmp_path, {"t.jsonl": train}, data, {"v.jsonl": validation}, QUESTIONS)
    assert (facts.num_rows, facts.num_on_both_sides) == (9, 2)
    by_topic = QUESTIONS.model_copy(update={"user": "{topic}"})
    assert write_parquet(tmp_path / "raw", tmp_path / "out", data, by_topic).num_on_both_sides == 3


def test_an_equal_first_question_of_a_conversation_counts(tmp_path: Path) -> None:
    def turns(question: str, answer: str, *system: str) -> dict[str, Any]:
        texts = [*(("system", each) for each in system), ("user", question), ("assistant", answer)]
        return {"turns": [{"role": role, "content": text} for role, text in texts]}

    train = [turns("Why?", "It burns."), turns("How?", "So.")]
    validation = [turns("why?", "It smokes.", "Be brief."), turns("When?", "It burns.")]
    data = own_validation({"turns": "{turns}"})
    facts = convert_files(tmp_path, {"t.jsonl": train}, data, {"v.jsonl": validation}, Prompt(messages="turns"))
    assert (facts.num_rows, facts.num_on_both_sides) == (4, 1)


def test_rows_after_max_rows_are_on_no_side(tmp_path: Path) -> None:
    files = {"t.jsonl": [{"a": str(i)} for i in range(10)]}
    data = own_validation({"a": "{a}"}, max_rows=3)
    facts = convert_files(tmp_path, files, data, {"v.jsonl": [{"a": "9"}, {"a": "2"}]})
    assert (facts.num_rows, facts.num_on_both_sides) == (5, 1)


def test_bad_validation_rows_are_not_hidden_by_many_good_training_rows(tmp_path: Path) -> None:
    files = {"t.jsonl": [{"a": str(i)} for i in range(900)]}
    v = tmp_path / "v.jsonl"
    with pytest.raises(UserError, match=rf"1 of 2 rows \(50.0 %\) were rejected.*first: {v}, line 2"):
        convert_files(tmp_path, files, own_validation({"a": "{a}"}), {"v.jsonl": [{"a": "x"}, {"a": ""}]})
    with pytest.raises(UserError, match=r"v.jsonl contains no rows"):
        convert_files(tmp_path, files, own_validation({"a": "{a}"}), {"v.jsonl": [""]})


def test_max_rows_applies_to_each_side(tmp_path: Path) -> None:
    files = {"t.jsonl": [{"a": str(i)} for i in range(9)]}
    data = own_validation({"a": "{a}"}, max_rows=3)
    facts = convert_files(tmp_path, files, data, {"v.jsonl": [{"a": f"v{i}"} for i in range(9)]})
    assert [row["a"] for row in rows_of(facts)] == ["0", "1", "2", "v0", "v1", "v2"]


def test_data_of_another_recipe_has_no_validation_rows(prepared: Path) -> None:
    recipe = tiny_recipe(**{"data.validation_source": "y", "data.split_by": None, "data.validation_share": None})
    with pytest.raises(UserError, match=r"data.validation_source is set, but .*data.parquet has no validation rows"):
        read_split(recipe, prepared / "data" / "data.parquet")


def test_a_directory_that_was_not_fetched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no fetched data; run the fetch step first"):
        write_parquet(tmp_path, tmp_path / "out", data_of())
