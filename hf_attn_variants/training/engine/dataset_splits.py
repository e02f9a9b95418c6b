"""Reads the rows of each split from tables or a `datasets` source, and restores the columns used in training."""

import itertools
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from datasets import ClassLabel, DatasetBuilder, load_dataset, load_dataset_builder
from datasets.packaged_modules.csv.csv import Csv
from huggingface_hub import DatasetCard

from ...files import RESULTS_NAME, get_suffix
from ...model_folder import read_json
from ...text_files import (
    OTHER_SEPARATORS,
    TABLE_SUFFIXES,
    TableRow,
    describe_row_location,
    has_column,
    make_missing_column_error,
    read_table_rows,
)
from .settings import SPLITS, FineTuningSettings, TableSettings, TrainingSettings

logger = logging.getLogger(__name__)

# The fields in the configuration of a `datasets` builder that do not affect how files are read.
IDENTITY_FIELDS = {"name", "version", "data_dir", "data_files", "description"}

# The types of data files that only `datasets` can read.
BINARY_SUFFIXES = (".parquet", ".arrow")


def find_split_files(settings: Any, suffixes: Sequence[str] = TABLE_SUFFIXES) -> dict[str, tuple[str, ...]] | None:
    """Find the files of each split if `--dataset_name` is a folder of files that this package can read.

    `datasets` reads CSV files with pandas, which changes some cells. For example, "None" becomes a missing value and
    "01" becomes the number 1. The readers for `--train_file` preserve the text of every cell, so `datasets` is only
    used to assign the files to splits.

    Args:
        settings: Settings with `dataset_name` and `dataset_config_name`.
        suffixes: The supported file types, with or without .gz.

    Returns:
        A dictionary from split names to paths. None if the source is not such a folder, or if the folder's README.md
        defines how files are read. CSV files are read as text even if README.md declares the types of their columns.

    Raises:
        ValueError: If the folder contains CSV or TSV files with an unsupported compression, or if a split contains
            data files of different types.
    """
    return _find_builder_files(settings, _open_folder(settings), suffixes)


def _find_builder_files(
    settings: Any, builder: DatasetBuilder | None, suffixes: Sequence[str] = TABLE_SUFFIXES
) -> dict[str, tuple[str, ...]] | None:
    """Find the files of each split (see `find_split_files`) with the builder from `_open_folder`."""
    if builder is None:
        return None
    options, defaults = vars(builder.config), vars(type(builder.config)())
    files = {str(split): tuple(map(str, paths)) for split, paths in (options["data_files"] or {}).items()}
    changed = {name for name in defaults.keys() - IDENTITY_FIELDS if options[name] != defaults[name]}
    if changed - {"sep"} or options.get("sep") not in (None, ",", *OTHER_SEPARATORS):
        return None
    if builder.info.features is not None and not isinstance(builder, Csv):
        return None
    paths = [Path(path) for split_files in files.values() for path in split_files]
    if not paths or not all(path.is_file() for path in paths):
        return None
    unreadable = next((path for path in paths if get_suffix(path) not in suffixes), None)
    if unreadable is not None and isinstance(builder, Csv):
        raise ValueError(
            f"{unreadable}: A table in a folder must be one of {', '.join(TABLE_SUFFIXES)}, optionally with .gz. "
            "Decompress the file, or compress it with gzip."
        )
    data_suffixes = {*TABLE_SUFFIXES, *BINARY_SUFFIXES, *suffixes}
    if unreadable is not None:
        data_suffixes.remove(".json")  # in other folders, a .json file usually contains metadata
    _check_file_types(Path(settings.dataset_name).expanduser(), files, data_suffixes)
    return files if unreadable is None else None


def _open_folder(settings: Any) -> DatasetBuilder | None:
    """Return the `datasets` builder for a local folder, or None if there is no folder or it has no builder."""
    folder = Path(settings.dataset_name or "").expanduser()
    if settings.dataset_name is None or not folder.is_dir():
        return None
    try:
        with tempfile.TemporaryDirectory() as cache:
            return load_dataset_builder(str(folder), settings.dataset_config_name, cache_dir=cache)
    except Exception:  # the error is reported by the code that loads the folder later
        return None


def _check_file_types(folder: Path, files: Mapping[str, Sequence[str]], suffixes: set[str]) -> None:
    """Check that `datasets` selects all data files of a split. It silently omits files with a less common type.

    Args:
        folder: The folder. If its README.md selects files, nothing is checked.
        files: The selected files of each split.
        suffixes: The suffixes of data files.

    Raises:
        ValueError: If a data file of a split is not selected.
    """
    card = folder / "README.md"
    if card.is_file() and DatasetCard.load(card).data.get("configs"):
        return
    with tempfile.TemporaryDirectory() as cache:  # the builder for text selects files of all types
        all_files = load_dataset_builder("text", data_dir=str(folder), cache_dir=cache).config.data_files
    for split, paths in all_files.items():
        for path in sorted(set(paths).difference(files.get(str(split), paths))):
            if suffixes.intersection(suffix.lower() for suffix in Path(path).suffixes):
                raise ValueError(
                    f"{path} would be omitted from the split {str(split)!r} because other files have another suffix. "
                    "Convert or rename it, or move it out of the folder."
                )


def load_dataset_splits(
    name: str, config: str | None = None, advice: str = "Use files instead.", **options: Any
) -> Any:
    """Load a dataset, or one of its splits, with `datasets`.

    Args:
        name: A folder or Hub id.
        config: The configuration of the dataset.
        advice: The last sentence of the error message.
        **options: Other arguments of `load_dataset`.

    Raises:
        OSError: If the dataset cannot be loaded.
    """
    try:
        return load_dataset(name, config, **options)
    except Exception as error:  # `datasets` and the Hub raise many exception types
        raise OSError(f"{name} could not be loaded ({type(error).__name__}: {error}). {advice}") from error


# The placeholders for unpublished labels in datasets on the Hub.
UNKNOWN_LABELS = {"-1", "-1.0"}


class DatasetSplit:
    """The rows of a split in order, and the features that define its label names.

    Args:
        records: The rows. There must be at least one row.
        features: The features of a `datasets` source, which map columns to their types.

    Attributes:
        first: The first row.
        records: An iterator over all rows.
    """

    def __init__(self, records: Iterator[TableRow], features: dict[str, Any] | None = None):
        self.first = next(records)
        self.records: Iterator[TableRow] = itertools.chain([self.first], records)
        self.features = features or {}

    def get_class_names(self, label_column: str | None) -> list[str] | None:
        """Return the class names if the label column contains class numbers, and None otherwise."""
        feature = self.features.get(label_column or "")
        feature = getattr(feature, "feature", feature)  # the feature of the list items, if labels are lists
        return [name.strip() for name in feature.names] if isinstance(feature, ClassLabel) else None


def read_splits(settings: TableSettings) -> dict[str, DatasetSplit]:
    """Open the splits that the run uses ("train", "validation" and "test"). Splits that do not exist are omitted.

    Raises:
        OSError: If a file or the dataset cannot be read.
        ValueError: If a file is not a table, or if there are no rows.
    """
    unused_splits = {"train": settings.only_evaluates, "test": settings.skip_predict}
    names = [name for name in SPLITS if not unused_splits.get(name)]
    if settings.dataset_name is None:
        paths = {name: getattr(settings, f"{name}_file") for name in names}
        splits = {name: DatasetSplit(_read_file_rows(files)) for name, files in paths.items() if files}
    else:
        splits = _read_dataset_splits(settings, settings.dataset_name, names)
    if not splits:
        raise ValueError(
            "There are no rows to read. Add dev rows, select them with --validation_split_name, or add test rows and "
            "remove --skip_predict."
        )
    return splits


def _read_file_rows(paths: Sequence[str]) -> Iterator[TableRow]:
    """Yield the rows of table files."""
    for path in paths:
        records = read_table_rows(Path(path))
        if (first := next(records, None)) is None:
            raise ValueError(f"{path} must contain at least one row, but is empty.")
        yield first
        yield from records


def read_dataset_rows(place: str, rows: Iterable[Any]) -> Iterator[TableRow]:
    """Yield the rows of a split from a `datasets` source. `place` is the name of the split in messages."""
    for number, row in enumerate(rows, start=1):
        yield TableRow(describe_row_location(place, None, number), row, place, None, place, number)


def _read_dataset_splits(settings: TableSettings, source: str, names: Sequence[str]) -> dict[str, DatasetSplit]:
    """Read the splits called `names` from the `datasets` source `source`."""
    builder = _open_folder(settings)
    files = _find_builder_files(settings, builder)
    splits: Any = load_dataset_splits(source, settings.dataset_config_name) if files is None else files
    sources = {}
    for name in names:
        split_name = getattr(settings, f"{name}_split_name")
        split = split_name or name
        if files is not None and split in files:
            sources[name] = DatasetSplit(_read_file_rows(files[split]), builder and builder.info.features)
        elif files is None and split in splits and len(splits[split]):
            rows = read_dataset_rows(f"{source} ({split})", splits[split])
            sources[name] = DatasetSplit(rows, splits[split].features)
        elif split_name is not None:
            split_names = ", ".join(map(str, splits))
            raise ValueError(
                f"--{name}_split_name must be a non-empty split, got {split!r}. The splits are {split_names}."
            )
    return sources


def resolve_label_column(name: str, source: DatasetSplit, column: str | None, flag: str) -> str | None:
    """Return the column that contains the labels of a split, or None for a test split without labels.

    Args:
        name: The name of the split.
        source: The rows of the split. Checks that run while the rows are read are added to the iterator.
        column: The column that should contain the labels.
        flag: The flag that sets the column, for messages.

    Raises:
        ValueError: If the first row of a split other than "test" lacks the column. While the rows are read, this
            error is also raised if the first row of another file lacks the column, or if a row of a test split without
            labels has the column.
    """
    if column is None:
        return None
    is_labeled = has_column(source.first.values, column)
    if not is_labeled and name != "test":
        raise make_missing_column_error(source.first.header_location, source.first.values, column, flag)
    source.records = _check_label_column(column, flag, source.first, source.records)
    return column if is_labeled else None


def _check_label_column(column: str, flag: str, first: TableRow, records: Iterator[TableRow]) -> Iterator[TableRow]:
    """Yield the rows. All files must have the label column if the first row has it, and no row otherwise."""
    is_labeled = has_column(first.values, column)
    for record in records:
        has_label = has_column(record.values, column)
        if is_labeled and record.number == 1 and not has_label:
            raise make_missing_column_error(record.header_location, record.values, column, flag)
        if has_label and not is_labeled:
            raise ValueError(
                f"{first.place}: There is no column {column!r}, but {record.place} has one. Add it to all rows or to "
                "none."
            )
        yield record


def map_class_ids_to_names(value: Any, names: Sequence[str]) -> Any:
    """Convert a class number, or each class number in a list, to its label name.

    The cells of a CSV table are texts, which can be class numbers, -1 (an unknown class), or any other text. Other
    texts are returned unchanged. All other values become None.
    """
    if isinstance(value, list):
        return [map_class_ids_to_names(item, names) for item in value]
    if isinstance(value, str):
        text = value.strip()
        if text in names or text not in map(str, range(-1, len(names))):
            return value
        value = int(text)
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None


SettingsT = TypeVar("SettingsT", bound=FineTuningSettings)


def fill_in_training_columns(
    settings: SettingsT,
    first_row: dict[str, Any] | None,
    columns: Mapping[str, Sequence[str]],
    other_settings: Sequence[str] = (),
) -> SettingsT:
    """Fill in missing settings with the values that were used to train the model, if the run only evaluates.

    The values are read from `all_results.json` in the model folder, and are logged.

    Args:
        settings: The settings of the run.
        first_row: The first row, which maps columns to values, or None if the run does not read a table. Recorded
            columns that this row lacks are not used.
        columns: Maps each setting that selects a column to the settings that define how the column is read.
        other_settings: Settings that are filled in regardless of the columns.
    """
    recorded = _load_training_record(settings)
    named_columns = {name for setting in columns for name in _as_list(getattr(settings, setting))}
    new_values: dict[str, Any] = {}
    for setting, reading_settings in columns.items():
        names = _as_list(recorded.get(setting))
        if not names or first_row is None or not all(has_column(first_row, name) for name in names):
            continue
        if getattr(settings, setting) is None and named_columns.isdisjoint(names):
            new_values[setting] = tuple(names) if isinstance(recorded[setting], list) else names[0]
        elif _as_list(getattr(settings, setting)) != names:
            continue
        for name in reading_settings:
            if getattr(settings, name) is None and recorded.get(name) is not None:
                new_values[name] = recorded[name]
    new_values |= {
        name: recorded[name] for name in other_settings if getattr(settings, name) is None and recorded.get(name)
    }
    if new_values:
        flags = " ".join(f"--{name} {_format_value(value)}" for name, value in new_values.items())
        logger.info("Using the settings from the model's training: %s", flags)
    return replace(settings, **new_values)


def find_missing_training_column(settings: FineTuningSettings, first_row: dict[str, Any], setting: str) -> str | None:
    """Return the column on which the model was trained if the data lacks this column, and None otherwise.

    If a column is returned, the run must not choose another column by its name, because that column may have different
    contents. The result is also None if the settings of the run select a column.

    Args:
        settings: The settings of the run, before `fill_in_training_columns`.
        first_row: The first row, which maps columns to values.
        setting: The setting that selects the column.
    """
    column = None if getattr(settings, setting) is not None else _load_training_record(settings).get(setting)
    return column if isinstance(column, str) and not has_column(first_row, column) else None


def _format_value(value: Any) -> str:
    """Format the value of a flag as a user would type it on the command line."""
    return " ".join(map(repr, _as_list(value))) if isinstance(value, str | tuple | list) else str(value)


def warn_about_max_length(settings: TrainingSettings) -> None:
    """Warn if the run only evaluates and its maximum text length differs from that in the model's training."""
    length = _load_training_record(settings).get("max_length", settings.max_length)
    if length != settings.max_length:
        message = "Texts are truncated to %d tokens, but the model was trained with --max_length %s."
        logger.warning(message, settings.max_length, length)


def _load_training_record(settings: TrainingSettings) -> dict[str, Any]:
    """Load the arguments and results of the model's training from the model folder.

    The result is empty if the run is not evaluation-only, or if the folder contains no readable training results.
    """
    if not settings.only_evaluates or settings.model_name_or_path is None:
        return {}
    path = Path(settings.model_name_or_path).expanduser() / RESULTS_NAME
    try:
        results = read_json(path) or {}
        return {**(results.get("arguments") or {}), **results}
    except (TypeError, ValueError) as error:  # the file is damaged or was written by another program
        logger.warning("The training arguments could not be read from %s: %s", path, error)
        return {}


def _as_list(value: Any) -> list[str]:
    """Convert a string, a sequence or None to a list of strings."""
    return [value] if isinstance(value, str) else list(value or ())
