"""Computes a model's attention maps for one text, before and after the talking-heads projections.

The maps are returned as tensors or as an HTML page, which does not require a network connection or other files. Shapes
are written with the same letters as in `modeling.ops.softmax_attention`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..files import is_unicode
from ..model_properties import get_decoder_start_token, ignore_saved_length_limits
from ..modeling.attention import attention_interface, mechanism_attention
from ..modeling.attention.attention_sites import AttentionSite
from ..modeling.attention.model_mixin import AttnVariantModelMixin
from ..modeling.fields.variant_config import supports_decoder_cache
from ..modeling.mechanisms.talking_heads import HEAD_PROJECTIONS, M2L, M2W, X2L, X2W
from ..modeling.ops.key_ranges import TransientGlobalKeyRange
from ..modeling.ops.softmax_attention import attention_with_weights
from ..modeling.ops.variant_attention import VariantAttention

ATTENTION_NAMES = {  # {type: (name on the page, field of the model outputs that contains the weights)}
    "self": ("layer {}", "attentions"),
    "encoder": ("encoder layer {}", "encoder_attentions"),
    "decoder": ("decoder layer {}, self-attention", "decoder_attentions"),
    "cross": ("decoder layer {}, cross-attention", "cross_attentions"),
}


@dataclass(frozen=True)
class AttentionStage:
    """The attention maps of all heads at one stage of the computation."""

    name: str  # "logits_before", "logits_after", "weights_before", "weights_after", or "weights" without talking heads
    title: str  # the name on the page
    head: str  # the type of head: "query head", "softmax head", "value head" or "head"
    # [heads, n, m]. The mean of each row of logits is 0 because a softmax ignores constants. Masked entries are NaN.
    maps: torch.Tensor
    kv_heads: tuple[int, ...] = ()  # the key/value head that each head reads, or () if no heads share one


@dataclass(frozen=True)
class HeadProjection:
    """A learned talking-heads projection, P_l or P_w, with one row per input head and one column per output head."""

    name: str
    rows: str
    columns: str
    matrix: torch.Tensor


@dataclass(frozen=True)
class AttentionMaps:
    """The attention maps of one module for one text."""

    site: str  # "self", "encoder", "decoder" or "cross"
    layer: int  # the index of the layer, from 0
    query_tokens: tuple[str, ...]  # the labels of the rows
    key_tokens: tuple[str, ...]  # the labels of the columns
    stages: tuple[AttentionStage, ...]  # in the order in which they are computed
    projections: tuple[HeadProjection, ...]
    kv_heads: int  # k, the number of key/value heads
    dynamic: tuple[str, ...] = ()  # the names of the input-dependent terms of the projections

    @property
    def name(self) -> str:
        """The name of the attention module on the page, for example "decoder layer 1, cross-attention"."""
        return ATTENTION_NAMES[self.site][0].format(self.layer)


@dataclass(frozen=True)
class TextAttentionMaps:
    """The attention maps of all modules in a model for one text, in the order of the forward pass."""

    text: str
    target_text: str | None  # the text that the decoder reads
    target_is_output: bool  # whether the target is the greedy output of the model
    is_cut: bool  # whether the text or the target was truncated to `max_length` tokens
    attentions: tuple[AttentionMaps, ...]


@torch.no_grad()
def attention_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    target_text: str | None = None,
    max_length: int = 32,
) -> TextAttentionMaps:
    """Run a model on one text and return the attention maps of every module and head.

    Args:
        model: A model from this package. Its training mode is restored afterwards.
        tokenizer: The model's tokenizer.
        text: The input text.
        target_text: The text that the decoder of an encoder-decoder reads (teacher forcing). By default, the decoder
            reads the model's own greedy output. In row i of a decoder map, the decoder reads token i-1 and predicts
            token i. In the first row, it reads the start token.
        max_length: The maximum number of tokens in the text and in the target, including special tokens.

    Returns:
        The attention maps, which `render_attention_page` renders.

    Raises:
        ValueError: If the model is not from this package, a text is empty or invalid, or `target_text` is missing or
            not supported.

    Example:
        >>> maps = attention_maps(model, tokenizer, "The cat sat on the mat.")
        >>> Path("maps.html").write_text(render_attention_page(maps, "my-model"), encoding="utf-8")
    """
    if not isinstance(model, AttnVariantModelMixin):
        raise ValueError(
            f"`model` must be a model from this package, got {type(model).__name__}. Convert it with `convert` first. "
            "Attention maps are not supported for EuroBERT and T5Gemma, whose classes are from Transformers."
        )
    has_decoder = hasattr(model.base_model, "decoder")
    if target_text is not None and not has_decoder:
        raise ValueError(
            f"`target_text` is not supported for {type(model).__name__}, which has no decoder. Remove it."
        )
    was_training, implementation = model.training, model.config._attn_implementation
    model.eval()
    try:
        inputs, target_text_read, is_cut = _prepare_model_inputs(model, tokenizer, text, target_text, max_length)
        model.set_attn_implementation("eager")
        with _record_attention_calls(model) as calls:
            outputs = model.base_model(**inputs, **{"use_cache": False} if has_decoder else {}, output_attentions=True)
    finally:
        model.set_attn_implementation(implementation)
        model.train(was_training)
    names = {"text": "input_ids", "target": "decoder_input_ids"}
    ids = {name: inputs[key][0].tolist() for name, key in names.items() if key in inputs}
    labels = {name: tuple(_format_token(tokenizer, token) for token in row) for name, row in ids.items()}
    fields = {name: field for name, (_, field) in ATTENTION_NAMES.items()}
    weights = {name: iter(enumerate(getattr(outputs, field, None) or ())) for name, field in fields.items()}
    attentions = tuple(_build_attention_maps(*call, labels, *next(weights[call[0].name])) for call in calls)
    return TextAttentionMaps(text, target_text_read, has_decoder and target_text is None, is_cut, attentions)


def _prepare_model_inputs(
    model: Any, tokenizer: PreTrainedTokenizerBase, text: str, target_text: str | None, max_length: int
) -> tuple[dict[str, torch.Tensor], str | None, bool]:
    """Return the model inputs, the text that the decoder reads, and whether a text was truncated."""
    encoded, is_cut = {}, False
    for name, passage in (("text", text), ("target_text", target_text)):
        if passage is not None:
            if not is_unicode(passage) or not passage.strip() or not (length := len(tokenizer(passage)["input_ids"])):
                raise ValueError(f"`{name}` must be Unicode text with at least one token, got {passage!r:.80}.")
            encoded[name] = tokenizer(passage, truncation=True, max_length=max_length, return_tensors="pt")
            is_cut |= length > max_length
    inputs = {name: encoded["text"][name].to(model.device) for name in ("input_ids", "attention_mask")}
    if not hasattr(model.base_model, "decoder"):
        return inputs, None, is_cut
    if target_text is not None:
        target = encoded["target_text"]["input_ids"].to(model.device)
    elif model.can_generate():
        options: dict[str, Any] = {"max_new_tokens": max_length, "num_beams": 1, "do_sample": False}
        with ignore_saved_length_limits(model):
            target = model.generate(**inputs, **options, use_cache=supports_decoder_cache(model.config))[:, 1:]
        is_cut |= target.shape[1] == max_length and int(target[0, -1]) != tokenizer.eos_token_id
        target_text = str(tokenizer.decode(target[0], skip_special_tokens=True))
    else:
        raise ValueError(f"`target_text` is required because {type(model).__name__} cannot generate text.")
    start = torch.full_like(target[:, :1], get_decoder_start_token(model.config))
    return inputs | {"decoder_input_ids": torch.cat([start, target[:, :-1]], dim=1)}, target_text, is_cut


def _format_token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return the text of a token, or its vocabulary entry if the text is empty or not valid Unicode."""
    text = str(tokenizer.decode([token])).strip()
    return str(tokenizer.convert_ids_to_tokens(token)) if not text or "\N{REPLACEMENT CHARACTER}" in text else text


@contextmanager
def _record_attention_calls(
    model: AttnVariantModelMixin,
) -> Iterator[list[tuple[AttentionSite, Any, list[AttentionStage]]]]:
    """Record a model's attention calls within this context.

    The context manager yields a list, to which each call appends the attention type, the core module, and all stages
    except the last stage, whose weights are part of the model output.
    """
    calls: list[tuple[AttentionSite, Any, list[AttentionStage]]] = []
    hooks = [
        module.get_submodule(site.core).register_forward_pre_hook(
            lambda core, inputs, site=site: calls.append((site, core, []))
        )
        for site, _, module in model.named_attention_modules()
    ]

    def attend(*args: Any, **options: Any) -> Any:
        calls[-1][-1].extend(_iterate_mixing_stages(*args, **options))
        return attention_with_weights(*args, **options)

    # The remote code of a checkpoint has its own copy of this function.
    registered = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation].__globals__
    modules = (vars(attention_interface), vars(mechanism_attention), registered)
    namespaces = {id(names): names for names in modules}.values()
    originals = [namespace["attention_with_weights"] for namespace in namespaces]
    for namespace in namespaces:
        namespace["attention_with_weights"] = attend
    try:
        yield calls
    finally:
        for namespace, original in zip(namespaces, originals, strict=True):
            namespace["attention_with_weights"] = original
        for hook in hooks:
            hook.remove()


def _iterate_mixing_stages(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, position_bias: Any, **options: Any
) -> Iterator[AttentionStage]:
    """Yield the stages of a call with talking-heads projections, except the last stage, which the model returns."""
    logits_proj, score, heads = options.get("logits_proj"), options.get("score"), query.shape[1]
    reads_keys = _get_kv_head_indices(heads, key.shape[1])
    without_weights_proj = options | dict.fromkeys(("weights_proj", X2W, M2W))
    placeholder_values = key.new_zeros(1, 1, key.shape[2], 1)
    weights = attention_with_weights(query, key, placeholder_values, mask, position_bias, **without_weights_proj)[1]
    if logits_proj is not None:
        repeated = key.repeat_interleave(heads // key.shape[1], dim=1)
        logits = options["scaling"] * query @ repeated.mT if score is None else score(query, key)  # [1, h_k, n, m]
        rules = {"binm,ij->bjnm": logits_proj, "binm,bnij->bjnm": options[X2L], "binm,bmij->bjnm": options[M2L]}
        terms = [torch.einsum(rule, logits, matrix) for rule, matrix in rules.items() if matrix is not None]
        forbidden = (weights == 0).all(1)
        for name, maps in (("before", logits), ("after", torch.stack(terms).sum(0))):
            maps = maps[0].float().masked_fill(forbidden, torch.nan)
            maps = maps - maps.nanmean(-1, keepdim=True)
            kind, reads = ("query head", reads_keys) if name == "before" else ("softmax head", ())
            yield AttentionStage(f"logits_{name}", f"logits of the {kind}s, {name} P_l", kind, _to_cpu(maps), reads)
    if options.get("weights_proj") is not None:
        reads = reads_keys if logits_proj is None else ()  # without P_l the softmax heads are the query heads
        title = "weights after the softmax, before P_w"
        yield AttentionStage("weights_before", title, "softmax head", _to_cpu(weights[0]), reads)


def _build_attention_maps(
    site: AttentionSite,
    core: VariantAttention,
    mixing_stages: list[AttentionStage],
    labels: dict[str, tuple[str, ...]],
    layer: int,
    weights: torch.Tensor,
) -> AttentionMaps:
    """Return the maps for one call. The weights [1, h_v, n, m] from the model output are added as the last stage."""
    decodes, heads = site.stack == "decoder", core.heads
    logits_proj, weights_proj = (getattr(core, name, None) for name in HEAD_PROJECTIONS)
    if not core.projection_names:
        last = ("weights", "attention weights", "head", heads.key)
    elif weights_proj is None:
        last = ("weights_before", "weights after the softmax", "softmax head", heads.value)
    else:
        last = ("weights_after", "weights of the value heads, after P_w", "value head", heads.value)
    stage = AttentionStage(*last[:3], _to_cpu(weights[0]), _get_kv_head_indices(heads.output, last[3]))
    kinds = (("P_l", "query head", "softmax head"), ("P_w", "softmax head", "value head"))
    matrices = zip(kinds, (logits_proj, weights_proj), strict=True)
    projections = tuple(HeadProjection(*kind, _to_cpu(matrix)) for kind, matrix in matrices if matrix is not None)
    rows = labels["target" if decodes else "text"]
    columns = _get_key_labels(core, labels["target" if decodes and not site.is_cross_attention else "text"])
    maps = (rows, columns, (*mixing_stages, stage), projections)
    return AttentionMaps(site.name, layer, *maps, heads.key, core.dynamic_names)


def _get_key_labels(core: VariantAttention, tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of the keys, which can be tokens, groups of tokens, or block summaries followed by tokens."""
    if core.compression is not None:
        stride = core.compression.stride
        blocks = [tokens[begin : begin + stride] for begin in range(0, len(tokens), stride)]
        return tuple(block[0] if len(block) == 1 else f"{block[0]} … {block[-1]}" for block in blocks)
    if isinstance(core.key_range, TransientGlobalKeyRange):
        return (*(f"block {1 + block}" for block in range(len(tokens) // core.key_range.block)), *tokens)
    return tokens


def _get_kv_head_indices(heads: int, kv_heads: int) -> tuple[int, ...]:
    """Return the index of the key/value head that each head reads, or () if no heads are shared."""
    return tuple(head * kv_heads // heads for head in range(heads)) if kv_heads < heads else ()


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached float32 copy of a tensor on the CPU."""
    return tensor.detach().float().cpu()


def render_attention_page(maps: TextAttentionMaps, model_name: str) -> str:
    """Render attention maps as an HTML page.

    Args:
        maps: The result of `attention_maps`.
        model_name: The title of the page.

    Returns:
        The HTML text of the page.
    """
    attentions = [
        {
            "name": attention.name,
            "rows": attention.query_tokens,
            "columns": attention.key_tokens,
            "kvHeads": attention.kv_heads,
            "dynamic": attention.dynamic,
            "stages": [_encode_stage(stage) for stage in attention.stages],
            "projections": [
                vars(projection) | {"matrix": projection.matrix.round(decimals=4).tolist()}
                for projection in _add_difference_matrices(attention.projections)
            ],
        }
        for attention in maps.attentions
    ]
    content: dict[str, Any] = {"model": model_name, "text": maps.text, "target": maps.target_text}
    content |= {"attentions": attentions, "targetIsOutput": maps.target_is_output, "isCut": maps.is_cut}
    data = json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")  # a "<" could end the script element
    return Path(__file__).with_name("attention_maps.html").read_text(encoding="utf-8").replace("@DATA@", data)


def _encode_stage(stage: AttentionStage) -> dict[str, Any]:
    """Return a stage as JSON values, with its maps as base64-encoded 16-bit numbers."""
    is_logits, known = stage.name.startswith("logits"), stage.maps[~stage.maps.isnan()]
    lowest, highest, strongest = float(known.min()), float(known.max()), float(known.abs().max())
    # NaN becomes 0, and the range from the lowest to the highest value becomes 1 to 65535.
    step = max(highest - lowest, 1e-12) / 65534
    levels = (((stage.maps - lowest) / step).round() + 1).nan_to_num(0).clamp(0, 65535).to(torch.int32)
    return {
        "title": stage.title,
        "head": stage.head,
        "kv": stage.kv_heads,
        "isLogits": is_logits,
        "signed": is_logits or lowest < -0.02 * strongest,  # whether the color scale has two signs
        # The value that is shown in the strongest color. Larger logits get the same color.
        "limit": max(1e-6, float(known.abs().quantile(0.99)) if is_logits and len(known) < 2**24 else strongest),
        "heads": len(stage.maps),
        "lowest": lowest,
        "step": step,
        "values": base64.b64encode(levels.numpy().astype("<u2").tobytes()).decode(),
    }


def _add_difference_matrices(projections: tuple[HeadProjection, ...]) -> Iterator[HeadProjection]:
    """Yield each projection and, if it is close to the identity matrix, 100 times its difference from the identity.

    The difference shows what the model has learned because training starts from the identity.
    """
    for projection in projections:
        yield projection
        matrix = projection.matrix
        change = matrix - torch.eye(*matrix.shape)
        if matrix.shape[0] == matrix.shape[1] and 0 < float(change.abs().max()) < 0.3:
            yield replace(projection, name=f"100 ({projection.name} - I)", matrix=100 * change)
