"""The layer of a cross-attention's cache that holds the encoder's outputs in place of keys and values."""

from typing import Any

import torch
from torch import nn

from ..modeling.attention.latent_attention import keys_and_values
from ..modeling.attention.shared_rows import SharedDynamicLayer, layer_at
from ..modeling.upstream import known_imports
from ..modeling.upstream_checks import check_caches

with known_imports():
    from transformers.cache_utils import DynamicLayer

check_caches()

__all__ = ["SourceLayer", "held_layer", "hold_source", "holds_anything"]


class SourceLayer(SharedDynamicLayer):
    """The layer that holds the encoder's outputs [b, m, D], and makes keys and values where somebody asks for them.

    From then on it is as any other: who reads the cache (Whisper's outputs, a model that shares no longer) finds
    upstream's. Nothing writes into the outputs, which other layers and callers hold as well.

    Args:
        source: the encoder's outputs.
        maps: those of keys and of values.
        head_dim: d.
        beams: how many rows of the decoder read one of the source's.
    """

    def __init__(self, source: torch.Tensor, maps: tuple[nn.Module, nn.Module], head_dim: int, beams: int) -> None:
        self.source: torch.Tensor | None = source
        self.maps: Any = maps
        self.head_dim, self.beams = head_dim, beams
        self.is_initialized = True
        self.dtype, self.device = source.dtype, source.device
        self._keys: Any = None
        self._values: Any = None

    @property
    def keys(self) -> Any:
        """The keys [b, h, m, d], made when they are first read."""
        self._make()
        return self._keys

    @keys.setter
    def keys(self, states: Any) -> None:
        self._keys = states

    @property
    def values(self) -> Any:
        """The values [b, h, m, d], made when they are first read."""
        self._make()
        return self._values

    @values.setter
    def values(self, states: Any) -> None:
        self._values = states

    def _make(self) -> None:
        if self.source is not None:
            source, self.source = self.source, None
            with torch.no_grad():  # as they would have been made when the outputs came
                made: Any = keys_and_values(source, self.maps, self.head_dim)
            self._keys, self._values = made
            self.maps = None

    def _rows(self) -> int:
        return super()._rows() if self.source is None else self.source.shape[0]

    def _change(self, rows: Any) -> None:
        if self.source is None:
            super()._change(rows)
        else:
            self.source = rows(self.source)

    def get_seq_length(self) -> int:
        """Return the length m of the source."""
        return super().get_seq_length() if self.source is None else self.source.shape[1]

    def reset(self) -> None:
        """Let go of everything; upstream's releases before 5.23 write zeros over it."""
        self.source = self.maps = self._keys = self._values = None
        self.is_initialized, self.beams = False, 1

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self._rows():
            self._change(lambda states: states.repeat_interleave(repeats, dim=0))

    def __reduce__(self) -> Any:
        # A copy, or a pickle, has keys and values, and none of the model's weights.
        if self.keys is None:
            return SharedDynamicLayer, ()
        return _layer_of, (self.keys, self.values, self.beams)


def _layer_of(keys: torch.Tensor, values: torch.Tensor, beams: int) -> SharedDynamicLayer:
    layer = SharedDynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.beams = keys, values, beams
    return layer


def held_layer(cache: Any, index: int) -> Any:
    """Return the layer of an encoder-decoder's cache that has the cross-attention's memory already, else None."""
    if cache is None or not cache.is_updated.get(index):
        return None
    return cache.cross_attention_cache.layers[index]


def holds_anything(layer: Any) -> bool:
    """Say whether a layer still holds the encoder's outputs."""
    return type(layer) is SourceLayer and layer.source is not None


def hold_source(cache: Any, index: int, layer: SourceLayer) -> bool:
    """Put a layer with the encoder's outputs into an encoder-decoder's cache; False where there is no place for it.

    A static cache, one that is offloaded and layers of other kinds keep keys and values.
    """
    cross = cache.cross_attention_cache
    if getattr(cross, "offloading", False) or type(layer_at(cross, index)) is not DynamicLayer:
        return False
    cross.layers[index] = layer
    cache.is_updated[index] = True
    return True
