"""Cumulative sums over keys for causal linear attention, in chunks of tokens (arXiv 2006.16236, section 3.3).

The letters are defined in `softmax_attention`; F is the number of features per head and C is the chunk length.
"""

import torch
from torch import nn

__all__ = ["causal_sums"]

# The number of tokens per chunk. The C x C weights of a chunk are about as large as a typical state.
CHUNK = 128


def causal_sums(
    queries: torch.Tensor, features: torch.Tensor, values: torch.Tensor, sums: torch.Tensor | None, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return phi(q) times the sum of phi(k) v^T over the keys up to each query, and the total sum.

    Args:
        queries: phi(q) [b, k, g n, F], n queries for each of the g heads of a group.
        features: phi(k) [b, k, n, F].
        values: [b, k, n, x].
        sums: the sums over earlier keys, [b, k, F, x], or None.
        rows: g.

    Returns:
        The outputs [b, k, g n, x] and the total sums [b, k, F, x].
    """
    length, chunk = features.shape[2], min(CHUNK, features.shape[2])
    missing = -length % chunk
    queries = nn.functional.pad(queries.unflatten(2, (rows, length)), (0, 0, 0, missing))
    features, values = (nn.functional.pad(each, (0, 0, 0, missing)) for each in (features, values))
    queries = queries.unflatten(3, (-1, chunk)).transpose(2, 3).flatten(3, 4)  # [b, k, chunks, g C, F]
    features, values = (each.unflatten(2, (-1, chunk)) for each in (features, values))  # [b, k, chunks, C, ...]
    within = features.mT @ values  # [b, k, chunks, F, x]
    after = within.cumsum(2) if sums is None else within.cumsum(2) + sums[:, :, None]
    weights = (queries @ features.mT).unflatten(3, (rows, chunk)).tril().flatten(3, 4)
    output = weights @ values + queries @ (after - within)
    output = output.unflatten(3, (rows, chunk)).transpose(2, 3).flatten(3, 4)[:, :, :, :length]
    return output.flatten(2, 3), after[:, :, -1]
