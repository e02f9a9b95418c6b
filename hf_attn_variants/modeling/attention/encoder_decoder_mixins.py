"""What encoder-decoders have of their own: a latent of the encoder's outputs, and beams that share these."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..mechanisms.talking_heads import talks
from ..upstream import Arguments, check_called, check_method, known_imports, upstream_class
from ..variant_names import EAGER, SDPA
from .latent_attention import holds_latent

with known_imports():
    from transformers import GenerationMixin

__all__ = ["BeamsShareMemory", "MakesCrossLatent", "expand_all_but_memory"]

# Inputs that keep one row a sentence where beams share the memory.
ONCE = ("encoder_outputs", "attention_mask")


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
        return super().forward(**self.memory_arguments.by_name(args, kwargs, memory=makes_latent(memory)))


check_method(GenerationMixin, "_expand_inputs_for_generation", ("expand_size", "is_encoder_decoder", "input_ids"))
check_called(GenerationMixin, "generate", "_expand_inputs_for_generation")
check_called(GenerationMixin, "_beam_search", "_reorder_cache")


def expand_all_but_memory(
    expand: Any, shares: bool, expand_size: int, is_encoder_decoder: bool, input_ids: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Repeat the inputs of `generate` for each beam or sample, and leave the encoder's outputs out.

    Upstream repeats these too, and with them the cache that is made from them.

    Args:
        expand: upstream's `_expand_inputs_for_generation`, whose arguments follow.
        shares: whether the model's attention reads one memory for all beams of a sentence; else all is repeated.
        expand_size: beams or samples of a sentence.
        is_encoder_decoder: as upstream says.
        input_ids: the decoder's.
        kwargs: the model's other inputs.
    """
    once = {}
    if shares and is_encoder_decoder and kwargs.get("encoder_outputs") is not None:
        once = {name: kwargs.pop(name) for name in ONCE if name in kwargs}
        is_encoder_decoder = False  # else upstream asks for the outputs
    input_ids, kwargs = expand(
        expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **kwargs
    )
    return input_ids, kwargs | once


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
        return expand_all_but_memory(expand, folds, expand_size, is_encoder_decoder, input_ids, kwargs)

    def _reorder_cache(self, cache: Any, beams: torch.Tensor) -> Any:
        # The beams of a sentence share its memory: only what they generated themselves moves with them.
        getattr(cache, "self_attention_cache", cache).reorder_cache(beams)
        return cache
