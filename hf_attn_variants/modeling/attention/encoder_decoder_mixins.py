"""What encoder-decoders have of their own: a latent of the encoder's outputs, and beams that share these."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..mechanisms.talking_heads import talks
from ..upstream import Arguments, check_called, check_method, known_imports, upstream_class
from ..variant_names import EAGER, SDPA
from .latent_attention import holds_latent
from .shared_rows import mark_repeated, rows_of_sentences

with known_imports():
    from transformers import GenerationMixin

__all__ = ["BeamsShareMemory", "MakesCrossLatent", "expand_and_mark"]


# A mixin is no model before it stands beside upstream's class: the checker alone sees the two as one.
if TYPE_CHECKING:
    _Stack = nn.Module

    class _Generation(nn.Module):  # upstream's methods, some of which were static once, are not known to the checker
        config: Any
else:
    _Stack = _Generation = object


class MakesCrossLatent(_Stack):
    """What a decoder's stack adds: it makes the latent of the encoder's outputs, once for all its layers."""

    memory_arguments: Arguments

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.memory_arguments = Arguments(upstream_class(cls, MakesCrossLatent), ("memory", "cache"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stack as upstream's does."""
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
    """Repeat the inputs of `generate` for each beam or sample, and mark encoder outputs whose rows are repeated.

    Args:
        expand: `_expand_inputs_for_generation` of Transformers, whose arguments follow.
        shares: whether the model's attention reads one memory for all beams of a sentence.
        expand_size: beams or samples of a sentence.
        is_encoder_decoder: as Transformers passes it.
        input_ids: the decoder's.
        kwargs: the model's other inputs.
    """
    outputs = kwargs.get("encoder_outputs")
    if shares and expand_size > 1 and outputs is not None:
        kwargs["encoder_outputs"] = type(outputs)(**outputs)  # Transformers writes into it
    input_ids, kwargs = expand(
        expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **kwargs
    )
    if shares and expand_size > 1 and outputs is not None and len(kwargs["encoder_outputs"][0]) > len(outputs[0]):
        mark_repeated(kwargs["encoder_outputs"][0], outputs[0])
    return input_ids, kwargs


class BeamsShareMemory(_Generation):
    """What generation of an encoder-decoder adds: the beams (or samples) of a sentence read one encoder output."""

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        # Only our attention functions read one memory for all beams, and not where heads talk.
        implementation = self.config._attn_implementation_internal
        folds = implementation in (EAGER, SDPA) and not talks(self.config, "cross_")
        upstreams: Any = super()
        expand = upstreams._expand_inputs_for_generation
        return expand_and_mark(expand, folds, expand_size, is_encoder_decoder, input_ids, kwargs)

    def _reorder_cache(self, cache: Any, beams: torch.Tensor) -> Any:
        # The beams of a sentence share its memory: only what they generated themselves moves with them.
        getattr(cache, "self_attention_cache", cache).reorder_cache(beams)
        return cache
