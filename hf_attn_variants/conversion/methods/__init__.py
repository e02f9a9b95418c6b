"""The conversion methods by name: one file each, one row here."""

from collections.abc import Callable

from .aligned import Aligned
from .base import AttentionTensors, CalibratedMethod, ConversionMethod, LayerContext
from .calibrated import Calibrated
from .first import FirstHead
from .mean import MeanPooling
from .random import RandomHeads

__all__ = ["METHODS", "AttentionTensors", "CalibratedMethod", "ConversionMethod", "LayerContext", "resolve_method"]

METHODS: dict[str, Callable[[], ConversionMethod]] = {
    method.name: method for method in (MeanPooling, FirstHead, RandomHeads, Aligned, Calibrated)
}


def resolve_method(method: str | ConversionMethod | None, calibration: object = None) -> ConversionMethod:
    """Return the method of that name, or `method` itself where it is one already.

    Args:
        method: None is "calibrated" where there is a calibration, else "mean".
        calibration: the calibration text, if any.

    Raises:
        ValueError: for an unknown name, a method without the calibration that it needs, or one that looks at no text.
    """
    if method is None:
        method = "mean" if calibration is None else Calibrated.name
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}; got {method!r}.")
        method = METHODS[method]()
        if isinstance(method, CalibratedMethod) and calibration is None:
            raise ValueError(
                f"method {method.name!r} needs calibration text: give `calibration=Calibration(texts)`, on the "
                "command line `--calibration_file`."
            )
    if calibration is not None and not isinstance(method, CalibratedMethod):
        raise ValueError(f"method {method.name!r} looks at no text: leave the calibration out.")
    return method
