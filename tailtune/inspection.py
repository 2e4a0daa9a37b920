"""What a data set contains, and the recipe that would fit: `python pipeline.py --inspect SOURCE`.

Local files in JSON, JSON Lines, CSV and plain text need only the default installation.
"""

import json
import math
import os
import shlex
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailtune.config import copied_column, fill_template, template_fields
from tailtune.errors import UserError, printable
from tailtune.fetch.choice import local_files
from tailtune.imports import installed_version, require_train
from tailtune.log import log
from tailtune.parquet.conversation import ROLES, read_conversation
from tailtune.parquet.lines import BadRow
from tailtune.parquet.readers import detect_format, read_values, source_of
from tailtune.progress import Progress
from tailtune.recipe.addresses import check_address, without_secrets
from tailtune.recipe.schema import Data, Recipe, show_sources
from tailtune.recipe.write import check_new_file, quoted, write_recipe

if TYPE_CHECKING:
    from tailtune.fetch.transfer import Origin

MAX_ROWS = 10_000
"""Rows that are read, unless there are many files."""
MAX_CHARS = 100_000_000
"""Of the rows that are read, as there may be very long ones."""
MAX_COLUMNS = 10_000
MIN_FILE_ROWS = 100
"""Rows that are read of each file even so: its columns may differ."""
FETCHED_BYTES = 16 << 20
"""How much of a file at an address is fetched. Parquet, which is read from its end, and a compressed JSON array are
fetched whole."""
MAX_TOKENIZED_ROWS = 1000
NUM_SHOWN = 3
SHOWN_CHARS = 160
NUM_QUESTIONS = 3
"""For the demo of a recipe that is written."""
QUESTION_CHARS = 300
"""Longer ones are passed over where there are shorter ones."""
BYTES_PER_TOKEN = 4
"""Of English text with common tokenizers; the estimate where no tokenizer is at hand."""
QUESTIONS = ("question", "prompt", "instruction", "query", "problem", "ask", "user", "human", "input")
ANSWERS = ("answer", "response", "output", "completion", "reply", "solution", "assistant", "target", "gpt")
CONTEXT = ("system", "system_prompt", "tools", "functions", "history")
"""Columns that belong to what the model is told, which no key of a recipe can take from a column of their own."""
SYSTEM_PROMPT = "You are a helpful assistant."


@dataclass
class Column:
    """What is known of one column."""

    types: dict[str, None] = field(default_factory=dict)
    """Names of the values' types, in the order of their first occurrence."""
    num_empty: int = 0
    """Rows in which it is missing, null or blank."""
    lengths: list[int] = field(default_factory=list)
    """Characters of the others."""


@dataclass
class Content:
    """What has been read of the sources."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    columns: dict[str, Column] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    """Why, for each row that cannot be read."""
    num_bytes: int = 0
    num_chars: int = 0
    """Of the rows."""
    num_skipped: int = 0
    """Files at addresses that are not fetched, because there are enough rows."""
    is_sample: bool = False
    """Whether there are more rows."""


@dataclass(frozen=True)
class SourceFile:
    name: str
    """As it is shown, without secrets."""
    path: Path
    """On this machine; of an address, only the name."""
    origin: "Origin | None" = None
    """Where it is fetched from."""


@dataclass
class Form:
    """The form of a data set, and what a recipe says for it."""

    name: str
    columns: dict[str, str] = field(default_factory=dict)
    """`data.columns`; empty when no kind of training uses such data."""
    optional: list[str] = field(default_factory=list)
    messages: str | None = None
    """The column that holds conversations."""
    counted: list[str] = field(default_factory=list)
    """Columns whose text is counted, where the recipe would use none."""

    @property
    def used(self) -> list[str]:
        """Columns of the source that the recipe uses, in their order there."""
        return list(dict.fromkeys(name for template in self.columns.values() for name in template_fields(template)))

    def sections(self, sources: Sequence[str]) -> dict[str, list[str]]:
        """Return the lines of YAML of the sections `data` and `prompt`."""
        shown = list(map(quoted, sources))
        data = [
            "data:",
            f"  source: {shown[0]}" if len(shown) == 1 else f"  source: [{', '.join(shown)}]",
            "  columns:",
            *(f"    {name}: {quoted(template)}" for name, template in self.columns.items()),
            *([f"  optional_columns: [{', '.join(map(quoted, self.optional))}]"] if self.optional else []),
            f"  split_by: {next(iter(self.columns))}",
        ]
        if self.messages:
            return {"data": data, "prompt": ["prompt:", "  messages: messages"]}
        templates = ['  user: "{question}"', '  assistant: "{answer}"']
        return {"data": data, "prompt": ["prompt:", f"  system: {quoted(SYSTEM_PROMPT)}", *templates]}

    def question(self, row: dict[str, Any]) -> str:
        """Return the question of a row, empty if there is none."""
        if self.messages:
            try:
                messages = read_conversation(row.get(self.messages))
            except BadRow:
                return ""
            return next(message["content"] for message in messages if message["role"] == "user")
        return fill_template(self.columns["question"], {name: _as_text(row.get(name)) for name in self.used}).strip()


def inspect_sources(
    sources: list[str], recipe: Recipe, *, write_to: Path | None = None, parameters: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the lines that describe the sources together, and write a recipe for them to `write_to`.

    `recipe` is the one to start from, with the run parameters `parameters`. Control characters of the data are left
    out. Raises UserError.
    """
    if write_to:
        check_new_file(write_to)
    for line in _describe(sources, recipe, write_to, parameters):
        yield printable(line, newline=False)


def _describe(sources: list[str], recipe: Recipe, write_to: Path | None, parameters: Sequence[str]) -> Iterator[str]:
    content = Content()
    files = _files_of(sources)
    for file in files:
        with tempfile.TemporaryDirectory(prefix="tailtune-") as scratch:
            yield from _read(file, content, recipe.data, Path(scratch))
    if content.num_skipped:
        yield f"not fetched, because there are enough rows: {content.num_skipped:,} of {len(files):,} files"
    rows, columns = content.rows, content.columns
    shown = files[0].name if len(files) == 1 else f"{len(files)} files"
    first = ("the first " if len(files) == 1 else "the first rows of each, ") if content.is_sample else ""
    unread = f", {len(content.unreadable):,} unreadable" if content.unreadable else ""
    size = f", {content.num_bytes:,} bytes" if content.num_bytes else ""
    yield f"{shown}: {first}{len(rows):,} rows{unread}{size}"
    if not rows:
        why = f"no row can be read; the first: {content.unreadable[0]}" if content.unreadable else "there is no row"
        raise UserError(f"{shown}: {why}", "correct the file, or name its format, for example -p data.format=jsonl")
    yield from _describe_columns(columns, len(rows))
    yield from _describe_rows(rows[:NUM_SHOWN])
    form = find_form(rows, columns)
    yield ""
    yield f"form: {form.name}"
    yield from _describe_unused(form, columns)
    yield from _describe_turns(rows, form)
    yield from _describe_tokens(rows, form, columns, recipe)
    reasons = [*content.unreadable, *(reason for row in rows if (reason := _why_rejected(row, form)))]
    share, limit = len(reasons) / (len(rows) + len(content.unreadable)), recipe.data.max_rejected_share
    if reasons:
        above = f", more than data.max_rejected_share {100 * limit:g} %" if share > limit else ""
        yield f"{len(reasons):,} rows ({100 * share:.1f} %) would be rejected{above}; the first: {reasons[0]}"
    if form.columns:
        yield "recipe keys that fit:"
        yield ""
        for lines in form.sections(list(map(without_secrets, sources))).values():
            yield from lines
        yield ""
        if share > limit:
            yield "A run would stop at these rows: correct them first."
        yield from _next_steps(sources, recipe, content, form, write_to, parameters)
    elif write_to:
        raise UserError(f"{write_to} is not written, because no recipe fits", "see the form above")


def _files_of(sources: list[str]) -> list[SourceFile]:
    try:
        found = [(source, local_files(check_address(source))) for source in sources]
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--inspect: {error}") from None
    if any(paths is None for _, paths in found):
        require_train("--inspect of an address")
    files: list[SourceFile] = []
    for source, paths in found:
        if paths is not None:
            files += [SourceFile(str(path), path) for path in paths]
            continue
        from tailtune.fetch import dataset, transfer

        with transfer.errors_named(without_secrets(source), dataset.hub_endpoint()):
            files += [
                SourceFile(origin.shown, Path(origin.name), origin) for origin in dataset.find_origins(source, None)
            ]
    return files


def _read(file: SourceFile, content: Content, data: Data, scratch: Path) -> Iterator[str]:
    """Read a file's rows into `content`, and say where its columns differ from those of the files before it."""
    limit = MAX_ROWS - len(content.rows) - len(content.unreadable)
    path, num_bytes, is_cut = file.path, None, False
    if file.origin:
        if limit <= 0 or content.num_chars > MAX_CHARS:
            content.is_sample, content.num_skipped = True, content.num_skipped + 1
            return
        file_format, compression = detect_format(path, data.format)
        needs_all = file_format == "parquet" or (file_format == "json" and compression)
        path, num_bytes, is_cut = _fetch(file.origin, scratch, math.inf if needs_all else FETCHED_BYTES)
    own: dict[str, Column] = {}
    values = read_values(source_of(path, data, scratch))
    if is_cut:
        values = _whole_rows(values)
    for row in islice(values, max(limit, MIN_FILE_ROWS)):
        if isinstance(row, BadRow):
            content.unreadable.append(row.reason)
        else:
            content.rows.append(row)
            content.num_chars += len(str(row))
            _count(row, own)
            if len(own) > MAX_COLUMNS:
                problem = f"{file.name} has more than {MAX_COLUMNS:,} columns"
                raise UserError(problem, "put what varies from row to row below one key")
        if content.num_chars > MAX_CHARS:
            break
    is_sample = is_cut or next(values, None) is not None
    if content.columns and own:
        known = content.columns
        for what, names in (("lacks", known.keys() - own.keys()), ("alone has", own.keys() - known.keys())):
            if names:
                yield f"{file.name} {what} {', '.join(sorted(names))}{' in its first rows' if is_sample else ''}"
    _merge(own, content.columns)
    content.num_bytes += num_bytes or path.stat().st_size
    content.is_sample |= is_sample


def _fetch(origin: "Origin", scratch: Path, max_bytes: float) -> tuple[Path, int | None, bool]:
    """Fetch the first `max_bytes` of a file, or a little more. Raises UserError.

    Returns the path, the size of the whole file if it is known, and whether something is missing.
    """
    from tailtune.fetch.hub import hub_endpoint
    from tailtune.fetch.transfer import Interrupted, call_with_retries, errors_named

    def receive() -> tuple[Path, int | None, bool]:
        path = scratch / origin.name
        with origin.open(0, None) as body, path.open("wb") as file:
            size = body.total_bytes
            if math.isinf(max_bytes) and size:
                log.info("fetch: %s: %s bytes, all of which are needed", origin.shown, f"{size:,}")
            with Progress(f"fetch: {origin.name}", size, "bytes", measure=file.tell):
                while file.tell() < max_bytes and (chunk := next(body.chunks, b"")):
                    file.write(chunk)
            if file.tell() < min(size or 0, max_bytes):
                raise Interrupted(f"{file.tell():,} of {size:,} bytes arrived")
            return path, size, file.tell() < size if size else file.tell() >= max_bytes

    with errors_named(origin.shown, hub_endpoint()):
        return call_with_retries(receive)


def _whole_rows(rows: Iterator[dict[str, Any] | BadRow]) -> Iterator[dict[str, Any] | BadRow]:
    """Yield the rows of a file whose end is missing, without the last one, which is broken."""
    row = next(rows, None)
    if row is None:
        return
    with suppress(UserError):  # where the end of the file has to be there
        for following in rows:
            yield row
            row = following


# -- the recipe --------------------------------------------------------------------------------------


def _next_steps(
    sources: list[str], recipe: Recipe, content: Content, form: Form, write_to: Path | None, parameters: Sequence[str]
) -> Iterator[str]:
    """Write the recipe, where asked to, and yield the commands that come next."""
    given = "".join(f" -p {shlex.quote(parameter)}" for parameter in parameters)
    if write_to is None:
        shown = shlex.join(map(without_secrets, sources))
        yield "next, write a recipe with these keys, which can be run as it is:"
        yield f"  python pipeline.py --inspect {shown} --write-recipe mine.yaml{given}"
        return
    questions = list(dict.fromkeys(filter(None, map(form.question, content.rows))))
    if not questions:
        raise UserError(f"{write_to} is not written: every row would be rejected", "correct the rows")
    short = [each for each in questions if len(each) <= QUESTION_CHARS] or [min(questions, key=len)]
    folder = write_to.parent
    name = write_recipe(
        write_to,
        recipe.name,
        form.sections([_source_in(source, folder) for source in sources]),
        description=f"Chat fine-tuning on {show_sources(sources)}.",
        questions=short[:NUM_QUESTIONS],
    )
    system = "" if form.messages else "system prompt and "
    yield f"{write_to} is written: these keys, and the settings of recipe {recipe.name}. Its {system}demo.questions are"
    yield "yours to change. Next, train a small model on this machine:"
    yield f"  python pipeline.py --local --recipe {shlex.quote(str(write_to))} --run-name {name}{given}"
    if any(map(_is_local, sources)):
        yield (
            "A cluster cannot read files on this machine. For --submit, copy them to the data volume, as step 17 of "
            "the runbook shows, or to S3, and add -p data_source=/shared/data/uploads/FILE or s3://BUCKET/KEY."
        )


def _is_local(source: str) -> bool:
    return "://" not in source and source != "embedded"


def _source_in(source: str, folder: Path) -> str:
    """Return a source as a recipe in the folder names it: a path below the folder, or an absolute one."""
    if not _is_local(source):
        return without_secrets(source)
    path, base = (Path(os.path.abspath(each)) for each in (Path(os.path.expanduser(source)), folder))
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)


# -- columns and rows --------------------------------------------------------------------------------


def _count(row: dict[str, Any], columns: dict[str, Column]) -> None:
    """Add a row to what is known of its columns."""
    num_before = max((len(column.lengths) + column.num_empty for column in columns.values()), default=0)
    for name in row:
        columns.setdefault(name, Column(num_empty=num_before))
    for name, column in columns.items():
        value = row.get(name)
        if value is None or (isinstance(value, str) and not value.strip()):
            column.num_empty += 1
        else:
            column.types.setdefault(_type_name(value))
            column.lengths.append(len(_text_of(value)))


def _merge(own: dict[str, Column], columns: dict[str, Column]) -> None:
    """Add one file's columns to those of all files."""
    for name, column in own.items():
        total = columns.setdefault(name, Column())
        total.types |= column.types
        total.num_empty += column.num_empty
        total.lengths += column.lengths


def _type_name(value: Any) -> str:
    if is_conversation(value):
        return "conversation"
    names = {
        str: "text",
        bool: "boolean",
        int: "number",
        float: "number",
        list: "list",
        dict: "object",
        bytes: "binary",
    }
    return names.get(type(value), type(value).__name__)


def is_conversation(value: Any) -> bool:
    """Return whether a value has the form of a conversation, good or bad."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(each, dict) and ({"role", "content"} <= each.keys() or {"from", "value"} <= each.keys())
        for each in value
    )  # fmt: skip


def _text_of(value: Any) -> str:
    if is_conversation(value):
        return "\n".join(str(message.get("content", message.get("value"))) for message in value)
    return _as_text(value)


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bytes):
        return f"({len(value):,} bytes)"
    return json.dumps(
        value, ensure_ascii=False, default=lambda each: _as_text(each) if isinstance(each, bytes) else str(each)
    )


def _describe_columns(columns: dict[str, Column], num_rows: int) -> Iterator[str]:
    header = ("column", "type", "empty", "characters: median", "90 %", "longest")
    cells: list[tuple[str, ...]] = [header]
    for name, column in columns.items():
        share = f"{column.num_empty:,} ({100 * column.num_empty / num_rows:.1f} %)" if column.num_empty else "0"
        cells.append((name, " or ".join(column.types) or "nothing", share, *map(_whole, _spread(column.lengths))))
    widths = [max(len(row[index]) for row in cells) for index in range(len(header))]
    for row in cells:
        texts = [cell.ljust(width) if index < 2 else cell.rjust(width)
                 for index, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        yield f"  {'  '.join(texts).rstrip()}"


def _spread(values: list[int]) -> tuple[float, float, float]:
    """Return the median, the value that 90 % do not exceed, and the largest."""
    if not values:
        return 0, 0, 0
    ordered = sorted(values)
    return statistics.median(ordered), ordered[math.ceil(0.9 * len(ordered)) - 1], ordered[-1]


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _describe_rows(rows: list[dict[str, Any]]) -> Iterator[str]:
    for number, row in enumerate(rows, 1):
        yield f"row {number}:"
        for name, value in row.items():
            if is_conversation(value):
                yield f"  {name}:"
                for message in value[:4]:
                    role, text = (message.get("role", message.get("from")), _text_of([message]))
                    yield f"    {role}: {_short(text)}"
                if len(value) > 4:
                    yield f"    … {len(value) - 4} more messages"
            else:
                yield f"  {name}: {_short(_text_of(value)) if value not in (None, '') else '(empty)'}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}…"


# -- the form ----------------------------------------------------------------------------------------


def find_form(rows: list[dict[str, Any]], columns: dict[str, Column]) -> Form:
    """Recognise the form of the rows by the columns' names and types."""
    texts = [name for name, column in columns.items() if column.types.keys() <= {"text", "number"}]
    lower = {name.lower(): name for name in texts}
    conversations = [name for name, column in columns.items() if "conversation" in column.types]
    if {"chosen", "rejected"} <= columns.keys():
        return Form("preference pairs (chosen, rejected). No kind of recipe trains on them yet; to train on the chosen "
                    "answers, write them into a file of conversations")  # fmt: skip
    if conversations:
        name = next((each for each in ("messages", "conversations", "conversation") if each in conversations),
                    conversations[0])  # fmt: skip
        first = next(row[name] for row in rows if is_conversation(row.get(name)))
        kind = "messages (role, content)" if "role" in first[0] else "ShareGPT (from, value)"
        form = Form(f"conversations in column '{name}', as {kind}", {"messages": f"{{{name}}}"}, messages=name)
        return _with_names_that_fit(form, [name])
    if "instruction" in lower and "output" in lower:
        asked = [lower[name] for name in ("instruction", "input") if name in lower]
        return _questions("instructions, as in Alpaca", asked, lower["output"])
    question = next((lower[name] for name in QUESTIONS if name in lower), None)
    answer = next((lower[name] for name in ANSWERS if name in lower), None)
    if question and answer:
        return _questions(f"questions and answers (columns '{question}' and '{answer}')", [question], answer)
    if len(texts) == 1 and texts[0].lower() in ("text", "content"):
        return Form(
            "plain text. No kind of recipe trains on it yet: training needs questions and answers", counted=texts
        )
    others = [name for name in texts if "text" in columns[name].types and name not in (question, answer)]
    if len(others) == (question is None) + (answer is None) and not {"text", "content"} & lower.keys():
        question, answer = question or others[0], answer or others[-1]
        form_name = f"questions and answers, guessed: is the question in column '{question}', the answer in '{answer}'?"
        return _questions(f"{form_name} If not, change data.columns", [question], answer)
    return Form("not recognised. Rename the columns of the question and the answer to question and answer, or name them"
                ' in a recipe, for example columns: {question: "{ask}", answer: "{reply}"}', counted=texts)  # fmt: skip


def _questions(name: str, asked: list[str], answer: str) -> Form:
    """Return the form of questions in the column `asked[0]`, to which others add where they are not empty."""
    columns = {"question": "\n\n".join(f"{{{each}}}" for each in asked), "answer": f"{{{answer}}}"}
    return _with_names_that_fit(Form(name, columns, asked[1:]), [*asked, answer])


def _with_names_that_fit(form: Form, names: list[str]) -> Form:
    """Return the form; without keys, and with the reason, where no template can name one of the columns."""
    for name in names:
        try:
            fits = copied_column(f"{{{name}}}") == name
        except ValueError:
            fits = False
        if not fits:
            remedy = "rename it, without ':', '!' and braces"
            return Form(f"{form.name}. But no template can name column '{name}': {remedy}", counted=names)
    return form


def _describe_unused(form: Form, columns: dict[str, Column]) -> Iterator[str]:
    """Say which columns the recipe leaves out."""
    unused = [name for name in columns if name not in form.used]
    if form.columns and unused:
        yield f"not used: {', '.join(unused)}"
        for name in unused:
            if name.lower() in CONTEXT and columns[name].types:
                yield f"  '{name}' is part of what the model is told, and is lost. To train with it, write it into each"
                yield "  row's messages, as a first message with role system"


# -- lengths in tokens, turns, rejects ---------------------------------------------------------------


def _describe_tokens(
    rows: list[dict[str, Any]], form: Form, columns: dict[str, Column], recipe: Recipe
) -> Iterator[str]:
    count, method = _token_counter(recipe)
    used = form.used or form.counted or list(columns)
    sample = rows[:MAX_TOKENIZED_ROWS]
    counts = [count("\n".join(_text_of(row[name]) for name in used if row.get(name) is not None)) for row in sample]
    if not counts:
        return
    median, most, longest = map(_whole, _spread(counts))
    of = f" of the first {len(sample):,} rows" if len(sample) < len(rows) else ""
    yield f"tokens per row{of}: median {median}, 90 % {most}, longest {longest}"
    yield f"  ({method}; the recipe's system prompt not included)"
    max_length = recipe.stages[0].trainer.get("max_length", 1024)
    if form.columns and max_length and (num_longer := sum(number > max_length for number in counts)):
        yield f"{num_longer:,} of them are longer than max_length {max_length} of recipe {recipe.name}"


def _token_counter(recipe: Recipe) -> tuple[Callable[[str], int], str]:
    """Return a function that counts a text's tokens, and how it does."""
    name, directory = recipe.model.base_model, recipe.model.directory
    path = directory / "tokenizer.json" if directory else _cached_tokenizer(name)
    if path and path.is_file() and installed_version("tokenizers"):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), f"tokenizer of {name}"
    exact = "-p base_model=DIRECTORY counts with that model's tokenizer"
    estimate = f"an estimate, {BYTES_PER_TOKEN} bytes per token; {exact}"
    return lambda text: math.ceil(len(text.encode(errors="replace")) / BYTES_PER_TOKEN), estimate


def _cached_tokenizer(name: str) -> Path | None:
    """Return the tokenizer of a model on the hub, if it is in this machine's cache."""
    if name.count("/") != 1 or installed_version("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "tokenizer.json")
    return Path(found) if isinstance(found, str) else None


def _describe_turns(rows: list[dict[str, Any]], form: Form) -> Iterator[str]:
    values = [row[form.messages] for row in rows if is_conversation(row.get(form.messages))] if form.messages else []
    if not values:
        return
    roles = [[ROLES.get(str(each.get("role", each.get("from"))), "other") for each in value] for value in values]
    median, most, longest = map(_whole, _spread([each.count("assistant") for each in roles]))
    yield f"answers per conversation: median {median}, 90 % {most}, most {longest}"
    yield f"with a system message of its own: {sum(each[0] == 'system' for each in roles):,} of {len(values):,}"


def _why_rejected(row: dict[str, Any], form: Form) -> str:
    """Return why the parquet step would reject a row, or nothing."""
    if form.messages:
        if row.get(form.messages) is None:
            return f"column '{form.messages}' is missing or null"
        try:
            read_conversation(row[form.messages])
        except BadRow as error:
            return error.reason
    empty = [name for name in form.used if name not in form.optional and not _as_text(row.get(name)).strip()]
    return f"column '{empty[0]}' is empty" if empty else ""
