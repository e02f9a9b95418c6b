"""Compare engines for serving on a CPU: Transformers, `share_memory`, int8, fewer heads and CTranslate2, in turn.

The script runs `attn-variants benchmark --serving` for several sizes. The weights are random, because speed does not
depend on them. For an encoder-decoder, the time is that of the encoder and the generation. For an encoder, it is that
of a forward pass. A time is the median over rounds. Peak memory is measured in a process with only the engine.

Example:
    python -m benchmarks.speed.serving --shape t5-small --batch_size 8 --source_length 512 --num_beams 1 4
    python -m benchmarks.speed.serving --shape opus-mt --batch_size 1 8 --source_length 64 --num_key_value_heads 2
    python -m benchmarks.speed.serving --shape whisper-base --batch_size 1 8 --num_beams 1 5
"""

import argparse
import json
from typing import Any

from transformers import AutoConfig

from benchmarks.kept_memory import run
from benchmarks.page_faults import get_allocator_setting, record_rounds, summarize_usages
from benchmarks.speed.decode import MARIANS, SHAPES
from benchmarks.speed.timed_sizes import measure_sizes, parse_sizes
from hf_attn_variants.serving import measure as serving
from hf_attn_variants.serving.measure import measure_serving, recommend_engine

WHISPERS = {
    "tiny-whisper": {"d_model": 32, "vocab_size": 100, "max_source_positions": 20, "num_mel_bins": 8}
    | {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    | {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    | {"decoder_start_token_id": 2, "suppress_tokens": [], "begin_suppress_tokens": []},
    "whisper-base": {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048}
    | {"decoder_ffn_dim": 2048, "encoder_attention_heads": 8, "decoder_attention_heads": 8},
}
ENCODERS = {
    "tiny-bert": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 256},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bert-base": {},
}
HEADS = {"t5": "T5ForConditionalGeneration", "marian": "MarianMTModel", "bert": "BertModel"}
HEADS |= {"whisper": "WhisperForConditionalGeneration"}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=(*SHAPES, *WHISPERS, *ENCODERS), default="t5-small")
    parser.add_argument("--batch_size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num_key_value_heads", type=int, nargs="+", help="default: a quarter of the heads")
    parser.add_argument("--variants", nargs="*", default=[], metavar="JSON", help="fields of further conversions")
    parser.add_argument("--engines", nargs="*", help="default: all")
    parser.add_argument("--no_peak_memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--compile", action="store_true", help="also time the torch engines with torch.compile")
    args = parse_sizes(parser, arguments)
    if args.shape in ENCODERS:
        args.num_beams = [1]
    if args.shape in WHISPERS:
        args.source_length = [WHISPERS[args.shape].get("max_source_positions", 1500)]
    return args


def make_config(shape: str) -> dict[str, Any]:
    """Return the contents of the config.json for a shape."""
    kind, fields = "marian" if shape in MARIANS else "t5", SHAPES.get(shape, {}) | {"decoder_start_token_id": 0}
    if shape in ENCODERS or shape in WHISPERS:
        kind = "bert" if shape in ENCODERS else "whisper"
        fields = ENCODERS[shape] if shape in ENCODERS else WHISPERS[shape]
    return AutoConfig.for_model(kind, **fields).to_dict() | {"architectures": [HEADS[kind]]}


def measure(args: argparse.Namespace, config: dict[str, Any], batch_size: int, length: int, beams: int) -> dict:
    """Return a row for one size: the times in milliseconds, the peak memory in bytes, and the advice."""
    with record_rounds(serving) as usages:
        table = measure_serving(
            config,
            checkpoint=args.shape,
            kv_heads=args.num_key_value_heads,
            batch_size=batch_size,
            length=length,
            max_new_tokens=args.max_new_tokens,
            num_beams=None if args.shape in ENCODERS else beams,
            rounds=args.rounds,
            compiles=args.compile,
            variants=list(map(json.loads, args.variants)),
            engines=args.engines,
            peak_memory=not args.no_peak_memory
            and get_allocator_setting() == "glibc",  # with the fixed setting, peaks include memory that is not in use
        )
    calls = 1 if args.shape in ENCODERS else 2  # with generation, a round has a second call, for the first token
    rows = {row.engine.name: row for row in table.rows}
    return {
        "batch_size": batch_size,
        "source_length": length,
        "num_beams": beams,
        "milliseconds": {name: row.milliseconds for name, row in rows.items()},
        "all_milliseconds": {name: row.all_milliseconds for name, row in rows.items()},
        "first_milliseconds": {name: row.first_milliseconds for name, row in rows.items()},
        "peak_bytes": {name: row.peak_bytes for name, row in rows.items()},
        "usage": {"milliseconds": {name: summarize_usages(usages[name][calls::calls]) for name in rows}},
        "advice": recommend_engine(table),
    }


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each size, write the JSON and print the figures after it, and return the report."""
    config = make_config(args.shape)
    return measure_sizes(args, f"serving_{args.shape}_cpu", lambda *size: measure(args, config, *size), format_row)


def format_row(row: dict[str, Any]) -> str:
    """Return the text to print for a row."""
    times = row["milliseconds"]
    base = next(iter(times.values()))
    cells = ", ".join(f"{name} {time:.1f} ms ({base / time:.2f}x)" for name, time in times.items())
    return f"{cells}. {row['advice']}"


if __name__ == "__main__":
    run(main, parse_args)
