"""A checkpoint as ONNX graphs, which ONNX Runtime runs without torch, transformers or this package.

The graphs that a model is exported as: what each computes, and its inputs by the names that optimum gives them.

An encoder is one graph. An encoder-decoder is three: the encoder; the decoder's first call, which makes both caches;
and a step, which takes them and one token. A cache is tensors by layer, `past_key_values.N.decoder.key` [b, k, n, d]
in and `present.N.decoder.key` out, likewise `value`, and `encoder` in place of `decoder` for the cross-attention,
whose cache a step only reads. Of a latent `key` holds the latent [b, 1, n, r], and there is no `value`; one that all
layers share is layer 0's.
"""

import importlib.util
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..conversion.checkpoint.source import copy_side_files, read_config, resolve_source, side_files
from ..conversion.checkpoint.tensor_files import open_checkpoint
from ..files import check_disk_space, check_output_dir, staged_folder
from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..modeling.fields.kernel_fields import has_kernel
from ..modeling.fields.variant_config import can_cache
from ..modeling.mechanisms.talking_heads import dynamic_terms, keeps_cache
from ..modeling.upstream import cache_name, cache_of
from ..progress import progress_bar
from ..registration import longest_input
from .plain import source_model, travels_without_code, upstream_architecture, upstream_config

__all__ = ["OPSETS", "Graph", "OnnxExport", "Sizes", "export_onnx", "model_graphs"]

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


NEEDED = ("onnx", "onnxscript", "onnxruntime")
# Older ones refuse some of these models or all of them (docs/compatibility.md).
LEAST_TORCH = "2.10"
# 23 has an operator for attention; 18 is the oldest that torch's exporter writes.
OPSETS = (18, 20, 23)
EXPORTED, CHECKED = Sizes(), Sizes(batch=3, choices=3, source=9, target=5)
# Of the largest output. Graphs agree to about 1e-6.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class OnnxExport:
    """What was written.

    Args:
        output_dir: where.
        architecture: upstream's class of the model.
        opset: of the graphs.
        graphs: of each file the largest difference of ONNX Runtime's outputs to torch's, and its inputs' names.
    """

    output_dir: str
    architecture: str
    opset: int
    graphs: dict[str, tuple[float, list[str]]]

    def summary(self) -> str:
        """Return a few lines for people."""
        lines = [f"Wrote {self.output_dir}: a {self.architecture} as ONNX graphs, opset {self.opset}"]
        for name, (error, inputs) in self.graphs.items():
            shown = ", ".join(inputs[:3]) + (f", ... ({len(inputs)} inputs)" if len(inputs) > 3 else "")
            lines.append(f"  {name:<29} within {error:.0e} of torch in ONNX Runtime; takes {shown}")
        return "\n".join(lines)


@torch.no_grad()
def export_onnx(
    model_name_or_path: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    opset: int = OPSETS[0],
    allow_pickle: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
) -> OnnxExport:
    """Write a checkpoint, ours or upstream's, as ONNX graphs in float32, by optimum's names (`onnx_graphs`).

    Each graph is run by ONNX Runtime, at other sizes than it was made with, before the folder appears.

    Args:
        model_name_or_path: a checkpoint folder or a Hub id.
        output_dir: a new or empty folder.
        opset: of `OPSETS`.
        allow_pickle, revision, token: as for `convert_checkpoint`.

    Raises:
        ValueError: if a package is missing or torch too old, the model is of no kind that has graphs, or a graph
            disagrees with it.
        OSError: if a file is missing, or cannot be written.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(f"an export to ONNX needs {' and '.join(missing)}: `pip install {' '.join(missing)}`")
    if torch.__version__ < LEAST_TORCH:
        raise ValueError(f"an export to ONNX needs torch {LEAST_TORCH} or newer; this is {torch.__version__}.")
    if opset not in OPSETS:
        raise ValueError(f"`opset` must be one of {', '.join(map(str, OPSETS))}; got {opset}.")
    check_output_dir(output_dir)
    folder = resolve_source(model_name_or_path, revision, token, allow_pickle)
    output = check_output_dir(output_dir, source=folder)
    model_class, described = source_model(read_config(folder))
    with open_checkpoint(folder, allow_pickle) as reader:
        found, _ = side_files(folder, reader.files)
    copied = [name for name in found if travels_without_code(folder, name)]
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    graphs = model_graphs(model)
    if len(graphs) == 1:  # an encoder, whose attention opset 23 has as one operator; a decoder's exports as products
        model.set_attn_implementation("sdpa")
    check_disk_space(output, len(graphs) * sum(each.nbytes for each in model.parameters()))
    with staged_folder(output) as stage:
        copy_side_files(folder, stage, copied)
        upstream_config(described, model_class).save_pretrained(stage)
        if model.can_generate():
            model.generation_config.save_pretrained(stage)
        written = {}
        for graph in progress_bar(graphs, desc="graphs"):
            file = f"{graph.name}.onnx"
            _write(graph, opset, stage / file)
            written[file] = _largest_difference(graph, stage / file), list(graph.axes)
    return OnnxExport(os.fspath(output_dir), upstream_architecture(model_class), opset, written)


def _write(graph: Graph, opset: int, path: Path) -> None:
    dimensions = {
        name: Dim(name, max=graph.longest.get(name)) for each in graph.axes.values() for name in each.values()
    }
    shapes = {name: {at: dimensions[axis] for at, axis in axes.items()} for name, axes in graph.axes.items()}
    inputs = {name: graph.inputs(EXPORTED)[name] for name in graph.axes}
    with _quiet():
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
        program.save(path)


def _largest_difference(graph: Graph, path: Path) -> float:
    """Return the largest difference of ONNX Runtime's outputs to torch's, of sizes that the graph was not made with.

    Raises:
        ValueError: if it is too large.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    inputs = {name: graph.inputs(CHECKED)[name] for name in graph.axes}
    expected: dict[str, torch.Tensor] = graph.module(inputs)
    found: list[Any] = session.run(list(expected), {name: each.numpy() for name, each in inputs.items()})
    pairs = [(torch.from_numpy(each), expected[name]) for name, each in zip(expected, found, strict=True)]
    differences = [((one - other).abs().max(), other.abs().max()) for one, other in pairs]
    for name, (difference, largest) in zip(expected, differences, strict=True):
        if not difference <= TOLERANCE * max(1.0, float(largest)):
            raise ValueError(f"ONNX Runtime gives {name} of {path.name} {float(difference):.1e} beside torch's.")
    return max(float(difference) for difference, _ in differences)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks on what this machine lacks, and torch's on itself, from those who export."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
