"""Attention maps of a model on one text, per layer and head, before and after the talking-heads projections.

Letters as in `attention_variants`.
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

from ...modeling.attention_sites import AttentionSite
from ...modeling.attention_variants import EAGER, OWN_FUNCTIONS, attention_with_weights, eager_attention_forward
from ...modeling.configuration_attn_variants import can_cache
from ...modeling.variant_mixins import AttnVariantModelMixin

__all__ = ["AttentionMaps", "Projection", "Stage", "TextMaps", "attention_maps"]

# For each attention site, its name for people and for files.
SITE_NAMES = {
    "self": ("layer {}", "layer_{:02d}"),
    "encoder": ("encoder layer {}", "encoder_layer_{:02d}"),
    "decoder": ("decoder layer {}, self-attention", "decoder_layer_{:02d}_self"),
    "cross": ("decoder layer {}, cross-attention", "decoder_layer_{:02d}_cross"),
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
        layer: counted from 1.
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
        return SITE_NAMES[self.site][0].format(self.layer)

    @property
    def file_name(self) -> str:
        """The same without spaces, for files to sort by."""
        return SITE_NAMES[self.site][1].format(self.layer)


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
        inputs, read_target, is_cut = _model_inputs(model, tokenizer, text, target_text, max_length)
        model.set_attn_implementation("eager")
        labels = {"text": token_labels(tokenizer, inputs["input_ids"][0])}
        if has_decoder:
            labels["target"] = token_labels(tokenizer, inputs["decoder_input_ids"][0])
        recorder = _Recorder(model, labels)
        with recorder.recording():
            # A decoder's cache would only cost memory here, and memory-side dynamic projections refuse one.
            model.base_model(**inputs, **({"use_cache": False} if has_decoder else {}))
    finally:
        model.set_attn_implementation(implementation)
        model.train(was_training)
    return TextMaps(
        text=text,
        target_text=read_target,
        target_is_output=has_decoder and target_text is None,
        is_cut=is_cut,
        attentions=tuple(recorder.calls),
    )


def token_labels(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> tuple[str, ...]:
    """Return one readable label a token: its text, or the vocabulary's name where a piece alone is no text."""
    labels = []
    for token in ids.tolist():
        name = str(tokenizer.convert_ids_to_tokens(token))
        text = tokenizer.decode([token]).strip()
        labels.append(name if not text or "\N{REPLACEMENT CHARACTER}" in text else text)
    return tuple(labels)


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int, name: str) -> dict[str, torch.Tensor]:
    if not text.strip():
        raise ValueError(f"`{name}` is empty.")
    batch = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
    if not batch["input_ids"].shape[1]:
        raise ValueError(f"`{name}` {text!r} has no tokens.")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def _is_cut(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int) -> bool:
    return len(tokenizer(text)["input_ids"]) > max_length


def _model_inputs(
    model: Any, tokenizer: PreTrainedTokenizerBase, text: str, target_text: str | None, max_length: int
) -> tuple[dict[str, torch.Tensor], str | None, bool]:
    """The model's arguments, the text that a decoder reads, and whether a text was cut."""
    inputs = {name: ids.to(model.device) for name, ids in _encoded(tokenizer, text, max_length, "text").items()}
    is_cut = _is_cut(tokenizer, text, max_length)
    if not hasattr(model.base_model, "decoder"):
        return inputs, None, is_cut
    if target_text is not None:
        target = _encoded(tokenizer, target_text, max_length, "target_text")["input_ids"].to(model.device)
        is_cut |= _is_cut(tokenizer, target_text, max_length)
    elif model.can_generate():
        options = {"use_cache": can_cache(model.config)}
        target = model.generate(**inputs, max_new_tokens=max_length, num_beams=1, do_sample=False, **options)[:, 1:]
        is_cut |= target.shape[1] == max_length and int(target[0, -1]) != tokenizer.eos_token_id
        target_text = tokenizer.decode(target[0], skip_special_tokens=True)
    else:
        raise ValueError(f"{type(model).__name__} generates nothing by itself: give a `target_text`.")
    start = torch.full_like(target[:, :1], model.config.decoder_start_token_id)
    return inputs | {"decoder_input_ids": torch.cat([start, target[:, :-1]], dim=1)}, target_text, is_cut


class _Recorder:
    """Computes the stages of each attention call beside the model's own."""

    def __init__(self, model: AttnVariantModelMixin, labels: dict[str, tuple[str, ...]]):
        self.calls: list[AttentionMaps] = []
        self._labels = labels
        # By the submodule that calls the attention function.
        self._modules: dict[nn.Module, tuple[AttentionSite, str]] = {
            module.get_submodule(site.core): (site, path) for site, path, module in model.named_attentions()
        }
        self._counts: Counter[str] = Counter()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the block runs, under the name that the models' "eager" has."""
        _set_eager(self._attention)
        try:
            yield
        finally:
            _set_eager(eager_attention_forward)

    def _attention(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any):
        if module in self._modules:
            site, path = self._modules[module]
            self._counts[site.name] += 1
            self._note(site, path, module, query, key, *args, **kwargs)
        return eager_attention_forward(module, query, key, *args, **kwargs)

    def _note(
        self,
        site: AttentionSite,
        path: str,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        asked = getattr(module, "is_causal", False) if is_causal is None else is_causal
        projs = {name: getattr(module, name, None) for name in ("logits_proj", "weights_proj")}
        terms = {name: kwargs[name] for name in ("x2l", "m2l", "x2w", "m2w") if kwargs.get(name) is not None}
        query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        is_causal = mask is None and query.shape[2] > 1 and asked
        decodes = site.stack == "decoder"
        self.calls.append(
            AttentionMaps(
                site=site.name,
                layer=self._counts[site.name],
                path=path,
                query_tokens=self._labels["target" if decodes else "text"],
                key_tokens=self._labels["target" if decodes and not site.is_cross_attention else "text"],
                stages=_stages(query, key, value.shape[1], mask, position_bias, is_causal, terms, **projs),
                projections=_projections(**projs),
                kv_heads=key.shape[1],
                dynamic=tuple(terms),
            )
        )


def _stages(
    query: torch.Tensor,
    key: torch.Tensor,
    kv_value_heads: int,
    mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    is_causal: bool,
    terms: dict[str, torch.Tensor],
    logits_proj: torch.Tensor | None,
    weights_proj: torch.Tensor | None,
) -> tuple[Stage, ...]:
    """The stages of one call of a batch of one; the queries are scaled."""
    heads, kv_heads = query.shape[1], key.shape[1]
    reads_keys = _reads(heads, kv_heads)
    options = {"scaling": 1.0, "is_causal": is_causal, "logits_proj": logits_proj}
    options |= {name: terms.get(name) for name in ("x2l", "m2l")}
    no_values = key.new_zeros(1, 1, key.shape[2], 1)
    _, weights = attention_with_weights(query, key, no_values, mask, position_bias, **options)  # [1, h, n, m]
    if logits_proj is None and weights_proj is None:
        return (Stage("weights", "attention weights", "head", _cpu(weights[0]), reads_keys),)
    stages = []
    if logits_proj is not None:
        logits = query @ key.repeat_interleave(heads // kv_heads, dim=1).transpose(-1, -2)  # [1, h_k, n, m]
        mixed = _mixed(logits, logits_proj, terms.get("x2l"), terms.get("m2l"))  # [1, h, n, m]
        allowed = _allowed(weights[:, :1], mask, is_causal)
        before, after = (_centred(states, allowed) for states in (logits, mixed))
        stages.append(
            Stage("logits_before", "logits of the query heads, before P_l", "query head", before, reads_keys)
        )
        stages.append(Stage("logits_after", "logits of the softmax heads, after P_l", "softmax head", after))
    # Without P_l the softmax heads are the query heads; without P_w they are the value heads.
    reads = reads_keys if logits_proj is None else ()
    if weights_proj is None:
        reads = _reads(weights.shape[1], kv_value_heads)
    title = "weights after the softmax" + ("" if weights_proj is None else ", before P_w")
    stages.append(Stage("weights_before", title, "softmax head", _cpu(weights[0]), reads))
    if weights_proj is not None:
        mixed = _mixed(weights, weights_proj, terms.get("x2w"), terms.get("m2w"))  # [1, h_v, n, m]
        reads = _reads(mixed.shape[1], kv_value_heads)
        stages.append(
            Stage("weights_after", "weights of the value heads, after P_w", "value head", _cpu(mixed[0]), reads)
        )
    return tuple(stages)


def _projections(logits_proj: torch.Tensor | None, weights_proj: torch.Tensor | None) -> tuple[Projection, ...]:
    named = (("P_l", "query head", "softmax head", logits_proj), ("P_w", "softmax head", "value head", weights_proj))
    return tuple(Projection(*names, _cpu(matrix)) for *names, matrix in named if matrix is not None)


def _set_eager(function: Any) -> None:
    # The models find the function by its registered name (T5's in the table, the others' through upstream).
    OWN_FUNCTIONS[EAGER] = function
    AttentionInterface.register(EAGER, function)


def _reads(heads: int, kv_heads: int) -> tuple[int, ...]:
    return tuple(head * kv_heads // heads for head in range(heads)) if kv_heads < heads else ()


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
