"""What CTranslate2 calls a model: its specification, filled with the tensors of one of this package's models.

An attention has key/value heads of its own there (`num_heads_kv`), in each layer, in self- and cross-attention.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from ctranslate2.specs import Activation, TransformerDecoderSpec, TransformerEncoderSpec, TransformerSpec, WhisperSpec
from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES

from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from .ctranslate2_check import ACTIVATIONS, Tokens

__all__ = ["QUANTIZATIONS", "model_specification"]

# What a token that is never written has for a bias: every dtype knows the number, and no softmax sees the token.
NEVER = -1e4
# How the tables of positions begin: with rows for padding, which CTranslate2 has none of.
PADDING_ROWS = {"bart": 2, "mbart": 2}
QUANTIZATIONS: tuple[str, ...] = ACCEPTED_MODEL_TYPES
TensorsByName = dict[str, torch.Tensor]


def model_specification(model: AttnVariantModelMixin, tokens: Tokens, model_type: str) -> Any:
    """Return the specification of a model with its vocabulary, whole.

    Args:
        model: an encoder-decoder of `SPECIFIED` that generates, in float32. Tensors are its own memory, and a
            quantisation changes them.
        tokens: its tokens.
        model_type: upstream's, for config.json: by it transformers finds the tokenizer.
    """
    config: Any = model.config
    host = config.upstream_model_types[0]
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    make: Callable[[Any, TensorsByName, str], Any] = {"t5": _t5, "umt5": _t5, "whisper": _whisper}.get(host, _bart)
    spec = make(config, tensors, host)
    for site, path, attention in model.named_attentions():
        layer = getattr(spec, site.stack_of(config)).layer[site.layer(config, path)]
        part = layer.attention if site.is_cross_attention else layer.self_attention
        part.num_heads_kv = np.int32(site.heads(config, path).key)
        query, key, value, output = (attention.get_submodule(name) for name in site.projections.values())
        groups = ([query], [key, value]) if site.is_cross_attention else ([query, key, value],)
        for linear, maps in zip(part.linear, (*groups, [output]), strict=True):
            linear.weight = torch.cat([each.weight.detach() for each in maps])
            if (bias := _joined_bias(maps)) is not None:
                linear.bias = bias
    spec.decoder.projection.weight = model.get_output_embeddings().weight.detach()
    if host == "whisper":
        _name_whispers_tokens(spec, tokens, config, model.generation_config)
    else:
        bias = tensors.get("final_logits_bias", torch.zeros(1, len(tokens.vocabulary))).flatten().clone()
        bias[tokens.never] = NEVER
        if bias.any():
            spec.decoder.projection.bias = bias
        _name_tokens(spec, tokens)
    spec.config.add_attribute("model_type", model_type)
    spec.validate()
    return spec


def _name_tokens(spec: Any, tokens: Tokens) -> None:
    spec.register_source_vocabulary(tokens.vocabulary)
    spec.register_target_vocabulary(tokens.vocabulary)
    start, end = tokens.texts([tokens.prompt[0], tokens.end])
    spec.config.decoder_start_token = spec.config.bos_token = start
    spec.config.eos_token, spec.config.unk_token = end, tokens.unknown


def _name_whispers_tokens(spec: Any, tokens: Tokens, config: Any, generation: Any) -> None:
    spec.register_vocabulary(tokens.vocabulary)
    spec.config.suppress_ids, spec.config.suppress_ids_begin = tokens.never, tokens.never_first
    spec.config.lang_ids = sorted((getattr(generation, "lang_to_id", None) or {}).values())
    heads = getattr(generation, "alignment_heads", None)
    # Where nobody has said which heads follow the sound: all of the upper half, as CTranslate2's own converter has it.
    upper = range(config.decoder_layers // 2, config.decoder_layers)
    spec.config.alignment_heads = heads or [*map(list, product(upper, range(config.decoder_attention_heads)))]


def _joined_bias(maps: list[Any]) -> torch.Tensor | None:
    """Return the biases of linear maps one after the other; zeros for one without (Whisper's keys have none)."""
    if all(each.bias is None for each in maps):
        return None
    return torch.cat(
        [each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias.detach() for each in maps]
    )


def _t5(config: Any, tensors: TensorsByName, host: str) -> Any:
    """T5, mT5 and UMT5."""
    options: dict[str, Any] = {
        "activation": getattr(Activation, ACTIVATIONS[config.dense_act_fn]),
        "ffn_glu": config.is_gated_act,
        "rms_norm": True,
        "relative_attention_bias": True,
        "num_heads_kv": config.num_heads,
        "head_dim": config.d_kv,
    }
    spec = TransformerSpec(
        TransformerEncoderSpec(config.num_layers, config.num_heads, **options),
        TransformerDecoderSpec(config.num_decoder_layers, config.num_heads, **options),
    )
    spec.config.layer_norm_epsilon = config.layer_norm_epsilon
    if config.scale_decoder_outputs:
        spec.decoder.scale_outputs = np.float32(config.d_model**-0.5)
    for name, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        _set_embeddings(stack, tensors[f"{name}.embed_tokens.weight"], False)
        stack.layer_norm.gamma = tensors[f"{name}.final_layer_norm.weight"]
        for number, layer in enumerate(stack.layer):
            parts = [layer.self_attention, *([layer.attention] if name == "decoder" else []), layer.ffn]
            for at, part in enumerate(parts):
                part.layer_norm.gamma = tensors[f"{name}.block.{number}.layer.{at}.layer_norm.weight"]
            inner = f"{name}.block.{number}.layer.{len(parts) - 1}.DenseReluDense"
            first, gate = ("wi_0", "wi_1") if config.is_gated_act else ("wi", None)
            layer.ffn.linear_0.weight, layer.ffn.linear_1.weight = (
                tensors[f"{inner}.{at}.weight"] for at in (first, "wo")
            )
            if gate is not None:
                layer.ffn.linear_0_noact.weight = tensors[f"{inner}.{gate}.weight"]
            # T5's layers share the first one's positions; UMT5's have their own.
            own = number if host == "umt5" else 0
            positions = f"{name}.block.{own}.layer.0.SelfAttention.relative_attention_bias.weight"
            layer.self_attention.relative_attention_bias = tensors[positions]
            layer.self_attention.relative_attention_max_distance = np.int32(config.relative_attention_max_distance)
            for part in parts[:-1]:
                part.queries_scale = np.float32(1.0)
    return spec


def _bart(config: Any, tensors: TensorsByName, host: str) -> Any:
    """BART, mBART, Marian, M2M100 and PEGASUS."""
    options: dict[str, Any] = {
        # Whoever normalises before an attention normalises once more at the end.
        "pre_norm": "model.encoder.layer_norm.weight" in tensors,
        "layernorm_embedding": "model.encoder.layernorm_embedding.weight" in tensors,
        "activation": getattr(Activation, ACTIVATIONS[config.activation_function]),
    }
    encoder_heads, decoder_heads = config.encoder_attention_heads, config.decoder_attention_heads
    spec = TransformerSpec(
        TransformerEncoderSpec(config.encoder_layers, encoder_heads, num_heads_kv=encoder_heads, **options),
        TransformerDecoderSpec(config.decoder_layers, decoder_heads, num_heads_kv=decoder_heads, **options),
    )
    for name, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        scale = float(config.d_model**0.5) if config.scale_embedding else False
        _set_embeddings(stack, tensors[f"model.{name}.embed_tokens.weight"], scale)
        if host == "m2m_100":
            table, padding = tensors[f"model.{name}.embed_positions.weights"], config.pad_token_id + 1
        else:
            table, padding = tensors[f"model.{name}.embed_positions.weight"], PADDING_ROWS.get(host, 0)
        stack.position_encodings.encodings = table[padding:]
        if options["layernorm_embedding"]:
            _set_norm(stack.layernorm_embedding, tensors, f"model.{name}.layernorm_embedding")
        if options["pre_norm"]:
            _set_norm(stack.layer_norm, tensors, f"model.{name}.layer_norm")
        _set_bart_layers(stack, tensors, f"model.{name}")
    return spec


def _whisper(config: Any, tensors: TensorsByName, host: str) -> Any:
    """Whisper, whose encoder begins with two convolutions."""
    encoder_heads, decoder_heads = config.encoder_attention_heads, config.decoder_attention_heads
    spec = WhisperSpec(config.encoder_layers, encoder_heads, config.decoder_layers, decoder_heads)
    # Upstream's specification of it has no word for key/value heads; that of other models has, and the same parts.
    options: dict[str, Any] = {"activation": getattr(Activation, ACTIVATIONS[config.activation_function])}
    spec.encoder.layer = TransformerEncoderSpec(
        config.encoder_layers, encoder_heads, num_heads_kv=encoder_heads, **options
    ).layer
    spec.decoder = TransformerDecoderSpec(config.decoder_layers, decoder_heads, num_heads_kv=decoder_heads, **options)
    _set_embeddings(spec.decoder, tensors["model.decoder.embed_tokens.weight"], False)
    for name in ("conv1", "conv2"):
        part = getattr(spec.encoder, name)
        part.weight, part.bias = (tensors[f"model.encoder.{name}.{kind}"] for kind in ("weight", "bias"))
    for name, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        stack.position_encodings.encodings = tensors[f"model.{name}.embed_positions.weight"]
        _set_norm(stack.layer_norm, tensors, f"model.{name}.layer_norm")
        _set_bart_layers(stack, tensors, f"model.{name}")
    return spec


def _set_bart_layers(stack: Any, tensors: TensorsByName, name: str) -> None:
    for number, layer in enumerate(stack.layer):
        base = f"{name}.layers.{number}"
        _set_norm(layer.self_attention.layer_norm, tensors, f"{base}.self_attn_layer_norm")
        if hasattr(layer, "attention"):
            _set_norm(layer.attention.layer_norm, tensors, f"{base}.encoder_attn_layer_norm")
        _set_norm(layer.ffn.layer_norm, tensors, f"{base}.final_layer_norm")
        for (part, linear), kind in product(
            (("fc1", layer.ffn.linear_0), ("fc2", layer.ffn.linear_1)), ("weight", "bias")
        ):
            setattr(linear, kind, tensors[f"{base}.{part}.{kind}"])


def _set_norm(norm: Any, tensors: TensorsByName, name: str) -> None:
    norm.gamma, norm.beta = tensors[f"{name}.weight"], tensors[f"{name}.bias"]


def _set_embeddings(stack: Any, weight: torch.Tensor, scale: float | bool) -> None:
    """Set the table of tokens and the factor of its rows; False: none."""
    embeddings = stack.embeddings[0] if isinstance(stack.embeddings, list) else stack.embeddings
    embeddings.weight, stack.scale_embeddings = weight, scale
