"""Compare the quality that `convert` reports with the true quality of the converted model on labeled examples.

`convert` estimates a number on held-out calibration examples. This script measures the same number, and a task metric,
on examples that no conversion has read. It supports three kinds of models:

- `masked`: a masked language model. The number is the increase of the masked-token loss over the original model (nats
  per token). The metric is the share of masked tokens that are predicted correctly.
- `labels`: a classifier. The number is the share of predictions that differ from those of the original model. The
  metric is the accuracy. Each line of the examples file contains a text, a tab and the name of its class.
- `written`: an encoder-decoder. The number is the share of generated tokens that differ from those of the original
  model, by edit distance. The metric is the share of identical outputs.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from benchmarks.machine import describe_machine
from hf_attn_variants.conversion.report import compute_edit_distance
from hf_attn_variants.files import REPORT_NAME, atomic_write
from hf_attn_variants.registration import register

EPILOG = """example:
  python -m benchmarks.convert.closing_numbers --kind labels --source rxnfp --converted rxnfp-2 rxnfp-1 \\
      --examples reactions.tsv --output build/closing_numbers.json"""
MODEL_CLASSES = {
    "masked": AutoModelForMaskedLM,
    "labels": AutoModelForSequenceClassification,
    "written": AutoModelForSeq2SeqLM,
}
MASKED_SHARE = 0.15


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=MODEL_CLASSES, required=True, help="the kind of model")
    parser.add_argument("--source", required=True, help="the checkpoint that was converted")
    parser.add_argument("--converted", nargs="+", required=True, help="folders that `convert` wrote")
    parser.add_argument("--examples", type=Path, required=True, help="a file with one example per line")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, help="a JSON file of results, to which the rows are added")
    return parser.parse_args(argv)


def iterate_batches(tokenizer: Any, texts: Sequence[str], size: int) -> Iterator[Any]:
    """Yield batches of model inputs, truncated only to the tokenizer's maximum length."""
    for start in range(0, len(texts), size):
        yield tokenizer(list(texts[start : start + size]), padding=True, truncation=True, return_tensors="pt")


def compute_outputs(model: Any, tokenizer: Any, texts: Sequence[str], args: argparse.Namespace) -> list[Any]:
    """Return a model's outputs: a class or a list of tokens per example, or (loss, is correct) per masked token."""
    rows: list[Any] = []
    generator, special = torch.Generator().manual_seed(1), torch.tensor(tokenizer.all_special_ids)
    for batch in iterate_batches(tokenizer, texts, args.batch_size):
        ids = batch["input_ids"]
        if args.kind == "labels":
            rows += model(**batch).logits.argmax(-1).tolist()
        elif args.kind == "written":
            written = model.generate(**batch, do_sample=False, num_beams=1, max_new_tokens=args.max_new_tokens)
            rows += [[token for token in row if token not in special] for row in written.tolist()]
        else:
            chosen = (torch.rand(ids.shape, generator=generator) < MASKED_SHARE) & ~torch.isin(ids, special)
            logits = model(**batch | {"input_ids": ids.masked_fill(chosen, tokenizer.mask_token_id)}).logits[chosen]
            losses = torch.nn.functional.cross_entropy(logits, ids[chosen], reduction="none")
            rows += list(zip(losses.tolist(), (logits.argmax(-1) == ids[chosen]).tolist(), strict=True))
    return rows


def compare_outputs(kind: str, source: list[Any], converted: list[Any], labels: list[int]) -> dict[str, float]:
    """Return the true number, and the metric before and after the conversion."""
    if kind == "masked":
        loss = sum(b[0] - a[0] for a, b in zip(source, converted, strict=True)) / len(source)
        before, after = (sum(row[1] for row in rows) / len(source) for rows in (source, converted))
        return {"true": loss, "before": before, "after": after}
    share_equal = sum(a == b for a, b in zip(source, converted, strict=True)) / len(source)
    if kind == "labels":
        before, after = (
            sum(a == b for a, b in zip(rows, labels, strict=True)) / len(source) for rows in (source, converted)
        )
        return {"true": 1 - share_equal, "before": before, "after": after}
    edits = sum(compute_edit_distance(a, b) for a, b in zip(source, converted, strict=True))
    return {"true": edits / max(1, sum(map(len, source))), "before": 1.0, "after": share_equal}


@torch.inference_mode()
def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each converted model, and print and return one row per model."""
    register()
    torch.set_num_threads(1)
    lines = args.examples.read_text(encoding="utf-8").splitlines()
    texts = [line.split("\t")[0] for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(args.source)
    model = MODEL_CLASSES[args.kind].from_pretrained(args.source).eval()
    labels = [model.config.label2id[line.split("\t")[1]] for line in lines] if args.kind == "labels" else []
    source, rows = compute_outputs(model, tokenizer, texts, args), []
    for folder in args.converted:
        report = json.loads((Path(folder) / REPORT_NAME).read_text(encoding="utf-8"))
        converted = compute_outputs(MODEL_CLASSES[args.kind].from_pretrained(folder).eval(), tokenizer, texts, args)
        quality = report["quality"]
        row = {
            "model": Path(args.source).name,
            "heads": report["heads"]["num_key_value_heads"],
            **{name: quality[name] for name in ("measure", "value", "interval", "verdict", "bound")},
            "held_out": quality["examples"],
            "examples": len(texts),
            **{name: round(value, 4) for name, value in compare_outputs(args.kind, source, converted, labels).items()},
            "fit_steps": report["calibration"]["fit_steps"],
            "calibration": report["calibration"]["count"],
        }
        print(json.dumps(row))
        rows.append(row)
    if args.output is not None:
        known = json.loads(args.output.read_text(encoding="utf-8"))["rows"] if args.output.is_file() else []
        atomic_write(
            args.output, json.dumps({"machine": describe_machine("cpu"), "rows": known + rows}, indent=1) + "\n"
        )
    return rows


if __name__ == "__main__":
    sys.exit(0 if main(parse_args()) else 1)
