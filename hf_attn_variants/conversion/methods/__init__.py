"""The conversion methods by name: one file each, one row here."""

from collections.abc import Callable

from .base import AttentionTensors, ConversionMethod, LayerContext
from .first import FirstHead
from .mean import MeanPooling
from .random import RandomHeads

__all__ = ["METHODS", "AttentionTensors", "ConversionMethod", "LayerContext", "resolve_method"]

METHODS: dict[str, Callable[[], ConversionMethod]] = {
    method.name: method for method in (MeanPooling, FirstHead, RandomHeads)
}


def resolve_method(method: str | ConversionMethod) -> ConversionMethod:
    """Return the method of that name, or `method` itself where it is one already.

    Raises:
        ValueError: for an unknown name.
    """
    if not isinstance(method, str):
        return method
    if method not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)}; got {method!r}.")
    return METHODS[method]()
