"""Measure the quality of conversions by method, key/value heads and uptraining steps, on a real BERT and a real T5.

all-MiniLM-L6-v2 is scored by Spearman's correlation on the STS-B dev set (zero-shot cosines), and by the mean cosine
between its embeddings and those of the multi-head model on held-out Wikipedia lines. The T5 in
shared/data/checkpoints, whose decoder is converted, is scored by BLEU (greedy) and loss on the Multi30k validation
set. The commands scripts/convert_checkpoint.py and scripts/uptrain.py create each checkpoint. The script writes the
JSON file after each row and keeps existing rows.
"""

import argparse
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sacrebleu
import torch
import transformers
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.convert.conversion_subjects import SUBJECTS
from benchmarks.page_faults import describe_memory
from benchmarks.run_records import check_data_dir
from hf_attn_variants.commands import convert as command
from hf_attn_variants.conversion.report import get_package_versions
from hf_attn_variants.files import atomic_write

ROOT = Path(__file__).resolve().parents[2]
EPILOG = """examples:
  python -m benchmarks.convert.conversion_quality --methods mean first random
  python -m benchmarks.convert.conversion_quality --models t5-mini --methods mean calibrated --steps 0 100 300 1000 \\
      --seeds 0
  python -m benchmarks.convert.conversion_quality --table"""

MULTI_HEAD = "multi-head"
KEY = ("model", "method", "num_key_value_heads", "steps", "seed")

Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A conversion method of scripts/convert_checkpoint.py.

    Args:
        flags: the flags that select the method.
        calibrated: whether the method reads calibration texts, a different sample for each seed.
        fitted: whether the method fits each attention module, for `fit_steps` steps of the subject.
        random: whether the result depends on the seed even without texts.
    """

    flags: tuple[str, ...]
    calibrated: bool = False
    fitted: bool = False
    random: bool = False


METHODS = {
    "mean": Method(("--method", "mean")),
    "first": Method(("--method", "first")),
    "random": Method(("--method", "random"), random=True),
    "aligned": Method(("--method", "aligned"), calibrated=True),
    "calibrated": Method(("--method", "calibrated", "--fit_steps", "0"), calibrated=True),
    "calibrated+fit": Method(("--method", "calibrated"), calibrated=True, fitted=True),
}


class Results:
    """The rows measured so far, in a JSON file that is replaced atomically.

    Args:
        path: the path of the file. Its existing rows are kept.
    """

    def __init__(self, path: Path):
        self.path = path
        report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"runs": [], "rows": []}
        self.memory: Any = report.get("memory") or describe_memory()
        self.runs: list[dict[str, Any]] = report["runs"]
        self._num_rows: dict[tuple, Row] = {get_row_key(row): row for row in report["rows"]}
        self._this_run: int | None = None

    @property
    def rows(self) -> list[Row]:
        """All rows, sorted by model, method, and key/value heads from many to few."""
        return sorted(self._num_rows.values(), key=get_sort_key)

    def __contains__(self, key: tuple) -> bool:
        # Rows with a batch_order come from an earlier version of --group_by_length. They are measured again.
        return key in self._num_rows and "batch_order" not in self._num_rows[key]

    def add(self, row: Row) -> None:
        """Add a row or replace the row with the same key, and write the file."""
        if self._this_run is None:
            self._this_run = len(self.runs)
            self.runs.append(make_run_record())
        self._num_rows[get_row_key(row)] = row | {"run": self._this_run}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(
            self.path, json.dumps({"memory": self.memory, "runs": self.runs, "rows": self.rows}, indent=1) + "\n"
        )


def get_row_key(row: Row) -> tuple:
    """Return the key of a row: model, method, key/value heads, steps, seed."""
    return tuple(row[name] for name in KEY)


def plan_rows(
    subject: Any, methods: Sequence[str], kv_heads: Sequence[int] | None, steps: Sequence[int], seeds: Sequence[int]
) -> list[Row]:
    """Return the keys of the requested rows, grouped by conversion.

    Settings without randomness (no training, no sampled texts, no random heads) only use seed 0.
    """
    rows = [(MULTI_HEAD, subject.heads, 0, 0)]
    for method, k, seed, count in itertools.product(methods, kv_heads or subject.kv_heads, seeds, steps):
        varies = count > 0 or METHODS[method].calibrated or METHODS[method].random
        rows.append((method, k, count, seed if varies else 0))
    return [dict(zip(KEY, (subject.name, *row), strict=True)) for row in dict.fromkeys(rows)]


def measure(kind: Any, requested_rows: Sequence[Row], results: Results, data_dir: Path, work_dir: Path | None) -> None:
    """Convert, uptrain and score the requested rows, and add each row to the results as soon as it is measured."""
    if not requested_rows:
        return
    check_data_dir(data_dir, *kind.reads)
    subject = kind(data_dir)
    done, started = 0, time.perf_counter()
    by_conversion = itertools.groupby(
        requested_rows, key=lambda row: (row["method"], row["num_key_value_heads"], row["seed"])
    )
    for (method, k, seed), group in by_conversion:
        with tempfile.TemporaryDirectory(dir=work_dir) as temporary:
            folder, seconds = Path(subject.source), 0.0
            if method != MULTI_HEAD:
                folder, seconds = convert(subject, method, k, seed, Path(temporary))
            for row in group:
                trained, training_seconds = folder, 0.0
                if row["steps"]:
                    trained, training_seconds = uptrain(subject, folder, row["steps"], seed, Path(temporary))
                metrics = subject.evaluate(trained)
                times = {"conversion_seconds": round(seconds, 2), "training_seconds": round(training_seconds, 1)}
                results.add(row | metrics | times)
                done += 1
                left = (time.perf_counter() - started) / done * (len(requested_rows) - done)
                print(
                    f"{format_row(row | metrics, subject)} | {len(requested_rows) - done} rows, {left:.0f} s left",
                    flush=True,
                )


def convert(subject: Any, method: str, k: int, seed: int, folder: Path) -> tuple[Path, float]:
    """Convert like scripts/convert_checkpoint.py, and return the checkpoint and the seconds without imports."""
    output = folder / "converted"
    flags = ["--model_name_or_path", str(subject.source), "--output_dir", str(output)]
    flags += ["--num_key_value_heads", str(k), *METHODS[method].flags, "--seed", str(seed)]
    if METHODS[method].calibrated:
        flags += subject.write_calibration_texts(folder, seed)
    if METHODS[method].fitted:
        flags += ["--fit_steps", str(subject.fit_steps)]
    started = time.perf_counter()
    command.main(command.parse_args(flags))
    return output, time.perf_counter() - started


def uptrain(subject: Any, checkpoint: Path, steps: int, seed: int, folder: Path) -> tuple[Path, float]:
    """Train a converted checkpoint with scripts/uptrain.py, and return the new checkpoint and the training seconds."""
    output = folder / f"uptrained-{steps}"
    flags = ["--model_name_or_path", str(checkpoint), "--teacher", str(subject.source), "--output_dir", str(output)]
    flags += [*subject.uptraining, *subject.write_training_texts(folder, seed, steps), "--max_train_steps", str(steps)]
    flags += ["--per_device_train_batch_size", str(subject.batch_size), "--group_by_length", "--seed", str(seed)]
    # The benchmark scores the result itself, so that the script's own evaluation can be short.
    flags += ["--eval_steps", str(steps), "--max_eval_samples", "64", "--disable_tqdm"]
    subprocess.run([sys.executable, str(ROOT / "scripts/uptrain.py"), *flags], check=True)
    return output, json.loads((output / "all_results.json").read_text())["train_runtime"]


def format_row(row: Row, subject: Any) -> str:
    """Return a row as a line for the terminal."""
    metrics = ", ".join(f"{name} {row[name]:{metric.format}}" for name, metric in subject.metrics.items())
    label = f"{row['model']} {row['method']:14s} k={row['num_key_value_heads']:<2d} {row['steps']:4d} steps"
    return f"{label} seed {row['seed']}: {metrics}"


def format_mean_and_range(values: Sequence[float], form: str) -> str:
    """Return the mean as text, followed by the range if there are several values."""
    text = f"{statistics.mean(values):{form}}"
    return text if len(values) < 2 else f"{text} ({min(values):{form}} to {max(values):{form}})"


def format_tables(rows: Sequence[Row]) -> str:
    """Return one Markdown table per model and metric, without the rows that have an earlier batch order."""
    rows = [row for row in rows if "batch_order" not in row]
    return "\n\n".join(
        format_table(rows, subject, name)
        for subject in SUBJECTS.values()
        for name in subject.metrics
        if any(row["model"] == subject.name for row in rows)
    )


def format_table(rows: Sequence[Row], subject: Any, metric: str) -> str:
    """Return the Markdown table of one metric: methods and uptraining steps by key/value heads."""
    title, form = subject.metrics[metric].title, subject.metrics[metric].format
    selected_rows = [row for row in rows if row["model"] == subject.name]
    heads = sorted({row["num_key_value_heads"] for row in selected_rows if row["method"] != MULTI_HEAD}, reverse=True)
    base = [row[metric] for row in selected_rows if row["method"] == MULTI_HEAD]
    suffix = f" (multi-head {format_mean_and_range(base, form)})" if base else ""
    lines = [f"{subject.name}, {title}{suffix}:", ""]
    lines.append("| method | uptraining steps | " + " | ".join(f"{k} KV heads" for k in heads) + " | time |")
    lines.append("| --- " * (len(heads) + 3) + "|")
    for method, steps in itertools.product(METHODS, sorted({row["steps"] for row in selected_rows})):
        group = [row for row in selected_rows if (row["method"], row["steps"]) == (method, steps)]
        if not group:
            continue
        cells = [[row[metric] for row in group if row["num_key_value_heads"] == k] for k in heads]
        seconds = statistics.mean(row["conversion_seconds"] + row["training_seconds"] for row in group)
        texts = [format_mean_and_range(values, form) if values else "" for values in cells]
        lines.append(f"| {method} | {steps} | " + " | ".join(texts) + f" | {seconds:.0f} s |")
    return "\n".join(lines)


def save_plot(rows: Sequence[Row], path: Path) -> None:
    """Plot quality against key/value heads, with one panel per model and number of steps, and one line per method.

    The plot omits numbers of steps that were not measured with at least two numbers of heads for every model.
    """
    names = ("model", "steps", "num_key_value_heads")
    measured = {tuple(row[name] for name in names) for row in rows if row["method"] != MULTI_HEAD}
    lines = Counter((model, steps) for model, steps, _ in measured)
    budgets = sorted({steps for _, steps in lines})
    subjects = [
        candidate for candidate in SUBJECTS.values() if any(lines[candidate.name, steps] > 1 for steps in budgets)
    ]
    budgets = [steps for steps in budgets if all(lines[subject.name, steps] > 1 for subject in subjects)]
    if not budgets or not subjects:
        return
    figure = Figure(figsize=(5 * len(subjects), 1.0 + 3.4 * len(budgets)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(budgets), len(subjects), squeeze=False, sharey="col")
    for (line, steps), (column, subject) in itertools.product(enumerate(budgets), enumerate(subjects)):
        selected_rows = [row for row in rows if row["model"] == subject.name]
        _draw(grid[line][column], selected_rows, subject, steps)
    lines_by_label = {
        label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        lines_by_label.values(),
        lines_by_label.keys(),
        loc="outside lower center",
        ncols=len(lines_by_label),
        fontsize=8,
    )
    figure.savefig(path.with_name(f".tmp-{path.name}"), dpi=120, format="png")
    path.with_name(f".tmp-{path.name}").replace(path)


def _draw(axes: Any, rows: Sequence[Row], subject: Any, steps: int) -> None:
    metric = next(iter(subject.metrics))
    for color, method in enumerate(METHODS):
        group = [row for row in rows if (row["method"], row["steps"]) == (method, steps)]
        heads = sorted({row["num_key_value_heads"] for row in group})
        values = [[row[metric] for row in group if row["num_key_value_heads"] == k] for k in heads]
        if heads:
            means = [statistics.mean(column) for column in values]
            below = [mean - min(column) for mean, column in zip(means, values, strict=True)]
            above = [max(column) - mean for mean, column in zip(means, values, strict=True)]
            axes.errorbar(heads, means, [below, above], fmt="o-", color=f"C{color}", capsize=3, label=method)
    base = [row[metric] for row in rows if row["method"] == MULTI_HEAD]
    if base:
        axes.axhline(base[0], color="black", linestyle="--", linewidth=1, label="multi-head")
    ticks = sorted({row["num_key_value_heads"] for row in rows if row["method"] != MULTI_HEAD})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, ticks)
    axes.set_xlabel("key/value heads")
    axes.set_ylabel(subject.metrics[metric].title)
    axes.set_title(
        f"{subject.name} ({subject.heads} heads), {f'{steps} steps of uptraining' if steps else 'no training'}",
        fontsize=10,
    )
    axes.grid(alpha=0.3)


def get_sort_key(row: Row) -> tuple:
    method = [MULTI_HEAD, *METHODS].index(row["method"])
    return row["model"], method, -row["num_key_value_heads"], row["steps"], row["seed"]


def make_run_record() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    # Only the name of a folder means something on another machine.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    return {
        "command": shlex.join(["python", *words]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": cpu or platform.processor(), "cpus": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": get_package_versions() | {"sacrebleu": sacrebleu.__version__},
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--num_key_value_heads", nargs="+", type=int, help="default: 6 4 2 1 for MiniLM, 4 2 1 for T5")
    parser.add_argument(
        "--steps", nargs="+", type=int, default=[0], help="numbers of uptraining steps, where 0 means no uptraining"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data_dir", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--work_dir", type=Path, help="folder of the temporary checkpoints (default: the system's)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/convert/results/conversion_quality.json")
    parser.add_argument("--overwrite", action="store_true", help="measure rows again that the JSON already has")
    parser.add_argument("--table", action="store_true", help="only print the tables of the JSON and draw its plot")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> list[Row]:
    """Measure the missing rows, draw the plot, print the tables, and return all rows."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = Results(args.output)
    for name in [] if args.table else args.models:
        subject = SUBJECTS[name]
        rows = plan_rows(subject, args.methods, args.num_key_value_heads, args.steps, args.seeds)
        requested_rows = [row for row in rows if args.overwrite or get_row_key(row) not in results]
        measure(subject, requested_rows, results, args.data_dir, args.work_dir)
    if results.rows:
        save_plot(results.rows, args.output.with_suffix(".png"))
    print(format_tables(results.rows))
    return results.rows


if __name__ == "__main__":
    main(parse_args())
