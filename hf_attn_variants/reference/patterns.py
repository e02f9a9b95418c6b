"""Attention to a subset of the keys, such as windows, blocks, strides, compressed keys and block summaries.

These functions list the keys that each query attends to, whereas the models use masks and blocks.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, einsum

from .heads import Maybe, masked_softmax
from .talking_heads import attention_core


def keys_in_window(
    i: int, n: int, *, window: int, dilation: int = 1, global_tokens: int = 0, causal: bool = False
) -> list[int]:
    """Return the positions that position i of n attends to in a sliding window (Longformer, 2004.05150, 3.1).

    The window contains window / 2 positions on each side of i. If `causal` is true, it contains the last `window`
    positions, including i. Between two positions in the window, dilation - 1 positions are skipped. The first
    `global_tokens` positions attend to all positions, and all positions attend to them. Global tokens are not
    supported for causal attention.
    """
    if i < global_tokens:
        return list(range(n))
    steps = range(-(window - 1), 1) if causal else range(-(window // 2), window // 2 + 1)
    keys = {i + dilation * step for step in steps} | set(range(min(global_tokens, n)))
    return sorted(j for j in keys if 0 <= j < n)


def sliding_window_mask(
    n: int, *, window: int, dilation: int = 1, global_tokens: int = 0, causal: bool = False
) -> Tensor:
    """Return the boolean mask [n, n] for `keys_in_window`, which is True if position i attends to position j."""
    window_of = partial(keys_in_window, window=window, dilation=dilation, global_tokens=global_tokens, causal=causal)
    return pattern_mask(n, window_of)


def sliding_window_attention(
    Q: Tensor, K: Tensor, V: Tensor, *, scale: float, padding: Maybe = None, bias: Maybe = None, **window: Any
) -> tuple[Tensor, Tensor]:
    """Compute sliding-window attention, in which each position attends to its `keys_in_window` (2004.05150, 3.1).

    Q [b, h, n, k], K and V [b, G, n, k] -> the outputs [b, h, n, k] and the weights [b, h, n, n]. The bias [h, 2 n -
    1] depends on the distance j - i, from -(n - 1) to n - 1 (LongT5, 2112.07916, 3.1.1). The keyword arguments
    `window` are passed to `keys_in_window`.
    """
    n, allowed = Q.shape[2], sliding_window_mask(Q.shape[2], **window)[None, None]
    allowed = allowed if padding is None else allowed & padding[:, None, None]
    mask = Q.new_zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    bias = None if bias is None else bias[None, :, torch.arange(n) - torch.arange(n)[:, None] + n - 1]
    return attention_core(Q, K, V, scale=scale, bias=bias, mask=mask)


def keys_in_strided_pattern(
    i: int, n: int, *, stride: int, part: int | None = None, causal: bool = False
) -> list[int]:
    """Return the positions that position i of n attends to in the strided pattern (1904.10509, 4.3).

    Part 1 contains the last `stride` positions and i itself. Part 2 contains every `stride`-th position before i. If
    `part` is None, the head uses both parts. If the parts are split between heads, half of the heads use part 1, and
    the others use part 2. If the pattern is not causal, it is symmetric.
    """
    near = {j for j in range(n) if abs(i - j) <= stride}
    far = {j for j in range(n) if (i - j) % stride == 0}
    return _select_keys(i, near, far, part, causal)


def keys_in_fixed_pattern(
    i: int, n: int, *, block: int, summary: int, part: int | None = None, causal: bool = False
) -> list[int]:
    """Return the positions that position i of n attends to in the fixed pattern (1904.10509, 4.3).

    Part 1 contains the block of i. Part 2 contains the last `summary` positions in each block and i itself. If `part`
    is None, the head uses both parts.
    """
    near = {j for j in range(n) if j // block == i // block}
    far = {j for j in range(n) if j % block >= block - summary} | {i}
    return _select_keys(i, near, far, part, causal)


def keys_in_local_block(i: int, n: int, *, block: int, causal: bool = False) -> list[int]:
    """Return the positions that position i of n attends to in its own block (1801.10198, 4.2.4)."""
    return _select_keys(i, {j for j in range(n) if j // block == i // block}, set(), None, causal)


def keys_in_dilated_block(i: int, n: int, *, block: int, step: int, causal: bool = False) -> list[int]:
    """Return the positions in the block of i whose distance from i is a multiple of `step` (LongNet, 2307.02486)."""
    near = {j for j in range(n) if j // block == i // block and (j - i) % step == 0}
    return _select_keys(i, near, set(), None, causal)


def keys_in_random_blocks(
    i: int, n: int, *, block: int, num_random: int, seed: int = 0, layer: int = 0, causal: bool = False
) -> list[int]:
    """Return the positions in the block of i, its two neighbors and `num_random` other blocks (BigBird, 2007.14062,
    2).

    The other blocks are drawn once per layer. They are the blocks with the smallest random numbers among those that
    are not neighbors.
    """
    i_block, blocks = i // block, -(-n // block)
    candidates = [j for j in range(blocks) if (i_block - j > 1 if causal else abs(i_block - j) > 1)]
    random_blocks = sorted(candidates, key=lambda j: (_hash_numbers(seed, layer, i_block, j), j))[:num_random]
    key_blocks = {i_block - 1, i_block, i_block + 1, *random_blocks}
    return _select_keys(i, {j for j in range(n) if j // block in key_blocks}, set(), None, causal)


def pattern_mask(n: int, keys: Callable[[int, int], Iterable[int]], *, global_tokens: int = 0) -> Tensor:
    """Return the boolean mask [n, n] of a pattern, which is True if position i attends to position j.

    Args:
        n: The number of positions.
        keys: A function of i and n that returns the positions that position i attends to.
        global_tokens: The number of leading positions that attend to all positions and that all positions attend to.

    Example:
        >>> pattern_mask(8, partial(keys_in_local_block, block=4))
    """
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        mask[i, list(keys(i, n))] = True
    mask[:global_tokens] = True
    mask[:, :global_tokens] = True
    return mask


def memory_compressed_attention(
    Q: Tensor, K: Tensor, V: Tensor, C_k: Tensor, C_v: Tensor, *, scale: float, padding: Maybe = None
) -> Tensor:
    """Compute memory-compressed attention, in which a convolution shortens keys and values (1801.10198, 4.2.4).

    Q [b, h, n, k], K and V [b, G, m, k], C_k and C_v [G, s, k, k] -> [b, h, n, k]. Key J of head g is sum_t K[sJ + t]
    C_k[g, t], with zeros after the end. Padding is treated as zeros, and queries do not attend to keys that consist
    only of padding.
    """
    m, stride = K.shape[2], C_k.shape[1]
    padding = torch.ones(K.shape[0], m, dtype=torch.bool) if padding is None else padding

    def in_groups(T: Tensor) -> Tensor:  # [b, ..., m, k] -> [b, ..., m / s, s, k]
        return torch.nn.functional.pad(T, (0, 0, 0, -m % stride)).unflatten(-2, (-1, stride))

    short = [einsum("bgJtd,gtde->bgJe", in_groups(T * padding[:, None, :, None]), C) for T, C in ((K, C_k), (V, C_v))]
    allowed = in_groups(padding[..., None]).any((-2, -1))[:, None, None]
    mask = Q.new_zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    return attention_core(Q, *short, scale=scale, mask=mask)[0]


def transient_global_attention(
    X: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, gamma: Tensor, *, window: int, block: int, scale: float = 1,
    length: int | None = None, bias: Maybe = None, block_bias: Maybe = None, epsilon: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Compute transient global attention to a window and to block summaries (LongT5, 2112.07916, 3.1.2).

    A summary is the sum of the inputs in a block, divided by the root mean square of this sum and multiplied by gamma.
    Its key and value are computed with the same projections as those of the inputs. Tokens after the last complete
    block belong to that block. Texts that are shorter than a block have no summaries.

    Args:
        X: The inputs of one text [n, d]. Positions from `length` on are padding.
        P_q: The query projections [h, d, k].
        P_k, P_v: The key and value projections [G, d, k].
        gamma: The scale of the summaries [d].
        window: The window size in tokens, half of which are on each side of the query.
        block: The number of tokens per block.
        scale: The factor of the logits.
        length: The number of tokens. By default, there is no padding.
        bias: The position bias [h, 2 n - 1] for the distances j - i from -(n - 1) to n - 1.
        block_bias: The position bias [h, 2 B - 1] with B = n // block, for the distances from queries to summaries in
            blocks.
        epsilon: A small number that is added to the mean square.

    Returns:
        The outputs [length, h, k].
    """
    n, h, length = len(X), len(P_q), len(X) if length is None else length
    num_blocks, max_blocks = length // block, n // block
    block_of = [min(i // block, num_blocks - 1) for i in range(length)]
    sums = [X[[i for i in range(length) if block_of[i] == b]].sum(0) for b in range(num_blocks)]
    inputs = [s * gamma / (s.square().mean() + epsilon).sqrt() for s in sums]
    outputs = X.new_zeros(length, h, P_v.shape[2])
    for head in range(h):
        p_k, p_v = (P[head * len(P) // h] for P in (P_k, P_v))
        for i in range(length):
            near = [j for j in range(length) if abs(i - j) <= window // 2]
            sources = torch.stack([*inputs, *X[near]])  # [whole + near, d]
            logits = scale * (sources @ p_k) @ (X[i] @ P_q[head])
            if block_bias is not None:
                logits[:num_blocks] += block_bias[head, [b - block_of[i] + max_blocks - 1 for b in range(num_blocks)]]
            if bias is not None:
                logits[num_blocks:] += bias[head, [j - i + n - 1 for j in near]]
            outputs[i, head] = masked_softmax(logits) @ sources @ p_v
    return outputs


def _select_keys(i: int, near: set[int], far: set[int], part: int | None, causal: bool) -> list[int]:
    """Return the sorted positions in part 1 (near), part 2 (far) or both (None).

    If `causal` is true, positions after i are omitted.
    """
    keys = {None: near | far, 1: near, 2: far}[part]
    return sorted(j for j in keys if not causal or j <= i)


def _hash_numbers(*numbers: int) -> int:
    """Return a 32-bit hash of a seed, a layer and two blocks, which is used as a random number."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number) % 2**32
        for _ in range(2):
            mixed = (mixed ^ mixed // 2**16) * 0x45D9F3B % 2**32
        mixed ^= mixed // 2**16
    return mixed
