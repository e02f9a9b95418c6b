"""Which heads share a key/value head, and how a projection with one number of heads becomes one with another."""

from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "HeadCounts",
    "group_heads",
    "join_heads",
    "rank_relation",
    "relation",
    "repeat_heads",
    "split_heads",
]


@dataclass(frozen=True)
class HeadCounts:
    """The heads of one attention module: h_k of queries, keys and values (before, after), h_v of the output; d.

    `rank` is that of the latent which keys and values are made from (before, after); None where that is the input.
    """

    query: int
    key: tuple[int, int]
    value: tuple[int, int]
    output: int
    head_dim: int
    rank: tuple[int | None, int | None] = (None, None)

    @property
    def new_rank(self) -> int:
        """The rank of its new latent; only for attentions that get one."""
        rank: Any = self.rank[1]
        return rank

    @property
    def relation(self) -> str:
        """What the conversion does to the heads of this module: "same", "pool" or "expand"."""
        relations = {relation(*self.key), relation(*self.value)} - {"same"}
        return relations.pop() if relations else "same"

    @property
    def rank_relation(self) -> str:
        """What the conversion does to its latent: "same", "compress" or "expand"."""
        return rank_relation(*self.rank)

    @property
    def change(self) -> str:
        """What the conversion does to this module, as reports have it: "same", "pool", "compress", ... or two."""
        changes = dict.fromkeys((self.relation, self.rank_relation))
        return ", ".join(change for change in changes if change != "same") or "same"

    @property
    def reduced(self) -> bool:
        """Whether it gets fewer heads or a smaller latent: what a method decides."""
        return self.relation == "pool" or self.rank_relation == "compress"


def relation(source: int, target: int) -> str:
    """Say how `source` key/value heads become `target`: "same", "pool" (fewer) or "expand" (more, by repeating).

    Raises:
        ValueError: if a count is below 1 or neither divides the other.
    """
    if source < 1 or target < 1:
        raise ValueError(f"a number of key/value heads must be at least 1: got {source} -> {target}.")
    if source % target == 0:
        return "same" if source == target else "pool"
    if target % source == 0:
        return "expand"
    raise ValueError(
        f"{source} key/value heads cannot become {target}: one count must divide the other (fewer heads pool whole "
        "groups, more heads repeat each one)."
    )


def rank_relation(source: int | None, target: int | None) -> str:
    """Say how a latent of rank `source` becomes one of `target`: "same", "compress" or "expand"; None is the input.

    Raises:
        ValueError: if `target` is larger and yet no input: nothing would fill it.
    """
    if source == target:
        return "same"
    if target is None:
        return "expand"
    if source is None or target < source:
        return "compress"
    raise ValueError(
        f"a latent of rank {source} cannot become one of rank {target}: a smaller one holds less, the input's full "
        "width holds all, and between the two there is nothing to gain."
    )


def split_heads(projection: torch.Tensor, heads: int) -> torch.Tensor:
    """View a projection's weight [h*d, D] or bias [h*d] as [h, d, D] or [h, d].

    Raises:
        ValueError: if the rows are not a multiple of `heads`.
    """
    if projection.ndim not in (1, 2) or projection.shape[0] % heads:
        raise ValueError(f"a projection of shape {list(projection.shape)} does not split into {heads} heads.")
    return projection.reshape(heads, projection.shape[0] // heads, *projection.shape[1:])


def join_heads(heads: torch.Tensor) -> torch.Tensor:
    """Undo `split_heads`: [h, d, ...] -> [h*d, ...]."""
    return heads.reshape(-1, *heads.shape[2:])


def group_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """View a projection of `source` heads as `target` groups of consecutive heads: [h*d, ...] -> [k, g, d, ...].

    Consecutive, because query heads g*i ... g*i + g - 1 share key/value head i wherever key/value heads are repeated.
    """
    heads = split_heads(projection, source)  # [h, d, ...]
    return heads.reshape(target, source // target, *heads.shape[1:])


def repeat_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Expand a projection [source*d, ...] to [target*d, ...] by repeating each head, which changes no output.

    Head i is then the source's head i // (target / source).
    """
    return join_heads(split_heads(projection, source).repeat_interleave(target // source, dim=0))
