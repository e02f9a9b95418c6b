"""Opens the text to pretrain on: files, plain or .gz, or a streamed `datasets` source."""

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import IterableDatasetDict

from ..engine.hub_datasets import folder_files
from .settings import PretrainingSettings, TextSettings, check_evaluated
from .text_shards import DatasetRows, FolderFile, TextFile, TextSource, check_text_files, hash_files

__all__ = ["PretrainingText", "open_text", "open_text_sources"]


@dataclass(frozen=True)
class PretrainingText:
    """The shards to train on, those held out (none: no evaluation), and what tells either from other text."""

    train: Sequence[TextSource]
    dev: Sequence[TextSource]
    train_fingerprint: dict[str, Any]
    dev_fingerprint: dict[str, Any]


def open_text_sources(settings: PretrainingSettings) -> PretrainingText:
    """Open the text of a pretraining.

    Raises:
        OSError, ValueError: as `open_text`, or if there is no text to evaluate on, and a flag needs it.
    """
    text = open_text(settings)
    if not text.dev and settings.dataset_name is not None:
        check_evaluated(settings, f": {settings.dataset_name} has no split 'validation'")
    return text


def open_text(settings: TextSettings) -> PretrainingText:
    """Open the text to train on, and that to evaluate on: files, or the splits of a dataset.

    Raises:
        OSError, ValueError: if a file or dataset cannot be read, or holds no text.
    """
    keeps = settings.keep_whitespace
    files = check_text_files(settings.validation_file or [], keeps)
    dev: Sequence[TextSource] = files
    train: Sequence[TextSource]
    dev_hash, names = hash_files(files), {}
    if settings.dataset_name is None:
        train = given = check_text_files(settings.train_file or [], keeps)
        train_hash = hash_files(given)
    else:
        # `datasets` reads JSON as it is written, and streams it; CSV by the guesses of pandas.
        local = folder_files(settings, (".csv", ".tsv", ".txt"))
        split_files: Mapping[str, Sequence[str]]
        split_files, splits = (local, None) if local is not None else _open_dataset(settings)
        there: Mapping[str, Any] = split_files if splits is None else splits
        if "train" not in there:
            raise ValueError(f"--dataset_name {settings.dataset_name} has no split 'train', only {', '.join(there)}")
        if not dev and "validation" in there:
            dev = _dataset_shards(settings, splits, split_files, "validation")
            dev_hash = _hash_dataset(split_files.get("validation", ()))
        train = _dataset_shards(settings, splits, split_files, "train")
        train_hash = _hash_dataset(split_files.get("train", ()))
        names = {name: getattr(settings, name) for name in ("dataset_name", "dataset_config_name", "text_column")}
    # None where there is nothing to say, as in the checkpoints of earlier versions.
    names |= {"keep_whitespace": keeps or None}
    fingerprints = names | {"hash of the training text": train_hash}, {"hash of the held-out text": dev_hash}
    return PretrainingText(train, dev, *fingerprints)


def _open_dataset(settings: TextSettings) -> tuple[Mapping[str, Sequence[str]], IterableDatasetDict]:
    """Find the splits of `--dataset_name`: the paths or addresses of each one's files, where known, and its rows."""
    named = (settings.dataset_name, settings.dataset_config_name)
    files: Mapping[str, Sequence[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        # A stream needs a cache only while it is opened.
        cache = None if _is_writable(Path(datasets.config.HF_DATASETS_CACHE)) else temporary
        try:
            files = datasets.load_dataset_builder(*named, cache_dir=cache).config.data_files or {}
            return files, datasets.load_dataset(*named, streaming=True, cache_dir=cache)
        except Exception as error:  # `datasets`, the Hub's client and each file format have errors of their own
            raise _opening_error(f"{settings.dataset_name}", files, error) from error


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _opening_error(name: str, files: Mapping[str, Sequence[str]], error: Exception) -> Exception:
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, StopIteration):  # where `datasets` looks for columns
        reason = "a file without a row"
    advice = ""
    if isinstance(error, PermissionError):
        advice = "; if this is the cache, HF_HOME names another folder for it"
    elif files:
        advice = f"; look at its first file, {next(iter(files.values()))[0]}"
    kind = OSError if isinstance(error, OSError | EOFError) else ValueError
    return kind(f"--dataset_name {name}: cannot be opened ({reason}){advice}")


def _dataset_shards(
    settings: TextSettings, splits: IterableDatasetDict | None, files: Mapping[str, Sequence[str]], split: str
) -> Sequence[TextSource]:
    shards: Sequence[TextSource]
    names, options = [Path(file).name for file in files.get(split, ())], (settings.text_column,)
    if splits is None:
        shards = [
            FolderFile(f"{settings.dataset_name} ({split}), {name}", Path(file), *options, settings.keep_whitespace)
            for name, file in zip(names, files[split], strict=True)
        ]
    else:
        rows = splits[split]
        if len(names) != rows.num_shards:
            names = [f"shard {i}" for i in range(rows.num_shards)]
        shards = [
            DatasetRows(f"{settings.dataset_name} ({split}), {name}", rows, *options, i, settings.keep_whitespace)
            for i, name in enumerate(names)
        ]
    # A wrong column is an error now.
    if all(next(shard.articles(), None) is None for shard in shards):
        raise ValueError(f"{settings.dataset_name} ({split}) holds no row")
    return shards


def _hash_dataset(files: Sequence[str]) -> str:
    paths = [Path(file) for file in files]
    if all(path.is_file() for path in paths):
        return hash_files(TextFile(path) for path in paths)
    # An address on the Hub holds the revision.
    return hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]
