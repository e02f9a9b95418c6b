"""Conversion methods, which compute the projections of one attention with fewer key/value heads."""

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
    """Information about the layer that a method converts, in addition to its tensors.

    Args:
        module: Path of the attention module inside the base model, e.g. "encoder.layer.0.attention".
        site: The kind of attention: "self", "cross", ...
        generator: Random number generator of this layer. Its numbers depend on the seed, not on the order of layers.
        initializer_std: Standard deviation of new key and value projections in this architecture.
        uses: Number of times that a forward pass calls the module. ALBERT's layers share their attention.
        held_out: Calls of the module on held-out text, to measure what improves it. Empty outside a calibration.
        held_out_error: Function that returns the relative error of the outputs of projections on held-out text, or
            None if the error is not finite.
        on_step: Function to call after each of `CalibratedMethod.steps`, to show the progress.
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
    """A latent that was computed for an attention on text.

    Args:
        weight: The latent projection A [r, D], float64.
        forms: The quadratic forms of the energy that the attention loses.
        is_shared: Whether other attentions use it too. A method must not change a shared latent.
    """

    weight: torch.Tensor
    forms: LatentForms
    is_shared: bool


class ConversionMethod(Protocol):
    """A way to merge heads. A new method is a class with this interface and an entry in `request.METHODS`.

    `convert(..., method=instance)` takes instances as well as names. A method that needs text is a `CalibratedMethod`.
    With all other methods, latents are computed from the weights (`attention_tensors.weight_forms`).

    Example:

    ```py
    >>> from hf_attn_variants.conversion import convert
    >>> from hf_attn_variants.conversion.attention_tensors import join_heads, pool_key_value, split_heads
    >>> class LastHead:
    ...     name = "last"
    ...
    ...     def pool(self, tensors, heads, layer):
    ...         def last(projection, source, target):
    ...             return join_heads(split_heads(projection, source)[source // target - 1 :: source // target])
    ...
    ...         return pool_key_value(tensors, heads, last)
    >>> model = convert("google-t5/t5-small", num_key_value_heads=2, method=LastHead())
    ```
    """

    name: str

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections of this layer with `heads.key[1]` key heads and `heads.value[1]` value heads.

        This is only called if there are fewer heads afterwards. The values of query and output projections may change,
        but not their shapes. A bias may change, but must not appear or disappear. Input tensors must not be changed
        in place; return a tensor that does not change. Torch uses one thread here, so fit weights before this call.

        Args:
            tensors: The projections of the original model.
            heads: The head counts before and after.
            layer: Further information about the layer.
        """
        ...


class CalibratedMethod(ABC):
    """A `ConversionMethod` that uses the inputs of each attention on text, before the conversion.

    `calibration.calibrate` calls `convert_module` for one module at a time. `options` are the fields of `Calibration`
    that this method reads in addition to those that describe the text. Options of other methods cause an error.
    """

    name: str
    options: tuple[str, ...] = ()

    def steps(self, calibration: Calibration) -> int:
        """Return the number of steps per attention after which the method calls `LayerContext.on_step`."""
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
        """Return the new projections of one attention.

        A method that measured `layer.held_out_error` adds it to `details` as "output_relative_error".

        Args:
            tensors, heads, layer: As for `pool`.
            inputs: The calls of the attention on the calibration text.
            calibration: The calibration.
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
        """Return the attention with keys and values from a latent. It already has its new heads.

        Args:
            tensors, heads, layer, inputs, calibration: As for `convert_module`.
            targets: Outputs of the original attention on the inputs, [b, n, D] each.
            latent: The latent.
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
        """Return the attention with a kernel that is fitted to the targets. It already has its new heads.

        The kernel of `tensors` is newly initialized. Arguments as for `with_latent`.
        """
        return tensors

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Raise an error, because this method needs text.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"`method` {self.name!r} needs text to convert {layer.module}, got only weights. Give `calibration`."
        )


def mean_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Return the mean of each group of consecutive heads: [source*d, ...] -> [target*d, ...], in the same dtype."""
    pooled = [
        # float64, so that the mean of equal heads is exact. One group at a time needs no float64 copy of the layer.
        group.double().sum(dim=0).div_(group.shape[0]).to(projection.dtype)
        for group in group_heads(projection, source, target)
    ]
    return join_heads(torch.stack(pooled))


class MeanPooling:
    """Mean pooling (arXiv 2305.13245): each key/value head is the mean of the heads of its group."""

    name = "mean"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections with the mean of each group. Arguments as for `ConversionMethod.pool`."""
        return pool_key_value(tensors, heads, mean_heads)


def first_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Return the first head of each group of consecutive heads: [source*d, ...] -> [target*d, ...]."""
    return join_heads(group_heads(projection, source, target)[:, 0])


class FirstHead:
    """Selection of the first head of each group as key/value head."""

    name = "first"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections with the first head of each group. Arguments as for `ConversionMethod.pool`."""
        return pool_key_value(tensors, heads, first_heads)


class RandomHeads:
    """Newly initialized key and value projections with zero biases: a baseline for uptraining."""

    name = "random"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections with new keys and values. Arguments as for `ConversionMethod.pool`."""

        def initialize(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
            rows = projection.shape[0] // source * target
            if projection.ndim == 1:
                return projection.new_zeros(rows)
            weight = torch.empty(rows, projection.shape[1])
            return weight.normal_(0.0, layer.initializer_std, generator=layer.generator).to(projection)

        return pool_key_value(tensors, heads, initialize)
