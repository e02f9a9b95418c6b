"""The table of configuration fields for the attention variants, with their descriptions.

Encoder-decoders have per-place fields for the encoder and the cross-attention (`encoder_...`, `cross_...`). They share
a row with the field without a prefix. The descriptions are used in help texts, model cards and messages, but are not
copied into the code that is saved with a model. This module does not import torch, because the commands create their
flags from this table.
"""

from collections.abc import Callable, Sequence
from dataclasses import field as dataclass_field
from typing import Any, NamedTuple

from ..mechanisms.kernels.kernel_table import KERNELS
from ..mechanisms.mechanism import NONE
from ..mechanisms.patterns.pattern_table import PATTERNS
from ..mechanisms.score_table import SCORE_FUNCTIONS
from ..mechanisms.talking_heads import DYNAMIC_PROJECTIONS, IDENTITY, TALKING_HEADS, TALKING_HEADS_INITS

__all__ = [
    "FIELD_TEXTS",
    "OPTIONAL_FIELDS",
    "PLACE_WORDINGS",
    "VARIANT_FIELDS",
    "VariantField",
    "check_choice",
    "describe_field",
    "get_card_text",
    "look_up_field",
    "make_dataclass_field",
    "with_variant_fields",
]


class VariantField(NamedTuple):
    """A field from this package, with its per-place fields.

    Args:
        name: the name of the field without a prefix.
        kind: the type of the value (int, str, bool, list, dict, or tuple for a pair of numbers).
        default: the value of the field if it is not set.
        prefixes: the prefixes of the field and of its per-place fields.
        choices: the allowed values. Plugins add to those that are a list.
        default_names: additional values that select the Transformers default.
        tags: the properties of the field: "by_layer" (may differ between layers), "latent" (is a rank), "talking"
            (configures talking heads), "pattern" (selects keys), "kernel" (configures linear attention), "extension"
            (selects an `AttentionExtension`), "from_scratch" (is not supported by conversion) and
            "not_in_transformers" (changes the function, so that a Transformers class must not load the weights).
        query_heads: for key/value heads, the name of the field with the number of query heads.
        model_wide_prefixes: the prefixes whose fields have the same value in all layers, even if `tags` contains
            "by_layer".
        inherits: True if a per-place field that is None uses the value of the field without a prefix.
    """

    name: str
    kind: type
    default: Any = None
    prefixes: tuple[str, ...] = ("",)
    choices: Sequence[str] = ()
    default_names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    query_heads: str | None = None
    model_wide_prefixes: tuple[str, ...] = ()
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


STACK_PREFIXES, ALL_PREFIXES = ("", "encoder_"), ("", "encoder_", "cross_")
TALKING_TAGS, FROM_SCRATCH_TAGS = ("talking", "by_layer"), ("from_scratch", "not_in_transformers")
EXTENSION_TAGS = ("extension", "not_in_transformers")
VARIANT_FIELDS = (
    VariantField(
        "num_key_value_heads", int, prefixes=STACK_PREFIXES, tags=("by_layer",), query_heads="num_attention_heads"
    ),
    VariantField("value_head_dim", int, tags=FROM_SCRATCH_TAGS),
    VariantField(
        "kv_lora_rank", int, prefixes=ALL_PREFIXES, tags=("latent", "by_layer"), model_wide_prefixes=("cross_",)
    ),
    VariantField("per_layer_values", dict),
    VariantField(
        "talking_heads",
        str,
        None,
        ALL_PREFIXES,
        TALKING_HEADS,
        tags=(*TALKING_TAGS, "not_in_transformers"),
        inherits=True,
    ),
    VariantField("num_softmax_heads", int, None, ALL_PREFIXES, tags=TALKING_TAGS, inherits=True),
    VariantField("num_value_heads", int, None, ALL_PREFIXES, tags=TALKING_TAGS, inherits=True),
    VariantField(
        "talking_heads_init", str, IDENTITY, ALL_PREFIXES, TALKING_HEADS_INITS, tags=TALKING_TAGS, inherits=True
    ),
    VariantField(
        "talking_heads_dynamic", list, (), ALL_PREFIXES, tuple(DYNAMIC_PROJECTIONS), tags=TALKING_TAGS, inherits=True
    ),
    VariantField(
        "attention_pattern", str, prefixes=STACK_PREFIXES, choices=PATTERNS, tags=("pattern", "not_in_transformers")
    ),
    VariantField("attention_window", int, prefixes=STACK_PREFIXES, tags=("pattern", "by_layer")),
    VariantField("attention_dilation", int, 1, prefixes=STACK_PREFIXES, tags=("pattern",)),
    VariantField("num_global_tokens", int, 0, prefixes=STACK_PREFIXES, tags=("pattern",)),
    VariantField("attention_block_size", int, prefixes=STACK_PREFIXES, tags=("pattern",)),
    VariantField("num_random_blocks", int, 0, prefixes=STACK_PREFIXES, tags=("pattern",)),
    VariantField("attention_seed", int, 0, prefixes=STACK_PREFIXES, tags=("pattern",)),
    VariantField("num_summary_tokens", int, 0, prefixes=STACK_PREFIXES, tags=("pattern",)),
    VariantField("split_attention_heads", bool, False, prefixes=STACK_PREFIXES, tags=("pattern",)),
    VariantField(
        "attention_kernel",
        str,
        prefixes=ALL_PREFIXES,
        choices=KERNELS,
        tags=("kernel", "by_layer", "not_in_transformers"),
    ),
    VariantField("attention_kernel_features", int, tags=("kernel",)),
    VariantField("attention_kernel_seed", int, 0, tags=("kernel",)),
    VariantField(
        "position_embedding_type", str, choices=("sinusoidal",), default_names=("absolute",), tags=FROM_SCRATCH_TAGS
    ),
    VariantField("score_function", str, None, ALL_PREFIXES, SCORE_FUNCTIONS, tags=FROM_SCRATCH_TAGS, inherits=True),
    VariantField("output_gate", str, None, ALL_PREFIXES, ("head", "element"), tags=EXTENSION_TAGS, inherits=True),
    VariantField("attention_sink", bool, None, ALL_PREFIXES, tags=EXTENSION_TAGS, inherits=True),
    VariantField("clipped_softmax", tuple, None, ALL_PREFIXES, tags=EXTENSION_TAGS, inherits=True),
    VariantField("knocking_heads", str, None, ALL_PREFIXES, ("value", "all"), tags=EXTENSION_TAGS, inherits=True),
    VariantField("dex", bool, None, ALL_PREFIXES, tags=EXTENSION_TAGS, inherits=True),
)

_FIELDS_BY_NAME = {prefix + field.name: (prefix, field) for field in VARIANT_FIELDS for prefix in field.prefixes}
# Fields that are only saved if they are set. Fields without a prefix are always saved, except for extensions.
OPTIONAL_FIELDS = (
    "value_head_dim",
    *(
        prefix + field.name
        for field in VARIANT_FIELDS
        for prefix in field.prefixes
        if field.inherits and (prefix or "extension" in field.tags)
    ),
)


def look_up_field(name: str) -> tuple[str, VariantField]:
    """Return the prefix and the `VariantField` of a field."""
    return _FIELDS_BY_NAME[name]


def check_choice(name: str, value: Any) -> None:
    """Check that the value of a field is one of its choices or None.

    Raises:
        ValueError: if the value is not one of the choices.
    """
    prefix, field = look_up_field(name)
    known = (*field.get_choices(prefix), *field.default_names)
    for choice in value if field.kind is list and isinstance(value, list | tuple) else (value,):
        if field.choices and choice is not None and choice not in known:
            plugins = " If a plugin registers it, load the plugin first." if isinstance(field.choices, list) else ""
            raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {choice!r}.{plugins}")


def make_dataclass_field(name: str) -> Any:
    """Create the dataclass field of a configuration for a field in the table.

    Its metadata marks it as a field from this package ("variant") and contains its tags.
    """
    prefix, field = look_up_field(name)
    tags = {tag: True for tag in field.tags if tag != "by_layer" or prefix not in field.model_wide_prefixes}
    heads = {} if field.query_heads is None else {"query_heads": field.query_heads}
    return dataclass_field(default=field.get_default(prefix), metadata={"variant": True, **tags, **heads})


def with_variant_fields(*prefixes: str, inherits: bool = False) -> Callable[[type], type]:
    """Return a class decorator that adds the fields in the table to a dataclass, except those that it already has.

    Args:
        prefixes: the prefixes of the fields.
        inherits: True to add only the fields that inherit their value.
    """

    def add_fields(cls: type) -> type:
        rows = [field for field in VARIANT_FIELDS if field.inherits or not inherits]
        for name in (prefix + field.name for prefix in prefixes for field in rows if prefix in field.prefixes):
            if not hasattr(cls, name):
                cls.__annotations__[name] = Any
                setattr(cls, name, make_dataclass_field(name))
        return cls

    return add_fields


class PlaceWording(NamedTuple):
    """The words that describe a place, such as the encoder, in field descriptions and on model cards."""

    attention: str
    layer: str
    place: str  # this word and those below are used on model cards
    owner: str
    softmax: str
    token: str


PLACE_WORDINGS = {
    "": PlaceWording(
        attention="self-attention (in encoder-decoders: of the decoder)",
        layer="each layer (in encoder-decoders: of the decoder)",
        place="self-attention",
        owner="self-attention",
        softmax="the softmax in self-attention",
        token="token",
    ),
    "encoder_": PlaceWording(
        attention="the self-attention of the encoder",
        layer="each encoder layer",
        place="the self-attention of the encoder",
        owner="the encoder",
        softmax="the softmax in the self-attention of the encoder",
        token="token",
    ),
    "cross_": PlaceWording(
        attention="cross-attention",
        layer="the cross-attention of each decoder layer",
        place="cross-attention",
        owner="all cross-attention modules",
        softmax="the softmax in cross-attention",
        token="source token",
    ),
}


class FieldDescription(NamedTuple):
    """The descriptions of a field, which may contain the words of a `PlaceWording` in braces.

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
        card="latent dimension in {place}",
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
        card="window size (tokens) in {place}",
    ),
    "attention_dilation": FieldDescription("step between the tokens in a window or block of {attention}"),
    "num_global_tokens": FieldDescription("number of global tokens at the start of the text (only encoders)"),
    "attention_block_size": FieldDescription(
        "block size in tokens of {attention}; for `strided`, the stride", card="block size (tokens) in {place}"
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
    "dex": FieldDescription(
        "DEX: subtract a learned projection of each head's output from the output",
        card="DEX",
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
    prefix, field = look_up_field(name)
    text = FIELD_TEXTS[field.name].help.format(**PLACE_WORDINGS[prefix]._asdict())
    text += f"; only for {PLACE_WORDINGS[prefix].attention}" if prefix and field.inherits else ""
    return f"{text}; the same for all layers" if prefix in field.model_wide_prefixes else text


def get_card_text(name: str) -> str:
    """Return the description of a field's value for model cards, or "" if it has none."""
    prefix, field = look_up_field(name)
    return (FIELD_TEXTS[field.name].card or "").format(**PLACE_WORDINGS[prefix]._asdict())
