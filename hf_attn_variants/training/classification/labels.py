"""Labels of tables: the kind of problem, the names of the classes, and the conversion of labels to numbers."""

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
    "compute_class_weights",
    "count_by_class",
    "format_names",
    "infer_problem_type",
    "normalized_label",
    "read_cell",
    "reject_indicators",
    "sort_class_names",
]

# The label of a row as text, a tuple of several labels, or None if the row has no label.
Cell = str | tuple[str, ...] | None
# Maps the index of a row, counted from 0, to its description for errors: file, row and column.
RowDescriber = Callable[[int], str]

DIGITS = re.compile(r"[+-]?[0-9]+")
# A whole number as Python writes it. "01" is a code, and so is a number with more digits.
WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# A number with a decimal comma, such as 2,5. The text may also hold the two labels 2 and 5.
COMMA_NUMBER = re.compile(r"[+-]?[0-9]+,[0-9]+")
# A number that is formatted for readers: "$1.50", "1,234.50", "1 234,5", "(12)", "50 %", "5 EUR".
AMOUNT = re.compile(
    r"\(?[-+]?(\d{1,3}([,' ]\d{2,3})+([.,]\d+)?|\d{1,3}(\.\d{3})+(,\d+)?|\d+([.,]\d+)?|[.,]\d+)([eE][-+]?\d+)?\)?"
)
UNITS = re.compile(r"%|‰|\b(usd|eur|gbp|jpy|chf|cny|rmb|inr|rub|rs\.?|kr\.?)(?![^\W\d_])", re.IGNORECASE)
NUMBER_ADVICE = (
    "For regression, write numbers with digits and a point, such as 1234.5, and set --problem_type regression. If "
    "they are names of classes, set --problem_type single_label_classification."
)
# With at least this many rows, labels are not classes if this share of the rows has a label of its own.
MIN_COUNTED_ROWS, MAX_UNIQUE_SHARE = 10, 0.9
# More different labels may be texts, ids or a scale. They are classes only if the user sets --problem_type.
MAX_CLASSES = 200
MAX_SHOWN_NAMES = 8
# The values of a list that indicates for each class whether a row has it.
INDICATORS = frozenset({"0", "1", "0.0", "1.0", "false", "true"})
INDICATOR_ADVICE = (
    "The label {!r:.80} seems to indicate for each class whether the row has it. Give the names of the labels instead."
)
NO_LABEL = (
    "The row has no label. If rows can have several labels or none, set --label_separator or give each row a JSON "
    "list of labels."
)


def read_cell(value: Any, separator: str | None, place: str) -> Cell:
    """Return the label of a row as text, without surrounding whitespace.

    Args:
        value: The cell: a text, or (in JSON and `datasets`) a number, a boolean, a list of these, or None.
        separator: The separator between the labels in a text. A space matches any whitespace. None: the text is one
            label.
        place: The description of the cell for errors: file, row and column.

    Raises:
        ValueError: If the cell holds another type, or if a list has an empty or a repeated label.
    """
    if value is None:
        return None
    if isinstance(value, str) and separator is not None:
        parts = value.split(None if separator == " " else separator) if value.strip() else []
        return _check_label_list([_to_label_text(part, place) for part in parts], place)
    if isinstance(value, list | tuple):
        return _check_label_list([_to_label_text(item, place) for item in value], place)
    return _to_label_text(value, place) or None


def _to_label_text(value: Any, place: str) -> str:
    """Return a single label as text, or raise ValueError."""
    if isinstance(value, str) and is_unicode(value):
        return value.strip()
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    got = "half a surrogate pair" if isinstance(value, str) else f"{value!r:.60}"
    raise ValueError(f"{place}: A label must be a text or a finite number, got {got}.")


def _check_label_list(labels: list[str], place: str) -> tuple[str, ...]:
    """Return the labels of a row as a tuple, or raise ValueError if one is empty or repeated."""
    if "" in labels:
        raise ValueError(f"{place}: Labels must not be empty, got {labels!r:.200}.")
    if repeated := [label for label, count in Counter(labels).items() if count > 1]:
        if INDICATORS.issuperset(map(str.lower, labels)):
            raise ValueError(f"{place}: {INDICATOR_ADVICE.format(labels)}")
        raise ValueError(f"{place}: The labels of a row must be different, got {repeated[0]!r} twice.")
    return tuple(labels)


def infer_problem_type(cells: Sequence[Cell], describe_row: RowDescriber) -> str:
    """Return the problem type of training rows, according to the form of their labels.

    Lists are several labels per row. Whole numbers and words are classes. Numbers of which some have a decimal point
    are a regression.

    Raises:
        ValueError: If a row has no label, if the labels have different forms, or if they may have another meaning. The
            message names the rows.
    """
    kinds = {type(cell): i for i, cell in reversed(list(enumerate(cells)))}
    if type(None) in kinds:
        raise ValueError(f"{describe_row(kinds[type(None)])}: {NO_LABEL}")
    if tuple in kinds:
        if str in kinds:
            single, several = kinds[str], kinds[tuple]
            raise ValueError(
                f"{describe_row(single)}: The label {cells[single]!r} must be a list, because {describe_row(several)} "
                "has a list. Give each row a list."
            )
        return MULTI_LABEL
    firsts = {str(cell): i for i, cell in reversed(list(enumerate(cells)))}
    words = sorted((text for text in firsts if not NUMBER.fullmatch(text)), key=firsts.__getitem__)
    numbers = sorted(firsts.keys() - words, key=firsts.__getitem__)
    _check_writing(words, numbers, firsts, describe_row)
    pointed = [text for text in numbers if not DIGITS.fullmatch(text)]
    if pointed and all(float(text).is_integer() for text in numbers):
        raise ValueError(
            f"{describe_row(firsts[pointed[0]])}: All labels are whole numbers, but {pointed[0]!r} has a decimal "
            f"point. Set --problem_type to {SINGLE_LABEL} if they are classes, or to {REGRESSION} if they are numbers "
            "on a scale."
        )
    if pointed:
        return REGRESSION
    if all(text.startswith("[") and text.endswith("]") for text in words) and words:
        raise ValueError(
            f"{describe_row(firsts[words[0]])}: The label {words[0]!r:.80} looks like a list. Write several labels as "
            "'a;b' and set --label_separator ';', or write a JSON list. If it is one label, set --problem_type "
            f"{SINGLE_LABEL}."
        )
    if len(firsts) > MAX_CLASSES or has_unique_labels(cells, firsts):
        examples = ", ".join(repr(text)[:40] for text in (words or numbers)[:3])
        raise ValueError(
            f"{describe_row(0)}: There are {len(firsts)} different labels in {len(cells)} rows, such as {examples}. "
            f"{NUMBER_ADVICE}"
        )
    return SINGLE_LABEL


def _check_writing(
    words: Sequence[str], numbers: Sequence[str], firsts: Mapping[str, int], describe_row: RowDescriber
) -> None:
    """Raise ValueError if words and numbers are mixed, or if words are numbers in another format."""
    amounts = [text for text in words if is_formatted_number(text) and not COMMA_NUMBER.fullmatch(text)]
    commas = [text for text in words if COMMA_NUMBER.fullmatch(text)]
    if amounts and len(amounts) + len(numbers) + len(commas) > len(firsts) // 2:
        raise ValueError(
            f"{describe_row(firsts[amounts[0]])}: The label {amounts[0]!r:.80} is a formatted number. {NUMBER_ADVICE}"
        )
    if words and numbers:
        word, number = firsts[words[0]], firsts[numbers[0]]
        raise ValueError(
            f"{describe_row(word)}: The label {words[0]!r} is a word, but the label {numbers[0]!r} of "
            f"{describe_row(number)} is a number. Correct one of them, or set --problem_type {SINGLE_LABEL} if both "
            "are names of classes."
        )
    if words and all(COMMA_NUMBER.fullmatch(text) for text in words):
        raise ValueError(
            f"{describe_row(firsts[words[0]])}: The label {words[0]!r:.80} contains a comma. Write numbers with a "
            "point. If these are several labels, set --label_separator ','. If they are names of classes, set "
            f"--problem_type {SINGLE_LABEL}."
        )


def is_formatted_number(text: str) -> bool:
    """Return whether a label is a number with a currency, a unit, thousands separators or a decimal comma."""
    shown = unicodedata.normalize("NFKC", text).translate({0x2212: "-", 0x2019: "'", 0x66C: ",", 0x66B: "."})
    plain = "".join(char for char in shown if unicodedata.category(char) != "Sc")
    return AMOUNT.fullmatch(re.sub(r"^([-+]) +", r"\1", UNITS.sub("", plain).strip())) is not None


def has_unique_labels(cells: Sequence[Cell], labels: Collection[str]) -> bool:
    """Return whether nearly every row has a label that no other row has. Such labels are ids, texts or a scale.

    With few rows, this is true only for numbers that are not class numbers (0 to n - 1, or 1 to n).
    """
    if len(cells) >= MIN_COUNTED_ROWS:
        return len(labels) > MAX_UNIQUE_SHARE * len(cells)
    if len(labels) < max(3, len(cells)) or not all(WHOLE.fullmatch(text) for text in labels):
        return False
    return max(map(int, labels)) - min(map(int, labels)) >= 2 * len(labels)


def reject_indicators(cells: Sequence[Cell], describe_row: RowDescriber) -> None:
    """Check that lists of labels hold names, and not one indicator per class.

    Raises:
        ValueError: If each row has the same two indicators in some order, such as [1, 0] and [0, 1]. With names, both
            rows would have both labels. Longer lists repeat an indicator, so `read_cell` raises an error for them.
    """
    rows = [cell for cell in cells if isinstance(cell, tuple)]
    indicates = all(len(row) == 2 and INDICATORS.issuperset(map(str.lower, row)) for row in rows)
    if indicates and len({frozenset(row) for row in rows}) == 1:
        raise ValueError(f"{describe_row(0)}: {INDICATOR_ADVICE.format(list(rows[0]))}")


def normalized_label(name: str) -> str:
    """Return a label in a form that is equal for labels that look alike.

    The letters are composed and casefolded, and invisible characters are removed.
    """
    shown = "".join(char for char in unicodedata.normalize("NFKC", name) if unicodedata.category(char) != "Cf")
    return shown.casefold()


def sort_class_names(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return the different class names of rows, sorted by value if they are numbers, otherwise by code points."""
    names = {name for cell in cells for name in ((cell,) if isinstance(cell, str) else cell or ())}
    if all(WHOLE.fullmatch(name) for name in names):
        return tuple(sorted(names, key=int))
    if all(NUMBER.fullmatch(name) for name in names):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))


@dataclass(frozen=True)
class LabelScheme:
    """The conversion of labels to numbers.

    Attributes:
        problem_type: The problem type of Transformers.
        names: The classes in the order of their ids. Empty for a regression.
    """

    problem_type: str
    names: tuple[str, ...]

    def encode(self, cells: Sequence[Cell], describe_row: RowDescriber) -> list[Any]:
        """Return one class id per row, one number per row, or one 0.0 or 1.0 per class and row.

        Raises:
            ValueError: If a row has no label, a label of another kind, or a label that is not a class. The message
                names the first such row.
        """
        ids = {name: i for i, name in enumerate(self.names)}
        return [self._encode_cell(cell, ids, i, describe_row) for i, cell in enumerate(cells)]

    def _encode_cell(self, cell: Cell, ids: Mapping[str, int], number: int, describe_row: RowDescriber) -> Any:
        """Return the number or numbers of a label, or raise ValueError."""
        if self.problem_type == MULTI_LABEL and isinstance(cell, tuple):
            labels = {self._get_class_id(label, ids, number, describe_row) for label in cell}
            return [float(i in labels) for i in range(len(ids))]
        if cell is None:
            raise ValueError(
                f"{describe_row(number)}: {NO_LABEL if self.problem_type == SINGLE_LABEL else 'The row has no label.'}"
            )
        if not isinstance(cell, str) or self.problem_type == MULTI_LABEL:
            got = f"the label {cell!r}" if isinstance(cell, str) else f"the list {list(cell)!r:.80}"
            rule = (
                "a list of labels. Set --label_separator or use JSON lists" if isinstance(cell, str) else "one label"
            )
            raise ValueError(
                f"{describe_row(number)}: Got {got}, but --problem_type {self.problem_type} needs {rule}."
            )
        if self.problem_type == SINGLE_LABEL:
            return self._get_class_id(cell, ids, number, describe_row)
        value = float(cell) if NUMBER.fullmatch(cell) else math.nan
        if not math.isfinite(value):
            raise ValueError(
                f"{describe_row(number)}: The label of a regression must be a finite number, got {cell!r:.80}."
            )
        return value

    def _get_class_id(self, name: str, ids: Mapping[str, int], number: int, describe_row: RowDescriber) -> int:
        """Return the id of a class, or raise ValueError."""
        if name not in ids:
            # If it looks like a known label, show its invisible and special characters as escapes.
            shown = ascii(name) if normalized_label(name) in map(normalized_label, ids) else repr(name)
            raise ValueError(
                f"{describe_row(number)}: The label must be one of {format_names(self.names)}, got {shown:.80}. "
                "These labels come from the training rows or from --labels."
            )
        return ids[name]


def format_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of further names, for a message."""
    more = f" and {len(names) - MAX_SHOWN_NAMES} more" if len(names) > MAX_SHOWN_NAMES else ""
    return ", ".join(repr(name)[:40] for name in names[:MAX_SHOWN_NAMES]) + more


def count_by_class(scheme: LabelScheme, values: Sequence[Any]) -> list[int]:
    """Return the number of rows of each class."""
    if scheme.problem_type == MULTI_LABEL:
        return [int(sum(column)) for column in zip(*values, strict=True)]
    counts = Counter(values)
    return [counts[i] for i in range(len(scheme.names))]


def compute_class_weights(
    setting: Mapping[str, Any] | str | None, scheme: LabelScheme, values: Sequence[Any]
) -> list[float] | None:
    """Return the weight of each class in the loss, or None if `setting` is None.

    Args:
        setting: "balanced", or weights by class name. The other classes have weight 1.
        scheme: The classes.
        values: The labels of the training rows as numbers.

    Returns:
        The weights. With one label per row, "balanced" gives rows / (classes * rows of the class), as scikit-learn
        does. With several labels per row, it gives rows without the label / rows with the label, the weight of
        positive examples.

    Raises:
        ValueError: If a name is not a class, or if "balanced" meets a class that no row or every row has.
    """
    if setting is None:
        return None
    if scheme.problem_type == REGRESSION:
        raise ValueError("--class_weights needs classes, but the labels are numbers (regression). Remove the flag.")
    if isinstance(setting, Mapping):
        if unknown := [name for name in setting if name not in scheme.names]:
            raise ValueError(
                f"--class_weights must name labels among {format_names(scheme.names)}, got {unknown[0]!r}."
            )
        return [float(setting.get(name, 1.0)) for name in scheme.names]
    counts, several = count_by_class(scheme, values), scheme.problem_type == MULTI_LABEL
    for name, count in zip(scheme.names, counts, strict=True):
        if count == 0 or (several and count == len(values)):
            rows = "every training row has" if count else "no training row has"
            raise ValueError(
                f"--class_weights balanced cannot be computed, because {rows} the label {name!r}. Set weights as JSON."
            )
    if several:
        return [(len(values) - count) / count for count in counts]
    return [len(values) / (len(counts) * count) for count in counts]
