"""Random vectors for kernels, and random rotations: the same for the same seed."""

import torch

__all__ = ["draw_vectors", "orthogonal_rows"]


def draw_vectors(count: int, size: int, seed: int, are_orthogonal: bool) -> torch.Tensor:
    """Return random vectors [count, size] as of the standard normal distribution.

    Args:
        count, size: the vectors, and the numbers of each.
        seed: the same vectors for the same seed.
        are_orthogonal: whether each `size` of them are orthogonal to each other (2009.14794, section 2.4).
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, size, generator=generator)
    if not are_orthogonal:
        return drawn
    turned = orthogonal_rows(count, size, generator)
    return turned * drawn.norm(dim=1, keepdim=True)  # lengths as independent vectors have them


def orthogonal_rows(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Return random unit vectors [count, size], each `size` of them orthogonal to each other."""
    blocks = [torch.linalg.qr(torch.randn(size, size, generator=generator))[0] for _ in range(-(-count // size))]
    return torch.cat([torch.empty(0, size), *blocks])[:count]
