"""Reproducible random vectors for kernels, and random rotations."""

import torch

__all__ = ["draw_vectors", "orthogonal_rows"]


def draw_vectors(count: int, size: int, seed: int, are_orthogonal: bool) -> torch.Tensor:
    """Return random vectors [count, size] from the standard normal distribution.

    Args:
        count, size: the number of vectors and the size of each.
        seed: the seed of the generator.
        are_orthogonal: `True` to make each group of `size` vectors orthogonal (arXiv 2009.14794, section 2.4).
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, size, generator=generator)
    if not are_orthogonal:
        return drawn
    turned = orthogonal_rows(count, size, generator)
    return turned * drawn.norm(dim=1, keepdim=True)  # the norms are those of independent vectors


def orthogonal_rows(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Return random unit vectors [count, size]; the vectors within each group of `size` are orthogonal."""
    blocks = [torch.linalg.qr(torch.randn(size, size, generator=generator))[0] for _ in range(-(-count // size))]
    return torch.cat([torch.empty(0, size), *blocks])[:count]
