"""The plan of a conversion: configuration, heads and tensors of each attention, checked before any work."""

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..errors import as_value_error
from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..modeling.fields.field_checks import nearest
from ..modeling.fields.field_table import FIELDS, row_of
from ..modeling.fields.field_texts import FIELD_TEXTS
from ..modeling.fields.given_fields import without_same_size
from ..modeling.fields.kernel_fields import has_kernel
from ..modeling.fields.variant_config import AttnVariantConfigMixin
from ..modeling.mechanisms.mechanism import NONE
from ..modeling.mechanisms.patterns.pattern_table import PATTERNS, pattern_class, pattern_prefixes
from ..modeling.mechanisms.talking_heads import (
    KIND,
    OUTPUT,
    SOFTMAX,
    projection_std,
    talking_group,
    talking_places,
    talks,
)
from ..registration import variant_config_class, variant_model_class
from .attention_modules import AttentionModule, attention_modules, check_nothing_missing, check_other_shapes
from .attention_tensors import FIELDS as POSITION_FIELDS
from .attention_tensors import AttentionTensors, best_latent, on_latent, pool_key_value, repeat_heads, weight_forms
from .checkpoint.tensor_files import TensorEntry
from .methods import ConversionMethod, LayerContext

__all__ = [
    "ConversionPlan",
    "check_not_talking_already",
    "check_talking_kept",
    "check_talking_used",
    "drawn_projections",
    "initializer_std",
    "make_plan",
    "seeded_generator",
    "why_not_calibrated",
    "why_source_is_not_fitted",
]

# What a conversion can give beside heads and latents.
OTHER_CHANGES = (KIND, "attention_pattern", "attention_kernel", "per_layer_values")
# Fields of a source that no conversion can start from.
UNCONVERTIBLE = {
    name: text for row in FIELDS for name in row.names if (text := FIELD_TEXTS[row.name].unconvertible) is not None
}


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

    model_class: type[AttnVariantModelMixin]
    source_config: Any
    config: Any
    modules: list[AttentionModule]
    method: ConversionMethod
    seed: int = 0
    dtype: torch.dtype | None = None

    @property
    def hears(self) -> bool:
        """Whether the model reads audio."""
        return self.model_class.main_input_name == "input_features"

    @cached_property
    def converted_names(self) -> frozenset[str]:
        """The names of the attentions' tensors in the checkpoint, before and after."""
        named = [names for module in self.modules for names in (module.tensors, module.new_tensors)]
        return frozenset(name for names in named for name in names.values())

    @property
    def heads(self) -> dict[str, tuple[Any, Any]]:
        """The head counts and ranks that the two configurations give, {field: (before, after)}.

        A value that differs by layer is the list of them; ranks are left out where there are none.
        """
        configs = (self.source_config, self.config)
        pairs = {
            name: tuple(_by_layer(config, name) for config in configs)
            for name in (*self.config.head_fields(), *self.config.rank_fields())
        }
        return {name: pair for name, pair in pairs.items() if pair != (None, None)}

    @property
    def other_fields(self) -> dict[str, tuple[Any, Any]]:
        """What else the two configurations say differently, {field: (before, after)}: kernels and patterns."""
        of_heads = {*_key_value_fields(self.config), *self.config.talking_fields(), "per_layer_values"}
        names = [name for name in self.config.variant_fields() if name not in of_heads]
        configs = (self.source_config, self.config)
        pairs = {name: tuple(_by_layer(config, name) for config in configs) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def reduced(self) -> list[AttentionModule]:
        """The attention modules that get fewer key/value heads, a smaller latent or a kernel."""
        return [module for module in self.modules if module.reduced]

    def convert(
        self,
        module: AttentionModule,
        tensors: AttentionTensors,
        latents: Mapping[str, torch.Tensor],
        calibrated: AttentionTensors | None = None,
    ) -> AttentionTensors:
        """Return one module's projections with its new heads and latent, in the plan's dtype or those they came in.

        Args:
            module, tensors: the attention and what it has.
            latents: new latents that several attentions share, by their names in the checkpoint.
            calibrated: what a calibration made of it; None = the method looks at weights alone.

        Raises:
            ValueError: if the method returns a tensor of another shape.
        """
        if module.change == "same":
            return tensors
        # What reads a latent is an attention like any other, whose memory is the latent.
        if calibrated is not None:
            new = calibrated
        else:
            new = self.with_new_heads(module, replace(tensors, latent_weight=None))
            if module.heads.rank_relation == "compress":
                forms = weight_forms(new, module.heads)
                shared = latents.get(module.new_latent or "")
                latent = best_latent([forms.key, forms.value], module.heads.new_rank) if shared is None else shared
                new = on_latent(new, latent, forms)
            if module.gets_kernel:
                new = new.with_new_kernel(module.new_kernel, module.heads)
        if tensors.latent_weight is not None:
            new = new.behind(tensors.latent_weight)
            if module.heads.rank[1] is None:
                # A wider dtype, where one is asked for, keeps digits of the product that the source's dtype loses.
                new = new.folded(self.dtype or tensors.key_weight.dtype)
        _check_shapes(self.method, module, new)
        return new

    def with_new_heads(self, module: AttentionModule, tensors: AttentionTensors) -> AttentionTensors:
        """Return the projections with the new head counts, by a method that looks at weights alone."""
        if module.heads.relation == "pool":
            return self.method.pool(tensors, module.heads, self.layer(module))
        # Lossless, whatever the method: there is nothing to choose.
        return pool_key_value(tensors, module.heads, repeat_heads)

    def layer(self, module: AttentionModule, **known: Any) -> LayerContext:
        """Return what a method may know of a layer; `known` are further fields of it."""
        generator = seeded_generator(self.seed, module.name)
        return LayerContext(module.name, module.site.name, generator, initializer_std(self.config), **known)

    def new_projections(self, module: AttentionModule, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the talking-heads parameters to add to one module, by their names in the checkpoint."""
        generator = seeded_generator(self.seed, f"{module.name}:talking_heads")
        init = module.site.heads(self.config, module.name).talking_init
        return {name: tensor.to(dtype) for name, tensor in drawn_projections(module.projections, init, generator)}


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
    given = {name: value for name, value in fields.items() if value is not None and value != {}}
    # The configuration and the tensors have the new positions already.
    changes = any([given.pop(name, None) is not None for name in POSITION_FIELDS]) or dtype is not None
    config_class = variant_config_class(config.get("model_type", ""))
    given = without_same_size(config_class, config, given)
    _check_fields(config_class, config, given, changes)
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
    modules = attention_modules(target, source_config, entries)
    check_other_shapes(target, entries, modules, wrong)
    check_nothing_missing(target, entries, modules, wrong)
    _check_all_used(model_class.__name__, config_class, given, new_config, modules)
    _check_layers_given(given, changes, modules)
    return ConversionPlan(model_class, source_config, new_config, modules, method, seed, dtype)


def why_source_is_not_fitted(config: Any) -> str | None:
    """Return why nothing can be fitted to what a source of this configuration computes; None where something can."""
    if talks(config):
        names = [name for name in config.talking_fields() if name.endswith(KIND)]
        kind = next(value for name in names if (value := getattr(config, name)) not in (None, NONE))
        what = f"the source has talking heads ({kind!r}), whose do not"
        return f"it fits heads whose weights sum to one; {what}"
    if has_kernel(config):
        return "it fits to a softmax's outputs; the source has a kernel in its place"
    patterns = (getattr(config, f"{prefix}attention_pattern") for prefix in pattern_prefixes(config))
    if learned := [each for each in patterns if each is not None and pattern_class(each).learned]:
        return f"it fits to what reads tokens; the source's pattern {learned[0]!r} also reads what it makes of several"
    return None


def why_not_calibrated(plan: ConversionPlan) -> str | None:
    """Return why no text can say how the plan's source is to be pooled; None where it can."""
    if (reason := why_source_is_not_fitted(plan.source_config)) is not None:
        return reason
    is_encoder_decoder = getattr(plan.config, "is_encoder_decoder", False)
    if not is_encoder_decoder and any(module.site.is_cross_attention for module in plan.reduced):
        return (
            "it cannot reach the cross-attention of a decoder alone: there is no text for the encoder that this reads"
        )
    return None


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


def _by_layer(config: Any, name: str) -> Any:
    """Return a field's value, or the list of those of the layers where they differ."""
    return (config.per_layer_values or {}).get(name) or getattr(config, name, None)


def _key_value_fields(config_class: type[AttnVariantConfigMixin]) -> list[str]:
    """Return the fields that say what keys and values are: their heads, and the ranks of latents."""
    return [*config_class.kv_heads_fields(), *config_class.rank_fields()]


def _check_shapes(method: ConversionMethod, module: AttentionModule, tensors: AttentionTensors) -> None:
    for part, shape in module.shapes.items():
        tensor = getattr(tensors, part, None)
        got = None if tensor is None else list(tensor.shape)
        if got != list(shape):
            raise ValueError(
                f"method {method.name!r} gave {part} of shape {got} for {module.name}, not {list(shape)}."
            )


def _check_fields(
    config_class: type[AttnVariantConfigMixin], config: Mapping[str, Any], given: Mapping[str, Any], changes: bool
) -> None:
    kv_fields = config_class.kv_heads_fields()
    for name in given:
        if name not in config_class.variant_fields():
            field = nearest(name, config_class.variant_fields())
            kv_names = ", ".join(f"`{each}`" for each in kv_fields)
            raise ValueError(
                f"`{name}` is not a field of {config['model_type']!r} checkpoints"
                + (f": did you mean `{field}`?" if field else f", whose key/value heads are {kv_names}.")
            )
        if name in config_class.from_scratch_fields():
            raise ValueError(f"`{name}` is of models that are trained from scratch: no conversion gives it.")
    if not given and not changes:
        other_names = [name for field in OTHER_CHANGES for name in row_of(field)[1].names]
        other_names = [name for name in other_names if name in config_class.variant_fields()]
        names = ", ".join(f"`{name}`" for name in (*_key_value_fields(config_class), *other_names))
        raise ValueError(f"nothing to convert: give one of {names} (each is a flag of the command, too).")
    asked = [each.get(f"{prefix}attention_pattern") for each in (config, given) for prefix in ("", "encoder_")]
    if learned := [pattern for pattern in asked if pattern in PATTERNS and pattern_class(pattern).learned]:
        raise ValueError(
            f"`attention_pattern` {learned[0]!r} has parameters that no conversion makes: load the checkpoint with "
            "it (`from_pretrained`), and train."
        )
    for name, what in UNCONVERTIBLE.items():
        if config.get(name) not in (None, NONE):
            raise ValueError(f"a checkpoint with {what} (`{name}` is {config[name]!r}) cannot be converted.")
    if config.get("quantization_config"):
        raise ValueError("a quantized source cannot be converted: convert the original, then quantize.")
    check_not_talking_already(config_class, config, given)


def _converted_config(
    config_class: type[AttnVariantConfigMixin], source_config: Any, raw: dict[str, Any], given: Mapping[str, Any]
) -> Any:
    # Numbers of heads that nobody asks for stay, unless layers differ in them; so do lists by layer.
    asked = given.get("per_layer_values")
    asked = asked if isinstance(asked, Mapping) else {}
    lists = source_config.per_layer_values or {}
    kv_heads = {
        name: getattr(source_config, name) for name in config_class.kv_heads_fields() if name not in {*lists, *asked}
    }
    if asked:
        lists = {name: values for name, values in lists.items() if name not in given}
        given = {**given, "per_layer_values": {**lists, **asked}}
    new_config = config_class.from_upstream(raw, **(kv_heads | dict(given)))
    check_talking_kept(source_config, new_config, given)
    for name in config_class.kernel_fields():
        old, new = _by_layer(source_config, name), _by_layer(new_config, name)
        if old != new and has_kernel(source_config):
            raise ValueError(
                f"the source has a kernel in a softmax's place, which a conversion keeps: `{name}` is {old!r}, the "
                f"new config asks for {new!r}."
            )
    return new_config


def _check_layers_given(given: Mapping[str, Any], changes: bool, modules: list[AttentionModule]) -> None:
    # Lists without a value expand what the source has shared; where it has nothing shared, they ask for nothing.
    if changes or given.keys() != {"per_layer_values"}:
        return
    lists = given["per_layer_values"].values()
    if all(value is None for values in lists for value in values) and not any(
        module.change != "same" for module in modules
    ):
        raise ValueError(
            f"nothing to convert: `per_layer_values` gives no layer a value; got {given['per_layer_values']}."
        )


def _check_all_used(
    name: str,
    config_class: type[AttnVariantConfigMixin],
    given: Mapping[str, Any],
    config: Any,
    modules: list[AttentionModule],
) -> None:
    # A field that changes nothing is a mistake: the output would say that it was converted, and be the source.
    used = {field for module in modules for field in (module.site.kv_heads_field, module.site.rank_field)}
    for fields in (config_class.kv_heads_fields(), config_class.rank_fields()):
        if useless := [each for each in fields if each in given and each not in used]:
            known = " or ".join(f"`{each}`" for each in fields if each in used)
            raise ValueError(f"`{useless[0]}` is of attentions that {name} does not have: give {known} alone.")
    for field in config_class.pattern_fields():
        kind = ("encoder_" if field.startswith("encoder_") else "") + "attention_pattern"
        if given.get(field) is not None and getattr(config, kind) is None and not has_kernel(config):
            raise ValueError(f"nothing to convert: `{field}` has no effect without `{kind}`.")
    places = {module.site.place_prefix for module in modules}
    check_talking_used(name, given, config, places)


def check_not_talking_already(config_class: Any, config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Check that talking heads are not asked for where the source has them already, the same in all places.

    Args:
        config_class: the source's.
        config: its config.json.
        given: the fields to change.

    Raises:
        ValueError: if there are any.
    """
    fields = config_class.talking_fields()
    asked = [name for name in fields if name in given]
    is_by_place = any(config.get(name) is not None for name in fields if row_of(name)[0])
    if config.get(KIND) is not None and asked and not is_by_place:
        raise _talking_already(config[KIND], asked)


def check_talking_kept(source: Any, new: Any, given: Mapping[str, Any]) -> None:
    """Check that the source's talking heads stay as they are, and that new ones change no tensor of the source.

    Raises:
        ValueError: if fields are given for heads that talk already, or heads of values, or of a T5's softmax, change.
    """
    asked = [name for name in source.talking_fields() if name in {*given, *(given.get("per_layer_values") or {})}]
    pairs = {
        (prefix, layer): (source.talking_heads_of(prefix, layer), new.talking_heads_of(prefix, layer))
        for prefix in talking_places(source)
        for layer in range(source.layer_count(prefix + KIND))
    }
    changed = {place for place, (old, now) in pairs.items() if old != now}
    looked_at = [old.kind for place, (old, _) in pairs.items() if place in changed or not changed]
    kinds = [kind for kind in looked_at if kind is not None]
    if asked and kinds:
        raise _talking_already(kinds[0], asked)
    has_bias = hasattr(new, "relative_attention_num_buckets")
    for (prefix, _), (old, now) in pairs.items():
        if now.output != old.output:
            raise ValueError(
                f"a conversion keeps the value heads: the source has {old.output}, the new config "
                f"{now.output} (`{_said(new, prefix, OUTPUT)}`, or "
                f"`{_said(new, prefix, SOFTMAX)}` with P_l alone)."
            )
        if has_bias and prefix != "cross_" and now.softmax != old.softmax:
            raise ValueError(
                f"a conversion keeps the softmax heads of a T5, whose position bias has a column for each: the source "
                f"has {old.softmax}, the new config {now.softmax} (`{_said(new, prefix, SOFTMAX)}`)."
            )


def _talking_already(kind: str, asked: list[str]) -> ValueError:
    names = ", ".join(f"`{name}`" for name in asked)
    return ValueError(
        f"the source has talking heads already ({kind!r}); they are kept as they are: leave {names} out."
    )


def _said(config: Any, prefix: str, name: str) -> str:
    """Return the field that gives a place its value: with the prefix of the place, or without one."""
    return talking_group(config, prefix) + name


def check_talking_used(name: str, given: Mapping[str, Any], config: Any, places: Collection[str]) -> None:
    """Check that each field of talking heads that is given changes an attention.

    Args:
        name: of the model's class.
        given: the fields to change.
        config: the converted model's.
        places: the prefixes of the attentions that it has.

    Raises:
        ValueError: for a field of attentions that it has none of, or without `talking_heads`.
    """
    for field in (field for field in config.talking_fields() if field in given):
        prefix, _ = row_of(field)
        if prefix and prefix not in places:
            raise ValueError(f"`{field}` is of attentions that {name} does not have: leave it out.")
        if field.endswith(KIND):
            if not talks(config):
                raise ValueError(f"nothing to convert: `{field}` is {given[field]!r}, and no heads talk.")
        elif not talks(config, prefix or None):
            raise ValueError(f"`{field}` is of talking heads: give `{prefix}talking_heads` as well.")


def drawn_projections(
    shapes: Mapping[str, tuple[int, ...]], initialization: str, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield new talking-heads parameters, as a new model initialises them (`AttentionVariantMixin.init_projections`).

    Args:
        shapes: of each, by its name in the checkpoint.
        initialization: the attention's `talking_heads_init`.
        generator: draws them.
    """
    for name, shape in shapes.items():
        std = projection_std(name.rsplit(".", 1)[-1], shape, initialization)
        yield name, torch.eye(*shape) if std is None else torch.empty(shape).normal_(0.0, std, generator=generator)
