"""Checks of the fields of talking heads, for each place and each layer."""

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
    WEIGHTS,
    TalkingHeads,
    listed_by_layer,
    query_heads_there,
    talking_group,
    talking_places,
)
from .field_checks import check_value_groups, checked_count
from .field_table import row_of

__all__ = ["check_talking_heads", "checked_talking_value"]


def checked_talking_value(config: Any, name: str, value: Any) -> Any:
    """Return the value of a field of talking heads in one layer, whose choices are checked already.

    Raises:
        ValueError: if it is a head count that is not a whole number from 1.
    """
    prefix, row = row_of(name)
    if row.name == DYNAMIC:
        return [each for each in DYNAMIC_PROJECTIONS if each in (value or ())]
    if row.name in (SOFTMAX, OUTPUT):
        return checked_count(name, value, query_heads_there(config, prefix))
    return None if value == NONE else value or row.default


def check_talking_heads(config: Any) -> None:
    """Check the fields of talking heads, place by place and layer by layer, and fill in what was not given.

    Raises:
        ValueError: if fields need a projection that `talking_heads` does not give, if the key/value heads do not
            divide the value heads, or if an encoder would inherit values by layer.
    """
    for prefix in talking_places(config):
        for name in (prefix + each for each in TALKING_FIELDS[1:]):
            if (value := getattr(config, name)) is not None:
                setattr(config, name, checked_talking_value(config, name, value))
        _check_kind_is_given(config, prefix)
        group = talking_group(config, prefix)
        if prefix == "encoder_" and not group and listed_by_layer(config, ("",)):
            raise ValueError(
                f"`encoder_{KIND}` must be given if `per_layer_values` has values of talking heads for the decoder's "
                f'layers. "{NONE}" means that the encoder has none.'
            )
        for layer in range(config.layer_count(prefix + KIND)) if config.per_layer_values else (0,):
            if TalkingHeads.of(config, prefix, layer).kind is not None:
                _check_layer(config, prefix, group, layer)
    if not listed_by_layer(config, ("",)):
        talking = TalkingHeads.of(config, "", 0)
        counts = (talking.softmax, talking.output) if talking.kind else (config.num_attention_heads,) * 2
        config.num_softmax_heads, config.num_value_heads = counts


def _check_kind_is_given(config: Any, prefix: str) -> None:
    """Check that a place whose other fields are given says which projections it has."""
    if getattr(config, prefix + KIND) is not None or prefix + KIND in (config.per_layer_values or {}):
        return
    heads = config.num_attention_heads, query_heads_there(config, prefix)
    defaults: dict[str, tuple[Any, ...]] = {SOFTMAX: heads, OUTPUT: heads, INIT: (IDENTITY,), DYNAMIC: ([],)}
    for name in TALKING_FIELDS[1:]:
        value = getattr(config, prefix + name)
        if value is not None and (prefix or value not in defaults[name]):
            raise ValueError(f"`{prefix}{name}` needs `{prefix}{KIND}`; got {value!r} without it.")


def _check_layer(config: Any, prefix: str, group: str, layer: int) -> None:
    talking, heads = TalkingHeads.of(config, prefix, layer), query_heads_there(config, prefix)
    needed = {SOFTMAX: LOGITS} if talking.softmax != heads else {}
    needed |= {OUTPUT: WEIGHTS} if talking.output != talking.softmax else {}
    pairs = [*needed.items(), *((DYNAMIC, DYNAMIC_PROJECTIONS[name]) for name in talking.dynamic)]
    for name, projection in pairs:
        if talking.kind not in (projection, BOTH):
            raise ValueError(
                f'`{group}{name}` needs `{group}{KIND}` "{projection}" or "{BOTH}"; got {talking.kind!r} for '
                f"{heads} query heads, {talking.softmax} softmax heads and {talking.output} value heads."
            )
    if needed and talking.init == IDENTITY:
        raise ValueError(
            f'`{group}{INIT}` must be "random" if the head counts differ; got "{IDENTITY}" for {heads} query heads, '
            f"{talking.softmax} softmax heads and {talking.output} value heads."
        )
    kv_field = key_value_field(prefix)
    check_value_groups(kv_field, config.layer_value(kv_field, layer), heads, talking.output, group)
