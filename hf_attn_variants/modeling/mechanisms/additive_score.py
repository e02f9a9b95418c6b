"""Additive scores: v^T tanh(W q + U k) in the place of the dot product (Bahdanau, arXiv 1409.0473, section A.1.2).

Each query head has a W and a v of its own, each key head a U; queries and keys are those of the head. There is no
factor of the scores, which v bounds. Letters as in `softmax_attention`.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..ops.query_folding import is_exporting
from ..upstream import known_imports
from .mechanism import Mechanism

with known_imports():
    from transformers import initialization as init

__all__ = ["AdditiveScore", "score_of"]

# Numbers of a block of queries, keys and d between them: a block is all there is of [n, m, d] at any time.
BLOCK_ELEMENTS = 2**22


class AdditiveScore(Mechanism, nn.Module):
    """The scores of an attention's heads.

    Args:
        heads: h_k, of the queries.
        key_heads: k.
        head_dim: d.
        like: a tensor with their dtype and device.
    """

    field = "score_function"
    name = "additive"
    paper = ("Neural machine translation by jointly learning to align and translate", "1409.0473")
    inherits = True

    def __init__(self, heads: int, key_heads: int, head_dim: int, like: torch.Tensor) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self.query_map = nn.Parameter(torch.empty(heads, head_dim, head_dim, **options))  # W, [h_k, d, d]
        self.key_map = nn.Parameter(torch.empty(key_heads, head_dim, head_dim, **options))  # U, [k, d, d]
        self.vector = nn.Parameter(torch.empty(heads, head_dim, **options))  # v, [h_k, d]

    def init_projections(self) -> None:
        """Draw by fan-in: sums keep the spread of queries and keys, and scores begin with one of at most 1."""
        for parameter in (self.query_map, self.key_map, self.vector):
            init.normal_(parameter, mean=0.0, std=parameter.shape[-1] ** -0.5)

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the logits [b, h_k, n, m] of queries [b, h_k, n, d] and keys [b, k, m, d].

        Of a text's queries as many at once as fit into a block; the backward pass makes each block again.
        """
        # [b, k, g, n, d] and [b, k, 1, 1, m, d]: query heads of a group stand beside each other.
        query = (query @ self.query_map.transpose(-1, -2)).unflatten(1, (key.shape[1], -1))
        key = (key @ self.key_map.transpose(-1, -2))[:, :, None, None]
        vector = self.vector.unflatten(0, (key.shape[1], -1))[..., None, :, None]  # [k, g, 1, d, 1]
        if torch.compiler.is_compiling() or is_exporting():
            return _scores(query, key, vector).flatten(1, 2)
        rows = max(1, BLOCK_ELEMENTS // max(1, query[..., :1, :].numel() * key.shape[-2]))
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, vector))
        blocks = query.split(rows, dim=3)
        logits = [_kept_small(block, key, vector) if learns else _scores(block, key, vector) for block in blocks]
        return torch.cat(logits, 3).flatten(1, 2)

    def flops(self) -> tuple[int, int]:
        """Return the floating-point operations of a token of the memory, and of a token that asks.

        The product with v is not in them: it is counted as that of a query and a key would be.
        """
        return 2 * self.key_map.numel(), 2 * self.query_map.numel()


def score_of(module: nn.Module, heads: Any, config: Any, prefix: str) -> AdditiveScore | None:
    """Return the score of an attention, in its weights' dtype; None: the dot product.

    Args:
        module: the attention.
        heads: its `AttentionHeads`.
        config: a variant configuration.
        prefix: of the attention's place.
    """
    if AdditiveScore.asked_for(config, prefix) is None:
        return None
    return AdditiveScore(heads.query, heads.key, heads.head_dim, next(module.parameters()))


def _scores(query: torch.Tensor, key: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return ((query[..., None, :] + key).tanh() @ vector)[..., 0]  # [b, k, g, n, m]


def _kept_small(*operands: torch.Tensor) -> Any:
    return checkpoint(_scores, *operands, use_reentrant=False, preserve_rng_state=False)
