"""A product with a weight in bfloat16, packed for oneDNN: the one place that knows how torch does it on a CPU."""

import functools
from typing import Any

import torch

from .processor import processor_has
from .timing import least_seconds

__all__ = ["Bfloat16Weight", "has_bfloat16", "has_fast_bfloat16"]

# The names that processors have for products of bfloat16.
BFLOAT16 = ("amx_bf16", "avx512_bf16")
# The layout is for so many rows; it costs other numbers of rows nothing (torch 2.13, AMX: 1 to 2048).
ROWS = 16
# A product that takes this many times as long as in float32 runs a reference kernel, whatever the noise of the clock.
SLOW_KERNEL = 2.0
_linear: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
_pack: Any = getattr(getattr(torch.ops.mkldnn, "_reorder_linear_weight", None), "default", None)


class Bfloat16Weight:
    """A weight W [out, in] in bfloat16, which has float32's range: large inputs are no harm to the others.

    Args:
        weight: in bfloat16 [out, in].
    """

    dtype = torch.bfloat16

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = _pack(weight.contiguous(), ROWS)
        self._out_features = len(weight)

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> "Bfloat16Weight":
        """Return the nearest to a weight of float32 [out, in]."""
        return cls(weight.to(torch.bfloat16))

    def product(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return W x + b [..., out] for states x [..., in] of two dimensions or more, float32."""
        if not states.numel():
            return states.new_empty(*states.shape[:-1], self._out_features)
        made: torch.Tensor = _linear(states.to(torch.bfloat16), self._packed, None, "none", [], "").float()
        return made if bias is None else made.add_(bias)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the arguments that it was made of."""
        return {"weight": self._packed.to_dense()}

    def whole(self) -> torch.Tensor:
        """Return W in float32 [out, in]."""
        return self.tensors()["weight"].float()


@functools.cache
@torch.autocast("cpu", enabled=False)
def has_bfloat16() -> bool:
    """Say whether this processor multiplies numbers of bfloat16, and torch's oneDNN makes use of it."""
    if _linear is None or _pack is None or not torch.backends.mkldnn.is_available() or not processor_has(*BFLOAT16):
        return False
    # What torch calls by these names promises nothing: it must be the product.
    numbers = torch.tensor([[3.0, -2.0, 0.5], [1.0, 2.0, -4.0]], device="cpu", dtype=torch.float32)
    try:
        weight = Bfloat16Weight.rounded(numbers)
        made, kept = weight.product(numbers, None), weight.whole()
    except (RuntimeError, TypeError):
        return False
    return torch.equal(made, numbers @ numbers.t()) and torch.equal(kept, numbers)


@functools.cache
@torch.autocast("cpu", enabled=False)
@torch.no_grad()
def has_fast_bfloat16() -> bool:
    """Return whether a product in bfloat16 is correct here and does not run a slow reference kernel."""
    if not has_bfloat16():
        return False
    states, weight = torch.full((16, 512), 0.5), torch.full((512, 512), 0.5)
    packed = Bfloat16Weight.rounded(weight)
    float32, bfloat16 = least_seconds(
        lambda: torch.nn.functional.linear(states, weight), lambda: packed.product(states, None)
    )
    return bfloat16 < SLOW_KERNEL * float32
