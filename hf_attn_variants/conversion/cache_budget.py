"""Bytes per token in the cache of a decoder, and the latents that fit into a budget of bytes.

Head counts are not among the choices: keys and values of k heads are a latent of 2 k d numbers, one whose projections
are tied, and a free latent of that size loses less.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..modeling.attention.attention_sites import AttentionSite
from ..modeling.fields.variant_config import can_cache
from ..modeling.ops.variant_attention import AttentionHeads
from ..registration import variant_config_class
from .attention_modules import AttentionModule
from .checkpoint.tensor_files import TensorEntry, element_size
from .plan import ConversionPlan

__all__ = [
    "PROBE",
    "cache_bytes_per_token",
    "cached_numbers",
    "check_cache_bytes",
    "check_has_cache",
    "fields_within",
    "ranks_within",
]


def cached_numbers(heads: AttentionHeads, width: int) -> int:
    """Return the numbers that one attention keeps of a token: its latent, or its keys and values.

    Args:
        heads: the attention's.
        width: of what keys and values are made from: a latent is at most as wide.
    """
    if heads.rank is not None:
        return min(heads.rank, width)
    return heads.key * heads.head_dim + heads.value * heads.value_dim


def cache_bytes_per_token(config: Any, attentions: Iterable[tuple[AttentionSite, int]]) -> dict[str, int] | None:
    """Return what one token costs in each kind of cached attention, over all layers, in bytes.

    A latent that all layers share is kept, and counted, once. The keys and values that a decoder keeps beside a latent
    of few source tokens (`latent_attention.is_short`) are not counted: they are no more numbers than the maps that
    make them.

    Args:
        config: the model's variant configuration.
        attentions: each attention's site, and the bytes of what is kept of a token there (`cached_numbers`).

    Returns:
        {site: bytes}: "self" or "decoder" for a generated token, "cross" for a token of the encoder; None for a model
        without a cache, an encoder or one that `can_cache` refuses.
    """
    if not can_cache(config):
        return None
    sites: Counter[str] = Counter()
    for site, size in attentions:
        # The encoder's attention, or any attention of an encoder-only model, is computed once.
        if site.stack_of(config) != "decoder":
            continue
        is_shared = site.shares_latent and getattr(config, site.rank_field or "", None) is not None
        sites[site.name] = size if is_shared else sites[site.name] + size
    return dict(sites) or None


# Fields of a plan whose attentions are to be looked at: any latents.
PROBE = {"cross_kv_lora_rank": 1, "kv_lora_rank": 1}
CHOSEN = {*PROBE, "num_key_value_heads"}
# Ranks are multiples of this many, which kernels like, where there are as many for each layer at least.
STEP, STEPPED_FROM = 8, 16


def check_cache_bytes(kv_cache_bytes: Any, fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of a source token and of a generated one.

    Args:
        kv_cache_bytes: as a user gave them.
        fields: the other fields that are asked for.

    Raises:
        ValueError: unless they are two whole numbers from 1, and nothing else says what they choose.
    """
    sizes = tuple(kv_cache_bytes) if isinstance(kv_cache_bytes, Sequence) else ()
    if len(sizes) != 2 or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in sizes):
        raise ValueError(
            "`kv_cache_bytes` must be two whole numbers from 1, bytes a source token and bytes a generated token; got "
            f"{kv_cache_bytes!r}."
        )
    by_layer = fields.get("per_layer_values") or {}
    said = [name for name in sorted(CHOSEN) if fields.get(name) is not None or name in by_layer]
    if said:
        raise ValueError(f"`kv_cache_bytes` chooses `{said[0]}`: give one of the two.")
    return sizes


def check_has_cache(config: Mapping[str, Any]) -> None:
    """Raise ValueError unless a config.json is of an encoder-decoder whose cache's size can be chosen."""
    architecture = next(iter(config.get("architectures") or ()), "")
    has_latents = "cross_kv_lora_rank" in variant_config_class(config.get("model_type", "")).rank_fields()
    if not has_latents or architecture.endswith(("EncoderModel", "ForTokenClassification")):
        raise ValueError(
            "`kv_cache_bytes` is for encoder-decoders, whose cache has source tokens and generated ones; the source "
            f"is a {architecture or config['model_type']}: give numbers of heads or ranks instead."
        )


def fields_within(
    probe: ConversionPlan,
    kv_cache_bytes: tuple[int, int],
    entries: Mapping[str, TensorEntry],
    losses: Callable[[list[AttentionModule]], list[torch.Tensor]],
) -> dict[str, Any]:
    """Return the ranks by which a decoder's cache takes no more than so many bytes a token.

    Args:
        probe: a plan of any latents (`PROBE`) for the source.
        kv_cache_bytes: of a source token, of a generated token; in the dtype stored.
        entries: the source's tensors.
        losses: gives of each of these attentions what is lost by rank from 0 (`lost_by_rank`).

    Raises:
        ValueError: if a number a token and latent does not fit, or the source takes no more than that already.
    """
    config, width = probe.source_config, probe.source_config.hidden_size
    sizes, numbers = [], {}
    for module in probe.modules:
        stored = entries[module.tensors["key_weight"]].dtype
        itemsize = element_size(stored) if probe.dtype is None else probe.dtype.itemsize
        numbers[module.name] = cached_numbers(module.site.heads(config, module.name), width)
        sizes.append((module.site, numbers[module.name] * itemsize))
    now = cache_bytes_per_token(config, sizes) or {}
    if not now:
        raise ValueError(
            "`kv_cache_bytes` is for decoders that keep a cache: the source's dynamic projections do not."
        )
    source, generated = (size // itemsize for size in kv_cache_bytes)
    layers = [module for module in probe.modules if module.site.name == "decoder"]
    least = {"source": 1, "generated": len(layers)}
    for (name, fewest), limit in zip(least.items(), (source, generated), strict=True):
        if limit < fewest:
            raise ValueError(
                f"`kv_cache_bytes` has room for {limit} numbers a {name} token: {fewest} are the fewest, one a latent."
            )
    fields: dict[str, Any] = {}
    if source * itemsize < now["cross"]:
        fields["cross_kv_lora_rank"] = min(source, width)
    if generated * itemsize < now["decoder"]:
        most = [min(numbers[module.name], width) for module in layers]
        ranks = ranks_within(losses(layers), generated, most)
        # As many numbers as a layer keeps now: it stays as it is, with its latent or its keys and values.
        now_kept = [(numbers[module.name], module.site.heads(config, module.name).rank) for module in layers]
        ranks_kept = [own if rank == count else rank for rank, (count, own) in zip(ranks, now_kept, strict=True)]
        fields["per_layer_values"] = {"kv_lora_rank": ranks_kept}
    if not fields:
        raise ValueError(
            f"the source's cache takes {now['cross']} bytes a source token and {now['decoder']} a generated token: "
            f"`kv_cache_bytes` allows {kv_cache_bytes[0]} and {kv_cache_bytes[1]}, so there is nothing to convert."
        )
    return fields


def ranks_within(lost: Sequence[torch.Tensor], total: int, most: Sequence[int]) -> list[int]:
    """Return a rank for each layer, together at most `total`, that lose the smallest share of energy in all.

    Args:
        lost: of each layer the share that is lost by rank, from 0; each number more takes less off.
        total: how many numbers there are; one a layer at least.
        most: the largest rank of each layer.
    """
    step = STEP if total >= STEPPED_FROM * len(lost) else 1
    ranks = [min(step, largest) for largest in most]

    def gain(layer: int) -> float:
        """Return what a step more takes off; less than nothing where there is no room for one."""
        rank = ranks[layer]
        more = min(rank + step, most[layer])
        if more == rank or sum(ranks) + more - rank > total:
            return -1.0
        losses = lost[layer]
        return float(losses[min(rank, len(losses) - 1)] - losses[min(more, len(losses) - 1)]) / (more - rank)

    while max(gains := [gain(layer) for layer in range(len(ranks))]) >= 0:
        best = gains.index(max(gains))
        ranks[best] = min(ranks[best] + step, most[best])
    return ranks
