"""Rotary positions (RoFormer, arXiv 2104.09864), which rotate pairs of dimensions of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class RotaryPairs(NamedTuple):
    """The dimensions of a head that rotary positions rotate, and those that they leave unchanged.

    Attributes:
        first, second: The two dimensions of each pair, [p].
        rest: The dimensions that are not rotated (partial rotary positions).
    """

    first: torch.Tensor
    second: torch.Tensor
    rest: torch.Tensor


@dataclass(frozen=True)
class RotaryPositions:
    """The rotation of each token in a batch.

    Dimensions (a, b) of a pair become (a cos - b sin, b cos + a sin). As complex numbers, a + bi is multiplied by
    cos + i sin.

    Args:
        cos, sin: Cosine and sine of the angle of each token and pair, [b or 1, n, p].
        layout: "half" for the pairs (i, i + p), or "interleaved" for the pairs (2i, 2i + 1).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    layout: str

    @classmethod
    def from_embeddings(cls, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> RotaryPositions:
        """Create an instance from the position embeddings in Transformers, with one value per dimension [b, n, 2p]."""
        if layout == "half":
            return cls(cos.chunk(2, -1)[0], sin.chunk(2, -1)[0], layout)
        return cls(cos[..., ::2], sin[..., ::2], layout)

    def get_pairs(self, head_dim: int) -> RotaryPairs:
        """Return the pairs of dimensions in a head."""
        count = self.cos.shape[-1]
        dims = torch.arange(head_dim, device=self.cos.device)
        rotated, rest = dims[: 2 * count], dims[2 * count :]
        if self.layout == "half":
            return RotaryPairs(rotated[:count], rotated[count:], rest)
        return RotaryPairs(rotated[::2], rotated[1::2], rest)

    def rotate(self, states: torch.Tensor) -> torch.Tensor:
        """Return the rotated queries or keys [b, n, h, d]."""
        pairs, cos, sin = self.get_pairs(states.shape[-1]), self.cos[:, :, None], self.sin[:, :, None]
        first, second = states[..., pairs.first], states[..., pairs.second]
        rotated = first * cos - second * sin, second * cos + first * sin
        joined = torch.cat(rotated, -1) if self.layout == "half" else torch.stack(rotated, -1).flatten(-2)
        return torch.cat([joined, states[..., pairs.rest]], -1)

    def select_rows(self, indices: torch.Tensor) -> RotaryPositions:
        """Return the rotations of the given examples in the batch."""
        return self if len(self.cos) == 1 else replace(self, cos=self.cos[indices], sin=self.sin[indices])
