"""Datasets of the Hub and local folders as a user names them, with their splits."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import load_dataset, load_dataset_builder

from ...table_files import TABLE_SUFFIXES
from ...text_lines import suffix_of

__all__ = ["folder_files", "load_splits"]

# Entries of a builder's configuration that do not say how a file is read.
NAMES = {"name", "version", "data_dir", "data_files", "description"}


def folder_files(settings: Any, suffixes: Sequence[str] = TABLE_SUFFIXES) -> dict[str, tuple[str, ...]] | None:
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
    changed = {name for name in defaults.keys() - NAMES if options[name] != defaults[name]}
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
