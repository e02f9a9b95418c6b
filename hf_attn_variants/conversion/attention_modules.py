"""Determines the tensor names and shapes of each attention module before and after a conversion, and checks them."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling.attention.attention_sites import AttentionSite, create_kernel
from ..modeling.attention.model_mixin import AttnVariantModelMixin
from ..modeling.fields.composition import get_requested_extensions
from ..modeling.mechanisms.attention_extension import AttentionExtension, get_extensions
from ..modeling.mechanisms.kernels.attention_kernel import get_kernel_tensors
from ..modeling.mechanisms.latents import get_projection_rank
from ..modeling.mechanisms.talking_heads import get_dynamic_terms
from .attention_tensors import LATENT_FIELD, AttentionTensors, HeadCounts
from .checkpoint.tensor_files import TensorEntry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionModule:
    """An attention module in a checkpoint, with its tensor names and shapes before and after a conversion.

    Args:
        name: Path of the module inside the base model, e.g. "encoder.layer.0.attention".
        site: The type of attention.
        heads: Head counts and latent ranks before and after the conversion.
        tensors: Maps each field of `AttentionTensors` that the module has to the tensor's name in the checkpoint. The
            queries, keys and values of a fused layer map to the same tensor, of which they are ranges of rows.
        new_tensors: The same mapping after the conversion. Modules that share a latent all map to the same tensor.
        shapes: The shape of each tensor after the conversion, {name in the checkpoint: shape}.
        projections: The talking-heads parameters to add, {name in the checkpoint: shape}.
        kernel: The kernels that replace the softmax (before, after). None if a softmax is used.
        extensions: The attention extensions to add, {prefix of the tensor names in the checkpoint: module on the meta
            device}.
    """

    name: str
    site: AttentionSite
    heads: HeadCounts
    tensors: dict[str, str]
    new_tensors: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    projections: dict[str, tuple[int, ...]]
    kernel: tuple[Any, Any] = (None, None)
    extensions: dict[str, AttentionExtension] = field(default_factory=dict)

    @property
    def extension_shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of the attention extensions to add, {name in the checkpoint: shape}."""
        return {
            prefix + name: tuple(parameter.shape)
            for prefix, extension in self.extensions.items()
            for name, parameter in extension.named_parameters()
        }

    @property
    def adds_kernel(self) -> bool:
        """True if the conversion replaces the softmax with a kernel."""
        return self.kernel[0] is None and self.kernel[1] is not None

    @property
    def is_reduced(self) -> bool:
        """True if the module gets fewer heads, a smaller latent or a kernel, so that new weights must be computed."""
        return self.heads.is_reduced or self.adds_kernel

    @property
    def change(self) -> str:
        """The changes as shown in reports: "same", or one or more of "pool", "expand", "compress" and "kernel"."""
        if not self.adds_kernel:
            return self.heads.change
        return "kernel" if self.heads.change == "same" else f"{self.heads.change}, kernel"

    @property
    def shared_latent_name(self) -> str | None:
        """The tensor name of the new latent if the module shares it with other modules, otherwise None."""
        shared = self.heads.latent_change == "compress" and self.site.shares_latent
        return self.new_tensors[LATENT_FIELD] if shared else None

    def read_tensors(self, read_tensor: Callable[[str], torch.Tensor], converted: bool = False) -> AttentionTensors:
        """Return the original or converted projections. `read_tensor` returns the tensor with a given name."""
        names = self.new_tensors if converted else self.tensors
        stored = {name: read_tensor(name) for name in dict.fromkeys(names.values())}
        tensors = {part: stored[name] for part, name in names.items()}
        for kind in ("weight", "bias") if self.site.is_fused else ():
            if (name := names.get(f"query_{kind}")) is not None:
                rows = stored[name].split(self._get_fused_rows(converted))
                tensors |= zip((f"{role}_{kind}" for role in ("query", "key", "value")), rows, strict=True)
        return AttentionTensors.from_tensors(tensors, self.kernel[converted])

    def join_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors to store, {name in the checkpoint: tensor}. `tensors` has the fields of `new_tensors`."""
        parts: dict[str, list[torch.Tensor]] = {}
        for part, name in self.new_tensors.items():  # the queries, keys and values are in this order
            parts.setdefault(name, []).append(tensors[part])
        return {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in parts.items()}

    def _get_fused_rows(self, converted: bool) -> list[int]:
        """Return the numbers of rows of a fused layer that compute the queries, keys and values."""
        counts = (self.heads.query, self.heads.key[converted], self.heads.value[converted])
        return [count * self.heads.head_dim for count in counts]


def build_attention_modules(
    target: AttnVariantModelMixin, source_config: Any, entries: Mapping[str, TensorEntry]
) -> list[AttentionModule]:
    """Return the attention modules in a checkpoint that is converted to `target`, after checking their tensors.

    Args:
        target: The converted model, on the meta device.
        source_config: The variant configuration of the original model.
        entries: {name: dtype and shape} for every tensor in the original model.

    Raises:
        ValueError: if the head counts or ranks cannot be converted, or if attention tensors are missing, are
            unexpected, or do not have the shapes that the configuration implies.
    """
    modules = [
        _build_attention_module(site, path, module, target, source_config, entries)
        for site, path, module in target.named_attention_modules()
    ]
    _check_no_leftover_tensors(target, modules, entries)
    return modules


def _build_attention_module(
    site: AttentionSite,
    path: str,
    module: nn.Module,
    target: PreTrainedModel,
    source_config: Any,
    entries: Mapping[str, TensorEntry],
) -> AttentionModule:
    """Return one attention module after checking its tensors.

    Args:
        site: The type of attention.
        path: Path of the module inside the base model.
        module: The converted module, on the meta device.
        target, source_config, entries: See `build_attention_modules`.
    """
    heads = _resolve_head_counts(site, path, source_config, target.config)
    prefix = find_stored_prefix(target, f"{path}.{site.query}.weight", entries)
    key_linear: Any = module.get_submodule(site.key)
    # Encoder outputs can be wider than the decoder. With a latent, the key projection reads the latent.
    width = key_linear.in_features if site.rank_field is None else target.config.hidden_size
    tensors, shapes = _resolve_linear_tensors(site, f"{prefix}{path}", module, heads, width, entries)
    new_tensors = dict(tensors)
    for rank, tensor_names in zip(heads.rank, (tensors, new_tensors), strict=True):
        if rank is not None:
            tensor_names[LATENT_FIELD] = f"{prefix}{site.get_latent_projection_path(path)}.weight"
    if heads.rank[0] is not None:
        _check_tensor(tensors[LATENT_FIELD], entries, [heads.rank[0], width])
    if heads.rank[1] is not None:
        shapes[new_tensors[LATENT_FIELD]] = (heads.rank[1], width)
    core_module: Any = module.get_submodule(site.core)
    core = f"{prefix}{path}.{site.core}." if site.core else f"{prefix}{path}."
    source_kernel = create_kernel(site, source_config, path, getattr(core_module, "is_causal", False))
    kernel = (source_kernel, getattr(core_module, "kernel", None))
    new_kernel_tensors = get_kernel_tensors(core_module)
    if kernel[0] is not None and kernel[0].tensors_per_key_head and heads.change != "same":
        raise ValueError(
            f"`{site.kv_heads_field}` must not change because the original model's kernel {kernel[0].name!r} has "
            "learned projections for each key head. Convert the heads and the kernel together from the base model."
        )
    for part, tensor in new_kernel_tensors.items():
        new_tensors[part] = name = f"{core}{part}"
        shapes[name] = tuple(tensor.shape)
        if kernel[0] is not None:
            tensors[part] = name
            _check_tensor(name, entries, list(tensor.shape))
    projections = {
        f"{core}{name}": tuple(parameter.shape)
        for name, parameter in core_module.named_parameters(recurse=False)
        if name not in new_kernel_tensors
    }
    if site.get_heads(source_config, path).talking is not None:
        for name, shape in projections.items():
            _check_tensor(name, entries, list(shape))
        projections = {}
    present = {extension.field for extension in get_requested_extensions(source_config, site.field_prefix)}
    extensions = {f"{core}{name}.": item for name, item in get_extensions(core_module).items() if name not in present}
    return AttentionModule(path, site, heads, tensors, new_tensors, shapes, projections, kernel, extensions)


def _resolve_linear_tensors(
    site: AttentionSite,
    path: str,
    module: nn.Module,
    heads: HeadCounts,
    hidden_size: int,
    entries: Mapping[str, TensorEntry],
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Return the tensor names of a module's linear layers and their new shapes, after checking the old shapes.

    Args:
        site, module, heads, entries: See `_build_attention_module`.
        path: Path of the module in the checkpoint.
        hidden_size: Input size of the key and value projections if there is no latent.
    """
    tensors, shapes = {}, {}
    for role, linear_path in site.projections.items():
        for part, parameter in module.get_submodule(linear_path).named_parameters():
            name, field_name = f"{path}.{linear_path}.{part}", f"{role}_{part}"
            expected = list(parameter.shape)
            if site.is_fused and role != "output":
                expected[0] = (heads.query + heads.key[0] + heads.value[0]) * heads.head_dim
            elif role in ("key", "value"):
                # The original input size may also differ because keys and values are computed from the latent.
                expected = [getattr(heads, role)[0] * heads.head_dim, heads.rank[0] or hidden_size][: len(expected)]
            _check_tensor(name, entries, expected)
            tensors[field_name], shapes[name] = name, tuple(parameter.shape)
    return tensors, shapes


def _resolve_head_counts(site: AttentionSite, path: str, source: Any, target: Any) -> HeadCounts:
    """Return the head counts and ranks of an attention module before and after the conversion.

    Raises:
        ValueError: if the original counts or ranks cannot be converted to the new ones.
    """
    source_heads, target_heads = site.get_heads(source, path), site.get_heads(target, path)
    old, new = (get_projection_rank(heads.rank, target.hidden_size) for heads in (source_heads, target_heads))
    heads = HeadCounts(
        target_heads.query,
        (source_heads.key, target_heads.key),
        (source_heads.value, target_heads.value),
        target_heads.output,
        target_heads.head_dim,
        (old, new),
    )
    for name, check in ((site.kv_heads_field, "kv_head_change"), (site.rank_field, "latent_change")):
        try:
            getattr(heads, check)
        except ValueError as error:
            raise ValueError(f"`{name}`: {error}") from None
    dynamic = {name for config in (source, target) for name in get_dynamic_terms(config, site.field_prefix)}
    terms = sorted(name for name in dynamic if name.startswith("m"))
    if site.shares_latent and heads.latent_change != "same" and terms:
        raise ValueError(
            f"`{site.rank_field}` must not change if `talking_heads_dynamic` contains {' and '.join(terms)} because "
            "these terms are computed from the latent shared by all layers. Remove it."
        )
    return heads


def _check_no_leftover_tensors(
    target: AttnVariantModelMixin, modules: list[AttentionModule], entries: Mapping[str, TensorEntry]
) -> None:
    """Check that every attention tensor in the checkpoint is used, so that no tensor is silently lost."""
    # Leftover tensors would be copied to the new checkpoint, but the converted model has no layers for them.
    used_names = {name for module in modules for name in module.tensors.values()}
    sites = "|".join(pattern for site in target.attention_sites for pattern in _linear_layer_patterns(site))
    pattern = re.compile(rf"(?:{re.escape(target.base_model_prefix)}\.)?(?:{sites})\.(?:weight|bias)")
    unused_names = [name for name in entries if name not in used_names and pattern.fullmatch(name)]
    if unused_names:
        name_list = ", ".join(repr(name) for name in unused_names[:3]) + (", ..." if len(unused_names) > 3 else "")
        raise ValueError(
            f"The checkpoint contains {len(unused_names)} attention tensors that {type(target).__name__} does not use "
            f"with this config.json: {name_list}. Check the number of layers and `architectures` in config.json."
        )


def _linear_layer_patterns(site: AttentionSite) -> Iterable[str]:
    """Yield regular expressions that match the paths of an attention module's linear layers in the base model."""
    linear_paths = list(site.projections.values())
    if site.rank_field is not None and not site.shares_latent:
        linear_paths.append(site.latent)
    yield rf"{site.module}\.(?:{'|'.join(map(re.escape, linear_paths))})"
    if site.shares_latent:
        yield re.escape(site.latent)


def find_stored_prefix(target: PreTrainedModel, name: str, entries: Mapping[str, TensorEntry]) -> str:
    """Return the prefix of base-model tensor names in the checkpoint, such as "bert." or an empty string."""
    for prefix in (f"{target.base_model_prefix}.", ""):
        if f"{prefix}{name}" in entries:
            return prefix
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(name)) + "$")
    similar = next((stored for stored in entries if pattern.search(stored)), next(iter(entries), None))
    raise ValueError(
        f"The checkpoint has no tensor {name!r}. It contains tensors such as {similar!r}. Check that config.json "
        "belongs to this checkpoint."
    )


def _check_tensor(name: str, entries: Mapping[str, TensorEntry], expected_shape: list[int]) -> None:
    """Check that a tensor exists and has the expected shape and a floating-point dtype."""
    if name not in entries:
        raise ValueError(f"The checkpoint has no tensor {name!r}. Check that config.json belongs to this checkpoint.")
    entry = entries[name]
    if list(entry.shape) != expected_shape:
        raise ValueError(
            f"{name!r} must have shape {expected_shape} for the head counts in config.json, got {list(entry.shape)}. "
            "Correct the head counts."
        )
    if not entry.is_floating:
        raise ValueError(
            f"{name!r} must have a floating-point dtype, got {entry.dtype}. Convert the unquantized model."
        )


def check_other_tensor_shapes(
    target: Any, entries: Mapping[str, TensorEntry], modules: list[AttentionModule], error_prefix: str
) -> None:
    """Check that the shapes of all other tensors match the configuration, so that the converted model can be loaded.

    Args:
        target: The converted model, on the meta device.
        entries: All tensors in the original model.
        modules: The attention modules. Their tensors are not checked because the conversion computes them.
        error_prefix: The beginning of error messages about an invalid configuration.

    Raises:
        ValueError: if a tensor has a different shape. The message names the first such tensor.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in target.state_dict().items()}
    converted = {name for module in modules for name in module.tensors.values()}
    prefix = f"{target.base_model_prefix}."
    for name, entry in entries.items():
        model_name = next((key for key in (name, prefix + name, name.removeprefix(prefix)) if key in shapes), None)
        if model_name is not None and name not in converted and shapes[model_name] != tuple(entry.shape):
            raise ValueError(
                f"{error_prefix}: it implies the shape {list(shapes[model_name])} for {name!r}, but the shape in the "
                f"checkpoint is {list(entry.shape)}."
            )


def check_no_missing_tensors(
    target: Any, entries: Mapping[str, TensorEntry], modules: list[AttentionModule], error_prefix: str
) -> None:
    """Check that the checkpoint is complete, because `from_pretrained` would initialize missing tensors randomly.

    If only the model head is missing, a warning is logged because users often load a base model into a model with a
    head. A missing pooler is ignored because many BERT checkpoints do not have one.

    Args:
        target, entries, modules, error_prefix: See `check_other_tensor_shapes`. The tensors of `modules` have already
            been checked.

    Raises:
        ValueError: if a base-model tensor is missing. The message names the first such tensor.
    """
    prefix = f"{target.base_model_prefix}."
    # Transformers renames these tensors when it loads old BERT checkpoints.
    new = {
        name
        for module in modules
        for name in (*module.new_tensors.values(), *module.projections, *module.extension_shapes)
    }
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
            f"{error_prefix}, or the checkpoint is incomplete: it has no tensor {missing_in_base[0]!r}{more}, and "
            "`from_pretrained` would initialize missing tensors randomly."
        )
    if missing:
        logger.warning(
            "The checkpoint has no %r, which is part of %s. `from_pretrained` initializes it randomly in both the "
            "original and the converted model.",
            missing[0],
            type(target).__name__,
        )
