"""Conversion of multi-head checkpoints into attention variants: fewer key/value heads, talking heads.

`convert` is the front door; the rooms behind it: `grouping` (which heads share), `methods` (how heads merge, one file
each), `plan` (what will be done, checked before any work), `calibration_files`, `calibration` and `recording` (text,
and what the attentions do on it, for the methods that fit to it), `checkpoint_io` (tensors in and out, one by one),
`report` and `next_steps` (what is said of it).
"""

from .calibration.calibrate import Calibration
from .calibration.texts import read_calibration
from .convert import convert, convert_checkpoint, convert_model, load_converted
from .methods import METHODS, AttentionTensors, ConversionMethod, LayerContext
from .report import ConversionReport, LayerReport

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
    "read_calibration",
]
