"""Which query heads read which key/value heads, drawn in text."""

from collections.abc import Mapping
from typing import Any

__all__ = ["heads_diagram"]

MAX_WIDTH = 90
SITES = {"num_key_value_heads": "decoder, self- and cross-attention", "encoder_num_key_value_heads": "encoder"}


def heads_diagram(config: Any, kv_heads: Mapping[str, int] | None = None) -> str:
    """Return a drawing of a variant configuration's heads: groups side by side, talking heads as a chain.

    Args:
        config: a variant configuration.
        kv_heads: the key/value heads of each kind of attention that the model has, by the configuration's field;
            several (T5's) get a drawing each. None = all that the configuration speaks of.
    """
    if kv_heads is None:
        kv_heads = {field: getattr(config, field) for field in config.kv_heads_fields()}
    blocks = []
    for field, count in kv_heads.items():
        title = [f"{SITES[field]}:"] if len(kv_heads) > 1 else []
        blocks.append("\n".join([*title, *_groups(config.query_heads(field), count)]))
    if config.talking_heads is not None:
        blocks.append(_chain(config))
    return "\n\n".join(blocks)


def _groups(heads: int, kv_heads: int) -> list[str]:
    size = heads // kv_heads
    groups = [[f"q{i}" for i in range(g * size, (g + 1) * size)] for g in range(kv_heads)]
    queries, keys = [" ".join(group) for group in groups], [f"kv{i}" for i in range(kv_heads)]
    if _width(queries, keys) > MAX_WIDTH:
        queries = [group[0] if size == 1 else f"{group[0]}..{group[-1]}" for group in groups]
    if _width(queries, keys) > MAX_WIDTH:
        queries, keys = [*queries[:4], "...", queries[-1]], [*keys[:4], "...", keys[-1]]
    widths = [max(len(query), len(key)) for query, key in zip(queries, keys, strict=True)]
    rows = (("query heads", queries), ("key/value heads", keys))
    return [
        f"{name:<16}| " + " | ".join(cell.center(width) for cell, width in zip(cells, widths, strict=True)) + " |"
        for name, cells in rows
    ]


def _width(queries: list[str], keys: list[str]) -> int:
    return sum(max(len(query), len(key)) + 3 for query, key in zip(queries, keys, strict=True))


def _chain(config: Any) -> str:
    heads, softmax_heads, value_heads = config.num_attention_heads, config.num_softmax_heads, config.num_value_heads
    first = f"--P_l [{heads} x {softmax_heads}]" if config.talking_heads in ("logits", "both") else ""
    second = f"--P_w [{softmax_heads} x {value_heads}]" if config.talking_heads in ("weights", "both") else ""
    softmax = f"softmax of {softmax_heads} heads"
    return f"logits of {heads} heads {first}--> {softmax} {second}--> weights of {value_heads} heads"
