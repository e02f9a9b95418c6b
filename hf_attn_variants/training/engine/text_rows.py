"""Texts and text pairs as training rows, and the masking of tokens for masked language models.

Shapes use these letters: b is the number of rows, n and m are lengths in tokens, and V is the vocabulary size.
"""

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

# Of the chosen tokens, this share becomes the mask token. The share between the two bounds becomes a random token, and
# the rest does not change (BERT).
MASKED_SHARE, RANDOM_BOUND = 0.8, 0.9
# Keys that separate random generators of different purposes; a generator is seeded with the seed of the run, one of
# these keys and the position of the block. 0 and 1 belong to the text stream, 4 to span corruption.
MASKING_KEY, PAIRING_KEY = 2, 5
# The share of pairs that are changed: the second segment comes from another text (nsp), or both are swapped (sop).
CHANGED_SHARE = 0.5
UNCHANGED, CHANGED = 0, 1


def find_word_starts(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return whether each token of the vocabulary begins a word, as a bool array [V].

    WordPiece marks the other tokens ("##"). SentencePiece ("▁") and byte-level BPE ("Ġ") mark the tokens that begin a
    word; there, a token without a letter or digit also counts as a word, as in the code of ALBERT.

    Raises:
        ValueError: If the vocabulary has none of these marks.
    """
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(get_vocabulary_size(tokenizer))))]
    if any(token.startswith("##") for token in tokens):
        return np.array([not token.startswith("##") for token in tokens])
    for mark in ("▁", "Ġ"):
        if any(token.startswith(mark) for token in tokens):
            return np.array([token.startswith(mark) or not any(map(str.isalnum, token)) for token in tokens])
    raise ValueError("--whole_word_mask needs a tokenizer that marks the beginnings of words with '##', '▁' or 'Ġ'.")


class MaskedLMPreparation:
    """Makes a masked example from a block of tokens and pads it to a fixed length.

    The example is [CLS] block [SEP]. With a sentence task it is [CLS] segment [SEP] segment [SEP], for which the block
    is cut in two.

    Args:
        tokenizer: A tokenizer with [CLS], [SEP], [MASK] and padding tokens.
        length: The length n of an example, including special tokens.
        probability: The probability that a token (with `whole_words`: a word) is chosen.
        seed: The random seed.
        whole_words: Whether to choose whole words.
        sentence_task: "nsp" (next sentence prediction), "sop" (sentence order prediction) or None.

    Raises:
        ValueError: If the tokenizer lacks one of these tokens, or does not mark words.
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
                f"The tokenizer has no {', '.join(missing)}, which masked language modeling needs. Use an encoder, or "
                "`attn-variants pretrain-t5` for a T5."
            )
        self.length, self.probability, self.seed = length, probability, seed
        self.sentence_task = sentence_task
        self.block_length, self.separator = length - (2 if sentence_task is None else 3), self.sep_id
        self.starts = find_word_starts(tokenizer) if whole_words else None
        self.special = np.zeros(get_vocabulary_size(tokenizer), dtype=bool)
        # Not `all_special_ids`, because some tokenizers include punctuation there.
        self.special[[getattr(tokenizer, name) for name in needed]] = True
        self.ordinary_ids = np.flatnonzero(~self.special)

    @property
    def takes_other_block(self) -> bool:
        """Whether the second segment of a pair can come from another block."""
        return self.sentence_task == "nsp"

    def __call__(
        self, block: np.ndarray, key: tuple[int, ...], other: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Mask a block of at most `block_length` tokens (n - 2, or n - 3 with a sentence task).

        Args:
            block: The token ids.
            key: The epoch and the number of the block in it. Together with the seed, it determines the masks.
            other: Another block for a changed pair of "nsp". Without it, the pair is not changed.

        Returns:
            "input_ids", "attention_mask" and "labels" (-100 for tokens that are not predicted), each [n]. With a
            sentence task also "token_type_ids" [n] and "sentence_labels" [], which is 1 if the pair was changed, and
            -100 if the block is too short for a pair.
        """
        segments, sentence_label = [block], None
        if self.sentence_task is not None:
            segments, sentence_label = self._pair(block, key, other)
        ids = np.full(self.length, self.pad_id, dtype=np.int64)
        used = 1 + sum(len(segment) + 1 for segment in segments)
        ids[:used] = [self.cls_id, *(token for segment in segments for token in (*segment, self.sep_id))]
        masked, labels = self.mask(ids, np.random.default_rng((self.seed, MASKING_KEY, *key)))
        positions = np.arange(self.length)
        example = {"input_ids": masked, "attention_mask": (positions < used).astype(np.int64), "labels": labels}
        if sentence_label is not None:
            begin = 2 + len(segments[0])
            example["token_type_ids"] = ((positions >= begin) & (positions < used)).astype(np.int64)
            example["sentence_labels"] = np.array(sentence_label)
        return example

    def _pair(self, block: np.ndarray, key: tuple[int, ...], other: np.ndarray | None) -> tuple[list[np.ndarray], int]:
        """Cut a block into two segments, change half of the pairs, and return the segments and the sentence label."""
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
        """Choose tokens and replace them: 80% by the mask token, 10% by a random token (arXiv:1810.04805).

        The other 10% of the chosen tokens do not change.

        Args:
            ids: Token ids [n].
            generator: The random generator.

        Returns:
            The inputs [n] and the labels [n].
        """
        maskable = ~self.special[ids]
        draws = generator.random(len(ids))
        if self.starts is not None:
            after_special = np.concatenate([[True], ~maskable[:-1]])
            words = np.cumsum(self.starts[ids] | ~maskable | after_special) - 1
            draws = draws[words]
        chosen = maskable & (draws < self.probability)
        action = generator.random(len(ids))
        replaced = np.where(action < MASKED_SHARE, self.mask_id, generator.choice(self.ordinary_ids, len(ids)))
        inputs = np.where(chosen & (action < RANDOM_BOUND), replaced, ids)
        return inputs, np.where(chosen, ids, IGNORED_LABEL)


# (epoch, index). Together with the seed of the run, it determines all random choices for a row.
RowKey = tuple[int, int]
Row = str | tuple[str, ...]
Collator = Callable[[list[tuple[Any, RowKey]]], dict[str, Tensor]]


@dataclass
class TextRows(Dataset):
    """A data set of texts or (source, target) pairs, which yields each row with its key.

    Args:
        texts: The rows.
        epoch: The epoch in the keys.
    """

    texts: list[Any]
    epoch: int = 0

    def start_epoch(self, epoch: int) -> None:
        """Select the epoch (from 0) in the keys of the rows."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Any, RowKey]:
        return self.texts[index], (self.epoch, index)

    def lengths(self) -> list[int]:
        """Return the number of characters of each row, with the sum for a pair, to group rows by length."""
        return [sum(map(len, row)) if isinstance(row, tuple) else len(row) for row in self.texts]

    def longest_first(self) -> "TextRows":
        """Return the rows with the longest first, so that padding is short and a lack of memory shows at once."""
        by_length = sorted(zip(self.lengths(), self.texts, strict=True), key=lambda row: -row[0])
        return TextRows([text for _, text in by_length])


def hash_texts(texts: list[Any]) -> str:
    """Return a hash of all rows, with which a resumed run checks that they have not changed."""
    digest = hashlib.sha256()
    for row in texts:
        for text in row if isinstance(row, tuple) else (row,):
            digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


def make_text_collator(
    tokenizer: PreTrainedTokenizerBase, max_length: int, pad_to_multiple_of: int | None
) -> Collator:
    """Make a function that tokenizes rows of `TextRows` (texts or pairs) to a batch of inputs [b, n]."""

    def collate(rows: list[tuple[Row, RowKey]]) -> dict[str, Tensor]:
        return _tokenize(tokenizer, [text for text, _ in rows], max_length, pad_to_multiple_of)

    return collate


def make_masked_text_collator(
    tokenizer: PreTrainedTokenizerBase, max_length: int, pad_to_multiple_of: int | None, probability: float, seed: int
) -> Collator:
    """Make a function that tokenizes and masks rows of `TextRows` for masked language modeling.

    The batch also contains "labels" [b, n].

    Args:
        tokenizer: The tokenizer.
        max_length: The maximum number of tokens of a row.
        pad_to_multiple_of: If given, batches are padded to a multiple of this number of tokens.
        probability: The probability that a token is predicted.
        seed: The random seed. With the key of a row, it determines the masks, so that a resumed run repeats them.

    Raises:
        ValueError: If the tokenizer lacks a special token that masking needs.
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
    """Make a function that tokenizes (source, target) rows to a batch for teacher forcing.

    The batch contains the inputs of the sources [b, m], "labels" [b, n] and "decoder_input_ids" [b, n], which are the
    labels shifted to the right by one.
    """

    def collate(rows: list[tuple[tuple[str, str], RowKey]]) -> dict[str, Tensor]:
        sources, targets = zip(*(pair for pair, _ in rows), strict=True)
        batch = _tokenize(tokenizer, [source_prefix + source for source in sources], max_length, pad_to_multiple_of)
        target = _tokenize(tokenizer, list(targets), max_target_length, pad_to_multiple_of, "text_target")
        ids = target["input_ids"]
        shifted = torch.cat([torch.full_like(ids[:, :1], decoder_start_token_id), ids[:, :-1]], dim=1)
        labels = ids.masked_fill(target["attention_mask"] == 0, IGNORED_LABEL)
        return {**batch, "decoder_input_ids": shifted, "labels": labels}

    return collate


def _tokenize(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Row],
    max_length: int,
    pad_to_multiple_of: int | None,
    argument: str = "text",
) -> dict[str, Tensor]:
    """Return the inputs of the tokenizer. If a pair is too long, the longer one of its texts is cut."""
    columns = {argument: texts}
    if isinstance(texts[0], tuple):
        columns = dict(zip(("text", "text_pair"), (list(column) for column in zip(*texts, strict=True)), strict=True))
    options = {"padding": True, "truncation": True, "return_tensors": "pt"}
    return dict(tokenizer(**columns, **options, max_length=max_length, pad_to_multiple_of=pad_to_multiple_of))
