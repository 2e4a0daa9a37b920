"""The parquet step: convert the source files, whatever their format, to one `data.parquet`.

The recipe's columns are filled from those of the source: text, and conversations, lists and objects as they are. Bad
rows go to `rejects.jsonl` with their line and the reason; exact duplicates are removed and counted. Rows keep the order
of the files, and of the rows in each. The split into train and validation is computed when the file is read
(`tailtune.parquet.split`), unless the recipe has a source of validation rows, which the file then marks.
"""

import json
import string
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from tailtune.config import copied_column, template_fields
from tailtune.errors import UserError
from tailtune.log import log
from tailtune.manifest import content_sha256, publish, read_manifest
from tailtune.parquet.lines import Batch, Columns, Reject, encoding_remedy, message_type, missing_column
from tailtune.parquet.parquet_reader import NO_VALUE, common_type
from tailtune.parquet.readers import detect_format, nested_columns, read_rows, source_of
from tailtune.parquet.split import normalise, split_values
from tailtune.recipe.schema import IS_VALIDATION, Data, Prompt
from tailtune.run import DATA_FILE

REJECTS = "rejects.jsonl"
CODE_VERSION = 5
"""Increase it when the same source and recipe give a different file."""
ROW_GROUP_BYTES = 32 << 20
"""Text bytes in a row group, before compression."""
COMPRESSION_LEVEL = 11
"""zstd's level. Measurements: the section on Parquet in BENCHMARKS.md."""
NUM_EXAMPLES = 5
PLACEHOLDERS = pa.array(["none", "null", "nan", "inf", "-inf", "infinity", "-infinity", "undefined", "n/a"])
"""What programs write for a value that is missing or no number; a text that says only this may be one of them."""
MAX_COLUMNS = 1000
"""Names of columns in bad rows that are kept for a message; there may be another one in each row."""


class SourceFile(NamedTuple):
    """One of the files to convert."""

    path: Path
    is_validation: bool
    name: str
    """Where it comes from, for messages and rejects; empty when it is the only file."""
    sha256: str


@dataclass(frozen=True)
class ParquetFacts:
    """What the parquet step wrote."""

    path: Path
    """Path of `data.parquet`."""
    num_rows: int
    """Of both sides."""
    num_rejected: int
    num_duplicates: int
    source_bytes: int
    parquet_bytes: int
    content_sha256: str
    """SHA-256 of `data.parquet`."""
    rejected_examples: list[dict[str, Any]]
    """The first five rejects: `{"line": 3, "reason": "broken JSON (…)"}`, and `file` where there are several."""
    num_files: int = 1
    num_on_both_sides: int | None = None
    """Validation rows whose question is also that of a training row; None without a `validation_source`."""


def write_parquet(source: Path, directory: Path, data: Data, prompt: Prompt | None = None) -> ParquetFacts:
    """Write `data.parquet`, `rejects.jsonl` and `manifest.json` into `directory`.

    `source` is a file, or the directory of the fetch step, whose manifest lists the files. With `prompt`, the column of
    `prompt.messages` becomes conversations, and columns that its templates use must be text. Does nothing when
    `directory` already holds the result for these files and this recipe. Raises UserError when a file cannot be read,
    no row of a file has a requested column, no row is left, or more than `data.max_rejected_share` of the rows of
    either side are bad. Nothing is published then, and the rejects are in `DIRECTORY.rejects.jsonl`.
    """
    files = _source_files(source)
    key = _key(files, data, prompt)
    if manifest := read_manifest(directory, key):
        log.info("parquet: %s is already complete: %s rows", directory, f"{manifest['facts']['num_rows']:,}")
        return _facts_of(directory, manifest)
    kept_rejects = directory.with_name(f"{directory.name}.{REJECTS}")
    facts: dict[str, Any] = {}
    with publish(directory, key, facts) as partial:
        kept_rejects.unlink(missing_ok=True)
        columns = _columns_to_read(files, data, prompt, partial)
        sides = _convert(files, partial, data, columns, prompt)
        for side in sides:
            if error := side.find_error(data, kept_rejects):
                (partial / REJECTS).replace(kept_rejects)
                raise error
            if side.num_rejected:
                log.warning("parquet: %s", side.describe_rejects(data))
            for (column, text), num_rows in sorted(side.null_texts.items()):
                words = "parquet: column '%s' says only '%s' in %s rows: if that means a missing value, leave them out"
                log.warning(words, column, text, f"{num_rows:,}")
        facts.update(
            num_rows=sum(side.num_rows for side in sides),
            num_rejected=sum(side.num_rejected for side in sides),
            num_duplicates=sum(side.num_duplicates for side in sides),
            source_bytes=sum(file.path.stat().st_size for file in files),
            rejected_examples=[example for side in sides for example in side.examples][:NUM_EXAMPLES],
            num_files=len(files),
            num_on_both_sides=sides[1].num_on_both_sides if len(sides) > 1 else None,
        )
    manifest = read_manifest(directory, key)
    assert manifest is not None
    result_facts = _facts_of(directory, manifest)
    log.info(
        "parquet: %s rows from %s, %s rejected, %s duplicates removed; %s → %s bytes",
        f"{result_facts.num_rows:,}",
        files[0].path.name if len(files) == 1 else f"{len(files)} files",
        f"{result_facts.num_rejected:,}",
        f"{result_facts.num_duplicates:,}",
        f"{result_facts.source_bytes:,}",
        f"{result_facts.parquet_bytes:,}",
    )
    for side in sides[1:]:
        shared = side.num_on_both_sides
        level = log.warning if shared else log.info
        words = "parquet: %s validation rows, of which %s have the question of a training row"
        level(words, f"{side.num_rows:,}", f"{shared:,}")
    return result_facts


def _source_files(source: Path) -> list[SourceFile]:
    """Return the files to convert, those of the training side first. Raises UserError."""
    if not source.is_dir():
        if not source.is_file():
            raise UserError(f"data file {source} does not exist", "check data.source")
        return [SourceFile(source, False, "", content_sha256(source.parent, source.name))]
    manifest = read_manifest(source)
    if manifest is None:
        raise UserError(f"{source} contains no fetched data", "run the fetch step first")
    return [
        SourceFile(source / file["file"], file["side"] == "validation", file["source"], file["sha256"])
        for file in manifest["facts"]["files"]
    ]


def _key(files: list[SourceFile], data: Data, prompt: Prompt | None) -> dict[str, Any]:
    """Return what the result depends on."""
    has_validation = any(file.is_validation for file in files)
    return {
        "step": "parquet",
        "code_version": CODE_VERSION,
        "files": [[file.sha256, detect_format(file.path, data.format), file.is_validation] for file in files],
        "columns": [list(item) for item in data.columns.items()],
        "optional_columns": data.optional_columns,
        "messages": prompt.messages if prompt else None,
        "question": prompt.user if prompt and has_validation else None,
        "max_rows": data.max_rows,
        "max_rejected_share": data.max_rejected_share,
        "max_row_bytes": data.max_row_bytes,
    }


def _facts_of(directory: Path, manifest: dict[str, Any]) -> ParquetFacts:
    file = manifest["files"][DATA_FILE]
    return ParquetFacts(
        path=directory / DATA_FILE,
        parquet_bytes=file["bytes"],
        content_sha256=file["sha256"],
        **manifest["facts"],
    )


def _columns_to_read(files: list[SourceFile], data: Data, prompt: Prompt | None, scratch: Path) -> Columns:
    """Return the source columns that the recipe uses, with the types of lists and objects. Raises UserError.

    No column may hold text in one file and lists or objects in another, and only a template of its name alone may use
    the latter.
    """
    names = list(dict.fromkeys(name for template in data.columns.values() for name in template_fields(template)))
    conversation = copied_column(data.columns[prompt.messages]) if prompt and prompt.messages else None
    others = [name for name in names if name != conversation]
    found = [nested_columns(source_of(file.path, data, scratch), others) for file in files]
    types: dict[str, pa.DataType] = {conversation: message_type()} if conversation else {}
    for name in dict.fromkeys(name for each in found for name in each if each[name] != NO_VALUE):
        for file, each in zip(files, found, strict=True):
            if name not in each:
                other = next(file.name for file, each in zip(files, found, strict=True)
                             if each.get(name, NO_VALUE) != NO_VALUE)  # fmt: skip
                raise UserError(f"column '{name}' holds lists or objects in {other}, but not in {file.name}",
                                "make the files alike, or leave one out")  # fmt: skip
            try:
                types[name] = common_type(types.get(name, NO_VALUE), each[name])
            except pa.ArrowException:
                raise UserError(f"column '{name}' is {each[name]} in {file.name}, and {types[name]} in the files "
                                "before", "make the files alike, or leave one out") from None  # fmt: skip
    templates = (prompt.user, prompt.assistant) if prompt else ()
    prompt_fields = [name for each in templates for name in template_fields(each or "")]
    for column, template in data.columns.items():
        nested = [name for name in template_fields(template) if name in types]
        if nested and copied_column(template) is None:
            problem = f"data.columns.{column} is '{template}', but column '{nested[0]}' holds lists or objects"
            raise UserError(problem, f"only text and numbers can be put into a text; '{{{nested[0]}}}' alone copies it")
        if nested and column in prompt_fields:
            problem = f"prompt.user or prompt.assistant uses column '{column}', which holds lists or objects"
            raise UserError(problem, "use columns of text, or prompt.messages for conversations")
    if conversation in data.optional_columns:
        problem = f"data.optional_columns names '{conversation}', which holds the conversations"
        raise UserError(problem, "leave it out there")
    return Columns(names, frozenset(data.optional_columns), conversation, types)


@dataclass
class _Side:
    """Counts of the training or the validation rows."""

    name: str
    """How messages call the files of this side."""
    num_rows: int = 0
    num_rejected: int = 0
    num_duplicates: int = 0
    num_on_both_sides: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    """The first NUM_EXAMPLES rejects."""
    null_texts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows in which a column says only one of PLACEHOLDERS: by column and text."""
    missing: UserError | None = None
    """Which column a file lacks, where no row of it is good."""
    seen: set[bytes] = field(default_factory=set)
    """Digests of the rows."""
    questions: set[bytes] = field(default_factory=set)
    """Digests of the written rows' questions, where there are validation rows to compare with."""

    def describe_rejects(self, data: Data) -> str:
        """Return, for example, `12 of 200 rows (6.0 %) were rejected; first: line 3: broken JSON (…)`."""
        total = self.num_rows + self.num_rejected + self.num_duplicates
        share = self.num_rejected / total
        limit = f", above data.max_rejected_share {100 * data.max_rejected_share:g} %"
        first = self.examples[0]
        file = f"{first['file']}, " if "file" in first else ""
        return (
            f"{self.num_rejected:,} of {total:,} rows ({100 * share:.1f} %) were rejected"
            f"{limit if share > data.max_rejected_share else ''}; "
            f"first: {file}line {first['line']}: {first['reason']}"
        )

    def find_error(self, data: Data, rejects: Path) -> UserError | None:
        """Return why the result must not be published, or None."""
        total = self.num_rows + self.num_rejected + self.num_duplicates
        remedy = f"see {rejects}"
        if any(example["reason"].startswith("invalid UTF-8") for example in self.examples):
            remedy += f"; if the text is Windows-1252 or Latin-1, {encoding_remedy('WINDOWS-1252')}"
        if self.missing:
            return self.missing
        if total == 0:
            return UserError(f"{self.name} contains no rows", "check data.source and data.format")
        if self.num_rejected > data.max_rejected_share * total:
            return UserError(self.describe_rejects(data), remedy)
        if self.num_rows == 0:
            return UserError(f"no row is left: {self.describe_rejects(data)}", remedy)
        return None


def _convert(
    files: list[SourceFile], directory: Path, data: Data, columns: Columns, prompt: Prompt | None
) -> list[_Side]:
    """Read, fill the columns, remove duplicates, write. Return the counts of each side."""
    sides: list[_Side] = []
    schema = _schema(data, columns, marked=any(file.is_validation for file in files))
    with (
        (directory / REJECTS).open("w", encoding="utf-8", errors="backslashreplace") as rejects_file,
        closing(_ParquetFile(directory / DATA_FILE, schema)) as parquet_file,
    ):
        for is_validation in (False, True):
            own_files = [file for file in files if file.is_validation is is_validation]
            if not own_files:
                continue
            name = str(own_files[0].path) if len(own_files) == 1 else f"{len(own_files)} files together"
            side = _Side(name)
            sides.append(side)
            for file in own_files:
                where = replace(columns, where=file.name) if file.name else columns
                if _convert_file(file, where, data, prompt, side, sides[0], parquet_file, rejects_file, directory):
                    log.info("parquet: stopped at data.max_rows %s", f"{side.num_rows:,}")
                    break
    return sides


def _convert_file(
    file: SourceFile,
    columns: Columns,
    data: Data,
    prompt: Prompt | None,
    side: _Side,
    train: _Side,
    parquet_file: "_ParquetFile",
    rejects_file: IO[str],
    scratch: Path,
) -> bool:
    """Convert one file and add to the counts of its side; return whether `data.max_rows` is reached."""
    rejected_columns: set[str] = set()
    filled: set[str] = set()
    num_rows, full = 0, False
    with closing(read_rows(source_of(file.path, data, scratch), columns)) as batches:
        for batch in batches:
            filled |= {name for name in columns.optional - filled if _has_value(batch.columns[name])}
            table = _fill_columns(batch.columns, data)
            fresh = _unseen(table, side.seen)
            table, fresh, rejects, full = _up_to_max_rows(table, fresh, batch, data.max_rows, side.num_rows)
            num_fresh = int(fresh.sum())
            num_rows += len(fresh)
            table = table if num_fresh == len(fresh) else table.filter(pa.array(fresh))
            if parquet_file.marked:
                questions = _questions(table, prompt)
                if side is train:
                    side.questions.update(questions)
                else:
                    side.num_on_both_sides += sum(question in train.questions for question in questions)
                table = table.append_column(IS_VALIDATION, pa.repeat(file.is_validation, len(table)))
            parquet_file.append(table)
            side.null_texts += _null_texts(table)
            _write_rejects(rejects, file.name, rejects_file)
            side.num_rows += num_fresh
            side.num_duplicates += len(fresh) - num_fresh
            side.num_rejected += len(rejects)
            new = rejects[: NUM_EXAMPLES - len(side.examples)]
            side.examples += [{"line": each.line, "reason": each.reason} | _file(file.name) for each in new]
            new_columns = batch.rejected_columns
            rejected_columns |= new_columns if len(rejected_columns) < MAX_COLUMNS else new_columns & set(columns.names)
            if full:
                break
    if num_rows == 0 and rejected_columns and side.missing is None:
        lacking = [name for name in columns.names if name not in rejected_columns | columns.optional]
        side.missing = missing_column(lacking[0], sorted(rejected_columns), columns.where) if lacking else None
    for name in sorted(columns.optional - filled if num_rows else ()):
        log.warning("parquet: column '%s' of data.optional_columns is empty in all rows of %s", name, file.path.name)
    return full


def _up_to_max_rows(
    table: pa.Table, fresh: np.ndarray, batch: Batch, max_rows: int | None, num_rows: int
) -> tuple[pa.Table, np.ndarray, list[Reject], bool]:
    """Cut a batch after the row that reaches `max_rows`, so that the counts do not depend on the batch size.

    Returns the rows, the mask of new rows among them, the rejects before the last row, and whether
    `max_rows` is reached. `num_rows` is the number of rows written before this batch.
    """
    if max_rows is None or num_rows + int(fresh.sum()) < max_rows:
        return table, fresh, batch.rejects, False
    last = int(np.flatnonzero(fresh)[max_rows - num_rows - 1])
    rejects = [reject for reject in batch.rejects if reject.line < batch.lines[last]]
    return table.slice(0, last + 1), fresh[: last + 1], rejects, True


def _null_texts(table: pa.Table) -> Counter[tuple[str, str]]:
    """Return how often a column says only one of PLACEHOLDERS, by column and text."""
    found: Counter[tuple[str, str]] = Counter()
    for name in table.column_names:
        if pa.types.is_string(table[name].type):
            short = table[name].filter(pc.less_equal(pc.binary_length(table[name]), 20))
            texts = pc.utf8_trim_whitespace(short)
            texts = texts.filter(pc.is_in(pc.utf8_lower(texts), PLACEHOLDERS))
            found.update((name, text) for text in texts.to_pylist())
    return found


def _file(name: str) -> dict[str, str]:
    return {"file": name} if name else {}


def _write_rejects(rejects: Iterable[Reject], name: str, file: IO[str]) -> None:
    file.writelines(json.dumps(_file(name) | reject._asdict(), ensure_ascii=False) + "\n" for reject in rejects)


def _has_value(column: pa.ChunkedArray) -> bool:
    """Return whether a column of the source has a value in any row."""
    if pa.types.is_nested(column.type):
        return column.null_count < len(column)
    return bool(pc.any(pc.not_equal(column, "")).as_py())


def _fill_columns(table: pa.Table, data: Data) -> pa.Table:
    """Return the recipe's columns: each template, filled for all rows at once.

    White space around optional columns goes where they are empty.
    """

    def fill(template: str) -> pa.ChunkedArray:
        filled = _fill(template, table)
        is_optional = not set(data.optional_columns).isdisjoint(template_fields(template))
        return pc.utf8_trim_whitespace(filled) if is_optional and not pa.types.is_nested(filled.type) else filled

    return pa.table([fill(template) for template in data.columns.values()], names=list(data.columns))


def _fill(template: str, table: pa.Table) -> pa.ChunkedArray:
    """Return a template, filled for all rows of a table."""
    parts: list[Any] = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts += [pa.scalar(literal)] if literal else []
        parts += [table[name]] if name else []
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, "")


# -- duplicates ------------------------------------------------------------------------------------


def _unseen(table: pa.Table, seen: set[bytes]) -> np.ndarray:
    """Return the mask, bool [rows], of the rows that are new; add their 16-byte digests to `seen`.

    Equal digests count as equal rows: with the 128 bits of XXH3, the chance that any two of five
    million distinct rows share one is 4e-26. With 64 bits, one in 1.5 million such files would lose
    a row.
    """
    rows = _whole_rows(table)
    mask = np.zeros(len(rows), bool)
    for index, row in enumerate(rows):
        digest = xxhash.xxh3_128_digest(row)
        if digest not in seen:
            seen.add(digest)
            mask[index] = True
    return mask


def _whole_rows(table: pa.Table) -> list[bytes]:
    """Return each row as bytes. No UTF-8 text contains the byte 0xff, so ("ab", "c") and ("a", "bc") differ."""
    columns = [_as_text(column).cast(pa.binary()) for column in table.columns]
    return list(pc.binary_join_element_wise(*columns, b"\xff").to_pylist())


def _questions(table: pa.Table, prompt: Prompt | None) -> list[bytes]:
    """Return the 16-byte digest of each row's question, without case and white space; of the whole row without one."""
    if prompt and prompt.messages:
        questions = split_values(table[prompt.messages]).to_pylist()
    elif prompt and template_fields(prompt.user or ""):
        questions = _fill(prompt.user or "", table).to_pylist()
    else:
        return [xxhash.xxh3_128_digest(row) for row in _whole_rows(table)]
    return [xxhash.xxh3_128_digest(normalise(question).encode()) for question in questions]


def _as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of lists or objects as JSON texts, and any other as it is."""
    if not pa.types.is_nested(column.type):
        return column
    return pa.chunked_array([[json.dumps(value, sort_keys=True, default=str) for value in column.to_pylist()]])


# -- writing ---------------------------------------------------------------------------------------


def _schema(data: Data, columns: Columns, *, marked: bool) -> pa.Schema:
    """Return the columns of `data.parquet`; `marked` adds the one that tells validation rows apart."""
    fields = []
    for name, template in data.columns.items():
        copied = copied_column(template) or ""
        is_nested = copied in columns.types
        fields.append(pa.field(name, columns.types[copied] if is_nested else pa.string(),
                               nullable=is_nested and copied in columns.optional))  # fmt: skip
    return pa.schema([*fields, *([pa.field(IS_VALIDATION, pa.bool_(), nullable=False)] if marked else [])])


def _text_paths(path: str, data_type: pa.DataType) -> list[str]:
    """Return the paths of the text columns that Parquet stores for a column."""
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        return [path]
    if pa.types.is_struct(data_type):
        return [name for field in data_type for name in _text_paths(f"{path}.{field.name}", field.type)]
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        return _text_paths(f"{path}.list.element", data_type.value_type)
    return []


class _ParquetFile:
    """A Parquet file that is written in row groups of about ROW_GROUP_BYTES."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self.marked = IS_VALIDATION in schema.names
        texts = [name for field in schema for name in _text_paths(field.name, field.type)]
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pq.ParquetWriter(
            self._file,
            self._schema,
            compression="zstd",
            compression_level=COMPRESSION_LEVEL,
            # Texts seldom repeat as a whole, so a dictionary makes the file larger, and so do statistics
            # and the Arrow schema. One page for each column of a row group compresses best.
            use_dictionary=False,
            column_encoding=dict.fromkeys(texts, "DELTA_LENGTH_BYTE_ARRAY"),
            write_statistics=False,
            store_schema=False,
            data_page_size=ROW_GROUP_BYTES,
        )
        self._tables = [self._schema.empty_table()]
        self._num_bytes = 0

    def append(self, table: pa.Table) -> None:
        # Not `cast`: with pyarrow 26 it makes an invalid array of lists of objects in which a key is always null.
        self._tables.append(pa.table(table.columns, schema=self._schema))
        self._num_bytes += table.nbytes
        if self._num_bytes >= ROW_GROUP_BYTES:
            self._write_row_group()

    def close(self) -> None:
        try:
            if self._num_bytes:
                self._write_row_group()
            self._writer.close()
        finally:  # after an error, the writer leaves the file open, and tries again when it is deleted
            self._writer.is_open = False
            self._file.close()

    def _write_row_group(self) -> None:
        self._writer.write_table(pa.concat_tables(self._tables))
        self._tables, self._num_bytes = [self._schema.empty_table()], 0
