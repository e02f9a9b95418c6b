"""Check with which optimizers and kinds of attention a small T5 learns to use its context in span corruption.

Each run trains a T5 from scratch with `scripts/pretrain_span_corruption.py` and the noise of T5 (15%, spans of 3
tokens). Finished runs in the work folder are reused, so that an interrupted comparison can continue. The plot shows
the dev loss by step, and the loss of a model that only knows the frequencies of target tokens.
"""

import argparse
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import AutoTokenizer

from benchmarks.run_records import check_arguments, check_data_dir, write_rows
from benchmarks.train.small_pretraining import (
    ROOT,
    format_command,
    get_gate_scores,
    make_script_command,
    make_vocabulary,
    run_script,
)
from hf_attn_variants.commands.training import pretrain_t5 as pretrain_span_corruption
from hf_attn_variants.training.engine.session import read_log
from hf_attn_variants.training.pretraining.span_corruption import SpanCorruptionPreparer
from hf_attn_variants.training.pretraining.task import MIN_COST
from hf_attn_variants.training.pretraining.text_stream import check_text_files, read_blocks

# This includes the 103 special tokens of T5.
VOCABULARY_SIZE = 256
LENGTH, EVAL_SAMPLES = 32, 4096
CONFIG = {
    "d_model": 128,
    "d_kv": 32,
    "num_heads": 4,
    "d_ff": 256,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "feed_forward_proj": "gated-gelu",
}
TRAINING = "--dropout_rate 0 --per_device_train_batch_size 64 --cpu --logging_steps 50 --save_total_limit 1 "
TRAINING += "--eval_steps 500 --checkpointing_steps 500"
WARMUP = "--num_warmup_steps 500 --lr_scheduler_type inverse_sqrt"
SCALED = "Adafactor, scaled steps, 2e-2"
OPTIMIZERS = {
    SCALED: f"--optim adafactor --adafactor_scale_parameter --learning_rate 2e-2 {WARMUP}",
    "Adafactor, relative steps": "--optim adafactor --adafactor_scale_parameter --adafactor_relative_step",
    "AdamW, 1e-3": f"--learning_rate 1e-3 {WARMUP}",
}
ATTENTIONS = {"MHA": "", "MQA": "--num_key_value_heads 1", "talking heads": "--talking_heads both"}
SCORES = ("eval_loss", "eval_accuracy", "eval_target_tokens", "train_tokens", "train_runtime", "num_parameters")
EPILOG = """example:
  python -m benchmarks.train.t5_span_corruption --data_dir wikipedia --tokenizer google-t5/t5-small \\
      --work_dir WORK_FOLDER"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", required=True, help="Folder with train-*.txt.gz and valid.txt.gz.")
    parser.add_argument("--tokenizer", required=True, help="A T5 tokenizer, for its normalization and special tokens.")
    parser.add_argument("--work_dir", required=True, help="Folder for checkpoints. Finished runs in it are reused.")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument(
        "--attentions",
        nargs="+",
        choices=ATTENTIONS,
        default=list(ATTENTIONS),
        help=f"Kinds of attention. All except MHA are only trained with {SCALED}.",
    )
    parser.add_argument("--max_train_steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default=str(ROOT / "benchmarks/train/results/t5_span_corruption.json"))
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train the missing models, write the JSON file and the plot, print the table of all runs, and return the rows."""
    data, work, output = Path(args.data_dir), Path(args.work_dir), Path(args.output)
    check_data_dir(data, "valid.txt.gz")
    shards, held_out = sorted(data.glob("train-*.txt.gz")), data / "valid.txt.gz"
    if not (work / "tokenizer").is_dir():
        make_vocabulary(args.tokenizer, shards[0], work / "tokenizer", VOCABULARY_SIZE)
    frequencies = compute_frequency_loss(work / "tokenizer", held_out, args.seed)
    pairs = [(optimizer, "MHA") for optimizer in args.optimizers if "MHA" in args.attentions]
    pairs += [(SCALED, attention) for attention in args.attentions if attention != "MHA"]
    names = {sys.executable: "python", f"{ROOT}/": "", str(work): "WORK_FOLDER", f"{data}/": "wikipedia/"}
    for optimizer, attention in pairs:
        slug = f"{optimizer} {attention} {args.seed}".replace(",", "").replace(" ", "-")
        command = make_pretraining_command(args, optimizer, attention, shards, held_out, work / slug)
        run_script(command, work / slug)
        results = check_arguments(work / slug, pretrain_span_corruption.parse_args, command[2:])
        row = {"optimizer": optimizer, "attention": attention, "seed": args.seed, "steps": results["steps"]}
        row |= {key: results[key] for key in SCORES} | get_gate_scores(results)
        row["dev_loss_by_step"] = {
            r["step"]: r["eval_loss"] for r in read_log(work / slug / "train_log.jsonl") if "eval_loss" in r
        }
        row |= {"date": results["date"], "versions": results["versions"], "command": format_command(command, names)}
        head = {
            "model": {"architecture": "t5", "vocab_size": VOCABULARY_SIZE, **CONFIG},
            "split": f"the first {results['eval_samples']} blocks of {results['block_length']} tokens of valid.txt.gz",
            "device": f"CPU, {os.environ.get('OMP_NUM_THREADS', 'all')} threads",
            "loss_of_frequencies_alone": frequencies,
        }
        write_rows(output, head, [row], ("optimizer", "attention", "seed"))
    rows = json.loads(output.read_text(encoding="utf-8"))["runs"]
    save_plot(rows, frequencies, output.with_suffix(".png"))
    print(format_table(rows))
    return rows


def make_pretraining_command(
    args: argparse.Namespace, optimizer: str, attention: str, shards: list[Path], held_out: Path, folder: Path
) -> list[str]:
    """Return the command that trains a model."""
    overrides = ",".join(f"{name}={value}" for name, value in CONFIG.items())
    return [
        *make_script_command("pretrain_span_corruption.py", "--model_type", "t5", "--config_overrides", overrides),
        *("--tokenizer_name", str(folder.parent / "tokenizer"), *ATTENTIONS[attention].split()),
        *("--train_file", *map(str, shards), "--validation_file", str(held_out), "--max_length", str(LENGTH)),
        *("--max_eval_samples", str(EVAL_SAMPLES), *TRAINING.split(), *OPTIMIZERS[optimizer].split()),
        *("--max_train_steps", str(args.max_train_steps), "--seed", str(args.seed), "--output_dir", str(folder)),
    ]


def compute_frequency_loss(tokenizer_folder: Path, held_out: Path, seed: int) -> float:
    """Return the entropy of the dev target tokens in nats, the loss of a model that only knows frequencies."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    prepare = SpanCorruptionPreparer(tokenizer, LENGTH, seed)
    blocks = read_blocks(
        check_text_files([str(held_out)]), tokenizer, prepare.block_length, prepare.separator, EVAL_SAMPLES
    )
    counts: Counter[int] = Counter()
    for number, block in enumerate(blocks):
        labels = prepare(block, (0, number))["labels"]
        counts.update(labels[labels >= 0].tolist())
    total = counts.total()
    return -sum(count / total * math.log(count / total) for count in counts.values())


def save_plot(rows: list[dict[str, Any]], frequencies: float, path: Path) -> None:
    """Plot the dev loss of every run against the step."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row in rows:
        steps = {int(step): loss for step, loss in row["dev_loss_by_step"].items()}
        axes.plot(list(steps), list(steps.values()), ".-", label=f"{row['attention']}, {row['optimizer']}")
    axes.axhline(frequencies, color="black", linestyle="--", linewidth=1, label="frequencies of tokens alone")
    axes.set(xlabel="step", ylabel="dev loss, nats a target token", title="T5, span corruption, from scratch")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    temporary = path.with_name(f".tmp-{path.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of runs."""
    lines = ["| optimiser | attention | dev loss | accuracy | shuffled words | zeroed attention | gate |"]
    lines.append("| --- " * 7 + "|")
    for row in rows:
        gate = "passed" if row["gate_passed"] else f"failed (below {MIN_COST})"
        costs = [f"{row[f'gate_{name}_cost']:+.2f}" for name in ("shuffled", "zeroed_attention")]
        cells = [row["optimizer"], row["attention"], f"{row['eval_loss']:.3f}", f"{row['eval_accuracy']:.3f}"]
        lines.append(f"| {' | '.join([*cells, *costs, gate])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(parse_args())
