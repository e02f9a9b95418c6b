"""CTranslate2 specifications that are filled with the tensors of models of this package.

In CTranslate2, each self-attention and cross-attention of each layer has its own number of key/value heads
(`num_heads_kv`).
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

# The bias of tokens that are never generated. All dtypes can represent it, and the softmax of it is 0.
FORBIDDEN_BIAS = -1e4
# The number of first rows of a position table that are for padding and do not exist in CTranslate2.
PADDING_ROWS = {"bart": 2, "mbart": 2}
QUANTIZATIONS: tuple[str, ...] = ACCEPTED_MODEL_TYPES
TensorsByName = dict[str, torch.Tensor]


def model_specification(model: AttnVariantModelMixin, tokens: Tokens, model_type: str) -> Any:
    """Return the complete specification of a model, with its vocabulary.

    Args:
        model: A float32 encoder-decoder of the `SUPPORTED_MODEL_TYPES` that generates. The specification shares the
            memory of its tensors, so that a quantization changes them.
        tokens: The tokens of the model.
        model_type: The Transformers model type for the `config.json`, with which Transformers finds the tokenizer.
    """
    config: Any = model.config
    architecture = config.transformers_model_types[0]
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    make: Callable[[Any, TensorsByName, str], Any] = {
        "t5": _make_t5_spec,
        "umt5": _make_t5_spec,
        "whisper": _make_whisper_spec,
    }.get(architecture, _make_bart_spec)
    spec = make(config, tensors, architecture)
    for site, path, attention in model.named_attentions():
        layer = getattr(spec, site.get_stack_name(config)).layer[site.get_layer_index(config, path)]
        part = layer.attention if site.is_cross_attention else layer.self_attention
        part.num_heads_kv = np.int32(site.get_heads(config, path).key)
        query, key, value, output = (attention.get_submodule(name) for name in site.projections.values())
        groups = ([query], [key, value]) if site.is_cross_attention else ([query, key, value],)
        for linear, projections in zip(part.linear, (*groups, [output]), strict=True):
            linear.weight = torch.cat([projection.weight.detach() for projection in projections])
            if (bias := _joined_bias(projections)) is not None:
                linear.bias = bias
    spec.decoder.projection.weight = model.get_output_embeddings().weight.detach()
    if architecture == "whisper":
        _register_whisper_tokens(spec, tokens, config, model.generation_config)
    else:
        bias = tensors.get("final_logits_bias", torch.zeros(1, len(tokens.vocabulary))).flatten().clone()
        bias[tokens.never] = FORBIDDEN_BIAS
        if bias.any():
            spec.decoder.projection.bias = bias
        _register_tokens(spec, tokens)
    spec.config.add_attribute("model_type", model_type)
    spec.validate()
    return spec


def _register_tokens(spec: Any, tokens: Tokens) -> None:
    """Set the vocabulary and the special tokens of a specification."""
    spec.register_source_vocabulary(tokens.vocabulary)
    spec.register_target_vocabulary(tokens.vocabulary)
    start, end = tokens.texts([tokens.prompt[0], tokens.end])
    spec.config.decoder_start_token = spec.config.bos_token = start
    spec.config.eos_token, spec.config.unk_token = end, tokens.unknown


def _register_whisper_tokens(spec: Any, tokens: Tokens, config: Any, generation: Any) -> None:
    """Set the vocabulary, the forbidden tokens, the languages and the alignment heads of a Whisper specification."""
    spec.register_vocabulary(tokens.vocabulary)
    spec.config.suppress_ids, spec.config.suppress_ids_begin = tokens.never, tokens.never_first
    spec.config.lang_ids = sorted((getattr(generation, "lang_to_id", None) or {}).values())
    heads = getattr(generation, "alignment_heads", None)
    # The default is all heads of the upper half of the layers, as in the converter of CTranslate2.
    upper = range(config.decoder_layers // 2, config.decoder_layers)
    spec.config.alignment_heads = heads or [*map(list, product(upper, range(config.decoder_attention_heads)))]


def _joined_bias(linears: list[Any]) -> torch.Tensor | None:
    """Return the concatenated biases of linear layers, or None if no layer has a bias.

    The bias of a layer without bias (the key projection of Whisper) is 0.
    """
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
    )


def _make_t5_spec(config: Any, tensors: TensorsByName, architecture: str) -> Any:
    """Return the specification of a T5, mT5 or UMT5 model, without attention projections."""
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
            for index, part in enumerate(parts):
                part.layer_norm.gamma = tensors[f"{name}.block.{number}.layer.{index}.layer_norm.weight"]
            inner = f"{name}.block.{number}.layer.{len(parts) - 1}.DenseReluDense"
            first, gate = ("wi_0", "wi_1") if config.is_gated_act else ("wi", None)
            layer.ffn.linear_0.weight, layer.ffn.linear_1.weight = (
                tensors[f"{inner}.{linear}.weight"] for linear in (first, "wo")
            )
            if gate is not None:
                layer.ffn.linear_0_noact.weight = tensors[f"{inner}.{gate}.weight"]
            # The layers of T5 share the relative positions of the first layer. Each layer of UMT5 has its own.
            positions_layer = number if architecture == "umt5" else 0
            positions = f"{name}.block.{positions_layer}.layer.0.SelfAttention.relative_attention_bias.weight"
            layer.self_attention.relative_attention_bias = tensors[positions]
            layer.self_attention.relative_attention_max_distance = np.int32(config.relative_attention_max_distance)
            for part in parts[:-1]:
                part.queries_scale = np.float32(1.0)
    return spec


def _make_bart_spec(config: Any, tensors: TensorsByName, architecture: str) -> Any:
    """Return the specification of a BART, mBART, Marian, M2M100 or PEGASUS model, without attention projections."""
    options: dict[str, Any] = {
        # Models with normalization before the attention have a final norm.
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
        if architecture == "m2m_100":
            table, padding = tensors[f"model.{name}.embed_positions.weights"], config.pad_token_id + 1
        else:
            table, padding = tensors[f"model.{name}.embed_positions.weight"], PADDING_ROWS.get(architecture, 0)
        stack.position_encodings.encodings = table[padding:]
        if options["layernorm_embedding"]:
            _set_norm(stack.layernorm_embedding, tensors, f"model.{name}.layernorm_embedding")
        if options["pre_norm"]:
            _set_norm(stack.layer_norm, tensors, f"model.{name}.layer_norm")
        _set_bart_layers(stack, tensors, f"model.{name}")
    return spec


def _make_whisper_spec(config: Any, tensors: TensorsByName, architecture: str) -> Any:
    """Return the specification of a Whisper model, without attention projections."""
    encoder_heads, decoder_heads = config.encoder_attention_heads, config.decoder_attention_heads
    spec = WhisperSpec(config.encoder_layers, encoder_heads, config.decoder_layers, decoder_heads)
    # `WhisperSpec` does not support key/value heads, but the layers of the other specifications do and are the same.
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
    """Set the norms and feed-forward layers of the encoder or decoder with a name."""
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
    """Set the weight and the bias of a layer norm."""
    norm.gamma, norm.beta = tensors[f"{name}.weight"], tensors[f"{name}.bias"]


def _set_embeddings(stack: Any, weight: torch.Tensor, scale: float | bool) -> None:
    """Set the token embeddings and their factor. False means no factor."""
    embeddings = stack.embeddings[0] if isinstance(stack.embeddings, list) else stack.embeddings
    embeddings.weight, stack.scale_embeddings = weight, scale
