"""Tables and `datasets` sources as splits of texts and labels, and the columns that hold them."""

import hashlib
import json
import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...input_files import is_blank
from ...text_files import column_names, column_value, row_place
from ..engine.tables import (
    UNKNOWN_LABELS,
    SplitRows,
    apply_recorded_columns,
    find_absent_recorded_column,
    get_label_name,
    get_text,
    read_splits,
    resolve_label_column,
)
from .labels import Cell, LabelScheme, check_names, counted, listed, look, problem_type_of, read_cell, sorted_names
from .settings import MULTI_LABEL, REGRESSION, SINGLE_LABEL, THRESHOLD, ClassificationSettings

__all__ = [
    "ClassificationData",
    "ClassificationSplit",
    "find_label_column",
    "find_text_columns",
    "hash_rows",
    "load_classification_data",
    "make_rows",
    "tokenize_split",
]

logger = logging.getLogger(__name__)

# Of pairs, of single texts, and of labels; what stands in an earlier row of LABELS goes before the later ones.
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("text", "text_pair"),
    ("question", "sentence"),
)
TEXTS = ("text", "sentence", "content", "document", "review", "comment", "tweet", "body")
LABELS = (
    ("label", "labels"),
    ("class", "category", "target", "score", "rating", "stars", "sentiment", "intent", "topic"),
)


def find_text_columns(record: dict[str, Any], place: str, but: str | None = None) -> tuple[str, ...]:
    """Return the columns of a row that are called as texts often are, one or the two of pairs; case does not count.

    Args:
        record: the row.
        place: where it is.
        but: the column of labels, which is none of texts.

    Raises:
        ValueError: if there are none, or more than one choice; the message lists the columns that are there.
    """
    there = _by_lower_name(record, but)
    pairs = [pair for pair in PAIRS if all(name in there for name in pair)]
    in_pairs = {name for pair in pairs for name in pair}
    singles = [(name,) for name in TEXTS if name in there and name not in in_pairs]
    found = [*pairs, *singles]
    if len(found) != 1:
        choices = " or ".join(" and ".join(there[name] for name in names) for names in found)
        what = f"the texts may be in {choices}" if found else "no column is called as texts often are"
        raise ValueError(f"{place}: {what}; {_listed(record)}: name one, or two of pairs, with --text_columns")
    return tuple(there[name] for name in found[0])


def find_label_column(record: dict[str, Any], place: str, but: Sequence[str], needed: bool = True) -> str | None:
    """Return the column of a row that is called as labels often are; errors as of `find_text_columns`.

    Args:
        record, place: the row, and where it is.
        but: the columns of texts, which are none of labels.
        needed: False: None where there is no such column.
    """
    there = _by_lower_name(record, *but)
    for names in LABELS:
        found = [there[name] for name in names if name in there]
        if len(found) > 1:
            raise ValueError(
                f"{place}: the labels may be in {' or '.join(found)}; {_listed(record)}: name one with --label_column"
            )
        if found:
            return found[0]
    if needed:
        raise ValueError(
            f"{place}: no column is called as labels often are; {_listed(record)}: name one with --label_column"
        )
    return None


def _by_lower_name(record: dict[str, Any], *but: str | None) -> dict[str, str]:
    """Return the columns by their names in small letters; of two that differ in case alone, the one so written."""
    names = [str(name) for name in record if name not in but]
    lowered = [name.strip().lower() for name in names]
    return {low: name for low, name in zip(lowered, names, strict=True) if lowered.count(low) == 1 or name == low}


def _listed(record: dict[str, Any]) -> str:
    return f"its columns are {' '.join(', '.join(column_names(record)).split()) or 'none'}"


@dataclass
class ClassificationSplit:
    """The rows of one split."""

    name: str  # the Hub's: "train", "validation_matched", "test", ...
    # Columns `text1`, `text2` (pairs only), `label` (where there is one) and `index`: the row's number, in GLUE the
    # submission's. Rows of a user's tables have their `file` and `line` as well.
    data: Dataset

    def __len__(self) -> int:
        return len(self.data)

    def first(self, count: int | None) -> Self:
        """Return the split's first `count` rows, with None all of them."""
        return self if count is None else replace(self, data=self.data.take(min(count, len(self.data))))

    def where(self, number: int) -> str:
        """Say where a row, counted from 0, comes from."""
        names = [name for name in ("file", "line", "index") if name in self.data.column_names]
        row = self.data.select_columns(names)[number]
        return row_place(row.get("file", self.name), row.get("line"), row.get("index", number))


def make_rows(columns: dict[str, list]) -> Dataset:
    """Make rows in memory, of columns of one length.

    Given no fingerprint, as by `Dataset.from_dict`, datasets hashes the table by dill, which fails where pyarrow lies
    in a folder that is not named site-packages.
    """
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint=uuid.uuid4().hex)


def hash_rows(split: ClassificationSplit, chunk: int = 10_000) -> str:
    """Return a short hash of a split's texts and labels, in their order."""
    columns = [name for name in ("text1", "text2", "label") if name in split.data.column_names]
    data = split.data.select_columns(columns)
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(data), chunk):
        rows = data[start : start + chunk]
        digest.update(json.dumps([rows[name] for name in columns]).encode())
    return digest.hexdigest()


def tokenize_split(split: ClassificationSplit, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Tokenise a split without padding; that is done per batch. The longer text of a pair is cut first.

    Return the tokenizer's columns (lists of ints), `label` where there is one, and `length` (tokens).
    """
    pair = "text2" in split.data.column_names

    def encode(rows: dict) -> dict:
        texts = (rows["text1"], rows["text2"]) if pair else (rows["text1"],)
        encoded = dict(tokenizer(*texts, truncation=True, max_length=max_length, padding=False))
        encoded["length"] = [len(ids) for ids in encoded["input_ids"]]
        return encoded

    unused = [name for name in split.data.column_names if name != "label"]
    # A longer name than this leaves no room for the bar in 80 columns.
    shown = f"{split.name.replace('validation', 'dev')} tokens"
    data = split.data.map(encode, batched=True, remove_columns=unused, desc=shown)
    if full := sum(length == max_length for length in data["length"]):
        message = "%s: %d of %d examples fill --max_length %d and may have been cut"
        logger.info(message, split.name, full, len(data), max_length)
    return data


@dataclass(frozen=True)
class ClassificationData:
    """What is trained on, evaluated and predicted.

    Attributes:
        splits: by name, those that there are of "train", "validation" and "test".
        scheme: what their labels are.
        text_columns: one, or the two of pairs.
        label_column: None where there is none, and texts are predicted alone.
        label_separator: what divides the labels of a row in it, where something does.
        threshold: of several labels a row, those are predicted whose probability is more.
    """

    splits: dict[str, ClassificationSplit]
    scheme: LabelScheme
    text_columns: tuple[str, ...]
    label_column: str | None
    label_separator: str | None
    threshold: float


@dataclass
class Rows:
    """The rows of a split as they were read; `texts` has a list a text column."""

    label_column: str | None
    texts: list[list[str]]
    cells: list[Cell] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    lines: list[int | None] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)  # the first row with each column that earlier ones lack

    def where(self, row: int) -> str:
        """Say where a label is: file, line, row and column."""
        return f"{row_place(self.files[row], self.lines[row], self.numbers[row])}, column {self.label_column!r}"

    def split(self, name: str, values: list[Any] | None) -> ClassificationSplit:
        """Return the split with these labels."""
        columns: dict[str, list] = {f"text{i + 1}": column for i, column in enumerate(self.texts)}
        columns |= {"index": self.numbers, "file": self.files, "line": self.lines}
        return ClassificationSplit(name, make_rows(columns | ({} if values is None else {"label": values})))


def _read(
    name: str, source: SplitRows, text_columns: Sequence[str], label_column: str | None, separator: str | None
) -> Rows:
    """Read all rows of a split; a blank text is one, and is counted.

    Raises:
        OSError, ValueError: see `load_classification_data`.
    """
    rows = Rows(label_column, [[] for _ in text_columns])
    names = source.class_names(label_column)
    blank: list[str] = []
    known = set(source.first.values)
    for record in source.records:
        if not known.issuperset(record.values):
            known.update(record.values)
            rows.others.append(record.values)
        for column, texts in zip(text_columns, rows.texts, strict=True):
            texts.append(get_text(record, column, "--text_columns"))
        if any(is_blank(texts[-1]) for texts in rows.texts):
            blank.append(record.place)
        rows.files.append(record.file)
        rows.lines.append(record.line)
        rows.numbers.append(record.number)
        if label_column is not None:
            value = column_value(record.values, label_column)
            value = value if names is None else get_label_name(value, names)
            rows.cells.append(read_cell(value, separator, f"{record.place}, column {label_column!r}"))
    if blank:
        message = "%s: %d of %d rows have a blank text, which is read as it is; the first is %s"
        logger.warning(message, name, len(blank), len(rows.numbers), blank[0])
    return rows


def load_classification_data(settings: ClassificationSettings, config: PreTrainedConfig) -> ClassificationData:
    """Read what the settings name.

    Args:
        settings: of the run.
        config: of the checkpoint, whose labels they are where the run only evaluates.

    Raises:
        OSError: if a file or the Hub's dataset cannot be read.
        ValueError: if it holds something else, lacks a column, or labels are not of one kind; the message names the
            file, the row and the column.
    """
    sources = read_splits(settings)
    first = next(iter(sources.values())).first
    given = settings.threshold
    columns = {"text_columns": (), "label_column": ("label_separator",)}
    lost = find_absent_recorded_column(settings, first.values, "label_column")
    settings = apply_recorded_columns(settings, first.values, columns, ("threshold",))
    text_columns, label_column = _columns(next(iter(sources.items())), settings, lost)
    read = {}
    for name, source in sources.items():
        column = resolve_label_column(name, source, label_column, "--label_column")
        read[name] = _read(name, source, text_columns, column, settings.label_separator)
    if settings.only_evaluates:
        class_names = next((found for each in sources.values() if (found := each.class_names(label_column))), None)
        scheme = _scheme_of_checkpoint(settings, config, class_names)
    else:
        scheme = _scheme_of_training(settings, read["train"], sources["train"].class_names(label_column))
    if given is not None and scheme.problem_type != MULTI_LABEL:
        raise ValueError(f"--threshold is for several labels a row; here it is {scheme.problem_type}")
    if label_column is None:
        _tell_unread([first.values, *read["test"].others], text_columns, scheme)
    values = {name: _values(name, rows, scheme) for name, rows in read.items()}
    _describe(scheme, values.get("train") or [])
    splits = {name: rows.split(name, values[name]) for name, rows in read.items()}
    threshold = THRESHOLD if settings.threshold is None else settings.threshold
    return ClassificationData(splits, scheme, text_columns, label_column, settings.label_separator, threshold)


def _tell_unread(rows: Sequence[dict[str, Any]], text_columns: Sequence[str], scheme: LabelScheme) -> None:
    """Say which column of test rows may have labels, where none is read."""
    named = {
        name for row in rows for name in column_names(row) if str(column_value(row, name)).strip() in scheme.names
    }
    for column in sorted(named.difference(text_columns)):
        message = "test: column %r may have labels, and is not read: --label_column %r scores the predictions"
        logger.warning(message, column, column)


def _values(name: str, rows: Rows, scheme: LabelScheme) -> list[Any] | None:
    """Return the labels of a split as numbers; None of test rows whose labels are not known."""
    if rows.label_column is None or (name == "test" and _is_unlabelled(rows.cells, scheme)):
        logger.info("%s: no labels are known: its rows are predicted and not scored", name)
        return None
    return scheme.values(rows.cells, rows.where)


def _columns(
    first: tuple[str, SplitRows], settings: ClassificationSettings, lost: str | None
) -> tuple[tuple[str, ...], str | None]:
    """Return the columns of texts and of labels; `lost` is that of the model's training, where it is not there."""
    name, source = first
    record = source.first
    given, label = settings.text_columns, settings.label_column
    texts = given or find_text_columns(record.values, record.names_place, label)
    if label is None and (lost is None or name != "test"):
        label = find_label_column(record.values, record.names_place, texts, needed=name != "test")
    return texts, label


def _is_unlabelled(cells: Sequence[Cell], scheme: LabelScheme) -> bool:
    """Say whether a test split's labels are not known: all empty, or the -1 of the Hub's."""
    found = set(cells)
    return found <= {None, ()} or (len(found) == 1 and found <= UNKNOWN_LABELS and not found & {*scheme.names})


def _scheme_of_training(
    settings: ClassificationSettings, rows: Rows, class_names: Sequence[str] | None
) -> LabelScheme:
    kind = settings.problem_type
    if kind is None and class_names is not None:
        kind = MULTI_LABEL if any(isinstance(cell, tuple) for cell in rows.cells) else SINGLE_LABEL
    kind = kind or problem_type_of(rows.cells, rows.where)
    if kind == MULTI_LABEL:
        check_names(rows.cells, rows.where)
    if kind == REGRESSION:
        if settings.labels is not None:
            raise ValueError(f"{rows.where(0)}: labels are numbers on a scale (regression), and --labels are names")
        return LabelScheme(kind, ())
    separator = settings.label_separator
    if separator is not None and not any(isinstance(cell, tuple) and len(cell) > 1 for cell in rows.cells):
        logger.warning(
            "no training row has several labels by --label_separator %r: is it what divides them?", separator
        )
    names = tuple(settings.labels or class_names or sorted_names(rows.cells))
    if len(names) < 1 + (kind == SINGLE_LABEL):
        what = f"every training row has the label {names[0]!r}" if names else "no training row has a label"
        raise ValueError(f"{rows.where(0)}: {what}: there is nothing to tell apart")
    _tell_odd_names(kind, names, rows.cells)
    return LabelScheme(kind, names)


def _tell_odd_names(kind: str, names: Sequence[str], cells: Sequence[Cell]) -> None:
    """Warn of labels that look alike, and of several labels a row of one that all rows have."""
    lowered, looks = Counter(name.lower() for name in names), Counter(map(look, names))
    if alike := [name for name in names if lowered[name.lower()] > 1]:
        logger.warning("labels that differ in case alone are different ones: %s", listed(alike))
    if twins := [ascii(name) for name in names if looks[look(name)] > lowered[name.lower()]]:
        logger.warning("labels that look the same are different ones: %s", ", ".join(twins[:8]))
    if kind == MULTI_LABEL:
        found = Counter(name for cell in cells for name in cell or ())
        if everywhere := [name for name in names if found[name] == len(cells)]:
            logger.warning("every training row has the label %s: nothing can be learned of it", listed(everywhere))


def _scheme_of_checkpoint(
    settings: ClassificationSettings, config: PreTrainedConfig, class_names: Sequence[str] | None
) -> LabelScheme:
    name: Any = settings.model_name_or_path
    numbered: Any = config.id2label or {}
    names = tuple(str(numbered[i]) for i in sorted(numbered))
    kind = settings.problem_type or config.problem_type
    if kind is None:
        kind = REGRESSION if len(names) == 1 else MULTI_LABEL if settings.label_separator else SINGLE_LABEL
    if kind == REGRESSION:
        if len(names) != 1:
            raise ValueError(f"{name} has {len(names)} outputs, and a regression has one")
        return LabelScheme(kind, ())
    if all(each == f"LABEL_{i}" for i, each in enumerate(names)):  # transformers' own, which say nothing
        numbers = tuple(map(str, range(len(names))))
        names = tuple(class_names or ()) if len(class_names or ()) == len(names) else numbers
    if settings.labels is not None and len(settings.labels) != len(names):
        raise ValueError(f"--labels has {len(settings.labels)}, and {name} classifies {len(names)}: {listed(names)}")
    return LabelScheme(kind, settings.labels or names)


def _describe(scheme: LabelScheme, values: Sequence[Any]) -> None:
    if not values:  # the run only evaluates
        return
    if scheme.problem_type == REGRESSION:
        logger.info("train: %d rows, labels from %g to %g: regression", len(values), min(values), max(values))
        return
    counts = dict(zip(scheme.names, counted(scheme, values), strict=True))
    shown = ", ".join(f"{name!r:.40} {counts[name]}" for name in scheme.names[:20])
    more = f" and {len(counts) - 20} more" if len(counts) > 20 else ""
    logger.info("train: %d rows, labels %s%s: %s", len(values), shown, more, scheme.problem_type)
    if without := [name for name, count in counts.items() if not count]:
        logger.warning("no training row has the labels %s", listed(without))
