"""Fine-tune one checkpoint and its attention variants on GLUE tasks and SQuAD, and tabulate the dev metrics.

`convert_checkpoint` creates each variant. The calibration reads lines of Wikipedia, or training texts of the task
without their labels. `scripts/uptrain.py` distills some variants on more of these texts, with the source as teacher.
Each run executes `scripts/run_glue.py` or `scripts/run_squad.py`. Variants of the fine-tuned MHA are created from its
run, and are either only evaluated or trained once more. Finished runs in the work folder are reused, so that an
interrupted comparison can continue.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.run_records import check_arguments, check_data_dir, check_source, write_rows
from benchmarks.train.compared_variants import MHA, VARIANTS, Variant
from hf_attn_variants.commands.training import glue as run_glue
from hf_attn_variants.commands.training import squad as run_squad
from hf_attn_variants.commands.training import uptrain
from hf_attn_variants.glue_tasks import get_task
from hf_attn_variants.training.glue.task import load_glue
from hf_attn_variants.training.squad.data import read_squad

ROOT = Path(__file__).resolve().parents[2]
EPILOG = """examples:
  python -m benchmarks.train.finetuned_variants --model MINILM --data_dir ../shared/data --work_dir WORK --jobs 2 \\
      --threads 1
  python -m benchmarks.train.finetuned_variants --model MINILM --data_dir ../shared/data --work_dir WORK \\
      --tasks squad \\
      --variants MHA "GQA-4 (calibrated, distilled)" "GQA-4 (mean)" """
CALIBRATION_LINES, CALIBRATION_LENGTH = 4096, 32
DEFAULT_LINES = 2048  # the number of lines that `convert` draws from a file by default
TASK_TEXTS = 1536  # training texts of the task, with the maximum length of its training
DISTILLATION_STEPS, DISTILLATION_BATCH, DISTILLATION_LENGTH = 100, 32, 64
RECIPE = ["--learning_rate", "1e-4", "--warmup_ratio", "0.06", "--weight_decay", "0.01"]
RECIPE += ["--per_device_train_batch_size", "32", "--group_by_length", "--overwrite_output_dir"]
# A row contains each of these flags that is not the default. They are part of the key of a row.
OWN_FLAGS = ("max_train_samples", "num_train_epochs", "mixed_precision")


class Run(NamedTuple):
    """A fine-tuning run: a task, a seed, and the name of a variant."""

    task: str
    seed: Any
    variant: str


@dataclass(frozen=True)
class Task:
    """A data set and the settings of its runs.

    Args:
        title: The title in tables.
        epochs: The number of training epochs.
        metrics: The names of the dev metrics.
        script: The name of the script that fine-tunes and evaluates a model.
        files: The paths in the data folder, by flag of the script.
        max_length: The maximum number of tokens.
        flags: Other flags of the script.
    """

    title: str
    epochs: int
    metrics: tuple[str, ...]
    script: str
    files: Mapping[str, str]
    max_length: int
    flags: tuple[str, ...] = ()


def _make_glue_task(title: str, epochs: int, *metrics: str) -> Task:
    return Task(title, epochs, metrics, "run_glue.py", {"data_dir": f"glue/{title}"}, 128, ("--skip_predict",))


SQUAD_FILES = {"train_file": "squad/train-v1.1.subset.json", "validation_file": "squad/dev-v1.1.json"}
TASKS = {
    "sst2": _make_glue_task("SST-2", 1, "accuracy"),
    "cola": _make_glue_task("CoLA", 3, "matthews_correlation"),
    "stsb": _make_glue_task("STS-B", 1, "pearson", "spearmanr"),
    "qnli": _make_glue_task("QNLI", 1, "accuracy"),
    "mnli": _make_glue_task("MNLI", 1, "accuracy"),
    "wnli": _make_glue_task("WNLI", 3, "accuracy"),
    "squad": Task("SQuAD v1.1", 1, ("exact_match", "f1"), "run_squad.py", SQUAD_FILES, 256),
}


def parse_args(argv: list[str] | None = None, variants: Iterable[str] = VARIANTS) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="Folder of a multi-head checkpoint.")
    parser.add_argument("--data_dir", type=Path, required=True, help="Folder with glue/, squad/ and wikipedia/.")
    parser.add_argument(
        "--work_dir", type=Path, required=True, help="Folder for checkpoints and runs. Finished runs are reused."
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variants", nargs="+", choices=list(variants), default=list(variants), metavar="VARIANT")
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--jobs", type=int, default=1, help="Number of parallel runs.")
    parser.add_argument("--threads", type=int, help="Number of CPU threads per run.")
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--num_train_epochs", type=int, help="Epochs, instead of the default of each task.")
    parser.add_argument("--max_train_samples", type=int, help="Train only on the first N rows of a task.")
    parser.add_argument("--max_train_steps", type=int, help="Maximum number of steps, to try the script.")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/train/results/finetuned_variants.json")
    return parser.parse_args(argv)


def main(args: argparse.Namespace, variants: Mapping[str, Variant] = VARIANTS) -> None:
    """Create the variants, execute the missing runs, add the rows to the JSON file and print the table."""
    check_data_dir(args.data_dir, *dict.fromkeys(path for name in args.tasks for path in TASKS[name].files.values()))
    runs = [Run(task, seed, name) for task in args.tasks for seed in args.seeds for name in args.variants]
    sources = {run._replace(variant=MHA): None for run in runs if variants[run.variant].of_finetuned}
    for run in [*sources, *runs]:  # a finished run with other arguments raises an error before any other run starts
        if (_get_run_folder(args.work_dir, run) / "all_results.json").is_file():
            _make_row(args, run, variants)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda run: _run(args, run, variants), sources))
        for run in runs:
            make_checkpoint(args, run, variants)
        list(pool.map(lambda run: _run(args, run, variants), runs))
    rows = [_make_row(args, run, variants) for run in runs]
    head = {
        "model": args.model.name,
        "device": _describe_device(),
        "commands": {
            name: " ".join(_make_command(args, Run(name, "SEED", MHA), "CHECKPOINT", "OUTPUT_DIR", variants)).replace(
                str(args.data_dir), "DATA"
            )
            for name in args.tasks
        },
    }
    # A row that has a batch_order was made by an earlier version of --group_by_length.
    write_rows(args.output, head, rows, ("variant", "task", "seed", *OWN_FLAGS, "batch_order"))
    print(format_table(rows))


def format_table(rows: Iterable[dict[str, Any]]) -> str:
    """Return a Markdown table of variants by task metrics: the mean, and the range if there are several seeds."""
    rows = list(rows)
    columns = [(t, metric) for t in dict.fromkeys(row["task"] for row in rows) for metric in TASKS[t].metrics]
    lines = ["| | " + " | ".join(f"{TASKS[t].title} {metric}" for t, metric in columns) + " |"]
    lines.append("| --- " * (len(columns) + 1) + "|")
    for name in dict.fromkeys(row["variant"] for row in rows):
        cells = []
        for t, metric in columns:
            values = [row[metric] for row in rows if (row["variant"], row["task"]) == (name, t)]
            spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}" if values else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def make_slug(name: str) -> str:
    """Return the name of a variant in a form that is suitable for folders."""
    return "-".join("".join(c if c.isalnum() or c == "-" else " " for c in name.lower()).split())


def get_checkpoint_folder(args: argparse.Namespace, run: Run, variants: Mapping[str, Variant]) -> Path:
    """Return the folder of the model that a run fine-tunes. The folder need not exist yet."""
    variant = variants[run.variant]
    if variant == Variant():
        return args.model
    which = [run.task] * (variant.on_task or variant.of_finetuned) + [str(run.seed)] * variant.of_finetuned
    return args.work_dir / "checkpoints" / "-".join([make_slug(variant.trained_again or run.variant), *which])


def make_checkpoint(args: argparse.Namespace, run: Run, variants: Mapping[str, Variant]) -> None:
    """Convert the source or distill another variant, unless the work folder already contains the result.

    If the source is the fine-tuned MHA, its run must be finished.
    """
    from hf_attn_variants.conversion import Calibration, convert_checkpoint

    variant, folder = variants[run.variant], get_checkpoint_folder(args, run, variants)
    if variant == Variant():
        return
    source = _get_run_folder(args.work_dir, run._replace(variant=MHA)) if variant.of_finetuned else args.model
    folder.parent.mkdir(parents=True, exist_ok=True)
    if variant.distilled_from is not None:
        start = run._replace(variant=variant.distilled_from)
        make_checkpoint(args, start, variants)
        _distil(args, run.task, variant, source, get_checkpoint_folder(args, start, variants), folder)
        return
    if not folder.is_dir():
        fields = dict(variant.fields)
        if variant.on_task:
            fields["calibration"] = Calibration(read_task_texts(args, run.task), max_length=TASKS[run.task].max_length)
        elif variant.at_defaults:
            texts = _draw_wikipedia_lines(args, DEFAULT_LINES, seed=0, min_characters=40)
            fields["calibration"] = Calibration(texts)
        elif fields.get("method") == "calibrated":
            texts = _draw_wikipedia_lines(args, CALIBRATION_LINES, seed=0, min_characters=1)
            fields["calibration"] = Calibration(texts, max_length=CALIBRATION_LENGTH, passages=False)
        convert_checkpoint(source, folder, **fields)
    check_source(folder, source)


def read_task_texts(args: argparse.Namespace, name: str, count: int = TASK_TEXTS) -> list[Any]:
    """Return training texts of a task without labels or answers, or pairs of texts in the order of its script."""
    task = TASKS[name]
    if task.script == "run_squad.py":
        questions = read_squad(args.data_dir / task.files["train_file"], has_answers=True)
        # The first questions would all be about a few articles.
        questions = random.Random(0).sample(questions, min(count, len(questions)))
        return [(question.question.strip(), question.context) for question in questions]
    rows = load_glue(get_task(name), args.data_dir / task.files["data_dir"])["train"].data
    columns = [list(rows[column]) for column in ("text1", "text2") if column in rows.column_names]
    return (columns[0] if len(columns) == 1 else list(zip(*columns, strict=True)))[:count]


def _draw_wikipedia_lines(args: argparse.Namespace, count: int, seed: int, **limits: int) -> list[str]:
    from benchmarks.convert.conversion_subjects import sample_lines

    return sample_lines(sorted((args.data_dir / "wikipedia").glob("train-*.txt.gz")), count, seed, **limits)


def _distil(args: argparse.Namespace, task: str, variant: Variant, teacher: Path, start: Path, folder: Path) -> None:
    flags = ["--model_name_or_path", str(start), "--teacher", str(teacher), "--objective", "distill"]
    if variant.distillation is not None:
        texts = read_task_texts(args, task, variant.distillation.texts)
        flags += [*_write_table(folder.with_name(f"{folder.name}.jsonl"), texts), *variant.distillation.flags]
        flags += ["--trainable", "all", "--eval_steps", "1000", "--max_length", str(TASKS[task].max_length)]
        flags += ["--logits_weight", "1"] if variant.of_finetuned else []
    else:
        lines = folder.with_name(f"{folder.name}.txt")
        # uptrain.py holds out a twentieth of the lines.
        texts = _draw_wikipedia_lines(args, DISTILLATION_STEPS * DISTILLATION_BATCH * 20 // 19 + 1, seed=1)
        lines.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        flags += ["--train_file", str(lines), "--max_length", str(DISTILLATION_LENGTH)]
        flags += ["--max_train_steps", str(DISTILLATION_STEPS), "--eval_steps", str(DISTILLATION_STEPS)]
    flags += ["--per_device_train_batch_size", str(DISTILLATION_BATCH)]
    flags += ["--group_by_length", "--disable_tqdm", "--overwrite_output_dir", "--output_dir", str(folder)]
    if args.max_train_steps:
        flags[flags.index("--max_train_steps") + 1] = str(args.max_train_steps)
    if not (folder / "all_results.json").is_file():
        command = [sys.executable, str(ROOT / "scripts/uptrain.py"), *flags]
        subprocess.run(command, check=True, env=_make_environment(args))
    check_arguments(folder, uptrain.parse_args, flags)


def _write_table(path: Path, texts: list[Any]) -> list[str]:
    """Write texts or pairs of texts to a file, and return the flags of uptrain.py for it."""
    rows = [text if isinstance(text, tuple) else (text,) for text in texts]
    columns = ["text1", "text2"][: len(rows[0])]
    records = (dict(zip(columns, row, strict=True)) for row in rows)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return ["--train_file", str(path), "--text_columns", *columns]


def _make_environment(args: argparse.Namespace) -> dict[str, str]:
    return dict(os.environ) | ({"OMP_NUM_THREADS": str(args.threads)} if args.threads else {})


def _get_run_folder(work: Path, run: Run) -> Path:
    return work / "runs" / f"{make_slug(run.variant)}-{run.task}-{run.seed}"


def _make_command(
    args: argparse.Namespace, run: Run, checkpoint: Any, output_dir: Any, variants: Mapping[str, Variant]
) -> list[str]:
    task = TASKS[run.task]
    command = [f"scripts/{task.script}", "--model_name_or_path", str(checkpoint), "--output_dir", str(output_dir)]
    command += ["--task_name", run.task] if task.script == "run_glue.py" else []
    for flag, path in task.files.items():
        command += [f"--{flag}", str(args.data_dir / path)]
    variant = variants[run.variant]
    only_evaluated = variant.of_finetuned and variant.trained_again is None
    epochs = 0 if only_evaluated else args.num_train_epochs or task.epochs
    command += ["--max_length", str(task.max_length), *task.flags, "--num_train_epochs", str(epochs)]
    command += ["--max_train_samples", str(args.max_train_samples)] if args.max_train_samples else []
    command += [*RECIPE, "--seed", str(run.seed), "--mixed_precision", args.mixed_precision]
    return command + (["--max_train_steps", str(args.max_train_steps)] if args.max_train_steps and epochs else [])


def _run(args: argparse.Namespace, run: Run, variants: Mapping[str, Variant]) -> None:
    folder = _get_run_folder(args.work_dir, run)
    if (folder / "all_results.json").is_file():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with open(folder.with_suffix(".log"), "w") as log:
        script, *flags = _make_command(args, run, get_checkpoint_folder(args, run, variants), folder, variants)
        command = [sys.executable, str(ROOT / script), *flags]
        status = subprocess.run(command, stdout=log, stderr=log, env=_make_environment(args)).returncode
    name = f"{run.variant} on {run.task}, seed {run.seed}"
    if status:
        raise SystemExit(f"{name} failed. See {folder.with_suffix('.log')}")
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


def _make_row(args: argparse.Namespace, run: Run, variants: Mapping[str, Variant]) -> dict[str, Any]:
    folder = _get_run_folder(args.work_dir, run)
    script, *flags = _make_command(args, run, get_checkpoint_folder(args, run, variants), folder, variants)
    parse = {"run_glue.py": run_glue.parse_args, "run_squad.py": run_squad.parse_args}[Path(script).name]
    results = check_arguments(folder, parse, flags)
    scores = {metric: results[f"eval_{metric}"] for metric in TASKS[run.task].metrics}
    scores |= {key: results.get(key) for key in ("train_loss", "steps", "train_runtime", "num_parameters", "versions")}
    own_flags = {flag: getattr(args, flag) for flag in OWN_FLAGS if getattr(args, flag) not in (None, "no")}
    return {"variant": run.variant, "task": run.task, "seed": run.seed, **own_flags, **scores}


def _describe_device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores, torch {torch.__version__}"


if __name__ == "__main__":
    main(parse_args())
