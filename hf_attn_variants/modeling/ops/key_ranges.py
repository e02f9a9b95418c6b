"""Key ranges for sliding-window attention, their blocks, and equivalent masks for full attention.

Attention is computed in blocks of consecutive queries, or of every `step`-th query if the window is dilated. A block
reads the global tokens and one slice of keys, which is the union of its queries' windows:

    keys                0 1 2 3 4 5 6 7 8 9        before = after = 2, one global token
    query 5             x . . x x x x x . .
    query 6             x . . . x x x x x .
    block of 5 and 6    x . . x x x x x x .        two slices: 0:1 and 3:9

No tensor has the size n x m. `blocked_attention` computes the attention in each block. The queries of global tokens
are in separate blocks that read all keys.

Positions are key positions. The queries are at the last n of the m positions. The symbols are defined in
`softmax_attention`.

Sources: arXiv 2004.05150 (Longformer), section 3.1; arXiv 2112.07916 (LongT5), section 3.1.1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from .padded_rows import is_boolean_key_mask
from .variant_attention import is_exporting

__all__ = [
    "MAX_SIZE",
    "KeyRange",
    "TransientGlobalKeyRange",
    "WindowBlockLayout",
    "key_range_to_mask_and_bias",
    "look_up_relative_bias",
    "should_compute_in_blocks",
]

# A distance that exceeds the length of any text and represents a layer without a window. Larger sizes in a
# configuration raise an error.
MAX_SIZE = 2**31


class KeyRange(NamedTuple):
    """The key range of an attention module, defined by positions.

    Query i attends to every `step`-th key j with i - before <= j <= i + after, counted from the query. It also attends
    to key j if i or j is one of the first `global_tokens` positions.
    """

    before: int
    after: int
    step: int = 1
    global_tokens: int = 0

    @classmethod
    def from_window(cls, window: int | None, dilation: int, global_tokens: int, is_causal: bool) -> "KeyRange":
        """Return the key range of a window.

        The window extends to each side of the query by half its width. A causal window ends at the query.

        Args:
            window: w, the window size in keys, or None for attention to all keys.
            dilation: the step from one key to the next.
            global_tokens: the number of global tokens at the beginning of the text.
            is_causal: if True, a query does not attend to later keys.
        """
        if window is None:
            return cls(MAX_SIZE, 0 if is_causal else MAX_SIZE)
        if is_causal:
            return cls((window - 1) * dilation, 0, dilation)
        return cls(window // 2 * dilation, window // 2 * dilation, dilation, global_tokens)

    @property
    def depends_on_positions(self) -> bool:
        """True if the key range depends on positions in the text, and not only on distances."""
        return self.global_tokens > 0

    @property
    def is_causal(self) -> bool:
        """True if a query does not attend to later keys."""
        return self.after == 0

    def count_attended_keys(self, key_length: int) -> int:
        """Return how many of `key_length` keys a query in the middle of the text attends to.

        The result does not apply to global tokens, which attend to all keys.
        """
        return min(key_length, (self.before + self.after) // self.step + 1 + self.global_tokens)

    def get_allowed_mask(self, query_positions: Any, key_positions: Any) -> Any:
        """Return a boolean mask [n, m] of the keys at positions [m] that queries at positions [n] attend to."""
        distance = key_positions - query_positions[:, None]
        is_allowed = (distance >= -self.before) & (distance <= self.after) & (distance % self.step == 0)
        return is_allowed | (key_positions < self.global_tokens) | (query_positions < self.global_tokens)[:, None]

    def covers_all_keys(self, length: int, key_length: int) -> bool:
        """Return True if the queries at the last `length` of `key_length` positions attend to all keys.

        If the key range is causal, return True if they attend to all keys up to their own positions.
        """
        return self.step == 1 and key_length - 1 <= self.before and (self.is_causal or key_length - 1 <= self.after)


@dataclass(frozen=True)
class TransientGlobalKeyRange:
    """The key range of transient-global attention: tokens within `radius`, and a summary of every `block` tokens.

    The attention itself is computed in the `transient_global` module.
    """

    radius: int
    block: int

    depends_on_positions: ClassVar[bool] = True  # blocks are counted from the first token in the text
    is_causal: ClassVar[bool] = False  # only encoders support this key range
    before: ClassVar[int] = MAX_SIZE  # encoders do not have a cache

    def count_attended_keys(self, key_length: int) -> int:
        """Return the number of keys and summaries that a query in the middle of `key_length` tokens attends to."""
        return min(key_length, 2 * self.radius + 1) + key_length // self.block


# Follows the verbosity level of Transformers, even in Hub repositories
logger = logging.get_logger("transformers.attn_variants")

# Possible numbers of queries per block. With fewer queries, a larger proportion of the computed logits is inside the
# windows. With more queries, matrix products are faster (benchmarks/long/sliding_window.py --rows).
QUERIES_PER_BLOCK = (512, 256, 128, 64, 32)
MAX_QUERIES_PER_BLOCK = {"cpu": 64, "default": 512}
# If a mask covers more keys than this, a warning is logged, because the size of a mask grows quadratically.
MAX_MASKED_KEYS = 2048


def choose_queries_per_block(key_range: KeyRange, device: str) -> int:
    """Return the number of queries per block: about half the window width, within the limits of the device."""
    max_queries = min(
        MAX_QUERIES_PER_BLOCK.get(device, MAX_QUERIES_PER_BLOCK["default"]),
        (key_range.before + key_range.after) // key_range.step // 2,
    )
    return next((rows for rows in QUERIES_PER_BLOCK if rows <= max_queries), QUERIES_PER_BLOCK[-1])


def look_up_relative_bias(bias_table: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Look up the position bias [1, h, n, m] in a table that is indexed by distance.

    Args:
        bias_table: the bias for the distances -(l - 1) .. l - 1 from a query to a key, [1, h, 1, 2 l - 1].
        query_positions, key_positions: the positions of the queries and keys, [n] and [m].
    """
    return bias_table[:, :, 0, key_positions - query_positions[:, None] + bias_table.shape[-1] // 2]


class WindowBlockLayout:
    """The blocks in one attention call, with the keys, the mask and the bias of each block.

    Blocks in the middle of a text have the same mask and bias, which are therefore computed only once.
    """

    def __init__(self, key_range: KeyRange, query: Tensor, key: Tensor, table: Tensor | None) -> None:
        self.key_range, self.table, self.device = key_range, table, query.device
        self.length, self.key_length = query.shape[2], key.shape[2]
        self.rows = choose_queries_per_block(key_range, query.device.type)
        self.last_terms: tuple[Any, ...] = (None,)  # the last kind of block, its mask, its bias and its distances
        self.d_table: Tensor | None = None
        self.gradient: Tensor | None = None  # the part of the gradient that is not yet in `d_table`
        self.zero = query.new_zeros(())

    @property
    def max_elements_per_block(self) -> int:
        """The largest number of logits per head in a block, except in the blocks of global tokens."""
        return self.rows * _count_keys_per_block(self.key_range, self.rows)

    def iterate_blocks(self, global_rows: int) -> Iterator[tuple[slice, tuple[slice, ...]]]:
        """Yield the queries in each block and the slices of keys that they read. The slices share no keys.

        Args:
            global_rows: the maximum number of queries in a block that reads all keys.
        """
        key_range, length, offset = self.key_range, self.length, self.key_length - self.length
        first = min(key_range.global_tokens, length)
        for row in range(0, first, global_rows):
            yield slice(row, min(row + global_rows, first)), (slice(0, self.key_length),)
        for phase in range(min(key_range.step, length - first)):
            for row in range(first + phase, length, self.rows * key_range.step):
                queries = range(row, min(row + self.rows * key_range.step, length), key_range.step)
                low = offset + queries[0] - key_range.before
                if low < key_range.global_tokens:  # the first slice already contains the global keys
                    low += -(-(key_range.global_tokens - low) // key_range.step) * key_range.step
                window = slice(low, min(self.key_length, offset + queries[-1] + key_range.after + 1), key_range.step)
                global_keys = (slice(0, key_range.global_tokens),) if key_range.global_tokens else ()
                yield slice(queries[0], queries[-1] + 1, key_range.step), (*global_keys, window)

    def get_mask_and_bias(self, rows: slice, spans: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """Return a block's mask of allowed keys [r, m] and its bias, [1, h, r, m] or [r, m].

        The bias is minus infinity for keys that are not allowed.
        """
        # The mask and bias depend only on distances, except in blocks that read global tokens, where they depend on
        # positions.
        first = rows.start + self.key_length - self.length
        depends_on_position = rows.start < self.key_range.global_tokens or (self.table is not None and len(spans) > 1)
        kind = (rows.stop - rows.start, *(span.stop - span.start for span in spans), spans[-1].start - first)
        kind = (*kind, first if depends_on_position else None)
        if self.last_terms[0] != kind:
            self.finish_bias_gradient(self.d_table)  # add the gradient of the previous kind of block first
            queries = torch.arange(rows.start, rows.stop, rows.step or 1, device=self.device) + first - rows.start
            keys = torch.cat([torch.arange(s.start, s.stop, s.step or 1, device=self.device) for s in spans])
            is_allowed = self.key_range.get_allowed_mask(queries, keys)
            bias = self.zero if self.table is None else look_up_relative_bias(self.table, queries, keys)
            self.last_terms = (kind, is_allowed, torch.where(is_allowed, bias, -torch.inf), keys - queries[:, None])
        return self.last_terms[1:3]

    def add_bias_gradient(self, d_table: Tensor, d_logits: Tensor) -> None:
        """Add the gradient of the last block's logits, [B, h, r, m], to the gradient of the bias table.

        The gradients of equivalent blocks are summed before they are scattered to the table, because scattering takes
        longer than summing. `finish_bias_gradient` scatters the last sum.
        """
        self.d_table, head_gradients = d_table, d_logits.sum(0)
        self.gradient = head_gradients if self.gradient is None else self.gradient.add_(head_gradients)

    def finish_bias_gradient(self, d_table: Tensor | None) -> None:
        """Add the accumulated gradient, if any, to the gradient of the bias table, [1, h, 1, 2 l - 1]."""
        if self.gradient is None or d_table is None:
            return
        index = (self.last_terms[3] + d_table.shape[-1] // 2).flatten()
        d_table[0, :, 0].index_add_(1, index, self.gradient.flatten(1).to(d_table.dtype))
        self.gradient = None


def should_compute_in_blocks(key_range: KeyRange, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Return True if a call can be computed in blocks and this is likely to be faster than full attention.

    Blocks require a mask that is boolean and the same for all queries, or no mask. If the text is shorter than twice
    the number of keys per block, full attention with a mask is faster.
    """
    length, key_length = query.shape[2], key.shape[2]
    if is_exporting() or query.shape[0] != key.shape[0] or length == 1:  # an exported graph must support every length
        return False
    if not isinstance(key_range, KeyRange):
        return False
    return (mask is None or is_boolean_key_mask(mask)) and key_length >= 2 * _count_keys_per_block(
        key_range, choose_queries_per_block(key_range, query.device.type)
    )


def _count_keys_per_block(key_range: KeyRange, rows: int) -> int:
    return rows + (key_range.before + key_range.after) // key_range.step + key_range.global_tokens


def key_range_to_mask_and_bias(
    key_range: Any,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    bias_table: Tensor | None,
    is_global: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask and the position bias that make full attention equivalent to a key range.

    Args:
        key_range: the key range of the attention module, a `KeyRange` or a `BlockPattern`.
        query, key: [b, h_k, n, d] and [b, k, m, d].
        mask: see `attention_with_weights`. Only its last m columns are used, because the cache may be shorter than the
            mask.
        bias_table: the bias table, which is indexed by distance (see `look_up_relative_bias`).
        is_global: a mask [b, n] of additional global tokens in an encoder.

    Raises:
        ValueError: if an encoder has keys before its queries, such as PEFT prefixes, which would be outside most
            windows.
    """
    length, key_length = query.shape[2], key.shape[2]
    if not key_range.is_causal and not is_exporting() and key_length != length:
        raise ValueError(
            f"Keys and queries must belong to the same tokens with `attention_pattern`, got {length} queries and "
            f"{key_length} keys. Remove the {key_length - length} prefix keys."
        )
    keys = torch.arange(key_length, device=query.device)
    queries = keys
    if key_range.is_causal:
        queries = torch.arange(length, device=query.device) + key_length - length
        mask = None if mask is None else mask[..., -key_length:]
    bias = None if bias_table is None else look_up_relative_bias(bias_table, queries, keys)
    if not is_exporting() and key_length > MAX_MASKED_KEYS and not isinstance(key_range, KeyRange):
        logger.warning_once(
            f"attention_pattern={key_range.kind.name!r} creates a mask with {length} x {key_length} "
            'elements. Use `attn_implementation="sdpa"` without `output_attentions` to avoid it.'
        )
    # In these cases, the attention function needs no mask beyond its `is_causal` argument, or a single query attends
    # to all keys.
    needs_no_mask = not key_range.is_causal or length == 1 or (mask is None and key_length == length)
    if not is_exporting() and key_range.covers_all_keys(length, key_length) and needs_no_mask:
        return mask, bias
    allowed = key_range.get_allowed_mask(queries, keys)
    allowed = allowed[(None,) * (4 - allowed.dim())]
    if is_global is not None:
        allowed = allowed | is_global[:, None, None] | is_global[:, None, :, None]
    if mask is None:
        return allowed, bias
    if mask.dtype == torch.bool:
        return mask & allowed, bias
    return mask.masked_fill(~allowed, torch.finfo(mask.dtype).min), bias
