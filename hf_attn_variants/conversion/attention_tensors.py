"""The tensors of one attention, its head counts, its latent, and the methods that compute new heads.

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
values only meet W_o,i. With text, see `calibration.methods.latent_forms`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from ..modeling.mechanisms.kernels.attention_kernel import AttentionKernel
from ..modeling.ops.variant_attention import AttentionHeads

if TYPE_CHECKING:
    from .calibration_settings import Calibration

PROJECTION_ROLES = ("query", "key", "value", "output")
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
    def of(cls, tensors: Mapping[str, torch.Tensor], kernel: AttentionKernel | None) -> AttentionTensors:
        """Return the attention with these tensors, {field name or name of a kernel tensor: tensor}."""
        names = () if kernel is None else (*kernel.learned, *kernel.drawn)
        projections: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name not in names}
        kernel_tensors = {name: tensors[name] for name in names if name in tensors}
        return cls(**projections, kernel=kernel, kernel_tensors=kernel_tensors)

    def pair(self, role: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight and the bias of one of `PROJECTION_ROLES` or of "latent", which has no bias."""
        return getattr(self, f"{role}_weight"), getattr(self, f"{role}_bias", None)

    def project(self, role: str, states: torch.Tensor) -> torch.Tensor:
        """Return the projection of `states` by one of `PROJECTION_ROLES`: [..., in] to [..., out]."""
        return nn.functional.linear(states, *self.pair(role))

    def latent(self, states: torch.Tensor) -> torch.Tensor:
        """Return the input of the key and value projections: the latent [..., r] of `states` [..., D], or `states`."""
        return states if self.latent_weight is None else nn.functional.linear(states, self.latent_weight)

    def with_input_projection(self, latent_weight: torch.Tensor) -> AttentionTensors:
        """Return the attention that first applies a linear layer [w, D] to the input of keys and values."""
        second = self.latent_weight
        product = latent_weight if second is None else (second.double() @ latent_weight.double()).to(latent_weight)
        return replace(self, latent_weight=product)

    def with_new_kernel(self, kernel: AttentionKernel, heads: HeadCounts) -> AttentionTensors:
        """Return the same projections with a newly initialized kernel instead of the softmax."""
        sizes = (heads.head_dim, heads.head_dim)  # conversions require equal sizes of keys and values
        counts = AttentionHeads(heads.query, heads.key[1], heads.value[1], heads.query, heads.output, *sizes)
        new = {name: tensor.begin().to(self.query_weight) for name, tensor in kernel.tensors(counts).items()}
        return replace(self, kernel=kernel, kernel_tensors=new)

    def folded(self, dtype: torch.dtype = torch.float64) -> AttentionTensors:
        """Return the same attention without a latent, in this dtype: the projections W become W A."""
        if self.latent_weight is None:
            return self
        latent = self.latent_weight.double()
        weights = {name: (getattr(self, name).double() @ latent).to(dtype) for name in ("key_weight", "value_weight")}
        return replace(self, **weights, latent_weight=None)

    def to(self, device: torch.device | str) -> AttentionTensors:
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


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one call of an attention module with a batch.

    Args:
        states: Inputs x of the queries, [b, n, D_x].
        key_value_states: Inputs y of the keys and values, [b, m, D_y]. In self-attention they are the same tensor as
            `states`. If the model has a latent, they are the latent.
        mask: Additive mask that broadcasts to [b, h, n, m], or None.
        position_bias: Position bias [1, h, n, m], or None.
        valid: Whether queries are tokens, not padding, [b, n].
        scaling: Factor of the dot products.
        is_causal: Whether query i only attends to keys 0..i. It is False if `mask` contains this already.
    """

    states: torch.Tensor
    key_value_states: torch.Tensor
    mask: torch.Tensor | None
    position_bias: torch.Tensor | None
    valid: torch.Tensor
    scaling: float
    is_causal: bool = False

    def rows(self, index: torch.Tensor) -> AttentionInputs:
        """Return the inputs of some examples of the batch."""
        key_value_states = self.key_value_states[index]
        states = key_value_states if self.key_value_states is self.states else self.states[index]
        mask = self.mask if self.mask is None or self.mask.shape[0] == 1 else self.mask[index]
        return replace(self, states=states, key_value_states=key_value_states, mask=mask, valid=self.valid[index])

    def key_mask(self) -> torch.Tensor:
        """Return which keys and values at least one query can attend to, [b, m]."""
        if self.key_value_states is self.states:
            return self.valid
        batch_size, length = self.key_value_states.shape[:2]
        if self.mask is None:
            return torch.ones(batch_size, length, dtype=torch.bool, device=self.key_value_states.device)
        reachable = self.mask.amax(1) > torch.finfo(self.mask.dtype).min / 2  # [b or 1, n, m]
        return reachable.any(1).expand(batch_size, -1)


@dataclass(frozen=True)
class LayerContext:
    """Information about the layer that a method converts, in addition to its tensors.

    The fields after `initializer_std` are only for a `CalibratedMethod`.

    Args:
        module: Path of the attention module inside the base model, e.g. "encoder.layer.0.attention".
        site: The kind of attention: "self", "cross", ...
        generator: Random number generator of this layer. Its numbers depend on the seed, not on the order of layers.
        initializer_std: Standard deviation of new key and value projections in this architecture.
        calibration: The calibration.
        inputs: The calls of the original attention on the calibration text.
        targets: Its outputs for these inputs, [b, n, D] each.
        uses: Number of times that a forward pass calls the module. ALBERT's layers share their attention.
        held_out_error: Function that returns the relative error of the outputs of projections on held-out text, or
            None if the error is not finite.
    """

    module: str
    site: str
    generator: torch.Generator
    initializer_std: float
    calibration: Calibration = None  # type: ignore[assignment]  # a `CalibratedMethod` always gets one
    inputs: Sequence[AttentionInputs] = ()
    targets: Sequence[torch.Tensor] = ()
    uses: int = 1
    held_out_error: Callable[[AttentionTensors], float | None] = lambda tensors: None


@dataclass(frozen=True)
class LatentInText:
    """A latent that was computed for an attention on text.

    Args:
        weight: The latent projection A [r, D], float64.
        forms: The quadratic forms of the energy that the attention loses.
        is_shared: Whether other attentions use it too. A method must not change a shared latent.
    """

    weight: torch.Tensor
    forms: LatentForms
    is_shared: bool


class ConversionMethod(Protocol):
    """A way to merge heads. A new method is a class with this interface and an entry in `conversions.METHODS`.

    `convert(..., method=instance)` takes instances as well as names. A method that needs text is a `CalibratedMethod`.
    With all other methods, latents are computed from the weights (`attention_tensors.weight_forms`).

    Example:

    ```py
    >>> from hf_attn_variants.conversion import convert
    >>> from hf_attn_variants.conversion.attention_tensors import join_heads, pool_key_value, split_heads
    >>> class LastHead:
    ...     name = "last"
    ...
    ...     def pool(self, tensors, heads, layer):
    ...         def last(projection, source, target):
    ...             return join_heads(split_heads(projection, source)[source // target - 1 :: source // target])
    ...
    ...         return pool_key_value(tensors, heads, last)
    >>> model = convert("google-t5/t5-small", num_key_value_heads=2, method=LastHead())
    ```
    """

    name: str

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections of this layer with `heads.key[1]` key heads and `heads.value[1]` value heads.

        This is only called if there are fewer heads afterwards. The values of query and output projections may change,
        but not their shapes. A bias may change, but must not appear or disappear. Input tensors must not be changed
        in place; return a tensor that does not change. Torch uses one thread here, so fit weights before this call.

        Args:
            tensors: The projections of the original model.
            heads: The head counts before and after.
            layer: Further information about the layer.
        """
        ...


class CalibratedMethod(ABC):
    """A `ConversionMethod` that uses the inputs of each attention on text, before the conversion.

    `calibration.calibrate` calls `convert_module` for one module at a time. `options` are the fields of `Calibration`
    that this method reads in addition to those that describe the text. Options of other methods cause an error.
    """

    name: str
    options: tuple[str, ...] = ()

    @abstractmethod
    def convert_module(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the new projections of one attention. Arguments as for `pool`.

        A method that measured `layer.held_out_error` adds it to `details` as "output_relative_error".
        """

    def with_latent(
        self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext, latent: LatentInText
    ) -> AttentionTensors:
        """Return the attention with keys and values from a latent. It already has its new heads."""
        return on_latent(tensors, latent.weight, latent.forms)

    def with_kernel(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the attention with a fitted kernel. It already has its new heads and a newly initialized kernel."""
        return tensors

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Raise `ValueError`, because this method needs text."""
        raise ValueError(
            f"`method` {self.name!r} needs text to convert {layer.module}, got only weights. Give `calibration`."
        )


def mean_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Return the mean of each group of consecutive heads: [source*d, ...] -> [target*d, ...], in the same dtype."""
    pooled = [
        # float64, so that the mean of equal heads is exact. One group at a time needs no float64 copy of the layer.
        group.double().sum(dim=0).div_(group.shape[0]).to(projection.dtype)
        for group in group_heads(projection, source, target)
    ]
    return join_heads(torch.stack(pooled))


class MeanPooling:
    """Mean pooling (arXiv 2305.13245): each key/value head is the mean of the heads of its group."""

    name = "mean"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections with the mean of each group. Arguments as for `ConversionMethod.pool`."""
        return pool_key_value(tensors, heads, mean_heads)


def first_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Return the first head of each group of consecutive heads: [source*d, ...] -> [target*d, ...]."""
    return join_heads(group_heads(projection, source, target)[:, 0])


class FirstHead:
    """Selection of the first head of each group as key/value head."""

    name = "first"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections with the first head of each group. Arguments as for `ConversionMethod.pool`."""
        return pool_key_value(tensors, heads, first_heads)


class RandomHeads:
    """Newly initialized key and value projections with zero biases: a baseline for uptraining."""

    name = "random"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections with new keys and values. Arguments as for `ConversionMethod.pool`."""

        def initialize(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
            rows = projection.shape[0] // source * target
            if projection.ndim == 1:
                return projection.new_zeros(rows)
            weight = torch.empty(rows, projection.shape[1])
            return weight.normal_(0.0, layer.initializer_std, generator=layer.generator).to(projection)

        return pool_key_value(tensors, heads, initialize)
