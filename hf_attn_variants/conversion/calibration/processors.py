"""What makes a model's inputs of a calibration's examples: the tokenizer or, of audio, the feature extractor."""

from pathlib import Path
from typing import Any

from transformers import AutoFeatureExtractor

from ..calibration_settings import Calibration
from ..checkpoint.loading import load_tokenizer_of, reading_checkpoint

__all__ = ["check_has_processor", "load_processor"]


def check_has_processor(calibration: Calibration) -> None:
    """Raise ValueError if a calibration of a model in memory, beside which no files lie, brings none."""
    if calibration.processor is not None:
        return
    if calibration.audio is not None:
        raise ValueError(
            "a model in memory has no feature extractor beside it, and a calibration needs the model's: give "
            "`calibration=Calibration(audio=files, feature_extractor=feature_extractor)`."
        )
    raise ValueError(
        "a model in memory has no tokenizer beside it, and a calibration needs the model's: give "
        "`calibration=Calibration(texts, tokenizer=tokenizer)`, or `read_calibration(path, tokenizer=tokenizer)`."
    )


def load_processor(folder: Path, calibration: Calibration | None) -> Any:
    """Return the tokenizer in a checkpoint's folder, or the feature extractor where the calibration is of audio.

    Raises:
        OSError: if it is not there, or cannot be read.
        ValueError: if its files are wrong.
    """
    if calibration is not None and calibration.audio is not None:
        try:
            with reading_checkpoint(folder):
                return AutoFeatureExtractor.from_pretrained(folder)
        except OSError:
            raise FileNotFoundError(
                f"{folder} has no preprocessor_config.json, and a calibration on audio needs it: put it there, or "
                "give `Calibration(..., feature_extractor=feature_extractor)`."
            ) from None
    return load_tokenizer_of(
        folder, ", and a calibration needs them: put them there, or give `Calibration(..., tokenizer=tokenizer)`."
    )
