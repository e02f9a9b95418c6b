"""Which architectures there are, and their registration with transformers' Auto factories."""

import importlib
from typing import TYPE_CHECKING, Any

import transformers

from .modeling.architectures.configuration_attn_variants import CONFIG_CLASSES
from .modeling.fields.variant_config import AttnVariantConfigMixin
from .modeling.mechanisms.sinusoidal_positions import has_sinusoids

if TYPE_CHECKING:  # its import builds every attention function
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
# The same classes under another name; T5's own head had another name before transformers 4.
SAME_CLASSES = {"MT5": "T5", "XLMRoberta": "Roberta", "Camembert": "Roberta"}
FORMER_NAMES = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}

ARCHITECTURES: tuple[type[AttnVariantConfigMixin], ...] = CONFIG_CLASSES


def register() -> None:
    """Make `AutoConfig`, `AutoModel` and the other Auto classes know every variant architecture."""
    for config_class in ARCHITECTURES:
        transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        for auto_class, name in config_class.auto_classes.items():
            model_class = getattr(_modeling_module(config_class), name)
            getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)


def supported_model_types() -> list[str]:
    """Return each `model_type` that can be converted or loaded: upstream's and ours."""
    return [name for row in ARCHITECTURES for name in (*row.upstream_model_types, row.model_type)]


def supported_architectures() -> list[str]:
    """Return the names of upstream's classes that have a variant, without mT5's."""
    return sorted({name.removeprefix(PREFIX) for row in ARCHITECTURES for name in row.auto_classes.values()})


def variant_config_class(model_type: str) -> type[AttnVariantConfigMixin]:
    """Return the configuration class for an upstream or variant `model_type`.

    Raises:
        ValueError: if no architecture here has it.
    """
    for row in ARCHITECTURES:
        if model_type in (*row.upstream_model_types, row.model_type):
            return row
    known = ", ".join(supported_model_types())
    raise ValueError(f"Model type {model_type!r} is not supported; supported are {known}.")


def longest_input(config: transformers.PreTrainedConfig) -> int | None:
    """Return how many tokens a model of this configuration, upstream's or ours, has positions for; None: no limit."""
    positions = getattr(config, "max_position_embeddings", getattr(config, "max_target_positions", None))
    if has_sinusoids(config):
        return None
    rows = (row for row in ARCHITECTURES if config.model_type in (*row.upstream_model_types, row.model_type))
    row = next(rows, None)
    if positions is None or row is None or not row.positions_after_padding:
        return positions
    return positions - config.pad_token_id - 1


def variant_model_class(architecture: str) -> "type[AttnVariantModelMixin]":
    """Return our class for an upstream or variant class name, "BertForMaskedLM" or "MT5EncoderModel" for example.

    Raises:
        ValueError: if there is none.
    """
    name = architecture.removeprefix(PREFIX)
    name = FORMER_NAMES.get(name, name)
    for other, ours in SAME_CLASSES.items():
        if name.startswith(other):
            name = ours + name.removeprefix(other)
    for row in ARCHITECTURES:
        if PREFIX + name in _modeling_module(row).__all__:
            return getattr(_modeling_module(row), PREFIX + name)
    known = ", ".join(supported_architectures())
    raise ValueError(f"Architecture {architecture!r} is not supported; supported are transformers' {known}.")


def _modeling_module(config_class: type[AttnVariantConfigMixin]) -> Any:
    return importlib.import_module(f".modeling.architectures.{config_class.modeling_file}", __package__)
