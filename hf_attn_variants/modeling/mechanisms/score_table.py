"""The table of score functions.

This module does not import torch, because the commands use these names in their flags.
"""

from typing import TYPE_CHECKING, Any

from .mechanism import get_registered_class, register_mechanism

if TYPE_CHECKING:
    from .score_function import ScoreFunction

__all__ = ["SCORE_FUNCTIONS", "get_score_class", "register_score"]

SCORE_FUNCTIONS = ["additive"]


def register_score(score: Any) -> Any:
    """Register a `ScoreFunction` of a plugin under its name. Use this function as a class decorator.

    Raises:
        ValueError: if another score function has the same name, or if the class is not in a file of its own.
    """
    return register_mechanism(score, SCORE_FUNCTIONS)


def get_score_class(name: str) -> "type[ScoreFunction]":
    """Return the class of the score function with this name."""
    from .additive_score import AdditiveScore

    return get_registered_class(AdditiveScore.field, name) or {AdditiveScore.name: AdditiveScore}[name]
