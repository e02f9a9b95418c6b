"""Attention to scattered keys, one block of queries at a time.

Each block gathers the keys that any of its queries attends to and ignores the other keys. There is no mask of size
n x m, and the backward pass recomputes each block. The cost of a block depends on the number of gathered keys. The
pattern is evaluated for every key, which takes one or two comparisons each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ...ops.padded_rows import is_of_keys
from ...ops.query_folding import is_exporting
from ...ops.window_blocks import relative_bias
from .block_patterns import BlockPattern

__all__ = ["attend_in_blocks", "gathers"]

# The number of queries per block, and the length from which blocks are used. One mask is faster for shorter texts.
GATHERED_ROWS, FEWEST_KEYS = 128, 1024


def gathers(pattern: Any, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Check if a call has a scattered pattern and is computed in blocks.

    The mask must be boolean and equal for all queries.
    """
    if not isinstance(pattern, BlockPattern) or torch.compiler.is_compiling() or is_exporting():
        return False
    length, memory = query.shape[2], key.shape[2]
    # Mask creation raises an error for keys before the queries of an encoder, such as the prefixes of peft.
    if query.shape[0] != key.shape[0] or not (pattern.is_causal or length == memory):
        return False
    by_key = mask is None or is_of_keys(mask)
    return by_key and length > 1 and memory >= FEWEST_KEYS and not pattern.covers(length, memory)


def attend_in_blocks(
    attend: Callable[..., torch.Tensor],
    pattern: Any,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    table: torch.Tensor | None,
) -> torch.Tensor:
    """Return the outputs [b, n, h_v, d_v] of attention to the keys of a pattern.

    Args:
        attend: a function of query, key, value, mask and position bias. It may also return the weights.
        pattern: the pattern that selects the keys (`BlockPattern`).
        states: the query [b, h_k, n, d], the key [b, k, m, d] and the value.
        mask: the mask of the keys, boolean [b, 1, 1 or n, m or more]; only the last m keys are used.
        table: the bias by distance (`relative_bias`).
    """
    query, key, value = states
    length, memory = query.shape[2], key.shape[2]
    keys = torch.arange(memory, device=query.device)
    mask = None if mask is None else mask[..., :1, -memory:]
    rows = (
        max(1, GATHERED_ROWS // pattern.block) * pattern.block if pattern.block <= 4 * GATHERED_ROWS else GATHERED_ROWS
    )

    def block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: Any, begin: int) -> torch.Tensor:
        queries = torch.arange(begin, begin + query.shape[2], device=query.device) + memory - length
        allowed = pattern.allowed(queries, keys)
        read = allowed.flatten(0, -2).any(0).nonzero()[:, 0]
        allowed = allowed[..., read][(None,) * (4 - allowed.dim())]
        allowed = allowed if mask is None else allowed & mask[..., read]
        bias = None if table is None else relative_bias(table, queries, read)
        output = attend(query, key[:, :, read], value[:, :, read], allowed, bias)
        return output[0] if isinstance(output, tuple) else output

    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*states, table))
    outputs = []
    # The first block ends with a block of the pattern, because queries after a cache may start inside a block.
    begin, end = 0, rows - (memory - length) % rows
    while begin < length:
        arguments = (query[:, :, begin:end], key, value, table, begin)
        outputs.append(checkpoint(block, *arguments, use_reentrant=False) if learns else block(*arguments))
        begin, end = end, end + rows
    return torch.cat(outputs, 1)
