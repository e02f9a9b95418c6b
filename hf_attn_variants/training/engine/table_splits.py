"""The rows of a run's splits as they come, from tables or a `datasets` source, each with the place it comes from."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import ClassLabel

from ...table_files import read_records, row_place
from ...text_files import column_value, has_column, missing_column
from ...text_lines import is_unicode
from .hub_datasets import folder_files, load_splits
from .table_settings import TableSettings

__all__ = [
    "UNKNOWN",
    "Record",
    "Source",
    "check_column",
    "named_label",
    "read_sources",
    "text_of",
    "uneven_column",
]

SPLITS = ("train", "validation", "test")
# What the Hub has as a label that is not public.
UNKNOWN = {"-1", "-1.0"}


@dataclass
class Record:
    """A row as it came.

    Attributes:
        file: or `datasets` source.
        number: in that, from 1.
        place, values, names_place, line: see `table_files.Record`.
    """

    file: str
    number: int
    place: str
    values: dict[str, Any]
    names_place: str
    line: int | None = None


class Source:
    """The rows of a split, one after the other, and what its features say of its labels."""

    def __init__(self, records: Iterator[Record], features: dict[str, Any] | None = None):
        self.first = next(records)
        self.records: Iterator[Record] = itertools.chain([self.first], records)
        self.features = features or {}

    def class_names(self, label_column: str | None) -> list[str] | None:
        """Return the names of labels that are numbers of names."""
        feature = self.features.get(label_column or "")
        feature = getattr(feature, "feature", feature)  # of a list
        return [name.strip() for name in feature.names] if isinstance(feature, ClassLabel) else None


def read_sources(settings: TableSettings) -> dict[str, Source]:
    """Return those splits that there are of "train", "validation" and "test", and that the run reads.

    Raises:
        OSError: if a file or the Hub's dataset cannot be read.
        ValueError: if a file is no table, or there is no row.
    """
    sources = _file_sources(settings) if settings.dataset_name is None else _dataset_sources(settings)
    if not sources:
        raise ValueError("there is no row to read: give dev rows, or test rows without --skip_predict")
    return sources


def _file_sources(settings: TableSettings) -> dict[str, Source]:
    paths = {name: getattr(settings, f"{name}_file") for name in _wanted(settings)}
    return {name: Source(_file_records(each)) for name, each in paths.items() if each}


def _wanted(settings: TableSettings) -> list[str]:
    unread = {"train": settings.only_evaluates, "test": settings.skip_predict}
    return [name for name in SPLITS if not unread.get(name)]


def _file_records(paths: Sequence[str]) -> Iterator[Record]:
    for path in paths:
        number = 0
        for number, (place, values, names_place, line) in enumerate(read_records(Path(path)), start=1):
            yield Record(path, number, place, values, names_place, line)
        if not number:
            raise ValueError(f"{path} is empty: it has no row")


def _dataset_sources(settings: TableSettings) -> dict[str, Source]:
    files = folder_files(settings)
    found: Any = load_splits(settings) if files is None else files
    sources = {}
    for name in _wanted(settings):
        given = getattr(settings, f"{name}_split_name")
        split = given or name
        if files is not None and split in files:
            sources[name] = Source(_file_records(files[split]))
        elif files is None and split in found and len(found[split]):
            file = f"{settings.dataset_name} ({split})"
            records = (Record(file, i, row_place(file, None, i), row, file) for i, row in enumerate(found[split], 1))
            sources[name] = Source(records, found[split].features)
        elif given is not None:
            raise ValueError(
                f"--dataset_name {settings.dataset_name} has no row of a split {split!r}; its splits are "
                f"{', '.join(map(str, found))}: name one with --{name}_split_name"
            )
    if not sources:
        there = ", ".join(map(str, found))
        raise ValueError(
            f"--dataset_name {settings.dataset_name} has neither a dev nor a test split to evaluate; its splits are "
            f"{there}: name one with --validation_split_name"
        )
    return sources


def check_column(name: str, source: Source, column: str | None, flag: str) -> str | None:
    """Return the column of a split's labels; None of a test split without it.

    Raises:
        ValueError: if its first row lacks the column, and it is no test split, or a later row has it; and if the first
            row of another of its files lacks the column that the first file has.
    """
    if column is None:
        return None
    if has_column(source.first.values, column):
        source.records = _with(column, flag, source.records)
        return column
    if name != "test":
        raise missing_column(source.first.names_place, source.first.values, column, flag)
    source.records = _without(column, source.first, source.records)
    return None


def _with(column: str, flag: str, records: Iterator[Record]) -> Iterator[Record]:
    for record in records:
        if record.number == 1 and not has_column(record.values, column):
            raise missing_column(record.names_place, record.values, column, flag)
        yield record


def _without(column: str, first: Record, records: Iterator[Record]) -> Iterator[Record]:
    for record in records:
        if has_column(record.values, column):
            raise uneven_column(column, first, record)
        yield record


def uneven_column(column: str, first: Record, record: Record) -> ValueError:
    """Return the error of a column that the first row lacks and a later one has."""
    return ValueError(
        f"{first.place}: there is no column {column!r}, and {record.place} has it: give it to all rows, or to none"
    )


def text_of(record: Record, column: str, flag: str) -> str:
    """Return a row's text in a column.

    Raises:
        ValueError: if it has none there; the message says that `flag` names the column.
    """
    text = column_value(record.values, column)
    if isinstance(text, str) and is_unicode(text):
        return text
    if text is None and not has_column(record.values, column):
        raise missing_column(record.names_place, record.values, column, flag)
    what = "half a surrogate pair, which is no text" if isinstance(text, str) else f"no text but {text!r:.60}"
    raise ValueError(f"{record.place}: column {column!r} holds {what}; another is named with {flag}")


def named_label(value: Any, names: Sequence[str]) -> Any:
    """Return the name of a label that is a number of names, of a list those of its items; None for other numbers."""
    if isinstance(value, list):
        return [named_label(each, names) for each in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None
