"""Measure the quality of converted Marian models on Multi30k, English to German, without and with distillation.

`train_marian.py` trains the Marian model with the code of Transformers. `convert` converts it with its defaults on
2,048 training pairs, and `scripts/uptrain.py` distills the result on all pairs. The scores are BLEU (greedy) and loss
on the validation set. The script writes the JSON file after each row and keeps existing rows.

Example:
    python -m benchmarks.convert.marian_multi30k --model MARIAN_FOLDER --data_dir ../shared/data
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.convert.conversion_quality import make_run_record, uptrain
from benchmarks.convert.conversion_subjects import Translator
from hf_attn_variants.commands import convert as command
from hf_attn_variants.files import atomic_write
from hf_attn_variants.inspection.costs import compute_kv_cache_bytes_per_token
from hf_attn_variants.registration import get_variant_model_class

ROOT = Path(__file__).resolve().parents[2]
MULTI_HEAD, MEAN = "multi-head", ("--method", "mean")
# Mean pooling and exact conversions use no calibration.
OPTIONS: dict[str, tuple[str, ...]] = {
    MULTI_HEAD: (),
    "2 heads, mean": ("--num_key_value_heads", "2", *MEAN),
    "2 heads, calibrated": ("--num_key_value_heads", "2"),
    "1 head, mean": ("--num_key_value_heads", "1", *MEAN),
    "1 head, calibrated": ("--num_key_value_heads", "1"),
    "exact": ("--cross_kv_lora_rank", "256"),
    "cross 128": ("--cross_kv_lora_rank", "128"),
    "cross 64": ("--cross_kv_lora_rank", "64"),
    "self 32": ("--kv_lora_rank", "32"),
    "cross 128 + self 32": ("--cross_kv_lora_rank", "128", "--kv_lora_rank", "32"),
}
Row = dict[str, Any]


class Marian(Translator):
    """A Marian model trained on Multi30k: 4 + 4 layers, 8 heads of dimension 32."""

    name = "marian-multi30k-en-de"
    uptraining = ("--objective", "distill", "--max_length", "64")


def main(args: argparse.Namespace) -> list[Row]:
    """Measure the missing rows, print the table, and return all rows."""
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    report = json.loads(args.output.read_text()) if args.output.is_file() else {"runs": [], "rows": []}
    training = json.loads((args.model / "training.json").read_text())
    if report.setdefault("training", training) != training:
        raise SystemExit(f"{args.output} contains rows of another model than {args.model}. Choose another --output.")
    subject, rows = Marian(args.data_dir, args.model), report["rows"]
    report["runs"].append(make_run_record())
    for name in args.options:
        if name not in {row["option"] for row in rows}:
            rows.append(measure(subject, name, args.steps) | {"run": len(report["runs"]) - 1})
            atomic_write(args.output, json.dumps(report, indent=1) + "\n")
            print(rows[-1], flush=True)
    print(format_table(rows))
    return rows


def measure(subject: Marian, option: str, steps: int) -> Row:
    """Convert and score the model, then distill and score it, and return the row."""
    with tempfile.TemporaryDirectory() as temporary:
        work, row = Path(temporary), {"option": option, "steps": steps}
        if option == MULTI_HEAD:
            return row | {"converted": subject.evaluate(subject.source)} | _read_scores(subject.source)
        folder = work / "converted"
        flags = ["--model_name_or_path", str(subject.source), "--output_dir", str(folder), "--disable_tqdm"]
        flags += OPTIONS[option]
        if option != "exact" and MEAN[1] not in OPTIONS[option]:
            flags += subject.write_calibration_texts(work, 0)
        started = time.perf_counter()
        command.main(command.parse_args(flags))
        row |= {"conversion_seconds": round(time.perf_counter() - started, 1), **_read_scores(folder)}
        row["converted"] = subject.evaluate(folder)
        if option != "exact" and steps:
            distilled, seconds = uptrain(subject, folder, steps, 0, work)
            row |= {"distilled": subject.evaluate(distilled), "distillation_seconds": seconds}
        return row


def _read_scores(folder: Path) -> Row:
    config = json.loads((folder / "config.json").read_text())
    model_class = get_variant_model_class(config["architectures"][0])
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_upstream(config))
    return {
        "numbers_per_token": compute_kv_cache_bytes_per_token(model, 1),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def format_table(rows: list[Row]) -> str:
    """Return the results as a Markdown table."""
    steps = max(row["steps"] for row in rows)
    lines = [f"| | numbers a token, generated + source | BLEU | loss | BLEU after {steps} steps | loss |"]
    lines.append("| --- " * 6 + "|")
    for row in rows:
        numbers = " + ".join(str(number) for number in row["numbers_per_token"].values())
        scores = [row["converted"], row.get("distilled")]
        cells = [f"{score['bleu']:.2f} | {score['loss']:.3f}" if score else " | " for score in scores]
        lines.append(f"| {row['option']} | {numbers} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="example:" + __doc__.split("Example:")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="output folder of train_marian.py")
    parser.add_argument("--data_dir", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--steps", type=int, default=300, help="number of distillation steps (default: 300)")
    parser.add_argument("--threads", type=int, help="number of CPU threads (default: that of PyTorch)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/convert/results/marian_multi30k.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
