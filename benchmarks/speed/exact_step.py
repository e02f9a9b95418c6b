"""Compare the cross-attention to cached encoder outputs in one decoding step with its matrix products, in turn.

The time is that of the cross-attention in all decoder layers for one new token per sentence or beam. The compared
models have cached encoder outputs (`cross_kv_lora_rank` = d_model), `share_memory` with the encoder outputs, or the
keys and values of Transformers. "products" are only the matrix products of the first model, with preallocated operands
and results. The weights are random, because speed does not depend on them.

Example:
    python -m benchmarks.speed.exact_step --shape t5-small --batch_size 1 8 32 --source_length 256 1024 --num_beams 1 4
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from benchmarks.kept_memory import run
from benchmarks.machine import measure_arithmetic_rate, measure_read_bandwidth
from benchmarks.speed.decode import CROSS_ATTENTION_NAMES, SHAPES, get_key_value_projections
from benchmarks.speed.talking_heads_peers import measure_interleaved
from benchmarks.speed.timed_sizes import make_random_model, measure_sizes, parse_sizes
from hf_attn_variants import share_memory
from hf_attn_variants.modeling.transformers_internals import get_cache_name
from hf_attn_variants.registration import get_variant_model_class
from hf_attn_variants.shared_memory.attention import ENCODER_OUTPUTS

PRODUCTS, EXACT, SHARED, UPSTREAM = "products", "exact", "share_memory", "upstream"


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="t5-small")
    parser.add_argument("--batch_size", type=int, nargs="+", default=[1, 8, 32])
    args = parse_sizes(parser, arguments)
    del args.max_new_tokens  # used only by benchmarks that generate whole texts
    return args


def make_models(args: argparse.Namespace) -> dict[str, Any]:
    """Return {name: model} for the models to compare, with the same weights."""
    model = make_random_model(args.shape)
    cls: Any = get_variant_model_class(type(model).__name__)
    config = cls.config_class.from_upstream(model.config, cross_kv_lora_rank=model.config.d_model)
    exact = cls(config).eval()
    exact.load_state_dict(model.state_dict())
    return {EXACT: exact, SHARED: share_memory(copy.deepcopy(model), cross_cache=ENCODER_OUTPUTS), UPSTREAM: model}


def list_cross_attentions(model: Any) -> list[torch.nn.Module]:
    """Return the cross-attention modules of a model, from the first layer to the last."""
    return [module for name, module in model.named_modules() if name.endswith(CROSS_ATTENTION_NAMES)]


def step_of(
    modules: list[torch.nn.Module], states: torch.Tensor, source: torch.Tensor
) -> Callable[[], list[torch.Tensor]]:
    """Return a function that calls each attention module for one token, with a cache that already has the source."""
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    options: Any = {"key_value_states": source, get_cache_name(): cache}

    def step() -> list[torch.Tensor]:
        return [module(states, **options)[0] for module in modules]

    step()
    return step


def make_products(modules: list[torch.nn.Module], states: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    """Return a function with the matrix products of attention to cached encoder outputs, for each module.

    Args:
        modules: the cross-attention modules.
        states: the hidden states of one token per beam [b B, 1, D].
        source: the encoder outputs [b, m, D].
    """
    (rows, _, width), (memories, length, _) = states.shape, source.shape
    inner = get_key_value_projections(modules[0])[0].out_features
    heads = modules[0].config.num_attention_heads
    size, num_queries = inner // heads, rows // memories * heads  # d; the queries per sentence
    maps = [
        [
            linear.weight.detach()
            for linear in (query_of(module), *get_key_value_projections(module), get_output_projection(module))
        ]
        for module in modules
    ]
    x, buffer = states[:, 0], torch.empty(rows, inner)
    by_head, absorbed = torch.randn(heads, rows, size), torch.empty(heads, rows, width)
    queries, logits = torch.randn(memories, num_queries, width), torch.empty(memories, num_queries, length)
    weights, sums = torch.rand(memories, num_queries, length), torch.empty(memories, num_queries, width)
    read, values, output = torch.randn(heads, rows, width), torch.empty(heads, rows, size), torch.empty(rows, width)

    def products() -> None:
        for query, key, value, last in maps:
            torch.mm(x, query.T, out=buffer)
            torch.bmm(by_head, key.view(heads, size, width), out=absorbed)
            torch.bmm(queries, source.mT, out=logits)
            torch.bmm(weights, source, out=sums)
            torch.bmm(read, value.view(heads, size, width).mT, out=values)
            torch.mm(buffer, last.T, out=output)

    return products


def query_of(module: Any) -> torch.nn.Linear:
    """Return the query projection of a cross-attention module."""
    return module.q if hasattr(module, "q") else module.q_proj


def get_output_projection(module: Any) -> torch.nn.Linear:
    """Return the output projection of a cross-attention module."""
    return module.o if hasattr(module, "o") else module.out_proj


def count_operations(modules: list[torch.nn.Module], rows: int, memories: int, length: int) -> int:
    """Return the number of floating-point operations of the products: two per multiplication."""
    key_map = get_key_value_projections(modules[0])[0]
    inner, width, heads = key_map.out_features, key_map.in_features, modules[0].config.num_attention_heads
    return len(modules) * 2 * rows * (4 * inner * width + 2 * heads * length * width)


@torch.no_grad()
def measure(models: dict[str, Any], args: argparse.Namespace, batch_size: int, length: int, beams: int) -> dict:
    """Return a row for one size: the times in milliseconds, and the limits of arithmetic and of memory access."""
    torch.manual_seed(0)
    width = models[UPSTREAM].config.d_model
    states, source = torch.randn(batch_size * beams, 1, width), torch.randn(batch_size, length, width)
    works: dict[str, Callable[[], Any]] = {}
    for name, model in models.items():
        read = source.repeat_interleave(beams, dim=0) if name == UPSTREAM else source
        works[name] = step_of(list_cross_attentions(model), states, read)
    expected = works[UPSTREAM]()
    differences = {
        name: max((a - b).abs().max().item() / b.abs().max().item() for a, b in zip(work(), expected, strict=True))
        for name, work in works.items()
    }
    modules = list_cross_attentions(models[UPSTREAM])
    works = {PRODUCTS: make_products(modules, states, source), **works}
    times, usage = measure_interleaved(works, "cpu", args.rounds)
    rate, bandwidth = measure_arithmetic_rate("cpu", torch.float32), measure_read_bandwidth("cpu")
    operations = count_operations(modules, batch_size * beams, batch_size, length)
    return {
        "batch_size": batch_size,
        "source_length": length,
        "num_beams": beams,
        "milliseconds": times,
        "operations": operations,
        "arithmetic_milliseconds": operations / rate * 1e3,
        "source_read_once_milliseconds": source.nbytes * len(modules) / bandwidth * 1e3,
        "largest_difference": differences,
        "usage": {"milliseconds": usage},
    }


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each size, write the JSON and print the figures after it, and return the report."""
    models = make_models(args)
    return measure_sizes(args, f"exact_step_{args.shape}_cpu", lambda *size: measure(models, args, *size), format_row)


def format_row(row: dict[str, Any]) -> str:
    """Return the text to print for a row."""
    times = row["milliseconds"]
    words = [f"{name} {time:.2f} ms ({time / times[PRODUCTS]:.2f} of the products)" for name, time in times.items()]
    limits = {"arithmetic": "arithmetic_milliseconds", "reading the source once": "source_read_once_milliseconds"}
    return ", ".join(words + [f"{name} only {row[field]:.2f} ms" for name, field in limits.items()])


if __name__ == "__main__":
    run(main, parse_args)
