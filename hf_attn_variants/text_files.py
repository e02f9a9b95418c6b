"""Files of text examples: lines, parallel files of lines, and the columns of tables, each plain or .gz."""

import csv
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from .files import parse_json
from .open_files import COMPRESSED_SUFFIX, open_file

__all__ = [
    "column_names",
    "column_value",
    "has_text",
    "is_table",
    "read_columns",
    "read_lines",
    "read_pairs",
    "text_columns",
]

MAX_FIELD = 2**27  # characters of a CSV's field: a document, not a file whose quotes do not end
TABLE_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl")


def read_lines(paths: Sequence[str | Path], keep_blank: bool = False) -> list[str]:
    """Return the lines of text files (UTF-8, plain or .gz) in the files' order; blank ones by `keep_blank` alone.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not text, or has no line that is not blank.
    """
    texts: list[str] = []
    for path in map(Path, paths):
        found = [line for line in _lines(path) if keep_blank or line.strip()]
        if not any(line.strip() for line in found):
            raise ValueError(f"{path} is empty: it has no line of text")
        texts += found
    return texts


def read_pairs(source_file: str | Path, target_file: str | Path) -> list[tuple[str, ...]]:
    """Return parallel text: line i of one file belongs to line i of the other; pairs with a blank side are left out.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not text, or they have unequal numbers of lines, or no pair.
    """
    sources, targets = (list(_lines(Path(path))) for path in (source_file, target_file))
    if len(sources) != len(targets):
        raise ValueError(
            f"{source_file} has {len(sources)} lines and {target_file} has {len(targets)}: parallel text has as many"
        )
    pairs: list[tuple[str, ...]] = [(s, t) for s, t in zip(sources, targets, strict=True) if s.strip() and t.strip()]
    if not pairs:
        raise ValueError(f"{source_file} and {target_file} are empty: they have no pair of lines")
    return pairs


def read_columns(
    paths: Sequence[str | Path], columns: Sequence[str], named_by: str | None = None, keep_blank: bool = False
) -> list[tuple[str, ...]]:
    """Return the rows of text columns of tables; those with a blank one are left out.

    Args:
        paths: .csv or .tsv with a header (a .tsv's quotes are text, as in GLUE), .json (a list of objects, or one
            object a line) or .jsonl, each also as .gz.
        columns: their names, as `column_value` reads them.
        named_by: the flag, or flags, that name them; an error over a missing one says so.
        keep_blank: rows with a blank text too.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if it is no such table, lacks a column, or has no row.
    """
    rows: list[tuple[str, ...]] = []
    for path in map(Path, paths):
        found = []
        for number, record in enumerate(_records(path), start=1):
            texts = tuple(column_value(record, name) for name in columns)
            missing = [name for name, text in zip(columns, texts, strict=True) if not isinstance(text, str)]
            if missing:
                has = ", ".join(column_names(record)) or "none"
                advice = f"; {named_by} can name another" if named_by else ""
                raise ValueError(
                    f"{path}, row {number}: no text in column {missing[0]!r}; its columns are {has}{advice}"
                )
            if keep_blank or all(text.strip() for text in texts):
                found.append(texts)
        if not any(text.strip() for texts in found for text in texts):
            raise ValueError(f"{path} is empty: it has no row of text")
        rows += found
    return rows


def has_text(path: str | Path, column: str) -> bool:
    """Say whether a table's first row has a text in a column; errors as for `read_columns`."""
    return isinstance(column_value(next(_records(Path(path)), {}), column), str)


def column_value(record: dict[str, Any], name: str) -> Any:
    """Return what a row has in a column, or None; a dot leads into a nested one: "translation.en"."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def column_names(record: dict[str, Any]) -> list[str]:
    """Return the names of a row's columns, as `column_value` takes them."""
    nested = [f"{key}.{inner}" for key, value in record.items() if isinstance(value, dict) for inner in value]
    return nested + [str(key) for key, value in record.items() if not isinstance(value, dict)]


def text_columns(paths: Sequence[str | Path], columns: Sequence[str] | None, flag: str) -> tuple[str, ...]:
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


def is_table(path: str | Path) -> bool:
    """Say whether a file's name is that of a table: .csv, .tsv, .json or .jsonl, or those .gz."""
    return _suffix(Path(path)) in TABLE_SUFFIXES


def _records(path: Path) -> Iterator[dict[str, Any]]:
    suffix = _suffix(path)
    if suffix not in TABLE_SUFFIXES:
        raise ValueError(
            f"{path}: parallel text in one file must be one of {', '.join(TABLE_SUFFIXES)} (or those .gz)"
        )
    if suffix in (".csv", ".tsv"):
        csv.field_size_limit(MAX_FIELD)
        form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if suffix == ".tsv" else {}
        reader = csv.DictReader(_whole_lines(path, newline=""), **form)
        try:
            yield from reader
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
        return
    for place, record in _json_values(path):
        if not isinstance(record, dict):
            raise ValueError(f"{path}, {place}: must be a JSON object, got {type(record).__name__}")
        yield record


def _json_values(path: Path) -> Iterator[tuple[str, Any]]:
    # What a JSON list holds, or a file of one value a line, and where each is.
    lines = ((number, line) for number, line in enumerate(_lines(path), start=1) if line.strip())
    first = list(itertools.islice(lines, 1))
    lines = itertools.chain(first, lines)
    if first and first[0][1].lstrip().startswith("["):
        try:
            values = parse_json("\n".join(line for _, line in lines))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON list: {error}") from error
        yield from ((f"row {number}", value) for number, value in enumerate(values, start=1))
        return
    for number, line in lines:
        try:
            yield f"line {number}", parse_json(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}, column {error.colno}: neither a JSON list nor one JSON object a line "
                f"({error.msg})"
            ) from error
        except ValueError as error:  # a number of thousands of digits
            raise ValueError(f"{path}, line {number}: {error}") from error


def _open_text(path: Path, newline: str) -> TextIO:
    path = path.expanduser()
    if path.is_dir():
        raise OSError(f"{path} is a folder, not a file")
    if not path.exists():
        raise OSError(f"{path}: no such file")
    return io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline=newline)


def _lines(path: Path) -> Iterator[str]:
    # A carriage return inside a line, as crawled text has, ends no line: its twin in the other language has none.
    for line in _whole_lines(path, newline="\n"):
        yield line.rstrip("\r\n")


def _whole_lines(path: Path, newline: str) -> Iterator[str]:
    with _open_text(path, newline) as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                if "\0" in line:
                    raise ValueError(f"{path}, line {number}, holds a null character: it is no text")
                yield line
        except UnicodeDecodeError as error:
            # The lines before were all taken before this part of the file was read.
            number += 1 + error.object[: error.start].count(b"\n")
            raise ValueError(f"{path}, line {number}, is not UTF-8 text ({error.reason})") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise OSError(f"{path} is no whole gzip file ({error})") from error


def _suffix(path: Path) -> str:
    return (Path(path.stem).suffix if path.suffix == COMPRESSED_SUFFIX else path.suffix).lower()
