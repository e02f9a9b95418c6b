"""Layers of a cross-attention's cache: keys and values that beams share, and the encoder's outputs in their place."""

import functools
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


class _SharedRows:
    """What layers have in common whose rows are those of sentences, each read by all beams of its sentence.

    Attributes:
        beams: how many rows of the decoder read one of the layer's.
    """

    beams = 1

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the rows of other beams; they stay where they are when beams move within their sentences."""
        rows = self._rows()
        if not rows:
            return
        if self.beams == 1:
            moves = len(beam_idx) == rows
        else:
            moves = len(beam_idx) != rows * self.beams or not _stay_with_sentence(beam_idx, self.beams)
        if moves:
            self._take(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that some of the decoder's rows read."""
        if self._rows():
            self._take(indices)

    def reset(self) -> None:
        """Forget the contents, and how many beams there were."""
        upstreams: Any = super()
        upstreams.reset()
        self.beams = 1

    def _take(self, indices: torch.Tensor) -> None:
        if self.beams > 1 and indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        chosen = indices // self.beams if self.beams > 1 else indices
        self._change(lambda states: states[chosen.to(states.device)])
        self.beams = 1

    def _rows(self) -> int:
        layer: Any = self
        return 0 if layer.keys is None else layer.keys.shape[0]

    def _change(self, rows: Any) -> None:
        layer: Any = self
        layer.keys, layer.values = rows(layer.keys), rows(layer.values)


@functools.lru_cache(maxsize=1)  # of a step, whose layers all ask the same
def _stay_with_sentence(beam_idx: torch.Tensor, beams: int) -> bool:
    sentences = torch.arange(len(beam_idx), device=beam_idx.device) // beams
    return torch.equal(beam_idx // beams, sentences.to(beam_idx.dtype))


class SharedDynamicLayer(_SharedRows, DynamicLayer):
    """The layer of a dynamic cache with keys and values of a sentence once for all its beams."""


class SharedStaticLayer(_SharedRows, StaticLayer):
    """The same of a static cache."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hold keys and values, in memory of its own where another search left as many rows."""
        if self._rows() != key_states.shape[0]:
            self.is_initialized = False
        return super().update(key_states, value_states, *args, **kwargs)


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


def share_rows(cache: Any, index: int, beams: int) -> bool:
    """Have a layer without contents keep a row for each sentence; False for one that cannot (a window's, say).

    Args:
        cache: an encoder-decoder's.
        index: of the layer.
        beams: how many rows of the decoder read one of the layer's.
    """
    cross = cache.cross_attention_cache
    layer = _place(cross, index)
    if type(layer) in _SHARED:
        shared: Any = _SHARED[type(layer)]
        cross.layers[index] = shared.__new__(shared)
        vars(cross.layers[index]).update(vars(layer))
    if layer is None or type(cross.layers[index]) not in _SHARED.values():
        return False
    cross.layers[index].beams = beams
    return True


def _place(cross: Any, index: int) -> Any:
    layers = cross.layers
    if len(layers) <= index and getattr(cross, "layer_class_to_replicate", None) is DynamicLayer:
        layers.extend(DynamicLayer() for _ in range(index + 1 - len(layers)))
    if index >= len(layers):
        return None
    if layers[index].is_initialized and type(layers[index]) is not SharedStaticLayer:  # whose memory outlives a reset
        return None
    if isinstance(layers[index], SharedDynamicLayer):  # that was reset
        layers[index] = DynamicLayer()
    return layers[index]
