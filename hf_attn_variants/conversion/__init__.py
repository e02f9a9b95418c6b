"""Conversion of multi-head checkpoints into attention variants: fewer key/value heads, latents, talking heads.

`conversions.convert` reads a model, plans the conversion, pools or fits the weights, and writes the result. The
modules, in the order of their use:

- `checkpoint` reads and writes folders, configurations and tensors.
- `request` and `plan` check the arguments and determine the change of each attention (`attention_modules`).
- `methods` computes new heads from the weights (`attention_tensors`).
- `calibration` fits attentions to text or audio and measures the quality of the whole model. It is only imported for a
  conversion with a calibration.
- `writing` and `report` create the new tensors, the folder, and the report.
"""

import importlib
from typing import TYPE_CHECKING, Any

# Names are imported at their first use, because reading a checkpoint folder needs none of the code that fits weights.
# No module here may be called `convert`, because it would replace the function of that name.
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
__all__ = [
    "METHODS",
    "AttentionTensors",
    "Calibration",
    "ConversionMethod",
    "ConversionReport",
    "LayerContext",
    "LayerReport",
    "convert",
    "convert_checkpoint",
    "convert_model",
    "load_converted",
    "read_audio_calibration",
    "read_calibration",
]


def _load_attribute(name: str) -> Any:
    """Import the module that defines a public name and return its value (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


# Type checkers would accept any attribute if they saw `__getattr__`.
if TYPE_CHECKING:
    from .attention_tensors import AttentionTensors, ConversionMethod, LayerContext
    from .calibration.examples import read_audio_calibration, read_calibration
    from .calibration_settings import Calibration
    from .conversions import METHODS, convert, convert_checkpoint, convert_model, load_converted
    from .report import ConversionReport, LayerReport
else:
    __getattr__ = _load_attribute


def __dir__() -> list[str]:
    """Return the names of the module, including those that are not imported yet."""
    return sorted({*globals(), *__all__})
