"""The tensors of a converted model, one attention at a time: all of them, or written into files as they are made."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tqdm.auto import tqdm

from ..files import INDEX_NAME
from ..progress import progress_bar
from .attention_modules import AttentionModule
from .checkpoint.models import TensorSource
from .checkpoint.tensor_files import CheckpointReader, SafetensorsWriter, TensorEntry, cast, dtype_name, write_index
from .latents import LatentForm, best_latent, weight_forms
from .plan import ConversionPlan
from .projections import AttentionTensors
from .report import LayerReport, layer_report

__all__ = ["converted_tensors", "planned_entries", "write_weights"]


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
