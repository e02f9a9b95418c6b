"""The rows of tables of text: CSV, TSV, JSON and JSONL, plain or .gz; each row whole, or an error that names it."""

import csv
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .files import parse_json
from .text_lines import is_blank, lines_of, suffix_of, whole_lines

__all__ = ["TABLE_SUFFIXES", "Record", "RepeatingObject", "parse_rows", "read_records", "repeated_name", "row_place"]

logger = logging.getLogger(__name__)

MAX_FIELD = 2**27  # characters of a CSV's field: a document, not a file whose quotes do not end
TABLE_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl")
# What programs write in the place of a CSV's comma: Excel a semicolon, where a comma is the decimal point.
OTHER_SEPARATORS = ";\t|"
# Of a cell whose quotes do not count, for white space stands before them.
SPACED_QUOTES = re.compile(r'\s+"')
# The first line of a JSON list or object. A header of a table may begin with a brace or bracket, too.
JSON_BEGINNING = re.compile(r'\s*(\[\s*)?(\{\s*("|$)|\[\s*$)|\s*\[\s*$')
# What is said of the csv module's errors, by its own words.
ADVICE = {
    "unexpected end of data": "a quote begins in this row and does not end",
    "expected after": 'text follows a quoted cell; inside one a quote is written "", not \\"',
    "new-line character": "a carriage return alone ends no row; write \\n or \\r\\n",
}


class Record(NamedTuple):
    """A row, and where it is.

    Attributes:
        place: "table.csv, line 4, row 3"; in a JSON list "table.json, row 3".
        values: by column.
        names_place: where its columns are named: "table.csv, line 1, the header"; of a JSON object its `place`.
        line: the line of the file on which it begins; None in a JSON list.
    """

    place: str
    values: dict[str, Any]
    names_place: str
    line: int | None


class RepeatingObject(dict):
    """A JSON object in which a name stands twice."""

    name: str


def row_place(file: Any, line: int | None, row: int) -> str:
    """Return what errors call the place of a row: its file, its line where one is known, and its number from 1."""
    return f"{file}, {'' if line is None else f'line {line}, '}row {row}"


def read_records(path: Path) -> Iterator[Record]:
    """Yield a table's rows.

    A .csv whose header has no comma is divided by the semicolon, tab or | that the header has; the log says so.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no table, or a row does not fit the header, does not end, or names a column twice.
    """
    suffix = suffix_of(path)
    if suffix not in TABLE_SUFFIXES:
        raise ValueError(f"{path}: a table must be one of {', '.join(TABLE_SUFFIXES)} (or those .gz)")
    yield from _delimited(path, suffix == ".tsv") if suffix in (".csv", ".tsv") else _objects(path)


def _delimited(path: Path, tabs: bool) -> Iterator[Record]:
    csv.field_size_limit(MAX_FIELD)
    lines = whole_lines(path)
    begin = _up_to_text(lines)
    if begin and JSON_BEGINNING.match(begin[-1]):
        raise ValueError(f"{path} holds JSON, not a table with a header: rename it to end in .json or .jsonl.")
    separator = "\t" if tabs else _separator(path, begin)
    form: dict[str, Any] = {"quoting": csv.QUOTE_NONE} if tabs else {}
    reader = csv.reader(itertools.chain(begin, lines), strict=True, delimiter=separator, **form)
    header: list[str] = []
    names_place = ""
    number, is_told = 0, False
    while True:
        line = reader.line_num + 1
        place = row_place(path, line, number + 1) if header else f"{path}, line {line}, the header"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            advice = next((advice for words, advice in ADVICE.items() if words in str(error)), error)
            raise ValueError(f"{place}: {advice}") from error
        if cells is None:
            return
        if not cells or (len(cells) == 1 != len(header) and is_blank(cells[0])):
            continue  # a blank line
        if not header:
            header, names_place = cells, place
            if twice := _twice(name for name in header if name):
                raise ValueError(f"{place}: two columns are named {twice!r}; rename one")
            continue
        number += 1
        spaced = None if tabs or is_told else next((cell for cell in cells if SPACED_QUOTES.match(cell)), None)
        if spaced is not None:
            is_told = True
            message = "%s: a space stands before the quotes of %.60r: they are read as text, and hold no cell together"
            logger.warning(message, place, spaced)
        if len(cells) != len(header):
            what = "a comma" if separator == "," else f"{separator!r}, which divides the header's,"
            rule = "a tab divides cells, quoted or not" if tabs else f"a cell that holds {what} must be quoted"
            has = " ".join(", ".join(header).split())[:200]
            raise ValueError(
                f"{place}: {len(cells)} cells where the header has {len(header)} ({has}), the last "
                f"{cells[-1][:60]!r}; {rule}"
            )
        yield Record(place, dict(zip(header, cells, strict=True)), names_place, line)


def _up_to_text(lines: Iterator[str]) -> list[str]:
    # The lines up to the first that is not blank, which is in it.
    taken = []
    for line in lines:
        taken.append(line)
        if not is_blank(line):
            break
    return taken


def _separator(path: Path, begin: list[str]) -> str:
    header = begin[-1].strip("\r\n") if begin else ""
    unquoted = "".join(header.split('"')[::2])
    found = max(OTHER_SEPARATORS, key=unquoted.count)
    if "," in unquoted or found not in unquoted:
        return ","
    logger.info("%s, line %d, the header: no comma is in it: %r divides the columns", path, len(begin), found)
    return found


def _objects(path: Path) -> Iterator[Record]:
    for number, (line, value) in enumerate(_json_values(path), start=1):
        where = row_place(path, line, number)
        if not isinstance(value, dict):
            raise ValueError(f"{where}: must be a JSON object, got {type(value).__name__}")
        if (twice := repeated_name(value)) is not None:
            raise ValueError(f"{where}: an object has the name {twice!r} twice; rename one")
        yield Record(where, value, where, line)


def _json_values(path: Path) -> Iterator[tuple[int | None, Any]]:
    # What a JSON list holds, or a file of one value a line, and the line of each.
    rest, begin = enumerate(lines_of(path), start=1), []
    for number, line in rest:
        begin.append((number, line))
        if not is_blank(line):
            break
    lines = itertools.chain(begin, rest)
    if begin and begin[-1][1].lstrip().startswith("["):
        try:
            values = parse_rows("\n".join(line for _, line in lines))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON list: {error}") from error
        yield from ((None, value) for value in values)
        return
    for number, line in lines:
        if is_blank(line):
            continue
        try:
            yield number, parse_rows(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}, column {error.colno}: neither a JSON list nor one JSON object a line "
                f"({error.msg})"
            ) from error
        except ValueError as error:  # a number of thousands of digits
            raise ValueError(f"{path}, line {number}: {error}") from error


def parse_rows(text: str | bytes) -> Any:
    """Return the value of a JSON text; `repeated_name` then tells of objects with a name twice; errors: `parse_json`.

    Raises:
        ValueError: if it is not JSON, or nests too deep.
    """
    return parse_json(text, object_pairs_hook=_object)


def repeated_name(value: Any) -> str | None:
    """Return a name that an object of `parse_rows`, or one inside, has twice: JSON would keep the last value alone."""
    inner = [value]
    while inner:
        value = inner.pop()
        if isinstance(value, RepeatingObject):
            return value.name
        inner += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    repeating = RepeatingObject(values)
    repeating.name = _twice(name for name, _ in pairs) or ""
    return repeating


def _twice(names: Iterable[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)
