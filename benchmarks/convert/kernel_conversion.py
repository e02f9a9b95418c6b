"""Measure the quality of a sentence encoder converted to linear attention, before and after the fit.

all-MiniLM-L6-v2 is scored by Spearman's correlation on the STS-B dev set, and by the mean cosine between its
embeddings and the original ones on held-out Wikipedia lines, like in `conversion_quality.py`. A hybrid kernel has
three rows: one with both branches, and one with each branch only. The script writes the JSON file after each model and
keeps existing rows. A fit of 400 steps takes about five minutes on one core. With `--distillation_steps`, the model
with the last number of fitting steps is also distilled with the recipe that `attn-variants convert` prints. The recipe
trains all parameters on lines of Wikipedia, with the original model as teacher.

Example:
    python -m benchmarks.convert.kernel_conversion --kernels elu hedgehog --fit_steps 0 400 --num_threads 1
    python -m benchmarks.convert.kernel_conversion --kernels hedgehog --features 64 --fit_steps 1000
    python -m benchmarks.convert.kernel_conversion --kernels hybrid --window 8
    python -m benchmarks.convert.kernel_conversion --kernels hedgehog --keep_matching_layers 2 --distillation_steps 300
"""

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

import hf_attn_variants
from benchmarks.convert.conversion_subjects import SentenceEncoder, SentenceEncoderOnSentences
from benchmarks.machine import describe_machine
from benchmarks.run_records import check_data_dir, write_rows
from hf_attn_variants.commands.training import uptrain as uptrain_command
from hf_attn_variants.conversion import Calibration
from hf_attn_variants.modeling.mechanisms.kernels.kernel_table import KERNELS

UNFITTED = "unfitted"
SUBJECTS = {"lines": SentenceEncoder, "sentences": SentenceEncoderOnSentences}
KEY = ("texts", "kernel", "features", "fit", "calibration_size", "max_length")
OPTIONAL_KEYS = ("window", "reads", "keep_matching_layers", "distillation_steps")  # only hybrids have the first two
# The branches of a hybrid kernel, and the logarithm of gamma that selects them. None keeps the gamma of the model.
# With 80, the weights of the kernel vanish in float32, and the sums of the window do not overflow.
BRANCHES = {"both": None, "the window": 80.0, "outside of it": -torch.inf}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["elu", "hedgehog"])
    parser.add_argument("--window", type=int, default=8, help="window of a hybrid kernel (default: %(default)s)")
    parser.add_argument("--features", type=int, help="number of features (default: that of the kernel)")
    parser.add_argument(
        "--keep_matching_layers", type=int, help="number of layers to leave unconverted (default: none)"
    )
    parser.add_argument("--distillation_steps", type=int, help="distill the last fitted model for this many steps")
    parser.add_argument("--fit_steps", type=int, nargs="+", default=[400], help="numbers of fitting steps")
    parser.add_argument("--texts", choices=SUBJECTS, default="lines", help="calibrate on lines or on short sentences")
    parser.add_argument("--calibration_size", type=int, default=3000)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--num_threads", type=int, default=1)
    parser.add_argument("--data_dir", type=Path, default=Path(__file__).resolve().parents[3] / "shared/data")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def convert(
    subject: SentenceEncoder, kernel: str, steps: int | None, args: argparse.Namespace
) -> tuple[PreTrainedModel, float]:
    """Return the converted model and the seconds of the conversion.

    Args:
        subject: the model to convert and its texts.
        kernel: the name of the kernel.
        steps: the number of fitting steps, or None to keep the weights without calibration.
        args: the arguments of the command line.
    """
    source, started = AutoModel.from_pretrained(subject.source), time.perf_counter()
    fields: dict[str, Any] = {"attention_kernel": kernel}
    fields |= {} if kernel == "elu" else {"attention_kernel_features": args.features}
    fields |= {"attention_window": args.window} if kernel == "hybrid" else {}
    if steps is None:
        fields["method"] = "mean"
    else:
        texts = subject.sample_calibration_lines(0)[: args.calibration_size]
        fields["calibration"] = Calibration(
            texts, tokenizer=subject.tokenizer, max_length=args.max_length, fit_steps=steps, passages=False
        )
        fields["keep_matching_layers"] = args.keep_matching_layers
    converted = hf_attn_variants.convert(source, **fields)
    return converted.eval(), round(time.perf_counter() - started, 1)


def distill(subject: SentenceEncoder, model: PreTrainedModel, steps: int) -> PreTrainedModel:
    """Train all parameters of a model for `steps` steps with the original model as teacher, and return the model."""
    with tempfile.TemporaryDirectory() as folder:
        start, end = Path(folder, "start"), Path(folder, "end")
        model.save_pretrained(start)
        subject.tokenizer.save_pretrained(start)
        flags = ["--model_name_or_path", str(start), "--teacher", str(subject.source), *subject.uptraining]
        flags += [*subject.write_training_texts(Path(folder), 0, steps), "--max_train_steps", str(steps)]
        flags += ["--trainable", "all", "--learning_rate", "1e-4", "--group_by_length", "--cpu", "--disable_tqdm"]
        flags += ["--per_device_train_batch_size", str(subject.batch_size), "--eval_steps", str(steps)]
        uptrain_command.main(uptrain_command.parse_args([*flags, "--output_dir", str(end)]))
        return AutoModel.from_pretrained(end).eval()


@torch.no_grad()
def compute_scores(subject: SentenceEncoder, model: PreTrainedModel, log_factor: float | None) -> dict[str, float]:
    """Return the scores of a model, with `log_factor` as the logarithm of gamma of a hybrid unless it is None."""
    if log_factor is None:
        return subject.compute_scores(model)
    factors = {name: factor for name, factor in model.named_parameters() if name.endswith("window_log_factor")}
    saved_factors = {name: factor.clone() for name, factor in factors.items()}
    for factor in factors.values():
        factor.fill_(log_factor)
    metrics = subject.compute_scores(model)
    for name, factor in factors.items():
        factor.copy_(saved_factors[name])
    return metrics


def is_measured(key: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Return whether there is a row with this key."""
    return any(all(row.get(name) == key.get(name) for name in (*KEY, *OPTIONAL_KEYS)) for row in rows)


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the missing rows, write the file after each model, print the new rows, and return all rows."""
    torch.set_num_threads(args.num_threads)
    kind = SUBJECTS[args.texts]
    check_data_dir(args.data_dir, *kind.reads)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "kernel_conversion.json"
    rows = json.loads(path.read_text())["runs"] if path.is_file() else []
    subject = kind(args.data_dir)
    for kernel, steps in itertools.product(args.kernels, (None, *args.fit_steps)):
        row_values = (args.texts, kernel, args.features, UNFITTED if steps is None else steps)
        key = dict(zip(KEY, (*row_values, args.calibration_size, args.max_length), strict=True))
        if args.keep_matching_layers is not None:
            if steps is None:  # only a calibration can choose the layers
                continue
            key["keep_matching_layers"] = args.keep_matching_layers
        is_hybrid = kernel == "hybrid"
        keys = [key | {"window": args.window, "reads": row_key} for row_key in BRANCHES] if is_hybrid else [key]
        is_last = args.distillation_steps is not None and steps == args.fit_steps[-1]
        distilled = [row_key | {"distillation_steps": args.distillation_steps} for row_key in keys] if is_last else []
        if all(is_measured(row_key, rows) for row_key in keys + distilled):
            continue
        model, seconds = convert(subject, kernel, steps, args)
        for group in filter(None, (keys, distilled)):
            if group is distilled:
                model = distill(subject, model, args.distillation_steps)
            for row_key in group:
                row_values = compute_scores(subject, model, BRANCHES[row_key.get("reads", "both")])
                rows.append(row_key | row_values | {"conversion_seconds": seconds})
        write_rows(path, {"machine": describe_machine("cpu")}, rows, (*KEY, *OPTIONAL_KEYS))
        for row in rows[-len(keys + distilled) :]:
            print(json.dumps(row), flush=True)
    return rows


if __name__ == "__main__":
    main(parse_args())
