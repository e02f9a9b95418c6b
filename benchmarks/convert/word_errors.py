"""Words that a converted Whisper writes otherwise than its source, with a bootstrap interval.

The word error rate is the least number of words to insert, delete or replace, over the words of the reference: the
source's own transcripts, and the texts where there are some. Text is compared in small letters, without punctuation.
"""

import argparse
import csv
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer

from benchmarks.machine import machine
from hf_attn_variants.conversion.calibration.audio import AUDIO_FILES, load_audio
from hf_attn_variants.conversion.quality import edit_distance
from hf_attn_variants.files import atomic_write
from hf_attn_variants.registration import register

EPILOG = """example:
  python -m benchmarks.convert.word_errors --source whisper-base --converted whisper-base-gqa4 \\
      --audio_dir recordings \\
      --texts recordings.tsv --output build/words.json"""
RESAMPLES = 2000


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", required=True, help="the checkpoint that was converted")
    parser.add_argument("--converted", nargs="+", required=True, help="what it became: folders")
    parser.add_argument("--audio_dir", nargs="+", type=Path, required=True, help="folders of recordings")
    parser.add_argument("--texts", nargs="*", type=Path, default=[], help="tables with the columns file and text")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--max_new_tokens", type=int, default=120)
    parser.add_argument("--output", type=Path, help="a JSON of the results")
    return parser.parse_args(argv)


def words(text: str) -> list[str]:
    """Return a text's words as they are compared."""
    return re.sub(r"[^\w' ]", " ", text.lower()).split()


def error_rate(references: Sequence[str], found: Sequence[str]) -> dict[str, Any]:
    """Return the word error rate over all recordings, its 95 % bootstrap interval, and how many there are."""
    pairs = [(edit_distance(words(a), words(b)), len(words(a))) for a, b in zip(references, found, strict=True)]
    draw, rates = random.Random(0), []
    for _ in range(RESAMPLES):
        chosen = draw.choices(pairs, k=len(pairs))
        rates.append(sum(errors for errors, _ in chosen) / max(1, sum(count for _, count in chosen)))
    rates.sort()
    total = sum(count for _, count in pairs)
    interval = [round(rates[int(share * RESAMPLES)], 4) for share in (0.025, 0.975)]
    rate = round(sum(errors for errors, _ in pairs) / max(1, total), 4)
    return {"word_error_rate": rate, "interval": interval, "recordings": len(pairs), "words": total}


@torch.no_grad()
def transcripts(folder: str, files: Sequence[Path], args: argparse.Namespace) -> list[str]:
    """Return what a model writes of each file, greedily."""
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    extractor, tokenizer = AutoFeatureExtractor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found: list[str] = []
    for start in range(0, len(files), args.batch_size):
        samples = [load_audio(path)[0] for path in files[start : start + args.batch_size]]
        rate = extractor.sampling_rate
        batch = torch.cat([extractor(s, sampling_rate=rate, return_tensors="pt").input_features for s in samples])
        mask = torch.ones_like(batch[:, 0], dtype=torch.long)
        ids = model.generate(
            batch, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=args.max_new_tokens
        )
        found += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return found


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print a row for each model and folder, and return the report."""
    register()
    texts: dict[str, str] = {}
    for table in args.texts:
        with open(table, encoding="utf-8", newline="") as file:
            texts |= {row["file"]: row["text"] for row in csv.DictReader(file, delimiter="\t")}
    rows = []
    for folder in args.audio_dir:
        files = sorted(path for path in folder.rglob("*") if path.suffix in AUDIO_FILES)
        if not files:
            sys.exit(f"error: {folder} has no recordings ({', '.join(AUDIO_FILES)})")
        known = all(path.name in texts for path in files)
        source = transcripts(args.source, files, args)
        for name in (args.source, *args.converted):
            own = source if name == args.source else transcripts(name, files, args)
            row: dict[str, Any] = {"model": Path(name).name, "audio": folder.name}
            row["against_source"] = error_rate(source, own)
            row["against_texts"] = error_rate([texts[path.name] for path in files], own) if known else None
            rows.append(row)
            print(json.dumps(row), flush=True)
    return {"machine": machine("cpu"), "rows": rows}


if __name__ == "__main__":
    arguments = parse_args()
    report = main(arguments)
    if arguments.output:
        atomic_write(arguments.output, json.dumps(report, indent=1) + "\n")
