"""Attention maps of a model on one text, per layer and head, before and after the talking-heads projections.

Letters as in `softmax_attention`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase

from ...modeling.attention.attention_interface import OWN_FUNCTIONS, eager_attention_forward
from ...modeling.attention.attention_sites import AttentionSite
from ...modeling.attention.variant_mixins import AttnVariantModelMixin
from ...modeling.mechanisms.head_sharing import consecutive_groups
from ...modeling.mechanisms.patterns.compressed_pattern import compressing
from ...modeling.mechanisms.talking_heads import M2L, PROJECTIONS, X2L
from ...modeling.ops.reach import TransientGlobal
from ...modeling.ops.softmax_attention import attention_with_weights
from ...modeling.ops.variant_attention import VariantAttention
from ...modeling.ops.window_blocks import as_full_attention
from ...modeling.variant_names import EAGER
from .inputs import model_inputs, token_labels

__all__ = ["AttentionMaps", "Projection", "Stage", "TextMaps", "attention_maps"]

# For each attention site, its name for people.
SITE_NAMES = {
    "self": "layer {}",
    "encoder": "encoder layer {}",
    "decoder": "decoder layer {}, self-attention",
    "cross": "decoder layer {}, cross-attention",
}
# The same among what a model returns.
OUTPUTS = {
    "self": "attentions",
    "encoder": "encoder_attentions",
    "decoder": "decoder_attentions",
    "cross": "cross_attentions",
}


@dataclass(frozen=True)
class Stage:
    """One map per head at one point of an attention.

    Args:
        name: "logits_before", "logits_after", "weights_before", "weights_after"; "weights" where nothing mixes them.
        title: the name in words.
        head: what one of these heads is called: "query head", "softmax head", "value head" or "head".
        maps: [heads, n, m]. Logits have each row's mean taken off, which the softmax does not see; what may not be
            attended to is NaN there and 0 among the weights.
        kv_heads: for each head the key/value head that it reads; () where the heads read none.
    """

    name: str
    title: str
    head: str
    maps: torch.Tensor
    kv_heads: tuple[int, ...] = ()

    @property
    def is_logits(self) -> bool:
        return self.name.startswith("logits")


@dataclass(frozen=True)
class Projection:
    """A learned projection across heads: P_l or P_w, a row for each head in and a column for each head out."""

    name: str
    rows: str
    columns: str
    matrix: torch.Tensor


@dataclass(frozen=True)
class AttentionMaps:
    """One attention of one layer, called on one text.

    Args:
        site: "self", "encoder", "decoder" or "cross".
        layer: counted from 0, as in the names of modules.
        path: the module's path inside the base model; layers that share their weights have the same.
        query_tokens, key_tokens: the labels of a map's rows and columns.
        stages: in the order in which they are computed.
        projections: its P_l and P_w, where it has them.
        kv_heads: k, its number of key/value heads.
        dynamic: the names of the input-dependent terms that its mixes have besides.
    """

    site: str
    layer: int
    path: str
    query_tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]
    stages: tuple[Stage, ...]
    projections: tuple[Projection, ...]
    kv_heads: int
    dynamic: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """ "layer 3", "decoder layer 1, cross-attention", ..."""
        return SITE_NAMES[self.site].format(self.layer)


@dataclass(frozen=True)
class TextMaps:
    """All attentions of a model on one text, in the order of the forward pass.

    Args:
        text: what was given.
        target_text: encoder-decoders: what the decoder read; else None.
        target_is_output: whether that is the model's own greedy output.
        is_cut: whether text or target had more tokens than `max_length`.
        attentions: the maps.
    """

    text: str
    target_text: str | None
    target_is_output: bool
    is_cut: bool
    attentions: tuple[AttentionMaps, ...]


@torch.no_grad()
def attention_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    target_text: str | None = None,
    max_length: int = 32,
) -> TextMaps:
    """Run a model on one text and return the maps of every attention and head.

    Args:
        model: one of this package's, multi-head or variant; it runs in evaluation mode and is left in its own.
        tokenizer: the model's.
        text: what the model reads.
        target_text: what the decoder of an encoder-decoder reads, by teacher forcing; None = its own greedy output.
            The decoder's row i reads token i-1 (first the start token) and predicts token i.
        max_length: tokens, special ones included, at which text and target are cut.

    Raises:
        ValueError: if the model is not this package's, a text is empty, or `target_text` does not fit the model.
    """
    if not isinstance(model, AttnVariantModelMixin):
        raise ValueError(f"attention maps are read from this package's models; {type(model).__name__} is none.")
    has_decoder = hasattr(model.base_model, "decoder")
    if target_text is not None and not has_decoder:
        raise ValueError(f"`target_text` is for encoder-decoders; {type(model).__name__} has no decoder.")
    was_training, implementation = model.training, model.config._attn_implementation
    model.eval()
    try:
        inputs, read_target, is_cut = model_inputs(model, tokenizer, text, target_text, max_length)
        model.set_attn_implementation("eager")
        labels = {"text": token_labels(tokenizer, inputs["input_ids"][0])}
        if has_decoder:
            labels["target"] = token_labels(tokenizer, inputs["decoder_input_ids"][0])
        recorder = _Recorder(model)
        with recorder.recording():
            # A decoder's cache would only cost memory here, and memory-side dynamic projections refuse one.
            options = {"use_cache": False} if has_decoder else {}
            outputs = model.base_model(**inputs, **options, output_attentions=True)
    finally:
        model.set_attn_implementation(implementation)
        model.train(was_training)
    attentions: list[AttentionMaps] = []
    layers: Counter[str] = Counter()
    core: Any  # of this package's attentions
    for number, (site, path, core) in enumerate(recorder.calls):
        layer = layers[site.name]
        layers[site.name] += 1
        weights = getattr(outputs, OUTPUTS[site.name])[layer]
        mixed = recorder.mixed.get(number, ())
        attentions.append(_maps_of_call(site, path, core, layer, labels, mixed, weights))
    return TextMaps(
        text=text,
        target_text=read_target,
        target_is_output=has_decoder and target_text is None,
        is_cut=is_cut,
        attentions=tuple(attentions),
    )


class _Recorder:
    """Notes which attentions run, in order, and what talking heads mix on the way to the weights."""

    def __init__(self, model: AttnVariantModelMixin):
        self.calls: list[tuple[AttentionSite, str, nn.Module]] = []
        self.mixed: dict[int, tuple[Stage, ...]] = {}  # by the call's number
        # By the submodule that calls the attention function.
        self._modules = {
            module.get_submodule(site.core): (site, path) for site, path, module in model.named_attentions()
        }

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the block runs, under the name that the models' "eager" has."""
        eager = OWN_FUNCTIONS[EAGER]
        hooks = [module.register_forward_pre_hook(self._enter) for module in self._modules]
        _set_eager(compressing(self._attention))
        try:
            yield
        finally:
            _set_eager(eager)
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self.calls.append((*self._modules[module], module))

    def _attention(self, module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if module in self._modules and module.projection_names:
            self.mixed[len(self.calls) - 1] = _mixing_stages(module, query, key, *args, **kwargs)
        return eager_attention_forward(module, query, key, *args, **kwargs)


def _maps_of_call(
    site: AttentionSite,
    path: str,
    core: VariantAttention,
    layer: int,
    labels: dict[str, tuple[str, ...]],
    mixed: tuple[Stage, ...],
    weights: torch.Tensor,
) -> AttentionMaps:
    """Return the maps of one call: what came before its weights, and these [1, h_v, n, m] as the model has them."""
    decodes, heads = site.stack == "decoder", core.heads
    logits_proj, weights_proj = (getattr(core, name, None) for name in PROJECTIONS)
    if not core.projection_names:
        last = ("weights", "attention weights", "head", _reads(heads.output, heads.key))
    elif weights_proj is None:
        last = ("weights_before", "weights after the softmax", "softmax head", _reads(heads.output, heads.value))
    else:
        last = (
            "weights_after",
            "weights of the value heads, after P_w",
            "value head",
            _reads(heads.output, heads.value),
        )
    name, title, head, reads = last
    return AttentionMaps(
        site=site.name,
        layer=layer,
        path=path,
        query_tokens=labels["target" if decodes else "text"],
        key_tokens=_key_labels(core, labels["target" if decodes and not site.is_cross_attention else "text"]),
        stages=(*mixed, Stage(name, title, head, _cpu(weights[0]), reads)),
        projections=_projections(logits_proj, weights_proj),
        kv_heads=heads.key,
        dynamic=core.dynamic_names,
    )


def _key_labels(core: VariantAttention, tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of what an attention reads: tokens, several as one, or summaries of blocks before tokens."""
    if core.compression is not None:
        stride = core.compression.stride
        blocks = [tokens[begin : begin + stride] for begin in range(0, len(tokens), stride)]
        return tuple(block[0] if len(block) == 1 else f"{block[0]} … {block[-1]}" for block in blocks)
    if isinstance(core.reach, TransientGlobal):
        return (*(f"block {1 + block}" for block in range(len(tokens) // core.reach.block)), *tokens)
    return tokens


def _mixing_stages(
    module: VariantAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[Stage, ...]:
    """Return the stages of one call of a batch of one, but for the weights that the model itself returns."""
    if module.reach is not None:
        mask, position_bias = as_full_attention(module.reach, query, key, mask, position_bias)
    asked = getattr(module, "is_causal", False) if is_causal is None else is_causal
    is_causal = mask is None and query.shape[2] > 1 and asked
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits_proj, weights_proj = (getattr(module, name, None) for name in PROJECTIONS)
    heads, kv_heads = query.shape[1], key.shape[1]
    reads_keys = _reads(heads, kv_heads)
    options: dict[str, Any] = {
        "scaling": scaling,
        "is_causal": is_causal,
        "logits_proj": logits_proj,
        "score": module.score,
    }
    options |= {name: kwargs.get(name) for name in (X2L, M2L)}
    no_values = key.new_zeros(1, 1, key.shape[2], 1)
    _, weights = attention_with_weights(query, key, no_values, mask, position_bias, **options)  # [1, h, n, m]
    stages = []
    if logits_proj is not None:
        repeated = key.repeat_interleave(heads // kv_heads, dim=1)
        # [1, h_k, n, m]
        logits = scaling * query @ repeated.mT if module.score is None else module.score(query, key)
        mixed = _mixed(logits, logits_proj, kwargs.get(X2L), kwargs.get(M2L))  # [1, h, n, m]
        allowed = _allowed(weights[:, :1], mask, is_causal)
        before, after = (_centred(states, allowed) for states in (logits, mixed))
        stages.append(
            Stage("logits_before", "logits of the query heads, before P_l", "query head", before, reads_keys)
        )
        stages.append(Stage("logits_after", "logits of the softmax heads, after P_l", "softmax head", after))
    if weights_proj is not None:
        # Without P_l the softmax heads are the query heads.
        reads = reads_keys if logits_proj is None else ()
        title = "weights after the softmax, before P_w"
        stages.append(Stage("weights_before", title, "softmax head", _cpu(weights[0]), reads))
    return tuple(stages)


def _projections(logits_proj: torch.Tensor | None, weights_proj: torch.Tensor | None) -> tuple[Projection, ...]:
    named = (("P_l", "query head", "softmax head", logits_proj), ("P_w", "softmax head", "value head", weights_proj))
    return tuple(Projection(name, heads, to, _cpu(matrix)) for name, heads, to, matrix in named if matrix is not None)


def _set_eager(function: Any) -> None:
    # The models find the function by its registered name (T5's in the table, the others' through upstream).
    OWN_FUNCTIONS[EAGER] = function
    AttentionInterface.register(EAGER, function)


def _reads(heads: int, kv_heads: int) -> tuple[int, ...]:
    groups = consecutive_groups(heads, kv_heads)
    return tuple(head for head, group in enumerate(groups) for _ in group) if kv_heads < heads else ()


def _mixed(
    heads: torch.Tensor, proj: torch.Tensor, by_query: torch.Tensor | None, by_memory: torch.Tensor | None
) -> torch.Tensor:
    mixed = torch.einsum("binm,ij->bjnm", heads, proj)
    if by_query is not None:
        mixed = mixed + torch.einsum("binm,bnij->bjnm", heads, by_query)
    if by_memory is not None:
        mixed = mixed + torch.einsum("binm,bmij->bjnm", heads, by_memory)
    return mixed


def _allowed(like: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor:
    """[b, 1, n, m]: what a query may attend to; a mask that differs between heads allows what any head may see."""
    allowed = torch.ones_like(like, dtype=torch.bool)
    if is_causal:
        allowed = allowed.tril()
    if mask is not None:
        # Additive masks forbid by the dtype's minimum; a bias in them, if any, is far above half of it.
        may = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        allowed = allowed & may.any(dim=1, keepdim=True)
    return allowed


def _centred(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """[heads, n, m] of the first example."""
    logits = logits.float().masked_fill(~allowed, torch.nan)
    return _cpu((logits - logits.nanmean(-1, keepdim=True))[0])


def _cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().cpu()
