"""The rows of the comparison, which are derived from the package's table of fields.

A mechanism that is added to the package, or registered by a plugin, appears as a row without a change here. All
models from scratch have the same number of parameters, because the width of their feed-forward layers makes up for the
difference.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from hf_attn_variants.modeling.fields.composition import MECHANISMS
from hf_attn_variants.modeling.fields.field_table import VARIANT_FIELDS, VariantField
from hf_attn_variants.modeling.mechanisms.kernels.kernel_table import get_kernel_class
from hf_attn_variants.modeling.mechanisms.patterns.pattern_table import get_pattern_class
from hf_attn_variants.registration import get_variant_config_class

__all__ = [
    "HEADS",
    "MODELS",
    "BaseModel",
    "Row",
    "build_config",
    "list_head_rows",
    "list_mechanism_rows",
    "match_parameters",
]

WIDTH, NUM_HEADS = 128, 8
# The numbers of heads for which multi-head, grouped-query, multi-query and talking-heads attention are compared.
HEADS = (8, 4, 16)
GROUPS = 2
# The values of fields that are not a choice, and of the fields that a mechanism requires in addition to its own.
SIZES = {
    "value_head_dim": 8,
    "kv_lora_rank": 32,
    "clipped_softmax": (-0.03, 1.0),
    "attention_window": 8,
    "attention_dilation": 2,
    "attention_block_size": 8,
    "num_random_blocks": 1,
    "num_summary_tokens": 2,
}
SINUSOIDAL = {"position_embedding_type": "sinusoidal"}


@dataclass(frozen=True)
class BaseModel:
    """A model whose attention is varied.

    Args:
        name: its name in the table.
        model_type: its model type in Transformers.
        auto_class: the Auto class of the trained model.
        feed_forward: the name of the field with the width of the feed-forward layers.
        heads: the name of the field with the number of heads.
        prefixes: the prefixes of its per-place fields.
        fields: the other fields of its configuration.
    """

    name: str
    model_type: str
    auto_class: str
    feed_forward: str
    heads: str
    prefixes: tuple[str, ...]
    fields: Mapping[str, Any]

    def config_fields(self, num_heads: int = NUM_HEADS) -> dict[str, Any]:
        """Return the fields of the multi-head model with this number of heads."""
        sizes = {self.heads: num_heads} | ({"d_kv": WIDTH // num_heads} if "d_model" in self.fields else {})
        return {**self.fields, **sizes}


MODELS = {
    "bert": BaseModel(
        *("BERT", "bert", "AutoModelForMaskedLM", "intermediate_size", "num_attention_heads", ("",)),
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "intermediate_size": 512,
            "max_position_embeddings": 256,
            "initializer_range": 0.08,
        },
    ),
    "t5": BaseModel(
        *("T5", "t5", "AutoModelForSeq2SeqLM", "d_ff", "num_heads", ("", "encoder_", "cross_")),
        {
            "d_model": WIDTH,
            "d_ff": 512,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "feed_forward_proj": "gated-gelu",
        },
    ),
}


@dataclass(frozen=True)
class Row:
    """A row of the comparison.

    Args:
        name: its name in the table.
        num_heads: the number of query heads.
        fields: the variant fields of its configuration.
        unsupported: the reason why the base model does not support the mechanism, or None.
    """

    name: str
    num_heads: int = NUM_HEADS
    fields: Mapping[str, Any] = field(default_factory=dict)
    unsupported: str | None = None


def list_head_rows(head_counts: Sequence[int] = HEADS) -> list[Row]:
    """Return the rows of multi-head, grouped-query, multi-query and talking-heads attention by number of heads."""
    kinds: dict[str, dict[str, Any]] = {
        "MHA": {},
        f"GQA-{GROUPS}": {"num_key_value_heads": GROUPS},
        "MQA": {"num_key_value_heads": 1},
        "talking heads": {"talking_heads": "both", "talking_heads_init": "random"},
    }
    return [Row(f"{kind}, {heads} heads", heads, fields) for heads in head_counts for kind, fields in kinds.items()]


def list_mechanism_rows(base: BaseModel, from_scratch: bool = True) -> list[Row]:
    """Return a row for each other mechanism in the table of fields, with the places in which the model supports it.

    Args:
        base: the model.
        from_scratch: False for models that are converted, which keep their position embeddings.
    """
    selecting = [row for row in VARIANT_FIELDS if row.name in MECHANISMS and row.name != "per_layer_values"]
    return [_place(base, row, value, from_scratch) for row in selecting for value in _list_values(row)]


def _list_values(row: VariantField) -> tuple[Any, ...]:
    values = row.choices or ((True,) if row.kind is bool else (SIZES[row.name],))
    return tuple(value for value in values if (row.name, value) != ("talking_heads", "both"))


def _place(base: BaseModel, row: VariantField, value: Any, from_scratch: bool) -> Row:
    """Return the row of a mechanism in as many places of the base model as possible."""
    text = "" if value is True else f" {value}"
    name = f"{row.name.replace('_', ' ')}{text}"
    reason = ""
    for places, suffix, others in _iterate_placements(base, row):
        if others and not from_scratch:
            continue
        fields = others | {prefix + name: item for prefix in places for name, item in _get_fields(row, value, prefix)}
        try:
            build_model(base, fields)
        except (ValueError, ImportError) as error:
            reason = reason or str(error)
        else:
            return Row(name + suffix, fields=fields)
    return Row(name, unsupported=reason)


def _iterate_placements(base: BaseModel, row: VariantField) -> Iterator[tuple[tuple[str, ...], str, dict[str, Any]]]:
    """Yield the places to try in turn, with a suffix of the row's name and additional fields."""
    # A place without a value of its own inherits the value of the field without a prefix.
    everywhere = ("",) if row.inherits else tuple(prefix for prefix in base.prefixes if prefix in row.prefixes)
    yield everywhere, "", {}
    yield everywhere, ", sinusoidal positions", SINUSOIDAL
    for prefix in everywhere[1:]:
        yield (prefix,), f" ({prefix.rstrip('_').replace('cross', 'cross-attention')})", {}
        yield (
            (prefix,),
            f" ({prefix.rstrip('_').replace('cross', 'cross-attention')}), sinusoidal positions",
            SINUSOIDAL,
        )


def _get_fields(row: VariantField, value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    yield row.name, value
    if row.name == "talking_heads":
        yield "talking_heads_init", "random"
    needed: tuple[str, ...] = ()
    if "pattern" in row.tags:
        needed = get_pattern_class(value).needed
    elif "kernel" in row.tags and get_kernel_class(value).needs_window and prefix != "cross_":
        needed = ("attention_window",)
    yield from ((name, SIZES[name]) for name in needed)


def build_model(base: BaseModel, fields: Mapping[str, Any], num_heads: int = NUM_HEADS) -> Any:
    """Build the model with these variant fields on the meta device.

    Raises:
        ValueError: if the base model does not support the fields.
    """
    config = get_variant_config_class(base.model_type)(**base.config_fields(num_heads) | dict(fields))
    with torch.device("meta"):
        return getattr(transformers, base.auto_class).from_config(config)


def match_parameters(base: BaseModel, row: Row) -> dict[str, Any]:
    """Return the configuration fields of a row, with as many parameters as the multi-head model of 8 heads."""
    width = base.fields[base.feed_forward]
    wanted, wider = (_count_parameters(base, {base.feed_forward: width + more}) for more in (0, 1))
    missing = wanted - _count_parameters(base, row.fields, row.num_heads)
    matched = {base.feed_forward: width + round(missing / (wider - wanted))}
    return base.config_fields(row.num_heads) | matched | dict(row.fields)


def build_config(base: BaseModel, row: Row, **fields: Any) -> Any:
    """Return the configuration of a row, with additional fields."""
    return get_variant_config_class(base.model_type)(**match_parameters(base, row) | fields)


def _count_parameters(base: BaseModel, fields: Mapping[str, Any], num_heads: int = NUM_HEADS) -> int:
    return sum(parameter.numel() for parameter in build_model(base, fields, num_heads).parameters())
