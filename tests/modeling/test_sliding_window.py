"""Check windows in blocks and under a mask: outputs and gradients of the formula, and memory."""

import pytest
import torch
from fixtures.gradients import assert_same_with_gradients, to_exact
from fixtures.largest_tensor import LargestTensor
from torch.nn import functional

from hf_attn_variants.modeling.ops import blocked_attention, key_ranges
from hf_attn_variants.modeling.ops.key_ranges import (
    KeyRange,
    WindowBlockLayout,
    key_range_to_mask_and_bias,
    should_compute_in_blocks,
)
from hf_attn_variants.modeling.ops.memory_efficient_attention import talking_heads_attention
from hf_attn_variants.modeling.ops.softmax_attention import attention_with_weights
from hf_attn_variants.reference import patterns as reference_patterns
from hf_attn_variants.reference.talking_heads import attention_core

pytestmark = pytest.mark.cross_product

HEADS, D = 4, 6
WINDOWS = {
    "window": {"window": 6},
    "dilated": {"window": 4, "dilation": 3},
    "global": {"window": 6, "global_tokens": 2},
    "dilated, global": {"window": 4, "dilation": 2, "global_tokens": 3},
    "causal": {"window": 6, "causal": True},
    "causal, dilated": {"window": 4, "dilation": 2, "causal": True},
}
EVERY_WINDOW = pytest.mark.parametrize("fields", WINDOWS.values(), ids=WINDOWS)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(key_ranges, "QUERIES_PER_BLOCK", (8,))


def reach_of(window, dilation=1, global_tokens=0, causal=False):
    return KeyRange.from_window(window, dilation, global_tokens, causal)


def make_call(n, groups=2, biased=False, dtype=torch.float32):
    """Return queries, keys, values and a bias by distance that require gradients, padded on either side."""
    torch.manual_seed(0)
    leaves = [torch.randn(3, heads, n, D, dtype=dtype) for heads in (HEADS, groups, groups)]
    leaves += [torch.randn(1, HEADS, 1, 2 * n - 1, dtype=dtype)] if biased else []
    places = torch.arange(n)
    padding = torch.stack([places < n, places < n // 2, places >= n - 4])
    return [leaf.requires_grad_() for leaf in leaves], padding


def compute_by_formula(leaves, fields, padding):
    exact = to_exact(leaves)
    bias = exact[3][0, :, 0] if len(exact) > 3 else None
    output, _ = reference_patterns.sliding_window_attention(
        *exact[:3], scale=0.4, padding=padding, bias=bias, **fields
    )
    return output.transpose(1, 2), exact


@EVERY_WINDOW
@pytest.mark.parametrize("n, groups, biased", [(41, 4, False), (41, 2, True), (64, 1, True)])
def test_window_blocks_equal_the_formula(fields, n, groups, biased):
    leaves, padding = make_call(n, groups, biased)
    expected, exact = compute_by_formula(leaves, fields, padding)
    bias = leaves[3] if biased else None
    key_range, mask = reach_of(**fields), padding[:, None, None]
    assert should_compute_in_blocks(key_range, leaves[0], leaves[1], mask)
    actual = talking_heads_attention(*leaves[:3], mask, bias, scaling=0.4, key_range=key_range)
    assert_same_with_gradients(actual, expected, leaves, exact)


@EVERY_WINDOW
def test_window_mask_equals_the_formula(fields):
    leaves, padding = make_call(23, biased=True)
    expected, exact = compute_by_formula(leaves, fields, padding)
    mask, bias = key_range_to_mask_and_bias(reach_of(**fields), *leaves[:2], padding[:, None, None], leaves[3])
    actual, _ = attention_with_weights(*leaves[:3], mask, bias, scaling=0.4)
    assert_same_with_gradients(actual, expected, leaves, exact)
    added = torch.zeros(padding.shape).masked_fill(~padding, torch.finfo(torch.float32).min)[:, None, None]
    mask, bias = key_range_to_mask_and_bias(reach_of(**fields), *leaves[:2], added, leaves[3])
    again, _ = attention_with_weights(*leaves[:3], mask, bias, scaling=0.4)
    # Queries without allowed keys have uniform weights.
    read = (reference_patterns.sliding_window_mask(23, **fields) & padding[:, None]).any(-1)
    torch.testing.assert_close(again[read], actual[read])


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("fields", [WINDOWS["causal"], WINDOWS["causal, dilated"]], ids=["causal", "dilated"])
@pytest.mark.parametrize("queries", [1, 5, 30])
def test_windows_align_queries_with_the_last_keys(fields, queries, biased):
    """Check a decoder step, and several tokens after a cache: the queries have the last positions of the keys."""
    leaves, padding = make_call(60, biased=biased)
    expected, _ = compute_by_formula(leaves, fields, padding)
    query, key, value = leaves[0][:, :, -queries:], *leaves[1:3]
    key_range, bias, mask = reach_of(**fields), leaves[3] if biased else None, padding[:, None, None]
    actual = talking_heads_attention(query, key, value, mask, bias, scaling=0.4, key_range=key_range)
    torch.testing.assert_close(actual.double(), expected[:, -queries:], atol=1e-5, rtol=0)
    # Pass only the keys that the cache stores. The mask covers all tokens, and the bias covers all distances.
    key, value = (states[:, :, -(key_range.before + queries) :] for states in (key, value))
    actual = talking_heads_attention(query, key, value, mask, bias, scaling=0.4, key_range=key_range)
    torch.testing.assert_close(actual.double(), expected[:, -queries:], atol=1e-5, rtol=0)


@EVERY_WINDOW
def test_talking_heads_in_windows_equal_the_formula(fields):
    leaves, padding = make_call(41, groups=4, biased=True)
    mixes = [torch.randn(HEADS, 3).requires_grad_(), torch.randn(3, HEADS).requires_grad_()]
    leaves[3] = torch.randn(1, 3, 1, 81).requires_grad_()
    exact = to_exact([*leaves, *mixes])
    distance = torch.arange(41) - torch.arange(41)[:, None]
    allowed = reference_patterns.sliding_window_mask(41, **fields) & padding[:, None, None]
    mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    expected, _ = attention_core(
        *exact[:3], scale=0.4, P_l=exact[4], P_w=exact[5], bias=exact[3][:, :, 0, distance + 40], mask=mask
    )
    actual = talking_heads_attention(
        *leaves[:3], padding[:, None, None], leaves[3], scaling=0.4, key_range=reach_of(**fields),
        logits_proj=mixes[0], weights_proj=mixes[1],
    )  # fmt: skip
    assert_same_with_gradients(actual, expected.transpose(1, 2), [*leaves, *mixes], exact)


@pytest.mark.parametrize("fields", [{"window": 82}, {"window": 41 * 2, "causal": True}], ids=["", "causal"])
def test_window_wider_than_the_text_equals_full_attention(fields):
    leaves, padding = make_call(41)
    key_range, mask = reach_of(**fields), padding[:, None, None]
    assert not should_compute_in_blocks(key_range, leaves[0], leaves[1], mask)
    if key_range.is_causal:  # the kernel applies `is_causal`
        assert key_range_to_mask_and_bias(key_range, *leaves[:2], None, None) == (None, None)
    else:
        assert key_range_to_mask_and_bias(key_range, *leaves[:2], mask, None)[0].equal(mask)
    actual = talking_heads_attention(*leaves[:3], mask, scaling=0.4, key_range=key_range)
    expected, _ = attention_with_weights(*leaves[:3], mask, scaling=0.4, is_causal=key_range.is_causal)
    torch.testing.assert_close(actual, expected)


@EVERY_WINDOW
@pytest.mark.parametrize("n, m", [(1, 1), (7, 7), (41, 41), (96, 96), (5, 41)])
def test_window_blocks_read_every_key_once(fields, n, m):
    key_range = reach_of(**fields)
    if n < m and not key_range.is_causal:
        pytest.skip("an encoder has as many queries as keys")
    read = torch.zeros(n, m, dtype=torch.long)
    layout = WindowBlockLayout(key_range, torch.empty(1, 1, n, 1), torch.empty(1, 1, m, 1), None)
    for rows, spans in layout.iterate_blocks(3):
        for span in spans:
            read[rows, span] += 1
    positions = torch.arange(m)
    allowed = key_range.get_allowed_mask(positions[m - n :], positions)
    assert read.max() == 1 and not (allowed & (read == 0)).any()


def test_window_dropout_keeps_the_mean_of_weights():
    leaves, padding = make_call(64)
    call = {"scaling": 0.4, "key_range": reach_of(6, global_tokens=1)}
    mask = padding[:, None, None]
    undropped = talking_heads_attention(*leaves[:3], mask, **call)
    torch.manual_seed(0)
    samples = [talking_heads_attention(*leaves[:3], mask, dropout=0.25, **call).detach() for _ in range(300)]
    assert not samples[0].equal(samples[1])
    torch.testing.assert_close(torch.stack(samples).mean(0), undropped, atol=0.25, rtol=0)
    # Outputs are linear in the values, so this equality holds only if both passes drop the same weights.
    torch.manual_seed(1)
    output = talking_heads_attention(*leaves[:3], mask, dropout=0.25, **call)
    (gradient,) = torch.autograd.grad(output.square().sum() / 2, leaves[2])
    torch.testing.assert_close((gradient * leaves[2]).sum(), output.square().sum())


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_windows_allocate_no_quadratic_tensor(monkeypatch, biased):
    monkeypatch.setitem(blocked_attention.BLOCK_ELEMENTS, "cpu", 2**12)
    sizes = []
    for n in (256, 512):
        leaves, padding = make_call(n, biased=biased)
        with LargestTensor() as largest:
            bias = leaves[3] if biased else None
            output = talking_heads_attention(
                *leaves[:3], padding[:, None, None], bias, scaling=0.4, key_range=reach_of(6, global_tokens=1)
            )
            output.sum().backward()
        sizes.append(largest.numel)
    assert sizes[1] <= 2 * sizes[0] and sizes[1] == 3 * HEADS * 512 * D  # the size of the queries


def test_windows_support_compilation_and_half_precision():
    leaves, padding = make_call(64)
    key_range, mask = reach_of(6, global_tokens=1), padding[:, None, None]
    exact = talking_heads_attention(*leaves[:3], mask, scaling=0.4, key_range=key_range)

    def attend(*states):
        return talking_heads_attention(*states, mask, scaling=0.4, key_range=key_range)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*leaves[:3]), exact)
    half = attend(*(leaf.detach().bfloat16() for leaf in leaves[:3]))
    assert half.dtype == torch.bfloat16 and functional.mse_loss(half.float(), exact) < 1e-4


def test_encoder_window_with_a_prefix_raises_an_error():
    query, key = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match="`attention_pattern`"):
        key_range_to_mask_and_bias(reach_of(2), query, key, None, None)
