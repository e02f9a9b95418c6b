"""Descriptions of the fields of configurations, for `--help`, model cards and messages of the package.

A repository does not include this file.
"""

from typing import NamedTuple

from .field_table import row_of

__all__ = ["FIELD_TEXTS", "PLACES", "FieldText", "card_text", "describe_field"]


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


class FieldText(NamedTuple):
    """The descriptions of one field, which may contain the words of a `Place` in braces.

    Args:
        help: description in one line.
        card: description of the value on a model card.
        not_in_transformers: property of the model that the classes of Transformers do not support, in the plural.
        unconvertible: property of a checkpoint that a conversion cannot start from, in the plural.
    """

    help: str
    card: str | None = None
    not_in_transformers: str | None = None
    unconvertible: str | None = None


FIELD_TEXTS = {
    "num_key_value_heads": FieldText("number of key/value heads in {layer}; 1 = multi-query"),
    "value_head_dim": FieldText(
        "size of a value head in all attention modules, if it differs from the size of a query head",
        card="size of a value head",
        not_in_transformers="value heads whose size differs from the key heads",
        unconvertible="value heads whose size differs from the key heads",
    ),
    "kv_lora_rank": FieldText(
        "rank of the latent from which {attention} computes keys and values; the width of the input "
        "caches the input itself, without loss",
        card="latent dimension in {here}",
    ),
    "per_layer_values": FieldText('values that differ between layers, as JSON: {{"kv_lora_rank": [64, 32]}}'),
    "talking_heads": FieldText(
        "talking-heads projections: of the logits, of the weights or of both", not_in_transformers="talking heads"
    ),
    "num_softmax_heads": FieldText("talking heads: number of softmax heads"),
    "num_value_heads": FieldText(
        "talking heads: number of value heads; differs from the softmax heads only with a weights projection"
    ),
    "talking_heads_init": FieldText("talking heads: initialization of new projections"),
    "talking_heads_dynamic": FieldText("talking heads: input-dependent projections to add"),
    "attention_pattern": FieldText(
        "pattern that selects the keys of {attention}", not_in_transformers="windows and other patterns"
    ),
    "attention_window": FieldText(
        "window size in tokens of {attention}, for patterns and hybrid kernels: half on each side, in "
        "decoders the most recent ones",
        card="window size (tokens) in {here}",
    ),
    "attention_dilation": FieldText("step between the tokens in a window or block of {attention}"),
    "num_global_tokens": FieldText("number of global tokens at the start of the text (only encoders)"),
    "attention_block_size": FieldText(
        "block size in tokens of {attention}; for `strided`, the stride", card="block size (tokens) in {here}"
    ),
    "num_random_blocks": FieldText("`random_blocks`: number of random blocks per block of {attention}"),
    "attention_seed": FieldText("`random_blocks`: seed of the random blocks of {attention}"),
    "num_summary_tokens": FieldText(
        "`fixed`: number of tokens at the end of each block of {attention} that all tokens attend to"
    ),
    "split_attention_heads": FieldText(
        "`strided`, `fixed`: half of the heads of {attention} attend to near tokens, the others to far tokens"
    ),
    "attention_kernel": FieldText(
        "kernel that replaces the softmax of {attention} (linear attention)",
        card="{softmax}",
        not_in_transformers="kernels",
    ),
    "attention_kernel_features": FieldText(
        "kernels: width of the learned features, number of random vectors or number of rows"
    ),
    "attention_kernel_seed": FieldText("kernels: seed of the random vectors"),
    "position_embedding_type": FieldText(
        "position embeddings, if they differ from those of the architecture",
        not_in_transformers="sinusoidal positions",
    ),
    "score_function": FieldText(
        "score function, if it differs from the dot product",
        not_in_transformers="additive scores",
        unconvertible="scores other than dot products",
    ),
}


def describe_field(name: str) -> str:
    """Return the description of a field in one line.

    Example:
        >>> describe_field("cross_kv_lora_rank")
    """
    prefix, row = row_of(name)
    text = FIELD_TEXTS[row.name].help.format(**PLACES[prefix].words())
    text += f"; only for {PLACES[prefix].attention}" if prefix and row.inherits else ""
    return f"{text}; the same for all layers" if prefix in row.one_for_all else text


def card_text(name: str) -> str:
    """Return the description of the value of a field on a model card."""
    prefix, row = row_of(name)
    return (FIELD_TEXTS[row.name].card or "").format(**PLACES[prefix].words())
