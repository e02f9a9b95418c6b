"""Checks for individual configuration fields, such as head counts, ranks, sizes and misspelled names."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ..variant_names import ATTN_VARIANTS_VERSION, CONFIG_FORMAT

__all__ = [
    "MAX_LABELS",
    "MAX_LAYERS",
    "check_buckets",
    "check_format",
    "check_head_size",
    "check_position_type",
    "check_size",
    "check_value_groups",
    "explain_type_errors",
    "find_closest_match",
    "remove_place_prefix",
    "validate_count",
    "validate_kv_heads",
    "validate_rank",
    "validate_value_head_dim",
]

# These limits are far above real model sizes. Without them, loading a malicious configuration could take hours.
MAX_HEADS, MAX_HEAD_DIM, MAX_LAYERS, MAX_LABELS = 2**16, 2**16, 10_000, 2**16

# Words in other configurations that correspond to words in field names, and the minimum similarity of two names.
OTHER_WORDS, ALIKE = {"kv": "key_value", "groups": "heads", "initialization": "init"}, 0.82


@lru_cache(maxsize=4096)  # every keyword of every new configuration is looked up
def _find_closest_match(name: str, known: tuple[str, ...]) -> str | None:
    if (bare := remove_place_prefix(name)) in known:
        return bare
    spelled = {spelling: candidate for candidate in known for spelling in (_sort_words(candidate), candidate)}
    for spelling in (name, _sort_words(name), bare, _sort_words(bare)):
        if matches := difflib.get_close_matches(spelling, spelled, n=1, cutoff=ALIKE):
            return spelled[matches[0]]
    return None


def find_closest_match(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a name, or None if no name is similar.

    The order of the words and place prefixes, such as `decoder_` in `decoder_num_kv_heads`, are ignored.
    """
    return _find_closest_match(name.lower(), tuple(known))


def remove_place_prefix(name: str) -> str:
    """Remove the prefixes for the encoder, the decoder and cross-attention from a name."""
    return re.sub("^((encoder|decoder|cross)_)+", "", name)


def _sort_words(name: str) -> str:
    words = "_".join(OTHER_WORDS.get(word, word) for word in name.split("_")).split("_")
    return "_".join(sorted(words))


def validate_kv_heads(field: str, value: int | None, heads: int) -> int:
    """Check a number of key/value heads and return it.

    Args:
        field: the name of the field.
        value: the value of the field, or None for one key/value head per query head.
        heads: the number of query heads.

    Raises:
        ValueError: if the number is not an integer of at least 1 that divides `heads`.
    """
    count = validate_count(field, value, heads)
    if heads % count:
        raise ValueError(f"`{field}` must divide `num_attention_heads`, got {count} for {heads} heads.")
    return count


def validate_rank(field: str, value: int | None, width: int) -> int | None:
    """Check the rank of a latent and return it.

    Args:
        field: the name of the field.
        value: the value of the field, or None if there is no latent.
        width: the size of the latent's input.

    Raises:
        ValueError: if the rank is not an integer from 1 to `width`.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= width:
        raise ValueError(
            f"`{field}` must be an integer from 1 to {width}, the input size of the key and value projections, got "
            f"{value!r}. Use None for no latent."
        )
    return value


def validate_count(field: str, value: int | None, default: int | None = None) -> int:
    """Check a number of heads and return it. If it is None, check and return `default`.

    Raises:
        ValueError: if the number is not an integer from 1 to `MAX_HEADS`.
    """
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{field}` must be a whole number of at least 1, got {value!r}.")
    if value > MAX_HEADS:
        raise ValueError(f"`{field}` must be a whole number of at most {MAX_HEADS}, got {value}.")
    return value


def check_size(field: str, value: int, least: int, most: int | None = None) -> None:
    """Check that a field's value is an integer from `least` to `most`. If `most` is None, there is no upper limit.

    Raises:
        ValueError: if it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"`{field}` must be a whole number {bounds}, got {value!r}.")


def check_head_size(heads: int, hidden_size: int) -> None:
    """Check that the number of query heads divides the hidden size.

    Raises:
        ValueError: if it does not.
    """
    if hidden_size % heads:
        raise ValueError(
            f"`num_attention_heads` must divide `hidden_size`, got {heads} heads for a hidden size of {hidden_size}."
        )


def check_value_groups(field: str, kv_heads: int, heads: int, value_heads: int, prefix: str = "") -> None:
    """Check that the value heads can be divided equally among the key/value heads.

    Args:
        field: the name of the key/value heads field.
        kv_heads, heads, value_heads: the number of key/value heads, query heads and value heads.
        prefix: the prefix of the value heads field.

    Raises:
        ValueError: if the number of grouped key/value heads does not divide the number of value heads.
    """
    if kv_heads != heads and value_heads % kv_heads:
        raise ValueError(
            f"`{field}` must divide `{prefix}num_value_heads`, got {kv_heads} for {value_heads} value heads."
        )


def validate_value_head_dim(value: int | None, head_dims: Iterable[int]) -> int | None:
    """Check the size of a value head and return it, or None if it is the same as the size of query and key heads.

    Args:
        value: the value of the field.
        head_dims: d in the encoder and in the decoder.

    Raises:
        ValueError: if the size is not an integer from 1 to `MAX_HEAD_DIM`.
    """
    if value is None:
        return None
    check_size("value_head_dim", value, 1, MAX_HEAD_DIM)
    return None if set(head_dims) == {value} else value


def check_position_type(value: str | None, known: Sequence[str | None], model_type: str) -> None:
    """Check that a model type supports a `position_embedding_type`.

    Raises:
        ValueError: if `value` is not in `known`.
    """
    if value not in known:
        raise ValueError(f"`position_embedding_type` for {model_type!r} must be one of {known}, got {value!r}.")


def check_buckets(config: Any) -> None:
    """Check the buckets of the relative position bias in a T5 configuration.

    Raises:
        ValueError: if there are too few buckets, or if the largest distance has its own bucket.
    """
    buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    # An encoder uses half of the buckets for each side. Half of the buckets for a side contain a single distance each,
    # and the others contain a range of distances.
    if buckets < 4 or distance <= buckets // 2:
        raise ValueError(
            "`relative_attention_num_buckets` must be at least 4, and `relative_attention_max_distance` "
            f"must be more than half of it, got {buckets} and {distance}."
        )


def check_format(value: Any) -> None:
    """Check the format number of a configuration's fields.

    Raises:
        ValueError: if the number differs from the format of this version.
    """
    if type(value) is not int or value != CONFIG_FORMAT:
        raise ValueError(
            f"`attn_variants_format` must be {CONFIG_FORMAT} for hf_attn_variants {ATTN_VARIANTS_VERSION}, got "
            f"{value!r}. Load the model with the version that saved it, or convert the original model again."
        )


@contextmanager
def explain_type_errors() -> Iterator[None]:
    """Convert errors from Transformers, which does not check the types of most fields, into `ValueError`.

    Raises:
        ValueError: if a field has a value of the wrong type.
    """
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"All configuration fields must have values of the correct type, got a value that raises {reason}."
        ) from error
