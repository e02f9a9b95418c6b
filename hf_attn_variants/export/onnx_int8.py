"""Quantizes ONNX graphs to int8, and compares them with the float32 graphs.

With dynamic quantization, ONNX Runtime chooses the scale of the inputs in each call. With static quantization, the
scales are computed from calibration texts, and OpenVINO can fuse more operators. Graphs for one runtime are slow
in the other one.
"""

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoTokenizer

from ..registration import get_max_input_length
from ..text_files import is_table, read_lines
from .onnx_decoder import get_data_path, save_graph

Arrays = dict[str, np.ndarray]

# The number of texts for the static scales, as in nncf.
CALIBRATION_TEXTS = 300
# The share of the calibration texts that are held out to compare the graphs.
HELD_OUT_SHARE = 0.1
MAX_COMPARED_TEXTS, MAX_TOKENS = 256, 128


@dataclass(frozen=True)
class Int8Export:
    """The int8 graphs of a model, and their agreement with the float32 graphs.

    Args:
        files: The names of the files.
        runtime: "ONNX Runtime" or "OpenVINO". The graphs are slow in the other runtime.
        measure: "cosine similarity", "equal predictions" or "equal tokens".
        agreement: The value of the measure.
        inputs: A description of the compared inputs.
    """

    files: list[str]
    runtime: str
    measure: str
    agreement: float
    inputs: str

    def summary(self) -> list[str]:
        """Return printable lines."""
        value = f"{self.agreement:.4f}" if self.measure == "cosine similarity" else f"{self.agreement:.1%}"
        return [
            f"int8 graphs for {self.runtime}: {', '.join(self.files)}",
            f"  {self.measure} with the float32 graphs on {self.inputs}: {value}",
        ]


class ComparisonTexts(NamedTuple):
    """The texts for the static scales of an int8 graph, and for its comparison with the float32 graph."""

    calibration: list[str]
    validation: list[str]


def read_comparison_texts(
    calibration_file: str | os.PathLike | None, validation_file: str | os.PathLike | None
) -> ComparisonTexts:
    """Read the texts, one per line. Without a validation file, some of the calibration texts are held out.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a file is a table, or there are not enough texts.
    """
    for path in (calibration_file, validation_file):
        if path is not None and is_table(path):
            raise ValueError(f"{path} must be a text file with one text per line, not a table.")
    calibration = [] if calibration_file is None else read_lines([calibration_file])
    validation = [] if validation_file is None else read_lines([validation_file])
    if calibration and not validation:
        held_out = math.ceil(HELD_OUT_SHARE * len(calibration))
        calibration, validation = calibration[:-held_out], calibration[-held_out:]
    if calibration_file is not None and not calibration:
        raise ValueError(f"{calibration_file} must contain at least 2 texts. Provide about {CALIBRATION_TEXTS}.")
    return ComparisonTexts(calibration[:CALIBRATION_TEXTS], validation[:MAX_COMPARED_TEXTS])


def make_text_batches(
    texts: Sequence[str], folder: Path, config: Any, input_names: Sequence[str], batch_size: int = 16
) -> list[Arrays]:
    """Tokenize texts.

    Args:
        texts: The texts.
        folder: The folder of the tokenizer.
        config: The configuration of the model.
        input_names: The names of the inputs.
        batch_size: The number of texts per batch.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    length = min(MAX_TOKENS, get_max_input_length(config) or MAX_TOKENS)
    options: dict[str, Any] = {"truncation": True, "max_length": length, "padding": True, "return_tensors": "np"}
    batches = []
    for first in range(0, len(texts), batch_size):
        batch = tokenizer(list(texts[first : first + batch_size]), **options)
        zeros = np.zeros_like(batch["input_ids"])
        batches.append({name: np.asarray(batch.get(name, zeros), dtype=np.int64) for name in input_names})
    return batches


def quantize_dynamically(
    path: Path, int8_path: Path, float32_modules: Sequence[str] = (), quantizes_embeddings: bool = True
) -> None:
    """Write a graph with int8 weights and one scale per output channel, for ONNX Runtime.

    Only 7 bits are used for the weights. On x86 processors without VNNI, ONNX Runtime adds two products in 16 bits,
    and the sum could overflow with 8-bit weights.

    Args:
        path: The float32 graph.
        int8_path: The file to write.
        float32_modules: The names of modules that remain in float32.
        quantizes_embeddings: Whether to quantize the embeddings. Their precision matters most for a decoder.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(path)
    # ONNX Runtime transposes the weights of linear layers with a bias, so that their recorded shapes become wrong.
    del model.graph.value_info[:]
    scopes = {
        node.name: {item.key: item.value for item in node.metadata_props}.get("pkg.torch.onnx.name_scopes", "")
        for node in model.graph.node
    }
    excluded = [
        node for node, scope in scopes.items() if any(re.search(rf"\b{name}'", scope) for name in float32_modules)
    ]
    is_large = get_data_path(path).exists()
    # The root logger advises simplifying the graph first, which does not change these graphs.
    with raise_log_level(None):
        quantize_dynamic(
            model,
            int8_path,
            op_types_to_quantize=["MatMul", "Gemm", *(["Gather"] if quantizes_embeddings else [])],
            nodes_to_exclude=excluded,
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=is_large,
        )
    if is_large:  # ONNX Runtime gives the second file another name
        quantized = onnx.load(int8_path)
        int8_path.with_name(f"{int8_path.name}.data").unlink()
        save_graph(quantized, int8_path)


def quantize_statically(path: Path, int8_path: Path, inputs: Sequence[Arrays]) -> None:
    """Write a graph with quantize and dequantize operators around the products, for OpenVINO.

    Args:
        path: The float32 graph.
        int8_path: The file to write.
        inputs: The model inputs for each calibration text.
    """
    import nncf
    import onnx

    quantized = nncf.quantize(
        onnx.load(path), nncf.Dataset(inputs), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(inputs)
    )
    save_graph(quantized, int8_path)


@contextmanager
def raise_log_level(name: str | None) -> Iterator[None]:
    """Suppress messages of a logger below the level of errors. The name None selects the root logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def load_graph(path: str | os.PathLike, threads: int) -> Any:
    """Load a graph in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])


def compare_encoders(path: Path, int8_path: Path, batches: Sequence[Arrays], threads: int) -> tuple[str, float]:
    """Compare an int8 encoder with the float32 encoder.

    Returns:
        The measure and its value: the mean cosine similarity of hidden states or embeddings, or the share of equal
        predictions for other outputs. Padding is ignored.
    """
    int8_session = load_graph(int8_path, threads)
    return _compare_outputs(path, lambda name, batch: int8_session.run([name], batch)[0], batches, threads)


def compare_with_openvino(path: Path, int8_path: Path, batches: Sequence[Arrays], threads: int) -> tuple[str, float]:
    """Compare an int8 encoder in OpenVINO with the float32 encoder, as in `compare_encoders`."""
    import openvino

    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    model = openvino.Core().compile_model(int8_path, "CPU", options)
    return _compare_outputs(path, lambda name, batch: model(batch)[name], batches, threads)


def _compare_outputs(
    path: Path, run_int8: Callable[[str, Arrays], np.ndarray], batches: Sequence[Arrays], threads: int
) -> tuple[str, float]:
    """Compare the most important output of an encoder with the int8 output."""
    session = load_graph(path, threads)
    names = [output.name for output in session.get_outputs()]
    name = next((name for name in ("sentence_embedding", "last_hidden_state") if name in names), names[0])
    measure = "equal predictions" if name.endswith("logits") else "cosine similarity"
    values = []
    for batch in batches:
        [expected], output = session.run([name], batch), run_int8(name, batch)
        if measure == "equal predictions":
            equal = (expected.argmax(-1) == output.argmax(-1)).astype(np.float64)
        else:
            norms = np.linalg.norm(expected, axis=-1) * np.linalg.norm(output, axis=-1)
            equal = (expected * output).sum(-1) / norms
        mask = batch.get("attention_mask")
        values.append(equal[mask.astype(bool)] if mask is not None and mask.shape == equal.shape else equal.ravel())
    return measure, float(np.concatenate(values).mean())


def compare_decoders(
    encoders: tuple[Path, Path], decoders: tuple[Path, Path], batches: Sequence[Mapping[str, np.ndarray]], threads: int
) -> tuple[str, float]:
    """Compare an int8 encoder-decoder with the float32 graphs.

    Args:
        encoders: The float32 encoder and the int8 encoder.
        decoders: The graphs of the first decoder call, in float32 and int8.
        batches: The inputs of the encoder, and the tokens that the float32 model generates as "tokens" [b, n], padded
            with -1.
        threads: The number of threads of ONNX Runtime.

    Returns:
        "equal tokens" and the share of generated tokens that are also the most likely ones in int8.
    """
    sessions = [
        (load_graph(encoder, threads), load_graph(decoder, threads))
        for encoder, decoder in zip(encoders, decoders, strict=True)
    ]
    equal = total = 0
    for batch in batches:
        tokens = batch["tokens"]
        inputs = {name: array for name, array in batch.items() if name != "tokens"}
        most_likely_tokens = []
        for encoder, decoder in sessions:
            [states] = encoder.run(["last_hidden_state"], inputs)
            decoder_inputs = {"encoder_hidden_states": states, "input_ids": np.maximum(tokens[:, :-1], 0)}
            if "attention_mask" in inputs:
                decoder_inputs["encoder_attention_mask"] = inputs["attention_mask"]
            most_likely_tokens.append(decoder.run(["logits"], decoder_inputs)[0].argmax(-1))
        real = tokens[:, 1:] >= 0
        equal += int((most_likely_tokens[0] == most_likely_tokens[1])[real].sum())
        total += int(real.sum())
    return "equal tokens", equal / max(total, 1)
