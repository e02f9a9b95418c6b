"""Attention to a part of the keys: windows, blocks, strides, compressed keys and summaries.

A list names the keys of every query. So the formulas share nothing with the masks and blocks of the models.
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
    """The positions that position i of n reads in a sliding window (Longformer, 2004.05150, 3.1).

    window w: w / 2 on each side and itself; if causal, the w last ones with itself. dilation: the gaps between them
    are dilation - 1 wide. The first global_tokens read all, and all read them; not if causal.
    """
    if i < global_tokens:
        return list(range(n))
    steps = range(-(window - 1), 1) if causal else range(-(window // 2), window // 2 + 1)
    read = {i + dilation * step for step in steps} | set(range(min(global_tokens, n)))
    return sorted(j for j in read if 0 <= j < n)


def sliding_window_mask(
    n: int, *, window: int, dilation: int = 1, global_tokens: int = 0, causal: bool = False
) -> Tensor:
    """The same as a mask [n, n] of full attention: True if position i reads position j."""
    window_of = partial(keys_in_window, window=window, dilation=dilation, global_tokens=global_tokens, causal=causal)
    return pattern_mask(n, window_of)


def sliding_window_attention(
    Q: Tensor, K: Tensor, V: Tensor, *, scale: float, padding: Maybe = None, bias: Maybe = None, **window: Any
) -> tuple[Tensor, Tensor]:
    """Attention in which each position reads the keys of `keys_in_window`, which takes `window` (2004.05150, 3.1).

    Q [b, h, n, k], K and V [b, G, n, k] -> the outputs [b, h, n, k] and the weights [b, h, n, n].
    bias [h, 2 n - 1] is added by distance j - i, from -(n - 1) to n - 1 (LongT5, 2112.07916, 3.1.1).
    """
    n, read = Q.shape[2], sliding_window_mask(Q.shape[2], **window)[None, None]
    read = read if padding is None else read & padding[:, None, None]
    mask = Q.new_zeros(read.shape).masked_fill(~read, -torch.inf)
    bias = None if bias is None else bias[None, :, torch.arange(n) - torch.arange(n)[:, None] + n - 1]
    return attention_core(Q, K, V, scale=scale, bias=bias, mask=mask)


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
    """The positions that position i of n reads of a text that is cut into blocks (1801.10198, 4.2.4)."""
    return _read(i, {j for j in range(n) if j // block == i // block}, set(), None, causal)


def keys_in_dilated_block(i: int, n: int, *, block: int, step: int, causal: bool = False) -> list[int]:
    """The positions that position i of n reads: of its block those a multiple of `step` away (2307.02486, 3.1)."""
    return _read(i, {j for j in range(n) if j // block == i // block and (j - i) % step == 0}, set(), None, causal)


def keys_in_random_blocks(
    i: int, n: int, *, block: int, random: int, seed: int = 0, layer: int = 0, causal: bool = False
) -> list[int]:
    """The positions that position i of n reads: its block, the two neighbors and `random` others (2007.14062, 2).

    Which others is drawn once a layer: of the blocks farther away, those with the smallest draws.
    """
    own, blocks = i // block, -(-n // block)
    others = [j for j in range(blocks) if (own - j > 1 if causal else abs(own - j) > 1)]
    drawn = sorted(others, key=lambda j: (_draw(seed, layer, own, j), j))[:random]
    read = {own - 1, own, own + 1, *drawn}
    return _read(i, {j for j in range(n) if j // block in read}, set(), None, causal)


def pattern_mask(n: int, keys: Callable[[int, int], Iterable[int]], *, global_tokens: int = 0) -> Tensor:
    """A pattern as a mask [n, n] of full attention: True if position i reads position j.

    keys: a function of i and n that lists what position i reads. The first global_tokens read all, and all read them.
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
    """Attention to keys and values that a convolution has shortened (1801.10198, 4.2.4).

    Q [b, h, n, k], K and V [b, G, m, k], C_k and C_v [G, s, k, k]: key J of head g is sum_t K[sJ + t] C_k[g, t], with
    zeros after the end. Padding counts as zeros, and a key made of padding alone is not read. -> [b, h, n, k].
    """
    m, stride = K.shape[2], C_k.shape[1]
    padding = torch.ones(K.shape[0], m, dtype=torch.bool) if padding is None else padding

    def in_groups(T: Tensor) -> Tensor:  # [b, ..., m, k] -> [b, ..., m / s, s, k]
        return torch.nn.functional.pad(T, (0, 0, 0, -m % stride)).unflatten(-2, (-1, stride))

    short = [einsum("bgJtd,gtde->bgJe", in_groups(T * padding[:, None, :, None]), C) for T, C in ((K, C_k), (V, C_v))]
    read = in_groups(padding[..., None]).any((-2, -1))[:, None, None]
    mask = Q.new_zeros(read.shape).masked_fill(~read, -torch.inf)
    return attention_core(Q, *short, scale=scale, mask=mask)[0]


def transient_global_attention(
    X: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, gamma: Tensor, *, window: int, block: int, scale: float = 1,
    length: int | None = None, bias: Maybe = None, block_bias: Maybe = None, epsilon: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Attention of one text to near tokens and to a summary of each block (LongT5, 2112.07916, 3.1.2).

    A summary is the sum of the block's inputs over their root mean square, times gamma; its key and value are made as
    those of an input. Tokens after the last whole block count to that block. A text shorter than a block has none.

    X [n, d], the first `length` of which are tokens and the others padding; P_q [h, d, k], P_k and P_v [G, d, k],
    gamma [d]; window: half of it on each side; bias [h, 2 n - 1], by distance j - i from -(n - 1) on; block_bias
    [h, 2 B - 1], B = n // block, by the distance of the summary's block from the query's -> [length, h, k].
    """
    n, h, length = len(X), len(P_q), len(X) if length is None else length
    whole, most = length // block, n // block
    own = [min(i // block, whole - 1) for i in range(length)]
    sums = [X[[i for i in range(length) if own[i] == b]].sum(0) for b in range(whole)]
    inputs = [s * gamma / (s.square().mean() + epsilon).sqrt() for s in sums]
    outputs = X.new_zeros(length, h, P_v.shape[2])
    for head in range(h):
        p_k, p_v = (P[head * len(P) // h] for P in (P_k, P_v))
        for i in range(length):
            near = [j for j in range(length) if abs(i - j) <= window // 2]
            read = torch.stack([*inputs, *X[near]])  # [whole + near, d]
            logits = scale * (read @ p_k) @ (X[i] @ P_q[head])
            if block_bias is not None:
                logits[:whole] += block_bias[head, [b - own[i] + most - 1 for b in range(whole)]]
            if bias is not None:
                logits[whole:] += bias[head, [j - i + n - 1 for j in near]]
            outputs[i, head] = masked_softmax(logits) @ read @ p_v
    return outputs


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
