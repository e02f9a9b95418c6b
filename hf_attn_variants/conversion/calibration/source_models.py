"""What reads a calibration: the source as a model, and the tokenizer or feature extractor that makes its inputs."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoFeatureExtractor, PreTrainedModel

from ...modeling.attention.variant_mixins import AttnVariantModelMixin
from ..calibration_settings import Calibration
from ..checkpoint.models import ModelReader, assemble, load_tokenizer_of, model_of_tensors, reading_checkpoint
from ..checkpoint.tensor_files import CheckpointReader
from ..plan import ConversionPlan
from ..writing import generation_config

__all__ = ["SourceModel", "check_has_processor", "load_processor", "source_in_memory", "source_of_folder"]

# Loads a plan's source, in float32, and what lies beside it to make its inputs; None where nothing does.
SourceModel = Callable[[ConversionPlan], tuple[AttnVariantModelMixin, Any]]


def source_in_memory(reader: ModelReader, model: PreTrainedModel) -> SourceModel:
    """Return the function that gives a model in memory as a plan's source."""

    def source(plan: ConversionPlan) -> tuple[AttnVariantModelMixin, None]:
        tensors = {name: reader.read(name).float() for name in reader.entries}
        return assemble(plan.model_class, plan.source_config, tensors, model), None

    return source


def source_of_folder(reader: CheckpointReader, folder: Path, calibration: Calibration | None) -> SourceModel:
    """Return the function that loads the model in a folder, and what makes its inputs where the calibration has none.

    Its errors are an OSError for a file that is missing or cannot be read, and a ValueError for one that is wrong.
    """

    def source(plan: ConversionPlan) -> tuple[AttnVariantModelMixin, Any]:
        tensors = {name: reader.read(name) for name in reader.entries}
        tensors = {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}
        # Whatever config.json says: in half precision second moments overflow and the fit finds no numbers.
        config = deepcopy(plan.source_config)
        model = model_of_tensors(plan.model_class, config, tensors, folder, dtype=torch.float32)
        if (generation := generation_config(plan, folder)) is not None:
            model.generation_config = generation
        is_given = calibration is not None and calibration.processor is not None
        return model, None if is_given else load_processor(folder, calibration)

    return source


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
        OSError: if it is not there.
        ValueError: if it cannot be read.
    """
    if calibration is not None and calibration.audio is not None:
        try:
            with reading_checkpoint(folder):
                return AutoFeatureExtractor.from_pretrained(folder)
        except OSError:
            raise FileNotFoundError(
                f"{folder} has no preprocessor_config.json or processor_config.json, and a calibration on audio needs "
                "one: put it there, or give `Calibration(..., feature_extractor=feature_extractor)`."
            ) from None
    return load_tokenizer_of(
        folder, ", and a calibration needs them: put them there, or give `Calibration(..., tokenizer=tokenizer)`."
    )
