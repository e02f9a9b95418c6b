"""One HTML file that shows every attention map of a text: no network, no other file; any head enlarged on a click."""

import base64
import json
from pathlib import Path
from typing import Any

import torch

from .colours import KV_COLOURS, colour_limit, is_signed, with_changes
from .maps import AttentionMaps, Stage, TextMaps

__all__ = ["attention_page"]

PAGE = Path(__file__).with_name("page.html")
# The values of a map are stored as 16-bit numbers: 0 for NaN, 1 to 65535 from the lowest to the highest.
LEVELS = 65534


def attention_page(maps: TextMaps, model_name: str) -> str:
    """Return the HTML page.

    Args:
        maps: of `attention_maps`.
        model_name: for the title.
    """
    content = {
        "model": model_name,
        "text": maps.text,
        "target": maps.target_text,
        "targetIsOutput": maps.target_is_output,
        "isCut": maps.is_cut,
        "kvColours": KV_COLOURS,
        "attentions": [_attention(attention) for attention in maps.attentions],
    }
    # Inside a script element only "<" could end it.
    data = json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("@DATA@", data)


def _attention(maps: AttentionMaps) -> dict[str, Any]:
    return {
        "name": maps.name,
        "rows": maps.query_tokens,
        "columns": maps.key_tokens,
        "kvHeads": maps.kv_heads,
        "dynamic": maps.dynamic,
        "stages": [_stage(stage) for stage in maps.stages],
        "projections": [
            {"name": one.name, "rows": one.rows, "columns": one.columns, "matrix": _rounded(one.matrix)}
            for one in with_changes(maps.projections)
        ],
    }


def _stage(stage: Stage) -> dict[str, Any]:
    known = stage.maps[~stage.maps.isnan()]
    lowest, highest = float(known.min()), float(known.max())
    step = max(highest - lowest, 1e-12) / LEVELS
    levels = (((stage.maps - lowest) / step).round() + 1).nan_to_num(0).clamp(0, LEVELS + 1).to(torch.int32)
    return {
        "title": stage.title,
        "head": stage.head,
        "kv": stage.kv_heads,
        "isLogits": stage.is_logits,
        "signed": is_signed(stage),
        "limit": colour_limit(stage),
        "heads": len(stage.maps),
        "lowest": lowest,
        "step": step,
        "values": base64.b64encode(levels.numpy().astype("<u2").tobytes()).decode(),
    }


def _rounded(matrix: torch.Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in matrix.tolist()]
