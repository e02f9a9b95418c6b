"""The tensors of one attention, its head counts, and the latents that keys and values can be computed from.

**Latents.** A latent c = A y [r] of an encoder output y [D] is decoded as R c. A key or value projection W then loses
W (y - R A y). The effect on the output of the attention is a quadratic form of the lost part. Let G [D, D] be the Gram
matrix that measures how an error of y, passed through the projections of all heads, changes the output. Let S [D, D]
be the second moment of y as the attention reads it. Then

    lost energy = tr( G (1 - R A) S (1 - R A)^T ),   total energy = tr( G S )

R is the regression of y on c, S A^T (A S A^T)^-1, and the new projections are W R. The best A spans the first r right
singular vectors of G^1/2 S^1/2 (Eckart-Young), transformed back with S^-1/2. A latent of several projections (keys and
values, or all layers that read the same encoder outputs) has one form for each. Their G are added in the common metric
sum S / tr S, and each S is weighted by the energy of its form.

Without text (`weight_forms`), S is the identity and G follows from products of weights: keys only meet W_q,i and
values only meet W_o,i. With text, see `calibration.latent_forms`.

**Positions.** A checkpoint with learned position embeddings can get more positions. "tiled" repeats the existing ones
(arXiv 2004.05150, section 5). "interpolated" stretches them to the new number: each new position lies between two old
neighbors (arXiv 2306.15595, equation 4, applied to learned positions).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

from ..model_history import read_json
from ..modeling.fields.field_checks import check_size
from ..modeling.mechanisms.kernels.attention_kernel import AttentionKernel
from ..modeling.mechanisms.kernels.kernel_table import KERNELS, get_kernel_class
from ..modeling.ops.variant_attention import AttentionHeads
from ..registration import variant_config_class
from .checkpoint.tensor_files import CheckpointReader

__all__ = [
    "EXTENSIONS",
    "LATENT",
    "POSITION_FIELDS",
    "ROLES",
    "AttentionTensors",
    "HeadCounts",
    "LatentForm",
    "LatentForms",
    "best_latent",
    "extend_positions",
    "group_heads",
    "join_heads",
    "lengthen_tokenizer",
    "lost_by_rank",
    "on_latent",
    "pool_key_value",
    "preserved_energy",
    "rank_relation",
    "relation",
    "reorder_heads",
    "repeat_heads",
    "split_heads",
    "weight_forms",
]

ROLES = ("query", "key", "value", "output")
# The field of `AttentionTensors` that several attentions can share.
LATENT = "latent_weight"


@dataclass(frozen=True)
class HeadCounts:
    """The head counts of one attention module, before and after a conversion.

    Args:
        query: Number of query heads.
        key, value: Number of key and of value heads (before, after).
        output: Number of heads that the output projection reads.
        head_dim: Size of a head, d.
        rank: Rank of the latent that keys and values are computed from (before, after); None if there is no latent.
    """

    query: int
    key: tuple[int, int]
    value: tuple[int, int]
    output: int
    head_dim: int
    rank: tuple[int | None, int | None] = (None, None)

    @property
    def new_rank(self) -> int:
        """The rank of the new latent. Only use it if the attention gets one."""
        rank: Any = self.rank[1]
        return rank

    @property
    def relation(self) -> str:
        """The change of the key/value heads: "same", "pool" or "expand"."""
        relations = {relation(*self.key), relation(*self.value)} - {"same"}
        return relations.pop() if relations else "same"

    @property
    def rank_relation(self) -> str:
        """The change of the latent: "same", "compress" or "expand"."""
        return rank_relation(*self.rank)

    @property
    def change(self) -> str:
        """The change of the attention, as in reports: "same", "pool", "expand", "compress" or two of them."""
        changes = dict.fromkeys((self.relation, self.rank_relation))
        return ", ".join(change for change in changes if change != "same") or "same"

    @property
    def reduced(self) -> bool:
        """Whether there are fewer heads or a smaller latent afterwards, so that a method computes the weights."""
        return self.relation == "pool" or self.rank_relation == "compress"


def relation(source: int, target: int) -> str:
    """Return how `source` key/value heads become `target`: "same", "pool" (fewer) or "expand" (more, by repeating).

    Raises:
        ValueError: if a count is below 1 or neither count divides the other.
    """
    if source < 1 or target < 1:
        raise ValueError(f"The number of key/value heads must be at least 1, got {source} -> {target}.")
    if source % target == 0:
        return "same" if source == target else "pool"
    if target % source == 0:
        return "expand"
    raise ValueError(
        f"{source} key/value heads cannot become {target}. One count must divide the other: groups of heads are "
        "pooled, or each head is repeated."
    )


def rank_relation(source: int | None, target: int | None) -> str:
    """Return how a latent of rank `source` becomes one of rank `target`: "same", "compress" or "expand".

    A rank of None means that there is no latent.

    Raises:
        ValueError: if `target` is a rank larger than `source`, because the new dimensions would be empty.
    """
    if source == target:
        return "same"
    if target is None:
        return "expand"
    if source is None or target < source:
        return "compress"
    raise ValueError(
        f"A latent of rank {source} cannot become one of rank {target}, because the larger latent would store nothing "
        "more. Give a smaller rank, or the full width of the input."
    )


def split_heads(projection: torch.Tensor, heads: int) -> torch.Tensor:
    """View a projection's weight [h*d, D] or bias [h*d] as [h, d, D] or [h, d]."""
    return projection.unflatten(0, (heads, -1))


def join_heads(heads: torch.Tensor) -> torch.Tensor:
    """Return the inverse of `split_heads`: [h, d, ...] -> [h*d, ...]."""
    return heads.reshape(-1, *heads.shape[2:])


def group_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """View a projection of `source` heads as `target` groups of consecutive heads: [h*d, ...] -> [k, g, d, ...].

    The groups are consecutive because query heads g*i ... g*i + g - 1 share key/value head i in Transformers.
    """
    heads = split_heads(projection, source)  # [h, d, ...]
    return heads.reshape(target, source // target, *heads.shape[1:])


def repeat_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Expand a projection [source*d, ...] to [target*d, ...] by repeating each head; the output does not change.

    Head i of the result is head i // (target / source) of the original model.
    """
    return join_heads(split_heads(projection, source).repeat_interleave(target // source, dim=0))


@dataclass(frozen=True)
class AttentionTensors:
    """The projections of one attention module, as `nn.Linear` stores them: weights [out, in], biases [out] or None.

    Args:
        query_weight, key_weight, value_weight, output_weight: The weights.
        query_bias, key_bias, value_bias, output_bias: The biases.
        latent_weight: Projection [r, D] to the latent that keys and values are computed from, or None. Several
            attentions can share it.
        kernel: The kernel that replaces the softmax, or None.
        kernel_tensors: The tensors of the kernel (`AttentionKernel.tensors`).
        details: JSON values about this layer that a method adds to the report.

    Example:

    ```py
    >>> from dataclasses import replace
    >>> halved = replace(tensors, key_weight=tensors.key_weight / 2)
    ```
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    value_weight: torch.Tensor
    output_weight: torch.Tensor
    query_bias: torch.Tensor | None = None
    key_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    latent_weight: torch.Tensor | None = None
    kernel: AttentionKernel | None = None
    kernel_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return a tensor of the kernel, so that the kernel's functions can take this object as their module."""
        if name not in vars(self).get("kernel_tensors", ()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.kernel_tensors[name]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], kernel: AttentionKernel | None) -> "AttentionTensors":
        """Return the attention with these tensors, {field name or name of a kernel tensor: tensor}."""
        names = () if kernel is None else (*kernel.learned, *kernel.drawn)
        projections: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name not in names}
        kernel_tensors = {name: tensors[name] for name in names if name in tensors}
        return cls(**projections, kernel=kernel, kernel_tensors=kernel_tensors)

    def pair(self, role: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight and the bias of one of `ROLES` or of "latent", which has no bias."""
        return getattr(self, f"{role}_weight"), getattr(self, f"{role}_bias", None)

    def project(self, role: str, states: torch.Tensor) -> torch.Tensor:
        """Return the projection of `states` by one of `ROLES`: [..., in] to [..., out]."""
        return nn.functional.linear(states, *self.pair(role))

    def latent(self, states: torch.Tensor) -> torch.Tensor:
        """Return the input of the key and value projections: the latent [..., r] of `states` [..., D], or `states`."""
        return states if self.latent_weight is None else nn.functional.linear(states, self.latent_weight)

    def with_input_projection(self, latent_weight: torch.Tensor) -> "AttentionTensors":
        """Return the attention that first applies a linear layer [w, D] to the input of keys and values."""
        second = self.latent_weight
        product = latent_weight if second is None else (second.double() @ latent_weight.double()).to(latent_weight)
        return replace(self, latent_weight=product)

    def with_new_kernel(self, kernel: AttentionKernel, heads: HeadCounts) -> "AttentionTensors":
        """Return the same projections with a newly initialized kernel instead of the softmax."""
        sizes = (heads.head_dim, heads.head_dim)  # conversions require equal sizes of keys and values
        counts = AttentionHeads(heads.query, heads.key[1], heads.value[1], heads.query, heads.output, *sizes)
        new = {name: tensor.begin().to(self.query_weight) for name, tensor in kernel.tensors(counts).items()}
        return replace(self, kernel=kernel, kernel_tensors=new)

    def folded(self, dtype: torch.dtype = torch.float64) -> "AttentionTensors":
        """Return the same attention without a latent, in this dtype: the projections W become W A."""
        if self.latent_weight is None:
            return self
        latent = self.latent_weight.double()
        weights = {name: (getattr(self, name).double() @ latent).to(dtype) for name in ("key_weight", "value_weight")}
        return replace(self, **weights, latent_weight=None)

    def to(self, device: torch.device | str) -> "AttentionTensors":
        """Return a copy with all tensors on a device."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        moved = {name: tensor.to(device) for name, tensor in self.kernel_tensors.items()}
        return replace(self, **tensors, kernel_tensors=moved)

    def joined(self, role: str) -> torch.Tensor:
        """Return the weight and bias of a role as one matrix [W | b], [out, in + 1], or W if there is no bias."""
        weight, bias = self.pair(role)
        return weight if bias is None else torch.cat([weight, bias[:, None]], dim=1)

    def split_joined(self, role: str, joined: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a matrix of `joined` into the fields of the role, {name: tensor}, for `dataclasses.replace`."""
        if self.pair(role)[1] is None:
            return {f"{role}_weight": joined}
        return {f"{role}_weight": joined[:, :-1], f"{role}_bias": joined[:, -1]}

    def mapped(self, role: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Apply `change` to the weight and the bias of a role and return the fields, {name: tensor}."""
        parts = zip((f"{role}_weight", f"{role}_bias"), self.pair(role), strict=True)
        return {name: change(tensor) for name, tensor in parts if tensor is not None}


def reorder_heads(tensors: AttentionTensors, heads: HeadCounts, groups: Sequence[Sequence[int]]) -> AttentionTensors:
    """Return the same attention with its query heads in the order of `groups`; the output does not change.

    Query heads that share a key/value head in the original model must be adjacent in `groups`.
    """
    order = torch.tensor([head for group in groups for head in group], device=tensors.query_weight.device)
    share = heads.query // heads.key[0]
    shared = order[::share] // share
    changed: dict[str, Any] = {}
    for role, rows in (("query", order), ("key", shared), ("value", shared)):
        changed |= tensors.mapped(role, partial(_heads_in_order, order=rows))
    output = tensors.output_weight.unflatten(1, (heads.output, -1))[:, order].flatten(1)
    return replace(tensors, **changed, output_weight=output)


def _heads_in_order(projection: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return a projection [h*d, ...] with its heads in another order."""
    return join_heads(split_heads(projection, len(order))[order])


def pool_key_value(
    tensors: AttentionTensors, heads: HeadCounts, pool: Callable[..., torch.Tensor]
) -> AttentionTensors:
    """Return the attention after `pool(projection, source=, target=)` on the key and value weights and biases.

    Args:
        tensors: The projections before.
        heads: The head counts. A role that keeps its number of heads stays unchanged.
        pool: Function that computes a projection with `target` heads from one with `source` heads.
    """
    changed: dict[str, Any] = {}
    for role, (source, target) in (("key", heads.key), ("value", heads.value)):
        if source != target:
            changed |= tensors.mapped(role, partial(pool, source=source, target=target))
    return replace(tensors, **changed)


class LatentForm(NamedTuple):
    """The quadratic form of errors that the key or the value projections cause: G and S (module docstring)."""

    gram: torch.Tensor  # [D, D]
    metric: torch.Tensor  # [D, D]

    @property
    def energy(self) -> torch.Tensor:
        """The total energy tr(G S)."""
        return (self.gram * self.metric).sum()


class LatentForms(NamedTuple):
    """The forms of one attention, and the mean input of each value head [k, D], or None without text."""

    key: LatentForm
    value: LatentForm
    mean_read: torch.Tensor | None = None


@torch.no_grad()
def best_latent(forms: Sequence[LatentForm], rank: int) -> torch.Tensor:
    """Return the latent projection A [r, D] that loses the least energy of all forms (float64, orthonormal rows)."""
    _, directions = _latent_directions(forms)
    # Orthonormal rows: the latent is not larger than its input, so that it fits into the same dtype.
    return torch.linalg.qr(directions[:, -rank:])[0].T.contiguous()


@torch.no_grad()
def lost_by_rank(forms: Sequence[LatentForm]) -> torch.Tensor:
    """Return the share of the energy of all forms that the best latent of each rank from 0 to D loses, [D + 1]."""
    energies = _latent_directions(forms)[0].clamp_min(0)  # ascending
    return torch.cat([energies.new_zeros(1), energies.cumsum(0)]).flip(0) / energies.sum().clamp_min(1e-300)


def _latent_directions(forms: Sequence[LatentForm]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the energies [D], ascending, of the directions of a latent, and the directions as columns [D, D]."""
    metric: Any = sum(form.energy * form.metric / form.metric.trace() for form in forms)
    metric = metric / metric.trace().clamp_min(1e-300)
    gram = sum(form.gram * (form.energy / (form.gram * metric).sum().clamp_min(1e-300)) for form in forms)
    values, vectors = torch.linalg.eigh((metric + metric.T) / 2)
    sizes = values.clamp_min(1e-15 * values[-1]).sqrt()
    root = vectors * sizes  # S = root root^T
    energies, directions = torch.linalg.eigh(root.T @ gram @ root)
    return energies, vectors / sizes @ directions


def preserved_energy(form: LatentForm, latent: torch.Tensor) -> float:
    """Return the share of the energy of a form that a latent [r, D] preserves."""
    lost = torch.eye(latent.shape[1], dtype=latent.dtype, device=latent.device) - _regression(form, latent) @ latent
    return float(1 - ((form.gram @ lost @ form.metric) * lost).sum() / form.energy.clamp_min(1e-300))


@torch.no_grad()
def on_latent(tensors: AttentionTensors, latent: torch.Tensor, forms: LatentForms) -> AttentionTensors:
    """Return an attention that computes keys and values from a latent A [r, D], by regression of the input on it.

    `details` gets the shares of the energy of keys and values that the latent preserves.
    """
    like = tensors.key_weight
    changed = {}
    for role, form in (("key", forms.key), ("value", forms.value)):
        weight = getattr(tensors, f"{role}_weight").double()
        changed[f"{role}_weight"] = (weight @ _regression(form, latent)).to(like).contiguous()
    if tensors.value_bias is not None and forms.mean_read is not None:
        # The forms use centered inputs, so the mean of the lost part is added to the bias.
        lost = tensors.value_weight.double() - changed["value_weight"].double() @ latent
        lost = split_heads(lost, forms.mean_read.shape[0])  # [k, d, D]
        lost_mean = torch.einsum("kde,ke->kd", lost, forms.mean_read).flatten()
        changed["value_bias"] = tensors.value_bias + lost_mean.to(like)
    roles = ("key", "value")
    shares = {f"latent_{role}_energy": round(preserved_energy(getattr(forms, role), latent), 4) for role in roles}
    return replace(tensors, **changed, latent_weight=latent.to(like), details=tensors.details | shares)


@torch.no_grad()
def weight_forms(tensors: AttentionTensors, heads: HeadCounts) -> LatentForms:
    """Return the forms of an attention from its weights, without text; keys and values have equal weight."""
    pairs = (
        ("key", tensors.joined("query").double(), heads.query),
        ("value", tensors.output_weight.T.double(), heads.output),
    )
    forms = []
    for role, other, count in pairs:
        weight = getattr(tensors, f"{role}_weight").double()
        weight = split_heads(repeat_heads(weight, weight.shape[0] // heads.head_dim, count), count)  # [h, d, D]
        other_heads = split_heads(other, count)
        products = torch.einsum("hde,hfe->hdf", other_heads, other_heads)  # [h, d, d]
        gram = torch.einsum("hdi,hdf,hfj->ij", weight, products, weight)
        metric = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
        forms.append(LatentForm(gram / gram.trace().clamp_min(1e-300), metric))
    key_form, value_form = forms
    return LatentForms(key_form, value_form)


def _regression(form: LatentForm, latent: torch.Tensor) -> torch.Tensor:
    """Return R [D, r] of the regression R c of the input on its latent c."""
    latent_metric = latent @ form.metric  # [r, D]
    return torch.linalg.solve(latent_metric @ latent.T, latent_metric).T


POSITIONS_FIELD, EXTENSION_FIELD = POSITION_FIELDS = "max_position_embeddings", "position_extension"
POSITION_WEIGHT = "embeddings.position_embeddings.weight"
EXTENSIONS = ("tiled", "interpolated")
# Buffers of old checkpoints with one element per position. They are left out because models create them.
POSITION_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
# Files with the maximum length of inputs, each with the name of its field.
LENGTH_FIELDS = {TOKENIZER_CONFIG_FILE: "model_max_length", "sentence_bert_config.json": "max_seq_length"}


class LongerCheckpoint(CheckpointReader):
    """A reader of a checkpoint that adds learned positions. The caller closes the files of the original reader."""

    def __init__(self, stored: CheckpointReader, name: str, positions: int, first: int, extension: str) -> None:
        super().__init__(stored.folder, stored.files, stored.index_metadata)
        self.stored, self.name, self.positions, self.first, self.extension = stored, name, positions, first, extension
        self.entries = {key: entry for key, entry in stored.entries.items() if not key.endswith(POSITION_BUFFERS)}
        width = stored.entries[name].shape[1]
        self.entries[name] = replace(stored.entries[name], shape=(positions, width))

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor. The position embeddings [n, D] keep their first rows; the other rows are extended."""
        tensor = self.stored.read(name)
        if name != self.name:
            return tensor
        first, others = tensor[: self.first], tensor[self.first :]
        extend = _repeat_rows if self.extension == "tiled" else _interpolate_rows
        return torch.cat([first, extend(others, self.positions - self.first)])

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of one tensor as short flat tensors."""
        return self.stored.chunks(name) if name != self.name else iter([self.read(name).flatten()])

    def close(self) -> None:
        """Do nothing, because the caller closes the files."""


def _repeat_rows(table: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeat the rows of a table [n, D] until there are `rows` of them."""
    return table.repeat(-(-rows // table.shape[0]), 1)[:rows]


def _interpolate_rows(table: torch.Tensor, rows: int) -> torch.Tensor:
    """Interpolate a table [n, D] linearly to `rows` rows; the first and the last row do not change."""
    columns = table.float().T[None]  # [1, D, n]
    stretched = torch.nn.functional.interpolate(columns, rows, mode="linear", align_corners=True)
    return stretched[0].T.contiguous().to(table.dtype)


def extend_positions(
    config: dict[str, Any], reader: CheckpointReader, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], CheckpointReader]:
    """Return the configuration and the reader of a checkpoint with the number of positions that `fields` contain.

    Args:
        config: The contents of config.json.
        reader: The reader of the tensors.
        fields: The fields of a conversion. `max_position_embeddings` includes the first positions of RoBERTa that no
            token uses, as in its configuration. `position_extension` is one of `EXTENSIONS` (None: "tiled").

    Returns:
        The configuration and the reader, both unchanged if `fields` do not contain `max_position_embeddings`.

    Raises:
        ValueError: if the model has no learned positions like BERT, the number is not larger than before, the
            extension is unknown or has no number, or the model is a Linformer, whose learned sums have a fixed length.
    """
    positions, extension = (fields.get(name) for name in POSITION_FIELDS)
    if extension is not None and extension not in EXTENSIONS:
        names = ", ".join(f'"{name}"' for name in EXTENSIONS)
        raise ValueError(f"`{EXTENSION_FIELD}` must be one of {names}, got {extension!r}.")
    if positions is None:
        if extension is not None:
            raise ValueError(
                f"`{EXTENSION_FIELD}` needs `{POSITIONS_FIELD}`, got {extension!r} without it. Give both."
            )
        return config, reader
    tables = [name for name in reader.entries if name.endswith(POSITION_WEIGHT)]
    if len(tables) != 1:
        raise ValueError(
            f"`{POSITIONS_FIELD}` must only be given for models with learned positions like BERT, got a "
            f"{config.get('model_type')!r} checkpoint. Leave it out."
        )
    old_positions = reader.entries[tables[0]].shape[0]
    check_size(POSITIONS_FIELD, positions, old_positions + 1)
    kernel = config.get("attention_kernel")
    if kernel in KERNELS and get_kernel_class(kernel).depends_on_positions:
        raise ValueError(
            f"`{POSITIONS_FIELD}` must not change in a model with the kernel {kernel!r}, whose learned sums have "
            f"{old_positions} positions. Leave it out."
        )
    longer = LongerCheckpoint(
        reader, tables[0], positions, _count_unused_positions(config), extension or EXTENSIONS[0]
    )
    return config | {POSITIONS_FIELD: positions}, longer


def lengthen_tokenizer(stage: Path, config: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Write the number of positions into the files of the tokenizer and of sentence-transformers, if it was changed.

    Args:
        stage: The new folder.
        config: The new config.json.
        fields: The fields of the conversion.
    """
    if fields.get(POSITIONS_FIELD) is None:
        return
    for file, name in LENGTH_FIELDS.items():
        path = stage / file
        if (settings := read_json(path)) is not None:
            values = settings | {name: fields[POSITIONS_FIELD] - _count_unused_positions(config)}
            path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _count_unused_positions(config: Mapping[str, Any]) -> int:
    """Return the number of first positions that no token uses: RoBERTa starts after the index of the padding token."""
    after_padding = variant_config_class(config.get("model_type", "")).positions_after_padding
    return config.get("pad_token_id", 1) + 1 if after_padding else 0
