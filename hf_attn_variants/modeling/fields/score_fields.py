"""Scores by place: the fields that say what an attention's scores are, `score_function` and its twins.

Bahdanau's score (arXiv 1409.0473) is of the attention from a decoder to the source: `cross_score_function` alone.
"""

from typing import Any

from ..mechanisms.additive_score import AdditiveScore
from .field_table import row_of

__all__ = ["has_scores", "score_fields", "score_name"]

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
