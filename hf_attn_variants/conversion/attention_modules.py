"""The attention modules of a checkpoint: the names and shapes of their tensors before and after."""

import logging
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
from ..modeling.mechanisms.talking_heads import dynamic_terms
from .attention_tensors import LATENT, AttentionTensors, HeadCounts
from .checkpoint.tensor_files import TensorEntry

__all__ = ["AttentionModule", "attention_modules", "check_nothing_missing", "check_other_shapes"]

logger = logging.getLogger(__name__)


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
        _check_memory_terms(site, source, target)
    return heads


def _check_memory_terms(site: AttentionSite, source: Any, target: Any) -> None:
    """Check that no input-dependent term is made from a latent that changes: another latent is another memory.

    Args:
        site: of attentions whose shared latent gets another rank.
        source, target: the configurations before and after.

    Raises:
        ValueError: naming the terms.
    """
    dynamic = {name for config in (source, target) for name in dynamic_terms(config, site.place_prefix)}
    terms = {name for name in dynamic if name.startswith("m")}
    if terms:
        raise ValueError(
            f"`{site.rank_field}` cannot change where `talking_heads_dynamic` has {' and '.join(sorted(terms))}: such "
            "terms are made from the latent that all layers share, and would be of another one."
        )


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


def check_other_shapes(
    target: Any, entries: Mapping[str, TensorEntry], modules: list[AttentionModule], wrong: str
) -> None:
    """Refuse tensors of another shape than the configuration makes: the folder could not be loaded.

    Args:
        target: the converted model, on the meta device.
        entries: every tensor of the source.
        modules: the attentions, whose tensors the conversion makes.
        wrong: the beginning of a message on the configuration.

    Raises:
        ValueError: naming the first.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in target.state_dict().items()}
    converted = {name for module in modules for name in module.tensors.values()}
    prefix = f"{target.base_model_prefix}."
    for name, entry in entries.items():
        here = next((each for each in (name, prefix + name, name.removeprefix(prefix)) if each in shapes), None)
        if here is not None and name not in converted and shapes[here] != tuple(entry.shape):
            raise ValueError(
                f"{wrong}: it makes {name!r} of shape {list(shapes[here])}, and the checkpoint's has "
                f"{list(entry.shape)}."
            )


def check_nothing_missing(
    target: Any, entries: Mapping[str, TensorEntry], modules: list[AttentionModule], wrong: str
) -> None:
    """Refuse a checkpoint that lacks a part of the model, which `from_pretrained` draws at random.

    A missing head is warned of: people load checkpoints without it on purpose. BERT's pooler is often left out.

    Args:
        target, entries, modules, wrong: as for `check_other_shapes`. The tensors of `modules` are already checked.

    Raises:
        ValueError: naming the first.
    """
    prefix = f"{target.base_model_prefix}."
    # Of old BERTs, whose names transformers changes when it loads them.
    new = {name for module in modules for name in (*module.new_tensors.values(), *module.projections)}
    names = {re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name) for name in {*entries, *new}}
    names = {re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name) for name in names}
    names |= {prefix + name for name in names} | {name.removeprefix(prefix) for name in names}
    ignored = [re.compile(pattern) for pattern in target._keys_to_ignore_on_load_missing or ()]
    tied: dict[int, list[str]] = {}
    for name, parameter in target.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    missing = [each[0] for each in tied.values() if not names.intersection(each)]
    missing = [name for name in missing if "pooler" not in name and not any(each.search(name) for each in ignored)]
    of_base = [name for name in missing if target.base_model is target or name.startswith(prefix)]
    if of_base:
        more = f" and {len(of_base) - 1} more" if len(of_base) > 1 else ""
        raise ValueError(
            f"{wrong}, or a part of the checkpoint is lost: it has no tensor {of_base[0]!r}{more}, and "
            "`from_pretrained` would draw at random what is missing."
        )
    if missing:
        logger.warning(
            "the checkpoint has no %r, a part of %s: `from_pretrained` draws it at random, in the source and in the "
            "converted model",
            missing[0],
            type(target).__name__,
        )
