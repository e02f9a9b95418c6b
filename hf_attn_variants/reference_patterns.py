"""Attention that reads a part of the memory, by its formula: the executable specification of the patterns.

Sources: sliding windows, dilated or not, and global tokens, arXiv 2004.05150 (Longformer), section 3.1; windows under
a bias by distance, 2112.07916 (LongT5), section 3.1.1. Letters as in `reference`: b batch, h heads, n length, k size
of a head. Here a query's keys are listed one by one, so that nothing is shared with the package's masks and blocks.
"""

import torch
from torch import Tensor

from .reference import masked_softmax

__all__ = ["keys_in_window", "sliding_window_attention", "sliding_window_mask"]


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
