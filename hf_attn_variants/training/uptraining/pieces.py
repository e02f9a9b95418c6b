"""A long text in pieces, for a teacher that reads fewer tokens than its student; what it makes of them, in a row."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

__all__ = ["Pieces", "in_pieces"]


class Pieces(NamedTuple):
    """Where the pieces of some texts were.

    Attributes:
        real: which pieces have a token, [b * p]; the others are not read.
        texts: b, how many texts there are.
        length: n, the tokens of a text.
    """

    real: Tensor
    texts: int
    length: int

    def in_a_row(self, states: Tensor) -> Tensor:
        """Return what was made of pieces, [pieces, l, ...], as if of whole texts [b, n, ...]; for padding zeros."""
        whole = states.new_zeros(len(self.real), *states.shape[1:])
        whole[self.real] = states
        return whole.unflatten(0, (self.texts, -1)).flatten(1, 2)[:, : self.length]


def in_pieces(inputs: Mapping[str, Tensor], length: int) -> tuple[dict[str, Tensor], Pieces]:
    """Cut texts into pieces of equal length; each is a text of its own to the model, without special tokens around it.

    Args:
        inputs: arguments of the model, [b, n] each, padded on the right; `attention_mask` among them.
        length: l, the tokens of a piece.

    Returns:
        The same arguments of all pieces that have a token, [pieces, l], and where these were.
    """
    texts, tokens = inputs["attention_mask"].shape
    filled = -tokens % length
    cut = {name: functional.pad(tensor, (0, filled)).reshape(-1, length) for name, tensor in inputs.items()}
    real = cut["attention_mask"].any(1)
    return {name: tensor[real] for name, tensor in cut.items()}, Pieces(real, texts, tokens)
