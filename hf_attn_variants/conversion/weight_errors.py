"""How far a converted attention's products are from the source's, by their weights alone.

The relative Frobenius errors of the two products that attention is made of, over all heads i:

    logits:  sqrt( sum_i |B_i - B'_i|^2 / sum_i |B_i|^2 ),  B_i = W_q,i^T W_k,i   (biases included: [W | b] for W)
    values:  sqrt( sum_i |P_i - P'_i|^2 / sum_i |P_i|^2 ),  P_i = W_o,i W_v,i     (the value's bias included)

with W_k,i the key head that query head i reads.
"""

import math

import torch

from .grouping import HeadCounts
from .projections import AttentionTensors

__all__ = ["attention_errors", "bilinear_error"]

# A weight [h*d, D] and its bias [h*d] or None.
Projection = tuple[torch.Tensor, torch.Tensor | None]
BLOCK_ELEMENTS = 2**20


def attention_errors(
    before: AttentionTensors, after: AttentionTensors, heads: HeadCounts
) -> tuple[float | None, float | None]:
    """Return the relative errors of the logits' products and of the values' (module docstring).

    Args:
        before, after: the projections of the source and the converted ones.
        heads: their head counts.

    Returns:
        The two errors; None where the source's products are zero.
    """
    queries, new_queries = before.pair("query"), after.pair("query")
    keys, new_keys = before.pair("key"), after.pair("key")
    values, new_values = before.pair("value"), after.pair("value")
    outputs = new_outputs = (before.output_weight.T, None)
    if after.output_weight is not before.output_weight:
        new_outputs = (after.output_weight.T, None)
    return (
        _summed_error(queries, keys, new_queries, new_keys, heads.query, heads.key, heads.head_dim),
        _summed_error(outputs, values, new_outputs, new_values, heads.output, heads.value, heads.head_dim),
    )


def bilinear_error(
    left: torch.Tensor, right: torch.Tensor, new_left: torch.Tensor, new_right: torch.Tensor
) -> tuple[float, float]:
    """Return |left^T right - new_left^T new_right|^2 and |left^T right|^2 (Frobenius) without forming either product.

    The difference is left^T (right - new_right) + (left - new_left)^T new_right, and |X^T Y|^2 = <X X^T, Y Y^T>: only
    matrices of 2d x 2d, and exactly zero where nothing changed.

    Args:
        left, new_left: [..., d, D_1].
        right, new_right: [..., d, D_2].

    Returns:
        The two squared norms, each summed over the leading dimensions.
    """
    left_gram = left @ left.mT
    reference = (left_gram * (right @ right.mT)).sum()
    columns = right - new_right  # [..., d, D_2]
    if new_left is not left:
        rows = torch.cat([left, left - new_left], dim=-2)  # [..., 2d, D_1]
        left_gram, columns = rows @ rows.mT, torch.cat([columns, new_right], dim=-2)
    difference = (left_gram * (columns @ columns.mT)).sum()
    return max(difference.item(), 0.0), reference.item()


def _summed_error(
    left: Projection,
    right: Projection,
    new_left: Projection,
    new_right: Projection,
    heads: int,
    shared: tuple[int, int],
    head_dim: int,
) -> float | None:
    """Return the relative error over all `heads`, of which each reads one of `shared` heads before and after."""
    # Some heads at a time: float64 copies of all would outgrow the layer itself.
    block = max(1, BLOCK_ELEMENTS // (head_dim * max(left[0].shape[1], right[0].shape[1])))
    unchanged = all(new is old for new, old in zip(new_left, left, strict=True))
    difference = reference = 0.0
    for indices in torch.arange(heads).split(block):
        before, after = (indices // (heads // count) for count in shared)
        lefts = _heads(left, indices, head_dim)
        new_lefts = lefts if unchanged else _heads(new_left, indices, head_dim)
        terms = bilinear_error(lefts, _heads(right, before, head_dim), new_lefts, _heads(new_right, after, head_dim))
        difference, reference = difference + terms[0], reference + terms[1]
    return math.sqrt(difference / reference) if 0 < reference < math.inf and math.isfinite(difference) else None


def _heads(projection: Projection, indices: torch.Tensor, head_dim: int) -> torch.Tensor:
    weight, bias = projection
    heads = weight.unflatten(0, (-1, head_dim))[indices.to(weight.device)].double()  # [i, d, D]
    if bias is None:
        return heads
    # [W | b]: the bias is what an input of 1 is multiplied by.
    bias = bias.unflatten(0, (-1, head_dim))[indices.to(bias.device)].double()
    return torch.cat([heads, bias[..., None]], dim=-1)
