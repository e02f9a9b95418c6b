"""The flags of a new model's attention: those of the table of the fields, one each.

`tests/training/test_settings.py` compares them with the table.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from ...modeling.fields.field_table import FIELDS, row_of
from .options import ALWAYS, Settings, option, parse_json

__all__ = ["FROM_SCRATCH", "EncoderDecoderVariantSettings", "VariantSettings", "given_variant"]

FROM_SCRATCH = "from scratch (without --model_name_or_path)"


def _flag(name: str) -> Any:
    """Return the option of a configuration's field, as the table of the fields describes it.

    Not given it is None, whatever the field's default: what is not given is left to the configuration.
    """
    prefix, row = row_of(name)
    text = row.described(prefix)
    first = text.split(":")[0]
    text = text if "_" in first else f"{text[0].upper()}{text[1:]}"  # the name of a pattern stays as it is
    unsaid = row.default_of(prefix)
    default = f" (default: {unsaid})" if unsaid not in (None, (), False) else ""
    is_json = row.kind is dict
    return option(
        f"{text}{default}.",
        None,
        resume=ALWAYS,
        choices=row.choices_of(prefix) or None,
        metavar="JSON" if is_json else None,
        parse=parse_json if is_json else None,
        may_be_empty=bool(prefix) and row.inherits,
    )


def given_variant(settings: Any) -> dict[str, Any]:
    """Return the fields of the table that settings give, by name."""
    values = {name: getattr(settings, name, None) for row in FIELDS for name in row.names}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class VariantSettings(Settings):
    """The fields that any new model may have."""

    title: ClassVar[str] = FROM_SCRATCH

    num_key_value_heads: int | None = _flag("num_key_value_heads")
    value_head_dim: int | None = _flag("value_head_dim")
    kv_lora_rank: int | None = _flag("kv_lora_rank")
    per_layer_values: dict[str, Any] | None = _flag("per_layer_values")  # noqa: RUF009 (of a dictionary: None)
    talking_heads: str | None = _flag("talking_heads")
    num_softmax_heads: int | None = _flag("num_softmax_heads")
    num_value_heads: int | None = _flag("num_value_heads")
    talking_heads_init: str | None = _flag("talking_heads_init")
    talking_heads_dynamic: tuple[str, ...] | None = _flag("talking_heads_dynamic")
    attention_pattern: str | None = _flag("attention_pattern")
    attention_window: int | None = _flag("attention_window")
    attention_dilation: int | None = _flag("attention_dilation")
    num_global_tokens: int | None = _flag("num_global_tokens")
    attention_block_size: int | None = _flag("attention_block_size")
    num_random_blocks: int | None = _flag("num_random_blocks")
    attention_seed: int | None = _flag("attention_seed")
    num_summary_tokens: int | None = _flag("num_summary_tokens")
    split_attention_heads: bool | None = _flag("split_attention_heads")
    attention_kernel: str | None = _flag("attention_kernel")
    attention_kernel_features: int | None = _flag("attention_kernel_features")
    attention_kernel_seed: int | None = _flag("attention_kernel_seed")
    position_embedding_type: str | None = _flag("position_embedding_type")
    score_function: str | None = _flag("score_function")


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderVariantSettings(Settings):
    """The twins that an encoder-decoder has of them, for its encoder and its cross-attention."""

    title: ClassVar[str] = FROM_SCRATCH

    encoder_num_key_value_heads: int | None = _flag("encoder_num_key_value_heads")
    encoder_kv_lora_rank: int | None = _flag("encoder_kv_lora_rank")
    cross_kv_lora_rank: int | None = _flag("cross_kv_lora_rank")
    encoder_talking_heads: str | None = _flag("encoder_talking_heads")
    cross_talking_heads: str | None = _flag("cross_talking_heads")
    encoder_num_softmax_heads: int | None = _flag("encoder_num_softmax_heads")
    cross_num_softmax_heads: int | None = _flag("cross_num_softmax_heads")
    encoder_num_value_heads: int | None = _flag("encoder_num_value_heads")
    cross_num_value_heads: int | None = _flag("cross_num_value_heads")
    encoder_talking_heads_init: str | None = _flag("encoder_talking_heads_init")
    cross_talking_heads_init: str | None = _flag("cross_talking_heads_init")
    encoder_talking_heads_dynamic: tuple[str, ...] | None = _flag("encoder_talking_heads_dynamic")
    cross_talking_heads_dynamic: tuple[str, ...] | None = _flag("cross_talking_heads_dynamic")
    encoder_score_function: str | None = _flag("encoder_score_function")
    cross_score_function: str | None = _flag("cross_score_function")
    encoder_attention_pattern: str | None = _flag("encoder_attention_pattern")
    encoder_attention_window: int | None = _flag("encoder_attention_window")
    encoder_attention_dilation: int | None = _flag("encoder_attention_dilation")
    encoder_num_global_tokens: int | None = _flag("encoder_num_global_tokens")
    encoder_attention_block_size: int | None = _flag("encoder_attention_block_size")
    encoder_num_random_blocks: int | None = _flag("encoder_num_random_blocks")
    encoder_attention_seed: int | None = _flag("encoder_attention_seed")
    encoder_num_summary_tokens: int | None = _flag("encoder_num_summary_tokens")
    encoder_split_attention_heads: bool | None = _flag("encoder_split_attention_heads")
    encoder_attention_kernel: str | None = _flag("encoder_attention_kernel")
    cross_attention_kernel: str | None = _flag("cross_attention_kernel")
