"""Pretrain a small ALBERT from scratch, and measure its dev loss after conversions without uptraining.

Scripts of this repository train, convert and evaluate the models, and the JSON file contains their commands and the
results of the context check. The vocabulary is little more than the alphabet (see `small_pretraining`). With 1,000
subwords, the model still predicted only word frequencies after 7,000 steps.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.run_records import check_arguments, check_data_dir
from benchmarks.train.small_pretraining import (
    ROOT,
    format_command,
    get_gate_scores,
    make_script_command,
    make_vocabulary,
    run_script,
)
from hf_attn_variants.commands.training import pretrain as pretrain_mlm
from hf_attn_variants.files import atomic_write

VOCABULARY_SIZE = 100
HEADS = 8
CONFIG = {
    "embedding_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
    # About 1 / sqrt(hidden_size). The 0.02 of Transformers suits sizes of at least 768. At this small size, attention
    # would get almost no signal from it.
    "initializer_range": 0.08,
}
BLOCKS = "--max_length 32 --mlm_probability 0.3 --max_eval_samples 4096 --seed 0 --cpu".split()
TRAINING = "--dropout_rate 0 --per_device_train_batch_size 32 --learning_rate 2e-3 --num_warmup_steps 200 "
TRAINING += "--adam_beta2 0.98 --weight_decay 0.01 --eval_steps 1000 --checkpointing_steps 1000 --save_total_limit 1 "
TRAINING += "--logging_steps 50"
KEY_VALUE_HEADS = (4, 2, 1)
METHODS = ("mean", "first", "random", "calibrated")
SCORES = ("eval_loss", "eval_perplexity", "eval_accuracy", "eval_masked_tokens")
EPILOG = """example:
  python -m benchmarks.train.albert_mlm --data_dir wikipedia --tokenizer albert/albert-base-v2 \\
      --work_dir WORK_FOLDER"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", required=True, help="Folder with train-*.txt.gz and valid.txt.gz.")
    parser.add_argument(
        "--tokenizer", required=True, help="An ALBERT tokenizer, for the normalization and the special tokens."
    )
    parser.add_argument("--work_dir", required=True, help="Folder for checkpoints. Finished runs in it are reused.")
    parser.add_argument("--max_train_steps", type=int, default=8000)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--output", default=str(ROOT / "benchmarks/train/results/albert_mlm.json"))
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Train, convert and evaluate the missing models, write the JSON file, print the table, and return the results."""
    data, work = Path(args.data_dir), Path(args.work_dir)
    check_data_dir(data, "valid.txt.gz")
    shards, held_out = sorted(data.glob("train-*.txt.gz")), data / "valid.txt.gz"
    if not (work / "tokenizer").is_dir():
        make_vocabulary(args.tokenizer, shards[0], work / "tokenizer", VOCABULARY_SIZE)
    commands = [make_pretraining_command(work, shards, held_out, args.max_train_steps)]
    run_script(commands[0], work / "multi-head")
    trained = check_arguments(work / "multi-head", pretrain_mlm.parse_args, commands[0][2:])
    rows = [{"method": "multi-head", "num_key_value_heads": HEADS, **_get_scores(trained)}]
    for method in args.methods:
        for heads in KEY_VALUE_HEADS:
            folder = work / f"{method}-{heads}"
            commands.append(make_conversion_command(work / "multi-head", folder, heads, method, shards[-1]))
            run_script(commands[-1], folder, done="config.json")
            commands.append(make_evaluation_command(folder, held_out))
            run_script(commands[-1], Path(f"{folder}-eval"))
            results = json.loads(Path(f"{folder}-eval/all_results.json").read_text())
            rows.append({"method": method, "num_key_value_heads": heads, **_get_scores(results)})
    names = {sys.executable: "python", f"{ROOT}/": "", str(work): "WORK_FOLDER", f"{data}/": "wikipedia/"}
    result = {
        "model": {"architecture": "albert", "vocab_size": VOCABULARY_SIZE, **CONFIG},
        "split": f"the first {trained['eval_samples']} blocks of 32 tokens of valid.txt.gz",
        "device": f"CPU, {os.environ.get('OMP_NUM_THREADS', 'all')} threads",
        "training": {key: value for key, value in trained.items() if key not in ("arguments", "versions")},
        "versions": trained["versions"],
        "commands": [format_command(command, names) for command in commands],
        "rows": rows,
    }
    atomic_write(args.output, json.dumps(result, indent=1) + "\n")
    print(format_table(rows))
    return result


def make_pretraining_command(work: Path, shards: list[Path], held_out: Path, steps: int) -> list[str]:
    """Return the command that trains the multi-head model."""
    overrides = ",".join(f"{name}={value}" for name, value in CONFIG.items())
    return [
        *make_script_command("pretrain_mlm.py", "--model_type", "albert", "--tokenizer_name", work / "tokenizer"),
        *("--config_overrides", overrides, "--train_file", *map(str, shards), "--validation_file", str(held_out)),
        *(*BLOCKS, *TRAINING.split(), "--max_train_steps", str(steps), "--output_dir", str(work / "multi-head")),
    ]


def make_conversion_command(source: Path, folder: Path, heads: int, method: str, text: Path) -> list[str]:
    """Return the command that converts a checkpoint. The method "calibrated" reads the file `text`."""
    command = make_script_command("convert_checkpoint.py", "--model_name_or_path", source, "--output_dir", folder)
    command += ["--num_key_value_heads", str(heads), "--method", method]
    flags = ["--calibration_file", str(text), "--max_length", "32", "--no-calibration_passages"]
    return command + (flags if method == "calibrated" else [])


def make_evaluation_command(folder: Path, held_out: Path) -> list[str]:
    """Return the command that evaluates a checkpoint."""
    command = make_script_command("pretrain_mlm.py", "--model_name_or_path", folder, "--num_train_epochs", 0)
    return [*command, "--validation_file", str(held_out), *BLOCKS, "--output_dir", f"{folder}-eval"]


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the dev loss in nats per masked token: methods by key/value heads."""
    by_method: dict[str, dict[int, float]] = {}
    for row in rows:
        by_method.setdefault(row["method"], {})[row["num_key_value_heads"]] = row["eval_loss"]
    heads = (HEADS, *KEY_VALUE_HEADS)
    lines = ["| | " + " | ".join(f"k = {k}" for k in heads) + " |", "| --- " * (len(heads) + 1) + "|"]
    for method, losses in by_method.items():
        cells = [f"{losses[k]:.3f}" if k in losses else "" for k in heads]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _get_scores(results: dict[str, Any]) -> dict[str, Any]:
    return {**{key: results[key] for key in SCORES}, **get_gate_scores(results)}


if __name__ == "__main__":
    main(parse_args())
