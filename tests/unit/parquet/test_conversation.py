"""Conversations in both forms, their rejects, and the column that they become."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from converted import data_of, rejects_of, rows_of

from tailtune.errors import UserError
from tailtune.fetch.dataset import fetch_dataset
from tailtune.kinds.chat.config import Prompt
from tailtune.parquet import lines as source_lines
from tailtune.parquet import parquet_reader
from tailtune.parquet.split import split_rows
from tailtune.parquet.write import ParquetFacts, write_parquet

CHAT = Prompt(messages="turns")
Turns = list[tuple[str, str]]


def in_messages_form(turns: Turns) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def in_sharegpt_form(turns: Turns) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[role], "value": text} for role, text in turns]


GOOD: list[Turns] = [
    [("user", "Is it safe?"), ("assistant", "No.")],
    [("system", "Be brief."), ("user", "Why?"), ("assistant", "It burns.")],
    [("user", "Hi"), ("assistant", "Yes?"), ("user", "é\n火 {x}"), ("assistant", " In\tshort: no. ")],
]


def convert_turns(tmp_path: Path, rows: list[Any], kind: str = "jsonl", **data: Any) -> ParquetFacts:
    """Convert rows with a column `c` of conversations, which becomes `turns`."""
    source = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([{"c": row} for row in rows]), source)
    elif kind == "json":
        source.write_text(json.dumps([{"c": row} for row in rows], indent=1))
    else:
        source.write_text("".join(json.dumps({"c": row}) + "\n" for row in rows))
    return write_parquet(source, tmp_path / "out", data_of({"turns": "{c}"}, **data), CHAT)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("form", [in_messages_form, in_sharegpt_form])
def test_both_forms_become_messages(form: Any, kind: str, tmp_path: Path) -> None:
    facts = convert_turns(tmp_path, [form(turns) for turns in GOOD], kind)
    assert rows_of(facts) == [{"turns": in_messages_form(turns)} for turns in GOOD]
    assert str(pq.read_schema(facts.path).field("turns").type) == (
        "list<element: struct<role: string, content: string>>"
    )


BAD: dict[str, tuple[Any, str]] = {
    "ends with the user": (in_messages_form([*GOOD[0], ("user", "And?")]), "the last message (3) is from user"),
    "user twice": (in_messages_form([("user", "a"), *GOOD[0]]), "message 2 is from user, expected assistant"),
    "begins with the assistant": (in_messages_form([("assistant", "a"), *GOOD[0]]), "message 1 is from assistant"),
    "system later": (in_messages_form([*GOOD[0], ("system", "x"), *GOOD[0]]), "message 3 is from system, expected"),
    "system alone": (in_messages_form([("system", "x")]), "no question and no answer"),
    "nothing": ([], "no question and no answer"),
    "other role": (in_messages_form([("user", "a"), ("tool", "b")]), "message 2 has role 'tool', expected system"),
    "blank": (in_messages_form([("user", " \n"), ("assistant", "b")]), "message 1 (user) is empty"),
    "null": ([{"role": "user", "content": None}], "message 1 (user) has no text as content"),
    "parts": ([{"role": "user", "content": [{"type": "text"}]}], "message 1 (user) has no text as content"),
    "no value": ([{"from": "human"}], "message 1 (human) has no text as value"),
    "other keys": ([{"speaker": "a", "text": "b"}], "message 1 has neither role and content nor from and value"),
    "a tool call": ([{"role": "user", "content": "a"},
                     {"role": "assistant", "content": "b", "tool_calls": [{"id": "1"}]}],
                    "message 2 has tool_calls, which cannot be trained on"),
    "an answer not to train on": ([{"role": "user", "content": "a"},
                                   {"role": "assistant", "content": "b", "weight": 0}],
                                  "message 2 has weight 0, but every answer is trained on"),
    "weight false": ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": False}],
                     "message 2 has weight False, but"),
    "roles": ([{"role": ["user"], "content": "a"}, {"role": "assistant", "content": "b"}],
              "message 1 has role '['user']', expected system, user"),
    "role as an object": ([{"from": {"name": "gpt"}, "value": "a"}], "message 1 has role '{'name': 'gpt'}', expected"),
    "text": ("hello", "not a list of messages"),
    "an object": ({"role": "user", "content": "a"}, "not a list of messages"),
    "texts": (["a", "b"], "message 1 is not an object"),
    "a lone surrogate": (in_messages_form([("user", "\ud800"), ("assistant", "b")]), "contains a lone surrogate"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_conversation_is_rejected_with_its_reason(case: str, tmp_path: Path) -> None:
    bad, reason = BAD[case]
    good = [in_messages_form(turns) for turns in GOOD]
    facts = convert_turns(tmp_path, [*good[:2], bad, good[2]], max_rejected_share=0.25)
    assert rows_of(facts) == [{"turns": each} for each in good]
    assert facts.num_rejected == 1
    (rejected,) = rejects_of(facts)
    assert rejected[0] == 3 and rejected[1].startswith(("column 'c': ", "column 'c' ")) and reason in rejected[1]


@pytest.mark.parametrize(
    "case",
    ["ends with the user", "other role", "blank", "null", "no value", "an answer not to train on", "weight false"],
)
def test_parquet_rejects_the_same(case: str, tmp_path: Path) -> None:
    bad, reason = BAD[case]
    good = in_messages_form(GOOD[0])
    facts = convert_turns(tmp_path, [good, bad], "parquet", max_rejected_share=0.5)
    assert rows_of(facts) == [{"turns": good}] and reason in rejects_of(facts)[0][1]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_answer_may_have_a_weight_above_0(kind: str, tmp_path: Path) -> None:
    rows = [[{**message, "weight": weight} for message in in_messages_form(GOOD[0])] for weight in (1, None)]
    facts = convert_turns(tmp_path, rows, kind)
    assert (facts.num_rows, facts.num_duplicates, facts.num_rejected) == (1, 1, 0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_column_of_conversations_can_be_copied_twice_but_not_put_into_a_text(kind: str, tmp_path: Path) -> None:
    rows = [in_messages_form(turns) for turns in GOOD]
    source = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([{"c": row} for row in rows]), source)
    else:
        source.write_text("".join(json.dumps({"c": row}) + "\n" for row in rows))
    facts = write_parquet(source, tmp_path / "out", data_of({"turns": "{c}", "first": "{c}"}), CHAT)
    assert rows_of(facts) == [{"turns": row, "first": row} for row in rows]
    with pytest.raises(UserError, match=r"data.columns.first is 'Q: {c}', but column 'c' holds lists or objects; only"):
        write_parquet(source, tmp_path / "out", data_of({"turns": "{c}", "first": "Q: {c}"}), CHAT)


def test_too_many_bad_conversations_stop_the_run(tmp_path: Path) -> None:
    rows = [in_messages_form([*GOOD[0], ("user", "And?")])] * 3 + [in_messages_form(GOOD[0])]
    with pytest.raises(UserError, match=r"3 of 4 rows \(75.0 %\) were rejected.*line 1: column 'c': the last message"):
        convert_turns(tmp_path, rows)


def test_equal_conversations_are_duplicates(tmp_path: Path) -> None:
    rows = [in_messages_form(GOOD[0]), in_sharegpt_form(GOOD[0]), in_messages_form(GOOD[1])]
    facts = convert_turns(tmp_path, rows)
    assert (facts.num_rows, facts.num_duplicates) == (2, 1)


def test_csv_holds_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("c\nhello\n")
    with pytest.raises(UserError, match="CSV, so its column 'c' holds no conversations; give them as JSON"):
        write_parquet(tmp_path / "data.csv", tmp_path / "out", data_of({"turns": "{c}"}), CHAT)


def test_conversations_with_the_same_first_question_are_on_one_side(tmp_path: Path) -> None:
    rows = [
        in_messages_form([("system", f"Style {i % 3}"), ("user", f" Q {i // 4}?"), ("assistant", f"Answer {i}.")])
        for i in range(200)
    ]  # fmt: skip
    facts = convert_turns(tmp_path, rows)
    train, validation = split_rows(pq.read_table(facts.path), "turns", 0.2, 42)
    questions = [{row["turns"][1]["content"] for row in side.to_pylist()} for side in (train, validation)]
    assert train.num_rows + validation.num_rows == 200 and not questions[0] & questions[1]
    assert len(questions[1]) * 4 == validation.num_rows > 0


NESTED: list[dict[str, Any]] = [
    {"q": "a", "tags": ["x", "y"], "meta": {"n": 1, "ok": True}, "score": [0.5]},
    {"q": "b", "tags": [], "meta": {"n": 2, "note": "é"}, "score": [1]},
    {"q": "c", "tags": ["z"], "meta": {"n": None}, "score": [-1e3, 7]},
]
COPIED = {"q": "{q}", "tags": "{tags}", "meta": "{meta}", "score": "{score}"}


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_lists_and_objects_reach_parquet_as_they_are(kind: str, tmp_path: Path) -> None:
    source = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(NESTED), source)
    else:
        source.write_text(json.dumps(NESTED) if kind == "json" else "".join(json.dumps(r) + "\n" for r in NESTED))
    facts = write_parquet(source, tmp_path / "out", data_of(COPIED))
    schema = pq.read_schema(facts.path)
    assert str(schema.field("tags").type) == "list<element: string>"
    assert str(schema.field("score").type) == "list<element: double>"
    meta = [
        {"n": 1, "ok": True, "note": None},
        {"n": 2, "ok": None, "note": "é"},
        {"n": None, "ok": None, "note": None},
    ]
    assert rows_of(facts) == [{**row, "meta": each} for row, each in zip(NESTED, meta, strict=True)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("columns", "prompt", "message"),
    [
        ({"q": "{q}: {tags}"}, None, r"data.columns.q is '{q}: {tags}', but column 'tags' holds lists or objects"),
        ({"q": "{q}", "t": "{tags}"}, Prompt(system="s", user="{t}", assistant="{q}"),
         "prompt.user or prompt.assistant uses column 't', which holds lists or objects; use columns of text"),
    ],
)  # fmt: skip
def test_a_text_cannot_be_made_of_a_list(
    kind: str, columns: dict[str, str], prompt: Prompt | None, message: str, tmp_path: Path
) -> None:
    source = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(NESTED), source)
    else:
        source.write_text("".join(json.dumps(row) + "\n" for row in NESTED))
    with pytest.raises(UserError, match=message):
        write_parquet(source, tmp_path / "out", data_of(columns), prompt)
    assert not (tmp_path / "out").exists()


def test_lists_of_different_types_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"a": ["x"]}\n{"a": [{"b": 1}]}\n')
    words = r"1 of 2 rows \(50.0 %\) were rejected.*first: line 2: column 'a' does not fit the other rows: Expected"
    with pytest.raises(UserError, match=words):
        write_parquet(tmp_path / "data.jsonl", tmp_path / "out", data_of({"a": "{a}"}))


MISFITS: dict[str, tuple[list[Any], int, str]] = {
    "a number among texts": ([["x"], ["y", "z"], [3], [], ["x"]], 2, "Expected bytes, got a 'int' object"),
    "a text among numbers": ([[1], ["x"], [2]], 1, "Could not convert 'x'"),
    "a text deep inside": ([{"b": [1]}, {"b": [2]}, {"b": ["x"]}, {"b": [], "c": "new"}], 2, "Could not convert 'x'"),
    "a list among objects": ([{"b": 1}, [1], {"b": 2}], 1, "Could not convert"),
    "an exact number among fractions": ([[2**60 + 1], [0.5]], 0, "outside of the range exactly representable"),
    "a number of 64 bits": ([{"n": -1}, {"n": 2**63}, {"n": 5}], 1, "too large"),
    "the same, first": ([{"n": 2**63}, {"n": -1}], 0, "too large"),
    "a number of 800 bits": ([[1], [10**240]], 1, "too large"),
    "not Unicode": ([{"b": 1}, {"\ud800": 1}], 1, "column 'a' contains a lone surrogate"),
}


@pytest.mark.parametrize("batch_rows", [1000, 2])
@pytest.mark.parametrize("case", MISFITS)
def test_a_value_that_does_not_fit_its_column_costs_its_row_only(
    case: str, batch_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (source_lines, parquet_reader):
        monkeypatch.setattr(module, "BATCH_ROWS", batch_rows)
    values, bad, reason = MISFITS[case]
    rows = [{"q": str(i), "a": value} for i, value in enumerate(values)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = data_of({"q": "{q}", "a": "{a}"}, max_rejected_share=0.5)
    facts = write_parquet(tmp_path / "data.jsonl", tmp_path / "out", data)
    keys = {key for value in values if isinstance(value, dict) for key in value if case != "not Unicode" or key == "b"}
    good = [{**dict.fromkeys(keys), **value} if isinstance(value, dict) else value for value in values]
    assert rows_of(facts) == [{"q": str(i), "a": value} for i, value in enumerate(good) if i != bad]
    ((line, why),) = rejects_of(facts)
    assert line == bad + 1 and why.startswith("column 'a' ") and reason in why


def test_a_number_that_does_not_fit_a_parquet_column_of_another_type_is_rejected(tmp_path: Path) -> None:
    """Two files give the column its type."""
    for name, values in (("one", [[2**60 + 1], [7]]), ("two", [[0.5], [1.5]])):
        pq.write_table(pa.table({"a": values}), tmp_path / f"{name}.parquet")
    fetched = fetch_dataset([str(tmp_path / f"{name}.parquet") for name in ("one", "two")], tmp_path / "raw")
    facts = write_parquet(fetched.path, tmp_path / "out", data_of({"a": "{a}"}, max_rejected_share=0.5))
    assert [row["a"] for row in rows_of(facts)] == [[7], [0.5], [1.5]] and rejects_of(facts)[0][0] == 1


def test_a_later_row_without_its_list_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"a": ["x"]}\n{"a": "text"}\n{"a": null}\n{"b": 1}\n{"a": [null]}\n')
    facts = write_parquet(tmp_path / "data.jsonl", tmp_path / "out", data_of({"a": "{a}"}, max_rejected_share=1))
    assert rows_of(facts) == [{"a": ["x"]}, {"a": [None]}]
    assert [reason for _, reason in rejects_of(facts)] == [
        "column 'a' is text, not a list or an object as in earlier rows",
        "column 'a' is null, not text", "column 'a' is missing",
    ]  # fmt: skip


ALPACA = [
    {"instruction": "Sort them.", "input": "3 1 2", "output": "1 2 3"},
    {"instruction": "Say hello.", "input": "", "output": "Hello."},
    {"instruction": "Say no.", "input": None, "output": "No."},
    {"instruction": "Say yes.", "output": "Yes."},
]
ALPACA_DATA = {"question": "{instruction}\n\n{input}", "answer": "{output}"}


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_optional_columns_may_be_empty(kind: str, tmp_path: Path) -> None:
    source = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ALPACA), source)
    elif kind == "csv":
        texts = [[row.get(name) or "" for name in ("instruction", "input", "output")] for row in ALPACA]
        source.write_text("".join(",".join(row) + "\n" for row in [["instruction", "input", "output"], *texts]))
    else:
        source.write_text(json.dumps(ALPACA) if kind == "json" else "".join(json.dumps(r) + "\n" for r in ALPACA))
    facts = write_parquet(source, tmp_path / "out", data_of(ALPACA_DATA, optional_columns=["input"]))
    assert [row["question"] for row in rows_of(facts)] == ["Sort them.\n\n3 1 2", "Say hello.", "Say no.", "Say yes."]
    with pytest.raises(UserError, match="column 'input' is"):
        write_parquet(source, tmp_path / "out", data_of(ALPACA_DATA))


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_an_optional_list_may_be_null(kind: str, tmp_path: Path) -> None:
    rows = [{"q": "a", "tags": ["x"]}, {"q": "b", "tags": None}, {"q": "c"}, {"q": "d", "tags": []}]
    source = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), source)
    else:
        source.write_text(json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    data = data_of({"q": "{q}", "tags": "{tags}"}, optional_columns=["tags"])
    facts = write_parquet(source, tmp_path / "out", data)
    assert rows_of(facts) == [{"tags": None, **row} for row in rows]
    assert split_rows(pq.read_table(facts.path), "tags", 0.5, 0)[0].num_rows < 4


@pytest.mark.parametrize("kind", ["csv", "parquet", "txt"])
def test_an_optional_column_may_be_missing_in_a_file(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": "Say no."}, {"text": "Say yes."}]
    source = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), source)
    else:
        texts = [row["text"] for row in rows]
        source.write_text("\n".join(["text", *texts] if kind == "csv" else texts))
    data = data_of({"question": "{text}\n\n{input}"}, optional_columns=["input"])
    assert rows_of(write_parquet(source, tmp_path / "out", data)) == [{"question": row["text"]} for row in rows]
    assert f"column 'input' of data.optional_columns is empty in all rows of data.{kind}" in caplog.text
    with pytest.raises(UserError, match="column 'input' is not in the data"):
        write_parquet(source, tmp_path / "out", data_of({"question": "{text}\n\n{input}"}))


def test_an_optional_column_that_no_row_has_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "data.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    write_parquet(tmp_path / "data.jsonl", tmp_path / "out", data_of(ALPACA_DATA, optional_columns=["input"]))
    assert "column 'input' of data.optional_columns is empty in all rows of data.jsonl" in caplog.text
