"""Additive scores: v^T tanh(W q + U k) instead of the dot product (Bahdanau, arXiv 1409.0473, section A.1.2).

Each query head has its own W and v, and each key head has its own U. The scores are not scaled, because they are
bounded by v. The symbols are defined in `softmax_attention`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..ops.variant_attention import is_exporting
from ..transformers_internals import guarded_imports
from .score_function import ScoreFunction

with guarded_imports():
    from transformers import initialization as init

__all__ = ["AdditiveScore"]

# The maximum number of elements in a block of the [n, m, d] tensor. Only one block is in memory at a time.
_SCORE_BLOCK_ELEMENTS = 2**22


class AdditiveScore(ScoreFunction):
    """The additive score function of an attention module."""

    name = "additive"
    paper = ("Neural machine translation by jointly learning to align and translate", "1409.0473")

    def __init__(self, heads: int, key_heads: int, head_dim: int, like: Tensor) -> None:
        super().__init__(heads, key_heads, head_dim, like)
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self.query_map = nn.Parameter(torch.empty(heads, head_dim, head_dim, **options))  # W, [h_k, d, d]
        self.key_map = nn.Parameter(torch.empty(key_heads, head_dim, head_dim, **options))  # U, [k, d, d]
        self.vector = nn.Parameter(torch.empty(heads, head_dim, **options))  # v, [h_k, d]

    def init_variant_parameters(self) -> None:
        """Initialize the parameters with fan-in scaling.

        The projections preserve the standard deviation of the queries and keys. The initial scores have a standard
        deviation of at most 1.
        """
        for parameter in (self.query_map, self.key_map, self.vector):
            init.normal_(parameter, mean=0.0, std=parameter.shape[-1] ** -0.5)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the logits [b, h_k, n, m] for queries [b, h_k, n, d] and keys [b, k, m, d].

        The logits are computed in blocks of queries, which the backward pass recomputes.
        """
        # [b, k, g, n, d] and [b, k, 1, 1, m, d]: the query heads of a group are adjacent.
        query = (query @ self.query_map.transpose(-1, -2)).unflatten(1, (key.shape[1], -1))
        key = (key @ self.key_map.transpose(-1, -2))[:, :, None, None]
        vector = self.vector.unflatten(0, (key.shape[1], -1))[..., None, :, None]  # [k, g, 1, d, 1]
        if torch.compiler.is_compiling() or is_exporting():
            return _compute_scores(query, key, vector).flatten(1, 2)
        rows = max(1, _SCORE_BLOCK_ELEMENTS // max(1, query[..., :1, :].numel() * key.shape[-2]))
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, vector))
        blocks = query.split(rows, dim=3)
        logits = [
            _compute_scores_with_checkpoint(block, key, vector) if learns else _compute_scores(block, key, vector)
            for block in blocks
        ]
        return torch.cat(logits, 3).flatten(1, 2)

    def count_flops(self) -> tuple[int, int]:
        """Return the number of floating-point operations per key token and per query token.

        The product with v is not included, because it is already counted as the dot product that it replaces.
        """
        return 2 * self.key_map.numel(), 2 * self.query_map.numel()


def _compute_scores(query: Tensor, key: Tensor, vector: Tensor) -> Tensor:
    return ((query[..., None, :] + key).tanh() @ vector)[..., 0]  # [b, k, g, n, m]


def _compute_scores_with_checkpoint(*operands: Tensor) -> Any:
    return checkpoint(_compute_scores, *operands, use_reentrant=False, preserve_rng_state=False)
