"""Plans a conversion: the new configuration, and the heads and tensors of each attention module.

    config.json ──────────► source_config ──┐
        │                                   ├──► heads and ranks before and after ──┐
        └─ changed fields ──► config ───────┘                                       │
                                │                                                   ▼
                                └──► model on the meta device ──► AttentionModules
                                                                                    ▲
    names and shapes of the checkpoint's tensors ───────────────────────────────────┘

`ConversionPlan.convert` then computes the tensors of each module: first new heads, then a latent, then a kernel.
"""

import copy
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..errors import convert_to_value_error
from ..modeling.attention.model_mixin import AttnVariantModelMixin
from ..modeling.fields.composition import get_requested_extensions
from ..modeling.fields.field_checks import find_closest_match
from ..modeling.fields.field_table import FIELD_TEXTS, VARIANT_FIELDS
from ..modeling.fields.mechanism_fields import has_kernel
from ..modeling.fields.saving_and_loading import drop_default_value_head_dim
from ..modeling.fields.variant_config import AttnVariantConfigMixin
from ..modeling.mechanisms.mechanism import NONE, PREFIXES
from ..modeling.mechanisms.patterns.pattern_table import PATTERNS, get_pattern_class, get_pattern_prefixes
from ..modeling.mechanisms.talking_heads import (
    KIND,
    OUTPUT,
    SOFTMAX,
    get_settings_prefix,
    get_talking_heads_init_std,
    get_talking_heads_prefixes,
    has_talking_heads,
)
from ..registration import get_variant_config_class, get_variant_model_class, is_native
from .attention_modules import (
    AttentionModule,
    build_attention_modules,
    check_no_missing_tensors,
    check_other_tensor_shapes,
)
from .attention_tensors import (
    AttentionTensors,
    ConversionMethod,
    LayerContext,
    compute_error_forms_from_weights,
    find_best_latent,
    pool_key_value,
    project_onto_latent,
    repeat_heads,
)
from .calibration_settings import Calibration
from .checkpoint.tensor_files import POSITION_FIELDS, TensorEntry


def collect_field_texts(kind: str) -> dict[str, str]:
    """Return {field: text} for all variant fields that have a text of this kind (see `FieldDescription`)."""
    texts = {name: getattr(FIELD_TEXTS[row.name], kind) for row in VARIANT_FIELDS for name in row.names}
    return {name: text for name, text in texts.items() if text is not None}


# Fields of the original model that must not be set, because the conversion does not support their features.
UNCONVERTIBLE = collect_field_texts("unconvertible")
# The arguments of `convert` that are not fields, for suggestions in errors.
CONVERT_ARGUMENTS = (
    *("method", "output_dir", "calibration", "kv_cache_bytes", "keep_matching_layers", "strict", "dtype", "seed"),
    *("copy", "position_extension", "allow_pickle", "revision", "token"),
)


@dataclass(frozen=True)
class ConversionPlan:
    """The checked plan of a conversion.

    Args:
        model_class: Class of the converted model.
        source_config: The variant configuration of the original model.
        config: The configuration of the converted model.
        modules: All attention modules.
        method: The method that merges heads.
        seed: Random seed.
        dtype: The dtype of floating-point tensors in the converted model. If None, their dtypes do not change.
    """

    model_class: type[AttnVariantModelMixin]
    source_config: Any
    config: Any
    modules: list[AttentionModule]
    method: ConversionMethod
    seed: int = 0
    dtype: torch.dtype | None = None

    @property
    def reads_audio(self) -> bool:
        """True if the input of the model is audio."""
        return self.model_class.main_input_name == "input_features"

    @cached_property
    def converted_tensor_names(self) -> frozenset[str]:
        """The names of all attention tensors in the checkpoint, before and after the conversion."""
        name_maps = [names for module in self.modules for names in (module.tensors, module.new_tensors)]
        return frozenset(name for names in name_maps for name in names.values())

    @property
    def heads(self) -> dict[str, tuple[Any, Any]]:
        """The head counts and ranks before and after the conversion, {field: (before, after)}.

        The value is a list if it differs between layers. Ranks are omitted if there are no latents.
        """
        pairs = self._get_changed_values([*self.config.get_head_count_fields(), *self.config.get_rank_fields()])
        return {name: pair for name, pair in pairs.items() if pair != (None, None)}

    @property
    def other_fields(self) -> dict[str, tuple[Any, Any]]:
        """The other fields that change, such as kernels and patterns, {field: (before, after)}."""
        config = self.config
        heads = (*config.get_kv_heads_fields(), *config.get_rank_fields(), *config.get_talking_heads_fields())
        excluded = (*heads, "per_layer_values")
        pairs = self._get_changed_values([name for name in config.get_variant_fields() if name not in excluded])
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def _get_changed_values(self, names: Iterable[str]) -> dict[str, tuple[Any, Any]]:
        """Return the values of the given fields in both configurations, {field: (before, after)}."""
        return {
            name: (get_field_value(self.source_config, name), get_field_value(self.config, name)) for name in names
        }

    @property
    def reduced_modules(self) -> list[AttentionModule]:
        """The attention modules that get fewer key/value heads, a smaller latent or a kernel."""
        return [module for module in self.modules if module.is_reduced]

    @property
    def is_unchanged(self) -> bool:
        """True if all fields of the converted model have the same values as in the original model."""
        before, after = (config.to_dict() | {"architectures": None} for config in (self.source_config, self.config))
        return before == after

    def convert(
        self,
        module: AttentionModule,
        tensors: AttentionTensors,
        latents: Mapping[str, torch.Tensor],
        calibrated: AttentionTensors | None = None,
    ) -> AttentionTensors:
        """Convert a module's projections to the new heads, latent and kernel.

        Args:
            module: The attention module.
            tensors: The module's original projections.
            latents: New latents that several modules share, by their names in the checkpoint.
            calibrated: The projections computed by calibration. If None, the method only uses the weights.
        """
        if module.change == "same":
            return tensors
        # To a method, an attention module with a latent is a module without one whose key/value input is the latent.
        if calibrated is not None:
            new = calibrated
        else:
            new = self.with_new_heads(module, replace(tensors, latent_weight=None))
            if module.heads.latent_change == "compress":
                error_forms = compute_error_forms_from_weights(new, module.heads)
                latent = latents.get(module.shared_latent_name or "")
                if latent is None:
                    latent = find_best_latent([error_forms.key, error_forms.value], module.heads.rank[1])
                new = project_onto_latent(new, latent, error_forms)
            if module.adds_kernel:
                new = new.with_new_kernel(module.kernel[1], module.heads)
        if tensors.latent_weight is not None:
            new = new.with_input_projection(tensors.latent_weight)
            if module.heads.rank[1] is None:
                # If the new dtype is wider, the product is more precise than in the dtype of the original tensors.
                new = new.fold_latent(self.dtype or tensors.key_weight.dtype)
        return new

    def with_new_heads(self, module: AttentionModule, tensors: AttentionTensors) -> AttentionTensors:
        """Return projections with the new head counts, which are computed from the weights only."""
        if module.heads.kv_head_change == "pool":
            return self.method.pool(tensors, module.heads, self.make_layer_context(module))
        # Repeating heads is lossless, so all methods give the same result.
        return pool_key_value(tensors, module.heads, repeat_heads)

    def make_layer_context(self, module: AttentionModule, **context: Any) -> LayerContext:
        """Return the `LayerContext` for a module, including the additional fields in `context`."""
        generator = make_seeded_generator(self.seed, module.name)
        return LayerContext(module.name, module.site.name, generator, get_initializer_std(self.config), **context)

    def initialize_new_parameters(self, module: AttentionModule, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Initialize the talking-heads parameters and extensions of a module, {name in the checkpoint: tensor}."""
        generator = make_seeded_generator(self.seed, f"{module.name}:talking_heads")
        init = module.site.get_heads(self.config, module.name).talking_init
        tensors = {}
        for name, shape in module.projections.items():  # as in `AttentionVariantMixin.init_variant_parameters`
            std = get_talking_heads_init_std(name.rsplit(".", 1)[-1], shape, init)
            new = torch.eye(*shape) if std is None else torch.empty(shape).normal_(0.0, std, generator=generator)
            tensors[name] = new.to(dtype)
        for prefix, extension in module.extensions.items():
            new_extension = copy.deepcopy(extension).to_empty(device="cpu")
            new_extension.init_variant_parameters()
            tensors |= {prefix + name: tensor.detach().to(dtype) for name, tensor in new_extension.named_parameters()}
        return tensors


def make_plan(
    config: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    method: ConversionMethod,
    fields: Mapping[str, Any],
    seed: int = 0,
    dtype: torch.dtype | None = None,
    config_file: str | os.PathLike | None = None,
) -> ConversionPlan:
    """Plan a conversion after checking that it is possible.

    Args:
        config: The original model's config.json. If it has no `architectures`, the base model is converted.
        entries: The dtype and shape of every tensor in the original model.
        method: The method that merges heads.
        fields: The configuration fields to change. Fields set to None do not change.
        seed: Random seed.
        dtype: The dtype of floating-point tensors in the converted model. If None, their dtypes do not change.
        config_file: Path of the file that contains `config`, for error messages.

    Raises:
        ValueError: if the architecture is not supported, if the configuration is invalid, if the head counts cannot be
            converted, or if attention tensors are missing, are unexpected, or do not have the shapes that the
            configuration implies.
    """
    changes = {name: value for name, value in fields.items() if value is not None and value != {}}
    # `extend_positions` has already changed the number of positions in the configuration and the tensors.
    is_changed = dtype is not None or POSITION_FIELDS[0] in changes
    changes = {name: value for name, value in changes.items() if name not in POSITION_FIELDS}
    config_class = get_variant_config_class(config.get("model_type", ""))
    changes = drop_default_value_head_dim(config_class, config, changes)
    _check_fields(config_class, config, changes, is_changed)
    architecture = next(iter(config.get("architectures") or ()), None)
    model_class = get_variant_model_class(architecture or config_class.auto_classes["AutoModel"])
    error_message = "The original model's configuration is invalid"
    if model_class.config_class is not config_class:
        raise ValueError(
            f"{error_message}: `model_type` {config['model_type']!r} does not match {architecture}. Correct "
            "config.json."
        )
    error_message += "" if config_file is None else f" ({os.fspath(config_file)})"
    with convert_to_value_error(error_message, ValueError, StrictDataclassError):
        source_config = config_class.from_upstream(dict(config))
        if not isinstance(source_config.dtype, torch.dtype | None):
            raise ValueError(f"`dtype` must be the name of a torch dtype, got {config.get('dtype')!r}.")
    with convert_to_value_error(error_message):
        new_config = _make_new_config(config_class, source_config, dict(config), changes)
        new_config.architectures = [model_class.__name__]
        if dtype is not None:
            new_config.dtype = dtype
        with torch.device("meta"):
            target = model_class(new_config)
    modules = build_attention_modules(target, source_config, entries)
    check_other_tensor_shapes(target, entries, modules, error_message)
    check_no_missing_tensors(target, entries, modules, error_message)
    _check_all_fields_used(model_class.__name__, config_class, changes, modules)
    return ConversionPlan(model_class, source_config, new_config, modules, method, seed, dtype)


def get_unsupported_calibration_reason(config: Any) -> str | None:
    """Return the reason why a model with this configuration cannot be calibrated, or None if it can."""
    if has_talking_heads(config):
        names = [name for name in config.get_talking_heads_fields() if name.endswith(KIND)]
        kind = next(value for name in names if (value := getattr(config, name)) not in (None, NONE))
        return (
            "it requires attention weights that sum to one, which the original model's talking heads "
            f"({kind!r}) do not guarantee"
        )
    if has_kernel(config):
        return "it requires softmax attention, but the original model uses a kernel"
    if fields := [field for prefix in PREFIXES for field, _ in get_requested_extensions(config, prefix).values()]:
        return f"it does not support `{fields[0]}`, which the original model uses"
    patterns = (getattr(config, f"{prefix}attention_pattern") for prefix in get_pattern_prefixes(config))
    if learned := [pattern for pattern in patterns if pattern is not None and get_pattern_class(pattern).learned]:
        return (
            f"it requires attention between tokens, but the original model's pattern {learned[0]!r} also uses "
            "learned summaries of several tokens"
        )
    return None


def get_calibration_blocker(plan: ConversionPlan) -> str | None:
    """Return the reason why calibration is not possible for a plan, or None if it is possible."""
    if (reason := get_unsupported_calibration_reason(plan.source_config)) is not None:
        return reason
    is_encoder_decoder = getattr(plan.config, "is_encoder_decoder", False)
    if not is_encoder_decoder and any(module.site.is_cross_attention for module in plan.reduced_modules):
        return "it cannot fit a decoder-only model's cross-attention without encoder outputs"
    return None


def make_seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a random number generator that depends only on the seed and the given name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def get_initializer_std(config: Any) -> float:
    """Return the standard deviation with which new key and value projections are initialized.

    BERT and BART define it in a configuration field, and T5 computes it from two fields.
    """
    std = getattr(config, "initializer_range", getattr(config, "init_std", None))
    return config.initializer_factor * config.d_model**-0.5 if std is None else std


def get_field_value(config: Any, name: str) -> Any:
    """Return a field's value, or the list of its values if they differ between layers."""
    return (config.per_layer_values or {}).get(name) or getattr(config, name, None)


def _check_fields(
    config_class: type[AttnVariantConfigMixin], config: Mapping[str, Any], changes: Mapping[str, Any], is_changed: bool
) -> None:
    """Check that the model changes, and that the conversion supports the original model and all changes.

    Args:
        config_class: The configuration class.
        config: The contents of the original config.json.
        changes: The fields to change.
        is_changed: Whether the dtype or the number of positions changes.
    """
    known_names = config_class.get_variant_fields()
    for name in changes:
        if name not in known_names:
            if is_native(config["model_type"]):
                config_class.check_field_names([name])
            advice = _suggest_argument(name, config_class)
            raise ValueError(f"`{name}` is not a field of {config['model_type']!r} models. {advice}")
        if name in config_class.get_from_scratch_fields():
            raise ValueError(f"`{name}` is only supported for models that are trained from scratch. Remove it.")
    if not changes and not is_changed:
        raise ValueError(
            f"There is nothing to convert. Set a field such as `{config_class.get_kv_heads_fields()[0]}` (or the flag "
            "of the same name)."
        )
    pattern_fields = ("attention_pattern", "encoder_attention_pattern")
    patterns = [values.get(field) for values in (config, changes) for field in pattern_fields]
    if learned := [pattern for pattern in patterns if pattern in PATTERNS and get_pattern_class(pattern).learned]:
        raise ValueError(
            f"`attention_pattern` {learned[0]!r} has parameters that cannot be computed by a conversion. Load the "
            "checkpoint with this pattern (`from_pretrained`) and train the model."
        )
    for name, feature in UNCONVERTIBLE.items():
        if config.get(name) not in (None, NONE):
            raise ValueError(
                f"`{name}` in the original model must not be {config[name]!r} because a checkpoint with {feature} "
                "cannot be converted."
            )
    if config.get("quantization_config"):
        raise ValueError(
            "A checkpoint with `quantization_config` cannot be converted. Convert the original model, then quantize."
        )


def _suggest_argument(name: str, config_class: type[AttnVariantConfigMixin]) -> str:
    """Return advice on an argument of `convert` that is not a field: the most similar field or argument."""
    if name in Calibration.__dataclass_fields__:
        return f"Set it in `Calibration(..., {name}=...)`."
    groups = config_class.get_variant_fields(), CONVERT_ARGUMENTS
    matches = filter(None, (find_closest_match(name, names) for names in groups))
    return f"Did you mean `{next(matches, config_class.get_kv_heads_fields()[0])}`?"


def _make_new_config(
    config_class: type[AttnVariantConfigMixin], source_config: Any, raw: dict[str, Any], changes: Mapping[str, Any]
) -> Any:
    """Return the configuration of the converted model.

    Args:
        config_class: The configuration class.
        source_config: The variant configuration of the original model.
        raw: The contents of the original config.json.
        changes: The fields to change.
    """
    # Head counts and per-layer lists that `changes` does not contain stay the same. A head count is left out if it
    # gets a per-layer list.
    new_lists, lists = changes.get("per_layer_values") or {}, source_config.per_layer_values or {}
    kv_heads = {
        name: getattr(source_config, name)
        for name in config_class.get_kv_heads_fields()
        if name not in {*lists, *new_lists}
    }
    if new_lists:
        lists = {name: values for name, values in lists.items() if name not in changes}
        changes = {**changes, "per_layer_values": {**lists, **new_lists}}
    new_config = config_class.from_upstream(raw, **(kv_heads | dict(changes)))
    check_talking_heads_unchanged(source_config, new_config, changes)
    _check_extensions_unchanged(source_config, new_config)
    for name in config_class.get_kernel_fields():
        old, new = get_field_value(source_config, name), get_field_value(new_config, name)
        if old != new and has_kernel(source_config):
            raise ValueError(
                f"`{name}` must stay {old!r} because the original model already has a kernel, got {new!r}. Remove it."
            )
    return new_config


def _check_extensions_unchanged(source: Any, new: Any) -> None:
    """Check that existing attention extensions stay unchanged, because their parameters are copied.

    Raises:
        ValueError: if an extension would be changed or removed.
    """
    for prefix in PREFIXES:
        extensions = get_requested_extensions(new, prefix)
        for extension, (field, old) in get_requested_extensions(source, prefix).items():
            value = extensions.get(extension, (field, None))[1]
            if value != old:
                raise ValueError(f"`{field}` must stay {old!r} as in the original model, got {value!r}. Remove it.")


def _check_all_fields_used(
    name: str, config_class: type[AttnVariantConfigMixin], changes: Mapping[str, Any], modules: list[AttentionModule]
) -> None:
    """Check that every changed head count or rank applies to an attention module in the model."""
    used = {field for module in modules for field in (module.site.kv_heads_field, module.site.rank_field)}
    for fields in (config_class.get_kv_heads_fields(), config_class.get_rank_fields()):
        if unused := [field for field in fields if field in changes and field not in used]:
            used_names = " or ".join(f"`{field}`" for field in fields if field in used)
            raise ValueError(
                f"`{unused[0]}` has no effect because {name} has no such attention modules. Only set {used_names}."
            )


def check_talking_heads_unchanged(source: Any, new: Any, changes: Mapping[str, Any]) -> None:
    """Check that existing talking heads stay unchanged, and that new ones do not require changes to other tensors.

    Args:
        source, new: The configurations before and after the conversion.
        changes: The fields to change.

    Raises:
        ValueError: if existing talking heads, the number of value heads, or the number of softmax heads in a T5 model
            would change.
    """
    new_lists = changes.get("per_layer_values") or {}
    talking_changes = [name for name in source.get_talking_heads_fields() if name in {*changes, *new_lists}]
    pairs = {
        (prefix, layer): (source.get_talking_heads(prefix, layer), new.get_talking_heads(prefix, layer))
        for prefix in get_talking_heads_prefixes(source)
        for layer in range(source.get_num_layers(prefix + KIND))
    }
    changed = {place for place, (before, after) in pairs.items() if before != after}
    kinds = [before.kind for place, (before, _) in pairs.items() if place in changed or not changed]
    kinds = [kind for kind in kinds if kind is not None]
    if talking_changes and kinds:
        raise ValueError(
            f"The original model already has talking heads ({kinds[0]!r}), which cannot be changed. Remove "
            f"`{talking_changes[0]}`."
        )
    has_bias = hasattr(new, "relative_attention_num_buckets")
    for (prefix, _), (before, after) in pairs.items():
        softmax_field = get_settings_prefix(new, prefix) + SOFTMAX
        if after.output != before.output:
            raise ValueError(
                f"`{get_settings_prefix(new, prefix)}{OUTPUT}` must stay {before.output}, the number of value heads "
                f"in the original model, got {after.output}. If there is only P_l, `{softmax_field}` must be the same."
            )
        if has_bias and prefix != "cross_" and after.softmax != before.softmax:
            raise ValueError(
                f"`{softmax_field}` must stay {before.softmax} in a T5 model because its position bias has one column "
                f"per softmax head, got {after.softmax}. Remove it."
            )
