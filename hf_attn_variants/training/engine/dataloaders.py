"""Dataloaders whose order depends only on the seed and the epoch, and collators for texts and text pairs.

A run can resume at any point in an epoch. In shapes, b is the number of rows, n and m are lengths in tokens, and V is
the vocabulary size.
"""

import hashlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import get_length_grouped_indices

from .checkpoints import STOP_SIGNALS
from .models import get_vocabulary_size


@dataclass(frozen=True)
class TrainingBatchSource:
    """The training batches of a run.

    Attributes:
        loader: Yields the batches. It is already prepared by Accelerate.
        start_epoch: A function that is called with the epoch number at the start of each epoch.
        count: The number of batches per process and epoch, or None for a stream of unknown length.
        examples: The number of examples per epoch, or None for a stream.
        seek: A function that moves to a position in the middle of an epoch (see `TrainingLoop`). If None, batches that
            have already been used are read again and skipped.
    """

    loader: Any
    start_epoch: Callable[[int], None]
    count: int | None = None
    examples: int | None = None
    seek: Callable[[int, list[int]], None] | None = None


# A prepared dataloader, and the row indices in the order of the dataloader.
EvalBatches = tuple[DataLoader, Sequence[int]]
# The label of tokens that do not contribute to the loss, as in PyTorch's cross-entropy.
IGNORED_LABEL = -100


class EpochSampler(Sampler[int]):
    """Shuffles example indices by seed and epoch, optionally in batches of examples with similar lengths.

    The sampler has no random state. After `start_epoch(n)`, every iteration yields the order for epoch n. The method
    is not called `set_epoch` because Accelerate calls a method with that name and its own epoch count, which restarts
    at 0 in a resumed run.

    Args:
        length: The number of examples.
        seed: The random seed.
        group_lengths: The number of tokens in each example, used to group examples by length. If None, examples are
            not grouped.
        batch_size: The size of the batches into which examples are grouped.

    Example:
        ```python
        sampler = EpochSampler(length=1000, seed=42)
        sampler.start_epoch(3)
        order = list(sampler)
        ```
    """

    def __init__(self, length: int, seed: int, group_lengths: Sequence[int] | None = None, batch_size: int = 1):
        self.length, self.seed, self.batch_size = length, seed, batch_size
        self.group_lengths = list(group_lengths) if group_lengths is not None else None
        self.epoch = 0

    def start_epoch(self, epoch: int) -> None:
        """Select the epoch (counted from 0) whose order the sampler yields."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        # `seed + epoch` is not used because seed 1 would then produce the orders of seed 0, shifted by one epoch.
        seed = int(torch.randint(2**62, (self.epoch + 1,), generator=torch.Generator().manual_seed(self.seed))[-1])
        generator = torch.Generator().manual_seed(seed)
        if self.group_lengths is None:
            return iter(torch.randperm(self.length, generator=generator).tolist())
        indices = get_length_grouped_indices(self.group_lengths, self.batch_size, generator=generator)
        return iter(self._shuffle_batches(indices, generator))

    def _shuffle_batches(self, indices: list[int], generator: torch.Generator) -> list[int]:
        """Shuffle the batches, each of which contains indices of examples with similar lengths."""
        # Lengths decrease within each group of fifty batches. Without shuffling, the model would alternate between
        # long and short texts and forget one kind while it learns the other. The batch with the longest texts stays
        # first, so that the run fails immediately if memory is insufficient. An incomplete batch stays last.
        size = self.batch_size
        batches = [indices[start : start + size] for start in range(0, len(indices), size)]
        shuffled = torch.randperm(max(len(indices) // size - 1, 0), generator=generator) + 1
        order = [0, *shuffled.tolist(), *([len(batches) - 1] if len(indices) % size and len(batches) > 1 else [])]
        return [index for number in order for index in batches[number]]


def create_dataloader(data: Any, num_workers: int = 0, seed: int = 0, **options: Any) -> DataLoader:
    """Create a dataloader that does not use the global random state, so that dropout is reproducible.

    Args:
        data: The examples.
        num_workers: The number of processes that prepare batches. They ignore stop signals.
        seed: The seed of the dataloader's own random generator.
        **options: Other arguments of `DataLoader`. The output of `collate_fn` must depend only on the examples,
            because batches are prepared before they are used.
    """
    on_gpu = bool(PartialState._shared_state) and PartialState().device.type == "cuda"
    return DataLoader(
        data,
        num_workers=num_workers,
        worker_init_fn=_ignore_stop_signals,
        # Without a separate generator, each new iterator would draw a seed from the global random state.
        generator=torch.Generator().manual_seed(seed),
        pin_memory=on_gpu and torch.cuda.is_available(),  # do not initialize CUDA for a run on the CPU
        **options,
    )


def create_stream_dataloader(
    accelerator: Accelerator, stream: IterableDataset, seed: int, num_workers: int = 0
) -> DataLoader:
    """Create and prepare a dataloader for a stream that yields different batches on each process.

    `num_workers` must be 0 or 1. `Accelerator.prepare` is not used because it would read the stream only on the main
    process, fill the last batch with rows from the first batch, and use the global random state.
    """
    return prepare_data_loader(
        create_dataloader(stream, num_workers, seed, batch_size=None),
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        rng_types=[],
        dispatch_batches=False,
    )


def _ignore_stop_signals(worker_id: int) -> None:
    """Ignore SIGTERM and Ctrl-C in a dataloader worker."""
    # All processes of a job receive these signals, but the training loop needs its workers until it has saved a
    # checkpoint.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# The cumulative shares of the chosen tokens that are replaced by the mask token and by a random token. The other
# chosen tokens are left unchanged, as in BERT.
MASKED_SHARE, RANDOM_BOUND = 0.8, 0.9
# These keys ensure that random choices for different purposes are independent. Each generator is seeded with the seed
# of the run, one of the keys and the position of the block. The text stream uses keys 0 and 1, and span corruption
# uses key 4.
MASKING_KEY, PAIRING_KEY = 2, 5
# The share of pairs that are changed: the second segment is replaced by one from another text (nsp), or the segments
# are swapped (sop).
CHANGED_SHARE = 0.5
UNCHANGED, CHANGED = 0, 1


def make_word_start_mask(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return a boolean array [V] that is True for vocabulary tokens that start a word.

    WordPiece marks tokens that continue a word ("##"). SentencePiece ("▁") and byte-level BPE ("Ġ") mark tokens that
    start a word. With SentencePiece and BPE, tokens without a letter or digit also count as word starts, as in the
    original ALBERT code.

    Raises:
        ValueError: If the vocabulary contains none of these marks.
    """
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(get_vocabulary_size(tokenizer))))]
    if any(token.startswith("##") for token in tokens):
        return np.array([not token.startswith("##") for token in tokens])
    for mark in ("▁", "Ġ"):
        if any(token.startswith(mark) for token in tokens):
            return np.array([token.startswith(mark) or not any(map(str.isalnum, token)) for token in tokens])
    raise ValueError("--whole_word_mask requires a tokenizer that marks word starts with '##', '▁' or 'Ġ'.")


class MaskedLMPreparer:
    """Prepares examples for masked language modeling from blocks of tokens.

    An example has the form [CLS] block [SEP]. With a sentence task, the block is split into two segments, and the
    example has the form [CLS] segment [SEP] segment [SEP].

    Args:
        tokenizer: A tokenizer with [CLS], [SEP], [MASK] and padding tokens.
        length: The length n of an example in tokens, including special tokens and padding.
        probability: The probability that a token (or a word, if `whole_words` is True) is chosen for prediction.
        seed: The random seed.
        whole_words: Whether to choose whole words.
        sentence_task: "nsp" (next sentence prediction), "sop" (sentence order prediction) or None.

    Raises:
        ValueError: If the tokenizer lacks one of the special tokens, or if `whole_words` is True but the tokenizer
            does not mark word starts.
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
                f"The tokenizer has no {', '.join(missing)}, which masked language modeling requires. Use an encoder, "
                "or `attn-variants pretrain-t5` for a T5 model."
            )
        self.length, self.probability, self.seed = length, probability, seed
        self.sentence_task = sentence_task
        self.block_length, self.separator = length - (2 if sentence_task is None else 3), self.sep_id
        self.starts = make_word_start_mask(tokenizer) if whole_words else None
        self.special = np.zeros(get_vocabulary_size(tokenizer), dtype=bool)
        # `all_special_ids` is not used because it includes punctuation for some tokenizers.
        self.special[[getattr(tokenizer, name) for name in needed]] = True
        self.ordinary_ids = np.flatnonzero(~self.special)

    def __call__(
        self, block: np.ndarray, key: tuple[int, ...], other_block: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Mask a block of at most `block_length` tokens (n - 2, or n - 3 with a sentence task).

        Args:
            block: The token ids.
            key: The epoch and the block number within the epoch. Together with the seed, they determine the masks.
            other_block: Another block, from which the second segment of a changed "nsp" pair is taken. If None, "nsp"
                pairs are left unchanged. Other tasks do not use it.

        Returns:
            A dictionary with "input_ids", "attention_mask" and "labels" (-100 for tokens that are not predicted), each
            [n]. With a sentence task, it also contains "token_type_ids" [n] and "sentence_labels" [], which is 1 if
            the pair was changed, 0 if it was not, and -100 if the block is too short for a pair.
        """
        segments, sentence_label = [block], None
        if self.sentence_task is not None:
            segments, sentence_label = self._make_segment_pair(block, key, other_block)
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

    def _make_segment_pair(
        self, block: np.ndarray, key: tuple[int, ...], other_block: np.ndarray | None
    ) -> tuple[list[np.ndarray], int]:
        """Split a block into two segments, change this pair with probability 0.5, and return it with its label."""
        if len(block) < 2:
            return [block, block[:0]], IGNORED_LABEL
        generator = np.random.default_rng((self.seed, PAIRING_KEY, *key))
        split_index = generator.integers(1, len(block))
        first, second = block[:split_index], block[split_index:]
        if generator.random() >= CHANGED_SHARE or (self.sentence_task == "nsp" and other_block is None):
            return [first, second], UNCHANGED
        if other_block is None or self.sentence_task == "sop":
            return [second, first], CHANGED
        return [first, other_block[: len(second)]], CHANGED

    def mask(self, ids: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Choose tokens to predict and mask them as in BERT (arXiv:1810.04805).

        80% of the chosen tokens are replaced by the mask token, 10% are replaced by a random token, and 10% are left
        unchanged.

        Args:
            ids: The token ids [n].
            generator: The random generator.

        Returns:
            The masked token ids [n] and the labels [n], which are -100 for tokens that were not chosen.
        """
        maskable = ~self.special[ids]
        random_values = generator.random(len(ids))
        if self.starts is not None:
            after_special = np.concatenate([[True], ~maskable[:-1]])
            words = np.cumsum(self.starts[ids] | ~maskable | after_special) - 1
            random_values = random_values[words]
        is_chosen = maskable & (random_values < self.probability)
        action = generator.random(len(ids))
        replaced = np.where(action < MASKED_SHARE, self.mask_id, generator.choice(self.ordinary_ids, len(ids)))
        inputs = np.where(is_chosen & (action < RANDOM_BOUND), replaced, ids)
        return inputs, np.where(is_chosen, ids, IGNORED_LABEL)


# The epoch and the index of a row. Together with the seed of the run, they determine all random choices for the row.
RowKey = tuple[int, int]
Row = str | tuple[str, ...]
Collator = Callable[[list[tuple[Any, RowKey]]], dict[str, Tensor]]


@dataclass
class TextDataset(Dataset):
    """A dataset of texts or (source, target) pairs that returns each row with its key.

    Args:
        texts: The rows.
        epoch: The epoch that the keys contain.
    """

    texts: list[Any]
    epoch: int = 0

    def start_epoch(self, epoch: int) -> None:
        """Set the epoch (counted from 0) that the keys of the rows contain."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Any, RowKey]:
        return self.texts[index], (self.epoch, index)

    def get_lengths(self) -> list[int]:
        """Return the number of characters in each row, so that rows can be grouped by length.

        For a pair, this is the total number of characters in both texts.
        """
        return [sum(map(len, row)) if isinstance(row, tuple) else len(row) for row in self.texts]

    def sort_longest_first(self) -> "TextDataset":
        """Return a dataset sorted from longest to shortest, which reduces padding and reveals memory errors early."""
        sorted_rows = sorted(zip(self.get_lengths(), self.texts, strict=True), key=lambda row: -row[0])
        return TextDataset([text for _, text in sorted_rows])


def hash_texts(texts: list[Any]) -> str:
    """Return a hash of all texts or text pairs, which a resumed run uses to check that the data has not changed."""
    digest = hashlib.sha256()
    for row in texts:
        for text in row if isinstance(row, tuple) else (row,):
            digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


def make_text_collator(
    tokenizer: PreTrainedTokenizerBase, max_length: int, pad_to_multiple_of: int | None
) -> Collator:
    """Create a collator that tokenizes rows of `TextDataset` (texts or pairs) into a batch of model inputs [b, n]."""

    return lambda rows: _tokenize(tokenizer, [text for text, _ in rows], max_length, pad_to_multiple_of)


def make_masked_text_collator(
    tokenizer: PreTrainedTokenizerBase, max_length: int, pad_to_multiple_of: int | None, probability: float, seed: int
) -> Collator:
    """Create a collator that tokenizes and masks rows of `TextDataset` for masked language modeling.

    In addition to the model inputs, the batches contain "labels" [b, n].

    Args:
        tokenizer: The tokenizer.
        max_length: The maximum number of tokens per row.
        pad_to_multiple_of: If set, batches are padded to a multiple of this number of tokens.
        probability: The probability that a token is predicted.
        seed: The random seed. Together with the key of a row, it determines the row's masks, so that a resumed run
            reproduces them.

    Raises:
        ValueError: If the tokenizer lacks a special token that masking requires.
    """
    prepare = MaskedLMPreparer(tokenizer, max_length, probability, seed)

    def collate(rows: list[tuple[Row, RowKey]]) -> dict[str, Tensor]:
        batch = _tokenize(tokenizer, [text for text, _ in rows], max_length, pad_to_multiple_of)
        masked = [
            prepare.mask(ids, np.random.default_rng((seed, *key)))
            for ids, (_, key) in zip(batch["input_ids"].numpy(), rows, strict=True)
        ]
        inputs, labels = (torch.from_numpy(np.stack(part)) for part in zip(*masked, strict=True))
        return {**batch, "input_ids": inputs, "labels": labels}

    return collate


def make_source_target_collator(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    pad_to_multiple_of: int | None,
    max_target_length: int,
    decoder_start_token_id: int,
    source_prefix: str = "",
) -> Collator:
    """Create a collator that tokenizes (source, target) pairs into a batch for teacher forcing.

    The batch contains the tokenized sources [b, m], "labels" [b, n] and "decoder_input_ids" [b, n], which are the
    target tokens shifted to the right by one position.
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
    """Tokenize texts or text pairs into padded tensors. If a pair is too long, its longer text is truncated."""
    columns = {argument: texts}
    if isinstance(texts[0], tuple):
        columns = dict(zip(("text", "text_pair"), (list(column) for column in zip(*texts, strict=True)), strict=True))
    options = {"padding": True, "truncation": True, "return_tensors": "pt"}
    return dict(tokenizer(**columns, **options, max_length=max_length, pad_to_multiple_of=pad_to_multiple_of))
