"""What an attention with a kernel computes with: learned maps, factors and projections, and random vectors.

Letters as in `linear_attention`.
"""

import math
from typing import Any

import torch
from torch import nn

from .attention_kernels import LEARNED, RANDOM, AttentionKernel
from .attention_sites import AttentionHeads, VariantAttention
from .length_projection import segment_means
from .upstream import known_imports

with known_imports():
    from transformers import initialization as init

__all__ = ["KERNEL_TENSORS", "draw_vectors", "init_kernel", "install_kernel", "kernel_tensors"]

# What hedgehog's maps begin as, times the identity: near what a fit to a softmax finds.
FIRST_MAP = 2.0
# What may be learned, and random vectors.
KERNEL_TENSORS = (
    "query_kernel_proj",
    "key_kernel_proj",
    "kernel_scale",
    "window_log_factor",
    "length_proj",
    "kernel_vectors",
)


def install_kernel(module: VariantAttention, kernel: AttentionKernel | None, heads: AttentionHeads) -> None:
    """Note an attention's kernel, if it has one, and add what this computes with; the model initialises it."""
    module.kernel = kernel
    if kernel is None:
        return
    like = next(module.parameters())
    new: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    if kernel.maps == "hedgehog":
        for name, count in (("query_kernel_proj", heads.query), ("key_kernel_proj", heads.key)):
            module.register_parameter(name, nn.Parameter(torch.empty(count, heads.head_dim, kernel.features, **new)))
    if kernel.name == "rfa":
        module.register_parameter("kernel_scale", nn.Parameter(torch.empty(heads.key, heads.head_dim, **new)))
    if kernel.window is not None:
        module.register_parameter("window_log_factor", nn.Parameter(torch.empty(heads.query, **new)))
    if kernel.length is not None:
        module.register_parameter("length_proj", nn.Parameter(torch.empty(kernel.features, kernel.length, **new)))
    if kernel.name in RANDOM:
        module.register_buffer("kernel_vectors", torch.empty(kernel.features, heads.head_dim, **new))
    if kernel.name in (*RANDOM, *LEARNED):
        module._is_hf_initialized = False


def kernel_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what `install_kernel` added to an attention, by name."""
    return {name: tensor for name in KERNEL_TENSORS if (tensor := getattr(module, name, None)) is not None}


def init_kernel(module: nn.Module) -> None:
    """Initialise what `install_kernel` added, but what is loaded.

    Maps begin as 2 I, scales as ones, projections along the length as the means of segments; vectors are the seed's.
    """
    kernel = getattr(module, "kernel", None)
    if kernel is None:
        return
    for name in ("query_kernel_proj", "key_kernel_proj"):
        if (maps := getattr(module, name, None)) is not None:
            init.copy_(maps, _first_maps(maps.shape[1], maps.shape[2], kernel.seed).to(maps).expand_as(maps))
    if kernel.name == "rfa":
        init.ones_(module.get_parameter("kernel_scale"))
    if kernel.window is not None:
        # gamma = 1 / F: what phi(q) phi(k) is of features that are all alike, and exp(s - c) is 1 of such logits.
        init.constant_(module.get_parameter("window_log_factor"), -math.log(2 * kernel.features))
    if kernel.length is not None:
        projection = module.get_parameter("length_proj")
        init.copy_(projection, segment_means(*projection.shape).to(projection))
    if kernel.name in RANDOM:
        vectors = module.get_buffer("kernel_vectors")
        count, size = vectors.shape
        init.copy_(vectors, draw_vectors(count, size, kernel.seed, kernel.name == "favor").to(vectors))


def draw_vectors(count: int, size: int, seed: int, are_orthogonal: bool) -> torch.Tensor:
    """Return random vectors [count, size] as of the standard normal distribution.

    Args:
        seed: the same vectors for the same seed.
        are_orthogonal: whether each `size` of them are orthogonal to each other (2009.14794, section 2.4).
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, size, generator=generator)
    if not are_orthogonal:
        return drawn
    turned = _orthogonal_rows(count, size, generator)
    return turned * drawn.norm(dim=1, keepdim=True)  # lengths as independent vectors have them


def _first_maps(size: int, width: int, seed: int) -> torch.Tensor:
    """Return what hedgehog's maps [size, width] begin as: the identity and, beside it, it turned at random."""
    rows = _orthogonal_rows(max(0, width - size), size, torch.Generator().manual_seed(seed))
    return FIRST_MAP * torch.cat([torch.eye(size), rows.T], dim=1)[:, :width]


def _orthogonal_rows(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Return random unit vectors [count, size], each `size` of them orthogonal to each other."""
    blocks = [torch.linalg.qr(torch.randn(size, size, generator=generator))[0] for _ in range(-(-count // size))]
    return torch.cat([torch.empty(0, size), *blocks])[:count]
