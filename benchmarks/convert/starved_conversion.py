"""Measure conversions of MiniLM to 4 of 12 heads with little or unsuitable calibration text.

The baseline is a conversion that averages heads. The scores are Spearman's correlation on the STS-B dev set, and the
mean cosine between the embeddings and the original ones on 512 held-out lines of Wikipedia. The report also contains
the quality that each conversion estimates, and its warnings.
"""

import argparse
import gzip
import json
import logging
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.convert.conversion_subjects import SentenceEncoder
from benchmarks.machine import describe_machine
from hf_attn_variants.conversion import Calibration, convert
from hf_attn_variants.files import atomic_write

HEADS = 4


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with wikipedia/, glue/ and multi30k/")
    parser.add_argument("--fit_steps", type=int, default=100)
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    return parser.parse_args(argv)


def make_calibrations(subject: SentenceEncoder, data_dir: Path) -> dict[str, list[str]]:
    """Return the calibration texts of each case."""
    lines, draw = subject.sample_calibration_lines(0), random.Random(0)
    words = range(1000, subject.tokenizer.vocab_size)  # lower ids are unused tokens and single characters
    with gzip.open(data_dir / "multi30k" / "train.de.gz", "rt", encoding="utf-8") as file:
        german = file.read().splitlines()
    return {
        "16 lines": lines[:16],
        "256 lines": lines[:256],
        "256 lines of German": german[:256],
        "256 lines of random tokens": [subject.tokenizer.decode(draw.choices(words, k=30)) for _ in range(256)],
        "8 lines, 32 times each": lines[:8] * 32,
    }


class WarningRecorder(logging.Handler):
    """A logging handler that collects the warnings of a conversion."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Convert and score the model in each case, print one row per case, and return the report."""
    subject = SentenceEncoder(args.data_dir)
    cases: dict[str, list[str] | None] = {"none: averaged heads": None, **make_calibrations(subject, args.data_dir)}
    recorder = WarningRecorder()
    logging.getLogger("hf_attn_variants").addHandler(recorder)
    rows = []
    for name, texts in cases.items():
        recorder.messages.clear()
        options: dict[str, Any] = {"method": "mean"}
        if texts is not None:
            settings = {"max_length": subject.calibration_length, "passages": False, "fit_steps": args.fit_steps}
            options = {"calibration": Calibration(texts, **settings)}
        with tempfile.TemporaryDirectory() as folder:
            report = convert(subject.source, HEADS, output_dir=f"{folder}/converted", **options)
            scores = subject.evaluate(Path(folder) / "converted")
        quality = None if report.quality is None else report.quality.value
        rows.append({"calibration": name, **scores, "own_quality": quality, "warnings": list(recorder.messages)})
        print(json.dumps(rows[-1]), flush=True)
    return {
        "machine": describe_machine("cpu"),
        "num_key_value_heads": HEADS,
        "fit_steps": args.fit_steps,
        "rows": rows,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = parse_args()
    report = main(arguments)
    if arguments.output:
        atomic_write(arguments.output, json.dumps(report, indent=1) + "\n")
