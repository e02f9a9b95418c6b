"""Checks for individual configuration fields, such as head counts, ranks, sizes and misspelled names."""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

__all__ = [
    "MAX_HEADS",
    "MAX_LABELS",
    "MAX_LAYERS",
    "check_integer_range",
    "check_relative_position_buckets",
    "explain_type_errors",
    "find_closest_match",
    "remove_field_prefix",
    "validate_kv_heads",
]

# These limits are far above real model sizes. Without them, loading a malicious configuration could take hours.
MAX_HEADS, MAX_LAYERS, MAX_LABELS = 2**16, 10_000, 2**16

# Words in other configurations that correspond to words in field names, and the minimum similarity of two names.
SYNONYMS, MIN_NAME_SIMILARITY = {"kv": "key_value", "groups": "heads", "initialization": "init"}, 0.82


@lru_cache(maxsize=4096)  # every keyword of every new configuration is looked up
def find_closest_match(name: str, known: tuple[str, ...]) -> str | None:
    """Return the known name that is most similar to a name, or None if no name is similar.

    Word order is ignored, and so are place prefixes, such as `decoder_` in `decoder_num_kv_heads`.
    """
    name = name.lower()
    if (unprefixed_name := remove_field_prefix(name)) in known:
        return unprefixed_name
    names_by_spelling = {
        spelling: candidate for candidate in known for spelling in (_sort_words(candidate), candidate)
    }
    for spelling in (name, _sort_words(name), unprefixed_name, _sort_words(unprefixed_name)):
        if matches := difflib.get_close_matches(spelling, names_by_spelling, n=1, cutoff=MIN_NAME_SIMILARITY):
            return names_by_spelling[matches[0]]
    return None


def remove_field_prefix(name: str) -> str:
    """Remove the prefixes for the encoder, the decoder and cross-attention from a name."""
    return re.sub("^((encoder|decoder|cross)_)+", "", name)


def _sort_words(name: str) -> str:
    words = "_".join(SYNONYMS.get(word, word) for word in name.split("_")).split("_")
    return "_".join(sorted(words))


def check_integer_range(field: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """Check that a field's value is an integer from `minimum` to `maximum`. If `maximum` is None, there is no upper
    limit.

    Raises:
        ValueError: if it is not.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < minimum
        or (maximum is not None and value > maximum)
    ):
        bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"`{field}` must be a whole number {bounds}, got {value!r}.")


def validate_kv_heads(field: str, value: int | None, heads: int) -> int:
    """Check a number of key/value heads and return it.

    Args:
        field: the name of the field.
        value: the value of the field, or None for one key/value head per query head.
        heads: the number of query heads.

    Raises:
        ValueError: if the number is not an integer of at least 1 that divides `heads`.
    """
    count = heads if value is None else value
    check_integer_range(field, count, 1, heads)
    if heads % count:
        raise ValueError(f"`{field}` must divide `num_attention_heads`, got {count} for {heads} heads.")
    return count


def check_relative_position_buckets(config: Any) -> None:
    """Check the buckets of the relative position bias in a T5 configuration.

    Raises:
        ValueError: if there are fewer than 4 buckets, or if the maximum distance is at most half of the bucket count.
    """
    buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    # An encoder uses half of the buckets for each side. Half of the buckets for a side contain a single distance each,
    # and the others contain a range of distances.
    if buckets < 4 or distance <= buckets // 2:
        raise ValueError(
            "`relative_attention_num_buckets` must be at least 4, and `relative_attention_max_distance` "
            f"must be more than half of it, got {buckets} and {distance}."
        )


@contextmanager
def explain_type_errors() -> Iterator[None]:
    """Convert Transformers errors caused by values of the wrong type to `ValueError`.

    Transformers does not check the types of most fields.

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
