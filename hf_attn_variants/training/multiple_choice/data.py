"""Reads tables, or a `datasets` source, as splits of questions with their choices."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...table_files import row_place
from ...text_files import column_value
from ...text_lines import is_blank, is_unicode
from ..classification.labels import read_cell
from ..classification.splits import make_rows
from ..engine.recorded_columns import absent_column, with_recorded_columns
from ..engine.table_splits import (
    UNKNOWN,
    Record,
    Source,
    check_column,
    has_column,
    missing_column,
    named_label,
    read_sources,
    text_of,
    uneven_column,
)
from .answers import answer_format_of, places_of
from .choices import ChoiceSplit, word_choice
from .columns import ChoiceColumns, find_columns, unread_answer
from .settings import FROM_0, MultipleChoiceSettings

__all__ = ["ChoiceData", "load_choice_data"]

logger = logging.getLogger(__name__)
# The settings that name columns, and with each those that say how it is read.
COLUMNS = {
    "context_column": (),
    "question_column": ("question_blank",),
    "choices_columns": (),
    "answer_column": ("answer_format",),
}


@dataclass(frozen=True)
class ChoiceData:
    """What is trained on, evaluated and predicted.

    Attributes:
        splits: by name, those that there are of "train", "validation" and "test".
        columns: what the tables' columns are.
        answer_format: how their answers name a choice; where there are no answers, as the settings or the columns say,
            else by its number from 0.
    """

    splits: dict[str, ChoiceSplit]
    columns: ChoiceColumns
    answer_format: str


@dataclass
class Rows:
    """The rows of a split as they were read."""

    answer_column: str | None
    firsts: list[str] = field(default_factory=list)
    seconds: list[list[str]] = field(default_factory=list)
    questions: list[str | None] = field(default_factory=list)
    choices: list[list[str]] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    lines: list[int | None] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def where(self, row: int) -> str:
        """Say where an answer is: file, line, row and column."""
        return f"{row_place(self.files[row], self.lines[row], self.numbers[row])}, column {self.answer_column!r}"

    def are_answered(self, name: str) -> bool:
        """Say whether answers are known: those of a test split may be all empty, or the -1 of the Hub's."""
        found = {*self.answers}
        return self.answer_column is not None and not (
            name == "test" and (found <= {None} or (len(found) == 1 and found <= UNKNOWN))
        )

    def split(self, name: str, places: list[int] | None) -> ChoiceSplit:
        """Return the split with these right choices."""
        columns: dict[str, list] = {"text1": self.firsts, "text2": self.seconds, "choices": self.choices}
        columns |= {"question": self.questions, "index": self.numbers, "file": self.files, "line": self.lines}
        return ChoiceSplit(name, make_rows(columns | ({} if places is None else {"label": places})))


def load_choice_data(settings: MultipleChoiceSettings) -> ChoiceData:
    """Read what the settings name.

    Raises:
        OSError: if a file or the Hub's dataset cannot be read.
        ValueError: if it holds something else, lacks a column, or an answer names no choice of its row; the message
            names the file, the row and the column.
    """
    sources = read_sources(settings)
    name, source = next(iter(sources.items()))
    lost = absent_column(settings, source.first.values, "answer_column")
    settings = with_recorded_columns(settings, source.first.values, COLUMNS)
    is_test, row = name == "test", source.first
    columns = find_columns(row.values, row.names_place, settings, not is_test, not is_test or lost is None)
    blank = settings.question_blank or columns.question_blank
    read = {name: _read(name, source, columns, blank) for name, source in sources.items()}
    answered = {name: rows for name, rows in read.items() if rows.are_answered(name)}
    answer_format = settings.answer_format or columns.answer_format
    if answer_format is None:
        first = next(iter(answered.values()), None)
        answer_format = FROM_0 if first is None else answer_format_of(first.answers, first.choices, first.where)
        if first is not None:
            logger.info("all answers are read by --answer_format %s", answer_format)
    splits = {}
    for name, rows in read.items():
        places = None
        if name in answered:
            places = places_of(rows.answers, rows.choices, answer_format, rows.where)
        else:
            logger.info("%s: no answers are known: its rows are predicted and not scored", name)
        splits[name] = rows.split(name, places)
    return ChoiceData(splits, columns, answer_format)


def _read(name: str, source: Source, columns: ChoiceColumns, blank: str | None) -> Rows:
    """Read all rows of a split; a blank context or question is one, and is counted.

    Raises:
        OSError, ValueError: see `load_choice_data`.
    """
    rows = Rows(check_column(name, source, columns.answer, "--answer_column"))
    names = source.class_names(rows.answer_column)
    blanks: list[str] = []
    if known := unread_answer(source.first.values, columns):  # the model was trained with another column
        message = "%s: column %r may have answers, and is not read: --answer_column %r scores the predictions"
        logger.warning(message, name, known, known)
    for record in source.records:
        if (unread := unread_answer(record.values, columns)) not in (None, known):
            raise uneven_column(unread, source.first, record)
        context = None if columns.context is None else text_of(record, columns.context, "--context_column")
        question = None if columns.question is None else text_of(record, columns.question, "--question_column")
        choices = _choices_of(record, columns.choices)
        if any(text is not None and is_blank(text) for text in (context, question)):
            blanks.append(record.place)
        if context is None:
            rows.firsts.append(question or "")
            rows.seconds.append(choices)
            rows.questions.append(None)
        else:
            rows.questions.append(question)
            rows.firsts.append(context)
            rows.seconds.append([word_choice(question, choice, blank) for choice in choices])
        rows.choices.append(choices)
        rows.files.append(record.file)
        rows.lines.append(record.line)
        rows.numbers.append(record.number)
        rows.answers.append(_answer_of(record, rows.answer_column, names))
    if blanks:
        message = "%s: %d of %d rows have a blank context or question, which is read as it is; the first is %s"
        logger.warning(message, name, len(blanks), len(rows.numbers), blanks[0])
    return rows


def _answer_of(record: Record, column: str | None, names: Sequence[str] | None) -> str | None:
    if column is None:
        return None
    where = f"{record.place}, column {column!r}"
    value = column_value(record.values, column)
    cell = read_cell(value if names is None else named_label(value, names), None, where)
    if isinstance(cell, tuple):
        raise ValueError(f"{where}: a list of answers, {list(cell)!r:.80}, where one choice is right")
    return cell


def _choices_of(record: Record, columns: Sequence[str]) -> list[str]:
    """Return a row's choices, in their order; of columns with a choice each, the last ones may be blank.

    Raises:
        ValueError: if there are fewer than two, one is blank, or no text.
    """
    if len(columns) == 1:
        found = _listed(record, columns[0])
    else:
        found = [column_value(record.values, column) for column in columns]
        for column, value in zip(columns, found, strict=True):
            if value is None and not has_column(record, column):
                raise missing_column(record, column, "--choices_columns")
        while found and (found[-1] is None or (isinstance(found[-1], str) and is_blank(found[-1]))):
            found.pop()
    for number, choice in enumerate(found, start=1):
        if not isinstance(choice, str) or not is_unicode(choice):
            raise ValueError(f"{record.place}: choice {number} is no text but {choice!r:.60}")
        if is_blank(choice):
            raise ValueError(f"{record.place}: choice {number} of {len(found)} is blank")
    if len(found) < 2:
        raise ValueError(f"{record.place}: {len(found)} choices; there must be at least 2 to choose from")
    return found


def _listed(record: Record, column: str) -> list[Any]:
    value = column_value(record.values, column)
    if value is None and not has_column(record, column):
        raise missing_column(record, column, "--choices_columns")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, list):
        cell = column_value(record.values, column)
        raise ValueError(
            f"{record.place}: column {column!r} holds no list of choices but {cell!r:.60}: give a list in JSON, as in "
            '["yes", "no"], or name the columns that hold a choice each with --choices_columns'
        )
    return value
