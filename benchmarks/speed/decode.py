"""Compare the decoding speed of T5 and Marian in Transformers with that of the variants in this package, in one run.

The variants are MHA, GQA, MQA, cached encoder outputs ("exact"), and cross-attention to a latent of the encoder
outputs.

The weights are random, because speed does not depend on them. `generate` is called with the encoder outputs, so the
reported time is the decoding time, including the computation of the encoder keys and values. The time of the encoder
is reported separately, because the decoder's key/value heads do not affect it. Every figure is the median over the
repeats, and everything runs with both allocator settings (`kept_memory.py`).

Example:
    python -m benchmarks.speed.decode --shape t5-small --batch_size 32 --source_length 1024 --threads 2
    python -m benchmarks.speed.decode --shape t5-large --device cuda --dtype bfloat16 --batch_size 1 16 256
"""

import argparse
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForSeq2SeqLM, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.kept_memory import NOT_SHOWN, add_memory_argument, run
from benchmarks.machine import (
    describe_machine,
    measure_arithmetic_rate,
    measure_read_bandwidth,
    measure_seconds,
    synchronize,
)
from benchmarks.page_faults import Usage, UsageRecorder, describe_memory, format_usage, summarize_usages
from hf_attn_variants.files import atomic_write
from hf_attn_variants.inspection.speed import FirstTokenTimer
from hf_attn_variants.modeling.attention.latent_attention import EXPANDED_LATENTS, attend_to_latent
from hf_attn_variants.modeling.transformers_internals import get_cache

# `num_layers` is the number of layers in the encoder, and also that in the decoder. "t5-large-attention" has a quarter
# of the layers of T5-large.
SHAPES = {
    "tiny": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2, "vocab_size": 500},
    "t5-multi30k": {"d_model": 128, "d_kv": 16, "d_ff": 512, "num_heads": 8, "num_layers": 2, "vocab_size": 8000}
    | {"feed_forward_proj": "gated-gelu"},  # the model that benchmarks/train/t5_multi30k.py trains
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_heads": 8, "num_layers": 6},
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "num_layers": 12},
    "t5-large": {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16, "num_layers": 24},
    "t5-large-attention": {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16, "num_layers": 6},
    "opus-mt": {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "vocab_size": 58101}
    | {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
    | {"activation_function": "swish", "max_position_embeddings": 4096},  # a Marian model, also for long sources
}
MARIANS = ("opus-mt",)
# The names of the cross-attention modules in T5 and in Marian.
CROSS_ATTENTION_NAMES = ("EncDecAttention", "encoder_attn")
UPSTREAM = "upstream MHA"


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="example:" + __doc__.split("Example:")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="t5-small")
    parser.add_argument("--num_layers", type=int, help="number of layers, to reduce the memory that a shape needs")
    parser.add_argument("--num_key_value_heads", type=int, nargs="+", help="default: MHA, 4, 2 and 1")
    parser.add_argument(
        "--cross_kv_lora_rank",
        type=int,
        nargs="*",
        help="ranks of the cross-attention latent; default: d_model (exact), and 1/2, 1/4 and 1/8 of it",
    )
    parser.add_argument(
        "--equal_parameters", action="store_true", help="widen the feed-forward layers if there are fewer K/V heads"
    )
    parser.add_argument("--batch_size", type=int, nargs="+", default=[32])
    parser.add_argument("--source_length", type=int, nargs="+", default=[1024])
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--num_beams", type=int, default=1)
    parser.add_argument("--padded", action="store_true", help="fill a quarter of every second source with padding")
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--compile", action="store_true", help="compile the decoding step (requires --cache static)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--threads", type=int, help="number of CPU threads; default: that of torch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip_encoder", action="store_true", help="do not time the encoder")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    add_memory_argument(parser)
    parser.add_argument("--run_name", help="output file name without extension; default: made of the settings")
    args = parser.parse_args(arguments)
    if args.max_new_tokens < 2:
        parser.error(f"--max_new_tokens must be at least 2 (the first token and a step), got {args.max_new_tokens}")
    if args.compile and args.cache != "static":
        parser.error("--compile requires --cache static, because a growing cache would be recompiled at each step")
    if args.shape in MARIANS and (args.equal_parameters or args.num_layers):
        parser.error("--equal_parameters and --num_layers require a T5 shape")
    heads = get_decoder_heads(SHAPES[args.shape])
    if args.num_key_value_heads is None:
        args.num_key_value_heads = sorted({heads, 4, 2, 1} - {k for k in (4, 2) if heads % k}, reverse=True)
    if args.cross_kv_lora_rank is None:
        width = SHAPES[args.shape]["d_model"]
        args.cross_kv_lora_rank = [] if args.equal_parameters else [width // part for part in (1, 2, 4, 8)]
    return args


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Run every configuration, write the JSON and the plot, and return the contents of the JSON."""
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    models = build_models(args)
    rows = []
    for batch_size, source_length in itertools.product(args.batch_size, args.source_length):
        rows += measure(models, args, batch_size, source_length)
    arguments = {key: str(value) for key, value in vars(args).items() if key not in NOT_SHOWN}
    results = {
        "arguments": arguments,
        "machine": describe_machine(args.device),
        "memory": describe_memory(),
        "rows": rows,
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    sizes = [f"batch{'-'.join(map(str, args.batch_size))}", f"source{'-'.join(map(str, args.source_length))}"]
    search = [f"beams{args.num_beams}", args.cache] + (["compiled"] if args.compile else [])
    name = args.run_name or "_".join(["decode", args.shape, args.device, args.dtype, *sizes, *search])
    path = args.output_dir / f"{name}.json"
    atomic_write(path, json.dumps(results, indent=2) + "\n")
    save_plot(results, path.with_suffix(".png"), args)
    print(f"wrote {path} and {path.with_suffix('.png')}")
    return results


def build_models(args: argparse.Namespace) -> dict[str, Any]:
    """Return {name: model} for the models to compare, with random weights."""
    fields = SHAPES[args.shape] | ({"num_layers": args.num_layers} if args.num_layers else {})
    fields |= {"decoder_start_token_id": 0, "attn_implementation": "sdpa"}
    heads, kind = get_decoder_heads(fields), "marian" if args.shape in MARIANS else "t5"

    def made(model_type: str, **overrides: Any) -> Any:
        with torch.device(args.device):  # a GPU initializes the weights of a large model much faster than a CPU
            return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(model_type, **fields | overrides))

    models = {UPSTREAM: made(kind)}
    for k in args.num_key_value_heads:
        wider = {"d_ff": compute_equal_feed_forward_size(fields, k)} if args.equal_parameters else {}
        models[get_variant_name(k, heads)] = made(f"attn_variant_{kind}", num_key_value_heads=k, **wider)
    for rank in args.cross_kv_lora_rank:
        name = "exact" if rank == fields["d_model"] else f"cross r={rank}"
        models[name] = made(f"attn_variant_{kind}", cross_kv_lora_rank=rank)
    for model in models.values():
        model.eval().to(args.device, getattr(torch, args.dtype))
        # With random weights, a sentence could end at any step, so the end token is disabled.
        model.generation_config.eos_token_id = None
        model.generation_config.forced_eos_token_id = None
        if args.compile:
            # All models share their code, so their compilations count toward the same limit.
            torch._dynamo.config.recompile_limit = 16 * len(models)
            model.forward = torch.compile(model.forward)
    return models


def get_decoder_heads(fields: dict[str, Any]) -> int:
    """Return the number of query heads in the decoder."""
    return fields["num_heads"] if "num_heads" in fields else fields["decoder_attention_heads"]


def compute_equal_feed_forward_size(fields: dict[str, Any], kv_heads: int) -> int:
    """Return the d_ff at which a model with fewer key/value heads has as many parameters (arXiv:1911.02150, 4.1)."""
    saved = fields["num_heads"] - kv_heads  # key and value heads, in both attention modules of each decoder layer
    saved *= fields["d_kv"] * fields["d_model"] * 2 * 2 * fields["num_layers"]
    matrices = 3 if "gated" in fields.get("feed_forward_proj", "relu") else 2
    return fields["d_ff"] + round(saved / (matrices * fields["d_model"] * 2 * fields["num_layers"]))


def get_variant_name(kv_heads: int, heads: int) -> str:
    return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else f"GQA-{kv_heads}"


def make_source(
    model: Any, args: argparse.Namespace, batch_size: int, source_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random encoder outputs [b, m, d_model] and their mask [b, m]."""
    torch.manual_seed(0)
    states = torch.randn(batch_size, source_length, model.config.d_model, device=args.device)
    mask = torch.ones(batch_size, source_length, dtype=torch.long, device=args.device)
    if args.padded:
        mask[::2, source_length - source_length // 4 :] = 0
    return states.to(getattr(torch, args.dtype)), mask


@torch.no_grad()
def measure(models: dict[str, Any], args: argparse.Namespace, batch_size: int, source_length: int) -> list[dict]:
    """Return a row for each model at one batch size and source length, with ratios to the first model."""
    states, mask = make_source(next(iter(models.values())), args, batch_size, source_length)
    parts = {
        name: measure_kv_cache(decode(model, states, mask, args)[0], model, args) for name, model in models.items()
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    usages: dict[str, list[Usage]] = {name: [] for name in models}
    for repeat in range(args.repeats):
        # The models take turns, and each round starts with another model, so that other load affects all of them.
        for name in rotate_names(list(models), repeat):
            with UsageRecorder() as watch:
                times[name].append(decode(models[name], states, mask, args)[1:])
            usages[name].append(watch.usage)
    first_model = next(iter(models.values()))
    encoder = None if args.skip_encoder else measure_encoder_seconds(first_model, batch_size, source_length, args)
    bandwidth, arithmetic = (
        measure_read_bandwidth(args.device),
        measure_arithmetic_rate(args.device, getattr(torch, args.dtype)),
    )
    rows: list[dict[str, Any]] = []
    for name, model in models.items():
        first, total = (statistics.median(column) for column in zip(*times[name], strict=True))
        step = statistics.median((end - start) / (args.max_new_tokens - 1) for start, end in times[name])
        config = model.config
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        row = {
            "model": name,
            "num_key_value_heads": kv_heads,
            "cross_kv_lora_rank": getattr(config, "cross_kv_lora_rank", None),
            "batch_size": batch_size,
            "source_length": source_length,
            "decode_seconds": total,
            "decode_seconds_all": [end for _, end in times[name]],
            "tokens_per_second": batch_size * args.max_new_tokens / total,
            "first_token_seconds": first,
            "step_milliseconds": step * 1e3,
            "encoder_seconds": encoder,
            "memory_bytes_per_second": bandwidth,
            "flops_per_second": arithmetic,
            **parts[name],
            "usage": summarize_usages(usages[name]),
        }
        upstream = rows[0] if rows else row
        row["speedup"] = upstream["decode_seconds"] / total
        row["step_speedup"] = upstream["step_milliseconds"] / row["step_milliseconds"]
        row["cache_bytes_ratio"] = row["cache_bytes"] / upstream["cache_bytes"]
        limit = row["cross_attention_bytes_read"] / bandwidth * 1e3
        row["cross_attention_over_memory_limit"] = row["cross_attention_milliseconds"] / limit
        limit = row["cross_attention_flops"] / arithmetic * 1e3
        row["cross_attention_over_arithmetic_limit"] = row["cross_attention_milliseconds"] / limit
        rows.append(row)
        print(format_row(row), flush=True)
    return rows


def decode(model: Any, states: torch.Tensor, mask: torch.Tensor, args: argparse.Namespace) -> tuple[Any, float, float]:
    """Generate from encoder outputs, and return the cache, the seconds to the first token and the total seconds."""
    first = FirstTokenTimer(args.device)
    synchronize(args.device)
    start = time.perf_counter()
    result = model.generate(
        encoder_outputs=BaseModelOutput(last_hidden_state=states),
        attention_mask=mask,
        max_new_tokens=args.max_new_tokens,
        num_beams=args.num_beams,
        do_sample=False,
        return_dict_in_generate=True,
        stopping_criteria=StoppingCriteriaList([first]),
        **({"cache_implementation": "static"} if args.cache == "static" else {}),
    )
    synchronize(args.device)
    return get_cache(result), first.time - start, time.perf_counter() - start


def measure_kv_cache(caches: Any, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the size of a cache in bytes, and the time that the cross-attention of all layers takes in one step.

    The layers run one after another, so each layer reads its keys and values from memory and not from the processor's
    cache. A decoding step with a large key/value cache does the same.
    """
    layers = caches.cross_attention_cache.layers
    (memories, _, length, width), config = layers[0].keys.shape, model.config
    tensor_options = {"dtype": layers[0].keys.dtype, "device": layers[0].keys.device}
    modules = [module for name, module in model.named_modules() if name.endswith(CROSS_ATTENTION_NAMES)]
    heads = config.num_attention_heads
    head_dim = getattr(config, "d_kv", config.d_model // heads)
    query = torch.randn(memories * args.num_beams, heads, 1, head_dim, **tensor_options)
    # Transformers repeats the encoder keys and values for each beam, and its T5 adds a position bias of zeros.
    is_upstream = not hasattr(config, "talking_heads")
    query = query[:memories] if is_upstream else query
    bias = (
        {"position_bias": torch.zeros(1, heads, 1, length, **tensor_options)}
        if is_upstream and args.shape not in MARIANS
        else {}
    )
    attend = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    has_latent = getattr(config, "cross_kv_lora_rank", None) is not None
    # The logits and the weighted sums. With a latent, the queries and outputs are projected as well.
    flops = 4 * query[..., 0].numel() * (length * width + (width * head_dim if has_latent else 0))

    def step() -> None:
        for number, module in enumerate(modules):
            if has_latent:
                maps, layer = get_key_value_projections(module), layers[0]
                attend_to_latent(module, query, layer.keys, None, maps, layer, scaling=1.0, dropout=0.0)
            else:
                layer = layers[number]
                attend(module, query, layer.keys, layer.values, None, scaling=1.0, **bias)

    step()
    times = [measure_seconds(step, args.device) for _ in range(9)]
    sizes = [compute_cache_size(part) for part in (caches.self_attention_cache, caches.cross_attention_cache)]
    # Every layer reads the same latent.
    read = sizes[1] * len(modules) if has_latent else sizes[1]
    return {
        "cache_bytes": sum(sizes),
        "cross_cache_bytes": sizes[1],
        "cross_attention_bytes_read": read,
        "cross_attention_flops": flops * len(modules),
        "cross_attention_milliseconds": statistics.median(times) * 1e3,
    }


def get_key_value_projections(module: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the key and value projections of a cross-attention module."""
    return (module.k, module.v) if hasattr(module, "k") else (module.k_proj, module.v_proj)


def compute_cache_size(cache: Any) -> int:
    """Return the bytes of the keys and values in a cache, including those that were expanded from latents."""
    expanded_tensors = [
        expanded for layer in cache.layers for expanded in vars(layer).get(EXPANDED_LATENTS, {}).values()
    ]
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    tensors += [tensor for _, *pair, _ in expanded_tensors for tensor in pair]
    # A latent that all layers share is stored only once.
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def measure_encoder_seconds(model: Any, batch_size: int, source_length: int, args: argparse.Namespace) -> float:
    """Return the seconds of one forward pass of a model's encoder."""
    ids = torch.randint(2, model.config.vocab_size, (batch_size, source_length), device=args.device)
    return measure_seconds(lambda: model.get_encoder()(input_ids=ids), args.device)


def rotate_names(names: list[str], count: int) -> list[str]:
    return names[count % len(names) :] + names[: count % len(names)]


def format_row(row: dict[str, Any]) -> str:
    return (
        f"batch {row['batch_size']:3d} source {row['source_length']:4d} {row['model']:12s} "
        f"{row['tokens_per_second']:8.1f} tokens/s {row['speedup']:5.2f}x | "
        f"first {row['first_token_seconds']:6.3f} s | "
        f"step {row['step_milliseconds']:7.2f} ms {row['step_speedup']:5.2f}x | "
        f"{format_usage(row['usage'])} | "
        f"cache {row['cache_bytes'] / 2**20:7.1f} MiB {row['cache_bytes_ratio']:.4f} | "
        f"cross-attention {row['cross_attention_milliseconds']:7.2f} ms, "
        f"{row['cross_attention_over_memory_limit']:.1f}x its reading, "
        f"{row['cross_attention_over_arithmetic_limit']:.1f}x its arithmetic"
    )


def is_same_setting(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two rows have the same model, batch size and source length."""
    return all(row[name] == other[name] for name in ("model", "batch_size", "source_length"))


def save_plot(results: dict[str, Any], path: Path, args: argparse.Namespace) -> None:
    """Plot tokens per second against the bytes of the cache, with a panel per batch size and source length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    kept_rows = (results.get("kept") or {"rows": []})["rows"]
    sizes = sorted({(row["batch_size"], row["source_length"]) for row in results["rows"]})
    columns = min(3, len(sizes))
    lines = -(-len(sizes) // columns)
    figure, panels = plt.subplots(
        lines, columns, figsize=(1 + 5 * columns, 4.5 * lines), layout="constrained", squeeze=False
    )
    for axes in panels.flat[len(sizes) :]:
        axes.remove()
    for axes, at in zip(panels.flat, sizes, strict=False):
        caches = [row["cache_bytes"] for row in results["rows"] if (row["batch_size"], row["source_length"]) == at]
        middle = math.sqrt(min(caches) * max(caches))
        for row in results["rows"]:
            if (row["batch_size"], row["source_length"]) == at:
                name, latent = row["model"], row["cross_kv_lora_rank"] is not None
                style = {"color": "k", "marker": "x"} if name == UPSTREAM else {"color": "C1" if latent else "C0"}
                point = (row["cache_bytes"] / 2**20, row["tokens_per_second"])
                axes.scatter(*point, **style)
                matching_rows = [other for other in kept_rows if is_same_setting(row, other)]
                axes.scatter(
                    [point[0]] * len(matching_rows),
                    [other["tokens_per_second"] for other in matching_rows],
                    s=12,
                    color="C2",
                )
                # To stay inside the panel, names of large caches are left of their points. Names of Transformers and
                # of latents are below them.
                place = (-6 if row["cache_bytes"] > middle else 6, -12 if latent or name == UPSTREAM else 5)
                side = "right" if place[0] < 0 else "left"
                axes.annotate(name, point, xytext=place, textcoords="offset points", fontsize=8, ha=side)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.2)
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])  # space for the highest name
        axes.set_xlabel("key/value cache, MiB")
        axes.set_title(f"batch {at[0]}, source {at[1]}")
        axes.grid(alpha=0.3)
    for line in panels:
        line[0].set_ylabel("tokens / s")
    search = "greedy" if args.num_beams == 1 else f"{args.num_beams} beams"
    device = results["machine"]["device"]
    device = f"CPU, {results['machine']['threads']} threads" if device == "cpu" else device
    title = [f"{args.shape}, {args.max_new_tokens} new tokens, {search}", f"{args.dtype}, {device}"]
    title += ["small green dots: fixed allocator setting"] if kept_rows else []
    figure.suptitle("\n".join(title) if len(sizes) == 1 else ", ".join(title), fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    run(main, parse_args, lambda report, path, args: save_plot(report, path.with_suffix(".png"), args))
