"""Compare the errors of the report with products that are computed in full."""

from dataclasses import replace

import pytest
import torch
from fixtures.attention_tensors import make_attention_tensors, make_head_counts

from hf_attn_variants.conversion import report
from hf_attn_variants.conversion.report import compute_attention_errors

HEADS, HEAD_DIM, SIZE, MEMORY = 6, 3, 10, 7


def make_attention(kv_heads, bias=True, seed=0):
    biases = ("query", "key", "value", "output") if bias else ()
    return make_attention_tensors(HEADS, kv_heads, HEAD_DIM, SIZE, biases, MEMORY, seed)


def compute_products(tensors, kv_heads):
    """Return [W_q | b_q]^T [W_k | b_k] and W_o [W_v | b_v] of every head, computed in full."""
    logits, values = [], []
    for i in range(HEADS):
        rows, j = slice(i * HEAD_DIM, (i + 1) * HEAD_DIM), i * kv_heads // HEADS
        shared = slice(j * HEAD_DIM, (j + 1) * HEAD_DIM)

        def augmented(role, part):
            weight, bias = getattr(tensors, f"{role}_weight")[part], getattr(tensors, f"{role}_bias")
            return weight.double() if bias is None else torch.cat([weight, bias[part, None]], dim=1).double()

        logits.append(augmented("query", rows).T @ augmented("key", shared))
        values.append(tensors.output_weight[:, rows].double() @ augmented("value", shared))
    return torch.stack(logits), torch.stack(values)


@pytest.mark.parametrize("block", [1, 2**20])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("same_query", [True, False])
@pytest.mark.parametrize("source, target", [(6, 2), (6, 1), (3, 1), (2, 6)])
def test_report_errors_equal_those_of_full_products(source, target, same_query, bias, block, monkeypatch):
    monkeypatch.setattr(report, "_COMPARED_ELEMENTS", block)
    before, after = make_attention(source, bias), make_attention(target, bias, seed=1)
    if same_query:
        unchanged = ("query_weight", "query_bias", "output_weight", "output_bias")
        after = replace(after, **{name: getattr(before, name) for name in unchanged})
    heads = make_head_counts(HEADS, source, target, HEAD_DIM)
    expected = [
        ((old - new).norm() / old.norm()).item()
        for old, new in zip(compute_products(before, source), compute_products(after, target), strict=True)
    ]
    assert compute_attention_errors(before, after, heads) == pytest.approx(expected, rel=1e-9)


def test_unchanged_weights_have_zero_error():
    counts = make_head_counts(HEADS, 2, 2, HEAD_DIM)
    assert compute_attention_errors(make_attention(2), make_attention(2), counts) == (0.0, 0.0)


def test_error_relative_to_zero_is_undefined():
    before = make_attention(2, bias=False)
    zero = replace(before, key_weight=torch.zeros_like(before.key_weight))
    counts = make_head_counts(HEADS, 2, 2, HEAD_DIM)
    assert compute_attention_errors(zero, before, counts) == (None, 0.0)
