"""Shared key/value heads in closed form from calibration text, then fitted to the attention's own outputs.

BERT, ALBERT and T5 have no rotary positions inside the dot product, so a head is its products alone: its logits are
x^T B_i y with B_i = W_q,i^T W_k,i, and it adds W_o,i W_v,i sum_j p_ij y_j to the output. For the g heads of a group:

- keys: the shared key head that keeps the most of the logits, in the least-squares sense over the text, spans the
  first d right singular vectors of the stacked T_i^1/2 [K_i] S^1/2, with T_i the second moment of head i's queries and
  S that of the group's keys, centred within each text, for a softmax ignores what all keys have in common. The queries
  are then refitted exactly.
- values: the shared value head spans the first d right singular vectors of the stacked W_o,i [V_i] Z^1/2, with Z the
  second moment of what the heads of the group read: the values averaged by the attention weights.
- output: W_o (and its bias) of all heads together by linear regression on the attention's own outputs, with the new
  heads' weights and values; what one head lost, others give back where they can.

All on moments of h*d numbers at most, in float64. The fit after that is Adam on the module's own projections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..grouping import HeadCounts, repeat_heads
from ..recording import AttentionInputs, attend
from .base import AttentionTensors, CalibratedMethod, LayerContext

if TYPE_CHECKING:
    from ..calibration import Calibration

__all__ = ["Calibrated", "closed_form", "fit"]

# Relative to the largest: directions of less weight than this are numerical noise of float32 activations.
RANK_TOLERANCE = 1e-7
RIDGE = 1e-6
# Directions that the text never takes still count this much beside those it does: other text may take them.
UNSEEN = 1e-4
# The share of the text that is not fitted to: it says when fitting helps.
HELD_OUT = 0.1


class Calibrated(CalibratedMethod):
    """The closed form, then `Calibration.fit_steps` of fitting; what it kept is in the report's `details`."""

    name = "calibrated"

    def convert_module(
        self,
        tensors: AttentionTensors,
        heads: HeadCounts,
        layer: LayerContext,
        inputs: Sequence[AttentionInputs],
        calibration: Calibration,
    ) -> AttentionTensors:
        targets = [attend(tensors, batch, heads.query)[0] for batch in inputs]
        converted = closed_form(tensors, heads, inputs, targets)
        if calibration.fit_steps:
            converted = fit(converted, heads, inputs, targets, calibration, layer.generator)
        return converted


@torch.no_grad()
def closed_form(
    tensors: AttentionTensors,
    heads: HeadCounts,
    inputs: Sequence[AttentionInputs],
    targets: Sequence[torch.Tensor],
) -> AttentionTensors:
    """Return the best shared heads in the least-squares sense: keys, then values, then the output projection.

    Args:
        tensors: the projections before.
        heads: the head counts before and after.
        inputs: what the attention is called with, on text.
        targets: its outputs there, [b, n, D] each.
    """
    queries, keys, values = _moments(tensors, heads, inputs)
    new: dict[str, list[torch.Tensor]] = {"query": [], "key": [], "value": [], "output": []}
    kept: dict[str, list[float]] = {"kept_key_energy": [], "kept_value_energy": []}
    query, key, value = (_augmented(tensors, role, heads) for role in ("query", "key", "value"))  # [h, d, D + 1]
    output = tensors.output_weight.double().unflatten(1, (heads.query, -1)).transpose(0, 1)  # [h, D, d]
    groups = torch.arange(heads.query, device=output.device).view(heads.key[1], -1)
    queries = _with_unseen(queries, query)
    keys, values = (
        _with_unseen(m, p.unflatten(0, groups.shape).flatten(1, 2)) for m, p in ((keys, key), (values, value))
    )
    for group, key_moment, value_moment in zip(groups, keys, values, strict=True):
        metric = [_square_root(moment) for moment in queries[group]]
        shared, old, energy = _shared_head(key[group], metric, key_moment)
        kept["kept_key_energy"].append(energy)
        refitted = old.transpose(1, 2) @ query[group]  # [g, d, D + 1]
        scale = _balance(refitted, shared)
        new["key"].append(shared * scale)
        new["query"].append((refitted / scale).flatten(0, 1))
        metric = [_square_root(weight.T @ weight) for weight in output[group]]
        shared, old, energy = _shared_head(value[group], metric, value_moment)
        kept["kept_value_energy"].append(energy)
        refitted = (output[group] @ old).transpose(1, 2)  # [g, d, D]
        scale = _balance(refitted, shared)
        new["value"].append(shared * scale)
        new["output"].append((refitted / scale).flatten(0, 1))
    parts = {role: torch.cat(rows) for role, rows in new.items()}
    changed = {"output_weight": parts["output"].T}
    for role in ("query", "key", "value"):
        has_bias = getattr(tensors, f"{role}_bias") is not None
        changed[f"{role}_weight"] = parts[role][:, :-1] if has_bias else parts[role]
        if has_bias:
            changed[f"{role}_bias"] = parts[role][:, -1]
    like = tensors.query_weight.dtype
    changed = {name: tensor.to(like).contiguous() for name, tensor in changed.items()}
    details = tensors.details | {name: [round(energy, 4) for energy in energies] for name, energies in kept.items()}
    return _refit_output(replace(tensors, **changed, details=details), heads, inputs, targets)


def fit(
    tensors: AttentionTensors,
    heads: HeadCounts,
    inputs: Sequence[AttentionInputs],
    targets: Sequence[torch.Tensor],
    calibration: Calibration,
    generator: torch.Generator,
) -> AttentionTensors:
    """Fit one attention's projections to outputs by Adam, then its output projection by regression once more.

    The gradient passes through this attention alone. Where fitting makes the outputs on a held-out tenth of the text
    no better, `tensors` come back as they are.

    Args:
        tensors: the projections to begin with.
        heads: the head counts.
        inputs: what the attention is called with, on text.
        targets: the outputs to reach, [b, n, D] each.
        calibration: the steps, their rate and size.
        generator: chooses each step's examples.
    """
    size = max(1, round(HELD_OUT * len(inputs)))
    order = torch.randperm(len(inputs), generator=generator).tolist()
    held, used = order[:size], order[size:] or order
    parameters = {
        name: tensor.detach().clone().requires_grad_()
        for name, tensor in vars(tensors).items()
        if isinstance(tensor, torch.Tensor)
    }
    groups = [{"params": [p], "lr": calibration.fit_learning_rate * _rms(p)} for p in parameters.values()]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98))
    steps = calibration.fit_steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))
    fitted = replace(tensors, **parameters)
    with torch.enable_grad():
        for _ in range(steps):
            index = used[int(torch.randint(len(used), (1,), generator=generator))]
            examples = inputs[index].states.shape[0]
            rows = torch.randperm(examples, generator=generator)[: calibration.fit_batch_size]
            rows = rows.to(inputs[index].states.device)
            batch, target = inputs[index].rows(rows), targets[index][rows]
            difference = (attend(fitted, batch, heads.query)[0] - target)[batch.valid]
            loss = difference.square().mean() / target[batch.valid].var().clamp_min(1e-30)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        fitted = replace(fitted, **{name: parameter.detach() for name, parameter in parameters.items()})
        held_inputs, held_targets = [inputs[i] for i in held], [targets[i] for i in held]
        fitted = _refit_output(fitted, heads, [inputs[i] for i in used], [targets[i] for i in used])
        before, after = (relative_error(which, heads, held_inputs, held_targets) for which in (tensors, fitted))
    details = {"relative_error_closed_form": round(before, 4), "relative_error_fitted": round(after, 4)}
    return replace(fitted if after < before else tensors, details=tensors.details | details)


@torch.no_grad()
def relative_error(
    tensors: AttentionTensors,
    heads: HeadCounts,
    inputs: Sequence[AttentionInputs],
    targets: Sequence[torch.Tensor],
) -> float:
    """Return sqrt(sum |output - target|^2 / sum |target - mean target|^2) over the valid positions."""
    errors = [
        (attend(tensors, batch, heads.query)[0] - target)[batch.valid]
        for batch, target in zip(inputs, targets, strict=True)
    ]
    target = torch.cat([target[batch.valid] for batch, target in zip(inputs, targets, strict=True)])
    spread = (target - target.mean(0)).double().square().sum()
    return math.sqrt(sum(error.double().square().sum() for error in errors) / spread.clamp_min(1e-30))


def _moments(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the second moments of each head's queries [h, d, d], each group's keys and values read [k, g*d, g*d]."""
    groups, width = heads.key[1], heads.query // heads.key[1] * heads.head_dim
    like = {"dtype": torch.float64, "device": tensors.query_weight.device}
    queries = torch.zeros(heads.query, heads.head_dim, heads.head_dim, **like)
    keys, values = torch.zeros(2, groups, width, width, **like)
    query_count = key_count = 0
    for batch in inputs:
        weights = attend(tensors, batch, heads.query)[2]  # [b, h, n, m]
        present = _memory_valid(batch)
        query = _project(tensors, "query", heads, batch.states)[batch.valid]  # [rows, h, d]
        queries += torch.einsum("rhd,rhe->hde", query, query)
        query_count += query.shape[0]
        key = _project(tensors, "key", heads, batch.memory)  # [b, m, h, d]
        counts = present.sum(1).clamp_min(1)[:, None, None]
        key = key - ((key * present[..., None, None]).sum(1) / counts)[:, None]
        key = key[present].unflatten(1, (groups, -1)).flatten(2)  # [rows, k, g*d]
        keys += torch.einsum("rkd,rke->kde", key, key)
        key_count += key.shape[0]
        value = _project(tensors, "value", heads, batch.memory).unflatten(2, (groups, -1)).flatten(3)  # [b, m, k, g*d]
        read = torch.einsum("bkgnm,bmkd->kbngd", weights.unflatten(1, (groups, -1)), value)
        read = read[:, batch.valid].flatten(1, 2)  # [k, rows * g, g*d]
        values += read.transpose(1, 2) @ read
    return queries / query_count, keys / key_count, values / (query_count * (heads.query // groups))


def _with_unseen(moments: torch.Tensor, projections: torch.Tensor) -> torch.Tensor:
    """Add to moments [n, d, d] what white inputs of `UNSEEN` of the text's energy would give under [n, d, D]."""
    white = projections @ projections.transpose(1, 2)
    traces = [matrices.diagonal(dim1=1, dim2=2).sum(1) for matrices in (moments, white)]
    return moments + (UNSEEN * traces[0] / traces[1].clamp_min(1e-300))[:, None, None] * white


def _shared_head(
    old: torch.Tensor, metric: Sequence[torch.Tensor], moment: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Find the d-dimensional projection that serves a group best.

    Args:
        old: the group's projections, [g, d, D + 1].
        metric: for each head, the square root of what weighs its outputs, [d, d].
        moment: the second moment of the stacked outputs, [g*d, g*d].

    Returns:
        The shared projection [d, D + 1], what makes each old head of it [g, d, d], and the energy kept.
    """
    size, head_dim = old.shape[0], old.shape[1]
    root = _square_root(moment)
    _, singular, right = torch.linalg.svd(torch.block_diag(*metric) @ root)
    basis = right[:head_dim]
    energy = singular.square()
    shared = basis @ _pseudo_inverse(root) @ old.flatten(0, 1)
    from_shared = (root @ basis.T).unflatten(0, (size, head_dim))
    return shared, from_shared, float(energy[:head_dim].sum() / energy.sum().clamp_min(1e-300))


def _refit_output(
    tensors: AttentionTensors,
    heads: HeadCounts,
    inputs: Sequence[AttentionInputs],
    targets: Sequence[torch.Tensor],
) -> AttentionTensors:
    """Change the output projection by linear regression of what is missing from the targets on the heads' outputs."""
    with_bias = tensors.output_bias is not None
    moment: Any = 0.0
    cross: Any = 0.0
    for batch, target in zip(inputs, targets, strict=True):
        output, context, _ = attend(tensors, batch, heads.query)
        context, missing = context[batch.valid], (target - output)[batch.valid]
        if with_bias:
            context = nn.functional.pad(context, (0, 1), value=1.0)
        moment = moment + (context.T @ context).double()
        cross = cross + (missing.T @ context).double()
    ridge = RIDGE * moment.diagonal().mean().clamp_min(1e-30)
    moment.diagonal().add_(ridge)
    change = torch.linalg.solve(moment, cross.T).T.to(tensors.output_weight.dtype)
    if not with_bias:
        return replace(tensors, output_weight=tensors.output_weight + change)
    return replace(
        tensors,
        output_weight=tensors.output_weight + change[:, :-1],
        output_bias=tensors.output_bias + change[:, -1],
    )


def _project(tensors: AttentionTensors, role: str, heads: HeadCounts, states: torch.Tensor) -> torch.Tensor:
    # [b, n, D] to [b, n, h, d], shared heads repeated.
    projected = nn.functional.linear(states, getattr(tensors, f"{role}_weight"), getattr(tensors, f"{role}_bias"))
    projected = projected.unflatten(-1, (-1, heads.head_dim))
    return projected.repeat_interleave(heads.query // projected.shape[2], dim=2)


def _augmented(tensors: AttentionTensors, role: str, heads: HeadCounts) -> torch.Tensor:
    # [h, d, D + 1] with the bias as the last column, or [h, d, D] without one; shared heads repeated.
    weight, bias = getattr(tensors, f"{role}_weight").double(), getattr(tensors, f"{role}_bias")
    projection = weight if bias is None else torch.cat([weight, bias.double()[:, None]], dim=1)
    source = projection.shape[0] // heads.head_dim
    return repeat_heads(projection, source, heads.query).unflatten(0, (heads.query, -1))


def _memory_valid(inputs: AttentionInputs) -> torch.Tensor:
    if inputs.memory is inputs.states:
        return inputs.valid
    if inputs.mask is None:
        return torch.ones(inputs.memory.shape[:2], dtype=torch.bool, device=inputs.memory.device)
    reachable = inputs.mask[:, 0] > torch.finfo(inputs.mask.dtype).min / 2  # [b or 1, n, m]
    return reachable.any(1).expand(inputs.memory.shape[0], -1)


def _balance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # What multiplies each row of `other` [d, D] so that both [g, d, ...] have rows of one size: bfloat16 loses least.
    sizes = one.square().mean((0, 2)).sqrt(), other.square().mean(1).sqrt()
    return (sizes[0].clamp_min(1e-30) / sizes[1].clamp_min(1e-30)).sqrt()[:, None]


def _square_root(moment: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def _pseudo_inverse(root: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh((root + root.T) / 2)
    floor = values.max().clamp_min(1e-300) * math.sqrt(RANK_TOLERANCE)
    return (vectors * torch.where(values > floor, 1 / values.clamp_min(floor), 0.0)) @ vectors.T


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.detach().square().mean().sqrt()) or 1e-3
