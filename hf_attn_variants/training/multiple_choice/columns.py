"""Which columns of a table hold a context, a question, its choices and the answer: those named, or common names."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...text_files import column_names
from .settings import FROM_0, LETTER, MultipleChoiceSettings

__all__ = ["ChoiceColumns", "find_columns", "unread_answer"]

CONTEXTS = ("article", "context", "passage", "paragraph", "premise", "story", "sent1", "ctx")
QUESTIONS = ("question", "query", "question_stem", "stem", "sent2")
LISTS = ("options", "choices", "choices.text", "endings", "candidates", "alternatives")
# Of columns that have a choice each: ending0, choice_1, "Option A".
NUMBERED = re.compile(r"(ending|choice|option|answer|alternative|candidate)[_ -]?(\d+|[a-z])")
ANSWERS = ("answer", "label", "answerkey", "answer_key", "correct_answer", "correct", "gold")
# The columns of two data sets, by which they are known, and what their answers and blanks are.
RACE = {"article", "question", "options", "answer"}
SWAG = {"sent1", "sent2", "ending0", "ending1", "ending2", "ending3"}


@dataclass(frozen=True)
class ChoiceColumns:
    """What the columns of a table are.

    Attributes:
        context, question: None where there is none; there is one of them.
        choices: one column that has a list, or one a choice.
        answer: None where there is none, and rows are predicted alone.
        answer_format: where the columns are those of a data set that is known; else None.
        question_blank: likewise.
    """

    context: str | None
    question: str | None
    choices: tuple[str, ...]
    answer: str | None
    answer_format: str | None = None
    question_blank: str | None = None


def find_columns(
    record: dict[str, Any], place: str, settings: MultipleChoiceSettings, needs_answer: bool, finds_answer: bool = True
) -> ChoiceColumns:
    """Return the columns that the settings name, and for others those of common names; case does not count.

    Args:
        record, place: a row, and where it is.
        settings: what is named.
        needs_answer: whether a row without a column of answers is an error.
        finds_answer: False: answers are in the column that the settings name, or nowhere.

    Raises:
        ValueError: if there is none, or more than one choice; the message lists the columns that are there.
    """
    given = (settings.context_column, settings.question_column, settings.answer_column)
    taken = {name for name in (*given, *(settings.choices_columns or ())) if name is not None}
    there = _by_lower_name(record, taken)
    listed = f"its columns are {' '.join(', '.join(column_names(record)).split()) or 'none'}"

    def one(found: Iterable[str], what: str, flag: str, needed: bool) -> str | None:
        names = [there[name] for name in found if name in there]
        if len(names) > 1:
            raise ValueError(f"{place}: the {what} may be in {' or '.join(names)}; {listed}: name one with {flag}")
        if needed and not names:
            raise ValueError(f"{place}: no column is called as {what}s often are; {listed}: name one with {flag}")
        return names[0] if names else None

    choices = settings.choices_columns or _find_choices(there, place, listed)
    for name in choices:
        there.pop(name.strip().lower(), None)
    answer = settings.answer_column
    if answer is None and finds_answer:
        answer = one(ANSWERS, "answer", "--answer_column", needs_answer)
    context = settings.context_column or one(CONTEXTS, "context", "--context_column", False)
    question = settings.question_column or one(QUESTIONS, "question", "--question_column", False)
    if context is None and question is None:
        raise ValueError(
            f"{place}: no column is called as contexts or questions often are; {listed}: name one with "
            "--context_column or --question_column"
        )
    found = {name.lower() for name in (context, question, *choices, answer) if name is not None}
    # Both are known without their answers, too: test rows may have none.
    if found | {"answer"} == RACE:
        return ChoiceColumns(context, question, choices, answer, LETTER, "_")
    if found - {"label"} == SWAG:
        return ChoiceColumns(context, question, choices, answer, FROM_0)
    return ChoiceColumns(context, question, choices, answer)


def unread_answer(record: dict[str, Any], columns: ChoiceColumns) -> str | None:
    """Return a row's column that is called as answers often are, where `columns` has none; else None."""
    if columns.answer is not None:
        return None
    there = _by_lower_name(record, {columns.context or "", columns.question or "", *columns.choices})
    return next((there[name] for name in ANSWERS if name in there), None)


def _by_lower_name(record: dict[str, Any], but: set[str]) -> dict[str, str]:
    """Return the columns by their names in small letters; of two that differ in case alone, the one so written."""
    names = [name for name in column_names(record) if name not in but]
    lowered = [name.strip().lower() for name in names]
    return {low: name for low, name in zip(lowered, names, strict=True) if lowered.count(low) == 1 or name == low}


def _find_choices(there: dict[str, str], place: str, listed: str) -> tuple[str, ...]:
    found: list[tuple[str, ...]] = [(there[name],) for name in LISTS if name in there]
    families: dict[str, list[tuple[str, str]]] = {}
    for low, name in there.items():
        if match := NUMBERED.fullmatch(low):
            families.setdefault(match[1], []).append((match[2], name))
    for members in families.values():
        members.sort(key=lambda member: (member[0].isdecimal(), len(member[0]), member[0]))
        if _are_consecutive([number for number, _ in members]):
            found.append(tuple(name for _, name in members))
    if len(found) != 1:
        shown = " or ".join(", ".join(names) for names in found)
        what = f"the choices may be in {shown}" if found else "no columns are called as choices often are"
        raise ValueError(f"{place}: {what}; {listed}: name them with --choices_columns")
    return found[0]


def _are_consecutive(numbers: Sequence[str]) -> bool:
    """Say whether there are several, which count from 0, from 1 or from a."""
    if len(numbers) < 2:
        return False
    if all(number.isdecimal() for number in numbers):
        start = int(numbers[0])
        return start in (0, 1) and [int(number) for number in numbers] == [*range(start, start + len(numbers))]
    return numbers == [chr(ord("a") + i) for i in range(len(numbers))]
