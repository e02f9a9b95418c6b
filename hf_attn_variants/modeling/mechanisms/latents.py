"""Latents, which are short vectors from which keys and values are computed.

The cache stores only the latents. `latent_attention` computes the attention and documents the papers and formulas.
"""

from typing import Any

from torch import nn

from ..transformers_internals import guarded_imports
from .mechanism import Mechanism

with guarded_imports():
    from transformers import initialization as init

__all__ = ["LatentAttention", "add_latent_projection", "get_projection_rank"]


class LatentAttention(Mechanism):
    """The latent of an attention module. This class is not instantiated.

    Class attributes:
        paper: the paper for a latent that is smaller than its input.
        paper_for_cached_inputs: the paper about caching the input itself.
    """

    field = "kv_lora_rank"
    paper = ("Multi-head latent attention (DeepSeek-V2)", "2405.04434")
    paper_for_cached_inputs = ("Slim attention: keys and values from what they are made of", "2503.05840")


class LatentProjection(nn.Linear):
    """The projection A [r, D] from inputs to latents, without a bias."""

    def __init__(self, width: int, rank: int, **kwargs: Any) -> None:
        super().__init__(width, rank, bias=False, **kwargs)

    def init_variant_parameters(self) -> None:
        """Initialize the weights so that keys and values have the same standard deviation as in Transformers."""
        init.normal_(self.weight, mean=0.0, std=self.out_features**-0.5)


def add_latent_projection(root: nn.Module, path: str, width: int, rank: int) -> None:
    """Add an uninitialized latent projection with the same dtype and device as its parent module.

    Args:
        root: the base model.
        path: the path of the projection inside the base model.
        width: D, the size of the inputs.
        rank: r, the size of the latents.
    """
    parent, _, name = path.rpartition(".")
    owner = root.get_submodule(parent)
    like = next(owner.parameters())
    owner.add_module(name, LatentProjection(width, rank, dtype=like.dtype, device=like.device))


def get_projection_rank(rank: int | None, width: int) -> int | None:
    """Return the rank of the latent projection, or None if no projection is needed.

    Args:
        rank: the rank of the latent, or None if there is no latent.
        width: the size of the input. A latent that is as wide as the input is the input itself.
    """
    return None if rank == width else rank
