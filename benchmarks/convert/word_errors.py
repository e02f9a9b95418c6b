"""Measure the word error rate of a converted Whisper model, with a bootstrap interval.

The word error rate is the minimum number of words to insert, delete or replace, divided by the number of words of the
reference. The references are the transcripts of the original model, and the texts of the recordings if there are any.
Texts are compared in lowercase and without punctuation. Chinese and Japanese are written without spaces, so that each
of their characters counts as a word. `--times` also compares the times of the tokens that both models generate.
"""

import argparse
import csv
import difflib
import json
import math
import random
import re
import statistics
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer

from benchmarks.machine import describe_machine
from hf_attn_variants.conversion.calibration.examples import AUDIO_FILES, load_audio
from hf_attn_variants.conversion.report import compute_edit_distance
from hf_attn_variants.files import atomic_write
from hf_attn_variants.registration import register

EPILOG = """example:
  python -m benchmarks.convert.word_errors --source whisper-base --converted whisper-base-gqa4 \\
      --audio_dir recordings \\
      --texts recordings.tsv --output build/words.json"""
RESAMPLES = 2000
# Ideographs, hiragana and katakana, including the mark for long vowels.
UNSPACED = r"[\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", required=True, help="the checkpoint that was converted")
    parser.add_argument("--converted", nargs="+", required=True, help="folders of converted checkpoints")
    parser.add_argument("--audio_dir", nargs="+", type=Path, required=True, help="folders of recordings")
    parser.add_argument("--texts", nargs="*", type=Path, default=[], help="TSV files with the columns file and text")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--max_new_tokens", type=int, default=120)
    parser.add_argument("--times", action="store_true", help="also compare the times of tokens")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    return parser.parse_args(argv)


def split_words(text: str) -> list[str]:
    """Return the normalized words of a text."""
    # Hindi vowel signs are marks (category M). `\w` does not match them, so that it would split words.
    normal = unicodedata.normalize("NFC", text.lower())
    letters = "".join(c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in normal)
    return re.sub(UNSPACED, r" \g<0> ", letters).split()


def compute_word_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> dict[str, Any]:
    """Return the word error rate over all recordings, its 95 % bootstrap interval, and the recordings and words."""
    pairs = [
        (compute_edit_distance(split_words(a), split_words(b)), len(split_words(a)))
        for a, b in zip(references, hypotheses, strict=True)
    ]
    draw, rates = random.Random(0), []
    for _ in range(RESAMPLES):
        chosen = draw.choices(pairs, k=len(pairs))
        rates.append(sum(errors for errors, _ in chosen) / max(1, sum(count for _, count in chosen)))
    rates.sort()
    total = sum(count for _, count in pairs)
    interval = [round(rates[int(share * RESAMPLES)], 4) for share in (0.025, 0.975)]
    rate = round(sum(errors for errors, _ in pairs) / max(1, total), 4)
    return {"word_error_rate": rate, "interval": interval, "recordings": len(pairs), "words": total}


class Transcript(NamedTuple):
    """The text and the tokens of a transcript, and optionally the time of each token in seconds."""

    text: str
    tokens: list[int]
    seconds: list[float]


@torch.no_grad()
def transcribe_files(folder: str, files: Sequence[Path], args: argparse.Namespace) -> list[Transcript]:
    """Return the greedy transcript of each file."""
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    extractor, tokenizer = AutoFeatureExtractor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    transcripts: list[Transcript] = []
    for start in range(0, len(files), args.batch_size):
        samples = [load_audio(path)[0] for path in files[start : start + args.batch_size]]
        rate = extractor.sampling_rate
        batch = torch.cat([extractor(s, sampling_rate=rate, return_tensors="pt").input_features for s in samples])
        output = model.generate(
            batch,
            attention_mask=torch.ones_like(batch[:, 0], dtype=torch.long),
            do_sample=False,
            num_beams=1,
            max_new_tokens=args.max_new_tokens,
            return_token_timestamps=args.times,
        )
        rows = output["sequences"] if args.times else output
        seconds = output["token_timestamps"].tolist() if args.times else [[]] * len(rows)
        for tokens, times in zip(rows.tolist(), seconds, strict=True):
            transcripts.append(Transcript(tokenizer.decode(tokens, skip_special_tokens=True), tokens, times))
    return transcripts


def compare_times(source: Sequence[Transcript], converted: Sequence[Transcript]) -> dict[str, Any]:
    """Return the number of common tokens, and the median and 95th percentile of their time differences in seconds."""
    differences = sorted(
        abs(a.seconds[block.a + i] - b.seconds[block.b + i])
        for a, b in zip(source, converted, strict=True)
        for block in difflib.SequenceMatcher(None, a.tokens, b.tokens, autojunk=False).get_matching_blocks()
        for i in range(block.size)
    )
    if not differences:
        return {"tokens": 0, "median_shift": None, "shift_of_95_percent": None}
    return {
        "tokens": len(differences),
        "median_shift": round(statistics.median(differences), 3),
        "shift_of_95_percent": round(differences[math.ceil(0.95 * len(differences)) - 1], 3),
    }


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the models, print one row per model and folder, and return the report."""
    register()
    texts: dict[str, str] = {}
    for table in args.texts:
        with open(table, encoding="utf-8", newline="") as file:
            texts |= {row["file"]: row["text"] for row in csv.DictReader(file, delimiter="\t")}
    rows = []
    for folder in args.audio_dir:
        files = sorted(path for path in folder.rglob("*") if path.suffix in AUDIO_FILES)
        if not files:
            sys.exit(f"error: {folder} contains no recordings ({', '.join(AUDIO_FILES)})")
        known = all(path.name in texts for path in files)
        source = transcribe_files(args.source, files, args)
        for name in (args.source, *args.converted):
            converted = source if name == args.source else transcribe_files(name, files, args)
            row: dict[str, Any] = {"model": Path(name).name, "audio": folder.name}
            written = [transcript.text for transcript in converted]
            row["against_source"] = compute_word_error_rate([transcript.text for transcript in source], written)
            row["against_texts"] = (
                compute_word_error_rate([texts[path.name] for path in files], written) if known else None
            )
            if args.times:
                row["times_against_source"] = compare_times(source, converted)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return {"machine": describe_machine("cpu"), "rows": rows}


if __name__ == "__main__":
    arguments = parse_args()
    report = main(arguments)
    if arguments.output:
        atomic_write(arguments.output, json.dumps(report, indent=1) + "\n")
