"""Computes the tensors of a converted model and writes them to a folder."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import FEATURE_EXTRACTOR_NAME, GENERATION_CONFIG_NAME

from ..files import CONFIG_NAME, INDEX_NAME, check_disk_space, staged_folder
from ..model_folder import read_json
from ..progress import progress_bar
from .attention_modules import AttentionModule
from .attention_tensors import AttentionTensors, QuadraticErrorForm, compute_error_forms_from_weights, find_best_latent
from .checkpoint.models import TensorSource
from .checkpoint.source import copy_auxiliary_files, list_auxiliary_files
from .checkpoint.tensor_files import (
    CheckpointReader,
    SafetensorsWriter,
    TensorEntry,
    cast_tensor,
    get_safetensors_dtype,
    write_index,
)
from .plan import ConversionPlan
from .report import LayerReport, build_layer_report

# Prefixes of tokenizer file names.
TOKENIZER_PREFIXES = ("tokenizer", "vocab", "spiece", "sentencepiece")


def compute_converted_tensors(
    plan: ConversionPlan, reader: TensorSource, calibrated: Mapping[str, AttentionTensors]
) -> dict[str, torch.Tensor]:
    """Return all tensors of the converted model, {name: tensor}.

    Args:
        plan: The conversion plan.
        reader: The tensors of the original model.
        calibrated: The projections computed by `calibrate`, by module name. Empty if calibration is not used.
    """
    tensors: dict[str, torch.Tensor] = {}
    with _use_single_thread():
        for _, _, _, new in _convert_modules(plan, reader, calibrated):
            tensors |= new
        for name in reader.entries:
            if name not in plan.converted_tensor_names:
                tensor = reader.read(name)
                dtype = plan.dtype if tensor.is_floating_point() else None
                tensors[name] = tensor if dtype is None else cast_tensor(tensor, dtype, name)
    return tensors


def plan_tensor_entries(plan: ConversionPlan, reader: CheckpointReader) -> dict[str, TensorEntry]:
    """Return the file, dtype and shape of every tensor after the conversion.

    Each original tensor is stored in the file that replaces its original file.
    """
    new_dtype = None if plan.dtype is None else get_safetensors_dtype(plan.dtype)
    shapes = {name: shape for module in plan.modules for name, shape in module.shapes.items()}
    entries = {}
    for name, entry in reader.entries.items():
        if name in plan.converted_tensor_names and name not in shapes:
            continue  # a latent that the converted model no longer has
        dtype = new_dtype if new_dtype and entry.is_floating else entry.dtype
        entries[name] = TensorEntry(_get_safetensors_name(entry.file), dtype, shapes.get(name, entry.shape))
    for module in plan.modules:
        # New tensors are stored in the same file and with the same dtype as the queries.
        query_entry = entries[module.tensors["query_weight"]]
        added = {name: shapes[name] for name in module.new_tensors.values() if name not in entries}
        added |= module.projections | module.extension_shapes
        entries |= {name: TensorEntry(query_entry.file, query_entry.dtype, shape) for name, shape in added.items()}
    return entries


def _convert_modules(
    plan: ConversionPlan, reader: TensorSource, calibrated: Mapping[str, AttentionTensors]
) -> Iterator[tuple[AttentionModule, AttentionTensors, AttentionTensors, dict[str, torch.Tensor]]]:
    """Yield each module, its projections before and after the conversion, and the tensors to store, {name: tensor}."""
    latents = {} if calibrated else _compute_shared_latents(plan, reader)
    for module in plan.modules:
        source_tensors = module.read_tensors(reader.read)
        converted_tensors = plan.convert(module, source_tensors, latents, calibrated.get(module.name))
        query, parts = source_tensors.query_weight, {}
        for part, name in module.new_tensors.items():
            stored = query if (old := getattr(source_tensors, part, None)) is None else old
            new = getattr(converted_tensors, part).to(stored.device)
            parts[part] = cast_tensor(new, plan.dtype or stored.dtype, name)
        added = plan.initialize_new_parameters(module, plan.dtype or query.dtype)
        tensors = module.join_tensors(parts) | {name: tensor.to(query.device) for name, tensor in added.items()}
        yield module, source_tensors, converted_tensors, tensors


def _compute_shared_latents(plan: ConversionPlan, reader: TensorSource) -> dict[str, torch.Tensor]:
    """Return each new latent that several modules share, {name: latent}, computed from the weights only.

    Modules are read one at a time, and their quadratic forms are summed.
    """
    gram_sums: dict[str, torch.Tensor] = {}
    ranks = {}
    for module in plan.modules:
        if (name := module.shared_latent_name) is not None:
            tensors = replace(module.read_tensors(reader.read), latent_weight=None)
            error_forms = compute_error_forms_from_weights(plan.with_new_heads(module, tensors), module.heads)
            # Without text, the metric of each form is the identity matrix, so the Gram matrices can be added.
            gram_sums[name] = gram_sums.get(name, 0.0) + error_forms.key.gram + error_forms.value.gram
            ranks[name] = module.heads.rank[1]
    return {
        name: find_best_latent([QuadraticErrorForm(gram, torch.eye(*gram.shape).to(gram))], ranks[name])
        for name, gram in gram_sums.items()
    }


@contextmanager
def _use_single_thread() -> Iterator[None]:
    """Make PyTorch use a single thread within this context."""
    # For such small matrices, synchronizing threads takes longer than the computation (ten times on busy machines).
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _get_safetensors_name(file: str) -> str:
    """Return the name of the safetensors file that replaces a weight file."""
    if file.endswith(".safetensors"):
        return file
    return Path(file).with_suffix(".safetensors").name.replace("pytorch_model", "model", 1)


class OutputFolder:
    """The output folder of a converted checkpoint. The constructor plans its contents and checks the disk space.

    Args:
        plan: The conversion plan.
        reader: The tensors of the original model.
        source: Folder of the original model.
        config: The contents of the original config.json.
        output: The folder to create.
        allow_pickle: Whether to copy pickled weights of sentence-transformers modules.
        should_copy: Function that returns whether to copy the file with a given relative path.

    Attributes:
        copied, left_out: The files in the original folder that are copied, and those that are not.
        entries: The file, dtype and shape of every tensor.

    Raises:
        OSError: if there is not enough disk space, or if a file to copy is a broken link.
    """

    def __init__(
        self,
        plan: ConversionPlan,
        reader: CheckpointReader,
        source: Path,
        config: dict[str, Any],
        output: Path,
        allow_pickle: bool,
        should_copy: Callable[[str], bool],
    ):
        self._plan, self._reader, self._source, self._config, self._output = plan, reader, source, config, output
        available, left_out = list_auxiliary_files(source, reader.files, allow_pickle)
        self.copied = [name for name in available if should_copy(name)]
        self.left_out = sorted({*left_out, *available} - {*self.copied})
        self.entries = plan_tensor_entries(plan, reader)
        self._weight_bytes = sum(entry.nbytes for entry in self.entries.values())
        check_disk_space(output, self._weight_bytes + sum((source / name).stat().st_size for name in self.copied))

    @contextmanager
    def write(self, calibrated: Mapping[str, AttentionTensors]) -> Iterator[tuple[Path, list[LayerReport]]]:
        """Write the weights, tokenizer, generation settings and other files to a temporary folder, and yield it.

        The caller must add at least config.json to the temporary folder. When the context exits, the temporary folder
        is renamed to the output folder.

        Args:
            calibrated: The projections computed by `calibrate`, by module name.

        Yields:
            The temporary folder and the report for each attention module.

        Raises:
            OSError: if a file cannot be written. In this case, the temporary folder is deleted.
        """
        with staged_folder(self._output) as stage:
            copy_auxiliary_files(self._source, stage, self.copied)
            layers = self._write_weights(calibrated, stage)
            write_class_names(stage, self._config)
            generation = read_generation_config(self._plan, self._source)
            if GENERATION_CONFIG_NAME not in self.copied and generation is not None:
                generation.to_json_file(stage / GENERATION_CONFIG_NAME, keys_to_pop=["_from_model_config"])
            yield stage, layers

    def _write_weights(self, calibrated: Mapping[str, AttentionTensors], stage: Path) -> list[LayerReport]:
        """Convert and write all tensors, and an index if the original checkpoint has one.

        Args:
            calibrated: The projections computed by `calibrate`, by module name.
            stage: The folder to write to.

        Returns:
            The report for each attention module.
        """
        plan, reader, entries, layers = self._plan, self._reader, self.entries, []
        entries_by_file: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in entries.items():
            entries_by_file.setdefault(entry.file, {})[name] = entry
        options: dict[str, Any] = {"unit": "B", "unit_scale": True, "desc": "writing"}
        with progress_bar(total=self._weight_bytes, **options) as bar, ExitStack() as stack, _use_single_thread():
            writers = {
                file: stack.enter_context(SafetensorsWriter(stage / file, file_entries))
                for file, file_entries in entries_by_file.items()
            }
            written: set[str] = set()
            for module, source_tensors, converted_tensors, tensors in _convert_modules(plan, reader, calibrated):
                for name, tensor in tensors.items():
                    if name not in written:  # several modules can share a latent
                        writers[entries[name].file].write(name, tensor)
                        written.add(name)
                        bar.update(tensor.nbytes)
                layers.append(build_layer_report(plan, module, source_tensors, converted_tensors, tensors))
            for name, entry in reader.entries.items():
                if name in plan.converted_tensor_names:
                    continue
                chunks = reader.iterate_chunks(name)
                if plan.dtype is not None and entries[name].dtype != entry.dtype:
                    chunks = (cast_tensor(chunk, plan.dtype, name) for chunk in chunks)
                writers[entries[name].file].write_chunks(name, chunks)
                bar.update(entries[name].nbytes)
        if reader.index_metadata is not None:
            write_index(stage / INDEX_NAME, entries, reader.index_metadata, self._weight_bytes)
        return layers


def read_generation_config(plan: ConversionPlan, folder: Path) -> GenerationConfig | None:
    """Return the original model's generation settings, or None if the converted model has the same defaults."""
    if not plan.model_class.can_generate():
        return None
    if (folder / GENERATION_CONFIG_NAME).is_file():
        return GenerationConfig.from_pretrained(folder)
    # Old checkpoints store settings such as the number of beams in config.json, but this package does not read them.
    generation = GenerationConfig.from_pretrained(folder, config_file_name=CONFIG_NAME, _from_model_config=True)
    defaults = GenerationConfig.from_model_config(plan.config).to_dict()
    changes = generation.to_diff_dict()
    return generation if any(defaults.get(name) != value for name, value in changes.items()) else None


def write_class_names(stage: Path, source: Mapping[str, Any]) -> None:
    """Add the class names of the tokenizer and the feature extractor to their configuration files.

    Args:
        stage: The folder with these files.
        source: The contents of the original config.json, which can contain these names instead.
    """
    # Auto classes select these classes based on the Transformers `model_type` or, for old tokenizers, on an entry in
    # config.json. The new config.json contains neither (see the configuration's `save_pretrained`). Without the class
    # names, AutoProcessor would only return the tokenizer of a Whisper model.
    model_type = source["model_type"]
    tokenizer = {"tokenizer_class": source.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(model_type)}
    extractor = {
        "feature_extractor_type": FEATURE_EXTRACTOR_MAPPING_NAMES.get(model_type),
        "processor_class": source.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(model_type),
    }
    if any(path.name.startswith(TOKENIZER_PREFIXES) for path in stage.iterdir()):
        _add_missing_keys(stage / TOKENIZER_CONFIG_FILE, tokenizer)
    if (stage / FEATURE_EXTRACTOR_NAME).is_file():
        _add_missing_keys(stage / FEATURE_EXTRACTOR_NAME, extractor)


def _add_missing_keys(path: Path, names: Mapping[str, str | None]) -> None:
    """Add the names that are not None to a JSON file, unless it already contains their keys."""
    settings = read_json(path) or {}
    missing = {key: name for key, name in names.items() if name is not None and settings.get(key) is None}
    if missing:
        path.write_text(json.dumps(settings | missing, indent=2) + "\n", encoding="utf-8")
