"""The projections of one attention: what a conversion changes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..modeling.mechanisms.kernels.attention_kernel import AttentionKernel
from ..modeling.ops.variant_attention import AttentionHeads
from .grouping import HeadCounts

__all__ = ["LATENT", "ROLES", "AttentionTensors", "pool_key_value"]

ROLES = ("query", "key", "value", "output")
# The field of `AttentionTensors` that several attentions may share.
LATENT = "latent_weight"


@dataclass(frozen=True)
class AttentionTensors:
    """One attention module's projections, as `nn.Linear` stores them: weights [out, in], biases [out] or None.

    `latent_weight` [r, D] makes the latent of the memory that keys and values are made from; None where they are made
    from the memory itself. It may be one for several attentions. `kernel` is what stands for a softmax, computed with
    `kernel_tensors` (`AttentionKernel.tensors`). `details` holds what a method wants to say about this layer in
    the report (JSON values).
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    value_weight: torch.Tensor
    output_weight: torch.Tensor
    query_bias: torch.Tensor | None = None
    key_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    latent_weight: torch.Tensor | None = None
    kernel: AttentionKernel | None = None
    kernel_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return a tensor of the kernel, for whose functions this stands in an attention's place."""
        if name not in vars(self).get("kernel_tensors", ()):
            raise AttributeError(f"there is no {name!r} among an attention's tensors")
        return self.kernel_tensors[name]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], kernel: AttentionKernel | None) -> "AttentionTensors":
        """Return the attention of these tensors, by name, some of which are its kernel's."""
        names = () if kernel is None else (*kernel.learned, *kernel.drawn)
        own: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name not in names}
        return cls(**own, kernel=kernel, kernel_tensors={name: tensors[name] for name in names if name in tensors})

    def pair(self, role: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight and the bias of one of `ROLES`, or of the "latent", which has none."""
        return getattr(self, f"{role}_weight"), getattr(self, f"{role}_bias", None)

    def project(self, role: str, states: torch.Tensor) -> torch.Tensor:
        """Return a role's linear map of states: [..., in] to [..., out]."""
        return nn.functional.linear(states, *self.pair(role))

    def latent(self, memory: torch.Tensor) -> torch.Tensor:
        """Return what keys and values are made from: of the memory [..., D] its latent [..., r], or itself."""
        return memory if self.latent_weight is None else nn.functional.linear(memory, self.latent_weight)

    def behind(self, latent_weight: torch.Tensor) -> "AttentionTensors":
        """Return the attention whose memory has passed through a linear map [w, D] before this one reads it."""
        own = self.latent_weight
        joined = latent_weight if own is None else (own.double() @ latent_weight.double()).to(latent_weight)
        return replace(self, latent_weight=joined)

    def with_new_kernel(self, kernel: AttentionKernel, heads: HeadCounts) -> "AttentionTensors":
        """Return the same projections with a kernel in a softmax's place, as a new model has it."""
        sizes = (heads.head_dim, heads.head_dim)  # of other values no conversion is made
        counts = AttentionHeads(heads.query, heads.key[1], heads.value[1], heads.query, heads.output, *sizes)
        new = {name: tensor.begin().to(self.query_weight) for name, tensor in kernel.tensors(counts).items()}
        return replace(self, kernel=kernel, kernel_tensors=new)

    def folded(self, dtype: torch.dtype = torch.float64) -> "AttentionTensors":
        """Return the same attention without a latent: W A in the place of W, in this dtype."""
        if self.latent_weight is None:
            return self
        latent = self.latent_weight.double()
        maps = {name: (getattr(self, name).double() @ latent).to(dtype) for name in ("key_weight", "value_weight")}
        return replace(self, **maps, latent_weight=None)

    def to(self, device: torch.device | str) -> "AttentionTensors":
        """Return the same on a device."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        moved = {name: tensor.to(device) for name, tensor in self.kernel_tensors.items()}
        return replace(self, **tensors, kernel_tensors=moved)

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
    changed: dict[str, Any] = {}
    for role, (source, target) in (("key", heads.key), ("value", heads.value)):
        if source != target:
            changed |= tensors.mapped(role, partial(pool, source=source, target=target))
    return replace(tensors, **changed)
