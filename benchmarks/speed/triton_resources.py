"""Compile the Triton kernels of talking-heads attention for GPUs, and report their resources. No GPU is required.

The forward and backward passes run on tensors without data ("meta"). Each kernel launch is recorded and compiled for
the chosen compute capabilities, exactly as on such a GPU. cuobjdump reports the registers per thread and the bytes on
the stack, which do not fit into registers. The compiled kernel states the shared memory per block. The script shows
that the kernels compile and fit, but does not measure their speed. It requires triton (`pip install triton`), but not
the CUDA build of torch.

Example:
    python -m benchmarks.speed.triton_resources --capabilities 80 90
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_attn_variants.files import atomic_write

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks/speed/results/triton_resources.json"
# The maximum shared memory per block in KiB, by compute capability: A100, consumer Ampere, Ada, Hopper
# (CUDA C++ programming guide, "technical specifications per compute capability").
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227}
HEADS = [(12, 12, 12), (32, 32, 32), (64, 64, 64), (8, 16, 12)]
LENGTHS = [512, 8192]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "boolean mask, dropout": {"mask": "boolean", "dropout": 0.1},
    "additive mask, trained bias": {"mask": "additive", "bias": True},
    "causal, P_l alone": {"causal": True, "weights": False},
    "P_w alone": {"logits": False},
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HEAD_DIM = 64
USAGE = {"registers": "REG", "stack_bytes": "STACK"}  # the names in the output of cuobjdump
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or by default the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", nargs="+", type=int, choices=list(SHARED_KIB), default=[80, 90])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compile all kernels, write the JSON, print the table, and return the rows.

    Raises:
        SystemExit: if a kernel needs more shared memory than a block may have.
    """
    import triton

    rows = []
    for dtype in args.dtypes:
        for heads in HEADS:
            for length in args.lengths:
                for case in args.cases:
                    settings = CASES[case]
                    if len(set(heads)) > 1 and not (settings.get("logits", True) and settings.get("weights", True)):
                        continue  # without a projection, the numbers of heads before and after it are equal
                    for name, launch in iterate_launches(DTYPES[dtype], length, heads, **settings):
                        for capability in args.capabilities:
                            row = {"dtype": dtype, "heads": heads, "length": length, "case": case, "kernel": name}
                            rows.append(row | {"capability": capability} | measure_resources(launch, capability))
                            print(json.dumps(rows[-1]), flush=True)
    result = {"triton": triton.__version__, "shared_kib_allowed": SHARED_KIB, "rows": rows}
    atomic_write(args.output, json.dumps(result, indent=1) + "\n")
    print(format_table(rows))
    if too_big := [row for row in rows if row["shared_bytes"] > 1024 * SHARED_KIB[row["capability"]]]:
        raise SystemExit(f"{len(too_big)} kernels need more shared memory than a block may have: {too_big[:3]}")
    return rows


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with the largest resources of any launch, by kernel, dtype and capability."""
    lines = ["| kernel | dtype | compute capability | launches | registers a thread | stack bytes | shared KiB |"]
    lines.append("| --- " * 7 + "|")
    keys = dict.fromkeys((row["kernel"], row["dtype"], row["capability"]) for row in rows)
    for key in sorted(keys):
        selected_rows = [row for row in rows if (row["kernel"], row["dtype"], row["capability"]) == key]
        maxima = [max(row[name] for row in selected_rows) for name in ("registers", "stack_bytes", "shared_bytes")]
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {len(selected_rows)} | "
            f"{maxima[0]} | {maxima[1]} | {maxima[2] / 1024:.0f} |"
        )
    return "\n".join(lines)


class _Recorder:
    """A replacement for a kernel that records the arguments of the first launch instead of running it."""

    def __init__(self, kernel: Any):
        self.kernel, self.arguments, self.options = kernel, None, {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*values: Any, **named: Any) -> None:
            if self.arguments is None:
                names = self.kernel.arg_names
                self.options = {key: value for key, value in named.items() if key not in names}
                constants = {key: value for key, value in named.items() if key in names}
                self.arguments = dict(zip(names, values, strict=False)) | constants

        return launch


def iterate_launches(
    dtype: torch.dtype,
    length: int,
    heads: tuple[int, int, int],
    mask: str | None = None,
    bias: bool = False,
    causal: bool = False,
    dropout: float = 0.0,
    logits: bool = True,
    weights: bool = True,
) -> Iterator[tuple[str, _Recorder]]:
    """Yield ("forward" or "backward", recorded launch) for one call on tensors without data.

    Args:
        dtype: the data type of the queries, keys and values.
        length: the number of tokens n.
        heads: the numbers of heads h_k, h and h_v.
        mask: the kind of the mask [1, 1, n, n], "boolean" or "additive", or None for no mask.
        bias: whether there is a position bias that needs a gradient.
        causal: whether the attention is causal.
        dropout: the dropout probability.
        logits, weights: whether there are the projections P_l and P_w.
    """
    from hf_attn_variants.modeling.ops import triton_attention as kernels
    from hf_attn_variants.modeling.ops.blocked_attention import AttentionOperands

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    query, key = (empty(2, heads[0], length, HEAD_DIM) for _ in range(2))
    value = empty(2, heads[2], length, HEAD_DIM)
    masks = {
        None: None,
        "boolean": empty(1, 1, length, length, of=torch.bool),
        "additive": empty(1, 1, length, length),
    }
    operands = AttentionOperands(
        query,
        key,
        value,
        masks[mask],
        empty(1, heads[1], length, length, of=torch.float32) if bias else None,
        empty(*heads[:2], of=torch.float32) if logits else None,
        empty(*heads[1:], of=torch.float32) if weights else None,
        empty(1, of=torch.int64) if dropout else None,
        HEAD_DIM**-0.5,
        causal,
        dropout,
    )
    recorders = {"forward": _Recorder(kernels.forward_kernel), "backward": _Recorder(kernels.backward_kernel)}
    original_kernels = kernels.forward_kernel, kernels.backward_kernel
    kernels.forward_kernel, kernels.backward_kernel = recorders.values()
    try:
        output, statistics = kernels.triton_forward(operands)
        kernels.triton_backward(torch.empty_like(output), statistics, bias, operands)
    finally:
        kernels.forward_kernel, kernels.backward_kernel = original_kernels
    yield from recorders.items()


def measure_resources(launch: _Recorder, capability: int) -> dict[str, int]:
    """Compile a launch, and return the registers per thread, stack bytes, shared bytes, warps and block size."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        # Triton specializes launches in the same way: None and 1 are constants, and multiples of 16 are marked.
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
            signature[parameter.name], constants[index,] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name], divisible = POINTERS[value.dtype], True
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
            divisible = specialised and not parameter.do_not_specialize_on_alignment
            divisible = divisible and isinstance(value, int) and value % 16 == 0
        if divisible:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    return {
        **_read_usage(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
        "warps": launch.options["num_warps"],
        "block": launch.arguments["BLOCK"],
    }


def _read_usage(cubin: bytes) -> dict[str, int]:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__path__[0], "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True)
    if report.returncode:
        raise OSError(f"{tool} cannot read the kernel: {report.stderr or report.stdout}")
    return {name: int(re.search(rf"{field}:(\d+)", report.stdout)[1]) for name, field in USAGE.items()}


if __name__ == "__main__":
    main(parse_args())
