"""Scores other than the dot product, and positions, by their formulas: the executable specification of both.

Sources: sinusoidal positions, arXiv 1706.03762, section 3.5. Letters as in `reference`.
"""

import math

import torch
from torch import Tensor

__all__ = ["sinusoidal_positions"]


def sinusoidal_positions(n: int, d: int) -> Tensor:
    """The positions 0 .. n - 1 as sines and cosines (1706.03762, 3.5), [n, d] in float64.

    PE(pos, 2i) = sin(pos / 10000^(2i / d)), PE(pos, 2i + 1) = cos(pos / 10000^(2i / d)).
    """
    PE = torch.empty(n, d, dtype=torch.float64)
    for position in range(n):
        for place in range(d):
            angle = position / 10000 ** (2 * (place // 2) / d)
            PE[position, place] = math.cos(angle) if place % 2 else math.sin(angle)
    return PE
