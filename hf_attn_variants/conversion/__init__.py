"""Conversion of multi-head checkpoints into attention variants: fewer key/value heads, latents, talking heads.

`conversions.convert` reads, plans, pools or fits, and writes. The modules, in the order of their use:

- `checkpoint`: folders, configurations and tensors, read and written;
- `request` and `plan`: what the user asks, and what becomes of each attention (`attention_modules`);
- `methods`: how heads are merged from their weights (`attention_tensors`);
- `calibration`: attentions fitted to text or audio, and the quality of the whole model (`quality`). A conversion
  without a calibration does not import it;
- `writing` and `report`: the new tensors, the folder, and the report.
"""

import importlib
from typing import TYPE_CHECKING, Any

# Imported when it is first used: whoever reads a checkpoint's folder needs none of the code that fits. No module here
# may be called `convert`: it would take the function's place.
_PLACES = {
    "METHODS": "request",
    "AttentionTensors": "attention_tensors",
    "Calibration": "calibration_settings",
    "ConversionMethod": "methods",
    "ConversionReport": "report",
    "LayerContext": "methods",
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


def _found(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)


# A type checker that saw it would take any name for one that is here.
if TYPE_CHECKING:
    from .attention_tensors import AttentionTensors
    from .calibration.examples import read_audio_calibration, read_calibration
    from .calibration_settings import Calibration
    from .conversions import convert, convert_checkpoint, convert_model, load_converted
    from .methods import ConversionMethod, LayerContext
    from .report import ConversionReport, LayerReport
    from .request import METHODS
else:
    __getattr__ = _found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
