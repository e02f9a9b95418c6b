"""Exports checkpoints to CTranslate2, an inference engine that does not require PyTorch or this package."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from ..conversion.attention_tensors import MeanPooling
from ..conversion.checkpoint.models import build_model_from_tensors, load_checkpoint_tokenizer
from ..conversion.checkpoint.source import (
    copy_auxiliary_files,
    list_auxiliary_files,
    read_config,
    resolve_checkpoint_folder,
)
from ..conversion.checkpoint.tensor_files import TensorEntry, open_checkpoint
from ..conversion.plan import ConversionPlan, make_plan
from ..conversion.writing import compute_converted_tensors, read_generation_config, write_class_names
from ..files import CONFIG_NAME, check_disk_space, check_output_dir, staged_folder
from ..inspection.costs import get_values_by_layer, list_used_fields, resolve_source_model
from ..modeling.attention.model_mixin import AttnVariantModelMixin
from .ctranslate2_check import (
    ACTIVATIONS,
    Agreement,
    TokenizerVocab,
    check_ctranslate2_support,
    describe_translator_usage,
    describe_whisper_usage,
    generate_greedily,
    generate_with_ctranslate2,
    get_max_generated_tokens,
    list_unsupported_settings,
    make_random_inputs,
    read_tokenizer_vocab,
)
from .folding import FOLDED_FIELDS, fold_extensions
from .plain import get_transformers_class_name, should_export_file

FLOAT32 = "float32"
# The number of bytes per weight for each quantization type. All other types use one byte.
BYTES_PER_WEIGHT = {FLOAT32: 4, "float16": 2, "bfloat16": 2, "int16": 2}


@dataclass(frozen=True)
class CTranslate2Export:
    """The result of `export_ctranslate2`.

    Args:
        output_dir: The output folder.
        architecture: The name of the Transformers class of the model.
        quantization: The quantization type of the weights, as named in CTranslate2.
        heads: {key/value head field: (query heads, key/value heads)}. The second value is a list if the layers differ.
        agreement: The comparison between the outputs of CTranslate2 and the model for random inputs.
        usage: Python code that uses the exported model.
        unexported_settings: The generation settings that are neither in the exported files nor in `usage`.
    """

    output_dir: str
    architecture: str
    quantization: str
    heads: dict[str, tuple[int, Any]]
    agreement: Agreement
    usage: str
    unexported_settings: dict[str, Any]

    def summary(self) -> str:
        """Return a printable summary."""
        lines = [f"Wrote {self.output_dir}: {self.architecture} for CTranslate2, {self.quantization}"]
        lines += [f"  {name:<27} {count} of {query}" for name, (query, count) in self.heads.items()]
        agreement, label = self.agreement, f"  {'comparison':<27}"
        tokens = f"{agreement.same_tokens} of {agreement.tokens}"
        if self.quantization == FLOAT32:
            lines.append(f"{label} {tokens} greedy tokens for {agreement.inputs} inputs are identical to the model's")
        else:
            lines += [
                f"{label} {agreement.same} of {agreement.inputs} greedy outputs are identical to the model's "
                f"({tokens} tokens up to the first difference)",
                f"  {'':<27} {self.quantization} rounds the weights, and these inputs are random, so check the "
                "quality on your own data",
            ]
        if self.unexported_settings:
            settings = ", ".join(f"{name}={value!r}" for name, value in self.unexported_settings.items())
            lines.append(f"  {'settings not exported':<27} {settings} (generation_config.json)")
        return "\n".join([*lines, "Use it as follows:", *(f"  {line}" for line in self.usage.splitlines())])


def export_ctranslate2(
    model_name_or_path: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    quantization: str = FLOAT32,
    allow_pickle: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
) -> CTranslate2Export:
    """Export a checkpoint from this package or Transformers to CTranslate2, including its tokenizer files.

    The greedy outputs of CTranslate2 are compared with those of the model before the output folder is created.

    Args:
        model_name_or_path: A checkpoint folder or a Hub id.
        output_dir: A new or empty folder.
        quantization: The quantization type of the weights, such as "float32" or "int8".
        allow_pickle, revision, token: See `convert_checkpoint`.

    Returns:
        A description of the export, with Python code that uses the exported model.

    Raises:
        ValueError: If CTranslate2 is not installed or does not support the model, or its float32 outputs differ.
        OSError: If a file is missing or cannot be written.

    Example:
        >>> print(export_ctranslate2("t5-gqa4", "t5-ct2", quantization="int8").summary())
    """
    _check_quantization(quantization)
    check_output_dir(output_dir)
    folder = resolve_checkpoint_folder(model_name_or_path, revision, token, allow_pickle)
    output = check_output_dir(output_dir, source=folder)
    config = read_config(folder)
    check_ctranslate2_support(*resolve_source_model({k: v for k, v in config.items() if k not in FOLDED_FIELDS}))
    tokenizer = load_checkpoint_tokenizer(folder, ", from which the CTranslate2 vocabulary is built.")
    with open_checkpoint(folder, allow_pickle) as reader:
        folded_reader, config = fold_extensions(reader, config)
        plan = _plan_without_latents(config, folded_reader.entries, folder / CONFIG_NAME)
        generation = read_generation_config(plan, folder) or GenerationConfig.from_model_config(plan.config)
        tokens = read_tokenizer_vocab(tokenizer, plan.config, generation)
        copied, _ = list_auxiliary_files(folder, reader.files)
        check_disk_space(output, BYTES_PER_WEIGHT.get(quantization, 1) * sum(e.numel for e in reader.entries.values()))
        tensors = compute_converted_tensors(plan, folded_reader, {})
    model = build_model_from_tensors(plan.model_class, plan.config, tensors, folder, dtype=torch.float32).eval()
    model.generation_config = generation
    inputs = make_random_inputs(model, tokenizer)
    expected = generate_greedily(model, inputs, tokens)  # before quantization changes the model's weights
    types = plan.config.transformers_model_types
    model_type = config["model_type"] if config["model_type"] in types else types[0]
    spec = build_model_specification(model, tokens, model_type)
    spec.optimize(quantization=quantization)
    with staged_folder(output) as stage:
        copy_auxiliary_files(folder, stage, [name for name in copied if should_export_file(folder, name)])
        write_class_names(stage, config | {"model_type": model_type})
        spec.save(os.fspath(stage))
        _check_copied_tokenizer(stage, tokenizer.get_vocab())
        limit = get_max_generated_tokens(model, tokens)
        agreement = Agreement.compare(expected, generate_with_ctranslate2(stage, inputs, tokens, limit, quantization))
        _check_agreement(agreement, tokens, quantization)
    return _describe_export(os.fspath(output_dir), model, tokens, quantization, agreement)


def _check_quantization(quantization: str) -> None:
    """Raise a `ValueError` if CTranslate2 is not installed or does not support a quantization type."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise ValueError("Export to CTranslate2 requires the ctranslate2 package. Run `pip install ctranslate2`.")
    from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES

    if quantization not in ACCEPTED_MODEL_TYPES:
        raise ValueError(f"`quantization` must be one of {', '.join(ACCEPTED_MODEL_TYPES)}, got {quantization!r}.")


def _plan_without_latents(
    config: Mapping[str, Any], entries: Mapping[str, TensorEntry], config_file: Path
) -> ConversionPlan:
    """Plan a conversion to float32 that removes all latents which are narrower than their input."""
    model_class, model_config = resolve_source_model(config)
    fields = {}
    for name in list_used_fields(model_class, model_config):
        ranks = get_values_by_layer(model_config, name) if name in model_config.get_rank_fields() else []
        if any(rank not in (None, model_config.hidden_size) for rank in ranks):
            fields[name] = model_config.hidden_size
    return make_plan(config, entries, MeanPooling(), fields, dtype=torch.float32, config_file=config_file)


def _check_copied_tokenizer(stage: Path, vocabulary: dict[str, int]) -> None:
    """Raise a `ValueError` if the tokenizer in the copied files does not have the original vocabulary."""
    if load_checkpoint_tokenizer(stage, ": the copied files are not sufficient.").get_vocab() != vocabulary:
        raise ValueError(
            "The copied tokenizer has different tokens than the original one. Save the original tokenizer with "
            "`save_pretrained` first."
        )


def _check_agreement(agreement: Agreement, vocab: TokenizerVocab, quantization: str) -> None:
    """Raise a `ValueError` if CTranslate2 with float32 weights does not generate the same tokens as the model."""
    if quantization != FLOAT32 or agreement.first is None:
        return
    number, position, *pair = agreement.first
    expected, actual = (repr(vocab.vocabulary[token]) if token >= 0 else "nothing" for token in pair)
    raise ValueError(
        f"CTranslate2 generates different tokens than the model for {agreement.inputs - agreement.same} of "
        f"{agreement.inputs} inputs. Token {position + 1} of input {number + 1} must be {expected}, got {actual}."
    )


def _describe_export(
    output_dir: str, model: AttnVariantModelMixin, vocab: TokenizerVocab, quantization: str, agreement: Agreement
) -> CTranslate2Export:
    """Collect the description of an export, including the code that uses it."""
    config, heads = model.config, {}
    for name in config.get_kv_heads_fields():
        counts = get_values_by_layer(config, name)
        heads[name] = config.get_query_heads(name), counts if len({*counts}) > 1 else getattr(config, name)
    generation, reads_audio = model.generation_config, model.main_input_name == "input_features"
    describe_usage = describe_whisper_usage if reads_audio else describe_translator_usage
    usage = describe_usage(output_dir, vocab, generation, config)
    architecture = get_transformers_class_name(type(model))
    unexported = list_unsupported_settings(generation, reads_audio)
    return CTranslate2Export(output_dir, architecture, quantization, heads, agreement, usage, unexported)


# The bias of tokens that are never generated. All dtypes can represent this value, and its softmax is 0.
FORBIDDEN_BIAS = -1e4
# The number of leading rows in a table of position embeddings that do not exist in CTranslate2.
PADDING_ROWS = {"bart": 2, "mbart": 2}
TensorsByName = dict[str, torch.Tensor]


def build_model_specification(model: AttnVariantModelMixin, vocab: TokenizerVocab, model_type: str) -> Any:
    """Build the CTranslate2 specification of a model, including its weights and vocabulary.

    Args:
        model: A float32 encoder-decoder that generates text, with one of the `SUPPORTED_MODEL_TYPES`. The
            specification shares memory with the model's tensors, so quantization changes them.
        vocab: The vocabulary and special tokens of the model.
        model_type: The model type to store in `config.json`, with which Transformers finds the tokenizer.
    """
    config: Any = model.config
    architecture = config.transformers_model_types[0]
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    makers = {"t5": _make_t5_spec, "umt5": _make_t5_spec, "whisper": _make_whisper_spec}
    spec = makers.get(architecture, _make_bart_spec)(config, tensors, architecture)
    for site, path, attention in model.named_attention_modules():
        layer = getattr(spec, site.get_stack_name(config)).layer[site.get_layer_index(config, path)]
        part = layer.attention if site.is_cross_attention else layer.self_attention
        part.num_heads_kv = np.int32(site.get_heads(config, path).key)
        query, key, value, output = (attention.get_submodule(name) for name in site.projections.values())
        groups = ([query], [key, value]) if site.is_cross_attention else ([query, key, value],)
        for linear, projections in zip(part.linear, (*groups, [output]), strict=True):
            linear.weight = torch.cat([projection.weight.detach() for projection in projections])
            if (bias := _concatenate_biases(projections)) is not None:
                linear.bias = bias
    spec.decoder.projection.weight = model.get_output_embeddings().weight.detach()
    if architecture == "whisper":
        _register_whisper_tokens(spec, vocab, config, model.generation_config)
    else:
        bias = tensors.get("final_logits_bias", torch.zeros(1, len(vocab.vocabulary))).flatten().clone()
        bias[vocab.suppressed_tokens] = FORBIDDEN_BIAS
        if bias.any():
            spec.decoder.projection.bias = bias
        spec.register_source_vocabulary(vocab.vocabulary)
        spec.register_target_vocabulary(vocab.vocabulary)
        start, spec.config.eos_token = vocab.get_texts([vocab.prompt[0], vocab.end])
        spec.config.decoder_start_token = spec.config.bos_token = start
        spec.config.unk_token = vocab.unknown
    spec.config.add_attribute("model_type", model_type)
    spec.validate()
    return spec


def _register_whisper_tokens(spec: Any, vocab: TokenizerVocab, config: Any, generation: Any) -> None:
    """Set the vocabulary, forbidden tokens, languages and alignment heads in a Whisper specification."""
    spec.register_vocabulary(vocab.vocabulary)
    spec.config.suppress_ids = vocab.suppressed_tokens
    spec.config.suppress_ids_begin = vocab.initially_suppressed_tokens
    spec.config.lang_ids = sorted((getattr(generation, "lang_to_id", None) or {}).values())
    heads = getattr(generation, "alignment_heads", None)
    # As in CTranslate2's converter, the default is all heads in the upper half of the layers.
    upper = range(config.decoder_layers // 2, config.decoder_layers)
    spec.config.alignment_heads = heads or [*map(list, product(upper, range(config.decoder_attention_heads)))]


def _concatenate_biases(linears: list[Any]) -> torch.Tensor | None:
    """Concatenate the biases of linear layers, or return None if none of them has a bias.

    For layers without a bias (Whisper's key projection), zeros are inserted.
    """
    if all(linear.bias is None for linear in linears):
        return None
    biases = (
        linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears
    )
    return torch.cat([bias.detach() for bias in biases])


def _make_t5_spec(config: Any, tensors: TensorsByName, architecture: str) -> Any:
    """Build the specification of a T5, mT5 or UMT5 model without its attention projections."""
    from ctranslate2 import specs

    options: dict[str, Any] = {
        "activation": getattr(specs.Activation, ACTIVATIONS[config.dense_act_fn]),
        "ffn_glu": config.is_gated_act,
        "rms_norm": True,
        "relative_attention_bias": True,
        "num_heads_kv": config.num_heads,
        "head_dim": config.d_kv,
    }
    spec = specs.TransformerSpec(
        specs.TransformerEncoderSpec(config.num_layers, config.num_heads, **options),
        specs.TransformerDecoderSpec(config.num_decoder_layers, config.num_heads, **options),
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
            feed_forward_name = f"{name}.block.{number}.layer.{len(parts) - 1}.DenseReluDense"
            first = "wi_0" if config.is_gated_act else "wi"
            layer.ffn.linear_0.weight = tensors[f"{feed_forward_name}.{first}.weight"]
            layer.ffn.linear_1.weight = tensors[f"{feed_forward_name}.wo.weight"]
            if config.is_gated_act:
                layer.ffn.linear_0_noact.weight = tensors[f"{feed_forward_name}.wi_1.weight"]
            # All layers of T5 share the relative position bias of the first layer, but each layer of UMT5 has its own.
            positions_layer = number if architecture == "umt5" else 0
            positions = f"{name}.block.{positions_layer}.layer.0.SelfAttention.relative_attention_bias.weight"
            layer.self_attention.relative_attention_bias = tensors[positions]
            layer.self_attention.relative_attention_max_distance = np.int32(config.relative_attention_max_distance)
            for part in parts[:-1]:
                part.queries_scale = np.float32(1.0)
    return spec


def _make_bart_spec(config: Any, tensors: TensorsByName, architecture: str) -> Any:
    """Build the specification of a BART, mBART, Marian, M2M100 or PEGASUS model without its attention projections."""
    from ctranslate2 import specs

    options: dict[str, Any] = {
        # Models with a final norm normalize the input of each layer (pre-norm).
        "pre_norm": "model.encoder.layer_norm.weight" in tensors,
        "layernorm_embedding": "model.encoder.layernorm_embedding.weight" in tensors,
        "activation": getattr(specs.Activation, ACTIVATIONS[config.activation_function]),
    }
    encoder_heads, decoder_heads = config.encoder_attention_heads, config.decoder_attention_heads
    spec = specs.TransformerSpec(
        specs.TransformerEncoderSpec(config.encoder_layers, encoder_heads, num_heads_kv=encoder_heads, **options),
        specs.TransformerDecoderSpec(config.decoder_layers, decoder_heads, num_heads_kv=decoder_heads, **options),
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
    """Build the specification of a Whisper model without its attention projections."""
    from ctranslate2 import specs

    encoder_heads, decoder_heads = config.encoder_attention_heads, config.decoder_attention_heads
    spec = specs.WhisperSpec(config.encoder_layers, encoder_heads, config.decoder_layers, decoder_heads)
    # `WhisperSpec` does not support grouped heads, but the equivalent layers in the other specifications do.
    options: dict[str, Any] = {"activation": getattr(specs.Activation, ACTIVATIONS[config.activation_function])}
    spec.encoder.layer = specs.TransformerEncoderSpec(
        config.encoder_layers, encoder_heads, num_heads_kv=encoder_heads, **options
    ).layer
    spec.decoder = specs.TransformerDecoderSpec(
        config.decoder_layers, decoder_heads, num_heads_kv=decoder_heads, **options
    )
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
    """Set the layer norms and feed-forward layers of the encoder or decoder with the given name."""
    for number, layer in enumerate(stack.layer):
        base = f"{name}.layers.{number}"
        _set_norm(layer.self_attention.layer_norm, tensors, f"{base}.self_attn_layer_norm")
        if hasattr(layer, "attention"):
            _set_norm(layer.attention.layer_norm, tensors, f"{base}.encoder_attn_layer_norm")
        _set_norm(layer.ffn.layer_norm, tensors, f"{base}.final_layer_norm")
        for part, linear in (("fc1", layer.ffn.linear_0), ("fc2", layer.ffn.linear_1)):
            linear.weight, linear.bias = tensors[f"{base}.{part}.weight"], tensors[f"{base}.{part}.bias"]


def _set_norm(norm: Any, tensors: TensorsByName, name: str) -> None:
    """Set the weight and the bias of a layer norm."""
    norm.gamma, norm.beta = tensors[f"{name}.weight"], tensors[f"{name}.bias"]


def _set_embeddings(stack: Any, weight: torch.Tensor, scale: float | bool) -> None:
    """Set the token embeddings and the factor by which they are multiplied (False for no factor)."""
    embeddings = stack.embeddings[0] if isinstance(stack.embeddings, list) else stack.embeddings
    embeddings.weight, stack.scale_embeddings = weight, scale
