"""Texts and pairs of texts as training rows, and the masking of their tokens for masked language models."""

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
from .tokenizers import get_vocabulary_size

__all__ = [
    "Collator",
    "MaskedLMPreparation",
    "TextRows",
    "find_word_starts",
    "hash_texts",
    "make_masked_text_collator",
    "make_pair_collator",
    "make_text_collator",
]

# Of the chosen tokens, this share becomes the mask token, and a share up to the next bound a random token (BERT).
MASKED_SHARE, RANDOM_BOUND = 0.8, 0.9
# What random numbers are for: with the seed and a block's place they seed a generator. 0 and 1 are the text stream's,
# 4 is span corruption's.
MASKING_KEY, PAIRING_KEY = 2, 5
# Of the pairs, this share is changed: its second segment is of other text (nsp), or both change places (sop).
CHANGED_SHARE = 0.5
UNCHANGED, CHANGED = 0, 1


def find_word_starts(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return of each token whether it begins a word: a bool array [V].

    WordPiece marks the others ("##"), SentencePiece ("▁") and byte-level BPE ("Ġ") those that do; under the latter two
    a token without a letter or digit is a word of its own, as in ALBERT's code.

    Raises:
        ValueError: if the vocabulary marks neither.
    """
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(get_vocabulary_size(tokenizer))))]
    if any(token.startswith("##") for token in tokens):
        return np.array([not token.startswith("##") for token in tokens])
    for mark in ("▁", "Ġ"):
        if any(token.startswith(mark) for token in tokens):
            return np.array([token.startswith(mark) or not any(map(str.isalnum, token)) for token in tokens])
    raise ValueError("--whole_word_mask: the tokenizer marks no beginnings of words (neither '##' nor '▁' nor 'Ġ')")


class MaskedLMPreparation:
    """Makes a masked example of a block of tokens, padded to one length: [CLS] block [SEP], or, with a sentence task,
    [CLS] segment [SEP] segment [SEP] of the block cut in two.

    Args:
        tokenizer: has [CLS], [SEP], [MASK] and padding tokens.
        length: n, special tokens included.
        probability: the chance of each token (with `whole_words`: of each word) to be chosen.
        sentence_task: "nsp" (does the second segment follow?), "sop" (are they in order?) or None.

    Raises:
        ValueError: if the tokenizer lacks a token, or does not mark words.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        probability: float,
        seed: int,
        whole_words: bool = False,
        sentence_task: str | None = None,
    ):
        needed = ("cls_token_id", "sep_token_id", "mask_token_id", "pad_token_id")
        self.cls_id, self.sep_id, self.mask_id, self.pad_id = (getattr(tokenizer, name) for name in needed)
        missing = [name.removesuffix("_id") for name in needed if getattr(tokenizer, name) is None]
        if missing:
            raise ValueError(
                f"the tokenizer has no {', '.join(missing)}, and masked-LM pretraining needs one: it is for "
                "encoders, a T5 is pretrained by `attn-variants pretrain-t5`"
            )
        self.length, self.probability, self.seed = length, probability, seed
        self.sentence_task = sentence_task
        self.block_length, self.separator = length - (2 if sentence_task is None else 3), self.sep_id
        self.starts = find_word_starts(tokenizer) if whole_words else None
        self.special = np.zeros(get_vocabulary_size(tokenizer), dtype=bool)
        # Not `all_special_ids`: some tokenizers count punctuation among them.
        self.special[[getattr(tokenizer, name) for name in needed]] = True
        self.ordinary_ids = np.flatnonzero(~self.special)

    @property
    def takes_other_block(self) -> bool:
        """Whether a pair can have a segment of another block."""
        return self.sentence_task == "nsp"

    def __call__(
        self, block: np.ndarray, key: tuple[int, ...], other: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Mask a block of at most `block_length` tokens: n - 2, or n - 3 with a sentence task.

        With the seed, its key (epoch, number in the epoch) alone decides the masks. Without an `other` block a pair
        stays as it is under "nsp".

        Returns:
            "input_ids", "attention_mask" and "labels" (-100 where nothing is to be predicted), each [n]; with a
            sentence task "token_type_ids" [n] and "sentence_labels" [], 1 where the pair was changed, -100 where the
            block is too short for one.
        """
        segments, sentence_label = [block], None
        if self.sentence_task is not None:
            segments, sentence_label = self._pair(block, key, other)
        ids = np.full(self.length, self.pad_id, dtype=np.int64)
        used = 1 + sum(len(segment) + 1 for segment in segments)
        ids[:used] = [self.cls_id, *(token for segment in segments for token in (*segment, self.sep_id))]
        masked, labels = self.mask(ids, np.random.default_rng((self.seed, MASKING_KEY, *key)))
        place = np.arange(self.length)
        example = {"input_ids": masked, "attention_mask": (place < used).astype(np.int64), "labels": labels}
        if sentence_label is not None:
            begin = 2 + len(segments[0])
            example["token_type_ids"] = ((place >= begin) & (place < used)).astype(np.int64)
            example["sentence_labels"] = np.array(sentence_label)
        return example

    def _pair(self, block: np.ndarray, key: tuple[int, ...], other: np.ndarray | None) -> tuple[list[np.ndarray], int]:
        if len(block) < 2:
            return [block, block[:0]], IGNORED_LABEL
        generator = np.random.default_rng((self.seed, PAIRING_KEY, *key))
        cut = generator.integers(1, len(block))
        first, second = block[:cut], block[cut:]
        if generator.random() >= CHANGED_SHARE or (self.sentence_task == "nsp" and other is None):
            return [first, second], UNCHANGED
        if other is None or self.sentence_task == "sop":
            return [second, first], CHANGED
        return [first, other[: len(second)]], CHANGED

    def mask(self, ids: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Replace chosen tokens: 80% by the mask token, 10% by a random one, 10% by themselves (arXiv:1810.04805).

        Return the inputs and the labels [n].
        """
        maskable = ~self.special[ids]
        draws = generator.random(len(ids))
        if self.starts is not None:
            after_special = np.concatenate([[True], ~maskable[:-1]])
            words = np.cumsum(self.starts[ids] | ~maskable | after_special) - 1
            draws = draws[words]
        chosen = maskable & (draws < self.probability)
        fate = generator.random(len(ids))
        replaced = np.where(fate < MASKED_SHARE, self.mask_id, generator.choice(self.ordinary_ids, len(ids)))
        inputs = np.where(chosen & (fate < RANDOM_BOUND), replaced, ids)
        return inputs, np.where(chosen, ids, IGNORED_LABEL)


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


def make_text_collator(
    tokenizer: PreTrainedTokenizerBase, max_length: int, pad_to_multiple_of: int | None
) -> Collator:
    """Make the function from `TextRows` rows, texts or pairs of them, to a batch of the tokenizer's inputs [b, n]."""

    def collate(rows: list[tuple[Row, RowKey]]) -> dict[str, Tensor]:
        return _tokenize(tokenizer, [text for text, _ in rows], max_length, pad_to_multiple_of)

    return collate


def make_masked_text_collator(
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
        batch = _tokenize(tokenizer, [text for text, _ in rows], max_length, pad_to_multiple_of)
        masked = [
            prepare.mask(ids, np.random.default_rng((seed, *key)))
            for ids, (_, key) in zip(batch["input_ids"].numpy(), rows, strict=True)
        ]
        inputs, labels = (torch.from_numpy(np.stack(part)) for part in zip(*masked, strict=True))
        return {**batch, "input_ids": inputs, "labels": labels}

    return collate


def make_pair_collator(
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
        batch = _tokenize(tokenizer, [source_prefix + source for source in sources], max_length, pad_to_multiple_of)
        right = _tokenize(tokenizer, list(targets), max_target_length, pad_to_multiple_of, "text_target")
        ids = right["input_ids"]
        shifted = torch.cat([torch.full_like(ids[:, :1], decoder_start_token_id), ids[:, :-1]], dim=1)
        labels = ids.masked_fill(right["attention_mask"] == 0, IGNORED_LABEL)
        return {**batch, "decoder_input_ids": shifted, "labels": labels}

    return collate


def _tokenize(
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
