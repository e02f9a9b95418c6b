"""What a conversion method is: a map from one layer's attention projections to those with fewer key/value heads."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..calibration.recording import AttentionInputs
from ..calibration_settings import Calibration
from ..grouping import HeadCounts
from ..latents import LatentForms, on_latent
from ..projections import AttentionTensors

__all__ = ["CalibratedMethod", "ConversionMethod", "LatentInText", "LayerContext"]


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
    """One way of merging heads. A new method is one file with such a class and one row in `methods/__init__.py`.

    `convert(..., method=instance)` takes instances as well as names. One that looks at text is a `CalibratedMethod`;
    with another, a latent is found from the weights (`latents.weight_forms`).
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
