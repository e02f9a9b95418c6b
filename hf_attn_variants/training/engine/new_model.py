"""Builds a model from scratch: an architecture's defaults, the fields that differ, and the attention variant."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...registration import variant_config_class
from .models import set_dropout, vocabulary_size

__all__ = ["add_scratch_arguments", "check_scratch_arguments", "new_config", "new_model"]

SCRATCH_FLAGS = ("model_type", "config_overrides", "num_key_value_heads", "talking_heads")


def add_scratch_arguments(parser: argparse.ArgumentParser, model_types: Sequence[str]) -> None:
    """Adds what a model from scratch is like, of one of `model_types`; see `new_config`."""
    group = parser.add_argument_group("from scratch (without --model_name_or_path)")
    group.add_argument("--model_type", choices=model_types, help="The architecture.")
    group.add_argument(
        "--config_overrides",
        metavar="FIELD=VALUE,...",
        help="Config fields that differ from the architecture's defaults.",
    )
    group.add_argument(
        "--num_key_value_heads", type=int, help="Key/value heads of a layer (T5: a decoder's); 1: multi-query."
    )
    group.add_argument("--talking_heads", choices=["logits", "weights", "both"], help="Projections across heads.")


def check_scratch_arguments(args: argparse.Namespace) -> None:
    """Checks that there is a checkpoint, or what a model from scratch needs, and not both.

    Raises:
        ValueError: There is neither, or both.
    """
    if args.model_name_or_path is None:
        if args.model_type is None or args.tokenizer_name is None:
            raise ValueError(
                "give --model_name_or_path, or --model_type and --tokenizer_name for a model from scratch"
            )
        return
    for name in SCRATCH_FLAGS:
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name} is for a model from scratch; --model_name_or_path {args.model_name_or_path} has its own "
                "(`attn-variants convert` makes variants of it)"
            )


def new_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Makes the config of a model from scratch: upstream's class, or ours where a variant is asked for.

    Args:
        args: Reads `model_type`, `config_overrides` ("field=value,..."), `num_key_value_heads`, `talking_heads`,
            `dropout_rate`.
        tokenizer: Gives the vocabulary's size and the special tokens.

    Raises:
        ValueError: A field is unknown, or a value breaks a rule.
    """
    variant_class = variant_config_class(args.model_type)
    given = {name: getattr(args, name, None) for name in variant_class.variant_fields()}
    variant = {name: value for name, value in given.items() if value is not None}
    default = variant_class() if variant else AutoConfig.for_model(args.model_type)
    fields = {
        "vocab_size": vocabulary_size(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        **_parse_overrides(args.config_overrides or "", default),
    }
    try:
        config = type(default)(**fields, **variant)
    except ValueError:
        raise
    except Exception as error:  # the configs' own checks have error classes of their own
        raise ValueError(f"--config_overrides {args.config_overrides}: {' '.join(str(error).split())}") from error
    if args.dropout_rate is not None:
        set_dropout(config, args.dropout_rate)
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


def new_model(args: argparse.Namespace, config: PreTrainedConfig, auto_class: Any) -> PreTrainedModel:
    """Makes a model of one of transformers' Auto classes in float32, its weights drawn at random.

    Args:
        args: Reads `attn_implementation`.
        config: Of the model.
        auto_class: AutoModelForMaskedLM, for example.

    Raises:
        ValueError: The config describes no model, or the machine cannot do `attn_implementation`.
    """
    try:
        return auto_class.from_config(config, dtype=torch.float32, attn_implementation=args.attn_implementation)
    except (ValueError, ImportError) as error:
        raise ValueError(f"cannot build a new {args.model_type} model: {error}") from error
