"""Pretrain a small BERT, ModernBERT and EuroBERT on the same text, and convert them to fewer key/value heads.

The models have two layers of width 128 with 8 heads of dimension 16. They read blocks of 32 tokens from a vocabulary
of 100 tokens, so that they learn to use their context within minutes. ModernBERT and EuroBERT have rotary positions,
which limit the linear layers that a conversion can change. Each converted model is evaluated without further training
by its accuracy on masked tokens of held-out text, with the same masks for all models.

Finished training runs in the work folder are not repeated.

Example:
    python -m benchmarks.convert.rotary_encoders --data_dir ../shared/data --work_dir WORK
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.convert.conversion_subjects import sample_lines
from benchmarks.convert.reactions import compute_masked_accuracy
from benchmarks.machine import describe_machine
from benchmarks.run_records import check_arguments, check_data_dir, write_rows
from benchmarks.train.small_pretraining import (
    ROOT,
    format_command,
    get_gate_scores,
    make_script_command,
    make_vocabulary,
    run_script,
)
from hf_attn_variants.commands.training import pretrain
from hf_attn_variants.conversion import Calibration, convert_checkpoint

MODELS = {"bert": "BERT", "modernbert": "ModernBERT", "eurobert": "EuroBERT"}
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 512}
# The fields that differ from the sizes of the published models, by model type.
FIELDS: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": 256, "initializer_range": 0.08},
    "modernbert": {"initializer_range": 0.08, "initializer_cutoff_factor": 3.0},
    "eurobert": {"num_key_value_heads": 8, "initializer_range": 0.08},
}
VOCABULARY_SIZE, LENGTH = 100, 32
RECIPE = f"--max_length {LENGTH} --mlm_probability 0.3 --learning_rate 2e-3 --adam_beta2 0.98 --weight_decay 0.01 "
RECIPE += "--cpu --dropout_rate 0 --per_device_train_batch_size 32 --max_eval_samples 4096 --disable_tqdm"
METHODS = ("mean", "aligned", "calibrated")
HEADS = (4, 2, 1)
NUM_LINES = 2048  # of calibration text, and of held-out text
TRAIN, CALIBRATION, TEST = "wikipedia/train-*.txt.gz", "wikipedia/train-00000.txt.gz", "wikipedia/valid.txt.gz"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with wikipedia/ and tokenizers/")
    parser.add_argument("--work_dir", type=Path, required=True, help="folder for the trained models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--max_train_steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/convert/results/rotary_encoders.json")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train the models that have not been trained yet, convert and evaluate them, and write the JSON file."""
    check_data_dir(args.data_dir, "wikipedia", "tokenizers")
    args.work_dir.mkdir(parents=True, exist_ok=True)
    vocabulary = args.work_dir / "vocabulary"
    if not vocabulary.is_dir():
        shard = args.data_dir / CALIBRATION
        make_vocabulary(str(args.data_dir / "tokenizers/bert-base-uncased"), shard, vocabulary, VOCABULARY_SIZE)
    lines = sample_lines([args.data_dir / CALIBRATION], NUM_LINES, seed=0, min_characters=2 * LENGTH)
    calibration = Calibration(lines, max_length=LENGTH)
    texts = sample_lines([args.data_dir / TEST], NUM_LINES, seed=0, min_characters=2 * LENGTH)
    rows = []
    for name in args.models:
        folder = args.work_dir / name
        command = make_training_command(args, name, vocabulary, folder)
        run_script(command, folder)
        results = check_arguments(folder, pretrain.parse_args, command[2:])
        names = {command[0]: "python", f"{ROOT}/": "", str(args.work_dir): "WORK", str(args.data_dir): "DATA"}
        row = {"model": name, "method": None, "heads": SIZES["num_attention_heads"]}
        row |= {"accuracy": compute_masked_accuracy(folder, texts, LENGTH), "steps": results["steps"]}
        row |= {"train_tokens": results["train_tokens"], "command": format_command(command, names)}
        rows.append(row | get_gate_scores(results))
        for heads in HEADS:
            rows += [convert_and_evaluate(args, folder, method, heads, calibration, texts) for method in METHODS]
        write_rows(args.output, {"machine": describe_machine("cpu")}, rows, ("model", "method", "heads"))
    return rows


def make_training_command(args: argparse.Namespace, name: str, vocabulary: Path, folder: Path) -> list[str]:
    """Return the command that trains a model."""
    overrides = ",".join(f"{field}={value}" for field, value in (SIZES | FIELDS[name]).items())
    steps = ("--max_train_steps", args.max_train_steps, "--num_warmup_steps", args.max_train_steps // 6)
    steps += ("--eval_steps", args.max_train_steps, "--checkpointing_steps", args.max_train_steps)
    return make_script_command(
        *("pretrain_mlm.py", "--model_type", name, "--tokenizer_name", vocabulary, "--output_dir", folder),
        *("--train_file", *sorted(args.data_dir.glob(TRAIN)), "--validation_file", args.data_dir / TEST),
        *(*RECIPE.split(), "--config_overrides", overrides, *steps),
    )


def convert_and_evaluate(
    args: argparse.Namespace, folder: Path, method: str, heads: int, calibration: Calibration, texts: list[str]
) -> dict[str, Any]:
    """Convert a trained model, and return the row with the accuracy of the converted model."""
    with tempfile.TemporaryDirectory(dir=args.work_dir) as temporary:
        start, output = time.perf_counter(), Path(temporary) / "converted"
        convert_checkpoint(folder, output, heads, method, calibration=None if method == "mean" else calibration)
        seconds = round(time.perf_counter() - start, 1)
        accuracy = compute_masked_accuracy(output, texts, LENGTH)
    row = {"model": folder.name, "method": method, "heads": heads, "accuracy": accuracy, "seconds": seconds}
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main(parse_args())
