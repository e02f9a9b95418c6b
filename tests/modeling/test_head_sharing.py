"""Head sharing: what a number of key/value heads is called, where it is asked for, and which heads read which."""

import pytest
import torch
from architectures import BERT, T5
from transformers.integrations.sdpa_attention import repeat_kv

from hf_attn_variants.modeling.mechanisms.head_sharing import (
    GroupedQuery,
    HeadSharing,
    MultiQuery,
    consecutive_groups,
    get_head_sharing,
)


def config_of(row, **fields):
    return row.config_class(**row.tiny, **fields)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([8, 8], HeadSharing), ([1], MultiQuery), ([2], GroupedQuery), ([1, 8], GroupedQuery), ([4, 2], GroupedQuery)],
)
def test_a_number_of_heads_has_its_name(counts, expected):
    assert get_head_sharing(counts, 8) is expected


def test_a_mechanism_says_where_it_is_asked_for():
    heads = config_of(BERT).num_attention_heads
    field = "num_key_value_heads"
    for count, found in ((heads, None), (2, GroupedQuery), (1, MultiQuery)):
        config = config_of(BERT, num_key_value_heads=count)
        for mechanism in (HeadSharing, GroupedQuery, MultiQuery):
            is_meant = found is not None and mechanism in (HeadSharing, found)
            assert mechanism.requested_in(config, "") == ((field, count) if is_meant else None)
    config = config_of(T5, encoder_num_key_value_heads=1)
    places = [HeadSharing.requested_in(config, prefix) for prefix in ("", "encoder_", "cross_")]
    assert places == [None, (f"encoder_{field}", 1), None]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_heads_that_share_one_are_those_of_upstream(count):
    """Upstream repeats each key/value head for its query heads."""
    repeated = repeat_kv(torch.arange(count).view(1, count, 1, 1), 8 // count).flatten().tolist()
    read = {head: group for group, heads in enumerate(consecutive_groups(8, count)) for head in heads}
    assert [read[head] for head in range(8)] == repeated
