"""An encoder's pass, or a decoding, as `attn-variants benchmark` times it, with memory held both ways and one JSON.

Random weights; upstream's class and the variants in turn in one run, medians over the rounds.

Example:
    python -m benchmarks.speed.encode --threads 2 --run_name encode_bert-base_cpu
    python -m benchmarks.speed.encode --model_name_or_path MINILM --batch_size 32 --rounds 15 \\
        --run_name encode_minilm_cpu
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.kept_memory import NOT_SHOWN, add_memory_argument, run
from benchmarks.machine import machine
from hf_attn_variants.files import atomic_write
from hf_attn_variants.inspection.checkpoint_config import read_checkpoint_config
from hf_attn_variants.inspection.page_faults import usage_text
from hf_attn_variants.inspection.speed import measure_speed

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `arguments`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="its config.json is read; default: BERT-base's shape")
    parser.add_argument("--tiny", action="store_true", help="a tiny BERT, to see the script work")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--max_position_embeddings", type=int, help="give every model so many (default: its own)")
    parser.add_argument("--attention_window", type=int, nargs="+", help="time these windows, and no other variants")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--run_name", default="encode_bert-base_cpu", help="the file's name")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    add_memory_argument(parser)
    return parser.parse_args(arguments)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, write the JSON and return what it holds."""
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    name, config = "BERT-base", transformers.BertConfig(**TINY if args.tiny else {}).to_dict()
    if args.model_name_or_path:
        name, config = Path(args.model_name_or_path).name, read_checkpoint_config(args.model_name_or_path)
    options = {each: getattr(args, each) for each in ("batch_size", "length", "rounds", "max_position_embeddings")}
    if args.attention_window:
        options |= {"windows": args.attention_window, "kv_heads": [config["num_attention_heads"]]}
        options |= {"talking_heads": False, "latents": False}
    table = measure_speed(config, name, **options)
    arguments = {key: value for key, value in vars(args).items() if key not in (*NOT_SHOWN, "model_name_or_path")}
    report = {"arguments": arguments} | table.to_dict() | {"machine": machine("cpu")}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    atomic_write(args.output_dir / f"{args.run_name}.json", json.dumps(report, indent=1) + "\n")
    for row in table.rows:
        took = usage_text(row.usage)
        print(f"{row.name:15s} {row.milliseconds:8.1f} ms {row.speedup:5.2f}x | {took}", flush=True)
    return report


if __name__ == "__main__":
    run(main, parse_args)
