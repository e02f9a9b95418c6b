"""Heads turned towards each other before they are pooled, as in arXiv 2412.20677."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...modeling.mechanisms.head_sharing import consecutive_groups
from ..calibration.moments import head_moments
from ..calibration.recording import AttentionInputs
from ..calibration_settings import Calibration
from ..grouping import HeadCounts, join_heads, repeat_heads, split_heads
from ..projections import AttentionTensors
from .base import CalibratedMethod, LayerContext

__all__ = ["Aligned"]

ROUNDS = 30


class Aligned(CalibratedMethod):
    """Mean-pooling after an orthogonal Procrustes alignment of each group's heads.

    A head's queries and keys may be rotated together, and its values against W_o, without changing what it computes:
    q^T k = (R q)^T (R k). The rotations are those that bring the keys (and values) of a group closest to each other on
    the text. Groups are of consecutive heads. Nothing is refitted.
    """

    name = "aligned"

    @torch.no_grad()
    def convert_module(
        self,
        tensors: AttentionTensors,
        heads: HeadCounts,
        layer: LayerContext,
        inputs: Sequence[AttentionInputs],
        calibration: Calibration,
    ) -> AttentionTensors:
        groups = consecutive_groups(heads.query, heads.key[1])
        moments = head_moments(tensors, heads, inputs, groups)
        key_turns = torch.cat([_alignment(moment, heads.head_dim) for moment in moments.keys])  # [h, d, d]
        value_turns = torch.cat([_alignment(moment.mean(0), heads.head_dim) for moment in moments.values])
        changed: dict[str, Any] = tensors.mapped("query", partial(_turned, turns=key_turns, kept=heads.query))
        changed |= tensors.mapped("key", partial(_turned, turns=key_turns, kept=len(groups)))
        changed |= tensors.mapped("value", partial(_turned, turns=value_turns, kept=len(groups)))
        output = tensors.output_weight.double().unflatten(1, (heads.query, -1))  # [D, h, d]
        output = torch.einsum("ohe,hde->ohd", output, value_turns).flatten(1).to(tensors.output_weight.dtype)
        return replace(tensors, **changed, output_weight=output)


def _turned(projection: torch.Tensor, turns: torch.Tensor, kept: int) -> torch.Tensor:
    """Turn each head of a projection by its rotation [h, d, d], then average them down to the heads that are kept."""
    heads, head_dim = turns.shape[:2]
    repeated = repeat_heads(projection, projection.shape[0] // head_dim, heads)
    turned = torch.einsum("hde,he...->hd...", turns, split_heads(repeated.double(), heads))  # [h, d, ...]
    if kept != heads:
        turned = turned.unflatten(0, (kept, -1)).mean(1)
    return join_heads(turned).to(projection.dtype)


def _alignment(moment: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rotations [g, d, d] that bring heads of a second moment [g*d, g*d] closest to each other.

    Each head in turn is rotated towards the sum of the others: the orthogonal Procrustes problem, whose solution is
    U V^T of the singular value decomposition of their cross-moment.
    """
    size = moment.shape[0] // head_dim
    cross = moment.unflatten(0, (size, head_dim)).unflatten(2, (size, head_dim)).transpose(1, 2)  # [g, g, d, d]
    turns = torch.eye(head_dim, dtype=moment.dtype, device=moment.device).repeat(size, 1, 1)
    for _ in range(ROUNDS):
        for head in range(size):
            others = sum(turns[other] @ cross[other, head] for other in range(size) if other != head)
            if size > 1:
                left, _, right = torch.linalg.svd(others)
                turns[head] = left @ right
    return turns
