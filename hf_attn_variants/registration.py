"""Supported architectures and their registration with the Transformers Auto classes."""

import importlib
from typing import TYPE_CHECKING, Any

import transformers

from .modeling.architectures.configuration_attn_variants import CONFIG_CLASSES
from .modeling.fields.variant_config import AttnVariantConfigMixin
from .modeling.mechanisms.sinusoidal_positions import has_sinusoids
from .native.native_model import get_native_model_class
from .native.native_table import NATIVE_CONFIGS

if TYPE_CHECKING:  # importing this module would build all attention functions
    from .modeling.attention.model_mixin import AttnVariantModelMixin

PREFIX = "AttnVariant"
# Class prefixes of model types that are equivalent to another model type, and the former name of a T5 class.
CLASS_ALIASES = {"MT5": "T5", "XLMRoberta": "Roberta", "Camembert": "Roberta"}
FORMER_CLASS_NAMES = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}

ARCHITECTURES: tuple[type[AttnVariantConfigMixin], ...] = CONFIG_CLASSES
ALL_ARCHITECTURES: tuple[type[AttnVariantConfigMixin], ...] = (*ARCHITECTURES, *NATIVE_CONFIGS)

# The reasons why the attention of some model types cannot be converted.
UNSUPPORTED_MODEL_TYPES = {
    "mpnet": "its attention class does not call Transformers' attention interface",
    **dict.fromkeys(("deberta", "deberta-v2"), "its attention adds position terms to the scores"),
    "t5gemma2": (
        "its attention normalizes queries and keys after the projections, so heads that share keys cannot be computed "
        "from the projections"
    ),
}


def register() -> None:
    """Register all variants with `AutoConfig`, `AutoModel` and the other Transformers Auto classes."""
    for config_class in ARCHITECTURES:
        transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        for auto_class, name in config_class.auto_classes.items():
            model_class = getattr(_import_modeling_module(config_class), name)
            getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)


def list_supported_model_types() -> list[str]:
    """Return all model types from Transformers and this package that can be converted or loaded."""
    return [name for config_class in ALL_ARCHITECTURES for name in _list_model_types(config_class)]


def list_supported_architectures() -> list[str]:
    """Return the names of the Transformers classes that can be converted, except those for mT5."""
    names = (name for config_class in ALL_ARCHITECTURES for name in config_class.auto_classes.values())
    return sorted({name.removeprefix(PREFIX) for name in names})


def get_variant_config_class(model_type: str) -> type[AttnVariantConfigMixin]:
    """Return the configuration class in this package for a `model_type` from Transformers or this package.

    Raises:
        ValueError: if the model type is not supported.

    Example:
        >>> get_variant_config_class("bert").model_type
        'attn_variant_bert'
    """
    for config_class in ALL_ARCHITECTURES:
        if model_type in _list_model_types(config_class):
            return config_class
    if (reason := UNSUPPORTED_MODEL_TYPES.get(model_type)) is not None:
        raise ValueError(f"Model type {model_type!r} is not supported because {reason}.")
    known = ", ".join(list_supported_model_types())
    raise ValueError(f"Model type {model_type!r} is not supported. Use one of {known}.")


def get_max_input_length(config: transformers.PreTrainedConfig) -> int | None:
    """Return the maximum number of input tokens that a model's positions allow, or None if there is no limit.

    Args:
        config: a configuration from Transformers or this package.
    """
    positions = getattr(config, "max_position_embeddings", getattr(config, "max_target_positions", None))
    if has_sinusoids(config):
        return None
    matching = (candidate for candidate in ALL_ARCHITECTURES if config.model_type in _list_model_types(candidate))
    starts_late = getattr(next(matching, None), "positions_after_padding", False)
    return positions - config.pad_token_id - 1 if positions is not None and starts_late else positions


def get_variant_model_class(architecture: str) -> "type[AttnVariantModelMixin]":
    """Return the model class in this package for a class name from Transformers or this package.

    Args:
        architecture: the class name, such as "BertForMaskedLM" or "MT5EncoderModel".

    Raises:
        ValueError: if the class is not supported.

    Example:
        >>> get_variant_model_class("BertForMaskedLM").__name__
        'AttnVariantBertForMaskedLM'
    """
    name = architecture.removeprefix(PREFIX)
    name = FORMER_CLASS_NAMES.get(name, name)
    for alias, base in CLASS_ALIASES.items():
        if name.startswith(alias):
            name = base + name.removeprefix(alias)
    for native_class in NATIVE_CONFIGS:
        if name in native_class.auto_classes.values():
            return get_native_model_class(native_class, name)  # type: ignore[arg-type]  # mypy checks `__hash__`
    for config_class in ARCHITECTURES:
        module = _import_modeling_module(config_class)
        if PREFIX + name in module.__all__:
            return getattr(module, PREFIX + name)
    known = ", ".join(list_supported_architectures())
    raise ValueError(f"Architecture {architecture!r} is not supported. Use one of {known}.")


def _list_model_types(config_class: type[AttnVariantConfigMixin]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*config_class.transformers_model_types, config_class.model_type)))


def is_native(model_type: str) -> bool:
    """Return whether the Transformers class of a model type itself supports fewer key/value heads."""
    return any(model_type == config_class.model_type for config_class in NATIVE_CONFIGS)


def _import_modeling_module(config_class: type[AttnVariantConfigMixin]) -> Any:
    return importlib.import_module(f".modeling.architectures.{config_class.modeling_file}", __package__)
