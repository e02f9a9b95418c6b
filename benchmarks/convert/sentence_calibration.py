"""Measure conversions of MiniLM that are calibrated on 2,000 sentences, with and without passages.

The sentences are from Wikipedia, or from the training set of STS-B. The score is Spearman's correlation on the STS-B
dev set. All other settings are the defaults of `convert`.

Example:
    python -m benchmarks.convert.sentence_calibration --data_dir DATA --work_dir WORK
"""

import argparse
import csv
import json
import random
from pathlib import Path

from benchmarks.convert.conversion_quality import make_run_record
from benchmarks.convert.conversion_subjects import SentenceEncoder, sample_sentences, write_texts
from hf_attn_variants.commands import convert as command
from hf_attn_variants.files import atomic_write

COUNT = 2000


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with wikipedia/ and glue/")
    parser.add_argument("--work_dir", type=Path, required=True, help="folder of checkpoints; existing ones are used")
    parser.add_argument("--num_key_value_heads", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/sentence_calibration.json")
    return parser.parse_args(argv)


def load_sentences(subject: SentenceEncoder, data_dir: Path, seed: int) -> dict[str, list[str]]:
    """Return the sentences of each source."""
    with open(data_dir / "glue/STS-B/train.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    sentences = dict.fromkeys(row[column] for column in ("sentence1", "sentence2") for row in rows)
    return {
        "Wikipedia": sample_sentences(subject.shards, COUNT, seed),
        "STS-B": random.Random(seed).sample([*sentences], COUNT),
    }


def main(args: argparse.Namespace) -> None:
    """Convert and score each model, and write the report."""
    subject = SentenceEncoder(args.data_dir)
    rows = []
    for source, texts in load_sentences(subject, args.data_dir, args.seed).items():
        (args.work_dir / source).mkdir(parents=True, exist_ok=True)
        flags = write_texts(args.work_dir / source, {"calibration_file": texts})
        for heads in args.num_key_value_heads:
            for passages in (True, False):
                output = args.work_dir / f"{source}-{heads}-{'passages' if passages else 'sentences'}"
                argv = ["--model_name_or_path", str(subject.source), "--num_key_value_heads", str(heads), *flags]
                argv += ["--calibration_size", str(COUNT), "--seed", str(args.seed), "--output_dir", str(output)]
                argv += [] if passages else ["--no-calibration_passages"]
                if not output.is_dir():
                    command.main(command.parse_args(argv))
                row = {"source": source, "heads": heads, "passages": passages, "seed": args.seed}
                rows.append(row | {"spearman": subject.evaluate(output)["spearman"]})
                print(rows[-1], flush=True)
    atomic_write(args.output, json.dumps({"run": make_run_record(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(parse_args())
