"""Names that are nearly a field's, the format of a configuration, and how its fields are stored and replaced."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..mechanisms.kernels.kernel_table import KERNELS, kernel_class
from ..mechanisms.mechanism import PREFIXES
from ..mechanisms.patterns.pattern_table import PATTERNS, pattern_class
from ..mechanisms.talking_heads import DYNAMIC, differs_by_place, keeps_cache
from ..variant_names import COUNTS_TOKENS, SCORES_BY_PLACE, SIZES_VALUES, TALKS_BY_PLACE
from .field_checks import nearest, without_prefix
from .field_table import LATE_FIELDS
from .kernel_fields import KernelFields
from .layer_values import without_layer_values
from .score_fields import score_fields

__all__ = [
    "UNSAID",
    "format_of",
    "settled_format",
    "stored_values",
    "without_replaced",
    "without_same_size",
    "wrong_name",
]


class _Unsaid(int):
    """A number that nobody has given."""


# The format of a configuration that does not say it; what needs a later one gets that.
UNSAID = _Unsaid(COUNTS_TOKENS)

KERNEL_FIELDS = tuple(f"{prefix}attention_kernel" for prefix in PREFIXES)


def wrong_name(config_class: Any, name: str) -> str | None:
    """Return what is wrong with a name that is nearly that of a variant field.

    Transformers accepts every name, so that a misspelt field would change nothing without an error.

    Args:
        config_class: the configuration's.
        name: a keyword.

    Returns:
        A sentence with the name that is probably meant; None for a field, and for a name that is like none.
    """
    known = config_class.variant_fields()
    if hasattr(config_class, name) or {name, without_prefix(name)} & _upstream_names():
        return None
    meant = nearest(name, known)
    text = f"`{name}` is not a field of {config_class.__name__}: did you mean `{meant}` ({{}})?"
    return None if meant is None else text.format(known[meant])


def _upstream_names() -> set[str]:
    """Return the names of all fields of upstream's configurations, of all hosts."""
    hosts, names = [KernelFields], set()
    while hosts:
        host = hosts.pop()
        hosts += host.__subclasses__()
        names |= {each.name for each in fields(host) if "variant" not in each.metadata}
        names |= {*getattr(host, "attribute_map", ())}
    return names


def format_of(config: Any) -> int:
    """Return the number of the format that a configuration has to say: code that does not know its fields refuses it.

    Raises:
        ValueError: where the fields need a later one than the configuration asks for.
    """
    needed, what = 0, ""
    if differs_by_place(config):
        needed, what = TALKS_BY_PLACE, "heads that talk by place or layer"
    if any(getattr(config, field) is not None for prefix, field in score_fields(config).items() if prefix):
        needed, what = SCORES_BY_PLACE, "scores by place"
    if config.value_head_dim is not None:
        needed, what = SIZES_VALUES, "values of another size than keys (`value_head_dim`)"
    said = config.attn_variants_format
    if needed and said < COUNTS_TOKENS:
        raise ValueError(
            f"{what} are of `attn_variants_format` {needed}, in which what counts tokens counts from a row's first "
            f"one; this configuration is of {said}: give `attn_variants_format={needed}` as well."
        )
    return needed or min(said, COUNTS_TOKENS)


def settled_format(values: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return what a configuration says with the format of its fields, where these are stored values of ours.

    What was saved without a number is of format 1; where nothing that the later ones changed is in it, it is of the
    latest all the same, so that what is added to it is of that one.

    Args:
        values: what it says.
        model_type: of the class that reads it; values of another type are upstream's.
    """
    if values.get("model_type", model_type) != model_type or values.get("attn_variants_format", 1) != 1:
        return values
    is_bool = isinstance(values.get("attn_variants_format"), bool)  # which is refused
    number = 1 if is_bool or _counts_tokens(values) else COUNTS_TOKENS
    return values if is_bool else {**values, "attn_variants_format": number}


def _counts_tokens(values: Mapping[str, Any]) -> bool:
    """Say whether a configuration has a field that means something else in format 1, for padded rows."""
    counting = [name for name in PATTERNS if pattern_class(name).counts_tokens]
    kernels = [name for name in KERNELS if kernel_class(name).counts_tokens]
    if any(values.get(f"{prefix}num_global_tokens") for prefix in PREFIXES):
        return True
    by_layer = values.get("per_layer_values")
    lists = list(by_layer.values()) if isinstance(by_layer, Mapping) else []
    said = [values.get(name) for name in (*KERNEL_FIELDS, "attention_pattern", "encoder_attention_pattern")]
    said += [each for values in lists if isinstance(values, list | tuple) for each in values]
    return any(isinstance(each, str) and each in (*counting, *kernels) for each in said)


def stored_values(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's values as they are stored: late fields that say nothing are left out.

    One that says something stands among `per_layer_values` too: 0.1.0, which knows neither it nor the number of a
    format, refuses lists of fields that it does not know, and would build a model without it otherwise.
    """
    stored = {name: value for name, value in values.items() if name not in LATE_FIELDS or value is not None}
    lists = {name: [stored[name]] * config.layer_count(name) for name in LATE_FIELDS if name in stored}
    return stored | {"per_layer_values": lists | (stored.get("per_layer_values") or {})} if lists else stored


def without_replaced(values: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's values without those that newly given fields replace."""
    values = without_layer_values(values, fields)
    # `use_cache=False` was stored because the old dynamic projections allow no cache. With other ones it is upstream's
    # default again.
    named = {*fields, *(fields.get("per_layer_values") or ())}
    if DYNAMIC not in named or keeps_cache(values.get(DYNAMIC)):
        return values
    return {name: value for name, value in values.items() if name != "use_cache"}


def without_same_size(config_class: Any, values: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are given, without a `value_head_dim` that is the size of the heads anyway.

    Args:
        config_class: of the values.
        values: what a configuration says, upstream's or ours.
        given: fields on top of it.

    Raises:
        ValueError: for a size that no head can have.
    """
    if "value_head_dim" not in given:
        return given
    config = config_class.from_upstream(dict(values), value_head_dim=given["value_head_dim"])
    is_same = config.value_head_dim is None
    return {name: value for name, value in given.items() if not (is_same and name == "value_head_dim")}
