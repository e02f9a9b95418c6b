"""Which colours the page gives to a stage of attention maps, and what of the projections it shows."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from .maps import Projection, Stage

__all__ = ["KV_COLOURS", "colour_limit", "is_signed", "with_changes"]

NEGLIGIBLE = 0.02  # of the largest weight: as far below zero no colours are given to both signs
NEAR_IDENTITY = 0.3  # in no number farther from the identity than this, a projection's change from it is shown too
# One for each key/value head, told apart by colour-blind readers as well; beyond eight they begin anew.
KV_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#4D4D4D")


def is_signed(stage: Stage) -> bool:
    """Say whether a stage needs colours for both signs: logits, and mixed weights that fall well below zero."""
    return stage.is_logits or float(stage.maps.min()) < -NEGLIGIBLE * float(stage.maps.abs().max())


def colour_limit(stage: Stage) -> float:
    """Return the value of the strongest colour, shared by a stage's heads; the largest logits are cut off."""
    values = stage.maps[~stage.maps.isnan()].abs()
    limit = values.quantile(0.99) if stage.is_logits and values.numel() < 2**24 else values.max()
    return max(float(limit), 1e-6)


def with_changes(projections: Sequence[Projection]) -> tuple[Projection, ...]:
    """Return projections, each near the identity (where it usually began) followed by 100 times its distance from it.

    Beside the ones of the diagonal, what training changed could not be seen.
    """
    shown = []
    for projection in projections:
        shown.append(projection)
        rows, columns = projection.matrix.shape
        change = projection.matrix - torch.eye(rows, columns)
        if rows == columns and 0 < float(change.abs().max()) < NEAR_IDENTITY:
            shown.append(replace(projection, name=f"100 ({projection.name} - I)", matrix=100 * change))
    return tuple(shown)
