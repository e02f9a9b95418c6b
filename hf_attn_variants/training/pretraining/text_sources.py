"""The flags that name a text to pretrain on: files, plain or .gz, or a streamed `datasets` source."""

import argparse
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import IterableDatasetDict

from ..engine import arguments
from .text_stream import DatasetRows, TextFile, TextSource, check_text_files, hash_files

__all__ = ["PretrainingText", "add_text_arguments", "check_text_arguments", "open_text_sources"]

# Flags that mean nothing without held-out text.
EVALUATION_FLAGS = ("metric_for_best_model", "early_stopping_patience", "eval_steps")


@dataclass(frozen=True)
class PretrainingText:
    """The text to pretrain on.

    Attributes:
        train: Shards to train on.
        dev: Held-out ones; none: no evaluation.
        train_fingerprint: What tells this training text from others.
        dev_fingerprint: The same of the held-out text.
    """

    train: Sequence[TextSource]
    dev: Sequence[TextSource]
    train_fingerprint: dict[str, Any]
    dev_fingerprint: dict[str, Any]


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds where the text comes from, and how it is shuffled."""
    text = parser.add_argument_group("text")
    text.add_argument("--train_file", nargs="+", help="Text files, .txt or .gz; articles separated by empty lines.")
    text.add_argument("--validation_file", nargs="+", help="Held-out text, of the same kind.")
    text.add_argument(
        "--dataset_name", help="Folder or Hub id of a `datasets` source, streamed, instead of --train_file."
    )
    text.add_argument("--dataset_config_name", help="Its configuration.")
    text.add_argument("--text_column", default="text", help="Its column that holds an article.")
    text.add_argument(
        "--shuffle_buffer_size",
        type=int,
        default=4096,
        help="Blocks that are held in memory and shuffled among themselves.",
    )


def check_text_arguments(args: argparse.Namespace, metrics: tuple[str, ...]) -> None:
    """Checks the flags of `add_text_arguments`, and that a stream's length and workers are as it needs them.

    Args:
        args: Checked by `arguments.check_arguments`.
        metrics: What `--metric_for_best_model` may be.

    Raises:
        ValueError: A flag is missing, or excludes another one.
    """
    only_evaluates = arguments.only_evaluates(args)
    given = [name for name in (args.train_file, args.dataset_name) if name is not None]
    if len(given) > 1 or not (given or only_evaluates):
        raise ValueError("give --train_file or --dataset_name, one of them")
    if args.shuffle_buffer_size < 1:
        raise ValueError(f"--shuffle_buffer_size must be at least 1, got {args.shuffle_buffer_size}")
    if args.max_train_steps is None and not only_evaluates:
        raise ValueError("text is a stream without a length: give --max_train_steps (or --num_train_epochs 0)")
    if args.dataloader_num_workers > 1:
        raise ValueError(f"--dataloader_num_workers must be 0 or 1 for a stream, got {args.dataloader_num_workers}")
    if args.metric_for_best_model is not None and args.metric_for_best_model.removeprefix("eval_") not in metrics:
        raise ValueError(f"--metric_for_best_model {args.metric_for_best_model!r}: there are {', '.join(metrics)}")
    if args.validation_file is None and args.dataset_name is None:
        _check_evaluation_flags(args, "")


def _check_evaluation_flags(args: argparse.Namespace, why: str) -> None:
    for name in EVALUATION_FLAGS:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} needs --validation_file{why}")


def open_text_sources(args: argparse.Namespace) -> PretrainingText:
    """Opens the text.

    Raises:
        OSError, ValueError: A file or dataset cannot be read, or holds no text; there is none to evaluate on, and a
            flag needs it.
    """
    dev_files = check_text_files(args.validation_file or [])
    dev: Sequence[TextSource] = dev_files
    dev_hash = hash_files(dev_files)
    if args.dataset_name is None:
        files = check_text_files(args.train_file or [])
        return PretrainingText(files, dev, _text_hash("training", hash_files(files)), _text_hash("held-out", dev_hash))
    split_files, splits = _open_dataset(args)
    if "train" not in splits:
        raise ValueError(f"--dataset_name {args.dataset_name} has no split 'train', only {', '.join(splits)}")
    if not dev and "validation" in splits:
        dev = _dataset_shards(args, splits, split_files, "validation")
        dev_hash = _hash_dataset(split_files.get("validation", ()))
    if not dev:
        _check_evaluation_flags(args, f": {args.dataset_name} has no split 'validation'")
    train = _dataset_shards(args, splits, split_files, "train")
    names = {name: getattr(args, name) for name in ("dataset_name", "dataset_config_name", "text_column")}
    train_hash = _hash_dataset(split_files.get("train", ()))
    return PretrainingText(train, dev, names | _text_hash("training", train_hash), _text_hash("held-out", dev_hash))


def _text_hash(kind: str, value: str) -> dict[str, str]:
    return {f"hash of the {kind} text": value}


def _open_dataset(args: argparse.Namespace) -> tuple[Mapping[str, Sequence[str]], IterableDatasetDict]:
    """Finds the splits of `--dataset_name`: the paths or addresses of each one's files, where known, and its rows."""
    named = (args.dataset_name, args.dataset_config_name)
    files: Mapping[str, Sequence[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        # A stream needs a cache only while it is opened.
        cache = None if _is_writable(Path(datasets.config.HF_DATASETS_CACHE)) else temporary
        try:
            files = datasets.load_dataset_builder(*named, cache_dir=cache).config.data_files or {}
            return files, datasets.load_dataset(*named, streaming=True, cache_dir=cache)
        except Exception as error:  # `datasets`, the Hub's client and each file format have errors of their own
            raise _opening_error(args.dataset_name, files, error) from error


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
    args: argparse.Namespace, splits: IterableDatasetDict, files: Mapping[str, Sequence[str]], split: str
) -> list[TextSource]:
    rows, names = splits[split], [Path(file).name for file in files.get(split, ())]
    if len(names) != rows.num_shards:
        names = [f"shard {i}" for i in range(rows.num_shards)]
    shards = [
        DatasetRows(f"{args.dataset_name} ({split}), {names[i]}", rows, args.text_column, i)
        for i in range(rows.num_shards)
    ]
    # A wrong column is an error now.
    if all(next(shard.articles(), None) is None for shard in shards):
        raise ValueError(f"{args.dataset_name} ({split}) holds no row")
    return list(shards)


def _hash_dataset(files: Sequence[str]) -> str:
    paths = [Path(file) for file in files]
    if all(path.is_file() for path in paths):
        return hash_files(TextFile(path) for path in paths)
    # An address on the Hub holds the revision.
    return hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]
