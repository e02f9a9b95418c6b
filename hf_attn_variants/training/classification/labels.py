"""The labels of tables: what kind of problem they pose, what the classes are called, and each row's as numbers."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...input_files import is_unicode
from .settings import MULTI_LABEL, REGRESSION, SINGLE_LABEL

__all__ = [
    "Cell",
    "LabelScheme",
    "check_names",
    "class_weights",
    "counted",
    "listed",
    "look",
    "problem_type_of",
    "read_cell",
    "sorted_names",
]

# A row's label as text, its labels, or None where it has none.
Cell = str | tuple[str, ...] | None
# What a row's number, counted from 0, is called in an error: file, row and column.
Where = Callable[[int], str]

DIGITS = re.compile(r"[+-]?[0-9]+")
# As Python writes it: "01" is a code, and so is what has more digits.
WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# As much of Europe writes 2.5; or labels 2 and 5.
COMMA_NUMBER = re.compile(r"[+-]?[0-9]+,[0-9]+")
# A number as people write it for people: "$1.50", "1,234.50", "1 234,5", "(12)", "50 %", "5 EUR".
AMOUNT = re.compile(
    r"\(?[-+]?(\d{1,3}([,' ]\d{2,3})+([.,]\d+)?|\d{1,3}(\.\d{3})+(,\d+)?|\d+([.,]\d+)?|[.,]\d+)([eE][-+]?\d+)?\)?"
)
UNITS = re.compile(r"%|‰|\b(usd|eur|gbp|jpy|chf|cny|rmb|inr|rub|rs\.?|kr\.?)(?![^\W\d_])", re.IGNORECASE)
NUMBER_ADVICE = (
    "write numbers with digits and a point, such as 1234.5, for a regression (--problem_type regression), or give "
    "--problem_type single_label_classification if they are names of classes"
)
# From so many rows on, labels of which nearly every row has its own are not taken for classes.
ROWS_TO_COUNT, MOST_OWN_LABELS = 10, 0.9
# More different labels are classes only where somebody says so: they may be texts, ids or a scale.
MOST_CLASSES = 200
SHOWN = 8
# What stands in a list that says of each class in turn whether a row has it.
INDICATORS = frozenset({"0", "1", "0.0", "1.0", "false", "true"})
INDICATOR_ADVICE = "{!r:.80} seems to say of each class whether the row has it: give the names of those that it has"
NO_LABEL = (
    "there is no label; where rows have several, or none, say with --label_separator what divides them, or give "
    "each a list in JSON"
)


def read_cell(value: Any, separator: str | None, where: str) -> Cell:
    """Return what a table has as a row's label, as text; space around it is no part of it.

    Args:
        value: a text; of JSON and `datasets` also a number, true or false, a list of these, or None.
        separator: what divides a row's labels in a text, a space standing for any white space; None: it is one label.
        where: file, row and column.

    Raises:
        ValueError: if it is something else, or a list has an empty label or one twice.
    """
    if value is None:
        return None
    if isinstance(value, str) and separator is not None:
        parts = value.split(None if separator == " " else separator) if value.strip() else []
        return _several([_text(part, where) for part in parts], where)
    if isinstance(value, list | tuple):
        return _several([_text(each, where) for each in value], where)
    return _text(value, where) or None


def _text(value: Any, where: str) -> str:
    if isinstance(value, str) and is_unicode(value):
        return value.strip()
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    shown = "half a surrogate pair" if isinstance(value, str) else f"{value!r:.60}"
    raise ValueError(f"{where}: a label is a text or a finite number, got {shown}")


def _several(labels: list[str], where: str) -> tuple[str, ...]:
    if "" in labels:
        raise ValueError(f"{where}: one of the labels {labels!r:.200} is empty")
    if twice := [label for label, count in Counter(labels).items() if count > 1]:
        if INDICATORS.issuperset(map(str.lower, labels)):
            raise ValueError(f"{where}: {INDICATOR_ADVICE.format(labels)}")
        raise ValueError(f"{where}: the label {twice[0]!r} stands twice")
    return tuple(labels)


def problem_type_of(cells: Sequence[Cell], where: Where) -> str:
    """Say what the labels of training rows pose, by these rules.

    Lists: several labels a row. Whole numbers, and words: classes. Numbers, some with a point: a regression.

    Raises:
        ValueError: if a row has none, they are of more than one kind, or could be of another; the message names rows.
    """
    kinds = {type(cell): i for i, cell in reversed(list(enumerate(cells)))}
    if type(None) in kinds:
        raise ValueError(f"{where(kinds[type(None)])}: {NO_LABEL}")
    if tuple in kinds:
        if str in kinds:
            one, several = kinds[str], kinds[tuple]
            raise ValueError(
                f"{where(one)}: one label, {cells[one]!r}, where {where(several)} has a list: give each row a list"
            )
        return MULTI_LABEL
    firsts = {str(cell): i for i, cell in reversed(list(enumerate(cells)))}
    words = sorted((text for text in firsts if not NUMBER.fullmatch(text)), key=firsts.__getitem__)
    numbers = sorted(firsts.keys() - words, key=firsts.__getitem__)
    _check_writing(words, numbers, firsts, where)
    pointed = [text for text in numbers if not DIGITS.fullmatch(text)]
    if pointed and all(float(text).is_integer() for text in numbers):
        raise ValueError(
            f"{where(firsts[pointed[0]])}: all labels are whole numbers, and {pointed[0]!r} is written with a point: "
            f"say by --problem_type whether they are classes ({SINGLE_LABEL}) or a scale ({REGRESSION})"
        )
    if pointed:
        return REGRESSION
    if all(text.startswith("[") and text.endswith("]") for text in words) and words:
        raise ValueError(
            f"{where(firsts[words[0]])}: the label {words[0]!r:.80} looks like a list: several labels a row are "
            f"written as in 'a;b', with --label_separator ';', or as a list in JSON (or give --problem_type "
            f"{SINGLE_LABEL})"
        )
    if len(firsts) > MOST_CLASSES or has_own_labels(cells, firsts):
        shown = ", ".join(repr(text)[:40] for text in (words or numbers)[:3])
        raise ValueError(
            f"{where(0)}: there are {len(firsts)} different labels in {len(cells)} rows, such as {shown}: "
            f"{NUMBER_ADVICE}"
        )
    return SINGLE_LABEL


def _check_writing(words: Sequence[str], numbers: Sequence[str], firsts: Mapping[str, int], where: Where) -> None:
    """Raise ValueError if some labels are words and some numbers, or words are numbers in another writing."""
    amounts = [text for text in words if is_amount(text) and not COMMA_NUMBER.fullmatch(text)]
    commas = [text for text in words if COMMA_NUMBER.fullmatch(text)]
    if amounts and len(amounts) + len(numbers) + len(commas) > len(firsts) // 2:
        raise ValueError(
            f"{where(firsts[amounts[0]])}: the label {amounts[0]!r:.80} is a number that is written for readers: "
            f"{NUMBER_ADVICE}"
        )
    if words and numbers:
        word, number = firsts[words[0]], firsts[numbers[0]]
        raise ValueError(
            f"{where(word)}: the label {words[0]!r} is a word, and that of {where(number)} is the number "
            f"{numbers[0]!r}: mend one, or give --problem_type {SINGLE_LABEL} if both are names of classes"
        )
    if words and all(COMMA_NUMBER.fullmatch(text) for text in words):
        raise ValueError(
            f"{where(firsts[words[0]])}: the label {words[0]!r:.80} is written with a comma: write numbers with a "
            f"point, or give --label_separator ',' (several a row) or --problem_type {SINGLE_LABEL} (names of classes)"
        )


def is_amount(text: str) -> bool:
    """Return whether a label is a number with a currency, a unit, separators of thousands or a decimal comma."""
    shown = unicodedata.normalize("NFKC", text).translate({0x2212: "-", 0x2019: "'", 0x66C: ",", 0x66B: "."})
    plain = "".join(each for each in shown if unicodedata.category(each) != "Sc")
    return AMOUNT.fullmatch(re.sub(r"^([-+]) +", r"\1", UNITS.sub("", plain).strip())) is not None


def has_own_labels(cells: Sequence[Cell], labels: Collection[str]) -> bool:
    """Return whether nearly every row has a label that no other row has, so that they are ids, texts or a scale.

    Of a few rows, only numbers that are not those of classes, 0 to n - 1 or 1 to n, tell this.
    """
    if len(cells) >= ROWS_TO_COUNT:
        return len(labels) > MOST_OWN_LABELS * len(cells)
    if len(labels) < max(3, len(cells)) or not all(WHOLE.fullmatch(text) for text in labels):
        return False
    return max(map(int, labels)) - min(map(int, labels)) >= 2 * len(labels)


def check_names(cells: Sequence[Cell], where: Where) -> None:
    """Check that lists of labels hold names: of two classes [1, 0] and [0, 1] would give each row both.

    Raises:
        ValueError: if all say 0 or 1 of two classes; longer ones have a label twice, which `read_cell` refuses.
    """
    rows = [cell for cell in cells if isinstance(cell, tuple)]
    indicates = all(len(row) == 2 and INDICATORS.issuperset(map(str.lower, row)) for row in rows)
    if indicates and len({frozenset(row) for row in rows}) == 1:
        raise ValueError(f"{where(0)}: {INDICATOR_ADVICE.format(list(rows[0]))}")


def look(name: str) -> str:
    """Return a label as it looks: letters composed, without case and without characters that are not seen."""
    shown = "".join(each for each in unicodedata.normalize("NFKC", name) if unicodedata.category(each) != "Cf")
    return shown.casefold()


def sorted_names(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return the names of the classes that rows have: numbers by value, words by their characters' codes."""
    found = {name for cell in cells for name in ((cell,) if isinstance(cell, str) else cell or ())}
    if all(WHOLE.fullmatch(name) for name in found):
        return tuple(sorted(found, key=int))
    if all(NUMBER.fullmatch(name) for name in found):
        return tuple(sorted(found, key=lambda name: (float(name), name)))
    return tuple(sorted(found))


@dataclass(frozen=True)
class LabelScheme:
    """How labels become numbers.

    Attributes:
        problem_type: transformers' name.
        names: the classes, by their ids; none of a regression.
    """

    problem_type: str
    names: tuple[str, ...]

    def values(self, cells: Sequence[Cell], where: Where) -> list[Any]:
        """Return class ids, a number each, or one 0.0 or 1.0 a class.

        Raises:
            ValueError: if a row has no label, one that is of another kind, or one that is no class; the message names
                the first such row.
        """
        ids = {name: i for i, name in enumerate(self.names)}
        return [self._value(cell, ids, i, where) for i, cell in enumerate(cells)]

    def _value(self, cell: Cell, ids: Mapping[str, int], number: int, where: Where) -> Any:
        if self.problem_type == MULTI_LABEL and isinstance(cell, tuple):
            labels = {self._id(label, ids, number, where) for label in cell}
            return [float(i in labels) for i in range(len(ids))]
        if cell is None:
            raise ValueError(
                f"{where(number)}: {NO_LABEL if self.problem_type == SINGLE_LABEL else 'there is no label'}"
            )
        if not isinstance(cell, str) or self.problem_type == MULTI_LABEL:
            found = f"one label, {cell!r}" if isinstance(cell, str) else f"a list of labels, {list(cell)!r:.80}"
            wanted = "several, by --label_separator or as a list in JSON" if isinstance(cell, str) else "one"
            raise ValueError(f"{where(number)}: {found}, where the problem type {self.problem_type} has {wanted}")
        if self.problem_type == SINGLE_LABEL:
            return self._id(cell, ids, number, where)
        value = float(cell) if NUMBER.fullmatch(cell) else math.nan
        if not math.isfinite(value):
            raise ValueError(f"{where(number)}: the label {cell!r:.80} is no finite number, as a regression's is")
        return value

    def _id(self, name: str, ids: Mapping[str, int], number: int, where: Where) -> int:
        if name not in ids:
            # One that only looks like a class is shown by its characters' codes.
            shown = ascii(name) if look(name) in map(look, ids) else repr(name)
            raise ValueError(
                f"{where(number)}: the label {shown:.80} is none of {listed(self.names)}: these are the model's, "
                "which are those of the training rows, or of --labels"
            )
        return ids[name]


def listed(names: Sequence[str]) -> str:
    """Return the first names as a message shows them, and how many there are beside."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(repr(name)[:40] for name in names[:SHOWN]) + more


def counted(scheme: LabelScheme, values: Sequence[Any]) -> list[int]:
    """Return how many of the rows with these values have each class."""
    if scheme.problem_type == MULTI_LABEL:
        return [int(sum(column)) for column in zip(*values, strict=True)]
    found = Counter(values)
    return [found[i] for i in range(len(scheme.names))]


def class_weights(
    given: Mapping[str, Any] | str | None, scheme: LabelScheme, values: Sequence[Any]
) -> list[float] | None:
    """Return the weight of each class in the loss; None where none are given.

    Args:
        given: "balanced", or weights by name; other classes weigh 1.
        scheme: the classes.
        values: those of the training rows.

    Returns:
        Balanced, of one label a row: rows / (classes * rows of the class), as scikit-learn's; of several labels a row,
        what having the label weighs: rows without it / rows with it.

    Raises:
        ValueError: if a name is no class, or a class to be balanced has no row, or all.
    """
    if given is None:
        return None
    if scheme.problem_type == REGRESSION:
        raise ValueError("--class_weights are for classes, and the labels are numbers on a scale (regression)")
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in scheme.names]:
            raise ValueError(f"--class_weights: {unknown[0]!r} is none of {listed(scheme.names)}")
        return [float(given.get(name, 1.0)) for name in scheme.names]
    counts, several = counted(scheme, values), scheme.problem_type == MULTI_LABEL
    for name, count in zip(scheme.names, counts, strict=True):
        if count == 0 or (several and count == len(values)):
            rows = "every training row has" if count else "no training row has"
            raise ValueError(f"--class_weights balanced: {rows} the label {name!r}: give its weight as JSON")
    if several:
        return [(len(values) - count) / count for count in counts]
    return [len(values) / (len(counts) * count) for count in counts]
