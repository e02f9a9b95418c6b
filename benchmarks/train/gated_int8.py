"""Uptrain MiniLM with output gates, attention sinks or a clipped softmax, and compare its quality in float32 and int8.

MiniLM is converted to grouped heads with each extension, and `attn-variants uptrain` restores its embeddings. Then the
model is quantized with `quantize` and for OpenVINO. Outliers are measured like in the code of arXiv 2306.12929. In the
following, x is the output of a feed-forward module before the residual connection, or the output of a layer. The
kurtosis of all values of x for a text is averaged over texts, modules and layers. The largest absolute value of x for
a text is averaged over texts, and the largest of these means is reported. Finished runs in the work folder are reused.

Install the packages with `pip install -e .[onnx,openvino,demo]`.

Example:
    python -m benchmarks.train.gated_int8 --data_dir ../shared/data --work_dir WORK
"""

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from benchmarks.machine import describe_machine
from benchmarks.run_records import check_arguments, check_data_dir, write_rows
from benchmarks.speed.int8_encoder import (
    CALIBRATION_SENTENCES,
    compute_embeddings,
    compute_spearman,
    export_openvino_encoders,
    find_demo_model,
    make_torch_encoder,
    read_pairs,
)
from benchmarks.train.small_pretraining import ROOT, format_command, make_script_command, run_script
from hf_attn_variants import quantize
from hf_attn_variants.commands.training import uptrain
from hf_attn_variants.conversion import convert_checkpoint

# The names of the untrained model and of the uptrained model without an extension, and the fields of each extension.
ORIGINAL, PLAIN = "MiniLM, not trained", "no extension"
EXTENSIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "output gates": {"output_gate": "head"},
    "attention sinks": {"attention_sink": True},
    "clipped softmax": {"clipped_softmax": [-0.1, 1]},
}
HEADS = {"num_key_value_heads": 4, "method": "mean"}
STEPS, SEEDS = 300, (0, 1)
RECIPE = "--objective embedding --trainable all --learning_rate 3e-4 --weight_decay 0.01 --max_length 64 --cpu "
RECIPE += "--per_device_train_batch_size 32 --group_by_length --disable_tqdm --max_eval_samples 256"
CLIPPING = "--clipping_ratio 0.5"
TRAIN, DEV = "glue/STS-B/train.tsv", "glue/STS-B/dev.tsv"
MNLI = "glue/MNLI/train.tsv"
ENGINES = {"float32": "float32", "quantize": "`quantize`", "OpenVINO int8 (static)": "OpenVINO, int8"}
OUTLIER_TEXTS = 500


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a BERT sentence encoder (default: all-MiniLM-L6-v2)")
    parser.add_argument("--data_dir", type=Path, required=True, help=f"folder with {TRAIN}, {DEV} and {MNLI}")
    parser.add_argument(
        "--work_dir", type=Path, required=True, help="folder for models; finished runs in it are reused"
    )
    parser.add_argument("--extensions", nargs="+", choices=EXTENSIONS, default=list(EXTENSIONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--max_train_steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/train/results/gated_int8.json")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train and measure the models that have not been measured yet, and write the JSON file and the plot."""
    check_data_dir(args.data_dir, TRAIN, DEV, MNLI)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    model = args.model or find_demo_model()
    texts = args.work_dir / "sentences.txt"
    texts.write_text("".join(f"{text}\n" for text in list_training_texts(args.data_dir)), encoding="utf-8")
    runs: list[tuple[str, int | None]] = [(ORIGINAL, None)]
    runs += [(name, seed) for seed in args.seeds for name in args.extensions]
    for name, seed in runs:
        rows = json.loads(args.output.read_text(encoding="utf-8"))["runs"] if args.output.is_file() else []
        if any((row["extension"], row["seed"]) == (name, seed) for row in rows):
            continue
        row: dict[str, Any] = {"extension": name, "seed": seed}
        folder = Path(model)
        if seed is not None:
            folder = args.work_dir / f"{name.replace(' ', '-')}-{seed}"
            command = prepare_training(args, model, name, seed, texts, folder)
            run_script(command, folder)
            results = check_arguments(folder, uptrain.parse_args, command[2:])
            names = {command[0]: "python", f"{ROOT}/": "", str(args.work_dir): "WORK", model: "MINILM"}
            row |= {"steps": results["steps"], "command": format_command(command, names)}
            row |= {key: results[key] for key in ("initial_eval_embedding_cosine", "eval_embedding_cosine")}
        row |= measure(folder, args.data_dir)
        head = {"machine": describe_machine("cpu"), "fields": HEADS, "extensions": EXTENSIONS}
        write_rows(args.output, head, [row], ("extension", "seed"))
    rows = json.loads(args.output.read_text(encoding="utf-8"))["runs"]
    plot(rows, args.output.with_suffix(".png"))
    return rows


def list_training_texts(data_dir: Path) -> list[str]:
    """Return the sentences of the training sets of STS-B and MNLI, without repetitions and in a fixed random order."""
    texts = [text for pair in read_pairs(data_dir / TRAIN) for text in pair[:2]]
    with (data_dir / MNLI).open(encoding="utf-8") as file:
        columns = next(file).rstrip("\n").split("\t")
        places = [columns.index(name) for name in ("sentence1", "sentence2")]
        texts += [line.rstrip("\n").split("\t")[place] for line in file for place in places]
    unique = list(dict.fromkeys(filter(None, map(str.strip, texts))))
    return [unique[i] for i in np.random.default_rng(0).permutation(len(unique))]


def prepare_training(
    args: argparse.Namespace, model: str, name: str, seed: int, texts: Path, folder: Path
) -> list[str]:
    """Convert the model unless the result exists, and return the command that trains it."""
    start = args.work_dir / f"{name.replace(' ', '-')}-start"
    if not start.is_dir():
        convert_checkpoint(model, start, **HEADS, **EXTENSIONS[name])
    clipping = CLIPPING.split() if "clipped_softmax" in EXTENSIONS[name] else []
    steps = ("--max_train_steps", args.max_train_steps, "--seed", seed, "--output_dir", folder)
    return make_script_command(
        *("uptrain.py", "--model_name_or_path", start, "--teacher", model, "--train_file", texts),
        *(*RECIPE.split(), *clipping, *steps),
    )


def measure(folder: Path, data_dir: Path) -> dict[str, Any]:
    """Return the outliers of a model, and per engine the quality and the distance of the embeddings from float32."""
    tokenizer, pairs = AutoTokenizer.from_pretrained(folder), read_pairs(data_dir / DEV)
    model = AutoModel.from_pretrained(folder).eval()
    sentences = [pair[0] for pair in pairs]
    report: dict[str, Any] = measure_outliers(model, tokenizer, sentences[:OUTLIER_TEXTS])
    with tempfile.TemporaryDirectory() as temporary:
        calibration = Path(temporary) / "sentences.txt"
        train = read_pairs(data_dir / TRAIN)[:CALIBRATION_SENTENCES]
        calibration.write_text("".join(f"{pair[0]}\n" for pair in train), encoding="utf-8")
        engines = export_openvino_encoders(Path(temporary) / "openvino", str(folder), calibration, threads=1)
        engines["float32"] = make_torch_encoder(model)
        expected = compute_embeddings(engines["float32"], tokenizer, sentences)
        report["spearman"], report["distance"] = (
            {"float32": compute_spearman(engines["float32"], tokenizer, pairs)},
            {},
        )
        engines["quantize"] = make_torch_encoder(quantize(model))
        for name in ENGINES:
            if name != "float32":
                report["spearman"][name] = compute_spearman(engines[name], tokenizer, pairs)
                cosines = (expected * compute_embeddings(engines[name], tokenizer, sentences)).sum(-1)
                report["distance"][name] = float(1 - cosines.mean())
    return report


@torch.no_grad()
def measure_outliers(model: Any, tokenizer: Any, texts: Sequence[str]) -> dict[str, float]:
    """Return the mean kurtosis and the largest mean infinity norm (see the module docstring)."""
    values: dict[str, list[tuple[float, float]]] = {}

    def record(name: str, output: Tensor) -> None:
        x = output.double()
        centered = x - x.mean()
        kurtosis = centered.pow(4).mean() / centered.square().mean().square()
        values.setdefault(name, []).append((float(kurtosis), float(x.abs().max())))

    hooks = []
    for name, module in model.named_modules():
        if name.endswith(("output.dense", "output.LayerNorm")) and "attention" not in name:

            def hook(_: nn.Module, inputs: Any, output: Tensor, name: str = name) -> None:
                record(name, output)

            hooks.append(module.register_forward_hook(hook))
    for text in texts:
        model(**tokenizer(text, truncation=True, max_length=128, return_tensors="pt"))
    for handle in hooks:
        handle.remove()
    means = {name: np.mean(records, axis=0) for name, records in values.items()}
    return {
        "kurtosis": float(np.mean([kurtosis for kurtosis, _ in means.values()])),
        "infinity_norm": float(max(norm for _, norm in means.values())),
    }


def plot(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Plot the distance of the int8 embeddings of each model against its kurtosis."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rows, axes = list(rows), figure.subplots(1, 2)
    for axis, engine in zip(axes, ("quantize", "OpenVINO int8 (static)"), strict=True):
        for name in dict.fromkeys(row["extension"] for row in rows):
            chosen = [row for row in rows if row["extension"] == name]
            axis.plot(
                [row["kurtosis"] for row in chosen],
                [row["distance"][engine] for row in chosen],
                "o",
                alpha=0.6,
                label=name,
            )
        axis.set(xlabel="mean kurtosis", ylabel="1 - cosine with float32", title=ENGINES[engine].replace("`", ""))
        axis.locator_params(axis="x", nbins=5)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    temporary = path.with_name(f".tmp-{path.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)


if __name__ == "__main__":
    main(parse_args())
