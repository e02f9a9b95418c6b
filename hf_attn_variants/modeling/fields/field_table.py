"""The table of the fields that variants add to a configuration: a row each.

A field is one stack's. Its twins in an encoder-decoder, `encoder_...` and `cross_...`, are of the same row. Nothing
here imports torch, for the flags of commands are made from it.
"""

from dataclasses import field as dataclass_field
from typing import Any, NamedTuple

from ..mechanisms.kernels.kernel_table import KERNELS
from ..mechanisms.mechanism import NONE
from ..mechanisms.patterns.pattern_table import PATTERNS
from ..mechanisms.talking_heads import DYNAMIC_PROJECTIONS, IDENTITY, TALKING_HEADS, TALKING_HEADS_INITS

__all__ = ["FIELDS", "OPTIONAL_FIELDS", "Field", "check_choice", "row_of", "variant_field"]


class Place(NamedTuple):
    """The words for the attentions that a prefix stands for, in descriptions and on model cards."""

    attention: str
    layer: str
    here: str  # on cards, as what follows
    whose: str
    softmax: str
    token: str

    def words(self) -> dict[str, str]:
        """Return what a text may name in braces."""
        return {**self._asdict(), "owner": self.whose + ("'" if self.whose.endswith("s") else "'s")}


PLACES = {
    "": Place(
        attention="self-attention (encoder-decoders: a decoder's)",
        layer="a layer (encoder-decoders: a decoder's)",
        here="self-attention",
        whose="self-attention",
        softmax="self-attention's softmax",
        token="token",
    ),
    "encoder_": Place(
        attention="the encoder's attention",
        layer="an encoder layer",
        here="the encoder's attention",
        whose="the encoder",
        softmax="the softmax of the encoder's attention",
        token="token",
    ),
    "cross_": Place(
        attention="cross-attention",
        layer="a decoder layer's cross-attention",
        here="cross-attention",
        whose="all cross-attentions",
        softmax="cross-attention's softmax",
        token="source token",
    ),
}


class Field(NamedTuple):
    """One row.

    Args:
        name: of the field without a prefix.
        kind: int, str, bool, or a list or dictionary.
        help: what it is, in a line; words of its `Place` in braces.
        default: what it is where nothing is given.
        prefixes: of itself and its twins.
        choices: of its values.
        default_names: values beside the choices that name the default of Transformers.
        facts: what is true of it: "by_layer" (each layer may have a value of its own), "latent" (the rank of one),
            "talking" (of talking heads), "pattern" (it says which keys are read), "kernel", "from_scratch" (no
            conversion gives it).
        query_heads: of key/value heads the field of the heads that share them.
        one_for_all: the prefixes of the twins that are one for all layers, whatever `facts` says.
        card: what a model's card says that its value is, likewise.
        inherits: whether a twin that is not given, which is None, is the field without a prefix.
        unknown_upstream: what it gives a model that upstream's classes have no form of, in the plural.
        unconvertible: what it gives a checkpoint that no conversion can start from, in the plural.
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
        """Its name, and those of its twins."""
        return tuple(prefix + self.name for prefix in self.prefixes)

    def described(self, prefix: str = "") -> str:
        """Return what the field, or the twin with this prefix, is."""
        text = self.help.format(**PLACES[prefix].words())
        text += f"; of {PLACES[prefix].attention} alone" if prefix and self.inherits else ""
        return f"{text}; one for all layers" if prefix in self.one_for_all else text

    def default_of(self, prefix: str = "") -> Any:
        """Return what the field, or the twin with this prefix, is where nothing is given."""
        return None if prefix and self.inherits else self.default

    def choices_of(self, prefix: str = "") -> tuple[str, ...]:
        """Return the values that the field, or the twin with this prefix, may have; () = any of its kind.

        A twin that inherits what may be None has a word for it, for None leaves it to the field without a prefix.
        """
        has_none = prefix and self.inherits and self.default is None
        return (*self.choices, NONE) if has_none and self.choices else tuple(self.choices)

    def on_card(self, prefix: str = "") -> str:
        """Return what a model's card says that its value, or that of the twin with this prefix, is."""
        return (self.card or "").format(**PLACES[prefix].words())


STACKS, ALL = ("", "encoder_"), ("", "encoder_", "cross_")
FIELDS = (
    Field(
        "num_key_value_heads",
        int,
        "key/value heads of {layer}; 1: multi-query",
        prefixes=STACKS,
        facts=("by_layer",),
        query_heads="num_attention_heads",
    ),
    Field(
        "value_head_dim",
        int,
        "size of the value heads of all attentions, where it is not that of the query and key heads",
        facts=("from_scratch",),
        card="numbers of a value head",
        unknown_upstream="value heads of another size than keys",
        unconvertible="values of another size than keys",
    ),
    Field(
        "kv_lora_rank",
        int,
        "numbers a token that {attention} makes its keys and values from; as many as the input has: the input itself, "
        "without loss",
        prefixes=ALL,
        facts=("latent", "by_layer"),
        one_for_all=("cross_",),
        card="numbers a {token} that {owner} keys and values are made from",
    ),
    Field("per_layer_values", dict, 'values that differ by layer, as JSON: {{"kv_lora_rank": [64, 32]}}'),
    Field(
        "talking_heads",
        str,
        "projections across heads",
        prefixes=ALL,
        choices=TALKING_HEADS,
        facts=("talking", "by_layer"),
        inherits=True,
        unknown_upstream="talking heads",
    ),
    Field(
        "num_softmax_heads",
        int,
        "talking heads: heads of the softmax",
        prefixes=ALL,
        facts=("talking", "by_layer"),
        inherits=True,
    ),
    Field(
        "num_value_heads",
        int,
        "talking heads: heads of the values; needs a weights projection to differ from the softmax heads",
        prefixes=ALL,
        facts=("talking", "by_layer"),
        inherits=True,
    ),
    Field(
        "talking_heads_init",
        str,
        "what new projections hold",
        IDENTITY,
        prefixes=ALL,
        choices=TALKING_HEADS_INITS,
        facts=("talking", "by_layer"),
        inherits=True,
    ),
    Field(
        "talking_heads_dynamic",
        list,
        "talking heads: input-dependent terms to add",
        (),
        prefixes=ALL,
        choices=tuple(DYNAMIC_PROJECTIONS),
        facts=("talking", "by_layer"),
        inherits=True,
    ),
    Field(
        "attention_pattern",
        str,
        "which tokens {attention} reads",
        prefixes=STACKS,
        choices=PATTERNS,
        facts=("pattern",),
        unknown_upstream="windows and other patterns",
    ),
    Field(
        "attention_window",
        int,
        "tokens in a window of {attention}, of a pattern or a hybrid kernel: half on each side; a decoder's: the last",
        prefixes=STACKS,
        facts=("pattern", "by_layer"),
        card="tokens in a window of {here}",
    ),
    Field(
        "attention_dilation",
        int,
        "step between the tokens of a window or block that {attention} reads",
        1,
        prefixes=STACKS,
        facts=("pattern",),
    ),
    Field(
        "num_global_tokens",
        int,
        "first tokens, of encoders, that read all and are read by all",
        0,
        prefixes=STACKS,
        facts=("pattern",),
    ),
    Field(
        "attention_block_size",
        int,
        "tokens in a block of {attention}; strided: the stride",
        prefixes=STACKS,
        facts=("pattern",),
        card="tokens in a block of {owner} pattern",
    ),
    Field(
        "num_random_blocks",
        int,
        "random_blocks: how many others a block of {attention} reads by chance",
        0,
        prefixes=STACKS,
        facts=("pattern",),
    ),
    Field(
        "attention_seed",
        int,
        "random_blocks: what those of {attention} are drawn from",
        0,
        prefixes=STACKS,
        facts=("pattern",),
    ),
    Field(
        "num_summary_tokens",
        int,
        "fixed: tokens at the end of a block of {attention} that all read",
        0,
        prefixes=STACKS,
        facts=("pattern",),
    ),
    Field(
        "split_attention_heads",
        bool,
        "strided, fixed: half of the heads of {attention} read near, the others far tokens",
        False,
        prefixes=STACKS,
        facts=("pattern",),
    ),
    Field(
        "attention_kernel",
        str,
        "what {attention} has in the place of a softmax: linear attention",
        prefixes=ALL,
        choices=KERNELS,
        facts=("kernel", "by_layer"),
        card="{softmax}",
        unknown_upstream="kernels",
    ),
    Field(
        "attention_kernel_features",
        int,
        "of kernels: width of learned maps, number of random vectors or of rows",
        facts=("kernel",),
    ),
    Field("attention_kernel_seed", int, "of kernels: what is drawn, is drawn from it", 0, facts=("kernel",)),
    Field(
        "position_embedding_type",
        str,
        "positions, where they are not the host's own",
        choices=("sinusoidal",),
        default_names=("absolute",),
        facts=("from_scratch",),
        unknown_upstream="sinusoidal positions",
    ),
    Field(
        "score_function",
        str,
        "scores, where they are no dot products",
        prefixes=ALL,
        choices=("additive",),
        facts=("from_scratch",),
        inherits=True,
        unknown_upstream="additive scores",
        unconvertible="other scores than dot products",
    ),
)


_ROWS = {prefix + row.name: (prefix, row) for row in FIELDS for prefix in row.prefixes}
# Fields that are stored only if they are set.
OPTIONAL_FIELDS = (
    "value_head_dim",
    *(prefix + row.name for row in FIELDS for prefix in row.prefixes[1:] if row.inherits),
)


def row_of(name: str) -> tuple[str, Field]:
    """Return the prefix of a field's name, and its row."""
    return _ROWS[name]


def check_choice(name: str, value: Any) -> None:
    """Check that a value of a field, of all layers or of one, is one of the field's choices; None is the default.

    Raises:
        ValueError: if it is not.
    """
    prefix, row = row_of(name)
    known = (*row.choices_of(prefix), *row.default_names)
    for each in value if row.kind is list and isinstance(value, list | tuple) else (value,):
        if row.choices and each is not None and each not in known:
            raise ValueError(f"`{name}` must be one of {', '.join(known)}; got {each!r}.")


def variant_field(name: str) -> Any:
    """Return the dataclass field of a configuration that a row of the table says.

    Its metadata has the description as "variant", and what the row says is true of it.
    """
    prefix, row = row_of(name)
    facts: dict[str, Any] = {fact: True for fact in row.facts if fact != "by_layer" or prefix not in row.one_for_all}
    if row.query_heads is not None:
        facts["query_heads"] = row.query_heads
    if prefix and row.inherits:
        facts["inherits"] = True
    return dataclass_field(default=row.default_of(prefix), metadata={"variant": row.described(prefix), **facts})
