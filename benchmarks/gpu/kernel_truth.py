"""Compare the talking-heads kernels with the formula in float64: outputs and gradients, masks, biases and dropout.

On CUDA, the Triton kernels are tested. Without a GPU, they run in Triton's interpreter (TRITON_INTERPRET=1). Without
Triton, the blocked backend replaces them, to check that this script runs.
"""

import argparse
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.cells import Cells, compute_relative_error, main
from hf_attn_variants.modeling.ops import triton_attention
from hf_attn_variants.modeling.ops.memory_efficient_attention import talking_heads_attention
from hf_attn_variants.reference.talking_heads import attention_core

DTYPES = ("float32", "bfloat16", "float16")
LIMITS = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
HEAD_DIM, BATCH = 64, 2
NAMES = ("query", "key", "value", "bias", "P_l", "P_w")


class Case(NamedTuple):
    """A call: the heads of logits, softmax, outputs, key states and value states; rows, keys, mask and bias."""

    heads: tuple[int, int, int, int, int]
    n: int
    m: int
    mask: str | None = None
    bias: bool = False


CASES = {
    "12 heads": Case((12, 12, 12, 12, 12), 512, 512),
    "padding": Case((12, 12, 12, 12, 12), 700, 700, "padding"),
    "causal": Case((12, 12, 12, 12, 12), 512, 512, "causal"),
    "causal, padding": Case((12, 12, 12, 4, 4), 512, 512, "causal padding"),
    "rows": Case((12, 12, 12, 12, 12), 128, 300, "rows"),
    "added mask": Case((12, 12, 12, 12, 12), 256, 256, "additive"),
    "trained bias": Case((12, 12, 12, 12, 12), 512, 512, None, True),
    "trained bias, causal, padding": Case((12, 12, 12, 4, 4), 300, 300, "causal padding", True),
    "one row": Case((12, 12, 12, 2, 2), 1, 2048, "padding"),
    "other heads": Case((6, 10, 8, 2, 4), 256, 256, "padding"),
    "33 heads": Case((33, 33, 33, 11, 11), 256, 256),
    "64 heads": Case((64, 64, 64, 8, 8), 256, 256, "causal"),
    "1,500 keys": Case((24, 24, 24, 24, 24), 1500, 1500, "causal"),
    "4,096 keys": Case((12, 12, 12, 12, 12), 4096, 4096, "padding"),
}


def make_cells(args: argparse.Namespace) -> Cells:
    """Return one cell per case and number format, then the cells with dropout."""
    cells: Cells = {}
    dtypes = [dtype for dtype in DTYPES if args.device == "cuda" or dtype != "bfloat16" or get_backend() == "blocked"]
    for name, case in CASES.items():
        case = case._replace(n=min(case.n, 5), m=min(case.m, 19)) if args.tiny else case
        case = case._replace(n=case.m) if args.tiny and case.mask and "causal" in case.mask else case
        for dtype in dtypes:
            cells[f"{name}, {dtype}"] = lambda case=case, dtype=dtype: measure_errors(
                case, args.device, dtype, args.tiny
            )
    for dtype in dtypes:
        cells[f"dropout, {dtype}"] = lambda dtype=dtype: measure_dropout(args.device, dtype, 40 if args.tiny else 256)
    return cells


def get_backend() -> str:
    """Return the name of the tested backend."""
    return (
        "triton"
        if triton_attention.supports_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        else "blocked"
    )


def make_inputs(case: Case, device: str, dtype: str, head_dim: int) -> list[torch.Tensor | None]:
    """Return query, key, value, bias, P_l and P_w, which require gradients. P_l and P_w are close to the identity."""
    h_k, h, h_v, key_heads, value_heads = case.heads

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(getattr(torch, dtype)).requires_grad_()

    def mix(rows: int, columns: int) -> torch.Tensor:
        return (
            torch.eye(rows, columns, device=device) + 0.1 * torch.randn(rows, columns, device=device)
        ).requires_grad_()

    states = [new(BATCH, h_k, case.n, head_dim), new(BATCH, key_heads, case.m, head_dim)]
    states += [new(BATCH, value_heads, case.m, head_dim), new(1, h, case.n, case.m) if case.bias else None]
    return [*states, mix(h_k, h), mix(h, h_v)]


def make_mask(kind: str | None, n: int, m: int, device: str) -> tuple[torch.Tensor | None, bool, torch.Tensor]:
    """Return the mask for the kernels, whether the call is causal, and both as an additive mask for the formula."""
    causal = kind is not None and kind.startswith("causal")
    allowed = torch.ones(n, m, dtype=torch.bool, device=device)
    allowed, mask = allowed.tril() if causal else allowed, None
    if kind == "additive":
        mask = torch.randn(BATCH, 1, n, m, device=device)
        return mask, causal, mask.double()
    if kind in ("padding", "causal padding"):
        lengths = torch.tensor([m, m - m // 3], device=device)[:, None, None, None]
        mask = torch.arange(m, device=device) < lengths  # [b, 1, 1, m]
    elif kind == "rows":
        mask = torch.rand(BATCH, 1, n, m, device=device) > 0.3
        mask[0, :, n // 2] = False  # a row that attends to nothing
    allowed = allowed if mask is None else allowed & mask
    return (
        mask,
        causal,
        torch.zeros(allowed.shape, device=device, dtype=torch.float64).masked_fill(~allowed, -torch.inf),
    )


def measure_errors(case: Case, device: str, dtype: str, tiny: bool) -> dict[str, Any]:
    """Return the relative errors of the output and of each gradient."""
    head_dim = 8 if tiny else HEAD_DIM
    inputs = make_inputs(case, device, dtype, head_dim)
    mask, causal, added = make_mask(case.mask, case.n, case.m, device)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(getattr(torch, dtype))
        added = mask.double()
    query, key, value, bias, logits_proj, weights_proj = inputs
    backend = get_backend()
    call = {"scaling": head_dim**-0.5, "logits_proj": logits_proj, "weights_proj": weights_proj, "backend": backend}
    output = talking_heads_attention(query, key, value, mask, bias, is_causal=causal, **call)
    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    expected, _ = attention_core(
        *exact[:3], scale=head_dim**-0.5, P_l=exact[4], P_w=exact[5], bias=exact[3], mask=added
    )
    expected = expected.transpose(1, 2)
    direction = torch.randn_like(expected).to(output.dtype)
    output.backward(direction)
    expected.backward(direction.double())
    errors = {"output": compute_relative_error(output, expected)}
    for name, actual, expected_input in zip(NAMES, inputs, exact, strict=True):
        if actual is not None:
            errors[name] = compute_relative_error(actual.grad, expected_input.grad)
    return {"backend": backend, "errors": errors, "met": max(errors.values()) <= LIMITS[dtype]}


def measure_dropout(device: str, dtype: str, n: int) -> dict[str, Any]:
    """Return the share of weights that dropout keeps, and the errors of these weights, the output and the gradient.

    With the identity as values, the outputs are the weights themselves. The same seed drops the same weights, from
    which the expected output and the expected gradient of the values are computed.
    """
    rate, backend = 0.25, get_backend()
    case = Case((12, 12, 12, 12, 12), n, n)
    query, key, value, _, logits_proj, weights_proj = make_inputs(case, device, dtype, 16)
    eye = torch.eye(n, device=device, dtype=query.dtype).expand(BATCH, 12, n, n)
    call = {"scaling": 0.25, "logits_proj": logits_proj, "weights_proj": weights_proj, "backend": backend}

    def attend(values: torch.Tensor, rate: float) -> torch.Tensor:
        torch.manual_seed(7)
        return talking_heads_attention(query, key, values, dropout=rate, **call)

    with torch.no_grad():
        weights, dropped = attend(eye, 0.0).double(), attend(eye, rate).double()  # [b, n, h, m]
    is_kept = dropped != 0
    output = attend(value, rate)
    direction = torch.randn_like(output)
    output.backward(direction)
    errors = {"kept weights": compute_relative_error(dropped[is_kept], weights[is_kept] / (1 - rate))}
    errors["output"] = compute_relative_error(output, torch.einsum("bnhm,bhmd->bnhd", dropped, value.double()))
    errors["value"] = compute_relative_error(value.grad, torch.einsum("bnhm,bnhd->bhmd", dropped, direction.double()))
    share = is_kept.double().mean().item()
    met = abs(share - (1 - rate)) < 0.02 and max(errors.values()) <= LIMITS[dtype]
    return {"backend": backend, "share_kept": share, "errors": errors, "met": met}


if __name__ == "__main__":
    main(make_cells)
