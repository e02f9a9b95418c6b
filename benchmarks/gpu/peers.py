"""Measure the time and memory of attention functions. A function that fails does not affect the others."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.speed.talking_heads_memory import measure_cpu_memory, measure_cuda_memory
from benchmarks.speed.talking_heads_peers import measure_interleaved

MODES = ("forward", "training")


def time_side_by_side(
    make_step: Callable[[Any, bool], Callable[[], None]], peers: dict[str, Any], device: str
) -> dict:
    """Return the median milliseconds: {"forward" | "training": {peer: ms}, "failures": {mode: {peer: error}}}.

    Args:
        make_step: A function from a peer, and whether to run the backward pass, to one step.
        peers: The peers, {name: peer}. A peer that fails has its error in "failures" and no time.
        device: The device of the calls.
    """
    row: dict[str, Any] = {"failures": {}, "usage": {}}
    for mode in MODES:
        steps = {}
        for name, peer in peers.items():
            try:
                step = make_step(peer, mode == "training")
                step()
                if device == "cuda":
                    torch.cuda.synchronize()
                steps[name] = step
            except Exception as error:
                if "CUDA error" in str(error):
                    raise
                row["failures"].setdefault(mode, {})[name] = f"{type(error).__name__}: {error}"[:500]
        row[mode], row["usage"][mode] = measure_interleaved(steps, device, rounds=1 if device == "cpu" else 5)
    return row


def measure_memory_row(
    peers: dict[str, Any], heads: int, head_dim: int, length: int, dtype: str, device: str
) -> dict[str, Any]:
    """Return the additional peak MiB of a call, {mode: {peer: MiB}} (see `talking_heads_memory`)."""
    if device == "cpu":
        return measure_cpu_memory(list(peers), heads, head_dim, [length], dtype, 1)[0]
    return measure_cuda_memory(peers, heads, head_dim, [length], dtype)[0]
