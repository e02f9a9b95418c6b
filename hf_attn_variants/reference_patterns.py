"""Attention that reads a part of the memory, by its formula: the executable specification of the patterns.

Sources: sliding windows, dilated or not, and global tokens, arXiv 2004.05150 (Longformer), section 3.1; windows under
a bias by distance, 2112.07916 (LongT5), section 3.1.1; random blocks, 2007.14062 (BigBird), section 2; strided and
fixed patterns, 1904.10509 (Sparse Transformers), sections 4.2 and 4.3; local blocks and compressed memory, 1801.10198,
section 4.2.4; transient global tokens, 2112.07916, section 3.1.2.
Letters as in `reference`: b batch, h heads, n length, k size of a head. Here a query's keys are listed one by one, so
that nothing is shared with the package's masks and blocks.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .reference import attention_core, masked_softmax

__all__ = [
    "keys_by_stride",
    "keys_in_dilated_block",
    "keys_in_local_block",
    "keys_in_random_blocks",
    "keys_in_window",
    "keys_of_fixed_pattern",
    "memory_compressed_attention",
    "pattern_mask",
    "sliding_window_attention",
    "sliding_window_mask",
    "transient_global_attention",
]


def keys_in_window(
    i: int, n: int, *, window: int, dilation: int = 1, global_tokens: int = 0, causal: bool = False
) -> list[int]:
    """The positions that position i of n reads (2004.05150, 3.1).

    window w: w / 2 on each side and itself; where causal, the w last ones, itself among them. dilation: the gaps
    between them are dilation - 1 wide. The first global_tokens read all, and all read them; not where causal.
    """
    if i < global_tokens:
        return list(range(n))
    steps = range(-(window - 1), 1) if causal else range(-(window // 2), window // 2 + 1)
    found = {i + dilation * step for step in steps} | set(range(min(global_tokens, n)))
    return sorted(j for j in found if 0 <= j < n)


def sliding_window_mask(
    n: int, *, window: int, dilation: int = 1, global_tokens: int = 0, causal: bool = False
) -> Tensor:
    """The same as a mask [n, n] of full attention: True where position i reads position j."""
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        mask[i, keys_in_window(i, n, window=window, dilation=dilation, global_tokens=global_tokens, causal=causal)] = (
            True
        )
    return mask


def sliding_window_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    *,
    scale: float,
    window: int,
    dilation: int = 1,
    global_tokens: int = 0,
    causal: bool = False,
    padding: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in which each position reads those of `keys_in_window` (2004.05150, 3.1).

    Args:
        Q: [b, h, n, k].
        K, V: [b, G, n, k], G divides h: query heads g*i .. g*i + g-1 share head i, g = h / G.
        scale: multiplies the logits.
        window, dilation, global_tokens, causal: as in `keys_in_window`.
        padding: [b, n], True where there is a token; the others are not read. A query that reads nothing gets zeros.
        bias: [h, 2 n - 1], added to the logits by distance j - i, from -(n - 1) to n - 1 (2112.07916, 3.1.1).

    Returns:
        The outputs [b, h, n, k] and the weights [b, h, n, n].
    """
    n, groups = Q.shape[2], Q.shape[1] // K.shape[1]
    K, V = (T.repeat_interleave(groups, dim=1) for T in (K, V))
    rows, weights = [], Q.new_zeros(*Q.shape[:3], n)
    for i in range(n):
        keys = keys_in_window(i, n, window=window, dilation=dilation, global_tokens=global_tokens, causal=causal)
        logits = scale * (Q[:, :, i : i + 1] * K[:, :, keys]).sum(-1)  # [b, h, keys]
        if bias is not None:
            logits = logits + bias[:, [j - i + n - 1 for j in keys]]
        if padding is not None:
            logits = logits.masked_fill(~padding[:, None, keys], -torch.inf)
        row = masked_softmax(logits)
        weights[:, :, i, keys] = row.detach()
        rows.append((row[..., None] * V[:, :, keys]).sum(2))
    return torch.stack(rows, dim=2), weights


def keys_by_stride(i: int, n: int, *, stride: int, part: int | None = None, causal: bool = False) -> list[int]:
    """The positions that position i of n reads in the strided pattern (1904.10509, 4.3).

    Part 1: the `stride` last ones and itself; part 2: every `stride`-th from it on back. None: both, in one head; with
    `split heads` half of the heads have part 1 and half part 2. Not causal: the same on both sides.
    """
    near = {j for j in range(n) if abs(i - j) <= stride}
    far = {j for j in range(n) if (i - j) % stride == 0}
    return _read(i, near, far, part, causal)


def keys_of_fixed_pattern(
    i: int, n: int, *, block: int, summary: int, part: int | None = None, causal: bool = False
) -> list[int]:
    """The positions that position i of n reads in the fixed pattern (1904.10509, 4.3).

    Part 1: its block; part 2: the last `summary` positions of each block, and itself. None: both, in one head.
    """
    near = {j for j in range(n) if j // block == i // block}
    far = {j for j in range(n) if j % block >= block - summary} | {i}
    return _read(i, near, far, part, causal)


def keys_in_local_block(i: int, n: int, *, block: int, causal: bool = False) -> list[int]:
    """The positions that position i of n reads where the text is cut into blocks (1801.10198, 4.2.4)."""
    return _read(i, {j for j in range(n) if j // block == i // block}, set(), None, causal)


def keys_in_dilated_block(i: int, n: int, *, block: int, step: int, causal: bool = False) -> list[int]:
    """The positions that position i of n reads: of its block those a multiple of `step` away (2307.02486, 3.1)."""
    return _read(i, {j for j in range(n) if j // block == i // block and (j - i) % step == 0}, set(), None, causal)


def keys_in_random_blocks(
    i: int, n: int, *, block: int, random: int, seed: int = 0, layer: int = 0, causal: bool = False
) -> list[int]:
    """The positions that position i of n reads: its block, the two beside it and `random` others (2007.14062, 2).

    Which others is drawn once a layer: of the blocks farther away, those with the smallest draws.
    """
    own, blocks = i // block, -(-n // block)
    others = [j for j in range(blocks) if (own - j > 1 if causal else abs(own - j) > 1)]
    drawn = sorted(others, key=lambda j: (_draw(seed, layer, own, j), j))[:random]
    read = {own - 1, own, own + 1, *drawn}
    return _read(i, {j for j in range(n) if j // block in read}, set(), None, causal)


def pattern_mask(n: int, keys: Callable[[int, int], Iterable[int]], *, global_tokens: int = 0) -> Tensor:
    """A pattern as a mask [n, n] of full attention: True where position i reads position j.

    keys: a function of i and n that lists what position i reads. The first global_tokens read all, and all read them.
    """
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        mask[i, list(keys(i, n))] = True
    mask[:global_tokens] = True
    mask[:, :global_tokens] = True
    return mask


def memory_compressed_attention(
    Q: Tensor, K: Tensor, V: Tensor, C_k: Tensor, C_v: Tensor, *, scale: float, padding: Tensor | None = None
) -> Tensor:
    """Attention to keys and values that a convolution has shortened (1801.10198, 4.2.4).

    Q [b, h, n, k], K and V [b, G, m, k], C_k and C_v [G, s, k, k]: key J of head g is sum_t K[sJ + t] C_k[g, t], of
    tokens behind the end none. padding [b, m]: True where there is a token; the others count as zeros, and a key of
    none is not read. -> [b, h, n, k].
    """
    m, stride = K.shape[2], C_k.shape[1]
    padding = torch.ones(K.shape[0], m, dtype=torch.bool) if padding is None else padding
    short: list[list[Tensor]] = [[], []]
    read = []
    for start in range(0, m, stride):
        tokens = range(start, min(start + stride, m))
        read.append(padding[:, list(tokens)].any(1))
        for states, conv, made in ((K, C_k, short[0]), (V, C_v, short[1])):
            real = [states[:, :, j] * padding[:, None, j, None] for j in tokens]
            made.append(_sum(torch.einsum("bgd,gde->bge", x, conv[:, t]) for t, x in enumerate(real)))
    mask = torch.zeros(len(padding), 1, 1, len(read), dtype=Q.dtype)
    mask = mask.masked_fill(~torch.stack(read, 1)[:, None, None], -torch.inf)
    return attention_core(Q, *(torch.stack(made, 2) for made in short), scale=scale, mask=mask)[0]


def transient_global_attention(
    X: Tensor,
    P_q: Tensor,
    P_k: Tensor,
    P_v: Tensor,
    gamma: Tensor,
    *,
    window: int,
    block: int,
    scale: float = 1,
    length: int | None = None,
    bias: Tensor | None = None,
    block_bias: Tensor | None = None,
    epsilon: float = 1e-6,
) -> Tensor:
    """Attention of one text to near tokens and to a summary of each block (2112.07916, 3.1.2).

    A summary is the sum of the block's inputs by their root mean square, times gamma; keys and values are made of it
    as of an input. Tokens behind the last whole block count to that one; a text shorter than a block has no summary.

    X [n, d], the first `length` of which are tokens and the others padding; P_q [h, d, k], P_k and P_v [G, d, k],
    gamma [d]; window: half of it on each side; bias [h, 2 n - 1], by distance j - i from -(n - 1) on; block_bias
    [h, 2 B - 1], B = n // block, by the distance of the summary's block from the query's -> [length, h, k].
    """
    n, h, length = len(X), len(P_q), len(X) if length is None else length
    whole, most = length // block, n // block
    own = [min(i // block, whole - 1) for i in range(length)]
    sums = [_sum(X[i] for i in range(length) if own[i] == b) for b in range(whole)]
    inputs = [s * gamma / (s.square().mean() + epsilon).sqrt() for s in sums]
    outputs = X.new_zeros(length, h, P_v.shape[2])
    for head in range(h):
        p_k, p_v = (P[head * len(P) // h] for P in (P_k, P_v))
        for i in range(length):
            near = [j for j in range(length) if abs(i - j) <= window // 2]
            logits = [scale * (X[i] @ P_q[head]) @ (x @ p_k) for x in (*inputs, *X[near])]
            if block_bias is not None:
                for b in range(whole):
                    logits[b] = logits[b] + block_bias[head, b - own[i] + most - 1]
            if bias is not None:
                for place, j in enumerate(near):
                    logits[whole + place] = logits[whole + place] + bias[head, j - i + n - 1]
            weights = masked_softmax(torch.stack(logits))
            outputs[i, head] = sum(w * (x @ p_v) for w, x in zip(weights, (*inputs, *X[near]), strict=True))
    return outputs


def _sum(terms: Iterable[Tensor]) -> Tensor:
    total: Any = sum(terms)
    return total


def _read(i: int, near: set[int], far: set[int], part: int | None, causal: bool) -> list[int]:
    read = {None: near | far, 1: near, 2: far}[part]
    return sorted(j for j in read if not causal or j <= i)


def _draw(*numbers: int) -> int:
    """A number of 32 bits that looks drawn, of a seed, a layer and two blocks: each is added to what was mixed."""
    drawn = 0
    for number in numbers:
        drawn = (drawn + number) % 2**32
        for _ in range(2):
            drawn = (drawn ^ drawn // 2**16) * 0x45D9F3B % 2**32
        drawn ^= drawn // 2**16
    return drawn
