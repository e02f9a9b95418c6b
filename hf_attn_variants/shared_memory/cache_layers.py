"""Layers of a cross-attention's cache: keys and values that beams share, and the encoder's outputs in their place."""

from typing import Any

import torch
from torch import nn

from ..modeling.attention.latent_attention import keys_and_values
from ..modeling.upstream import known_imports
from ..modeling.upstream_checks import check_caches

with known_imports():
    from transformers.cache_utils import DynamicLayer, StaticLayer

check_caches()

__all__ = [
    "SharedDynamicLayer",
    "SharedStaticLayer",
    "SourceLayer",
    "held_layer",
    "hold_source",
    "holds_anything",
    "share_rows",
]


class SharedDynamicLayer(DynamicLayer):
    """The layer of a dynamic cache with keys and values of a sentence once for all its beams.

    They stay where they are when the beams of the sentence move.
    """

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the rows of other beams, where each has its own."""
        if _has_rows_for(self, beam_idx):
            super().reorder_cache(beam_idx)


class SharedStaticLayer(StaticLayer):
    """The same of a static cache."""

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the rows of other beams, where each has its own."""
        if _has_rows_for(self, beam_idx):
            super().reorder_cache(beam_idx)


def _has_rows_for(layer: Any, beam_idx: torch.Tensor) -> bool:
    return layer.keys is not None and layer.keys.shape[0] == len(beam_idx)


class SourceLayer(SharedDynamicLayer):
    """The layer that holds the encoder's outputs [b, m, D], and makes keys and values where somebody asks for them.

    From then on it is as any other: who reads the cache (Whisper's outputs, a model that shares no longer) finds
    upstream's. Nothing writes into the outputs, which other layers and callers hold as well.

    Args:
        source: the encoder's outputs.
        maps: those of keys and of values.
        head_dim: d.
    """

    def __init__(self, source: torch.Tensor, maps: tuple[nn.Module, nn.Module], head_dim: int) -> None:
        self.source: torch.Tensor | None = source
        self.maps: Any = maps
        self.head_dim = head_dim
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

    def _change(self, rows: Any) -> None:
        if self.source is not None:
            self.source = rows(self.source)

    def get_seq_length(self) -> int:
        """Return the length m of the source."""
        return super().get_seq_length() if self.source is None else self.source.shape[1]

    def reset(self) -> None:
        """Let go of everything; upstream's releases before 5.23 write zeros over it."""
        self.source = self.maps = self._keys = self._values = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the rows of other beams, where each has its own."""
        if self.source is None:
            super().reorder_cache(beam_idx)
        elif len(beam_idx) == self.source.shape[0]:
            self._change(lambda source: source.index_select(0, beam_idx.to(source.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.source is None:
            super().batch_repeat_interleave(repeats)
        self._change(lambda source: source.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows."""
        if self.source is None:
            super().batch_select_indices(indices)
        self._change(lambda source: source[indices])

    def __reduce__(self) -> Any:
        # A copy, or a pickle, has keys and values, and none of the model's weights.
        if self.keys is None:
            return SharedDynamicLayer, ()
        return _layer_of, (self.keys, self.values)


def _layer_of(keys: torch.Tensor, values: torch.Tensor) -> SharedDynamicLayer:
    layer = SharedDynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


_SHARED: dict[type, type] = {DynamicLayer: SharedDynamicLayer, StaticLayer: SharedStaticLayer}


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
    if getattr(cross, "offloading", False) or type(_place(cross, index)) is not DynamicLayer:
        return False
    cross.layers[index] = layer
    cache.is_updated[index] = True
    return True


def share_rows(cache: Any, index: int) -> bool:
    """Have a layer without contents keep a row for each sentence; False for one that cannot (a window's, say)."""
    cross = cache.cross_attention_cache
    layer = _place(cross, index)
    if type(layer) in _SHARED:
        shared: Any = _SHARED[type(layer)]
        cross.layers[index] = shared.__new__(shared)
        vars(cross.layers[index]).update(vars(layer))
    return layer is not None and type(cross.layers[index]) in _SHARED.values()


def _place(cross: Any, index: int) -> Any:
    layers = cross.layers
    if len(layers) <= index and getattr(cross, "layer_class_to_replicate", None) is DynamicLayer:
        layers.extend(DynamicLayer() for _ in range(index + 1 - len(layers)))
    if index >= len(layers) or layers[index].is_initialized:
        return None
    if isinstance(layers[index], SharedDynamicLayer):  # that was reset
        layers[index] = DynamicLayer()
    return layers[index]
