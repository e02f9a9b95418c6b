"""New projections fitted to the outputs of the original attention: by regression, and by steps of Adam.

Least squares with as many unknowns as there are tokens fits the noise of these: on a Whisper's decoder, with 1,200
tokens of 32 recordings and 513 unknowns for each output, the result was worse on other recordings than zeros. So the
regression is a ridge regression (Hoerl and Kennard, 1970), its strength is the one with the least error under
cross-validation over examples, and it may also leave the projection as it is.

With c the heads' outputs and y the source's output, both less their means where there is a bias, it is one of

    W + sum (y - W c) c^T (sum c c^T + k I)^-1      towards the projection W at hand
    sum y c^T (sum c c^T + k I)^-1                  towards zero: an attention that cannot be followed adds little
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..attention_tensors import AttentionTensors, HeadCounts
from ..calibration_settings import Calibration
from .recording import AttentionInputs, attend

__all__ = ["error_compared_with", "fit", "refit_output", "refits_of_output", "relative_error", "rounded"]

# This part of the mean second moment is added to each direction's before whitening, lest rare ones be blown up.
DAMPING = 0.1
# Steps between two looks at held-out text, and those without gain after which the fit ends.
MEASURED_EVERY, PATIENCE = 40, 160
# Examples are dealt to this many folds.
FOLDS = 5
# The values of k to try, as multiples of the mean second moment of c. With plenty of text the first is the best.
STRENGTHS = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
# The values to try after a fit, each measured on held-out text.
REFIT_STRENGTHS = (1e-6, 1e-2, 1.0)


def fit(
    tensors: AttentionTensors,
    heads: HeadCounts,
    inputs: Sequence[AttentionInputs],
    targets: Sequence[torch.Tensor],
    calibration: Calibration,
    generator: torch.Generator,
    held_out_error: Callable[[AttentionTensors], float | None],
    on_step: Callable[[], Any] = lambda: None,
) -> tuple[AttentionTensors, float | None]:
    """Fit one attention's projections to outputs by Adam, for as long as that helps on text that is held out.

    The gradient passes through this attention alone. Adam works on W C^1/2, with C the second moment of what W reads:
    a step then changes the outputs by as much in all directions that the text takes.

    Args:
        tensors, heads: the projections to begin with.
        inputs, targets: what the attention is called with, on text, and the outputs to reach, [b, n, D] each.
        calibration: the steps, their rate and size.
        generator: chooses each step's examples.
        held_out_error: of projections, on held-out text; None where it is no number.
        on_step: called after each step.

    Returns:
        The projections with the least error of those measured on the way, and this error; None = none was a number.
    """
    coordinates = _Whitened(tensors, heads, inputs)
    rate, size = calibration.fit_option("fit_learning_rate"), calibration.fit_option("fit_batch_size")
    groups = [{"params": [p], "lr": rate * _rms(p)} for p in coordinates.parameters]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98))
    steps = calibration.fit_option("fit_steps")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))
    best, least, least_at = tensors, math.inf, 0
    for step in range(1, steps + 1):
        index = int(torch.randint(len(inputs), (1,), generator=generator))
        rows = torch.randperm(inputs[index].states.shape[0], generator=generator)[:size]
        rows = rows.to(tensors.query_weight.device)
        batch, target = inputs[index].rows(rows), targets[index][rows]
        with torch.enable_grad():
            output = attend(coordinates.tensors(), batch, heads.query)[0]
            loss = (output - target)[batch.valid].square().mean() / target[batch.valid].var().clamp_min(1e-30)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
        on_step()
        if step % MEASURED_EVERY and step < steps:
            continue
        fitted = coordinates.unwhitened()
        error = held_out_error(fitted)
        if error is not None and error < least:
            best, least, least_at = fitted, error, step
        elif step - least_at >= PATIENCE:
            break
    return best, None if math.isinf(least) else least


@torch.no_grad()
def relative_error(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], targets: Sequence[torch.Tensor]
) -> float | None:
    """Return sqrt(sum |output - target|^2 / sum |target - mean target|^2) over the valid positions.

    None where there is no text, or what comes out is no number.
    """
    if not inputs:
        return None
    pairs = list(zip(inputs, targets, strict=True))
    errors = [(attend(tensors, batch, heads.query)[0] - target)[batch.valid] for batch, target in pairs]
    target = torch.cat([target[batch.valid] for batch, target in pairs])
    spread = (target - target.mean(0)).double().square().sum()
    error = math.sqrt(sum(error.double().square().sum() for error in errors) / spread.clamp_min(1e-30))
    return error if math.isfinite(error) else None


@torch.no_grad()
def error_compared_with(
    tensors: AttentionTensors, heads: HeadCounts, held_out: Sequence[AttentionInputs]
) -> Callable[[AttentionTensors], float | None]:
    """Return the function that measures other projections' outputs on held-out text against this attention's."""
    targets = [attend(tensors, batch, heads.query)[0] for batch in held_out]
    return lambda converted: relative_error(converted, heads, held_out, targets)


def rounded(error: float | None) -> float | None:
    """Return an error as reports have it."""
    return None if error is None else round(error, 4)


class _Whitened:
    """One attention's projections W (with the bias as a last column) as W C^1/2, trainable, and the way back.

    C is of what each reads: the inputs, the latent, the heads' outputs. Keys may be without the bias that values have
    (Whisper's): one is fitted and left out again, for no softmax sees it.
    """

    def __init__(self, tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs]):
        self._original = tensors
        contexts = (attend(tensors, batch, heads.query)[1][batch.valid] for batch in inputs)
        states = (batch.states[batch.valid] for batch in inputs)
        memories = (batch.memory[batch.memory_valid()] for batch in inputs)
        self._reads = {"query": "states", "key": "memory", "value": "memory", "output": "context"}
        has_bias = tensors.value_bias is not None
        self._maps = {
            "states": _whitening(states, tensors.query_bias is not None),
            "context": _whitening(contexts, tensors.output_bias is not None),
        }
        if tensors.latent_weight is None:
            self._maps["memory"] = _whitening(memories, has_bias)
        else:
            self._reads |= {"key": "latent", "value": "latent", "latent": "memory"}
            latents = (tensors.latent(batch.memory[batch.memory_valid()]) for batch in inputs)
            self._maps |= {"memory": _whitening(memories, False), "latent": _whitening(latents, has_bias)}
        self._weights = {
            role: (self._joined(role) @ self._maps[what][1]).requires_grad_() for role, what in self._reads.items()
        }
        # What a kernel has learned reads heads, not the text: it is fitted as it is.
        names = () if tensors.kernel is None else tensors.kernel.learned
        self._learned = {name: tensors.kernel_tensors[name].clone().requires_grad_() for name in names}
        self.parameters = [*self._weights.values(), *self._learned.values()]

    def tensors(self) -> AttentionTensors:
        """Return the projections of plain inputs, through which the gradient passes."""
        changed: dict[str, Any] = {"kernel_tensors": self._original.kernel_tensors | self._learned}
        for role in self._reads:
            changed |= self._plain(role)
        return replace(self._original, **changed)

    @torch.no_grad()
    def unwhitened(self) -> AttentionTensors:
        """Return them without a gradient, in memory of their own."""
        plain = {name: tensor for role in self._reads for name, tensor in self._plain(role).items()}
        changed: dict[str, Any] = {name: tensor.contiguous() for name, tensor in plain.items()}
        learned = {name: tensor.detach().clone() for name, tensor in self._learned.items()}
        return replace(self._original, **changed, kernel_tensors=self._original.kernel_tensors | learned)

    def _joined(self, role: str) -> torch.Tensor:
        """Return [W | b] as wide as the map of what it reads: where that has a bias and this role none, b is zero."""
        joined = self._original.joined(role)
        return nn.functional.pad(joined, (0, self._maps[self._reads[role]][1].shape[0] - joined.shape[1]))

    def _plain(self, role: str) -> dict[str, torch.Tensor]:
        plain = self._weights[role] @ self._maps[self._reads[role]][0].T
        return self._original.parted(role, plain[:, : self._original.joined(role).shape[1]])


def _whitening(rows: Any, with_bias: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return C^-1/2 and C^1/2 of the damped second moment C of rows [n, D], each a map to and from eigenvectors."""
    moment: Any = 0.0
    count = 0
    for part in rows:
        part = _with_one(part) if with_bias else part
        moment, count, dtype = moment + (part.T @ part).double(), count + part.shape[0], part.dtype
    moment = moment / count
    moment.diagonal().add_(DAMPING * moment.diagonal().mean().clamp_min(1e-30))
    values, vectors = torch.linalg.eigh(moment)
    return (vectors * values.rsqrt()).to(dtype), (vectors * values.sqrt()).to(dtype)


def _with_one(states: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(states, (0, 1), value=1.0)


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.detach().square().mean().sqrt()) or 1e-3


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
