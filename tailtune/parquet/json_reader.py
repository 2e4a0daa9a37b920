"""Read rows from JSON Lines and from JSON arrays.

Each row is parsed separately, so a broken row does not affect its neighbours. The exception is a missing quote or
bracket in a JSON array, which can make the whole array unreadable.
"""

import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from tailtune.errors import UserError
from tailtune.parquet import lines as source_lines
from tailtune.parquet.conversation import read_conversation
from tailtune.parquet.lines import BadRow, Columns, Record, Source, check_length, numbered_lines, open_source

MAX_DIGITS = 300
"""Longer whole numbers in lists and objects become floating-point numbers."""
_WHITESPACE = b" \t\r\n"


def read_json(source: Source, columns: Columns | None) -> Iterator[Record]:
    """Parse JSON Lines, or where the format is `json` a JSON array of objects, if the file is one.

    A row is good when it is a JSON object in which each of the columns appears once and holds a string or a number, or
    a conversation or a list or object where `columns` says so. Numbers in place of text are kept as they are written:
    1.50 stays "1.50". Without `columns`, the only value of a record is the whole row, a dictionary. The line of a
    record is the line on which the object begins. Raises UserError when an array has no end, or is followed by other
    text, and when the first object is written over several lines.
    """
    is_array = source.format == "json" and _is_array(source)
    with open_source(source) as file:
        lines = _split_array(file, source) if is_array else _not_indented(file, source)
        yield from _read_json_lines(lines, source, columns)


def _read_json_lines(lines: Iterable[tuple[int, bytes]], source: Source, columns: Columns | None) -> Iterator[Record]:
    """Parse one JSON object per line. `lines` yields (line number, text) pairs. Blank lines are skipped."""
    getters = None if columns is None else [(name, _getter(name, columns)) for name in columns.names]
    for number, line in lines:
        text = line.strip(_WHITESPACE)
        if text or len(line) > source.max_row_bytes:
            yield Record(number, text, _parse_row(line, source, getters))


def _not_indented(file: io.BufferedReader, source: Source) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of JSON Lines. Raises UserError when the first object is written over several lines."""
    first = b""
    for number, line in numbered_lines(file, source.max_row_bytes):
        text = line[:1000].strip(_WHITESPACE)
        if first.startswith(b"{") and first.endswith((b"{", b"[", b",", b":")) and text.startswith(b'"'):
            problem = (
                f"{source.path} has JSON objects over several lines: they are neither in an array nor one per line"
            )
            raise UserError(problem, "convert it with jq -c . FILE > NEW, or jq -c '.KEY[]' for rows below a key")
        first = text or first
        yield number, line


# -- One row ---------------------------------------------------------------------------------------


class _Number(str):
    """A JSON number, kept as it is written, with any number of digits."""

    __slots__ = ()


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


def _parse_row(line: bytes, source: Source, getters: list[tuple[str, _Getter]] | None) -> list[Any] | BadRow:
    """Return the values of the columns that have getters, or of the whole row, or why the row is bad."""
    try:
        check_length(line, source)
        row = _decode(line.strip(_WHITESPACE))
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


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return a decoded value with its numbers as numbers. Raises BadRow for what is not valid JSON, or too deep."""
    if depth > source_lines.MAX_DEPTH:
        raise BadRow(f"{where} is nested more than {source_lines.MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        return {_plain(key, where): _plain(each, where, depth + 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, where, depth + 1) for each in value]
    if isinstance(value, _Number):
        number = float(value) if set(value) & set(".eE") or len(value) > MAX_DIGITS else int(value)
        if math.isinf(number):
            raise BadRow(f"{where} contains a number that is too large")
        return number
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

_REST_OF_STRING = rb'[^"\\]*+(?:\\.[^"\\]*+)*+(")?'
_STRING = re.compile(_REST_OF_STRING, re.DOTALL)
"""The rest of a string, with its closing quote if it is there, without a backslash at the very end."""
_TOKEN = re.compile(rb'"' + _REST_OF_STRING + rb"|[][{},]", re.DOTALL)
"""A string, perhaps without its end, a bracket, or a comma."""


def _is_array(source: Source) -> bool:
    """Return whether the first character that is not white space is `[`."""
    with open_source(source) as file:
        while part := file.read(source_lines.BATCH_BYTES):
            if text := part.lstrip(_WHITESPACE):
                return text.startswith(b"[")
    return False


class _Element:
    """The text of one element, collected from the parts of the file, cut after `limit` bytes."""

    def __init__(self, line: int, limit: int) -> None:
        self.line = line
        """On which it begins."""
        self._text, self._limit = bytearray(), limit

    def add(self, part: bytes) -> None:
        if not self._text:
            text = part.lstrip(_WHITESPACE)
            self.line += part.count(b"\n", 0, len(part) - len(text))
            part = text
        self._text += part[: self._limit - len(self._text)]

    def take(self) -> tuple[int, bytes]:
        return self.line, bytes(self._text)


def _split_array(file: io.BufferedReader, source: Source) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, text) for each element of a JSON array, without parsing the elements.

    An element ends at the next comma or closing bracket that is not inside a string or inside brackets of its own. The
    line number is that of the element's first character. Longer elements are cut to `max_row_bytes` + 1 bytes. Raises
    UserError when the array has no end or is followed by other text.
    """
    limit = source.max_row_bytes + 1
    depth = 0  # brackets that are open
    in_string = escaped = False  # at the end of the part before; `escaped` is a backslash there
    line = 1  # at the index `counted` of the part
    begin_line = 1
    element = _Element(line, limit)
    while part := file.read(source_lines.BATCH_BYTES):
        begin = counted = end = 0
        if in_string:
            rest = _STRING.match(part, int(escaped))
            assert rest is not None
            in_string, end = rest[1] is None, rest.end()
            escaped = in_string and end < len(part)
        for token in () if in_string else _TOKEN.finditer(part, end):
            character = part[token.start()]
            if character == ord('"'):
                in_string = token[1] is None
                escaped = in_string and token.end() < len(part)
                continue
            if character in b"[{":
                depth += 1
                if depth == 1:  # of the array itself
                    begin = token.end()
            elif character in b"]}":
                depth -= 1
            if depth > 1 or (depth == 1 and character != ord(",")):
                continue
            element.add(part[begin : token.start()])
            yield element.take()
            begin = token.end()
            line += part.count(b"\n", counted, begin)
            counted = begin
            begin_line, element = line, _Element(line, limit)
            if depth <= 0:
                _refuse_text(part[begin:], file, line)
                return
        if depth:
            element.add(part[begin:])
        line += part.count(b"\n", counted)
    raise UserError(
        "the JSON array does not end: the file is cut off, or a quote or bracket is missing in the row that begins "
        f"on or after line {begin_line}",
        "fetch it again, or correct that row",
    )


def _refuse_text(part: bytes, file: io.BufferedReader, line: int) -> None:
    """Raise UserError when anything but white space follows: in `part`, or in the rest of the file."""
    for each in chain([part], iter(lambda: file.read(source_lines.BATCH_BYTES), b"")):
        text = each.lstrip(_WHITESPACE)
        line += each.count(b"\n", 0, len(each) - len(text))
        if text:
            raise UserError(f"line {line}: text follows the end of the JSON array", "put one array into each file")
