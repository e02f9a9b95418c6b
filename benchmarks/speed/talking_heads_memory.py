"""Measure the peak memory that one attention call adds, for `talking_heads.py` and `sliding_window.py`.

On a CPU, each measurement runs in its own process and is the growth of the peak resident size. Because importing torch
takes seconds, these processes are forked from one that has not started threads or allocated large blocks. On CUDA, the
allocator reports the peak.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.speed.talking_heads_peers import make_inputs, make_peers, make_step

ROOT = Path(__file__).resolve().parents[2]
MODES = ("forward", "training")
# Lengths at which a warm-up takes the same path as the measurement. The memory of the warm-up is not counted.
WARM_UP_LENGTHS = {"window": 1024}


def measure_cpu_memory(
    peers: list[str], heads: int, head_dim: int, lengths: list[int], dtype: str, threads: int
) -> list[dict]:
    """Measure every peer and mode with one sequence of each length on a CPU.

    Returns:
        A row for each length: {"shape": [1, heads, n, head_dim], "forward": {peer: MiB}, "training": {peer: MiB}}.

    Raises:
        RuntimeError: if a measurement failed (its message is on stderr).
    """
    points = [
        {"shape": [1, heads, length, head_dim], "mode": mode, "peer": peer}
        for length in lengths
        for mode in MODES
        for peer in peers
    ]
    job = {"points": points, "dtype": dtype, "threads": threads}
    command = [sys.executable, "-m", "benchmarks.speed.talking_heads_memory", json.dumps(job)]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        raise RuntimeError("A memory measurement failed, see its message above.")
    rows = {length: {"shape": [1, heads, length, head_dim], **{mode: {} for mode in MODES}} for length in lengths}
    for point in map(json.loads, run.stdout.splitlines()):
        rows[point["shape"][2]][point["mode"]][point["peer"]] = point["mib"]
    return list(rows.values())


def measure_cuda_memory(
    peers: dict[str, Callable], heads: int, head_dim: int, lengths: list[int], dtype: str
) -> list[dict]:
    """Measure the same on CUDA, with None if a peer ran out of memory."""
    rows = []
    for length in lengths:
        shape = (1, heads, length, head_dim)
        row = {
            mode: {peer: _measure_cuda_peak(attend, shape, mode, dtype) for peer, attend in peers.items()}
            for mode in MODES
        }
        rows.append({"shape": list(shape), **row})
    return rows


def _measure_cuda_peak(attend: Callable, shape: tuple[int, int, int, int], mode: str, dtype: str) -> float | None:
    try:
        step = make_step(attend, make_inputs(shape, "plain", "cuda", getattr(torch, dtype)), mode == "training")
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def _measure_here(point: dict, dtype: torch.dtype, threads: int) -> float:
    torch.set_num_threads(threads)
    attend = make_peers("cpu", [point["peer"]])[point["peer"]]
    batch, heads, length, head_dim = point["shape"]
    training = point["mode"] == "training"
    step = make_step(attend, make_inputs((batch, heads, length, head_dim), "plain", "cpu", dtype), training)
    _warm_up(point["peer"], dtype, training)  # starts the threads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def _warm_up(peer: str, dtype: torch.dtype, training: bool) -> None:
    inputs = make_inputs((1, 2, WARM_UP_LENGTHS.get(peer, 32), 16), "plain", "cpu", dtype)
    make_step(make_peers("cpu", [peer])[peer], inputs, training)()


def _run_job(job: dict) -> None:
    torch.set_num_threads(1)  # threads would not survive the fork
    for peer in dict.fromkeys(point["peer"] for point in job["points"]):
        _warm_up(peer, getattr(torch, job["dtype"]), training=True)
    for point in job["points"]:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                mib = _measure_here(point, getattr(torch, job["dtype"]), job["threads"])
                print(json.dumps(point | {"mib": round(mib, 2)}), flush=True)
                status = 0
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"error: cannot measure the memory of {point}")


if __name__ == "__main__":
    _run_job(json.loads(sys.argv[1]))
