"""Check whether optimum runs the ONNX graphs of `attn-variants export` and generates the same tokens as `generate`.

A T5 for Multi30k with 8, 2 and 1 key/value heads (averaged) translates 50 sentences of the validation set, greedily
and with 4 beams. all-MiniLM-L6-v2 with 4 of 12 heads encodes them. optimum-onnx requires an earlier version of
transformers than this package. Therefore the script installs both into a separate folder from a package index, and
uses them with the current Python, torch and ONNX Runtime.

Example:
    python -m benchmarks.speed.onnx_optimum --model MINILM
"""

import argparse
import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
# The latest transformers version that optimum-onnx 0.1.0 supports, with its requirements.
PACKAGES = ["optimum-onnx==0.1.0", "optimum==2.1.0", "transformers==4.57.6", "huggingface-hub<1", "tokenizers<0.23"]
T5, HEADS, BEAMS, SENTENCES, NEW_TOKENS = "checkpoints/t5-mini-multi30k-en-de", (8, 2, 1), (1, 4), 50, 40


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="example:" + __doc__.split("Example:")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--data_dir", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--work_dir", type=Path, default=ROOT / "build/optimum", help="not deleted between runs")
    parser.add_argument("--output_dir", type=Path, default=FOLDER / "results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """Export the models, run the graphs with optimum in another process, compare the outputs, and write the JSON."""
    import transformers

    import hf_attn_variants  # not at the top, because it does not support the worker's older transformers
    from hf_attn_variants.export.onnx import export_onnx
    from hf_attn_variants.files import atomic_write

    transformers.logging.set_verbosity_error()
    with gzip.open(args.data_dir / "multi30k/val.en.gz", "rt") as file:
        lines = list(itertools.islice(map(str.strip, file), SENTENCES))
    request: dict[str, Any] = {"graphs": {}, "inputs": {}}
    expected = {}
    sources = {f"T5, {heads} of 8 heads": (args.data_dir / T5, heads) for heads in HEADS}
    sources |= {"MiniLM, 4 of 12 heads": (args.model, 4)} if args.model else {}
    args.work_dir.mkdir(parents=True, exist_ok=True)
    for name, (source, heads) in sources.items():
        auto = transformers.AutoModel if name.startswith("MiniLM") else transformers.AutoModelForSeq2SeqLM
        model = hf_attn_variants.convert(auto.from_pretrained(source), num_key_value_heads=heads, method="mean").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        folder, graphs = (args.work_dir / f"{kind}-{name.split(',')[0]}-{heads}" for kind in ("model", "onnx"))
        for directory in (folder, graphs):
            shutil.rmtree(directory, ignore_errors=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        export_onnx(folder, graphs)
        request["graphs"][name] = str(graphs)
        # The worker's transformers cannot load the tokenizer of a later version, so the worker gets token ids.
        request["inputs"][name] = dict(tokenizer(lines, padding=True))
        expected[name] = compute_outputs(model, request["inputs"][name])
    response = run_with_optimum(request, args.work_dir)
    rows = []
    for name, outs in expected.items():
        for kind, value in outs.items():
            optimum_value = response["outputs"][name][kind]
            is_same = value == optimum_value if kind != "states" else None
            max_difference = (
                float((torch.tensor(value) - torch.tensor(optimum_value)).abs().max()) if kind == "states" else None
            )
            rows.append({"model": name, "compared": kind, "same": is_same, "largest_difference": max_difference})
            print(json.dumps(rows[-1]), flush=True)
    result = {key: response[key] for key in ("optimum_onnx", "transformers")} | {
        "saved_with": transformers.__version__,
        "sentences": SENTENCES,
        "runs": rows,
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    atomic_write(args.output_dir / "onnx_optimum.json", json.dumps(result, indent=1) + "\n")


@torch.no_grad()
def compute_outputs(model: Any, inputs: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Return the generated tokens for each number of beams, or the last hidden states of an encoder's first text."""
    tensors = {key: torch.tensor(value) for key, value in inputs.items()}
    if not model.can_generate():
        return {"states": model(**tensors).last_hidden_state[0].tolist()}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    return {f"beams {beams}": model.generate(**tensors, num_beams=beams, **options).tolist() for beams in BEAMS}


def run_with_optimum(request: dict[str, Any], work_dir: Path) -> dict[str, Any]:
    """Run this file as a worker with optimum and its transformers, which are installed the first time."""
    folder = work_dir / "packages"
    if not folder.is_dir():
        stage = work_dir / ".packages"
        shutil.rmtree(stage, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(stage)]
        subprocess.run([*pip, *PACKAGES], check=True)
        stage.rename(folder)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--worker"],
        input=json.dumps(request),
        env=os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_worker() -> None:
    """Read the request from standard input, run the graphs with optimum, and print their outputs as JSON."""
    from importlib.metadata import version

    from optimum.onnxruntime import ORTModelForFeatureExtraction, ORTModelForSeq2SeqLM

    request = json.load(sys.stdin)
    response = {}
    for name, folder in request["graphs"].items():
        ort_class = ORTModelForFeatureExtraction if name.startswith("MiniLM") else ORTModelForSeq2SeqLM
        response[name] = compute_outputs(ort_class.from_pretrained(folder), request["inputs"][name])
    versions = {"optimum_onnx": version("optimum-onnx"), "transformers": version("transformers")}
    print(json.dumps(versions | {"outputs": response}))


if __name__ == "__main__":
    args = parse_args()
    if args.worker:
        run_worker()
    else:
        main(args)
