"""Checks of one field of a configuration at a time: head counts, ranks, sizes, and names that are nearly a field's."""

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
    "checked_count",
    "checked_kv_heads",
    "checked_rank",
    "checked_value_head_dim",
    "nearest",
    "without_prefix",
    "wrong_kinds_explained",
]

# Far above any model. Unbounded, a hostile configuration could keep whoever reads it busy for hours.
MAX_HEADS, MAX_HEAD_DIM, MAX_LAYERS, MAX_LABELS = 2**16, 2**16, 10_000, 2**16

# How other configurations spell words of the fields, and how alike two names have to be.
OTHER_WORDS, ALIKE = {"kv": "key_value", "groups": "heads", "initialization": "init"}, 0.82


@lru_cache(maxsize=4096)  # each new configuration asks for all of its keywords
def _nearest(name: str, known: tuple[str, ...]) -> str | None:
    if (bare := without_prefix(name)) in known:
        return bare
    spelled = {spelling: candidate for candidate in known for spelling in (_sorted_words(candidate), candidate)}
    for spelling in (name, _sorted_words(name), bare, _sorted_words(bare)):
        if matches := difflib.get_close_matches(spelling, spelled, n=1, cutoff=ALIKE):
            return spelled[matches[0]]
    return None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the one of the known names that a name is most like; None if it is like none.

    The order of words does not count, nor does the prefix of a place (`decoder_num_kv_heads`).
    """
    return _nearest(name.lower(), tuple(known))


def without_prefix(name: str) -> str:
    """Return a name without the prefixes of the encoder, the decoder and cross-attention."""
    return re.sub("^((encoder|decoder|cross)_)+", "", name)


def _sorted_words(name: str) -> str:
    words = "_".join(OTHER_WORDS.get(word, word) for word in name.split("_")).split("_")
    return "_".join(sorted(words))


def checked_kv_heads(field: str, value: int | None, heads: int) -> int:
    """Return the number of key/value heads that `field` asks for; None means one for each of the `heads` query heads.

    Raises:
        ValueError: unless it is a whole number from 1 that divides `heads`.
    """
    count = checked_count(field, value, heads)
    if heads % count:
        raise ValueError(f"`{field}` must divide `num_attention_heads`, got {count} for {heads} heads.")
    return count


def checked_rank(field: str, value: int | None, width: int) -> int | None:
    """Return the rank of a latent of inputs of this width, or None without a latent.

    Raises:
        ValueError: unless it is a whole number from 1 to the width.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= width:
        raise ValueError(
            f"`{field}` must be a whole number from 1 to {width}, the size of the inputs of keys and "
            f"values, got {value!r}. Use None for no latent."
        )
    return value


def checked_count(field: str, value: int | None, default: int | None = None) -> int:
    """Return a number of heads, `default` where the value is None.

    Raises:
        ValueError: unless it is a whole number from 1 to `MAX_HEADS`.
    """
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{field}` must be a whole number of at least 1, got {value!r}.")
    if value > MAX_HEADS:
        raise ValueError(f"`{field}` must be a whole number of at most {MAX_HEADS}, got {value}.")
    return value


def check_size(field: str, value: int, least: int, most: int | None = None) -> None:
    """Check a size of the model.

    Raises:
        ValueError: unless it is a whole number from `least` to `most`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"`{field}` must be a whole number {bounds}, got {value!r}.")


def check_head_size(heads: int, hidden_size: int) -> None:
    """Check that the query heads make up the hidden size, whole.

    Raises:
        ValueError: unless they divide it.
    """
    if hidden_size % heads:
        raise ValueError(
            f"`num_attention_heads` must divide `hidden_size`, got {heads} heads for a hidden size of {hidden_size}."
        )


def check_value_groups(field: str, kv_heads: int, heads: int, value_heads: int, prefix: str = "") -> None:
    """Check that grouped key/value heads serve each value head alike; `prefix` is that of the field of these.

    Raises:
        ValueError: unless they divide the value heads.
    """
    if kv_heads != heads and value_heads % kv_heads:
        raise ValueError(
            f"`{field}` must divide `{prefix}num_value_heads`, got {kv_heads} for {value_heads} value heads."
        )


def checked_value_head_dim(value: int | None, head_dims: Iterable[int]) -> int | None:
    """Return the size of a value head; None where it is that of the query and key heads.

    Args:
        value: as given.
        head_dims: d of each stack.

    Raises:
        ValueError: unless it is a whole number from 1 to `MAX_HEAD_DIM`.
    """
    if value is None:
        return None
    check_size("value_head_dim", value, 1, MAX_HEAD_DIM)
    return None if set(head_dims) == {value} else value


def check_position_type(value: str | None, known: Sequence[str | None], model_type: str) -> None:
    """Check the kind of positions that a model of this type has.

    Raises:
        ValueError: if it is not among `known`.
    """
    if value not in known:
        raise ValueError(f"`position_embedding_type` of {model_type!r} must be one of {known}, got {value!r}.")


def check_buckets(config: Any) -> None:
    """Check that distances of a T5, ours or upstream's, have buckets.

    Raises:
        ValueError: if there are too few, or the largest distance lies among those that have a bucket each.
    """
    buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    # An encoder has half of the buckets for each side: half of those hold one distance each, the others a range.
    if buckets < 4 or distance <= buckets // 2:
        raise ValueError(
            "`relative_attention_num_buckets` must be at least 4, and `relative_attention_max_distance` "
            f"must be more than half of it, got {buckets} and {distance}."
        )


def check_format(value: Any) -> None:
    """Check the format of a configuration's fields.

    Raises:
        ValueError: if it is not the format of this version.
    """
    if type(value) is not int or value != CONFIG_FORMAT:
        raise ValueError(
            f"`attn_variants_format` must be {CONFIG_FORMAT} for hf_attn_variants {ATTN_VARIANTS_VERSION}, got "
            f"{value!r}. Load the model with the version that saved it, or convert the original model again."
        )


@contextmanager
def wrong_kinds_explained() -> Iterator[None]:
    """Raise a ValueError for what upstream's code raises, which does not look at a field's value before it uses it.

    Raises:
        ValueError: for a value of the wrong kind.
    """
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"Every field of the configuration must have a value of its type, got a value that raises {reason}."
        ) from error
