"""Check head sharing: the names of head counts, their fields, and the groups of query heads."""

import pytest
import torch
from architectures import BERT, T5
from transformers.integrations.sdpa_attention import repeat_kv

from hf_attn_variants.modeling.mechanisms.head_sharing import (
    GroupedQueryAttention,
    HeadSharing,
    MultiQueryAttention,
    get_consecutive_groups,
    get_head_sharing,
)


def make_config(row, **fields):
    return row.config_class(**row.tiny, **fields)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([8, 8], HeadSharing),
        ([1], MultiQueryAttention),
        ([2], GroupedQueryAttention),
        ([1, 8], GroupedQueryAttention),
        ([4, 2], GroupedQueryAttention),
    ],
)
def test_head_counts_are_named_mha_gqa_and_mqa(counts, expected):
    assert get_head_sharing(counts, 8) is expected


def test_head_sharing_reports_its_field():
    heads = make_config(BERT).num_attention_heads
    field = "num_key_value_heads"
    for count, result in ((heads, None), (2, GroupedQueryAttention), (1, MultiQueryAttention)):
        config = make_config(BERT, num_key_value_heads=count)
        for mechanism in (HeadSharing, GroupedQueryAttention, MultiQueryAttention):
            is_meant = result is not None and mechanism in (HeadSharing, result)
            assert mechanism.find_requesting_field(config, "") == ((field, count) if is_meant else None)
    config = make_config(T5, encoder_num_key_value_heads=1)
    places = [HeadSharing.find_requesting_field(config, prefix) for prefix in ("", "encoder_", "cross_")]
    assert places == [None, (f"encoder_{field}", 1), None]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_query_head_groups_equal_transformers(count):
    """Check the groups against Transformers, which repeats each key/value head for its query heads."""
    repeated = repeat_kv(torch.arange(count).view(1, count, 1, 1), 8 // count).flatten().tolist()
    read = {head: group for group, heads in enumerate(get_consecutive_groups(8, count)) for head in heads}
    assert [read[head] for head in range(8)] == repeated
