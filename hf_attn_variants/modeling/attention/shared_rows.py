"""Layers of a cross-attention's cache whose rows are those of sentences, each read by all beams of its sentence."""

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

# The attribute of a tensor whose rows are those of another, each repeated for the beams of its sentence: that tensor,
# and the version of this one then.
REPEATED = "_attn_variants_repeated"


class SharedRows:
    """What layers have in common whose rows are those of sentences, each read by all beams of its sentence.

    Attributes:
        beams: how many rows of the decoder read one of the layer's.
    """

    beams = 1

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the rows of other beams; they stay where they are when beams move within their sentences."""
        rows = self._rows()
        stays = self.beams > 1 and len(beam_idx) == rows * self.beams and _stay_with_sentence(beam_idx, self.beams)
        if rows and not stays:
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


def _stay_with_sentence(beam_idx: torch.Tensor, beams: int) -> bool:
    sentences = torch.arange(len(beam_idx), device=beam_idx.device) // beams
    return torch.equal(beam_idx // beams, sentences.to(beam_idx.dtype))


class SharedDynamicLayer(SharedRows, DynamicLayer):
    """The layer of a dynamic cache with keys and values of a sentence once for all its beams."""


class SharedStaticLayer(SharedRows, StaticLayer):
    """The same of a static cache."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hold keys and values, in memory of its own where another search left as many rows."""
        if self._rows() != key_states.shape[0]:
            self.is_initialized = False
        return super().update(key_states, value_states, *args, **kwargs)


_SHARED: dict[type, type] = {DynamicLayer: SharedDynamicLayer, StaticLayer: SharedStaticLayer}


def share_rows(cache: Any, index: int, beams: int) -> bool:
    """Have a layer without contents keep a row for each sentence; False for one that cannot (a window's, say).

    Args:
        cache: an encoder-decoder's.
        index: of the layer.
        beams: how many rows of the decoder read one of the layer's.
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
    """Return a layer of a cross-attention's cache that holds nothing yet; None where there is no such layer."""
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


def mark_repeated(repeated: torch.Tensor, states: torch.Tensor) -> None:
    """Note on encoder outputs [b B, m, D] that each row of `states` [b, m, D] is in them B times.

    All code reads one row per beam. Only our attentions look for the mark, and a tensor made from this
    one does not have it.
    """
    setattr(repeated, REPEATED, (states, None if repeated.is_inference() else repeated._version))


def rows_of_sentences(memory: torch.Tensor, maps: Iterable[nn.Module] = ()) -> torch.Tensor:
    """Return a memory [b B, m, D] with one row per sentence if the beams of each have equal rows, else unchanged.

    Args:
        memory: encoder outputs, or a latent of them.
        maps: the linear layers that read it. With a hook, one may expect a row for each beam, as an adapter of peft's
            does that is chosen for each row (`adapter_names`).
    """
    mark = None if is_exporting() or torch.jit.is_tracing() else getattr(memory, REPEATED, None)
    if mark is None or any(has_hooks(each) for each in maps):
        return memory
    states, version = mark
    if version is None:  # a tensor of the inference mode does not count what is written into it
        is_same = torch.equal(memory, states.repeat_interleave(len(memory) // len(states), dim=0))
    else:
        is_same = memory._version == version
    return states if is_same else memory


def has_hooks(linear: nn.Module) -> bool:
    """Return whether a call of a module runs hooks of torch's."""
    return any(module._forward_pre_hooks or module._forward_hooks for module in linear.modules())


def beams_of(states: torch.Tensor, memory: torch.Tensor) -> int:
    """Return how many rows of the decoder's states [b B, n, D] read one of the memory's [b, m, D]: B; traced, 1."""
    return 1 if is_traced() or not len(memory) else max(len(states) // len(memory), 1)


def note_beams(cache: Any, index: int, states: torch.Tensor, memory: torch.Tensor) -> None:
    """Have a layer that is about to be filled know how many rows of the decoder read one of its own.

    Args:
        cache: the decoder's; a plain one has no place for a memory.
        index: of the layer.
        states, memory: as for `beams_of`.
    """
    if isinstance(cache, EncoderDecoderCache) and not cache.is_updated.get(index):
        beams = beams_of(states, memory)
        if beams > 1:
            share_rows(cache, index, beams)
