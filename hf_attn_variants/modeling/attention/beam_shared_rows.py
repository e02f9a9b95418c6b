"""Cross-attention in which all beams of a sentence share one row of keys and values.

encoder outputs    [b, m, D]        one row per sentence
expanded           [b B, m, D]      `generate` repeats each row B times; `mark_repeated_rows` marks the result
attention          [b, m, D]        `get_unrepeated_encoder_outputs` returns the rows before the repetition
cache              [b, k, m, d]     `BeamSharedCacheLayer` keeps one row per sentence when beams are reordered
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..mechanisms.talking_heads import has_talking_heads
from ..ops.beams import count_beams_in_cache, get_sentence_indices, repeat_for_beams
from ..ops.variant_attention import is_exporting
from ..transformers_internals import check_method, check_method_calls, guarded_imports
from ..variant_names import EAGER, SDPA

with guarded_imports():
    from transformers import GenerationMixin
    from transformers.cache_utils import DynamicLayer, EncoderDecoderCache, StaticLayer

__all__ = [
    "BeamSharedCacheLayer",
    "BeamSharedDynamicLayer",
    "SharedEncoderOutputsMixin",
    "expand_and_mark_encoder_outputs",
    "get_empty_layer",
    "get_unrepeated_encoder_outputs",
    "has_hooks",
    "mark_repeated_rows",
    "share_encoder_outputs_between_beams",
    "share_rows_between_beams",
    "store_num_beams",
]


# An attribute of encoder outputs whose rows have been repeated for beams. It contains the tensor with one row per
# sentence, and the version of the repeated tensor at that time.
REPEATED_ROWS = "_attn_variants_repeated"


class BeamSharedCacheLayer:
    """The base class of cache layers with one row per sentence.

    Attributes:
        beams: the number of decoder rows that read one row of the layer.
    """

    beams = 1

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorder the rows for beam search. Nothing changes if beams only move within their sentences."""
        rows = self._num_rows()
        stays_within_sentences = (
            self.beams > 1
            and len(beam_idx) == rows * self.beams
            and _reorders_only_within_sentences(beam_idx, self.beams)
        )
        if rows and not stays_within_sentences:
            self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows that belong to the given decoder rows."""
        if self._num_rows():
            self._select_rows(indices)

    def reset(self) -> None:
        """Clear the contents and the number of beams."""
        parent: Any = super()
        parent.reset()
        self.beams = 1

    def _select_rows(self, indices: Tensor) -> None:
        if self.beams > 1 and indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        chosen = get_sentence_indices(indices, self.beams) if self.beams > 1 else indices
        self._apply_to_tensors(lambda states: states[chosen.to(states.device)])
        self.beams = 1

    def _num_rows(self) -> int:
        layer: Any = self
        return 0 if layer.keys is None else layer.keys.shape[0]

    def _apply_to_tensors(self, fn: Any) -> None:
        layer: Any = self
        layer.keys, layer.values = fn(layer.keys), fn(layer.values)


def _reorders_only_within_sentences(beam_idx: Tensor, beams: int) -> bool:
    rows = torch.arange(len(beam_idx), dtype=beam_idx.dtype, device=beam_idx.device)
    return torch.equal(get_sentence_indices(beam_idx, beams), get_sentence_indices(rows, beams))


class BeamSharedDynamicLayer(BeamSharedCacheLayer, DynamicLayer):
    """A dynamic cache layer with one row of keys and values per sentence."""


class BeamSharedStaticLayer(BeamSharedCacheLayer, StaticLayer):
    """A static cache layer with one row of keys and values per sentence."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store keys and values. New tensors are allocated if the number of rows has changed since the last search."""
        if self._num_rows() != key_states.shape[0]:
            self.is_initialized = False
        return super().update(key_states, value_states, *args, **kwargs)


_BEAM_SHARED_CLASSES: dict[type, type] = {DynamicLayer: BeamSharedDynamicLayer, StaticLayer: BeamSharedStaticLayer}


def share_rows_between_beams(cache: Any, index: int, beams: int) -> bool:
    """Make an empty cache layer store one row per sentence.

    The result is False if this is not possible, for example if the layer has a window.

    Args:
        cache: the cache of an encoder-decoder.
        index: the index of the layer.
        beams: the number of decoder rows that read one row of the layer.
    """
    cross = cache.cross_attention_cache
    layer = get_empty_layer(cross, index)
    if type(layer) in _BEAM_SHARED_CLASSES:
        shared: Any = _BEAM_SHARED_CLASSES[type(layer)]
        cross.layers[index] = shared.__new__(shared)
        vars(cross.layers[index]).update(vars(layer))
    if layer is None or type(cross.layers[index]) not in _BEAM_SHARED_CLASSES.values():
        return False
    cross.layers[index].beams = beams
    return True


def get_empty_layer(cross_attention_cache: Any, index: int) -> Any:
    """Return a layer of a cross-attention cache if it is empty, and None otherwise."""
    layers = cross_attention_cache.layers
    if len(layers) <= index and getattr(cross_attention_cache, "layer_class_to_replicate", None) is DynamicLayer:
        layers.extend(DynamicLayer() for _ in range(index + 1 - len(layers)))
    if index >= len(layers):
        return None
    if (
        layers[index].is_initialized and type(layers[index]) is not BeamSharedStaticLayer
    ):  # static layers keep their tensors after a reset
        return None
    if isinstance(layers[index], BeamSharedDynamicLayer):  # the layer was reset
        layers[index] = DynamicLayer()
    return layers[index]


def mark_repeated_rows(expanded: Tensor, original: Tensor) -> None:
    """Mark encoder outputs [b B, m, D] that contain each row of `original` [b, m, D] B times.

    To all other code, the tensor still has one row per beam. Only attention modules in this package read the mark, and
    tensors that are computed from the marked tensor do not inherit it.
    """
    setattr(expanded, REPEATED_ROWS, (original, None if expanded.is_inference() else expanded._version))


def get_unrepeated_encoder_outputs(encoder_outputs: Tensor, linears: Iterable[nn.Module] = ()) -> Tensor:
    """Return encoder outputs with one row per sentence if they are marked, and otherwise return them unchanged.

    Args:
        encoder_outputs: encoder outputs [b B, m, D], or their latent. `mark_repeated_rows` may have marked them.
        linears: the linear layers that are applied to them. If one of them has hooks, nothing is changed, because
            hooks may expect one row per beam. For example, PEFT can select an adapter per row (`adapter_names`).
    """
    mark = None if is_exporting() or torch.jit.is_tracing() else getattr(encoder_outputs, REPEATED_ROWS, None)
    if mark is None or any(has_hooks(linear) for linear in linears):
        return encoder_outputs
    states, version = mark
    if version is None:  # inference-mode tensors have no version
        is_same = torch.equal(encoder_outputs, repeat_for_beams(states, len(encoder_outputs)))
    else:
        is_same = encoder_outputs._version == version
    return states if is_same else encoder_outputs


def has_hooks(linear: nn.Module) -> bool:
    """Return True if calling a linear layer runs forward hooks."""
    return any(module._forward_pre_hooks or module._forward_hooks for module in linear.modules())


def share_encoder_outputs_between_beams(
    module: Any, linears: Iterable[nn.Module], states: Tensor, encoder_outputs: Tensor, cache: Any
) -> Tensor:
    """Return the encoder outputs with one row per sentence if possible, and prepare the cache for such rows.

    Modules with a latent are not affected, because `compute_latent_with_cache` handles their rows.

    Args:
        module: a cross-attention module.
        linears, encoder_outputs: see `get_unrepeated_encoder_outputs`.
        states: the hidden states of the decoder [b B, n, D].
        cache: the cache of the decoder, if any.
    """
    if module.heads.rank is not None:
        return encoder_outputs
    encoder_outputs = get_unrepeated_encoder_outputs(encoder_outputs, linears)
    store_num_beams(cache, module.layer_idx, states, encoder_outputs)
    return encoder_outputs


def store_num_beams(cache: Any, index: int, states: Tensor, encoder_outputs: Tensor) -> None:
    """Set how many decoder rows share each row of a cross-attention cache layer, unless the layer is already filled.

    Args:
        cache: the cache of the decoder. Caches without cross-attention are ignored.
        index: the index of the layer.
        states, encoder_outputs: see `count_beams_in_cache`.
    """
    if isinstance(cache, EncoderDecoderCache) and not cache.is_updated.get(index):
        beams = count_beams_in_cache(states, encoder_outputs)
        if beams > 1:
            share_rows_between_beams(cache, index, beams)


_Generation: Any = object  # the type of the Transformers class with which the mixin is combined


def expand_and_mark_encoder_outputs(
    expand_fn: Any,
    can_share_rows: bool,
    expand_size: int,
    is_encoder_decoder: bool,
    input_ids: Any,
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Repeat the inputs of `generate` for each beam or sample, and mark encoder outputs whose rows are repeated.

    Args:
        expand_fn: the Transformers method `_expand_inputs_for_generation`, which takes the following arguments.
        can_share_rows: True if all beams of a sentence can share a row of encoder outputs.
        expand_size: the number of beams or samples per sentence.
        is_encoder_decoder: the value that is passed by Transformers.
        input_ids: the input ids of the decoder.
        kwargs: the other model inputs.
    """
    outputs = kwargs.get("encoder_outputs")
    if can_share_rows and expand_size > 1 and outputs is not None:
        kwargs["encoder_outputs"] = type(outputs)(**outputs)  # a copy, because Transformers modifies it
    input_ids, kwargs = expand_fn(
        expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **kwargs
    )
    if (
        can_share_rows
        and expand_size > 1
        and outputs is not None
        and len(kwargs["encoder_outputs"][0]) > len(outputs[0])
    ):
        mark_repeated_rows(kwargs["encoder_outputs"][0], outputs[0])
    return input_ids, kwargs


class SharedEncoderOutputsMixin(_Generation):
    """A mixin for generation in which all beams or samples of a sentence share a row of encoder outputs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_method(
            GenerationMixin, "_expand_inputs_for_generation", ("expand_size", "is_encoder_decoder", "input_ids")
        )
        check_method_calls(GenerationMixin, "generate", "_expand_inputs_for_generation")
        check_method_calls(GenerationMixin, "_beam_search", "_reorder_cache")

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        # Only attention functions in this package can share encoder outputs, and only without talking-heads
        # projections.
        implementation = self.config._attn_implementation_internal
        can_share = implementation in (EAGER, SDPA) and not has_talking_heads(self.config, "cross_")
        expand = super()._expand_inputs_for_generation
        return expand_and_mark_encoder_outputs(expand, can_share, expand_size, is_encoder_decoder, input_ids, kwargs)

    def _reorder_cache(self, cache: Any, beam_idx: Tensor) -> Any:
        # The beams of a sentence share the cross-attention cache, so only the self-attention cache is reordered.
        getattr(cache, "self_attention_cache", cache).reorder_cache(beam_idx)
        return cache
