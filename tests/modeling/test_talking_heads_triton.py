"""Check when the Triton kernels serve a talking-heads call, and run the kernel tests in Triton's interpreter.

The interpreter needs another process, because Triton reads its environment variable when it is imported.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures.talking_heads_calls import (
    CUDA,
    INTERPRETED,
    D,
    M,
    N,
    compare,
    get_device,
    make_inputs,
    make_mask,
    needs_triton,
    run_in_interpreter,
)

from hf_attn_variants.modeling.ops import backend_choice, memory_efficient_attention, triton_attention
from hf_attn_variants.modeling.ops.memory_efficient_attention import talking_heads_attention

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.skipif(triton_attention.triton is None, reason="needs Triton")
def test_triton_uses_as_few_chunks_as_the_workspace_allows(monkeypatch):
    monkeypatch.setattr(triton_attention, "WORKSPACE_BYTES", 2**10)
    for rows in (1, 31, 512, 4096, 5000):
        for fitting in (1, 33, 48, 512, 1000):
            chunks = list(triton_attention._yield_chunks(1, rows, 2**10 // fitting))
            most = max(row.stop - row.start for _, row in chunks)
            fitting_now = max(1, 2**10 // (2**10 // fitting))
            assert [row.start for _, row in chunks] == [0, *(row.stop for _, row in chunks[:-1])]
            assert chunks[-1][1].stop == rows and most <= fitting_now
            rounded = fitting_now // 16 * 16 if fitting_now >= 32 else fitting_now  # multiples of 16 rows
            assert len(chunks) <= -(-rows // rounded)


@needs_triton
@pytest.mark.parametrize("kind, mixes", [("heads", "both"), ("causal padding", "logits"), ("additive", "weights")])
def test_triton_is_used_after_an_agreeing_trial(monkeypatch, kind, mixes):
    device = get_device("triton")
    used = _count_calls(monkeypatch)
    for count in (2, 3):  # the trial and the call, and another call
        compare("auto", make_inputs("gqa", (1, N, M), mixes, device=device), *make_mask(kind, device=device))
        assert used == {"forward": count, "backward": count}


@needs_triton
def test_triton_trial_skips_the_backward_pass_in_inference(monkeypatch):
    used = _count_calls(monkeypatch)
    query, key, value, *_ = make_inputs(device=get_device("triton"))
    with torch.no_grad():
        talking_heads_attention(query, key, value, scaling=1.0)
    assert used == {"forward": 2, "backward": 0}
    talking_heads_attention(query, key, value, scaling=1.0).sum().backward()
    assert used == {"forward": 4, "backward": 2}


@needs_triton
def test_triton_trials_keep_the_random_state(monkeypatch):
    query, key, value, *_ = make_inputs(device=get_device("triton"))
    outputs = []
    for _ in range(2):  # only the first call runs a trial
        torch.manual_seed(7)
        outputs.append(talking_heads_attention(query, key, value, scaling=1.0, dropout=0.5))
    assert torch.equal(*outputs)


@needs_triton
@pytest.mark.parametrize("failure", ["raises", "is wrong", "is not a number", "wrong gradient"])
def test_triton_is_not_used_after_a_failure(monkeypatch, failure):
    forward, backward = backend_choice.BACKENDS["triton"]

    def failing_forward(operands):
        if failure == "raises":
            raise RuntimeError("out of resource: shared memory")
        output, statistics = forward(operands)
        if failure == "wrong gradient":
            return output, statistics
        return output * (torch.nan if failure == "is not a number" else 1.5), statistics

    def failing_backward(*inputs):
        d_query, *others = backward(*inputs)
        return [d_query * 1.5, *others]

    monkeypatch.setitem(backend_choice.BACKENDS, "triton", (failing_forward, failing_backward))
    warnings = []
    monkeypatch.setattr(backend_choice.logger, "warning", warnings.append)
    device = get_device("triton")
    for _ in range(2):
        compare("auto", make_inputs("gqa", (1, N, M), device=device), *make_mask("rows", device=device))
    assert len(warnings) == 1 and "The slower blocked backend computes talking-heads attention" in warnings[0]
    reason = "failed with RuntimeError: out of resource" if failure == "raises" else "returned different values"
    assert reason in warnings[0]


@needs_triton
@pytest.mark.skipif(CUDA, reason="needs the wrong tl.dot of the interpreter, which reads bfloat16 as integers")
def test_triton_interpreter_is_not_used_for_bfloat16():
    inputs = make_inputs("gqa", (1, N, M), dtype=torch.bfloat16)
    compare("auto", inputs, *make_mask("rows"), tolerance=2e-2)
    assert list(backend_choice._trial_results.values()) == [False]


@needs_triton
def test_triton_is_not_used_if_it_skips_one_key(monkeypatch):
    forward, backward = backend_choice.BACKENDS["triton"]

    def forgetting(operands):
        value = operands.value
        return forward(operands._replace(value=value.index_fill(2, torch.tensor(900, device=value.device), 0.0)))

    query, key, value, _, logits_proj, weights_proj = make_inputs(
        "more than sixteen", m=1000, device=get_device("triton"), dtype=torch.float16
    )
    call = {"scaling": D**-0.5, "logits_proj": logits_proj, "weights_proj": weights_proj}
    monkeypatch.setattr(triton_attention, "WORKSPACE_BYTES", 2**20)
    with torch.no_grad():
        talking_heads_attention(query, key, value, **call)
        assert list(backend_choice._trial_results.values()) == [True]
    monkeypatch.setattr(backend_choice, "_trial_results", {})

    def forgetful_backward(*inputs):
        d_query, d_key, d_value, *others = backward(*inputs)
        d_value[:, :, 900] = 0.0
        return [d_query, d_key, d_value, *others]

    monkeypatch.setitem(backend_choice.BACKENDS, "triton", (forgetting, forgetful_backward))
    talking_heads_attention(query, key, value, **call)
    assert list(backend_choice._trial_results.values()) == [False]


@needs_triton
def test_triton_trial_accepts_every_tf32_setting(monkeypatch):
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this version of torch has only one TF32 setting")
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # from here on, reading `allow_tf32` raises
        assert triton_attention.allows_tf32()
        compare("auto", make_inputs("gqa", device=get_device("triton")), tolerance=1e-5 if not CUDA else 1e-2)
        assert list(backend_choice._trial_results.values()) == [True]
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.skipif(triton_attention.triton is None, reason="needs Triton")
@pytest.mark.parametrize("n", [17, 100, 128, 512])
def test_triton_call_uses_the_specialization_of_the_trial(monkeypatch, n):
    """Check that the trial and the call use the same specializations of kernels at every length."""
    launches = []

    def record(call, kernel, pointers, batch, row, memory, settings):
        strides = [(0,) * 4 if t is None else t.stride() for t in (call.bias, call.mask)]
        steps = [min(s, 2) for four in strides for s in four[1::2]]
        launches.append((kernel, tuple(steps), tuple(sorted((call.constants | settings).items(), key=str))))

    monkeypatch.setattr(triton_attention, "WORKSPACE_BYTES", 2**24)
    monkeypatch.setattr(triton_attention._TritonCall, "launch", record)
    monkeypatch.setattr(triton_attention, "supports_device", lambda device: True)
    monkeypatch.setattr(memory_efficient_attention, "supports_device", lambda device: True)
    monkeypatch.setattr(backend_choice, "compute_largest_error", lambda *_: 0.0)
    query, key, value, _, logits_proj, weights_proj = make_inputs("gqa", n=n, m=n, dtype=torch.bfloat16)
    bias = torch.randn(1, n, n, 4).permute(0, 3, 1, 2).requires_grad_()  # the memory layout of T5's bias
    mask = make_mask("padding", n=n, m=n)[0]
    talking_heads_attention(
        query, key, value, mask, bias, scaling=1.0, logits_proj=logits_proj, weights_proj=weights_proj
    ).sum().backward()
    assert len(launches) == 4 and launches[2:] == launches[:2]  # forward and backward, in trial and call


@needs_triton
@pytest.mark.filterwarnings("ignore")
def test_triton_is_used_in_a_compiled_graph(monkeypatch):
    used = _count_calls(monkeypatch)
    inputs = make_inputs("gqa", device=get_device("triton"))
    inputs = [t for t in inputs if t is not None]

    def attend(query, key, value, logits_proj, weights_proj):
        return talking_heads_attention(
            query * 2, key, value, scaling=1.0, logits_proj=logits_proj, weights_proj=weights_proj
        ).sin()

    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs).sum(), inputs), expected)
    assert used == {"forward": 3, "backward": 3}


def _count_calls(monkeypatch):
    """Count the calls of the Triton kernels, including trials."""
    counts = {"forward": 0, "backward": 0}

    def counted(name, function):
        def call(*inputs):
            counts[name] += 1
            return function(*inputs)

        return call

    forward, backward = backend_choice.BACKENDS["triton"]
    pair = counted("forward", forward), counted("backward", backward)
    monkeypatch.setitem(backend_choice.BACKENDS, "triton", pair)
    return counts


@pytest.mark.thorough
@pytest.mark.skipif(INTERPRETED, reason="already runs in the interpreter")
def test_talking_heads_kernels_pass_in_the_triton_interpreter():
    run_in_interpreter("-k", "triton", *Path(__file__).parent.glob("test_talking_heads_*.py"))


@pytest.mark.thorough
@pytest.mark.skipif(INTERPRETED, reason="already runs without the interpreter")
def test_package_loads_without_triton():
    # An empty package replaces the real one, because only these files are loaded here.
    code = (
        "import sys, types; sys.modules['triton'] = None\n"
        "package = sys.modules['hf_attn_variants'] = types.ModuleType('hf_attn_variants')\n"
        "package.__path__ = ['hf_attn_variants']\n"
        "import torch\n"
        "from hf_attn_variants.modeling.ops import triton_attention\n"
        "from hf_attn_variants.modeling.ops.blocked_attention import AttentionOperands\n"
        "x = torch.ones(1, 2, 3, 4)\n"
        "assert triton_attention.triton is None and not triton_attention.supports_operands(AttentionOperands(x, x, "
        "x))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=120)
