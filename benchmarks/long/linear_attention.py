"""Compare linear attention with torch's fused softmax in one run: time, memory, decoding steps, and random estimates.

The contestants take turns within each round, and each time is the median over rounds. The inputs are queries, keys and
values (12 heads of 64, batch 1), and the call computes the features. Memory is the additional peak memory of a call,
in one process per measurement on a CPU. A decoding step processes one token of 12 heads after other tokens: the
softmax reads their keys and values, and a kernel reads its sums. "Estimates" are the errors of favor and rfa on unit
vectors, by the number of random vectors. "Models" is one pass of a BERT-base with random weights and batch 1: kernels
in all layers, kernels in all layers except two (`--kept`), and Transformers.

Example:
    python -m benchmarks.long.linear_attention --num_threads 2
    python -m benchmarks.long.linear_attention --parts estimates --output_dir estimates
    python -m benchmarks.long.linear_attention --parts models --peers elu hedgehog --lengths 512 2048 \\
        --output_dir models
    python -m benchmarks.long.linear_attention --parts attention --peers sdpa hedgehog hybrid linformer \\
        --output_dir others
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import BertConfig, BertModel

from benchmarks.kept_memory import NOT_SHOWN, add_memory_argument, run
from benchmarks.long.sliding_window import HEAD_DIM, HEADS, LENGTHS, MODES, compute_growth_exponent
from benchmarks.machine import describe_machine
from benchmarks.page_faults import describe_memory
from benchmarks.speed.talking_heads_memory import measure_cpu_memory, measure_cuda_memory
from benchmarks.speed.talking_heads_peers import (
    make_inputs,
    make_kernel_module,
    make_peers,
    make_step,
    measure_interleaved,
)
from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertModel
from hf_attn_variants.files import atomic_write
from hf_attn_variants.modeling.attention.mechanism_attention import attend_with_kernel
from hf_attn_variants.modeling.mechanisms.kernels.attention_kernel import init_kernel
from hf_attn_variants.modeling.mechanisms.kernels.kernel_table import KERNELS
from hf_attn_variants.modeling.ops.softmax_attention import fused_attention
from hf_attn_variants.reference.linear import favor_features

PARTS = ("attention", "causal", "memory", "steps", "estimates", "models")
# The names of parts in the report, if they differ from the names in `PARTS`.
REPORTED = {"memory": "peak_memory"}
PEERS = ["sdpa", "elu", "hedgehog", "favor", "rfa"]
# These peers are only measured on request. The hybrid has a window of 64, and linformer is only for encoders.
OTHERS = ["hybrid", "linformer"]
VECTORS = (32, 64, 128, 256, 512, 1024)
DRAWS = 20
# The targets by length: the forward speed of hedgehog relative to the fused softmax.
GOALS = {512: 1.0, 4096: 5.0}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--peers", nargs="+", choices=[*PEERS, *OTHERS], default=PEERS)
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--kept", type=int, nargs="+", default=[1, 2], help="softmax layers in the models part")
    parser.add_argument("--num_layers", type=int, default=12, help="number of layers in the models part")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--num_threads", type=int, default=2, help="number of CPU threads")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    add_memory_argument(parser)
    return parser.parse_args(arguments)


def measure_attention(length: int, option: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a softmax and of kernels: {"forward" | "training": {peer: ms}}."""
    inputs = make_inputs((1, args.heads, length, HEAD_DIM), option, args.device, getattr(torch, args.dtype))
    names = [name for name in args.peers if not (option == "causal" and name == "linformer")]
    peers, row = make_peers(args.device, names), {"length": length, "usage": {}}
    for mode in MODES:
        steps = {name: make_step(attend, inputs, mode == "training") for name, attend in peers.items()}
        row[mode], row["usage"][mode] = measure_interleaved(steps, args.device, args.rounds)
    return row


@torch.no_grad()
def measure_steps(length: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of one token after `length` others, and the bytes of the cache: {peer: ...}."""
    dtype = getattr(torch, args.dtype)

    def states(count: int) -> list[torch.Tensor]:
        return [torch.randn(1, args.heads, count, HEAD_DIM, device=args.device, dtype=dtype) for _ in range(3)]

    (_, keys, values), token, scaling = states(length), states(1), HEAD_DIM**-0.5
    steps, stored_bytes = {}, {}
    for name in args.peers:
        if name == "linformer":
            continue
        if name == "sdpa":
            stored_bytes[name] = keys.nbytes + values.nbytes
            steps[name] = lambda: fused_attention(token[0], keys, values, scaling=scaling)
            continue
        module = make_kernel_module(name, args.heads, HEAD_DIM, is_causal=True).to(args.device, dtype)
        _, state = attend_with_kernel(module, keys, keys, values, None, scaling)
        stored_bytes[name] = sum(tensor.nbytes for tensor in state if tensor is not None)
        steps[name] = lambda module=module, state=state: attend_with_kernel(module, *token, None, scaling, state)
    times, usage = measure_interleaved(steps, args.device, args.rounds)
    return {"length": length, "step": times, "bytes": stored_bytes, "usage": {"step": usage}}


@torch.no_grad()
def measure_models(length: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of one pass of whole encoders: {contestant: ms}."""
    shape = {"num_attention_heads": args.heads, "hidden_size": args.heads * HEAD_DIM}
    shape |= {"intermediate_size": 4 * args.heads * HEAD_DIM, "num_hidden_layers": args.num_layers}
    shape |= {"max_position_embeddings": length}
    models = {"upstream": BertModel(BertConfig(**shape))}
    for name in (peer for peer in args.peers if peer in KERNELS and peer not in OTHERS):
        layers = [None if layer in args.kept else name for layer in range(args.num_layers)]
        layer_fields = {"per_layer_values": {"attention_kernel": layers}}
        fields_by_name = {
            name: {"attention_kernel": name},
            f"{name} in {args.num_layers - len(args.kept)} layers": layer_fields,
        }
        for title, fields in fields_by_name.items():
            models[title] = AttnVariantBertModel(AttnVariantBertConfig(**shape, **fields))
    tokens = torch.randint(1000, (1, length), device=args.device)
    models = {name: model.eval().to(args.device, getattr(torch, args.dtype)) for name, model in models.items()}
    steps = {name: torch.no_grad()(lambda model=model: model(tokens)) for name, model in models.items()}
    times, usage = measure_interleaved(steps, args.device, args.rounds)
    return {"length": length, "pass": times, "usage": {"pass": usage}}


@torch.no_grad()
def measure_estimates(head_dim: int = HEAD_DIM, count: int = 64) -> list[dict[str, Any]]:
    """Return the relative errors of estimates of exp(q k) for unit vectors, one row per number of random vectors.

    rfa estimates exp(q k - 1). The errors are root mean squares, over pairs and draws, of the difference divided by
    the exact value.
    """
    query, key = (torch.nn.functional.normalize(torch.randn(1, 1, count, head_dim), dim=-1) for _ in range(2))
    exact, rows = (query @ key.mT).exp(), []
    for vectors in VECTORS:
        row: dict[str, Any] = {"vectors": vectors}
        for name in ("favor", "rfa"):
            module, errors = make_kernel_module(name, 1, head_dim, False, vectors), []
            for seed in range(DRAWS):
                module.kernel = replace(module.kernel, seed=seed)
                errors.append(_estimate(module, query, key) / exact * (torch.e if name == "rfa" else 1.0) - 1)
            row[name] = torch.stack(errors).square().mean().sqrt().item()
        rows.append(row)
    return rows


def _estimate(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return phi(q) phi(k) as defined by the formulas, with random vectors from the seed of the module."""
    init_kernel(module)
    if module.kernel.name == "favor":  # the package omits factors that the normalization cancels
        return favor_features(query, module.kernel_vectors) @ favor_features(key, module.kernel_vectors).mT
    queries, (keys, _) = (
        module.kernel.compute_query_features(module, query, 1.0),
        module.kernel.compute_key_features(module, key, None, 1.0),
    )
    return queries @ keys.mT


def list_targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets and the measured values for the measured lengths."""
    target_rows = []
    for row in report["attention"]:
        goal = GOALS.get(row["length"])
        if goal is not None and {"sdpa", "hedgehog"} <= row["forward"].keys():
            ratio = row["forward"]["sdpa"] / row["forward"]["hedgehog"]
            target_rows.append({"what": f"times softmax's speed, hedgehog, {row['length']} tokens", "least": goal})
            target_rows[-1] |= {"measured": ratio, "met": ratio >= goal}
    return target_rows


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all parts, write the JSON file after each length, print the figures, and return the report."""
    torch.manual_seed(0)
    torch.set_num_threads(args.num_threads)
    arguments = {name: str(value) for name, value in vars(args).items() if name not in NOT_SHOWN}
    report = {
        "arguments": arguments,
        "machine": describe_machine(args.device),
        "heads": args.heads,
        "memory": describe_memory(),
    }
    report |= {REPORTED.get(part, part): [] for part in PARTS}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / f"linear_attention_{args.device}.json"
    if "memory" in args.parts and args.memory != "kept":  # a fixed allocator setting hides peaks
        on_cpu = args.device == "cpu"
        peers = args.peers if on_cpu else make_peers(args.device, args.peers)
        other_settings = (args.dtype, args.num_threads) if on_cpu else (args.dtype,)
        report["peak_memory"] = (measure_cpu_memory if on_cpu else measure_cuda_memory)(
            peers, args.heads, HEAD_DIM, args.lengths, *other_settings
        )
    if "estimates" in args.parts:
        report["estimates"] = measure_estimates()
    for length in tqdm(args.lengths, desc="lengths"):
        for part, option in (("attention", "plain"), ("causal", "causal")):
            if part in args.parts:
                report[part].append(measure_attention(length, option, args))
        if "steps" in args.parts:
            report["steps"].append(measure_steps(length, args))
        if "models" in args.parts:
            report["models"].append(measure_models(length, args))
        atomic_write(path, json.dumps(report, indent=1) + "\n")
    report["growth"] = {
        f"{peer}, {mode}": compute_growth_exponent(report["attention"], mode, peer)
        for peer in args.peers
        for mode in MODES
    }
    report["targets"] = list_targets(report)
    atomic_write(path, json.dumps(report, indent=1) + "\n")
    for part in PARTS:
        for row in report[REPORTED.get(part, part)]:
            print(part, json.dumps(row))
    for target in report["targets"]:
        print(
            f"{target['what']}: {target['measured']:.2f} (at least {target['least']}: "
            f"{'met' if target['met'] else 'NOT met'})"
        )
    print(f"time grows with the length to the power of: {report['growth']}\nwrote {path}")
    return report


if __name__ == "__main__":
    run(main, parse_args)
