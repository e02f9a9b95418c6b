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
from ..modeling.mechanisms.kernels.attention_kernel import AttentionKernel, get_kernel_tensors
from ..modeling.mechanisms.latents import get_projection_rank
from ..modeling.mechanisms.talking_heads import get_dynamic_terms
from .attention_tensors import LATENT, AttentionTensors, HeadCounts
from .checkpoint.tensor_files import TensorEntry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionModule:
    """An attention module of a checkpoint, with the names and shapes of its tensors before and after a conversion.

    Args:
        name: Path of the module inside the base model, e.g. "encoder.layer.0.attention".
        site: The kind of attention.
        heads: Head counts, and the rank of the latent, before and after.
        tensors: Maps each field of `AttentionTensors` that the module has to the tensor's name in the checkpoint.
        new_tensors: The same after the conversion. Attentions that share a latent all contain its name.
        shapes: Maps each field of `new_tensors` to its shape.
        projections: The talking-heads parameters to add, {name in the checkpoint: shape}.
        kernel: The kernel that replaces the softmax, before and after; None if there is a softmax.
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
        """The kernel that replaces the softmax. Only use it if the attention gets one."""
        kernel: Any = self.kernel[1]
        return kernel

    @property
    def gets_kernel(self) -> bool:
        """Whether the conversion replaces the softmax by a kernel."""
        return self.kernel[0] is None and self.kernel[1] is not None

    @property
    def reduced(self) -> bool:
        """Whether the module gets fewer heads, a smaller latent or a kernel, so that a method computes its weights."""
        return self.heads.reduced or self.gets_kernel

    @property
    def change(self) -> str:
        """The kind of change, as in reports: "same", "pool", "expand", "compress", "kernel" or two of them."""
        if not self.gets_kernel:
            return self.heads.change
        return "kernel" if self.heads.change == "same" else f"{self.heads.change}, kernel"

    @property
    def new_latent(self) -> str | None:
        """The name of the new latent if the module gets one that other modules read too, else None."""
        shared = self.heads.rank_relation == "compress" and self.site.shares_latent
        return self.new_tensors[LATENT] if shared else None

    def read(self, read: Callable[[str], torch.Tensor]) -> AttentionTensors:
        """Return the projections before the conversion. `read` returns a tensor by its name in the checkpoint."""
        return AttentionTensors.of({part: read(name) for part, name in self.tensors.items()}, self.kernel[0])

    def read_converted(self, read: Callable[[str], torch.Tensor]) -> AttentionTensors:
        """Return the projections after the conversion. `read` returns a tensor by its name in the checkpoint."""
        return AttentionTensors.of({part: read(name) for part, name in self.new_tensors.items()}, self.kernel[1])


def attention_modules(
    target: AttnVariantModelMixin, source_config: Any, entries: Mapping[str, TensorEntry]
) -> list[AttentionModule]:
    """Return all attention modules of a checkpoint that is converted to `target`, after checking their tensors.

    Args:
        target: The converted model, on the meta device.
        source_config: The variant configuration of the original model.
        entries: {name: dtype and shape} for every tensor of the original model.

    Raises:
        ValueError: if head counts or ranks are impossible, or if attention tensors are missing, unexpected, or have
            other shapes than the configuration implies.
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
    """Return one attention module after checking its tensors. Arguments as for `attention_modules`."""
    heads = _head_counts(site, path, source_config, target.config)
    prefix = _stored_prefix(target, f"{path}.{site.query}.weight", entries)
    width = target.config.hidden_size
    tensors, shapes = _linear_tensors(site, f"{prefix}{path}", module, heads, width, entries)
    new_tensors = dict(tensors)
    for rank, tensor_names in zip(heads.rank, (tensors, new_tensors), strict=True):
        if rank is not None:
            tensor_names[LATENT] = f"{prefix}{site.get_latent_path(path)}.weight"
    if heads.rank[0] is not None:
        _check_tensor(tensors[LATENT], entries, [heads.rank[0], width])
    if heads.rank[1] is not None:
        shapes[LATENT] = (heads.rank[1], width)
    core_module: Any = module.get_submodule(site.core)
    core = f"{prefix}{path}.{site.core}." if site.core else f"{prefix}{path}."
    kernel = (site.get_kernel(source_config, path, getattr(core_module, "is_causal", False)), core_module.kernel)
    new_kernel_tensors = get_kernel_tensors(core_module)
    if kernel[0] is not None and kernel[0].tensors_per_key_head and heads.change != "same":
        raise ValueError(
            f"`{site.kv_heads_field}` must not change, because the original model has learned projections of the "
            f"kernel {kernel[0].name!r} for each key head. Convert heads and kernel together, from the base model."
        )
    for part, tensor in new_kernel_tensors.items():
        new_tensors[part], shapes[part] = f"{core}{part}", tuple(tensor.shape)
        if kernel[0] is not None:
            tensors[part] = f"{core}{part}"
            _check_tensor(tensors[part], entries, list(tensor.shape))
    parameters = core_module.named_parameters(recurse=False)
    projections = {
        f"{core}{name}": tuple(parameter.shape) for name, parameter in parameters if name not in new_kernel_tensors
    }
    if site.get_heads(source_config, path).talking is not None:
        for name, shape in projections.items():
            _check_tensor(name, entries, list(shape))
        projections = {}
    return AttentionModule(path, site, heads, tensors, new_tensors, shapes, projections, kernel)


def _linear_tensors(
    site: AttentionSite,
    path: str,
    module: nn.Module,
    heads: HeadCounts,
    width: int,
    entries: Mapping[str, TensorEntry],
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Return the names and the new shapes of the tensors of the linear layers, after checking the old shapes.

    Args:
        site, module, heads, entries: As for `_attention_module`.
        path: Path of the module in the checkpoint.
        width: Size of the input of keys and values without a latent.
    """
    tensors, shapes = {}, {}
    for role, linear_path in site.projections.items():
        for part, parameter in module.get_submodule(linear_path).named_parameters():
            name, field_name = f"{path}.{linear_path}.{part}", f"{role}_{part}"
            expected = list(parameter.shape)
            if role in ("key", "value"):
                # The original input size may differ as well, because keys and values are computed from the latent.
                expected = [getattr(heads, role)[0] * heads.head_dim, heads.rank[0] or width][: len(expected)]
            _check_tensor(name, entries, expected)
            tensors[field_name], shapes[field_name] = name, tuple(parameter.shape)
    return tensors, shapes


def _head_counts(site: AttentionSite, path: str, source: Any, target: Any) -> HeadCounts:
    """Return the head counts and ranks of one attention before and after the conversion.

    Raises:
        ValueError: if the counts or ranks before cannot become those after.
    """
    before, after = site.get_heads(source, path), site.get_heads(target, path)
    old, new = (get_projection_rank(heads.rank, target.hidden_size) for heads in (before, after))
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
    """Check that no input-dependent term is computed from a shared latent that gets another rank.

    Args:
        site: The kind of attention whose shared latent gets another rank.
        source, target: The configurations before and after.

    Raises:
        ValueError: if there are such terms.
    """
    dynamic = {name for config in (source, target) for name in get_dynamic_terms(config, site.place_prefix)}
    terms = {name for name in dynamic if name.startswith("m")}
    if terms:
        raise ValueError(
            f"`{site.rank_field}` must not change if `talking_heads_dynamic` contains {' and '.join(sorted(terms))}, "
            "because these terms are computed from the latent that all layers share. Leave it out."
        )


def _check_nothing_unclaimed(
    target: AttnVariantModelMixin, modules: list[AttentionModule], entries: Mapping[str, TensorEntry]
) -> None:
    """Check that no attention tensor of the checkpoint is left over; it would silently be lost."""
    # Unclaimed tensors would be copied, but the converted model would lack their layers.
    claimed = {name for module in modules for name in module.tensors.values()}
    sites = "|".join(pattern for site in target.attention_sites for pattern in _linear_patterns(site))
    pattern = re.compile(rf"(?:{re.escape(target.base_model_prefix)}\.)?(?:{sites})\.(?:weight|bias)")
    unclaimed = [name for name in entries if name not in claimed and pattern.fullmatch(name)]
    if unclaimed:
        shown = ", ".join(repr(name) for name in unclaimed[:3]) + (", ..." if len(unclaimed) > 3 else "")
        raise ValueError(
            f"The checkpoint has {len(unclaimed)} attention tensors that {type(target).__name__} with its "
            f"config.json does not have: {shown}. Check the number of layers and `architectures` in config.json."
        )


def _linear_patterns(site: AttentionSite) -> Iterable[str]:
    """Yield regular expressions for the paths of the linear layers of an attention inside the base model."""
    linear_paths = list(site.projections.values())
    if site.rank_field is not None and not site.shares_latent:
        linear_paths.append(site.latent)
    yield rf"{site.module}\.(?:{'|'.join(map(re.escape, linear_paths))})"
    if site.shares_latent:
        yield re.escape(site.latent)


def _stored_prefix(target: PreTrainedModel, name: str, entries: Mapping[str, TensorEntry]) -> str:
    """Return the prefix that the checkpoint has before the name of a tensor of the base model, often none."""
    for prefix in (f"{target.base_model_prefix}.", ""):
        if f"{prefix}{name}" in entries:
            return prefix
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(name)) + "$")
    similar = next((stored for stored in entries if pattern.search(stored)), next(iter(entries), None))
    raise ValueError(
        f"The checkpoint has no tensor {name!r}. It has {similar!r}, for example. Check that config.json belongs to "
        "this checkpoint."
    )


def _check_tensor(name: str, entries: Mapping[str, TensorEntry], expected: list[int]) -> None:
    """Check that a tensor exists and has the expected shape and a floating-point dtype."""
    if name not in entries:
        raise ValueError(f"The checkpoint has no tensor {name!r}. Check that config.json belongs to this checkpoint.")
    entry = entries[name]
    if list(entry.shape) != expected:
        raise ValueError(
            f"{name!r} must have shape {expected} with the heads of config.json, got {list(entry.shape)}. Check the "
            "head counts in config.json."
        )
    if not entry.is_floating:
        raise ValueError(
            f"{name!r} must have a floating-point dtype, got {entry.dtype}. Convert the unquantized model."
        )


def check_other_shapes(
    target: Any, entries: Mapping[str, TensorEntry], modules: list[AttentionModule], wrong: str
) -> None:
    """Check that all other tensors have the shapes of the configuration; otherwise the folder could not be loaded.

    Args:
        target: The converted model, on the meta device.
        entries: Every tensor of the original model.
        modules: The attention modules, whose tensors the conversion computes.
        wrong: The beginning of messages about a wrong configuration.

    Raises:
        ValueError: if a tensor has another shape. The message names the first.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in target.state_dict().items()}
    converted = {name for module in modules for name in module.tensors.values()}
    prefix = f"{target.base_model_prefix}."
    for name, entry in entries.items():
        model_name = next((key for key in (name, prefix + name, name.removeprefix(prefix)) if key in shapes), None)
        if model_name is not None and name not in converted and shapes[model_name] != tuple(entry.shape):
            raise ValueError(
                f"{wrong}: it implies the shape {list(shapes[model_name])} of {name!r}, but the checkpoint has "
                f"{list(entry.shape)}."
            )


def check_nothing_missing(
    target: Any, entries: Mapping[str, TensorEntry], modules: list[AttentionModule], wrong: str
) -> None:
    """Check that the checkpoint contains the whole model; `from_pretrained` would initialize missing parts randomly.

    A missing model head only causes a warning, because users often load a base model into a model with a head. A
    missing pooler is ignored, because BERT checkpoints often lack it.

    Args:
        target, entries, modules, wrong: As for `check_other_shapes`. The tensors of `modules` are already checked.

    Raises:
        ValueError: if a tensor of the base model is missing. The message names the first.
    """
    prefix = f"{target.base_model_prefix}."
    # Transformers renames these tensors of old BERT checkpoints when it loads them.
    new = {name for module in modules for name in (*module.new_tensors.values(), *module.projections)}
    names = {re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name) for name in {*entries, *new}}
    names = {re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name) for name in names}
    names |= {prefix + name for name in names} | {name.removeprefix(prefix) for name in names}
    ignored = [re.compile(pattern) for pattern in target._keys_to_ignore_on_load_missing or ()]
    tied: dict[int, list[str]] = {}
    for name, parameter in target.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    missing = [aliases[0] for aliases in tied.values() if not names.intersection(aliases)]
    missing = [name for name in missing if "pooler" not in name and not any(key.search(name) for key in ignored)]
    missing_in_base = [name for name in missing if target.base_model is target or name.startswith(prefix)]
    if missing_in_base:
        more = f" and {len(missing_in_base) - 1} more" if len(missing_in_base) > 1 else ""
        raise ValueError(
            f"{wrong}, or the checkpoint is incomplete: it has no tensor {missing_in_base[0]!r}{more}, and "
            "`from_pretrained` would initialize missing tensors randomly."
        )
    if missing:
        logger.warning(
            "The checkpoint has no %r, which is a part of %s. `from_pretrained` initializes it randomly, in the "
            "original and in the converted model.",
            missing[0],
            type(target).__name__,
        )
