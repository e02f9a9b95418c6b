"""The output projection by linear regression on the heads' outputs, no further than the text supports.

Least squares with as many unknowns as there are tokens fits the noise of these: on a Whisper's decoder, with 1,200
tokens of 32 recordings and 513 unknowns for each output, the result was worse on other recordings than zeros. So the
regression is a ridge regression (Hoerl and Kennard, 1970), its strength is the one with the least error under
cross-validation over examples, and it may also leave the projection as it is.

With c the heads' outputs and y the source's output, both less their means where there is a bias, it is one of

    W + sum (y - W c) c^T (sum c c^T + k I)^-1      towards the projection W at hand
    sum y c^T (sum c c^T + k I)^-1                  towards zero: an attention that cannot be followed adds little
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..grouping import HeadCounts
from ..projections import AttentionTensors
from .recording import AttentionInputs, attend

__all__ = ["refit_output", "refits_of_output"]

# Examples are dealt to this many folds.
FOLDS = 5
# The values of k to try, as multiples of the mean second moment of c. With plenty of text the first is the best.
STRENGTHS = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
# The values to try after a fit, each measured on held-out text.
REFIT_STRENGTHS = (1e-6, 1e-2, 1.0)


@torch.no_grad()
def refit_output(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], targets: Sequence[torch.Tensor]
) -> AttentionTensors:
    """Return the attention with its output projection, and its bias, by regression of the targets on its heads.

    Args:
        tensors, heads: the attention, whose projections were not fitted to these very outputs: cross-validation would
            take them for better than they are (`refits_of_output`).
        inputs: what it is called with on text.
        targets: the outputs to reach there, [b, n, D] each.

    Returns:
        The same with another output projection; as it is where cross-validation finds nothing better, or there is a
        single example.
    """
    folds = _folds(tensors, heads, inputs, targets)
    if len(folds) < 2:
        return tensors
    whole = _total(folds)
    has_bias = tensors.output_bias is not None
    errors: dict[Any, float] = {(None, 0): sum(float(fold.energy[0]) for fold in folds)}
    for fold in folds:
        for choice, error in _errors(whole - fold, fold, has_bias):
            errors[choice] = errors.get(choice, 0.0) + error
    strength, base = min(errors, key=errors.__getitem__)
    return tensors if strength is None else _with_output(tensors, _Solution(whole, has_bias), strength, base)


@torch.no_grad()
def refits_of_output(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], targets: Sequence[torch.Tensor]
) -> Iterator[AttentionTensors]:
    """Yield the attention with its output projection by ridge regression beside the one at hand, by strength.

    Arguments as for `refit_output`.
    """
    solution = _Solution(_total(_folds(tensors, heads, inputs, targets)), tensors.output_bias is not None)
    for strength in REFIT_STRENGTHS:
        yield _with_output(tensors, solution, strength, 0)


def _with_output(tensors: AttentionTensors, solution: "_Solution", strength: float, base: int) -> AttentionTensors:
    weight, bias = solution.of(strength, base)
    old, old_bias = tensors.pair("output")
    changed: dict[str, Any] = {"output_weight": weight.to(old) + (old if base == 0 else 0.0)}
    if old_bias is not None:
        changed["output_bias"] = bias.to(old) + (old_bias if base == 0 else 0.0)
    return replace(tensors, **changed)


@dataclass(frozen=True)
class _Moments:
    """Sums over tokens, in float64, of c and of what is to be reached: y - W c, and y.

    Args:
        count: tokens.
        context: sum c, [in].
        reached: sums of both, [2, out].
        square: sum c c^T, [in, in].
        cross: sums of both with c, [2, out, in].
        energy: sums of the squares of both, [2].
    """

    count: int
    context: torch.Tensor
    reached: torch.Tensor
    square: torch.Tensor
    cross: torch.Tensor
    energy: torch.Tensor

    def __add__(self, other: "_Moments") -> "_Moments":
        return _Moments(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __sub__(self, other: "_Moments") -> "_Moments":
        return _Moments(*(a - b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def about(self, context: torch.Tensor, reached: torch.Tensor) -> "_Moments":
        """Return the same of c and of what is to be reached less these means, [in] and [2, out]."""
        square = self.square - torch.outer(self.context, context) - torch.outer(context, self.context)
        cross = self.cross - self.reached[:, :, None] * context - reached[:, :, None] * self.context
        energy = self.energy - 2 * (self.reached * reached).sum(1) + self.count * reached.square().sum(1)
        square = square + self.count * torch.outer(context, context)
        cross = cross + self.count * reached[:, :, None] * context
        sums = self.context - self.count * context, self.reached - self.count * reached
        return _Moments(self.count, *sums, square, cross, energy)


def _folds(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], targets: Sequence[torch.Tensor]
) -> list[_Moments]:
    """Return the moments of each fold of the examples."""
    folds: dict[int, _Moments] = {}
    # By its place in a batch an example is in one fold, also where a pass meets it several times (ALBERT's layers).
    alone = all(len(target) == 1 for target in targets)
    for number, (batch, target) in enumerate(zip(inputs, targets, strict=True)):
        output, context = attend(tensors, batch, heads.query)
        missing = target - output
        rows = torch.arange(len(target)) % FOLDS if not alone else torch.tensor([number % FOLDS])
        for fold in rows.unique().tolist():
            chosen = (rows == fold).to(target.device)
            valid = batch.valid[chosen]
            moments = _moments(context[chosen][valid], missing[chosen][valid], target[chosen][valid])
            folds[fold] = folds[fold] + moments if fold in folds else moments
    return [fold for fold in folds.values() if fold.count]


def _moments(context: torch.Tensor, missing: torch.Tensor, target: torch.Tensor) -> _Moments:
    both = torch.stack([missing, target])  # [2, rows, out]
    return _Moments(
        len(context),
        context.sum(0).double(),
        both.sum(1).double(),
        (context.T @ context).double(),
        (both.mT @ context).double(),
        both.double().square().sum((1, 2)),
    )


def _total(folds: Sequence[_Moments]) -> _Moments:
    total = folds[0]
    for fold in folds[1:]:
        total = total + fold
    return total


class _Solution:
    """The regressions on some examples, for any strength."""

    def __init__(self, moments: _Moments, has_bias: bool):
        means: Any = (moments.context / moments.count, moments.reached / moments.count)
        self.means = means if has_bias else tuple(torch.zeros_like(mean) for mean in means)
        moments = moments.about(*self.means)
        values, self.vectors = torch.linalg.eigh(moments.square)
        self._values = values.clamp_min(0)
        self._scale = self._values.mean().clamp_min(1e-30)
        self.cross = moments.cross @ self.vectors  # in the eigenvectors' coordinates, [2, out, in]

    def factors(self, strength: float) -> torch.Tensor:
        """Return what each eigenvector's part of sum y c^T is multiplied by, [in]."""
        return 1 / (self._values + strength * self._scale)

    def of(self, strength: float, base: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the map [out, in] and the bias [out]; base 0: beside W, 1: in its place."""
        weight = (self.cross[base] * self.factors(strength)) @ self.vectors.T
        context, reached = self.means
        return weight, reached[base] - weight @ context


def _errors(used: _Moments, left: _Moments, has_bias: bool) -> list[tuple[tuple[float, int], float]]:
    """Return the squared error on the examples left out, by strength and base."""
    solution = _Solution(used, has_bias)
    left = left.about(*solution.means)
    square = solution.vectors.T @ left.square @ solution.vectors
    errors = []
    for base in (0, 1):
        cross = solution.cross[base]
        # Of the map with factors f the squared error is E - 2 f a + f G f.
        agreed = (cross * (left.cross[base] @ solution.vectors)).sum(0)
        gram = (cross.T @ cross) * square
        for strength in STRENGTHS:
            factors = solution.factors(strength)
            error = float(left.energy[base] - 2 * factors @ agreed + factors @ gram @ factors)
            errors.append(((strength, base), error if math.isfinite(error) else math.inf))
    return errors
