"""Time the generation of real models in int8 on a CPU: `quantize`, `quantize_dynamic` and ONNX Runtime.

A T5 translates sentences of Multi30k, and a Whisper model transcribes recordings. All engines of a row run in turn in
one process, and each is compared with float32 by the ratio of the shortest times. The documentation recommends
`share_memory` followed by `quantize`. The ONNX Runtime graphs, which have 7-bit weights, run in the greedy loop of
`examples/onnx_decoding.py`. OpenVINO can run these graphs too, but is not timed because it is slow with them.

Example:
    python -m benchmarks.speed.int8_decoder --data_dir ../shared/data --threads 1
    python -m benchmarks.speed.int8_decoder --data_dir ../shared/data --whisper WHISPER --audio_dir recordings
"""

import argparse
import copy
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoFeatureExtractor, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoTokenizer

from benchmarks.convert.conversion_subjects import read_lines
from benchmarks.convert.int8_quality import T5, quantize_with_torch
from benchmarks.kept_memory import add_memory_argument, run
from benchmarks.machine import describe_machine
from benchmarks.page_faults import describe_memory
from benchmarks.speed.int8_encoder import LIMITS, time_engines
from examples.onnx_decoding import greedy, load_graphs
from hf_attn_variants import quantize, share_memory
from hf_attn_variants.conversion.calibration.examples import AUDIO_FILES, load_audio
from hf_attn_variants.export.onnx import export_onnx
from hf_attn_variants.files import atomic_write
from hf_attn_variants.quantization.int8_weight import get_current_plan

# (batch size, number of beams)
SIZES = [(1, 1), (1, 4), (16, 1), (16, 4)]
SPEECH_SIZES = [(1, 1), (1, 4)]


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse `arguments`, or by default the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True, help=f"folder with multi30k and {T5}")
    parser.add_argument("--whisper", type=Path, help="folder of a Whisper model")
    parser.add_argument("--audio_dir", type=Path, help="folder of recordings for the Whisper model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5, help="timed calls of each model and size")
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "int8_decoder.json")
    add_memory_argument(parser)
    args = parser.parse_args(arguments)
    if args.whisper and not args.audio_dir:
        parser.error("--whisper requires --audio_dir")
    return args


def make_translation_batches(args: argparse.Namespace) -> tuple[Any, dict[int, dict[str, torch.Tensor]]]:
    """Return the T5, and a batch of sentences by batch size."""
    folder = args.data_dir / T5
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sentences = read_lines(args.data_dir / "multi30k/test_2016_flickr.en.gz")
    batches = {
        size: dict(tokenizer(sentences[:size], padding=True, return_tensors="pt"))
        for size in {size for size, _ in SIZES}
    }
    return AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), batches


def make_speech_batches(args: argparse.Namespace) -> tuple[Any, dict[int, dict[str, torch.Tensor]]]:
    """Return the Whisper model, and a batch of recordings by batch size.

    Recordings are repeated if there are too few.
    """
    extractor = AutoFeatureExtractor.from_pretrained(args.whisper)
    files = sorted(path for path in args.audio_dir.iterdir() if path.suffix in AUDIO_FILES)
    sizes = sorted({size for size, _ in SPEECH_SIZES})
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


def measure(
    name: str,
    folder_of_model: Path,
    sizes: list[tuple[int, int]],
    model: Any,
    batches: dict[int, dict[str, torch.Tensor]],
    args: argparse.Namespace,
) -> list[Any]:
    """Time all engines at each size, print the ratios, and return the rows."""
    models = {
        "float32": model,
        "quantize": quantize(copy.deepcopy(model)),
        "quantize_dynamic": quantize_with_torch(copy.deepcopy(model)),
        "share_memory and quantize": quantize(share_memory(copy.deepcopy(model))),
    }
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(folder_of_model, Path(folder) / "onnx", quantization="int8")
        graphs = {
            f"ONNX Runtime{label}": load_graphs(Path(folder) / "onnx", suffix)
            for label, suffix in (("", ""), (" int8", "_quantized"))
        }
    source_names = {item.name for item in graphs["ONNX Runtime"][0].get_inputs()}
    start = model.generation_config.decoder_start_token_id
    rows = []
    for size, beams in sizes:
        # All models generate the same number of tokens.
        options = {"num_beams": beams, "min_new_tokens": args.max_new_tokens, "max_new_tokens": args.max_new_tokens}
        calls: dict[str, Any] = {
            engine: functools.partial(generate, engine_model, batches[size], **options)
            for engine, engine_model in models.items()
        }
        if beams == 1:
            source = {name: tensor.numpy() for name, tensor in batches[size].items() if name in source_names}
            for engine, graph in graphs.items():
                calls[engine] = functools.partial(
                    greedy, graph, source, start=start, end=-1, pad=0, new_tokens=args.max_new_tokens
                )
        times, usage = time_engines(calls, args.turns)
        rows.append({"size": f"{name}, {size}, {beams}", "milliseconds": times, "usage": {"milliseconds": usage}})
        ratios = ", ".join(f"{engine} {times['float32'] / time:.2f}" for engine, time in times.items())
        print(f"{name}, batch {size}, {beams} beams: {ratios}", flush=True)
    return rows


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Time the models, and write and return the report."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    rows = measure("T5", args.data_dir / T5, SIZES, *make_translation_batches(args), args)
    if args.whisper:
        rows += measure("Whisper", args.whisper, SPEECH_SIZES, *make_speech_batches(args), args)
    report = {
        "machine": describe_machine("cpu"),
        "threads": args.threads,
        "new_tokens": args.max_new_tokens,
        "memory": describe_memory(),
        "int8_path": str(get_current_plan()),
        "limits": {name: os.environ[name] for name in LIMITS if name in os.environ},
        "sizes": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(args.output, json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    run(main, parse_args, output="--output")
