"""One HTML file with all attention maps of a text, which needs neither a network nor other files."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .maps import Projection, Stage, TextMaps

__all__ = ["attention_page"]


def attention_page(maps: TextMaps, model_name: str) -> str:
    """Return the HTML page of the result of `attention_maps`, with the name of the model as its title."""
    attentions = [
        {
            "name": each.name,
            "rows": each.query_tokens,
            "columns": each.key_tokens,
            "kvHeads": each.kv_heads,
            "dynamic": each.dynamic,
            "stages": [_stage(stage) for stage in each.stages],
            "projections": [
                vars(one) | {"matrix": one.matrix.round(decimals=4).tolist()}
                for one in _with_changes(each.projections)
            ],
        }
        for each in maps.attentions
    ]
    content: dict[str, Any] = {"model": model_name, "text": maps.text, "target": maps.target_text}
    content |= {
        "targetIsOutput": maps.target_is_output,
        "isCut": maps.is_cut,
        "attentions": attentions,
    }
    data = json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")  # "<" could end the script element
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8").replace("@DATA@", data)


def _stage(stage: Stage) -> dict[str, Any]:
    known = stage.maps[~stage.maps.isnan()]
    lowest, highest, strongest = float(known.min()), float(known.max()), float(known.abs().max())
    # A value is a 16-bit number: 0 for NaN, and 1 to 65535 from the lowest to the highest.
    step = max(highest - lowest, 1e-12) / 65534
    levels = (((stage.maps - lowest) / step).round() + 1).nan_to_num(0).clamp(0, 65535).to(torch.int32)
    return {
        "title": stage.title,
        "head": stage.head,
        "kv": stage.kv_heads,
        "isLogits": stage.is_logits,
        "signed": stage.is_logits or lowest < -0.02 * strongest,  # colours for both signs
        # The value of the strongest colour; larger logits are cut off.
        "limit": max(1e-6, float(known.abs().quantile(0.99)) if stage.is_logits and len(known) < 2**24 else strongest),
        "heads": len(stage.maps),
        "lowest": lowest,
        "step": step,
        "values": base64.b64encode(levels.numpy().astype("<u2").tobytes()).decode(),
    }


def _with_changes(projections: tuple[Projection, ...]) -> Iterator[Projection]:
    """Yield projections; those near the identity, where training began, with 100 times their distance from it."""
    for one in projections:
        yield one
        change = one.matrix - torch.eye(*one.matrix.shape)
        if one.matrix.shape[0] == one.matrix.shape[1] and 0 < float(change.abs().max()) < 0.3:
            yield replace(one, name=f"100 ({one.name} - I)", matrix=100 * change)
