"""Head sharing: groups of query heads, of equal size, share one set of keys and values.

Multi-query attention (MQA) has one key/value head, and grouped-query attention (GQA) has several. Multi-head attention
(MHA) has as many key/value heads as query heads. Every attention of this package supports any number of them: the
projections are smaller, and `ops.softmax_attention` uses one key/value head per group. The module does not import
torch, because the commands create flags from this field.
"""

from collections.abc import Collection
from typing import Any

from .mechanism import Mechanism

__all__ = ["GroupedQuery", "HeadSharing", "MultiQuery", "consecutive_groups", "get_head_sharing", "get_kv_heads_field"]


class HeadSharing(Mechanism):
    """Attention whose heads share keys and values. The class is not instantiated.

    Class attributes:
        label: the abbreviation.
        words: the name in a sentence.
    """

    field = "num_key_value_heads"
    label = "MHA"
    words = "multi-head"

    @classmethod
    def requested_in(cls, config: Any, prefix: str) -> tuple[str, int] | None:
        """Return the key/value head field of a place and the smallest count in a layer, or None for another kind."""
        field = get_kv_heads_field(prefix)
        if not hasattr(config, field):
            return None
        counts = {config.layer_value(field, layer) for layer in range(config.layer_count(field))}
        counts = counts or {getattr(config, field)}  # an encoder or decoder may have no layers
        sharing = get_head_sharing(counts, config.query_heads(field))
        return (field, min(counts)) if sharing is not HeadSharing and issubclass(sharing, cls) else None


class GroupedQuery(HeadSharing):
    """Attention with one key/value head per group of query heads (section 2.2)."""

    label = "GQA"
    words = "grouped-query"
    paper = ("Grouped-query attention", "2305.13245")


class MultiQuery(HeadSharing):
    """Attention with one key/value head for all query heads (section 3)."""

    label = "MQA"
    words = "multi-query"
    paper = ("Multi-query attention", "1911.02150")


def get_head_sharing(counts: Collection[int], heads: int) -> type[HeadSharing]:
    """Return the kind of head sharing in the layers of an encoder or decoder; `HeadSharing` means no sharing.

    Args:
        counts: the number of key/value heads of each layer.
        heads: h_k, the number of query heads in a layer.
    """
    if min(counts) == heads:
        return HeadSharing
    return MultiQuery if max(counts) == 1 else GroupedQuery


def consecutive_groups(heads: int, count: int) -> list[list[int]]:
    """Return the query heads of each of `count` key/value heads: heads g*i ... g*i + g - 1 use key/value head i."""
    size = heads // count
    return [list(range(size * i, size * (i + 1))) for i in range(count)]


def get_kv_heads_field(prefix: str) -> str:
    """Return the key/value head field of a place; cross-attention uses the field of the decoder."""
    return f"{prefix if prefix == 'encoder_' else ''}{HeadSharing.field}"
