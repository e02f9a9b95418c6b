"""Files of text examples: lines, parallel files of lines, and the columns of tables, each plain or .gz."""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .command_line import nearest_name
from .table_files import TABLE_SUFFIXES, read_records, row_place
from .text_lines import is_blank, is_unicode, lines_of, suffix_of

__all__ = [
    "PlacedRows",
    "check_unused",
    "column_names",
    "column_value",
    "filled_rows",
    "has_column",
    "has_texts",
    "is_table",
    "missing_column",
    "read_columns",
    "read_lines",
    "read_pairs",
    "read_placed_columns",
    "read_placed_pairs",
    "text_columns",
]

logger = logging.getLogger(__name__)


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
