"""Rows of a run's splits, read from tables or a `datasets` source, and the columns that a finished model recorded."""

import itertools
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from datasets import ClassLabel, load_dataset, load_dataset_builder

from ...files import RESULTS_NAME, load_json
from ...input_files import is_unicode, suffix_of
from ...text_files import TABLE_SUFFIXES, column_value, has_column, missing_column, read_records, row_place
from .settings import FineTuningSettings, TableSettings

__all__ = [
    "UNKNOWN_LABELS",
    "SplitRows",
    "TableRow",
    "apply_recorded_columns",
    "find_absent_recorded_column",
    "find_split_files",
    "get_label_name",
    "get_text",
    "load_splits",
    "make_uneven_column_error",
    "read_splits",
    "resolve_label_column",
    "warn_about_max_length",
]

logger = logging.getLogger(__name__)

# Entries of a builder's configuration that do not say how a file is read.
IDENTITY_FIELDS = {"name", "version", "data_dir", "data_files", "description"}


def find_split_files(settings: Any, suffixes: Sequence[str] = TABLE_SUFFIXES) -> dict[str, tuple[str, ...]] | None:
    """Return the paths of each split's files if `--dataset_name` is a folder of files that this package reads.

    `datasets` reads CSV by the guesses of pandas: "None" becomes a missing value, "01" the number 1. The readers of
    `--train_file` keep every cell as it is written. `datasets` only finds which file belongs to which split.

    Args:
        settings: with `dataset_name` and `dataset_config_name`.
        suffixes: the kinds of files to read, plain or .gz.

    Returns:
        The paths by split; None for another source, or if the folder's README.md says how its files are read.
    """
    folder = Path(settings.dataset_name or "").expanduser()
    if settings.dataset_name is None or not folder.is_dir():
        return None
    try:
        with tempfile.TemporaryDirectory() as cache:
            builder = load_dataset_builder(str(folder), settings.dataset_config_name, cache_dir=cache)
            options, defaults = vars(builder.config), vars(type(builder.config)())
            files = {str(split): tuple(map(str, paths)) for split, paths in (options["data_files"] or {}).items()}
    except Exception:  # whoever loads the folder reports the error
        return None
    changed = {name for name in defaults.keys() - IDENTITY_FIELDS if options[name] != defaults[name]}
    if changed - {"sep"} or options.get("sep") not in (None, ",", "\t") or builder.info.features is not None:
        return None
    paths = [Path(path) for each in files.values() for path in each]
    is_ours = all(path.is_file() and suffix_of(path) in suffixes for path in paths)
    return files if paths and is_ours else None


def load_splits(settings: Any) -> Any:
    """Return the splits of `--dataset_name`, by their names.

    Args:
        settings: with `dataset_name` and `dataset_config_name`.

    Raises:
        OSError: if it cannot be loaded.
    """
    try:
        return load_dataset(settings.dataset_name, settings.dataset_config_name)
    except Exception as error:  # the Hub's many ways to fail are one thing to the user
        raise OSError(
            f"cannot load --dataset_name {settings.dataset_name} ({type(error).__name__}: {error}); give files instead"
        ) from error


SPLITS = ("train", "validation", "test")
# What the Hub has as a label that is not public.
UNKNOWN_LABELS = {"-1", "-1.0"}


@dataclass
class TableRow:
    """A row as it came.

    Attributes:
        file: or `datasets` source.
        number: in that, from 1.
        place, values, names_place, line: see `table_files.TableRow`.
    """

    file: str
    number: int
    place: str
    values: dict[str, Any]
    names_place: str
    line: int | None = None


class SplitRows:
    """The rows of a split, one after the other, and what its features say of its labels."""

    def __init__(self, records: Iterator[TableRow], features: dict[str, Any] | None = None):
        self.first = next(records)
        self.records: Iterator[TableRow] = itertools.chain([self.first], records)
        self.features = features or {}

    def class_names(self, label_column: str | None) -> list[str] | None:
        """Return the names of labels that are numbers of names."""
        feature = self.features.get(label_column or "")
        feature = getattr(feature, "feature", feature)  # of a list
        return [name.strip() for name in feature.names] if isinstance(feature, ClassLabel) else None


def read_splits(settings: TableSettings) -> dict[str, SplitRows]:
    """Return those splits that there are of "train", "validation" and "test", and that the run reads.

    Raises:
        OSError: if a file or the Hub's dataset cannot be read.
        ValueError: if a file is no table, or there is no row.
    """
    sources = _read_file_splits(settings) if settings.dataset_name is None else _read_dataset_splits(settings)
    if not sources:
        raise ValueError("there is no row to read: give dev rows, or test rows without --skip_predict")
    return sources


def _read_file_splits(settings: TableSettings) -> dict[str, SplitRows]:
    paths = {name: getattr(settings, f"{name}_file") for name in _list_read_splits(settings)}
    return {name: SplitRows(_read_file_rows(each)) for name, each in paths.items() if each}


def _list_read_splits(settings: TableSettings) -> list[str]:
    unread = {"train": settings.only_evaluates, "test": settings.skip_predict}
    return [name for name in SPLITS if not unread.get(name)]


def _read_file_rows(paths: Sequence[str]) -> Iterator[TableRow]:
    for path in paths:
        number = 0
        for number, (place, values, names_place, line) in enumerate(read_records(Path(path)), start=1):
            yield TableRow(path, number, place, values, names_place, line)
        if not number:
            raise ValueError(f"{path} is empty: it has no row")


def _read_dataset_splits(settings: TableSettings) -> dict[str, SplitRows]:
    files = find_split_files(settings)
    found: Any = load_splits(settings) if files is None else files
    sources = {}
    for name in _list_read_splits(settings):
        given = getattr(settings, f"{name}_split_name")
        split = given or name
        if files is not None and split in files:
            sources[name] = SplitRows(_read_file_rows(files[split]))
        elif files is None and split in found and len(found[split]):
            file = f"{settings.dataset_name} ({split})"
            records = (TableRow(file, i, row_place(file, None, i), row, file) for i, row in enumerate(found[split], 1))
            sources[name] = SplitRows(records, found[split].features)
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


def resolve_label_column(name: str, source: SplitRows, column: str | None, flag: str) -> str | None:
    """Return the column of a split's labels; None of a test split without it.

    Raises:
        ValueError: if its first row lacks the column, and it is no test split, or a later row has it; and if the first
            row of another of its files lacks the column that the first file has.
    """
    if column is None:
        return None
    if has_column(source.first.values, column):
        source.records = _require_column(column, flag, source.records)
        return column
    if name != "test":
        raise missing_column(source.first.names_place, source.first.values, column, flag)
    source.records = _forbid_column(column, source.first, source.records)
    return None


def _require_column(column: str, flag: str, records: Iterator[TableRow]) -> Iterator[TableRow]:
    for record in records:
        if record.number == 1 and not has_column(record.values, column):
            raise missing_column(record.names_place, record.values, column, flag)
        yield record


def _forbid_column(column: str, first: TableRow, records: Iterator[TableRow]) -> Iterator[TableRow]:
    for record in records:
        if has_column(record.values, column):
            raise make_uneven_column_error(column, first, record)
        yield record


def make_uneven_column_error(column: str, first: TableRow, record: TableRow) -> ValueError:
    """Return the error of a column that the first row lacks and a later one has."""
    return ValueError(
        f"{first.place}: there is no column {column!r}, and {record.place} has it: give it to all rows, or to none"
    )


def get_text(record: TableRow, column: str, flag: str) -> str:
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


def get_label_name(value: Any, names: Sequence[str]) -> Any:
    """Return the name of a label that is a number of names, of a list those of its items; None for other numbers."""
    if isinstance(value, list):
        return [get_label_name(each, names) for each in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None


# What results of another program, or damaged ones, raise.
UNREADABLE = (AttributeError, TypeError, ValueError)
SettingsT = TypeVar("SettingsT", bound=FineTuningSettings)


def apply_recorded_columns(
    settings: SettingsT,
    first: dict[str, Any] | None,
    columns: Mapping[str, Sequence[str]],
    others: Sequence[str] = (),
) -> SettingsT:
    """Return the settings of a run that only evaluates, with what is not given as the model's results have it.

    The results are `all_results.json` in the model's folder. What is taken from them is logged.

    Args:
        settings: the run's.
        first: a row by column; a column that it lacks is not taken. None: the run reads no table.
        columns: the settings that name columns; with each, the settings that say how that column is read.
        others: settings that are taken whatever the columns are.
    """
    if (path := _find_results(settings)) is None:
        return settings
    try:
        recorded = _load_recorded(path)
    except UNREADABLE as error:
        logger.warning("%s does not say which columns were trained on (%s)", path, error)
        return settings
    given = {name for setting in columns for name in _list_names(getattr(settings, setting))}
    taken: dict[str, Any] = {}
    for setting, ways in columns.items():
        names = _list_names(recorded.get(setting))
        if not names or first is None or not all(has_column(first, name) for name in names):
            continue
        if getattr(settings, setting) is None and given.isdisjoint(names):
            taken[setting] = tuple(names) if isinstance(recorded[setting], list) else names[0]
        elif _list_names(getattr(settings, setting)) != names:
            continue
        for way in ways:
            if getattr(settings, way) is None and recorded.get(way) is not None:
                taken[way] = recorded[way]
    taken |= {name: recorded[name] for name in others if getattr(settings, name) is None and recorded.get(name)}
    if taken:
        shown = " ".join(f"--{name} {_format_value(value)}" for name, value in taken.items())
        logger.info("as in %s: %s", path, shown)
    return replace(settings, **taken)


def find_absent_recorded_column(settings: FineTuningSettings, first: dict[str, Any], setting: str) -> str | None:
    """Return the column that a model was trained with, where the run names none and a row lacks it; else None.

    Another column that is called as such columns often are would be something else.

    Args:
        settings: those of a run, before `apply_recorded_columns`.
        first: the row, by column.
        setting: the setting that names the column.
    """
    if getattr(settings, setting) is not None or (path := _find_results(settings)) is None:
        return None
    try:
        column = _load_recorded(path).get(setting)
    except UNREADABLE:
        return None
    return column if isinstance(column, str) and not has_column(first, column) else None


def _format_value(value: Any) -> str:
    return " ".join(map(repr, _list_names(value))) if isinstance(value, str | tuple | list) else str(value)


def warn_about_max_length(settings: FineTuningSettings) -> None:
    """Warn where a run that only evaluates cuts texts at another length than the model's training did."""
    if (path := _find_results(settings)) is None:
        return
    try:
        length = _load_recorded(path).get("max_length", settings.max_length)
    except UNREADABLE:
        return
    if length != settings.max_length:
        message = "texts are cut at %d tokens, and the model was trained with --max_length %s (%s)"
        logger.warning(message, settings.max_length, length, path)


def _find_results(settings: FineTuningSettings) -> Path | None:
    """Return the results of the training of a model that is only evaluated, if they are there."""
    path = Path(settings.source).expanduser() / RESULTS_NAME if settings.only_evaluates else None
    return path if path is not None and path.is_file() else None


def _load_recorded(path: Path) -> dict[str, Any]:
    results = load_json(path)
    return {**(results.get("arguments") or {}), **results}


def _list_names(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
