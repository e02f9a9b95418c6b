"""The projections of one attention: what a conversion changes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .grouping import HeadCounts

__all__ = ["ROLES", "AttentionTensors", "pool_key_value"]

ROLES = ("query", "key", "value", "output")


@dataclass(frozen=True)
class AttentionTensors:
    """One attention module's projections, as `nn.Linear` stores them: weights [out, in], biases [out] or None.

    `details` holds what a method wants to say about this layer in the report (JSON values).
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    value_weight: torch.Tensor
    output_weight: torch.Tensor
    query_bias: torch.Tensor | None = None
    key_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def pair(self, role: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight and the bias of one of `ROLES`."""
        return getattr(self, f"{role}_weight"), getattr(self, f"{role}_bias")

    def project(self, role: str, states: torch.Tensor) -> torch.Tensor:
        """Return a role's linear map of states: [..., in] to [..., out]."""
        return nn.functional.linear(states, *self.pair(role))

    def joined(self, role: str) -> torch.Tensor:
        """Return [W | b], [out, in + 1]: the bias is what an input of 1 is multiplied by. Without one, W."""
        weight, bias = self.pair(role)
        return weight if bias is None else torch.cat([weight, bias[:, None]], dim=1)

    def parted(self, role: str, joined: torch.Tensor) -> dict[str, torch.Tensor]:
        """Undo `joined`: return the role's fields by name, for `dataclasses.replace`."""
        if self.pair(role)[1] is None:
            return {f"{role}_weight": joined}
        return {f"{role}_weight": joined[:, :-1], f"{role}_bias": joined[:, -1]}

    def mapped(self, role: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Apply `change` to a role's weight and to its bias, if any: return these fields by name."""
        parts = zip((f"{role}_weight", f"{role}_bias"), self.pair(role), strict=True)
        return {name: change(tensor) for name, tensor in parts if tensor is not None}


def pool_key_value(
    tensors: AttentionTensors, heads: HeadCounts, pool: Callable[..., torch.Tensor]
) -> AttentionTensors:
    """Return the projections with `pool(projection, source=, target=)` for the key and value weights and biases.

    Args:
        tensors: the projections before.
        heads: the head counts; a role that keeps its heads is left as it is.
        pool: makes a projection of `target` heads out of one of `source` heads.
    """
    changed = {}
    for role, (source, target) in (("key", heads.key), ("value", heads.value)):
        if source != target:
            changed |= tensors.mapped(role, partial(pool, source=source, target=target))
    return replace(tensors, **changed)
