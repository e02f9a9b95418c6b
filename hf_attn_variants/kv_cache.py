"""What a token costs in the cache of a decoder: for a conversion's report and for tables of costs."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from .modeling.attention.attention_sites import AttentionSite
from .modeling.fields.variant_config import can_cache
from .modeling.ops.variant_attention import AttentionHeads

__all__ = ["cache_bytes_per_token", "cached_numbers"]


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
