"""Texts and pairs of texts to uptrain on: what the flags name, holding out, and batches of token ids."""

import argparse
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...text_files import read_columns, read_lines, read_pairs, text_columns
from ..engine.dataloaders import IGNORED_LABEL
from ..pretraining.masked_lm import MaskedLMPreparation

__all__ = [
    "Collator",
    "TextRows",
    "UptrainingData",
    "hash_texts",
    "hold_out",
    "load_uptraining_data",
    "masked_text_collator",
    "pair_collator",
    "text_collator",
]

# (epoch, index): what, with the run's seed, decides everything random about a row.
RowKey = tuple[int, int]
Row = str | tuple[str, ...]
Collator = Callable[[list[tuple[Any, RowKey]]], dict[str, Tensor]]
PARALLEL_FLAGS = ("source_file", "target_file", "validation_source_file", "validation_target_file")
# Held out of the training text where no validation file is given: this share, and no more than that many.
HELD_OUT_SHARE, MAX_HELD_OUT = 0.05, 512


@dataclass
class TextRows(Dataset):
    """Texts by index, each with its key of this epoch.

    Attributes:
        texts: One text, or one (source, target) pair, a row.
        epoch: The epoch that the keys are for.
    """

    texts: list[Any]
    epoch: int = 0

    def start_epoch(self, epoch: int) -> None:
        """Selects the epoch (from 0) whose keys the rows come with."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Any, RowKey]:
        return self.texts[index], (self.epoch, index)

    def lengths(self) -> list[int]:
        """Characters of each row (a pair's are added up): what rows are grouped by length with."""
        return [sum(map(len, row)) if isinstance(row, tuple) else len(row) for row in self.texts]

    def longest_first(self) -> "TextRows":
        """The same rows, longest first: little padding, and a batch that does not fit into memory fails at once."""
        lengths = self.lengths()
        order = sorted(range(len(self.texts)), key=lambda i: -lengths[i])
        return TextRows([self.texts[i] for i in order])


def hold_out(texts: list[Any], max_rows: int | None = None) -> tuple[list[Any], list[Any]]:
    """Splits off the last rows for evaluation (lines beside each other often come from one article).

    Args:
        texts: All rows.
        max_rows: Of the 5 % that are held out, no more than this; None: 512.

    Returns:
        Rows to train on, rows held out.

    Raises:
        ValueError: There are fewer than two.
    """
    if len(texts) < 2:
        raise ValueError("the training text has one row, so none can be held out: give a validation file")
    count = min(max_rows or MAX_HELD_OUT, max(1, int(HELD_OUT_SHARE * len(texts))))
    return texts[:-count], texts[-count:]


def hash_texts(texts: list[Any]) -> str:
    """Hash of all rows, by which a resumed run knows that they are the same."""
    digest = hashlib.sha256()
    for row in texts:
        for text in row if isinstance(row, tuple) else (row,):
            digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


def text_collator(tokenizer: PreTrainedTokenizerBase, max_length: int, pad_to_multiple_of: int | None) -> Collator:
    """Makes the function from `TextRows` rows, texts or pairs of them, to a batch of the tokenizer's inputs [b, n]."""

    def collate(rows: list[tuple[Row, RowKey]]) -> dict[str, Tensor]:
        return _tokenize(tokenizer, [text for text, _ in rows], max_length, pad_to_multiple_of)

    return collate


def masked_text_collator(
    tokenizer: PreTrainedTokenizerBase, max_length: int, pad_to_multiple_of: int | None, probability: float, seed: int
) -> Collator:
    """Makes the function from rows to a batch of masked language modelling, with "labels" [b, n].

    Args:
        tokenizer: Has a mask token.
        max_length, pad_to_multiple_of: As the flags of these names.
        probability: Chance of each token to be predicted.
        seed: With a row's key it alone decides which are, so that a resumed run masks the same ones.

    Raises:
        ValueError: The tokenizer lacks a token that masking needs.
    """
    prepare = MaskedLMPreparation(tokenizer, max_length, probability, seed)

    def collate(rows: list[tuple[Row, RowKey]]) -> dict[str, Tensor]:
        batch = _tokenize(tokenizer, [text for text, _ in rows], max_length, pad_to_multiple_of)
        masked = [
            prepare.mask(ids, np.random.default_rng((seed, *key)))
            for ids, (_, key) in zip(batch["input_ids"].numpy(), rows, strict=True)
        ]
        inputs, labels = (torch.from_numpy(np.stack(part)) for part in zip(*masked, strict=True))
        return {**batch, "input_ids": inputs, "labels": labels}

    return collate


def pair_collator(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    pad_to_multiple_of: int | None,
    max_target_length: int,
    decoder_start_token_id: int,
    source_prefix: str = "",
) -> Collator:
    """Makes the function from (source, target) rows to a batch of teacher forcing.

    Its batches hold the tokenizer's inputs of the sources [b, m], "labels" [b, n] and "decoder_input_ids" [b, n]: the
    labels moved one to the right.
    """

    def collate(rows: list[tuple[tuple[str, str], RowKey]]) -> dict[str, Tensor]:
        batch = _tokenize(
            tokenizer, [source_prefix + source for (source, _), _ in rows], max_length, pad_to_multiple_of
        )
        targets = tokenizer(
            text_target=[target for (_, target), _ in rows],
            padding=True,
            truncation=True,
            max_length=max_target_length,
            pad_to_multiple_of=pad_to_multiple_of,
            return_tensors="pt",
        )
        ids = targets["input_ids"]
        shifted = torch.cat([torch.full_like(ids[:, :1], decoder_start_token_id), ids[:, :-1]], dim=1)
        labels = ids.masked_fill(targets["attention_mask"] == 0, IGNORED_LABEL)
        return {**batch, "decoder_input_ids": shifted, "labels": labels}

    return collate


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Row], max_length: int, pad_to_multiple_of: int | None
) -> dict[str, Tensor]:
    # Pairs in one sequence, as the tokenizer joins them; the longer of the two is cut.
    columns = [list(column) for column in zip(*texts, strict=True)] if isinstance(texts[0], tuple) else [texts]
    encoded = tokenizer(
        *columns,
        padding=True,
        truncation=True,
        max_length=max_length,
        pad_to_multiple_of=pad_to_multiple_of,
        return_tensors="pt",
    )
    return dict(encoded)


@dataclass(frozen=True)
class UptrainingData:
    """Rows to train on, rows to evaluate, and how they become batches."""

    train: TextRows
    held_out: TextRows
    collate: Collator


def load_uptraining_data(
    args: argparse.Namespace, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> UptrainingData:
    """Reads what the flags of `scripts/uptrain.py` name: texts or pairs for an encoder, pairs for an encoder-decoder.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file holds something else, or a flag is missing.
    """
    collate = _collator(args, config, tokenizer)
    train, held_out = (_read_pairs if config.is_encoder_decoder else _read_texts)(args)
    if not held_out:
        train, held_out = hold_out(train, args.max_eval_samples)
    return UptrainingData(
        TextRows(train[: args.max_train_samples]), TextRows(held_out[: args.max_eval_samples]).longest_first(), collate
    )


def _read_texts(args: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    _refuse(args, PARALLEL_FLAGS, "is for an encoder-decoder; an encoder reads --train_file")
    if not args.train_file:
        raise ValueError(f"--objective {args.objective} of an encoder needs --train_file")
    columns = text_columns([*args.train_file, *(args.validation_file or [])], args.text_columns, "--text_columns")
    if not columns:
        return read_lines(args.train_file), read_lines(args.validation_file or [])
    train, held_out = (
        read_columns(paths or [], columns, "--text_columns") for paths in (args.train_file, args.validation_file)
    )
    if len(columns) == 1:
        return [text for (text,) in train], [text for (text,) in held_out]
    return train, held_out


def _read_pairs(args: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    _refuse(args, ("text_columns",), "is for an encoder; a table of pairs has --source_column and --target_column")
    train, held_out = (args.source_file, args.target_file), (args.validation_source_file, args.validation_target_file)
    if any((source is None) != (target is None) for source, target in (train, held_out)):
        raise ValueError("--source_file and --target_file belong together, and so do their validation twins")
    if (args.source_file is None) == (args.train_file is None):
        raise ValueError("an encoder-decoder needs --source_file and --target_file, or else a table as --train_file")
    if held_out[0] and args.validation_file:
        raise ValueError("give --validation_source_file and --validation_target_file or --validation_file, not both")
    columns = (args.source_column, args.target_column), "--source_column and --target_column"
    return (
        read_pairs(*train) if args.source_file else read_columns(args.train_file, *columns),
        read_pairs(*held_out) if held_out[0] else read_columns(args.validation_file or [], *columns),
    )


def _refuse(args: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} {reason}")


def _collator(args: argparse.Namespace, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Collator:
    shape = args.max_length, args.pad_to_multiple_of
    if args.objective == "mlm":
        return masked_text_collator(tokenizer, *shape, args.mlm_probability, args.seed)
    if not config.is_encoder_decoder:
        return text_collator(tokenizer, *shape)
    start = config.decoder_start_token_id
    if start is None:
        raise ValueError(f"{args.model_name_or_path} has no decoder_start_token_id: its decoder could not begin")
    return pair_collator(tokenizer, *shape, args.max_target_length or args.max_length, start, args.source_prefix)
