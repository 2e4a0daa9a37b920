"""Read rows from JSON Lines and from JSON arrays.

Each row is parsed separately, so a broken row does not affect its neighbours. The exception is a missing quote or
bracket in a JSON array, which can make the whole array unreadable.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tailtune.errors import UserError
from tailtune.parquet import lines as source_lines
from tailtune.parquet.conversation import read_conversation
from tailtune.parquet.lines import BadRow, Columns, Record, check_length, numbered_lines, open_source
from tailtune.progress import Progress

MAX_ARRAY_BYTES = 256 << 20
"""Largest JSON array that is read, in bytes after decompression. The whole array is held in memory."""
MAX_DIGITS = 300
"""Longer whole numbers in lists and objects become floating-point numbers."""
_WHITESPACE = b" \t\r\n"


def read_json_lines(lines: Iterable[tuple[int, bytes]], columns: Columns | None) -> Iterator[Record]:
    """Parse one JSON object per line. `lines` yields (line number, text) pairs. Blank lines are skipped.

    A row is good when it is a JSON object in which each of the columns appears once and holds a string or a number, or
    a conversation or a list or object where `columns` says so. Numbers in place of text are kept as they are written:
    1.50 stays "1.50". Without `columns`, the only value of a record is the whole row, a dictionary.
    """
    getters = None if columns is None else [(name, _getter(name, columns)) for name in columns.names]
    for number, line in lines:
        text = line.strip(_WHITESPACE)
        if text:
            yield Record(number, text, _parse_row(text, getters))


def read_json(source: Path, compression: str | None, columns: Columns | None) -> Iterator[Record]:
    """Parse a JSON array of objects, or JSON Lines, which many files named `.json` contain.

    The line of a record is the line on which the object begins. Raises UserError when the array has
    more than MAX_ARRAY_BYTES, has no end, or is followed by other text.
    """
    is_array = _is_array(source, compression)
    with open_source(source, compression) as file:
        if not is_array:
            yield from read_json_lines(numbered_lines(file), columns)
            return
        data = file.read(MAX_ARRAY_BYTES + 1)
    if len(data) > MAX_ARRAY_BYTES:
        raise UserError(
            f"{source} is a JSON array of more than {MAX_ARRAY_BYTES >> 20} MiB",
            "convert it to JSON Lines with jq -c '.[]' and set data.source to the result",
        )
    num_read = 0
    with Progress(f"parquet: {source.name}", len(data), "bytes", measure=lambda: num_read):
        for record in read_json_lines(_split_array(data), columns):
            yield record
            num_read += len(record.text)


# -- One row ---------------------------------------------------------------------------------------


class _Number(str):
    """A JSON number, kept as it is written, with any number of digits."""


_REPEATED = object()
"""Value of a key that appears more than once in its object."""


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object from its (key, value) pairs."""
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        result.update((key, _REPEATED) for key in result if counts[key] > 1)
    return result


_DECODER = json.JSONDecoder(
    object_pairs_hook=_make_object, parse_int=_Number, parse_float=_Number, parse_constant=lambda _: math.nan
)
_TYPE_NAMES = {
    type(None): "null",
    bool: "a boolean",
    float: "NaN or Infinity",  # neither is valid JSON
    list: "a list",
    dict: "an object",
    _Number: "a number",
    str: "a string",
}


_Getter = Callable[[dict[str, Any], str], Any]


def _parse_row(text: bytes, getters: list[tuple[str, _Getter]] | None) -> list[Any] | BadRow:
    """Return the values of the columns that have getters, or of the whole row, or why the row is bad."""
    try:
        check_length(text)
        row = _decode(text)
        return [_plain(row, "the row")] if getters is None else [get(row, name) for name, get in getters]
    except BadRow as error:
        return error
    except RecursionError:
        return BadRow("JSON nested too deeply")


def _getter(name: str, columns: Columns) -> _Getter:
    if name == columns.messages:
        return _get_conversation
    if name in columns.types:
        return _get_optional_nested if name in columns.optional else _get_nested
    return _get_optional if name in columns.optional else _get_text


def _decode(text: bytes) -> dict[str, Any]:
    """Decode one JSON object. Raises BadRow."""
    try:
        row = _DECODER.decode(text.decode())
    except UnicodeDecodeError as error:
        raise BadRow(f"invalid UTF-8 (byte {error.start + 1})") from None
    except RecursionError:
        raise BadRow("JSON nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadRow(f"broken JSON ({error.msg.removesuffix(' at')} at character {error.pos + 1})") from None
    if not isinstance(row, dict):
        raise BadRow(f"not a JSON object but {_TYPE_NAMES[type(row)]}")
    return row


def _get_text(row: dict[str, Any], name: str) -> str:
    """Return the value of one column as text. Raises BadRow."""
    value = row.get(name)
    if type(value) is str and value.isascii():  # most values
        return value
    if name not in row:
        raise BadRow(f"column '{name}' is missing", row)
    if value is _REPEATED:
        raise BadRow(f"column '{name}' appears more than once", row)
    if not isinstance(value, str):
        raise BadRow(f"column '{name}' is {_TYPE_NAMES[type(value)]}, not text", row)
    if not _is_unicode(value):
        raise BadRow(f"column '{name}' contains a lone surrogate, which is not valid Unicode", row)
    return str(value)


def _get_optional(row: dict[str, Any], name: str) -> str:
    """Return the value of one column as text, empty where it is missing. Raises BadRow."""
    return "" if row.get(name) is None else _get_text(row, name)


def _get_optional_nested(row: dict[str, Any], name: str) -> Any:
    """Return the list or object in one column, None where it is missing. Raises BadRow."""
    return None if row.get(name) is None else _get_nested(row, name)


def _get_nested(row: dict[str, Any], name: str) -> Any:
    """Return the list or object in one column, with numbers as numbers. Raises BadRow."""
    value = row.get(name)
    if not isinstance(value, list | dict):
        _get_text(row, name)  # raises for what is neither text nor a list
        raise BadRow(f"column '{name}' is text, not a list or an object as in earlier rows", row)
    return _plain(value, f"column '{name}'")


def _get_conversation(row: dict[str, Any], name: str) -> list[dict[str, str]]:
    """Return the messages in one column. Raises BadRow."""
    value = row.get(name)
    if not isinstance(value, list | dict):
        _get_text(row, name)  # raises for what is missing or repeated
    try:
        return read_conversation(_plain(value, f"column '{name}'"))
    except BadRow as error:
        raise BadRow(error.reason if error.reason.startswith("column") else f"column '{name}': {error.reason}",
                     row) from None  # fmt: skip


def _plain(value: Any, where: str) -> Any:
    """Return a decoded value with its numbers as numbers. Raises BadRow for what is not valid JSON."""
    if isinstance(value, dict):
        return {_plain(key, where): _plain(each, where) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, where) for each in value]
    if isinstance(value, _Number):
        return float(value) if set(value) & set(".eE") or len(value) > MAX_DIGITS else int(value)
    if value is _REPEATED:
        raise BadRow(f"{where} contains a key more than once")
    if isinstance(value, float):
        raise BadRow(f"{where} contains NaN or Infinity")
    if isinstance(value, str) and not _is_unicode(value):
        raise BadRow(f"{where} contains a lone surrogate, which is not valid Unicode")
    return value


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# -- JSON arrays -----------------------------------------------------------------------------------

_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{},]', re.DOTALL)
"""A string (possibly without its closing quote), a bracket, or a comma."""
_LEADING_WHITESPACE = re.compile(rb"[ \t\r\n]*+")


def _is_array(source: Path, compression: str | None) -> bool:
    """Return whether the first character that is not white space is `[`."""
    with open_source(source, compression) as file:
        while character := file.read(1):
            if character not in _WHITESPACE:
                return character == b"["
    return False


def _split_array(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, text) for each element of a JSON array, without parsing the elements.

    An element ends at the next comma or closing bracket that is not inside a string or inside
    brackets of its own. The line number is that of the element's first character. Elements longer
    than MAX_LINE_BYTES are cut to MAX_LINE_BYTES + 1 bytes. Raises UserError when the array has no end or is
    followed by other text.
    """
    depth = 0  # brackets that are open
    begin = 0  # index after the bracket or comma before the current element
    line, position = 1, 0  # `line` is the line number at the index `position`
    for token in _TOKENS.finditer(data):
        character = data[token.start()]
        if character == ord('"'):
            continue
        if character in b"[{":
            depth += 1
            begin = begin or token.end()
        elif character in b"]}":
            depth -= 1
        if depth > 1 or (depth == 1 and character != ord(",")):
            continue
        first = _skip_whitespace(data, begin)
        line, position = line + data.count(b"\n", position, first), first
        yield line, data[first : min(token.start(), first + source_lines.MAX_LINE_BYTES + 1)]
        begin = token.end()
        if depth <= 0:
            rest = _skip_whitespace(data, begin)
            if rest < len(data):
                line += data.count(b"\n", position, rest)
                raise UserError(f"line {line}: text follows the end of the JSON array", "put one array into each file")
            return
    line += data.count(b"\n", position, begin)
    raise UserError(
        "the JSON array does not end: the file is cut off, or a quote or bracket is missing in the row that begins "
        f"on or after line {line}",
        "fetch it again, or correct that row",
    )


def _skip_whitespace(data: bytes, begin: int) -> int:
    """Return the index of the first byte at or after `begin` that is not white space."""
    match = _LEADING_WHITESPACE.match(data, begin)
    assert match is not None
    return match.end()
