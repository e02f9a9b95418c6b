"""A checkpoint as ONNX graphs, which ONNX Runtime runs without torch, transformers or this package."""

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

from ..conversion.checkpoint.source import copy_side_files, read_config, resolve_source, side_files
from ..conversion.checkpoint.tensor_files import open_checkpoint
from ..files import check_disk_space, check_output_dir, staged_folder
from ..progress import progress_bar
from .onnx_graphs import Graph, Sizes, model_graphs
from .upstream import source_model, travels_without_code, upstream_architecture, upstream_config

__all__ = ["OPSETS", "OnnxExport", "export_onnx"]

NEEDED = ("onnx", "onnxscript", "onnxruntime")
# Older ones refuse some of these models or all of them (docs/compatibility.md).
LEAST_TORCH = "2.10"
# 23 has an operator for attention; 18 is the oldest that torch's exporter writes.
OPSETS = (18, 20, 23)
EXPORTED, CHECKED = Sizes(), Sizes(batch=3, choices=3, source=9, target=5)
# Of the largest output. Graphs agree to about 1e-6.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class OnnxExport:
    """What was written.

    Args:
        output_dir: where.
        architecture: upstream's class of the model.
        opset: of the graphs.
        graphs: of each file the largest difference of ONNX Runtime's outputs to torch's, and its inputs' names.
    """

    output_dir: str
    architecture: str
    opset: int
    graphs: dict[str, tuple[float, list[str]]]

    def summary(self) -> str:
        """Return a few lines for people."""
        lines = [f"Wrote {self.output_dir}: a {self.architecture} as ONNX graphs, opset {self.opset}"]
        for name, (error, inputs) in self.graphs.items():
            shown = ", ".join(inputs[:3]) + (f", ... ({len(inputs)} inputs)" if len(inputs) > 3 else "")
            lines.append(f"  {name:<29} within {error:.0e} of torch in ONNX Runtime; takes {shown}")
        return "\n".join(lines)


@torch.no_grad()
def export_onnx(
    model_name_or_path: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    opset: int = OPSETS[0],
    allow_pickle: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
) -> OnnxExport:
    """Write a checkpoint, ours or upstream's, as ONNX graphs in float32, by optimum's names (`onnx_graphs`).

    Each graph is run by ONNX Runtime, at other sizes than it was made with, before the folder appears.

    Args:
        model_name_or_path: a checkpoint folder or a Hub id.
        output_dir: a new or empty folder.
        opset: of `OPSETS`.
        allow_pickle, revision, token: as for `convert_checkpoint`.

    Raises:
        ValueError: if a package is missing or torch too old, the model is of no kind that has graphs, or a graph
            disagrees with it.
        OSError: if a file is missing, or cannot be written.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(f"an export to ONNX needs {' and '.join(missing)}: `pip install {' '.join(missing)}`")
    if torch.__version__ < LEAST_TORCH:
        raise ValueError(f"an export to ONNX needs torch {LEAST_TORCH} or newer; this is {torch.__version__}.")
    if opset not in OPSETS:
        raise ValueError(f"`opset` must be one of {', '.join(map(str, OPSETS))}; got {opset}.")
    check_output_dir(output_dir)
    folder = resolve_source(model_name_or_path, revision, token, allow_pickle)
    output = check_output_dir(output_dir, source=folder)
    model_class, described = source_model(read_config(folder))
    with open_checkpoint(folder, allow_pickle) as reader:
        found, _ = side_files(folder, reader.files)
    copied = [name for name in found if travels_without_code(folder, name)]
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    graphs = model_graphs(model)
    if len(graphs) == 1:  # an encoder, whose attention opset 23 has as one operator; a decoder's exports as products
        model.set_attn_implementation("sdpa")
    check_disk_space(output, len(graphs) * sum(each.nbytes for each in model.parameters()))
    with staged_folder(output) as stage:
        copy_side_files(folder, stage, copied)
        upstream_config(described, model_class).save_pretrained(stage)
        if model.can_generate():
            model.generation_config.save_pretrained(stage)
        written = {}
        for graph in progress_bar(graphs, desc="graphs"):
            file = f"{graph.name}.onnx"
            _write(graph, opset, stage / file)
            written[file] = _largest_difference(graph, stage / file), list(graph.axes)
    return OnnxExport(os.fspath(output_dir), upstream_architecture(model_class), opset, written)


def _write(graph: Graph, opset: int, path: Path) -> None:
    dimensions = {
        name: Dim(name, max=graph.longest.get(name)) for each in graph.axes.values() for name in each.values()
    }
    shapes = {name: {at: dimensions[axis] for at, axis in axes.items()} for name, axes in graph.axes.items()}
    inputs = {name: graph.inputs(EXPORTED)[name] for name in graph.axes}
    with _quiet():
        program: Any = torch.onnx.export(
            graph.module,
            (),
            kwargs={"inputs": inputs},
            dynamic_shapes={"inputs": shapes},
            input_names=list(inputs),
            output_names=list(graph.module(inputs)),
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
        program.save(path)


def _largest_difference(graph: Graph, path: Path) -> float:
    """Return the largest difference of ONNX Runtime's outputs to torch's, of sizes that the graph was not made with.

    Raises:
        ValueError: if it is too large.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    inputs = {name: graph.inputs(CHECKED)[name] for name in graph.axes}
    expected: dict[str, torch.Tensor] = graph.module(inputs)
    found: list[Any] = session.run(list(expected), {name: each.numpy() for name, each in inputs.items()})
    pairs = [(torch.from_numpy(each), expected[name]) for name, each in zip(expected, found, strict=True)]
    differences = [((one - other).abs().max(), other.abs().max()) for one, other in pairs]
    for name, (difference, largest) in zip(expected, differences, strict=True):
        if not difference <= TOLERANCE * max(1.0, float(largest)):
            raise ValueError(f"ONNX Runtime gives {name} of {path.name} {float(difference):.1e} beside torch's.")
    return max(float(difference) for difference, _ in differences)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks on what this machine lacks, and torch's on itself, from those who export."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
