"""Fitting one attention to outputs recorded on text, by Adam in whitened coordinates, and how far off outputs are."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..calibration_settings import Calibration
from ..grouping import HeadCounts
from ..projections import AttentionTensors
from .recording import AttentionInputs, attend

__all__ = ["error_compared_with", "fit", "relative_error", "rounded"]

# This part of the mean second moment is added to each direction's before whitening, lest rare ones be blown up.
DAMPING = 0.1
# Steps between two looks at held-out text, and those without gain after which the fit ends.
MEASURED_EVERY, PATIENCE = 40, 160


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
