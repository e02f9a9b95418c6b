"""Fine-tunes one checkpoint and its attention variants on GLUE tasks by one script, and tabulates the dev metrics."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What is converted: None is the source itself.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "MHA": None,
    "GQA-4 (mean)": {"num_key_value_heads": 4},
    "MQA (mean)": {"num_key_value_heads": 1},
    "talking heads (identity)": {"talking_heads": "both"},
}
# Folder of the TSVs, epochs, the metrics of the table.
TASKS = {
    "sst2": ("SST-2", 1, ["accuracy"]),
    "cola": ("CoLA", 3, ["matthews_correlation"]),
    "stsb": ("STS-B", 1, ["pearson", "spearmanr"]),
    "wnli": ("WNLI", 3, ["accuracy"]),
}
EPILOG = """example:
  python benchmarks/glue_variants.py --model MINILM_FOLDER --glue_dir GLUE_FOLDER --work_dir WORK_FOLDER --jobs 2"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="Folder of a multi-head checkpoint.")
    parser.add_argument("--glue_dir", required=True, help="Folder that holds one folder of TSVs for each task.")
    parser.add_argument(
        "--work_dir", required=True, help="Where checkpoints and runs go; finished runs in it are kept."
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--jobs", type=int, default=1, help="Runs at a time.")
    parser.add_argument("--threads", type=int, help="CPU threads of each run.")
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--max_train_steps", type=int, help="Shorter runs, to try the script.")
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/glue_variants.json"))
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    """Convert, run what is not there yet, write the JSON and print the table."""
    work = Path(args.work_dir)
    checkpoints = {name: _checkpoint(args.model, work, name) for name in VARIANTS}
    # Tasks in the order given, so that a table begins to fill before the long ones end.
    runs = [(task, seed, name) for task in args.tasks for seed in args.seeds for name in VARIANTS]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda run: _run(args, work, checkpoints[run[2]], *run), runs))
    rows = [_row(work, *run) for run in runs]
    first = json.loads((_folder(work, *runs[0]) / "all_results.json").read_text())
    result = {
        "model": Path(args.model).name,
        "device": _device(),
        "flags": " ".join(_flags(args, "TASK", "SEED", "CHECKPOINT", "OUTPUT_DIR")[2:]),
        "versions": first["versions"],
        "runs": rows,
    }
    Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return a Markdown table: variants by task metrics, mean and (with several seeds) range."""
    rows = list(rows)
    columns = [(t, metric) for t in dict.fromkeys(row["task"] for row in rows) for metric in TASKS[t][2]]
    lines = ["| | " + " | ".join(f"{TASKS[t][0]} {metric}" for t, metric in columns) + " |"]
    lines.append("| --- " * (len(columns) + 1) + "|")
    for name in dict.fromkeys(row["variant"] for row in rows):
        cells = []
        for t, metric in columns:
            values = [row[metric] for row in rows if (row["variant"], row["task"]) == (name, t)]
            spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _slug(name: str) -> str:
    return name.split(" (")[0].replace(" ", "-").lower()


def _folder(work: Path, task: str, seed: int, name: str) -> Path:
    return work / "runs" / f"{_slug(name)}-{task}-{seed}"


def _checkpoint(model: str, work: Path, name: str) -> str:
    from hf_attn_variants.conversion import convert_checkpoint

    fields = VARIANTS[name]
    folder = work / "checkpoints" / _slug(name)
    if fields is None:
        return model
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        convert_checkpoint(model, folder, **fields)
    return str(folder)


def _flags(args: argparse.Namespace, task: str, seed: Any, checkpoint: str, output_dir: str) -> list[str]:
    folder, epochs = (TASKS[task][0], str(TASKS[task][1])) if task in TASKS else (task, "EPOCHS")
    command = [
        sys.executable,
        str(ROOT / "scripts/run_glue.py"),
        "--model_name_or_path",
        checkpoint,
        "--task_name",
        task,
    ]
    command += [
        "--data_dir",
        str(Path(args.glue_dir) / folder),
        "--output_dir",
        output_dir,
        "--num_train_epochs",
        epochs,
    ]
    command += ["--learning_rate", "1e-4", "--warmup_ratio", "0.06", "--weight_decay", "0.01", "--max_length", "128"]
    command += ["--per_device_train_batch_size", "32", "--group_by_length", "--seed", str(seed), "--skip_predict"]
    command += ["--mixed_precision", args.mixed_precision, "--overwrite_output_dir"]
    return command + (["--max_train_steps", str(args.max_train_steps)] if args.max_train_steps else [])


def _run(args: argparse.Namespace, work: Path, checkpoint: str, task: str, seed: int, name: str) -> None:
    folder = _folder(work, task, seed, name)
    if (folder / "all_results.json").is_file():
        _check_finished(args, folder, task)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ) | ({"OMP_NUM_THREADS": str(args.threads)} if args.threads else {})
    started = time.perf_counter()
    with open(folder.with_suffix(".log"), "w") as log:
        command = _flags(args, task, seed, checkpoint, str(folder))
        status = subprocess.run(command, stdout=log, stderr=log, env=environment).returncode
    if status:
        raise SystemExit(f"{name} on {task}, seed {seed}, failed: see {folder.with_suffix('.log')}")
    print(f"{name} on {task}, seed {seed}: {time.perf_counter() - started:.0f} s", flush=True)


def _check_finished(args: argparse.Namespace, folder: Path, task: str) -> None:
    used = json.loads((folder / "all_results.json").read_text())["arguments"]
    wanted = {"max_train_steps": args.max_train_steps, "num_train_epochs": TASKS[task][1]}
    wanted |= {"learning_rate": 1e-4, "per_device_train_batch_size": 32}
    different = {key: used[key] for key, value in wanted.items() if used[key] != value}
    if different or (used["mixed_precision"] or "no") != args.mixed_precision:
        raise SystemExit(f"{folder} holds a run with other settings {different or used['mixed_precision']}: remove it")


def _row(work: Path, task: str, seed: int, name: str) -> dict[str, Any]:
    found = json.loads((_folder(work, task, seed, name) / "all_results.json").read_text())
    kept = {metric: found[f"eval_{metric}"] for metric in TASKS[task][2]}
    kept |= {key: found[key] for key in ("train_loss", "steps", "train_runtime", "num_parameters")}
    return {"variant": name, "task": task, "seed": seed, **kept}


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores, torch {torch.__version__}"


if __name__ == "__main__":
    main(parse_args())
