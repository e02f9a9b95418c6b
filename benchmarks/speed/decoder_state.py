"""Measure the cache size of a T5 decoder and the time per token at several lengths, with kernels and a softmax.

The model has the shape of T5-small. Its weights are random, because neither time nor cache size depends on them.
Kernels do not support position biases, so the models with kernels have sinusoidal positions. They are compared with a
softmax model with sinusoidal positions, and with the T5 of Transformers, which computes its bias in each step. The
models take turns, with one token each, and a time is the median over rounds. The cache size is that of the
self-attention in all layers.

Example:
    python -m benchmarks.speed.decoder_state --num_threads 2
    python -m benchmarks.speed.decoder_state --lengths 64 128 --rounds 3 --output_dir states
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from benchmarks.kept_memory import NOT_SHOWN, add_memory_argument, run
from benchmarks.machine import describe_machine
from benchmarks.page_faults import describe_memory
from benchmarks.speed.decode import SHAPES
from benchmarks.speed.talking_heads_peers import measure_interleaved
from hf_attn_variants import AttnVariantT5Config, AttnVariantT5ForConditionalGeneration
from hf_attn_variants.files import atomic_write
from hf_attn_variants.modeling.attention.decoder_caches import KernelStateLayer
from hf_attn_variants.modeling.transformers_internals import get_cache, get_cache_name

UPSTREAM = "upstream"
PEERS = {
    UPSTREAM: None,
    "softmax": {},
    "elu": {"attention_kernel": "elu"},
    "hedgehog": {"attention_kernel": "hedgehog"},
    "hybrid, window 64": {"attention_kernel": "hybrid", "attention_window": 64},
    "hedgehog, softmax in 2 of 6 layers": {
        "per_layer_values": {"attention_kernel": ["hedgehog", None, None, *["hedgehog"] * 3]}
    },
}
SOURCE, CHUNK_LENGTH = (
    64,
    512,
)  # tokens of the source; tokens per decoder call while the cache is filled


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    add_memory_argument(parser)
    return parser.parse_args(arguments)


def make_models() -> dict[str, PreTrainedModel]:
    """Return {name: model} for the models to compare."""
    shape = SHAPES["t5-small"]
    models = {UPSTREAM: T5ForConditionalGeneration(T5Config(**shape))}
    for name, fields in PEERS.items():
        if fields is not None:
            config = AttnVariantT5Config(**shape, position_embedding_type="sinusoidal", **fields)
            models[name] = AttnVariantT5ForConditionalGeneration(config)
    return {name: model.eval() for name, model in models.items()}


@torch.no_grad()
def make_step_after(model: PreTrainedModel, length: int, batch_size: int) -> tuple[Callable[[], None], int]:
    """Return a step that decodes one token after `length` others, and the cache size of these in bytes."""
    tokens = torch.randint(2, model.config.vocab_size, (batch_size, length))
    source = BaseModelOutput(torch.randn(batch_size, SOURCE, model.config.d_model))
    cache = None
    for chunk in tokens.split(CHUNK_LENGTH, dim=1):
        cache = get_cache(
            model(encoder_outputs=source, decoder_input_ids=chunk, **{get_cache_name(): cache}, use_cache=True)
        )

    def step() -> None:
        with torch.no_grad():
            model(encoder_outputs=source, decoder_input_ids=tokens[:, :1], **{get_cache_name(): cache}, use_cache=True)

    return step, compute_cached_bytes(cache.self_attention_cache)


def compute_cached_bytes(cache: Any) -> int:
    """Return the bytes of all layers of a cache: their keys and values, or their kernel states."""
    num_bytes = 0
    for layer in cache.layers:
        is_state = isinstance(layer, KernelStateLayer)
        tensors = layer.state if is_state else (layer.keys, layer.values)
        num_bytes += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return num_bytes


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each length, write the JSON and print the figures after it, and return the report."""
    torch.manual_seed(0)
    torch.set_num_threads(args.num_threads)
    arguments = {name: str(value) for name, value in vars(args).items() if name not in NOT_SHOWN}
    report: dict[str, Any] = {
        "arguments": arguments,
        "machine": describe_machine("cpu"),
        "memory": describe_memory(),
        "steps": [],
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path, models = args.output_dir / "decoder_state_cpu.json", make_models()
    for length in tqdm(args.lengths, desc="lengths"):
        steps = {name: make_step_after(model, length, args.batch_size) for name, model in models.items()}
        times, usage = measure_interleaved({name: step for name, (step, _) in steps.items()}, "cpu", args.rounds)
        state_bytes = {name: size for name, (_, size) in steps.items()}
        report["steps"].append({"length": length, "step_ms": times, "bytes": state_bytes, "usage": {"step_ms": usage}})
        atomic_write(path, json.dumps(report, indent=1) + "\n")
        tqdm.write(json.dumps(report["steps"][-1]))
    return report


if __name__ == "__main__":
    run(main, parse_args)
