"""Conversion methods that fit new heads to the outputs of the original attention on text.

**Closed form for heads.** BERT, ALBERT and T5 have no rotary positions in the dot product, so only products of weights
matter. Head i has the logits x^T B_i y with B_i = W_q,i^T W_k,i, and it adds W_o,i W_v,i sum_j p_ij y_j to the output.
Heads can be reordered, and `find_best_groups` chooses the groups that lose the least energy. For the g heads in a
group:

- Keys: The best shared key head (the least-squares solution over the text) spans the first d right singular vectors of
  the stacked T_i^1/2 [K_i] S^1/2. T_i is the second-moment matrix of head i's queries. S is the second-moment matrix
  of the group's keys, which are centered within each text because a softmax ignores what all keys have in common. The
  queries are then adapted to the shared key head.
- Values: The shared value head spans the first d right singular vectors of the stacked W_o,i [V_i] Z^1/2. Z is the
  second-moment matrix of the group's values after averaging with the attention weights of its heads.
- Output: W_o and its bias are fitted for all heads together by regressing the original attention outputs on the
  outputs of the new heads (`fitting.refit_output_projection`). One head can thus compensate for the losses of another.

All computations use float64 moments of dimension h*d or less. Afterwards, all projections are fitted with Adam
(`fitting`).

**Latent forms.** A latent causes an error E y in the keys or values for each input y. The form measures the
first-order effect of this error on the attention output for the calibration text
(`attention_tensors.QuadraticErrorForm`). An error in the keys changes the logits of query q by q^T E y_j, and the
output by

    W_o,i W_v,i sum_j p_ij (y_j - z_i) (q_i^T E y_j),   z_i = sum_j p_ij y_j   (q_i includes the logit scaling)

This is linear in E. Its square along a random output direction e is (q_i^T E a_i)^2 with

    a_i = sum_j p_ij s_ij y_j,   s_ij = e^T W_o,i W_v,i (y_j - z_i)

An error in the values changes the output by W_o,i E z_i. If queries and a_i are assumed to be independent (as in
K-FAC, arXiv 1503.05671), the form for the keys has G = sum_i W_k,i^T E[q q^T] W_k,i, and S is the second-moment matrix
of a_i. The form for the values has G = sum_i W_v,i^T W_o,i^T W_o,i W_v,i, and S is the second-moment matrix of z_i.
The S of each head is weighted by its share of G. Because both forms measure squared output errors, no further weights
are needed to balance keys and values, or to balance layers that read the same encoder outputs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...modeling.mechanisms.head_sharing import get_consecutive_groups
from ..attention_tensors import (
    AttentionInputs,
    AttentionTensors,
    CalibratedLatent,
    CalibratedMethod,
    HeadCounts,
    KeyValueErrorForms,
    LayerContext,
    QuadraticErrorForm,
    join_heads,
    project_onto_latent,
    reorder_heads,
    repeat_heads,
    split_heads,
)
from ..calibration_settings import FIT_DEFAULTS
from ..rotary_positions import RotaryPairs
from .fitting import fit_projections, iterate_output_refits, refit_output_projection, round_error
from .head_groups import can_reorder_heads, find_best_groups
from .head_moments import (
    HeadMoments,
    center_keys,
    compute_head_moments,
    find_shared_head,
    get_rotary_pairs,
    matrix_square_root,
    project_heads,
    split_output_heads,
)
from .recording import compute_attention_weights
from .rotary_heads import (
    compute_pair_moments,
    find_phases,
    find_shared_rotary_head,
    fit_query_factors,
    make_commuting_maps,
    select_rest,
)

logger = logging.getLogger(__name__)

# Weight of directions that do not occur in the calibration text, relative to the mean direction. It is not zero
# because they can occur in other text.
UNSEEN_SHARE = 1e-4


@torch.no_grad()
def compute_error_forms(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], generator: torch.Generator
) -> KeyValueErrorForms:
    """Compute the quadratic forms for a module's keys and values from text. Their energies are averages over queries.

    Args:
        tensors: The projections of an attention module with a softmax and without a latent.
        heads: The head counts.
        inputs: Recorded inputs to the module.
        generator: Random number generator for the directions e.
    """
    count, shared = heads.query, heads.query // heads.value[1]
    weights = tensors.key_weight, tensors.value_weight
    key, value = projections = [_repeat_for_query_heads(weight, heads) for weight in weights]  # [h, d, D]
    output = split_output_heads(tensors, heads)  # [h, D, d]
    products = (_compute_query_moments(tensors, heads, inputs), output.mT @ output)  # [h, d, d]
    # The weight of each head in the sum S over all heads.
    shares = [(metric @ weight * weight).sum((1, 2)) for weight, metric in zip(projections, products, strict=True)]
    moments = [key.new_zeros(key.shape[2], key.shape[2]) for _ in projections]  # S of a, and S of z
    energies: list[Any] = [0.0, 0.0]
    sums, queries = key.new_zeros(count, key.shape[2]), 0
    for batch in inputs:
        mixes = _compute_mixture_coefficients(tensors, value, output, batch, generator)
        for role, mix in enumerate(mixes):
            moments[role] += _compute_weighted_second_moment(mix, batch.key_value_states, shares[role])
            energies[role] += _compute_energy(mix, batch.key_value_states, projections[role], products[role])
        sums += torch.einsum("bhm,bmi->hi", mixes[1].sum(2), batch.key_value_states).double()
        queries += int(batch.valid.sum())
    value_input_means = None
    if tensors.value_bias is not None:
        # The bias can reproduce the mean input of a value head, so the mean is subtracted from the form.
        value_input_means = sums.unflatten(0, (-1, shared)).mean(1) / queries  # [k, D]
        center = value_input_means.repeat_interleave(shared, dim=0)
        for head in range(count):
            # sum (z - c)(z - c)^T = sum z z^T - correction
            correction = torch.outer(sums[head], center[head])
            correction = correction + correction.T - queries * torch.outer(center[head], center[head])
            moments[1] -= shares[1][head] * correction
            energies[1] -= (value[head] @ correction @ value[head].T * products[1][head]).sum()
    pairs = zip(projections, products, strict=True)
    gram_matrices = [torch.einsum("hdi,hdj->ij", weight, metric @ weight) for weight, metric in pairs]
    energies = [total / queries for total in energies]
    key_form, value_form = map(_make_error_form, gram_matrices, moments, energies)
    return KeyValueErrorForms(key_form, value_form, value_input_means)


def _compute_mixture_coefficients(
    tensors: AttentionTensors,
    value: torch.Tensor,
    output: torch.Tensor,
    batch: AttentionInputs,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the coefficients of a and those of z, each [b, h, n, m].

    The module docstring defines a and z, which are weighted sums of the key/value inputs for each head and query.
    """
    weights = compute_attention_weights(tensors, batch, len(value)).masked_fill(~batch.valid[:, None, :, None], 0.0)
    probe = torch.randn(*batch.states.shape[:2], output.shape[1], generator=generator).to(batch.key_value_states)  # e
    directions = torch.einsum("bno,hod->bhnd", probe, output.to(probe))
    slopes = directions @ _project_states(batch.key_value_states, value).mT
    slopes = slopes - (weights * slopes).sum(-1, keepdim=True)  # s
    return weights * slopes, weights


def _project_states(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Project states [b, m, D] with the weights of heads [h, d, D] to [b, h, m, d]."""
    return torch.einsum("bmi,hdi->bhmd", states, weight.to(states))


def _compute_weighted_second_moment(
    coefficients: torch.Tensor, states: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Return the second-moment matrix [D, D] of the mixtures of states. Each head is weighted by its share."""
    rows = (coefficients * shares.sqrt().to(coefficients)[:, None, None]).flatten(1, 2)  # [b, h*n, m]
    return torch.einsum("bmi,bmj->ij", states, (rows.mT @ rows) @ states).double()


def _compute_energy(
    coefficients: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, metric: torch.Tensor
) -> torch.Tensor:
    """Return the energy of the projected mixtures of states, summed over all heads and queries.

    The energy of a projected mixture x [d] is x^T M x, where M is its head's matrix in `metric` [h, d, d].
    """
    mixed = coefficients @ _project_states(states, weight)  # [b, h, n, d]
    return (torch.einsum("bhnd,bhne->hde", mixed, mixed).double() * metric).sum()


def _make_error_form(gram: torch.Tensor, metric: torch.Tensor, energy: torch.Tensor) -> QuadraticErrorForm:
    """Return a form that is scaled to the given energy. Its metric also gives a small weight to unseen directions."""
    metric = metric / metric.trace().clamp_min(1e-300) * metric.shape[0]
    metric.diagonal().add_(UNSEEN_SHARE)
    return QuadraticErrorForm(gram * (energy / (gram * metric).sum().clamp_min(1e-300)), metric)


def _compute_query_moments(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs]
) -> torch.Tensor:
    """Return the second-moment matrices [h, d, d] of each head's scaled queries."""
    moments: Any = 0.0
    for batch in inputs:
        query = tensors.project("query", batch.states).unflatten(-1, (heads.query, -1))[batch.valid]  # [rows, h, d]
        query = query * batch.scaling
        moments = moments + torch.einsum("rhd,rhe->hde", query, query).double()
    return moments / sum(int(batch.valid.sum()) for batch in inputs)


# Number of times that all heads in a group are aligned with each other.
NUM_ROUNDS = 30
# Weight of directions that do not occur in the calibration text, relative to those that do. It is not zero because
# they can occur in other text.
UNSEEN_ENERGY_SHARE = 1e-4
# Keys can be weighted equally, or by the attention that they receive. Each of these shares of attention weighting is
# tried.
ATTENDED_SHARES = (0.0, 0.5, 1.0)
# A latent's learning rate is proportional to the relative error of the closed form, or to this value if it is larger.
MIN_RATE_ERROR = 1e-3


class Aligned(CalibratedMethod):
    """Mean pooling after an orthogonal Procrustes alignment of the heads in each group.

    A head's queries and keys can be rotated together without changing the output, because q^T k = (R q)^T (R k). The
    same applies to its values and W_o. The rotations bring the keys and values of a group as close together as
    possible on the text. Groups consist of consecutive heads. No projection is fitted. With rotary positions, each
    pair of dimensions is turned by its own phase (see `rotary_heads`).
    """

    name = "aligned"

    @torch.no_grad()
    def convert_module(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections after alignment and averaging (see `CalibratedMethod.convert_module`)."""
        groups = get_consecutive_groups(heads.query, heads.key[1])
        moments = compute_head_moments(tensors, heads, layer.inputs, groups)
        pairs = get_rotary_pairs(heads, layer.inputs)
        align = partial(_align_heads, head_dim=heads.head_dim)
        align_keys = align if pairs is None else partial(_align_rotary_heads, head_dim=heads.head_dim, pairs=pairs)
        key_rotations = torch.cat([align_keys(moment) for moment in moments.keys])  # [h, d, d]
        value_rotations = torch.cat([align(moment.mean(0)) for moment in moments.values])
        changed: dict[str, Any] = {}
        for role, rotations, new_heads in (
            ("query", key_rotations, heads.query),
            ("key", key_rotations, len(groups)),
            ("value", value_rotations, len(groups)),
        ):
            rotate = partial(_rotate_and_average, rotations=rotations, new_heads=new_heads)
            changed |= tensors.apply_to_role(role, rotate)
        output = tensors.output_weight.double().unflatten(1, (heads.query, -1))  # [D, h, d]
        output = torch.einsum("ohe,hde->ohd", output, value_rotations).flatten(1).to(tensors.output_weight.dtype)
        return replace(tensors, **changed, output_weight=output)


def _rotate_and_average(projection: torch.Tensor, rotations: torch.Tensor, new_heads: int) -> torch.Tensor:
    """Apply the rotations [h, d, d] to the heads of a projection, and average groups of heads to get `new_heads`."""
    heads, head_dim = rotations.shape[:2]
    repeated = repeat_heads(projection, projection.shape[0] // head_dim, heads)
    rotated = torch.einsum("hde,he...->hd...", rotations, split_heads(repeated.double(), heads))  # [h, d, ...]
    return join_heads(rotated.unflatten(0, (new_heads, -1)).mean(1)).to(projection.dtype)


def _align_heads(moment: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rotations [g, d, d] that align heads with joint second moments [g*d, g*d] as closely as possible.

    The heads are rotated one at a time towards the sum of the others. The solution to this orthogonal Procrustes
    problem is U V^T for the singular value decomposition U S V^T of the cross-moment.
    """
    size = moment.shape[0] // head_dim
    cross = moment.unflatten(0, (size, head_dim)).unflatten(2, (size, head_dim)).transpose(1, 2)  # [g, g, d, d]
    rotations = torch.eye(head_dim, dtype=moment.dtype, device=moment.device).repeat(size, 1, 1)
    for _ in range(NUM_ROUNDS):
        for head in range(size):
            weighted_sum = sum(rotations[other] @ cross[other, head] for other in range(size) if other != head)
            if size > 1:
                left, _, right = torch.linalg.svd(weighted_sum)
                rotations[head] = left @ right
    return rotations


def _align_rotary_heads(moment: torch.Tensor, head_dim: int, pairs: RotaryPairs) -> torch.Tensor:
    """Return the rotations [g, d, d] as in `_align_heads`, but only those that commute with rotary positions."""
    phases = find_phases(compute_pair_moments(moment, head_dim, pairs), NUM_ROUNDS)
    rest = moment.new_zeros(len(phases), 0, 0)
    if len(pairs.rest):
        rest = _align_heads(select_rest(moment, head_dim, pairs), len(pairs.rest))
    return make_commuting_maps(phases, rest, pairs)


class Calibrated(CalibratedMethod):
    """Computes the closed form, and then fits it with Adam if this reduces the error on held-out text.

    `Calibration.fit_steps` is the maximum number of fitting steps. The report's `details` contain both errors.
    """

    name = "calibrated"
    options = tuple(FIT_DEFAULTS)

    def convert_module(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections with new heads (see `CalibratedMethod.convert_module`)."""
        groups = get_consecutive_groups(heads.query, heads.key[1])
        if can_reorder_heads(heads, layer.inputs):
            groups = find_best_groups(tensors, heads, layer.inputs, layer.generator, layer.num_uses)
            tensors = reorder_heads(tensors, heads, groups)
        tensors = replace(tensors, details=tensors.details | {"head_groups": groups})
        closed_forms = iterate_closed_form_projections(tensors, heads, layer.inputs, layer.targets)
        measured = ((layer.held_out_error(form), form) for form in closed_forms)
        error, closed_form = min(measured, key=_get_measured_error)
        if (pairs := get_rotary_pairs(heads, layer.inputs)) is not None:
            fitted = refit_rotary_queries(tensors, closed_form, heads, layer.inputs, pairs)
            fitted = refit_output_projection(fitted, heads, layer.inputs, layer.targets)
            candidates = (error, closed_form), (layer.held_out_error(fitted), fitted)
            error, closed_form = min(candidates, key=_get_measured_error)
        closed_form = replace(closed_form, details=closed_form.details | {"output_relative_error": round_error(error)})
        return self._fit_closed_form(closed_form, heads, layer, closed_form_error=error)

    def with_latent(
        self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext, latent: CalibratedLatent
    ) -> AttentionTensors:
        """Compute the keys and values from a latent, refit the output projection, and then fit all projections.

        The latent is also fitted unless other modules share it. The default learning rate is multiplied by the
        relative error of the closed form.
        """
        tensors = project_onto_latent(tensors, latent.weight, latent.forms)
        tensors = refit_output_projection(tensors, heads, layer.inputs, layer.targets)
        return self._fit_closed_form(tensors, heads, layer, tensors.latent_weight if latent.is_shared else None)

    def fit_kernel(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Refit the output projection for the kernel, and then fit the kernel and all projections."""
        tensors = refit_output_projection(tensors, heads, layer.inputs, layer.targets)
        return self._fit_closed_form(tensors, heads, layer)

    def _fit_closed_form(
        self,
        closed_form: AttentionTensors,
        heads: HeadCounts,
        layer: LayerContext,
        fixed_latent: torch.Tensor | None = None,
        closed_form_error: float | None = None,
    ) -> AttentionTensors:
        """Fit the closed form, and return whichever result has the smaller error on held-out text.

        Args:
            closed_form: The projections of the closed form.
            heads, layer: See `convert_module`.
            fixed_latent: A latent that is not fitted because other modules share it.
            closed_form_error: The closed form's error on held-out text, if it is already known.
        """
        calibration, measure = layer.calibration, layer.held_out_error
        if not calibration.get_fit_option("fit_steps"):
            return closed_form
        error_before, start = measure(closed_form) if closed_form_error is None else closed_form_error, closed_form
        has_latent = closed_form.latent_weight is not None
        if has_latent and calibration.fit_learning_rate is None and error_before is not None:
            # A latent's closed form is already close to the optimum, and large steps would move away from it.
            rate = max(error_before, MIN_RATE_ERROR) * calibration.get_fit_option("fit_learning_rate")
            layer = replace(layer, calibration=replace(calibration, fit_learning_rate=rate))
        if fixed_latent is not None:
            start = replace(closed_form, latent_weight=None)
            inputs = [
                replace(batch, key_value_states=closed_form.compute_latent(batch.key_value_states))
                for batch in layer.inputs
            ]
            layer = replace(layer, inputs=inputs)

        def add_latent(tensors: AttentionTensors) -> AttentionTensors:
            return tensors if fixed_latent is None else replace(tensors, latent_weight=fixed_latent)

        layer = replace(layer, held_out_error=lambda tensors: measure(add_latent(tensors)))
        fitted, error_after = fit_projections(start, heads, layer)
        for refitted in iterate_output_refits(fitted, heads, layer.inputs, layer.targets):
            error = layer.held_out_error(refitted)
            if error is not None and (error_after is None or error < error_after):
                fitted, error_after = refitted, error
        is_better = error_before is not None and error_after is not None and error_after < error_before
        details = {
            "relative_error_closed_form": round_error(error_before),
            "relative_error_fitted": round_error(error_after),
            "output_relative_error": round_error(error_after if is_better else error_before),
            "fit_kept": is_better,
        }
        return replace(add_latent(fitted) if is_better else closed_form, details=closed_form.details | details)


def _get_measured_error(measured: tuple[float | None, AttentionTensors]) -> float:
    """Return the error of measured projections, or infinity if it is not finite."""
    return math.inf if measured[0] is None else measured[0]


@torch.no_grad()
def iterate_closed_form_projections(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], targets: Sequence[torch.Tensor]
) -> Iterator[AttentionTensors]:
    """Compute the best shared heads in the least-squares sense, and yield projections for each of `ATTENDED_SHARES`.

    Args:
        tensors: The original projections. Query heads that will share a key/value head must be consecutive.
        heads: The head counts.
        inputs: Recorded inputs to the module.
        targets: Outputs of the original module, each of shape [b, n, D].
    """
    groups = get_consecutive_groups(heads.query, heads.key[1])
    moments = compute_head_moments(tensors, heads, inputs, groups, with_attended_keys=True)
    with_values, pairs = _share_values(tensors, heads, groups, moments), get_rotary_pairs(heads, inputs)
    for share in ATTENDED_SHARES:
        keys = [_mix_moments(*pair, share) for pair in zip(moments.keys, moments.attended_keys, strict=True)]
        closed_form = _share_keys(with_values, heads, groups, moments.queries, keys, pairs)
        closed_form = replace(closed_form, details=closed_form.details | {"attended_key_share": share})
        yield refit_output_projection(closed_form, heads, inputs, targets)


def _mix_moments(moment: torch.Tensor, other_moment: torch.Tensor, share: float) -> torch.Tensor:
    """Return the weighted mean of two moments, each divided by its trace. `share` is the weight of `other_moment`."""
    first, second = (matrix / matrix.trace().clamp_min(1e-300) for matrix in (moment, other_moment))
    return (1 - share) * first + share * second


def _share_keys(
    tensors: AttentionTensors,
    heads: HeadCounts,
    groups: Sequence[Sequence[int]],
    queries: torch.Tensor,
    key_moments: Sequence[torch.Tensor],
    pairs: RotaryPairs | None = None,
) -> AttentionTensors:
    """Return projections with the best shared key head for each group, and with queries adapted to it.

    Args:
        tensors: The original projections.
        heads: The head counts.
        groups: The query heads in each group.
        queries: Second-moment matrices of the queries, [h, d, d].
        key_moments: Second-moment matrix of the stacked keys in each group, [g*d, g*d].
        pairs: The pairs of dimensions that rotary positions rotate, or None if there are no rotary positions.
    """
    joined = map(tensors.join_weight_and_bias, ("query", "key"))
    query, key = (_repeat_for_query_heads(weight, heads) for weight in joined)  # [h, d, D + 1]
    new: dict[str, list[torch.Tensor]] = {"query": [], "key": []}
    energies = []
    for group, moment in zip(groups, key_moments, strict=True):
        query_moments = torch.stack([_add_unseen_directions(queries[head], query[head]) for head in group])
        moment = _add_unseen_directions(moment, key[group].flatten(0, 1))
        if pairs is None:
            metric = [matrix_square_root(matrix) for matrix in query_moments]
            shared, old, energy = find_shared_head(key[group], metric, moment)
            refitted = old.transpose(1, 2) @ query[group]  # [g, d, D + 1]
        else:
            key_maps, query_maps, energy = find_shared_rotary_head(query_moments, moment, pairs)
            shared, refitted = (key_maps @ key[group]).sum(0), query_maps @ query[group]
        energies.append(round(energy, 4))
        scale = _compute_balancing_factors(refitted, shared, pairs)
        new["key"].append(shared * scale)
        new["query"].append((refitted / scale).flatten(0, 1))
    changed: dict[str, torch.Tensor] = {}
    for role, parts in new.items():
        changed |= tensors.split_weight_and_bias(role, torch.cat(parts))
    return _replace_tensors(tensors, changed, {"kept_key_energy": energies})


@torch.no_grad()
def refit_rotary_queries(
    tensors: AttentionTensors,
    closed_form: AttentionTensors,
    heads: HeadCounts,
    inputs: Sequence[AttentionInputs],
    pairs: RotaryPairs,
) -> AttentionTensors:
    """Return `closed_form` with the queries of `tensors`, fitted to the new keys (see `fit_query_factors`)."""
    new_heads = replace(heads, key=(heads.key[1], heads.key[1]))

    def iterate_moments() -> Iterator[tuple[torch.Tensor, ...]]:
        for batch in inputs:
            query = project_heads(tensors, "query", heads, batch) * batch.valid[..., None, None]
            key, new_key = center_keys(tensors, heads, batch), center_keys(closed_form, new_heads, batch)
            lengths = batch.valid.sum(1).clamp_min(1)[:, None, None, None]
            pairs_of_states = (query / lengths, query), (new_key, new_key), (key, new_key)
            yield tuple(torch.einsum("bnhd,bnhe->bhde", a.double(), b.double()) for a, b in pairs_of_states)

    maps = fit_query_factors(iterate_moments(), pairs)
    query = _repeat_for_query_heads(tensors.join_weight_and_bias("query"), heads)
    changed = tensors.split_weight_and_bias("query", (maps @ query).flatten(0, 1))
    return _replace_tensors(closed_form, changed, {"query_factors_fitted": True})


def _share_values(
    tensors: AttentionTensors, heads: HeadCounts, groups: Sequence[Sequence[int]], moments: HeadMoments
) -> AttentionTensors:
    """Return projections with the best shared value head for each group, and with an output projection adapted to it.

    Args:
        tensors: The original projections.
        heads: The head counts.
        groups: The query heads in each group.
        moments: The second moments, measured on text.
    """
    value = _repeat_for_query_heads(tensors.join_weight_and_bias("value"), heads)  # [h, d, D + 1]
    output = split_output_heads(tensors, heads)
    new: dict[str, list[torch.Tensor]] = {"value": [], "output": []}
    energies = []
    for group, value_moments in zip(groups, moments.values, strict=True):
        metric = [matrix_square_root(weight.T @ weight) for weight in output[group]]
        moment = _add_unseen_directions(value_moments.mean(0), value[group].flatten(0, 1))
        shared, old, energy = find_shared_head(value[group], metric, moment)
        energies.append(round(energy, 4))
        refitted = (output[group] @ old).transpose(1, 2)  # [g, d, D]
        scale = _compute_balancing_factors(refitted, shared)
        new["value"].append(shared * scale)
        new["output"].append((refitted / scale).flatten(0, 1))
    changed = tensors.split_weight_and_bias("value", torch.cat(new["value"]))
    changed["output_weight"] = torch.cat(new["output"]).T
    return _replace_tensors(tensors, changed, {"kept_value_energy": energies})


def _replace_tensors(
    tensors: AttentionTensors, changed: dict[str, torch.Tensor], details: dict[str, Any]
) -> AttentionTensors:
    """Replace fields of the projections, cast to the dtype of the queries, and add entries to `details`."""
    like = tensors.query_weight.dtype
    fields: dict[str, Any] = {name: tensor.to(like).contiguous() for name, tensor in changed.items()}
    return replace(tensors, **fields, details=tensors.details | details)


def _add_unseen_directions(moment: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Add the second moment of projected white noise to `moment`.

    The added moment is scaled to `UNSEEN_ENERGY_SHARE` times the trace of `moment`.
    """
    white = projection @ projection.T
    return moment + (UNSEEN_ENERGY_SHARE * moment.trace() / white.trace().clamp_min(1e-300)) * white


def _repeat_for_query_heads(projection: torch.Tensor, heads: HeadCounts) -> torch.Tensor:
    """Repeat the heads of a projection [k*d, ...], and return one head per query head, [h, d, ...], in float64."""
    projection = projection.double()
    return split_heads(repeat_heads(projection, projection.shape[0] // heads.head_dim, heads.query), heads.query)


def _compute_balancing_factors(
    first: torch.Tensor, second: torch.Tensor, pairs: RotaryPairs | None = None
) -> torch.Tensor:
    """Return factors [d, 1] for multiplying the rows of `second` [d, D] and dividing the rows of `first` [g, d, ...].

    Afterwards, the rows of both have the same magnitude, which minimizes rounding errors in bfloat16. Both rows of a
    pair have the same factor.
    """
    sizes = [first.square().mean((0, 2)), second.square().mean(1)]
    if pairs is not None:
        for energy in sizes:
            energy[pairs.first] = energy[pairs.second] = energy[pairs.first] + energy[pairs.second]
    return (sizes[0].sqrt().clamp_min(1e-30) / sizes[1].sqrt().clamp_min(1e-30)).sqrt()[:, None]
