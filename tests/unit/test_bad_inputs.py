"""Every bad input in one table: how it is given, the exit status, and what the user reads."""

import contextlib
import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from conftest import as_written_before_train_weights, tiny_recipe

import pipeline
import pipeline_cli
import tailtune.cli
from tailtune.fetch.model import provide_base_model
from tailtune.jobs.train_step import train_stage
from tailtune.log import step
from tailtune.parquet.split import split_rows
from tailtune.parquet.write import write_parquet
from tailtune.recipe.load import BUILT_IN, load_recipe
from tailtune.resolve import resolve_run
from tailtune.run import Run

ROOT = Path(pipeline.__file__).parent
SURVIVAL = (BUILT_IN / "survival.yaml").read_text(encoding="utf-8")
ROW = '{"topic": "Knots", "question": "How?", "answer": "So."}\n'
METRICS = {
    "answer_loss_vs_base": 0.5, "answer_loss_vs_unigram": 0.5, "tuned_token_accuracy": 0.5, "answer_words_vs_base": 0.9,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    tmp: Path
    """The test's own directory, and the current one."""
    prepared: Path
    """`data/` and `base/` of the tiny recipe, to read."""


@dataclass(frozen=True)
class Shown:
    status: int
    stderr: str
    stdout: str = ""


Call = Callable[[Place], Shown]


# -- ways to give an input: each returns a function that gives it and tells what was shown -----------


def command(main: click.Command, *arguments: str) -> Call:
    """A command line; `TMP` and `PREPARED` stand for the directories."""

    def call(place: Place) -> Shown:
        filled = [a.replace("TMP", str(place.tmp)).replace("PREPARED", str(place.prepared)) for a in arguments]
        result = CliRunner().invoke(main, filled, prog_name="prog")
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Shown(result.exit_code, result.stderr, result.stdout)

    return call


def pipeline_py(*arguments: str) -> Call:
    return command(pipeline_cli.main, *arguments)


def flag(*pairs: str) -> Call:
    """`-p PAIR …` on top of the survival recipe."""
    return pipeline_py("--dry-run", *(text for pair in pairs for text in ("-p", pair)))


def tailtune_command(*arguments: str) -> Call:
    return command(tailtune.cli.main, *arguments)


def after(prepare: Callable[[Place], Any], call: Call) -> Call:
    def both(place: Place) -> Shown:
        prepare(place)
        return call(place)

    return both


def file(name: str, content: str | bytes) -> Callable[[Place], None]:
    def write(place: Place) -> None:
        path = place.tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def recipe_file(content: str | bytes, *arguments: str, name: str = "own.yaml") -> Call:
    return after(file(name, content), pipeline_py("--dry-run", "--recipe", f"TMP/{name}", *arguments))


def recipe(old: str, new: str, *arguments: str) -> Call:
    """The survival recipe with one text replaced, as a file of the user's."""
    assert SURVIVAL.count(old) >= 1, old
    return recipe_file(SURVIVAL.replace(old, new, 1), *arguments)


def stage_resources(text: str) -> Call:
    """The survival recipe with resources of its stage."""
    return recipe("    loss: answer\n", f"    loss: answer\n    resources: {{{text}}}\n")


def in_step(function: Callable[[Place], Any]) -> Call:
    """A step of the pipeline, with what its log shows."""

    def call(place: Place) -> Shown:
        stderr, status = io.StringIO(), 0
        with contextlib.redirect_stderr(stderr):
            try:
                with step("step"):
                    function(place)
            except SystemExit as stop:
                status = stop.code
        return Shown(status, stderr.getvalue())

    return call


def fetch(source: str, **arguments: Any) -> Call:
    def function(place: Place) -> None:
        from tailtune.fetch.dataset import fetch_dataset

        fetch_dataset(source.replace("TMP", str(place.tmp)), place.tmp / "raw", **arguments)

    return in_step(function)


def data_file(name: str, content: str | bytes, **data: Any) -> Call:
    """A file for the parquet step of the tiny recipe."""
    return after(
        file(name, content),
        in_step(
            lambda place: write_parquet(
                place.tmp / name, place.tmp / "parquet", tiny_recipe().data.model_copy(update=data)
            )
        ),
    )


def base_model(name: str, **overrides: Any) -> Call:
    return in_step(
        lambda place: provide_base_model(
            tiny_recipe(**{"model.base_model": name.replace("TMP", str(place.tmp)), **overrides}),
            place.prepared / "data",
            place.tmp / "base",
        )
    )


def resolve(recipe_json: Callable[[], str], **overrides: Any) -> Call:
    return in_step(lambda place: resolve_run(recipe_json(), overrides, "run", "id", *["TMP"] * 3, local=False))


def train_layers(place: Place) -> None:
    from tailtune.recipe.schema import LastLayers
    from tailtune.train.hardware import plan_hardware
    from tailtune.train.weights import load_model, select_trainable

    weights = LastLayers(last_layers=99)
    model = load_model(place.prepared / "base", plan_hardware(tiny_recipe().hardware, 2, 1), weights)
    select_trainable(model, weights)


def long_question(place: Place) -> None:
    from transformers import AutoTokenizer

    from tailtune.config import Truncation
    from tailtune.kinds.chat.prompt import encode_row
    from tailtune.kinds.chat.train import count_truncated

    tokenizer = AutoTokenizer.from_pretrained(place.prepared / "base")
    row = {"full-question": "How? " * 50, "answer": "So."}
    count_truncated([encode_row(tokenizer, tiny_recipe().prompt, row)], Truncation(64))


def train_command(*arguments: str) -> Call:
    def call(place: Place) -> Shown:
        from tailtune.train.__main__ import main

        return command(main, *arguments)(place)

    return call


def a_run(tmp: Path, **overrides: Any) -> Run:
    root = tmp / "runs" / "mine"
    return Run(name="mine", recipe=tiny_recipe(**overrides), local=True, data_dir=root / "data",
               models_dir=root / "models", workspace_dir=root / "workspace")  # fmt: skip


def run_file(text: Callable[[Place], str]) -> Callable[[Place], None]:
    """A started run below runs/ with this `run.json`."""

    def write(place: Place) -> None:
        file("runs/mine/workspace/run.json", text(place))(place)
        file("runs/mine/workspace/pipeline.log", "")(place)

    return write


write_run = run_file(lambda place: a_run(place.tmp).to_json())
write_earlier_run = run_file(lambda place: as_written_before_train_weights(a_run(place.tmp)))


def table(**columns: list[str]) -> Callable[[Place], None]:
    return lambda place: pq.write_table(pa.table(columns), place.tmp / "data.parquet")


def gate(document: Any) -> Call:
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    return after(file("evaluation.json", text), tailtune_command("gate", "TMP/evaluation.json", "--recipe", "survival"))


def process(*arguments: str) -> Call:
    """The real thing: `python ARGUMENTS` in the test's directory."""

    def call(place: Place) -> Shown:
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=place.tmp,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return Shown(result.returncode, result.stderr, result.stdout)

    return call


# -- the table ---------------------------------------------------------------------------------------

ALIASES = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 20))])
"""In few bytes, 9**19 values."""

Row = tuple[str, Call, int, str]
"""Name, how it is given, exit status, what the user reads. `TMP` stands for the directory."""

FILES: list[Row] = [
    ("data file is missing", fetch("TMP/no.jsonl"), 1,
     "data source TMP/no.jsonl does not exist; give the path of a file as this step sees it"),
    ("data directory is empty", after(lambda p: (p.tmp / "none").mkdir(), fetch("TMP/none")), 1,
     "TMP/none contains no .json, .jsonl, .csv, .txt or .parquet file"),
    ("directory with several splits",
     after(file("d/train.jsonl", ROW), after(file("d/test.jsonl", ROW), fetch("TMP/d"))), 1,
     "TMP/d has 2 splits (train: train.jsonl, test: test.jsonl); name the files, a folder, or a pattern, for example "
     "TMP/d/train.jsonl"),
    ("hash of several files", after(file("d/1.jsonl", ROW), after(file("d/2.jsonl", ROW),
                                                                fetch("TMP/d", sha256="0" * 64))), 1,
     "data.sha256 is the hash of one file, but data.source is 2 files; leave data.sha256 out, or name one file"),
    ("data file is empty", after(file("e.jsonl", ""), fetch("TMP/e.jsonl")), 1,
     "TMP/e.jsonl is empty (0 bytes); give a file with data"),
    ("data file has another hash", after(file("a.jsonl", ROW), fetch("TMP/a.jsonl", sha256="0" * 64)), 1,
     "correct data.sha256 or restore the file"),
    ("scheme is unknown", fetch("ftp://host/a.csv"), 1,
     "data source ftp://host/a.csv: 'ftp://' is not supported; use hf://datasets/…, https://, s3://, a path"),
    ("bucket without an object", fetch("s3://bucket"), 1, "s3://bucket names no object; write s3://BUCKET/KEY"),
    ("hub address of a model", fetch("hf://models/a/b"), 1,
     "hf://models/a/b is not a dataset; write hf://datasets/OWNER/NAME[@revision][/file]"),
    ("format is unknown", data_file("rows.xlsx", ROW), 1,
     "the format of rows.xlsx is unknown; give the file one of the suffixes .json, .jsonl, .csv, .txt, .parquet"),
    ("no suffix", data_file("rows", ROW), 1, "or set data.format to one of json, jsonl, csv, txt, parquet"),
    ("converted file is missing", in_step(lambda p: write_parquet(p.tmp / "no.csv", p.tmp / "out", tiny_recipe().data)),
     1, "data file TMP/no.csv does not exist; check data.source"),
    ("broken JSON above the limit", data_file("rows.jsonl", ROW * 10 + '{"topic":\n' * 5), 1,
     "5 of 15 rows (33.3 %) were rejected, above data.max_rejected_share 1 %; first: line 11: broken JSON"),
    ("column is missing in JSON Lines", data_file("rows.jsonl", ROW.replace("question", "frage")), 1,
     "column 'question' is not in the data; found: answer, frage, topic; map your columns in data.columns"),
    ("column is missing in CSV", data_file("rows.csv", "topic,frage,answer\na,b,c\n"), 1,
     "column 'question' is not in the data; found: topic, frage, answer; map your columns in data.columns"),
    ("text has no columns", data_file("rows.txt", "a\nb\n"), 1, "column 'topic' is not in the data; found: text"),
    ("gz that is none", data_file("rows.jsonl.gz", ROW), 1, "TMP/rows.jsonl.gz cannot be read as jsonl, gzip"),
    ("gz that is cut off", data_file("rows.jsonl.gz", gzip.compress(os.urandom(9000))[:4000]), 1,
     "TMP/rows.jsonl.gz cannot be read as jsonl, gzip: Truncated compressed stream; fetch or export it again"),
    ("zst that is none", data_file("rows.jsonl.zst", ROW), 1, "cannot be read as jsonl, zstd"),
    ("Parquet that is none", data_file("rows.parquet", ROW), 1, "TMP/rows.parquet cannot be read as parquet"),
    ("no rows", data_file("rows.jsonl", "\n\n"), 1,
     "TMP/rows.jsonl contains no rows; check data.source and data.format"),
    ("header only", data_file("rows.csv", "topic,question,answer\n"), 1, "TMP/rows.csv contains no rows"),
    ("JSON array is cut off", data_file("rows.json", f"[{ROW},{{"), 1, "the JSON array does not end"),
    ("answers are blank", data_file("rows.jsonl", ROW.replace("So.", " ") * 3), 1,
     "3 of 3 rows (100.0 %) were rejected, above data.max_rejected_share 1 %; first: line 1: column 'answer' is empty"),
    ("text is UTF-16", data_file("rows.jsonl", ROW.encode("utf-16")), 1,
     "TMP/rows.jsonl is UTF-16, not UTF-8; convert it with iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    ("text is UTF-16 without a mark", data_file("rows.json", ROW.encode("utf-16-be")), 1,
     "TMP/rows.json is UTF-16BE, not UTF-8; convert it with iconv -f UTF-16BE -t UTF-8 FILE > NEW"),
    ("CSV is UTF-16", data_file("rows.csv", "topic,question,answer\n1,2,3\n".encode("utf-16")), 1,
     "TMP/rows.csv is UTF-16, not UTF-8"),
    ("CSV is UTF-32", data_file("rows.csv", "topic,question,answer\n1,2,3\n".encode("utf-32")), 1,
     "TMP/rows.csv is UTF-32, not UTF-8"),
    ("text is Latin-1", data_file("rows.jsonl", ROW.replace("So", "Käse").encode("latin-1")), 1,
     "TMP/parquet.rejects.jsonl; if the text is Windows-1252 or Latin-1, convert it with iconv -f WINDOWS-1252"),
    ("CSV header is Latin-1", data_file("rows.csv", "topic,frage,größe\n1,2,3\n".encode("latin-1")), 1,
     "the CSV header of TMP/rows.csv is not UTF-8; convert it with iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"),
    ("CSV with semicolons", data_file("rows.csv", "topic;question;answer\n1;2;3\n"), 1,
     "the columns of TMP/rows.csv are separated by semicolons, not commas; convert it with python -c"),
    ("CSV with semicolons, and commas in the names", data_file("rows.csv", 'topic;"question";"a, b";answer\n1;2;3;4\n'),
     1, "the columns of TMP/rows.csv are separated by semicolons, not commas"),
    ("CSV with tabs", data_file("rows.csv", "topic\tquestion\tanswer\n1\t2\t3\n"), 1,
     "the columns of TMP/rows.csv are separated by tabs, not commas"),
    ("CSV header is too long", data_file("rows.csv", f"topic,question,answer,{'x' * 5000}\n1,2,3,4\n",
                                         max_row_bytes=4000), 1,
     "the CSV header cannot be read: row longer than data.max_row_bytes 4,000; correct the first line"),
    ("one indented object", data_file("rows.json", json.dumps(json.loads(ROW), indent=2)), 1,
     "TMP/rows.json has JSON objects over several lines: they are neither in an array nor one per line; convert it "
     "with jq -c . FILE > NEW"),
    ("web page", data_file("rows.jsonl", "\n<!DOCTYPE html>\n<p>Log in"), 1,
     "TMP/rows.jsonl is a web page, not jsonl; download the file itself, after the login"),
    ("compressed without its suffix", data_file("rows.jsonl", gzip.compress(ROW.encode())), 1,
     "TMP/rows.jsonl is gzip, not jsonl; let its name end in .gz"),
    ("Parquet without its suffix", data_file("rows.csv", b"PAR1\x15\x04"), 1,
     "TMP/rows.csv is Parquet, not csv; set data.format to parquet"),
    ("spreadsheet", data_file("rows.csv", b"PK\x03\x04\x14\0"), 1,
     "TMP/rows.csv is a ZIP archive or a spreadsheet, not csv; extract it, or export it as CSV"),
    ("user without a home", fetch("~nosuchuser/rows.jsonl"), 1,
     "data source ~nosuchuser/rows.jsonl cannot be read: Could not determine home directory; check the path"),
    ("path that is too long", fetch("a" * 5000), 1, "File name too long"),
    ("address that is none", fetch("http://[::1/rows.jsonl"), 1,
     "http://[::1/rows.jsonl is no valid address: Invalid IPv6 URL; check it"),
    ("objects with too many keys", data_file(
        "rows.jsonl", "".join(f'{{"topic": {{"k{i}": 1}}, "question": "q", "answer": "a"}}\n' for i in range(2000)),
        columns={"topic": "{topic}", "question": "{question}", "answer": "{answer}"}), 1,
     "column 'topic' holds objects with more than 1,000 different keys; leave it out of data.columns"),
    ("every row is bad", data_file("rows.jsonl", "[1]\n", max_rejected_share=1.0), 1,
     "no row is left: 1 of 1 rows (100.0 %) were rejected; first: line 1: not a JSON object"),
    ("too few rows to split", in_step(lambda p: split_rows(pa.table({"q": ["a"]}), "q", 0.1, 1)), 1,
     "splitting 1 rows by 'q' with data.validation_share 0.1 leaves the validation side empty; change the share"),
    ("split column is not in the data", in_step(lambda p: split_rows(pa.table({"q": ["a"]}), "question", 0.1, 1)), 1,
     "data.split_by is 'question', but the data has the columns q; name one of them"),
    ("training without data", in_step(lambda p: train_stage(a_run(p.tmp), p.tmp / "no", p.prepared / "base")), 1,
     "TMP/no contains no complete Parquet file; run the parquet step first"),
    ("question longer than max_length", in_step(long_question), 1, "leaves no room for its answer in max_length 64; "
     "raise stages.0.trainer.max_length or shorten prompt.system"),
    ("base model directory is empty", base_model("TMP"), 1,
     "base_model TMP contains no config.json; give the directory of a Transformers model"),
    ("base model is nothing", base_model("./nowhere"), 1,
     "base_model './nowhere' is neither a directory nor a hub name; give OWNER/NAME, a path, or small"),
    ("architecture is unknown", base_model("small", **{"model.small.model_type": "smollm9"}), 1,
     "model.small.model_type 'smollm9' is not a causal-LM architecture in Transformers; use for example smollm3"),
    ("architecture is not causal", base_model("small", **{"model.small.model_type": "t5"}), 1,
     "model.small.model_type 't5' is not a causal-LM architecture in Transformers"),
    ("more layers than the model has", in_step(train_layers), 1,
     "train_weights.last_layers is 99, but the model has 3 layers; lower it"),
]  # fmt: skip

RECIPES: list[Row] = [
    ("more layers than the small model has",
     pipeline_py("--local", "--dry-run", "-p", "stages.0.train_weights.last_layers=99"), 2,
     "stages.0.train_weights.last_layers is 99, but model.small has 4 layers; lower it"),
    ("base model is not a directory", pipeline_py("--local", "--dry-run", "-p", "base_model=./nowhere"), 2,
     "error: base model ./nowhere is not a directory; give -p base_model= a directory, OWNER/NAME, or small"),
    ("data of this machine, for a cluster", pipeline_py("--dry-run", "-p", "data_source=/home/me/my.jsonl"), 2,
     "error: /home/me/my.jsonl is a path on this machine, and a cluster's pods cannot read it; copy it to the volume "
     "and name it as /shared/data/…, as step 17 of the runbook shows, or give an address"),
    ("model of this machine, for a cluster",
     pipeline_py("--dry-run", "-p", "base_model=/home/me/model", "-p", "data_source=/shared/data/uploads/my.jsonl"), 2,
     "error: /home/me/model is a path on this machine, and a cluster's pods cannot read it; copy it to the volume and "
     "name it as /shared/models/…"),
    ("unknown name", pipeline_py("--dry-run", "--recipe", "survivl"), 2,
     "error: no recipe 'survivl', did you mean 'survival'?; built in: survival; or give a path that ends in .yaml"),
    ("file is missing", pipeline_py("--dry-run", "--recipe", "nowhere.yaml"), 2,
     "error: recipe file nowhere.yaml does not exist; check the path, or see --list"),
    ("file is a directory", after(lambda p: (p.tmp / "own.yaml").mkdir(),
                                  pipeline_py("--dry-run", "--recipe", "TMP/own.yaml")), 2,
     "recipe file TMP/own.yaml cannot be read: Is a directory; give a readable YAML file"),
    ("not UTF-8", recipe_file("name: é".encode("latin-1")), 2, "cannot be read: 'utf-8' codec can't decode byte 0xe9"),
    ("broken YAML", recipe("seed: 42", "seed: [42"), 2,
     "recipe file TMP/own.yaml: line 6: expected ',' or ']', but got ':'; correct the YAML"),
    ("broken JSON", recipe_file("{", name="own.json"), 2,
     "recipe file TMP/own.json: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); correct"),
    ("empty file", recipe_file(""), 2,
     "contains no mapping; start from a built-in one (tailtune/recipes/survival.yaml)"),
    ("not a mapping", recipe_file("- a\n"), 2,
     "recipe file TMP/own.yaml contains no mapping; start from a built-in one"),
    ("key stands twice", recipe("seed: 42", "seed: 42\nseed: 43"), 2,
     "recipe file TMP/own.yaml: line 5: duplicate key 'seed'; correct the YAML"),
    ("nested key stands twice in JSON", recipe_file('{"a": {"b": 1, "b": 2}}', name="own.json"), 2,
     "recipe file TMP/own.json: duplicate key 'b'; correct the JSON"),
    ("brackets without end in JSON", recipe_file("[" * 100_000, name="own.json"), 2,
     "recipe file TMP/own.json: brackets within brackets in too many levels; correct the JSON"),
    ("number of 5,000 digits in JSON", recipe_file(f'{{"seed": {"1" * 5000}}}', name="own.json"), 2,
     "recipe file TMP/own.json: a number of 5,000 digits; correct the JSON"),
    ("brackets without end in YAML", recipe_file("a: " + "[" * 5000), 2,
     "recipe file TMP/own.yaml: line 1: lists and mappings in more than 32 levels; correct the YAML"),
    ("number of 5,000 digits in YAML", recipe("seed: 42", f"seed: {'1' * 5000}"), 2,
     "line 4: a number of 5,000 digits; for a text, put it in quotes; correct the YAML"),
    ("number above all doubles, as a text", flag("keep_runs='9007199254740993'"), 2, "keep_runs: a number above 2**53"),
    ("number above all doubles, as a float", flag("keep_runs=9007199254740994.0"), 2,
     "keep_runs: a number above 2**53"),
    ("seed above all doubles", recipe("seed: 42", "seed: 9007199254740993"), 2, "seed: a number above 2**53"),
    ("aliases that grow without end", recipe_file(ALIASES), 2,
     "recipe TMP/own.yaml is larger than 300,000 characters, with its aliases written out; shorten it"),
    ("alias of itself", recipe_file("local: &a {x: *a}"), 2, "levels; write it flatter"),
    ("a list as a key", recipe_file("? [a]\n: 1\n"), 2, "line 1: a key that is no text; put it in quotes"),
    ("a mapping as a key", recipe('user: "{full-question}"', "user: {{full-question}}"), 2,
     'a mapping as a key; for a template, write "{column}" in quotes; correct the YAML'),
    ("a date as a key", recipe_file("{1: 2}"), 2, "line 1: a key that is no text; put it in quotes"),
    ("a tag", recipe("seed: 42", "seed: !!python/object:os.system 42"), 2,
     "line 4: a tag (tag:yaml.org,2002:python/object:os.system); leave it out; correct the YAML"),
    ("half a character", recipe_file('{"description": "\\ud800"}', name="own.json"), 2,
     "recipe TMP/own.json: description: contains \\ud800, which is no character of a text; remove it"),
    ("NUL in a path", recipe_file('data: {source: "a\\0b"}'), 2, "data.source: contains \\x00, which is no character"),
    ("Infinity in JSON", recipe_file('{"local": {"epochs": Infinity}}', name="own.json"), 2,
     "local.epochs: Input should be a finite number (got inf)"),
    ("a file that is too large", recipe_file(" " * (513 << 10)), 2,
     "error: recipe file TMP/own.yaml is larger than 512 KiB; is this another file?"),
    ("a key that looks like a tag", recipe_file("<a>: 1"), 2, "recipe TMP/own.yaml: <a>: unknown key; known: name, "),
    ("a key without end", recipe_file(f"{'k' * 1000}: 1"), 2,
     f"recipe TMP/own.yaml: {'k' * 80}…: unknown key; known: "),
    ("a value without end", recipe("seed: 42", f"seed: {'many ' * 999}"), 2,
     "seed: Input should be a valid integer, unable to parse string as an integer (got 'many many many many many many "
     "many ma…any many many many many many many many')"),
    ("unknown key", recipe("seed: 42", "sead: 42"), 2,
     "recipe TMP/own.yaml: sead: unknown key, did you mean 'seed'?; known: name, description, seed, model"),
    ("unknown nested key", recipe("validation_share", "validation_shar"), 2,
     "data.validation_shar: unknown key, did you mean 'validation_share'?"),
    ("unknown key of the weights", recipe("last_layers: 2", "last_layer: 2"), 2,
     "stages.0.train_weights.last_layer: unknown key, did you mean 'last_layers'?"),
    ("former keys of a stage",
     recipe("    kind: chat", "    num_trainable_layers: 2\n    train_head: true\n    kind: sft"), 2,
     "num_trainable_layers is now train_weights.last_layers, train_head is now train_weights.head, kind sft is now"),
    ("unknown key of a stage", recipe("scale_learning_rate", "scale_learnign_rate"), 2,
     "stages.0.scale_learnign_rate: unknown key, did you mean 'scale_learning_rate'?"),
    ("unknown key of a stage's resources", stage_resources("num_node: 2"), 2,
     "recipe TMP/own.yaml: stages.0.resources.num_node: unknown key, did you mean 'num_nodes'?; known: num_nodes, "),
    ("bad quantity of a stage", stage_resources("memory: much"), 2,
     "recipe TMP/own.yaml: stages.0.resources.memory: String should match pattern"),
    ("a request above the stage's limit", stage_resources("memory: 8Gi"), 2,
     "stages.0.resources.memory is 8Gi, less than resources.memory_request, which is 16Gi; set both"),
    ("a stage's memory of the steps", stage_resources("step_memory: 2Gi"), 2,
     "stages.0.resources: step_memory is the same for all stages; set resources.step_memory"),
    ("a stage's kind of job", stage_resources("job_kind: trainjob"), 2,
     "stages.0.resources: job_kind is the same for all stages; set resources.job_kind"),
    ("a secret of a stage", stage_resources("environment: {HF_TOKEN: hf_x}"), 2,
     "stages.0.resources.environment: HF_TOKEN cannot be set here: a recipe is no place for secrets"),
    ("a setting as a variable of a stage", stage_resources("environment: {EPOCHS: 3}"), 2,
     "error: EPOCHS in stages.0.resources.environment is a setting; set stages.0.trainer.num_train_epochs"),
    ("missing key", recipe("name: survival\n", ""), 2, "recipe TMP/own.yaml: name: is missing; add it"),
    ("wrong type", recipe("seed: 42", "seed: many"), 2, "seed: Input should be a valid integer"),
    ("two problems", recipe("seed: 42", "seed: many\nsead: 1"), 2, "local; seed: Input should be a valid integer"),
    ("a typo and what it leaves out", recipe("\ngate:", "\ngates:"), 2, "gates: unknown key, did you mean 'gate'?"),
    ("a misspelt metric", recipe("answer_loss_vs_base", "answer_loss_vs_bas"), 2,
     "metric 'answer_loss_vs_bas' is not measured, did you mean 'answer_loss_vs_base'?"),
    ("a misspelt run parameter", recipe("num_train_epochs: 4", "num_train_epoch: 4"), 2,
     "trainer.num_train_epochs is missing; did you misspell it as 'num_train_epoch'?"),
    ("one checkpoint", recipe("max_grad_norm: 1.0", "save_total_limit: 1"), 2,
     "stages.0.trainer.save_total_limit is 1; keep at least 2, the best checkpoint and the last"),
    ("name with a space", recipe("name: survival", "name: My Recipe"), 2, "name: String should match pattern"),
    ("split_by no column", recipe("split_by: full-question", "split_by: question"), 2,
     "data: split_by is 'question', which is not a column; use one of ['full-question', 'answer']"),
    ("template without a field", recipe('answer: "{answer}"', 'answer: "answer"'), 2,
     "data: columns.answer names no source column; write for example '{answer}'"),
    ("template with one brace", recipe('answer: "{answer}"', 'answer: "{answer"'), 2,
     "data: template '{answer': expected '}' before end of string; write {name}, and {{ or }} for a brace"),
    ("template with a format", recipe('answer: "{answer}"', 'answer: "{answer:>9}"'), 2,
     "template '{answer:>9}': 'answer' is followed by ':' or '!'; write {answer}"),
    ("prompt with one brace", recipe('user: "{full-question}"', 'user: "{full-question"'), 2,
     "template '{full-question': expected '}' before end of string"),
    ("prompt with doubled braces", flag("prompt.user={{full-question}}"), 2,
     "prompt.user has {{full-question}}, which is the text {full-question} for every row; write {full-question}"),
    ("prompt with doubled braces and spaces", flag("prompt.assistant=So: {{ answer }} {answer}"), 2,
     "prompt.assistant has {{answer}}, which is the text {answer} for every row; write {answer}"),
    ("columns with doubled braces", flag("data.columns={full-question: '{{ask}}', answer: '{answer}'}"), 2,
     "data: columns.full-question names no source column; write for example '{ask}'"),
    ("columns with one doubled brace of two",
     flag("data.columns={full-question: '{question} {{answer}}', answer: '{answer}'}"), 2,
     "data: columns.full-question has {{answer}}, which is the text {answer} for every row; write {answer}"),
    ("prompt uses no column", recipe('assistant: "{answer}"', 'assistant: "yes"'), 2,
     "prompt.assistant uses no column, so every answer would be the same; use one of ['full-question', 'answer']"),
    ("prompt uses an unknown column", recipe('user: "{full-question}"', 'user: "{question}"'), 2,
     "prompt.user uses column 'question', which data.columns does not define; it defines ['full-question', 'answer']"),
    ("threshold NaN", recipe("threshold: 0.95", "threshold: .nan"), 2,
     "gate.0.threshold: Input should be a finite number (got nan)"),
    ("threshold infinite", recipe("threshold: 0.95", "threshold: .inf"), 2, "gate.0.threshold: Input should be"),
    ("infinite number elsewhere", flag("generation.repetition_penalty=.inf"), 2,
     "generation.repetition_penalty: Input should be a finite number (got inf)"),
    ("unknown comparison", recipe('"<="', '"=<"'), 2, "gate.0.comparison: Input should be '<', '<=', '>' or '>='"),
    ("no rules", flag("gate=[]"), 2, "gate: List should have at least 1 item"),
    ("SFTConfig knows no such argument", recipe("warmup_steps", "warmup_step"), 2,
     "error: stages.0.trainer.warmup_step is not an argument of trl.SFTConfig, did you mean 'warmup_steps'?"),
    ("reserved argument", recipe("warmup_steps: 0.03", "output_dir: x"), 2,
     "stages.0.trainer.output_dir cannot be set: the run's own directory is used"),
    ("argument that would be ignored", recipe("warmup_steps: 0.03", "use_cpu: true"), 2,
     "stages.0.trainer.use_cpu cannot be set: a GPU is used where there is one"),
    ("another chat template", flag("stages.0.trainer.chat_template_path=plain.jinja"), 2,
     "stages.0.trainer.chat_template_path cannot be set: the template is part of the base model, and frozen"),
    ("no evaluations", flag("stages.0.trainer.eval_strategy=no"), 2,
     "stages.0.trainer.eval_strategy is 'no'; leave it out: the best checkpoint by eval_loss becomes the model"),
    ("no steps", flag("stages.0.trainer.max_steps=0"), 2,
     "stages.0.trainer.max_steps is 0; give a number above 0, or leave it out to train for whole epochs"),
    ("a seed that numpy refuses", flag("seed=4294967296"), 2, "seed: Input should be less than 4294967296"),
    ("max_seq_length", recipe("max_length: 1024", "max_seq_length: 1024"), 2,
     "stages.0.trainer.max_seq_length cannot be set: TRL calls it `max_length`"),
    ("wrong type of an argument", recipe("weight_decay: 0.0", "weight_decay: heavy"), 2,
     "stages.0.trainer.weight_decay is 'heavy': Input should be a valid number; use a value of that type"),
    ("value that SFTConfig refuses", recipe("lr_scheduler_type: linear", "lr_scheduler_type: linaer"), 2,
     "stage 'sft': trl.SFTConfig refuses the trainer arguments: linaer is not a valid SchedulerType, please select"),
    ("argument whose package is missing", recipe("weight_decay: 0.0", "deepspeed: ds.json"), 2,
     "trl.SFTConfig refuses the trainer arguments: No package metadata was found for The 'deepspeed"),
    ("argument is not a number", recipe("weight_decay: 0.0", "weight_decay: .nan"), 2,
     "stages.0.trainer.weight_decay: Input should be a finite number (got nan)"),
    ("negative learning rate", recipe("learning_rate: 5e-5", "learning_rate: -5e-5"), 2,
     "stages.0: trainer.learning_rate must be a finite number above 0, found -5e-05"),
    ("length of nothing", recipe("max_length: 1024", "max_length: 0"), 2,
     "stages.0.trainer.max_length is 0; give a finite number above 0"),
    ("nothing trains", flag("stages.0={name: sft, kind: chat, train_weights: {last_layers: 0, head: false}, trainer: "
                            "{num_train_epochs: 1, per_device_train_batch_size: 1, learning_rate: 1}}"), 2,
     "last_layers is 0 and head is false, so nothing would train"),
    ("unknown kind of stage", recipe("kind: chat", "kind: dpo"), 2,
     "stages.0.kind: Input should be 'chat' (got 'dpo')"),
    ("unknown hardware profile", recipe("resources:\n", "hardware: {profile: B200}\nresources:\n"), 2,
     "error: hardware.profile 'B200' is not known; use auto or one of T4, L4, A40"),
    ("small without a description", flag("base_model=small", "model.small=null"), 2,
     "model: base_model is 'small' but model.small is not given; describe it, or name a model"),
    ("heads do not divide", flag("model.small.num_heads=5"), 2,
     "model.small: hidden_size 128 is not a multiple of num_heads 5"),
    ("unknown key in local:", recipe("  model.base_model: small", "  modle.base_model: small", "--local"), 2,
     "error: the recipe's local: overlay: unknown key 'modle.base_model', did you mean 'model'?"),
    ("dashboard: no JSON", resolve(lambda: "survival"), 1, "parameter 'recipe' is not JSON (Expecting value"),
    ("dashboard: no object", resolve(lambda: "[]"), 1,
     "parameter 'recipe' is not a JSON object; leave it at its default"),
    ("dashboard: epochs", resolve(lambda: tiny_recipe().to_json(), epochs=-1.0), 1,
     "recipe with epochs: stages.0: trainer.num_train_epochs must be a finite number above 0, found -1.0"),
    ("dashboard: trainer argument", resolve(lambda: tiny_recipe(**{"stages.0.trainer.warmup": 1}).to_json()), 1,
     "stages.0.trainer.warmup is not an argument of trl.SFTConfig, did you mean"),
    ("dashboard: directory", resolve(lambda: tiny_recipe().to_json()), 1,
     "data_dir 'TMP': give a directory below /shared/data, where the volume is, that ends in /{run}"),
    ("dashboard: profile", resolve(lambda: tiny_recipe(**{"hardware.profile": "B200"}).to_json()), 1,
     "hardware.profile 'B200' is not known"),
]  # fmt: skip

FLAGS: list[Row] = [
    ("-p without =", flag("epochs"), 2, "error: -p epochs: write KEY=VALUE, for example -p epochs=2"),
    ("-p without a key", flag("=3"), 2, "error: -p =3: write KEY=VALUE, for example -p epochs=2"),
    ("-p with an unknown key", flag("epoch=3"), 2,
     "error: unknown key 'epoch', did you mean 'epochs'?; known here: name, description, seed"),
    ("-p with an unknown dotted key", flag("model.revison=x"), 2,
     "unknown key 'model.revison', did you mean 'model.revision'?; known here: model.base_model, model.revision"),
    ("-p with an unknown argument", flag("stages.0.trainer.warmup_stepz=1"), 2,
     "stages.0.trainer.warmup_stepz is not an argument of trl.SFTConfig, did you mean 'warmup_steps'?"),
    ("-p with a secret", flag("resources.environment.HF_TOKEN=hf_x"), 2,
     "error: recipe with resources.environment.HF_TOKEN: resources.environment: HF_TOKEN cannot be set here: a recipe "
     "is no place for secrets; hf_secret and s3_secret name those that are mounted as files into the steps that fetch"),
    ("-p with a setting that is a variable as well", flag("epochs=2", "resources.environment.EPOCHS=3"), 2,
     "error: epochs is 2, but EPOCHS in resources.environment is 3; set only epochs"),
    ("-p with an unknown resource of a stage", flag("stages.0.resources.gpus=x"), 2,
     "stages.0.resources.gpus: unknown key, did you mean 'gpu'?; known: num_nodes, "),
    ("-p with an index out of range", flag("stages.1.trainer.max_length=1"), 2,
     "error: unknown key 'stages.1.trainer.max_length': 'stages' has entries 0 to 0"),
    ("-p with a name as an index", flag("gate.first.threshold=1"), 2, "'gate' has entries 0 to 3"),
    ("-p without an index", flag("stages.tail.mode=off"), 2,
     "error: unknown key 'stages.tail.mode': 'stages' has entries 0 to 0; write 'stages.0.tail.mode'"),
    ("-p with an index that is no ASCII digit", flag("stages.².trainer.learning_rate=1"), 2,
     "error: unknown key 'stages.².trainer.learning_rate': 'stages' has entries 0 to 0; write 'stages.0."),
    ("-p with an index of many digits", flag(f"stages.{'1' * 5000}.kind=x"), 2, "'stages' has entries 0 to 0; write"),
    ("-p local:", flag("local.data.source=x"), 2,
     "error: 'local.data.source' has no effect: local: is applied to the recipe before parameters; set data.source "
     "itself"),
    ("-p with a number of 5,000 digits", flag(f"seed={'1' * 5000}"), 2, "recipe with seed: seed: "),
    ("-p with a directory of nobody", pipeline_py("--local", "-p", "data_source=~nosuchuser/x.jsonl"), 2,
     "error: data source ~nosuchuser/x.jsonl does not exist; give -p data_source= a path"),
    ("-p with a model of nobody", pipeline_py("--local", "-p", "base_model=~nosuchuser/x"), 2,
     "error: base model ~nosuchuser/x is not a directory; give -p base_model= a directory"),
    ("-p below a value", flag("seed.x=1"), 2,
     "error: unknown key 'seed.x': 'seed' is a single value, not a section; set 'seed' itself"),
    ("-p with the wrong type", flag("epochs=two"), 2, "recipe with epochs: stages.0: trainer.num_train_epochs must be"),
    ("-p with nothing", flag("base_model="), 2, "model.base_model: String should have at least 1 character (got '')"),
    ("-p infinite", flag("epochs=.inf"), 2, "trainer.num_train_epochs: Input should be a finite number (got inf)"),
    ("-p half a row", flag("batch_size=1.5"), 2,
     "stages.0: trainer.per_device_train_batch_size must be a whole number, found 1.5"),
    ("--local without the file", pipeline_py("--local", "-p", "data_source=nowhere.jsonl"), 2,
     "data source nowhere.jsonl does not exist; give -p data_source= a path, an address, or embedded"),
    ("-p a limit below the request", flag("resources.memory=16000Mi"), 2,
     "resources.memory is 16000Mi, less than resources.memory_request, which is 16Gi; set both"),
    ("-p a request above the limit", flag("resources.step_cpu_request=2100m"), 2,
     "resources.step_cpu is 2, less than resources.step_cpu_request, which is 2100m; set both"),
    ("-p a unit that Kubernetes does not have", flag("resources.memory=20gi"), 2,
     "resources.memory: String should match pattern"),
    ("-p no nodes", flag("num_nodes=0"), 2, "resources.num_nodes: Input should be greater than or equal to 1 (got 0)"),
    ("--check with --local", pipeline_py("--check", "--local"), 2, "Error: give one of --local, --submit, --schedule"),
    ("two modes", pipeline_py("--list", "--check"), 2, "Error: give one of --local, --submit, --schedule, --dry-run"),
    ("-p without a mode", pipeline_py("-p", "epochs=1"), 2, "Error: --recipe and -p need --local"),
    ("--run-name without --local", pipeline_py("--run-name", "x"), 2, "Error: --run-name needs --local"),
    ("--run-name with a path", pipeline_py("--local", "--run-name", "../x"), 2,
     "error: --run-name '../x': use letters, digits, '-', '_' and '.', at most 100, not starting with '-' or '.'"),
    ("--run-name of two words", pipeline_py("--local", "--run-name", "a b"), 2, "error: --run-name 'a b': use letters"),
    ("--run-name empty", pipeline_py("--local", "--run-name", ""), 2, "error: --run-name '': use letters"),
    ("--run-name of an earlier version's run",
     after(write_earlier_run, pipeline_py("--local", "--run-name", "mine")), 2,
     "error: this run was made by an earlier version of tailtune, in which recipe.stages.0 had a different form; "
     "choose another --run-name, or check out that version"),
    ("--run-name too long", pipeline_py("--local", "--run-name", "x" * 300), 2, "at most 100"),
    ("runs/ is a file", after(file("runs", ""), pipeline_py("--local", "--run-name", "x")), 2,
     "error: cannot write into TMP/runs/x: "),
    ("unknown option", process(str(ROOT / "pipeline.py"), "--lokal"), 2, "No such option '--lokal'"),
    ("an argument", pipeline_py("survival"), 2, "Error: Got unexpected extra argument (survival)"),
    ("a run that fails", process(str(ROOT / "pipeline.py"), "--local", "-p", "stages.0.trainer.warmup_step=1"), 1,
     "failed: resolve: stages.0.trainer.warmup_step is not an argument of trl.SFTConfig, did you mean "
     "'warmup_steps'?"),
]  # fmt: skip

EVALUATE = ("evaluate", "PREPARED/base", "--recipe", "survival", "--data-dir")
COMMANDS: list[Row] = [
    ("ask without a run", tailtune_command("ask", "hi"), 1,
     "error: there is no run in runs/; start one with `make demo`, or give --run DIRECTORY"),
    ("ask an empty question", tailtune_command("ask", " "), 1, "error: the question is empty; write one in quotes"),
    ("ask without a question", tailtune_command("ask"), 2, "Error: Missing argument 'QUESTION'."),
    ("ask in another directory", tailtune_command("ask", "hi", "--run", "TMP"), 1,
     "error: TMP contains no run; there are: none in runs/"),
    ("ask a run without its model", after(write_run, tailtune_command("ask", "hi")), 1,
     "error: the tuned model of run 'mine' is not at TMP/runs/mine/models/best_model; finish the run first"),
    ("ask the base model that is not there", after(write_run, tailtune_command("ask", "hi", "--model", "base")), 1,
     "error: the base model of run 'mine' is not at TMP/runs/mine/models/base_model; finish the run first"),
    ("ask a broken model", after(write_run, after(file("runs/mine/models/best_model/config.json", "{"),
                                                  tailtune_command("ask", "hi"))), 1,
     "is not a valid JSON file; give the directory of a Transformers model with its tokenizer"),
    ("ask a broken run", after(run_file(lambda p: '{"name": 3}'), tailtune_command("ask", "hi")), 1,
     "error: runs/mine/workspace/run.json: this is not the output of the resolve step: name: Input should be a valid "
     "string; run the pipeline again"),
    ("ask a run of an earlier version", after(write_earlier_run, tailtune_command("ask", "hi")), 1,
     "error: runs/mine/workspace/run.json: this run was made by an earlier version of tailtune, in which "
     "recipe.stages.0 had a different form; choose another --run-name, or check out that version"),
    ("ask a run that is no JSON", after(run_file(lambda p: "x"), tailtune_command("ask", "hi")), 1,
     "error: runs/mine/workspace/run.json: this is not the output of the resolve step: run: Invalid JSON"),
    ("continue a run that is no text", after(file("runs/mine/workspace/run.json", b"\xff"),
                                             pipeline_py("--local", "--run-name", "mine")), 2,
     "error: this is not the output of the resolve step: run: Invalid JSON"),
    ("ask an unknown model", tailtune_command("ask", "hi", "--model", "best"), 2, "'best' is not one of 'tuned'"),
    ("evaluate without data", tailtune_command(*EVALUATE, "TMP"), 1,
     "error: TMP contains no data.parquet; give the data/parquet directory of a run"),
    ("evaluate no model", tailtune_command("evaluate", "TMP", "--recipe", "survival", "--data-dir", "PREPARED/data"), 1,
     "error: TMP contains no config.json; give the directory of a Transformers model"),
    ("evaluate an unknown recipe", tailtune_command("evaluate", "TMP", "--recipe", "survivl", "--data-dir", "TMP"), 1,
     "error: no recipe 'survivl', did you mean 'survival'?"),
    ("evaluate without a recipe", tailtune_command("evaluate", "TMP"), 2, "Error: Missing option '--recipe'."),
    ("evaluate broken data", after(file("data.parquet", "x"), tailtune_command(*EVALUATE, "TMP")), 1,
     "error: TMP/data.parquet cannot be read: "),
    ("evaluate other data", after(table(question=["a"]), tailtune_command(*EVALUATE, "TMP")), 1,
     "error: TMP/data.parquet has no column 'full-question', it has question; give the data of a run of this recipe"),
    ("evaluate on one row", after(table(**{"full-question": ["a"], "answer": ["b"]}),
                                  tailtune_command(*EVALUATE, "TMP")), 1, "splitting 1 rows by "),
    ("gate a missing file", tailtune_command("gate", "TMP/no.json", "--recipe", "survival"), 1,
     "error: TMP/no.json is not a file; give the evaluation.json of a run"),
    ("gate a file without metrics", gate({"loss": 1}), 1,
     'error: TMP/evaluation.json contains no "metrics"; give the evaluation.json of a run'),
    ("gate broken JSON", gate("{"), 1, "error: TMP/evaluation.json is not JSON that can be judged: Expecting property"),
    ("gate bytes", gate(b"\xff\xfe\x00"), 1, "TMP/evaluation.json is not JSON that can be judged: 'utf-8' codec"),
    ("gate brackets without end", gate("[" * 100_000), 1,
     "judged: brackets within brackets in too many levels; give the evaluation.json of a run"),
    ("gate a number of 5,000 digits", gate(f'{{"metrics": {{"a": {"1" * 5000}}}}}'), 1, "a number of 5,000 digits"),
    ("gate a metric that stands twice", gate('{"metrics": {"answer_loss_vs_base": 2, "answer_loss_vs_base": 0}}'), 1,
     "error: TMP/evaluation.json is not JSON that can be judged: duplicate key 'answer_loss_vs_base'; give"),
    ("gate a list of metrics", gate({"metrics": [1]}), 1, 'error: TMP/evaluation.json contains no "metrics"'),
    ("unknown command", tailtune_command("aks"), 2, "No such command 'aks'"),
    ("train without data", train_command("--recipe", "survival", "--model-dir", "TMP", "--data-dir", "TMP"), 1,
     "train: error: TMP/data.parquet does not exist; write it with the parquet step, or set --data-dir"),
    ("train an unknown stage", train_command("--recipe", "survival", "--model-dir", "TMP", "--stage", "dpo"), 1,
     "train: error: the recipe has no stage 'dpo'; use one of sft"),
]  # fmt: skip

VERDICTS: list[Row] = [
    ("a metric fails", gate({"metrics": METRICS | {"answer_loss_vs_base": 1.2}}), 1,
     "FAIL  answer_loss_vs_base 1.2 (<= 0.95) — 1.2 is not <= 0.95"),
    ("a metric is NaN", gate({"metrics": METRICS | {"answer_loss_vs_base": float("nan")}}), 1,
     "FAIL  answer_loss_vs_base nan (<= 0.95) — the metric is nan"),
    ("a metric is missing", gate({"metrics": {}}), 1, "the metric is missing; measured: none"),
    ("a metric is a word", gate({"metrics": METRICS | {"tuned_token_accuracy": "good"}}), 1,
     "the metric is str 'good', not a number"),
    ("a metric is beyond all floats", gate({"metrics": METRICS | {"tuned_token_accuracy": 10**400}}), 1,
     "FAIL  tuned_token_accuracy a number of about 398 digits (>= "),
]  # fmt: skip

BAD = {"file": FILES, "recipe": RECIPES, "flag": FLAGS, "command": COMMANDS}


def cases(rows: list[Row], kind: str) -> list[Any]:
    return [pytest.param(*row[1:], id=f"{kind}: {row[0]}") for row in rows]


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr_log: None) -> None:
    """Nothing is written elsewhere."""
    monkeypatch.chdir(tmp_path)
    for name in ("DATA_DIR", "OUTPUT_DIR", "EPOCHS", "BATCH_SIZE", "LEARNING_RATE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("call", "status", "message"), [c for kind, rows in BAD.items() for c in cases(rows, kind)])
def test_bad_input(call: Call, status: int, message: str, tmp_path: Path, prepared: Path) -> None:
    shown = call(Place(tmp_path, prepared))
    stderr = shown.stderr.replace(str(tmp_path), "TMP")
    assert shown.status == status, stderr
    assert message in stderr
    assert "Traceback" not in stderr + shown.stdout
    assert shown.status == 1 or not shown.stdout
    errors = [line for line in stderr.splitlines() if "error: " in line.lower() or line.startswith("failed: ")]
    assert message in errors[-1], "the message is one line"
    assert stderr.splitlines()[-1] == errors[-1], "and the last one"


@pytest.mark.parametrize(("call", "status", "message"), cases(VERDICTS, "verdict"))
def test_a_verdict_is_a_result_not_an_error(
    call: Call, status: int, message: str, tmp_path: Path, prepared: Path
) -> None:
    shown = call(Place(tmp_path, prepared))
    assert (shown.status, shown.stderr) == (status, "")
    assert shown.stdout.startswith("gate FAILED") and message in shown.stdout


def test_the_metrics_of_the_table_would_pass(tmp_path: Path, prepared: Path) -> None:
    shown = gate({"metrics": METRICS})(Place(tmp_path, prepared))
    assert (shown.status, shown.stderr) == (0, "") and shown.stdout.startswith("gate passed")


def test_bad_input_before_a_run_makes_no_directory(tmp_path: Path) -> None:
    result = CliRunner().invoke(pipeline_cli.main, ["--local", "-p", "epoch=1"])
    assert result.exit_code == 2 and not list(tmp_path.iterdir())


def test_the_recipe_that_the_table_breaks_is_good(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(SURVIVAL, encoding="utf-8")
    assert load_recipe(tmp_path / "own.yaml") == load_recipe("survival"), "a copy finds the samples too"
    result = CliRunner().invoke(pipeline_cli.main, ["--dry-run", "--recipe", "own.yaml"])
    assert result.exit_code == 0, result.output
