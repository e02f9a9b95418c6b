"""The conversion methods by name: one file each, one row here."""

from collections.abc import Callable

from ..calibration_settings import FIT_DEFAULTS, Calibration
from .aligned import Aligned
from .base import CalibratedMethod, ConversionMethod
from .calibrated import Calibrated
from .first import FirstHead
from .mean import MeanPooling
from .random import RandomHeads

__all__ = ["METHODS", "resolve_method"]

METHODS: dict[str, Callable[[], ConversionMethod]] = {
    method.name: method for method in (MeanPooling, FirstHead, RandomHeads, Aligned, Calibrated)
}


def resolve_method(method: str | ConversionMethod | None, calibration: Calibration | None = None) -> ConversionMethod:
    """Return the method of that name, or `method` itself where it is one already.

    None is "calibrated" where there is a calibration, else "mean".

    Raises:
        ValueError: for an unknown name, a method without the calibration that it needs, one that looks at no text, or
            an option of the calibration that is another method's.
    """
    if method is None:
        method = "mean" if calibration is None else Calibrated.name
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}; got {method!r}.")
        method = METHODS[method]()
    if not isinstance(method, CalibratedMethod):
        if calibration is not None:
            raise ValueError(f"method {method.name!r} looks at no text: leave the calibration out.")
        return method
    if calibration is None:
        raise ValueError(
            f"method {method.name!r} needs calibration text: give `calibration=texts`, on the command line "
            "`--calibration_file`."
        )
    foreign = [name for name in FIT_DEFAULTS if getattr(calibration, name) is not None and name not in method.options]
    if foreign:
        raise ValueError(
            f"method {method.name!r} has no `{foreign[0]}` (--{foreign[0]}): that is an option of "
            f'"{Calibrated.name}"; leave it out.'
        )
    return method
