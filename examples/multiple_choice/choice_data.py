"""Read tables of questions with choices as splits of rows."""

import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from choice_settings import ANSWER_FORMATS

from hf_attn_variants.input_files import is_blank
from hf_attn_variants.text_files import column_names, column_value, has_column, missing_column, parse_rows
from hf_attn_variants.training.classification.data import ClassificationSplit, make_rows
from hf_attn_variants.training.classification.labels import read_cell
from hf_attn_variants.training.engine import tables
from hf_attn_variants.training.engine.tables import SplitRows, TableRow, get_label_name, get_text

# Names of columns that need no flag; choices may also be in ending0, ending1, ... and the like.
NAMES = {
    "context_column": ("article", "context", "passage", "premise", "sent1"),
    "question_column": ("question", "sent2"),
    "choices_columns": ("options", "choices", "choices.text", "endings"),
    "answer_column": ("answer", "label", "answerKey"),
}


@dataclass
class Row:
    """A question of a table."""

    record: TableRow
    context: str | None
    question: str | None
    choices: list[str]
    answer: Any


def load_choice_data(settings: Any) -> tuple[dict[str, ClassificationSplit], dict[str, Any]]:
    """Read the tables, or the `datasets` source, of the settings.

    Returns:
        The splits "train", "validation" and "test" that are there, and the columns and `answer_format` by setting. The
        columns of a split are `text1` (the context, or the question without a context), `text2` (a list: each choice
        after its question), `choices`, `question`, `index`, `file` and, if the answers are known, `label`.

    Raises:
        OSError: if a file or the dataset cannot be read.
        ValueError: if a column is missing or ambiguous, or a row is malformed; the message names the row.
    """
    sources = tables.read_splits(settings)
    first = next(iter(sources.values())).first
    names, columns = column_names(first.values), _find_columns(first, settings)
    if columns["answer_column"] is None and {*sources} != {"test"}:
        raise ValueError(f"{first.names_place}: --answer_column must be given, got the columns {', '.join(names)}.")
    read = {name: _read(name, source, columns) for name, source in sources.items()}
    answered = next((rows for rows in read.values() if any(row.answer for row in rows)), None)
    answer_format = settings.answer_format or ("from_0" if answered is None or "sent1" in names else None)
    answer_format = answer_format or find_answer_format(answered or [])
    blank = "_" if {"article", "options"} <= {*names} else None  # RACE
    splits = {name: _split(name, rows, answer_format, blank) for name, rows in read.items()}
    return splits, columns | {"answer_format": answer_format}


def _find_columns(first: TableRow, settings: Any) -> dict[str, Any]:
    there = column_names(first.values)
    columns = {flag: getattr(settings, flag) for flag in NAMES}
    taken = {*columns.values(), *(columns["choices_columns"] or ())}
    for flag, names in NAMES.items():
        found: list[Any] = [name for name in names if name in there and name not in taken]
        if flag == "choices_columns":
            counted = [_counted(stem, there) for stem in ("ending", "choice", "option")]
            found = [(name,) for name in found] + [each for each in counted if len(each) > 1]
        if columns[flag] is None and len(found) > 1:
            raise ValueError(f"{first.names_place}: --{flag} must be given, got {' and '.join(map(str, found))}.")
        columns[flag] = columns[flag] or (found[0] if found else None)
    if not columns["choices_columns"] or not (columns["context_column"] or columns["question_column"]):
        raise ValueError(
            f"{first.names_place}: --choices_columns, and --context_column or --question_column, must be given, got "
            f"the columns {', '.join(there)}."
        )
    return columns


def _counted(stem: str, there: Sequence[str]) -> tuple[str, ...]:
    """Return the columns such as ending0, ending1, ..., which count from 0 or 1 without a gap."""
    numbers = itertools.count(0 if f"{stem}0" in there else 1)
    return tuple(itertools.takewhile(lambda name: name in there, (f"{stem}{i}" for i in numbers)))


def _read(name: str, source: SplitRows, columns: dict[str, Any]) -> list[Row]:
    answer_column = tables.resolve_label_column(name, source, columns["answer_column"], "--answer_column")
    names, rows = source.class_names(answer_column), []
    texts = {flag: columns[flag] for flag in ("context_column", "question_column")}
    for record in source.records:
        context, question = (texts[flag] and get_text(record, texts[flag], f"--{flag}") for flag in texts)
        value = column_value(record.values, answer_column) if answer_column else None
        value = value if names is None else get_label_name(value, names)
        answer = read_cell(value, None, f"{record.place}, column {answer_column!r}")
        rows.append(Row(record, context, question, _choices_of(record, columns["choices_columns"]), answer))
    answers = {row.answer for row in rows}
    # The Hub gives all rows of a test split the same answer if the answers are not public.
    if name == "test" and len(answers) == 1 and answers <= tables.UNKNOWN_LABELS:
        rows = [replace(row, answer=None) for row in rows]
    return rows


def _choices_of(record: TableRow, columns: Sequence[str]) -> list[str]:
    """Return the choices of a row; the last of several columns may be blank."""
    for column in columns:
        if not has_column(record.values, column):
            raise missing_column(record.names_place, record.values, column, "--choices_columns")
    values: Any = [column_value(record.values, column) for column in columns]
    if len(columns) == 1:
        [values] = values
        if isinstance(values, str):
            with contextlib.suppress(ValueError):
                values = parse_rows(values)
    else:
        while values and is_blank(str(values[-1] or "")):
            values.pop()
    if not isinstance(values, list) or len(values) < 2 or not all(isinstance(v, str) and v.strip() for v in values):
        raise ValueError(
            f"{record.place}: {', '.join(columns)} must have at least 2 choices, none of them blank, got "
            f"{values!r:.80}. Give one column per choice, or one column with a list in JSON."
        )
    return values


def place_of(answer: Any, choices: Sequence[str], answer_format: str) -> int | None:
    """Return the place, from 0, of the choice that an answer names; None if it names none, or two equal ones."""
    place = -1
    if answer_format == "text":
        texts = [choice.strip() for choice in choices]
        place = texts.index(answer) if texts.count(answer) == 1 else -1
    elif answer_format == "letter" and re.fullmatch("[A-Za-z]", str(answer)):
        place = ord(answer.upper()) - ord("A")
    elif answer_format.startswith("from") and re.fullmatch("[0-9]+", str(answer)):
        place = int(answer) - int(answer_format[-1])
    return place if 0 <= place < len(choices) else None


def shown_answer(place: int, choices: Sequence[str], answer_format: str) -> Any:
    """Return the answer of a table with this format for the choice at a place."""
    if answer_format == "text":
        return choices[place]
    return chr(ord("A") + place) if answer_format == "letter" else place + int(answer_format[-1])


def find_answer_format(rows: Sequence[Row]) -> str:
    """Return the only format in which the answers of all rows name a choice.

    Raises:
        ValueError: if no format, or more than one, fits.
    """
    places = {name: [place_of(row.answer, row.choices, name) for row in rows if row.answer] for name in ANSWER_FORMATS}
    fitting = [name for name in ANSWER_FORMATS if None not in places[name]]
    if len(fitting) != 1:
        answers = ", ".join(dict.fromkeys(str(row.answer) for row in rows[:10]))
        raise ValueError(
            f"{rows[0].record.place}: --answer_format must be given, because the answers ({answers:.60}) fit "
            f"{' and '.join(fitting) or 'none'} of {', '.join(ANSWER_FORMATS)}."
        )
    return fitting[0]


def _split(name: str, rows: Sequence[Row], answer_format: str, blank: str | None) -> ClassificationSplit:
    columns: dict[str, list] = {
        "text1": [row.question if row.context is None else row.context for row in rows],
        "text2": [_worded(row, blank) for row in rows],
        "choices": [row.choices for row in rows],
        "question": [None if row.context is None else row.question for row in rows],
        "index": [row.record.number for row in rows],
        "file": [row.record.file for row in rows],
    }
    if name != "test" or any(row.answer is not None for row in rows):
        columns["label"] = [_label_of(row, answer_format) for row in rows]
    return ClassificationSplit(name, make_rows(columns))


def _worded(row: Row, blank: str | None) -> list[str]:
    """Return the question with each choice instead of its blank, or with each choice after it."""
    if row.context is None or not row.question:
        return row.choices
    if blank and blank in row.question:
        return [row.question.replace(blank, choice) for choice in row.choices]
    return [f"{row.question} {choice}" for choice in row.choices]


def _label_of(row: Row, answer_format: str) -> int:
    place = place_of(row.answer, row.choices, answer_format)
    if place is None:
        raise ValueError(
            f"{row.record.place}: the answer must name one of {len(row.choices)} choices (--answer_format "
            f"{answer_format}), got {row.answer!r:.60}."
        )
    return place
