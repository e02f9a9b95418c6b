"""What a token costs in the cache of a decoder: for a conversion's report and for tables of costs."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from .modeling.attention_sites import AttentionSite
from .modeling.configuration_attn_variants import can_cache

__all__ = ["cache_bytes_per_token"]


def cache_bytes_per_token(config: Any, attentions: Iterable[tuple[AttentionSite, int]]) -> dict[str, int] | None:
    """Return what one token costs in each kind of cached attention, over all layers, in bytes.

    Args:
        config: the model's variant configuration.
        attentions: each attention's site, and the bytes of a token's keys and values there.

    Returns:
        {site: bytes}: "self" or "decoder" for a generated token, "cross" for a token of the encoder; None for a model
        without a cache, an encoder or one that `can_cache` refuses.
    """
    if not can_cache(config):
        return None
    sites: Counter[str] = Counter()
    for site, size in attentions:
        # The encoder's attention, or any attention of an encoder-only model, is computed once.
        if site.stack_of(config) == "decoder":
            sites[site.name] += size
    return dict(sites) or None
