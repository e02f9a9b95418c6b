"""A checkpoint's folder made from another: what lies in it beside the weights, and how it comes about, all or none."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import FEATURE_EXTRACTOR_NAME, GENERATION_CONFIG_NAME

from ..files import CONFIG_NAME, check_disk_space, staged_folder
from ..model_history import read_json
from .checkpoint.source import copy_side_files, side_files
from .checkpoint.tensor_files import CheckpointReader, TensorEntry
from .converted_tensors import planned_entries, write_weights
from .plan import ConversionPlan
from .projections import AttentionTensors
from .report import LayerReport

__all__ = ["CheckpointFolder", "generation_config", "name_classes", "plan_folder"]

# How the names of tokenizers' files begin.
TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece")


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder that is to be written.

    Args:
        plan: what becomes of the tensors.
        reader: of the source's tensors.
        source: the source's folder.
        config: the source's config.json.
        output: the folder to write.
        copied, left_out: of what lies beside the source's weights.
        entries: where each tensor goes, with its dtype and shape.
    """

    plan: ConversionPlan
    reader: CheckpointReader
    source: Path
    config: dict[str, Any]
    output: Path
    copied: list[str]
    left_out: list[str]
    entries: dict[str, TensorEntry]

    @property
    def weight_bytes(self) -> int:
        """The size of all tensors together."""
        return sum(entry.nbytes for entry in self.entries.values())

    @contextmanager
    def written(self, calibrated: Mapping[str, AttentionTensors]) -> Iterator[tuple[Path, list[LayerReport]]]:
        """Write weights, tokenizer, generation settings and the files beside them; give the place for what is left.

        What the caller adds to that place, config.json at least, is in the folder too when it appears. `calibrated` is
        what `calibrate` made, by attention.

        Raises:
            OSError: if something cannot be written; nothing is left then.
        """
        with staged_folder(self.output) as stage:
            copy_side_files(self.source, stage, self.copied)
            layers = write_weights(self.plan, self.reader, calibrated, self.entries, stage, self.weight_bytes)
            name_classes(stage, self.config)
            generation = generation_config(self.plan, self.source)
            if GENERATION_CONFIG_NAME not in self.copied and generation is not None:
                generation.to_json_file(stage / GENERATION_CONFIG_NAME, keys_to_pop=["_from_model_config"])
            yield stage, layers


def plan_folder(
    plan: ConversionPlan,
    reader: CheckpointReader,
    source: Path,
    config: dict[str, Any],
    output: Path,
    allow_pickle: bool = False,
    travels: Callable[[str], bool] = lambda name: True,
) -> CheckpointFolder:
    """Settle what a folder will hold.

    Args:
        plan, reader, source, config, output: as for `CheckpointFolder`.
        allow_pickle: take the pickled weights of sentence-transformers modules along.
        travels: whether a file that could be copied is to be; given its relative path.

    Raises:
        OSError: if there is no room for it, or a file to copy is a link that leads nowhere.
    """
    beside, left_out = side_files(source, reader.files, allow_pickle)
    copied = [name for name in beside if travels(name)]
    left_out = sorted({*left_out, *beside} - {*copied})
    folder = CheckpointFolder(plan, reader, source, config, output, copied, left_out, planned_entries(plan, reader))
    check_disk_space(output, folder.weight_bytes + sum((source / name).stat().st_size for name in copied))
    return folder


def generation_config(plan: ConversionPlan, folder: Path) -> GenerationConfig | None:
    """Return how the source generates; None where nothing but the class's own defaults says it."""
    if not plan.model_class.can_generate():
        return None
    if (folder / GENERATION_CONFIG_NAME).is_file():
        return GenerationConfig.from_pretrained(folder)
    # Old checkpoints have the number of beams and the like in config.json, where this package's classes do not look.
    generation = GenerationConfig.from_pretrained(folder, config_file_name=CONFIG_NAME, _from_model_config=True)
    own = GenerationConfig.from_model_config(plan.config).to_dict()
    return generation if any(own.get(name) != value for name, value in generation.to_diff_dict().items()) else None


def name_classes(stage: Path, source: Mapping[str, Any]) -> None:
    """Have the files of a tokenizer and of a feature extractor in a folder name their classes.

    Args:
        stage: the folder.
        source: the source's config.json, to which those files may leave it.
    """
    # Auto classes know them by upstream's `model_type`, and old tokenizers by an entry of config.json. Neither is in
    # ours (`save_pretrained` of the configuration says why): AutoProcessor would give a Whisper's tokenizer alone.
    model_type = source["model_type"]
    tokenizer = {"tokenizer_class": source.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(model_type)}
    extractor = {
        "feature_extractor_type": FEATURE_EXTRACTOR_MAPPING_NAMES.get(model_type),
        "processor_class": source.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(model_type),
    }
    if any(path.name.startswith(TOKENIZER_FILES) for path in stage.iterdir()):
        _complete(stage / TOKENIZER_CONFIG_FILE, tokenizer)
    if (stage / FEATURE_EXTRACTOR_NAME).is_file():
        _complete(stage / FEATURE_EXTRACTOR_NAME, extractor)


def _complete(path: Path, names: Mapping[str, str | None]) -> None:
    """Write the names that are known and that the file has not."""
    settings = read_json(path) or {}
    missing = {key: name for key, name in names.items() if name is not None and settings.get(key) is None}
    if missing:
        path.write_text(json.dumps(settings | missing, indent=2) + "\n", encoding="utf-8")
