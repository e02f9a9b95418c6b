"""Time the generation of real models in int8 on a CPU: `quantize` and torch's `quantize_dynamic`, against float32.

A T5 translates sentences of Multi30k, and a Whisper transcribes recordings. All models of a row run in turn in one
process, and a row has the ratio of their least times. `share_memory` followed by `quantize` is what the documentation
of this package recommends.

Example:
    python -m benchmarks.speed.int8_decoder --data_dir ../shared/data --threads 1
    python -m benchmarks.speed.int8_decoder --data_dir ../shared/data --whisper WHISPER --audio_dir recordings
"""

import argparse
import copy
import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoFeatureExtractor, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoTokenizer

from benchmarks.convert.conversion_subjects import read_lines
from benchmarks.convert.int8_quality import T5, by_torch
from benchmarks.kept_memory import NOT_RECORDED
from benchmarks.machine import machine
from benchmarks.speed.int8_encoder import LIMITS
from hf_attn_variants import quantize, share_memory
from hf_attn_variants.conversion.calibration.examples import AUDIO_FILES, load_audio
from hf_attn_variants.files import atomic_write
from hf_attn_variants.quantization.int8_weight import current_plan, time_calls_in_turn

# (batch size, number of beams)
SIZES = [(1, 1), (1, 4), (16, 1), (16, 4)]


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `arguments`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True, help=f"folder with multi30k and {T5}")
    parser.add_argument("--whisper", type=Path, help="folder of a Whisper")
    parser.add_argument("--audio_dir", type=Path, help="folder of recordings for the Whisper")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5, help="timed calls of each model and size")
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "int8_decoder.json")
    args = parser.parse_args(arguments)
    if args.whisper and not args.audio_dir:
        parser.error("--whisper needs --audio_dir")
    return args


def translation_batches(args: argparse.Namespace) -> tuple[Any, dict[int, dict[str, torch.Tensor]]]:
    """Return the T5, and a batch of sentences by batch size."""
    folder = args.data_dir / T5
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sentences = read_lines(args.data_dir / "multi30k/test_2016_flickr.en.gz")
    batches = {
        size: dict(tokenizer(sentences[:size], padding=True, return_tensors="pt"))
        for size in {size for size, _ in SIZES}
    }
    return AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), batches


def speech_batches(args: argparse.Namespace) -> tuple[Any, dict[int, dict[str, torch.Tensor]]]:
    """Return the Whisper, and a batch of recordings by batch size. Recordings are repeated if there are too few."""
    extractor = AutoFeatureExtractor.from_pretrained(args.whisper)
    files = sorted(path for path in args.audio_dir.iterdir() if path.suffix in AUDIO_FILES)
    sizes = sorted({size for size, _ in SIZES})
    features = torch.cat(
        [
            extractor(load_audio(path)[0], sampling_rate=extractor.sampling_rate, return_tensors="pt").input_features
            for path in files[: sizes[-1]]
        ]
    )
    features = features[torch.arange(sizes[-1]) % len(features)]
    return AutoModelForSpeechSeq2Seq.from_pretrained(args.whisper).eval(), {
        size: {"input_features": features[:size], "attention_mask": torch.ones(size, features.shape[-1]).long()}
        for size in sizes
    }


@torch.inference_mode()
def generate(model: Any, batch: dict[str, torch.Tensor], **options: Any) -> Any:
    return model.generate(**batch, do_sample=False, **options)


def measure(name: str, model: Any, batches: dict[int, dict[str, torch.Tensor]], args: argparse.Namespace) -> list[Any]:
    """Time the forms of a model at each size, print the ratios, and return the rows."""
    models = {
        "float32": model,
        "quantize": quantize(copy.deepcopy(model)),
        "quantize_dynamic": by_torch(copy.deepcopy(model)),
        "share_memory and quantize": quantize(share_memory(copy.deepcopy(model))),
    }
    rows = []
    for size, beams in SIZES:
        # All models write the same number of tokens.
        options = {"num_beams": beams, "min_new_tokens": args.max_new_tokens, "max_new_tokens": args.max_new_tokens}
        calls = [functools.partial(generate, each, batches[size], **options) for each in models.values()]
        seconds = dict(zip(models, time_calls_in_turn(*calls, times=args.turns), strict=True))
        milliseconds = {engine: round(1e3 * value, 1) for engine, value in seconds.items()}
        rows.append({"model": name, "batch": size, "beams": beams, "milliseconds": milliseconds})
        ratios = ", ".join(f"{engine} {seconds['float32'] / value:.2f}" for engine, value in seconds.items())
        print(f"{name}, batch {size}, {beams} beams: {ratios}", flush=True)
    return rows


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Time the models, and write and return the report."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    rows = measure("T5", *translation_batches(args), args)
    if args.whisper:
        rows += measure("Whisper", *speech_batches(args), args)
    report = {
        "machine": machine("cpu"),
        "threads": args.threads,
        "new_tokens": args.max_new_tokens,
        "memory": NOT_RECORDED,
        "int8_path": str(current_plan()),
        "limits": {name: os.environ[name] for name in LIMITS if name in os.environ},
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(args.output, json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main(parse_args())
