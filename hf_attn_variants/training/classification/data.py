"""Reads texts and labels from tables and from the `datasets` library, and interprets the columns and labels."""

import hashlib
import json
import logging
import math
import re
import unicodedata
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Self

from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...files import is_blank, is_unicode
from ...text_files import (
    TableRow,
    check_unused_column,
    describe_row_location,
    get_column_text,
    get_column_value,
    list_column_names,
)
from ..engine.dataset_splits import (
    UNKNOWN_LABELS,
    DatasetSplit,
    fill_in_training_columns,
    find_missing_training_column,
    map_class_ids_to_names,
    read_splits,
    resolve_label_column,
)
from . import DEFAULT_THRESHOLD, MULTI_LABEL, REGRESSION, SINGLE_LABEL, ClassificationSettings

# The label of a row as text, a tuple of several labels, or None if the row has no label.
Cell = str | tuple[str, ...] | None
# Maps the index of a row, counted from 0, to its description (file, row and column) in error messages.
RowDescriber = Callable[[int], str]

DIGITS_PATTERN = re.compile(r"[+-]?[0-9]+")
# A whole number as Python formats it. "01" and numbers with more than 18 digits are treated as codes.
INTEGER_PATTERN = re.compile(r"0|-?[1-9][0-9]{0,17}")
NUMBER_PATTERN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# A number with a decimal comma, such as 2,5. The text may also contain the two labels 2 and 5.
COMMA_NUMBER_PATTERN = re.compile(r"[+-]?[0-9]+,[0-9]+")
# A number formatted for human readers, such as "$1.50", "1,234.50", "1 234,5", "(12)", "50 %" or "5 EUR".
AMOUNT_PATTERN = re.compile(
    r"\(?[-+]?(\d{1,3}([,' ]\d{2,3})+([.,]\d+)?|\d{1,3}(\.\d{3})+(,\d+)?|\d+([.,]\d+)?|[.,]\d+)([eE][-+]?\d+)?\)?"
)
UNITS_PATTERN = re.compile(r"%|‰|\b(usd|eur|gbp|jpy|chf|cny|rmb|inr|rub|rs\.?|kr\.?)(?![^\W\d_])", re.IGNORECASE)
# A number with a denominator or a unit of measurement, such as "4.5/5" or "12 kg". Class names often contain
# other units, such as "stars" or "k".
MEASUREMENT_PATTERN = re.compile(
    r"[-+]?(\d+([.,]\d+)?|[.,]\d+)\s*(?P<unit>/\s*\d+|kg|mg|km|cm|mm|ml|lbs?|oz|°[CF])", re.IGNORECASE
)
# The minimum number of different measurements. Fewer labels may be classes.
MIN_MEASUREMENTS = 3
NUMBER_ADVICE = (
    "For regression, write numbers with digits and a decimal point, such as 1234.5, and set --problem_type "
    "regression. If they are class names, set --problem_type single_label_classification."
)
# If there are at least this many rows and the number of distinct labels exceeds this share of the rows, the labels do
# not represent classes.
MIN_COUNTED_ROWS, MAX_UNIQUE_SHARE = 10, 0.9
# If there are more distinct labels than this, they may be texts, ids or values on a scale. They are treated as classes
# only if --problem_type is set.
MAX_CLASSES = 200
MAX_SHOWN_NAMES = 8
# The values in a list that indicates for each class whether the row belongs to that class.
INDICATORS = frozenset({"0", "1", "0.0", "1.0", "false", "true"})
INDICATOR_ADVICE = "The label {!r:.80} seems to contain one indicator per class. Provide label names instead."
MISSING_LABEL_MESSAGE = (
    "The row has no label. If rows can have several labels or none, set --label_separator or provide a JSON list of "
    "labels for each row."
)


def parse_label_cell(value: Any, separator: str | None, location: str) -> Cell:
    """Return the label or labels in a table cell as text, without surrounding whitespace.

    Args:
        value: The content of the cell, which is text. In JSON and `datasets`, it can also be a number, a boolean, a
            list of these values, or None.
        separator: The separator between the labels in a text. A space matches any whitespace. If None, the text is a
            single label.
        location: The location of the cell (file, row and column) for error messages.

    Raises:
        ValueError: If the content has another type, or if a list contains an empty or repeated label.
    """
    if value is None:
        return None
    if isinstance(value, str) and separator is not None:
        parts = value.split(None if separator == " " else separator) if value.strip() else []
        return _check_label_list([_to_label_text(part, location) for part in parts], location)
    if isinstance(value, list | tuple):
        return _check_label_list([_to_label_text(item, location) for item in value], location)
    return _to_label_text(value, location) or None


def _to_label_text(value: Any, location: str) -> str:
    """Convert a single label to text."""
    if isinstance(value, str) and is_unicode(value):
        return value.strip()
    if isinstance(value, bool | int) or (isinstance(value, float | Decimal) and math.isfinite(value)):
        return str(value)
    invalid_value = "an incomplete surrogate pair" if isinstance(value, str) else f"{value!r:.60}"
    raise ValueError(f"{location}: A label must be text or a finite number, got {invalid_value}.")


def _check_label_list(labels: list[str], location: str) -> tuple[str, ...]:
    """Check that no label in a row is empty or repeated, and return the labels as a tuple."""
    if "" in labels:
        raise ValueError(f"{location}: Labels must not be empty, got {labels!r:.200}.")
    if repeated := [label for label, count in Counter(labels).items() if count > 1]:
        if INDICATORS.issuperset(map(str.lower, labels)):
            raise ValueError(f"{location}: {INDICATOR_ADVICE.format(labels)}")
        raise ValueError(f"{location}: The labels in a row must be distinct, got {repeated[0]!r} twice.")
    return tuple(labels)


def infer_problem_type(cells: Sequence[Cell], describe_row: RowDescriber) -> str:
    """Infer the problem type from the format of the training labels.

    Lists of labels indicate multi-label classification. Words and whole numbers indicate single-label classification.
    If some numbers have a decimal point, the labels indicate regression.

    Raises:
        ValueError: If a row has no label, if the labels have different formats, or if their meaning is ambiguous. The
            message names an affected row.
    """
    kinds = {type(cell): i for i, cell in reversed(list(enumerate(cells)))}
    if type(None) in kinds:
        raise ValueError(f"{describe_row(kinds[type(None)])}: {MISSING_LABEL_MESSAGE}")
    if tuple in kinds:
        if str in kinds:
            single, multiple = kinds[str], kinds[tuple]
            raise ValueError(
                f"{describe_row(single)}: The label {cells[single]!r} must be a list because {describe_row(multiple)} "
                "has a list. Use a list in every row."
            )
        return MULTI_LABEL
    first_rows = {str(cell): i for i, cell in reversed(list(enumerate(cells)))}
    words = sorted((text for text in first_rows if not NUMBER_PATTERN.fullmatch(text)), key=first_rows.__getitem__)
    numbers = sorted(first_rows.keys() - words, key=first_rows.__getitem__)
    if (ambiguous := _find_ambiguous_label(words, numbers)) is not None:
        label, problem = ambiguous
        raise ValueError(f"{describe_row(first_rows[label])}: The label {label!r:.80} {problem}")
    if not all(DIGITS_PATTERN.fullmatch(text) for text in numbers):
        return REGRESSION
    if len(first_rows) > MAX_CLASSES or has_mostly_unique_labels(cells, first_rows):
        examples = ", ".join(repr(text)[:40] for text in (words or numbers)[:3])
        raise ValueError(
            f"{describe_row(0)}: There are {len(first_rows)} different labels in {len(cells)} rows, such as "
            f"{examples}. {NUMBER_ADVICE}"
        )
    return SINGLE_LABEL


def _find_ambiguous_label(words: Sequence[str], numbers: Sequence[str]) -> tuple[str, str] | None:
    """Return a label whose meaning is ambiguous and a description of the problem, or None if there is no such label.

    Args:
        words: The distinct labels that are not numbers.
        numbers: The distinct labels that are numbers.
    """
    commas = [text for text in words if COMMA_NUMBER_PATTERN.fullmatch(text)]
    amounts = [text for text in words if is_formatted_number(text) and not COMMA_NUMBER_PATTERN.fullmatch(text)]
    decimal_numbers = [text for text in numbers if not DIGITS_PATTERN.fullmatch(text)]
    if amounts and len(amounts) + len(numbers) + len(commas) > (len(words) + len(numbers)) // 2:
        return amounts[0], f"is a formatted number. {NUMBER_ADVICE}"
    if words and not numbers and are_measurements(words):
        return words[0], f"is a number with a denominator or a unit. {NUMBER_ADVICE}"
    if words and numbers:
        return words[0], (
            f"is a word, but the label {numbers[0]!r} is a number. Correct one of them, or set --problem_type "
            f"{SINGLE_LABEL} if both are class names."
        )
    if words and len(commas) == len(words):
        return words[0], (
            "contains a comma. Write numbers with a decimal point. If these are several labels, set --label_separator "
            f"','. If they are class names, set --problem_type {SINGLE_LABEL}."
        )
    if decimal_numbers and all(float(text).is_integer() for text in numbers):
        return decimal_numbers[0], (
            "is written with a decimal point or an exponent, but all labels are whole numbers. Set --problem_type to "
            f"{SINGLE_LABEL} if they are classes, or to {REGRESSION} if they are numbers on a scale."
        )
    if words and all(text.startswith("[") and text.endswith("]") for text in words):
        return words[0], (
            "looks like a list. Write several labels as 'a;b' and set --label_separator ';', or use a JSON list. If "
            f"it is a single label, set --problem_type {SINGLE_LABEL}."
        )
    return None


def is_formatted_number(text: str) -> bool:
    """Return whether a label is a number with a currency, a unit, thousands separators or a decimal comma."""
    normalized_text = unicodedata.normalize("NFKC", text).translate({0x2212: "-", 0x2019: "'", 0x66C: ",", 0x66B: "."})
    plain = "".join(char for char in normalized_text if unicodedata.category(char) != "Sc")
    return AMOUNT_PATTERN.fullmatch(re.sub(r"^([-+]) +", r"\1", UNITS_PATTERN.sub("", plain).strip())) is not None


def are_measurements(labels: Sequence[str]) -> bool:
    """Return whether distinct labels are at least `MIN_MEASUREMENTS` numbers with the same denominator or unit."""
    matches = [MEASUREMENT_PATTERN.fullmatch(label) for label in labels]
    units = {None if match is None else match["unit"].lower() for match in matches}
    return len(labels) >= MIN_MEASUREMENTS and len(units) == 1 and None not in units


def has_mostly_unique_labels(cells: Sequence[Cell], labels: Collection[str]) -> bool:
    """Return whether nearly every row has a unique label. Such labels are ids, texts or values on a scale.

    If there are fewer than `MIN_COUNTED_ROWS` rows, return True only if all labels are distinct whole numbers that are
    too far apart to be class ids (0 to n - 1, or 1 to n).
    """
    if len(cells) >= MIN_COUNTED_ROWS:
        return len(labels) > MAX_UNIQUE_SHARE * len(cells)
    if len(labels) < max(3, len(cells)) or not all(INTEGER_PATTERN.fullmatch(text) for text in labels):
        return False
    return max(map(int, labels)) - min(map(int, labels)) >= 2 * len(labels)


def check_no_class_indicators(cells: Sequence[Cell], describe_row: RowDescriber) -> None:
    """Check that lists of labels contain names instead of one indicator per class.

    Only lists of two labels are checked. Longer lists of indicators contain a repeated value, for which
    `parse_label_cell` raises an error.

    Raises:
        ValueError: If all rows contain the same two indicators in any order, such as [1, 0] and [0, 1]. If they were
            read as names, every row would have both labels.
    """
    rows = [cell for cell in cells if isinstance(cell, tuple)]
    are_indicators = all(len(row) == 2 and INDICATORS.issuperset(map(str.lower, row)) for row in rows)
    if are_indicators and len({frozenset(row) for row in rows}) == 1:
        raise ValueError(f"{describe_row(0)}: {INDICATOR_ADVICE.format(list(rows[0]))}")


def collect_class_names(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return the distinct class names, sorted by value if they are numbers and otherwise by code point."""
    names = {name for cell in cells for name in ((cell,) if isinstance(cell, str) else cell or ())}
    if all(INTEGER_PATTERN.fullmatch(name) for name in names):
        return tuple(sorted(names, key=int))
    if all(NUMBER_PATTERN.fullmatch(name) for name in names):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))


@dataclass(frozen=True)
class LabelScheme:
    """Converts labels to numbers.

    Attributes:
        problem_type: The problem type, as in Transformers.
        names: The classes in the order of their ids. Empty for regression.
    """

    problem_type: str
    names: tuple[str, ...]

    def encode(self, cells: Sequence[Cell], describe_row: RowDescriber) -> list[Any]:
        """Convert the labels of all rows to numbers.

        Returns:
            For each row, a class id, a number (for regression), or a list with 0.0 or 1.0 for each class (for
            multi-label classification).

        Raises:
            ValueError: If a row has no label, a label of the wrong type, or an unknown class. The message names the
                first such row.
        """
        ids = {name: i for i, name in enumerate(self.names)}
        values = []
        for i, cell in enumerate(cells):
            try:
                values.append(self._encode_cell(cell, ids))
            except ValueError as error:
                raise ValueError(f"{describe_row(i)}: {error}") from None
        return values

    def _encode_cell(self, cell: Cell, class_ids: Mapping[str, int]) -> Any:
        """Convert the label or labels of a row to a number or a list of numbers."""
        kind = self.problem_type
        if cell is None:
            raise ValueError(MISSING_LABEL_MESSAGE if kind == SINGLE_LABEL else "The row has no label.")
        if kind == MULTI_LABEL:
            if isinstance(cell, str):
                raise ValueError(
                    f"Got the label {cell!r}, but --problem_type {kind} requires a list of labels. Set "
                    "--label_separator or use JSON lists."
                )
            labels = {self._get_class_id(label, class_ids) for label in cell}
            return [float(i in labels) for i in range(len(class_ids))]
        if not isinstance(cell, str):
            raise ValueError(f"Got the list {list(cell)!r:.80}, but --problem_type {kind} requires one label.")
        if kind == SINGLE_LABEL:
            return self._get_class_id(cell, class_ids)
        value = float(cell) if NUMBER_PATTERN.fullmatch(cell) else math.nan
        if not math.isfinite(value):
            raise ValueError(f"A regression label must be a finite number, got {cell!r:.80}.")
        return value

    def _get_class_id(self, name: str, class_ids: Mapping[str, int]) -> int:
        """Return the id of a class, or raise `ValueError` if the class is unknown."""
        if name not in class_ids:
            raise ValueError(
                f"The label must be one of {format_names(self.names)}, got {name!r:.80}. These labels come from the "
                "training rows or from --labels."
            )
        return class_ids[name]


def format_names(names: Sequence[str]) -> str:
    """Format the first names and the number of remaining names for a message."""
    more = f" and {len(names) - MAX_SHOWN_NAMES} more" if len(names) > MAX_SHOWN_NAMES else ""
    return ", ".join(repr(name)[:40] for name in names[:MAX_SHOWN_NAMES]) + more


def count_rows_by_class(scheme: LabelScheme, encoded_labels: Sequence[Any]) -> list[int]:
    """Count the rows in each class.

    Args:
        scheme: The classes.
        encoded_labels: The encoded labels, as returned by `LabelScheme.encode`.
    """
    if scheme.problem_type == MULTI_LABEL:
        return [int(sum(column)) for column in zip(*encoded_labels, strict=True)]
    counts = Counter(encoded_labels)
    return [counts[i] for i in range(len(scheme.names))]


def compute_class_weights(
    class_weights: Mapping[str, Any] | str | None, scheme: LabelScheme, encoded_labels: Sequence[Any]
) -> list[float] | None:
    """Return the weight of each class in the loss, or None if `class_weights` is None.

    Args:
        class_weights: "balanced", or weights by class name. All other classes have weight 1.
        scheme: The classes.
        encoded_labels: The labels of the training rows, as numbers.

    Returns:
        The weights in the order of the class names. With one label per row, "balanced" sets the weight of a class to
        num_rows / (num_classes * num_rows_in_class), as in scikit-learn. With several labels per row, "balanced" sets
        the weight of a label's positive examples to num_rows_without_label / num_rows_with_label.

    Raises:
        ValueError: If a name is not a class, or if the balanced weights are undefined because a label occurs in no row
            or, with several labels per row, in every row.
    """
    if class_weights is None or scheme.problem_type == REGRESSION:
        return None
    if isinstance(class_weights, Mapping):
        if unknown := [name for name in class_weights if name not in scheme.names]:
            known_names = format_names(scheme.names)
            raise ValueError(f"--class_weights contains the unknown label {unknown[0]!r}. Use only {known_names}.")
        return [float(class_weights.get(name, 1.0)) for name in scheme.names]
    counts, is_multi_label = count_rows_by_class(scheme, encoded_labels), scheme.problem_type == MULTI_LABEL
    for name, count in zip(scheme.names, counts, strict=True):
        if count == 0 or (is_multi_label and count == len(encoded_labels)):
            rows = "every training row has" if count else "no training row has"
            raise ValueError(
                f"--class_weights balanced cannot be computed because {rows} the label {name!r}. Set the weights as "
                "JSON."
            )
    if is_multi_label:
        return [(len(encoded_labels) - count) / count for count in counts]
    return [len(encoded_labels) / (len(counts) * count) for count in counts]


logger = logging.getLogger(__name__)

# Common names of columns that contain pairs of texts, single texts, and labels. Names in the first tuple of
# LABEL_COLUMNS take precedence over those in the second.
PAIR_COLUMNS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("text", "text_pair"),
    ("question", "sentence"),
)
TEXT_COLUMNS = ("text", "sentence", "content", "document", "review", "comment", "tweet", "body")
LABEL_COLUMNS = (
    ("label", "labels"),
    ("class", "category", "target", "score", "rating", "stars", "sentiment", "intent", "topic"),
)


def find_text_columns(record: dict[str, Any], location: str, label_column: str | None = None) -> tuple[str, ...]:
    """Find the text column, or the two columns of a text pair, by their common names, ignoring case.

    Args:
        record: The row, which maps column names to values.
        location: The description of the row in error messages, such as "t.csv, row 1".
        label_column: The label column, which cannot be a text column.

    Raises:
        ValueError: If no column matches or the choice is ambiguous. The message lists the columns.
    """
    columns = _map_lowercase_names(record, label_column)
    pairs = [pair for pair in PAIR_COLUMNS if all(name in columns for name in pair)]
    in_pairs = {name for pair in pairs for name in pair}
    single_columns = [(name,) for name in TEXT_COLUMNS if name in columns and name not in in_pairs]
    candidates = [*pairs, *single_columns]
    if len(candidates) != 1:
        choices = " or ".join(" and ".join(columns[name] for name in names) for names in candidates)
        problem = f"The texts may be in {choices}" if candidates else "No column has a common name for texts"
        raise ValueError(
            f"{location}: {problem}; {_describe_columns(record)}. Set --text_columns to one column, or to two for "
            f"pairs."
        )
    return tuple(columns[name] for name in candidates[0])


def find_label_column(
    record: dict[str, Any], location: str, text_columns: Sequence[str], required: bool = True
) -> str | None:
    """Find the label column by its common names, ignoring case.

    Args:
        record: The row, which maps column names to values.
        location: The description of the row in error messages.
        text_columns: The text columns, which cannot be the label column.
        required: Whether to raise an error instead of returning None if no column matches.

    Raises:
        ValueError: If the choice is ambiguous, or if no column matches and `required` is True. The message lists the
            columns.
    """
    columns = _map_lowercase_names(record, *text_columns)
    candidates: list[str] = []
    for names in LABEL_COLUMNS:
        candidates = candidates or [columns[name] for name in names if name in columns]
    if len(candidates) == 1:
        return candidates[0]
    if not candidates and not required:
        return None
    choices = " or ".join(candidates)
    problem = f"The labels may be in {choices}" if candidates else "No column has a common name for labels"
    raise ValueError(f"{location}: {problem}; {_describe_columns(record)}. Set --label_column.")


def _map_lowercase_names(record: dict[str, Any], *excluded: str | None) -> dict[str, str]:
    """Map the lowercase form of each column name to the column name.

    If several column names differ only in case, only the lowercase one is included.
    """
    names = [str(name) for name in record if name not in excluded]
    lowered = [name.strip().lower() for name in names]
    return {low: name for low, name in zip(lowered, names, strict=True) if lowered.count(low) == 1 or name == low}


def _describe_columns(record: dict[str, Any]) -> str:
    """Return a clause that lists the columns of a row, for messages."""
    return f"the columns are {' '.join(', '.join(list_column_names(record)).split()) or 'none'}"


@dataclass
class ClassificationSplit:
    """The rows of one split.

    Attributes:
        name: The name of the split on the Hub: "train", "validation_matched", "test", ...
        data: A dataset with the columns `text1`, `text2` (only for pairs), `label` (if there are labels) and `index`,
            which is the row number (for GLUE, the number in the submission). Datasets from user-provided tables also
            have the columns `file` and `line`.
    """

    name: str
    data: Dataset

    def __len__(self) -> int:
        return len(self.data)

    def take(self, count: int | None) -> Self:
        """Return a split that contains the first `count` rows, or all rows if `count` is None."""
        return self if count is None else replace(self, data=self.data.take(min(count, len(self.data))))

    def describe_row(self, row_index: int) -> str:
        """Describe the location of a row for messages. The number of the row is counted from 0."""
        names = [name for name in ("file", "line", "index") if name in self.data.column_names]
        row = self.data.select_columns(names)[row_index]
        return describe_row_location(row.get("file", self.name), row.get("line"), row.get("index", row_index))


def make_in_memory_dataset(columns: dict[str, list]) -> Dataset:
    """Create an in-memory dataset from columns of equal length.

    `Dataset.from_dict` is not used because it does not set a fingerprint, so `datasets` would hash the table with
    dill. This fails if pyarrow is installed in a folder that is not named site-packages.
    """
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint=uuid.uuid4().hex)


def hash_rows(split: ClassificationSplit, chunk_size: int = 10_000) -> str:
    """Return a short hash of the texts and labels in a split. The hash depends on the order of the rows."""
    columns = [name for name in ("text1", "text2", "label") if name in split.data.column_names]
    data = split.data.select_columns(columns)
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(data), chunk_size):
        rows = data[start : start + chunk_size]
        digest.update(json.dumps([rows[name] for name in columns]).encode())
    return digest.hexdigest()


def tokenize_split(split: ClassificationSplit, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Tokenize a split, truncating the longer text of a pair first. Padding is added later for each batch.

    Returns:
        A dataset with the tokenizer outputs as columns (lists of integers), the column `label` if there are labels,
        and the column `length` (in tokens).
    """
    pair = "text2" in split.data.column_names

    def encode(rows: dict) -> dict:
        texts = (rows["text1"], rows["text2"]) if pair else (rows["text1"],)
        encoded = dict(tokenizer(*texts, truncation=True, max_length=max_length, padding=False))
        encoded["length"] = [len(ids) for ids in encoded["input_ids"]]
        return encoded

    unused = [name for name in split.data.column_names if name != "label"]
    # With the full name of the split, the progress bar would not fit into 80 columns.
    description = f"{split.name.replace('validation', 'dev')} tokens"
    data = split.data.map(encode, batched=True, remove_columns=unused, desc=description)
    if num_truncated := sum(length == max_length for length in data["length"]):
        message = "%s: %d of %d examples have --max_length %d tokens and may have been truncated."
        logger.info(message, split.name, num_truncated, len(data), max_length)
    return data


@dataclass(frozen=True)
class ClassificationData:
    """The splits of a run and the meaning of their labels.

    Attributes:
        splits: Maps "train", "validation" and "test" to the splits. Splits that do not exist are omitted.
        scheme: The label scheme, which contains the problem type and the class names.
        text_columns: The name of the text column, or two names for pairs.
        label_column: The column that contains the labels, or None if the run only predicts labels for unlabeled texts.
        label_separator: The separator between several labels in a row, or None if each cell is a single label.
        threshold: In multi-label classification, labels with a probability above this threshold are predicted.
    """

    splits: dict[str, ClassificationSplit]
    scheme: LabelScheme
    text_columns: tuple[str, ...]
    label_column: str | None
    label_separator: str | None
    threshold: float


@dataclass
class UnencodedSplit:
    """The rows of a split before their labels are converted to numbers.

    Attributes:
        label_column: The column that contains the labels, or None if there are no labels.
        columns: The columns of `ClassificationSplit.data`, except `label`.
        cells: The label or labels of each row as text.
    """

    label_column: str | None
    columns: dict[str, list] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)

    def describe_row(self, row_index: int) -> str:
        """Describe the location of a row's label (file, line, row and column) for messages."""
        file, line, number = (self.columns[name][row_index] for name in ("file", "line", "index"))
        return f"{describe_row_location(file, line, number)}, column {self.label_column!r}"

    def split(self, name: str, encoded_labels: list[Any] | None) -> ClassificationSplit:
        """Create a split from the rows. If `encoded_labels` is None, it has no labels."""
        labels = {} if encoded_labels is None else {"label": encoded_labels}
        return ClassificationSplit(name, make_in_memory_dataset(self.columns | labels))


def _read_rows(
    name: str,
    source: DatasetSplit,
    text_columns: Sequence[str],
    label_column: str | None,
    separator: str | None,
) -> UnencodedSplit:
    """Read all rows of a split. Rows with a blank text are kept, and a warning is logged.

    Raises:
        OSError, ValueError: See `load_classification_data`.
    """
    rows = UnencodedSplit(label_column)
    names = source.get_class_names(label_column)
    blank: list[str] = []
    for record in source.records:
        texts = [get_column_text(record, column, "--text_columns") for column in text_columns]
        if any(map(is_blank, texts)):
            blank.append(record.place)
        values: dict[str, Any] = {f"text{i + 1}": text for i, text in enumerate(texts)}
        values |= {"index": record.number, "file": record.file, "line": record.line}
        for column, value in values.items():
            rows.columns.setdefault(column, []).append(value)
        if label_column is not None:
            value = get_column_value(record.values, label_column)
            value = value if names is None else map_class_ids_to_names(value, names)
            rows.cells.append(parse_label_cell(value, separator, f"{record.place}, column {label_column!r}"))
    if blank:
        message = "%s: %d of %d rows have a blank text. The model reads it unchanged. The first such row is %s."
        logger.warning(message, name, len(blank), len(rows.columns["index"]), blank[0])
    return rows


def load_classification_data(settings: ClassificationSettings, config: PreTrainedConfig) -> ClassificationData:
    """Read the splits specified in the settings, and determine the meaning of their labels.

    Args:
        settings: The settings of the run.
        config: The configuration of the checkpoint. Its labels are used if the run only evaluates.

    Raises:
        OSError: If a file or a Hub dataset cannot be read.
        ValueError: If a file has invalid content or lacks a column, or if the labels have different types. The message
            names the file, the row and the column.
    """
    sources = read_splits(settings)
    first = next(iter(sources.values())).first
    columns = {"text_columns": (), "label_column": ("label_separator",)}
    absent_label_column = find_missing_training_column(settings, first.values, "label_column")
    settings = fill_in_training_columns(settings, first.values, columns, ("threshold",))
    label_column = settings.label_column
    text_columns = settings.text_columns or find_text_columns(first.values, first.header_location, label_column)
    only_test = next(iter(sources)) == "test"
    if label_column is None and not (only_test and absent_label_column is not None):
        label_column = find_label_column(first.values, first.header_location, text_columns, required=not only_test)
    read = {}
    for name, source in sources.items():
        if settings.text_columns is None and len(text_columns) == 1:
            source.records = _check_second_texts(text_columns[0], label_column, source.records)
        column = resolve_label_column(name, source, label_column, "--label_column")
        read[name] = _read_rows(name, source, text_columns, column, settings.label_separator)
    if settings.only_evaluates:
        names_by_split = (source.get_class_names(label_column) for source in sources.values())
        class_names = next((names for names in names_by_split if names), None)
        scheme = _infer_checkpoint_scheme(settings, config, class_names)
    else:
        scheme = _infer_training_scheme(settings, read["train"], sources["train"].get_class_names(label_column))
    values: dict[str, list[Any] | None] = {}
    for name, rows in read.items():
        if rows.label_column is None or (name == "test" and _is_unlabeled(rows.cells, scheme)):
            logger.info("%s: There are no labels, so the rows are predicted but not scored.", name)
            values[name] = None
        else:
            values[name] = scheme.encode(rows.cells, rows.describe_row)
    _log_label_counts(scheme, values.get("train") or [])
    splits = {name: rows.split(name, values[name]) for name, rows in read.items()}
    threshold = DEFAULT_THRESHOLD if settings.threshold is None else settings.threshold
    return ClassificationData(splits, scheme, text_columns, label_column, settings.label_separator, threshold)


def _check_second_texts(text_column: str, label_column: str | None, records: Iterator[TableRow]) -> Iterator[TableRow]:
    """Yield the rows. If the first row has a single text, no other row may have the second text of a pair."""
    name = text_column.strip().lower()
    others = {other for pair in PAIR_COLUMNS if name in pair for other in pair} - {name}
    for record in records:
        for column in record.values:
            if column != label_column and column.strip().lower() in others:
                check_unused_column(record.values, column, record.place)
        yield record


def _is_unlabeled(cells: Sequence[Cell], scheme: LabelScheme) -> bool:
    """Return whether the labels of a test split are unknown.

    Labels are unknown if all of them are empty, or if all of them are -1, as in datasets on the Hub.
    """
    distinct = set(cells)
    return distinct <= {None, ()} or (
        len(distinct) == 1 and distinct <= UNKNOWN_LABELS and not distinct & {*scheme.names}
    )


def _infer_training_scheme(
    settings: ClassificationSettings, rows: UnencodedSplit, class_names: Sequence[str] | None
) -> LabelScheme:
    """Infer the label scheme of a training run from the settings and the training rows."""
    kind = settings.problem_type
    if kind is None and class_names is not None:
        kind = MULTI_LABEL if any(isinstance(cell, tuple) for cell in rows.cells) else SINGLE_LABEL
    kind = kind or infer_problem_type(rows.cells, rows.describe_row)
    if kind == MULTI_LABEL:
        check_no_class_indicators(rows.cells, rows.describe_row)
    if kind == REGRESSION:
        return LabelScheme(kind, ())
    names = tuple(settings.labels or class_names or collect_class_names(rows.cells))
    if len(names) < 1 + (kind == SINGLE_LABEL):
        problem = f"Every training row has the label {names[0]!r}" if names else "No training row has a label"
        raise ValueError(f"{rows.describe_row(0)}: {problem}. Provide training rows with different labels.")
    return LabelScheme(kind, names)


def _infer_checkpoint_scheme(
    settings: ClassificationSettings, config: PreTrainedConfig, class_names: Sequence[str] | None
) -> LabelScheme:
    """Infer the label scheme from the settings and the checkpoint, for a run that only evaluates."""
    model_name: Any = settings.model_name_or_path
    id2label: Any = config.id2label or {}
    names = tuple(str(id2label[i]) for i in sorted(id2label))
    kind = settings.problem_type or config.problem_type
    if kind is None:
        kind = REGRESSION if len(names) == 1 else MULTI_LABEL if settings.label_separator else SINGLE_LABEL
    if kind == REGRESSION:
        if len(names) != 1:
            raise ValueError(
                f"{model_name} must have a single output for regression, got {len(names)}. Set another --problem_type."
            )
        return LabelScheme(kind, ())
    if all(name == f"LABEL_{i}" for i, name in enumerate(names)):  # the default class names in Transformers
        numbers = tuple(map(str, range(len(names))))
        names = tuple(class_names or ()) if len(class_names or ()) == len(names) else numbers
    if settings.labels is not None and len(settings.labels) != len(names):
        raise ValueError(
            f"--labels must list the {len(names)} classes of {model_name} ({format_names(names)}), got "
            f"{len(settings.labels)} names."
        )
    return LabelScheme(kind, settings.labels or names)


def _log_label_counts(scheme: LabelScheme, encoded_labels: Sequence[Any]) -> None:
    """Log the number of training rows and the distribution of their labels."""
    if not encoded_labels:  # the run only evaluates
        return
    if scheme.problem_type == REGRESSION:
        message = "train: %d rows with labels from %g to %g (regression)."
        logger.info(message, len(encoded_labels), min(encoded_labels), max(encoded_labels))
        return
    counts = dict(zip(scheme.names, count_rows_by_class(scheme, encoded_labels), strict=True))
    label_counts = ", ".join(f"{name!r:.40} {counts[name]}" for name in scheme.names[:20])
    more = f" and {len(counts) - 20} more" if len(counts) > 20 else ""
    logger.info("train: %d rows with labels %s%s (%s).", len(encoded_labels), label_counts, more, scheme.problem_type)
    if missing_classes := [name for name, count in counts.items() if not count]:
        logger.warning("No training row has any of the labels %s.", format_names(missing_classes))
