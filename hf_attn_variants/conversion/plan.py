"""What a conversion will do, settled and checked before any work: configuration, heads, each attention's tensors."""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..errors import as_value_error
from ..modeling.attention_sites import AttentionSite
from ..modeling.field_checks import nearest
from ..modeling.variant_mixins import projection_std
from ..registration import variant_config_class, variant_model_class
from .checkpoint.entries import TensorEntry
from .grouping import HeadCounts, relation, repeat_heads
from .methods.base import ConversionMethod, LayerContext
from .projections import AttentionTensors, pool_key_value

__all__ = ["AttentionModule", "ConversionPlan", "initializer_std", "make_plan", "seeded_generator"]


@dataclass(frozen=True)
class AttentionModule:
    """One attention module of the checkpoint.

    Args:
        name: its path inside the base model, e.g. "encoder.layer.0.attention".
        site: which kind of attention it is.
        heads: its head counts before and after.
        tensors: for each field of `AttentionTensors` that it has, the tensor's name in the checkpoint.
        shapes: for each such field, the shape after the conversion.
        projections: the talking-heads parameters to add, {name in the checkpoint: shape}.
    """

    name: str
    site: AttentionSite
    heads: HeadCounts
    tensors: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    projections: dict[str, tuple[int, ...]]

    def read(self, read: Callable[[str], torch.Tensor]) -> AttentionTensors:
        """Return its projections, each by the function that gives a tensor by its name in the checkpoint."""
        return AttentionTensors(**{part: read(name) for part, name in self.tensors.items()})


@dataclass(frozen=True)
class ConversionPlan:
    """The whole conversion, checked.

    Args:
        model_class: the converted model's class.
        source_config: the source, described by a variant configuration.
        config: the converted model's configuration.
        modules: every attention module.
        method: how heads are pooled.
        seed: of everything random.
        dtype: of the floating-point tensors afterwards; None keeps each one's.
    """

    model_class: type[torch.nn.Module]
    source_config: Any
    config: Any
    modules: list[AttentionModule]
    method: ConversionMethod
    seed: int = 0
    dtype: torch.dtype | None = None

    @cached_property
    def converted_names(self) -> frozenset[str]:
        """The names of the attentions' tensors in the checkpoint."""
        return frozenset(name for module in self.modules for name in module.tensors.values())

    @property
    def heads(self) -> dict[str, tuple[int, int]]:
        """The head counts that the two configurations give, {field: (before, after)}."""
        fields = self.config.head_fields()
        return {name: (getattr(self.source_config, name), getattr(self.config, name)) for name in fields}

    @property
    def pooled(self) -> list[AttentionModule]:
        """The attention modules that get fewer key/value heads."""
        return [module for module in self.modules if module.heads.relation == "pool"]

    def convert(self, module: AttentionModule, tensors: AttentionTensors) -> AttentionTensors:
        """Return one module's projections with its new head counts, in the dtypes they came in.

        Raises:
            ValueError: if the method returns a tensor of another shape.
        """
        change = module.heads.relation
        if change == "same":
            return tensors
        if change == "expand":
            # Lossless, whatever the method: there is nothing to choose.
            return pool_key_value(tensors, module.heads, repeat_heads)
        generator = seeded_generator(self.seed, module.name)
        layer = LayerContext(module.name, module.site.name, generator, initializer_std(self.config))
        pooled = self.method.pool(tensors, module.heads, layer)
        for part, shape in module.shapes.items():
            tensor = getattr(pooled, part)
            found = None if tensor is None else list(tensor.shape)
            if found != list(shape):
                raise ValueError(
                    f"method {self.method.name!r} gave {part} of shape {found} for {module.name}, not {list(shape)}."
                )
        return pooled

    def new_projections(self, module: AttentionModule, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the talking-heads parameters to add to one module, by their names in the checkpoint."""
        generator = seeded_generator(self.seed, f"{module.name}:talking_heads")
        new = {}
        for name, shape in module.projections.items():
            # As a new model initialises it (`AttentionVariantMixin.init_projections`).
            std = projection_std(name.rsplit(".", 1)[-1], shape, self.config.talking_heads_init)
            drawn = torch.eye(*shape) if std is None else torch.empty(shape).normal_(0.0, std, generator=generator)
            new[name] = drawn.to(dtype)
        return new


def make_plan(
    config: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    method: ConversionMethod,
    fields: Mapping[str, Any],
    seed: int = 0,
    dtype: torch.dtype | None = None,
    config_file: str | os.PathLike | None = None,
) -> ConversionPlan:
    """Settle what a conversion does and check that it can be done.

    Args:
        config: the source's config.json; without `architectures` the base model's class is taken.
        entries: every tensor of the source with its dtype and shape.
        method: how heads are pooled.
        fields: the configuration fields to change; a value of None is not given.
        seed: of everything random.
        dtype: the dtype to convert floating-point tensors to.
        config_file: where `config` was read, for messages.

    Raises:
        ValueError: for an unsupported architecture, a configuration that makes no model, impossible head counts, or
            attention tensors that are missing, too many, or of other shapes than the configuration says.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    config_class = variant_config_class(config.get("model_type", ""))
    _check_fields(config_class, config, given, dtype)
    architecture = next(iter(config.get("architectures") or ()), None)
    model_class = variant_model_class(architecture or config_class.auto_classes["AutoModel"])
    if model_class.config_class is not config_class:
        raise ValueError(
            f"the source's configuration is wrong: a {architecture} has no `model_type` {config['model_type']!r}."
        )
    wrong = "the source's configuration is wrong" + ("" if config_file is None else f" ({os.fspath(config_file)})")
    with as_value_error(wrong, ValueError, StrictDataclassError):
        source_config = config_class.from_upstream(dict(config))
        if not isinstance(source_config.dtype, torch.dtype | None):
            raise ValueError(f"`dtype` must be the name of a torch dtype; got {config.get('dtype')!r}.")
    with as_value_error(wrong):
        new_config = _converted_config(config_class, source_config, dict(config), given)
        new_config.architectures = [model_class.__name__]
        if dtype is not None:
            new_config.dtype = dtype
        with torch.device("meta"):
            target = model_class(new_config)
    modules = [
        _attention_module(site, path, module, target, source_config, entries)
        for site, path, module in target.named_attentions()
    ]
    _check_nothing_unclaimed(target, modules, entries)
    _check_all_used(model_class.__name__, config_class, given, new_config, modules)
    return ConversionPlan(model_class, source_config, new_config, modules, method, seed, dtype)


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return random numbers that depend on the seed and on the layer's name alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def initializer_std(config: Any) -> float:
    """Return the standard deviation of a new key or value projection: BERT's or BART's field, or T5's rule."""
    for name in ("initializer_range", "init_std"):
        if hasattr(config, name):
            return getattr(config, name)
    return config.initializer_factor * config.d_model**-0.5


def _talking_fields(config_class: type) -> list[str]:
    """Return the fields of talking heads: all of a variant's but those of key/value heads."""
    return [name for name in config_class.variant_fields() if name not in config_class.kv_heads_fields()]


def _check_fields(config_class: type, config: Mapping[str, Any], given: Mapping[str, Any], dtype: Any) -> None:
    kv_fields = config_class.kv_heads_fields()
    for name in given:
        if name not in config_class.variant_fields():
            field = nearest(name, config_class.variant_fields())
            kv_names = ", ".join(f"`{each}`" for each in kv_fields)
            raise ValueError(
                f"`{name}` is not a field of {config['model_type']!r} checkpoints"
                + (f": did you mean `{field}`?" if field else f", whose key/value heads are {kv_names}.")
            )
    if not given and dtype is None:
        raise ValueError(
            f"nothing to convert: give {' or '.join(f'`{name}`' for name in kv_fields)}, or `talking_heads`."
        )
    if config.get("per_layer_config"):
        raise ValueError("a source with a `per_layer_config` (unequal layers) cannot be converted.")
    if config.get("quantization_config"):
        raise ValueError("a quantized source cannot be converted: convert the original, then quantize.")
    talking = [name for name in _talking_fields(config_class) if name in given]
    if config.get("talking_heads") is not None and talking:
        raise ValueError(
            f"the source has talking heads already ({config['talking_heads']!r}); they are kept as they are: leave "
            f"{', '.join(f'`{name}`' for name in talking)} out."
        )


def _converted_config(config_class: type, source_config: Any, raw: dict[str, Any], given: Mapping[str, Any]) -> Any:
    kv_fields = config_class.kv_heads_fields()
    kept = {name: getattr(source_config, name) for name in kv_fields}
    new_config = config_class.from_upstream(raw, **(kept | dict(given)))
    for name in kv_fields:
        try:
            relation(getattr(source_config, name), getattr(new_config, name))
        except ValueError as error:
            raise ValueError(f"`{name}`: {error}") from None
    if new_config.num_value_heads != source_config.num_value_heads:
        raise ValueError(
            f"a conversion keeps the value heads: the source has {source_config.num_value_heads}, the new config "
            f"{new_config.num_value_heads} (`num_value_heads`, or `num_softmax_heads` with P_l alone)."
        )
    has_bias = hasattr(new_config, "relative_attention_num_buckets")
    if has_bias and new_config.num_softmax_heads != source_config.num_softmax_heads:
        raise ValueError(
            f"a conversion keeps the softmax heads of a T5, whose position bias has a column for each: the source has "
            f"{source_config.num_softmax_heads}, the new config {new_config.num_softmax_heads} (`num_softmax_heads`)."
        )
    return new_config


def _attention_module(
    site: AttentionSite,
    path: str,
    module: torch.nn.Module,
    target: torch.nn.Module,
    source_config: Any,
    entries: Mapping[str, TensorEntry],
) -> AttentionModule:
    heads = _head_counts(site, path, source_config, target.config)
    prefix = _stored_prefix(target, f"{path}.{site.query}.weight", entries)
    tensors, shapes = {}, {}
    for role, linear_path in site.projections.items():
        for part, parameter in module.get_submodule(linear_path).named_parameters():
            name, field_name = f"{prefix}{path}.{linear_path}.{part}", f"{role}_{part}"
            expected = list(parameter.shape)
            if role in ("key", "value"):
                expected[0] = getattr(heads, role)[0] * heads.head_dim
            _check_tensor(name, entries, expected)
            tensors[field_name], shapes[field_name] = name, tuple(parameter.shape)
    core = f"{prefix}{path}.{site.core}." if site.core else f"{prefix}{path}."
    parameters = module.get_submodule(site.core).named_parameters(recurse=False)
    projections = {f"{core}{name}": tuple(parameter.shape) for name, parameter in parameters}
    if source_config.talking_heads is not None:
        for name, shape in projections.items():
            _check_tensor(name, entries, list(shape))
        projections = {}
    return AttentionModule(path, site, heads, tensors, shapes, projections)


def _head_counts(site: AttentionSite, path: str, source: Any, target: Any) -> HeadCounts:
    before, after = site.heads(source, path), site.heads(target, path)
    return HeadCounts(after.query, (before.key, after.key), (before.value, after.value), after.output, after.head_dim)


def _check_all_used(
    name: str, config_class: type, given: Mapping[str, Any], config: Any, modules: list[AttentionModule]
) -> None:
    # A field that changes nothing is a mistake: the output would say that it was converted, and be the source.
    used = {module.site.kv_heads_field for module in modules}
    asked = [each for each in config_class.kv_heads_fields() if each in given]
    if useless := [each for each in asked if each not in used]:
        known = " or ".join(f"`{each}`" for each in config_class.kv_heads_fields() if each in used)
        raise ValueError(f"`{useless[0]}` is of attentions that {name} does not have: give {known} alone.")
    if config.talking_heads is None and (useless := [each for each in _talking_fields(config_class) if each in given]):
        raise ValueError(f"`{useless[0]}` is of talking heads: give `talking_heads` as well.")


def _check_nothing_unclaimed(
    target: torch.nn.Module, modules: list[AttentionModule], entries: Mapping[str, TensorEntry]
) -> None:
    # They would stay as they are, and the converted model would silently be without their layers.
    claimed = {name for module in modules for name in module.tensors.values()}
    sites = "|".join(
        rf"{site.module}\.(?:{'|'.join(map(re.escape, site.projections.values()))})" for site in target.attention_sites
    )
    pattern = re.compile(rf"(?:{re.escape(target.base_model_prefix)}\.)?(?:{sites})\.(?:weight|bias)")
    unclaimed = [name for name in entries if name not in claimed and pattern.fullmatch(name)]
    if unclaimed:
        shown = ", ".join(repr(name) for name in unclaimed[:3]) + (", ..." if len(unclaimed) > 3 else "")
        raise ValueError(
            f"the checkpoint holds {len(unclaimed)} attention tensors that {type(target).__name__} with its "
            f"config.json does not have: {shown}; check the number of layers and `architectures`."
        )


def _stored_prefix(target: torch.nn.Module, name: str, entries: Mapping[str, TensorEntry]) -> str:
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
