"""Latents: the few numbers of a memory that keys and values are made from, and what they lose.

Of the memory y a latent c = A y [r] keeps R c, and the maps W of keys or values then lose W (y - R A y). What that
does to an attention's output is a quadratic form of the lost part: with G [D, D] for what the output makes of an error
of the memory through all heads' maps, and S [D, D] for the second moment of the memory as it is read,

    lost energy = tr( G (1 - R A) S (1 - R A)^T ),   all energy = tr( G S )

So R is the regression of y on c, S A^T (A S A^T)^-1, new maps are W R, and the best A spans the first r right singular
vectors of G^1/2 S^1/2 (Eckart-Young), turned back by S^-1/2. A latent of several maps, keys and values, or those of
all layers that read one memory, has a form for each: their G are added in the common metric sum S / tr S, each S
counting as much as its form has energy.

Without text (`weight_forms`) S is the identity, and G that of the products of weights: W_q,i is all that keys meet and
W_o,i all that values do. With text: `calibration.latent_forms`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .grouping import HeadCounts, repeat_heads, split_heads
from .projections import AttentionTensors

__all__ = ["LatentForm", "LatentForms", "best_latent", "kept_energy", "lost_by_rank", "on_latent", "weight_forms"]


class LatentForm(NamedTuple):
    """What an error of the memory does through the maps of keys, or of values: G and S (module docstring)."""

    gram: torch.Tensor  # [D, D]
    metric: torch.Tensor  # [D, D]

    @property
    def energy(self) -> torch.Tensor:
        """tr(G S)."""
        return (self.gram * self.metric).sum()


class LatentForms(NamedTuple):
    """The forms of one attention, and what its value heads read in the mean [k, D]; None where there is no text."""

    key: LatentForm
    value: LatentForm
    mean_read: torch.Tensor | None = None


@torch.no_grad()
def best_latent(forms: Sequence[LatentForm], rank: int) -> torch.Tensor:
    """Return A [r, D], float64, of orthonormal rows: the latent of this rank that loses least by all the forms."""
    _, directions = _directions(forms)
    # c is then no larger than the memory, whatever the dtype holds.
    return torch.linalg.qr(directions[:, -rank:])[0].T.contiguous()


@torch.no_grad()
def lost_by_rank(forms: Sequence[LatentForm]) -> torch.Tensor:
    """Return the share of all the forms' energy that the best latent of each rank from 0 to D loses, [D + 1]."""
    energies = _directions(forms)[0].clamp_min(0)  # ascending
    return torch.cat([energies.new_zeros(1), energies.cumsum(0)]).flip(0) / energies.sum().clamp_min(1e-300)


def _directions(forms: Sequence[LatentForm]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the energies [D], ascending, of the directions that a latent may keep, and what reads them [D, D]."""
    metric: Any = sum(form.energy * form.metric / form.metric.trace() for form in forms)
    metric = metric / metric.trace().clamp_min(1e-300)
    gram = sum(form.gram * (form.energy / (form.gram * metric).sum().clamp_min(1e-300)) for form in forms)
    values, vectors = torch.linalg.eigh((metric + metric.T) / 2)
    sizes = values.clamp_min(1e-15 * values[-1]).sqrt()
    root = vectors * sizes  # S = root root^T
    energies, directions = torch.linalg.eigh(root.T @ gram @ root)
    return energies, vectors / sizes @ directions


def kept_energy(form: LatentForm, latent: torch.Tensor) -> float:
    """Return the share of a form's energy that is not lost."""
    lost = torch.eye(latent.shape[1], dtype=latent.dtype, device=latent.device) - _regression(form, latent) @ latent
    return float(1 - ((form.gram @ lost @ form.metric) * lost).sum() / form.energy.clamp_min(1e-300))


@torch.no_grad()
def on_latent(tensors: AttentionTensors, latent: torch.Tensor, forms: LatentForms) -> AttentionTensors:
    """Return an attention whose keys and values are made from a latent A [r, D], by regression of the memory on it.

    `details` say which share of the energy of keys and values is kept.
    """
    like = tensors.key_weight
    changed = {}
    for role, form in (("key", forms.key), ("value", forms.value)):
        weight = getattr(tensors, f"{role}_weight").double()
        changed[f"{role}_weight"] = (weight @ _regression(form, latent)).to(like).contiguous()
    if tensors.value_bias is not None and forms.mean_read is not None:
        # The forms know what is read less its mean: the mean of what is lost goes into the bias.
        lost = tensors.value_weight.double() - changed["value_weight"].double() @ latent
        lost = split_heads(lost, forms.mean_read.shape[0])  # [k, d, D]
        missing = torch.einsum("kde,ke->kd", lost, forms.mean_read).flatten()
        changed["value_bias"] = tensors.value_bias + missing.to(like)
    roles = ("key", "value")
    shares = {f"latent_{role}_energy": round(kept_energy(getattr(forms, role), latent), 4) for role in roles}
    return replace(tensors, **changed, latent_weight=latent.to(like), details=tensors.details | shares)


@torch.no_grad()
def weight_forms(tensors: AttentionTensors, heads: HeadCounts) -> LatentForms:
    """Return an attention's forms without any text; keys and values count alike."""
    pairs = (
        ("key", tensors.joined("query").double(), heads.query),
        ("value", tensors.output_weight.T.double(), heads.output),
    )
    forms = []
    for role, other, count in pairs:
        weight = getattr(tensors, f"{role}_weight").double()
        weight = split_heads(repeat_heads(weight, weight.shape[0] // heads.head_dim, count), count)  # [h, d, D]
        met = split_heads(other, count)
        products = torch.einsum("hde,hfe->hdf", met, met)  # [h, d, d]
        gram = torch.einsum("hdi,hdf,hfj->ij", weight, products, weight)
        metric = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
        forms.append(LatentForm(gram / gram.trace().clamp_min(1e-300), metric))
    of_key, of_value = forms
    return LatentForms(of_key, of_value)


def _regression(form: LatentForm, latent: torch.Tensor) -> torch.Tensor:
    """Return R [D, r] of the memory's regression R c on its latent."""
    seen = latent @ form.metric  # [r, D]
    return torch.linalg.solve(seen @ latent.T, seen).T
