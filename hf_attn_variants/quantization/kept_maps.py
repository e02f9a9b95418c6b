"""Which linear layers become int8, which bfloat16, and which stay in float32, with the reason."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..shared_memory.attention import ENCODER_OUTPUTS, SharesMemory
from .int8_weight import LARGEST, round_inputs

__all__ = ["LEAST_WEIGHTS", "MOST_ERROR", "is_named", "large_linears", "make_example_inputs", "rounding_errors"]

# A smaller layer gains no time in a call of few tokens, and it needs little memory. (With AVX-512 VNNI, int8 layers of
# 256 x 256 made a batch of 16 texts of a small T5 1.16 times as fast.)
LEAST_WEIGHTS = 2**16
# The largest relative error that rounding the inputs may make in the outputs of an int8 layer. Inputs without
# outliers make 0.01, and the layers of MiniLM up to 0.04. In a flan-T5 (small), it is 0.16 for the output layer, which
# then names another likeliest token in one case of seven.
MOST_ERROR = 0.05
# The example batch, and the most rows of it that a layer is measured on.
EXAMPLE_TEXTS, EXAMPLE_TOKENS, MEASURED_ROWS = 4, 16, 64


def large_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers of a model that gain from fewer bits, by their paths.

    Layers of a class of their own (those that make latents) are not among them. Nor are those whose weight an
    attention reads together with a latent or with the encoder's outputs, instead of calling the layer.
    """
    read = {id(linear) for linear in _read_linears(model)}
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear and id(module) not in read and module.weight.numel() >= LEAST_WEIGHTS
    }


def is_named(path: str, names: Iterable[str]) -> bool:
    """Return whether a path of a module or parameter has one of the names among its parts."""
    return any(re.search(rf"(^|\.){name}(\.|$)", path) for name in names)


def make_example_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a small random batch for a model of texts, sounds or images, from its configuration."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    name = model.main_input_name

    def text_batch(size: int) -> torch.Tensor:
        # The first ids are special tokens; models with positions from 2 on (RoBERTa) need two more.
        tokens = max(1, min(EXAMPLE_TOKENS, getattr(config, "max_position_embeddings", 512) - 4))
        return torch.randint(min(4, size - 1), size, (EXAMPLE_TEXTS, tokens), generator=generator)

    if name == "input_features":  # Whisper
        size = (1, config.num_mel_bins, 2 * config.max_source_positions)
        inputs = {name: torch.randn(size, generator=generator)}
    elif name == "input_values":
        inputs = {name: torch.randn(1, 16_000, generator=generator)}
    elif name == "pixel_values":
        sides = config.image_size if isinstance(config.image_size, list | tuple) else [config.image_size] * 2
        inputs = {name: torch.randn(1, config.num_channels, *sides, generator=generator)}
    else:
        ids = text_batch(config.get_text_config().vocab_size)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder and model.get_decoder() is not model:
        inputs["decoder_input_ids"] = text_batch(config.get_text_config(decoder=True).vocab_size)
    return inputs


def rounding_errors(model: nn.Module, linears: dict[str, nn.Linear], inputs: dict[str, Any]) -> dict[str, float]:
    """Run a model once and return the error that rounding the inputs of each linear layer makes in its outputs.

    The error is relative to what differs between the outputs of the tokens: a part that all tokens share, as of one
    very large input, carries nothing. Layers that the model does not call are not in the result.
    """
    errors: dict[int, float] = {}

    def measure(linear: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].is_nested:
            return
        states = args[0].detach().float().reshape(-1, args[0].shape[-1])
        states = states[:: max(1, len(states) // MEASURED_ROWS)].contiguous()
        numbers, step = round_inputs(states, LARGEST)
        weight: Any = linear.weight
        outputs = nn.functional.linear(states, weight)
        error = nn.functional.linear((numbers.float() - LARGEST - 1) * step - states, weight)
        spread = (outputs - outputs.mean(0)).norm()
        if spread > 0:
            ratio = float((error - error.mean(0)).norm() / spread)
            errors[id(linear)] = max(errors.get(id(linear), 0.0), ratio)

    hooks = [
        linear.register_forward_pre_hook(measure) for linear in {id(each): each for each in linears.values()}.values()
    ]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return {path: errors[id(linear)] for path, linear in linears.items() if id(linear) in errors}


def _read_linears(model: PreTrainedModel) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, SharesMemory) and module.cross_cache == ENCODER_OUTPUTS:
            yield from module.key_and_value_maps()
        if isinstance(module, AttnVariantModelMixin):
            for site, _, attention in module.named_attentions():
                core: Any = attention.get_submodule(site.core)
                if core.heads.rank is not None:
                    yield from (attention.get_submodule(path) for path in (site.key, site.value))
