"""Compare greedy translations of int8 ONNX graphs with those of the float32 model.

The graphs are those of `attn-variants export --to onnx --quantization int8`, and run in the loop of
`examples/onnx_decoding.py`. The sentences are from the test set of Multi30k, English to German.

Example:
    python -m benchmarks.convert.onnx_translation --data_dir ../shared/data --marian MARIAN
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import sacrebleu
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from benchmarks.convert.conversion_subjects import read_lines
from benchmarks.convert.int8_quality import T5
from benchmarks.machine import describe_machine
from examples.onnx_decoding import greedy, load_graphs
from hf_attn_variants.export.onnx import export_onnx
from hf_attn_variants.files import atomic_write

BATCH, NEW_TOKENS = 50, 60


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True, help=f"folder with multi30k and {T5}")
    parser.add_argument("--marian", type=Path, help="folder of a Marian (see `train_marian.py`)")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/onnx_translation.json")
    return parser.parse_args(arguments)


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the models, and write and return the rows."""
    torch.set_num_threads(1)
    models = {"T5": args.data_dir / T5} | ({"Marian": args.marian} if args.marian else {})
    sources, targets = (
        read_lines(args.data_dir / f"multi30k/test_2016_flickr.{side}.gz")[: args.sentences] for side in ("en", "de")
    )
    rows = []
    for name, folder in models.items():
        rows.append({"model": name} | measure(folder, sources, targets))
        print(rows[-1], flush=True)
    report = {"machine": describe_machine("cpu"), "sentences": len(sources), "rows": rows}
    atomic_write(args.output, json.dumps(report, indent=1) + "\n")
    return rows


def measure(folder: Path, sources: list[str], targets: list[str]) -> dict[str, Any]:
    """Return BLEU in float32 and in int8, and the share of equal translations."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    texts: dict[str, list[str]] = {"float32": [], "int8": []}
    with tempfile.TemporaryDirectory() as temporary:
        export_onnx(folder, Path(temporary) / "onnx", quantization="int8")
        graphs = load_graphs(Path(temporary) / "onnx", "_quantized")
        for first in range(0, len(sources), BATCH):
            batch = tokenizer(sources[first : first + BATCH], padding=True, return_tensors="pt")
            inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
            with torch.inference_mode():
                tokens = model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS)
            ends = model.config.eos_token_id, model.config.pad_token_id
            arrays = {key: tensor.numpy() for key, tensor in inputs.items()}
            start = model.generation_config.decoder_start_token_id
            quantized = greedy(graphs, arrays, start=start, end=ends[0], pad=ends[1], new_tokens=NEW_TOKENS)
            texts["float32"] += tokenizer.batch_decode(tokens, skip_special_tokens=True)
            texts["int8"] += tokenizer.batch_decode(quantized, skip_special_tokens=True)
    equal = sum(a == b for a, b in zip(*texts.values(), strict=True)) / len(sources)
    bleu = {name: sacrebleu.corpus_bleu(written, [targets]).score for name, written in texts.items()}
    return {"equal": equal, "bleu": bleu}


if __name__ == "__main__":
    main(parse_args())
