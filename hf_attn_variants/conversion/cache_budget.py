"""The cache size per token of a decoder, and the latent ranks that fit into a budget of bytes.

The budget does not choose head counts. Keys and values of k heads are a latent of 2 k d numbers with tied projections,
and a free latent of that size loses less.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..modeling.attention.attention_sites import AttentionSite
from ..modeling.fields.variant_config import supports_decoder_cache
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
    """Return how many numbers one attention caches per token: its latent, or its keys and values.

    Args:
        heads: The heads of the attention.
        width: Size of the input of keys and values. A latent is at most as wide.
    """
    if heads.rank is not None:
        return min(heads.rank, width)
    return heads.key * heads.head_dim + heads.value * heads.value_dim


def cache_bytes_per_token(config: Any, attentions: Iterable[tuple[AttentionSite, int]]) -> dict[str, int] | None:
    """Return the cache size per token of each kind of attention, summed over all layers, in bytes.

    A latent that all layers share counts once. Decoders also cache the keys and values of short source texts
    (`latent_attention.is_short_latent`). These are not counted, because they are not larger than the projections.

    Args:
        config: The variant configuration of the model.
        attentions: The kind of each attention, and its bytes per token (see `cached_numbers`).

    Returns:
        {kind: bytes}: "self" or "decoder" per generated token, "cross" per source token. None for a model without a
        cache: an encoder, or a model that `supports_decoder_cache` excludes.
    """
    if not supports_decoder_cache(config):
        return None
    sites: Counter[str] = Counter()
    for site, size in attentions:
        # The attention of an encoder, or of an encoder-only model, is not cached.
        if site.get_stack_name(config) != "decoder":
            continue
        is_shared = site.shares_latent and getattr(config, site.rank_field or "", None) is not None
        sites[site.name] = size if is_shared else sites[site.name] + size
    return dict(sites) or None


# Fields of a plan that selects the attentions to compress. The ranks do not matter.
PROBE = {"cross_kv_lora_rank": 1, "kv_lora_rank": 1}
# Fields that the budget determines.
BUDGET_FIELDS = {*PROBE, "num_key_value_heads"}
# Ranks are multiples of RANK_STEP, which suits GPU kernels, if there are MIN_STEPPED_RANK numbers per layer or more.
RANK_STEP, MIN_STEPPED_RANK = 8, 16


def check_cache_bytes(kv_cache_bytes: Any, fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the cache budget of a source token and of a generated token, in bytes.

    Args:
        kv_cache_bytes: The value of the user.
        fields: The other fields of the conversion.

    Raises:
        ValueError: if the value is not two positive integers, or if a field sets a rank or the key/value heads too.
    """
    sizes = tuple(kv_cache_bytes) if isinstance(kv_cache_bytes, Sequence) else ()
    if len(sizes) != 2 or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(
            "`kv_cache_bytes` must be two integers of at least 1 (bytes per source token and per generated token), "
            f"got {kv_cache_bytes!r}."
        )
    by_layer = fields.get("per_layer_values") or {}
    conflicts = [name for name in sorted(BUDGET_FIELDS) if fields.get(name) is not None or name in by_layer]
    if conflicts:
        raise ValueError(f"`kv_cache_bytes` determines `{conflicts[0]}`. Give only one of the two.")
    return sizes


def check_has_cache(config: Mapping[str, Any]) -> None:
    """Check that a config.json belongs to an encoder-decoder, whose cache can have a budget.

    Raises:
        ValueError: if it does not.
    """
    architecture = next(iter(config.get("architectures") or ()), "")
    has_latents = "cross_kv_lora_rank" in variant_config_class(config.get("model_type", "")).rank_fields()
    if not has_latents or architecture.endswith(("EncoderModel", "ForTokenClassification")):
        raise ValueError(
            "`kv_cache_bytes` must only be given for encoder-decoders, which cache source and generated tokens, got "
            f"{architecture or config['model_type']}. Give head counts or ranks instead."
        )


def fields_within(
    probe: ConversionPlan,
    kv_cache_bytes: tuple[int, int],
    entries: Mapping[str, TensorEntry],
    losses: Callable[[list[AttentionModule]], list[torch.Tensor]],
) -> dict[str, Any]:
    """Return the fields with the latent ranks whose cache fits into the budget.

    Args:
        probe: A plan that compresses all attentions to latents (`PROBE`).
        kv_cache_bytes: Bytes per source token and per generated token, in the stored dtype.
        entries: The tensors of the original model.
        losses: Function that returns for each of the given modules the energy lost by rank (`lost_by_rank`).

    Raises:
        ValueError: if the budget is below one number per latent and token, or not below the present cache size.
    """
    config, width = probe.source_config, probe.source_config.hidden_size
    sizes, numbers = [], {}
    for module in probe.modules:
        stored = entries[module.tensors["key_weight"]].dtype
        itemsize = element_size(stored) if probe.dtype is None else probe.dtype.itemsize
        numbers[module.name] = cached_numbers(module.site.get_heads(config, module.name), width)
        sizes.append((module.site, numbers[module.name] * itemsize))
    old_sizes = cache_bytes_per_token(config, sizes) or {}
    if not old_sizes:
        raise ValueError(
            "`kv_cache_bytes` must only be given for decoders with a cache, but the dynamic talking-heads projections "
            "of this model do not allow one. Leave it out."
        )
    source, generated = (size // itemsize for size in kv_cache_bytes)
    layers = [module for module in probe.modules if module.site.name == "decoder"]
    minimums = {"source": 1, "generated": len(layers)}
    for (name, minimum), limit in zip(minimums.items(), (source, generated), strict=True):
        if limit < minimum:
            raise ValueError(
                f"`kv_cache_bytes` must allow at least {minimum} numbers per {name} token (one per latent), got "
                f"{limit}. Give more bytes."
            )
    fields: dict[str, Any] = {}
    if source * itemsize < old_sizes["cross"]:
        fields["cross_kv_lora_rank"] = min(source, width)
    if generated * itemsize < old_sizes["decoder"]:
        max_ranks = [min(numbers[module.name], width) for module in layers]
        ranks = ranks_within(losses(layers), generated, max_ranks)
        # A layer that needs no smaller cache keeps its latent, or its keys and values.
        old = [(numbers[module.name], module.site.get_heads(config, module.name).rank) for module in layers]
        new_ranks = [old_rank if rank == count else rank for rank, (count, old_rank) in zip(ranks, old, strict=True)]
        fields["per_layer_values"] = {"kv_lora_rank": new_ranks}
    if not fields:
        raise ValueError(
            f"`kv_cache_bytes` must be below the present cache size of {old_sizes['cross']} bytes per source token or "
            f"{old_sizes['decoder']} bytes per generated token, got {kv_cache_bytes[0]} and {kv_cache_bytes[1]}. Give "
            "fewer bytes."
        )
    return fields


def ranks_within(lost: Sequence[torch.Tensor], total: int, max_ranks: Sequence[int]) -> list[int]:
    """Return a rank for each layer so that all layers together lose the least energy.

    Args:
        lost: For each layer, the share of energy lost by rank, starting at rank 0. It must be convex.
        total: Maximum of the sum of all ranks. It is at least the number of layers.
        max_ranks: Maximum rank of each layer.
    """
    step = RANK_STEP if total >= MIN_STEPPED_RANK * len(lost) else 1
    ranks = [min(step, max_rank) for max_rank in max_ranks]

    def gain(layer: int) -> float:
        """Return the loss avoided per number by one more step, or -1 if no further step is possible."""
        rank = ranks[layer]
        more = min(rank + step, max_ranks[layer])
        if more == rank or sum(ranks) + more - rank > total:
            return -1.0
        losses = lost[layer]
        return float(losses[min(rank, len(losses) - 1)] - losses[min(more, len(losses) - 1)]) / (more - rank)

    while max(gains := [gain(layer) for layer in range(len(ranks))]) >= 0:
        best = gains.index(max(gains))
        ranks[best] = min(ranks[best] + step, max_ranks[best])
    return ranks
