"""Configuration fields for kernels, patterns and talking heads, and their checks.

Fields without a prefix apply to self-attention, which is the decoder's self-attention in an encoder-decoder. Fields
with the prefix `encoder_` apply to the encoder, and fields with `cross_` to cross-attention. Cross-attention has no
pattern and attends to all encoder outputs.
"""

from dataclasses import dataclass, fields
from typing import Any

from ..mechanisms.head_sharing import get_kv_heads_field
from ..mechanisms.kernels.kernel_table import get_kernel_class, get_kernel_names
from ..mechanisms.mechanism import NONE, PREFIXES
from ..mechanisms.patterns.pattern_table import get_pattern_class, get_pattern_prefixes, has_pattern
from ..mechanisms.talking_heads import (
    BOTH,
    DYNAMIC,
    DYNAMIC_PROJECTIONS,
    IDENTITY,
    INIT,
    KIND,
    LOGITS,
    OUTPUT,
    SOFTMAX,
    TALKING_FIELDS,
    WEIGHTS,
    TalkingHeadsSettings,
    get_num_query_heads,
    get_per_layer_talking_heads_fields,
    get_settings_prefix,
    get_talking_heads_prefixes,
)
from ..ops.key_ranges import MAX_SIZE
from .field_checks import MAX_HEADS, check_integer_range
from .field_table import VARIANT_FIELDS, look_up_field, make_dataclass_field

__all__ = [
    "BlockPatternConfigMixin",
    "KernelConfigMixin",
    "check_kernels",
    "check_pattern_value",
    "check_patterns",
    "check_talking_heads",
    "has_kernel",
    "needs_only_padding_mask",
    "validate_talking_heads_value",
]

MAX_FEATURES, MAX_SEED = 2**16, 2**31


_Config: Any = object  # the type of the Transformers class with which the mixin is combined


@dataclass(kw_only=True, repr=False)
class KernelConfigMixin(_Config):
    """The kernel fields of all configurations in this package.

    Args:
        attention_kernel: the kernel that replaces the softmax of self-attention, with time and memory linear in the
            length. In an encoder-decoder, it applies to the decoder. The kernels are "elu", "relu", "hedgehog",
            "favor", "rfa", "hybrid" (with a softmax within `attention_window`) and "linformer" (encoders only). None
            selects the softmax, and can also be used for individual layers in `per_layer_values`.
        attention_kernel_features: the width of the learned features ("hedgehog"), the number of random vectors
            ("favor", "rfa") or the number of rows ("linformer"). The respective defaults are d, 4 d, 2 d and 4 d,
            where d is the head size. The default for "linformer" is at most the number of positions.
        attention_kernel_seed: the seed of the random vectors.
    """

    attention_kernel: str | None = make_dataclass_field("attention_kernel")
    attention_kernel_features: int | None = make_dataclass_field("attention_kernel_features")
    attention_kernel_seed: int = make_dataclass_field("attention_kernel_seed")

    @classmethod
    def get_kernel_fields(cls) -> tuple[str, ...]:
        """Return the fields that select a kernel or set its options."""
        return tuple(field.name for field in fields(cls) if "kernel" in field.metadata)


def has_kernel(config: Any, is_causal: bool | None = None) -> bool:
    """Return True if any attention module with this configuration has a kernel.

    Args:
        config: a configuration from this package or from Transformers.
        is_causal: True to check only the field without a prefix, which applies to decoder self-attention, or None to
            check all fields.
    """
    return bool(get_kernel_names(config, PREFIXES[:1] if is_causal else PREFIXES))


def needs_only_padding_mask(config: Any, is_causal: bool | None = None) -> bool:
    """Return True if masks only have to cover padding, because the attention modules handle causality and windows."""
    return has_pattern(config, is_causal) or has_kernel(config, is_causal)


def check_kernels(config: Any) -> None:
    """Check the kernel fields of a configuration.

    Raises:
        ValueError: if a size is invalid, or if the model does not support the kernel (see `AttentionKernel.check`).
    """
    check_integer_range("attention_kernel_seed", config.attention_kernel_seed, 0, MAX_SEED)
    if config.attention_kernel_features is not None:
        check_integer_range("attention_kernel_features", config.attention_kernel_features, 1, MAX_FEATURES)
    for field, name in get_kernel_names(config).items():
        get_kernel_class(name).check(config, field)


# The pattern fields other than the pattern's name, without prefixes, and their defaults.
PATTERN_SIZES = {
    row.name: row.default for row in VARIANT_FIELDS if "pattern" in row.tags and row.name != "attention_pattern"
}


@dataclass(kw_only=True, repr=False)
class BlockPatternConfigMixin:
    """The fields of block patterns.

    Args:
        attention_block_size: l, the number of tokens per block. For "strided", this is the stride. For
            "memory_compressed", it is the number of tokens that are combined into one key.
        num_random_blocks: for "random_blocks", the number of random blocks that a block attends to in addition to
            itself and its neighbors.
        attention_seed: for "random_blocks", the seed from which each layer's random blocks are drawn.
        num_summary_tokens: for "fixed", the number of tokens at the end of each block that all tokens attend to.
        split_attention_heads: for "strided" and "fixed", True if half of the heads attend to near tokens and the other
            half to far tokens. If False, all heads attend to both.
    """

    attention_block_size: int | None = make_dataclass_field("attention_block_size")
    num_random_blocks: int = make_dataclass_field("num_random_blocks")
    attention_seed: int = make_dataclass_field("attention_seed")
    num_summary_tokens: int = make_dataclass_field("num_summary_tokens")
    split_attention_heads: bool = make_dataclass_field("split_attention_heads")


def check_patterns(config: Any) -> None:
    """Check the pattern fields of the encoder and the decoder.

    Raises:
        ValueError: if a size is invalid or missing, or if the model does not support the pattern (see
            `AttentionPattern.check`).
    """
    for prefix in get_pattern_prefixes(config):
        for name in PATTERN_SIZES:
            check_pattern_value(prefix + name, getattr(config, prefix + name))
        if (pattern := getattr(config, f"{prefix}attention_pattern")) is None:
            continue
        for name in get_pattern_class(pattern).needed:
            if (value := getattr(config, prefix + name)) == PATTERN_SIZES[name]:
                raise ValueError(
                    f'`{prefix}{name}` must be set with `{prefix}attention_pattern="{pattern}"`, got {value}.'
                )
        block, summary = (getattr(config, prefix + name) for name in ("attention_block_size", "num_summary_tokens"))
        if summary > (block or summary):
            raise ValueError(
                f"`{prefix}num_summary_tokens` must be at most `{prefix}attention_block_size`, got {summary} "
                f"and {block}."
            )
        get_pattern_class(pattern).check(config, prefix)


def check_pattern_value(field: str, value: Any) -> None:
    """Check the value of a pattern field.

    Raises:
        ValueError: if the value is invalid. A window must be None or an even number of at least 2, a block size must
            be None or at least 1, and a dilation must be at least 1. `split_attention_heads` must be a boolean, and
            the other fields must be integers of at least 0.
    """
    if field.endswith("split_attention_heads"):
        if not isinstance(value, bool):
            raise ValueError(f"`{field}` must be True or False, got {value!r}.")
    elif value is not None or not field.endswith(("attention_window", "attention_block_size")):
        check_integer_range(field, value, 1 if field.endswith(("window", "dilation", "block_size")) else 0, MAX_SIZE)
        if field.endswith("attention_window") and value % 2:
            raise ValueError(f"`{field}` must be even, got {value}.")


def validate_talking_heads_value(config: Any, name: str, value: Any) -> Any:
    """Check the value of a talking-heads field in one layer and return it. `check_choice` must be called first.

    Raises:
        ValueError: if a head count is not an integer of at least 1.
    """
    prefix, row = look_up_field(name)
    if row.name == DYNAMIC:
        return [term for term in DYNAMIC_PROJECTIONS if term in (value or ())]
    if row.name in (SOFTMAX, OUTPUT):
        value = get_num_query_heads(config, prefix) if value is None else value
        check_integer_range(name, value, 1, MAX_HEADS)
        return value
    return None if value == NONE else value or row.default


def check_talking_heads(config: Any) -> None:
    """Check the talking-heads fields of each place and layer, and fill in the default values.

    Raises:
        ValueError: if a field requires a projection that `talking_heads` does not select, if the number of key/value
            heads does not divide the number of value heads, or if an encoder would inherit per-layer values.
    """
    for prefix in get_talking_heads_prefixes(config):
        for name in (prefix + field for field in TALKING_FIELDS[1:]):
            if (value := getattr(config, name)) is not None:
                setattr(config, name, validate_talking_heads_value(config, name, value))
        _check_talking_heads_is_set(config, prefix)
        group = get_settings_prefix(config, prefix)
        if prefix == "encoder_" and not group and get_per_layer_talking_heads_fields(config, ("",)):
            raise ValueError(
                f"`encoder_{KIND}` must be set if `per_layer_values` contains talking-heads fields for the decoder's "
                f'layers. Use "{NONE}" for an encoder without talking heads.'
            )
        for layer in range(config.get_num_layers(prefix + KIND)) if config.per_layer_values else (0,):
            if TalkingHeadsSettings.from_config(config, prefix, layer).kind is not None:
                _check_talking_heads_in_layer(config, prefix, group, layer)
    if not get_per_layer_talking_heads_fields(config, ("",)):
        talking = TalkingHeadsSettings.from_config(config, "", 0)
        counts = (talking.softmax, talking.output) if talking.kind else (config.num_attention_heads,) * 2
        config.num_softmax_heads, config.num_value_heads = counts


def _check_talking_heads_is_set(config: Any, prefix: str) -> None:
    """Check that `talking_heads` is set at a place if other talking-heads fields are set there."""
    if getattr(config, prefix + KIND) is not None or prefix + KIND in (config.per_layer_values or {}):
        return
    heads = config.num_attention_heads, get_num_query_heads(config, prefix)
    defaults: dict[str, tuple[Any, ...]] = {SOFTMAX: heads, OUTPUT: heads, INIT: (IDENTITY,), DYNAMIC: ([],)}
    for name in TALKING_FIELDS[1:]:
        value = getattr(config, prefix + name)
        if value is not None and (prefix or value not in defaults[name]):
            raise ValueError(
                f"`{prefix}{KIND}` must be set with `{prefix}{name}`, got None and `{prefix}{name}={value!r}`."
            )


def _check_talking_heads_in_layer(config: Any, prefix: str, settings_prefix: str, layer: int) -> None:
    talking, heads = TalkingHeadsSettings.from_config(config, prefix, layer), get_num_query_heads(config, prefix)
    needed = {SOFTMAX: LOGITS} if talking.softmax != heads else {}
    needed |= {OUTPUT: WEIGHTS} if talking.output != talking.softmax else {}
    pairs = [*needed.items(), *((DYNAMIC, DYNAMIC_PROJECTIONS[name]) for name in talking.dynamic)]
    for name, projection in pairs:
        if talking.kind not in (projection, BOTH):
            raise ValueError(
                f'`{settings_prefix}{KIND}` must be "{projection}" or "{BOTH}" for the value of '
                f"`{settings_prefix}{name}`, got {talking.kind!r}. The module has {heads} query heads, "
                f"{talking.softmax} softmax heads and {talking.output} value heads."
            )
    if needed and talking.init == IDENTITY:
        raise ValueError(
            f'`{settings_prefix}{INIT}` must be "random" if the numbers of heads differ, got "{IDENTITY}" for '
            f"{heads} query heads, {talking.softmax} softmax heads and {talking.output} value heads."
        )
    kv_field = get_kv_heads_field(prefix)
    kv_heads = config.get_layer_value(kv_field, layer)
    if kv_heads != heads and talking.output % kv_heads:
        raise ValueError(
            f"`{kv_field}` must divide `{settings_prefix}num_value_heads`, got {kv_heads} for {talking.output} value "
            f"heads."
        )
