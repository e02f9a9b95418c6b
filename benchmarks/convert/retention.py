"""Measure the quality of a converted all-MiniLM-L6-v2 on many kinds of text, calibrated on lines or on passages.

`convert` creates each checkpoint with its defaults, from lines of Wikipedia, with or without
`--calibration_passages`. It converts all layers, or all except the token-matching layers (`--keep_matching_layers`).
The models are not trained. Three numbers compare the converted with the original model on text that was not used for
fitting:

- error: the square root of the squared error of the last hidden states divided by their variance, over all tokens
- cosine: the mean cosine between the embeddings of both models (means over tokens)
- neighbours: the share of texts whose nearest other text is the same for both models

Example:
    python -m benchmarks.convert.retention --num_key_value_heads 4 1
    python -m benchmarks.convert.retention --num_key_value_heads 4 2 --passages yes --keep_matching_layers 2
    python -m benchmarks.convert.retention --num_key_value_heads 4 --passages yes --calibration_size 8192
    python -m benchmarks.convert.retention --num_key_value_heads 12 --kv_lora_rank 64 --passages yes
"""

import argparse
import csv
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoTokenizer

from benchmarks.convert.conversion_quality import make_run_record
from benchmarks.convert.conversion_subjects import SentenceEncoder, read_lines, sample_lines, write_texts
from benchmarks.run_records import write_rows
from hf_attn_variants.commands import convert as command
from hf_attn_variants.inspection import sentence_embeddings, similarity_spearman

ROOT = Path(__file__).resolve().parents[2]
LINES = 20_000  # lines from which the command draws its examples
LONG = 900  # minimum number of characters of a long line
BATCH_SIZE = 16
# The maximum number of tokens for each kind of long text. For other texts it is LENGTH.
LENGTHS = {"Wikipedia, 900 characters and more": 256, "SQuAD, question and passage": 384}
LENGTH = 128
KEY = ("heads", "passages", "seed", "fit_steps", "keep_matching_layers", "calibration_size", "kv_lora_rank")

Texts = Sequence[str] | Sequence[tuple[str, str]]


def load_texts_by_kind(data_dir: Path, size: int, seed: int) -> dict[str, Texts]:
    """Return at most `size` texts or pairs of texts per kind, or half as many if the texts are long."""
    validation = [data_dir / "wikipedia/valid.txt.gz"]
    questions = _read_questions(data_dir / "squad/dev-v1.1.json")
    kinds: dict[str, Texts] = {
        "Wikipedia, 40 characters and more": sample_lines(validation, size, seed),
        "Wikipedia, 900 characters and more": sample_lines(validation, size // 2, seed, min_characters=LONG),
        "captions (Multi30k)": read_lines(data_dir / "multi30k/val.en.gz"),
        "questions (SQuAD)": [question for question, _ in questions],
        "film reviews (SST-2)": _read_column(data_dir / "glue/SST-2/dev.tsv", "sentence"),
        "fiction, speech, reports (MNLI)": _read_column(data_dir / "glue/MNLI/dev_matched.tsv", "sentence1"),
        "news and captions (STS-B)": _read_column(data_dir / "glue/STS-B/dev.tsv", "sentence1"),
        "STS-B, pairs": _read_pairs(data_dir / "glue/STS-B/dev.tsv", "sentence1", "sentence2"),
        "QNLI, question and sentence": _read_pairs(data_dir / "glue/QNLI/dev.tsv", "question", "sentence"),
        "SQuAD, question and passage": questions,
    }
    return {name: _sample(texts, size // 2 if name in LENGTHS else size, seed) for name, texts in kinds.items()}


def _sample(texts: Texts, size: int, seed: int) -> Texts:
    different: list[Any] = sorted(set(texts))
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(seed)).tolist()
    return [different[i] for i in order[:size]]


def _read_table(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def _read_column(path: Path, name: str) -> list[str]:
    return [row[name] for row in _read_table(path) if row.get(name)]


def _read_pairs(path: Path, first: str, second: str) -> list[tuple[str, str]]:
    return [(row[first], row[second]) for row in _read_table(path) if row.get(first) and row.get(second)]


def _read_questions(path: Path) -> list[tuple[str, str]]:
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    passages = [passage for article in articles for passage in article["paragraphs"]]
    return [(question["question"].strip(), passage["context"]) for passage in passages for question in passage["qas"]]


@torch.inference_mode()
def compare(model: Any, source: Any, tokenizer: Any, texts: Texts, length: int) -> dict[str, float]:
    """Compare a model with its source on texts by error, cosine and neighbours, or on pairs of texts by the error."""
    wrong = spread = 0.0
    for start in range(0, len(texts), BATCH_SIZE):
        rows = list(texts[start : start + BATCH_SIZE])
        batch = tokenizer(rows, padding=True, truncation=True, max_length=length, return_tensors="pt")
        real = batch["attention_mask"].bool()
        actual, expected = (each_model(**batch).last_hidden_state[real] for each_model in (model, source))
        wrong += (actual - expected).square().sum().item()
        spread += (expected - expected.mean(0)).square().sum().item()
    error = {"error": round((wrong / spread) ** 0.5, 4)}
    if not isinstance(texts[0], str):
        return error
    pair = [sentence_embeddings(each_model, tokenizer, texts, max_length=length) for each_model in (model, source)]
    cosine = torch.nn.functional.cosine_similarity(*pair).mean().item()
    accuracy = (_find_nearest(pair[0]) == _find_nearest(pair[1])).float().mean().item()
    return error | {"cosine": round(cosine, 4), "neighbours": round(accuracy, 4)}


def _find_nearest(embeddings: torch.Tensor) -> torch.Tensor:
    unit = torch.nn.functional.normalize(embeddings, dim=-1)
    return (unit @ unit.T).fill_diagonal_(-2.0).argmax(1)


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Convert with each setting, measure the models, write the JSON file, and return the rows."""
    transformers.logging.set_verbosity_error()
    subject = SentenceEncoder(args.data_dir)
    source, tokenizer = AutoModel.from_pretrained(subject.source).eval(), AutoTokenizer.from_pretrained(subject.source)
    kinds = load_texts_by_kind(args.data_dir, args.size, args.seed)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        lines = sample_lines(subject.shards, args.lines, args.seed, min_characters=1)
        flags = write_texts(Path(temporary), {"calibration_file": lines})
        for heads in args.num_key_value_heads:
            for passages in args.passages:
                kept_layers = args.keep_matching_layers
                settings = {name: getattr(args, name) for name in ("calibration_size", "kv_lora_rank")}
                settings = {name: value for name, value in settings.items() if value is not None}
                name = "-".join(map(str, (heads, passages, kept_layers, *settings.values())))
                output = (args.work_dir or Path(temporary)) / name
                argv = ["--model_name_or_path", str(subject.source), "--num_key_value_heads", str(heads), *flags]
                argv += ["--calibration_passages" if passages == "yes" else "--no-calibration_passages"]
                argv += ["--seed", str(args.seed), "--disable_tqdm", "--output_dir", str(output)]
                argv += [] if args.fit_steps is None else ["--fit_steps", str(args.fit_steps)]
                argv += [] if kept_layers is None else ["--keep_matching_layers", str(kept_layers)]
                argv += [str(word) for flag, value in settings.items() for word in (f"--{flag}", value)]
                if not output.is_dir():
                    command.main(command.parse_args(argv))
                report = json.loads((output / "conversion_report.json").read_text(encoding="utf-8"))
                model = AutoModel.from_pretrained(output).eval()
                row = {"heads": heads, "passages": passages, "seed": args.seed, "fit_steps": args.fit_steps}
                row |= {} if kept_layers is None else {"keep_matching_layers": kept_layers, "kept": report["heads"]}
                row |= settings | {"calibration": report["calibration"]}
                row["spearman"] = similarity_spearman(model, tokenizer, subject.pairs, subject.scores)
                row["kinds"] = {
                    name: compare(model, source, tokenizer, texts, LENGTHS.get(name, LENGTH))
                    for name, texts in kinds.items()
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
                write_rows(args.output, {"run": make_run_record()}, rows, KEY)
    return rows


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="example:" + __doc__.split("Example:")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--num_key_value_heads", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--passages", nargs="+", choices=["yes", "no"], default=["no", "yes"])
    parser.add_argument(
        "--keep_matching_layers", type=int, help="number of layers to leave unconverted (default: none)"
    )
    parser.add_argument("--fit_steps", type=int, help="number of fitting steps (default: that of `convert`)")
    parser.add_argument("--kv_lora_rank", type=int, help="size of latents, with all 12 heads (default: no latents)")
    parser.add_argument("--calibration_size", type=int, help="number of examples (default: that of `convert`)")
    parser.add_argument("--size", type=int, default=384, help="number of texts per kind (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=LINES, help="lines of Wikipedia to use (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work_dir", type=Path, help="folder of the checkpoints; existing ones are used again")
    parser.add_argument("--data_dir", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/convert/results/retention.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
