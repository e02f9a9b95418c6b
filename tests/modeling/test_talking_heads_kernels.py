"""Compare the talking-heads kernels with the specification: outputs and all gradients, by mask, bias and head count.

The Triton kernels run on a GPU, or on a CPU in Triton's interpreter (`test_talking_heads_triton.py`). The interpreter
is slow, so it runs fewer cases.
"""

import itertools

import pytest
import torch
from fixtures.largest_tensor import LargestTensor
from fixtures.talking_heads_calls import (
    BACKENDS,
    CUDA,
    HEADS_AND_MIXES,
    INTERPRETED,
    LENGTHS,
    MASKS,
    MASKS_AND_BIASES,
    B,
    M,
    N,
    assert_close,
    compare,
    get_device,
    make_inputs,
    make_mask,
)

from hf_attn_variants.modeling.ops import (
    backend_choice,
    blocked_attention,
    memory_efficient_attention,
    triton_attention,
)
from hf_attn_variants.modeling.ops.blocked_attention import AttentionOperands
from hf_attn_variants.modeling.ops.memory_efficient_attention import talking_heads_attention
from hf_attn_variants.modeling.ops.softmax_attention import attention_with_weights

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("kind, bias", MASKS_AND_BIASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_equal_the_specification_for_all_masks_and_biases(backend, kind, bias):
    device = get_device(backend)
    compare(backend, make_inputs("gqa", bias, device=device), *make_mask(kind, device=device))


@pytest.mark.parametrize("heads, mixes", HEADS_AND_MIXES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_equal_the_specification_for_all_head_counts(backend, heads, mixes):
    compare(backend, make_inputs(heads, mixes=mixes, device=get_device(backend)))


@pytest.mark.parametrize("n, m, kind", LENGTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_equal_the_specification_for_all_lengths(backend, n, m, kind):
    sizes = {"n": n, "m": m, "device": get_device(backend)}
    compare(backend, make_inputs("all different", **sizes), *make_mask(kind, **sizes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_equal_the_specification_for_many_heads_in_blocks(backend):
    compare(backend, make_inputs("more than thirty-two", n=2, m=70, device=get_device(backend)))


@pytest.mark.skipif(INTERPRETED, reason="tests only the blocked backend")
@pytest.mark.parametrize(
    "kind, bias", list(zip(MASKS, itertools.cycle([None, (1, 12, M), (1, 1, M)]), strict=False)), ids=str
)
@pytest.mark.parametrize("batches, threads", [(1, 2), (1, 3), (1, 5), (2, 2), (2, 3)])
def test_kernels_equal_the_specification_in_blocks_with_threads(monkeypatch, batches, threads, kind, bias):
    # The number of threads determines the blocks. Patch this number, because real threads would wait for each other.
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    inputs = make_inputs("gqa", bias, n=12)
    inputs[:3] = (t[:batches].detach().requires_grad_() for t in inputs[:3])
    mask, causal, added = make_mask(kind, n=12)
    mask, added = (t if t is None or t.dim() < 4 else t[:batches] for t in (mask, added))
    compare("blocked", inputs, mask, causal, added)


def test_kernels_equal_the_specification_with_several_threads(set_threads):
    set_threads(3)
    compare("blocked", [t[:1].detach().requires_grad_() for t in make_inputs(n=12)[:3]] + [None] * 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_in_half_precision_are_within_rounding(backend, dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter's tl.dot reads bfloat16 as integers")
    device = get_device(backend)
    inputs = make_inputs("gqa", (1, N, M), dtype=dtype, device=device)
    compare(backend, inputs, *make_mask("rows", device=device), tolerance=2e-2)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("n", [1024, 1500, 3000])
@pytest.mark.parametrize("kind", [None, "causal padding"])
def test_kernels_equal_the_specification_for_long_rows_on_a_gpu(monkeypatch, kind, n):
    # With this limit, a row has one block of keys or several.
    monkeypatch.setattr(triton_attention, "WORKSPACE_BYTES", 2**24)
    sizes = {"n": n, "m": n, "device": "cuda"}
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        compare("triton", make_inputs("gqa", dtype=dtype, **sizes), *make_mask(kind, **sizes), tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_handle_fully_masked_rows(backend):
    device = get_device(backend)
    query, key, value, _, logits_proj, weights_proj = make_inputs(device=device)
    projections = {"scaling": 1.0, "logits_proj": logits_proj, "weights_proj": weights_proj, "backend": backend}
    boolean = torch.ones(B, 1, 1, M, dtype=torch.bool, device=device)
    boolean[0] = False
    output = talking_heads_attention(query, key, value, boolean, **projections)
    output.sum().backward()
    assert (output[0] == 0).all() and (output[1] != 0).all()
    assert (query.grad[0] == 0).all() and (value.grad[0] == 0).all() and query.grad.isfinite().all()
    additive = torch.zeros(1, 1, 1, M, device=device).fill_(torch.finfo(torch.float32).min)
    output = talking_heads_attention(query, key, value, additive, **projections)
    uniform = torch.einsum("ij,bjmd->bjd", weights_proj / M, value)
    torch.testing.assert_close(output, uniform[:, None].expand_as(output), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["rows", "additive", "causal"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_kernel_gradients_equal_finite_differences(kind, dropout):
    inputs = make_inputs("all different", (1, 3, 4), n=3, m=4, dtype=torch.float64)
    mask, causal, _ = make_mask(kind, h=5, n=3, m=4)
    if kind == "additive":
        mask = mask.clamp_min(-1.0).double()

    def attend(query, key, value, bias, logits_proj, weights_proj):
        torch.manual_seed(1)
        return talking_heads_attention(
            query, key, value, mask, bias, scaling=0.5, is_causal=causal, dropout=dropout, logits_proj=logits_proj,
            weights_proj=weights_proj, backend="blocked",
        )  # fmt: skip

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


def test_autocast_lowers_inputs_and_keeps_parameter_precision():
    inputs = make_inputs()
    query, key, value, _, logits_proj, weights_proj = inputs
    call = {"scaling": 0.3, "logits_proj": logits_proj, "weights_proj": weights_proj}
    exact = attention_with_weights(query, key, value, **call)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = talking_heads_attention(query, key, value, **call)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(t.grad.dtype == torch.float32 for t in (query, logits_proj, weights_proj))
    assert_close(output, exact.detach().double(), 3e-2, "output")


@pytest.mark.filterwarnings("ignore")
def test_kernels_compile_into_one_graph():
    inputs = make_inputs("gqa", (1, N, M))

    def attend(query, key, value, bias, logits_proj, weights_proj):
        return talking_heads_attention(
            query * 2, key, value, None, bias, scaling=1.0, is_causal=True, logits_proj=logits_proj,
            weights_proj=weights_proj,
        ).sin()  # fmt: skip

    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs).sum(), inputs), expected)


@pytest.mark.skipif(INTERPRETED, reason="takes too long in the interpreter")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_custom_op_passes_opcheck(backend):
    device = get_device(backend)
    query, key, value, bias, logits_proj, weights_proj = make_inputs("own value heads", (1, N, M), device=device)
    seed = torch.tensor([7], device=device)
    inputs = (query, key, value, None, bias, logits_proj, weights_proj, seed, 0.5, True, 0.1, None, backend, True)
    # Check the schema, the registration of autograd and the shapes of the fake implementation, without dynamic shapes.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    name = f"{memory_efficient_attention.NAMESPACE}::talking_heads"
    torch.library.opcheck(getattr(torch.ops, name.split("::")[0]).talking_heads.default, inputs, test_utils=tests)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_do_not_overflow_in_float16(backend):
    device = get_device(backend)
    states = torch.full((1, 2, 3, 64), 40.0, dtype=torch.float16, device=device)  # q k = 102,400 overflows float16
    query, key = (states.clone().requires_grad_() for _ in range(2))
    value = torch.randn(1, 2, 3, 64, device=device).half()
    proj = torch.eye(2, device=device).requires_grad_()
    output = talking_heads_attention(query, key, value, scaling=0.125, logits_proj=proj, backend=backend)
    output.sum().backward()
    torch.testing.assert_close(output, value.mean(2)[:, None].expand_as(output), rtol=1e-2, atol=1e-3)
    assert query.grad.isfinite().all() and proj.grad.isfinite().all()


@pytest.mark.parametrize("b, n, m", [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_kernels_return_zeros_for_empty_inputs(b, n, m):
    query, key, value = (torch.randn(b, 2, size, 4, requires_grad=True) for size in (n, m, m))
    proj = torch.eye(2, requires_grad=True)
    output = talking_heads_attention(query, key, value, scaling=1.0, dropout=0.1, logits_proj=proj)
    output.sum().backward()
    assert output.shape == (b, n, 2, 4) and not output.any() and not proj.grad.any()


def test_kernels_allocate_no_quadratic_tensor(monkeypatch):
    monkeypatch.setitem(blocked_attention.BLOCK_ELEMENTS, "cpu", 2**12)
    query, key, value, _, logits_proj, weights_proj = (
        None if t is None else t.detach() for t in make_inputs(n=256, m=256)
    )
    operands = AttentionOperands(query, key, value, logits_proj=logits_proj, weights_proj=weights_proj)
    with LargestTensor() as largest:
        output, threads = blocked_attention.blocked_forward(operands)
        blocked_attention.blocked_backward(torch.ones_like(output), threads, False, operands)
    assert largest.numel <= max(2**12, query.numel()) < 4 * 256 * 256


def test_kernel_backend_is_selected_and_validated():
    query, key, value, *_ = make_inputs(dtype=torch.float64)
    with pytest.raises(ValueError, match="`backend`"):
        talking_heads_attention(query, key, value, scaling=1.0, backend="fast")
    with pytest.raises(ValueError, match="`dropout`"):
        talking_heads_attention(query, key, value, scaling=1.0, dropout=1.0)
    assert not triton_attention.supports_operands(AttentionOperands(query, key, value))
    with pytest.raises(ValueError, match="`backend` must be"):
        talking_heads_attention(query, key, value, scaling=1.0, backend="triton")
    assert talking_heads_attention(query, key, value, scaling=1.0).dtype == torch.float64


@pytest.mark.skipif(CUDA or INTERPRETED, reason="Triton kernels may be selected")
def test_blocked_kernels_run_without_triton(monkeypatch):
    monkeypatch.setitem(backend_choice.BACKENDS, "triton", (None, None))
    compare("auto", make_inputs("gqa"))
    assert not backend_choice._trial_results
