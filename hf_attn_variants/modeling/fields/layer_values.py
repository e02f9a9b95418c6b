"""Fields whose values differ between layers: `per_layer_values`, {field: [one value per layer]}.

Transformers has a similar field, `per_layer_config`, {layer: {field: value}}. However, it does not distinguish between
the encoder and the decoder, and it hides the value for the whole model. It is therefore converted to lists here.
"""

from collections.abc import Mapping
from typing import Any

from ..mechanisms.mechanism import NONE
from ..mechanisms.talking_heads import BOTH, DYNAMIC_PROJECTIONS
from .field_checks import check_integer_range, validate_kv_heads
from .field_table import VARIANT_FIELDS, check_choice, look_up_field
from .mechanism_fields import check_pattern_value, validate_talking_heads_value

__all__ = ["LayerValue", "drop_replaced_layer_values", "merge_per_layer_config", "validate_layer_values"]

LayerValue = int | str | list[str] | None

# The names (without a prefix) of the fields that may differ between layers.
PER_LAYER_FIELDS = tuple(field.name for field in VARIANT_FIELDS if "by_layer" in field.tags)


def validate_layer_values(config: Any) -> dict[str, list[LayerValue]] | None:
    """Check the `per_layer_values` of a configuration and return the fields that differ between layers.

    Each of these fields is also set to a value for the whole model, which summarizes the layers. This value is the
    largest number, the single kernel in use, or all talking-heads projections that any layer uses.

    Raises:
        ValueError: if a field is unknown, a list has the wrong length, a value is invalid, a field is also set for the
            whole model, or the layers have different kernels.
    """
    lists = config.per_layer_values
    if lists is None:
        return None
    if not isinstance(lists, Mapping):
        raise ValueError(f"`per_layer_values` must be {{field: [one value per layer]}}, got {lists!r}.")
    values_by_field = {}
    for name, values in lists.items():
        _check_is_per_layer_field(config, name)
        layers = config.get_num_layers(name)
        if not isinstance(values, list | tuple) or len(values) != layers:
            raise ValueError(f"`per_layer_values` must have a list of {layers} values for `{name}`, got {values!r}.")
        checked = [_validate_value(config, name, value) for value in values]
        if name in config.get_kernel_fields() and len({*checked} - {None}) > 1:
            raise ValueError(
                f"`{name}` must be the same kernel in all layers, except layers with None, got {checked}."
            )
        summary, model_value = _summarize_layers(name, checked), getattr(config, name)
        model_value = list(model_value) if isinstance(model_value, tuple) else model_value
        prefix, field = look_up_field(name)
        compatible_values = (None, summary, list(field.default) if field.kind is list else field.get_default(prefix))
        if model_value not in compatible_values:
            raise ValueError(
                f"`{name}` and its `per_layer_values` must not both be set, got {model_value} and {checked}. "
                "Remove one."
            )
        setattr(config, name, summary)
        if any(value != checked[0] for value in checked):
            values_by_field[name] = checked
    return values_by_field or None


def merge_per_layer_config(
    config: Any, fields_by_layer: Mapping[Any, Mapping[str, Any]]
) -> dict[str, list[LayerValue]] | None:
    """Return the `per_layer_values` of a configuration, updated with a `per_layer_config` from Transformers.

    Raises:
        ValueError: if a layer index is invalid, or if a field cannot differ between layers.
    """
    if not isinstance(fields_by_layer, Mapping) or not all(
        isinstance(fields, Mapping) for fields in fields_by_layer.values()
    ):
        raise ValueError(f"`per_layer_config` must be {{layer: {{field: value}}}}, got {fields_by_layer!r}.")
    lists = {name: list(values) for name, values in (config.per_layer_values or {}).items()}
    for layer, fields in fields_by_layer.items():
        for name, value in fields.items():
            _check_is_per_layer_field(config, name)
            count = config.get_num_layers(name)
            if not str(layer).isdecimal() or int(layer) >= count:
                raise ValueError(
                    f"The layers of `{name}` in `per_layer_config` must be from 0 to {count - 1}, got {layer!r}."
                )
            lists.setdefault(name, [getattr(config, name)] * count)[int(layer)] = value
    for name in lists:  # all other layers now have the value of the whole model
        setattr(config, name, None)
    return lists or None


def drop_replaced_layer_values(values: Mapping[str, Any], new_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model-wide and per-layer values of a configuration without those that `new_fields` replaces."""
    values_by_field = {
        name: layers for name, layers in (values.get("per_layer_values") or {}).items() if name not in new_fields
    }
    new = new_fields.get("per_layer_values")
    new = [name for name in new if name.endswith(PER_LAYER_FIELDS)] if isinstance(new, Mapping) else []
    other_values = {name: value for name, value in values.items() if name not in new}
    return {**other_values, "per_layer_values": values_by_field or None}


def _check_is_per_layer_field(config: Any, name: str) -> None:
    if name not in config.get_per_layer_fields():
        raise ValueError(
            f"`per_layer_values` contains the unsupported field `{name}`. Set `{name}` for the whole model. Supported "
            f"fields: {', '.join(config.get_per_layer_fields())}."
        )


def _summarize_layers(name: str, values: list[Any]) -> LayerValue:
    """Return one value for the whole model that summarizes a field's values in all layers."""
    prefix, field = look_up_field(name)
    known = [value for value in values if value is not None]
    if field.kind is list:
        return [term for term in DYNAMIC_PROJECTIONS if any(term in value for value in known)]
    if field.kind is int or "talking" not in field.tags:
        return max(known, default=None)
    if field.default is not None:
        return next((value for value in known if value != field.default), field.default)
    kinds = {*known} or {NONE if prefix and values else None}
    return kinds.pop() if len(kinds) == 1 else BOTH


def _validate_value(config: Any, name: str, value: Any) -> LayerValue:
    check_choice(name, value)
    if name in config.get_talking_heads_fields():
        return validate_talking_heads_value(config, name, value)
    if name in config.get_kv_heads_fields():
        return validate_kv_heads(name, value, config.get_query_heads(name))
    if name in config.get_rank_fields() and value is not None:
        check_integer_range(name, value, 1, config.hidden_size)
    if name in config.get_pattern_fields():
        check_pattern_value(name, value)
    return value
