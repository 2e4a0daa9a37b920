"""The parquet step: convert the source file, whatever its format, to one `data.parquet` of text columns.

The recipe's columns are filled from those of the source. Bad rows go to `rejects.jsonl` with their
line and the reason; exact duplicates are removed and counted. Rows keep the order of the source. The
split into train and validation is computed when the file is read (`tailtune.parquet.split`).
"""

import json
import string
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from tailtune.config import template_fields
from tailtune.errors import UserError
from tailtune.log import log
from tailtune.manifest import content_sha256, publish, read_manifest
from tailtune.parquet.lines import Batch, Reject
from tailtune.parquet.readers import detect_format, missing_column, read_rows
from tailtune.recipe.schema import Data
from tailtune.run import DATA_FILE

REJECTS = "rejects.jsonl"
CODE_VERSION = 2
"""Increase it when the same source and recipe give a different file."""
ROW_GROUP_BYTES = 32 << 20
"""Text bytes in a row group, before compression."""
COMPRESSION_LEVEL = 11
"""zstd's level. Measurements: the section on Parquet in BENCHMARKS.md."""
NUM_EXAMPLES = 5


@dataclass(frozen=True)
class ParquetFacts:
    """What the parquet step wrote."""

    path: Path
    """Path of `data.parquet`."""
    num_rows: int
    num_rejected: int
    num_duplicates: int
    source_bytes: int
    parquet_bytes: int
    content_sha256: str
    """SHA-256 of `data.parquet`."""
    rejected_examples: list[dict[str, Any]]
    """The first five rejects: `{"line": 3, "reason": "broken JSON (…)"}`."""


def write_parquet(source: Path, directory: Path, data: Data) -> ParquetFacts:
    """Write `data.parquet`, `rejects.jsonl` and `manifest.json` into `directory`.

    Does nothing when `directory` already holds the result for this source and recipe. Raises
    UserError when the file cannot be read, no row has a requested column, no row is left, or more
    than `data.max_rejected_share` of the rows are bad. Nothing is published then, and the rejects
    are in `DIRECTORY.rejects.jsonl`.
    """
    key = _key(source, data)
    if manifest := read_manifest(directory, key):
        log.info("parquet: %s is already complete: %s rows", directory, f"{manifest['facts']['num_rows']:,}")
        return _facts_of(directory, manifest)
    kept_rejects = directory.with_name(f"{directory.name}.{REJECTS}")
    kept_rejects.unlink(missing_ok=True)
    facts: dict[str, Any] = {}
    with publish(directory, key, facts) as partial:
        result = _convert(source, partial, data)
        if error := result.find_error(data, kept_rejects):
            (partial / REJECTS).replace(kept_rejects)
            raise error
        if result.num_rejected:
            log.warning("parquet: %s", result.describe_rejects(data))
        facts.update(
            num_rows=result.num_rows,
            num_rejected=result.num_rejected,
            num_duplicates=result.num_duplicates,
            source_bytes=source.stat().st_size,
            rejected_examples=[{"line": reject.line, "reason": reject.reason} for reject in result.examples],
        )
    manifest = read_manifest(directory, key)
    assert manifest is not None
    result_facts = _facts_of(directory, manifest)
    log.info(
        "parquet: %s rows from %s, %s rejected, %s duplicates removed; %s → %s bytes",
        f"{result_facts.num_rows:,}",
        source.name,
        f"{result_facts.num_rejected:,}",
        f"{result_facts.num_duplicates:,}",
        f"{result_facts.source_bytes:,}",
        f"{result_facts.parquet_bytes:,}",
    )
    return result_facts


def _key(source: Path, data: Data) -> dict[str, Any]:
    """Return what the result depends on. The file's hash comes from the fetch step's manifest, if there is one."""
    file_format, compression = detect_format(source, data.format)
    if not source.is_file():
        raise UserError(f"data file {source} does not exist", "check data.source")
    return {
        "step": "parquet",
        "code_version": CODE_VERSION,
        "source_sha256": content_sha256(source.parent, source.name),
        "format": [file_format, compression],
        "columns": [list(item) for item in data.columns.items()],
        "max_rows": data.max_rows,
        "max_rejected_share": data.max_rejected_share,
    }


def _facts_of(directory: Path, manifest: dict[str, Any]) -> ParquetFacts:
    file = manifest["files"][DATA_FILE]
    return ParquetFacts(
        path=directory / DATA_FILE,
        parquet_bytes=file["bytes"],
        content_sha256=file["sha256"],
        **manifest["facts"],
    )


@dataclass
class _Result:
    """Counts of one conversion."""

    source: Path
    num_rows: int = 0
    num_rejected: int = 0
    num_duplicates: int = 0
    examples: list[Reject] = field(default_factory=list)
    """The first NUM_EXAMPLES rejects."""
    rejected_columns: set[str] = field(default_factory=set)
    """Names of the columns in rejected rows."""

    def describe_rejects(self, data: Data) -> str:
        """Return, for example, `12 of 200 rows (6.0 %) were rejected; first: line 3: broken JSON (…)`."""
        total = self.num_rows + self.num_rejected + self.num_duplicates
        share = self.num_rejected / total
        limit = f", above data.max_rejected_share {100 * data.max_rejected_share:g} %"
        return (
            f"{self.num_rejected:,} of {total:,} rows ({100 * share:.1f} %) were rejected"
            f"{limit if share > data.max_rejected_share else ''}; "
            f"first: line {self.examples[0].line}: {self.examples[0].reason}"
        )

    def find_error(self, data: Data, rejects: Path) -> UserError | None:
        """Return why the result must not be published, or None."""
        total = self.num_rows + self.num_rejected + self.num_duplicates
        if total == 0:
            return UserError(f"{self.source} contains no rows", "check data.source and data.format")
        if self.num_rows == 0 and self.rejected_columns:
            for name in _source_columns(data):
                if name not in self.rejected_columns:
                    return missing_column(name, sorted(self.rejected_columns))
        if self.num_rejected > data.max_rejected_share * total:
            return UserError(self.describe_rejects(data), f"see {rejects}")
        if self.num_rows == 0:
            return UserError(f"no row is left: {self.describe_rejects(data)}", f"see {rejects}")
        return None


def _convert(source: Path, directory: Path, data: Data) -> _Result:
    """Read, fill the columns, remove duplicates, write."""
    result = _Result(source)
    seen: set[bytes] = set()
    batches = read_rows(source, data.format, _source_columns(data), directory)
    with (
        (directory / REJECTS).open("w", encoding="utf-8", errors="backslashreplace") as rejects_file,
        closing(_ParquetFile(directory / DATA_FILE, list(data.columns))) as parquet_file,
        closing(batches),
    ):
        for batch in batches:
            table = _fill_columns(batch.columns, data.columns)
            fresh = _unseen(table, seen)
            table, fresh, rejects, full = _up_to_max_rows(table, fresh, batch, data.max_rows, result.num_rows)
            num_fresh = int(fresh.sum())
            parquet_file.append(table if num_fresh == len(fresh) else table.filter(pa.array(fresh)))
            _write_rejects(rejects, rejects_file)
            result.num_rows += num_fresh
            result.num_duplicates += len(fresh) - num_fresh
            result.num_rejected += len(rejects)
            result.examples += rejects[: NUM_EXAMPLES - len(result.examples)]
            result.rejected_columns |= batch.rejected_columns
            if full:
                log.info("parquet: stopped at data.max_rows %s", f"{result.num_rows:,}")
                break
    return result


def _source_columns(data: Data) -> list[str]:
    """Return the names of the source's columns that the recipe uses, each once."""
    return list(dict.fromkeys(name for template in data.columns.values() for name in template_fields(template)))


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


def _write_rejects(rejects: list[Reject], file: IO[str]) -> None:
    file.writelines(json.dumps(reject._asdict(), ensure_ascii=False) + "\n" for reject in rejects)


def _fill_columns(table: pa.Table, columns: dict[str, str]) -> pa.Table:
    """Return the recipe's columns: each template, filled for all rows at once."""

    def fill(template: str) -> pa.ChunkedArray:
        parts: list[Any] = []
        for literal, name, _, _ in string.Formatter().parse(template):
            parts += [pa.scalar(literal)] if literal else []
            parts += [table[name]] if name else []
        return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, "")

    return pa.table([fill(template) for template in columns.values()], names=list(columns))


# -- duplicates ------------------------------------------------------------------------------------


def _unseen(table: pa.Table, seen: set[bytes]) -> np.ndarray:
    """Return the mask, bool [rows], of the rows that are new, and add their 16-byte digests to `seen`.

    Equal digests count as equal rows: with the 128 bits of XXH3, the chance that any two of five
    million distinct rows share one is 4e-26. With 64 bits, one in 1.5 million such files would lose
    a row. No UTF-8 text contains the byte 0xff, so ("ab", "c") and ("a", "bc") differ.
    """
    columns = [column.cast(pa.binary()) for column in table.columns]
    rows = pc.binary_join_element_wise(*columns, b"\xff").to_pylist()
    mask = np.zeros(len(rows), bool)
    for index, row in enumerate(rows):
        digest = xxhash.xxh3_128_digest(row)
        if digest not in seen:
            seen.add(digest)
            mask[index] = True
    return mask


# -- writing ---------------------------------------------------------------------------------------


class _ParquetFile:
    """A Parquet file of text columns that is written in row groups of about ROW_GROUP_BYTES."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self._schema = pa.schema([pa.field(name, pa.string(), nullable=False) for name in names])
        self._writer = pq.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            compression_level=COMPRESSION_LEVEL,
            # Texts seldom repeat as a whole, so a dictionary makes the file larger, and so do statistics
            # and the Arrow schema. One page for each column of a row group compresses best.
            use_dictionary=False,
            column_encoding="DELTA_LENGTH_BYTE_ARRAY",
            write_statistics=False,
            store_schema=False,
            data_page_size=ROW_GROUP_BYTES,
        )
        self._tables = [self._schema.empty_table()]
        self._num_bytes = 0

    def append(self, table: pa.Table) -> None:
        self._tables.append(table.cast(self._schema))
        self._num_bytes += table.nbytes
        if self._num_bytes >= ROW_GROUP_BYTES:
            self._write_row_group()

    def close(self) -> None:
        if self._num_bytes:
            self._write_row_group()
        self._writer.close()

    def _write_row_group(self) -> None:
        self._writer.write_table(pa.concat_tables(self._tables))
        self._tables, self._num_bytes = [self._schema.empty_table()], 0
