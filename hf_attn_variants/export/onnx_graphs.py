"""The graphs that a model is exported as: what each computes, and its inputs by the names that optimum gives them.

An encoder is one graph. An encoder-decoder is three: the encoder; the decoder's first call, which makes both caches;
and a step, which takes them and one token. A cache is tensors by layer, `past_key_values.N.decoder.key` [b, k, n, d]
in and `present.N.decoder.key` out, likewise `value`, and `encoder` in place of `decoder` for the cross-attention,
whose cache a step only reads. Of a latent `key` holds the latent [b, 1, n, r], and there is no `value`; one that all
layers share is layer 0's.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..modeling.fields.kernel_fields import has_kernel
from ..modeling.fields.variant_config import can_cache
from ..modeling.mechanisms.talking_heads import dynamic_terms, keeps_cache
from ..modeling.upstream import cache_name, cache_of
from ..registration import longest_input
from .upstream import upstream_architecture

__all__ = ["Graph", "Sizes", "model_graphs"]

Tensors = dict[str, torch.Tensor]
BATCH, SOURCE, TARGET, PAST = "batch_size", "encoder_sequence_length", "decoder_sequence_length", "past_length"
LENGTH, CHOICES = "sequence_length", "num_choices"


@dataclass(frozen=True)
class Sizes:
    """The sizes of example inputs."""

    batch: int = 2
    choices: int = 2
    source: int = 16
    target: int = 3


@dataclass(frozen=True)
class Graph:
    """One graph of a model.

    Args:
        name: of its file, without the ending.
        module: computes a dictionary of tensors from one.
        inputs: makes example inputs of some sizes, by name.
        axes: the sizes that vary, {input: {dimension: name}}.
        longest: the largest value of an axis by its name; without one there is no limit.
    """

    name: str
    module: nn.Module
    inputs: Callable[[Sizes], Tensors]
    axes: dict[str, dict[int, str]]
    longest: dict[str, int]


def model_graphs(model: AttnVariantModelMixin) -> list[Graph]:
    """Return the graphs of one of this package's models.

    Raises:
        ValueError: for a model that is neither an encoder nor an encoder-decoder that generates, or that keeps no
            cache.
    """
    config, stacks = model.config, {site.stack_of(model.config) for site, _, _ in model.named_attentions()}
    longest = longest_input(config)
    limits = {} if longest is None else {LENGTH: longest, SOURCE: longest, TARGET: longest, PAST: longest - 1}
    if stacks == {"encoder"}:
        return [_encoder_graph(model, limits)]
    name = upstream_architecture(type(model))
    if stacks == {"decoder"} or not model.can_generate():
        raise ValueError(
            f"a {name} cannot be exported to ONNX: encoders can (with any head), and encoder-decoders that generate."
        )
    if not can_cache(config) or not keeps_cache(dynamic_terms(config, "cross_")):
        raise ValueError(
            "`talking_heads_dynamic` m2l and m2w of a decoder cannot be exported to ONNX: they need inputs that its "
            f"cache does not hold; got {sorted({*dynamic_terms(config), *dynamic_terms(config, 'cross_')})}."
        )
    if has_kernel(config, is_causal=True):
        raise ValueError(
            f"a decoder whose `attention_kernel` is {config.attention_kernel!r} keeps sums over all tokens, and a "
            "step's graph takes keys and values. Kernels of encoders and of cross-attention can be exported."
        )
    return [_encoder_stack_graph(model, limits), *_decoder_graphs(model, limits)]


class _Encoder(nn.Module):
    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensors) -> Tensors:
        """Return all tensors that the model returns, by upstream's names."""
        outputs = self.model(**inputs, return_dict=True)
        return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


class _Decoder(nn.Module):
    """The decoder of an encoder-decoder: its first call without a cache, a step with the tensors of one."""

    def __init__(self, model: PreTrainedModel, is_step: bool):
        super().__init__()
        self.model, self.is_step = model, is_step

    def forward(self, inputs: Tensors) -> Tensors:
        """Return the logits [b, n, vocabulary] and the caches: of a step, only that of the decoder's own tokens."""
        states: Any = inputs.get("encoder_hidden_states")
        cache = None
        if self.is_step:
            own, memory = (_filled_cache(self.model.config, part, inputs) for part in ("decoder", "encoder"))
            cache = EncoderDecoderCache(own, memory)
            batch, _, length, _ = inputs["past_key_values.0.encoder.key"].shape
            # What the encoder said is in its cache; only the length is looked at.
            states = torch.zeros(batch, length, self.model.config.d_model)
        output = self.model(
            encoder_outputs=BaseModelOutput(states),
            attention_mask=inputs.get("encoder_attention_mask"),
            decoder_input_ids=inputs["input_ids"],
            use_cache=True,
            **{cache_name(): cache},
        )
        parts = ("decoder",) if self.is_step else ("decoder", "encoder")
        return {"logits": output.logits} | _cache_tensors(self.model.config, parts, cache_of(output))


def _encoder_graph(model: PreTrainedModel, limits: dict[str, int]) -> Graph:
    hears = model.main_input_name == "input_features"
    has_choices = type(model).__name__.endswith("MultipleChoice")
    names = ["input_features"] if hears else ["input_ids", "attention_mask"]
    # RoBERTa takes token types and has one alone.
    if "token_type_ids" in inspect.signature(model.forward).parameters and model.config.type_vocab_size > 1:
        names.append("token_type_ids")
    axes = {0: BATCH} if hears else {0: BATCH, 1: LENGTH}
    if has_choices:
        axes = {0: BATCH, 1: CHOICES, 2: LENGTH}

    def inputs(sizes: Sizes) -> Tensors:
        shape = (sizes.batch, *([sizes.choices] if has_choices else []), sizes.source)
        made = _features(model, sizes) if hears else _text(model, *shape)
        return {name: made[name] for name in names}

    return Graph("model", _Encoder(model), inputs, dict.fromkeys(names, axes), limits)


def _encoder_stack_graph(model: PreTrainedModel, limits: dict[str, int]) -> Graph:
    hears = model.main_input_name == "input_features"
    names = ["input_features"] if hears else ["input_ids", "attention_mask"]
    axes = {0: BATCH} if hears else {0: BATCH, 1: SOURCE}

    def inputs(sizes: Sizes) -> Tensors:
        made = _features(model, sizes) if hears else _text(model, sizes.batch, sizes.source)
        return {name: made[name] for name in names}

    return Graph("encoder_model", _Encoder(model.get_encoder()), inputs, dict.fromkeys(names, axes), limits)


def _decoder_graphs(model: PreTrainedModel, limits: dict[str, int]) -> list[Graph]:
    hears = model.main_input_name == "input_features"
    first, step = _Decoder(model, False), _Decoder(model, True)
    source = {0: BATCH} if hears else {0: BATCH, 1: SOURCE}
    mask = {} if hears else {"encoder_attention_mask": source}

    def first_inputs(sizes: Sizes) -> Tensors:
        length = model.config.max_source_positions if hears else sizes.source
        read, written = _text(model, sizes.batch, length), _text(model, sizes.batch, sizes.target)
        states = torch.randn(sizes.batch, length, model.config.d_model, generator=_generator())
        given = {"input_ids": written["input_ids"], "encoder_hidden_states": states}
        return ({} if hears else {"encoder_attention_mask": read["attention_mask"]}) | given

    def step_inputs(sizes: Sizes) -> Tensors:
        given = first_inputs(sizes)
        made = {name.replace("present", "past_key_values"): each for name, each in first(given).items()}
        del made["logits"], given["encoder_hidden_states"]
        return given | {"input_ids": given["input_ids"][:, -1:]} | made

    axes = mask | {"input_ids": {0: BATCH, 1: TARGET}, "encoder_hidden_states": source}
    own, memory = {0: BATCH, 2: PAST}, ({0: BATCH} if hears else {0: BATCH, 2: SOURCE})
    cached = _cached(model.config, "decoder", "past_key_values"), _cached(model.config, "encoder", "past_key_values")
    # Layer by layer, as the outputs: optimum fills the inputs of caches by their place, not by their name.
    names: dict[str, Any] = {}
    for of_own, of_memory in zip(*cached, strict=True):
        names |= dict.fromkeys(of_own, own) | dict.fromkeys(of_memory, memory)
    return [
        Graph("decoder_model", first, first_inputs, axes, limits),
        Graph("decoder_with_past_model", step, step_inputs, mask | {"input_ids": {0: BATCH}} | names, limits),
    ]


def _cached(config: Any, part: str, prefix: str) -> list[list[str]]:
    """Return the names of what the cache of "decoder" or "encoder" tokens holds, a list for each layer."""
    layers = config.layer_count("num_key_value_heads")
    kinds = []
    for layer in range(layers):
        if part == "encoder" and config.cross_kv_lora_rank is not None:
            kinds.append(["key"] if layer == 0 else [])
        else:
            is_latent = part == "decoder" and config.layer_value("kv_lora_rank", layer) is not None
            kinds.append(["key"] if is_latent else ["key", "value"])
    return [[f"{prefix}.{layer}.{part}.{kind}" for kind in each] for layer, each in enumerate(kinds)]


def _filled_cache(config: Any, part: str, inputs: Tensors) -> DynamicCache:
    layers = [[inputs[name] for name in names] for names in _cached(config, part, "past_key_values") if names]
    # A latent has values of no width.
    return DynamicCache([(each[0], each[1] if len(each) > 1 else each[0][..., :0]) for each in layers])


def _cache_tensors(config: Any, parts: tuple[str, ...], cache: EncoderDecoderCache) -> Tensors:
    caches = {"decoder": cache.self_attention_cache, "encoder": cache.cross_attention_cache}
    names = [_cached(config, part, "present") for part in parts]
    found = {}
    for layer, by_part in enumerate(zip(*names, strict=True)):
        for part, each in zip(parts, by_part, strict=True):
            for name in each:
                found[name] = getattr(caches[part].layers[layer], f"{name.rpartition('.')[2]}s")
    return found


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _text(model: PreTrainedModel, *shape: int) -> Tensors:
    """Return random tokens, the last one of the first text padding."""
    tokens = torch.randint(0, model.config.vocab_size, shape, generator=_generator())
    mask = torch.ones(shape, dtype=torch.long)
    mask.view(-1, shape[-1])[0, 1:][-1:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": torch.zeros_like(tokens)}


def _features(model: PreTrainedModel, sizes: Sizes) -> Tensors:
    shape = (sizes.batch, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    return {"input_features": torch.randn(shape, generator=_generator())}
