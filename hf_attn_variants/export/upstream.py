"""What upstream calls a checkpoint of this package: its class, and its configuration without a variant."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..files import CARD_NAME, is_generated_card
from ..inspection.costs import variant_config
from ..modeling.travel import travelling_names
from ..registration import PREFIX, variant_model_class

if TYPE_CHECKING:
    from ..modeling.attention.variant_mixins import AttnVariantModelMixin

__all__ = ["OWN_CODE", "source_model", "travels_without_code", "upstream_architecture", "upstream_config"]

OWN_CODE = travelling_names()
# Beside the key/value heads and ranks of a variant's configuration, upstream's has none of these.
NOT_UPSTREAMS = ("auto_map", "model_type", "transformers_version")


def source_model(config: Mapping[str, Any]) -> "tuple[type[AttnVariantModelMixin], Any]":
    """Return the model class that a config.json describes, and its configuration, both of this package.

    Raises:
        ValueError: if it describes no model of an architecture here.
    """
    described = variant_config(config)
    architecture = next(iter(config.get("architectures") or ()), None)
    return variant_model_class(architecture or described.auto_classes["AutoModel"]), described


def upstream_architecture(model_class: type) -> str:
    """Return upstream's name of one of this package's model classes."""
    return model_class.__name__.removeprefix(PREFIX)


def upstream_config(config: Any, model_class: type) -> PreTrainedConfig:
    """Return upstream's configuration of a model: that of ours, without the variant's fields.

    mT5, XLM-RoBERTa and CamemBERT, which are T5 and RoBERTa under another name, get those names.
    """
    left = {*config.variant_fields(), *NOT_UPSTREAMS}
    values = {name: value for name, value in config.to_dict().items() if name not in left}
    found = CONFIG_MAPPING[config.upstream_model_types[0]](**values)
    found.architectures = [upstream_architecture(model_class)]
    return found


def travels_without_code(folder: Path, name: str) -> bool:
    """Say whether a file beside the weights is true of a model that needs no code: not the code, nor a card of it."""
    if name == CARD_NAME:
        return not is_generated_card(folder / name)
    return name not in OWN_CODE
