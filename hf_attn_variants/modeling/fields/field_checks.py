"""Checks of one field of a configuration at a time: head counts, ranks, sizes, and names that are nearly a field's."""

import difflib
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

# What names of one stack's fields, or of cross-attention's, begin with; and how many letters a name may be off.
STACK_NAMES, MOST_EDITS = ("encoder_", "decoder_", "cross_"), 2
# How other configurations write the words of our fields, and words that they may add or leave out.
OTHER_WORDS = {"kv": "key_value", "groups": "heads", "group": "heads"}
FREE_WORDS = {"num", "n", "encoder", "decoder"}
# How alike two words have to be, and two whole names without underscores; which share of their words is the same.
ALIKE_WORD, ALIKE_NAME, SHARED_WORDS = 0.75, 0.92, 0.75


def nearest(name: str, fields: Iterable[str]) -> str | None:
    """Return the one of `fields` that `name` nearly is ("num_kv_heads", "talking_head"); None if it is like none.

    It may have a stack's name before it (`STACK_NAMES`), be one or two letters off, or be made of the same words. A
    word that stands in no field makes it another name ("num_cls_heads").
    """
    return _nearest(name, tuple(fields))


@lru_cache(maxsize=4096)  # each configuration that is made asks for all of its keywords
def _nearest(name: str, fields: tuple[str, ...]) -> str | None:
    _, bare = without_prefix(name.lower(), fields)
    for prefixes in (("",), STACK_NAMES):  # a field first, then one with a stack's name before it
        pairs = [(each, prefix + field) for each in (name.lower(), bare) for prefix in prefixes for field in fields]
        edits = [_edits(*pair) for pair in pairs]
        if min(edits) <= MOST_EDITS:
            return without_prefix(pairs[edits.index(min(edits))][1], fields)[1]
    words_of = {field: set(_spelled(field)) for field in fields}
    known = sorted(set().union(*words_of.values()))
    words = {_word(word, known) for word in _spelled(name) if word in known or word not in FREE_WORDS} - {"num"}

    def shared(field: str) -> float:
        own = words_of[field] - {"num"}
        return len(own & words) / len(own | words)

    best = max(words_of, key=shared)
    if None not in words and shared(best) >= SHARED_WORDS:
        return best
    squashed = {field.replace("_", ""): field for field in words_of}
    typed = difflib.get_close_matches(name.lower().replace("_", ""), squashed, n=1, cutoff=ALIKE_NAME)
    return squashed[typed[0]] if typed else None


def without_prefix(name: str, fields: Iterable[str]) -> tuple[str, str]:
    """Return the prefixes before a name, as many as it takes for one of `fields`, else all; and what is behind."""
    bare = name
    while bare not in fields and (prefix := next((each for each in STACK_NAMES if bare.startswith(each)), None)):
        bare = bare.removeprefix(prefix)
    return name.removesuffix(bare), bare


def _edits(name: str, field: str) -> int:
    """Return how many letters must be put in, left out or changed to make one of the other; more than enough: 3."""
    if abs(len(name) - len(field)) > MOST_EDITS:
        return MOST_EDITS + 1
    row = list(range(len(field) + 1))
    for place, letter in enumerate(name, 1):
        before, row = row, [place]
        for index, other in enumerate(field, 1):
            row.append(min(before[index] + 1, row[-1] + 1, before[index - 1] + (letter != other)))
        if min(row) > MOST_EDITS:
            return MOST_EDITS + 1
    return row[-1]


def _spelled(name: str) -> list[str]:
    """Return the words of a name as `num_key_value_heads` writes them."""
    return "_".join(OTHER_WORDS.get(word, word) for word in name.lower().split("_")).split("_")


def _word(word: str, known: Sequence[str]) -> str | None:
    """Return the one of `known` that a word is, begins with, or nearly is."""
    if word in known:  # "heads" begins with "head"
        return word
    longer = [each for each in known if len(each) > 3 and word.startswith(each)]
    return next(iter([*longer, *difflib.get_close_matches(word, known, n=1, cutoff=ALIKE_WORD)]), None)


def checked_kv_heads(field: str, value: int | None, heads: int) -> int:
    """Return the number of key/value heads that `field` asks for; None means one for each of the `heads` query heads.

    Raises:
        ValueError: unless it is a whole number from 1 that divides `heads`.
    """
    count = checked_count(field, value, heads)
    if heads % count:
        raise ValueError(f"`{field}` must divide `num_attention_heads`: got {count} for {heads} heads.")
    return count


def checked_rank(field: str, value: int | None, width: int) -> int | None:
    """Return the rank of a latent of inputs of this width; None means that there is none.

    Raises:
        ValueError: unless it is a whole number from 1 to the width.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= width:
        raise ValueError(
            f"`{field}` must be a whole number from 1 to {width}, the width of what keys and values are made from "
            f"(None: no latent); got {value!r}."
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
        raise ValueError(f"`{field}` must be a whole number of heads, at least 1; got {value!r}.")
    if value > MAX_HEADS:
        raise ValueError(f"`{field}` must be a whole number of heads, at most {MAX_HEADS}; got {value}.")
    return value


def check_size(field: str, value: int, least: int, most: int | None = None) -> None:
    """Check a size of the model.

    Raises:
        ValueError: unless it is a whole number from `least` to `most`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" + ("" if most is None else f", at most {most}")
        raise ValueError(f"`{field}` must be a whole number, {bounds}; got {value!r}.")


def check_head_size(heads: int, hidden_size: int) -> None:
    """Check that the query heads make up the hidden size, whole.

    Raises:
        ValueError: unless they divide it.
    """
    if hidden_size % heads:
        raise ValueError(
            f"`num_attention_heads` must divide `hidden_size`: got {heads} heads for a hidden size of {hidden_size}."
        )


def check_value_groups(field: str, kv_heads: int, heads: int, value_heads: int, prefix: str = "") -> None:
    """Check that grouped key/value heads serve each value head alike; `prefix` is that of the field of these.

    Raises:
        ValueError: unless they divide the value heads.
    """
    if kv_heads != heads and value_heads % kv_heads:
        raise ValueError(
            f"`{field}` must divide `{prefix}num_value_heads`: got {kv_heads} for {value_heads} value heads."
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
        ValueError: for one that is not among `known`; transformers 5 has dropped BERT's relative ones.
    """
    if isinstance(value, str | None) and value in known:
        return
    reason = ""
    if isinstance(value, str) and value.startswith("relative_key"):
        reason = ": neither transformers 5 nor this package reads the embeddings of distances of such a checkpoint"
    words = " or ".join("None" if each is None else f'"{each}"' for each in known)
    raise ValueError(f"`position_embedding_type` of {model_type!r} must be {words}; got {value!r}{reason}.")


def check_buckets(config: Any) -> None:
    """Check that distances of a T5, ours or upstream's, have buckets.

    Raises:
        ValueError: if there are too few, or the largest distance lies among those that have a bucket each.
    """
    buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    # An encoder has half of the buckets for each side: half of those hold one distance each, the others a range.
    if buckets < 4 or distance <= buckets // 2:
        raise ValueError(
            "`relative_attention_num_buckets` must be at least 4, and `relative_attention_max_distance` more than "
            f"half of that; got {buckets} and {distance}."
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
        raise ValueError(f"{reason}; a field of the configuration has a value of the wrong kind.") from error
