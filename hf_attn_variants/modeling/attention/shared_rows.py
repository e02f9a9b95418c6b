"""Cross-attention cache layers with one row per sentence, which all beams of the sentence read."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..ops.query_folding import is_exporting, is_traced
from ..upstream import known_imports
from ..upstream_checks import check_caches

with known_imports():
    from transformers.cache_utils import DynamicLayer, EncoderDecoderCache, StaticLayer

check_caches()

__all__ = [
    "SharedDynamicLayer",
    "SharedRows",
    "SharedStaticLayer",
    "beams_of",
    "has_hooks",
    "layer_at",
    "mark_repeated",
    "note_beams",
    "rows_of_sentences",
    "share_rows",
]

# An attribute of encoder outputs whose rows are repeated for beams. It holds the tensor with one row per sentence, and
# the version of the repeated tensor at that time.
REPEATED = "_attn_variants_repeated"


class SharedRows:
    """Common base of cache layers with one row per sentence.

    Attributes:
        beams: the number of decoder rows that read one row of the layer.
    """

    beams = 1

    def reorder_cache(self, beam_idx: Any) -> None:
        """Select the rows of other beams. Nothing changes if beams move only within their sentences."""
        rows = self._rows()
        stays = self.beams > 1 and len(beam_idx) == rows * self.beams and _stay_with_sentence(beam_idx, self.beams)
        if rows and not stays:
            self._take(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that these decoder rows read."""
        if self._rows():
            self._take(indices)

    def reset(self) -> None:
        """Remove the contents and the number of beams."""
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


def _stay_with_sentence(beam_idx: torch.Tensor, beams: int) -> bool:
    sentences = torch.arange(len(beam_idx), device=beam_idx.device) // beams
    return torch.equal(beam_idx // beams, sentences.to(beam_idx.dtype))


class SharedDynamicLayer(SharedRows, DynamicLayer):
    """A layer of a dynamic cache with one row of keys and values per sentence."""


class SharedStaticLayer(SharedRows, StaticLayer):
    """A layer of a static cache with one row of keys and values per sentence."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store keys and values. If the number of rows differs from that of the last search, allocate new tensors."""
        if self._rows() != key_states.shape[0]:
            self.is_initialized = False
        return super().update(key_states, value_states, *args, **kwargs)


_SHARED: dict[type, type] = {DynamicLayer: SharedDynamicLayer, StaticLayer: SharedStaticLayer}


def share_rows(cache: Any, index: int, beams: int) -> bool:
    """Make an empty layer keep one row per sentence. Return False if it cannot, for example because of a window.

    Args:
        cache: the cache of an encoder-decoder.
        index: the index of the layer.
        beams: the number of decoder rows that read one row of the layer.
    """
    cross = cache.cross_attention_cache
    layer = layer_at(cross, index)
    if type(layer) in _SHARED:
        shared: Any = _SHARED[type(layer)]
        cross.layers[index] = shared.__new__(shared)
        vars(cross.layers[index]).update(vars(layer))
    if layer is None or type(cross.layers[index]) not in _SHARED.values():
        return False
    cross.layers[index].beams = beams
    return True


def layer_at(cross: Any, index: int) -> Any:
    """Return a layer of a cross-attention cache if it is empty, otherwise None."""
    layers = cross.layers
    if len(layers) <= index and getattr(cross, "layer_class_to_replicate", None) is DynamicLayer:
        layers.extend(DynamicLayer() for _ in range(index + 1 - len(layers)))
    if index >= len(layers):
        return None
    if (
        layers[index].is_initialized and type(layers[index]) is not SharedStaticLayer
    ):  # a static layer keeps its tensors after a reset
        return None
    if isinstance(layers[index], SharedDynamicLayer):  # it was reset
        layers[index] = DynamicLayer()
    return layers[index]


def mark_repeated(repeated: torch.Tensor, states: torch.Tensor) -> None:
    """Mark encoder outputs [b B, m, D] that contain each row of `states` [b, m, D] B times.

    All other code sees one row per beam. Only attention modules of this package read the mark, and a tensor that is
    computed from the marked one does not have it.
    """
    setattr(repeated, REPEATED, (states, None if repeated.is_inference() else repeated._version))


def rows_of_sentences(memory: torch.Tensor, maps: Iterable[nn.Module] = ()) -> torch.Tensor:
    """Return encoder outputs [b B, m, D] with one row per sentence if they are marked, otherwise unchanged.

    Args:
        memory: encoder outputs, or a latent of them.
        maps: the linear layers that read them. A layer with a hook may expect one row per beam, for example if peft
            selects an adapter per row (`adapter_names`).
    """
    mark = None if is_exporting() or torch.jit.is_tracing() else getattr(memory, REPEATED, None)
    if mark is None or any(has_hooks(each) for each in maps):
        return memory
    states, version = mark
    if version is None:  # a tensor of the inference mode has no version
        is_same = torch.equal(memory, states.repeat_interleave(len(memory) // len(states), dim=0))
    else:
        is_same = memory._version == version
    return states if is_same else memory


def has_hooks(linear: nn.Module) -> bool:
    """Return whether a call of a linear layer runs forward hooks."""
    return any(module._forward_pre_hooks or module._forward_hooks for module in linear.modules())


def beams_of(states: torch.Tensor, memory: torch.Tensor) -> int:
    """Return B, the number of rows of the states [b B, n, D] per row of the memory [b, m, D]; 1 while tracing."""
    return 1 if is_traced() or not len(memory) else max(len(states) // len(memory), 1)


def note_beams(cache: Any, index: int, states: torch.Tensor, memory: torch.Tensor) -> None:
    """Store the number of decoder rows per row of a cross-attention layer before it is filled.

    Args:
        cache: the cache of the decoder. A cache without cross-attention is ignored.
        index: the index of the layer.
        states, memory: as for `beams_of`.
    """
    if isinstance(cache, EncoderDecoderCache) and not cache.is_updated.get(index):
        beams = beams_of(states, memory)
        if beams > 1:
            share_rows(cache, index, beams)
