"""Running sums over keys, a chunk of tokens at a time (arXiv 2006.16236, section 3.3).

Letters as in `softmax_attention`; F features a head, C tokens of a chunk.
"""

import torch
from torch import nn

__all__ = ["causal_sums"]

# Tokens of a chunk: its weights, C x C, are as large as a state of usual sizes.
CHUNK = 128


def causal_sums(
    queries: torch.Tensor, features: torch.Tensor, values: torch.Tensor, sums: torch.Tensor | None, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each query, phi(q) times the sum of phi(k) v^T over the keys up to its own, and the whole sum.

    Args:
        queries: phi(q) [b, k, g n, F], the n queries of each of a group's g heads.
        features: phi(k) [b, k, n, F].
        values: [b, k, n, x].
        sums: of earlier keys [b, k, F, x], if there are any.
        rows: g.

    Returns:
        [b, k, g n, x] and [b, k, F, x].
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
