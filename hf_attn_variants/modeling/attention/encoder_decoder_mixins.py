"""Mixins for encoder-decoders: a shared latent of the encoder outputs, and beams that share the encoder outputs."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..mechanisms.talking_heads import has_talking_heads
from ..upstream import Arguments, check_called, check_method, known_imports, upstream_class
from ..variant_names import EAGER, SDPA
from .latent_attention import holds_latent
from .shared_rows import mark_repeated, rows_of_sentences

with known_imports():
    from transformers import GenerationMixin

__all__ = ["BeamsShareMemory", "MakesCrossLatent", "expand_and_mark"]


# A mixin becomes a model only together with a class of Transformers. Only the type checker sees it as one here.
if TYPE_CHECKING:
    _Stack = nn.Module

    class _Generation(nn.Module):  # hides the methods of Transformers, some of which were static in older releases
        config: Any
else:
    _Stack = _Generation = object


class MakesCrossLatent(_Stack):
    """A mixin for decoders that computes the latent of the encoder outputs once for all layers."""

    memory_arguments: Arguments

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.memory_arguments = Arguments(upstream_class(cls, MakesCrossLatent), ("memory", "cache"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder as in Transformers, with the latent instead of the encoder outputs."""
        memory, cache = self.memory_arguments.read(args, kwargs)
        makes_latent = getattr(self, "cross_kv_a_proj", None)
        if makes_latent is None or memory is None or holds_latent(cache):
            return super().forward(*args, **kwargs)
        rows = rows_of_sentences(memory, (makes_latent,))
        latent = made = makes_latent(rows)
        if rows is not memory:
            made = latent.repeat_interleave(len(memory) // len(rows), dim=0)
            mark_repeated(made, latent)
        return super().forward(**self.memory_arguments.by_name(args, kwargs, memory=made))


check_method(GenerationMixin, "_expand_inputs_for_generation", ("expand_size", "is_encoder_decoder", "input_ids"))
check_called(GenerationMixin, "generate", "_expand_inputs_for_generation")
check_called(GenerationMixin, "_beam_search", "_reorder_cache")


def expand_and_mark(
    expand: Any, shares: bool, expand_size: int, is_encoder_decoder: bool, input_ids: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Repeat the inputs of `generate` for each beam or sample, and mark encoder outputs with repeated rows.

    Args:
        expand: the method `_expand_inputs_for_generation` of Transformers, which takes the following arguments.
        shares: True if all beams of a sentence can read the same row of encoder outputs.
        expand_size: the number of beams or samples per sentence.
        is_encoder_decoder: the value that Transformers passes.
        input_ids: the input ids of the decoder.
        kwargs: the other inputs of the model.
    """
    outputs = kwargs.get("encoder_outputs")
    if shares and expand_size > 1 and outputs is not None:
        kwargs["encoder_outputs"] = type(outputs)(**outputs)  # a copy, because Transformers changes it
    input_ids, kwargs = expand(
        expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **kwargs
    )
    if shares and expand_size > 1 and outputs is not None and len(kwargs["encoder_outputs"][0]) > len(outputs[0]):
        mark_repeated(kwargs["encoder_outputs"][0], outputs[0])
    return input_ids, kwargs


class BeamsShareMemory(_Generation):
    """A mixin for generation in which all beams or samples of a sentence read the same row of encoder outputs."""

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        # Only the functions of this package can share encoder outputs, and only without talking-heads projections.
        implementation = self.config._attn_implementation_internal
        folds = implementation in (EAGER, SDPA) and not has_talking_heads(self.config, "cross_")
        upstreams: Any = super()
        expand = upstreams._expand_inputs_for_generation
        return expand_and_mark(expand, folds, expand_size, is_encoder_decoder, input_ids, kwargs)

    def _reorder_cache(self, cache: Any, beams: torch.Tensor) -> Any:
        # The beams of a sentence share the cross-attention cache, so only the self-attention cache is reordered.
        getattr(cache, "self_attention_cache", cache).reorder_cache(beams)
        return cache
