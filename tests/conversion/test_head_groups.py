"""Check which heads share: the order of heads, and the search for groups."""

import pytest
import torch
from fixtures.attention_tensors import make_attention_tensors, make_head_counts

from hf_attn_variants.conversion.attention_tensors import AttentionInputs, reorder_heads
from hf_attn_variants.conversion.calibration.head_groups import _sample_inputs, find_best_groups
from hf_attn_variants.conversion.calibration.recording import compute_attention
from hf_attn_variants.modeling.mechanisms.head_sharing import get_consecutive_groups

pytestmark = pytest.mark.cross_product

SIZE, HEAD_DIM = 16, 4


def make_attention(heads, key_value_heads, with_bias=True):
    biases = ("query", "key", "value", "output") if with_bias else ()
    return make_attention_tensors(heads, key_value_heads, HEAD_DIM, SIZE, biases)


def make_inputs(batches: int = 4) -> list[AttentionInputs]:
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(8, 10, SIZE, generator=generator) for _ in range(batches)]
    return [AttentionInputs(x, x, None, None, torch.ones(8, 10, dtype=torch.bool), HEAD_DIM**-0.5) for x in states]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("key_value_heads", [6, 3])
def test_reordering_heads_changes_no_output(key_value_heads, with_bias):
    heads = make_head_counts(6, key_value_heads, 1, HEAD_DIM)
    groups = [[4, 5], [0, 1], [2, 3]] if key_value_heads == 3 else [[5, 0, 3], [2, 4, 1]]
    before, batch = make_attention(6, key_value_heads, with_bias), make_inputs(1)[0]
    after = reorder_heads(before, heads, groups)
    assert not torch.equal(before.query_weight, after.query_weight)
    torch.testing.assert_close(compute_attention(after, batch, 6)[0], compute_attention(before, batch, 6)[0])


@pytest.mark.parametrize("pairs", [[(0, 3), (1, 5), (2, 4)], [(0, 1), (2, 3), (4, 5)]])
def test_search_groups_similar_heads(pairs):
    tensors = make_attention(6, 6)
    for first, second in pairs:
        for role in ("key", "value"):
            for part in ("weight", "bias"):
                heads = getattr(tensors, f"{role}_{part}").unflatten(0, (6, HEAD_DIM))
                heads[second] = heads[first]
    heads = make_head_counts(6, 6, 3, HEAD_DIM)
    groups = find_best_groups(tensors, heads, make_inputs(), torch.Generator().manual_seed(0))
    assert groups == [list(pair) for pair in sorted(pairs)]


def test_search_uses_every_layer_that_shares_an_attention():
    class Call:
        def __init__(self, layer):
            self.layer, self.valid = layer, torch.ones(32, 24)

    calls = [Call(layer) for _ in range(64) for layer in range(12)]
    seen = [call.layer for call in _sample_inputs(calls, num_uses=12)]
    assert len(seen) == len(set(seen)) == 11  # the sampled calls are all from different layers


def test_search_is_skipped_if_it_exceeds_the_memory(caplog):
    heads = make_head_counts(128, 128, 8, 128)
    groups = find_best_groups(None, heads, [], torch.Generator())
    assert groups == get_consecutive_groups(128, 8) and "would need 550 GB" in caplog.text


def test_grouped_heads_stay_together():
    tensors, heads = make_attention(8, 4, False), make_head_counts(8, 4, 2, HEAD_DIM)
    groups = find_best_groups(tensors, heads, make_inputs(), torch.Generator().manual_seed(0))
    assert sorted(head for group in groups for head in group) == list(range(8))
    assert all((head + 1 in group) for group in groups for head in group if head % 2 == 0)
    assert get_consecutive_groups(8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
