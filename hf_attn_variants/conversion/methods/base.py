"""What a conversion method is: a map from one layer's attention projections to those with fewer key/value heads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..grouping import HeadCounts

__all__ = ["AttentionTensors", "ConversionMethod", "LayerContext", "pool_key_value"]


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


@dataclass(frozen=True)
class LayerContext:
    """What a method may know of the layer that it converts, beside the tensors.

    Args:
        module: the attention module's path inside the base model, e.g. "encoder.layer.0.attention".
        site: which kind of attention it is: "self", "cross", ...
        generator: random numbers of this layer alone: the same for a seed, whatever the order of the layers.
        initializer_std: the standard deviation that the architecture gives a new key or value projection.
    """

    module: str
    site: str
    generator: torch.Generator
    initializer_std: float


class ConversionMethod(Protocol):
    """One way of merging heads. A new method is one file with such a class and one row in `methods/__init__.py`.

    A method that needs calibration data takes it in its constructor: an instance is ready to convert any layer, and
    `convert(..., method=instance)` takes instances as well as names.
    """

    name: str

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return this layer's projections with `heads.key[1]` key and `heads.value[1]` value heads.

        Only called where there are fewer heads afterwards. Query and output projections may change as well, in value
        but not in shape; a bias may change but neither appear nor vanish. No input tensor may be changed in place; one
        that stays as it is, is returned as it is. Torch runs on one thread here: fitting belongs before.
        """
        ...


def pool_key_value(
    tensors: AttentionTensors, heads: HeadCounts, pool: Callable[[torch.Tensor, int, int], torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Apply `pool(projection, heads before, heads after)` to the key and value weights and biases.

    Returns:
        The four new tensors under their names in `AttentionTensors`, for `dataclasses.replace`.
    """
    pooled: dict[str, torch.Tensor | None] = {}
    for role, (source, target) in (("key", heads.key), ("value", heads.value)):
        for part in ("weight", "bias"):
            projection = getattr(tensors, f"{role}_{part}")
            unchanged = projection is None or source == target
            pooled[f"{role}_{part}"] = projection if unchanged else pool(projection, source, target)
    return pooled
