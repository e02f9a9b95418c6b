"""Compare the talking-heads kernels with torch's fused attention (which does not mix heads) and the compiled formula.

The sizes are BERT-base's 12 heads of 64 and about 16,384 tokens per call. The targets are at most three times the time
of fused attention, five times the speed of the compiled formula, and memory that is linear in the length.
"""

import argparse
from typing import Any

import torch

from benchmarks.gpu.cells import Cells, main
from benchmarks.gpu.peers import MODES, measure_memory_row, time_side_by_side
from benchmarks.speed.talking_heads_peers import make_inputs, make_peers, make_step

LENGTHS = (2048, 512, 8192, 1024, 4096, 16384)
TOKENS = 16384
HEADS, HEAD_DIM = 12, 64
PEERS = ["sdpa", "triton", "compiled", "naive", "blocked"]
# The compiler takes up to half a minute per peer and length.
COMPILED_LENGTHS = (2048, 512, 8192)
MAX_FUSED_RATIO, MIN_COMPILED_RATIO = 3.0, 5.0


def make_cells(args: argparse.Namespace) -> Cells:
    """Return the cells: times by length, memory by length, then causal calls, dropout, a bias and float16."""
    lengths = (64, 32) if args.tiny else LENGTHS
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    cells: Cells = {}
    for n in lengths:
        cells[f"{n}, plain"] = lambda n=n: measure_times(n, "plain", dtype, args)
    for n in lengths:
        cells[f"{n}, memory"] = lambda n=n: measure_memory(n, dtype, args)
    for n, option in [(lengths[0], "causal"), (lengths[0], "dropout"), (lengths[1], "bias")]:
        cells[f"{n}, {option}"] = lambda n=n, option=option: measure_times(n, option, dtype, args)
    if args.device == "cuda":
        cells[f"{lengths[0]}, float16"] = lambda: measure_times(lengths[0], "plain", "float16", args)
    return cells


def select_peers(n: int, device: str, tiny: bool) -> dict[str, Any]:
    """Return the peers that are compared at a length."""
    return make_peers(device, [name for name in PEERS if name != "compiled" or n in COMPILED_LENGTHS or tiny])


def measure_times(n: int, option: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of each peer, the ratios of ours to the others, and whether the targets are met."""
    heads, head_dim = (2, 8) if args.tiny else (HEADS, HEAD_DIM)
    shape = (max(1, (2 * n if args.tiny else TOKENS) // n), heads, n, head_dim)
    inputs = make_inputs(shape, option, args.device, getattr(torch, dtype))
    peers = select_peers(n, args.device, args.tiny)
    row = time_side_by_side(lambda attend, training: make_step(attend, inputs, training), peers, args.device)
    row |= {"shape": list(shape), "option": option, "dtype": dtype, "ratios": {}}
    own_peer = "triton" if args.device == "cuda" else "blocked"
    for mode in MODES:
        milliseconds = row[mode].get(own_peer)
        for peer in ("sdpa", "compiled"):
            if milliseconds and row[mode].get(peer):
                row["ratios"][f"{mode}, {peer}"] = milliseconds / row[mode][peer]
    if args.device == "cuda" and option == "plain":
        fused = [ratio for name, ratio in row["ratios"].items() if name.endswith("sdpa")]
        compiled = [ratio for name, ratio in row["ratios"].items() if name.endswith("compiled")]
        reached = len(fused) == len(MODES) and max(fused) <= MAX_FUSED_RATIO
        row["met"] = reached and all(ratio <= 1 / MIN_COMPILED_RATIO for ratio in compiled)
    return row


def measure_memory(n: int, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the additional peak MiB of a call with one sequence."""
    names = ["sdpa", "triton", "naive", "blocked"]
    heads, head_dim = (2, 8) if args.tiny else (HEADS, HEAD_DIM)
    return measure_memory_row(make_peers(args.device, names), heads, head_dim, n, dtype, args.device)


if __name__ == "__main__":
    main(make_cells)
