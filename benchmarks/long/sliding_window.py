"""Compare attention in windows with torch's fused full attention and Transformers' Longformer layer, in one run.

The contestants take turns within each round, and each time is the median over rounds. The inputs are queries, keys and
values (12 heads of 64, batch 1, a window of 128 on each side and 1 global token). The script also measures whole
layers of BERT-base, and compares their self-attention (with projections) with that of Longformer, which has more
projections for global tokens. Memory is the additional peak memory of a call, in one process per measurement on a CPU.

Example:
    python -m benchmarks.long.sliding_window --num_threads 2
    python -m benchmarks.long.sliding_window --num_threads 2 --parts attention --lengths 4096 --rows 32 64 128 256 \\
        --output_dir rows
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from tqdm import tqdm
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

import hf_attn_variants
from benchmarks.kept_memory import NOT_SHOWN, add_memory_argument, run
from benchmarks.machine import describe_machine
from benchmarks.page_faults import describe_memory
from benchmarks.speed.talking_heads_memory import measure_cpu_memory, measure_cuda_memory
from benchmarks.speed.talking_heads_peers import (
    GLOBAL_TOKENS,
    WINDOW,
    make_inputs,
    make_peers,
    make_step,
    measure_interleaved,
    step_of,
)
from hf_attn_variants.files import atomic_write
from hf_attn_variants.modeling.ops import key_ranges

HEADS, HEAD_DIM = 12, 64
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
MODES = ("forward", "training")
PARTS = ("attention", "layers", "memory")
PEERS = ["sdpa", "window"]
FULL, WINDOWED = "BERT layer", "BERT layer, window"
OURS, LONGFORMER = "self-attention, window", "Longformer's self-attention"
# The targets at 4,096 tokens: the speed relative to full attention (forward and in training), the speed relative to
# Longformer's layer, and the memory relative to full attention.
GOALS = {"forward": 5.0, "training": 4.0, "longformer": 2.0, "memory": 1.5}
GOAL_LENGTH, SHORT_LENGTH = 4096, 1024


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of queries per block to compare")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--num_threads", type=int, default=2, help="number of CPU threads")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden_size", type=int, default=HEADS * HEAD_DIM, help="hidden size of the layers")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    add_memory_argument(parser)
    args = parser.parse_args(arguments)
    if any(length % WINDOW for length in args.lengths) or args.hidden_size % HEAD_DIM:
        parser.error(
            f"--lengths must be multiples of {WINDOW}, which Longformer requires. "
            "--hidden_size must be a multiple of 64."
        )
    return args


def measure_attention(length: int, heads: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of full attention and of windows: {"forward" | "training": {peer: ms}}."""
    inputs = make_inputs((1, heads, length, HEAD_DIM), "plain", args.device, getattr(torch, args.dtype))
    peers, row = make_peers(args.device, PEERS), {"length": length, "usage": {}}
    for mode in MODES:
        steps = {name: make_step(attend, inputs, mode == "training") for name, attend in peers.items()}
        row[mode], row["usage"][mode] = measure_interleaved(steps, args.device, args.rounds)
    return row


def measure_rows(args: argparse.Namespace, heads: int) -> list[dict[str, Any]]:
    """Return the results of `measure_attention` for each number of queries per block."""
    original, results = key_ranges.QUERIES_PER_BLOCK, []
    for rows in args.rows or ():
        key_ranges.QUERIES_PER_BLOCK = (rows,)
        results += [{"rows": rows} | measure_attention(length, heads, args) for length in args.lengths]
    key_ranges.QUERIES_PER_BLOCK = original
    return results


def get_layer_sizes(hidden_size: int) -> dict[str, Any]:
    """Return the fields of a BERT with one layer and no dropout. A hidden size of 768 is that of BERT-base."""
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": hidden_size // HEAD_DIM,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 1,
        "vocab_size": 100,
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
    }


def make_bert_layer(hidden_size: int, **fields: Any) -> nn.Module:
    """Return a layer of this package's BERT with these fields: a function of states [1, n, hidden size]."""
    config = hf_attn_variants.AttnVariantBertConfig(**get_layer_sizes(hidden_size), **fields)
    return hf_attn_variants.AttnVariantBertModel(config, add_pooling_layer=False).encoder.layer[0]


def make_layers(hidden_size: int, length: int) -> dict[str, nn.Module]:
    """Return a dictionary of layers. Each layer is a function of states [1, n, hidden size] without dropout."""
    window = {"attention_pattern": "sliding_window", "attention_window": WINDOW, "num_global_tokens": GLOBAL_TOKENS}
    layers = {FULL: make_bert_layer(hidden_size), WINDOWED: make_bert_layer(hidden_size, **window)}
    layers[OURS] = layers[WINDOWED].attention.self
    config = transformers.LongformerConfig(**get_layer_sizes(hidden_size), attention_window=[WINDOW])
    layers[LONGFORMER] = Longformer(LongformerSelfAttention(config, 0), length)
    return layers


class Longformer(nn.Module):
    """The Longformer layer of Transformers as its model calls it, with the global token first."""

    def __init__(self, layer: nn.Module, length: int) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("mask", torch.zeros(1, length).index_fill(1, torch.arange(GLOBAL_TOKENS), 10000.0))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the outputs for states [1, n, hidden size], in the same shape."""
        return self.layer(
            states,
            attention_mask=self.mask,
            is_index_masked=self.mask < 0,
            is_index_global_attn=self.mask > 0,
            is_global_attn=True,
        )[0]


def measure_layers(length: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of whole layers: {"forward" | "training": {layer: ms}}."""
    dtype, row = getattr(torch, args.dtype), {"length": length, "usage": {}}
    states = torch.randn(1, length, args.hidden_size, device=args.device, dtype=dtype, requires_grad=True)
    layers = {name: module.to(args.device, dtype) for name, module in make_layers(args.hidden_size, length).items()}
    for mode in MODES:
        steps = {name: make_layer_step(layer, states, mode == "training") for name, layer in layers.items()}
        row[mode], row["usage"][mode] = measure_interleaved(steps, args.device, args.rounds)
    return row


def make_layer_step(layer: nn.Module, states: torch.Tensor, training: bool) -> Callable[[], None]:
    """Return a function that calls a layer, with the backward pass for training."""

    def call() -> torch.Tensor:
        output = layer(states)
        return output[0] if isinstance(output, tuple) else output

    return step_of(call, [states, *layer.parameters()], torch.randn_like(states), training)


def compute_growth_exponent(rows: list[dict[str, Any]], mode: str, peer: str) -> float | None:
    """Return the exponent with which time grows with the length (1 is linear), from a line fitted to logarithms."""
    rows = [row for row in rows if row["length"] >= SHORT_LENGTH and row[mode][peer] is not None]
    if len(rows) < 2:
        return None
    logs = torch.tensor([[row["length"], row[mode][peer]] for row in rows], dtype=torch.float64).log()
    centred = logs - logs.mean(0)
    return ((centred[:, 0] * centred[:, 1]).sum() / centred[:, 0].square().sum()).item()


def list_targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets and the measured values for the measured lengths."""
    target_rows = []
    for row in report["attention"]:
        for mode in MODES:
            goal = {GOAL_LENGTH: GOALS[mode], SHORT_LENGTH: 1.0}.get(row["length"])
            if goal is not None:
                ratio = row[mode]["sdpa"] / row[mode]["window"]
                target_rows.append(
                    {"what": f"times full attention's speed, {mode}, {row['length']} tokens", "least": goal}
                )
                target_rows[-1] |= {"measured": ratio, "met": ratio >= goal}
    for row in report["layers"]:
        for mode in MODES if row["length"] == GOAL_LENGTH else ():
            ratio = row[mode][LONGFORMER] / row[mode][OURS]
            target_rows.append({"what": f"times Longformer's speed, {mode}", "least": GOALS["longformer"]})
            target_rows[-1] |= {"measured": ratio, "met": ratio >= GOALS["longformer"]}
    for row in report["peak_memory"]:
        for mode in MODES:
            if row["shape"][2] >= GOAL_LENGTH and row[mode]["sdpa"]:
                ratio = row[mode]["window"] / row[mode]["sdpa"]
                label = f"full attention's memory, {mode}, {row['shape'][2]} tokens"
                target_rows.append(
                    {"what": label, "most": GOALS["memory"], "measured": ratio, "met": ratio <= GOALS["memory"]}
                )
    return target_rows


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all parts, write the JSON file after each length, print the figures, and return the report."""
    torch.manual_seed(0)
    torch.set_num_threads(args.num_threads)
    transformers.logging.set_verbosity_error()
    heads = args.hidden_size // HEAD_DIM
    arguments = {name: str(value) for name, value in vars(args).items() if name not in NOT_SHOWN}
    report = {"arguments": arguments, "machine": describe_machine(args.device), "window": WINDOW, "heads": heads}
    report["memory"] = describe_memory()
    report |= {"attention": [], "layers": [], "peak_memory": [], "rows": []}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / f"sliding_window_{args.device}.json"
    if "memory" in args.parts and not args.rows and args.memory != "kept":  # a fixed setting hides peaks
        measured = measure_cpu_memory if args.device == "cpu" else measure_cuda_memory
        peers = PEERS if args.device == "cpu" else make_peers(args.device, PEERS)
        other_settings = (args.dtype, args.num_threads) if args.device == "cpu" else (args.dtype,)
        report["peak_memory"] = measured(peers, heads, HEAD_DIM, args.lengths, *other_settings)
    report["rows"] = measure_rows(args, heads)
    for length in tqdm([] if args.rows else args.lengths, desc="lengths"):
        if "attention" in args.parts:
            report["attention"].append(measure_attention(length, heads, args))
        if "layers" in args.parts:
            report["layers"].append(measure_layers(length, args))
        atomic_write(path, json.dumps(report, indent=1) + "\n")
    report["growth"] = {
        f"{peer}, {mode}": compute_growth_exponent(report["attention"], mode, peer) for peer in PEERS for mode in MODES
    }
    report["targets"] = list_targets(report)
    atomic_write(path, json.dumps(report, indent=1) + "\n")
    for row in (*report["rows"], *report["attention"], *report["layers"], *report["peak_memory"]):
        print(json.dumps(row))
    for target in report["targets"]:
        bound = f"at least {target['least']}" if "least" in target else f"at most {target['most']}"
        print(f"{target['what']}: {target['measured']:.2f} ({bound}: {'met' if target['met'] else 'NOT met'})")
    print(f"time grows with the length to the power of: {report['growth']}\nwrote {path}")
    return report


if __name__ == "__main__":
    run(main, parse_args)
