"""The table of the fields that variants add to a configuration: a row each.

A field is one stack's. Its twins in an encoder-decoder, `encoder_...` and `cross_...`, are of the same row. Nothing
here imports torch, for the flags of commands are made from it.
"""

from dataclasses import field as dataclass_field
from typing import Any, NamedTuple

from ..mechanisms.kernels.kernel_table import KERNELS
from ..mechanisms.patterns.pattern_table import PATTERNS
from .field_checks import DYNAMIC_PROJECTIONS, TALKING_HEADS, TALKING_HEADS_INITS

__all__ = ["FIELDS", "Field", "row_of", "variant_field"]

# What a field is of, by its prefix.
LAYERS = {"": "a layer (encoder-decoders: a decoder's)", "encoder_": "an encoder layer"}
ATTENTIONS = {
    "": "self-attention (encoder-decoders: a decoder's)",
    "encoder_": "the encoder's attention",
    "cross_": "cross-attention",
}


class Field(NamedTuple):
    """One row.

    Args:
        name: of the field without a prefix.
        kind: int, str, bool, or a list or dictionary.
        help: what it is, in a line; {layer} and {attention} are those of its stack.
        default: what it is where nothing is given.
        prefixes: of itself and its twins.
        choices: of its values.
        facts: what is true of it: "by_layer" (each layer may have a value of its own), "latent" (the rank of one),
            "pattern" (it says which keys are read), "kernel", "from_scratch" (no conversion gives it).
        query_heads: of key/value heads the field of the heads that share them.
        one_for_all: the prefixes of the twins that are one for all layers, whatever `facts` says.
    """

    name: str
    kind: type
    help: str
    default: Any = None
    prefixes: tuple[str, ...] = ("",)
    choices: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    query_heads: str | None = None
    one_for_all: tuple[str, ...] = ()

    def described(self, prefix: str = "") -> str:
        """Return what the field, or one of its twins, is."""
        text = self.help.format(layer=LAYERS.get(prefix), attention=ATTENTIONS[prefix])
        return f"{text}; one for all layers" if prefix in self.one_for_all else text


STACKS = ("", "encoder_")
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
        "kv_lora_rank",
        int,
        "numbers a token that {attention} makes its keys and values from; as many as the input has: the input itself, "
        "without loss",
        prefixes=("", "encoder_", "cross_"),
        facts=("latent", "by_layer"),
        one_for_all=("cross_",),
    ),
    Field("per_layer_values", dict, 'values that differ by layer, as JSON: {{"kv_lora_rank": [64, 32]}}'),
    Field("talking_heads", str, "projections across heads", choices=TALKING_HEADS),
    Field("num_softmax_heads", int, "talking heads: heads of the softmax"),
    Field("num_value_heads", int, "talking heads: heads of the values"),
    Field("talking_heads_init", str, "what new projections hold", "identity", choices=TALKING_HEADS_INITS),
    Field(
        "talking_heads_dynamic",
        list,
        "talking heads: input-dependent terms to add",
        (),
        choices=tuple(DYNAMIC_PROJECTIONS),
    ),
    Field(
        "attention_pattern",
        str,
        "which tokens {attention} reads",
        prefixes=STACKS,
        choices=PATTERNS,
        facts=("pattern",),
    ),
    Field(
        "attention_window",
        int,
        "tokens in a window of {attention}, of a pattern or a hybrid kernel: half on each side; a decoder's: the last",
        prefixes=STACKS,
        facts=("pattern", "by_layer"),
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
        prefixes=("", "encoder_", "cross_"),
        choices=KERNELS,
        facts=("kernel", "by_layer"),
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
        facts=("from_scratch",),
    ),
    Field(
        "score_function",
        str,
        "scores, where they are no dot products",
        choices=("additive",),
        facts=("from_scratch",),
    ),
)


def row_of(name: str) -> tuple[str, Field]:
    """Return the prefix of a field's name, and its row."""
    return next((prefix, row) for row in FIELDS for prefix in row.prefixes if prefix + row.name == name)


def variant_field(name: str) -> Any:
    """Return the dataclass field of a configuration that a row of the table says.

    Its metadata has the description as "variant", and what the row says is true of it.
    """
    prefix, row = row_of(name)
    facts: dict[str, Any] = {fact: True for fact in row.facts if fact != "by_layer" or prefix not in row.one_for_all}
    if row.query_heads is not None:
        facts["query_heads"] = row.query_heads
    return dataclass_field(default=row.default, metadata={"variant": row.described(prefix), **facts})
