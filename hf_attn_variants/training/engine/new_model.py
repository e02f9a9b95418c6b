"""Builds a model from scratch, where there is no checkpoint to load: an architecture's defaults and what differs."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...command_line import nearest_name
from ...modeling.fields.field_checks import check_buckets
from ...modeling.fields.given_fields import wrong_name
from ...registration import variant_config_class
from .models import enable_gradient_checkpointing, load_config, load_model, set_dropout
from .settings import ModelSettings, NewModelSettings
from .tokenizers import load_tokenizer, vocabulary_size
from .variant_settings import given_variant

__all__ = [
    "check_end_token",
    "check_new_model",
    "load_or_make_config",
    "load_or_make_model",
    "load_seq2seq_config",
    "new_config",
    "read_overrides",
]

# In `--config_overrides`, a comma before the next field or at the end.
ITEM_END = re.compile(r",(?=[\s,]*(?:\w+\s*=|$))")
# As plain text these would be true in a condition.
PYTHON_WORDS = ("True", "False", "None")


def load_or_make_config(settings: NewModelSettings) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Return the config of the checkpoint, or of the model from scratch that the settings describe; and the tokenizer.

    Raises:
        OSError: if the checkpoint or the tokenizer is not there.
        ValueError: if one cannot be used, they do not fit, or a field of the new config is wrong.
    """
    if settings.model_name_or_path is not None:
        config = load_config(settings)
        return config, load_tokenizer(settings, config)
    tokenizer = load_tokenizer(settings, None)
    return new_config(settings, tokenizer), tokenizer


def load_seq2seq_config(settings: NewModelSettings) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Do as `load_or_make_config`, with errors as there; a new model gets the special tokens of an encoder-decoder."""
    if settings.model_name_or_path is not None:
        return load_or_make_config(settings)
    tokenizer = load_tokenizer(settings, None)
    return new_config(settings, tokenizer, _seq2seq_tokens(settings, tokenizer)), tokenizer


def _seq2seq_tokens(settings: NewModelSettings, tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the special tokens of an encoder-decoder's config: no [CLS] and [SEP], and what its decoder starts with.

    That is the end token, where the architecture's own checkpoints start so (BART), else padding (T5, Marian).
    """
    model_type: Any = settings.model_type
    default, end = AutoConfig.for_model(model_type), tokenizer.eos_token_id
    starts_with_end = getattr(default, "decoder_start_token_id", None) == default.eos_token_id
    tokens = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end,
        "decoder_start_token_id": end if starts_with_end else tokenizer.pad_token_id,
    }
    # What generation ends with where a text would be too long.
    return tokens | ({"forced_eos_token_id": end} if getattr(default, "forced_eos_token_id", None) is not None else {})


def check_end_token(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError unless a tokenizer, its languages set, closes each target by its end token."""
    end = tokenizer.eos_token_id
    # mBART's first version puts the language behind it.
    if end is None or end not in tokenizer(text_target="a")["input_ids"][-2:]:
        raise ValueError(
            f"the tokenizer of {settings.tokenizer_name or settings.model_name_or_path} ends no text in an end token "
            f"({'it has none' if end is None else repr(tokenizer.eos_token)}): generation would not learn to stop. "
            "Give one that does with --tokenizer_name, or set its eos_token and a post-processor that appends it"
        )


def new_config(
    settings: NewModelSettings, tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """Make the config of a model from scratch: upstream's class, or ours where a variant is asked for.

    Args:
        settings: which; its `config_overrides` are the last word.
        tokenizer: the model's.
        tokens: special tokens that are others than an encoder's.

    Raises:
        ValueError: if a field is unknown, or a value breaks a rule.
    """
    model_type: Any = settings.model_type  # given, where there is no checkpoint
    variant_class = variant_config_class(model_type)
    variant, overrides = given_variant(settings), read_overrides(settings.config_overrides or "")
    known = variant_class.variant_fields()
    if unknown := [name for name in variant if name not in known]:
        raise ValueError(f"--{unknown[0]} is of encoder-decoders, or of cross-attention; {model_type} has none")
    if twice := [name for name in variant if name in overrides]:
        raise ValueError(f"`{twice[0]}` is given by --{twice[0]} and by --config_overrides: leave one out")
    is_variant = variant or known.keys() & overrides.keys()
    default = variant_class() if is_variant else AutoConfig.for_model(model_type)
    _check_names(overrides, default, variant_class)
    fields = {
        "vocab_size": vocabulary_size(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        **(tokens or {}),
        **overrides,
    }
    try:
        config = type(default)(**fields, **variant)
    except ValueError:
        raise
    except Exception as error:  # the configs' own checks have error classes of their own
        raise ValueError(f"--config_overrides {settings.config_overrides}: {' '.join(str(error).split())}") from error
    if config.vocab_size < (size := vocabulary_size(tokenizer)):
        raise ValueError(
            f"--config_overrides vocab_size={config.vocab_size}: the tokenizer of {settings.tokenizer_name} has "
            f"{size} tokens, and each needs a row: leave vocab_size out, or give as many"
        )
    if hasattr(config, "relative_attention_max_distance"):
        check_buckets(config)
    if settings.dropout_rate is not None:
        set_dropout(config, settings.dropout_rate)
    return config


def _check_names(overrides: dict[str, Any], default: PreTrainedConfig, variant_class: Any) -> None:
    """Raise ValueError for the name of an override that is no field of the configuration."""
    for name in overrides:
        if name not in default.to_dict() and name not in variant_class.variant_fields():
            reason = wrong_name(variant_class, name)
            if reason is None:
                near = nearest_name(name, default.to_dict())
                reason = f"`{name}` is not a field of {type(default).__name__}"
                reason += "" if near is None else f"; did you mean {near}?"
            raise ValueError(f"--config_overrides: {reason}")


def read_overrides(text: str) -> dict[str, Any]:
    """Return the fields of `--config_overrides` with their values.

    A value is JSON if it can be read as such, otherwise plain text without a comma.

    Args:
        text: "num_layers=2,feed_forward_proj=gated-gelu", 'talking_heads_dynamic=["x2l", "m2l"],num_layers=2' or
            '{"num_layers": 2}'.

    Raises:
        ValueError: if an item is not FIELD=VALUE, a field is given twice, or a value is neither JSON nor plain text.
    """
    if text.lstrip().startswith("{"):
        return _read_json("the text", text)
    pairs = []
    for item in filter(None, (item.strip(", \n\t") for item in ITEM_END.split(text))):
        name, _, value = (part.strip() for part in item.partition("="))
        if not name or not value:
            raise ValueError(f"--config_overrides: {item!r} is not FIELD=VALUE")
        pairs.append((name, _override(name, value)))
    return _once(pairs)


def _override(name: str, text: str) -> Any:
    if text[0] in '[{"':
        return _read_json(f"the value of `{name}`", text)
    if "," in text or text in PYTHON_WORDS:
        raise ValueError(f"--config_overrides: `{name}` must be JSON or text without commas, got {text!r}")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_json(what: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"--config_overrides: {what} is not JSON, as it begins: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"--config_overrides gives `{twice}` twice")
    return values


def check_new_model(settings: NewModelSettings) -> None:
    """Make the model from scratch that settings describe, without its weights.

    Raises:
        OSError: if the tokenizer is not there.
        ValueError: if the tokenizer cannot be used, or there is no such model.
    """
    config = new_config(settings, load_tokenizer(settings, None))
    with torch.device("meta"), _building(settings):
        AutoModel.from_config(config)


@contextmanager
def _building(settings: NewModelSettings) -> Iterator[None]:
    """Raise ValueError for whatever a model's constructor raises about its configuration."""
    try:
        yield
    except Exception as error:  # an unknown activation is a KeyError, no heads are a ZeroDivisionError
        reason = str(error) if isinstance(error, ValueError | ImportError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot build a new {settings.model_type} model: {reason}") from error


def load_or_make_model(
    settings: NewModelSettings, config: PreTrainedConfig, auto_class: Any, needs_all: bool = False
) -> PreTrainedModel:
    """Load the checkpoint, or make a new model with weights drawn at random, in float32.

    Raises:
        OSError, ValueError: as for `load_model_and_rest`, or if the config describes no model.
    """
    if settings.model_name_or_path is not None:
        return load_model(settings, config, auto_class, needs_all=needs_all)
    with _building(settings):
        model = auto_class.from_config(config, dtype=torch.float32, attn_implementation=settings.attn_implementation)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model
