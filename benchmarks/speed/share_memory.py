"""Compare `generate` of Transformers models with and without `share_memory`, including the encoder, in one run.

The weights are random, because speed does not depend on them. The script compares a model with two copies of it that
share memory. One copy stores the encoder keys and values once per sentence, and the other stores the encoder outputs
once for all layers. The report states whether all models generate the same tokens. A time is the median over rounds.

Example:
    python -m benchmarks.speed.share_memory --shape t5-small --batch_size 1 8 32 --source_length 64 512 --num_beams 1 4
    python -m benchmarks.speed.share_memory --shape opus-mt --batch_size 8 --source_length 512 --num_beams 4
"""

import argparse
import copy
from typing import Any

import torch

from benchmarks.kept_memory import run
from benchmarks.speed.decode import SHAPES
from benchmarks.speed.talking_heads_peers import measure_interleaved
from benchmarks.speed.timed_sizes import make_random_model, measure_sizes, parse_sizes
from hf_attn_variants import share_memory
from hf_attn_variants.modeling.transformers_internals import get_cache
from hf_attn_variants.shared_memory.attention import ENCODER_OUTPUTS, KEYS_AND_VALUES, holds_encoder_outputs

UPSTREAM = "upstream"


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="t5-small")
    parser.add_argument("--batch_size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--padded", action="store_true", help="fill a quarter of every second source with padding")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    return parse_sizes(parser, arguments)


def make_models(args: argparse.Namespace) -> dict[str, Any]:
    """Return the unchanged model and the copies that share memory, by name or by the contents of their caches."""
    model = make_random_model(args.shape).to(getattr(torch, args.dtype))
    kinds = (KEYS_AND_VALUES, ENCODER_OUTPUTS)
    return {UPSTREAM: model} | {kind: share_memory(copy.deepcopy(model), cross_cache=kind) for kind in kinds}


@torch.no_grad()
def measure(models: dict[str, Any], args: argparse.Namespace, batch_size: int, length: int, beams: int) -> dict:
    """Return a row for one size: the times in milliseconds, and the size of each cross-attention cache in bytes."""
    torch.manual_seed(0)
    ids = torch.randint(2, models[UPSTREAM].config.vocab_size, (batch_size, length))
    mask = torch.ones_like(ids)
    if args.padded:
        mask[::2, length - length // 4 :] = 0

    options = {"max_new_tokens": args.max_new_tokens, "num_beams": beams, "do_sample": False}

    def decoding(model: Any) -> Any:
        return lambda **more: model.generate(input_ids=ids, attention_mask=mask, **options, **more)

    works = {name: decoding(model) for name, model in models.items()}
    first = {name: work(return_dict_in_generate=True) for name, work in works.items()}
    same = {name: torch.equal(output.sequences, first[UPSTREAM].sequences) for name, output in first.items()}
    stored_bytes = {name: compute_cached_bytes(get_cache(output)) for name, output in first.items()}
    del first
    times, usage = measure_interleaved(works, "cpu", args.rounds)
    size = {"batch_size": batch_size, "source_length": length, "num_beams": beams}
    row = {"milliseconds": times, "same_tokens": same, "cross_cache_bytes": stored_bytes}
    return size | row | {"usage": {"milliseconds": usage}}


def compute_cached_bytes(cache: Any) -> int:
    """Return the size of the cross-attention cache in bytes."""
    layers = cache.cross_attention_cache.layers
    if all(holds_encoder_outputs(layer) for layer in layers):
        return layers[0].encoder_outputs.nbytes
    return sum(states.nbytes for layer in layers for states in (layer.keys, layer.values))


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each size, write the JSON and print the figures after it, and return the report."""
    models = make_models(args)
    name = f"share_memory_{args.shape}_{args.dtype}_cpu"
    return measure_sizes(args, name, lambda *size: measure(models, args, *size), format_row)


def format_row(row: dict[str, Any]) -> str:
    """Return the text to print for a row."""
    times, ratios = row["milliseconds"], []
    for name, time in times.items():
        marks = "" if row["same_tokens"][name] else ", DIFFERENT TOKENS"
        ratios.append(f"{name} {time:.0f} ms ({times[UPSTREAM] / time:.2f}x{marks})")
    return ", ".join(ratios)


if __name__ == "__main__":
    run(main, parse_args)
