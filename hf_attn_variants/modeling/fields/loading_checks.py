"""Checks of whether a checkpoint loads with a configuration or requires a conversion first."""

import json
from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from ..mechanisms.kernels.kernel_table import KERNELS, kernel_class
from ..mechanisms.sinusoidal_positions import SinusoidalPositions, has_sinusoids
from ..mechanisms.talking_heads import (
    DYNAMIC,
    KIND,
    TalkingHeads,
    talking_places,
)
from .field_checks import checked_rank
from .layer_values import value_or_list, without_layer_values

__all__ = ["adds_talking_heads", "warn_of_positions"]

# This logger is a child of the logger of Transformers and therefore follows its verbosity.
logger = logging.get_logger(f"transformers.{__name__}")

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def adds_talking_heads(
    config_class: Any, source: Any, config: Any, kwargs: dict[str, Any]
) -> frozenset[tuple[str, int]]:
    """Return the attentions to which loading a checkpoint with this configuration adds talking heads.

    Each attention is a pair of its prefix and its layer.

    Args:
        config_class: configuration class of the model.
        source, config, kwargs: arguments of `from_pretrained`.

    Raises:
        ValueError: if the configuration has other heads than the checkpoint and therefore requires a conversion.
    """
    converted = (*config_class.kv_heads_fields(), *config_class.rank_fields(), "per_layer_values")
    shapes = (*config_class.talking_fields(), *config_class.kernel_fields(), "value_head_dim")
    wanted = {name: kwargs[name] for name in (*converted, *shapes) if name in kwargs}
    if hasattr(config, DYNAMIC):
        wanted = without_layer_values({name: getattr(config, name) for name in (*converted, *shapes)}, wanted) | wanted
    if not wanted and not kwargs.get("per_layer_config"):
        return frozenset()
    held = _held(config_class, source, kwargs)
    heads = held.get(config_class.attribute_map.get("num_attention_heads", "num_attention_heads"))
    if heads is None:
        return frozenset()  # the weights have no configuration to compare with
    if by_layer := kwargs.get("per_layer_config"):
        wanted["per_layer_values"] = config_class.from_dict(dict(held), per_layer_config=by_layer).per_layer_values
    _check_no_conversion(config_class, source, held, {n: wanted[n] for n in converted if n in wanted})
    if any(value_or_list(held, name) for name in config_class.kernel_fields() if name.endswith("attention_kernel")):
        _check_kernel_kept(config_class, source, held, wanted)
    _check_values_kept(config_class, source, held, wanted)
    if not any(_talk(config_class, values) for values in (held, wanted)):
        return frozenset()
    given = {name: kwargs[name] for name in (*config_class.variant_fields(), "per_layer_config") if name in kwargs}
    old = config_class.from_dict(dict(held))
    asked = config.to_dict() if hasattr(config, DYNAMIC) else dict(held)
    return _added(source, old, config_class.from_dict(asked, **given))


def _talk(config_class: Any, values: Mapping[str, Any]) -> bool:
    """Return whether the values of a configuration include talking heads in any layer."""
    names = [name for name in config_class.talking_fields() if name.endswith(KIND)]
    by_layer = values.get("per_layer_values") or {}
    return any(values.get(name) is not None or name in by_layer for name in names)


def _added(source: Any, held: Any, wanted: Any) -> frozenset[tuple[str, int]]:
    """Return the attentions that have talking heads only in the wanted configuration.

    The initialization allows adding talking heads to a plain checkpoint, but loading must not drop learned ones.

    Raises:
        ValueError: if learned talking heads would be dropped or get other projections, or if a learned weight would
            change its size.
    """
    added, has_bias = set(), hasattr(wanted, "relative_attention_num_buckets")
    for prefix in talking_places(wanted):
        field = prefix + KIND
        for layer in range(min(held.layer_count(field), wanted.layer_count(field))):
            old, new = (TalkingHeads.of(each, prefix, layer) for each in (held, wanted))
            if old.kind is None and new.kind is not None:
                added.add((prefix, layer))
            for name, pair in old.kept_when_loaded(new, has_bias and prefix != "cross_"):
                if pair[0] != pair[1]:
                    known = (getattr(held, prefix + name, None), getattr(wanted, prefix + name, None))
                    shown = prefix + name if any(value is not None for value in known) else name
                    raise ValueError(
                        f"The checkpoint {str(source)!r} has {shown}={pair[0]!r}, the configuration asks for "
                        f"{pair[1]!r}: loading neither drops nor resizes learned heads, nor adds to learned "
                        "projections. Use the checkpoint's own configuration."
                    )
    return frozenset(added)


def warn_of_positions(config: Any, source: Any, kwargs: dict[str, Any]) -> None:
    """Warn if sinusoidal positions replace the positions of a checkpoint and change its outputs.

    Args:
        config: configuration of the loaded model.
        source, kwargs: same as for `adds_talking_heads`.
    """
    held = _held(type(config), source, kwargs) if source is not None and has_sinusoids(config) else {}
    if held and held.get(SinusoidalPositions.field) != SinusoidalPositions.name:
        logger.warning(
            f"{source} was trained with learned positions: sinusoidal ones take their place, and the outputs change. "
            "Train it."
        )


def _held(config_class: Any, source: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a checkpoint, read from the location that `from_pretrained` uses."""
    return config_class.get_config_dict(source, **{name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs})[0]


def _check_no_conversion(config_class: Any, source: Any, held: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError if the wanted heads and ranks require a conversion of the checkpoint."""
    width: Any = held.get(config_class.attribute_map.get("hidden_size", "hidden_size"))
    asked = {*wanted, *(wanted.get("per_layer_values") or {})}
    for name in (*config_class.kv_heads_fields(), *config_class.rank_fields()):
        # A rank equal to the input width has no parameters.
        default = _query_heads(config_class, held, name) if name in config_class.kv_heads_fields() else width
        old, value = _by_layer(held, name, default), _by_layer(wanted, name, default)
        if name not in asked or value == old:
            continue
        option, field = f"--{name} {value}", f"{name}={value}"
        if name in config_class.rank_fields() and held.get(name) is None:
            old = None
        if isinstance(value, list):
            by_layer = {name: list(wanted["per_layer_values"][name])}
            option, field = f"--per_layer_values '{json.dumps(by_layer)}'", f"per_layer_values={by_layer}"
        elif name in config_class.rank_fields():
            checked_rank(name, value, width)
        raise ValueError(
            f"The checkpoint {str(source)!r} has {name}={old}, the configuration asks for "
            f"{value}: convert it first, by `attn-variants convert --model_name_or_path {source} {option} "
            f"--output_dir OUTPUT_DIR` or by `hf_attn_variants.convert({str(source)!r}, {field})`."
        )


def _check_kernel_kept(config_class: Any, source: Any, held: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError if learned weights or random vectors of a kernel would be dropped or resized."""
    asked = {**without_layer_values(held, wanted), **wanted}
    old = {name: value_or_list(held, name) for name in config_class.kernel_fields()}
    by_layer = {name: value if isinstance(value, list) else [value] for name, value in old.items()}
    kernels = [kernel_class(each) for values in by_layer.values() for each in values if each in KERNELS]
    has_size = any(kernel.learned or kernel.drawn for kernel in kernels)
    for name, value in old.items():
        is_size = name == "attention_kernel_features" and has_size
        is_learned = any(kernel_class(each).learned for each in by_layer[name] if each in KERNELS)
        if (is_size or is_learned) and (other := value_or_list(asked, name)) != value:
            raise ValueError(
                f"The checkpoint {str(source)!r} has {name}={value!r}, the configuration asks for {other!r}: loading "
                "neither drops nor resizes what a kernel has learned. Use the checkpoint's own configuration."
            )


def _check_values_kept(config_class: Any, source: Any, held: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError if the wanted size of the value heads differs from the checkpoint."""
    if "value_head_dim" not in wanted or wanted["value_head_dim"] == held.get("value_head_dim"):
        return
    old = config_class.from_dict(dict(held))
    new = config_class.from_dict(dict(held), value_head_dim=wanted["value_head_dim"])
    fields = config_class.kv_heads_fields()
    sizes = [[config.attention_value_dim(name) for name in fields] for config in (old, new)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The checkpoint {str(source)!r} has value heads of {sizes[0][0]} numbers, the configuration asks for "
            f"{sizes[1][0]} (`value_head_dim`): loading does not resize them. Use the checkpoint's own configuration, "
            "or train a model from scratch."
        )


def _query_heads(config_class: Any, held: Mapping[str, Any], kv_heads_field: str) -> int | None:
    encoder, decoder = getattr(config_class, "encoder_decoder_heads", ("num_attention_heads",) * 2)
    name = encoder if kv_heads_field.startswith("encoder_") else decoder
    return held.get(config_class.attribute_map.get(name, name))


def _by_layer(values: Mapping[str, Any], name: str, default: int | None) -> Any:
    by_layer = (values.get("per_layer_values") or {}).get(name)
    if by_layer is None:
        return values.get(name) or default
    layers = [value or default for value in by_layer]
    return layers[0] if len(set(layers)) == 1 else layers
