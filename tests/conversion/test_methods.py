"""Check the grouping and pooling of tensors."""

import pytest
import torch
from fixtures.attention_tensors import make_attention_tensors, make_head_counts
from torch import nn

from hf_attn_variants.conversion.attention_tensors import (
    AttentionTensors,
    LayerContext,
    average_heads,
    get_kv_head_change,
    group_heads,
    repeat_heads,
    select_first_heads,
    split_heads,
)
from hf_attn_variants.conversion.conversions import resolve_method
from hf_attn_variants.conversion.plan import make_seeded_generator

HEADS, KV_HEADS, HEAD_DIM, SIZE = 12, 4, 3, 20


def make_attention(bias=True):
    return make_attention_tensors(HEADS, HEADS, HEAD_DIM, SIZE, ("query", "key", "value", "output") if bias else ())


def make_layer_context(seed=0, module="encoder.layer.0.attention", std=0.02):
    return LayerContext(module, "self", make_seeded_generator(seed, module), std)


@pytest.mark.parametrize(
    "source, target, expected",
    [(12, 4, "pool"), (12, 1, "pool"), (4, 4, "same"), (4, 12, "expand"), (1, 12, "expand")],
)
def test_head_counts_are_related_as_pooled_or_repeated(source, target, expected):
    assert get_kv_head_change(source, target) == expected


@pytest.mark.parametrize("source, target", [(6, 4), (4, 6), (12, 0), (12, -3)])
def test_incompatible_head_counts_raise_an_error(source, target):
    with pytest.raises(ValueError, match=str(target)):
        get_kv_head_change(source, target)


def test_groups_equal_those_of_torch_grouped_attention():
    # Each key head is a constant, so the output of torch shows which query heads share a pooled key head.
    values = torch.arange(float(HEADS)).repeat_interleave(HEAD_DIM)[:, None].expand(-1, SIZE)
    pooled = split_heads(average_heads(values, HEADS, KV_HEADS), KV_HEADS)[:, :, :HEAD_DIM]  # [k, d, d]
    query = torch.zeros(1, HEADS, 1, HEAD_DIM)
    output = nn.functional.scaled_dot_product_attention(query, pooled[None], pooled[None], enable_gqa=True)
    expected = torch.tensor([1.0, 1, 1, 4, 4, 4, 7, 7, 7, 10, 10, 10])
    torch.testing.assert_close(output[0, :, 0, 0], expected)


@pytest.mark.parametrize("target", [1, 2, 4])
def test_mean_pooling_averages_consecutive_heads(target):
    weight = make_attention().key_weight
    group = HEADS // target
    pooled = average_heads(weight, HEADS, target)
    for i in range(target):
        heads = [weight[head * HEAD_DIM : (head + 1) * HEAD_DIM] for head in range(i * group, (i + 1) * group)]
        torch.testing.assert_close(pooled[i * HEAD_DIM : (i + 1) * HEAD_DIM], sum(heads) / group)
    assert len(pooled) == target * HEAD_DIM


def test_first_method_takes_the_first_head_of_each_group():
    bias = torch.arange(HEADS * HEAD_DIM)
    assert select_first_heads(bias, HEADS, KV_HEADS).tolist() == [0, 1, 2, 9, 10, 11, 18, 19, 20, 27, 28, 29]


def test_repeated_heads_keep_their_weights():
    bias = torch.randn(KV_HEADS * HEAD_DIM)
    repeated = repeat_heads(bias, KV_HEADS, HEADS)
    assert torch.equal(group_heads(repeated, HEADS, KV_HEADS)[:, 2], split_heads(bias, KV_HEADS))


def test_pooling_in_two_steps_equals_pooling_in_one():
    weight = make_attention().value_weight
    twice = average_heads(average_heads(weight, 12, 4), 4, 2)
    torch.testing.assert_close(twice, average_heads(weight, 12, 2))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["mean", "first", "random"])
def test_methods_change_only_keys_and_values(name, bias):
    before = make_attention(bias=bias)
    copy = make_attention(bias=bias)
    heads = make_head_counts(HEADS, HEADS, KV_HEADS, HEAD_DIM)
    after = resolve_method(name).pool(before, heads, make_layer_context())
    assert after.key_weight.shape == after.value_weight.shape == (KV_HEADS * HEAD_DIM, SIZE)
    assert after.query_weight is before.query_weight and after.output_weight is before.output_weight
    assert (after.key_bias is None) is not bias
    if bias:
        assert after.key_bias.shape == after.value_bias.shape == (KV_HEADS * HEAD_DIM,)
    assert all(
        getattr(before, part) is None or torch.equal(value, getattr(copy, part))
        for part, value in vars(before).items()
        if isinstance(value, torch.Tensor)
    )


def test_random_method_is_seeded_per_layer():
    draws, heads = [], make_head_counts(HEADS, HEADS, KV_HEADS, HEAD_DIM)
    for seed, module in [(0, "layer.0"), (0, "layer.0"), (0, "layer.1"), (1, "layer.0")]:
        pooled = resolve_method("random").pool(make_attention(), heads, make_layer_context(seed, module))
        draws.append(pooled.key_weight)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[3])


def test_random_method_uses_the_initial_scale_without_bias():
    inner = HEADS * 64
    wide = AttentionTensors(*(torch.zeros(inner, 512) for _ in range(4)), *(torch.ones(inner) for _ in range(4)))
    heads = make_head_counts(HEADS, 12, 4, 64)
    after = resolve_method("random").pool(wide, heads, make_layer_context(std=0.5))
    assert after.key_weight.std().item() == pytest.approx(0.5, rel=0.02)
    assert not torch.equal(after.key_weight, after.value_weight)
    assert after.key_bias.abs().max() == 0
