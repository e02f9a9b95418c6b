"""Head sharing: query heads that read one set of keys and values, in groups of equal size.

Multi-query attention (MQA) has one key/value head, grouped-query attention (GQA) has several, multi-head attention
(MHA) has as many as query heads. Every attention here is written for any number of them: a projection is smaller, and
`ops.softmax_attention` reads a key/value head for each group. Nothing here imports torch, for commands make flags of
this field.
"""

from collections.abc import Collection
from typing import Any

from .mechanism import Mechanism

__all__ = ["GroupedQuery", "HeadSharing", "MultiQuery", "consecutive_groups", "key_value_field", "sharing_of"]


class HeadSharing(Mechanism):
    """Heads that share keys and values; nothing is made of this class.

    Class attributes:
        label: what it is called in short.
        words: what it is called in a sentence.
    """

    field = "num_key_value_heads"
    label = "MHA"
    words = "multi-head"

    @classmethod
    def asked_for(cls, config: Any, prefix: str) -> tuple[str, int] | None:
        """Return the field of a place's key/value heads, and the fewest of a layer; None: it does not share so."""
        field = key_value_field(prefix)
        if not hasattr(config, field):
            return None
        counts = {config.layer_value(field, layer) for layer in range(config.layer_count(field))}
        counts = counts or {getattr(config, field)}  # a stack may have no layer
        found = sharing_of(counts, config.query_heads(field))
        return (field, min(counts)) if found is not HeadSharing and issubclass(found, cls) else None


class GroupedQuery(HeadSharing):
    """A key/value head for each group of query heads (section 2.2)."""

    label = "GQA"
    words = "grouped-query"
    paper = ("Grouped-query attention", "2305.13245")


class MultiQuery(HeadSharing):
    """One key/value head for all query heads (section 3)."""

    label = "MQA"
    words = "multi-query"
    paper = ("Multi-query attention", "1911.02150")


def sharing_of(counts: Collection[int], heads: int) -> type[HeadSharing]:
    """Return how heads are shared in the layers of a stack; `HeadSharing` itself where none are.

    Args:
        counts: of key/value heads, of each layer.
        heads: h_k, the query heads of a layer.
    """
    if min(counts) == heads:
        return HeadSharing
    return MultiQuery if max(counts) == 1 else GroupedQuery


def consecutive_groups(heads: int, count: int) -> list[list[int]]:
    """Return the query heads that read each of `count` key/value heads: heads g*i ... g*i + g - 1 read head i."""
    size = heads // count
    return [list(range(size * i, size * (i + 1))) for i in range(count)]


def key_value_field(prefix: str) -> str:
    """Return the field of the key/value heads of a place: cross-attention is in the decoder."""
    return f"{prefix if prefix == 'encoder_' else ''}{HeadSharing.field}"
