"""Text diagram of a variant: its query heads, key/value heads, latents and talking-heads projections."""

from collections.abc import Sequence
from typing import Any

from ..inspection.costs import values_by_layer
from ..inspection.tables import talking_by_place
from ..modeling.fields.field_table import PLACES, get_field_row
from ..modeling.mechanisms.head_sharing import consecutive_groups
from ..modeling.mechanisms.talking_heads import BOTH, LOGITS, WEIGHTS, TalkingHeadsSettings, get_query_heads

__all__ = ["heads_diagram", "layers_text"]

MAX_WIDTH = 90
HEADS_TITLES = {"num_key_value_heads": "decoder, self- and cross-attention", "encoder_num_key_value_heads": "encoder"}


def heads_diagram(config: Any, fields: Sequence[str] | None = None) -> str:
    """Return a diagram of the heads of a variant: the groups in columns, and the talking-heads projections in a line.

    Args:
        config: a variant configuration.
        fields: the fields of key/value heads and ranks that apply to attentions of the model. Each field of heads has
            a diagram, so that T5 has two. None means all fields.

    Example:
        For 4 query heads and 2 key/value heads::

            query heads     | q0 q1 | q2 q3 |
            key/value heads |  kv0  |  kv1  |
    """
    fields = (*config.kv_heads_fields(), *config.rank_fields()) if fields is None else fields
    kv_fields = [name for name in config.kv_heads_fields() if name in fields]
    blocks = []
    for field in kv_fields:
        counts = values_by_layer(config, field) or [getattr(config, field)]
        for count in dict.fromkeys(counts):
            title = [HEADS_TITLES[field]] if len(kv_fields) > 1 else []
            title += [layers_text(counts, count)] if len(set(counts)) > 1 else []
            head = [f"{', '.join(title)}:"] if title else []
            blocks.append("\n".join([*head, *_draw_groups(config.query_heads(field), count)]))
    latents = [_describe_latent(config, name, len(kv_fields) > 1) for name in config.rank_fields() if name in fields]
    if any(latents):
        blocks.append("\n".join(filter(None, latents)))
    if chains := _draw_chains(config, kv_fields):
        blocks.append(chains)
    return "\n\n".join(blocks)


def layers_text(values: Sequence[Any], value: Any) -> str:
    """Return the layers that have a value, counted from 0: "layers 0, 2"."""
    layers = [str(layer) for layer, layer_value in enumerate(values) if layer_value == value]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(layers)}"


def _describe_latent(config: Any, field: str, is_t5: bool) -> str:
    """Return the sentence about a latent, or an empty text if the attention has no latent."""
    ranks, parts = values_by_layer(config, field), []
    for rank in dict.fromkeys(rank for rank in ranks if rank is not None):
        numbers = "the input itself" if rank == config.hidden_size else f"a latent of dimension {rank}"
        parts.append(numbers + (f" ({layers_text(ranks, rank)})" if len(set(ranks)) > 1 else ""))
    prefix, _ = get_field_row(field)
    owner = ("the decoder's " if is_t5 and not prefix else "") + PLACES[prefix].whose
    text = f"Keys and values of {owner} are computed from {', '.join(parts)} for each {PLACES[prefix].token}."
    return text if parts else ""


def _draw_groups(heads: int, kv_heads: int) -> list[str]:
    groups = [[f"q{head}" for head in group] for group in consecutive_groups(heads, kv_heads)]
    queries, keys = [" ".join(group) for group in groups], [f"kv{i}" for i in range(kv_heads)]
    if _compute_width(queries, keys) > MAX_WIDTH:
        queries = [group[0] if len(group) == 1 else f"{group[0]}..{group[-1]}" for group in groups]
    if _compute_width(queries, keys) > MAX_WIDTH:
        queries, keys = [*queries[:4], "...", queries[-1]], [*keys[:4], "...", keys[-1]]
    widths = [max(len(query), len(key)) for query, key in zip(queries, keys, strict=True)]
    rows = (("query heads", queries), ("key/value heads", keys))
    return [
        f"{name:<16}| " + " | ".join(cell.center(width) for cell, width in zip(cells, widths, strict=True)) + " |"
        for name, cells in rows
    ]


def _compute_width(queries: list[str], keys: list[str]) -> int:
    return sum(max(len(query), len(key)) + 3 for query, key in zip(queries, keys, strict=True))


def _draw_chains(config: Any, kv_fields: Sequence[str]) -> str:
    """Return the talking-heads projections: one line if they are the same in all places, otherwise one per place."""
    by_place = {
        prefix: [_draw_chain(get_query_heads(config, prefix), talking) for talking in layers]
        for prefix, layers in talking_by_place(config, kv_fields).items()
    }
    if len({chain for chains in by_place.values() for chain in chains}) == 1:
        return next(chain for chains in by_place.values() for chain in chains)
    lines = []
    for prefix, chains in by_place.items():
        for chain in dict.fromkeys(filter(None, chains)):
            where = f", {layers_text(chains, chain)}" if len({*chains}) > 1 else ""
            lines.append(f"{PLACES[prefix].here}{where}: {chain}")
    return "\n".join(lines)


def _draw_chain(heads: int, talking: TalkingHeadsSettings) -> str:
    """Return the talking-heads projections of one attention module, or an empty text if it has none."""
    if talking.kind is None:
        return ""
    first = f"--P_l [{heads} x {talking.softmax}]" if talking.kind in (LOGITS, BOTH) else ""
    second = f"--P_w [{talking.softmax} x {talking.output}]" if talking.kind in (WEIGHTS, BOTH) else ""
    softmax = f"softmax of {talking.softmax} heads"
    return f"logits of {heads} heads {first}--> {softmax} {second}--> weights of {talking.output} heads"
