"""Conversion methods that fit the new heads to what the attentions of the original model make of text.

BERT, ALBERT and T5 have no rotary positions inside the dot product, so a head is its products alone: its logits are
x^T B_i y with B_i = W_q,i^T W_k,i, and it adds W_o,i W_v,i sum_j p_ij y_j to the output. So heads may change places,
and the groups are those that lose least (`head_groups`). For the g heads of a group:

- keys: the shared key head that keeps the most of the logits, in the least-squares sense over the text, spans the
  first d right singular vectors of the stacked T_i^1/2 [K_i] S^1/2, with T_i the second moment of head i's queries and
  S that of the group's keys, centred within each text, for a softmax ignores what all keys have in common. The queries
  are then refitted exactly.
- values: the shared value head spans the first d right singular vectors of the stacked W_o,i [V_i] Z^1/2, with Z the
  second moment of what the heads of the group read: the values averaged by the attention weights.
- output: W_o (and its bias) of all heads together by regression on the attention's own outputs, with the new heads'
  weights and values (`fitting.refit_output`); what one head lost, others give back where they can.

All on moments of h*d numbers at most, in float64. The fit after that (`fitting`) is Adam on the module's projections.

What an error of the memory does to an attention's output, to first order, measured on text (`latents.LatentForm`).

A lost part E y of a key changes the logits of query q by q^T E y_j, and so the output, to first order, by

    W_o,i W_v,i sum_j p_ij (y_j - z_i) (q_i^T E y_j),   z_i = sum_j p_ij y_j   (q_i with the scaling of the logits)

which is linear in E: its square, for a random direction e of the output, is (q_i^T E a_i)^2 with the memory as the
keys' errors meet it,

    a_i = sum_j p_ij s_ij y_j,   s_ij = e^T W_o,i W_v,i (y_j - z_i)

A lost part of a value changes the output by W_o,i E z_i. Queries and a_i, taken as independent (as in K-FAC, arXiv
1503.05671), give the forms: for keys G = sum_i W_k,i^T E[q q^T] W_k,i with S of a_i, for values G = sum_i W_v,i^T
W_o,i^T W_o,i W_v,i with S of z_i; each head's S counts as much as its G. Both are squared errors of the output, and so
nothing has to be chosen between keys and values, or between the layers that read one memory.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...modeling.mechanisms.head_sharing import consecutive_groups
from ..attention_tensors import (
    AttentionTensors,
    HeadCounts,
    LatentForm,
    LatentForms,
    join_heads,
    on_latent,
    reorder_heads,
    repeat_heads,
    split_heads,
)
from ..calibration_settings import FIT_DEFAULTS, Calibration
from ..methods import CalibratedMethod, LatentInText, LayerContext
from .fitting import fit, refit_output, refits_of_output, rounded
from .head_groups import HeadMoments, best_groups, head_moments, heads_are_free, pseudo_inverse, square_root
from .recording import AttentionInputs, attend, attention_weights

__all__ = ["Aligned", "Calibrated", "latent_forms"]

# A direction that the text never takes counts this part of the mean direction: other text may take it.
UNSEEN_SHARE = 1e-4


@torch.no_grad()
def latent_forms(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], generator: torch.Generator
) -> LatentForms:
    """Return the forms of an attention's keys and values on text; a form's energy is of one query.

    Args:
        tensors, heads: an attention whose weights sum to one, without a latent.
        inputs: what it is called with.
        generator: draws the directions e.
    """
    count, shared = heads.query, heads.query // heads.value[1]
    key, value = maps = [_per_query_head(tensors, role, heads) for role in ("key", "value")]  # [h, d, D]
    output = tensors.output_weight.double().unflatten(1, (count, -1)).transpose(0, 1)  # [h, D, d]
    products = (_query_moments(tensors, heads, inputs), output.mT @ output)  # [h, d, d]
    # How much of each head's S there is in that of all.
    shares = [(metric @ weight * weight).sum((1, 2)) for weight, metric in zip(maps, products, strict=True)]
    moments = [key.new_zeros(key.shape[2], key.shape[2]) for _ in maps]  # the S of a, and of z
    energies: list[Any] = [0.0, 0.0]
    sums, queries = key.new_zeros(count, key.shape[2]), 0
    for batch in inputs:
        mixes = _mixes(tensors, value, output, batch, generator)
        for role, mix in enumerate(mixes):
            moments[role] += _moment(mix, batch.memory, shares[role])
            energies[role] += _energy(mix, batch.memory, maps[role], products[role])
        sums += torch.einsum("bhm,bmi->hi", mixes[1].sum(2), batch.memory).double()
        queries += int(batch.valid.sum())
    mean_read = None
    if tensors.value_bias is not None:
        # The mean of what a value head reads is the bias's: left out of what the latent is for.
        mean_read = sums.unflatten(0, (-1, shared)).mean(1) / queries  # [k, D]
        centre = mean_read.repeat_interleave(shared, dim=0)
        for head in range(count):
            # sum (z - c)(z - c)^T = sum z z^T - away
            away = torch.outer(sums[head], centre[head])
            away = away + away.T - queries * torch.outer(centre[head], centre[head])
            moments[1] -= shares[1][head] * away
            energies[1] -= (value[head] @ away @ value[head].T * products[1][head]).sum()
    grams = [torch.einsum("hdi,hdj->ij", weight, m @ weight) for weight, m in zip(maps, products, strict=True)]
    energies = [total / queries for total in energies]
    of_key, of_value = map(_form, grams, moments, energies)
    return LatentForms(of_key, of_value, mean_read)


def _mixes(
    tensors: AttentionTensors,
    value: torch.Tensor,
    output: torch.Tensor,
    batch: AttentionInputs,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a and z of each query head are made of: factors of the memory, [b, h, n, m] each."""
    weights = attention_weights(tensors, batch, len(value)).masked_fill(~batch.valid[:, None, :, None], 0.0)
    probe = torch.randn(*batch.states.shape[:2], output.shape[1], generator=generator).to(batch.memory)  # e
    through = torch.einsum("bno,hod->bhnd", probe, output.to(probe))
    slopes = through @ _projected(batch.memory, value).mT
    slopes = slopes - (weights * slopes).sum(-1, keepdim=True)  # s
    return weights * slopes, weights


def _projected(memory: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bmi,hdi->bhmd", memory, weight.to(memory))


def _moment(mix: torch.Tensor, memory: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the second moment [D, D] of all heads' mixes of the memory, each head's by its share."""
    rows = (mix * shares.sqrt().to(mix)[:, None, None]).flatten(1, 2)  # [b, h*n, m]
    return torch.einsum("bmi,bmj->ij", memory, (rows.mT @ rows) @ memory).double()


def _energy(mix: torch.Tensor, memory: torch.Tensor, weight: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    mixed = mix @ _projected(memory, weight)  # [b, h, n, d]
    return (torch.einsum("bhnd,bhne->hde", mixed, mixed).double() * metric).sum()


def _form(gram: torch.Tensor, metric: torch.Tensor, energy: torch.Tensor) -> LatentForm:
    metric = metric / metric.trace().clamp_min(1e-300) * metric.shape[0]
    metric.diagonal().add_(UNSEEN_SHARE)
    return LatentForm(gram * (energy / (gram * metric).sum().clamp_min(1e-300)), metric)


def _per_query_head(tensors: AttentionTensors, role: str, heads: HeadCounts) -> torch.Tensor:
    weight = getattr(tensors, f"{role}_weight").double()
    return split_heads(repeat_heads(weight, weight.shape[0] // heads.head_dim, heads.query), heads.query)


def _query_moments(tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs]) -> torch.Tensor:
    moments: Any = 0.0
    for batch in inputs:
        query = tensors.project("query", batch.states).unflatten(-1, (heads.query, -1))[batch.valid]  # [rows, h, d]
        query = query * batch.scaling
        moments = moments + torch.einsum("rhd,rhe->hde", query, query).double()
    return moments / sum(int(batch.valid.sum()) for batch in inputs)


ROUNDS = 30
# Directions that the text never takes still count this much beside those it does: other text may take them.
UNSEEN = 1e-4
# Keys count as often as they occur, and as much as they are attended to: these shares of the latter are tried.
ATTENDED_SHARES = (0.0, 0.5, 1.0)
# The relative error below which the fit of a latent takes no smaller steps.
LEAST_ERROR = 1e-3


class Aligned(CalibratedMethod):
    """Mean-pooling after an orthogonal Procrustes alignment of each group's heads.

    A head's queries and keys may be rotated together, and its values against W_o, without changing what it computes:
    q^T k = (R q)^T (R k). The rotations are those that bring the keys (and values) of a group closest to each other on
    the text. Groups are of consecutive heads. Nothing is refitted.
    """

    name = "aligned"

    @torch.no_grad()
    def convert_module(
        self,
        tensors: AttentionTensors,
        heads: HeadCounts,
        layer: LayerContext,
        inputs: Sequence[AttentionInputs],
        calibration: Calibration,
    ) -> AttentionTensors:
        groups = consecutive_groups(heads.query, heads.key[1])
        moments = head_moments(tensors, heads, inputs, groups)
        key_turns = torch.cat([_alignment(moment, heads.head_dim) for moment in moments.keys])  # [h, d, d]
        value_turns = torch.cat([_alignment(moment.mean(0), heads.head_dim) for moment in moments.values])
        changed: dict[str, Any] = tensors.mapped("query", partial(_turned, turns=key_turns, kept=heads.query))
        changed |= tensors.mapped("key", partial(_turned, turns=key_turns, kept=len(groups)))
        changed |= tensors.mapped("value", partial(_turned, turns=value_turns, kept=len(groups)))
        output = tensors.output_weight.double().unflatten(1, (heads.query, -1))  # [D, h, d]
        output = torch.einsum("ohe,hde->ohd", output, value_turns).flatten(1).to(tensors.output_weight.dtype)
        return replace(tensors, **changed, output_weight=output)


def _turned(projection: torch.Tensor, turns: torch.Tensor, kept: int) -> torch.Tensor:
    """Turn each head of a projection by its rotation [h, d, d], then average them down to the heads that are kept."""
    heads, head_dim = turns.shape[:2]
    repeated = repeat_heads(projection, projection.shape[0] // head_dim, heads)
    turned = torch.einsum("hde,he...->hd...", turns, split_heads(repeated.double(), heads))  # [h, d, ...]
    if kept != heads:
        turned = turned.unflatten(0, (kept, -1)).mean(1)
    return join_heads(turned).to(projection.dtype)


def _alignment(moment: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rotations [g, d, d] that bring heads of a second moment [g*d, g*d] closest to each other.

    Each head in turn is rotated towards the sum of the others: the orthogonal Procrustes problem, whose solution is
    U V^T of the singular value decomposition of their cross-moment.
    """
    size = moment.shape[0] // head_dim
    cross = moment.unflatten(0, (size, head_dim)).unflatten(2, (size, head_dim)).transpose(1, 2)  # [g, g, d, d]
    turns = torch.eye(head_dim, dtype=moment.dtype, device=moment.device).repeat(size, 1, 1)
    for _ in range(ROUNDS):
        for head in range(size):
            others = sum(turns[other] @ cross[other, head] for other in range(size) if other != head)
            if size > 1:
                left, _, right = torch.linalg.svd(others)
                turns[head] = left @ right
    return turns


class Calibrated(CalibratedMethod):
    """The closed form, then `Calibration.fit_steps` of fitting, kept where it is the better one on held-out text.

    The report's `details` have the errors of both there.
    """

    name = "calibrated"
    options = tuple(FIT_DEFAULTS)

    def steps(self, calibration: Calibration) -> int:
        return calibration.fit_option("fit_steps")

    def convert_module(
        self,
        tensors: AttentionTensors,
        heads: HeadCounts,
        layer: LayerContext,
        inputs: Sequence[AttentionInputs],
        calibration: Calibration,
    ) -> AttentionTensors:
        with torch.no_grad():
            targets = [attend(tensors, batch, heads.query)[0] for batch in inputs]
        groups = consecutive_groups(heads.query, heads.key[1])
        if heads_are_free(heads, inputs):
            groups = best_groups(tensors, heads, inputs, layer.generator, layer.uses)
            tensors = reorder_heads(tensors, heads, groups)
        tensors = replace(tensors, details=tensors.details | {"head_groups": groups})
        forms = ((layer.held_out_error(form), form) for form in closed_forms(tensors, heads, inputs, targets))
        error, closed = min(forms, key=lambda pair: math.inf if pair[0] is None else pair[0])
        closed = replace(closed, details=closed.details | {"output_relative_error": rounded(error)})
        return self._fitted(closed, heads, layer, inputs, targets, calibration, before=error)

    def with_latent(
        self,
        tensors: AttentionTensors,
        heads: HeadCounts,
        layer: LayerContext,
        inputs: Sequence[AttentionInputs],
        targets: Sequence[torch.Tensor],
        calibration: Calibration,
        latent: LatentInText,
    ) -> AttentionTensors:
        """Return keys and values by regression on the latent, the output refitted, then all fitted.

        A latent of this attention alone is fitted with it. The default learning rate is multiplied by the relative
        error of the closed form.
        """
        tensors = refit_output(on_latent(tensors, latent.weight, latent.forms), heads, inputs, targets)
        fixed = tensors.latent_weight if latent.is_shared else None
        return self._fitted(tensors, heads, layer, inputs, targets, calibration, fixed)

    def with_kernel(
        self,
        tensors: AttentionTensors,
        heads: HeadCounts,
        layer: LayerContext,
        inputs: Sequence[AttentionInputs],
        targets: Sequence[torch.Tensor],
        calibration: Calibration,
    ) -> AttentionTensors:
        """Return the output refitted, then the kernel's maps and all projections fitted."""
        tensors = refit_output(tensors, heads, inputs, targets)
        return self._fitted(tensors, heads, layer, inputs, targets, calibration)

    def _fitted(
        self,
        closed: AttentionTensors,
        heads: HeadCounts,
        layer: LayerContext,
        inputs: Sequence[AttentionInputs],
        targets: Sequence[torch.Tensor],
        calibration: Calibration,
        fixed_latent: torch.Tensor | None = None,
        before: float | None = None,
    ) -> AttentionTensors:
        """Return the closed form or what the fit makes of it, whichever is better on held-out text.

        `before` is the closed form's error there, if it was measured.
        """
        if not self.steps(calibration):
            return closed
        before, begun = layer.held_out_error(closed) if before is None else before, closed
        if closed.latent_weight is not None and calibration.fit_learning_rate is None and before is not None:
            # The closed form of a latent is near its best already: large steps lead away from it.
            rate = max(before, LEAST_ERROR) * calibration.fit_option("fit_learning_rate")
            calibration = replace(calibration, fit_learning_rate=rate)
        if fixed_latent is not None:
            begun = replace(closed, latent_weight=None)
            inputs = [replace(batch, memory=closed.latent(batch.memory)) for batch in inputs]

        def whole(tensors: AttentionTensors) -> AttentionTensors:
            return tensors if fixed_latent is None else replace(tensors, latent_weight=fixed_latent)

        def held_out_error(tensors: AttentionTensors) -> float | None:
            return layer.held_out_error(whole(tensors))

        fitted, after = fit(begun, heads, inputs, targets, calibration, layer.generator, held_out_error, layer.on_step)
        for refitted in refits_of_output(fitted, heads, inputs, targets):
            error = held_out_error(refitted)
            if error is not None and (after is None or error < after):
                fitted, after = refitted, error
        better = before is not None and after is not None and after < before
        names = ("relative_error_closed_form", "relative_error_fitted", "output_relative_error")
        details = dict(zip(names, map(rounded, (before, after, after if better else before)), strict=True))
        details |= {"fit_kept": better}
        return replace(whole(fitted) if better else closed, details=closed.details | details)


@torch.no_grad()
def closed_forms(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], targets: Sequence[torch.Tensor]
) -> Iterator[AttentionTensors]:
    """Yield the best shared heads in the least-squares sense, for each of `ATTENDED_SHARES`.

    Args:
        tensors, heads: the projections before, heads that will share one beside each other.
        inputs: what the attention is called with on text.
        targets: its outputs there, [b, n, D] each.
    """
    groups = consecutive_groups(heads.query, heads.key[1])
    moments = head_moments(tensors, heads, inputs, groups, with_attended_keys=True)
    with_values = _with_shared_values(tensors, heads, groups, moments)
    for share in ATTENDED_SHARES:
        keys = [_mixed(*pair, share) for pair in zip(moments.keys, moments.attended_keys, strict=True)]
        closed = _with_shared_keys(with_values, heads, groups, moments.queries, keys)
        details = closed.details | {"attended_key_share": share}
        yield refit_output(replace(closed, details=details), heads, inputs, targets)


def _mixed(moment: torch.Tensor, other: torch.Tensor, share: float) -> torch.Tensor:
    """Return the sum of two moments, each of energy one, by the share of the second."""
    one, two = (each / each.trace().clamp_min(1e-300) for each in (moment, other))
    return (1 - share) * one + share * two


def _with_shared_keys(
    tensors: AttentionTensors,
    heads: HeadCounts,
    groups: Sequence[Sequence[int]],
    queries: torch.Tensor,
    keys: Sequence[torch.Tensor],
) -> AttentionTensors:
    """Return the attention with the key head that serves each group best, and queries for it; moments as given."""
    query, key = (_augmented(tensors, role, heads) for role in ("query", "key"))  # [h, d, D + 1]
    new: dict[str, list[torch.Tensor]] = {"query": [], "key": []}
    energies = []
    for group, moment in zip(groups, keys, strict=True):
        metric = [square_root(_with_unseen(queries[head], query[head])) for head in group]
        moment = _with_unseen(moment, key[group].flatten(0, 1))
        shared, old, energy = _shared_head(key[group], metric, moment)
        energies.append(round(energy, 4))
        refitted = old.transpose(1, 2) @ query[group]  # [g, d, D + 1]
        scale = _balance(refitted, shared)
        new["key"].append(shared * scale)
        new["query"].append((refitted / scale).flatten(0, 1))
    changed = tensors.parted("query", torch.cat(new["query"])) | tensors.parted("key", torch.cat(new["key"]))
    return _replaced(tensors, changed, {"kept_key_energy": energies})


def _with_shared_values(
    tensors: AttentionTensors, heads: HeadCounts, groups: Sequence[Sequence[int]], moments: HeadMoments
) -> AttentionTensors:
    """Return the attention with the value head that serves each group best, and an output projection for it."""
    value = _augmented(tensors, "value", heads)  # [h, d, D + 1]
    output = tensors.output_weight.double().unflatten(1, (heads.query, -1)).transpose(0, 1)  # [h, D, d]
    new: dict[str, list[torch.Tensor]] = {"value": [], "output": []}
    energies = []
    for group, of_heads in zip(groups, moments.values, strict=True):
        metric = [square_root(weight.T @ weight) for weight in output[group]]
        moment = _with_unseen(of_heads.mean(0), value[group].flatten(0, 1))
        shared, old, energy = _shared_head(value[group], metric, moment)
        energies.append(round(energy, 4))
        refitted = (output[group] @ old).transpose(1, 2)  # [g, d, D]
        scale = _balance(refitted, shared)
        new["value"].append(shared * scale)
        new["output"].append((refitted / scale).flatten(0, 1))
    changed = {"output_weight": torch.cat(new["output"]).T} | tensors.parted("value", torch.cat(new["value"]))
    return _replaced(tensors, changed, {"kept_value_energy": energies})


def _replaced(
    tensors: AttentionTensors, changed: dict[str, torch.Tensor], details: dict[str, Any]
) -> AttentionTensors:
    like = tensors.query_weight.dtype
    own: dict[str, Any] = {name: tensor.to(like).contiguous() for name, tensor in changed.items()}
    return replace(tensors, **own, details=tensors.details | details)


def _with_unseen(moment: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Add to a moment [d, d] what white inputs of `UNSEEN` of the text's energy would give under [d, D]."""
    white = projection @ projection.T
    return moment + (UNSEEN * moment.trace() / white.trace().clamp_min(1e-300)) * white


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
    root = square_root(moment)
    _, singular, right = torch.linalg.svd(torch.block_diag(*metric) @ root)
    basis = right[:head_dim]
    energy = singular.square()
    shared = basis @ pseudo_inverse(root) @ old.flatten(0, 1)
    from_shared = (root @ basis.T).unflatten(0, (size, head_dim))
    return shared, from_shared, float(energy[:head_dim].sum() / energy.sum().clamp_min(1e-300))


def _augmented(tensors: AttentionTensors, role: str, heads: HeadCounts) -> torch.Tensor:
    # [h, d, D + 1] with the bias as the last column, or [h, d, D] without one; shared heads repeated.
    projection = tensors.joined(role).double()
    return split_heads(repeat_heads(projection, projection.shape[0] // heads.head_dim, heads.query), heads.query)


def _balance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # What multiplies each row of `other` [d, D] so that both [g, d, ...] have rows of one size: bfloat16 loses least.
    sizes = one.square().mean((0, 2)).sqrt(), other.square().mean(1).sqrt()
    return (sizes[0].clamp_min(1e-30) / sizes[1].clamp_min(1e-30)).sqrt()[:, None]
