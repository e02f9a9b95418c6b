"""Attention to scattered keys, a block of queries at a time: what any of them reads is gathered, the rest left out.

No mask of n x m is made, and the backward pass makes each block again. What a block costs is what its queries read
together; the pattern itself is asked for every key, a comparison or two each.
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

# Queries of a block; and keys from which on blocks serve, below which one mask of all is faster.
GATHERED_ROWS, FEWEST_KEYS = 128, 1024


def gathers(pattern: Any, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Say whether a call is of a pattern and computed in blocks; a mask must be of keys alone, and boolean."""
    if not isinstance(pattern, BlockPattern) or torch.compiler.is_compiling() or is_exporting():
        return False
    length, memory = query.shape[2], key.shape[2]
    # Keys before an encoder's queries, such as peft's prefixes, are refused where masks are made.
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
        attend: a function of query, key, value, mask and position bias, which may return the weights as well.
        pattern: says which keys are read (`BlockPattern`).
        states: query [b, h_k, n, d], key [b, k, m, d] and value.
        mask: boolean, of keys alone [b, 1, 1 or n, m or more]; of its keys the last m count.
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
    # The first block ends where the pattern's own does: after a cache, queries begin in the midst of one.
    begin, end = 0, rows - (memory - length) % rows
    while begin < length:
        arguments = (query[:, :, begin:end], key, value, table, begin)
        outputs.append(checkpoint(block, *arguments, use_reentrant=False) if learns else block(*arguments))
        begin, end = end, end + rows
    return torch.cat(outputs, 1)
