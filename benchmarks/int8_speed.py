"""Models in int8 beside float32, in turn in one run: `quantize`, torch's own `quantize_dynamic`, and `share_memory`.

Random weights: speed does not depend on them. An encoder-decoder generates, its encoder included; an encoder reads
texts. A time is the median over rounds.

Example:
    python benchmarks/int8_speed.py --shape t5-small --batch_size 1 8 --source_length 64 512 --num_beams 1 4
    python benchmarks/int8_speed.py --shape minilm --batch_size 1 32 --source_length 32 128
    python benchmarks/int8_speed.py --shape opus-mt --batch_size 8 --source_length 64 --num_beams 1 4
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from decode import SHAPES
from int8_quality import FLOAT32, INT8, TORCHS, by_torch
from kept_memory import add_memory_argument, run
from talking_heads_peers import interleaved
from timed_sizes import measure_sizes, random_model
from transformers import AutoConfig, AutoModel

from hf_attn_variants import quantize, share_memory
from hf_attn_variants.registration import variant_model_class

ENCODERS = {
    "tiny-bert": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 256},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bert-base": {},
}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=(*SHAPES, *ENCODERS), default="t5-small")
    parser.add_argument("--batch_size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--source_length", type=int, nargs="+", default=[64, 512], help="tokens of a text")
    parser.add_argument("--num_beams", type=int, nargs="+", default=[1, 4], help="of encoder-decoders")
    parser.add_argument("--max_new_tokens", type=int, default=32, help="of encoder-decoders")
    parser.add_argument("--bfloat16", action="store_true", help="in bfloat16, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    add_memory_argument(parser)
    parser.add_argument("--run_name", help="the file's name; default: made of the shape")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {args.rounds}")
    if args.shape in ENCODERS:
        args.num_beams = [1]
    return args


def make_models(args: argparse.Namespace) -> dict[str, Any]:
    """Return the contestants by name, of the same weights."""
    torch.manual_seed(0)
    if args.shape in ENCODERS:
        model = AutoModel.from_config(AutoConfig.for_model("bert", **ENCODERS[args.shape])).eval()
        return {FLOAT32: model} | in_other_types("", model, args)
    model = random_model(args.shape)
    shared = share_memory(copy.deepcopy(model))
    cls: Any = variant_model_class(type(model).__name__)
    exact = cls(cls.config_class.from_upstream(model.config, cross_kv_lora_rank=model.config.d_model)).eval()
    exact.load_state_dict(model.state_dict())
    exact.generation_config = model.generation_config
    models = {FLOAT32: model} | in_other_types("", model, args)
    models |= {"float32, shared": shared, "int8, shared": quantize(copy.deepcopy(shared))}
    return models | {"float32, exact": exact} | in_other_types(", exact", exact, args)


def in_other_types(what: str, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return a model in int8 by `quantize` and by torch's call, and in bfloat16 where that is asked for."""
    found = {f"{INT8}{what}": quantize(copy.deepcopy(model)), f"{TORCHS}{what}": by_torch(model)}
    if args.bfloat16:
        found[f"bfloat16{what}"] = quantize(copy.deepcopy(model), "bfloat16")
    return found


@torch.no_grad()
def measure(models: dict[str, Any], args: argparse.Namespace, batch_size: int, length: int, beams: int) -> dict:
    """Return the times of one size in milliseconds."""
    torch.manual_seed(0)
    ids = torch.randint(2, models[FLOAT32].config.vocab_size, (batch_size, length))
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if args.shape not in ENCODERS:
        given |= {"max_new_tokens": args.max_new_tokens, "num_beams": beams, "do_sample": False}
    works = {
        name: lambda model=model: model(**given) if args.shape in ENCODERS else model.generate(**given)
        for name, model in models.items()
    }
    times, usage = interleaved(works, "cpu", args.rounds)
    size = {"batch_size": batch_size, "source_length": length, "num_beams": beams}
    return size | {"milliseconds": times, "usage": {"milliseconds": usage}}


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, write the JSON after each size, print the figures; returns the report."""
    models = make_models(args)
    return measure_sizes(args, f"int8_speed_{args.shape}_cpu", lambda *size: measure(models, args, *size), row_text)


def row_text(row: dict[str, Any]) -> str:
    """Return what is printed of a row."""
    times = row["milliseconds"]
    return ", ".join(f"{name} {time:.1f} ms ({times[FLOAT32] / time:.2f}x)" for name, time in times.items())


if __name__ == "__main__":
    run(main, parse_args)
