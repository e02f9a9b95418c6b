"""Knocking heads in their linear form, which multiplies all heads by shared matrices (arXiv 2510.23052, equation 7).

Every value head is multiplied by the same d_v x d_v matrix, and with "all", every query and key head by two further
d x d matrices. The matrices start as the identity, so that a model can continue from a checkpoint without them. They
change the training but not the set of functions, because a matrix can be multiplied into the projection. The symbols
are defined in `softmax_attention`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.variant_attention import AttentionHeads
from ..transformers_internals import guarded_imports
from .attention_extension import HEAD_STAGE, AttentionExtension

with guarded_imports():
    from transformers import initialization as init

__all__ = ["KnockingHeads"]


class KnockingHeads(AttentionExtension):
    """The matrices of an attention module for the value heads ("value") or for all heads ("all")."""

    field = "knocking_heads"
    paper = ("Knocking-heads attention", "2510.23052")
    stage = HEAD_STAGE

    def __init__(self, value: Any, heads: AttentionHeads, query_dim: int, like: Tensor) -> None:
        super().__init__(value, heads, query_dim, like)
        self.heads = {"query": heads.query, "key": heads.key, "value": heads.value}
        sizes = {"query": heads.head_dim, "key": heads.head_dim, "value": heads.value_dim}
        for role in ("value",) if value == "value" else sizes:
            matrix = torch.empty(sizes[role], sizes[role], dtype=like.dtype, device=like.device)
            self.register_parameter(f"{role}_map", nn.Parameter(matrix))  # [d, d] or [d_v, d_v]

    def init_variant_parameters(self) -> None:
        """Initialize the matrices as the identity."""
        for matrix in self.parameters():
            init.copy_(matrix, torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device))

    def forward(self, states: Tensor, role: str) -> Tensor:
        """Return the queries, keys or values [b, h, n, d], multiplied by the matrix for their role if there is one."""
        matrix = getattr(self, f"{role}_map", None)
        return states if matrix is None else states @ matrix

    def count_flops(self) -> tuple[int, int]:
        """Return the number of floating-point operations per key token and per query token."""
        flops = {name.removesuffix("_map"): 2 * matrix.numel() for name, matrix in self.named_parameters()}
        key_flops = sum(self.heads[role] * flops.get(role, 0) for role in ("key", "value"))
        return key_flops, self.heads["query"] * flops.get("query", 0)

    def fold(self, role: str, projection: Tensor) -> Tensor:
        """Return the weight or bias [h d, ...] of a projection, multiplied by the matrix for its role if any."""
        matrix = getattr(self, f"{role}_map", None)
        if matrix is None:
            return projection
        heads = projection.double().unflatten(0, (-1, len(matrix)))
        return torch.einsum("de,hd...->he...", matrix.double(), heads).flatten(0, 1).to(projection)
