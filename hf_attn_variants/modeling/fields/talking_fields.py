"""Checks of the fields of talking heads: each value by itself, and all of them place by place and layer by layer."""

from typing import Any

from ..mechanisms.head_sharing import key_value_field
from ..mechanisms.mechanism import NONE
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
    TALKING_HEADS,
    TALKING_HEADS_INITS,
    WEIGHTS,
    TalkingHeads,
    is_own_value,
    layers_to_check,
    listed_by_layer,
    query_heads_there,
    talking_places,
    talks,
)
from .field_checks import check_value_groups, checked_count
from .field_table import row_of

__all__ = ["check_talking_heads", "checked_talking_value"]


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
        return _checked_dynamic(value, BOTH, prefix)
    return checked_count(name, value, query_heads_there(config, prefix))


def check_talking_heads(config: Any) -> None:
    """Check the fields of talking heads, place by place and layer by layer, and fill in what was not given.

    Raises:
        ValueError: for an unknown value, head counts or terms that need a projection which is not there, key/value
            heads that do not divide the value heads, and layers of the decoder that the encoder cannot inherit.
    """
    _check_whole(config)
    for prefix in talking_places(config):
        _check_inherited_layers(config, prefix)
        is_own = not prefix or any(is_own_value(config, prefix, name) for name in TALKING_FIELDS)
        for layer in layers_to_check(config, prefix) if is_own else ():
            _check_layer(config, prefix, layer)
    for prefix in talking_places(config):
        kv_field = key_value_field(prefix)
        for layer in range(config.layer_count(kv_field)) if config.per_layer_values else (0,):
            count, output = config.layer_value(kv_field, layer), TalkingHeads.of(config, prefix, layer).output
            named = prefix if is_own_value(config, prefix, OUTPUT) else ""
            check_value_groups(kv_field, count, query_heads_there(config, prefix), output, named)


def _check_whole(config: Any) -> None:
    """Check each field by itself, and the fields without a prefix against each other where they are of all layers."""
    for prefix in talking_places(config)[1:]:
        for name in (prefix + each for each in TALKING_FIELDS):
            if (value := getattr(config, name)) is not None and not (name.endswith(KIND) and value == NONE):
                setattr(config, name, checked_talking_value(config, name, value))
    if listed_by_layer(config, ("",)):
        config.talking_heads_dynamic = _checked_dynamic(config.talking_heads_dynamic, BOTH)
        return
    heads = config.num_attention_heads if config.talking_heads is None else query_heads_there(config, "")
    config.num_softmax_heads, config.num_value_heads = _checked_talking_heads(
        config.talking_heads, config.talking_heads_init, heads, config.num_softmax_heads, config.num_value_heads
    )
    config.talking_heads_dynamic = _checked_dynamic(config.talking_heads_dynamic, config.talking_heads)


def _check_layer(config: Any, prefix: str, layer: int) -> None:
    talking, heads = TalkingHeads.of(config, prefix, layer), query_heads_there(config, prefix)
    if talking.kind is not None:
        _checked_talking_heads(talking.kind, talking.init, heads, talking.softmax, talking.output, prefix)
        _checked_dynamic(talking.dynamic, talking.kind, prefix)
        return
    softmax, output, dynamic = (_of_silent_layer(config, prefix, name, layer) for name in (SOFTMAX, OUTPUT, DYNAMIC))
    _checked_talking_heads(None, IDENTITY, heads, softmax, output, prefix)
    _checked_dynamic(dynamic, None, prefix)


def _of_silent_layer(config: Any, prefix: str, name: str, layer: int) -> Any:
    """Return the value that a field has for a layer whose heads do not talk; None if it may be meant for others."""
    lists = config.per_layer_values or {}
    is_said = prefix + name in lists or (prefix and prefix + KIND not in lists and is_own_value(config, prefix, name))
    return config.layer_value(prefix + name, layer) if is_said else None


def _check_inherited_layers(config: Any, prefix: str) -> None:
    """Check that an encoder inherits no value by layer: these are of the decoder's layers."""
    if prefix != "encoder_":
        return
    listed = listed_by_layer(config, ("",))
    for name in TALKING_FIELDS:
        if name in listed and not is_own_value(config, prefix, name) and (name == KIND or talks(config, prefix)):
            none = f' ("{NONE}": none)' if name == KIND else ""
            raise ValueError(
                f"`per_layer_values` has `{name}` of the decoder's layers, which an encoder does not inherit: give "
                f"`{prefix}{name}` as well{none}."
            )


def _checked_talking_heads(
    talking_heads: str | None,
    init: str,
    heads: int,
    softmax_heads: int | None,
    value_heads: int | None,
    prefix: str = "",
) -> tuple[int, int]:
    """Return the numbers of softmax and value heads for `heads` query heads; None means as many as those before them.

    `prefix` is that of the fields, for messages.

    Raises:
        ValueError: for an unknown value, or head counts that need a projection which `talking_heads` does not have.
    """
    if talking_heads is not None and talking_heads not in TALKING_HEADS:
        raise ValueError(
            f'`{prefix}talking_heads` must be None, "logits", "weights" or "both"; got {talking_heads!r}.'
        )
    if init not in TALKING_HEADS_INITS:
        raise ValueError(f'`{prefix}talking_heads_init` must be "identity" or "random"; got {init!r}.')
    softmax_heads = checked_count(prefix + SOFTMAX, softmax_heads, heads)
    default_value_heads = softmax_heads if talking_heads == LOGITS else heads
    value_heads = checked_count(prefix + OUTPUT, value_heads, default_value_heads)
    if talking_heads in (None, WEIGHTS) and softmax_heads != heads:
        raise ValueError(
            f"`{prefix}num_softmax_heads` can differ from `num_attention_heads` only with a logits projection "
            f'(`{prefix}talking_heads` "logits" or "both"): got {softmax_heads} and {heads} with '
            f"{prefix}talking_heads={talking_heads!r}."
        )
    if talking_heads in (None, LOGITS) and value_heads != softmax_heads:
        raise ValueError(
            f"`{prefix}num_value_heads` can differ from `{prefix}num_softmax_heads` only with a weights projection "
            f'(`{prefix}talking_heads` "weights" or "both"): got {value_heads} and {softmax_heads} with '
            f"{prefix}talking_heads={talking_heads!r}."
        )
    if talking_heads is not None and init == IDENTITY and not heads == softmax_heads == value_heads:
        raise ValueError(
            f'`{prefix}talking_heads_init="identity"` needs equal head counts: got '
            f"num_attention_heads={heads}, {prefix}num_softmax_heads={softmax_heads}, "
            f'{prefix}num_value_heads={value_heads}; use "random" for rectangular projections.'
        )
    return softmax_heads, value_heads


def _checked_dynamic(
    value: list[str] | tuple[str, ...] | None, talking_heads: str | None, prefix: str = ""
) -> list[str]:
    """Return the names of `talking_heads_dynamic` in their own order; None means none.

    `prefix` is that of the fields, for messages.

    Raises:
        ValueError: unless they are distinct names, each of a projection that `talking_heads` has.
    """
    field = prefix + DYNAMIC
    if not isinstance(value, list | tuple | None):
        raise ValueError(f"`{field}` must be a list of names; got {value!r}.")
    dynamic = list(value or ())
    known = all(isinstance(name, str) and name in DYNAMIC_PROJECTIONS for name in dynamic)
    if not known or len(set(dynamic)) != len(dynamic):
        raise ValueError(f"`{field}` must be distinct names out of {', '.join(DYNAMIC_PROJECTIONS)}; got {dynamic}.")
    for name in dynamic:
        if talking_heads not in (DYNAMIC_PROJECTIONS[name], BOTH):
            raise ValueError(
                f"`{field}` {name!r} is added to the {DYNAMIC_PROJECTIONS[name]} projection, which "
                f"{prefix}talking_heads={talking_heads!r} does not have."
            )
    return [name for name in DYNAMIC_PROJECTIONS if name in dynamic]
