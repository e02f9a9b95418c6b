"""Which variants of a checkpoint are worth trying: fewer key/value heads, latents, and both sizes of them together."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..costs import has_latents, kv_head_counts, values_by_layer

__all__ = ["default_options", "options_of"]

Fields = dict[str, Any]
# The most numbers of key/value heads that are tried where nobody says which.
MOST_COUNTS = 4


def default_options(config: Any, field: str, decodes: bool) -> list[Fields]:
    """Return the fields of the variants to try.

    Of an encoder-decoder: latents of its cross-attention, from the exact one down, with such of the decoder's
    self-attention whose sizes go with them; of other models latents of their attention. And fewer key/value heads.

    Args:
        config: the source's variant configuration.
        field: of the key/value heads that are varied.
        decodes: whether the attention of these heads has a cache.
    """
    width, own_counts = config.hidden_size, values_by_layer(config, field) or [config.query_heads(field)]
    multi_query = 2 * config.attention_head_dim()  # numbers a token and layer
    # Whole groups are merged, in each layer.
    counts = [count for count in kv_head_counts(config, field) if count < max(own_counts)]
    counts = [count for count in counts if all(own % count == 0 or count % own == 0 for own in own_counts)]

    def fits(value: int | None) -> bool:
        return value is None or 1 <= value <= width

    options: list[Fields] = []
    if has_latents(config, field):
        pass  # what they are made from is not there any more: smaller ones are what a user asks for by name
    elif "cross_kv_lora_rank" in config.rank_fields() and decodes:
        cross = [width, width // 2, 3 * width // 8, width // 4]
        own = [None, 2 * multi_query, multi_query, multi_query // 2]
        pairs = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 2), (2, 3), (3, 2), (3, 3)]
        options += [{"cross_kv_lora_rank": cross[i], "kv_lora_rank": own[j]} for i, j in pairs]
    else:
        name = "encoder_kv_lora_rank" if field.startswith("encoder_") else "kv_lora_rank"
        exact = [width] if decodes else []  # an encoder would compute more, and store as much
        options += [{name: rank} for rank in (*exact, width // 2, 3 * width // 8, width // 4, width // 8)]
    options += [{field: count} for count in _spread(counts)]
    return _distinct(option for option in options if all(fits(value) for value in option.values()))


def options_of(given: Mapping[str, Sequence[int] | None]) -> list[Fields]:
    """Return the variants of the values that a user names: heads alone, and ranks in all their combinations.

    Args:
        given: {field: values}; None = not given.
    """
    heads = [(name, values) for name, values in given.items() if "heads" in name and values]
    ranks = {name: values for name, values in given.items() if "rank" in name and values}
    options = [dict(zip(ranks, chosen, strict=True)) for chosen in itertools.product(*ranks.values())] if ranks else []
    return _distinct([*options, *({name: value} for name, values in heads for value in values)])


def _spread(counts: Sequence[int]) -> list[int]:
    """Return at most `MOST_COUNTS` of them, the largest and the smallest among them."""
    if len(counts) <= MOST_COUNTS:
        return list(counts)
    step = (len(counts) - 1) / (MOST_COUNTS - 1)
    return [counts[round(i * step)] for i in range(MOST_COUNTS)]


def _distinct(options: Iterable[Fields]) -> list[Fields]:
    """Return options without what is not given and without repeats, in their order."""
    found: list[Fields] = []
    for option in options:
        fields = {name: value for name, value in option.items() if value is not None}
        if fields and fields not in found:
            found.append(fields)
    return found
