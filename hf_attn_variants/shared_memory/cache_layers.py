"""The cache layer of cross-attention that holds encoder outputs instead of keys and values."""

from typing import Any

import torch
from torch import nn

from ..modeling.attention.latent_attention import compute_keys_and_values
from ..modeling.attention.shared_rows import SharedDynamicLayer, get_empty_layer
from ..modeling.transformers_internals import check_caches, guarded_imports

with guarded_imports():
    from transformers.cache_utils import DynamicLayer

check_caches()

__all__ = ["SourceLayer", "filled_layer", "holds_encoder_outputs", "store_layer"]


class SourceLayer(SharedDynamicLayer):
    """A cache layer that holds the encoder outputs [b, m, D], and computes keys and values when they are first read.

    After that it is an ordinary cache layer. Keys and values are read by other users of the cache, for example by the
    outputs of Whisper. The encoder outputs are never modified, because other layers and callers use the same tensor.

    Args:
        source: The encoder outputs.
        projections: The key and the value projection.
        head_dim: The head size d.
        beams: The number of decoder rows per row of the encoder outputs.
    """

    def __init__(
        self, source: torch.Tensor, projections: tuple[nn.Module, nn.Module], head_dim: int, beams: int
    ) -> None:
        self.source: torch.Tensor | None = source
        self.projections: Any = projections
        self.head_dim, self.beams = head_dim, beams
        self.is_initialized = True
        self.dtype, self.device = source.dtype, source.device
        self._keys: Any = None
        self._values: Any = None

    @property
    def keys(self) -> Any:
        """The keys [b, h, m, d], which are computed when they are first read."""
        self._compute_keys_and_values()
        return self._keys

    @keys.setter
    def keys(self, states: Any) -> None:
        self._keys = states

    @property
    def values(self) -> Any:
        """The values [b, h, m, d], which are computed when they are first read."""
        self._compute_keys_and_values()
        return self._values

    @values.setter
    def values(self, states: Any) -> None:
        self._values = states

    def _compute_keys_and_values(self) -> None:
        """Replace the encoder outputs, if they are still there, by keys and values."""
        if self.source is not None:
            source, self.source = self.source, None
            with torch.no_grad():  # the layer is created only if no gradients are recorded
                states: Any = compute_keys_and_values(source, self.projections, self.head_dim)
            self._keys, self._values = states
            self.projections = None

    def _rows(self) -> int:
        return super()._rows() if self.source is None else self.source.shape[0]

    def _apply(self, rows: Any) -> None:
        if self.source is None:
            super()._apply(rows)
        else:
            self.source = rows(self.source)

    def get_seq_length(self) -> int:
        """Return the number of encoder positions m."""
        return super().get_seq_length() if self.source is None else self.source.shape[1]

    def reset(self) -> None:
        """Remove all tensors. (Transformers releases before 5.23 overwrite them with zeros.)"""
        self.source = self.projections = self._keys = self._values = None
        self.is_initialized, self.beams = False, 1

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        if self._rows():
            self._apply(lambda states: states.repeat_interleave(repeats, dim=0))

    def __reduce__(self) -> Any:
        # Copies and pickles contain keys and values, so that they do not contain weights of the model.
        if self.keys is None:
            return SharedDynamicLayer, ()
        return _make_shared_layer, (self.keys, self.values, self.beams)


def _make_shared_layer(keys: torch.Tensor, values: torch.Tensor, beams: int) -> SharedDynamicLayer:
    """Return a cache layer with keys and values that beams share."""
    layer = SharedDynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.beams = keys, values, beams
    return layer


def filled_layer(cache: Any, index: int) -> Any:
    """Return the cross-attention layer of an encoder-decoder cache if it is filled, or None otherwise."""
    if cache is None or not cache.is_updated.get(index):
        return None
    return cache.cross_attention_cache.layers[index]


def holds_encoder_outputs(layer: Any) -> bool:
    """Return whether a cache layer holds encoder outputs and not yet keys and values."""
    return type(layer) is SourceLayer and layer.source is not None


def store_layer(cache: Any, index: int, layer: SourceLayer) -> bool:
    """Put a layer with encoder outputs into an encoder-decoder cache.

    Args:
        cache: The cache.
        index: The index of the layer.
        layer: The new layer.

    Returns:
        Whether the layer was stored. Static caches, offloaded caches and other kinds of layers are not changed.
    """
    cross = cache.cross_attention_cache
    if getattr(cross, "offloading", False) or type(get_empty_layer(cross, index)) is not DynamicLayer:
        return False
    cross.layers[index] = layer
    cache.is_updated[index] = True
    return True
