"""Functions that read examples from text files, parallel files and tables (CSV, TSV, JSON, JSON Lines)."""

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

from .command_parser import find_closest_name
from .files import get_suffix, is_blank, is_unicode, iterate_lines, iterate_lines_with_endings, parse_json

logger = logging.getLogger(__name__)

MAX_CELL_LENGTH = 2**27  # characters in a CSV cell; a longer cell probably contains an unclosed quote
TABLE_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl")
# Separators that programs use instead of a comma. Excel uses a semicolon if the comma is the decimal separator.
OTHER_SEPARATORS = ";\t|"
# A cell with a space before the opening quote, which makes the csv module read the quote as text.
SPACED_QUOTES = re.compile(r'\s+"')
# The first line of a JSON list or object. (The header of a CSV table can also begin with a brace or bracket.)
JSON_START = re.compile(r'\s*(\[\s*)?(\{\s*("|$)|\[\s*$)|\s*\[\s*$')
# Advice for each error from the csv module, by a substring of its message.
CSV_ADVICE = {
    "unexpected end of data": "A quote begins in this row but does not end. Close it.",
    "expected after": 'Text follows a quoted cell. Write a quote inside a cell as "", not as \\".',
    "new-line character": "A carriage return without a line feed does not end a row. Write \\n or \\r\\n.",
}


class TableRow(NamedTuple):
    """A table row and its location.

    Attributes:
        place: the location of the row, such as "table.csv, line 4, row 3", or "table.json, row 3" in a JSON list.
        values: the values by column.
        header_location: the location of the column names, such as "table.csv, line 1, the header". For a JSON object,
            it is the same as `place`.
        line: the number of the first line of the row. None in a JSON list.
        file: the file, or the name of another source.
        number: the number of the row in the file, counted from 1.
    """

    place: str
    values: dict[str, Any]
    header_location: str
    line: int | None = None
    file: str = ""
    number: int = 1


def describe_row_location(file: Any, line: int | None, row: int) -> str:
    """Return the location of a row for a message: its file, its line (if known), and its number, counted from 1.

    Example:
        >>> describe_row_location("train.csv", 4, 3)
        'train.csv, line 4, row 3'
    """
    return f"{file}, {'' if line is None else f'line {line}, '}row {row}"


def read_table_rows(path: Path) -> Iterator[TableRow]:
    """Yield the rows of a table.

    If the header of a .csv file does not contain a comma, the separator is detected from the header and logged.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not a table, a row does not match the header, repeats the header or contains an
            unclosed quote, or a column name occurs twice.
    """
    suffix = get_suffix(path)
    if suffix not in TABLE_SUFFIXES:
        raise ValueError(f"{path}: a table must be one of {', '.join(TABLE_SUFFIXES)}, optionally with .gz.")
    yield from _read_csv_rows(path, suffix == ".tsv") if suffix in (".csv", ".tsv") else _read_json_rows(path)


def _read_csv_rows(path: Path, is_tsv: bool) -> Iterator[TableRow]:
    csv.field_size_limit(MAX_CELL_LENGTH)
    lines = iterate_lines_with_endings(path)
    begin = _read_until_first_text_line(lines)
    if begin and JSON_START.match(begin[-1]):
        raise ValueError(f"{path} must be a table with a header, but it contains JSON. Rename it to .json or .jsonl.")
    separator = "\t" if is_tsv else _detect_separator(path, begin)
    options: dict[str, Any] = {"quoting": csv.QUOTE_NONE} if is_tsv else {}
    reader = csv.reader(itertools.chain(begin, lines), strict=True, delimiter=separator, **options)
    header: list[str] = []
    header_location = ""
    number, has_warned = 0, False
    while True:
        line = reader.line_num + 1
        place = describe_row_location(path, line, number + 1) if header else f"{path}, line {line}, the header"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            advice = next((advice for words, advice in CSV_ADVICE.items() if words in str(error)), error)
            raise ValueError(f"{place}: {advice}") from error
        if cells is None:
            return
        if not cells or (len(cells) == 1 != len(header) and is_blank(cells[0])):
            continue  # an empty line
        if not header:
            header, header_location = cells, place
            if repeated := next((name for name, count in Counter(header).items() if name and count > 1), None):
                raise ValueError(f"{place}: two columns have the name {repeated!r}. Rename one of them.")
            continue
        number += 1
        if not is_tsv and not has_warned and (spaced_cells := [cell for cell in cells if SPACED_QUOTES.match(cell)]):
            has_warned = True
            message = "%s: there is a space before the quote in %.60r. Therefore, the quote is read as text."
            logger.warning(message, place, spaced_cells[0])
        # A single cell may be equal to its header by chance.
        if len(header) > 1 and cells[1:] == header[1:] and cells[0].removeprefix("\ufeff") == header[0]:
            raise ValueError(f"{place}: the row repeats the header. Remove this row.")
        if len(cells) != len(header):
            rule = f"Put a cell that contains the separator {separator!r} in quotes."
            if is_tsv:
                rule = "A tab always separates cells."
            names = " ".join(", ".join(header).split())[:200]
            raise ValueError(
                f"{place}: the row must have {len(header)} cells like the header ({names}), got {len(cells)}. The "
                f"last cell is {cells[-1][:60]!r}. {rule}"
            )
        yield TableRow(place, dict(zip(header, cells, strict=True)), header_location, line, str(path), number)


def _read_until_first_text_line(lines: Iterator[str]) -> list[str]:
    """Return the lines up to and including the first line that is not blank."""
    leading_lines = []
    for line in lines:
        leading_lines.append(line)
        if not is_blank(line):
            break
    return leading_lines


def _detect_separator(path: Path, first_lines: list[str]) -> str:
    header = first_lines[-1].strip("\r\n") if first_lines else ""
    unquoted = "".join(header.split('"')[::2])
    most_frequent = max(OTHER_SEPARATORS, key=unquoted.count)
    if "," in unquoted or most_frequent not in unquoted:
        return ","
    message = "%s, line %d: the header contains no comma. %r is used as the separator."
    logger.info(message, path, len(first_lines), most_frequent)
    return most_frequent


def _read_json_rows(path: Path) -> Iterator[TableRow]:
    for number, (line, value) in enumerate(_iterate_json_values(path), start=1):
        place = describe_row_location(path, line, number)
        if not isinstance(value, dict):
            raise ValueError(f"{place}: a row must be a JSON object, got {type(value).__name__}.")
        yield TableRow(place, value, place, line, str(path), number)


def _iterate_json_values(path: Path) -> Iterator[tuple[int | None, Any]]:
    """Yield (line number, value) for each value in a JSON list or in a file with one value per line.

    In a list, the line numbers are None.
    """
    remaining_lines = iterate_lines(path)
    begin = _read_until_first_text_line(remaining_lines)
    lines = enumerate(itertools.chain(begin, remaining_lines), start=1)
    if begin and begin[-1].lstrip().startswith("["):
        try:
            values = parse_json("\n".join(line for _, line in lines), unique_keys=True)
        except ValueError as error:
            message = str(error).rstrip(".")
            raise ValueError(f"{path} must be a JSON list: {message}.") from error
        yield from ((None, value) for value in values)
        return
    for number, line in lines:
        if is_blank(line):
            continue
        try:
            yield number, parse_json(line, unique_keys=True)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}, column {error.colno}: the file must be a JSON list or have one JSON object "
                f"per line ({error.msg})."
            ) from error
        except ValueError as error:  # such as a number with thousands of digits
            raise ValueError(f"{path}, line {number}: {error}") from error


@dataclass(frozen=True)
class LocatedRows:
    """Rows of texts and their locations. If rows were skipped, there are gaps in the row numbers.

    Attributes:
        texts: the texts in each row.
        files: the file that contains each row. For parallel files, it is the source file.
        numbers: the number of each row in its file, counted from 1. For text files, it is the line number.
    """

    texts: list[tuple[str, ...]]
    files: list[str]
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.texts)


def read_lines(paths: Sequence[str | os.PathLike], keep_blank: bool = False) -> list[str]:
    """Return the lines of one or more text files (UTF-8, plain or .gz).

    Args:
        paths: the files.
        keep_blank: whether to include blank lines.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not text, or contains only blank lines.
    """
    texts: list[str] = []
    for path in map(Path, paths):
        lines = [line for line in iterate_lines(path) if keep_blank or not is_blank(line)]
        if all(map(is_blank, lines)):
            raise ValueError(f"{path} is empty. It must contain at least one line of text.")
        texts += lines
    return texts


def read_pairs(source_file: str | os.PathLike, target_file: str | os.PathLike) -> LocatedRows:
    """Return the line pairs from two parallel files, without pairs that contain a blank line.

    Line i in one file corresponds to line i in the other file.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not text, the files have different numbers of lines, or no pair is left.
    """
    sources, targets = (list(iterate_lines(Path(path))) for path in (source_file, target_file))
    if len(sources) != len(targets):
        raise ValueError(
            f"{source_file} and {target_file} must have the same number of lines, got {len(sources)} and "
            f"{len(targets)}."
        )
    pairs: list[tuple[str, ...]] = list(zip(sources, targets, strict=True))
    indices = find_complete_rows(f"{source_file} and {target_file}", "line", pairs, lambda i: f"line {i + 1}")
    if not indices:
        raise ValueError(f"{source_file} and {target_file} are empty. They must contain at least one pair of lines.")
    return LocatedRows([pairs[i] for i in indices], [str(source_file)] * len(indices), [i + 1 for i in indices])


def read_columns(
    paths: Sequence[str | os.PathLike],
    columns: Sequence[str],
    flag: str | None = None,
    keep_blank: bool = False,
    unused: str | None = None,
) -> LocatedRows:
    """Return the text columns of tables, without rows that contain a blank text.

    Args:
        paths: .csv or .tsv files with a header, .json files (a list of objects, or one object per line) or .jsonl
            files, optionally with .gz. Quotes in a .tsv file are read as text, as in GLUE.
        columns: the names of the columns, in the format that `get_column_value` accepts.
        flag: the flag or flags that set the column names. An error about a missing column mentions them.
        keep_blank: whether to include rows with a blank text.
        unused: a column that is ignored because it is empty in the first row. It is an error if another row contains
            text in this column.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not a table or does not contain any rows, a column is missing, or a value is not text.
            The message contains the location.
    """
    rows = LocatedRows([], [], [])
    for path in map(Path, paths):
        selected = select_columns(str(path), read_table_rows(path), columns, flag, keep_blank, unused)
        rows.texts.extend(selected.texts)
        rows.files.extend(selected.files)
        rows.numbers.extend(selected.numbers)
    return rows


def select_columns(
    location: str,
    records: Iterable[TableRow],
    columns: Sequence[str],
    flag: str | None = None,
    keep_blank: bool = False,
    unused: str | None = None,
) -> LocatedRows:
    """Return the text columns of the rows of one table. See `read_columns` for the other arguments and the errors.

    Args:
        location: the file or the other source of the rows.
        records: the rows.
    """
    all_texts: list[tuple[str, ...]] = []
    lines = []
    for record in records:
        check_unused_column(record.values, unused, record.place)
        all_texts.append(tuple(get_column_text(record, name, flag) for name in columns))
        lines.append(record.line)
    if all(is_blank(text) for texts in all_texts for text in texts):
        raise ValueError(f"{location} is empty. It must contain at least one row of text.")
    indices = [*range(len(all_texts))]
    if not keep_blank:
        indices = find_complete_rows(
            location, "row", all_texts, lambda i: describe_row_location(location, lines[i], i + 1)
        )
    if not indices:
        raise ValueError(f"{location}: at least one row must contain text in each column of {', '.join(columns)}.")
    return LocatedRows([all_texts[i] for i in indices], [location] * len(indices), [i + 1 for i in indices])


def get_column_text(record: TableRow, column: str, flag: str | None) -> str:
    """Return the text in a column of a row.

    Raises:
        ValueError: if the column does not exist or does not contain text. The message mentions `flag`, which selects
            the column.
    """
    text = get_column_value(record.values, column)
    if isinstance(text, str) and is_unicode(text):
        return text
    if text is None and column not in list_column_names(record.values):
        raise make_missing_column_error(record.header_location, record.values, column, flag)
    problem = "an incomplete surrogate pair" if isinstance(text, str) else f"{text!r:.60}"
    advice = f" Use {flag} to select another column." if flag else ""
    raise ValueError(f"{record.place}: Column {column!r} contains {problem} instead of text.{advice}")


def check_unused_column(row: dict[str, Any], column: str | None, location: str) -> None:
    """Raise ValueError if a row contains text in a column that is ignored because it is empty in the first row."""
    if column is not None and isinstance(text := get_column_value(row, column), str) and not is_blank(text):
        raise ValueError(
            f"{location}: column {column!r} contains text in this row, but not in the first row. Fill this column in "
            "all rows or in none."
        )


def find_complete_rows(
    location: str, row_label: str, rows: list[tuple[str, ...]], describe_location: Callable[[int], str]
) -> list[int]:
    """Return the indices of the rows that contain no blank text, and log a warning about the other rows.

    Args:
        location: the file or files that contain the rows.
        row_label: the word to use for a row in the warning, such as "line".
        rows: the texts in each row.
        describe_location: a function that returns the location of the row with a given index.
    """
    is_blank_row = [any(map(is_blank, texts)) for texts in rows]
    if left_out := [i for i, has_blank in enumerate(is_blank_row) if has_blank]:
        message = "%s: Skipping %d of %d %ss because they contain a blank text. The first one is %s."
        logger.warning(message, location, len(left_out), len(rows), row_label, describe_location(left_out[0]))
    return [i for i, has_blank in enumerate(is_blank_row) if not has_blank]


def make_missing_column_error(location: str, record: dict[str, Any], column: str, flag: str | None) -> ValueError:
    """Return an error about a missing column, with a suggestion if there is a column with a similar name.

    Args:
        location: the location of the column names.
        record: the values of a row.
        column: the name of the missing column.
        flag: the flag or flags that set this name.
    """
    names = list_column_names(record)
    listed = " ".join(", ".join(names).split()) or "none"
    stripped = {name.strip(): name for name in names}
    nearest = find_closest_name(column.strip(), stripped)
    advice = f" Choose another column with {flag}." if flag else ""
    if nearest is not None:
        advice = f" Did you mean {stripped[nearest]!r}?"
    return ValueError(f"{location}: there is no column {column!r}. The columns are {listed}.{advice}")


def has_texts(rows: Iterable[dict[str, Any]], column: str) -> bool:
    """Return whether a column contains text.

    The first value must be a string, and at least one value must not be blank.
    """
    values = (get_column_value(row, column) for row in rows)
    first = next(values, None)
    if not isinstance(first, str):
        return False
    return any(isinstance(text, str) and not is_blank(text) for text in itertools.chain([first], values))


def get_column_value(record: dict[str, Any], name: str) -> Any:
    """Return the value in a column of a row, or None if the row does not have this column.

    Args:
        record: the values of the row.
        name: the name of the column. A dot selects a value in a nested object.

    Example:
        >>> get_column_value({"translation": {"en": "a dog"}}, "translation.en")
        'a dog'
    """
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def has_column(record: dict[str, Any], name: str) -> bool:
    """Return whether a row has a column. A nested column whose value is null counts as missing."""
    return name in record or get_column_value(record, name) is not None


def list_column_names(record: dict[str, Any]) -> list[str]:
    """Return the column names of a row, in the format that `get_column_value` accepts."""
    nested = [
        f"{key}.{nested_name}" for key, value in record.items() if isinstance(value, dict) for nested_name in value
    ]
    return nested + [str(key) for key, value in record.items() if not isinstance(value, dict)]


def resolve_text_columns(
    paths: Sequence[str | os.PathLike], columns: Sequence[str] | None, flag: str
) -> tuple[str, ...]:
    """Return the text columns for an encoder, or an empty tuple if the files contain lines of text.

    Args:
        paths: tables, or files with lines of text.
        columns: one column, or two columns with text pairs. If None, the column "text" is used.
        flag: the flag that sets `columns`, which the error messages mention.

    Raises:
        ValueError: if only some of the files are tables, there are more than two columns, or columns are set for lines
            of text.
    """
    tables = [path for path in paths if is_table(path)]
    if not tables:
        if columns is not None:
            raise ValueError(
                f"{flag} is only supported for tables ({', '.join(TABLE_SUFFIXES)}), got {paths[0]}. Use a table."
            )
        return ()
    if len(tables) < len(paths):
        text_path = next(path for path in paths if path not in tables)
        raise ValueError(f"Either all files or none must be tables. {tables[0]} is a table, but {text_path} is not.")
    if columns is not None and len(columns) > 2:
        raise ValueError(f"{flag} must contain one or two columns, got {len(columns)}.")
    return tuple(columns or ("text",))


def is_table(path: str | os.PathLike) -> bool:
    """Return whether a file name has a table suffix (.csv, .tsv, .json or .jsonl, optionally followed by .gz)."""
    return get_suffix(Path(path)) in TABLE_SUFFIXES
