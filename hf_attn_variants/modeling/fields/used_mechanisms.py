"""The mechanisms that a configuration uses, by which the code of a repository is chosen."""

from collections.abc import Mapping
from typing import Any

from ..mechanisms.mechanism import NONE, PREFIXES
from ..variant_names import INCLUDED

__all__ = ["check_included", "used_mechanisms"]

# The field that selects each mechanism, without the prefix of a place.
MECHANISMS = {
    "attention_kernel": "linear_attention",
    "attention_pattern": "patterns",
    "kv_lora_rank": "latents",
    "per_layer_values": "unequal_layers",
    "position_embedding_type": "sinusoidal_positions",
    "score_function": "additive_score",
    "talking_heads": "talking_heads",
}
# Values that select nothing: "absolute" is the name of an architecture's own positions.
IDLE = (None, NONE, "absolute")


def used_mechanisms(config: Any) -> frozenset[str]:
    """Return the mechanisms that attention modules of a configuration use.

    Grouped heads are not among them: every repository includes these.

    Example:
        >>> used_mechanisms(AttnVariantBertConfig(attention_pattern="sliding_window", attention_window=64))
        frozenset({'patterns'})
    """
    by_layer = config.per_layer_values if isinstance(config.per_layer_values, Mapping) else {}
    used = set()
    for field, mechanism in MECHANISMS.items():
        for name in (prefix + field for prefix in PREFIXES):
            layers = by_layer.get(name)
            values = [getattr(config, name, None), *(layers if isinstance(layers, list | tuple) else ())]
            if any(value not in IDLE for value in values):
                used.add(mechanism)
    return frozenset(used)


def check_included(used: frozenset[str]) -> None:
    """Check that the code of this repository includes the mechanisms that a configuration uses.

    Raises:
        ValueError: if it was saved without one of them.
    """
    missing = [] if INCLUDED is None else sorted(used - {*INCLUDED})
    if missing:
        raise ValueError(
            f"The code of this repository does not include {', '.join(missing)}, because the model was saved without. "
            "Install hf_attn_variants and import it before you load the model."
        )
