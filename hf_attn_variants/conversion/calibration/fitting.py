"""Fits projections to the outputs of the original attention module by ridge regression and Adam.

If there are not many more tokens than unknowns, least squares fits noise. For example, a Whisper decoder read 1,200
tokens from 32 recordings, and each output had 513 unknowns. On other recordings, the result was worse than an output
of zero. The output projection is therefore computed by ridge regression (Hoerl and Kennard, 1970). The strength k of
the regularization is selected by cross-validation over examples, which can also select the unchanged projection.

Let c be the concatenated head outputs and y the output of the original module, both centered if there is a bias. The
new projection is one of

    W + sum (y - W c) c^T (sum c c^T + k I)^-1      shrunk towards the current projection W
    sum y c^T (sum c c^T + k I)^-1                  shrunk towards zero, for modules that cannot be reproduced
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..attention_tensors import AttentionInputs, AttentionTensors, HeadCounts, LayerContext
from .recording import compute_attention

# Share of the mean second moment that is added to each direction before whitening, so that rare directions are not
# amplified.
DAMPING = 0.1
# Number of steps between measurements on held-out text, and number of steps without improvement after which fitting
# stops.
STEPS_PER_MEASUREMENT, PATIENCE = 40, 160
# Number of cross-validation folds.
NUM_FOLDS = 5
# Values of k for cross-validation, relative to the mean second moment of c. With enough text, the first value is best.
STRENGTHS = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
# Values of k after fitting. Each result is measured on held-out text.
REFIT_STRENGTHS = (1e-6, 1e-2, 1.0)


def fit_projections(
    tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext
) -> tuple[AttentionTensors, float | None]:
    """Fit a module's projections to target outputs with Adam until the error on held-out text stops decreasing.

    Gradients only pass through this module. Adam optimizes W C^1/2, where C is the second-moment matrix of W's input,
    so that each step changes the outputs equally in all directions that occur in the text.

    Args:
        tensors: The initial projections.
        heads: The head counts.
        layer: The inputs, the target outputs, and the calibration settings with the fitting options.

    Returns:
        The projections with the smallest measured error, and this error. The error is None if no measurement was
        finite.
    """
    inputs, targets, calibration, generator = layer.inputs, layer.targets, layer.calibration, layer.generator
    coordinates = _WhitenedProjections(tensors, heads, inputs)
    rate, size = calibration.get_fit_option("fit_learning_rate"), calibration.get_fit_option("fit_batch_size")
    groups = [{"params": [p], "lr": rate * _root_mean_square(p)} for p in coordinates.parameters]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98))
    steps = calibration.get_fit_option("fit_steps")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))
    best, best_error, best_step = tensors, math.inf, 0
    for step in range(1, steps + 1):
        index = int(torch.randint(len(inputs), (1,), generator=generator))
        rows = torch.randperm(inputs[index].states.shape[0], generator=generator)[:size]
        rows = rows.to(tensors.query_weight.device)
        batch, target = inputs[index].select_rows(rows), targets[index][rows]
        with torch.enable_grad():
            output = compute_attention(coordinates.get_tensors(), batch, heads.query)[0]
            loss = (output - target)[batch.valid].square().mean() / target[batch.valid].var().clamp_min(1e-30)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
        if step % STEPS_PER_MEASUREMENT and step < steps:
            continue
        fitted = coordinates.get_detached_tensors()
        error = layer.held_out_error(fitted)
        if error is not None and error < best_error:
            best, best_error, best_step = fitted, error, step
        elif step - best_step >= PATIENCE:
            break
    return best, None if math.isinf(best_error) else best_error


@torch.no_grad()
def compute_output_error(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], targets: Sequence[torch.Tensor]
) -> float | None:
    """Return sqrt(sum |output - target|^2 / sum |target - mean target|^2) over the valid positions.

    Args:
        tensors: The projections of the module.
        heads: The head counts.
        inputs: Recorded inputs to the module.
        targets: Expected outputs, each of shape [b, n, D].

    Returns:
        The error, or None if there is no text or the error is not finite.
    """
    if not inputs:
        return None
    pairs = list(zip(inputs, targets, strict=True))
    errors = [(compute_attention(tensors, batch, heads.query)[0] - target)[batch.valid] for batch, target in pairs]
    target = torch.cat([target[batch.valid] for batch, target in pairs])
    spread = (target - target.mean(0)).double().square().sum()
    error = math.sqrt(sum(error.double().square().sum() for error in errors) / spread.clamp_min(1e-30))
    return error if math.isfinite(error) else None


@torch.no_grad()
def make_error_function(
    tensors: AttentionTensors, heads: HeadCounts, held_out: Sequence[AttentionInputs]
) -> Callable[[AttentionTensors], float | None]:
    """Return a function that computes the relative error of other projections compared with this module's outputs."""
    targets = [compute_attention(tensors, batch, heads.query)[0] for batch in held_out]
    return lambda converted: compute_output_error(converted, heads, held_out, targets)


def round_error(error: float | None) -> float | None:
    """Round an error to the precision used in reports."""
    return None if error is None else round(error, 4)


class _WhitenedProjections:
    """A module's projections in whitened coordinates W C^1/2, with biases as the last columns of W.

    C is the second-moment matrix of the input to W, which consists of hidden states, latents or head outputs. If the
    values have a bias but the keys do not (Whisper), a key bias is fitted and then discarded because it does not
    affect a softmax.
    """

    def __init__(self, tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs]):
        self._original = tensors
        contexts = (compute_attention(tensors, batch, heads.query)[1][batch.valid] for batch in inputs)
        states = (batch.states[batch.valid] for batch in inputs)
        key_value_states = [batch.key_value_states[batch.get_key_mask()] for batch in inputs]
        latents = map(tensors.compute_latent, key_value_states)
        key_value = _compute_second_moment_roots(latents, tensors.value_bias is not None)
        # The matrices C^-1/2 and C^1/2 for the input of each role.
        self._roots = {
            "query": _compute_second_moment_roots(states, tensors.query_bias is not None),
            "key": key_value,
            "value": key_value,
            "output": _compute_second_moment_roots(contexts, tensors.output_bias is not None),
        }
        if tensors.latent_weight is not None:
            self._roots["latent"] = _compute_second_moment_roots(key_value_states, False)
        joined = {role: self._pad_weight_and_bias(role) @ root for role, (_, root) in self._roots.items()}
        self._weights = {role: weight.requires_grad_() for role, weight in joined.items()}
        # A kernel's learned tensors are not whitened because their inputs are heads.
        names = () if tensors.kernel is None else tensors.kernel.learned_parameters
        self._learned = {name: tensors.kernel_tensors[name].clone().requires_grad_() for name in names}
        self.parameters = [*self._weights.values(), *self._learned.values()]

    def get_tensors(self) -> AttentionTensors:
        """Return the projections in the original coordinates, with gradients."""
        kernel_tensors = self._original.kernel_tensors | self._learned
        return replace(self._original, **self._unwhiten(), kernel_tensors=kernel_tensors)

    @torch.no_grad()
    def get_detached_tensors(self) -> AttentionTensors:
        """Return copies of the projections in the original coordinates, without gradients."""
        changed: dict[str, Any] = {name: tensor.contiguous() for name, tensor in self._unwhiten().items()}
        learned = {name: tensor.detach().clone() for name, tensor in self._learned.items()}
        return replace(self._original, **changed, kernel_tensors=self._original.kernel_tensors | learned)

    def _pad_weight_and_bias(self, role: str) -> torch.Tensor:
        """Return [W | b], padded with zeros if the input has a bias column but this role has no bias."""
        joined = self._original.join_weight_and_bias(role)
        return nn.functional.pad(joined, (0, self._roots[role][1].shape[0] - joined.shape[1]))

    def _unwhiten(self) -> dict[str, Any]:
        """Return all weights and biases in the original coordinates, {field: tensor}."""
        changed: dict[str, Any] = {}
        for role, (inverse_root, _) in self._roots.items():
            size = self._original.join_weight_and_bias(role).shape[1]
            plain = (self._weights[role] @ inverse_root.T)[:, :size]
            changed |= self._original.split_weight_and_bias(role, plain)
        return changed


def _compute_second_moment_roots(batches: Any, with_bias: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return C^-1/2 and C^1/2 (up to a rotation), where C is the damped second-moment matrix of all rows [n, D]."""
    moment: Any = 0.0
    count = 0
    for part in batches:
        part = nn.functional.pad(part, (0, 1), value=1.0) if with_bias else part  # the input for the bias is 1
        moment, count, dtype = moment + (part.T @ part).double(), count + part.shape[0], part.dtype
    moment = moment / count
    moment.diagonal().add_(DAMPING * moment.diagonal().mean().clamp_min(1e-30))
    values, vectors = torch.linalg.eigh(moment)
    return (vectors * values.rsqrt()).to(dtype), (vectors * values.sqrt()).to(dtype)


def _root_mean_square(tensor: torch.Tensor) -> float:
    """Return the root mean square of a tensor, or 0.001 if the tensor is zero."""
    return float(tensor.detach().square().mean().sqrt()) or 1e-3


@torch.no_grad()
def refit_output_projection(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], targets: Sequence[torch.Tensor]
) -> AttentionTensors:
    """Refit the output projection and bias by regressing the target outputs on the head outputs.

    Cross-validation selects the regularization strength. If the projections have already been fitted to these targets,
    use `iterate_output_refits` instead because cross-validation would underestimate their error.

    Args:
        tensors: The projections of the module.
        heads: The head counts.
        inputs: Recorded inputs to the module.
        targets: Target outputs, each of shape [b, n, D].

    Returns:
        The projections with a new output projection. They are unchanged if cross-validation finds no improvement, or
        if there is only one example.
    """
    folds = _compute_fold_moments(tensors, heads, inputs, targets)
    if len(folds) < 2:
        return tensors
    all_moments = functools.reduce(operator.add, folds)
    has_bias = tensors.output_bias is not None
    errors: dict[Any, float] = {(None, 0): sum(float(fold.energy[0]) for fold in folds)}
    for fold in folds:
        for choice, error in _compute_validation_errors(all_moments - fold, fold, has_bias):
            errors[choice] = errors.get(choice, 0.0) + error
    strength, base = min(errors, key=errors.__getitem__)
    if strength is None:
        return tensors
    return _replace_output_projection(tensors, _RidgeRegression(all_moments, has_bias), strength, base)


@torch.no_grad()
def iterate_output_refits(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], targets: Sequence[torch.Tensor]
) -> Iterator[AttentionTensors]:
    """Refit the output projection with shrinkage towards the current one, and yield a result for each strength.

    The strengths are `REFIT_STRENGTHS`. The function takes the same arguments as `refit_output_projection`.
    """
    moments = functools.reduce(operator.add, _compute_fold_moments(tensors, heads, inputs, targets))
    regression = _RidgeRegression(moments, tensors.output_bias is not None)
    for strength in REFIT_STRENGTHS:
        yield _replace_output_projection(tensors, regression, strength, 0)


def _replace_output_projection(
    tensors: AttentionTensors, regression: "_RidgeRegression", strength: float, target_index: int
) -> AttentionTensors:
    """Replace the output projection with the solution of a regression (see `_RidgeRegression.solve`)."""
    weight, bias = regression.solve(strength, target_index)
    old, old_bias = tensors.get_weight_and_bias("output")
    changed: dict[str, Any] = {"output_weight": weight.to(old) + (old if target_index == 0 else 0.0)}
    if old_bias is not None:
        changed["output_bias"] = bias.to(old) + (old_bias if target_index == 0 else 0.0)
    return replace(tensors, **changed)


@dataclass(frozen=True)
class _Moments:
    """Sums over tokens for regressions of two targets, y - W c and y, on the head outputs c (float64).

    Args:
        count: Number of tokens.
        context: sum c, [in].
        target: Sum of each target, [2, out].
        square: sum c c^T, [in, in].
        cross: Sum of the products of each target with c, [2, out, in].
        energy: Sum of the squares of each target, [2].
    """

    count: int
    context: torch.Tensor
    target: torch.Tensor
    square: torch.Tensor
    cross: torch.Tensor
    energy: torch.Tensor

    def __add__(self, other: "_Moments") -> "_Moments":
        return _Moments(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __sub__(self, other: "_Moments") -> "_Moments":
        return _Moments(*(a - b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def center(self, context: torch.Tensor, target: torch.Tensor) -> "_Moments":
        """Return the moments after subtracting the given means from c [in] and from both targets [2, out]."""
        square = self.square - torch.outer(self.context, context) - torch.outer(context, self.context)
        cross = self.cross - self.target[:, :, None] * context - target[:, :, None] * self.context
        energy = self.energy - 2 * (self.target * target).sum(1) + self.count * target.square().sum(1)
        square = square + self.count * torch.outer(context, context)
        cross = cross + self.count * target[:, :, None] * context
        sums = self.context - self.count * context, self.target - self.count * target
        return _Moments(self.count, *sums, square, cross, energy)


def _compute_fold_moments(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], targets: Sequence[torch.Tensor]
) -> list[_Moments]:
    """Return the moments for each cross-validation fold. Takes the same arguments as `refit_output_projection`."""
    moments_by_fold: dict[int, _Moments] = {}
    # An example's index in its batch determines its fold, so that it stays in the same fold if a forward pass calls
    # the module several times (ALBERT). If all batches contain a single example, the batch number determines the fold.
    is_single = all(len(target) == 1 for target in targets)
    for number, (batch, target) in enumerate(zip(inputs, targets, strict=True)):
        output, context = compute_attention(tensors, batch, heads.query)
        residual = target - output
        rows = torch.arange(len(target)) % NUM_FOLDS if not is_single else torch.tensor([number % NUM_FOLDS])
        for fold in rows.unique().tolist():
            is_in_fold = (rows == fold).to(target.device)
            valid = batch.valid[is_in_fold]
            moments = _compute_moments(*(states[is_in_fold][valid] for states in (context, residual, target)))
            moments_by_fold[fold] = moments_by_fold[fold] + moments if fold in moments_by_fold else moments
    return [fold for fold in moments_by_fold.values() if fold.count]


def _compute_moments(context: torch.Tensor, residual: torch.Tensor, target: torch.Tensor) -> _Moments:
    """Return the moments of head outputs c, residuals y - W c and targets y, with one row per token."""
    targets = torch.stack([residual, target])  # [2, rows, out]
    return _Moments(
        len(context),
        context.sum(0).double(),
        targets.sum(1).double(),
        (context.T @ context).double(),
        (targets.mT @ context).double(),
        targets.double().square().sum((1, 2)),
    )


class _RidgeRegression:
    """Ridge regressions that share one eigendecomposition for all regularization strengths."""

    def __init__(self, moments: _Moments, has_bias: bool):
        means: Any = (moments.context / moments.count, moments.target / moments.count)
        self.means = means if has_bias else tuple(torch.zeros_like(mean) for mean in means)
        moments = moments.center(*self.means)
        values, self.vectors = torch.linalg.eigh(moments.square)
        self._values = values.clamp_min(0)
        self._scale = self._values.mean().clamp_min(1e-30)
        self.cross = moments.cross @ self.vectors  # in eigenvector coordinates, [2, out, in]

    def compute_factors(self, strength: float) -> torch.Tensor:
        """Return the factors [in] by which the components of sum y c^T along the eigenvectors are multiplied."""
        return 1 / (self._values + strength * self._scale)

    def solve(self, strength: float, target_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the solution [out, in] and its bias [out].

        If `target_index` is 0, they must be added to the current projection. If it is 1, they replace the current
        projection.
        """
        weight = (self.cross[target_index] * self.compute_factors(strength)) @ self.vectors.T
        context, target = self.means
        return weight, target[target_index] - weight @ context


def _compute_validation_errors(
    fit_moments: _Moments, test_moments: _Moments, has_bias: bool
) -> list[tuple[tuple[float, int], float]]:
    """Return the squared error on the test examples for each pair (strength, base) (see `_RidgeRegression.solve`)."""
    regression = _RidgeRegression(fit_moments, has_bias)
    test_moments = test_moments.center(*regression.means)
    square = regression.vectors.T @ test_moments.square @ regression.vectors
    errors = []
    for base in (0, 1):
        cross = regression.cross[base]
        # The squared error of the solution with factors f is E - 2 f a + f G f.
        agreement = (cross * (test_moments.cross[base] @ regression.vectors)).sum(0)
        gram = (cross.T @ cross) * square
        for strength in STRENGTHS:
            factors = regression.compute_factors(strength)
            error = float(test_moments.energy[base] - 2 * factors @ agreement + factors @ gram @ factors)
            errors.append(((strength, base), error if math.isfinite(error) else math.inf))
    return errors
