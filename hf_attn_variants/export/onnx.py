"""Exports checkpoints to ONNX graphs, which ONNX Runtime runs without PyTorch, Transformers or this package.

An encoder is exported as one graph. An encoder-decoder is exported as three graphs: the encoder, the first decoder
call, which fills both caches, and a decoding step, which reads the caches and one token. A fourth graph, for
transformers.js, contains both decoder graphs. Files and inputs have the same names as in Optimum.

A cache consists of tensors for each layer. The inputs `past_key_values.N.decoder.key` [b, k, n, d] and the outputs
`present.N.decoder.key` contain the self-attention keys of layer N. The names for values contain
`value` instead of `key`. The names for cross-attention, whose cache is only read in a step, contain `encoder` instead
of `decoder`. With latents, `key` contains the latents [b, 1, n, r], and there is no `value`. Latents that all layers
share are stored for layer 0.
"""

import importlib.util
import inspect
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import Dim
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..conversion.checkpoint.source import (
    copy_auxiliary_files,
    list_auxiliary_files,
    read_config,
    resolve_checkpoint_folder,
)
from ..conversion.checkpoint.tensor_files import open_checkpoint
from ..files import CONFIG_NAME, check_disk_space, check_output_dir, load_json, staged_folder
from ..inspection.costs import resolve_source_model
from ..model_properties import get_encoder_width
from ..modeling.attention.model_mixin import AttnVariantModelMixin
from ..modeling.fields.mechanism_fields import has_kernel
from ..modeling.fields.variant_config import supports_decoder_cache
from ..modeling.mechanisms.talking_heads import get_dynamic_terms, supports_cache
from ..modeling.transformers_internals import get_cache, get_cache_name
from ..progress import progress_bar
from ..registration import get_max_input_length
from . import onnx_decoder
from .onnx_decoder import BRANCH_INPUT, get_data_path, merge_decoders
from .onnx_int8 import (
    ComparisonTexts,
    Int8Export,
    compare_decoders,
    compare_encoders,
    compare_with_openvino,
    load_graph,
    make_text_batches,
    quantize_dynamically,
    quantize_statically,
    raise_log_level,
    read_comparison_texts,
)
from .plain import get_transformers_class_name, make_transformers_config, should_export_file

TensorDict = dict[str, torch.Tensor]
# The names of dimensions with variable sizes.
BATCH_AXIS, SEQUENCE_AXIS, CHOICES_AXIS = "batch_size", "sequence_length", "num_choices"
SOURCE_AXIS, TARGET_AXIS, PAST_AXIS = "encoder_sequence_length", "decoder_sequence_length", "past_length"
FIRST_CALL_NAME, STEP_NAME, MERGED_NAME = "decoder_model", "decoder_with_past_model", "decoder_model_merged"


@dataclass(frozen=True)
class ExampleSizes:
    """The sizes of the dimensions of example inputs."""

    batch: int = 2
    choices: int = 2
    source: int = 16
    target: int = 3


@dataclass(frozen=True)
class ExportGraph:
    """A graph to export.

    Args:
        name: The name of the file without extension.
        module: A module that computes a dictionary of outputs from a dictionary of inputs.
        make_inputs: A function that creates example inputs of the given sizes, {name: tensor}.
        axes: The dimensions with variable sizes, {input: {index of the dimension: name}}.
        longest: The maximum sizes of these dimensions, {name: size}. All others are not limited.
    """

    name: str
    module: nn.Module
    make_inputs: Callable[[ExampleSizes], TensorDict]
    axes: dict[str, dict[int, str]]
    longest: dict[str, int]


def build_model_graphs(
    model: AttnVariantModelMixin, pooling: str | None = None, normalize: bool = False
) -> list[ExportGraph]:
    """Build the graphs for a model from this package.

    Args:
        model: The model.
        pooling: If given, an encoder also returns embeddings, pooled with "mean" or "cls".
        normalize: Whether to scale embeddings to unit length.

    Raises:
        ValueError: If the model is neither an encoder nor an encoder-decoder that generates text, or if its decoder
            has no key/value cache.
    """
    config = model.config
    stacks = {site.get_stack_name(config) for site, _, _ in model.named_attention_modules()}
    limits: dict[str, int] = {}
    if (longest := get_max_input_length(config)) is not None:
        limits = dict.fromkeys((SEQUENCE_AXIS, SOURCE_AXIS, TARGET_AXIS), longest) | {PAST_AXIS: longest - 1}
    if stacks == {"encoder"}:
        graph = _build_encoder_graph("model", model, model, SEQUENCE_AXIS, limits)
        if pooling is None:
            return [graph]
        if model.base_model is model and "attention_mask" in graph.axes:
            return [replace(graph, module=_SentenceEncoderForExport(model, pooling, normalize))]
    if pooling is not None:
        raise ValueError(
            f"`pooling` is only supported for text encoders without a head, got "
            f"{get_transformers_class_name(type(model))}. Remove `pooling`."
        )
    name = get_transformers_class_name(type(model))
    if stacks == {"decoder"} or not model.can_generate():
        raise ValueError(
            f"{name} cannot be exported to ONNX. Only encoders with any head and encoder-decoders that generate text "
            "are supported."
        )
    if not supports_decoder_cache(config) or not supports_cache(get_dynamic_terms(config, "cross_")):
        raise ValueError(
            "`talking_heads_dynamic` must not contain m2l or m2w for the decoder in an ONNX export, got "
            f"{sorted({*get_dynamic_terms(config), *get_dynamic_terms(config, 'cross_')})}. They require inputs that "
            "are not in the cache."
        )
    if has_kernel(config, is_causal=True):
        raise ValueError(
            f"`attention_kernel` is not supported for the decoder in an ONNX export, got {config.attention_kernel!r}. "
            "Kernels are supported for encoders and cross-attention."
        )
    encoder_graph = _build_encoder_graph("encoder_model", model, model.get_encoder(), SOURCE_AXIS, limits)
    return [encoder_graph, *_build_decoder_graphs(model, limits)]


class _EncoderForExport(nn.Module):
    """Runs a model or an encoder with a dictionary of inputs."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, inputs: TensorDict) -> TensorDict:
        """Return all output tensors of the model under their Transformers names."""
        outputs = self.model(**inputs, return_dict=True)
        return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


class _SentenceEncoderForExport(nn.Module):
    """Runs an encoder, and pools its last hidden states into one embedding per text."""

    def __init__(self, model: PreTrainedModel, pooling: str, normalize: bool):
        super().__init__()
        self.model, self.pooling, self.normalize = model, pooling, normalize

    def forward(self, inputs: TensorDict) -> TensorDict:
        """Return the embeddings [b, D] and the last hidden states [b, n, D]."""
        states = self.model(**inputs, return_dict=True).last_hidden_state
        if self.pooling == "cls":
            embeddings = states[:, 0]
        else:
            mask = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
            embeddings = (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        if self.normalize:
            embeddings = nn.functional.normalize(embeddings, dim=-1)
        return {"sentence_embedding": embeddings, "last_hidden_state": states}


class _DecoderForExport(nn.Module):
    """Runs the first call of a decoder without a cache, or a decoding step with the tensors of a cache."""

    def __init__(self, model: PreTrainedModel, is_step: bool):
        super().__init__()
        self.model, self.is_step = model, is_step

    def forward(self, inputs: TensorDict) -> TensorDict:
        """Return the logits [b, n, vocabulary] and the cache tensors (in a step, only those for self-attention)."""
        states: Any = inputs.get("encoder_hidden_states")
        cache = None
        if self.is_step:
            caches = (_make_cache(self.model.config, part, inputs) for part in ("decoder", "encoder"))
            cache = EncoderDecoderCache(*caches)
            batch, _, length, _ = inputs["past_key_values.0.encoder.key"].shape
            # Cross-attention reads the cache, so only the length of the encoder outputs matters.
            states = torch.zeros(batch, length, get_encoder_width(self.model.config))
        output = self.model(
            encoder_outputs=BaseModelOutput(states),
            attention_mask=inputs.get("encoder_attention_mask"),
            decoder_input_ids=inputs["input_ids"],
            use_cache=True,
            **{get_cache_name(): cache},
        )
        parts = ("decoder",) if self.is_step else ("decoder", "encoder")
        return {"logits": output.logits} | _collect_cache_tensors(self.model.config, parts, get_cache(output))


def _build_encoder_graph(
    name: str, model: PreTrainedModel, encoder: PreTrainedModel, length_axis: str, limits: dict[str, int]
) -> ExportGraph:
    """Build the graph for an encoder-only model, or for the encoder of an encoder-decoder.

    Args:
        name: The name of the file without extension.
        model: The model.
        encoder: The part of the model to export, which is the model itself if it has only an encoder.
        length_axis: The name of the dimension of tokens.
        limits: The maximum sizes of dimensions.
    """
    reads_audio = model.main_input_name == "input_features"
    has_choices = type(model).__name__.endswith("MultipleChoice")
    names = ["input_features"] if reads_audio else ["input_ids", "attention_mask"]
    # RoBERTa accepts token type ids, but has only one token type.
    if "token_type_ids" in inspect.signature(model.forward).parameters and model.config.type_vocab_size > 1:
        names.append("token_type_ids")
    axes = {0: BATCH_AXIS} if reads_audio else {0: BATCH_AXIS, 1: length_axis}
    if has_choices:
        axes = {0: BATCH_AXIS, 1: CHOICES_AXIS, 2: length_axis}

    def make_inputs(sizes: ExampleSizes) -> TensorDict:
        shape = (sizes.batch, *([sizes.choices] if has_choices else []), sizes.source)
        example = _make_audio_inputs(model, sizes) if reads_audio else _make_text_inputs(model, *shape)
        return {name: example[name] for name in names}

    return ExportGraph(name, _EncoderForExport(encoder), make_inputs, dict.fromkeys(names, axes), limits)


def _build_decoder_graphs(model: PreTrainedModel, limits: dict[str, int]) -> list[ExportGraph]:
    """Build the graphs for the first call of a decoder and for a decoding step."""
    reads_audio = model.main_input_name == "input_features"
    first, step = _DecoderForExport(model, False), _DecoderForExport(model, True)
    source = {0: BATCH_AXIS} if reads_audio else {0: BATCH_AXIS, 1: SOURCE_AXIS}
    mask = {} if reads_audio else {"encoder_attention_mask": source}

    def make_first_inputs(sizes: ExampleSizes) -> TensorDict:
        length = model.config.max_source_positions if reads_audio else sizes.source
        source_text = _make_text_inputs(model, sizes.batch, length)
        target_text = _make_text_inputs(model, sizes.batch, sizes.target)
        states = torch.randn(sizes.batch, length, get_encoder_width(model.config), generator=_make_generator())
        inputs = {"input_ids": target_text["input_ids"], "encoder_hidden_states": states}
        return ({} if reads_audio else {"encoder_attention_mask": source_text["attention_mask"]}) | inputs

    def make_step_inputs(sizes: ExampleSizes) -> TensorDict:
        inputs = make_first_inputs(sizes)
        past = {name.replace("present", "past_key_values"): tensor for name, tensor in first(inputs).items()}
        del past["logits"], inputs["encoder_hidden_states"]
        return inputs | {"input_ids": inputs["input_ids"][:, -1:]} | past

    axes = mask | {"input_ids": {0: BATCH_AXIS, 1: TARGET_AXIS}, "encoder_hidden_states": source}
    self_axes = {0: BATCH_AXIS, 2: PAST_AXIS}
    cross_axes = {0: BATCH_AXIS} if reads_audio else {0: BATCH_AXIS, 2: SOURCE_AXIS}
    names_by_layer = (_list_cache_names(model.config, part, "past_key_values") for part in ("decoder", "encoder"))
    # The inputs have the same order as the outputs because Optimum passes cache inputs by position instead of by name.
    cache_axes: dict[str, Any] = {}
    for self_names, cross_names in zip(*names_by_layer, strict=True):
        cache_axes |= dict.fromkeys(self_names, self_axes) | dict.fromkeys(cross_names, cross_axes)
    return [
        ExportGraph(FIRST_CALL_NAME, first, make_first_inputs, axes, limits),
        ExportGraph(STEP_NAME, step, make_step_inputs, mask | {"input_ids": {0: BATCH_AXIS}} | cache_axes, limits),
    ]


def _list_cache_names(config: Any, cache_type: str, prefix: str) -> list[list[str]]:
    """Return the names of the cache tensors in each layer.

    Args:
        config: The configuration of the model.
        cache_type: "decoder" for self-attention or "encoder" for cross-attention.
        prefix: "past_key_values" for inputs or "present" for outputs.
    """
    layers = config.get_num_layers("num_key_value_heads")
    kinds = []
    for layer in range(layers):
        if cache_type == "encoder" and config.cross_kv_lora_rank is not None:
            kinds.append(["key"] if layer == 0 else [])
        else:
            is_latent = cache_type == "decoder" and config.get_layer_value("kv_lora_rank", layer) is not None
            kinds.append(["key"] if is_latent else ["key", "value"])
    return [[f"{prefix}.{layer}.{cache_type}.{kind}" for kind in names] for layer, names in enumerate(kinds)]


def _make_cache(config: Any, cache_type: str, inputs: TensorDict) -> DynamicCache:
    """Create a Transformers cache from the cache tensors in the inputs (see `_list_cache_names`)."""
    names_by_layer = filter(None, _list_cache_names(config, cache_type, "past_key_values"))
    layers = [[inputs[name] for name in names] for names in names_by_layer]
    # A cache of latents has values of width 0.
    return DynamicCache([(layer[0], layer[1] if len(layer) > 1 else layer[0][..., :0]) for layer in layers])


def _collect_cache_tensors(config: Any, cache_types: tuple[str, ...], cache: EncoderDecoderCache) -> TensorDict:
    """Return the tensors in a Transformers cache, {name: tensor}."""
    caches = {"decoder": cache.self_attention_cache, "encoder": cache.cross_attention_cache}
    names = [_list_cache_names(config, part, "present") for part in cache_types]
    tensors = {}
    for layer, names_by_part in enumerate(zip(*names, strict=True)):
        for part, part_names in zip(cache_types, names_by_part, strict=True):
            for name in part_names:
                tensors[name] = getattr(caches[part].layers[layer], f"{name.rpartition('.')[2]}s")
    return tensors


def _make_generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _make_text_inputs(model: PreTrainedModel, *shape: int) -> TensorDict:
    """Return random text inputs. The last token of the first text is padding."""
    tokens = torch.randint(0, model.config.vocab_size, shape, generator=_make_generator())
    mask = torch.ones(shape, dtype=torch.long)
    mask.view(-1, shape[-1])[0, 1:][-1:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": torch.zeros_like(tokens)}


def _make_audio_inputs(model: PreTrainedModel, sizes: ExampleSizes) -> TensorDict:
    """Return random audio inputs."""
    shape = (sizes.batch, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    return {"input_features": torch.randn(shape, generator=_make_generator())}


# The subfolder of the graphs, the suffix of dynamically quantized files, and the file for OpenVINO.
ONNX_FOLDER, INT8_SUFFIX, OPENVINO_NAME = "onnx", "_quantized", "model_openvino_int8.onnx"
# The number of tokens that are generated to compare graphs.
MAX_COMPARED_TOKENS = 32
REQUIRED_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# Older torch versions cannot export some or all of these models (docs/compatibility.md).
MIN_TORCH_VERSION = "2.10"
# Opset 18 is the oldest that torch can export, and opset 23 has an attention operator.
OPSETS = (18, 20, 23)
# The sizes of example inputs for the export and for the comparison.
EXPORT_SIZES, CHECK_SIZES = ExampleSizes(), ExampleSizes(batch=3, choices=3, source=9, target=5)
# The largest difference relative to the largest output. Typical differences are about 1e-6.
MAX_RELATIVE_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class OnnxExport:
    """The result of `export_onnx`.

    Args:
        output_dir: The output folder.
        architecture: The name of the Transformers class of the model.
        opset: The opset of the graphs.
        graphs: {file: (largest difference between the outputs of ONNX Runtime and PyTorch, names of the inputs)}.
        int8: The int8 graphs, or None.
    """

    output_dir: str
    architecture: str
    opset: int
    graphs: dict[str, tuple[float, list[str]]]
    int8: Int8Export | None = None

    def summary(self) -> str:
        """Return a printable summary."""
        lines = [f"Wrote {self.output_dir}: {self.architecture} as ONNX graphs, opset {self.opset}"]
        for name, (error, inputs) in self.graphs.items():
            input_list = ", ".join(inputs[:3]) + (f", ... ({len(inputs)} inputs)" if len(inputs) > 3 else "")
            lines.append(f"  {name:<33} within {error:.0e} of torch; inputs: {input_list}")
        return "\n".join(lines + ([] if self.int8 is None else self.int8.summary()))


@torch.no_grad()
def export_onnx(
    model_name_or_path: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    opset: int = OPSETS[0],
    pooling: str | None = None,
    normalize: bool = False,
    quantization: str | None = None,
    calibration_file: str | os.PathLike | None = None,
    validation_file: str | os.PathLike | None = None,
    allow_pickle: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
) -> OnnxExport:
    """Export a checkpoint from this package or Transformers to ONNX graphs with the same names as in Optimum.

    The graphs are written to the subfolder `onnx`, where sentence-transformers, Optimum and transformers.js look for
    them. Before the output folder is created, the outputs of each graph in ONNX Runtime are compared with the model's
    outputs. The inputs for this comparison have different sizes than those for the export.

    Args:
        model_name_or_path: A checkpoint folder or a Hub id.
        output_dir: A new or empty folder.
        opset: The ONNX opset, one of `OPSETS`.
        pooling: "mean" or "cls". If given, the graph of an encoder has another output, `sentence_embedding` [b, D].
        normalize: Whether to scale the embeddings to unit length.
        quantization: "int8" to write quantized graphs next to the float32 graphs. The quantized graphs are for ONNX
            Runtime, or for OpenVINO if there is a calibration file.
        calibration_file: A text file with one text per line (UTF-8, plain or .gz), from which the static scales of
            the int8 graph of an encoder are computed. A tenth of the texts is held out.
        validation_file: A text file with texts on which the int8 graphs are compared with the float32 graphs. By
            default, these are the held-out texts of the calibration file, or else random tokens.
        allow_pickle, revision, token: See `convert_checkpoint`.

    Returns:
        A description of the export, with the largest output difference of each graph.

    Raises:
        ValueError: If a package is missing, torch is too old, the model or an option is not supported, or a graph is
            incorrect.
        OSError: If a file is missing or cannot be written.

    Example:
        >>> print(export_onnx("bert-gqa4", "bert-onnx", quantization="int8").summary())
    """
    _check_options(opset, pooling, normalize, quantization, calibration_file, validation_file)
    texts = read_comparison_texts(calibration_file, validation_file)
    check_output_dir(output_dir)
    folder = resolve_checkpoint_folder(model_name_or_path, revision, token, allow_pickle)
    output = check_output_dir(output_dir, source=folder)
    model_class, model_config = resolve_source_model(read_config(folder))
    with open_checkpoint(folder, allow_pickle) as reader:
        names, _ = list_auxiliary_files(folder, reader.files)
    copied = [name for name in names if should_export_file(folder, name)]
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    graphs = build_model_graphs(model, pooling, normalize)
    if len(graphs) == 1:  # opset 23 has an operator for attention in an encoder, but not for a decoder with a cache
        model.set_attn_implementation("sdpa")
    elif calibration_file is not None:
        raise ValueError(
            f"`calibration_file` is only supported for encoders, got {get_transformers_class_name(model_class)}. "
            "Remove it to quantize the graphs dynamically."
        )
    if texts.validation and graphs[0].axes.get("input_ids", {}).keys() != {0, 1}:
        raise ValueError(
            "`calibration_file` and `validation_file` are only supported for models that read one text per example, "
            f"got {get_transformers_class_name(model_class)}. Remove them to compare the graphs on random inputs."
        )
    # The merged graph is as large as a decoder graph, and an int8 graph is at most half as large as its float32 graph.
    copies = (len(graphs) + (len(graphs) > 1)) * (1.5 if quantization else 1)
    check_disk_space(output, int(copies * sum(parameter.nbytes for parameter in model.parameters())))
    with staged_folder(output) as stage:
        copy_auxiliary_files(folder, stage, copied)
        make_transformers_config(model_config, model_class).save_pretrained(stage)
        if model.can_generate():
            model.generation_config.save_pretrained(stage)
        written = _write_graphs(graphs, opset, stage)
        int8 = None if quantization is None else _write_int8_graphs(model, graphs, texts, stage)
        _list_data_files(stage)
    return OnnxExport(os.fspath(output_dir), get_transformers_class_name(model_class), opset, written, int8)


def _check_options(
    opset: int,
    pooling: str | None,
    normalize: bool,
    quantization: str | None,
    calibration_file: str | os.PathLike | None,
    validation_file: str | os.PathLike | None,
) -> None:
    """Raise `ValueError` if an option of `export_onnx` is not valid, or if a package is missing or too old."""
    if opset not in OPSETS:
        raise ValueError(f"`opset` must be one of {', '.join(map(str, OPSETS))}, got {opset}.")
    if quantization not in (None, "int8"):
        raise ValueError(f'`quantization` must be "int8" for ONNX graphs, got {quantization!r}.')
    if quantization is None and (calibration_file or validation_file):
        raise ValueError('`calibration_file` and `validation_file` require `quantization` to be "int8".')
    if pooling not in (None, "mean", "cls"):
        raise ValueError(f'`pooling` must be "mean" or "cls", got {pooling!r}.')
    if normalize and pooling is None:
        raise ValueError('`normalize` requires `pooling` to be "mean" or "cls".')
    required = REQUIRED_PACKAGES if calibration_file is None else (*REQUIRED_PACKAGES, "nncf", "openvino")
    if missing := [name for name in required if importlib.util.find_spec(name) is None]:
        raise ValueError(f"This export requires {' and '.join(missing)}. Run `pip install {' '.join(missing)}`.")
    if torch.__version__ < MIN_TORCH_VERSION:
        raise ValueError(
            f"Export to ONNX requires torch {MIN_TORCH_VERSION} or newer, got {torch.__version__}. Upgrade torch."
        )


def _list_data_files(folder: Path) -> None:
    """List the graphs with a second file in config.json, where transformers.js looks for them."""
    large = [path.name for path in sorted((folder / ONNX_FOLDER).glob("*.onnx")) if get_data_path(path).exists()]
    if large:
        config = load_json(folder / CONFIG_NAME)
        config["transformers.js_config"] = {"use_external_data_format": dict.fromkeys(large, True)}
        (folder / CONFIG_NAME).write_text(f"{json.dumps(config, indent=2, sort_keys=True)}\n", encoding="utf-8")


def _write_graphs(graphs: list[ExportGraph], opset: int, stage: Path) -> dict[str, tuple[float, list[str]]]:
    """Write the graphs, and compare them with the model.

    Returns:
        {file: (largest difference, names of the inputs)}.
    """
    written = {}
    (stage / ONNX_FOLDER).mkdir()
    for graph in progress_bar(graphs, desc="graphs"):
        file = f"{ONNX_FOLDER}/{graph.name}.onnx"
        _write_graph(graph, opset, stage / file)
        written[file] = _compute_largest_difference(graph, stage / file), list(graph.axes)
    if len(graphs) > 1:
        file = _merge_decoder_files(stage, "")
        differences = [_compute_largest_difference(graph, stage / file) for graph in graphs[1:]]
        names = list(dict.fromkeys(name for graph in graphs[1:] for name in graph.axes))
        written[file] = max(differences), [*names, BRANCH_INPUT]
    return written


def _merge_decoder_files(stage: Path, suffix: str) -> str:
    """Merge the decoder graphs, whose files have the given suffix, and return the name of the new file."""
    first, step, merged = (f"{ONNX_FOLDER}/{name}{suffix}.onnx" for name in (FIRST_CALL_NAME, STEP_NAME, MERGED_NAME))
    merge_decoders(stage / first, stage / step, stage / merged)
    return merged


def _write_int8_graphs(
    model: PreTrainedModel, graphs: list[ExportGraph], texts: ComparisonTexts, stage: Path
) -> Int8Export:
    """Write an int8 graph for each graph, and compare them with the float32 graphs."""
    threads, names, folder = torch.get_num_threads(), list(graphs[0].axes), stage / ONNX_FOLDER
    files = [(folder / f"{graph.name}.onnx", folder / f"{graph.name}{INT8_SUFFIX}.onnx") for graph in graphs]
    if texts.calibration:
        files = [(files[0][0], folder / OPENVINO_NAME)]
        quantize_statically(*files[0], make_text_batches(texts.calibration, stage, model.config, names, batch_size=1))
    else:
        float32_modules = getattr(model, "_keep_in_fp32_modules", None) or ()
        for path, int8_path in progress_bar(files, desc="int8"):
            quantize_dynamically(path, int8_path, float32_modules, quantizes_embeddings=len(graphs) == 1)
    if texts.validation:
        batches = make_text_batches(texts.validation, stage, model.config, names)
        inputs = f"{len(texts.validation)} texts"
    else:
        random_inputs = graphs[0].make_inputs(ExampleSizes(batch=16, source=32))
        batches, inputs = [{name: tensor.numpy() for name, tensor in random_inputs.items()}], "random inputs"
    written = [f"{ONNX_FOLDER}/{path.name}" for _, path in files]
    if len(graphs) == 1:
        compare = compare_with_openvino if texts.calibration else compare_encoders
        result = compare(*files[0], batches, threads)
    else:
        written.append(_merge_decoder_files(stage, INT8_SUFFIX))
        batches = [batch | {"tokens": _generate_tokens(model, batch)} for batch in batches]
        result = compare_decoders(files[0], files[1], batches, threads)
    return Int8Export(written, "OpenVINO" if texts.calibration else "ONNX Runtime", *result, inputs)


def _generate_tokens(model: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Return the tokens that a model generates with greedy search [b, n]. The padding after the last token is -1."""
    inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
    tokens = model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=MAX_COMPARED_TOKENS)
    ends = torch.isin(tokens, torch.tensor(model.generation_config.eos_token_id or -1))
    ends[:, 0] = False  # a decoder may start with the end token
    is_padding = ends.cumsum(1) - ends.long() > 0
    generated: np.ndarray = tokens.masked_fill(is_padding, -1).numpy()
    return generated


def _write_graph(graph: ExportGraph, opset: int, path: Path) -> None:
    """Export a graph to a file."""
    from onnxscript import ir

    axis_names = (name for axes in graph.axes.values() for name in axes.values())
    dimensions = {name: Dim(name, max=graph.longest.get(name)) for name in axis_names}
    shapes = {name: {index: dimensions[axis] for index, axis in axes.items()} for name, axes in graph.axes.items()}
    inputs = {name: graph.make_inputs(EXPORT_SIZES)[name] for name in graph.axes}
    # The exporter logs and warns about details that users cannot change.
    with raise_log_level("torch.onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            graph.module,
            (),
            kwargs={"inputs": inputs},
            dynamic_shapes={"inputs": shapes},
            input_names=list(inputs),
            output_names=list(graph.module(inputs)),
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
        for node in program.model.graph:
            node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)  # contains local paths
        size = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
        is_large = size > onnx_decoder.MAX_GRAPH_BYTES
        ir.save(program.model, path, external_data=get_data_path(path).name if is_large else None)


def _compute_largest_difference(graph: ExportGraph, path: Path) -> float:
    """Return the largest difference between the outputs of ONNX Runtime and PyTorch.

    The inputs have different sizes than those for the export.

    Raises:
        ValueError: If the difference is too large.
    """
    session = load_graph(path, torch.get_num_threads())
    inputs = {name: graph.make_inputs(CHECK_SIZES)[name] for name in graph.axes}
    expected: dict[str, torch.Tensor] = graph.module(inputs)
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    # A merged decoder also has the inputs of its other branch, which does not read them.
    for item in session.get_inputs():
        if item.name == BRANCH_INPUT:
            arrays[item.name] = np.array([graph.name == STEP_NAME])
        elif item.name not in arrays:
            arrays[item.name] = np.zeros([size if isinstance(size, int) else 1 for size in item.shape], np.float32)
    outputs: list[Any] = session.run(list(expected), arrays)
    pairs = [(torch.from_numpy(output), expected[name]) for name, output in zip(expected, outputs, strict=True)]
    differences = [((actual - reference).abs().max(), reference.abs().max()) for actual, reference in pairs]
    for name, (difference, largest) in zip(expected, differences, strict=True):
        if not difference <= MAX_RELATIVE_DIFFERENCE * max(1.0, float(largest)):
            raise ValueError(
                f"`{name}` in {path.name} must be the same in ONNX Runtime and PyTorch, but differs by "
                f"{float(difference):.1e}."
            )
    return max(float(difference) for difference, _ in differences)
