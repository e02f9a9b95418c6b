"""Converts multi-head checkpoints into models with fewer key/value heads, latents, kernels or talking heads.

`conversions.convert` reads a model, plans the conversion, pools or fits the weights, and writes the result:

    checkpoint            reads and writes folders, configurations and tensors
        │
    conversions           checks the arguments; layer_choice chooses the fields of each layer
        │
    plan                  the new configuration, and how each attention module changes (attention_modules)
        │
    attention_tensors     computes new heads and latents from the weights, or
    calibration           fits attention modules to text or audio (imported only if calibration is used)
        │
    writing, report       write the new tensors, the other files and the report
"""

import importlib
from typing import TYPE_CHECKING, Any

# Names are imported when they are first used, so that reading a checkpoint folder does not import the fitting code.
# No module here may be called `convert` because it would shadow the function of that name.
_MODULES = {
    "METHODS": "conversions",
    "AttentionTensors": "attention_tensors",
    "Calibration": "calibration_settings",
    "ConversionMethod": "attention_tensors",
    "ConversionReport": "report",
    "LayerContext": "attention_tensors",
    "LayerReport": "report",
    "convert": "conversions",
    "convert_checkpoint": "conversions",
    "convert_model": "conversions",
    "load_converted": "conversions",
    "read_audio_calibration": "calibration.examples",
    "read_calibration": "calibration.examples",
}
__all__ = list(_MODULES)


def _load_attribute(name: str) -> Any:
    """Import the module that defines a public name and return its value (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


# `__getattr__` is hidden from type checkers because they would otherwise accept any attribute name.
if TYPE_CHECKING:
    from .attention_tensors import AttentionTensors as AttentionTensors
    from .attention_tensors import ConversionMethod as ConversionMethod
    from .attention_tensors import LayerContext as LayerContext
    from .calibration.examples import read_audio_calibration as read_audio_calibration
    from .calibration.examples import read_calibration as read_calibration
    from .calibration_settings import Calibration as Calibration
    from .conversions import METHODS as METHODS
    from .conversions import convert as convert
    from .conversions import convert_checkpoint as convert_checkpoint
    from .conversions import convert_model as convert_model
    from .conversions import load_converted as load_converted
    from .report import ConversionReport as ConversionReport
    from .report import LayerReport as LayerReport
else:
    __getattr__ = _load_attribute


def __dir__() -> list[str]:
    """Return the names in this module, including those that have not been imported yet."""
    return sorted({*globals(), *__all__})
