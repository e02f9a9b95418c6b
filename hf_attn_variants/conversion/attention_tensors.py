"""Defines the tensors and head counts of an attention module, and computes new heads and latents for it.

**Latents.** A latent c = A y [r] of an encoder output y [D] is decoded as R c. A key or value projection W then loses
W (y - R A y). The squared effect on the attention output is a quadratic form in y - R A y. Let G [D, D] be the Gram
matrix that measures how an error in y, passed through the projections of all heads, changes the output. Let S [D, D]
be the second-moment matrix of y, weighted by the attention. Then

    lost energy = tr( G (1 - R A) S (1 - R A)^T ),   total energy = tr( G S )

R = S A^T (A S A^T)^-1 contains the coefficients of a regression of y on c. Each new projection is W R. The best A
spans the first r right singular vectors of G^1/2 S^1/2 (Eckart-Young), transformed back with S^-1/2.

Several projections can share a latent, such as keys and values, or all layers that read the same encoder outputs. Each
projection then has its own quadratic form with its own G and S. The common S is the sum of all S matrices, each
divided by its trace and multiplied by the energy of its form. The common G is the sum of all G matrices, each scaled
so that its form has the same energy under the common S as under its own S.

Without text (`compute_error_forms_from_weights`), S is the identity matrix, and G follows from products of weights
because keys are only multiplied by W_q,i and values only by W_o,i. See `calibration.methods.compute_error_forms` for
the computation with text.
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
from .rotary_positions import RotaryPositions

if TYPE_CHECKING:
    from .calibration_settings import Calibration

PROJECTION_ROLES = ("query", "key", "value", "output")
# The field of `AttentionTensors` that several attention modules can share.
LATENT_FIELD = "latent_weight"


@dataclass(frozen=True)
class HeadCounts:
    """Head counts of an attention module before and after a conversion.

    Args:
        query: Number of query heads.
        key, value: Numbers of key heads and of value heads, each as (before, after).
        output: Number of heads that the output projection reads.
        head_dim: Size of a head, d.
        rank: Rank of the latent from which keys and values are computed (before, after). None if there is no latent.
    """

    query: int
    key: tuple[int, int]
    value: tuple[int, int]
    output: int
    head_dim: int
    rank: tuple[Any, Any] = (None, None)

    @property
    def kv_head_change(self) -> str:
        """The change to the key/value heads: "same", "pool" or "expand"."""
        relations = {get_kv_head_change(*self.key), get_kv_head_change(*self.value)} - {"same"}
        return relations.pop() if relations else "same"

    @property
    def latent_change(self) -> str:
        """The change to the latent: "same", "compress" or "expand"."""
        return get_latent_change(*self.rank)

    @property
    def change(self) -> str:
        """The changes as shown in reports: "same", or one or two of "pool", "expand" and "compress"."""
        changes = dict.fromkeys((self.kv_head_change, self.latent_change))
        return ", ".join(change for change in changes if change != "same") or "same"

    @property
    def is_reduced(self) -> bool:
        """True if the module gets fewer heads or a smaller latent, so that new weights must be computed."""
        return self.kv_head_change == "pool" or self.latent_change == "compress"


def get_kv_head_change(source: int, target: int) -> str:
    """Return how `source` key/value heads become `target` heads: "same", "pool" (fewer) or "expand" (more heads).

    Raises:
        ValueError: if a count is less than 1, or if neither count divides the other.
    """
    if source < 1 or target < 1:
        raise ValueError(f"The number of key/value heads must be at least 1, got {source} -> {target}.")
    if source % target == 0:
        return "same" if source == target else "pool"
    if target % source == 0:
        return "expand"
    raise ValueError(
        f"{source} key/value heads cannot be converted to {target}. One count must divide the other because heads are "
        "pooled in groups or each head is repeated."
    )


def get_latent_change(source: int | None, target: int | None) -> str:
    """Return how a latent of rank `source` becomes one of rank `target`: "same", "compress" or "expand".

    A rank of None means that there is no latent.

    Raises:
        ValueError: if `target` is larger than `source`, because the additional dimensions would hold no information.
    """
    if source == target:
        return "same"
    if target is None:
        return "expand"
    if source is None or target < source:
        return "compress"
    raise ValueError(
        f"A latent of rank {source} cannot be converted to rank {target} because the larger latent would not store "
        "any more information. Use a smaller rank, or the full width of the input."
    )


def split_heads(projection: torch.Tensor, heads: int) -> torch.Tensor:
    """Reshape a projection's weight [h*d, D] or bias [h*d] to [h, d, D] or [h, d]."""
    return projection.unflatten(0, (heads, -1))


def join_heads(heads: torch.Tensor) -> torch.Tensor:
    """Undo `split_heads`: [h, d, ...] -> [h*d, ...]."""
    return heads.reshape(-1, *heads.shape[2:])


def group_heads(projection: torch.Tensor, source_heads: int, target_heads: int) -> torch.Tensor:
    """Reshape a projection [h*d, ...] to groups of consecutive heads [k, g, d, ...].

    h is `source_heads` and k is `target_heads`. Each group is consecutive because query heads g*i ... g*i + g - 1
    share key/value head i in Transformers.
    """
    heads = split_heads(projection, source_heads)  # [h, d, ...]
    return heads.reshape(target_heads, source_heads // target_heads, *heads.shape[1:])


def repeat_heads(projection: torch.Tensor, source_heads: int, target_heads: int) -> torch.Tensor:
    """Repeat each head of a projection, [source*d, ...] -> [target*d, ...], which preserves the attention output.

    Head i of the result is head i // (target / source) of the original projection.
    """
    return join_heads(split_heads(projection, source_heads).repeat_interleave(target_heads // source_heads, dim=0))


@dataclass(frozen=True)
class AttentionTensors:
    """The projections of an attention module, with weights [out, in] and biases [out] as in `nn.Linear`.

    Args:
        query_weight, key_weight, value_weight, output_weight: The weights.
        query_bias, key_bias, value_bias, output_bias: The biases, or None for projections without a bias.
        latent_weight: Projection [r, D] to the latent from which keys and values are computed, or None if there is no
            latent. Several modules can share it.
        kernel: The kernel that replaces the softmax, or None if a softmax is used.
        kernel_tensors: The kernel's tensors (`AttentionKernel.tensors`).
        details: JSON values that the conversion method adds to the report for this layer.

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
        """Return a kernel tensor, so that this object can be passed to kernel functions instead of a module."""
        if name not in vars(self).get("kernel_tensors", ()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.kernel_tensors[name]

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], kernel: AttentionKernel | None) -> AttentionTensors:
        """Create an instance from a dictionary that maps field names and kernel tensor names to tensors."""
        names = () if kernel is None else (*kernel.learned_parameters, *kernel.random_buffers)
        projections: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name not in names}
        kernel_tensors = {name: tensors[name] for name in names if name in tensors}
        return cls(**projections, kernel=kernel, kernel_tensors=kernel_tensors)

    def get_weight_and_bias(self, role: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight and bias for one of `PROJECTION_ROLES`, or for "latent", which has no bias."""
        return getattr(self, f"{role}_weight"), getattr(self, f"{role}_bias", None)

    def project(self, role: str, states: torch.Tensor) -> torch.Tensor:
        """Apply the projection of one of `PROJECTION_ROLES` to `states`: [..., in] -> [..., out]."""
        return nn.functional.linear(states, *self.get_weight_and_bias(role))

    def compute_latent(self, states: torch.Tensor) -> torch.Tensor:
        """Return the latent [..., r] computed from `states` [..., D], or `states` if there is no latent."""
        return states if self.latent_weight is None else nn.functional.linear(states, self.latent_weight)

    def with_input_projection(self, latent_weight: torch.Tensor) -> AttentionTensors:
        """Return projections that first apply a linear layer [w, D] to the key/value inputs.

        The layer becomes part of the latent projection.
        """
        second = self.latent_weight
        product = latent_weight if second is None else (second.double() @ latent_weight.double()).to(latent_weight)
        return replace(self, latent_weight=product)

    def with_new_kernel(self, kernel: AttentionKernel, heads: HeadCounts) -> AttentionTensors:
        """Return the same projections with a newly initialized kernel instead of the softmax."""
        sizes = (heads.head_dim, heads.head_dim)  # conversions require keys and values of the same size
        counts = AttentionHeads(heads.query, heads.key[1], heads.value[1], heads.query, heads.output, *sizes)
        specs = kernel.get_tensor_specs(counts)
        new = {name: spec.initialize().to(self.query_weight) for name, spec in specs.items()}
        return replace(self, kernel=kernel, kernel_tensors=new)

    def fold_latent(self, dtype: torch.dtype = torch.float64) -> AttentionTensors:
        """Merge the latent A into the key and value weights: each W becomes W A in the given dtype."""
        if self.latent_weight is None:
            return self
        latent = self.latent_weight.double()
        weights = {name: (getattr(self, name).double() @ latent).to(dtype) for name in ("key_weight", "value_weight")}
        return replace(self, **weights, latent_weight=None)

    def to(self, device: torch.device | str) -> AttentionTensors:
        """Return a copy with all tensors on the given device."""
        moved: dict[str, Any] = {name: t.to(device) for name, t in vars(self).items() if isinstance(t, torch.Tensor)}
        moved["kernel_tensors"] = {name: tensor.to(device) for name, tensor in self.kernel_tensors.items()}
        return replace(self, **moved)

    def join_weight_and_bias(self, role: str) -> torch.Tensor:
        """Return a role's weight and bias as one matrix (W, b) [out, in + 1], or only W [out, in] without a bias."""
        weight, bias = self.get_weight_and_bias(role)
        return weight if bias is None else torch.cat([weight, bias[:, None]], dim=1)

    def split_weight_and_bias(self, role: str, joined: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a matrix from `join_weight_and_bias`, and return {field: tensor} for `dataclasses.replace`."""
        if self.get_weight_and_bias(role)[1] is None:
            return {f"{role}_weight": joined}
        return {f"{role}_weight": joined[:, :-1], f"{role}_bias": joined[:, -1]}

    def apply_to_role(self, role: str, transform: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Apply `transform` to a role's weight and bias and return {field: tensor}."""
        parts = zip((f"{role}_weight", f"{role}_bias"), self.get_weight_and_bias(role), strict=True)
        return {name: transform(tensor) for name, tensor in parts if tensor is not None}


def reorder_heads(tensors: AttentionTensors, heads: HeadCounts, groups: Sequence[Sequence[int]]) -> AttentionTensors:
    """Return equivalent projections with the query heads in the order of `groups`.

    Query heads that share a key/value head in the original model must be adjacent in `groups`.
    """
    order = torch.tensor([head for group in groups for head in group], device=tensors.query_weight.device)
    share = heads.query // heads.key[0]
    shared = order[::share] // share
    changed: dict[str, Any] = {}
    for role, rows in (("query", order), ("key", shared), ("value", shared)):
        changed |= tensors.apply_to_role(role, partial(_reorder_projection, order=rows))
    output = tensors.output_weight.unflatten(1, (heads.output, -1))[:, order].flatten(1)
    return replace(tensors, **changed, output_weight=output)


def _reorder_projection(projection: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return a projection [h*d, ...] with its heads in the given order."""
    return join_heads(split_heads(projection, len(order))[order])


def pool_key_value(
    tensors: AttentionTensors, heads: HeadCounts, pool: Callable[..., torch.Tensor]
) -> AttentionTensors:
    """Apply a pooling function to the key and value projections, and return all projections.

    Args:
        tensors: The original projections.
        heads: The head counts. The function is only applied to keys or values whose number of heads changes.
        pool: Function `pool(projection, source_heads=, target_heads=)` that computes a projection with `target_heads`
            heads from a projection with `source_heads` heads.
    """
    changed: dict[str, Any] = {}
    for role, (source, target) in (("key", heads.key), ("value", heads.value)):
        if source != target:
            changed |= tensors.apply_to_role(role, partial(pool, source_heads=source, target_heads=target))
    return replace(tensors, **changed)


class QuadraticErrorForm(NamedTuple):
    """The matrices G and S of the quadratic form for errors in the keys or values (see the module docstring)."""

    gram: torch.Tensor  # [D, D]
    metric: torch.Tensor  # [D, D]

    @property
    def energy(self) -> torch.Tensor:
        """The total energy tr(G S)."""
        return (self.gram * self.metric).sum()


class KeyValueErrorForms(NamedTuple):
    """The quadratic forms for the keys and values of an attention module.

    Attributes:
        key, value: The forms.
        value_input_means: Mean input of each value head, averaged with the attention weights, [k, D]. None if the
            forms were computed without text, or if the values have no bias.
    """

    key: QuadraticErrorForm
    value: QuadraticErrorForm
    value_input_means: torch.Tensor | None = None


@torch.no_grad()
def find_best_latent(forms: Sequence[QuadraticErrorForm], rank: int) -> torch.Tensor:
    """Return the latent projection A [r, D] (float64, orthonormal rows) that loses the least energy over all forms."""
    _, directions = _compute_latent_directions(forms)
    # With orthonormal rows, the latent is not larger than its input and therefore fits into the same dtype.
    return torch.linalg.qr(directions[:, -rank:])[0].T.contiguous()


@torch.no_grad()
def compute_energy_loss_by_rank(forms: Sequence[QuadraticErrorForm]) -> torch.Tensor:
    """Return the share of energy over all forms that the best latent of each rank r = 0, ..., D loses, [D + 1]."""
    energies = _compute_latent_directions(forms)[0].clamp_min(0)  # ascending
    return torch.cat([energies.new_zeros(1), energies.cumsum(0)]).flip(0) / energies.sum().clamp_min(1e-300)


def _compute_latent_directions(forms: Sequence[QuadraticErrorForm]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ascending energies [D] of candidate directions for a latent, and the directions as columns [D, D]."""
    metric: Any = sum(form.energy * form.metric / form.metric.trace() for form in forms)
    metric = metric / metric.trace().clamp_min(1e-300)
    gram = sum(form.gram * (form.energy / (form.gram * metric).sum().clamp_min(1e-300)) for form in forms)
    values, vectors = torch.linalg.eigh((metric + metric.T) / 2)
    sizes = values.clamp_min(1e-15 * values[-1]).sqrt()
    root = vectors * sizes  # S = root root^T
    energies, directions = torch.linalg.eigh(root.T @ gram @ root)
    return energies, vectors / sizes @ directions


def compute_preserved_energy_share(form: QuadraticErrorForm, latent: torch.Tensor) -> float:
    """Return the share of a form's energy that a latent projection [r, D] preserves."""
    lost = torch.eye(latent.shape[1]).to(latent) - _compute_regression_matrix(form, latent) @ latent
    return float(1 - ((form.gram @ lost @ form.metric) * lost).sum() / form.energy.clamp_min(1e-300))


@torch.no_grad()
def project_onto_latent(
    tensors: AttentionTensors, latent: torch.Tensor, forms: KeyValueErrorForms
) -> AttentionTensors:
    """Return projections that compute keys and values from a latent A [r, D], by regressing the input on the latent.

    The shares of key and value energy that the latent preserves are added to `details`.
    """
    like = tensors.key_weight
    changed = {}
    for role, form in (("key", forms.key), ("value", forms.value)):
        weight = getattr(tensors, f"{role}_weight").double()
        changed[f"{role}_weight"] = (weight @ _compute_regression_matrix(form, latent)).to(like).contiguous()
    if tensors.value_bias is not None and forms.value_input_means is not None:
        # The forms were computed from centered inputs, so the mean of the lost part is added to the bias.
        lost = tensors.value_weight.double() - changed["value_weight"].double() @ latent
        lost = split_heads(lost, forms.value_input_means.shape[0])  # [k, d, D]
        lost_mean = torch.einsum("kde,ke->kd", lost, forms.value_input_means).flatten()
        changed["value_bias"] = tensors.value_bias + lost_mean.to(like)
    shares = {
        f"latent_{role}_energy": round(compute_preserved_energy_share(getattr(forms, role), latent), 4)
        for role in ("key", "value")
    }
    return replace(tensors, **changed, latent_weight=latent.to(like), details=tensors.details | shares)


@torch.no_grad()
def compute_error_forms_from_weights(tensors: AttentionTensors, heads: HeadCounts) -> KeyValueErrorForms:
    """Compute a module's quadratic forms from its weights only, with equal energies for keys and values."""
    pairs = (
        ("key", tensors.join_weight_and_bias("query").double(), heads.query),
        ("value", tensors.output_weight.T.double(), heads.output),
    )
    forms = []
    for role, other_weight, count in pairs:
        weight = getattr(tensors, f"{role}_weight").double()
        weight = split_heads(repeat_heads(weight, weight.shape[0] // heads.head_dim, count), count)  # [h, d, D]
        other_heads = split_heads(other_weight, count)
        products = torch.einsum("hde,hfe->hdf", other_heads, other_heads)  # [h, d, d]
        gram = torch.einsum("hdi,hdf,hfj->ij", weight, products, weight)
        metric = torch.eye(len(gram)).to(gram)
        forms.append(QuadraticErrorForm(gram / gram.trace().clamp_min(1e-300), metric))
    key_form, value_form = forms
    return KeyValueErrorForms(key_form, value_form)


def _compute_regression_matrix(form: QuadraticErrorForm, latent: torch.Tensor) -> torch.Tensor:
    """Return the matrix R [D, r] of regression coefficients that predict the input from its latent c as R c."""
    latent_metric = latent @ form.metric  # [r, D]
    return torch.linalg.solve(latent_metric @ latent.T, latent_metric).T


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs to one call of an attention module for a batch.

    Args:
        states: Inputs x to the query projection, [b, n, D_x].
        key_value_states: Inputs y to the key and value projections, [b, m, D_y]. In self-attention, this is the same
            tensor as `states`. If the model has a latent, it is the latent.
        mask: Additive mask that can be broadcast to [b, h, n, m], or None if there is no mask.
        position_bias: Position bias [1, h, n, m], or None if there is no bias.
        valid: Boolean mask [b, n] of the queries that are not padding.
        scaling: Factor by which dot products are multiplied.
        is_causal: Whether query i only attends to keys 0..i. False if `mask` already contains this restriction.
        rotary: The rotary positions of the queries and keys, or None for a model without them.
        softcap: The limit c of scores s, which become c tanh(s / c), or None if they are not limited.
    """

    states: torch.Tensor
    key_value_states: torch.Tensor
    mask: torch.Tensor | None
    position_bias: torch.Tensor | None
    valid: torch.Tensor
    scaling: float
    is_causal: bool = False
    rotary: RotaryPositions | None = None
    softcap: float | None = None

    def select_rows(self, indices: torch.Tensor) -> AttentionInputs:
        """Return the inputs for the given examples in the batch."""
        key_value_states = self.key_value_states[indices]
        states = key_value_states if self.key_value_states is self.states else self.states[indices]
        mask = self.mask if self.mask is None or self.mask.shape[0] == 1 else self.mask[indices]
        rotary = None if self.rotary is None else self.rotary.select_rows(indices)
        shared: dict[str, Any] = {"mask": mask, "valid": self.valid[indices], "rotary": rotary}
        return replace(self, states=states, key_value_states=key_value_states, **shared)

    def get_key_mask(self) -> torch.Tensor:
        """Return a boolean mask [b, m] of the keys that at least one query can attend to."""
        if self.key_value_states is self.states:
            return self.valid
        batch_size, length = self.key_value_states.shape[:2]
        if self.mask is None:
            return torch.ones(batch_size, length, dtype=torch.bool, device=self.key_value_states.device)
        reachable = self.mask.amax(1) > torch.finfo(self.mask.dtype).min / 2  # [b or 1, n, m]
        return reachable.any(1).expand(batch_size, -1)


@dataclass(frozen=True)
class LayerContext:
    """Information about the layer to convert, in addition to its tensors.

    The fields after `initializer_std` are only set for a `CalibratedMethod`.

    Args:
        module: Path of the attention module inside the base model, e.g. "encoder.layer.0.attention".
        site: The type of attention, such as "self" or "cross".
        generator: Random number generator for this layer. Its values depend on the seed, but not on the layer order.
        initializer_std: Standard deviation of new key and value projections in this architecture.
        calibration: The calibration settings.
        inputs: The recorded inputs to the original attention module on the calibration text.
        targets: The module's outputs for these inputs, each of shape [b, n, D].
        num_uses: Number of times that a forward pass calls the module. It is greater than 1 in ALBERT, whose layers
            share the same module.
        held_out_error: Function that takes projections and returns their relative output error on held-out text, or
            None if the error is not finite.
    """

    module: str
    site: str
    generator: torch.Generator
    initializer_std: float
    calibration: Calibration = None  # type: ignore[assignment]  # always set for a `CalibratedMethod`
    inputs: Sequence[AttentionInputs] = ()
    targets: Sequence[torch.Tensor] = ()
    num_uses: int = 1
    held_out_error: Callable[[AttentionTensors], float | None] = lambda tensors: None


@dataclass(frozen=True)
class CalibratedLatent:
    """A latent projection that was computed from calibration text for an attention module.

    Args:
        weight: The latent projection A [r, D], float64.
        forms: The quadratic forms that measure the energy that the latent loses.
        is_shared: Whether other attention modules also use the latent. A method must not change a shared latent.
    """

    weight: torch.Tensor
    forms: KeyValueErrorForms
    is_shared: bool


class ConversionMethod(Protocol):
    """Interface for methods that merge heads. To register a method, add its class to `conversions.METHODS`.

    The `method` argument of `convert` accepts an instance or the name of a registered method. Methods that need text
    must be subclasses of `CalibratedMethod`. With all other methods, latents are computed from the weights
    (`attention_tensors.compute_error_forms_from_weights`).

    Example:

    ```py
    >>> from hf_attn_variants.conversion import convert
    >>> from hf_attn_variants.conversion.attention_tensors import join_heads, pool_key_value, split_heads
    >>> class LastHead:
    ...     name = "last"
    ...
    ...     def pool(self, tensors, heads, layer):
    ...         def last(projection, source_heads, target_heads):
    ...             group = source_heads // target_heads
    ...             return join_heads(split_heads(projection, source_heads)[group - 1 :: group])
    ...
    ...         return pool_key_value(tensors, heads, last)
    >>> model = convert("google-t5/t5-small", num_key_value_heads=2, method=LastHead())
    ```
    """

    name: str

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return this layer's projections with `heads.key[1]` key heads and `heads.value[1]` value heads.

        This method is only called if the number of heads decreases. It may change the values of the query and output
        projections, but not their shapes. It may change a bias, but must not add or remove one. It must not modify
        the input tensors in place, but may return them unchanged. PyTorch uses a single thread during this call, so
        expensive fitting should be done beforehand.

        Args:
            tensors: The original projections.
            heads: The head counts before and after.
            layer: Further information about the layer.
        """
        ...


class CalibratedMethod(ABC):
    """A `ConversionMethod` that uses the recorded inputs of each attention module on calibration text.

    `calibration.calibrate` calls `convert_module` for one module at a time. `options` lists the fitting options of
    `Calibration` that this method uses. An error is raised if the user sets any other fitting option.
    """

    name: str
    options: tuple[str, ...] = ()

    @abstractmethod
    def convert_module(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the new projections of an attention module. Takes the same arguments as `pool`.

        A method that evaluates `layer.held_out_error` should add the result to `details` as "output_relative_error".
        """

    def with_latent(
        self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext, latent: CalibratedLatent
    ) -> AttentionTensors:
        """Return projections that compute keys and values from a latent. `tensors` must already have the new heads."""
        return project_onto_latent(tensors, latent.weight, latent.forms)

    def fit_kernel(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Fit a newly initialized kernel. `tensors` must already have this kernel and the new heads."""
        return tensors

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Raise `ValueError` because this method needs text."""
        raise ValueError(
            f"`method` {self.name!r} needs text to convert {layer.module}, got only weights. Set `calibration`."
        )


def average_heads(projection: torch.Tensor, source_heads: int, target_heads: int) -> torch.Tensor:
    """Return the mean of each group of consecutive heads: [source*d, ...] -> [target*d, ...], in the same dtype."""
    # The mean of identical heads is exact in float64. Processing one group at a time avoids a large float64 copy.
    groups = group_heads(projection, source_heads, target_heads)
    return join_heads(torch.stack([group.double().sum(0).div_(len(group)).to(group.dtype) for group in groups]))


class MeanPooling:
    """Mean pooling (arXiv 2305.13245), which averages the key and value heads in each group."""

    name = "mean"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections with averaged heads. Takes the same arguments as `ConversionMethod.pool`."""
        return pool_key_value(tensors, heads, average_heads)


def select_first_heads(projection: torch.Tensor, source_heads: int, target_heads: int) -> torch.Tensor:
    """Return the first head of each group of consecutive heads: [source*d, ...] -> [target*d, ...]."""
    return join_heads(group_heads(projection, source_heads, target_heads)[:, 0])


class FirstHead:
    """Keeps the first head of each group as the key/value head."""

    name = "first"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections with the first head of each group. Takes the arguments of `ConversionMethod.pool`."""
        return pool_key_value(tensors, heads, select_first_heads)


class RandomInitialization:
    """Initializes new key and value projections randomly, with zero biases, as a baseline for uptraining."""

    name = "random"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        """Return the projections with random keys and values. Takes the same arguments as `ConversionMethod.pool`."""

        def initialize(projection: torch.Tensor, source_heads: int, target_heads: int) -> torch.Tensor:
            rows = projection.shape[0] // source_heads * target_heads
            if projection.ndim == 1:
                return projection.new_zeros(rows)
            weight = torch.empty(rows, projection.shape[1])
            return weight.normal_(0.0, layer.initializer_std, generator=layer.generator).to(projection)

        return pool_key_value(tensors, heads, initialize)
