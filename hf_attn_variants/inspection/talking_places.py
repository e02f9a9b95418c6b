"""Where the heads of a model talk, and how: for tables, cards and diagrams."""

from collections.abc import Sequence
from typing import Any

from ..modeling.fields.field_table import PLACES
from ..modeling.mechanisms.head_sharing import key_value_field
from ..modeling.mechanisms.talking_heads import KIND, TalkingHeads, talking_places

__all__ = ["places_of_stacks", "talking_by_place", "talking_parts"]


def places_of_stacks(config: Any, fields: Sequence[str]) -> tuple[str, ...]:
    """Return the prefixes of the places that are in the stacks of some fields of key/value heads.

    Cross-attention is in the decoder's; a model that is an encoder, or a decoder without one, has none.
    """
    has_cross = hasattr(config, "encoder_decoder_layers") or getattr(config, "add_cross_attention", False)
    return tuple(
        prefix
        for prefix in talking_places(config)
        if key_value_field(prefix) in fields and (prefix != "cross_" or has_cross)
    )


def talking_by_place(config: Any, fields: Sequence[str]) -> dict[str, list[TalkingHeads]]:
    """Return how heads talk in each layer of each place in these stacks, {prefix: [of each layer]}."""
    return {
        prefix: [config.talking_heads_of(prefix, layer) for layer in range(config.layer_count(prefix + KIND))]
        for prefix in places_of_stacks(config, fields)
    }


def talking_parts(config: Any, fields: Sequence[str]) -> list[tuple[str, str]]:
    """Return which projections there are, and where: ("both", ""), or ("logits", " in cross-attention").

    Nothing is said of where, if it is everywhere in these stacks.

    Args:
        config: a variant configuration.
        fields: of key/value heads, of the stacks that are looked at.
    """
    by_place = talking_by_place(config, fields)
    kinds = [each.kind for layers in by_place.values() for each in layers]
    if len({*kinds}) == 1:
        return [] if kinds[0] is None else [(kinds[0], "")]
    found: dict[str, list[str]] = {}
    for prefix, layers in by_place.items():
        for kind in dict.fromkeys(each.kind for each in layers if each.kind is not None):
            having = [str(layer) for layer, each in enumerate(layers) if each.kind == kind]
            some = f" (layer{'s' * (len(having) > 1)} {', '.join(having)})" if len(having) < len(layers) else ""
            found.setdefault(kind, []).append(PLACES[prefix].here + some)
    return [(kind, f" in {' and '.join(places)}") for kind, places in found.items()]
