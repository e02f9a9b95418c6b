"""The projections of one attention, its heads, and the latents that keys and values can be made from.

A latent c = A y [r] of the memory y keeps R c, and the maps W of keys or values then lose W (y - R A y). What that
does to an attention's output is a quadratic form of the lost part: with G [D, D] for what the output makes of an error
of the memory through all heads' maps, and S [D, D] for the second moment of the memory as it is read,

    lost energy = tr( G (1 - R A) S (1 - R A)^T ),   all energy = tr( G S )

So R is the regression of y on c, S A^T (A S A^T)^-1, new maps are W R, and the best A spans the first r right singular
vectors of G^1/2 S^1/2 (Eckart-Young), turned back by S^-1/2. A latent of several maps, keys and values, or those of
all layers that read one memory, has a form for each: their G are added in the common metric sum S / tr S, each S
counting as much as its form has energy.

Without text (`weight_forms`) S is the identity, and G that of the products of weights: W_q,i is all that keys meet and
W_o,i all that values do. With text: `calibration.latent_forms`.

More positions for a checkpoint that has learned ones: those it has, repeated or stretched.

"tiled": those there are, again and again (arXiv 2004.05150, section 5). "interpolated": stretched to the new number,
each new one between two old neighbours in proportion (arXiv 2306.15595, equation 4, of learned positions).
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
from ..modeling.mechanisms.kernels.kernel_table import KERNELS, kernel_class
from ..modeling.ops.variant_attention import AttentionHeads
from ..registration import variant_config_class
from .checkpoint.tensor_files import CheckpointReader

__all__ = [
    "EXTENSIONS",
    "FIELDS",
    "LATENT",
    "ROLES",
    "AttentionTensors",
    "HeadCounts",
    "LatentForm",
    "LatentForms",
    "best_latent",
    "group_heads",
    "join_heads",
    "kept_energy",
    "lengthen_tokenizer",
    "lost_by_rank",
    "on_latent",
    "pool_key_value",
    "rank_relation",
    "relation",
    "reorder_heads",
    "repeat_heads",
    "split_heads",
    "weight_forms",
    "with_positions",
]

ROLES = ("query", "key", "value", "output")
# The field of `AttentionTensors` that several attentions may share.
LATENT = "latent_weight"


@dataclass(frozen=True)
class HeadCounts:
    """The heads of one attention module: h_k of queries, keys and values (before, after), h_v of the output; d.

    `rank` is that of the latent which keys and values are made from (before, after); None where that is the input.
    """

    query: int
    key: tuple[int, int]
    value: tuple[int, int]
    output: int
    head_dim: int
    rank: tuple[int | None, int | None] = (None, None)

    @property
    def new_rank(self) -> int:
        """The rank of its new latent; only for attentions that get one."""
        rank: Any = self.rank[1]
        return rank

    @property
    def relation(self) -> str:
        """What the conversion does to the heads of this module: "same", "pool" or "expand"."""
        relations = {relation(*self.key), relation(*self.value)} - {"same"}
        return relations.pop() if relations else "same"

    @property
    def rank_relation(self) -> str:
        """What the conversion does to its latent: "same", "compress" or "expand"."""
        return rank_relation(*self.rank)

    @property
    def change(self) -> str:
        """What the conversion does to this module, as reports have it: "same", "pool", "compress", ... or two."""
        changes = dict.fromkeys((self.relation, self.rank_relation))
        return ", ".join(change for change in changes if change != "same") or "same"

    @property
    def reduced(self) -> bool:
        """Whether it gets fewer heads or a smaller latent: what a method decides."""
        return self.relation == "pool" or self.rank_relation == "compress"


def relation(source: int, target: int) -> str:
    """Say how `source` key/value heads become `target`: "same", "pool" (fewer) or "expand" (more, by repeating).

    Raises:
        ValueError: if a count is below 1 or neither divides the other.
    """
    if source < 1 or target < 1:
        raise ValueError(f"a number of key/value heads must be at least 1: got {source} -> {target}.")
    if source % target == 0:
        return "same" if source == target else "pool"
    if target % source == 0:
        return "expand"
    raise ValueError(
        f"{source} key/value heads cannot become {target}: one count must divide the other (fewer heads pool whole "
        "groups, more heads repeat each one)."
    )


def rank_relation(source: int | None, target: int | None) -> str:
    """Say how a latent of rank `source` becomes one of `target`: "same", "compress" or "expand"; None is the input.

    Raises:
        ValueError: if `target` is larger and yet no input: nothing would fill it.
    """
    if source == target:
        return "same"
    if target is None:
        return "expand"
    if source is None or target < source:
        return "compress"
    raise ValueError(
        f"a latent of rank {source} cannot become one of rank {target}: a smaller one holds less, the input's full "
        "width holds all, and between the two there is nothing to gain."
    )


def split_heads(projection: torch.Tensor, heads: int) -> torch.Tensor:
    """View a projection's weight [h*d, D] or bias [h*d] as [h, d, D] or [h, d]."""
    return projection.unflatten(0, (heads, -1))


def join_heads(heads: torch.Tensor) -> torch.Tensor:
    """Undo `split_heads`: [h, d, ...] -> [h*d, ...]."""
    return heads.reshape(-1, *heads.shape[2:])


def group_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """View a projection of `source` heads as `target` groups of consecutive heads: [h*d, ...] -> [k, g, d, ...].

    Consecutive, because query heads g*i ... g*i + g - 1 share key/value head i wherever key/value heads are repeated.
    """
    heads = split_heads(projection, source)  # [h, d, ...]
    return heads.reshape(target, source // target, *heads.shape[1:])


def repeat_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Expand a projection [source*d, ...] to [target*d, ...] by repeating each head, which changes no output.

    Head i is then the source's head i // (target / source).
    """
    return join_heads(split_heads(projection, source).repeat_interleave(target // source, dim=0))


@dataclass(frozen=True)
class AttentionTensors:
    """One attention module's projections, as `nn.Linear` stores them: weights [out, in], biases [out] or None.

    `latent_weight` [r, D] makes the latent of the memory that keys and values are made from; None where they are made
    from the memory itself. It may be one for several attentions. `kernel` is what stands for a softmax, computed with
    `kernel_tensors` (`AttentionKernel.tensors`). `details` holds what a method wants to say about this layer in
    the report (JSON values).
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
        """Return a tensor of the kernel, for whose functions this stands in an attention's place."""
        if name not in vars(self).get("kernel_tensors", ()):
            raise AttributeError(f"there is no {name!r} among an attention's tensors")
        return self.kernel_tensors[name]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], kernel: AttentionKernel | None) -> "AttentionTensors":
        """Return the attention of these tensors, by name, some of which are its kernel's."""
        names = () if kernel is None else (*kernel.learned, *kernel.drawn)
        own: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name not in names}
        return cls(**own, kernel=kernel, kernel_tensors={name: tensors[name] for name in names if name in tensors})

    def pair(self, role: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight and the bias of one of `ROLES`, or of the "latent", which has none."""
        return getattr(self, f"{role}_weight"), getattr(self, f"{role}_bias", None)

    def project(self, role: str, states: torch.Tensor) -> torch.Tensor:
        """Return a role's linear map of states: [..., in] to [..., out]."""
        return nn.functional.linear(states, *self.pair(role))

    def latent(self, memory: torch.Tensor) -> torch.Tensor:
        """Return what keys and values are made from: of the memory [..., D] its latent [..., r], or itself."""
        return memory if self.latent_weight is None else nn.functional.linear(memory, self.latent_weight)

    def behind(self, latent_weight: torch.Tensor) -> "AttentionTensors":
        """Return the attention whose memory has passed through a linear map [w, D] before this one reads it."""
        own = self.latent_weight
        joined = latent_weight if own is None else (own.double() @ latent_weight.double()).to(latent_weight)
        return replace(self, latent_weight=joined)

    def with_new_kernel(self, kernel: AttentionKernel, heads: HeadCounts) -> "AttentionTensors":
        """Return the same projections with a kernel in a softmax's place, as a new model has it."""
        sizes = (heads.head_dim, heads.head_dim)  # of other values no conversion is made
        counts = AttentionHeads(heads.query, heads.key[1], heads.value[1], heads.query, heads.output, *sizes)
        new = {name: tensor.begin().to(self.query_weight) for name, tensor in kernel.tensors(counts).items()}
        return replace(self, kernel=kernel, kernel_tensors=new)

    def folded(self, dtype: torch.dtype = torch.float64) -> "AttentionTensors":
        """Return the same attention without a latent: W A in the place of W, in this dtype."""
        if self.latent_weight is None:
            return self
        latent = self.latent_weight.double()
        maps = {name: (getattr(self, name).double() @ latent).to(dtype) for name in ("key_weight", "value_weight")}
        return replace(self, **maps, latent_weight=None)

    def to(self, device: torch.device | str) -> "AttentionTensors":
        """Return the same on a device."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        moved = {name: tensor.to(device) for name, tensor in self.kernel_tensors.items()}
        return replace(self, **tensors, kernel_tensors=moved)

    def joined(self, role: str) -> torch.Tensor:
        """Return [W | b], [out, in + 1]: the bias is what an input of 1 is multiplied by. Without one, W."""
        weight, bias = self.pair(role)
        return weight if bias is None else torch.cat([weight, bias[:, None]], dim=1)

    def parted(self, role: str, joined: torch.Tensor) -> dict[str, torch.Tensor]:
        """Undo `joined`: return the role's fields by name, for `dataclasses.replace`."""
        if self.pair(role)[1] is None:
            return {f"{role}_weight": joined}
        return {f"{role}_weight": joined[:, :-1], f"{role}_bias": joined[:, -1]}

    def mapped(self, role: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Apply `change` to a role's weight and to its bias, if any: return these fields by name."""
        parts = zip((f"{role}_weight", f"{role}_bias"), self.pair(role), strict=True)
        return {name: change(tensor) for name, tensor in parts if tensor is not None}


def reorder_heads(tensors: AttentionTensors, heads: HeadCounts, groups: Sequence[Sequence[int]]) -> AttentionTensors:
    """Return the same attention with its query heads in the order of `groups`, which changes no output.

    Query heads that share a key/value head of the source must be beside each other in `groups`.
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
    return join_heads(split_heads(projection, len(order))[order])


def pool_key_value(
    tensors: AttentionTensors, heads: HeadCounts, pool: Callable[..., torch.Tensor]
) -> AttentionTensors:
    """Return the projections with `pool(projection, source=, target=)` for the key and value weights and biases.

    Args:
        tensors: the projections before.
        heads: the head counts; a role that keeps its heads is left as it is.
        pool: makes a projection of `target` heads out of one of `source` heads.
    """
    changed: dict[str, Any] = {}
    for role, (source, target) in (("key", heads.key), ("value", heads.value)):
        if source != target:
            changed |= tensors.mapped(role, partial(pool, source=source, target=target))
    return replace(tensors, **changed)


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


FIELD, EXTENSION = FIELDS = "max_position_embeddings", "position_extension"
WEIGHT = "embeddings.position_embeddings.weight"
EXTENSIONS = ("tiled", "interpolated")
# Buffers of old checkpoints, as long as the positions; they are left out, for models make them.
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
# The files beside a model that say how many tokens it reads, each with its field.
LENGTHS = {TOKENIZER_CONFIG_FILE: "model_max_length", "sentence_bert_config.json": "max_seq_length"}


class LongerCheckpoint(CheckpointReader):
    """A checkpoint with more learned positions than its files have; the files stay its reader's to close."""

    def __init__(self, stored: CheckpointReader, name: str, positions: int, first: int, extension: str) -> None:
        super().__init__(stored.folder, stored.files, stored.index_metadata)
        self.stored, self.name, self.positions, self.first, self.extension = stored, name, positions, first, extension
        self.entries = {each: entry for each, entry in stored.entries.items() if not each.endswith(BUFFERS)}
        width = stored.entries[name].shape[1]
        self.entries[name] = replace(stored.entries[name], shape=(positions, width))

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor; of the positions [n, D] the first ones as they are, the others extended."""
        tensor = self.stored.read(name)
        if name != self.name:
            return tensor
        first, others = tensor[: self.first], tensor[self.first :]
        extend = _tiled if self.extension == "tiled" else _interpolated
        return torch.cat([first, extend(others, self.positions - self.first)])

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield one tensor's elements as short flat tensors."""
        return self.stored.chunks(name) if name != self.name else iter([self.read(name).flatten()])

    def close(self) -> None:
        """Do nothing."""


def _tiled(table: torch.Tensor, rows: int) -> torch.Tensor:
    return table.repeat(-(-rows // table.shape[0]), 1)[:rows]


def _interpolated(table: torch.Tensor, rows: int) -> torch.Tensor:
    # The first row and the last one stay.
    columns = table.float().T[None]  # [1, D, n]
    stretched = torch.nn.functional.interpolate(columns, rows, mode="linear", align_corners=True)
    return stretched[0].T.contiguous().to(table.dtype)


def with_positions(
    config: dict[str, Any], reader: CheckpointReader, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], CheckpointReader]:
    """Return a checkpoint's configuration and tensors with as many positions as `fields` ask for, if they do.

    Args:
        config: its config.json.
        reader: its tensors.
        fields: of a conversion; `max_position_embeddings` counts as the configuration does, RoBERTa's first ones
            among them, which no token has. `position_extension` is one of `EXTENSIONS`; None = "tiled".

    Raises:
        ValueError: for a model without learned positions like BERT's, a number that is not larger than it has, an
            unknown extension, or one without a number, and for linformer, whose sums are over those there are.
    """
    positions, extension = (fields.get(name) for name in FIELDS)
    if extension is not None and extension not in EXTENSIONS:
        names = ", ".join(f'"{name}"' for name in EXTENSIONS)
        raise ValueError(f"`{EXTENSION}` must be one of {names}; got {extension!r}.")
    if positions is None:
        if extension is not None:
            raise ValueError(f"`{EXTENSION}` says how positions are made more: give `{FIELD}` too; got {extension!r}.")
        return config, reader
    tables = [name for name in reader.entries if name.endswith(WEIGHT)]
    if len(tables) != 1:
        raise ValueError(
            f"`{FIELD}` is for the learned positions of BERT and its relatives, which {config.get('model_type')!r} "
            "checkpoints have not."
        )
    now = reader.entries[tables[0]].shape[0]
    check_size(FIELD, positions, now + 1)
    kernel = config.get("attention_kernel")
    if kernel in KERNELS and kernel_class(kernel).counts_tokens:
        raise ValueError(f"`{FIELD}` cannot change in a model with {kernel}, which has learned sums over {now}.")
    longer = LongerCheckpoint(reader, tables[0], positions, _without_token(config), extension or EXTENSIONS[0])
    return config | {FIELD: positions}, longer


def lengthen_tokenizer(stage: Path, config: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Let the tokenizer beside a converted model, and sentence-transformers, read as many tokens as it has positions.

    Args:
        stage: the new folder.
        config: the new config.json.
        fields: of the conversion.
    """
    if fields.get(FIELD) is None:
        return
    for file, name in LENGTHS.items():
        path = stage / file
        if (found := read_json(path)) is not None:
            values = found | {name: fields[FIELD] - _without_token(config)}
            path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _without_token(config: Mapping[str, Any]) -> int:
    """Return how many positions no token has: RoBERTa numbers them from behind the padding token's number on."""
    after_padding = variant_config_class(config.get("model_type", "")).positions_after_padding
    return config.get("pad_token_id", 1) + 1 if after_padding else 0
