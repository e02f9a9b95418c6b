"""Check windows with FlexAttention on the CPU: its outputs, and which calls use it. Models use it only on CUDA.

FlexAttention without compilation also has gradients on a CPU if its check is patched. They come from the same formulas
as those of the kernel. `benchmarks/gpu/long_texts.py` contains the checks that need a GPU.
"""

import shutil
from functools import partial

import pytest
import torch
from fixtures.largest_tensor import LargestTensor
from torch.utils.checkpoint import checkpoint

from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertModel
from hf_attn_variants.modeling.ops import backend_choice, flex_windows
from hf_attn_variants.modeling.ops.flex_windows import find_attended_blocks, windowed_attention
from hf_attn_variants.modeling.ops.key_ranges import KeyRange
from hf_attn_variants.modeling.ops.memory_efficient_attention import talking_heads_attention

flex_attention = pytest.importorskip("torch.nn.attention.flex_attention")
if not flex_windows._supports_partial_blocks():
    pytest.skip("this version of torch supports only whole blocks in block masks", allow_module_level=True)

REACHES = {
    "window": KeyRange(20, 20),
    "dilated": KeyRange(60, 60, 3),
    "global": KeyRange(20, 20, 1, 3),
    "dilated, global": KeyRange(40, 40, 2, 130),
    "causal": KeyRange(33, 0),
    "wider than the text": KeyRange(2**31, 2**31),
}
EVERY_REACH = pytest.mark.parametrize("key_range", REACHES.values(), ids=REACHES)
HEADS, KV_HEADS, D = 4, 2, 16


def make_call(n, m=None, padded=False, biased=False):
    """Return queries, keys, values, a mask of the keys and a bias by distance."""
    m = m or n
    torch.manual_seed(0)
    states = [torch.randn(2, heads, length, D) for heads, length in ((HEADS, n), (KV_HEADS, m), (KV_HEADS, m))]
    mask = (torch.arange(m) < torch.tensor([[m], [m // 2]]))[:, None, None] if padded else None
    return [*states, mask, torch.randn(1, HEADS, 1, 2 * m - 1) if biased else None]


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Run FlexAttention on the CPU with gradients but without compiled kernels, and list its calls."""
    calls = []

    def attend(*states, **options):
        calls.append(options)
        return traced(*states, **options)

    torch._dynamo.reset()
    traced = torch.compile(flex_attention.flex_attention, fullgraph=True, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(flex_windows, "DEVICES", ("cpu",))
    monkeypatch.setattr(flex_windows, "_flex_trial_results", {})
    monkeypatch.setattr(flex_windows, "_get_compiled_flex_attention", lambda: attend)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    flex_windows._create_block_mask.cache_clear()
    yield calls
    flex_windows._create_block_mask.cache_clear()
    torch._dynamo.reset()


@EVERY_REACH
@pytest.mark.parametrize("n, m", [(1, 1), (41, 41), (64, 64), (5, 41), (17, 64)])
def test_block_mask_covers_all_allowed_keys(key_range, n, m):
    block, keys = 8, torch.arange(m)
    allowed = key_range.get_allowed_mask(keys[m - n :], keys)
    some, full_blocks = find_attended_blocks(key_range, n, m, block)
    for i in range(some.shape[0]):
        for j in range(some.shape[1]):
            part = allowed[i * block : (i + 1) * block, j * block : (j + 1) * block]
            assert some[i, j] or not part.any()
            assert not full_blocks[i, j] or (some[i, j] and part.all())
            if key_range.step == 1 and key_range.global_tokens == 0:
                assert some[i, j] == part.any() and full_blocks[i, j] == part.all()


@pytest.mark.thorough
@pytest.mark.cross_product
@EVERY_REACH
@pytest.mark.parametrize("padded, biased", [(False, False), (True, True)])
def test_flex_outputs_and_gradients_equal_block_attention(key_range, padded, biased, on_the_cpu):
    *states, mask, bias = make_call(300, padded=padded, biased=biased)
    leaves = [*states, bias] if biased else states
    call = {"key_range": key_range, "scaling": 0.3}
    direction, actual = torch.randn(2, 300, HEADS, D), []
    for attend in (windowed_attention, talking_heads_attention):
        for leaf in leaves:
            leaf.requires_grad_()
        output = attend(*states, mask, bias, **call)
        actual.append([output, *torch.autograd.grad(output, leaves, direction)])
    assert on_the_cpu
    for actual_item, expected_item in zip(*actual, strict=True):
        torch.testing.assert_close(
            actual_item, expected_item, atol=1e-5 * max(1, expected_item.abs().max().item()), rtol=0
        )


@pytest.mark.thorough
def test_flex_windows_handle_more_keys_than_queries(on_the_cpu):
    call = make_call(70, 300, padded=True, biased=True)
    actual = windowed_attention(*call, key_range=KeyRange(150, 0), scaling=0.3)
    assert on_the_cpu
    torch.testing.assert_close(actual, talking_heads_attention(*call, key_range=KeyRange(150, 0), scaling=0.3))


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch needs g++ to compile for a CPU")
def test_compiled_flex_kernel_is_used_after_a_successful_trial(monkeypatch):
    compiled = torch.compile(flex_attention.flex_attention, fullgraph=True, dynamic=False)
    monkeypatch.setattr(flex_windows, "DEVICES", ("cpu",))
    monkeypatch.setattr(flex_windows, "_flex_trial_results", {})
    monkeypatch.setattr(flex_windows, "TRIAL_CALLS", ((2, 300, 0),))
    monkeypatch.setattr(flex_windows, "_get_compiled_flex_attention", lambda: compiled)
    call = make_call(300, padded=True, biased=True)
    actual = windowed_attention(*call, key_range=KeyRange(130, 130, 1, 1), scaling=0.3)
    assert list(flex_windows._flex_trial_results.values()) == [True]
    expected = talking_heads_attention(*call, key_range=KeyRange(130, 130, 1, 1), scaling=0.3)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["wrong", "raises", "raises later"])
def test_disagreeing_flex_kernel_falls_back_to_blocks(fault, on_the_cpu, monkeypatch):
    right, calls, printed = flex_windows._get_compiled_flex_attention(), [], []

    def attend(*states, **options):
        calls.append(states)
        if fault == "raises" or (fault == "raises later" and len(calls) > len(flex_windows.TRIAL_CALLS)):
            raise RuntimeError("no kernel for this")
        return right(*states, **options) * (1.01 if fault == "wrong" else 1)

    monkeypatch.setattr(flex_windows, "_get_compiled_flex_attention", lambda: attend)
    monkeypatch.setattr(backend_choice.logger, "warning", printed.append)
    call, options = make_call(300), {"key_range": KeyRange(20, 20), "scaling": 0.3}
    expected = talking_heads_attention(*call, **options)
    for _ in range(2):
        assert windowed_attention(*call, **options).equal(expected)
    assert len(printed) == 1 and ("different values" if fault == "wrong" else "no kernel for this") in printed[0]
    assert len(calls) == {"wrong": 2, "raises": 1, "raises later": 3}[fault]


def test_dropout_talking_heads_and_float64_use_blocks(on_the_cpu):
    call, options = make_call(300), {"key_range": KeyRange(20, 20), "scaling": 0.3}
    windowed_attention(*call, dropout=0.1, **options)
    windowed_attention(*call, logits_proj=torch.eye(HEADS), weights_proj=torch.eye(HEADS), **options)
    windowed_attention(*(t if t is None else t.double() for t in call), **options)
    assert not on_the_cpu and not flex_windows._flex_trial_results


@pytest.mark.thorough
def test_model_with_windows_uses_flex_attention(on_the_cpu):
    torch.manual_seed(0)
    config = AttnVariantBertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=300, attention_pattern="sliding_window", attention_window=32, num_global_tokens=1,
    )  # fmt: skip
    model = AttnVariantBertModel(config).eval()
    batch = {"input_ids": torch.randint(50, (2, 300)), "attention_mask": torch.ones(2, 300, dtype=torch.long)}
    batch["attention_mask"][1, 200:] = 0
    with torch.no_grad():
        actual = model(**batch).last_hidden_state
        assert len(on_the_cpu) == len(flex_windows.TRIAL_CALLS) + 2  # one call per layer
        model.set_attn_implementation("eager")
        torch.testing.assert_close(actual[:, :200], model(**batch).last_hidden_state[:, :200], atol=1e-5, rtol=0)


@pytest.mark.thorough
def test_flex_windows_train_after_inference_mode(on_the_cpu):
    call, options = make_call(300, biased=True), {"key_range": KeyRange(20, 20), "scaling": 0.3}
    with torch.inference_mode():
        actual = windowed_attention(*call, **options)
    call[0].requires_grad_()
    again = windowed_attention(*call, **options)
    torch.autograd.grad(again.sum(), call[0])
    torch.testing.assert_close(actual, again)
    assert all(flex_windows._flex_trial_results.values()) and len(flex_windows._flex_trial_results) == 2


@pytest.mark.thorough
@pytest.mark.cross_product
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("last", [False, True], ids=["more follows", "nothing follows"])
def test_flex_windows_train_with_gradient_checkpointing(reentrant, last, on_the_cpu):
    call, options = make_call(300, biased=True), {"key_range": KeyRange(20, 20), "scaling": 0.3}
    leaves = [*call[:3], call[4]]
    for leaf in leaves:
        leaf.requires_grad_()

    def layer(*states):
        output = windowed_attention(*states[:3], None, states[3], **options)
        return output if last else output.sin()

    def gradients_of(run):
        for leaf in leaves:
            leaf.grad = None
        run(*leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    actual = gradients_of(partial(checkpoint, layer, use_reentrant=reentrant))  # the trial runs in the checkpoint
    assert all(flex_windows._flex_trial_results.values()) and on_the_cpu
    torch.testing.assert_close(actual, gradients_of(layer))


@pytest.mark.thorough
def test_flex_kernel_serves_other_windows_and_lengths(on_the_cpu):
    windowed_attention(*make_call(300), key_range=KeyRange(20, 20), scaling=0.3)
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for n, key_range in (
        (500, KeyRange(130, 130)),
        (640, KeyRange(90, 0)),
        (777, KeyRange(20, 20, 1, 1)),
        (300, KeyRange(1, 1, 1, 2)),
    ):
        windowed_attention(*make_call(n), key_range=key_range, scaling=0.3)
    windowed_attention(*make_call(200, 500), key_range=KeyRange(90, 0), scaling=0.3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs
    assert list(flex_windows._flex_trial_results.values()) == [True]


def test_flex_windows_allocate_no_quadratic_mask():
    with LargestTensor() as largest:
        flex_windows._create_block_mask.__wrapped__(KeyRange(128, 128, 1, 1), 8192, 8192, torch.device("cpu"))
    assert largest.numel <= (8192 // flex_windows.BLOCK + 1) ** 2
