"""The base class of score functions, which replace the dot product of queries and keys.

`score_table` lists the score functions. The symbols are defined in `softmax_attention`.
"""

from abc import abstractmethod

from torch import Tensor, nn

from .mechanism import Mechanism

__all__ = ["ScoreFunction"]


class ScoreFunction(Mechanism, nn.Module):
    """The score function of an attention module.

    Args:
        heads: h_k, the number of query heads.
        key_heads: k, the number of key heads.
        head_dim: d, the size of a query or key head.
        like: a tensor whose dtype and device are used for the parameters.
    """

    field = "score_function"
    inherits = True

    def __init__(self, heads: int, key_heads: int, head_dim: int, like: Tensor) -> None:
        super().__init__()

    def init_variant_parameters(self) -> None:
        """Initialize the parameters with the functions of `transformers.initialization`."""

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the logits [b, h_k, n, m] for queries [b, h_k, n, d] and keys [b, k, m, d]."""

    def count_flops(self) -> tuple[int, int]:
        """Return the number of floating-point operations per key token and per query token.

        The dot product that the score function replaces is not included.
        """
        return 0, 0
