"""Saves configurations together with their modeling code, and checks the fields with which checkpoints are loaded.

Errors are raised if a field is misspelled, if a Transformers model class would ignore a field, or if a checkpoint must
be converted before it can be loaded with the requested fields.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedModel
from transformers.utils import logging

from ..mechanisms.kernels.kernel_table import get_kernel_class, get_kernel_names
from ..mechanisms.sinusoidal_positions import SinusoidalPositions
from ..mechanisms.talking_heads import (
    DYNAMIC,
    KIND,
    OUTPUT,
    SOFTMAX,
    TalkingHeadsSettings,
    get_talking_heads_prefixes,
    has_talking_heads,
    supports_cache,
)
from ..remote_code import CONFIGURATION_MODULE, is_package_class, write_code
from .composition import UNUSED_VALUES, get_registered_mechanisms, get_used_mechanisms
from .field_checks import find_closest_match, remove_field_prefix
from .field_table import look_up_field
from .layer_values import drop_replaced_layer_values
from .mechanism_fields import KernelConfigMixin, has_kernel

__all__ = [
    "CodeSavingConfigMixin",
    "check_transformers_model_class",
    "describe_misspelled_field",
    "drop_default_value_head_dim",
    "drop_replaced_values",
    "find_added_talking_heads",
    "find_model_class_under_construction",
    "get_effective_fields",
    "warn_about_replaced_positions",
]


def describe_misspelled_field(config_class: Any, name: str) -> str | None:
    """Return an error message if a name is not a field but resembles a variant field.

    Transformers accepts any name, so a misspelled field would silently have no effect.

    Args:
        config_class: the class of the configuration.
        name: a keyword argument.

    Returns:
        A message with the most similar field, or None if the name is a field or is not similar to any field.
    """
    known = config_class.get_variant_fields()
    if hasattr(config_class, name) or {name, remove_field_prefix(name)} & _get_transformers_field_names():
        return None
    # A name may also have the prefix of a place that this architecture does not have.
    prefixed = {prefix + field: field for prefix in ("encoder_", "decoder_", "cross_") for field in known}
    closest_name = find_closest_match(name, known) or prefixed.get(find_closest_match(name, tuple(prefixed)) or "")
    return (
        None
        if closest_name is None
        else f"`{name}` is not a field of {config_class.__name__}. Did you mean `{closest_name}`?"
    )


def _get_transformers_field_names() -> set[str]:
    """Return the names of all fields in the Transformers configurations of all architectures."""
    classes, names = [KernelConfigMixin], {"scale_decoder_outputs"}  # T5 saves this attribute, which is not a field
    while classes:
        config_class = classes.pop()
        classes += config_class.__subclasses__()
        names |= {field.name for field in fields(config_class) if "variant" not in field.metadata}
        names |= {*getattr(config_class, "attribute_map", ())}
    return names


def drop_replaced_values(values: dict[str, Any], new_fields: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration without those that new fields replace."""
    values = drop_replaced_layer_values(values, new_fields)
    # `use_cache=False` was saved because the old dynamic projections do not support a cache. With new projections, the
    # Transformers default applies again.
    named = {*new_fields, *(new_fields.get("per_layer_values") or ())}
    if DYNAMIC not in named or supports_cache(values.get(DYNAMIC)):
        return values
    return {name: value for name, value in values.items() if name != "use_cache"}


def drop_default_value_head_dim(
    config_class: Any, values: Mapping[str, Any], new_fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the new fields, but omit `value_head_dim` if it is the same as the size of the query heads.

    Args:
        config_class: the class of the variant configuration.
        values: the values of a variant configuration or a Transformers configuration.
        new_fields: the new fields for these values.

    Raises:
        ValueError: if the size is invalid.
    """
    if "value_head_dim" not in new_fields:
        return new_fields
    config = config_class.from_upstream(dict(values), value_head_dim=new_fields["value_head_dim"])
    is_same = config.value_head_dim is None
    return {name: value for name, value in new_fields.items() if not (is_same and name == "value_head_dim")}


# At runtime, this mixin is combined with a Transformers class. Only type checkers see it as a configuration.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig as _Saved
else:
    _Saved = object


class CodeSavingConfigMixin(_Saved):
    """A mixin for configurations that are saved together with the modeling code.

    Class attributes:
        modeling_file: the name of the file with the architecture's models.
        auto_classes: the name of the model class in this file for each Auto class.
    """

    modeling_file: ClassVar[str] = ""
    auto_classes: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, *args: Any, **kwargs: Any) -> None:
        super().__init_subclass__(*args, **kwargs)
        if "modeling_file" in vars(cls):
            cls.register_for_auto_class()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Register the class as Transformers does.

        Classes of this package are skipped, because their code is saved separately.
        """
        if not is_package_class(cls):
            super().register_for_auto_class(auto_class)

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Save the configuration as in Transformers, together with the code that `auto_map` refers to.

        The tokenizer class is omitted, because tokenizer_config.json contains it. Otherwise, if no tokenizer was
        saved, `AutoTokenizer` would silently create a tokenizer of this class with an empty vocabulary.
        """
        names = ("auto_map", "tokenizer_class")
        attributes: dict[str, Any] = {name: self.__dict__[name] for name in names if name in self.__dict__}
        # Newly saved files are not in the repository from which the code was loaded.
        auto_map = attributes["auto_map"].items()
        local_names = {key: name.split("--")[-1] if isinstance(name, str) else name for key, name in auto_map}
        self.auto_map = self.build_auto_map() | local_names
        self.__dict__.pop("tokenizer_class", None)
        try:
            super().save_pretrained(save_directory)
            used, plugins = get_used_mechanisms(self), get_registered_mechanisms(self)
            write_code(save_directory, type(self), self.modeling_file, used, plugins)
        finally:
            self.__dict__.update(attributes)
        if push_to_hub:  # the Transformers method saves again and uploads all files in the folder
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    @classmethod
    def build_auto_map(cls) -> dict[str, str]:
        """Return the `auto_map` of saved configurations, which maps Auto classes to classes in this code."""
        auto_map = {"AutoConfig": f"{CONFIGURATION_MODULE}.{cls.__name__}"}
        return auto_map | {auto: f"{cls.modeling_file}.{name}" for auto, name in cls.auto_classes.items()}


TRANSFORMERS_MODELS = "transformers.models."


def find_model_class_under_construction() -> type | None:
    """Return the Transformers model class whose constructor is running, or None if this package is building the model.

    The result is also None for classes that only contain other models, because these models have their own
    constructors.

    The call stack is searched, because Transformers does not pass the model class to the configuration. A module
    variable would not work, because with remote code, a configuration and its model may be loaded from two copies of
    this module.
    """
    built: list[type] = []
    frame = inspect.currentframe()
    while frame is not None:
        model = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(model, PreTrainedModel):
            built.append(type(model))
        frame = frame.f_back
    # Models in this package replace the attention modules of the models that they build.
    if not built or any(hasattr(cls, "attention_sites") for cls in built):
        return None
    makes_layers = any(
        base.__module__.startswith(TRANSFORMERS_MODELS) and "__init__" in vars(base) for base in built[0].__mro__
    )
    return built[0] if makes_layers else None


def check_transformers_model_class(config: Any, model_class: type) -> None:
    """Check that a Transformers model class would compute the same outputs as the variant with this configuration.

    Raises:
        ValueError: if a variant field would change the outputs.
    """
    if not (effective_fields := get_effective_fields(config)):
        return
    settings = ", ".join(f"{name}={getattr(config, name)!r}" for name in effective_fields)
    known = list(dict.fromkeys(type(config).auto_classes.values()))
    suitable_classes = [name for base in model_class.__mro__ if (name := f"AttnVariant{base.__name__}") in known]
    classes = suitable_classes[0] if suitable_classes else f"a class of hf_attn_variants ({', '.join(known)})"
    raise ValueError(
        f"{model_class.__name__} does not support {settings}, which this {type(config).__name__} contains. Use "
        f"{classes}, or load the model with an Auto class."
    )


def get_effective_fields(config: Any) -> list[str]:
    """Return the variant fields whose values change the outputs compared with the Transformers model."""
    variant_fields = config.get_variant_fields()
    values = {name: value for name, value in config.to_dict().items() if name not in variant_fields}
    plain = type(config).from_dict(values | {"model_type": type(config).model_type})
    # Sizes and seeds have no effect without their mechanism.
    relevant_fields = {*config.get_kv_heads_fields(), *config.get_rank_fields(), "per_layer_values"}
    relevant_fields |= {name for name in variant_fields if "not_in_transformers" in look_up_field(name)[1].tags}
    changed_fields = [
        name for name in variant_fields if name in relevant_fields and getattr(config, name) != getattr(plain, name)
    ]
    # A latent that is as wide as its input has no parameters, and "absolute" selects the default positions of the
    # architecture.
    unused_ranks = {name for name in config.get_rank_fields() if getattr(config, name) == config.hidden_size}
    return [name for name in changed_fields if name not in unused_ranks and getattr(config, name) not in UNUSED_VALUES]


# This logger is a child of the Transformers logger and therefore follows its verbosity level.
logger = logging.get_logger(f"transformers.{__name__}")

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def find_added_talking_heads(
    config_class: Any, source: Any, config: Any, kwargs: dict[str, Any]
) -> frozenset[tuple[str, int]]:
    """Return the attention modules to which talking heads are added when a checkpoint is loaded, as (prefix, layer).

    Args:
        config_class: the configuration class of the model.
        source, config, kwargs: the arguments of `from_pretrained`.

    Raises:
        ValueError: if the head counts in the configuration differ from those in the checkpoint, which must then be
            converted first.
    """
    names = (*config_class.get_variant_fields(), "per_layer_config")
    new_fields = {name: kwargs[name] for name in names if name in kwargs}
    if not new_fields and not hasattr(config, DYNAMIC):
        return frozenset()
    checkpoint_values = _read_checkpoint_config(config_class, source, kwargs)
    if config_class.attribute_map.get("num_attention_heads", "num_attention_heads") not in checkpoint_values:
        return frozenset()  # there is no configuration to compare with
    values = config.to_dict() if hasattr(config, DYNAMIC) else checkpoint_values
    old, new = config_class.from_dict(dict(checkpoint_values)), config_class.from_dict(dict(values), **new_fields)
    _check_no_conversion_needed(source, old, new)
    if has_kernel(old):
        _check_kernel_unchanged(source, old, new)
    if has_talking_heads(old) or has_talking_heads(new):
        return _find_new_talking_heads(source, old, new)
    return frozenset()


def _get_changed_values(old: Any, new: Any, name: str) -> list[Any] | None:
    """Return the old and the new value of a field, or None if they are equivalent in all layers.

    A value that differs between layers is a list. A latent that is as wide as its input is equivalent to no latent.
    """
    width = old.hidden_size if name in old.get_rank_fields() else None
    lists = [
        [config.get_layer_value(name, layer) for layer in range(config.get_num_layers(name))] for config in (old, new)
    ]
    if all(
        old_value == new_value or {old_value, new_value} == {None, width}
        for old_value, new_value in zip(*lists, strict=False)
    ):
        return None
    return [values[0] if len({*values}) == 1 else values for values in lists]


def _check_no_conversion_needed(source: Any, old: Any, new: Any) -> None:
    """Raise `ValueError` if a checkpoint must be converted to the key/value heads and ranks of a configuration."""
    for name in (*old.get_kv_heads_fields(), *old.get_rank_fields()):
        if (changed := _get_changed_values(old, new, name)) is None:
            continue
        old_value, new_value = changed
        option, field = f"--{name} {new_value}", f"{name}={new_value}"
        if isinstance(new_value, list):
            per_layer_values = {name: new_value}
            option, field = (
                f"--per_layer_values '{json.dumps(per_layer_values)}'",
                f"per_layer_values={per_layer_values}",
            )
        raise ValueError(
            f"`{name}` must be {old_value} as in the checkpoint {str(source)!r}, got {new_value}. Convert the "
            f"checkpoint with `attn-variants convert --model_name_or_path {source} {option} --output_dir "
            f"OUTPUT_DIR` or `hf_attn_variants.convert({str(source)!r}, {field})`."
        )


def _check_kernel_unchanged(source: Any, old: Any, new: Any) -> None:
    """Raise `ValueError` if a kernel's learned weights or random vectors would be dropped or resized."""
    kernels = {field: get_kernel_class(name) for field, name in get_kernel_names(old).items()}
    fixed = [field for field, kernel in kernels.items() if kernel.learned_parameters]
    if any(kernel.learned_parameters or kernel.random_buffers for kernel in kernels.values()):
        fixed.append("attention_kernel_features")
    for name in fixed:
        if (changed := _get_changed_values(old, new, name)) is not None:
            raise ValueError(
                f"`{name}` must be {changed[0]!r} as in the checkpoint {str(source)!r}, got {changed[1]!r}. Loading "
                "cannot change the parameters of a kernel. Use the configuration of the checkpoint."
            )


def _find_new_talking_heads(source: Any, checkpoint_config: Any, new_config: Any) -> frozenset[tuple[str, int]]:
    """Return the attention modules that have talking heads in the new configuration but not in the checkpoint.

    Talking heads can be added to a checkpoint, but learned projections must not be dropped when it is loaded.

    Raises:
        ValueError: if learned projections would be dropped or changed, or if the size of a learned weight would
            change.
    """
    added, has_bias = set(), hasattr(new_config, "relative_attention_num_buckets")
    for prefix in get_talking_heads_prefixes(new_config):
        field = prefix + KIND
        for layer in range(min(checkpoint_config.get_num_layers(field), new_config.get_num_layers(field))):
            old, new = (
                TalkingHeadsSettings.from_config(config, prefix, layer) for config in (checkpoint_config, new_config)
            )
            if old.kind is None and new.kind is not None:
                added.add((prefix, layer))
            pairs: dict[str, tuple[Any, Any]] = {OUTPUT: (old.output, new.output)}
            if old.kind is not None or (has_bias and prefix != "cross_"):  # the bias has one column per softmax head
                pairs[SOFTMAX] = (old.softmax, new.softmax)
            if old.kind is not None:
                pairs |= {KIND: (old.kind, new.kind), DYNAMIC: (list(old.dynamic), list(new.dynamic))}
            for name, pair in pairs.items():
                if pair[0] != pair[1]:
                    known = (getattr(checkpoint_config, prefix + name, None), getattr(new_config, prefix + name, None))
                    field_name = prefix + name if any(value is not None for value in known) else name
                    raise ValueError(
                        f"`{field_name}` must be {pair[0]!r} as in the checkpoint {str(source)!r}, got {pair[1]!r}. "
                        "Learned talking heads cannot be changed on loading. Use the configuration of the checkpoint."
                    )
    return frozenset(added)


def warn_about_replaced_positions(config: Any, source: Any, kwargs: dict[str, Any]) -> None:
    """Warn if sinusoidal positions replace the learned positions of a checkpoint and change its outputs.

    Args:
        config: the configuration of the loaded model, which has sinusoidal positions.
        source, kwargs: see `find_added_talking_heads`.
    """
    checkpoint_values = _read_checkpoint_config(type(config), source, kwargs)
    if checkpoint_values and checkpoint_values.get(SinusoidalPositions.field) != SinusoidalPositions.name:
        logger.warning(
            f"{source} was trained with learned positions. Sinusoidal positions replace them and change "
            "the outputs. Train the model."
        )


def _read_checkpoint_config(config_class: Any, source: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Read the configuration of a checkpoint from the same location as `from_pretrained`."""
    return config_class.get_config_dict(source, **{name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs})[0]
