"""What a kernel in a softmax's place costs in quality, before and after the fit: a real sentence encoder, no labels.

all-MiniLM-L6-v2 by Spearman's correlation on the STS-B dev set and by the mean cosine of its embeddings to its own on
held-out Wikipedia lines, as `conversion_quality.py` scores heads. The JSON is written after each row; rows in it are
kept. A fit of 400 steps takes some five minutes of one core.

Example:
    python benchmarks/kernel_conversion.py --kernels elu hedgehog --fit_steps 0 400 --num_threads 1
    python benchmarks/kernel_conversion.py --kernels hedgehog --features 64 --fit_steps 1000
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from conversion_subjects import SentenceEncoder, SentenceEncoderOnSentences
from machine import machine
from run_records import check_data_dir, write_rows
from transformers import AutoModel

import hf_attn_variants
from hf_attn_variants.conversion import Calibration

UNFITTED = "unfitted"
KERNELS = ("elu", "hedgehog", "favor", "rfa")
SUBJECTS = {"lines": SentenceEncoder, "sentences": SentenceEncoderOnSentences}
KEY = ("texts", "kernel", "features", "fit", "calibration_size", "max_length")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kernels", nargs="+", choices=["elu", "hedgehog", "favor", "rfa"], default=["elu", "hedgehog"]
    )
    parser.add_argument("--features", type=int, help="default: each kernel's own")
    parser.add_argument("--fit_steps", type=int, nargs="+", default=[400], help="each a row, beside the unfitted one")
    parser.add_argument("--texts", choices=SUBJECTS, default="lines", help="beginnings of lines, or short sentences")
    parser.add_argument("--calibration_size", type=int, default=3000)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--num_threads", type=int, default=1)
    parser.add_argument("--data_dir", type=Path, default=Path(__file__).parents[2] / "shared/data")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def measure(subject: SentenceEncoder, kernel: str, steps: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """Convert and score; without steps (None) the weights stay as they are.

    The fit reads the texts of `--texts`, and features are `--features` where the kernel has any.
    """
    source, started = AutoModel.from_pretrained(subject.source), time.perf_counter()
    fields: dict[str, Any] = {"attention_kernel": kernel}
    fields |= {} if kernel == "elu" else {"attention_kernel_features": args.features}
    if steps is None:
        fields["method"] = "mean"
    else:
        texts = subject.calibration_lines(0)[: args.calibration_size]
        fields["calibration"] = Calibration(
            texts, tokenizer=subject.tokenizer, max_length=args.max_length, fit_steps=steps, passages=False
        )
    converted = hf_attn_variants.convert(source, **fields)
    seconds = time.perf_counter() - started
    return subject.scores_of(converted.eval()) | {"conversion_seconds": round(seconds, 1)}


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure what the file does not have, write it after each row, print all; returns the rows."""
    torch.set_num_threads(args.num_threads)
    kind = SUBJECTS[args.texts]
    check_data_dir(args.data_dir, *kind.reads)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "kernel_conversion.json"
    rows = json.loads(path.read_text())["runs"] if path.is_file() else []
    subject = kind(args.data_dir)
    for kernel, steps in itertools.product(args.kernels, (None, *args.fit_steps)):
        found = (args.texts, kernel, args.features, UNFITTED if steps is None else steps)
        key = dict(zip(KEY, (*found, args.calibration_size, args.max_length), strict=True))
        if any(key.items() <= row.items() for row in rows):
            continue
        rows.append(key | measure(subject, kernel, steps, args))
        write_rows(path, {"machine": machine("cpu")}, rows, KEY)
        print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    main(parse_args())
