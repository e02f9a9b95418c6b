"""What one call of the blocked attention is computed from. Letters as in `softmax_attention`."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Operands"]


class Operands(NamedTuple):
    """What one call is computed from, by whichever kernel; arguments as in `talking_heads_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None  # four dimensions, as the bias
    position_bias: Tensor | None = None
    logits_proj: Tensor | None = None
    weights_proj: Tensor | None = None
    seed: Tensor | None = None  # whole number [1] that decides what dropout drops; None without dropout
    scaling: float = 1.0
    is_causal: bool = False
    dropout: float = 0.0
    reach: list[int] | None = None  # a `Reach`; the bias is then by distance

    @property
    def heads_in(self) -> int:
        """h_k, the heads of the queries."""
        return self.query.shape[1]

    @property
    def heads(self) -> int:
        """h, the heads of the softmax."""
        return self.heads_in if self.logits_proj is None else self.logits_proj.shape[1]

    @property
    def heads_out(self) -> int:
        """h_v, the heads of the output."""
        return self.heads if self.weights_proj is None else self.weights_proj.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no query or no key."""
        return 0 in (*self.query.shape, self.key.shape[2])

    def new_output(self) -> Tensor:
        """Return an uninitialised output [b, n, h_v, d_v]."""
        batches, _, length, _ = self.query.shape
        return self.value.new_empty(batches, length, self.heads_out, self.value.shape[-1])
