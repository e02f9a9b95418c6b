"""The table of the fields that variants add to a configuration, with one row per field.

The per-place fields of an encoder-decoder (`encoder_...`, `cross_...`) share the row of the field without a prefix.
This module does not import torch, because the flags of the commands are made from it.
"""

from dataclasses import field as dataclass_field
from typing import Any, NamedTuple

from ..mechanisms.kernels.kernel_table import KERNELS
from ..mechanisms.mechanism import NONE
from ..mechanisms.patterns.pattern_table import PATTERNS
from ..mechanisms.talking_heads import DYNAMIC_PROJECTIONS, IDENTITY, TALKING_HEADS, TALKING_HEADS_INITS

__all__ = ["FIELDS", "OPTIONAL_FIELDS", "Field", "check_choice", "row_of", "variant_field"]


class Place(NamedTuple):
    """The words for the attentions of a prefix, in descriptions and on model cards."""

    attention: str
    layer: str
    here: str  # on cards, as are the following
    whose: str
    softmax: str
    token: str

    def words(self) -> dict[str, str]:
        """Return the words that a text may contain in braces."""
        return self._asdict()


PLACES = {
    "": Place(
        attention="self-attention (in encoder-decoders: of the decoder)",
        layer="each layer (in encoder-decoders: of the decoder)",
        here="self-attention",
        whose="self-attention",
        softmax="the softmax in self-attention",
        token="token",
    ),
    "encoder_": Place(
        attention="the self-attention of the encoder",
        layer="each encoder layer",
        here="the self-attention of the encoder",
        whose="the encoder",
        softmax="the softmax in the self-attention of the encoder",
        token="token",
    ),
    "cross_": Place(
        attention="cross-attention",
        layer="the cross-attention of each decoder layer",
        here="cross-attention",
        whose="all cross-attention modules",
        softmax="the softmax in cross-attention",
        token="source token",
    ),
}


class Field(NamedTuple):
    """A row of the table.

    Args:
        name: name of the field without a prefix.
        kind: type of the value: int, str, bool, list or dict.
        help: description in one line, with words of a `Place` in braces.
        default: value of the field if it is not set.
        prefixes: prefixes of the field and of its per-place fields.
        choices: allowed values.
        default_names: further values that name the default of Transformers.
        facts: properties of the field: "by_layer" (it may differ between layers), "latent" (it is a rank), "talking"
            (it belongs to talking heads), "pattern" (it selects keys), "kernel" (it belongs to linear attention) or
            "from_scratch" (a conversion cannot set it).
        query_heads: for key/value heads, the field with the number of query heads.
        one_for_all: prefixes whose field has the same value in all layers, regardless of `facts`.
        card: description of the value on a model card, with words of a `Place` in braces.
        inherits: whether a per-place field that is None uses the value of the field without a prefix.
        unknown_upstream: property of the model that the classes of Transformers do not support, in the plural.
        unconvertible: property of a checkpoint that a conversion cannot start from, in the plural.
    """

    name: str
    kind: type
    help: str
    default: Any = None
    prefixes: tuple[str, ...] = ("",)
    choices: tuple[str, ...] = ()
    default_names: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    query_heads: str | None = None
    one_for_all: tuple[str, ...] = ()
    card: str | None = None
    inherits: bool = False
    unknown_upstream: str | None = None
    unconvertible: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the field and of its per-place fields."""
        return tuple(prefix + self.name for prefix in self.prefixes)

    def described(self, prefix: str = "") -> str:
        """Return the description of the field with this prefix."""
        text = self.help.format(**PLACES[prefix].words())
        text += f"; only for {PLACES[prefix].attention}" if prefix and self.inherits else ""
        return f"{text}; the same for all layers" if prefix in self.one_for_all else text

    def default_of(self, prefix: str = "") -> Any:
        """Return the value of the field with this prefix if it is not set."""
        return None if prefix and self.inherits else self.default

    def choices_of(self, prefix: str = "") -> tuple[str, ...]:
        """Return the allowed values of the field with this prefix; () = any value of its type.

        A per-place field that inherits its value has the choice "none", because None selects the inherited value.
        """
        has_none = prefix and self.inherits and self.default is None
        return (*self.choices, NONE) if has_none and self.choices else tuple(self.choices)

    def on_card(self, prefix: str = "") -> str:
        """Return the description of the value of the field with this prefix on a model card."""
        return (self.card or "").format(**PLACES[prefix].words())


STACKS, ALL = ("", "encoder_"), ("", "encoder_", "cross_")
FIELDS = (
    Field(
        "num_key_value_heads",
        int,
        "number of key/value heads in {layer}; 1 = multi-query",
        prefixes=STACKS,
        facts=("by_layer",),
        query_heads="num_attention_heads",
    ),
    Field(
        "value_head_dim",
        int,
        "size of a value head in all attention modules, if it differs from the size of a query head",
        facts=("from_scratch",),
        card="size of a value head",
        unknown_upstream="value heads whose size differs from the key heads",
        unconvertible="value heads whose size differs from the key heads",
    ),
    Field(
        "kv_lora_rank",
        int,
        "rank of the latent from which {attention} computes keys and values; the width of the input caches the input "
        "itself, without loss",
        prefixes=ALL,
        facts=("latent", "by_layer"),
        one_for_all=("cross_",),
        card="latent dimension in {here}",
    ),
    Field("per_layer_values", dict, 'values that differ between layers, as JSON: {{"kv_lora_rank": [64, 32]}}'),
    Field(
        "talking_heads",
        str,
        "talking-heads projections: of the logits, of the weights or of both",
        prefixes=ALL,
        choices=TALKING_HEADS,
        facts=("talking", "by_layer"),
        inherits=True,
        unknown_upstream="talking heads",
    ),
    Field(
        "num_softmax_heads",
        int,
        "talking heads: number of softmax heads",
        prefixes=ALL,
        facts=("talking", "by_layer"),
        inherits=True,
    ),
    Field(
        "num_value_heads",
        int,
        "talking heads: number of value heads; differs from the softmax heads only with a weights projection",
        prefixes=ALL,
        facts=("talking", "by_layer"),
        inherits=True,
    ),
    Field(
        "talking_heads_init",
        str,
        "talking heads: initialization of new projections",
        IDENTITY,
        prefixes=ALL,
        choices=TALKING_HEADS_INITS,
        facts=("talking", "by_layer"),
        inherits=True,
    ),
    Field(
        "talking_heads_dynamic",
        list,
        "talking heads: input-dependent projections to add",
        (),
        prefixes=ALL,
        choices=tuple(DYNAMIC_PROJECTIONS),
        facts=("talking", "by_layer"),
        inherits=True,
    ),
    Field(
        "attention_pattern",
        str,
        "pattern that selects the keys of {attention}",
        prefixes=STACKS,
        choices=PATTERNS,
        facts=("pattern",),
        unknown_upstream="windows and other patterns",
    ),
    Field(
        "attention_window",
        int,
        "window size in tokens of {attention}, for patterns and hybrid kernels: half on each side, in decoders the "
        "most recent ones",
        prefixes=STACKS,
        facts=("pattern", "by_layer"),
        card="window size (tokens) in {here}",
    ),
    Field(
        "attention_dilation",
        int,
        "step between the tokens in a window or block of {attention}",
        1,
        prefixes=STACKS,
        facts=("pattern",),
    ),
    Field(
        "num_global_tokens",
        int,
        "number of global tokens at the start of the text (only encoders)",
        0,
        prefixes=STACKS,
        facts=("pattern",),
    ),
    Field(
        "attention_block_size",
        int,
        "block size in tokens of {attention}; for `strided`, the stride",
        prefixes=STACKS,
        facts=("pattern",),
        card="block size (tokens) in {here}",
    ),
    Field(
        "num_random_blocks",
        int,
        "`random_blocks`: number of random blocks per block of {attention}",
        0,
        prefixes=STACKS,
        facts=("pattern",),
    ),
    Field(
        "attention_seed",
        int,
        "`random_blocks`: seed of the random blocks of {attention}",
        0,
        prefixes=STACKS,
        facts=("pattern",),
    ),
    Field(
        "num_summary_tokens",
        int,
        "`fixed`: number of tokens at the end of each block of {attention} that all tokens attend to",
        0,
        prefixes=STACKS,
        facts=("pattern",),
    ),
    Field(
        "split_attention_heads",
        bool,
        "`strided`, `fixed`: half of the heads of {attention} attend to near tokens, the others to far tokens",
        False,
        prefixes=STACKS,
        facts=("pattern",),
    ),
    Field(
        "attention_kernel",
        str,
        "kernel that replaces the softmax of {attention} (linear attention)",
        prefixes=ALL,
        choices=KERNELS,
        facts=("kernel", "by_layer"),
        card="{softmax}",
        unknown_upstream="kernels",
    ),
    Field(
        "attention_kernel_features",
        int,
        "kernels: width of the learned features, number of random vectors or number of rows",
        facts=("kernel",),
    ),
    Field("attention_kernel_seed", int, "kernels: seed of the random vectors", 0, facts=("kernel",)),
    Field(
        "position_embedding_type",
        str,
        "position embeddings, if they differ from those of the architecture",
        choices=("sinusoidal",),
        default_names=("absolute",),
        facts=("from_scratch",),
        unknown_upstream="sinusoidal positions",
    ),
    Field(
        "score_function",
        str,
        "score function, if it differs from the dot product",
        prefixes=ALL,
        choices=("additive",),
        facts=("from_scratch",),
        inherits=True,
        unknown_upstream="additive scores",
        unconvertible="scores other than dot products",
    ),
)


_ROWS = {prefix + row.name: (prefix, row) for row in FIELDS for prefix in row.prefixes}
# Fields that are stored only if they are set.
OPTIONAL_FIELDS = (
    "value_head_dim",
    *(prefix + row.name for row in FIELDS for prefix in row.prefixes[1:] if row.inherits),
)


def row_of(name: str) -> tuple[str, Field]:
    """Return the prefix and the row of a field."""
    return _ROWS[name]


def check_choice(name: str, value: Any) -> None:
    """Check that the value of a field is one of its choices; None is the default.

    Raises:
        ValueError: if the value is not one of the choices.
    """
    prefix, row = row_of(name)
    known = (*row.choices_of(prefix), *row.default_names)
    for each in value if row.kind is list and isinstance(value, list | tuple) else (value,):
        if row.choices and each is not None and each not in known:
            raise ValueError(f"`{name}` must be one of {', '.join(known)}; got {each!r}.")


def variant_field(name: str) -> Any:
    """Return the dataclass field of a configuration for a row of the table.

    Its metadata contains the description ("variant") and the facts of the row.
    """
    prefix, row = row_of(name)
    facts: dict[str, Any] = {fact: True for fact in row.facts if fact != "by_layer" or prefix not in row.one_for_all}
    if row.query_heads is not None:
        facts["query_heads"] = row.query_heads
    if prefix and row.inherits:
        facts["inherits"] = True
    return dataclass_field(default=row.default_of(prefix), metadata={"variant": row.described(prefix), **facts})
