"""Clipped softmax, whose weights can be exactly 0 (arXiv 2306.12929, equation 4).

The weights are clip((zeta - gamma) softmax(s) + gamma, 0, 1) with gamma <= 0 and zeta >= 1. During training, gamma and
zeta can move from 0 and 1, which is the softmax, to their configured values (`set_clipping_progress`). The symbols are
defined in `softmax_attention`.
"""

import math
from typing import Any

from torch import Tensor, nn

from ..ops.variant_attention import AttentionHeads
from .attention_extension import WEIGHT_STAGE, AttentionExtension

__all__ = ["ClippedSoftmax", "set_clipping_progress"]


class ClippedSoftmax(AttentionExtension):
    """The clipping of an attention module, whose `progress` is 0 for a plain softmax and 1 for the configured values.

    The progress is not saved.
    """

    field = "clipped_softmax"
    paper = ("Quantizable transformers: removing outliers by helping attention heads do nothing", "2306.12929")
    stage = WEIGHT_STAGE

    def __init__(self, value: Any, heads: AttentionHeads, query_dim: int, like: Tensor) -> None:
        super().__init__(value, heads, query_dim, like)
        (self.gamma, self.zeta), self.progress = value, 1.0

    @classmethod
    def validate(cls, field: str, value: Any) -> list[float]:
        """Return the value of a field as [gamma, zeta].

        Raises:
            ValueError: if the value is not a pair of finite numbers, or if gamma > 0 or zeta < 1.
        """
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or not all(type(number) in (int, float) and math.isfinite(number) for number in value):
            raise ValueError(f"`{field}` must be [gamma, zeta], two finite numbers, got {value!r}.")
        if value[0] > 0 or value[1] < 1:
            raise ValueError(f"`{field}` must be [gamma, zeta] with gamma <= 0 and zeta >= 1, got {list(value)}.")
        return [float(number) for number in value]

    def forward(self, weights: Tensor, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Return the clipped weights [b, h, n, m]. The logits and the mask are not used."""
        gamma, zeta = self.progress * self.gamma, 1 + self.progress * (self.zeta - 1)
        return ((zeta - gamma) * weights + gamma).clamp(0, 1)


def set_clipping_progress(model: nn.Module, progress: float) -> None:
    """Interpolate gamma and zeta of all modules: 0 and 1 for a `progress` of 0, the configured values for 1."""
    for module in model.modules():
        if isinstance(module, ClippedSoftmax):
            module.progress = progress
