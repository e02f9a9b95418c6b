"""Compare kernels for one query per head and a latent, as in decoding: our Triton kernels, torch and the formula.

Multi-head attention to separate keys and values of every head reads 2 h d numbers per token, and attention to a latent
reads r. The sizes are those of cross-attention in T5-base, T5-large and Whisper base. "Reading" is the time that the
device needs to read the latent once.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.cells import Cells, compute_relative_error, main
from benchmarks.machine import measure_read_bandwidth
from hf_attn_variants.modeling.ops import latent_decoding
from hf_attn_variants.modeling.ops.latent_decoding import (
    LaunchSettings,
    attend_to_one_latent,
    choose_launch_settings,
    run_latent_kernels,
)
from hf_attn_variants.modeling.ops.triton_attention import supports_device

HEAD_DIM = 64
LIMITS = {"bfloat16": 1e-2, "float16": 2e-3}


class Case(NamedTuple):
    """The number of latents, the rows that read each latent (heads times beams), the heads, keys and width."""

    memories: int
    rows: int
    heads: int
    keys: int
    width: int


CASES = {
    "t5-base, exact": Case(64, 12, 12, 2048, 768),
    "t5-large, exact": Case(64, 16, 16, 2048, 1024),
    "t5-base, latents": Case(256, 12, 12, 2048, 192),
    "whisper-base, exact": Case(128, 8, 8, 1500, 512),
    "t5-base, exact, 4 beams": Case(64, 48, 12, 2048, 768),
    "t5-base, exact, one text": Case(1, 12, 12, 2048, 768),
}
BLOCKS = [(32, 16, 4, 2), (32, 16, 8, 2), (32, 16, 4, 3), (64, 16, 4, 2), (64, 16, 8, 2), (16, 16, 4, 3)]
PROGRAMS = (264, 528, 1056)
TRUTH = {
    "plain": (Case(3, 12, 12, 701, 768), None),
    "padding": (Case(3, 12, 12, 701, 768), "padding"),
    "added": (Case(2, 16, 16, 300, 1024), "added"),
    "beams, padding": (Case(2, 48, 12, 2048, 768), "padding"),
    "narrow": (Case(5, 8, 8, 1500, 96), "padding"),
    "one text": (Case(1, 12, 12, 4099, 192), None),
}


def make_cells(args: argparse.Namespace) -> Cells:
    """Return the cells: the errors by case and number format, then the times by case."""
    if not supports_device(torch.empty(0, device=args.device).device):
        return {"kernels": lambda: {"reason": f"The kernels do not support this device: {args.device}"}}
    cells: Cells = {}
    for name, (case, mask) in TRUTH.items():
        for dtype in LIMITS if args.device == "cuda" else ("float16",):
            cells[f"truth, {name}, {dtype}"] = lambda case=case, mask=mask, dtype=dtype: measure_errors(
                case, mask, dtype, args
            )
    if args.device == "cuda":
        cells["truth, in a CUDA graph"] = measure_compiled_error
    for name, case in CASES.items() if args.device == "cuda" else ():
        cells[f"times, {name}"] = lambda case=case: measure_times(case)
    return cells


def make_inputs(case: Case, dtype: str, device: str) -> tuple[Tensor, Tensor]:
    """Return queries [b, 1, n, r] and a latent [b, 1, m, r]. Their logits vary like those of a trained model."""
    query = 3 * torch.randn(case.memories, 1, case.rows, case.width, device=device)
    latent = torch.randn(case.memories, 1, case.keys, case.width, device=device)
    return query.to(getattr(torch, dtype)), latent.to(getattr(torch, dtype))


def measure_errors(case: Case, kind: str | None, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the relative error of the kernels, compared with the formula in float64."""
    case = case._replace(keys=35, width=min(case.width, 48)) if args.tiny else case
    query, latent = make_inputs(case, dtype, args.device)
    mask, added = None, torch.zeros((), dtype=torch.float64, device=args.device)
    if kind == "padding":
        lengths = torch.tensor([case.keys - 7 * i for i in range(case.memories)], device=args.device)
        mask = (torch.arange(case.keys, device=args.device) < lengths[:, None])[:, None, None]
        added = torch.zeros(mask.shape, dtype=torch.float64, device=args.device).masked_fill(~mask, -torch.inf)
    elif kind == "added":
        mask = torch.randn(case.memories, 1, case.rows, case.keys, device=args.device).to(query.dtype)
        added = mask.double()
    scaling = case.width**-0.5
    logits = query.double() @ latent.double().mT * scaling + added
    expected = logits.softmax(-1) @ latent.double()
    launch = choose_launch_settings(query, latent)
    # Call the kernels directly, because the public function falls back to torch.
    error = compute_relative_error(run_latent_kernels(query, latent, mask, scaling, launch), expected)
    return {"error": error, "launch": list(launch), "met": error <= LIMITS[dtype]}


def measure_compiled_error() -> dict[str, Any]:
    """Return the errors of repeated calls of a compiled function, each with different inputs."""
    torch._dynamo.reset()
    case, scaling, errors = TRUTH["plain"][0], 0.05, []
    compiled = torch.compile(lambda *call: attend_to_one_latent(*call, scaling=scaling), mode="reduce-overhead")
    for _ in range(5):
        query, latent = make_inputs(case, "bfloat16", "cuda")
        expected = (query.double() @ latent.double().mT * scaling).softmax(-1) @ latent.double()
        errors.append(compute_relative_error(compiled(query, latent), expected))
    agreed = all(latent_decoding._latent_trial_results.values())
    return {"errors": errors, "agreed": agreed, "met": agreed and max(errors) <= LIMITS["bfloat16"]}


def attend_with_products(query: Tensor, latent: Tensor, scaling: float) -> Tensor:
    """Attend to a latent with two matrix products and a softmax."""
    weights = torch.softmax((query * scaling) @ latent.mT, -1, dtype=torch.float32)
    return weights.to(latent.dtype) @ latent


def measure_times(case: Case) -> dict[str, Any]:
    """Return the microseconds of each contestant, the failures, and the microseconds of reading the latent once.

    The times are those of replays of a CUDA graph, as in a compiled step. "launching" is the time that Python needs to
    launch our kernels.
    """
    query, latent = make_inputs(case, "bfloat16", "cuda")
    scaling = case.width**-0.5
    beams = case.rows // case.heads
    query_states = torch.randn(case.memories * beams, case.heads, 1, HEAD_DIM, device="cuda", dtype=query.dtype)
    keys, values = (
        torch.randn(case.memories * beams, case.heads, case.keys, HEAD_DIM, device="cuda", dtype=query.dtype)
        for _ in "kv"
    )
    mask = (torch.arange(case.keys, device="cuda") < case.keys - 9).expand(case.memories, 1, 1, -1)
    contestants: dict[str, Callable[[], Tensor]] = {
        "multi-head, fused": lambda: scaled_dot_product_attention(query_states, keys, values),
        "latent, fused": lambda: scaled_dot_product_attention(query, latent, latent, scale=scaling),
        "latent, two products": lambda: attend_with_products(query, latent, scaling),
        "latent, ours": lambda: attend_to_one_latent(query, latent, scaling=scaling),
        "padding, fused": lambda: scaled_dot_product_attention(query, latent, latent, mask, scale=scaling),
        "padding, ours": lambda: attend_to_one_latent(query, latent, mask, scaling=scaling),
    }
    row: dict[str, Any] = {"microseconds": {}, "failures": {}, "chosen": list(choose_launch_settings(query, latent))}
    for name, contestant in contestants.items():
        measure(name, contestant, row)
    for block in BLOCKS:
        launch = LaunchSettings(*block, 264)
        measure(str(list(launch)), partial(run_latent_kernels, query, latent, None, scaling, launch), row)
    launches = {name: time for name, time in row["microseconds"].items() if name.startswith("[")}
    if launches:
        best = json.loads(min(launches, key=lambda name: launches[name]))
        for programs in PROGRAMS:
            launch = LaunchSettings(*best[:-1], programs)
            measure(str(list(launch)), partial(run_latent_kernels, query, latent, None, scaling, launch), row)
    row["reading_microseconds"] = 1e6 * latent.numel() * latent.element_size() / measure_read_bandwidth("cuda")
    attend_to_one_latent(query[:1], latent[:1], scaling=scaling)  # the first call compiles and checks
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        attend_to_one_latent(query[:1], latent[:1], scaling=scaling)
    row["launching_microseconds"] = 1e6 * (time.perf_counter() - start) / 20
    return row


def measure(name: str, contestant: Callable[[], Tensor], row: dict[str, Any]) -> None:
    """Add the median time of a contestant's replays to the row, or the error if it fails."""
    from triton.testing import do_bench_cudagraph

    if name in row["microseconds"]:
        return
    try:
        contestant()  # the first call compiles and checks
        with torch.cuda.stream(torch.cuda.Stream()):
            row["microseconds"][name] = 1e3 * do_bench_cudagraph(contestant, rep=20, return_mode="median")
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        row["failures"][name] = f"{type(error).__name__}: {error}"[:300]


if __name__ == "__main__":
    main(make_cells)
