"""Which heads share a key/value head, and how a projection with one number of heads becomes one with another."""

from dataclasses import dataclass

import torch

__all__ = ["HeadCounts", "group_heads", "join_heads", "relation", "repeat_heads", "split_heads"]


@dataclass(frozen=True)
class HeadCounts:
    """The heads of one attention module: h_k of queries, keys and values (before, after), h_v of the output; d."""

    query: int
    key: tuple[int, int]
    value: tuple[int, int]
    output: int
    head_dim: int

    @property
    def relation(self) -> str:
        """What the conversion does to this module: "same", "pool" or "expand"."""
        relations = {relation(*self.key), relation(*self.value)} - {"same"}
        return relations.pop() if relations else "same"


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
