"""The operands of blocked attention and of the Triton kernels; letters are defined in `softmax_attention`."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Operands"]


class Operands(NamedTuple):
    """The operands of one attention call, with the arguments of `talking_heads_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None  # four dimensions, like the bias
    position_bias: Tensor | None = None
    logits_proj: Tensor | None = None
    weights_proj: Tensor | None = None
    seed: Tensor | None = None  # integer [1] that seeds dropout; None without dropout
    scaling: float = 1.0
    is_causal: bool = False
    dropout: float = 0.0
    reach: list[int] | None = None  # a `KeyRange`; the bias is then a bias by distance

    @property
    def heads_in(self) -> int:
        """Return h_k, the number of query heads."""
        return self.query.shape[1]

    @property
    def heads(self) -> int:
        """Return h, the number of softmax heads."""
        return self.heads_in if self.logits_proj is None else self.logits_proj.shape[1]

    @property
    def heads_out(self) -> int:
        """Return h_v, the number of output heads."""
        return self.heads if self.weights_proj is None else self.weights_proj.shape[1]

    @property
    def is_empty(self) -> bool:
        """Return True if there are no queries or no keys."""
        return 0 in (*self.query.shape, self.key.shape[2])

    def new_output(self) -> Tensor:
        """Return an uninitialized output [b, n, h_v, d_v]."""
        batches, _, length, _ = self.query.shape
        return self.value.new_empty(batches, length, self.heads_out, self.value.shape[-1])
