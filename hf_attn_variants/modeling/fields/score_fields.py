"""Scores by place: the fields that say what an attention's scores are, `score_function` and its twins.

Bahdanau's score (arXiv 1409.0473) is of the attention from a decoder to the source: `cross_score_function` alone.
"""

from typing import Any

from ..mechanisms.additive_score import AdditiveScore
from ..mechanisms.mechanism import NONE
from .field_table import row_of

__all__ = ["check_scores", "has_scores", "score_fields", "score_name"]

FIELD = AdditiveScore.field


def score_fields(config: Any) -> dict[str, str]:
    """Return the fields of scores that a configuration has, {prefix: field}, that without a prefix first."""
    return {prefix: prefix + FIELD for prefix in row_of(FIELD)[1].prefixes if hasattr(config, prefix + FIELD)}


def score_name(config: Any, prefix: str) -> str | None:
    """Return the score of the attentions that a prefix stands for; None: the dot product."""
    asked = AdditiveScore.asked_for(config, prefix)
    return None if asked is None else asked[1]


def has_scores(config: Any) -> bool:
    """Say whether any attention of a configuration has other scores than dot products."""
    return any(score_name(config, prefix) is not None for prefix in score_fields(config))


def check_scores(config: Any) -> None:
    """Check the scores of a configuration.

    Raises:
        ValueError: for an unknown score.
    """
    known = row_of(FIELD)[1].choices
    for prefix, field in score_fields(config).items():
        value = getattr(config, field)
        if value is not None and value not in known and not (prefix and value == NONE):
            reasons = {
                "dot": ": the dot product is None",
                "general": ": a dot product whose query map is learned is as general as q^T W k",
            }
            reason = reasons.get(value, "") if isinstance(value, str) else ""
            names = " or ".join(f'"{each}"' for each in (*known, *((NONE,) if prefix else ())))
            raise ValueError(f"`{field}` must be None or {names}; got {value!r}{reason}.")
