"""Reading tables of multiple-choice questions and converting them to splits."""

import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from choice_settings import ANSWER_FORMATS

from hf_attn_variants.files import is_blank, parse_json
from hf_attn_variants.text_files import (
    TableRow,
    check_unused_column,
    get_column_text,
    get_column_value,
    has_column,
    list_column_names,
    make_missing_column_error,
)
from hf_attn_variants.training.classification.data import ClassificationSplit, make_in_memory_dataset, parse_label_cell
from hf_attn_variants.training.engine.dataset_splits import (
    UNKNOWN_LABELS,
    DatasetSplit,
    map_class_ids_to_names,
    read_splits,
    resolve_label_column,
)

# Common column names. Columns with these names do not need a flag. Choices may also be in ending0, ending1, and so on.
COMMON_NAMES = {
    "context_column": ("article", "context", "passage", "premise", "sent1"),
    "question_column": ("question", "sent2"),
    "choices_columns": ("options", "choices", "choices.text", "endings"),
    "answer_column": ("answer", "label", "answerKey"),
}


@dataclass
class ChoiceRow:
    """A multiple-choice question from a table.

    Attributes:
        record: The table row.
        context: The context, or None if the table has no column for it.
        question: The question, or None if the table has no column for it.
        choices: The choices.
        answer: The content of the answer column, or None if the answer is unknown.
    """

    record: TableRow
    context: str | None
    question: str | None
    choices: list[str]
    answer: Any


def load_choice_data(settings: Any) -> tuple[dict[str, ClassificationSplit], dict[str, Any]]:
    """Read the tables or the `datasets` source specified in the settings.

    Returns:
        The available splits ("train", "validation" and "test"), and a dictionary with the columns and `answer_format`.
        The columns of a split are `text1` (the context, or the question if there is no context), `text2` (a list with
        the question followed by each choice), `choices`, `question`, `index`, `file` and, if the answers are known,
        `label`.

    Raises:
        OSError: If a file or the dataset cannot be read.
        ValueError: If a column is missing or ambiguous, or if a row is not valid. The message contains the location of
            the row.
    """
    sources = read_splits(settings)
    first = next(iter(sources.values())).first
    names, columns = list_column_names(first.values), _find_columns(first, settings)
    if columns["answer_column"] is None and {*sources} != {"test"}:
        raise ValueError(f"{first.header_location}: --answer_column must be set, got the columns {', '.join(names)}.")
    read = {name: _read_rows(name, source, columns) for name, source in sources.items()}
    answered = next((rows for rows in read.values() if any(row.answer for row in rows)), None)
    answer_format = settings.answer_format or ("from_0" if answered is None or "sent1" in names else None)
    answer_format = answer_format or find_answer_format(answered or [])
    blank = "_" if {"article", "options"} <= {*names} else None  # RACE
    splits = {name: _make_split(name, rows, answer_format, blank) for name, rows in read.items()}
    return splits, columns | {"answer_format": answer_format}


def _find_columns(first: TableRow, settings: Any) -> dict[str, Any]:
    """Return the column for each setting, either from the settings or by its common names."""
    names_in_table = list_column_names(first.values)
    columns = {flag: getattr(settings, flag) for flag in COMMON_NAMES}
    taken = {*columns.values(), *(columns["choices_columns"] or ())}
    for flag, names in COMMON_NAMES.items():
        candidates: list[Any] = [name for name in names if name in names_in_table and name not in taken]
        if flag == "choices_columns":
            numbered = [_find_numbered_columns(stem, names_in_table) for stem in ("ending", "choice", "option")]
            candidates = [(name,) for name in candidates] + [group for group in numbered if len(group) > 1]
        if columns[flag] is None and len(candidates) > 1:
            raise ValueError(
                f"{first.header_location}: --{flag} must be set because the table contains "
                f"{' and '.join(map(str, candidates))}."
            )
        columns[flag] = columns[flag] or (candidates[0] if candidates else None)
    if not columns["choices_columns"] or not (columns["context_column"] or columns["question_column"]):
        raise ValueError(
            f"{first.header_location}: --choices_columns, and --context_column or --question_column, must be set, got "
            f"the columns {', '.join(names_in_table)}."
        )
    return columns


def _find_numbered_columns(stem: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return columns such as ending0, ending1, ..., numbered from 0 or 1 without gaps."""
    numbers = itertools.count(0 if f"{stem}0" in names else 1)
    return tuple(itertools.takewhile(lambda name: name in names, (f"{stem}{i}" for i in numbers)))


def _read_rows(name: str, source: DatasetSplit, columns: dict[str, Any]) -> list[ChoiceRow]:
    """Read the questions in a split."""
    answer_column = resolve_label_column(name, source, columns["answer_column"], "--answer_column")
    names, rows = source.get_class_names(answer_column), []
    texts = {flag: columns[flag] for flag in ("context_column", "question_column")}
    absent = {name for flag in texts if texts[flag] is None for name in COMMON_NAMES[flag]}
    absent -= {*texts.values(), *columns["choices_columns"], answer_column}
    for record in source.records:
        for column in sorted(absent.intersection(record.values)):
            check_unused_column(record.values, column, record.place)
        context, question = (texts[flag] and get_column_text(record, texts[flag], f"--{flag}") for flag in texts)
        value = get_column_value(record.values, answer_column) if answer_column else None
        value = value if names is None else map_class_ids_to_names(value, names)
        answer = parse_label_cell(value, None, f"{record.place}, column {answer_column!r}")
        rows.append(ChoiceRow(record, context, question, _get_choices(record, columns["choices_columns"]), answer))
    answers = {row.answer for row in rows}
    # If the answers of a test split are not public, all its rows on the Hub have the same answer.
    if name == "test" and len(answers) == 1 and answers <= UNKNOWN_LABELS:
        rows = [replace(row, answer=None) for row in rows]
    return rows


def _get_choices(record: TableRow, columns: Sequence[str]) -> list[str]:
    """Return the choices in a row. If each choice has a column, the last columns may be blank."""
    for column in columns:
        if not has_column(record.values, column):
            raise make_missing_column_error(record.header_location, record.values, column, "--choices_columns")
    values: Any = [get_column_value(record.values, column) for column in columns]
    if len(columns) == 1:
        [values] = values
        if isinstance(values, str):
            with contextlib.suppress(ValueError):
                values = parse_json(values)
    else:
        while values and is_blank(str(values[-1] or "")):
            values.pop()
    if not isinstance(values, list) or len(values) < 2 or not all(isinstance(v, str) and v.strip() for v in values):
        raise ValueError(
            f"{record.place}: {', '.join(columns)} must contain at least 2 choices, none of them blank, got "
            f"{values!r:.80}. Use one column per choice, or one column with a JSON list."
        )
    return values


def find_choice(answer: Any, choices: Sequence[str], answer_format: str) -> int | None:
    """Return the index of the choice that matches an answer, or None if there is no match or several."""
    place = -1
    if answer_format == "text":
        texts = [choice.strip() for choice in choices]
        place = texts.index(answer) if texts.count(answer) == 1 else -1
    elif answer_format == "letter" and re.fullmatch("[A-Za-z]", str(answer)):
        place = ord(answer.upper()) - ord("A")
    elif answer_format.startswith("from") and re.fullmatch("[0-9]+", str(answer)):
        place = int(answer) - int(answer_format[-1])
    return place if 0 <= place < len(choices) else None


def format_answer(place: int, choices: Sequence[str], answer_format: str) -> Any:
    """Return the answer for the choice at an index, in the answer format of the table."""
    if answer_format == "text":
        return choices[place]
    return chr(ord("A") + place) if answer_format == "letter" else place + int(answer_format[-1])


def find_answer_format(rows: Sequence[ChoiceRow]) -> str:
    """Return the only format in which the answers in all rows match a choice.

    Raises:
        ValueError: If no format or more than one format matches.
    """
    places = {
        name: [find_choice(row.answer, row.choices, name) for row in rows if row.answer] for name in ANSWER_FORMATS
    }
    fitting = [name for name in ANSWER_FORMATS if None not in places[name]]
    if len(fitting) != 1:
        answers = ", ".join(dict.fromkeys(str(row.answer) for row in rows[:10]))
        raise ValueError(
            f"{rows[0].record.place}: --answer_format must be set because the answers ({answers:.60}) match "
            f"{' and '.join(fitting) or 'none'} of {', '.join(ANSWER_FORMATS)}."
        )
    return fitting[0]


def _make_split(name: str, rows: Sequence[ChoiceRow], answer_format: str, blank: str | None) -> ClassificationSplit:
    """Convert questions to a split. `blank` is the text in a question to replace with the choice, or None."""
    columns: dict[str, list] = {
        "text1": [row.question if row.context is None else row.context for row in rows],
        "text2": [_join_question_and_choices(row, blank) for row in rows],
        "choices": [row.choices for row in rows],
        "question": [None if row.context is None else row.question for row in rows],
        "index": [row.record.number for row in rows],
        "file": [row.record.file for row in rows],
    }
    if name != "test" or any(row.answer is not None for row in rows):
        columns["label"] = [_get_label(row, answer_format) for row in rows]
    return ClassificationSplit(name, make_in_memory_dataset(columns))


def _join_question_and_choices(row: ChoiceRow, blank: str | None) -> list[str]:
    """Fill each choice into the blank of the question, or append it to the question."""
    if row.context is None or not row.question:
        return row.choices
    if blank and blank in row.question:
        return [row.question.replace(blank, choice) for choice in row.choices]
    return [f"{row.question} {choice}" for choice in row.choices]


def _get_label(row: ChoiceRow, answer_format: str) -> int:
    """Return the index of the correct choice. Raises ValueError if the answer does not match a choice."""
    place = find_choice(row.answer, row.choices, answer_format)
    if place is None:
        raise ValueError(
            f"{row.record.place}: The answer must match one of the {len(row.choices)} choices (--answer_format "
            f"{answer_format}), got {row.answer!r:.60}. Correct the answer."
        )
    return place
