"""Words that a converted Whisper writes otherwise than its source, with a bootstrap interval.

The word error rate is the least number of words to insert, delete or replace, over the words of the reference: the
source's own transcripts, and the texts where there are some. Text is compared in small letters, without punctuation.
Chinese and Japanese are written without spaces: each of their characters counts as a word. With `--times` the times of
tokens that both write are compared, too.
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
# Ideographs, hiragana and katakana, with the mark that lengthens a vowel.
UNSPACED = r"[\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"


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
    parser.add_argument("--times", action="store_true", help="compare the times of tokens as well")
    parser.add_argument("--output", type=Path, help="a JSON of the results")
    return parser.parse_args(argv)


def split_words(text: str) -> list[str]:
    """Return a text's words as they are compared."""
    # Vowel signs are marks (category M), which `\w` leaves out: without them a Hindi word would fall into pieces.
    normal = unicodedata.normalize("NFC", text.lower())
    letters = "".join(c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in normal)
    return re.sub(UNSPACED, r" \g<0> ", letters).split()


def compute_word_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> dict[str, Any]:
    """Return the word error rate over all recordings, its 95 % bootstrap interval, and how many there are."""
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
    """A transcript of a recording: its text, its tokens, and optionally the second of each token."""

    text: str
    tokens: list[int]
    seconds: list[float]


@torch.no_grad()
def transcribe_files(folder: str, files: Sequence[Path], args: argparse.Namespace) -> list[Transcript]:
    """Return what a model writes of each file, greedily."""
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
    """Return how many tokens both write, and how far their times are apart, in seconds: median, 95th percentile."""
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
