"""`pipeline.py --inspect`: columns, rows, lengths, the form, and keys that really fit."""

import csv
import gzip
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from converted import rows_of
from servers import COMMIT, Reply, Server, serve

import pipeline_cli
from tailtune import console, inspection
from tailtune.fetch import dataset, transfer
from tailtune.parquet import lines
from tailtune.parquet.write import write_parquet
from tailtune.recipe.load import BUILT_IN, load_recipe, parse_yaml, with_local_overlay
from tailtune.recipe.schema import Recipe

SURVIVAL = parse_yaml((BUILT_IN / "survival.yaml").read_text())
MESSAGES = [
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"},
                  {"role": "assistant", "content": "It burns."}]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"},
                  {"role": "user", "content": "Is it safe?"}, {"role": "assistant", "content": "No."}]},
]  # fmt: skip
ALPACA = [
    {"instruction": "Say hello.", "input": "", "output": "Hello."},
    {"instruction": "Sort them.", "input": "3 1 2", "output": "1 2 3"},
]
QUESTIONS = [{"Query": f"Why {i}?", "topic": "fire", "Reply": "It burns."} for i in range(3)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def inspect(*arguments: str) -> str:
    """What the command prints."""
    done = CliRunner().invoke(pipeline_cli.main, ["--inspect", *arguments])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def suggested(text: str) -> Recipe:
    """The survival recipe with the keys that were printed in place of its own."""
    keys = parse_yaml(text.partition("recipe keys that fit:\n")[2].partition("\nnext, ")[0])
    return Recipe.model_validate({**SURVIVAL, **keys, "local": {}})


def resolved(*arguments: str) -> Recipe:
    """The recipe that --dry-run prints."""
    done = CliRunner().invoke(pipeline_cli.main, [*arguments, "--dry-run"])
    assert done.exit_code == 0, done.stderr
    return Recipe.model_validate(json.loads(done.stdout)["recipe"])


def converted(recipe: Recipe, folder: Path) -> list[dict[str, Any]]:
    source = recipe.data.source
    assert isinstance(source, str)
    return rows_of(write_parquet(Path(source), folder / "out", recipe.data, recipe.prompt))


every_form = pytest.mark.parametrize(
    ("rows", "form", "expected"),
    [
        (ALPACA, "instructions, as in Alpaca",
         [{"question": "Say hello.", "answer": "Hello."}, {"question": "Sort them.\n\n3 1 2", "answer": "1 2 3"}]),
        (QUESTIONS, "questions and answers (columns 'Query' and 'Reply')",
         [{"question": f"Why {i}?", "answer": "It burns."} for i in range(3)]),
        (MESSAGES, "conversations in column 'messages', as messages (role, content)", MESSAGES),
        ([{"id": 1, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]}],
         "conversations in column 'conversations', as ShareGPT (from, value)",
         [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]}]),
        ([{"n": 1, "frage": "Warum?", "antwort": "Es brennt."}, {"n": 2, "frage": "Wie?", "antwort": "So."}],
         "questions and answers, guessed: is the question in column 'frage', the answer in 'antwort'? If not, change "
         "data.columns",
         [{"question": "Warum?", "answer": "Es brennt."}, {"question": "Wie?", "answer": "So."}]),
    ],
    ids=["alpaca", "questions", "messages", "sharegpt", "other-names"],
)  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "jsonl.gz"])
@every_form
def test_the_keys_that_are_printed_fit(
    kind: str, rows: list[dict[str, Any]], form: str, expected: list[Any], tmp_path: Path
) -> None:
    if kind == "csv" and ("conversations" in form or "guessed" in form):
        pytest.skip("CSV holds no conversations, and its numbers are text")
    text = inspect(write(tmp_path / f"data.{kind}", rows))
    assert f"form: {form}\n" in text
    assert converted(suggested(text), tmp_path) == expected


@every_form
def test_the_recipe_that_is_written_runs_on_these_rows(
    rows: list[dict[str, Any]], form: str, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("my.jsonl"), rows)
    text = inspect("my.jsonl", "--write-recipe", "mine.yaml")
    assert f"form: {form}\n" in text and "\nmine.yaml is written: " in text
    [command] = [line for line in text.splitlines() if line.startswith("  python pipeline.py")]
    assert command == "  python pipeline.py --local --recipe mine.yaml --run-name mine"

    local = resolved(*shlex.split(command)[2:])
    assert local.data.source == str(tmp_path / "my.jsonl") and local.model.base_model == "small"
    assert converted(local, tmp_path) == expected
    first = [row.get("question") or next(each["content"] for each in row["messages"] if each["role"] == "user")
             for row in expected]  # fmt: skip
    assert local.demo.questions == first

    cluster = resolved("--recipe", "mine.yaml", "-p", "data_source=s3://bucket/my.jsonl")
    assert cluster.data.source == "s3://bucket/my.jsonl" and cluster.demo.questions == first
    assert cluster.model == load_recipe("survival").model and cluster.name == "mine"


def test_a_written_recipe_is_survivals_but_for_what_belongs_to_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inspect(write(Path("my.jsonl"), QUESTIONS), "--write-recipe", "mine.yaml")
    text = Path("mine.yaml").read_text()
    assert "      head: true  # untied from the input embedding\n" in text, "comments stay"
    assert not re.search(r"sample|wilderness|knot|800|camera|prompt asks", text)
    mine, survival = load_recipe("mine.yaml"), load_recipe("survival")
    changed = {name for name in Recipe.model_fields if getattr(mine, name) != getattr(survival, name)}
    assert changed == {"name", "description", "data", "prompt", "gate", "expect", "demo", "local"}
    assert mine.expect == [] and mine.prompt.system == "You are a helpful assistant."
    assert mine.gate == [rule for rule in survival.gate if rule.metric != "answer_words_vs_base"]
    local, original = with_local_overlay(mine), with_local_overlay(survival)
    assert local.stages == original.stages and local.generation == original.generation
    assert local.gate == original.gate[: len(local.gate)]
    assert mine.local.items() <= survival.local.items()


@pytest.mark.parametrize(
    ("sources", "recipe", "found"),
    [
        (["my.jsonl"], "recipes/mine.yaml", "my.jsonl"),
        (["data"], "mine.yaml", "data"),
        (["data/*.jsonl"], "mine.yaml", "data/*.jsonl"),
        (["my.jsonl", "data/a.jsonl"], "mine.yaml", ["my.jsonl", "data/a.jsonl"]),
        (['rosé "1": #2.jsonl'], "mine.yaml", 'rosé "1": #2.jsonl'),
    ],
    ids=["another-folder", "directory", "pattern", "two-files", "odd-name"],
)
def test_a_written_recipe_finds_its_sources(
    sources: list[str], recipe: str, found: str | list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("data", "recipes", "elsewhere"):
        Path(folder).mkdir()
    for name in ("my.jsonl", "data/a.jsonl", 'rosé "1": #2.jsonl'):
        write(Path(name), QUESTIONS)
    inspect(*sources, "--write-recipe", recipe)
    monkeypatch.chdir(tmp_path / "elsewhere")
    source = load_recipe(tmp_path / recipe).data.source
    assert source == ([str(tmp_path / each) for each in found] if isinstance(found, list) else str(tmp_path / found))


def test_a_written_recipe_holds_any_text(tmp_path: Path) -> None:
    questions = ['"\x1b[31m: #{x}\x85\u2028\ufeff\\', "😀 naïve \u202e火\x7f", "- a\tb\n"]
    rows = [{"question": question, "answer": "b"} for question in (*questions, questions[0], "x" * 400, "late")]
    inspect(write(tmp_path / "my.jsonl", rows), "--write-recipe", str(tmp_path / "mine.yaml"))
    assert load_recipe(tmp_path / "mine.yaml").demo.questions == [question.strip() for question in questions]


@pytest.mark.parametrize(
    ("file", "name"), [("Mine 2.yaml", "mine-2"), ("survival.yml", "my-survival"), ("2.yaml", "my-2"), ("é.yaml", "my")]
)
def test_a_written_recipe_is_named_after_its_file(file: str, name: str, tmp_path: Path) -> None:
    text = inspect(write(tmp_path / "my.jsonl", QUESTIONS), "--write-recipe", str(tmp_path / file))
    assert load_recipe(tmp_path / file).name == name and f" --run-name {name}\n" in text


def test_the_next_commands_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("my rows.csv"), QUESTIONS)
    given = ["-p", "epochs=3", "-p", "resources.environment={A: 'b c'}"]
    text = inspect("my rows.csv", *given)
    assert text.endswith("\nnext, write a recipe with these keys, which can be run as it is:\n  python pipeline.py "
                         f"--inspect 'my rows.csv' --write-recipe mine.yaml {shlex.join(given)}\n")  # fmt: skip
    done = CliRunner().invoke(pipeline_cli.main, shlex.split(text.splitlines()[-1])[2:])
    assert done.exit_code == 0 and f" --recipe mine.yaml --run-name mine {shlex.join(given)}\n" in done.stdout
    assert done.stdout.endswith(
        "\nA cluster cannot read files on this machine. For --submit, copy them to the data volume, as step 17 of the "
        "runbook shows, or to S3, and add -p data_source=/shared/data/uploads/FILE or s3://BUCKET/KEY.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my.jsonl", "--write-recipe", "there.yaml"], "--write-recipe there.yaml already exists; choose another name"),
        (["my.jsonl", "--write-recipe", "mine"], "--write-recipe mine is not the name of a recipe file; give a path"),
        (["my.jsonl", "--write-recipe", "no/mine.yaml"], "--write-recipe no/mine.yaml: there is no directory no"),
        (["book.txt", "--write-recipe", "mine.yaml"], "mine.yaml is not written, because no recipe fits; see the form"),
        (["bad.jsonl", "--write-recipe", "mine.yaml"], "mine.yaml is not written: every row would be rejected"),
        (["my.jsonl", "--write-recipe", "mine.yaml", "--recipe", "there.yaml"],
         "--write-recipe starts from a built-in recipe: survival"),
    ],
)  # fmt: skip
def test_recipes_that_are_not_written(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("my.jsonl"), QUESTIONS)
    write(Path("bad.jsonl"), [{"messages": [{"role": "user", "content": "a"}]}])
    Path("book.txt").write_text("One line.\n")
    Path("there.yaml").write_text("mine\n")
    done = CliRunner().invoke(pipeline_cli.main, ["--inspect", *arguments])
    assert done.exit_code == 2 and message in done.stderr
    assert Path("there.yaml").read_text() == "mine\n" and not Path("mine.yaml").exists()


def test_write_recipe_needs_inspect() -> None:
    done = CliRunner().invoke(pipeline_cli.main, ["--write-recipe", "mine.yaml"])
    assert done.exit_code == 2 and "--write-recipe needs --inspect SOURCE" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("pairs.json", '[{"prompt": "a", "chosen": "b", "rejected": "c"}]', "preference pairs (chosen, rejected). No"),
        ("pairs2.json", json.dumps([{"conversations": [{"from": "human", "value": "a"}], "rejected": {"value": "c"},
                                     "chosen": {"from": "gpt", "value": "b"}}]),
         "preference pairs (chosen, rejected). No kind of recipe trains on them yet"),
        ("book.txt", "One line.\n\nAnother.\n", "plain text. No kind of recipe trains on it yet"),
        ("web.jsonl", '{"text": "One.", "url": "x"}\n', "not recognised"),
        ("text.jsonl", '{"text": "One."}\n', "plain text. No kind of recipe trains on it yet"),
        ("odd.csv", "id,frage,antwort\n1,a,b\n", "not recognised. Rename the columns of the question and the answer"),
        ("named.jsonl", '{"chat:v1": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
         "conversations in column 'chat:v1', as messages (role, content). But no template can name column 'chat:v1': "),
        ("named.csv", "ask!,answer\na,b\n", "questions and answers, guessed: is the question in column 'ask!', the "
         "answer in 'answer'? If not, change data.columns. But no template can name column 'ask!': rename it"),
    ],
)  # fmt: skip
def test_what_no_recipe_trains_on_is_said(name: str, content: str, form: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    text = inspect(str(tmp_path / name))
    assert f"form: {form}" in text and "recipe keys" not in text


def test_columns_rows_and_lengths(tmp_path: Path) -> None:
    rows = [{"question": "x" * n, "answer": "y y" * 200, "n": n, "tags": ["a"], "note": None} for n in range(1, 11)]
    text = inspect(write(tmp_path / "data.jsonl", rows))
    size = (tmp_path / "data.jsonl").stat().st_size
    assert text.startswith(f"{tmp_path}/data.jsonl: 10 rows, {size:,} bytes\n")
    table = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:7]}
    assert table["question"] == ["text", "0", "6", "9", "10"]
    assert table["n"][0] == "number" and table["tags"][0] == "list"
    assert table["note"] == ["nothing", "10", "(100.0", "%)", "0", "0", "0"]
    assert f"  answer: {'y y' * 53}y…\n" in text, "shortened to 160 characters"
    assert "\nrow 3:\n" in text and "\nrow 4:\n" not in text
    # a newline joins question and answer: 602 to 611 characters
    assert "tokens per row: median 152, 90 % 153, longest 153\n  (an estimate, 4 bytes per token;" in text


def test_turns_and_what_would_be_rejected(tmp_path: Path) -> None:
    bad = {"messages": [{"role": "user", "content": "Hi"}]}
    text = inspect(write(tmp_path / "data.jsonl", [*MESSAGES, bad]))
    assert "answers per conversation: median 1, 90 % 2, most 2\n" in text
    assert "with a system message of its own: 1 of 3\n" in text
    assert ("1 rows (33.3 %) would be rejected, more than data.max_rejected_share 1 %; the first: the last message (1) "
            "is from user, expected assistant\n") in text  # fmt: skip
    assert "    user: Is it safe?\n    assistant: No.\n" in text
    stop = "\nA run would stop at these rows: correct them first.\n"
    assert stop in text and stop not in inspect(write(tmp_path / "good.jsonl", MESSAGES))


def test_tokens_are_counted_with_a_tokenizer_of_this_machine(prepared: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepared / "base")
    count = len(tokenizer("Why 0?\nIt burns.")["input_ids"])
    text = inspect(write(tmp_path / "data.jsonl", QUESTIONS), "-p", f"base_model={prepared / 'base'}")
    assert f"median {count}, 90 % {count}, longest {count}\n  (tokenizer of {prepared / 'base'};" in text


def test_rows_above_the_recipes_length_are_counted(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "b" * n} for n in (10, 100)]
    text = inspect(write(tmp_path / "data.jsonl", rows), "-p", "stages.0.trainer.max_length=20")
    assert "1 of them are longer than max_length 20 of recipe survival" in text


def test_several_files_and_their_differences(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.jsonl", QUESTIONS), write(tmp_path / "two.csv", [{"Query": "a", "answer": "b"}])
    text = inspect(one, two)
    assert f"{two} lacks Reply, topic\n{two} alone has answer\n" in text and "2 files: 4 rows" in text
    assert f'  source: ["{one}", "{two}"]\n' in text
    assert inspect(str(tmp_path)).startswith(text.split("\n2 files")[0]), "the directory is the same files"


def test_bad_lines_are_counted_and_a_sample_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "a", "answer": "b"}\nbroken\n' * 3)
    assert ": 3 rows, 3 unreadable, " in inspect(str(tmp_path / "data.jsonl"))
    monkeypatch.setattr(inspection, "MAX_ROWS", 3)
    monkeypatch.setattr(inspection, "MIN_FILE_ROWS", 1)
    assert ": the first 2 rows, 1 unreadable, " in inspect(str(tmp_path / "data.jsonl"))
    write(tmp_path / "data.jsonl", QUESTIONS)
    assert ": 3 rows, " in inspect(str(tmp_path / "data.jsonl")), "all of them"


def test_every_file_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MAX_ROWS", 4)
    monkeypatch.setattr(inspection, "MIN_FILE_ROWS", 2)
    one, two = write(tmp_path / "one.jsonl", QUESTIONS), write(tmp_path / "two.jsonl", QUESTIONS)
    three = write(tmp_path / "three.jsonl", [{"prompt": "a", "Reply": "b", "topic": "c"}] * 3)
    text = inspect(one, two, three)
    assert f"{three} lacks Query in its first rows\n{three} alone has prompt in its first rows\n" in text
    assert "\n3 files: the first rows of each, 7 rows, " in text


def test_why_rows_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(
        'broken\n[1]\n{"question": "a", "answer": "b"}\n{"question": "a", "answer": ""}\n'
    )
    assert ("3 rows (75.0 %) would be rejected, more than data.max_rejected_share 1 %; the first: broken JSON "
            "(Expecting value at character 1)\n") in inspect(str(tmp_path / "data.jsonl"))  # fmt: skip


@pytest.mark.parametrize(
    ("content", "why"),
    [("[1]\nbroken\n", "no row can be read; the first: not a JSON object but a list"), ("", "there is no row")],
)
def test_sources_without_a_good_row(content: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    done = CliRunner().invoke(pipeline_cli.main, ["--inspect", str(tmp_path / "data.jsonl")])
    assert done.exit_code == 2 and "form:" not in done.stdout
    assert f"data.jsonl: {why}; correct the file, or name its format, for example -p data.format=jsonl" in done.stderr


def test_the_data_cannot_command_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07\x9b31mred\u202e"
    rows: list[dict[str, Any]] = [{"question": evil, "answer": "b", f"c{evil}": "c"}]
    assert inspect(write(tmp_path / "data.jsonl", rows)).replace("\n", "").isprintable()
    rows = [{"messages": [{"role": evil, "content": evil}]}]
    assert inspect(write(tmp_path / "data.jsonl", rows)).replace("\n", "").isprintable()


def test_binary_columns_are_no_reason_to_reject_rows(tmp_path: Path) -> None:
    table = {"question": ["a", "b"], "answer": [b"c", b"d"], "image": [b"\xff" * 1000, b"\xfe" * 1000]}
    pq.write_table(pa.table(table), tmp_path / "data.parquet")
    text = inspect(str(tmp_path / "data.parquet"))
    assert "data.parquet: 2 rows, " in text and "\n  image: (1,000 bytes)\n" in text and "reject" not in text
    assert re.search(r"\n  answer +text .*\n  image +binary ", text)
    assert converted(suggested(text), tmp_path) == [{"question": "a", "answer": "c"}, {"question": "b", "answer": "d"}]


def test_text_that_is_not_unicode_is(tmp_path: Path) -> None:
    invalid = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    pq.write_table(pa.table({"question": pa.concat_arrays([invalid, pa.array(["a"])]), "answer": ["b", "c"]}),
                   tmp_path / "data.parquet")  # fmt: skip
    assert "would be rejected, more than data.max_rejected_share 1 %; the first: invalid UTF-8\n" in inspect(
        str(tmp_path / "data.parquet")
    )


def test_columns_without_a_name_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("question,answer,,\na,b,,\n")
    text = inspect(str(tmp_path / "data.csv"))
    assert converted(suggested(text), tmp_path) == [{"question": "a", "answer": "b"}]


@pytest.mark.parametrize("column", ["system", "tools", "History"])
def test_columns_that_are_not_used_are_named(column: str, tmp_path: Path) -> None:
    said = f"'{column}' is part of what the model is told, and is lost. To train with it, write it into each"
    text = inspect(write(tmp_path / "data.jsonl", [{**row, "id": 1, column: "You are X."} for row in MESSAGES]))
    assert f"\nnot used: id, {column}\n  {said}\n" in text
    text = inspect(write(tmp_path / "data.jsonl", [{**row, column: None} for row in MESSAGES]))
    assert f"\nnot used: {column}\n" in text and said not in text, "there is nothing in it"
    assert "not used" not in inspect(write(tmp_path / "data.jsonl", MESSAGES))


def test_turns_of_odd_roles_are_counted() -> None:
    odd = {"messages": [{"role": ["user"], "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]}
    form = inspection.Form("", {"messages": "{messages}"}, messages="messages")
    assert next(inspection._describe_turns([odd], form)) == "answers per conversation: median 1, 90 % 1, most 1"


def serve_beginning(server: Server, path: str, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve a file whose last byte never comes: who waits for it gets an error."""
    monkeypatch.setattr(dataset, "TIMEOUT_SECONDS", 2.0)
    monkeypatch.setattr(transfer, "ATTEMPTS", 1)
    monkeypatch.setattr(inspection, "FETCHED_BYTES", 1 << 20)
    monkeypatch.setattr(lines, "BATCH_BYTES", 1 << 16)  # a buffer that the beginning fills, as it fills the real one
    assert len(body) > 2 << 20, "the client reads pieces of a mebibyte"
    reply = server.replies.setdefault(path, Reply(body))
    reply.body, reply.pause_after = body, len(body) - 1


def many_rows() -> list[dict[str, Any]]:
    random = Random(0)
    return [{"question": f"Why {i}?\nAnd how?", "answer": random.randbytes(200).hex()} for i in range(15_000)]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "jsonl.gz"])
@pytest.mark.parametrize("max_rows", [100, 1_000_000])
def test_only_the_beginning_of_an_address_is_fetched(
    kind: str, max_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "MAX_ROWS", max_rows)
    body = Path(write(tmp_path / f"data.{kind}", many_rows())).read_bytes()
    with serve() as server:
        serve_beginning(server, f"/data.{kind}", body, monkeypatch)
        text = inspect(f"{server.url}/data.{kind}")
    [number, size] = re.match(rf".*/data.{kind}: the first ([\d,]+) rows, ([\d,]+) bytes\n", text).groups()  # type: ignore[union-attr]
    assert int(size.replace(",", "")) == len(body), "of the whole file"
    assert 100 <= int(number.replace(",", "")) <= min(max_rows, 14_999)
    assert re.search(r"\n  answer +text +0 +400 +400 +400\n", text), "whole rows"
    assert "unreadable" not in text and "rejected" not in text
    assert suggested(text).data.columns == {"question": "{question}", "answer": "{answer}"}


def test_only_the_beginning_of_a_file_on_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = Path(write(tmp_path / "data.jsonl", many_rows())).read_bytes()
    with serve() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        server.add_repo("datasets", "owner/name", {"data.jsonl": body})
        serve_beginning(server, f"/datasets/owner/name/resolve/{COMMIT}/data.jsonl", body, monkeypatch)
        text = inspect("hf://datasets/owner/name")
    assert text.startswith("hf://datasets/owner/name: the first ") and "A cluster cannot" not in text


def test_recipes_that_cannot_be_written_give_one_line(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", QUESTIONS)
    (closed := tmp_path / "file").write_text("")
    long_name = tmp_path / ("a" * 300 + ".yaml")
    for path, words in (
        (long_name, "File name too long"),
        (closed / "a.yaml", "Not a directory"),
        (Path("/proc/a.yaml"), ""),
    ):
        done = CliRunner().invoke(pipeline_cli.main, ["--inspect", rows, "--write-recipe", str(path)])
        assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
        assert f"--write-recipe {path} cannot be written: {words}" in done.stderr
        assert done.stderr.endswith("; choose another name or folder\n")


def test_parquet_is_fetched_whole_and_only_while_rows_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tailtune")
    monkeypatch.setattr(console, "configure", lambda: None)
    monkeypatch.setattr(inspection.log, "propagate", True)
    monkeypatch.setattr(inspection, "MAX_ROWS", 3)
    monkeypatch.setattr(inspection, "FETCHED_BYTES", 10)
    body = Path(write(tmp_path / "a.parquet", QUESTIONS)).read_bytes()
    with serve() as server:
        server.replies |= {"/a.parquet": Reply(body), "/b.parquet": Reply(body)}
        one, two = f"{server.url}/a.parquet", f"{server.url}/b.parquet"
        text = inspect(one, two)
        assert f"fetch: {one}: {len(body):,} bytes, all of which are needed" in caplog.messages
        assert text.startswith(
            "not fetched, because there are enough rows: 1 of 2 files\n2 files: the first rows of each, 3 rows, "
        )
        assert [path for _, path, _ in server.requests] == ["/a.parquet"]


def test_a_broken_beginning_of_an_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as server:
        serve_beginning(server, "/data.csv", b'"question,answer\n' * (3 << 16), monkeypatch)
        done = CliRunner().invoke(pipeline_cli.main, ["--inspect", f"{server.url}/data.csv"])
    assert done.exit_code == 2 and "error: the CSV header cannot be read: " in done.stderr


def test_an_address_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_QUERY", "signature=secret")
    with serve() as server:
        server.replies["/data.jsonl"] = Reply("".join(json.dumps(row) + "\n" for row in QUESTIONS).encode())
        text = inspect(f"{server.url}/data.jsonl?${{DATA_QUERY}}")
        assert set(server.queries) == {"signature=secret"}
    assert f"{server.url}/data.jsonl?${{DATA_QUERY}}: 3 rows" in text and "secret" not in text
    assert "A cluster cannot" not in text


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--inspect", "nowhere.jsonl"], 2, "data source nowhere.jsonl does not exist; give the path"),
        (["--inspect", "https://u:p@host/a.jsonl"], 2, "error: --inspect: https://host/a.jsonl is given with a login"),
        (["--inspect", "TMP"], 2, "contains no .json, .jsonl, "),
        (["--inspect", "TMP", "--list"], 2, "give one of"),
        (["x.jsonl"], 2, "Got unexpected extra argument (x.jsonl): only --inspect takes several sources"),
    ],
)
def test_bad_calls(arguments: list[str], status: int, message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(pipeline_cli.main, [each.replace("TMP", str(tmp_path)) for each in arguments])
    assert done.exit_code == status and message in done.stderr


def test_the_default_recipe_is_survival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    find: Callable[..., Any] = inspection.inspect_sources
    monkeypatch.setattr(
        inspection, "inspect_sources", lambda s, recipe, **given: asked.append(recipe.name) or find(s, recipe, **given)
    )
    inspect(write(tmp_path / "data.jsonl", QUESTIONS))
    assert asked == [load_recipe("survival").name]
