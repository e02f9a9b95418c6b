"""Streams of packed token blocks from text of any size, in an order that a run can enter in the middle.

Text is read article by article, tokenised and cut into blocks of one length, none of its tokens lost. Shards are
shuffled by (seed, epoch), blocks within windows of some thousand. A window is found again from the place in the text
where its first block begins, which every batch carries: a resumed run opens that shard there.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from ..engine.dataloaders import IGNORED_LABEL
from .text_shards import TextSource

__all__ = ["Place", "TextStream", "pack_blocks", "read_blocks", "stack_rows"]

# Texts handed to the tokenizer at a time.
TOKENIZER_BATCH = 32
# What random numbers are for, so that no two uses share them.
SHARD_ORDER, WINDOW_ORDER = 0, 1


class Place(NamedTuple):
    """Where a block begins: in which shard of the epoch's order, at which article, after how many of its tokens."""

    shard: int = 0
    offset: int = 0
    token: int = 0


TEXT_BEGIN = Place()


def pack_blocks(
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    separator: int,
    start: Place = TEXT_BEGIN,
) -> Iterator[tuple[np.ndarray, Place]]:
    """Cut the tokens of all articles into blocks of one length; the last one is shorter.

    Args:
        tokenizer: a fast tokenizer; no special tokens are added, and those that the text spells out are left out.
        separator: the token that ends each article.
        start: where the first block begins.

    Yields:
        A block's token ids [length], and the place where it begins.
    """
    reserved = _reserved_ids(tokenizer)
    rest = np.empty(0, dtype=np.int64)
    # Where in `rest` each article begins, and which place of the text that is.
    begins: list[tuple[int, Place]] = []
    for shard, source in itertools.islice(enumerate(sources), start.shard, None):
        first = start.offset if shard == start.shard else 0
        for offset, tokens in _tokenized(source, tokenizer, first, separator, reserved):
            skipped = start.token if (shard, offset) == start[:2] else 0
            begins.append((len(rest), Place(shard, offset, skipped)))
            rest = np.concatenate([rest, tokens[skipped:]])
            whole = len(rest) // length
            for i in range(whole):
                yield rest[i * length : (i + 1) * length], _place_at(begins, i * length)
            if whole:
                begins = _without(begins, whole * length)
                rest = rest[whole * length :]
    if len(rest):
        yield rest, _place_at(begins, 0)


def _tokenized(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, offset: int, separator: int, reserved: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    articles = source.articles(offset)
    while batch := list(itertools.islice(articles, TOKENIZER_BATCH)):
        encoded = tokenizer(
            [text.strip("\r\n") if source.keeps_whitespace else " ".join(text.split()) for _, text in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # articles are longer than the model: no warning
        )["input_ids"]
        for (begin, _), ids in zip(batch, encoded, strict=True):
            tokens = np.asarray(ids, dtype=np.int64)
            tokens = tokens[~np.isin(tokens, reserved)]
            if len(tokens):
                yield begin, np.append(tokens, separator)


def _reserved_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the token ids that text may not hold: special tokens, but the unknown one, and sentinels.

    Not `all_special_ids`: some tokenizers count punctuation among them.
    """
    ids = {getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "mask", "pad", "bos", "eos")}
    ids |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids |= {i for token, i in tokenizer.get_vocab().items() if "<extra_id_" in token}
    return np.array(sorted(ids - {None, tokenizer.unk_token_id}), dtype=np.int64)


def _place_at(begins: list[tuple[int, Place]], index: int) -> Place:
    begin, place = begins[bisect_right(begins, index, key=lambda item: item[0]) - 1]
    return place._replace(token=place.token + index - begin)


def _without(begins: list[tuple[int, Place]], cut: int) -> list[tuple[int, Place]]:
    # The article that the cut falls into goes on at index 0.
    later = [(begin - cut, place) for begin, place in begins if begin > cut]
    return [(0, _place_at(begins, cut)), *later]


def read_blocks(
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    separator: int,
    limit: int | None = None,
) -> list[np.ndarray]:
    """Read the first `limit` blocks of a text (None: all) into memory, in order; see `pack_blocks`.

    Raises:
        ValueError: if the tokenizer makes no token of the text.
    """
    blocks = [block for block, _ in itertools.islice(pack_blocks(sources, tokenizer, length, separator), limit)]
    if not blocks:
        more = f" (and {len(sources) - 1} more)" if len(sources) > 1 else ""
        raise ValueError(f"{sources[0].name}{more} holds no text that the tokenizer makes a token of")
    return blocks


class TextStream(IterableDataset):
    """Batches of prepared blocks, the same on any number of processes and from wherever a run resumes.

    Every process reads all of the text and prepares its own rows of each batch; one that a last batch is too small
    for gets a row with nothing to predict. `start_epoch` and `seek` come before iteration, as `TrainingLoop` calls
    them.

    Args:
        length, separator: tokens a block, and the one that ends each article; see `pack_blocks`.
        prepare: (token ids, (epoch, number of the block in it)) -> arrays of one shape for every block; anything
            random in it must be drawn from those two numbers.
        window: blocks that are shuffled among themselves; they are held in memory.
        with_other: hand `prepare` another block of the same window as well; None where the window has one alone.
    """

    def __init__(
        self,
        sources: Sequence[TextSource],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        separator: int,
        prepare: Callable[[np.ndarray, tuple[int, int]], dict[str, np.ndarray]],
        batch_size: int,
        seed: int,
        window: int = 4096,
        process_index: int = 0,
        num_processes: int = 1,
        with_other: bool = False,
    ):
        self.with_other = with_other
        self.sources, self.tokenizer, self.length, self.separator = list(sources), tokenizer, length, separator
        self.prepare, self.batch_size, self.seed, self.window = prepare, batch_size, seed, window
        self.process_index, self.num_processes = process_index, num_processes
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Select the epoch that `__iter__` yields, from its beginning."""
        self.epoch, self._used, self._position = epoch, 0, [0, 0, *TEXT_BEGIN]

    def seek(self, batches: int, position: list[int]) -> None:
        """Go to the batch after the first `batches` ones of the epoch; `position` is the last one's."""
        self._used, self._position = batches * self.batch_size * self.num_processes, position

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield tensors [b, ...] of what `prepare` makes; "position", which `seek` takes; and "examples", b or 0."""
        rows = self._numbered_blocks()
        while batch := list(itertools.islice(rows, self.batch_size * self.num_processes)):
            share = np.array_split(np.arange(len(batch)), self.num_processes)[self.process_index]
            # Every process must take the step: without a row of its own, with a copy of the last one.
            taken = [batch[i] for i in share] or batch[-1:]
            prepared = [self.prepare(block, (self.epoch, number), *other) for number, block, _, other in taken]
            if not len(share):
                row = prepared[0]
                prepared = [row | {key: np.full_like(row[key], IGNORED_LABEL) for key in row if "label" in key}]
            counts = {"position": torch.tensor(batch[-1][2]), "examples": torch.tensor(len(share))}
            yield stack_rows(prepared) | counts

    def _numbered_blocks(self) -> Iterator[tuple[int, np.ndarray, list[int], tuple[np.ndarray | None, ...]]]:
        order = np.random.default_rng((self.seed, SHARD_ORDER, self.epoch)).permutation(len(self.sources))
        sources = [self.sources[i] for i in order]
        window, number, *place = self._position
        blocks = pack_blocks(sources, self.tokenizer, self.length, self.separator, Place(*place))
        while found := list(itertools.islice(blocks, self.window)):
            position = [window, number, *found[0][1]]
            shuffled = np.random.default_rng((self.seed, WINDOW_ORDER, self.epoch, window)).permutation(len(found))
            for i, following in zip(shuffled, np.roll(shuffled, -1), strict=True):
                other = found[following][0] if len(found) > 1 else None
                if number >= self._used:
                    yield number, found[i][0], position, (other,) if self.with_other else ()
                number += 1
            window += 1


def stack_rows(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stack prepared blocks into a batch of tensors [b, ...]."""
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
