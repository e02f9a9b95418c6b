"""What somebody names and what a file says: fields that do nothing, and names that are nearly a field's.

A field that does nothing is an error where a user names it, since something was meant by it. In a stored config.json
it is a warning, one for all of them, and loading goes on without it.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

from transformers.utils import logging

from ..mechanisms.head_sharing import key_value_field
from ..mechanisms.kernels.kernel_table import KERNELS, kernel_class, kernels_of
from ..mechanisms.talking_heads import DYNAMIC, IDENTITY, INIT, keeps_cache, talking_places, talks
from ..ops.reach import MAX_SIZE
from .field_checks import nearest, without_prefix
from .field_table import OPTIONAL_FIELDS
from .kernel_fields import KernelFields
from .layer_values import without_layer_values

__all__ = [
    "check_idle",
    "named_fields",
    "quietly",
    "reading",
    "stored_values",
    "without_replaced",
    "without_same_size",
    "wrong_name",
]

# Below transformers' own logger: its verbosity holds for what is said here too.
logger = logging.get_logger(f"transformers.{__name__}")

# What other code calls `value_head_dim`.
SIZES_OF_VALUES = ("d_v", "v_dim", "v_head_dim", "v_head_size", "value_dim", "value_head_size")


class _Reading(NamedTuple):
    """A stored configuration that is being read."""

    named: Collection[str]  # what the user names beside it
    notes: list[str]  # what is to be said of it


_named: ContextVar[Collection[str]] = ContextVar("named", default=())
_reading: ContextVar[_Reading | None] = ContextVar("reading", default=None)
_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


@contextmanager
def named_fields(names: Collection[str]) -> Iterator[None]:
    """Note the fields that a user names, while a configuration is made of these and of stored values."""
    token = _named.set(names)
    try:
        yield
    finally:
        _named.reset(token)


@contextmanager
def quietly() -> Iterator[None]:
    """Give no warning of stored fields while the block runs: it reads a file that has been read before."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


@contextmanager
def reading(config: Any, is_stored: bool, names: Collection[str]) -> Iterator[None]:
    """Check the names of a configuration that is being made, and say in one warning what of a stored one does nothing.

    Args:
        config: it.
        is_stored: whether it is made of stored values, and not of what somebody names.
        names: the keywords that are no fields of it.

    Raises:
        ValueError: for a name that is nearly a field's, where nothing is stored.
    """
    if not is_stored:
        type(config).check_names(names)
    notes = [reason for name in sorted(names) if is_stored and (reason := wrong_name(type(config), name))]
    token = _reading.set(_Reading(_named.get(), notes) if is_stored else None)
    try:
        yield
    finally:
        _reading.reset(token)
    if notes and not _is_quiet.get():
        logger.warning(f"The stored configuration has fields that do nothing, and are left alone: {' '.join(notes)}")


def check_idle(config: Any) -> None:
    """Check that a configuration has no field that would do nothing; those that are stored so get their default.

    Raises:
        ValueError: for one that a user names.
    """
    stored = _reading.get()
    for name, default, reason in _idle_fields(config):
        if stored is None or name in stored.named:
            raise ValueError(reason)
        stored.notes.append(reason)
        setattr(config, name, default)
        by_layer = config.per_layer_values or {}
        config.per_layer_values = {each: values for each, values in by_layer.items() if each != name} or None


def _idle_fields(config: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the fields that are given and have nothing to do: name, default and what is wrong."""
    if config.talking_heads_init != IDENTITY and not talks(config):
        yield (
            INIT,
            IDENTITY,
            f"`talking_heads_init` is of talking heads: give `talking_heads` as well; got "
            f"{config.talking_heads_init!r} with talking_heads=None.",
        )
    yield from _idle_twins(config)
    if config.attention_kernel_seed and not _draws(config):
        drawn = [name for name in KERNELS if kernel_class(name).drawn]
        others = [f"{name}'s" for name in KERNELS if name not in drawn and kernel_class(name).draws(MAX_SIZE, 1)]
        kernels = kernels_of(config)
        yield (
            "attention_kernel_seed",
            0,
            f"`attention_kernel_seed` is of random vectors ({', '.join(drawn)}) and of {' and '.join(others)} maps "
            f"that are wider than a head; got {config.attention_kernel_seed} with {kernels or 'no kernel'} and "
            f"attention_kernel_features={config.attention_kernel_features}.",
        )


def _idle_twins(config: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the fields of one place that have nothing to do there, as `_idle_fields` does."""
    has_cross = hasattr(config, "encoder_decoder_layers") or getattr(config, "add_cross_attention", False)
    for prefix in talking_places(config)[1:]:
        names = [name for name in OPTIONAL_FIELDS if name.startswith(prefix)]
        for name in [name for name in names if getattr(config, name, None) is not None]:
            value = getattr(config, name)
            if prefix == "cross_" and not has_cross:
                reason = "cross-attention, which this configuration has none of: give `add_cross_attention=True` too"
                yield name, None, f"`{name}` is of {reason}; got {value!r}."
            elif name.endswith("_init") and not talks(config, prefix):
                yield (
                    name,
                    None,
                    f"`{name}` is of talking heads: give `{prefix}talking_heads` as well; got {value!r} where none "
                    "talk.",
                )


def _draws(config: Any) -> bool:
    """Say whether a kernel of a configuration has anything that is drawn."""
    for field, kernel in kernels_of(config).items():
        prefix = "encoder_" if field.startswith("encoder_") else ""
        head_dim = config.attention_head_dim(key_value_field(prefix))
        if kernel_class(kernel).draws(config.attention_kernel_features, head_dim):
            return True
    return False


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


def stored_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's values without the optional fields that are not set."""
    return {name: value for name, value in values.items() if name not in OPTIONAL_FIELDS or value is not None}


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
