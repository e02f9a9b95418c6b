"""Head sharing, in which equally large groups of query heads share keys and values.

Multi-query attention (MQA) has a single key/value head, and grouped-query attention (GQA) has several. Multi-head
attention (MHA) has as many key/value heads as query heads. All attention modules in this package support any number of
key/value heads. Fewer heads require smaller projections, and `ops.softmax_attention` uses one key/value head per
group. This module does not import torch, because the commands create a flag from its field.
"""

from collections.abc import Collection
from typing import Any

from .mechanism import Mechanism

__all__ = [
    "KV_HEADS",
    "GroupedQueryAttention",
    "HeadSharing",
    "MultiQueryAttention",
    "get_consecutive_groups",
    "get_head_sharing",
    "get_kv_heads_field",
]


# The field with the number of key/value heads, without a prefix.
KV_HEADS = "num_key_value_heads"


class HeadSharing(Mechanism):
    """Attention whose heads share keys and values. This class is not instantiated.

    Class attributes:
        label: the abbreviation of the mechanism.
        words: the name of the mechanism for use in sentences.
    """

    field = KV_HEADS
    label = "MHA"
    words = "multi-head"

    @classmethod
    def find_requesting_field(cls, config: Any, prefix: str) -> tuple[str, int] | None:
        """Return the key/value heads field of a place and the smallest value of this field in any layer.

        The result is None if the place does not use this kind of head sharing.
        """
        field = get_kv_heads_field(prefix)
        if not hasattr(config, field):
            return None
        counts = {config.get_layer_value(field, layer) for layer in range(config.get_num_layers(field))}
        counts = counts or {getattr(config, field)}  # an encoder or decoder may have no layers
        sharing = get_head_sharing(counts, config.get_query_heads(field))
        return (field, min(counts)) if sharing is not HeadSharing and issubclass(sharing, cls) else None


class GroupedQueryAttention(HeadSharing):
    """Grouped-query attention, with one key/value head per group of query heads (section 2.2 of the paper)."""

    label = "GQA"
    words = "grouped-query"
    paper = ("Grouped-query attention", "2305.13245")


class MultiQueryAttention(HeadSharing):
    """Multi-query attention, with one key/value head for all query heads (section 3 of the paper)."""

    label = "MQA"
    words = "multi-query"
    paper = ("Multi-query attention", "1911.02150")


def get_head_sharing(kv_head_counts: Collection[int], heads: int) -> type[HeadSharing]:
    """Return the kind of head sharing in an encoder or decoder, or `HeadSharing` if heads are not shared.

    Args:
        kv_head_counts: the number of key/value heads in each layer.
        heads: h_k, the number of query heads in a layer.
    """
    if min(kv_head_counts) == heads:
        return HeadSharing
    return MultiQueryAttention if max(kv_head_counts) == 1 else GroupedQueryAttention


def get_consecutive_groups(num_heads: int, num_groups: int) -> list[list[int]]:
    """Return the query heads in each of `num_groups` groups.

    Group i contains heads g*i to g*i + g - 1, where g is the number of heads per group.
    """
    size = num_heads // num_groups
    return [list(range(size * i, size * (i + 1))) for i in range(num_groups)]


def get_kv_heads_field(prefix: str) -> str:
    """Return the name of the key/value heads field for a place. Cross-attention uses the decoder's field."""
    return f"{prefix if prefix == 'encoder_' else ''}{KV_HEADS}"
