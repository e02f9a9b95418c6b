"""The flags that name a text to pretrain on: files, plain or .gz, or a streamed `datasets` source."""

import argparse
from typing import Any

from datasets import get_dataset_split_names, load_dataset

from hf_attn_variants.training.text_data import DatasetRows, TextSource, check_text_files, hash_files

__all__ = ["add_text_arguments", "check_text_arguments", "open_text_sources"]


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
    only_evaluates = args.max_train_steps is None and args.num_train_epochs == 0
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
        for name in ("metric_for_best_model", "early_stopping_patience", "eval_steps"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} needs --validation_file")


def open_text_sources(args: argparse.Namespace) -> tuple[list[TextSource], list[TextSource], dict[str, Any]]:
    """Opens the text.

    Returns:
        Training shards, held-out ones (none: no evaluation), and what tells this training text from others.

    Raises:
        OSError, ValueError: A file or dataset cannot be read, or holds no text.
    """
    dev: list[TextSource] = list(check_text_files(args.validation_file or []))
    if args.dataset_name is None:
        files = check_text_files(args.train_file or [])
        return list(files), dev, {"hash of the training text": hash_files(files)}
    name, config = args.dataset_name, args.dataset_config_name
    try:
        if not dev and "validation" in get_dataset_split_names(name, config):
            dev = [_dataset_rows(args, "validation")]
        train: list[TextSource] = [_dataset_rows(args, "train")]
    except (ValueError, OSError):
        raise
    except Exception as error:  # `datasets` and the Hub's client have errors of their own for a wrong name
        raise ValueError(f"--dataset_name {name}: {type(error).__name__}: {error}") from error
    return train, dev, {"dataset_name": name, "dataset_config_name": config, "text_column": args.text_column}


def _dataset_rows(args: argparse.Namespace, split: str) -> DatasetRows:
    rows = load_dataset(args.dataset_name, args.dataset_config_name, split=split, streaming=True)
    source = DatasetRows(f"{args.dataset_name} ({split})", rows, args.text_column)
    next(source.articles(), None)  # a wrong column is an error now
    return source
