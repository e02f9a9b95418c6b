"""What an error of the memory does to an attention's output, to first order, measured on text (`latents.LatentForm`).

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

from collections.abc import Sequence
from typing import Any

import torch

from ..attention_tensors import AttentionTensors, HeadCounts, LatentForm, LatentForms, repeat_heads, split_heads
from .recording import AttentionInputs, attention_weights

__all__ = ["latent_forms"]

# A direction that the text never takes counts this part of the mean direction: other text may take it.
UNSEEN = 1e-4


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
    metric.diagonal().add_(UNSEEN)
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
