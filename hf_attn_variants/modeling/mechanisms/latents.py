"""Latents: keys and values made from fewer numbers a token, which are all that a cache keeps.

`latent_attention` attends to them; the sources and the formulas are there.
"""

from typing import Any

from torch import nn

from ..upstream import known_imports
from .mechanism import Mechanism

with known_imports():
    from transformers import initialization as init

__all__ = ["Latent", "LatentProjection", "add_latent_map", "rank_of_map"]


class Latent(Mechanism):
    """The latent of an attention; nothing is made of this class.

    Class attributes:
        paper: of a latent that is smaller than what it is made of.
        paper_of_input: of the input itself in its place.
    """

    field = "kv_lora_rank"
    paper = ("Multi-head latent attention (DeepSeek-V2)", "2405.04434")
    paper_of_input = ("Slim attention: keys and values from what they are made of", "2503.05840")


class LatentProjection(nn.Linear):
    """The map A [r, D] from the memory to its latent, without bias."""

    def __init__(self, width: int, rank: int, **kwargs: Any) -> None:
        super().__init__(width, rank, bias=False, **kwargs)

    def init_projections(self) -> None:
        """Draw it so that keys and values have the spread that upstream's rule means them to have."""
        init.normal_(self.weight, mean=0.0, std=self.out_features**-0.5)


def add_latent_map(root: nn.Module, path: str, width: int, rank: int) -> None:
    """Add the map of a latent, uninitialised, with the dtype and device of what is around it.

    Args:
        root: the base model.
        path: of the map, inside it.
        width: D.
        rank: r.
    """
    parent, _, name = path.rpartition(".")
    owner = root.get_submodule(parent)
    like = next(owner.parameters())
    owner.add_module(name, LatentProjection(width, rank, dtype=like.dtype, device=like.device))


def rank_of_map(rank: int | None, width: int) -> int | None:
    """Return the rank of the map that makes a latent; None where there is no map.

    Args:
        rank: the latent's; None: there is none.
        width: of its input. A latent as wide as its input is the input itself.
    """
    return None if rank == width else rank
