"""Compare one window of 4,096 tokens with windows of 384 for questions about articles, with one fine-tuned reader.

The paragraphs of each article of SQuAD's dev set are joined up to 4,096 tokens, with a few of its questions. The
reader is a BERT that `attn-variants squad` fine-tuned on single paragraphs. The original reader reads an article in
windows of 384 tokens that overlap by 128. Converted to 4,096 positions and to attention in windows of 256, it reads
the article in one pass (the tokens of the question are global: docs/sparse.md). The converted reader is not trained.
Seconds are CPU times. The script writes the JSON file after each row and does not measure existing rows again.

Example:
    python -m benchmarks.long.long_questions --model runs/squad --work_dir long
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.machine import describe_machine
from benchmarks.run_records import check_data_dir, write_rows
from hf_attn_variants.commands import convert as convert_command
from hf_attn_variants.commands.training import squad as squad_command

ROOT = Path(__file__).resolve().parents[2]
DEV = "squad/dev-v1.1.json"
POSITIONS = 4_096
ROOM = 80  # for the tokens of the question (at most 64) and special tokens
GAP = "\n"  # between two paragraphs
KEY = ("reading", "questions", "seed")
LONGER = ("--max_position_embeddings", str(POSITIONS))
WINDOW = (*LONGER, "--attention_pattern", "sliding_window", "--attention_window", "256", "--num_global_tokens", "1")
# The ways to read an article: the flags of the conversion, the tokens per pass, and the overlap of two passes.
READINGS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "windows of 384": ((), 384, 128),
    "one window": (WINDOW, POSITIONS, 128),
    "one window, interpolated": ((*WINDOW, "--position_extension", "interpolated"), POSITIONS, 128),
    "one window, full attention": (LONGER, POSITIONS, 128),
}


def join_articles(content: dict[str, Any], tokenizer: Any, tokens: int, questions: int, seed: int) -> dict[str, Any]:
    """Return the data of SQuAD with each article as one paragraph.

    Args:
        content: the data of SQuAD's JSON file.
        tokens: the maximum number of tokens of an article, which ends after the last paragraph that fits.
        questions: the number of questions, which are drawn evenly from all articles.
        seed: the seed of the random questions.
    """
    articles = []
    for number, article in enumerate(content["data"]):
        context, available_questions, used = "", [], 0
        for paragraph in article["paragraphs"]:
            used += len(tokenizer(paragraph["context"], add_special_tokens=False, verbose=False)["input_ids"])
            if used > tokens:
                break
            begin = len(context) + len(GAP) if context else 0
            context = f"{context}{GAP}{paragraph['context']}" if context else paragraph["context"]
            for qa in paragraph["qas"]:
                moved = [answer | {"answer_start": answer["answer_start"] + begin} for answer in qa["answers"]]
                available_questions.append(qa | {"answers": moved})
        share = questions // len(content["data"]) + (number < questions % len(content["data"]))
        sampled_questions = random.Random(f"{seed}-{number}").sample(
            available_questions, min(share, len(available_questions))
        )
        if sampled_questions:
            paragraphs = [{"context": context, "qas": sampled_questions}]
            articles.append({"title": article.get("title", ""), "paragraphs": paragraphs})
    return {"version": "1.1", "data": articles}


def measure(reading: str, model: Path, questions: Path, work_dir: Path, mixed_precision: str) -> dict[str, Any]:
    """Convert the reader if this way of reading requires it, and measure its answers."""
    flags, length, stride = READINGS[reading]
    name = reading.replace(", ", "-").replace(" ", "_")
    if flags:
        converted = work_dir / f"{model.name}-{name}"
        if not converted.is_dir():
            argv = ["--model_name_or_path", str(model), "--output_dir", str(converted), "--disable_tqdm", *flags]
            convert_command.main(convert_command.parse_args(argv))
        model = converted
    argv = ["--model_name_or_path", str(model), "--num_train_epochs", "0", "--validation_file", str(questions)]
    argv += ["--max_length", str(length), "--doc_stride", str(stride), "--per_device_eval_batch_size", "2"]
    argv += ["--mixed_precision", mixed_precision, "--cpu", "--disable_tqdm", "--overwrite_output_dir"]
    argv += ["--output_dir", str(work_dir / f"{name}-answers")]
    started = time.process_time()
    results = squad_command.main(squad_command.parse_args(argv))
    seconds = round(time.process_time() - started, 1)
    names = ("eval_exact_match", "eval_f1", "eval_samples", "eval_windows")
    return {name: results[name] for name in names} | {"seconds": seconds}


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the rows that are not in the output file, write and print each new row, and return all rows."""
    check_data_dir(args.data_dir, DEV)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    content = json.loads((args.data_dir / DEV).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    articles = join_articles(content, tokenizer, POSITIONS - ROOM, args.questions, args.seed)
    file = args.work_dir / f"articles-{args.questions}-{args.seed}.json"
    file.write_text(json.dumps(articles), encoding="utf-8")
    rows = json.loads(args.output.read_text())["runs"] if args.output.is_file() else []
    for reading in args.readings:
        key = dict(zip(KEY, (reading, args.questions, args.seed), strict=True))
        if any(key.items() <= row.items() for row in rows):
            continue
        result = measure(reading, args.model, file, args.work_dir, args.mixed_precision)
        rows.append(key | {"mixed_precision": args.mixed_precision} | result)
        write_rows(args.output, {"machine": describe_machine("cpu")}, rows, KEY)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a BERT fine-tuned by `attn-variants squad`")
    parser.add_argument("--readings", nargs="+", choices=READINGS, default=list(READINGS)[:2], metavar="READING")
    parser.add_argument("--questions", type=int, default=144, help="number of questions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawn questions (default: %(default)s)")
    parser.add_argument("--mixed_precision", default="bf16", choices=["no", "bf16"])
    parser.add_argument("--work_dir", type=Path, required=True, help="folder of the models; existing ones are reused")
    parser.add_argument("--data_dir", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/long/results/long_questions.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
