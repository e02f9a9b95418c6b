"""Compare the time and memory of talking-heads attention functions, with and without the backward pass, in one run.

The peers are torch's fused multi-head attention ("sdpa", the baseline, which does not mix heads), the talking-heads
formula ("naive"), the formula under torch.compile ("compiled", CUDA only), and this package's "blocked" and "triton"
(CUDA only). The script also measures whole attention layers, with those of x-transformers if it is installed, and the
training step of a BERT-base-shaped model with and without talking heads. The peers take turns within each round, so
that other load affects all of them. Each time is the median over rounds. Memory is the increase of the peak during a
call. On CUDA, the allocator reports it. On a CPU, it is the growth of the resident size, in one process per
measurement.

To install x-transformers without changing torch in this environment:
    pip install --no-deps --target PEER x-transformers==2.31.10 torch-einops-utils einops einx loguru frozendict

Example:
    PYTHONPATH=PEER python -m benchmarks.speed.talking_heads --device cpu --num_threads 2
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.kept_memory import NOT_SHOWN, add_memory_argument, run
from benchmarks.machine import describe_machine
from benchmarks.page_faults import describe_memory
from benchmarks.speed.talking_heads_layers import get_peer_version, measure_layers, measure_training_steps
from benchmarks.speed.talking_heads_memory import measure_cpu_memory, measure_cuda_memory
from benchmarks.speed.talking_heads_peers import make_inputs, make_peers, make_step, measure_interleaved
from benchmarks.speed.talking_heads_report import format_tables, list_targets, save_plot
from hf_attn_variants.files import atomic_write
from hf_attn_variants.modeling.ops import triton_attention

RESULTS = Path(__file__).parent / "results"
# b, h, n, d
SHAPES = {
    "tiny": [(2, 4, 32, 8), (1, 4, 64, 8)],
    "cpu": [(8, 12, 128, 64), (4, 12, 512, 64), (1, 12, 2048, 64), (4, 24, 512, 32)],
    "cuda": [
        (64, 12, 128, 64), (16, 12, 512, 64), (4, 12, 2048, 64), (1, 12, 2048, 64), (1, 12, 8192, 64),
        (16, 24, 512, 32), (4, 24, 2048, 32), (4, 32, 2048, 64), (1, 24, 8192, 32),
    ],
}  # fmt: skip
LAYER_SHAPES = {
    "tiny": [(2, 4, 32, 8)],
    "cpu": [(4, 12, 512, 64), (1, 12, 2048, 64)],
    "cuda": [(16, 12, 512, 64), (4, 12, 2048, 64)],
}
MEMORY_LENGTHS = {
    "tiny": [512, 64],
    "cpu": [512, 1024, 2048, 4096],
    "cuda": [512, 1024, 2048, 4096, 8192],
}
MEMORY_HEADS = {"tiny": (4, 16), "cpu": (12, 64), "cuda": (12, 64)}
TRAINING = {
    "tiny": {"layers": 1, "batch": 2, "length": 32, "hidden_size": 48, "intermediate_size": 64},
    "cpu": {"layers": 2, "batch": 4, "length": 512},
    "cuda": {"layers": 12, "batch": 16, "length": 512},
}
OPTIONS = ("plain", "causal", "dropout", "bias")
PARTS = ("errors", "times", "layers", "training_steps", "memory")


def measure_times(peers: dict[str, Callable], shape, option: str, device: str, dtype, rounds: int) -> dict:
    """Return the median milliseconds of each peer, or None if it ran out of memory.

    Returns:
        {"forward" | "training": {peer: ms}, "usage": {"forward" | "training": {peer: page faults and system time}}}.
    """
    times: dict = {"usage": {}}
    for mode in ("forward", "training"):
        inputs = make_inputs(shape, option, device, dtype)
        steps = {name: make_step(attend, inputs, mode == "training") for name, attend in peers.items()}
        times[mode], times["usage"][mode] = measure_interleaved(steps, device, rounds)
    return times


def measure_errors(peers: dict[str, Callable], device: str, dtype: torch.dtype) -> dict:
    """Return the relative errors of each talking-heads peer's outputs and gradients, compared with float64."""
    errors: dict[str, dict] = {}
    for shape in ((2, 12, 192, 64), (1, 24, 1500, 32)) if device == "cuda" else ((2, 12, 96, 64),):
        for option in ("plain", "causal", "bias"):
            inputs = make_inputs(shape, option, device, dtype)
            exact = {
                name: value.detach().double().requires_grad_() if isinstance(value, torch.Tensor) else value
                for name, value in inputs.items()
            }
            names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
            expected = make_peers("cpu", ["naive"])["naive"](**exact)
            d_output = torch.randn_like(expected).to(dtype)
            expected_gradients = torch.autograd.grad(expected, [exact[name] for name in names], d_output.double())
            for peer, attend in peers.items():
                if peer == "sdpa":
                    continue
                output = attend(**inputs)
                gradients = torch.autograd.grad(output, [inputs[name] for name in names], d_output)
                row = {"output": _compute_error(output, expected)}
                row |= {
                    name: _compute_error(g, w) for name, g, w in zip(names, gradients, expected_gradients, strict=True)
                }
                errors.setdefault(peer, {})[f"{shape} {option}"] = row
    return errors


def _compute_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def _get_versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "x-transformers": get_peer_version()}
    for name in ("torch", "triton", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return versions


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: float32; bfloat16 on CUDA"
    )
    parser.add_argument("--num_threads", type=int, default=2, help="number of CPU threads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--peers", nargs="+", default=["sdpa", "naive", "compiled", "blocked", "triton"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--num_shapes", type=int, help="measure only this number of shapes")
    parser.add_argument("--tiny", action="store_true", help="use tiny sizes, to test the script")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    add_memory_argument(parser)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda requires a GPU, but torch does not find one")
    is_complete = set(args.parts) == set(PARTS) and args.num_shapes is None and not args.tiny
    if not is_complete and (args.output_dir / f"talking_heads_{args.device}.json").exists():
        parser.error(f"a partial run would replace the report in {args.output_dir}; set another --output_dir")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    args.peers = list(make_peers(args.device, args.peers))
    if not args.peers:
        parser.error("--peers must contain a peer that runs on the chosen device")
    return args


def measure_parts(args: argparse.Namespace, report: dict) -> None:
    """Measure the parts in `args.parts`, add the results to `report`, and write it after each result."""
    sizes = "tiny" if args.tiny else args.device
    dtype, peers = getattr(torch, args.dtype), make_peers(args.device, args.peers)
    if "errors" in args.parts:
        report["errors"] = measure_errors(peers, args.device, dtype)
    shapes = SHAPES[sizes][: args.num_shapes] if "times" in args.parts else []
    # At 8,192 tokens, the n x n bias itself would need too much memory.
    cells = [(o, shape) for o in args.options for shape in shapes if o != "bias" or shape[2] <= 4096]
    for option, shape in tqdm(cells, desc="attention"):
        row = {"shape": list(shape), "option": option}
        report["times"].append(row | measure_times(peers, shape, option, args.device, dtype, args.rounds))
        _write(args, report)
    for shape in tqdm(LAYER_SHAPES[sizes] if "layers" in args.parts else [], desc="layers"):
        row = measure_layers(args.peers, shape, args.device, dtype, args.rounds)
        report["layers"].append({"shape": list(shape), **row})
        _write(args, report)
    if "training_steps" in args.parts:
        training = TRAINING[sizes]
        step_times, usage = measure_training_steps(**training, device=args.device, dtype=dtype, rounds=args.rounds)
        report["training_steps"] = training | {"milliseconds": step_times, "usage": {"milliseconds": usage}}
        _write(args, report)
    if "memory" in args.parts and args.memory != "kept":  # peaks cannot be measured with the fixed setting
        heads, lengths = MEMORY_HEADS[sizes], MEMORY_LENGTHS[sizes]
        if args.device == "cpu":
            report["peak_memory"] = measure_cpu_memory(args.peers, *heads, lengths, args.dtype, args.num_threads)
        else:
            report["peak_memory"] = measure_cuda_memory(peers, *heads, lengths, args.dtype)
        _write(args, report)


def _write(args: argparse.Namespace, report: dict) -> Path:
    path = args.output_dir / f"talking_heads_{args.device}.json"
    atomic_write(path, json.dumps(report, indent=1) + "\n")
    return path


def main(args: argparse.Namespace) -> dict:
    """Measure all parts, write the JSON and the plot, print the tables, and return the report."""
    torch.manual_seed(0)
    torch.set_num_threads(args.num_threads)
    on_cuda, machine_info = args.device == "cuda", describe_machine(args.device)
    report = {
        "arguments": {name: value for name, value in vars(args).items() if name not in NOT_SHOWN},
        "machine": machine_info,
        "memory": describe_memory(),
        "device": args.device,
        "device_name": torch.cuda.get_device_name()
        if on_cuda
        else f"{machine_info['cpu']}, threads: {args.num_threads}",
        "dtype": args.dtype,
        "versions": _get_versions(),
        "load_before": None if on_cuda else os.getloadavg()[0],
        "workspace_bytes": triton_attention.WORKSPACE_BYTES if on_cuda else None,
        "rounds": args.rounds,
        "peers": args.peers,
        "notes": "sdpa is multi-head attention without head mixing. With dropout or a trained bias, torch uses its "
        "slow math kernel on a CPU. Times are median milliseconds over rounds in which the peers take turns.",
        "errors": {},
        "times": [],
        "layers": [],
        "training_steps": {},
        "peak_memory": [],
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    measure_parts(args, report)
    report["targets"] = list_targets(report)
    path = _write(args, report)
    for peer, peer_errors in report["errors"].items():
        largest_error = max(error for row in peer_errors.values() for error in row.values())
        print(f"largest relative error against float64, {peer}: {largest_error:.1e}")
    print(format_tables(report))
    save_plot(report, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png').name}")
    return report


if __name__ == "__main__":
    run(main, parse_args, lambda report, path, args: save_plot(report, path.with_suffix(".png")))
