"""Which variants of a checkpoint are worth trying: fewer key/value heads, latents, and both sizes of them together."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
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
    width, heads = config.hidden_size, max(values_by_layer(config, field), default=config.query_heads(field))
    multi_query = 2 * config.attention_head_dim  # numbers a token and layer
    counts = [count for count in kv_head_counts(config, field) if count < heads]
    options: list[Fields] = []
    if has_latents(config, field):
        pass  # what they are made from is not there any more: smaller ones are what a user asks for by name
    elif "cross_kv_lora_rank" in config.rank_fields() and decodes:
        cross = [width, width // 2, width // 4, width // 8]
        own = [None, 2 * multi_query, multi_query, multi_query // 2]
        pairs = [(0, 0), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3)]
        options += [{"cross_kv_lora_rank": cross[i], "kv_lora_rank": own[j]} for i, j in pairs]
    else:
        name = "encoder_kv_lora_rank" if field.startswith("encoder_") else "kv_lora_rank"
        exact = [width] if decodes else []  # an encoder would compute more, and store as much
        options += [{name: rank} for rank in (*exact, width // 2, 3 * width // 8, width // 4, width // 8)]
    options += [{field: count} for count in _spread(counts)]
    return _distinct(options, width)


def options_of(given: Mapping[str, Sequence[int] | None], width: int) -> list[Fields]:
    """Return the variants of the values that a user names: heads alone, and ranks in all their combinations.

    Args:
        given: {field: values}; None = not given.
        width: of the model, the largest rank.
    """
    heads = [(name, values) for name, values in given.items() if "heads" in name and values]
    ranks = {name: values for name, values in given.items() if "rank" in name and values}
    options = [dict(zip(ranks, chosen, strict=True)) for chosen in itertools.product(*ranks.values())] if ranks else []
    return _distinct([*options, *({name: value} for name, values in heads for value in values)], width)


def _spread(counts: Sequence[int]) -> list[int]:
    """Return at most `MOST_COUNTS` of them, the largest and the smallest among them."""
    if len(counts) <= MOST_COUNTS:
        return list(counts)
    step = (len(counts) - 1) / (MOST_COUNTS - 1)
    return [counts[round(i * step)] for i in range(MOST_COUNTS)]


def _distinct(options: Sequence[Fields], width: int) -> list[Fields]:
    return list(_without_repeats(options, width))


def _without_repeats(options: Sequence[Fields], width: int) -> Iterator[Fields]:
    seen = []
    for option in options:
        fields = {name: value for name, value in option.items() if value is not None}
        fits = all("rank" not in name or 1 <= value <= width for name, value in fields.items())
        if fields and fits and fields not in seen:
            seen.append(fields)
            yield fields
