"""The attention modules of a checkpoint: what each one's tensors are called, and their shapes before and after."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling.attention.attention_sites import AttentionSite
from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..modeling.mechanisms.kernels.attention_kernel import AttentionKernel
from ..modeling.mechanisms.kernels.kernel_parameters import kernel_tensors
from ..modeling.mechanisms.latents import rank_of_map
from .checkpoint.tensor_files import TensorEntry
from .grouping import HeadCounts
from .projections import LATENT, AttentionTensors
from .talking_heads import check_memory_terms

__all__ = ["AttentionModule", "attention_modules"]


@dataclass(frozen=True)
class AttentionModule:
    """One attention module of the checkpoint.

    Args:
        name: its path inside the base model, e.g. "encoder.layer.0.attention".
        site: which kind of attention it is.
        heads: its head counts, and the rank of its latent, before and after.
        tensors: for each field of `AttentionTensors` that it has, the tensor's name in the checkpoint.
        new_tensors: the same after the conversion. A latent that attentions share is named by each of them.
        shapes: for each field of `new_tensors`, its shape.
        projections: the talking-heads parameters to add, {name in the checkpoint: shape}.
        kernel: what stands for its softmax, before and after.
    """

    name: str
    site: AttentionSite
    heads: HeadCounts
    tensors: dict[str, str]
    new_tensors: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    projections: dict[str, tuple[int, ...]]
    kernel: tuple[AttentionKernel | None, AttentionKernel | None] = (None, None)

    @property
    def new_kernel(self) -> AttentionKernel:
        """The kernel that takes its softmax's place; only for attentions that get one."""
        kernel: Any = self.kernel[1]
        return kernel

    @property
    def gets_kernel(self) -> bool:
        """Whether a kernel takes the place of its softmax."""
        return self.kernel[0] is None and self.kernel[1] is not None

    @property
    def reduced(self) -> bool:
        """Whether it gets fewer heads, a smaller latent or a kernel: what a method decides."""
        return self.heads.reduced or self.gets_kernel

    @property
    def change(self) -> str:
        """What the conversion does to it, as reports have it: "same", or "pool", "compress", "kernel", ..."""
        if not self.gets_kernel:
            return self.heads.change
        return "kernel" if self.heads.change == "same" else f"{self.heads.change}, kernel"

    @property
    def new_latent(self) -> str | None:
        """The name of the new latent that it reads, if it gets one and others read it too."""
        shared = self.heads.rank_relation == "compress" and self.site.shares_latent
        return self.new_tensors[LATENT] if shared else None

    def read(self, read: Callable[[str], torch.Tensor]) -> AttentionTensors:
        """Return its projections, each by the function that gives a tensor by its name in the checkpoint."""
        return AttentionTensors.of({part: read(name) for part, name in self.tensors.items()}, self.kernel[0])

    def read_converted(self, read: Callable[[str], torch.Tensor]) -> AttentionTensors:
        """Return its projections after the conversion, from where these are."""
        return AttentionTensors.of({part: read(name) for part, name in self.new_tensors.items()}, self.kernel[1])


def attention_modules(
    target: AttnVariantModelMixin, source_config: Any, entries: Mapping[str, TensorEntry]
) -> list[AttentionModule]:
    """Return every attention module of a checkpoint that is to become `target`, its tensors found and checked.

    Args:
        target: the converted model, without memory.
        source_config: the source, described by a variant configuration.
        entries: every tensor of the source with its dtype and shape.

    Raises:
        ValueError: for impossible head counts or ranks, or attention tensors that are missing, too many, or of other
            shapes than the configuration says.
    """
    modules = [
        _attention_module(site, path, module, target, source_config, entries)
        for site, path, module in target.named_attentions()
    ]
    _check_nothing_unclaimed(target, modules, entries)
    return modules


def _attention_module(
    site: AttentionSite,
    path: str,
    module: nn.Module,
    target: PreTrainedModel,
    source_config: Any,
    entries: Mapping[str, TensorEntry],
) -> AttentionModule:
    heads = _head_counts(site, path, source_config, target.config)
    prefix = _stored_prefix(target, f"{path}.{site.query}.weight", entries)
    tensors, shapes = {}, {}
    width = target.config.hidden_size
    for role, linear_path in site.projections.items():
        for part, parameter in module.get_submodule(linear_path).named_parameters():
            name, field_name = f"{prefix}{path}.{linear_path}.{part}", f"{role}_{part}"
            expected = list(parameter.shape)
            if role in ("key", "value"):
                # The input's size too: both are made from the latent.
                expected = [getattr(heads, role)[0] * heads.head_dim, heads.rank[0] or width][: len(expected)]
            _check_tensor(name, entries, expected)
            tensors[field_name], shapes[field_name] = name, tuple(parameter.shape)
    new_tensors = dict(tensors)
    for rank, named in zip(heads.rank, (tensors, new_tensors), strict=True):
        if rank is not None:
            named[LATENT] = f"{prefix}{site.latent_path(path)}.weight"
    if heads.rank[0] is not None:
        _check_tensor(tensors[LATENT], entries, [heads.rank[0], width])
    if heads.rank[1] is not None:
        shapes[LATENT] = (heads.rank[1], width)
    core_module: Any = module.get_submodule(site.core)
    core = f"{prefix}{path}.{site.core}." if site.core else f"{prefix}{path}."
    kernel = (site.kernel(source_config, path, getattr(core_module, "is_causal", False)), core_module.kernel)
    of_kernel = kernel_tensors(core_module)
    if kernel[0] is not None and kernel[0].of_key_heads and heads.change != "same":
        raise ValueError(
            f"`{site.kv_heads_field}` cannot change: the source has learned maps of the kernel {kernel[0].name!r} for "
            "each key head. Convert heads and kernel at once, from the model that it was made of."
        )
    for part, tensor in of_kernel.items():
        new_tensors[part], shapes[part] = f"{core}{part}", tuple(tensor.shape)
        if kernel[0] is not None:
            tensors[part] = f"{core}{part}"
            _check_tensor(tensors[part], entries, list(tensor.shape))
    parameters = core_module.named_parameters(recurse=False)
    projections = {f"{core}{name}": tuple(each.shape) for name, each in parameters if name not in of_kernel}
    if site.heads(source_config, path).talking is not None:
        for name, shape in projections.items():
            _check_tensor(name, entries, list(shape))
        projections = {}
    return AttentionModule(path, site, heads, tensors, new_tensors, shapes, projections, kernel)


def _head_counts(site: AttentionSite, path: str, source: Any, target: Any) -> HeadCounts:
    """Return the counts and ranks of one attention before and after.

    Raises:
        ValueError: if what it has cannot become what it is to have.
    """
    before, after = site.heads(source, path), site.heads(target, path)
    old, new = (rank_of_map(heads.rank, target.hidden_size) for heads in (before, after))
    heads = HeadCounts(
        after.query, (before.key, after.key), (before.value, after.value), after.output, after.head_dim, (old, new)
    )
    for field, check in ((site.kv_heads_field, "relation"), (site.rank_field, "rank_relation")):
        try:
            getattr(heads, check)
        except ValueError as error:
            raise ValueError(f"`{field}`: {error}") from None
    if site.shares_latent and heads.rank_relation != "same":
        check_memory_terms(site, source, target)
    return heads


def _check_nothing_unclaimed(
    target: AttnVariantModelMixin, modules: list[AttentionModule], entries: Mapping[str, TensorEntry]
) -> None:
    # Tensors that no module claims would stay, and the converted model would silently lack their layers.
    claimed = {name for module in modules for name in module.tensors.values()}
    sites = "|".join(pattern for site in target.attention_sites for pattern in _linear_patterns(site))
    pattern = re.compile(rf"(?:{re.escape(target.base_model_prefix)}\.)?(?:{sites})\.(?:weight|bias)")
    unclaimed = [name for name in entries if name not in claimed and pattern.fullmatch(name)]
    if unclaimed:
        shown = ", ".join(repr(name) for name in unclaimed[:3]) + (", ..." if len(unclaimed) > 3 else "")
        raise ValueError(
            f"the checkpoint holds {len(unclaimed)} attention tensors that {type(target).__name__} with its "
            f"config.json does not have: {shown}; check the number of layers and `architectures`."
        )


def _linear_patterns(site: AttentionSite) -> Iterable[str]:
    """Yield regular expressions for the paths of a site's linear maps inside the base model."""
    inside = list(site.projections.values())
    if site.rank_field is not None and not site.shares_latent:
        inside.append(site.latent)
    yield rf"{site.module}\.(?:{'|'.join(map(re.escape, inside))})"
    if site.shares_latent:
        yield re.escape(site.latent)


def _stored_prefix(target: PreTrainedModel, name: str, entries: Mapping[str, TensorEntry]) -> str:
    for prefix in (f"{target.base_model_prefix}.", ""):
        if f"{prefix}{name}" in entries:
            return prefix
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(name)) + "$")
    similar = next((stored for stored in entries if pattern.search(stored)), next(iter(entries), None))
    raise ValueError(f"the checkpoint has no tensor {name!r}; it has {similar!r}, for example.")


def _check_tensor(name: str, entries: Mapping[str, TensorEntry], expected: list[int]) -> None:
    if name not in entries:
        raise ValueError(f"the checkpoint has no tensor {name!r}.")
    entry = entries[name]
    if list(entry.shape) != expected:
        raise ValueError(
            f"{name!r} has shape {list(entry.shape)}; with the heads that config.json gives it must be {expected}."
        )
    if not entry.is_floating:
        raise ValueError(f"{name!r} has dtype {entry.dtype}; convert the unquantized checkpoint.")
