"""The converted model's tensors, and the folder that they are written into."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import FEATURE_EXTRACTOR_NAME, GENERATION_CONFIG_NAME

from ..files import CONFIG_NAME, INDEX_NAME, check_disk_space, staged_folder
from ..model_history import read_json
from ..progress import progress_bar
from .attention_modules import AttentionModule
from .attention_tensors import AttentionTensors, LatentForm, best_latent, weight_forms
from .checkpoint.models import TensorSource
from .checkpoint.source import copy_side_files, side_files
from .checkpoint.tensor_files import CheckpointReader, SafetensorsWriter, TensorEntry, cast, dtype_name, write_index
from .plan import ConversionPlan
from .report import LayerReport, layer_report

__all__ = [
    "CheckpointFolder",
    "converted_tensors",
    "generation_config",
    "name_classes",
    "plan_folder",
    "planned_entries",
    "write_weights",
]
# How the names of tokenizers' files begin.
TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece")


def converted_tensors(
    plan: ConversionPlan, reader: TensorSource, calibrated: Mapping[str, AttentionTensors]
) -> dict[str, torch.Tensor]:
    """Return every tensor of the converted model by name; `calibrated` is what `calibrate` made, by attention."""
    tensors: dict[str, torch.Tensor] = {}
    with _one_thread():
        latents = {} if calibrated else _shared_latents(plan, reader)
        for module in plan.modules:
            before = module.read(reader.read)
            after = plan.convert(module, before, latents, calibrated.get(module.name))
            tensors |= _new_tensors(plan, module, before, after)
        for name in reader.entries:
            if name not in plan.converted_names:
                tensor = reader.read(name)
                dtype = plan.dtype if tensor.is_floating_point() else None
                tensors[name] = tensor if dtype is None else cast(tensor, dtype, name)
    return tensors


def planned_entries(plan: ConversionPlan, reader: CheckpointReader) -> dict[str, TensorEntry]:
    """Say where every tensor goes, with its new dtype and shape: beside the source's, in files of the same names."""
    stored = dtype_name(plan.dtype) if plan.dtype is not None else None
    shapes = {module.new_tensors[part]: shape for module in plan.modules for part, shape in module.shapes.items()}
    entries = {}
    for name, entry in reader.entries.items():
        if name in plan.converted_names and name not in shapes:
            continue  # a latent that is no more
        dtype = stored if stored and entry.is_floating else entry.dtype
        entries[name] = TensorEntry(_safetensors_name(entry.file), dtype, shapes.get(name, entry.shape))
    for module in plan.modules:
        beside = entries[module.tensors["query_weight"]]
        added = {name: shapes[name] for name in module.new_tensors.values() if name not in entries}
        added |= module.projections
        entries |= {name: TensorEntry(beside.file, beside.dtype, shape) for name, shape in added.items()}
    return entries


def write_weights(
    plan: ConversionPlan,
    reader: CheckpointReader,
    calibrated: Mapping[str, AttentionTensors],
    entries: dict[str, TensorEntry],
    stage: Path,
    size: int,
) -> list[LayerReport]:
    """Write all tensors, `size` bytes, into the planned files in `stage`, with an index if they are several."""
    layouts: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, entry in entries.items():
        layouts.setdefault(entry.file, {})[name] = (entry.dtype, entry.shape)
    layers = []
    with ExitStack() as stack, _one_thread():
        progress = stack.enter_context(progress_bar(total=size, unit="B", unit_scale=True, desc="writing"))
        writers = {
            file: stack.enter_context(SafetensorsWriter(stage / file, layout, {"format": "pt"}))
            for file, layout in layouts.items()
        }
        latents, written = {} if calibrated else _shared_latents(plan, reader), set()
        for module in plan.modules:
            before = module.read(reader.read)
            after = plan.convert(module, before, latents, calibrated.get(module.name))
            tensors = _new_tensors(plan, module, before, after)
            for name, tensor in tensors.items():
                if name in written:
                    continue  # a latent that several attentions share
                writers[entries[name].file].write(name, tensor)
                written.add(name)
                progress.update(tensor.nbytes)
            layers.append(layer_report(plan, module, before, after, tensors))
        for name, entry in reader.entries.items():
            if name not in plan.converted_names:
                dtype = None if entries[name].dtype == entry.dtype else plan.dtype
                chunks = _tracked(reader.chunks(name), dtype, name, progress)
                writers[entries[name].file].write_chunks(name, chunks)
    if reader.index_metadata is not None:
        write_index(stage / INDEX_NAME, entries, reader.index_metadata, size)
    return layers


def _shared_latents(plan: ConversionPlan, reader: TensorSource) -> dict[str, torch.Tensor]:
    """Find the new latents that several attentions share, where no text has said what they are; by name.

    One attention is read at a time; of each a quadratic form is kept, added to those before it.
    """
    grams: dict[str, torch.Tensor] = {}
    ranks = {}
    for module in plan.modules:
        if (name := module.new_latent) is not None:
            tensors = replace(module.read(reader.read), latent_weight=None)
            forms = weight_forms(plan.with_new_heads(module, tensors), module.heads)
            # Without text all metrics are the identity, and forms add up.
            grams[name] = grams.get(name, 0.0) + forms.key.gram + forms.value.gram
            ranks[name] = module.heads.new_rank
    of_all = {name: LatentForm(gram, torch.eye(*gram.shape).to(gram)) for name, gram in grams.items()}
    return {name: best_latent([form], ranks[name]) for name, form in of_all.items()}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread inside."""
    # On matrices this small, threads wait for each other longer than they work: tenfold and more on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _tracked(
    chunks: Iterator[torch.Tensor], dtype: torch.dtype | None, name: str, progress: tqdm
) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        chunk = chunk if dtype is None else cast(chunk, dtype, name)
        yield chunk
        progress.update(chunk.nbytes)


def _new_tensors(
    plan: ConversionPlan, module: AttentionModule, before: AttentionTensors, after: AttentionTensors
) -> dict[str, torch.Tensor]:
    """Name one module's tensors as the checkpoint does, in the dtypes that they are stored in."""
    tensors = {}
    for part, name in module.new_tensors.items():
        stored = getattr(before, part, None)
        stored = before.query_weight if stored is None else stored
        tensors[name] = cast(getattr(after, part).to(stored.device), plan.dtype or stored.dtype, name)
    added = plan.new_projections(module, plan.dtype or before.query_weight.dtype)
    return tensors | {name: tensor.to(before.query_weight.device) for name, tensor in added.items()}


def _safetensors_name(file: str) -> str:
    if file.endswith(".safetensors"):
        return file
    return Path(file).with_suffix(".safetensors").name.replace("pytorch_model", "model", 1)


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
