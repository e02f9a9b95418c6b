"""Attention sinks, an additional term in the denominator of the softmax (gpt-oss, arXiv 2508.10925, section 2.2).

The weight of key j is exp(s_j) / (a + sum_i exp(s_i)), with one a >= 0 per softmax head. A head can therefore attend
to nothing. gpt-oss learns log a, whose gradient vanishes as a approaches 0. Here a itself is learned and starts at 0,
so that a model can continue from a checkpoint without sinks. The symbols are defined in `softmax_attention`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.variant_attention import AttentionHeads
from ..transformers_internals import guarded_imports
from .attention_extension import WEIGHT_STAGE, AttentionExtension, check_switch

with guarded_imports():
    from transformers import initialization as init

__all__ = ["AttentionSink"]

# Below this logarithm of the sum, exp(-logarithm) could overflow in float32.
_MIN_LOG_SUM = -80.0


class AttentionSink(AttentionExtension):
    """The sinks of an attention module."""

    field = "attention_sink"
    paper = ("gpt-oss-120b & gpt-oss-20b model card", "2508.10925")
    stage = WEIGHT_STAGE
    validate = staticmethod(check_switch)

    def __init__(self, value: Any, heads: AttentionHeads, query_dim: int, like: Tensor) -> None:
        super().__init__(value, heads, query_dim, like)
        self.sink = nn.Parameter(torch.empty(heads.softmax, dtype=like.dtype, device=like.device))  # a, [h]

    def init_variant_parameters(self) -> None:
        """Initialize a with zeros."""
        init.zeros_(self.sink)

    def forward(self, weights: Tensor, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weights [b, h, n, m] of a softmax with sinks for the softmax of the masked logits."""
        # If training makes a parameter negative, a is 0, and the gradient still reaches the parameter.
        sink = self.sink + (self.sink.clamp(min=0) - self.sink).detach()
        lowest = torch.finfo(logits.dtype).min
        if mask is not None:
            logits = logits.masked_fill(~mask, lowest) if mask.dtype == torch.bool else logits + mask
        # Minus infinity would make the gradient NaN.
        log_sum = logits.to(weights.dtype).clamp(min=lowest).logsumexp(-1, keepdim=True).clamp(min=_MIN_LOG_SUM)
        return weights / (1 + sink.to(weights.dtype)[:, None, None] * (-log_sum).exp())
