"""Talking heads by place: which ones an attention has, from the fields without a prefix and from their twins.

Of an encoder-decoder the fields without a prefix are the decoder's self-attention's, and what the encoder
(`encoder_...`) and cross-attention (`cross_...`) have where they say nothing of their own. The ablation of the paper,
arXiv 2003.02436, is by place.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from .field_checks import (
    DYNAMIC_PROJECTIONS,
    NONE,
    TALKING_HEADS,
    TALKING_HEADS_INITS,
    check_value_groups,
    checked_count,
    checked_dynamic,
    checked_talking_heads,
)
from .field_table import row_of

__all__ = [
    "TalkingHeads",
    "check_talking_heads",
    "checked_talking_value",
    "differs_by_place",
    "dynamic_terms",
    "keeps_cache",
    "talking_of",
    "talking_places",
    "talks",
]

KIND, SOFTMAX, OUTPUT, INIT, DYNAMIC = (
    "talking_heads",
    "num_softmax_heads",
    "num_value_heads",
    "talking_heads_init",
    "talking_heads_dynamic",
)
NAMES = (KIND, SOFTMAX, OUTPUT, INIT, DYNAMIC)


class TalkingHeads(NamedTuple):
    """How the heads of one attention talk."""

    kind: str | None  # which projections there are: None, "logits", "weights", "both"
    softmax: int  # h, the heads of the softmax
    output: int  # h_v, those of the values
    init: str = "identity"
    dynamic: tuple[str, ...] = ()


def talking_places(config: Any) -> tuple[str, ...]:
    """Return the prefixes of the attentions that a configuration has fields of talking heads for, "" first."""
    return tuple(prefix for prefix in row_of(KIND)[1].prefixes if hasattr(config, prefix + KIND))


def talking_of(config: Any, prefix: str, layer: int) -> TalkingHeads:
    """Return how heads talk in a layer's attention of the place that a prefix stands for; the fields are checked."""
    heads = _heads_of(config, prefix)
    kind = _kind(config, prefix, layer)
    if kind is None:
        return TalkingHeads(None, heads, heads)
    softmax = _count(config, prefix, SOFTMAX, layer)
    softmax = heads if softmax is None else softmax
    output = _count(config, prefix, OUTPUT, layer)
    output = (softmax if kind == "logits" else heads) if output is None else output
    dynamic = tuple(_value(config, prefix, DYNAMIC, layer) or ())
    return TalkingHeads(kind, softmax, output, _value(config, prefix, INIT, layer), dynamic)


def talks(config: Any, prefix: str | None = None) -> bool:
    """Say whether heads talk in any layer of a place; None: of any place."""
    places = talking_places(config) if prefix is None else (prefix,)
    return any(_kind(config, place, layer) is not None for place in places for layer in _layers(config, place))


def dynamic_terms(config: Any, prefix: str = "") -> list[str]:
    """Return the input-dependent terms that layers of a place have, in their own order."""
    layers = _layers(config, prefix) if talks(config, prefix) else ()
    found = {name for layer in layers for name in talking_of(config, prefix, layer).dynamic}
    return [name for name in DYNAMIC_PROJECTIONS if name in found]


def keeps_cache(dynamic: Iterable[str] | None) -> bool:
    """Say whether a decoder whose self-attention has these input-dependent terms keeps a cache."""
    return not any(name[0] == "m" for name in dynamic or ())


def differs_by_place(config: Any) -> bool:
    """Say whether heads talk otherwise in some places or layers than the fields without a prefix say."""
    twins = [prefix + name for prefix in talking_places(config)[1:] for name in NAMES]
    return any(getattr(config, name) is not None for name in twins) or bool(_listed(config, talking_places(config)))


def checked_talking_value(config: Any, name: str, value: Any) -> Any:
    """Return the value that a field of talking heads has in one layer; None is as nothing given.

    Raises:
        ValueError: for one that the field cannot have.
    """
    prefix, row = row_of(name)
    if row.name == KIND:
        if value not in (None, NONE, *TALKING_HEADS):
            raise ValueError(f'`{name}` must be "logits", "weights", "both" or, for none, None; got {value!r}.')
        return None if value == NONE else value
    if row.name == INIT:
        if value not in TALKING_HEADS_INITS:
            raise ValueError(f'`{name}` must be "identity" or "random"; got {value!r}.')
        return value
    if row.name == DYNAMIC:
        return checked_dynamic(value, "both", prefix)
    return checked_count(name, value, _heads_of(config, prefix))


def check_talking_heads(config: Any) -> None:
    """Check the fields of talking heads, place by place and layer by layer, and fill in what was not given.

    Raises:
        ValueError: for an unknown value, head counts or terms that need a projection which is not there, key/value
            heads that do not divide the value heads, and layers of the decoder that the encoder cannot inherit.
    """
    _check_whole(config)
    for prefix in talking_places(config):
        _check_inherited_layers(config, prefix)
        is_own = not prefix or any(_is_own(config, prefix, name) for name in NAMES)
        for layer in _layers(config, prefix) if is_own else ():
            _check_layer(config, prefix, layer)
    for prefix in talking_places(config):
        kv_field = f"{_stack(prefix)}num_key_value_heads"
        for layer in range(config.layer_count(kv_field)) if config.per_layer_values else (0,):
            count, output = config.layer_value(kv_field, layer), talking_of(config, prefix, layer).output
            named = prefix if _is_own(config, prefix, OUTPUT) else ""
            check_value_groups(kv_field, count, _heads_of(config, prefix), output, named)


def _check_whole(config: Any) -> None:
    """Check each field by itself, and the fields without a prefix against each other where they are of all layers."""
    for prefix in talking_places(config)[1:]:
        for name in (prefix + each for each in NAMES):
            if (value := getattr(config, name)) is not None and not (name.endswith(KIND) and value == NONE):
                setattr(config, name, checked_talking_value(config, name, value))
    if _listed(config, ("",)):
        config.talking_heads_dynamic = checked_dynamic(config.talking_heads_dynamic, "both")
        return
    heads = config.num_attention_heads if config.talking_heads is None else _heads_of(config, "")
    config.num_softmax_heads, config.num_value_heads = checked_talking_heads(
        config.talking_heads, config.talking_heads_init, heads, config.num_softmax_heads, config.num_value_heads
    )
    config.talking_heads_dynamic = checked_dynamic(config.talking_heads_dynamic, config.talking_heads)


def _check_layer(config: Any, prefix: str, layer: int) -> None:
    found, heads = talking_of(config, prefix, layer), _heads_of(config, prefix)
    if found.kind is not None:
        checked_talking_heads(found.kind, found.init, heads, found.softmax, found.output, prefix)
        checked_dynamic(found.dynamic, found.kind, prefix)
        return
    softmax, output, dynamic = (_of_silent_layer(config, prefix, name, layer) for name in (SOFTMAX, OUTPUT, DYNAMIC))
    checked_talking_heads(None, "identity", heads, softmax, output, prefix)
    checked_dynamic(dynamic, None, prefix)


def _of_silent_layer(config: Any, prefix: str, name: str, layer: int) -> Any:
    """Return what is said of a layer whose heads do not talk, and of no other that may."""
    lists = config.per_layer_values or {}
    is_said = prefix + name in lists or (prefix and prefix + KIND not in lists and _is_own(config, prefix, name))
    return config.layer_value(prefix + name, layer) if is_said else None


def _check_inherited_layers(config: Any, prefix: str) -> None:
    """Check that an encoder inherits no value by layer: these are of the decoder's layers."""
    if prefix != "encoder_":
        return
    listed = _listed(config, ("",))
    for name in NAMES:
        if name in listed and not _is_own(config, prefix, name) and (name == KIND or talks(config, prefix)):
            none = f' ("{NONE}": none)' if name == KIND else ""
            raise ValueError(
                f"`per_layer_values` has `{name}` of the decoder's layers, which an encoder does not inherit: give "
                f"`{prefix}{name}` as well{none}."
            )


def _stack(prefix: str) -> str:
    return "encoder_" if prefix == "encoder_" else ""


def _heads_of(config: Any, prefix: str) -> int:
    return config.query_heads(f"{_stack(prefix)}num_key_value_heads")


def _listed(config: Any, prefixes: Iterable[str]) -> set[str]:
    """Return the fields of some places that have a value for each layer."""
    return {prefix + name for prefix in prefixes for name in NAMES} & {*(config.per_layer_values or {})}


def _is_own(config: Any, prefix: str, name: str) -> bool:
    """Say whether a place has a value of its own of a field."""
    return prefix + name in (config.per_layer_values or {}) or getattr(config, prefix + name, None) is not None


def _layers(config: Any, prefix: str) -> Iterable[int]:
    """Return the layers to look at: the first stands for all where none differs."""
    listed = _listed(config, ("", prefix))
    return range(config.layer_count(prefix + KIND)) if listed else (0,)


def _value(config: Any, prefix: str, name: str, layer: int) -> Any:
    """Return what a field is in a layer of a place: the place's own, or that without a prefix."""
    prefix = prefix if prefix and _is_own(config, prefix, name) else ""
    return config.layer_value(prefix + name, layer)


def _kind(config: Any, prefix: str, layer: int) -> str | None:
    kind = _value(config, prefix, KIND, layer)
    return None if kind == NONE else kind


def _count(config: Any, prefix: str, name: str, layer: int) -> int | None:
    """Return a number of heads; None: as many as there are otherwise.

    One without a prefix that says no more than "as many as query heads", or that nothing talks by, is not inherited.
    """
    count = _value(config, prefix, name, layer)
    if not prefix or _is_own(config, prefix, name):
        return count
    means_nothing = _kind(config, "", layer) is None or count == _heads_of(config, "")
    return None if means_nothing else count
