"""Texts and pairs of texts as training rows: their keys, their hash, and how they become batches of token ids."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from .dataloaders import IGNORED_LABEL
from .masking import MaskedLMPreparation

__all__ = ["Collator", "TextRows", "hash_texts", "masked_text_collator", "pair_collator", "text_collator"]

# (epoch, index): what, with the run's seed, decides everything random about a row.
RowKey = tuple[int, int]
Row = str | tuple[str, ...]
Collator = Callable[[list[tuple[Any, RowKey]]], dict[str, Tensor]]


@dataclass
class TextRows(Dataset):
    """Texts, or pairs (source, target), by index, each with its key of the epoch that `start_epoch` selects."""

    texts: list[Any]
    epoch: int = 0

    def start_epoch(self, epoch: int) -> None:
        """Select the epoch (from 0) whose keys the rows come with."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Any, RowKey]:
        return self.texts[index], (self.epoch, index)

    def lengths(self) -> list[int]:
        """Return the characters of each row, a pair's added up, to group rows by length."""
        return [sum(map(len, row)) if isinstance(row, tuple) else len(row) for row in self.texts]

    def longest_first(self) -> "TextRows":
        """Return the same rows, longest first: little padding, and memory that is too small fails at once."""
        by_length = sorted(zip(self.lengths(), self.texts, strict=True), key=lambda row: -row[0])
        return TextRows([text for _, text in by_length])


def hash_texts(texts: list[Any]) -> str:
    """Return the hash of all rows, by which a resumed run knows that they are the same."""
    digest = hashlib.sha256()
    for row in texts:
        for text in row if isinstance(row, tuple) else (row,):
            digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


def text_collator(tokenizer: PreTrainedTokenizerBase, max_length: int, pad_to_multiple_of: int | None) -> Collator:
    """Make the function from `TextRows` rows, texts or pairs of them, to a batch of the tokenizer's inputs [b, n]."""

    def collate(rows: list[tuple[Row, RowKey]]) -> dict[str, Tensor]:
        return _encode(tokenizer, [text for text, _ in rows], max_length, pad_to_multiple_of)

    return collate


def masked_text_collator(
    tokenizer: PreTrainedTokenizerBase, max_length: int, pad_to_multiple_of: int | None, probability: float, seed: int
) -> Collator:
    """Make the function from rows to a batch of masked language modelling, with "labels" [b, n].

    Each token is predicted with this probability. The seed and a row's key alone decide which are, so that a resumed
    run masks the same ones.

    Raises:
        ValueError: if the tokenizer lacks a token that masking needs.
    """
    prepare = MaskedLMPreparation(tokenizer, max_length, probability, seed)

    def collate(rows: list[tuple[Row, RowKey]]) -> dict[str, Tensor]:
        batch = _encode(tokenizer, [text for text, _ in rows], max_length, pad_to_multiple_of)
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
    """Make the function from (source, target) rows to a batch of teacher forcing.

    Its batches hold the tokenizer's inputs of the sources [b, m], "labels" [b, n] and "decoder_input_ids" [b, n]: the
    labels moved one to the right.
    """

    def collate(rows: list[tuple[tuple[str, str], RowKey]]) -> dict[str, Tensor]:
        sources, targets = zip(*(pair for pair, _ in rows), strict=True)
        batch = _encode(tokenizer, [source_prefix + source for source in sources], max_length, pad_to_multiple_of)
        right = _encode(tokenizer, list(targets), max_target_length, pad_to_multiple_of, "text_target")
        ids = right["input_ids"]
        shifted = torch.cat([torch.full_like(ids[:, :1], decoder_start_token_id), ids[:, :-1]], dim=1)
        labels = ids.masked_fill(right["attention_mask"] == 0, IGNORED_LABEL)
        return {**batch, "decoder_input_ids": shifted, "labels": labels}

    return collate


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Row],
    max_length: int,
    pad_to_multiple_of: int | None,
    argument: str = "text",
) -> dict[str, Tensor]:
    """Return the tokenizer's inputs; a pair is one sequence, of which the longer text is cut."""
    columns = {argument: texts}
    if isinstance(texts[0], tuple):
        columns = dict(zip(("text", "text_pair"), (list(column) for column in zip(*texts, strict=True)), strict=True))
    options = {"padding": True, "truncation": True, "return_tensors": "pt"}
    return dict(tokenizer(**columns, **options, max_length=max_length, pad_to_multiple_of=pad_to_multiple_of))
