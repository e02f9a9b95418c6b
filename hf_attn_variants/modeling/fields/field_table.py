"""The table of configuration fields for the attention variants, with their descriptions.

The per-place fields of encoder-decoders (`encoder_...`, `cross_...`) share a row with the field without a prefix. The
descriptions are used in help texts, model cards and messages, but are not included in repositories. This module does
not import torch, because the commands create their flags from this table.
"""

from collections.abc import Callable
from dataclasses import field as dataclass_field
from typing import Any, NamedTuple

from ..mechanisms.kernels.kernel_table import KERNELS
from ..mechanisms.mechanism import NONE
from ..mechanisms.patterns.pattern_table import PATTERNS
from ..mechanisms.talking_heads import DYNAMIC_PROJECTIONS, IDENTITY, TALKING_HEADS, TALKING_HEADS_INITS

__all__ = [
    "FIELDS",
    "FIELD_TEXTS",
    "OPTIONAL_FIELDS",
    "PLACES",
    "Field",
    "check_choice",
    "describe_field",
    "get_card_value_description",
    "get_field_row",
    "variant_field",
    "with_table_fields",
]


class Field(NamedTuple):
    """A row in the table of fields.

    Args:
        name: the name of the field without a prefix.
        kind: the type of the value (int, str, bool, list, dict, or tuple for a pair of numbers).
        default: the value of the field if it is not set.
        prefixes: the prefixes of the field and of its per-place fields.
        choices: the allowed values.
        default_names: additional values that select the Transformers default.
        facts: the properties of the field: "by_layer" (may differ between layers), "latent" (is a rank), "talking"
            (configures talking heads), "pattern" (selects keys), "kernel" (configures linear attention), "extension"
            (selects an `AttentionExtension`), "from_scratch" (is not supported by conversion) and
            "not_in_transformers" (changes the computation).
        query_heads: for key/value heads, the name of the field with the number of query heads.
        one_for_all: the prefixes whose fields have the same value in all layers, even if `facts` contains "by_layer".
        inherits: True if a per-place field that is None uses the value of the field without a prefix.
    """

    name: str
    kind: type
    default: Any = None
    prefixes: tuple[str, ...] = ("",)
    choices: tuple[str, ...] = ()
    default_names: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    query_heads: str | None = None
    one_for_all: tuple[str, ...] = ()
    inherits: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the field and of its per-place fields."""
        return tuple(prefix + self.name for prefix in self.prefixes)

    def get_default(self, prefix: str = "") -> Any:
        """Return the field's default value for the given prefix."""
        return None if prefix and self.inherits else self.default

    def get_choices(self, prefix: str = "") -> tuple[str, ...]:
        """Return the field's allowed values for the given prefix, or () if all values of its type are allowed.

        A per-place field that can inherit its value has the additional choice "none", because None selects the
        inherited value.
        """
        has_none = prefix and self.inherits and self.default is None
        return (*self.choices, NONE) if has_none and self.choices else tuple(self.choices)


STACKS, ALL = ("", "encoder_"), ("", "encoder_", "cross_")
TALKING, FROM_SCRATCH = ("talking", "by_layer"), ("from_scratch", "not_in_transformers")
EXTENSION = ("extension", "not_in_transformers")
FIELDS = (
    Field("num_key_value_heads", int, prefixes=STACKS, facts=("by_layer",), query_heads="num_attention_heads"),
    Field("value_head_dim", int, facts=FROM_SCRATCH),
    Field("kv_lora_rank", int, prefixes=ALL, facts=("latent", "by_layer"), one_for_all=("cross_",)),
    Field("per_layer_values", dict),
    Field("talking_heads", str, None, ALL, TALKING_HEADS, facts=(*TALKING, "not_in_transformers"), inherits=True),
    Field("num_softmax_heads", int, None, ALL, facts=TALKING, inherits=True),
    Field("num_value_heads", int, None, ALL, facts=TALKING, inherits=True),
    Field("talking_heads_init", str, IDENTITY, ALL, TALKING_HEADS_INITS, facts=TALKING, inherits=True),
    Field("talking_heads_dynamic", list, (), ALL, tuple(DYNAMIC_PROJECTIONS), facts=TALKING, inherits=True),
    Field("attention_pattern", str, prefixes=STACKS, choices=PATTERNS, facts=("pattern", "not_in_transformers")),
    Field("attention_window", int, prefixes=STACKS, facts=("pattern", "by_layer")),
    Field("attention_dilation", int, 1, prefixes=STACKS, facts=("pattern",)),
    Field("num_global_tokens", int, 0, prefixes=STACKS, facts=("pattern",)),
    Field("attention_block_size", int, prefixes=STACKS, facts=("pattern",)),
    Field("num_random_blocks", int, 0, prefixes=STACKS, facts=("pattern",)),
    Field("attention_seed", int, 0, prefixes=STACKS, facts=("pattern",)),
    Field("num_summary_tokens", int, 0, prefixes=STACKS, facts=("pattern",)),
    Field("split_attention_heads", bool, False, prefixes=STACKS, facts=("pattern",)),
    Field("attention_kernel", str, prefixes=ALL, choices=KERNELS, facts=("kernel", "by_layer", "not_in_transformers")),
    Field("attention_kernel_features", int, facts=("kernel",)),
    Field("attention_kernel_seed", int, 0, facts=("kernel",)),
    Field("position_embedding_type", str, choices=("sinusoidal",), default_names=("absolute",), facts=FROM_SCRATCH),
    Field("score_function", str, None, ALL, ("additive",), facts=FROM_SCRATCH, inherits=True),
    Field("output_gate", str, None, ALL, ("head", "element"), facts=EXTENSION, inherits=True),
    Field("attention_sink", bool, None, ALL, facts=EXTENSION, inherits=True),
    Field("clipped_softmax", tuple, None, ALL, facts=EXTENSION, inherits=True),
    Field("knocking_heads", str, None, ALL, ("value", "all"), facts=EXTENSION, inherits=True),
)

_ROWS = {prefix + row.name: (prefix, row) for row in FIELDS for prefix in row.prefixes}
# Fields that are only saved if they are set.
OPTIONAL_FIELDS = (
    "value_head_dim",
    *(name for row in FIELDS if row.inherits for name in row.names["extension" not in row.facts :]),
)


def get_field_row(name: str) -> tuple[str, Field]:
    """Return the prefix of a field and its row in the table."""
    return _ROWS[name]


def check_choice(name: str, value: Any) -> None:
    """Check that the value of a field is one of its choices or None.

    Raises:
        ValueError: if the value is not one of the choices.
    """
    prefix, row = get_field_row(name)
    known = (*row.get_choices(prefix), *row.default_names)
    for choice in value if row.kind is list and isinstance(value, list | tuple) else (value,):
        if row.choices and choice is not None and choice not in known:
            raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {choice!r}.")


def variant_field(name: str) -> Any:
    """Create the dataclass field of a configuration for a field in the table.

    Its metadata marks it as a field from this package ("variant") and contains the facts from its row.
    """
    prefix, row = get_field_row(name)
    facts = {fact: True for fact in row.facts if fact != "by_layer" or prefix not in row.one_for_all}
    heads = {} if row.query_heads is None else {"query_heads": row.query_heads}
    return dataclass_field(default=row.get_default(prefix), metadata={"variant": True, **facts, **heads})


def with_table_fields(*prefixes: str, inherits: bool = False) -> Callable[[type], type]:
    """Return a class decorator that adds the fields in the table to a dataclass, except those that it already has.

    Args:
        prefixes: the prefixes of the fields.
        inherits: True to add only the fields that inherit their value.
    """

    def add_fields(cls: type) -> type:
        rows = [row for row in FIELDS if row.inherits or not inherits]
        for name in (prefix + row.name for prefix in prefixes for row in rows if prefix in row.prefixes):
            if not hasattr(cls, name):
                cls.__annotations__[name] = Any
                setattr(cls, name, variant_field(name))
        return cls

    return add_fields


class AttentionTypeWording(NamedTuple):
    """The words that describe a place, such as the encoder, in field descriptions and on model cards."""

    attention: str
    layer: str
    here: str  # this word and those below are used on model cards
    whose: str
    softmax: str
    token: str


PLACES = {
    "": AttentionTypeWording(
        attention="self-attention (in encoder-decoders: of the decoder)",
        layer="each layer (in encoder-decoders: of the decoder)",
        here="self-attention",
        whose="self-attention",
        softmax="the softmax in self-attention",
        token="token",
    ),
    "encoder_": AttentionTypeWording(
        attention="the self-attention of the encoder",
        layer="each encoder layer",
        here="the self-attention of the encoder",
        whose="the encoder",
        softmax="the softmax in the self-attention of the encoder",
        token="token",
    ),
    "cross_": AttentionTypeWording(
        attention="cross-attention",
        layer="the cross-attention of each decoder layer",
        here="cross-attention",
        whose="all cross-attention modules",
        softmax="the softmax in cross-attention",
        token="source token",
    ),
}


class FieldDescription(NamedTuple):
    """The descriptions of a field, which may contain the words of an `AttentionTypeWording` in braces.

    Args:
        help: the one-line description.
        card: the description of the value on a model card.
        not_in_transformers: a plural noun phrase for a model property that Transformers classes do not support.
        unconvertible: a plural noun phrase for a property that prevents the conversion of a checkpoint.
    """

    help: str
    card: str | None = None
    not_in_transformers: str | None = None
    unconvertible: str | None = None


FIELD_TEXTS = {
    "num_key_value_heads": FieldDescription("number of key/value heads in {layer}; 1 = multi-query"),
    "value_head_dim": FieldDescription(
        "size of a value head in all attention modules, if it differs from the size of a query head",
        card="size of a value head",
        not_in_transformers="value heads whose size differs from the key heads",
        unconvertible="value heads whose size differs from the key heads",
    ),
    "kv_lora_rank": FieldDescription(
        "rank of the latent from which {attention} computes keys and values; the width of the input "
        "caches the input itself, without loss",
        card="latent dimension in {here}",
    ),
    "per_layer_values": FieldDescription('values that differ between layers, as JSON: {{"kv_lora_rank": [64, 32]}}'),
    "talking_heads": FieldDescription(
        "talking-heads projections: of the logits, of the weights or of both", not_in_transformers="talking heads"
    ),
    "num_softmax_heads": FieldDescription("talking heads: number of softmax heads"),
    "num_value_heads": FieldDescription(
        "talking heads: number of value heads; differs from the softmax heads only with a weights projection"
    ),
    "talking_heads_init": FieldDescription("talking heads: initialization of new projections"),
    "talking_heads_dynamic": FieldDescription("talking heads: input-dependent projections to add"),
    "attention_pattern": FieldDescription(
        "pattern that selects the keys of {attention}", not_in_transformers="windows and other patterns"
    ),
    "attention_window": FieldDescription(
        "window size in tokens of {attention}, for patterns and hybrid kernels: half on each side, in "
        "decoders the most recent ones",
        card="window size (tokens) in {here}",
    ),
    "attention_dilation": FieldDescription("step between the tokens in a window or block of {attention}"),
    "num_global_tokens": FieldDescription("number of global tokens at the start of the text (only encoders)"),
    "attention_block_size": FieldDescription(
        "block size in tokens of {attention}; for `strided`, the stride", card="block size (tokens) in {here}"
    ),
    "num_random_blocks": FieldDescription("`random_blocks`: number of random blocks per block of {attention}"),
    "attention_seed": FieldDescription("`random_blocks`: seed of the random blocks of {attention}"),
    "num_summary_tokens": FieldDescription(
        "`fixed`: number of tokens at the end of each block of {attention} that all tokens attend to"
    ),
    "split_attention_heads": FieldDescription(
        "`strided`, `fixed`: half of the heads of {attention} attend to near tokens, the others to far tokens"
    ),
    "attention_kernel": FieldDescription(
        "kernel that replaces the softmax of {attention} (linear attention)",
        card="{softmax}",
        not_in_transformers="kernels",
    ),
    "attention_kernel_features": FieldDescription(
        "kernels: width of the learned features, number of random vectors or number of rows"
    ),
    "attention_kernel_seed": FieldDescription("kernels: seed of the random vectors"),
    "position_embedding_type": FieldDescription(
        "position embeddings, if they differ from those of the architecture",
        not_in_transformers="sinusoidal positions",
    ),
    "score_function": FieldDescription(
        "score function, if it differs from the dot product",
        not_in_transformers="additive scores",
        unconvertible="scores other than dot products",
    ),
    "output_gate": FieldDescription(
        "gates of the head outputs: one value per head, or one per element of a head",
        card="output gates",
        not_in_transformers="output gates",
    ),
    "attention_sink": FieldDescription(
        "learned attention sinks, an additional term in the denominator of the softmax",
        card="attention sinks",
        not_in_transformers="attention sinks",
    ),
    "clipped_softmax": FieldDescription(
        "clipped softmax with the given gamma (at most 0) and zeta (at least 1)",
        card="a clipped softmax",
        not_in_transformers="a clipped softmax",
    ),
    "knocking_heads": FieldDescription(
        "knocking heads: one matrix for the values of all heads, or also for the queries and keys",
        card="knocking heads",
    ),
}


def describe_field(name: str) -> str:
    """Return a one-line description of a field.

    Example:

    ```py
    >>> from hf_attn_variants.modeling.fields.field_table import describe_field
    >>> describe_field("encoder_attention_dilation")
    'step between the tokens in a window or block of the self-attention of the encoder'
    ```
    """
    prefix, row = get_field_row(name)
    text = FIELD_TEXTS[row.name].help.format(**PLACES[prefix]._asdict())
    text += f"; only for {PLACES[prefix].attention}" if prefix and row.inherits else ""
    return f"{text}; the same for all layers" if prefix in row.one_for_all else text


def get_card_value_description(name: str) -> str:
    """Return the description of a field's value for model cards, or "" if it has none."""
    prefix, row = get_field_row(name)
    return (FIELD_TEXTS[row.name].card or "").format(**PLACES[prefix]._asdict())
