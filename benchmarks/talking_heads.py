"""Talking-heads attention beside its peers, in one run: time and peak memory, forward and with the backward pass.

Peers: torch's fused multi-head attention ("sdpa", which mixes no heads: the mark to reach), the talking-heads formula
written plainly ("naive"), that under torch.compile ("compiled", CUDA only), and this package's "blocked" and "triton"
(CUDA only). The peers take turns within each round, so that a change in the machine's load meets them all; each time
is the median over rounds. Memory is what a call adds at its peak: the allocator's figure on CUDA; on a CPU the growth
of the process's peak resident size, each measurement in a process of its own.

Example:
    python benchmarks/talking_heads.py --device cpu --num_threads 2
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from hf_attn_variants.modeling import talking_heads_triton
from hf_attn_variants.modeling.attention_variants import attention_with_weights
from hf_attn_variants.modeling.talking_heads import talking_heads_attention

RESULTS = Path(__file__).parent / "results"
# b, h, n, d
SHAPES = {
    "cpu": [(8, 12, 128, 64), (4, 12, 512, 64), (1, 12, 2048, 64), (4, 24, 512, 32)],
    "cuda": [
        (64, 12, 128, 64), (16, 12, 512, 64), (4, 12, 2048, 64), (1, 12, 2048, 64), (1, 12, 8192, 64),
        (16, 24, 512, 32), (4, 24, 2048, 32), (4, 32, 2048, 64), (1, 24, 8192, 32),
    ],
}  # fmt: skip
MEMORY_LENGTHS = {"cpu": [512, 1024, 2048, 4096], "cuda": [512, 1024, 2048, 4096, 8192]}
OPTIONS = ("plain", "causal", "dropout", "bias")


def make_peers(device: str, peers: list[str]) -> dict[str, Callable]:
    """Each peer as a function of (query, key, value, P_l, P_w, bias, scaling, is_causal, dropout) -> [b, n, h, d]."""

    def sdpa(query, key, value, logits_proj, weights_proj, bias, scaling, is_causal, dropout):
        # The mixing matrices go unused here.
        output = F.scaled_dot_product_attention(query, key, value, bias, dropout, is_causal, scale=scaling)
        return output.transpose(1, 2)

    def naive(query, key, value, logits_proj, weights_proj, bias, scaling, is_causal, dropout):
        return attention_with_weights(
            query, key, value, None, bias, scaling=scaling, is_causal=is_causal, dropout=dropout,
            logits_proj=logits_proj.to(query.dtype), weights_proj=weights_proj.to(query.dtype),
        )[0]  # fmt: skip

    def ours(backend):
        def attend(query, key, value, logits_proj, weights_proj, bias, scaling, is_causal, dropout):
            return talking_heads_attention(
                query, key, value, None, bias, scaling=scaling, is_causal=is_causal, dropout=dropout,
                logits_proj=logits_proj, weights_proj=weights_proj, backend=backend,
            )  # fmt: skip

        return attend

    made = {"sdpa": sdpa, "naive": naive, "blocked": ours("blocked")}
    if device == "cuda":
        torch._dynamo.config.cache_size_limit = 256
        made |= {"compiled": torch.compile(naive, dynamic=False), "triton": ours("triton")}
    return {name: made[name] for name in peers if name in made}


def make_inputs(shape: tuple[int, int, int, int], option: str, device: str, dtype: torch.dtype) -> dict:
    """Fresh random inputs of one measurement, laid out as the models lay them out ([b, n, h, d], transposed)."""
    b, h, n, d = shape

    def new(*size, dtype=dtype):
        return torch.randn(size, device=device, dtype=dtype)

    inputs = {name: new(b, n, h, d).transpose(1, 2).requires_grad_() for name in ("query", "key", "value")}
    for name in ("logits_proj", "weights_proj"):
        inputs[name] = (torch.eye(h, device=device) + 0.1 * new(h, h, dtype=torch.float32)).requires_grad_()
    inputs["bias"] = new(1, h, n, n).requires_grad_() if option == "bias" else None
    others = {"scaling": d**-0.5, "is_causal": option == "causal", "dropout": 0.1 if option == "dropout" else 0.0}
    return {**inputs, **others}


def make_step(attend: Callable, inputs: dict, training: bool) -> Callable[[], torch.Tensor]:
    leaves = [tensor for tensor in inputs.values() if isinstance(tensor, torch.Tensor)]
    b, h, n, d = inputs["query"].shape
    d_output = torch.randn(b, n, h, d, device=leaves[0].device, dtype=leaves[0].dtype)

    def step():
        with torch.set_grad_enabled(training):
            output = attend(**inputs)
        if training:
            for leaf in leaves:
                leaf.grad = None
            output.backward(d_output)
        return output

    return step


def _milliseconds(step: Callable, device: str, repeats: int) -> float:
    if device == "cpu":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    # A queue of work hides what Python takes to launch the next step, as in training.
    torch.cuda._sleep(1_000_000)
    events[0].record()
    for _ in range(repeats):
        step()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / repeats


def measure_times(peers: dict[str, Callable], shape, option: str, device: str, dtype, rounds: int) -> dict:
    """Median milliseconds of each peer: {"forward" | "training": {peer: ms}}; None where it ran out of memory."""
    times = {}
    for mode in ("forward", "training"):
        inputs = make_inputs(shape, option, device, dtype)
        steps = {name: make_step(attend, inputs, mode == "training") for name, attend in peers.items()}
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(rounds + 2):
            for name in list(steps):
                try:
                    sample = _milliseconds(steps[name], device, repeats=5)
                except torch.OutOfMemoryError:
                    del steps[name]
                    samples[name] = []
                    torch.cuda.empty_cache()
                    continue
                if number > 1:  # the first warm up
                    samples[name].append(sample)
        times[mode] = {name: statistics.median(found) if found else None for name, found in samples.items()}
    return times


def measure_errors(peers: dict[str, Callable], device: str, dtype: torch.dtype) -> dict:
    """Relative errors of outputs and gradients against float64, on fresh inputs, of each talking-heads peer."""
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
            wanted = torch.autograd.grad(expected, [exact[name] for name in names], d_output.double())
            for peer, attend in peers.items():
                if peer == "sdpa":
                    continue
                output = attend(**inputs)
                got = torch.autograd.grad(output, [inputs[name] for name in names], d_output)
                found = {"output": _error(output, expected)}
                found |= {name: _error(g, w) for name, g, w in zip(names, got, wanted, strict=True)}
                errors.setdefault(peer, {})[f"{shape} {option}"] = found
    return errors


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


def measure_memory(peer: str, attend: Callable, shape, mode: str, device: str, dtype: torch.dtype) -> float | None:
    """MiB that one call adds at its peak; None where it ran out of memory."""
    step = make_step(attend, make_inputs(shape, "plain", device, dtype), mode == "training")
    if device == "cpu":
        small = (1, shape[1], 32, shape[3])
        make_step(attend, make_inputs(small, "plain", device, dtype), mode == "training")()  # loads the libraries
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    try:
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


def _memory_in_a_process(args: argparse.Namespace, peer: str, shape, mode: str) -> float:
    command = [sys.executable, __file__, "--device", args.device, "--dtype", args.dtype, "--num_threads"]
    command += [str(args.num_threads), "--one_memory", peer, mode, *map(str, shape)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(run.stdout.split()[-1])


def plot(report: dict, path: Path) -> None:
    """Draw the ratios to SDPA for each shape, and the memory over the sequence length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(18, 5), constrained_layout=True)
    rows = [row for row in report["times"] if row["option"] == "plain"]
    peers = [peer for peer in report["peers"] if peer != "sdpa"]
    for axis, mode in zip(axes, ("forward", "training"), strict=False):
        for number, peer in enumerate(peers):
            ratios = [(row[mode].get(peer) or float("nan")) / row[mode]["sdpa"] for row in rows]
            bars = axis.bar([i + 0.8 * number / len(peers) for i in range(len(rows))], ratios, 0.75 / len(peers))
            axis.bar_label(bars, fmt="%.1f", fontsize=7)
            bars.set_label(peer)
        axis.axhline(1, color="grey", linewidth=1)
        axis.set(title=f"{mode}: time / SDPA multi-head attention", yscale="log")
        axis.set_xticks([i + 0.3 for i in range(len(rows))], [str(tuple(row["shape"])) for row in rows], rotation=30)
        axis.set_xlabel("b, h, n, d")
        axis.legend()
    for peer in report["peers"]:
        points = [(row["shape"][2], row["training"].get(peer)) for row in report["memory"]]
        axes[2].plot(*zip(*[point for point in points if point[1]], strict=True), marker="o", label=peer)
    axes[2].set(title="training: peak memory added (MiB)", xscale="log", yscale="log", xlabel="n = m, one sequence")
    axes[2].legend()
    figure.suptitle(f"Talking-heads attention, {report['device_name']}, {report['dtype']}")
    figure.savefig(path, dpi=120)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: float32; bfloat16 on CUDA"
    )
    parser.add_argument("--num_threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--peers", nargs="+", default=["sdpa", "naive", "compiled", "blocked", "triton"])
    parser.add_argument("--num_shapes", type=int, help="only the first so many")
    parser.add_argument("--no_memory", action="store_true")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    parser.add_argument("--one_memory", nargs=6, metavar=("PEER", "MODE", "B", "H", "N", "D"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return args


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(args.num_threads)
    dtype = getattr(torch, args.dtype)
    peers = make_peers(args.device, args.peers)
    if args.one_memory:
        peer, mode, *shape = args.one_memory
        print(measure_memory(peer, peers[peer], tuple(map(int, shape)), mode, args.device, dtype))
        return
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {args.num_threads} threads"
    report = {
        "device": args.device,
        "device_name": name,
        "processor": platform.processor() or platform.machine(),
        "dtype": args.dtype,
        "versions": _versions(),
        "workspace_bytes": talking_heads_triton.WORKSPACE_BYTES,
        "peers": list(peers),
        "notes": "sdpa is multi-head attention without head mixing. With dropout or a trained bias, torch's CPU "
        "kernel is the slow math one. Times: median milliseconds over rounds in which the peers take turns.",
        "errors": measure_errors(peers, args.device, dtype),
        "times": [],
        "memory": [],
    }
    for peer, found in report["errors"].items():
        worst = max(error for row in found.values() for error in row.values())
        print(f"largest relative error against float64, {peer}: {worst:.1e}", flush=True)
    path = args.output_dir / f"talking_heads_{args.device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    shapes = SHAPES[args.device][: args.num_shapes]
    for option, shape in tqdm([(option, shape) for option in args.options for shape in shapes]):
        if option == "bias" and shape[2] > 4096:
            continue  # the bias itself is n x m
        row = {"shape": shape, "option": option}
        row |= measure_times(peers, shape, option, args.device, dtype, args.rounds)
        report["times"].append(row)
        for mode in ("forward", "training"):
            cells = [f"{p} {t:.3f} ({t / row[mode]['sdpa']:.2f}x)" if t else f"{p} -" for p, t in row[mode].items()]
            tqdm.write(f"{option:8} {shape!s:20} {mode:8} " + "  ".join(cells))
        path.write_text(json.dumps(report, indent=1) + "\n")
    for length in [] if args.no_memory else tqdm(MEMORY_LENGTHS[args.device]):
        shape = (1, 12, length, 64)
        row = {"shape": shape}
        for mode in ("forward", "training"):
            if args.device == "cpu":
                row[mode] = {peer: _memory_in_a_process(args, peer, shape, mode) for peer in peers}
            else:
                row[mode] = {p: measure_memory(p, peers[p], shape, mode, args.device, dtype) for p in peers}
            tqdm.write(f"MiB {shape} {mode} {row[mode]}")
        report["memory"].append(row)
        path.write_text(json.dumps(report, indent=1) + "\n")
    if report["times"] and report["memory"]:
        plot(report, path.with_suffix(".png"))
    print(f"wrote {path}")


if __name__ == "__main__":
    main(parse_args())
