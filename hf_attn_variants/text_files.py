"""Examples from text files: lines, parallel files of lines, and the columns of tables (CSV, TSV, JSON, JSONL)."""

import csv
import itertools
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .command_line import nearest_name
from .files import parse_json
from .input_files import is_blank, is_unicode, lines_of, suffix_of, whole_lines

__all__ = [
    "TABLE_SUFFIXES",
    "PlacedRows",
    "Record",
    "RepeatingObject",
    "check_unused",
    "column_names",
    "column_value",
    "filled_rows",
    "has_column",
    "has_texts",
    "is_table",
    "missing_column",
    "parse_rows",
    "read_columns",
    "read_lines",
    "read_pairs",
    "read_placed_columns",
    "read_placed_pairs",
    "read_records",
    "repeated_name",
    "row_place",
    "text_columns",
]

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


@dataclass(frozen=True)
class PlacedRows:
    """Rows of texts, and where each was read: rows that are left out leave a gap in the numbers.

    Attributes:
        texts: of each row.
        files: of each row; of parallel text that of the sources.
        numbers: of each row in its file, from 1; of lines of text, the line.
    """

    texts: list[tuple[str, ...]]
    files: list[str]
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.texts)


def read_lines(paths: Sequence[str | os.PathLike], keep_blank: bool = False) -> list[str]:
    """Return the lines of text files (UTF-8, plain or .gz) in the files' order; blank ones by `keep_blank` alone.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not text, or has no line that is not blank.
    """
    texts: list[str] = []
    for path in map(Path, paths):
        found = [line for line in lines_of(path) if keep_blank or not is_blank(line)]
        if all(map(is_blank, found)):
            raise ValueError(f"{path} is empty: it has no line of text")
        texts += found
    return texts


def read_pairs(source_file: str | os.PathLike, target_file: str | os.PathLike) -> list[tuple[str, ...]]:
    """Return the texts of `read_placed_pairs`."""
    return read_placed_pairs(source_file, target_file).texts


def read_placed_pairs(source_file: str | os.PathLike, target_file: str | os.PathLike) -> PlacedRows:
    """Return parallel text: line i of one file belongs to line i of the other; pairs with a blank side are left out.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not text, or they have unequal numbers of lines, or no pair.
    """
    sources, targets = (list(lines_of(Path(path))) for path in (source_file, target_file))
    if len(sources) != len(targets):
        raise ValueError(
            f"{source_file} has {len(sources)} lines and {target_file} has {len(targets)}: parallel text has as many"
        )
    pairs: list[tuple[str, ...]] = list(zip(sources, targets, strict=True))
    kept = filled_rows(f"{source_file} and {target_file}", "line", pairs, lambda i: f"line {i + 1}")
    if not kept:
        raise ValueError(f"{source_file} and {target_file} are empty: they have no pair of lines")
    return PlacedRows([pairs[i] for i in kept], [str(source_file)] * len(kept), [i + 1 for i in kept])


def read_columns(
    paths: Sequence[str | os.PathLike],
    columns: Sequence[str],
    named_by: str | None = None,
    keep_blank: bool = False,
    unused: str | None = None,
) -> list[tuple[str, ...]]:
    """Return the texts of `read_placed_columns`."""
    return read_placed_columns(paths, columns, named_by, keep_blank, unused).texts


def read_placed_columns(
    paths: Sequence[str | os.PathLike],
    columns: Sequence[str],
    named_by: str | None = None,
    keep_blank: bool = False,
    unused: str | None = None,
) -> PlacedRows:
    """Return the rows of text columns of tables; those with a blank one are left out.

    Args:
        paths: .csv or .tsv with a header (a .tsv's quotes are text, as in GLUE), .json (a list of objects, or one
            object a line) or .jsonl, each also as .gz.
        columns: their names, as `column_value` reads them.
        named_by: the flag, or flags, that name them; an error over a missing one says so.
        keep_blank: rows with a blank text too.
        unused: a column that the first row has no text in: no row may have any, for it would be dropped.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if it is no such table, lacks a column, has no row, or one that does not fit; the message names it.
    """
    rows = PlacedRows([], [], [])
    for path in map(Path, paths):
        found, lines = [], []
        for record in read_records(path):
            values = record.values
            check_unused(values, unused, record.place)
            texts = tuple(column_value(values, name) for name in columns)
            for name, text in zip(columns, texts, strict=True):
                if text is None and name not in column_names(values):
                    raise missing_column(record.names_place, values, name, named_by)
                if not isinstance(text, str):
                    raise ValueError(f"{record.place}: no text in column {name!r}, but {text!r:.60}")
                if not is_unicode(text):
                    raise ValueError(f"{record.place}: column {name!r} holds half a surrogate pair, which is no text")
            found.append(texts)
            lines.append(record.line)
        if all(is_blank(text) for texts in found for text in texts):
            raise ValueError(f"{path} is empty: it has no row of text")
        kept = [*range(len(found))] if keep_blank else filled_rows(str(path), "row", found, _places_in(path, lines))
        if not kept:
            raise ValueError(f"{path}: no row has a text in each of the columns {', '.join(columns)}")
        rows.texts.extend(found[i] for i in kept)
        rows.files.extend(str(path) for _ in kept)
        rows.numbers.extend(i + 1 for i in kept)
    return rows


def check_unused(row: dict[str, Any], column: str | None, place: str) -> None:
    """Raise ValueError if a row has a text in a column of which the first row has none: it would be dropped."""
    if column is not None and isinstance(text := column_value(row, column), str) and not is_blank(text):
        raise ValueError(
            f"{place}: there is a text in column {column!r}, and the first row has none: give one to all, or to none"
        )


def _places_in(path: Path, lines: Sequence[int | None]) -> Callable[[int], str]:
    return lambda i: row_place(path, lines[i], i + 1)


def filled_rows(place: str, what: str, rows: list[tuple[str, ...]], place_of: Callable[[int], str]) -> list[int]:
    """Return the numbers, counted from 0, of the rows without a blank text; warn of those that are left out.

    Args:
        place: where they were read.
        what: what a row is called.
        rows: the texts of each.
        place_of: from a row's number, counted from 0, to where it is.
    """
    blank = [any(map(is_blank, texts)) for texts in rows]
    if left := [i for i, has_blank in enumerate(blank) if has_blank]:
        message = "%s: %d of %d %ss are left out, for one of their texts is blank; the first is %s"
        logger.warning(message, place, len(left), len(rows), what, place_of(left[0]))
    return [i for i, has_blank in enumerate(blank) if not has_blank]


def missing_column(place: str, record: dict[str, Any], column: str, named_by: str | None) -> ValueError:
    """Return the error over a column that is not there, with the one that may be meant.

    Args:
        place: where the columns are named.
        record: a row.
        column: the missing one.
        named_by: the flag, or flags, that name it.
    """
    names = column_names(record)
    there = " ".join(", ".join(names).split()) or "none"
    stripped = {name.strip(): name for name in names}
    near = nearest_name(column.strip(), stripped)
    advice = f"; {named_by} can name another" if named_by else ""
    if near is not None:
        advice = f"; did you mean {stripped[near]!r}?"
    return ValueError(f"{place}: there is no column {column!r}; its columns are {there}{advice}")


def has_texts(rows: Iterable[dict[str, Any]], column: str) -> bool:
    """Say whether rows have texts in a column: the first has one, blank or not, and not all are blank."""
    found = (column_value(row, column) for row in rows)
    first = next(found, None)
    if not isinstance(first, str):
        return False
    return any(isinstance(text, str) and not is_blank(text) for text in itertools.chain([first], found))


def column_value(record: dict[str, Any], name: str) -> Any:
    """Return what a row has in a column, or None; a dot leads into a nested one: "translation.en"."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def has_column(record: dict[str, Any], name: str) -> bool:
    """Say whether a row has a column, as `column_value` takes it; of a nested one that is null nobody knows."""
    return name in record or column_value(record, name) is not None


def column_names(record: dict[str, Any]) -> list[str]:
    """Return the names of a row's columns, as `column_value` takes them."""
    nested = [f"{key}.{inner}" for key, value in record.items() if isinstance(value, dict) for inner in value]
    return nested + [str(key) for key, value in record.items() if not isinstance(value, dict)]


def text_columns(paths: Sequence[str | os.PathLike], columns: Sequence[str] | None, flag: str) -> tuple[str, ...]:
    """Return the columns that hold an encoder's texts, one, or two of pairs; none where the files are lines of text.

    Args:
        paths: tables, or else lines of text.
        columns: what `flag` gave; None = a table has its texts in "text".
        flag: which errors speak of.

    Raises:
        ValueError: if the files are of both kinds, there are more than two columns, or columns of lines.
    """
    tables = [path for path in paths if is_table(path)]
    if not tables:
        if columns is not None:
            raise ValueError(f"{flag} is for tables ({', '.join(TABLE_SUFFIXES)}); {paths[0]} is none")
        return ()
    if len(tables) < len(paths):
        other = next(path for path in paths if path not in tables)
        raise ValueError(f"{tables[0]} is a table and {other} is not: give files of one kind")
    if columns is not None and len(columns) > 2:
        raise ValueError(f"{flag} takes one column or two, got {len(columns)}")
    return tuple(columns or ("text",))


def is_table(path: str | os.PathLike) -> bool:
    """Say whether a file's name is that of a table: .csv, .tsv, .json or .jsonl, or those .gz."""
    return suffix_of(Path(path)) in TABLE_SUFFIXES
