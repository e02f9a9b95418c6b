"""Measure the time of a forward pass of an encoder or a decoder with each variant, with both allocator settings.

The models have random weights. The Transformers class and the variants take turns, and each time is the median over
rounds.

Example:
    python -m benchmarks.speed.encode --threads 2 --run_name encode_bert-base_cpu
    python -m benchmarks.speed.encode --model_name_or_path MINILM --batch_size 32 --rounds 15 \\
        --run_name encode_minilm_cpu
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.kept_memory import NOT_SHOWN, add_memory_argument, run
from benchmarks.machine import describe_machine
from benchmarks.page_faults import describe_memory, format_usage, record_rounds, summarize_usages
from hf_attn_variants.files import atomic_write
from hf_attn_variants.inspection import speed
from hf_attn_variants.inspection.costs import check_sizes, make_variant_config, read_checkpoint_config
from hf_attn_variants.inspection.speed import (
    build_verified_models,
    make_timed_function,
    resolve_timed_length,
    select_timed_auto_class,
)

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse `arguments`, or by default the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="checkpoint with the config.json; default: BERT-base")
    parser.add_argument("--tiny", action="store_true", help="use a tiny BERT, to test the script")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--max_position_embeddings", type=int, help="override the field of the configuration")
    parser.add_argument("--attention_window", type=int, nargs="+", help="time only variants with these windows")
    parser.add_argument("--attention_kernel", nargs="+", help="time these kernels, and hybrids with each window")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--run_name", default="encode_bert-base_cpu", help="name of the JSON file")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    add_memory_argument(parser)
    return parser.parse_args(arguments)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the forward passes, write the JSON, and return its contents."""
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    name, config = "BERT-base", transformers.BertConfig(**TINY if args.tiny else {}).to_dict()
    if args.model_name_or_path:
        name, config = Path(args.model_name_or_path).name, read_checkpoint_config(args.model_name_or_path)
    options: dict[str, Any] = {}
    if args.attention_window or args.attention_kernel:
        options = {"windows": args.attention_window or (), "kernels": args.attention_kernel or ()}
        options |= {"kv_heads": [config["num_attention_heads"]]}
        options |= {"talking_heads": False, "latents": False}
    if args.max_position_embeddings:
        config["max_position_embeddings"] = args.max_position_embeddings
    table = measure_passes(config, args.batch_size, args.length, args.rounds, **options)
    arguments = {key: value for key, value in vars(args).items() if key not in (*NOT_SHOWN, "model_name_or_path")}
    report = (
        {"arguments": arguments, "checkpoint": name}
        | table
        | {"machine": describe_machine("cpu"), "memory": describe_memory()}
    )
    args.output_dir.mkdir(parents=True, exist_ok=True)
    atomic_write(args.output_dir / f"{args.run_name}.json", json.dumps(report, indent=1) + "\n")
    for row in table["rows"]:
        took = format_usage(row["usage"])
        print(f"{row['name']:15s} {row['milliseconds']:8.1f} ms {row['speedup']:5.2f}x | {took}", flush=True)
    return report


def measure_passes(
    config: Mapping[str, Any], batch_size: int, length: int | None, rounds: int, **options: Any
) -> dict[str, Any]:
    """Time a forward pass of each variant of a model that is not a generating encoder-decoder, on the CPU.

    Args:
        config: the configuration of the checkpoint (config.json).
        batch_size: the number of sequences.
        length: the tokens or audio positions per sequence; None for 128, or for all positions of a Whisper model.
        rounds: the number of timings of each variant, whose median is reported.
        options: the arguments of `build_verified_models`, which select the variants.

    Returns:
        The rows (the baseline first) and the settings of the measurement, as JSON values.

    Raises:
        ValueError: in the same cases as `measure_speed`.
    """
    check_sizes(batch_size=batch_size, length=length, rounds=rounds)
    current = make_variant_config(config)
    auto_class = select_timed_auto_class(config, current)
    length = resolve_timed_length(length, current, auto_class)
    models = build_verified_models(config, **options)
    with torch.no_grad(), record_rounds(speed) as usages:
        runs = {name: make_timed_function(model, batch_size, length, None) for name, (_, model) in models.items()}
        times = speed._time_engines(runs, rounds, "cpu")
    rows: list[dict[str, Any]] = []
    for name, engine_times in times.items():
        milliseconds = [1e3 * end for _, end in engine_times]
        row = {"name": name, "fields": models[name][0], "milliseconds": statistics.median(milliseconds)}
        row |= {"all_milliseconds": milliseconds, "tokens_per_second": batch_size * length / row["milliseconds"] * 1e3}
        baseline = rows[0]["milliseconds"] if rows else row["milliseconds"]
        row |= {"speedup": baseline / row["milliseconds"], "usage": summarize_usages(usages[name][1:])}
        rows.append(row)
    header = {"architecture": current.auto_classes[auto_class], "work": "forward", "batch_size": batch_size}
    return header | {"length": length, "dtype": "float32", "device": "cpu", "rows": rows}


if __name__ == "__main__":
    run(main, parse_args)
