"""The talking-heads kernels against the specification: outputs and every gradient, over masks, biases and head counts.

The Triton kernels run on a GPU, or on a CPU through Triton's interpreter: slowly, so over fewer cases, and in another
process, because the variable that asks for it is read when Triton is imported.
"""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hf_attn_variants.modeling import talking_heads, talking_heads_blocked, talking_heads_choice, talking_heads_triton
from hf_attn_variants.modeling.attention_variants import attention_with_weights
from hf_attn_variants.modeling.talking_heads import talking_heads_attention
from hf_attn_variants.reference import attention_core

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available()
needs_triton = pytest.mark.skipif(
    talking_heads_triton.triton is None or not (CUDA or INTERPRETED), reason="needs a GPU or Triton's interpreter"
)
BACKENDS = ["blocked", pytest.param("triton", marks=needs_triton)]

B, N, M, D = 2, 3 if INTERPRETED else 5, 19, 8
MASKS = [None, "padding", "rows", "heads", "additive", "infinite", "causal", "causal padding"]
BIASES = [None, (1, N, M), (B, N, M), (1, 1, M)]  # the batch, query and key axes of [., h, ., .]
HEADS = {  # h_k, h, h_v, key heads, value heads
    "mha": (4, 4, 4, 4, 4),
    "gqa": (4, 4, 4, 2, 2),
    "mqa": (4, 4, 4, 1, 1),
    "all different": (6, 5, 4, 2, 2),
    "own value heads": (3, 4, 6, 3, 6),
    "more than sixteen": (17, 3, 20, 17, 20),
    "more than thirty-two": (33, 3, 36, 33, 36),
}
MIXES = ["both", "logits", "weights", "none"]
if INTERPRETED:
    MASKS_AND_BIASES = list(zip(MASKS, itertools.cycle(BIASES), strict=False))
    HEADS_AND_MIXES = [(heads, "both") for heads in HEADS if heads[0] != "m"] + [("gqa", mixes) for mixes in MIXES[1:]]
    LENGTHS = [(1, 33, None), (4, 40, "causal")]
else:
    MASKS_AND_BIASES = list(itertools.product(MASKS, BIASES))
    HEADS_AND_MIXES = [
        (heads, mixes)
        for heads, mixes in itertools.product(HEADS, MIXES)
        if mixes in ("both", "weights") or HEADS[heads][0] == HEADS[heads][2]  # other value heads need P_w
    ]
    LENGTHS = [(*size, kind) for size in ((1, 33), (1, 1), (40, 7), (7, 40)) for kind in (None, "causal")]


@pytest.fixture(autouse=True)
def _seed_and_small_blocks(monkeypatch):
    torch.manual_seed(0)
    # Several blocks of rows, and several sequences of which the last block has fewer, at the sizes of these tests.
    monkeypatch.setitem(talking_heads_blocked.BLOCK_ELEMENTS, "cpu", 200)
    monkeypatch.setattr(talking_heads_blocked, "ROWS", (3, 2))
    monkeypatch.setattr(talking_heads_triton, "WORKSPACE_BYTES", 700)
    monkeypatch.setattr(talking_heads_choice, "_agreed", {})


def make_inputs(heads="mha", bias=None, mixes="both", n=N, m=M, dtype=torch.float32, device="cpu"):
    """query, key, value, position_bias, logits_proj, weights_proj: leaves that want a gradient, or None."""
    h_k, h, h_v, key_heads, value_heads = HEADS[heads]
    if mixes != "both":
        h = h_k if mixes != "logits" else h
        h_v = h if mixes != "weights" else h_v

    def new(*shape):
        return torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_()

    return [
        new(B, h_k, n, D),
        new(B, key_heads, m, D),
        new(B, value_heads, m, D),
        None if bias is None else new(bias[0], h, *bias[1:]),
        new(h_k, h) if mixes in ("both", "logits") else None,
        new(h, h_v) if mixes in ("both", "weights") else None,
    ]


def make_mask(kind, h=4, n=N, m=M, device="cpu"):
    """The mask that the kernels get, whether the call is causal, and both as what the specification adds."""
    mask = None
    if kind in ("padding", "causal padding"):
        mask = torch.arange(m) < torch.tensor([m - 4, m])[:, None, None, None]
        if kind == "padding":
            mask = mask & (torch.arange(m) != 1)
    elif kind == "rows":
        mask = torch.rand(B, 1, n, m) > 0.3
        mask[0, :, 1] = False
    elif kind == "heads":
        mask = torch.rand(1, h, n, m) > 0.3
        mask[:, 2, 0] = False
    elif kind == "additive":
        mask = torch.zeros(B, 1, n, m).masked_fill(torch.rand(B, 1, n, m) > 0.6, torch.finfo(torch.float32).min)
        mask[1, :, 2] = torch.finfo(torch.float32).min
    elif kind == "infinite":
        mask = torch.zeros(B, 1, n, m).masked_fill(torch.rand(B, 1, n, m) > 0.6, -torch.inf)
        mask[1, :, 2] = -torch.inf
    causal = kind is not None and kind.startswith("causal")
    allowed = torch.ones(n, m, dtype=torch.bool).tril() if causal else torch.ones(n, m, dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    added = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    if kind == "additive":
        added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask < 0, torch.finfo(torch.float64).min)
    if kind == "infinite":
        added = mask.double()
    return None if mask is None else mask.to(device), causal, added


def compare(backend, inputs, mask=None, causal=False, added=None, tolerance=1e-5):
    query, key, value, bias, logits_proj, weights_proj = inputs
    output = talking_heads_attention(
        query, key, value, mask, bias, scaling=D**-0.5, is_causal=causal, logits_proj=logits_proj,
        weights_proj=weights_proj, backend=backend,
    )  # fmt: skip
    exact = [None if t is None else t.detach().cpu().double().requires_grad_() for t in inputs]
    expected, _ = attention_core(
        *exact[:3], scale=D**-0.5, P_l=exact[4], P_w=exact[5], bias=exact[3], mask=added
    )  # [b, h_v, n, d]
    expected = expected.transpose(1, 2)
    d_output = torch.randn_like(expected).to(output.dtype)
    output.backward(d_output.to(output.device))
    expected.backward(d_output.double())
    assert output.dtype == value.dtype and output.shape == expected.shape
    _assert_close(output, expected, tolerance, "output")
    for name, got, want in zip(("query", "key", "value", "bias", "P_l", "P_w"), inputs, exact, strict=True):
        if got is not None:
            _assert_close(got.grad, want.grad, tolerance, name)


def _assert_close(got, want, tolerance, name):
    error = (got.detach().cpu().double() - want).norm() / want.norm().clamp_min(1e-30)
    assert error < tolerance, f"{name}: relative error {error:.1e}"


def _device(backend):
    return "cuda" if CUDA and backend == "triton" else "cpu"


@pytest.mark.parametrize("kind, bias", MASKS_AND_BIASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_specification_over_masks_and_biases(backend, kind, bias):
    device = _device(backend)
    mask, causal, added = make_mask(kind, device=device)
    compare(backend, make_inputs("gqa", bias, device=device), mask, causal, added)


@pytest.mark.parametrize("heads, mixes", HEADS_AND_MIXES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_specification_over_head_counts(backend, heads, mixes):
    compare(backend, make_inputs(heads, mixes=mixes, device=_device(backend)))


@pytest.mark.parametrize("n, m, kind", LENGTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_specification_over_lengths(backend, n, m, kind):
    device = _device(backend)
    mask, causal, added = make_mask(kind, n=n, m=m, device=device)
    compare(backend, make_inputs("all different", n=n, m=m, device=device), mask, causal, added)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_heads_in_several_blocks_of_keys(backend):
    compare(backend, make_inputs("more than thirty-two", n=2, m=70, device=_device(backend)))


@pytest.fixture
def set_threads():
    """Sets the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.skipif(INTERPRETED, reason="of the blocked path alone")
@pytest.mark.parametrize("bias", [None, (1, 12, M), (1, 1, M)], ids=str)
@pytest.mark.parametrize("kind", MASKS, ids=str)
@pytest.mark.parametrize("batches, threads", [(1, 2), (1, 3), (1, 5), (2, 2), (2, 3)])
def test_equals_the_specification_with_several_threads(set_threads, batches, threads, kind, bias):
    set_threads(threads)
    inputs = make_inputs("gqa", bias, n=12)
    inputs[:3] = (t[:batches].detach().requires_grad_() for t in inputs[:3])
    mask, causal, added = make_mask(kind, n=12)
    mask, added = (t if t is None or t.dim() < 4 else t[:batches] for t in (mask, added))
    compare("blocked", inputs, mask, causal, added)


@pytest.mark.parametrize("batches", [1, B])
def test_dropout_drops_the_same_when_the_number_of_threads_changes_before_the_backward_pass(set_threads, batches):
    query, key, value, _, logits_proj, weights_proj = make_inputs(n=12, dtype=torch.float64)
    value = value[:batches].detach().requires_grad_()
    set_threads(3)
    output = talking_heads_attention(
        query[:batches], key[:batches], value, scaling=1.0, dropout=0.5, logits_proj=logits_proj,
        weights_proj=weights_proj,
    )  # fmt: skip
    set_threads(1)
    d_output = torch.randn_like(output)
    output.backward(d_output)
    # The output is linear in the values, whatever is dropped.
    torch.testing.assert_close((value.grad * value).sum(), (d_output * output).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_stays_within_its_rounding(backend, dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter's tl.dot reads bfloat16 as integers")
    device = _device(backend)
    inputs = make_inputs("gqa", (1, N, M), dtype=dtype, device=device)
    mask, causal, added = make_mask("rows", device=device)
    compare(backend, inputs, mask, causal, added, tolerance=2e-2)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("n", [1024, 1500, 3000])
@pytest.mark.parametrize("kind", [None, "causal padding"])
def test_long_rows_on_a_gpu(monkeypatch, kind, n):
    # One block of keys for a row, and several.
    monkeypatch.setattr(talking_heads_triton, "WORKSPACE_BYTES", 2**24)
    mask, causal, added = make_mask(kind, n=n, m=n, device="cuda")
    compare("triton", make_inputs("gqa", n=n, m=n, device="cuda"), mask, causal, added)
    compare("triton", make_inputs("gqa", n=n, m=n, device="cuda", dtype=torch.bfloat16), mask, causal, added, 2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_may_attend_to_nothing(backend):
    device = _device(backend)
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
def test_gradients_by_finite_differences(kind, dropout):
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_drops_single_weights(backend):
    device, dropout = _device(backend), 0.25
    query, key, _, _, logits_proj, weights_proj = make_inputs(n=6, m=80, device=device)
    # Values that show the weights themselves.
    value = torch.eye(80, device=device).expand(B, 4, 80, 80)
    call = {"scaling": 1.0, "logits_proj": logits_proj, "weights_proj": weights_proj, "backend": backend}
    weights = talking_heads_attention(query, key, value, **call)  # [b, n, h_v, m]
    dropped = talking_heads_attention(query, key, value, dropout=dropout, **call)
    kept = dropped != 0
    assert abs(kept.float().mean() - (1 - dropout)) < 0.03
    torch.testing.assert_close(dropped[kept], weights[kept] / (1 - dropout), rtol=1e-4, atol=1e-6)
    for one, other in ((kept[0], kept[1]), (kept[:, :3], kept[:, 3:]), (kept[:, :, 0], kept[:, :, 1])):
        assert abs((one == other).float().mean() - (dropout**2 + (1 - dropout) ** 2)) < 0.06
    again = talking_heads_attention(query, key, value, dropout=dropout, **call) != 0
    assert (again != kept).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_drops_the_same_in_both_passes(backend):
    inputs = make_inputs("all different", device=_device(backend))
    query, key, value, _, logits_proj, weights_proj = inputs

    def attend(value, weights_proj):
        torch.manual_seed(3)
        return talking_heads_attention(
            query, key, value, scaling=1.0, dropout=0.4, logits_proj=logits_proj, weights_proj=weights_proj,
            backend=backend,
        )  # fmt: skip

    output = attend(value, weights_proj)
    direction = torch.randn_like(output)
    output.backward(direction)
    # The output is linear in V and in P_w, given what is dropped.
    for moved, change in (
        (attend(value + 1, weights_proj), value.grad.sum()),
        (attend(value, weights_proj + 1), weights_proj.grad.sum()),
    ):
        torch.testing.assert_close(((moved - output) * direction).sum(), change, rtol=1e-3, atol=1e-3)


def test_checkpointing_repeats_the_dropout():
    inputs = make_inputs()
    query, key, value, _, logits_proj, weights_proj = inputs

    def attend(*states):
        return talking_heads_attention(
            *states, scaling=1.0, dropout=0.5, logits_proj=logits_proj, weights_proj=weights_proj
        )

    gradients = []
    for run in (attend, lambda *states: checkpoint(attend, *states, use_reentrant=False)):
        torch.manual_seed(5)
        run(query, key, value).square().sum().backward()
        gradients.append([t.grad.clone() for t in inputs if t is not None])
        for tensor in inputs:
            if tensor is not None:
                tensor.grad = None
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_autocast_takes_the_low_precision_and_keeps_the_parameters_in_theirs():
    inputs = make_inputs()
    query, key, value, _, logits_proj, weights_proj = inputs
    call = {"scaling": 0.3, "logits_proj": logits_proj, "weights_proj": weights_proj}
    exact = attention_with_weights(query, key, value, **call)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = talking_heads_attention(query, key, value, **call)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(t.grad.dtype == torch.float32 for t in (query, logits_proj, weights_proj))
    _assert_close(output, exact.detach().double(), 3e-2, "output")


@pytest.mark.filterwarnings("ignore")
def test_compiles_into_one_graph():
    inputs = make_inputs("gqa", (1, N, M))

    def attend(query, key, value, bias, logits_proj, weights_proj):
        return talking_heads_attention(
            query * 2, key, value, None, bias, scaling=1.0, is_causal=True, logits_proj=logits_proj,
            weights_proj=weights_proj,
        ).sin()  # fmt: skip

    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for got, want in zip(torch.autograd.grad(compiled(*inputs).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter long")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_the_custom_op_describes_itself(backend):
    device = _device(backend)
    query, key, value, bias, logits_proj, weights_proj = make_inputs("own value heads", (1, N, M), device=device)
    seed = torch.tensor([7], device=device)
    inputs = (query, key, value, None, bias, logits_proj, weights_proj, seed, 0.5, True, 0.1, backend, True)
    # The fake implementation's shapes, the schema, autograd's registration; dynamic shapes are traced apart.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    name = f"{talking_heads.NAMESPACE}::talking_heads"
    torch.library.opcheck(getattr(torch.ops, name.split("::")[0]).talking_heads.default, inputs, test_utils=tests)


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_dot_products_do_not_overflow(backend):
    device = _device(backend)
    states = torch.full((1, 2, 3, 64), 40.0, dtype=torch.float16, device=device)  # q k = 102,400, beyond float16
    query, key = (states.clone().requires_grad_() for _ in range(2))
    value = torch.randn(1, 2, 3, 64, device=device).half()
    proj = torch.eye(2, device=device).requires_grad_()
    output = talking_heads_attention(query, key, value, scaling=0.125, logits_proj=proj, backend=backend)
    output.sum().backward()
    torch.testing.assert_close(output, value.mean(2)[:, None].expand_as(output), rtol=1e-2, atol=1e-3)
    assert query.grad.isfinite().all() and proj.grad.isfinite().all()


@pytest.mark.parametrize("b, n, m", [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_empty_inputs_give_zeros(b, n, m):
    query, key, value = (torch.randn(b, 2, size, 4, requires_grad=True) for size in (n, m, m))
    proj = torch.eye(2, requires_grad=True)
    output = talking_heads_attention(query, key, value, scaling=1.0, dropout=0.1, logits_proj=proj)
    output.sum().backward()
    assert output.shape == (b, n, 2, 4) and not output.any() and not proj.grad.any()


@pytest.mark.skipif(talking_heads_triton.triton is None, reason="needs Triton")
def test_chunks_are_as_few_as_the_workspace_allows(monkeypatch):
    monkeypatch.setattr(talking_heads_triton, "WORKSPACE_BYTES", 2**10)
    for rows in (1, 31, 512, 4096, 5000):
        for fitting in (1, 33, 48, 512, 1000):
            chunks = list(talking_heads_triton._chunks(1, rows, 2**10 // fitting))
            most = max(row.stop - row.start for _, row in chunks)
            fitting_now = max(1, 2**10 // (2**10 // fitting))
            assert [row.start for _, row in chunks] == [0, *(row.stop for _, row in chunks[:-1])]
            assert chunks[-1][1].stop == rows and most <= fitting_now
            whole = fitting_now // 16 * 16 if fitting_now >= 32 else fitting_now  # rows in sixteens
            assert len(chunks) <= -(-rows // whole)


def test_no_tensor_grows_with_n_times_m(monkeypatch):
    monkeypatch.setitem(talking_heads_blocked.BLOCK_ELEMENTS, "cpu", 2**12)
    query, key, value, _, logits_proj, weights_proj = (
        None if t is None else t.detach() for t in make_inputs(n=256, m=256)
    )
    inputs = (query, key, value, None, None, logits_proj, weights_proj, None, 1.0, False, 0.0)
    with _LargestTensor() as largest:
        output, statistics = talking_heads_blocked.forward(*inputs)
        talking_heads_blocked.backward(torch.ones_like(output), statistics, False, *inputs)
    assert largest.numel <= max(2**12, query.numel()) < 4 * 256 * 256


def test_the_backend_is_chosen_and_checked():
    query, key, value, *_ = make_inputs(dtype=torch.float64)
    with pytest.raises(ValueError, match=r"`backend` must be one of \['auto', 'blocked', 'triton'\], got 'fast'"):
        talking_heads_attention(query, key, value, scaling=1.0, backend="fast")
    with pytest.raises(ValueError, match=r"`dropout` must be at least 0 and below 1, got 1\.0"):
        talking_heads_attention(query, key, value, scaling=1.0, dropout=1.0)
    assert not talking_heads_triton.is_supported(query, key, value)
    with pytest.raises(ValueError, match="does not cover these inputs"):
        talking_heads_attention(query, key, value, scaling=1.0, backend="triton")
    assert talking_heads_attention(query, key, value, scaling=1.0).dtype == torch.float64


@needs_triton
@pytest.mark.parametrize("kind, mixes", [("heads", "both"), ("causal padding", "logits"), ("additive", "weights")])
def test_triton_is_chosen_where_it_agrees(monkeypatch, kind, mixes):
    device = _device("triton")
    used = _count_calls(monkeypatch)
    mask, causal, added = make_mask(kind, device=device)
    compare("auto", make_inputs("gqa", (1, N, M), mixes, device=device), mask, causal, added)
    assert used == {"forward": 2, "backward": 2}  # the trial and the call
    compare("auto", make_inputs("gqa", (1, N, M), mixes, device=device), mask, causal, added)
    assert used == {"forward": 3, "backward": 3}


@needs_triton
def test_triton_is_tried_without_a_backward_pass_where_none_will_come(monkeypatch):
    used = _count_calls(monkeypatch)
    query, key, value, *_ = make_inputs(device=_device("triton"))
    with torch.no_grad():
        talking_heads_attention(query, key, value, scaling=1.0)
    assert used == {"forward": 2, "backward": 0}
    talking_heads_attention(query, key, value, scaling=1.0).sum().backward()
    assert used == {"forward": 4, "backward": 2}


@needs_triton
def test_triton_tries_do_not_move_the_random_numbers(monkeypatch):
    query, key, value, *_ = make_inputs(device=_device("triton"))
    outputs = []
    for _ in range(2):  # with a trial, and without one
        torch.manual_seed(7)
        outputs.append(talking_heads_attention(query, key, value, scaling=1.0, dropout=0.5))
    assert torch.equal(*outputs)


@needs_triton
@pytest.mark.parametrize("failure", ["raises", "is wrong", "is not a number", "wrong gradient"])
def test_triton_is_not_used_where_it_fails(monkeypatch, failure):
    forward, backward = talking_heads_choice.BACKENDS["triton"]

    def failing_forward(*inputs):
        if failure == "raises":
            raise RuntimeError("out of resource: shared memory")
        output, statistics = forward(*inputs)
        if failure == "wrong gradient":
            return output, statistics
        return output * (torch.nan if failure == "is not a number" else 1.5), statistics

    def failing_backward(*inputs):
        d_query, *others = backward(*inputs)
        return [d_query * 1.5, *others]

    monkeypatch.setitem(talking_heads_choice.BACKENDS, "triton", (failing_forward, failing_backward))
    warnings = []
    monkeypatch.setattr(talking_heads_choice.logger, "warning", warnings.append)
    device = _device("triton")
    for _ in range(2):
        mask, causal, added = make_mask("rows", device=device)
        compare("auto", make_inputs("gqa", (1, N, M), device=device), mask, causal, added)
    assert len(warnings) == 1 and "are computed by the blocked path, which is exact and slower" in warnings[0]
    reason = "failed with RuntimeError: out of resource" if failure == "raises" else "gave other numbers"
    assert reason in warnings[0]


@needs_triton
@pytest.mark.skipif(CUDA, reason="the interpreter's tl.dot reads bfloat16 as integers: a kernel that is really wrong")
def test_triton_is_not_used_where_the_interpreter_gets_bfloat16_wrong():
    inputs = make_inputs("gqa", (1, N, M), dtype=torch.bfloat16)
    mask, causal, added = make_mask("rows")
    compare("auto", inputs, mask, causal, added, tolerance=2e-2)
    assert list(talking_heads_choice._agreed.values()) == [False]


@needs_triton
def test_triton_is_not_used_where_it_forgets_one_key(monkeypatch):
    forward, backward = talking_heads_choice.BACKENDS["triton"]

    def forgetting(query, key, value, *others):
        return forward(query, key, value.index_fill(2, torch.tensor(900, device=value.device), 0.0), *others)

    query, key, value, _, logits_proj, weights_proj = make_inputs(
        "more than sixteen", m=1000, device=_device("triton"), dtype=torch.float16
    )
    call = {"scaling": D**-0.5, "logits_proj": logits_proj, "weights_proj": weights_proj}
    monkeypatch.setattr(talking_heads_triton, "WORKSPACE_BYTES", 2**20)
    with torch.no_grad():
        talking_heads_attention(query, key, value, **call)
        assert list(talking_heads_choice._agreed.values()) == [True]
    monkeypatch.setattr(talking_heads_choice, "_agreed", {})

    def forgetful_backward(*inputs):
        d_query, d_key, d_value, *others = backward(*inputs)
        d_value[:, :, 900] = 0.0
        return [d_query, d_key, d_value, *others]

    monkeypatch.setitem(talking_heads_choice.BACKENDS, "triton", (forgetting, forgetful_backward))
    talking_heads_attention(query, key, value, **call)
    assert list(talking_heads_choice._agreed.values()) == [False]


@needs_triton
def test_triton_is_asked_whichever_switch_for_tf32_was_used(monkeypatch):
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch has one switch only")
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # from here on, reading `allow_tf32` raises
        assert talking_heads_triton.allows_tf32()
        compare("auto", make_inputs("gqa", device=_device("triton")), tolerance=1e-5 if not CUDA else 1e-2)
        assert list(talking_heads_choice._agreed.values()) == [True]
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.skipif(talking_heads_triton.triton is None, reason="needs Triton")
@pytest.mark.parametrize("n", [17, 100, 128, 512])
def test_triton_compiles_the_code_that_it_was_tried_with(monkeypatch, n):
    """What Triton specialises a launch for is the same in the trial and in the call, whatever the length."""
    launches = []

    def record(call, kernel, pointers, batch, row, memory, settings):
        strides = [(0,) * 4 if t is None else t.stride() for t in (call.bias, call.mask)]
        steps = [min(s, 2) for four in strides for s in four[1::2]]
        launches.append((kernel, tuple(steps), tuple(sorted((call.constants | settings).items(), key=str))))

    monkeypatch.setattr(talking_heads_triton, "WORKSPACE_BYTES", 2**24)
    monkeypatch.setattr(talking_heads_triton._Call, "launch", record)
    monkeypatch.setattr(talking_heads_triton, "covers_device", lambda device: True)
    monkeypatch.setattr(talking_heads, "covers_device", lambda device: True)
    monkeypatch.setattr(talking_heads_choice, "_largest_error", lambda *_: 0.0)
    query, key, value, _, logits_proj, weights_proj = make_inputs("gqa", n=n, m=n, dtype=torch.bfloat16)
    bias = torch.randn(1, n, n, 4).permute(0, 3, 1, 2).requires_grad_()  # as T5 computes it
    mask = make_mask("padding", n=n, m=n)[0]
    talking_heads_attention(
        query, key, value, mask, bias, scaling=1.0, logits_proj=logits_proj, weights_proj=weights_proj
    ).sum().backward()
    assert len(launches) == 4 and launches[2:] == launches[:2]  # forward and backward, tried and called


@needs_triton
@pytest.mark.filterwarnings("ignore")
def test_triton_is_chosen_in_a_compiled_graph(monkeypatch):
    used = _count_calls(monkeypatch)
    inputs = make_inputs("gqa", device=_device("triton"))
    inputs = [t for t in inputs if t is not None]

    def attend(query, key, value, logits_proj, weights_proj):
        return talking_heads_attention(
            query * 2, key, value, scaling=1.0, logits_proj=logits_proj, weights_proj=weights_proj
        ).sin()

    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for got, want in zip(torch.autograd.grad(compiled(*inputs).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(got, want)
    assert used == {"forward": 3, "backward": 3}


def _count_calls(monkeypatch):
    """Counts what goes to the Triton kernels, trials included."""
    counts = {"forward": 0, "backward": 0}

    def counted(name, function):
        def call(*inputs):
            counts[name] += 1
            return function(*inputs)

        return call

    forward, backward = talking_heads_choice.BACKENDS["triton"]
    pair = counted("forward", forward), counted("backward", backward)
    monkeypatch.setitem(talking_heads_choice.BACKENDS, "triton", pair)
    return counts


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels may be chosen")
def test_the_blocked_path_serves_where_triton_does_not(monkeypatch):
    monkeypatch.setitem(talking_heads_choice.BACKENDS, "triton", (None, None))
    compare("auto", make_inputs("gqa"))
    assert not talking_heads_choice._agreed


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_triton_through_its_interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-k", "triton", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:]
    assert "passed" in run.stdout


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_loads_where_there_is_no_triton():
    # The package stands in empty: what is asked is whether these files load, and its models take long to.
    code = (
        "import sys, types; sys.modules['triton'] = None\n"
        "package = sys.modules['hf_attn_variants'] = types.ModuleType('hf_attn_variants')\n"
        "package.__path__ = ['hf_attn_variants']\n"
        "import torch\n"
        "from hf_attn_variants.modeling import talking_heads_triton\n"
        "x = torch.ones(1, 2, 3, 4)\n"
        "assert talking_heads_triton.triton is None and not talking_heads_triton.is_supported(x, x, x)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=120)
