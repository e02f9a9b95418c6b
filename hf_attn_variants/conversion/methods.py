"""Conversion methods: they map the projections of one attention to those with fewer key/value heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .attention_tensors import (
    AttentionTensors,
    HeadCounts,
    LatentForms,
    group_heads,
    join_heads,
    on_latent,
    pool_key_value,
)

if TYPE_CHECKING:
    from .calibration.recording import AttentionInputs
    from .calibration_settings import Calibration

__all__ = [
    "CalibratedMethod",
    "ConversionMethod",
    "FirstHead",
    "LatentInText",
    "LayerContext",
    "MeanPooling",
    "RandomHeads",
    "first_heads",
    "mean_heads",
]


@dataclass(frozen=True)
class LayerContext:
    """What a method may know of the layer that it converts, beside the tensors.

    Args:
        module: the attention module's path inside the base model, e.g. "encoder.layer.0.attention".
        site: which kind of attention it is: "self", "cross", ...
        generator: random numbers of this layer alone: the same for a seed, whatever the order of the layers.
        initializer_std: the standard deviation that the architecture gives a new key or value projection.
        uses: how often a forward pass goes through it: ALBERT's layers share their attention.
        held_out: its calls on text that is not fitted to; it says what helps. Empty outside a calibration.
        held_out_error: the relative error of the outputs that projections have there; None where it is no number.
        on_step: to be called after each of `CalibratedMethod.steps`.
    """

    module: str
    site: str
    generator: torch.Generator
    initializer_std: float
    uses: int = 1
    held_out: Sequence[AttentionInputs] = ()
    held_out_error: Callable[[AttentionTensors], float | None] = lambda tensors: None
    on_step: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class LatentInText:
    """A latent that was found for an attention on text.

    Args:
        weight: A [r, D], float64.
        forms: what the attention loses by it.
        is_shared: whether other attentions read it too: then it stays as it is.
    """

    weight: torch.Tensor
    forms: LatentForms
    is_shared: bool


class ConversionMethod(Protocol):
    """One way of merging heads. A new method is such a class and its row in `request.METHODS`.

    `convert(..., method=instance)` takes instances as well as names. One that looks at text is a `CalibratedMethod`;
    with another, a latent is found from the weights (`attention_tensors.weight_forms`).
    """

    name: str

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return this layer's projections with `heads.key[1]` key and `heads.value[1]` value heads.

        Only called where there are fewer heads afterwards. Query and output projections may change as well, in value
        but not in shape; a bias may change but neither appear nor vanish. No input tensor may be changed in place; one
        that stays as it is, is returned as it is. Torch runs on one thread here: fitting belongs before.
        """
        ...


class CalibratedMethod(ABC):
    """A `ConversionMethod` that looks at what each attention is called with on text, before the conversion.

    `calibration.calibrate` converts a module at a time, by `convert_module`. `options` are the fields of `Calibration`
    that this method reads beside those that say what the text is: another method's are refused.
    """

    name: str
    options: tuple[str, ...] = ()

    def steps(self, calibration: Calibration) -> int:
        """Return how many steps of one attention's work `LayerContext.on_step` tells of."""
        return 0

    @abstractmethod
    def convert_module(
        self,
        tensors: AttentionTensors,
        heads: HeadCounts,
        layer: LayerContext,
        inputs: Sequence[AttentionInputs],
        calibration: Calibration,
    ) -> AttentionTensors:
        """Return one attention's new projections; arguments as for `pool`, and its calls on the calibration text.

        A method that has measured their `layer.held_out_error` says it as "output_relative_error" of the `details`.
        """

    def with_latent(
        self,
        tensors: AttentionTensors,
        heads: HeadCounts,
        layer: LayerContext,
        inputs: Sequence[AttentionInputs],
        targets: Sequence[torch.Tensor],
        calibration: Calibration,
        latent: LatentInText,
    ) -> AttentionTensors:
        """Return an attention, its heads new already, with keys and values that are made from a latent.

        Args:
            tensors, heads, layer, inputs, calibration: as for `convert_module`.
            targets: the source's outputs on the inputs, [b, n, D] each.
            latent: the latent.
        """
        return on_latent(tensors, latent.weight, latent.forms)

    def with_kernel(
        self,
        tensors: AttentionTensors,
        heads: HeadCounts,
        layer: LayerContext,
        inputs: Sequence[AttentionInputs],
        targets: Sequence[torch.Tensor],
        calibration: Calibration,
    ) -> AttentionTensors:
        """Return an attention, its heads new already, whose kernel is as a new model has it, fitted to the targets.

        Arguments as for `with_latent`.
        """
        return tensors

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Raise ValueError: projections alone do not say how to merge these heads."""
        raise ValueError(
            f"method {self.name!r} has not seen this model's {layer.module}: it needs calibration text "
            "(`calibration=`)."
        )


def mean_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Average each group of consecutive heads: weight [source*d, D] -> [target*d, D], bias likewise, in one dtype."""
    pooled = [
        # float64 so that equal heads give themselves back; a group at a time so that no wide copy of the layer exists.
        group.double().sum(dim=0).div_(group.shape[0]).to(projection.dtype)
        for group in group_heads(projection, source, target)
    ]
    return join_heads(torch.stack(pooled))


class MeanPooling:
    """Key/value head i is the mean of its group's heads, weights and biases alike."""

    name = "mean"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        return pool_key_value(tensors, heads, mean_heads)


def first_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Keep the first of each group of consecutive heads: weight [source*d, D] -> [target*d, D], bias likewise."""
    return join_heads(group_heads(projection, source, target)[:, 0])


class FirstHead:
    """Key/value head i is head g*i of the source, g heads to a group."""

    name = "first"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        return pool_key_value(tensors, heads, first_heads)


class RandomHeads:
    """Keys and values are drawn as the architecture initialises them, biases are zero: a baseline for uptraining."""

    name = "random"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        def draw(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
            rows = projection.shape[0] // source * target
            if projection.ndim == 1:
                return projection.new_zeros(rows)
            drawn = torch.empty(rows, projection.shape[1])
            return drawn.normal_(0.0, layer.initializer_std, generator=layer.generator).to(projection)

        return pool_key_value(tensors, heads, draw)
