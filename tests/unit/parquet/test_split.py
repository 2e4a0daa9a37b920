import random

import pyarrow as pa
import pytest

from tailtune.errors import UserError
from tailtune.parquet.lines import message_type
from tailtune.parquet.split import normalise, split_rows


def table_of(questions: list[str]) -> pa.Table:
    return pa.table({"question": questions, "row": list(range(len(questions)))})


def questions_of(table: pa.Table) -> set[str]:
    return set(table["question"].to_pylist())


QUESTIONS = [f"How do I tie knot {number % 1727}?" for number in range(2845)]


def test_no_question_is_on_both_sides_and_no_row_is_lost() -> None:
    train, validation = split_rows(table_of(QUESTIONS), "question", 0.1, seed=42)
    assert not questions_of(train) & questions_of(validation)
    assert sorted(train["row"].to_pylist() + validation["row"].to_pylist()) == list(range(2845))
    assert train["row"].to_pylist() == sorted(train["row"].to_pylist()), "the source's order is kept"


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_share_is_close_to_the_requested_one(share: float) -> None:
    _, validation = split_rows(table_of([f"question {i}" for i in range(20_000)]), "question", share, seed=7)
    assert validation.num_rows / 20_000 == pytest.approx(share, abs=0.01)


def test_side_does_not_change_when_rows_are_added_removed_or_reordered() -> None:
    _, before = split_rows(table_of(QUESTIONS), "question", 0.1, seed=42)
    changed = QUESTIONS[100:] + [f"A new question {number}" for number in range(5000)]
    random.Random(0).shuffle(changed)
    _, after = split_rows(table_of(changed), "question", 0.1, seed=42)
    assert questions_of(after) & set(QUESTIONS) == questions_of(before) & set(changed)


def test_side_does_not_depend_on_how_the_table_is_chunked() -> None:
    table = table_of(QUESTIONS)
    chunked = pa.concat_tables([table.slice(start, 100) for start in range(0, 2845, 100)])
    assert split_rows(chunked, "question", 0.1, 42)[1].equals(split_rows(table, "question", 0.1, 42)[1])


def test_hash_is_pinned() -> None:
    """Other machines and later versions must put the same rows on the same side."""
    _, validation = split_rows(table_of([f"question {i}" for i in range(40)]), "question", 0.1, seed=42)
    assert validation["row"].to_pylist() == [19, 21, 35]


def test_seed_changes_the_split() -> None:
    table = table_of(QUESTIONS)
    assert questions_of(split_rows(table, "question", 0.1, 1)[1]) != questions_of(
        split_rows(table, "question", 0.1, 2)[1]
    )


def test_larger_share_keeps_the_validation_rows() -> None:
    table = table_of(QUESTIONS)
    small, large = (questions_of(split_rows(table, "question", share, 42)[1]) for share in (0.1, 0.3))
    assert small < large


def test_trivial_variants_are_on_one_side() -> None:
    variants = [
        text
        for i in range(200)
        for text in (f"How many {i}?", f"how  many {i}? ", f"HOW\tMANY {i}?", f"\nHow many {i}?")
    ]
    train, validation = split_rows(table_of(variants), "question", 0.3, 42)
    normal = [{" ".join(text.casefold().split()) for text in questions_of(side)} for side in (train, validation)]
    assert not normal[0] & normal[1]


@pytest.mark.parametrize(
    ("questions", "share", "message"),
    [
        (["one question"] * 50, 0.1, "splitting 50 rows by .question. .* leaves the validation side empty"),
        (["one question"] * 50, 0.999, "splitting 50 rows by .question. .* leaves the train side empty"),
        ([], 0.1, "empty"),
    ],
)
def test_empty_side_is_an_error_with_the_remedy(questions: list[str], share: float, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        split_rows(pa.table({"question": pa.array(questions, pa.string())}), "question", share, 42)
    assert "data.validation_share" in str(caught.value)


def test_missing_column_is_reported_with_the_existing_ones() -> None:
    with pytest.raises(UserError, match=r"'topic'.*question, row"):
        split_rows(table_of(QUESTIONS), "topic", 0.1, 42)


def test_lists_like_conversations_without_a_question_are_split_by_all_of_their_content() -> None:
    rows = [
        [{"role": role, "content": f"{i}"} for role in roles]
        for i in range(50)
        for roles in (["user", "assistant"], ["assistant"], [])
    ]
    table = pa.table({"turns": pa.array([*rows, None], message_type()), "row": list(range(151))})
    train, validation = split_rows(table, "turns", 0.3, 42)
    assert sorted(train["row"].to_pylist() + validation["row"].to_pylist()) == list(range(151))
    contents = [{str(row) for row in side["turns"].to_pylist()} for side in (train, validation)]
    assert not contents[0] & contents[1]
    assert sum("user" not in each for each in contents[1]) > 5, "those without a question are not all on one side"


@pytest.mark.parametrize(("one", "other"), [
    ("Où est le café ?", "Où est le cafe\u0301?"),
    ("Wh\u200bat is\u00ad it", "what is it"),
    ("ﬁre\u00a0drill", "Fire  drill"),
    ("Is it hot ?", "Is it hot?"),
])  # fmt: skip
def test_questions_that_look_alike_are_on_the_same_side(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)


def test_questions_that_look_different_are_different() -> None:
    texts = ["resume", "résumé", "a b", "ab", "1.5", "1 .5 m", "co-op", "coop"]
    assert len({normalise(text) for text in texts}) == len(texts)
