"""Builds a model from scratch: an architecture's defaults, the fields that differ, and the attention variant."""

import json
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...registration import variant_config_class
from .models import enable_gradient_checkpointing, set_dropout
from .settings import NewModelSettings
from .tokenizers import vocabulary_size

__all__ = ["new_config", "new_model"]

VARIANT_FIELDS = ("num_key_value_heads", "talking_heads")


def new_config(settings: NewModelSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Make the config of a model from scratch: upstream's class, or ours where a variant is asked for.

    Raises:
        ValueError: if a field is unknown, or a value breaks a rule.
    """
    variant = {name: getattr(settings, name) for name in VARIANT_FIELDS if getattr(settings, name) is not None}
    default = variant_config_class(settings.model_type)() if variant else AutoConfig.for_model(settings.model_type)
    fields = {
        "vocab_size": vocabulary_size(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        **_parse_overrides(settings.config_overrides or "", default),
    }
    try:
        config = type(default)(**fields, **variant)
    except ValueError:
        raise
    except Exception as error:  # the configs' own checks have error classes of their own
        raise ValueError(f"--config_overrides {settings.config_overrides}: {' '.join(str(error).split())}") from error
    if settings.dropout_rate is not None:
        set_dropout(config, settings.dropout_rate)
    return config


def _parse_overrides(text: str, default: PreTrainedConfig) -> dict[str, Any]:
    fields = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in default.to_dict() or not value:
            raise ValueError(f"--config_overrides: {item!r} is no FIELD=VALUE of a {type(default).__name__}")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


def new_model(settings: NewModelSettings, config: PreTrainedConfig, auto_class: Any) -> PreTrainedModel:
    """Make a model of one of transformers' Auto classes in float32, its weights drawn at random.

    Raises:
        ValueError: if the config describes no model, or the machine cannot do `attn_implementation`.
    """
    try:
        model = auto_class.from_config(config, dtype=torch.float32, attn_implementation=settings.attn_implementation)
    except (ValueError, ImportError) as error:
        raise ValueError(f"cannot build a new {settings.model_type} model: {error}") from error
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model
