"""Compare launch settings of the talking-heads kernels (block, warps and workspace), and split up their time.

The sizes are BERT-base's 12 heads of 64 and about 16,384 tokens per call, as in `kernel_speed`. Each cell times
`triton_forward` and `triton_backward` with one changed setting, alternating with the default. "Launching" is the time
that Python needs to launch the kernels. If it exceeds the time of the device, the device waits.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.cells import Cells, main
from benchmarks.speed.talking_heads_peers import measure_interleaved
from hf_attn_variants.modeling.ops import triton_attention
from hf_attn_variants.modeling.ops.blocked_attention import AttentionOperands

HEADS, HEAD_DIM, TOKENS = 12, 64, 16384
LENGTHS = (2048, 512, 8192)
WORKSPACES = [2**20 * size for size in (64, 512)]
# Block, warps and stages. The forward pass has rows in several blocks, with and without zeros beyond the row.
FORWARD = [(256, 4, 2), (256, 4, 3), (256, 4, 4), (128, 4, 3), (128, 2, 3), (64, 1, 3), (512, 8, 3)]
BACKWARD = [(64, 1, 3), (64, 1, 2), (64, 2, 3), (128, 4, 2), (128, 4, 3), (32, 1, 3), (64, 1, 4)]
FEW_ROUNDS = 3  # the number of these choices at the other lengths


def make_cells(args: argparse.Namespace) -> Cells:
    """Return the cells: the time of each kernel by length, then one cell per workspace and one per launch."""
    if not triton_attention.supports_device(torch.empty(0, device=args.device).device):
        return {"kernels": lambda: {"reason": f"The kernels do not support this device: {args.device}"}}
    cells: Cells = {}
    for n in LENGTHS:
        cells[f"{n}, parts"] = lambda n=n: measure_parts(n, args)
    for n in LENGTHS:
        for size in WORKSPACES:
            cells[f"{n}, workspace {size >> 20} MiB"] = lambda n=n, size=size: compare_settings(
                n, args, WORKSPACE_BYTES=size
            )
        few_rounds = None if n == LENGTHS[0] else FEW_ROUNDS
        for choice in FORWARD[:few_rounds]:
            for zeroed in (False, True):
                settings = make_launch_settings(choice) | {"ONE_BLOCK": False, "ZEROED": zeroed}
                name = f"{n}, forward {choice}{', zeroed' * zeroed}"
                cells[name] = lambda n=n, settings=settings: compare_settings(
                    n, args, _choose_forward_settings=lambda _: settings
                )
        for choice in BACKWARD[:few_rounds]:
            settings = make_launch_settings(choice)
            cells[f"{n}, backward {choice}"] = lambda n=n, settings=settings: compare_settings(
                n, args, _choose_backward_settings=lambda _: settings
            )
    return cells


def make_launch_settings(choice: tuple[int, int, int]) -> dict[str, Any]:
    """Return the launch settings for a block size and numbers of warps and stages."""
    return dict(zip(("BLOCK", "num_warps", "num_stages"), choice, strict=True))


def make_passes(n: int, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return functions for the forward and the backward pass of a call with a given length."""
    length, heads, dtype = (64, 2, torch.float32) if args.tiny else (n, HEADS, torch.bfloat16)
    shape = (max(1, (2 * length if args.tiny else TOKENS) // length), heads, length, HEAD_DIM)
    states = [torch.randn(shape, device=args.device, dtype=dtype) for _ in range(3)]
    mixes = [torch.eye(heads, device=args.device) + 0.1 * torch.randn(heads, heads, device=args.device) for _ in "lw"]
    operands = AttentionOperands(*states, None, None, *mixes, None, HEAD_DIM**-0.5, False, 0.0, None)
    output, statistics = triton_attention.triton_forward(operands)
    direction = torch.randn_like(output)
    return {
        "forward": lambda: triton_attention.triton_forward(operands),
        "backward": lambda: triton_attention.triton_backward(direction, statistics, False, operands),
    }


@contextmanager
def change_settings(**choices: Any) -> Iterator[None]:
    """Change launch settings of the kernels within the `with` block."""
    original_values = {name: getattr(triton_attention, name) for name in choices}
    try:
        for name, value in choices.items():
            setattr(triton_attention, name, value)
        yield
    finally:
        for name, value in original_values.items():
            setattr(triton_attention, name, value)


def compare_settings(n: int, args: argparse.Namespace, **choices: Any) -> dict[str, Any]:
    """Return the milliseconds of both passes with the default and the changed settings, which take turns."""
    steps = {}
    for name, step in make_passes(n, args).items():

        def other(step: Callable[[], Any] = step) -> None:
            with change_settings(**choices):
                step()

        steps |= {name: step, f"{name}, changed": other}
    return {"milliseconds": measure_interleaved(steps, args.device, rounds=1 if args.tiny else 3)[0]}


def measure_parts(n: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the device's microseconds per kernel and Python's milliseconds to launch them, for each pass."""
    row: dict[str, Any] = {}
    on_cuda = args.device == "cuda"
    activity = torch.profiler.ProfilerActivity
    for name, step in make_passes(n, args).items():
        step()
        wait = torch.cuda.synchronize if on_cuda else lambda: None
        wait()
        start = time.perf_counter()
        step()
        launching = time.perf_counter() - start
        wait()
        with torch.profiler.profile(activities=[activity.CUDA] if on_cuda else [activity.CPU]) as profile:
            step()
            wait()
        kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.device_time_total)[:8]
        row[name] = {"launching_milliseconds": 1e3 * launching}
        row[name]["kernels"] = {
            kernel.key[:90]: {"microseconds": kernel.device_time_total, "calls": kernel.count} for kernel in kernels
        }
    return row


if __name__ == "__main__":
    main(make_cells)
