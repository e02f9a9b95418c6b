"""Attention in windows: which keys a block of queries reads, as slices; and the same as a mask of full attention.

A block of queries that follow each other (where the window is dilated: every `step`-th) reads one slice of keys, the
windows of them all, and before it the global tokens. So nothing is as large as n x m; `blocked_attention` does the
arithmetic. The global tokens' own rows are blocks that read every key.

Positions are those of the keys, and the queries are the last n of the m. Letters as in `softmax_attention`.

Source: arXiv 2004.05150 (Longformer), section 3.1; 2112.07916 (LongT5), section 3.1.1.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.utils import logging

from .padded_rows import is_of_keys
from .query_folding import is_exporting
from .reach import Reach

__all__ = ["BlockWindows", "as_full_attention", "block_rows", "fills_blocks", "relative_bias"]

logger = logging.get_logger("transformers.attn_variants")  # ruled by transformers' verbosity, in a Hub repository too

# Queries of a block, where the window is as wide: with fewer, more of what is computed lies inside of the windows;
# with more, matrix products are faster (benchmarks/long/sliding_window.py --rows).
WINDOW_ROWS = (512, 256, 128, 64, 32)
MOST_ROWS = {"cpu": 64, "default": 512}
# Tokens from which on a mask of all of them by all is worth a warning.
MOST_IN_A_MASK = 2048


def block_rows(reach: Reach, device: str) -> int:
    """Return the queries of a block: about half of what its window reads, within what suits the device."""
    most = min(MOST_ROWS.get(device, MOST_ROWS["default"]), (reach.before + reach.after) // reach.step // 2)
    return next((rows for rows in WINDOW_ROWS if rows <= most), WINDOW_ROWS[-1])


def relative_bias(table: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return a bias [1, h, n, m] from one that is given by distance.

    Args:
        table: [1, h, 1, 2 l - 1], of the distances -(l - 1) .. l - 1 from a query to a key.
        queries, keys: their positions, [n] and [m].
    """
    return table[:, :, 0, keys - queries[:, None] + table.shape[-1] // 2]


class BlockWindows:
    """The blocks of one call: which keys each reads, what its windows allow and what is added to its logits.

    What blocks in the midst of a text have in common is made once.
    """

    def __init__(self, reach: Reach, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor | None) -> None:
        self.reach, self.table, self.device = reach, table, query.device
        self.length, self.memory = query.shape[2], key.shape[2]
        self.rows = block_rows(reach, query.device.type)
        self.last_terms: tuple[Any, ...] = (None,)  # of the last kind of block: it, keys read, bias, distances
        self.d_table: torch.Tensor | None = None
        self.gradient: torch.Tensor | None = None  # the table's, which is not in it yet
        self.zero = query.new_zeros(())

    @property
    def most_elements(self) -> int:
        """The logits of a block and one head, but for those of global queries."""
        return self.rows * _keys_of_block(self.reach, self.rows)

    def blocks(self, global_rows: int) -> Iterator[tuple[slice, tuple[slice, ...]]]:
        """Yield each block's queries and the slices of the keys that any of them reads, none twice.

        Args:
            global_rows: the most queries of a block that reads everything.
        """
        reach, length, offset = self.reach, self.length, self.memory - self.length
        first = min(reach.global_tokens, length)
        for row in range(0, first, global_rows):
            yield slice(row, min(row + global_rows, first)), (slice(0, self.memory),)
        for phase in range(min(reach.step, length - first)):
            for row in range(first + phase, length, self.rows * reach.step):
                queries = range(row, min(row + self.rows * reach.step, length), reach.step)
                low = offset + queries[0] - reach.before
                if low < reach.global_tokens:  # those stand in front already
                    low += -(-(reach.global_tokens - low) // reach.step) * reach.step
                window = slice(low, min(self.memory, offset + queries[-1] + reach.after + 1), reach.step)
                global_keys = (slice(0, reach.global_tokens),) if reach.global_tokens else ()
                yield slice(queries[0], queries[-1] + 1, reach.step), (*global_keys, window)

    def terms(self, rows: slice, spans: tuple[slice, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which keys a block's queries read, [r, m], and the bias [1, h, r, m] or [r, m], -inf outside."""
        # Distances decide all of it; where global tokens are read, positions do.
        first = rows.start + self.memory - self.length
        by_position = rows.start < self.reach.global_tokens or (self.table is not None and len(spans) > 1)
        kind = (rows.stop - rows.start, *(span.stop - span.start for span in spans), spans[-1].start - first)
        kind = (*kind, first if by_position else None)
        if self.last_terms[0] != kind:
            self.finish_bias_gradient(self.d_table)  # what blocks of the last kind have added up
            queries = torch.arange(rows.start, rows.stop, rows.step or 1, device=self.device) + first - rows.start
            keys = torch.cat([torch.arange(s.start, s.stop, s.step or 1, device=self.device) for s in spans])
            near = self.reach.allowed(queries, keys)
            bias = self.zero if self.table is None else relative_bias(self.table, queries, keys)
            self.last_terms = (kind, near, torch.where(near, bias, -torch.inf), keys - queries[:, None])
        return self.last_terms[1:3]

    def add_bias_gradient(self, d_table: torch.Tensor, d_logits: torch.Tensor) -> None:
        """Add the gradient of the last block's logits [B, h, r, m] to the table's; `finish_bias_gradient` ends it.

        Blocks that are alike are summed first: scattering takes longer.
        """
        self.d_table, by_head = d_table, d_logits.sum(0)
        self.gradient = by_head if self.gradient is None else self.gradient.add_(by_head)

    def finish_bias_gradient(self, d_table: torch.Tensor | None) -> None:
        """Add what was summed so far, if anything, to the gradient of the table [1, h, 1, 2 l - 1]."""
        if self.gradient is None or d_table is None:
            return
        index = (self.last_terms[3] + d_table.shape[-1] // 2).flatten()
        d_table[0, :, 0].index_add_(1, index, self.gradient.flatten(1).to(d_table.dtype))
        self.gradient = None


def fills_blocks(reach: Reach, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Say whether blocks serve a call and have something to leave out; a mask must be of keys alone, and boolean.

    Where a text is not twice as long as a block and its window, full attention under a mask is faster.
    """
    length, memory = query.shape[2], key.shape[2]
    if is_exporting() or query.shape[0] != key.shape[0] or length == 1:  # a graph should serve every length
        return False
    if not isinstance(reach, Reach):
        return False
    return (mask is None or is_of_keys(mask)) and memory >= 2 * _keys_of_block(
        reach, block_rows(reach, query.device.type)
    )


def _keys_of_block(reach: Reach, rows: int) -> int:
    return rows + (reach.before + reach.after) // reach.step + reach.global_tokens


def as_full_attention(
    reach: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    table: torch.Tensor | None,
    is_global: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the mask and the position bias by which full attention reads what `reach` says.

    Args:
        reach: of the attention, a `Reach` or a `BlockPattern`.
        query, key: [b, h_k, n, d] and [b, k, m, d].
        mask: as in `attention_with_weights`; of its keys the last m count, for a cache keeps no more.
        table: the bias by distance (`relative_bias`).
        is_global: which tokens of an encoder are global beside the first ones, [b, n].

    Raises:
        ValueError: for keys before the queries of an encoder (peft's prefixes), which would be far from most of them.
    """
    length, memory = query.shape[2], key.shape[2]
    if not reach.is_causal and not is_exporting() and memory != length:
        raise ValueError(
            f"`attention_pattern` reads keys by their distance: {length} tokens cannot read {memory}, a prefix of "
            f"{memory - length} among them."
        )
    keys = torch.arange(memory, device=query.device)
    queries = keys
    if reach.is_causal:
        queries = torch.arange(length, device=query.device) + memory - length
        mask = None if mask is None else mask[..., -memory:]
    bias = None if table is None else relative_bias(table, queries, keys)
    if not is_exporting() and memory > MOST_IN_A_MASK and not isinstance(reach, Reach):
        logger.warning_once(
            f'attention_pattern={reach.kind.name!r} as a mask of {length} x {memory} numbers: "sdpa" without '
            "`output_attentions` goes by blocks."
        )
    # Left to the function's own `is_causal`, or to a single query that reads all there is.
    is_told = not reach.is_causal or length == 1 or (mask is None and memory == length)
    if not is_exporting() and reach.covers(length, memory) and is_told:
        return mask, bias
    allowed = reach.allowed(queries, keys)
    allowed = allowed[(None,) * (4 - allowed.dim())]
    if is_global is not None:
        allowed = allowed | is_global[:, None, None] | is_global[:, None, :, None]
    if mask is None:
        return allowed, bias
    if mask.dtype == torch.bool:
        return mask & allowed, bias
    return mask.masked_fill(~allowed, torch.finfo(mask.dtype).min), bias
