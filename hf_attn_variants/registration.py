"""Supported architectures and their registration with the Auto classes of Transformers."""

import importlib
from typing import TYPE_CHECKING, Any

import transformers

from .modeling.architectures.configuration_attn_variants import CONFIG_CLASSES
from .modeling.fields.variant_config import AttnVariantConfigMixin
from .modeling.mechanisms.sinusoidal_positions import has_sinusoids

if TYPE_CHECKING:  # this import would build all attention functions
    from .modeling.attention.variant_mixins import AttnVariantModelMixin

__all__ = [
    "ARCHITECTURES",
    "longest_input",
    "register",
    "supported_model_types",
    "variant_config_class",
    "variant_model_class",
]

PREFIX = "AttnVariant"
# Classes that equal those of another model type, and the name of T5's head before Transformers 4.
SAME_CLASSES = {"MT5": "T5", "XLMRoberta": "Roberta", "Camembert": "Roberta"}
FORMER_NAMES = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}

ARCHITECTURES: tuple[type[AttnVariantConfigMixin], ...] = CONFIG_CLASSES


def register() -> None:
    """Register all variants with `AutoConfig`, `AutoModel` and the other Auto classes of Transformers."""
    for config_class in ARCHITECTURES:
        transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        for auto_class, name in config_class.auto_classes.items():
            model_class = getattr(_import_modeling_module(config_class), name)
            getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)


def supported_model_types() -> list[str]:
    """Return all model types that can be converted or loaded: those of Transformers and those of this package."""
    return [name for config_class in ARCHITECTURES for name in _list_model_types(config_class)]


def supported_architectures() -> list[str]:
    """Return the names of the classes of Transformers that have a variant, without mT5's."""
    names = (name for config_class in ARCHITECTURES for name in config_class.auto_classes.values())
    return sorted({name.removeprefix(PREFIX) for name in names})


def variant_config_class(model_type: str) -> type[AttnVariantConfigMixin]:
    """Return the configuration class of this package for a `model_type` of Transformers or of this package.

    Raises:
        ValueError: if the model type is not supported.

    Example:
        >>> variant_config_class("bert").model_type
        'attn_variant_bert'
    """
    for config_class in ARCHITECTURES:
        if model_type in _list_model_types(config_class):
            return config_class
    known = ", ".join(supported_model_types())
    raise ValueError(f"Model type {model_type!r} is not supported. Use one of {known}.")


def longest_input(config: transformers.PreTrainedConfig) -> int | None:
    """Return the number of tokens that the position embeddings of a model allow, or None if there is no limit.

    Args:
        config: a configuration of Transformers or of this package.
    """
    positions = getattr(config, "max_position_embeddings", getattr(config, "max_target_positions", None))
    if has_sinusoids(config):
        return None
    matching = (candidate for candidate in ARCHITECTURES if config.model_type in _list_model_types(candidate))
    config_class = next(matching, None)
    if positions is None or config_class is None or not config_class.positions_after_padding:
        return positions
    return positions - config.pad_token_id - 1


def variant_model_class(architecture: str) -> "type[AttnVariantModelMixin]":
    """Return the class of this package for a class name of Transformers or of this package.

    Args:
        architecture: the class name, for example "BertForMaskedLM" or "MT5EncoderModel".

    Raises:
        ValueError: if the class is not supported.

    Example:
        >>> variant_model_class("BertForMaskedLM").__name__
        'AttnVariantBertForMaskedLM'
    """
    name = architecture.removeprefix(PREFIX)
    name = FORMER_NAMES.get(name, name)
    for other, base in SAME_CLASSES.items():
        if name.startswith(other):
            name = base + name.removeprefix(other)
    for config_class in ARCHITECTURES:
        module = _import_modeling_module(config_class)
        if PREFIX + name in module.__all__:
            return getattr(module, PREFIX + name)
    known = ", ".join(supported_architectures())
    raise ValueError(f"Architecture {architecture!r} is not supported. Use one of {known}.")


def _list_model_types(config_class: type[AttnVariantConfigMixin]) -> tuple[str, ...]:
    return (*config_class.transformers_model_types, config_class.model_type)


def _import_modeling_module(config_class: type[AttnVariantConfigMixin]) -> Any:
    return importlib.import_module(f".modeling.architectures.{config_class.modeling_file}", __package__)
