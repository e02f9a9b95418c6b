"""Compare attention of linear cost with fused full attention, up to 65,536 tokens, like `sliding_window.py`.

The cells measure attention (12 heads of 64), a layer of BERT-base, and memory. The contestants are windows with
FlexAttention (if its outputs agree with those of the blocks), windows in blocks, and each `attention_kernel` of the
package. The first cells check whether FlexAttention agrees.
"""

import argparse
from typing import Any

import torch

from benchmarks.gpu.cells import Cells, main
from benchmarks.gpu.peers import measure_memory_row, time_side_by_side
from benchmarks.long.sliding_window import (
    HEAD_DIM,
    HEADS,
    PEERS,
    WINDOW,
    make_bert_layer,
    make_layer_step,
    make_layers,
)
from benchmarks.speed.talking_heads_peers import make_inputs, make_peers, make_step
from hf_attn_variants.modeling.ops import flex_windows

try:  # older versions of the package only have windows
    from hf_attn_variants.modeling.mechanisms.kernels.kernel_table import KERNELS
except ImportError:
    KERNELS = ()

LENGTHS = (16384, 4096, 65536, 1024)
KINDS = ("attention", "layers", "memory")
DTYPES = ("bfloat16", "float16", "float32")
WINDOWS = [*PEERS, "window in blocks"]


def make_cells(args: argparse.Namespace) -> Cells:
    """Return the cells that check FlexAttention, then one cell per length and kind of measurement."""
    measures = {"attention": measure_attention, "layers": measure_layers, "memory": measure_memory}
    agreement = {
        f"FlexAttention, {dtype}{', bias' * bias}{', padding' * bias}": lambda dtype=dtype, bias=bias: (
            compare_backends(args, dtype, bias)
        )
        for bias in (False, True)
        for dtype in DTYPES
    }
    return agreement | {
        f"{kind}, {n}": lambda kind=kind, n=n: measures[kind](n, args)
        for n in ((512,) if args.tiny else LENGTHS)
        for kind in KINDS
    }


def _get_num_heads_and_dtype(args: argparse.Namespace) -> tuple[int, str]:
    return 1 if args.tiny else HEADS, "bfloat16" if args.device == "cuda" else "float32"


def compare_backends(args: argparse.Namespace, dtype: str, bias: bool) -> dict[str, Any]:
    """Return whether FlexAttention agrees with the blocks, forward and (on CUDA) backward, and the reason if not."""
    if args.tiny:
        return {"reason": "The check was skipped, because FlexAttention has no gradients on a CPU."}
    kind = flex_windows.FlexCallKind(
        device=torch.empty(0, device=args.device).device,
        dtype=getattr(torch, dtype),
        heads=(HEADS, HEADS),
        sizes=(HEAD_DIM, HEAD_DIM),
        scaling=HEAD_DIM**-0.5,
        has_padding=bias,
        bias=getattr(torch, dtype) if bias else None,
        trains_bias=bias,
        is_dilated=False,
        with_backward=True,
    )
    reason = flex_windows.run_flex_trial(kind)
    return {"met": reason is None, "reason": reason}


def measure_attention(n: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of full attention and of windows."""
    heads, dtype = _get_num_heads_and_dtype(args)
    inputs = make_inputs((1, heads, n, HEAD_DIM), "plain", args.device, getattr(torch, dtype))
    peers = make_peers(args.device, WINDOWS)
    return time_side_by_side(lambda attend, training: make_step(attend, inputs, training), peers, args.device)


def measure_layers(n: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of whole layers: full attention, windows, Longformer and each kernel."""
    heads, dtype = _get_num_heads_and_dtype(args)
    size = heads * HEAD_DIM
    layers_by_name = make_layers(size, n)
    layers_by_name |= {f"BERT layer, {name}": make_bert_layer(size, **_get_kernel_fields(name, n)) for name in KERNELS}
    for layer in layers_by_name.values():
        layer.to(args.device, getattr(torch, dtype))
    states = torch.randn(1, n, size, device=args.device, dtype=getattr(torch, dtype), requires_grad=True)
    return time_side_by_side(
        lambda layer, training: make_layer_step(layer, states, training), layers_by_name, args.device
    )


def _get_kernel_fields(kernel: str, n: int) -> dict[str, Any]:
    """Return the fields of a kernel. Linformer needs the number of positions, and the hybrid needs a window."""
    fields = {"attention_kernel": kernel, "max_position_embeddings": n}
    return fields | ({"attention_window": WINDOW} if kernel == "hybrid" else {})


def measure_memory(n: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the additional peak MiB of a call of attention."""
    heads, dtype = _get_num_heads_and_dtype(args)
    return measure_memory_row(make_peers(args.device, WINDOWS), heads, HEAD_DIM, n, dtype, args.device)


if __name__ == "__main__":
    main(make_cells)
