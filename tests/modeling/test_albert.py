"""Check the features of ALBERT: groups of layers that share their weights."""

import pytest
import torch
import transformers
from architectures import ALBERT

from hf_attn_variants import AttnVariantAlbertModel

pytestmark = pytest.mark.cross_product

# Six layers use two groups of two inner layers, so each group is used three times.
GROUPS = {"num_hidden_groups": 2, "inner_group_num": 2, "num_hidden_layers": 6}


def test_albert_layer_groups_equal_transformers(tmp_path):
    upstream = ALBERT.make_upstream_model("AlbertModel", **GROUPS)
    upstream.save_pretrained(tmp_path)
    variant_model = AttnVariantAlbertModel.from_pretrained(tmp_path).eval()
    batch = ALBERT.make_batch("AlbertModel")
    with torch.no_grad():
        actual, expected = variant_model(**batch), upstream(**batch)
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, atol=1e-5, rtol=0)
    torch.testing.assert_close(actual.pooler_output, expected.pooler_output, atol=1e-5, rtol=0)


def test_albert_layers_of_a_group_share_one_attention():
    model = ALBERT.make_model("AlbertModel", "gqa_talking", **GROUPS)
    attentions = [(name, module) for _, name, module in model.named_attention_modules()]
    assert len(attentions) == 4
    assert len({id(module.logits_proj) for _, module in attentions}) == 4
    for _, module in attentions:
        assert module.key.out_features == model.config.num_key_value_heads * 4
        assert module.num_key_value_groups == 3


def test_albert_returns_attention_weights_of_every_layer():
    model = ALBERT.make_model("AlbertModel", "talking", **GROUPS)
    with torch.no_grad():
        maps = model(**ALBERT.make_batch("AlbertModel"), output_attentions=True).attentions
    # There is one entry per pass through an attention module: six layers with two attention modules per group.
    assert len(maps) == 12


def test_albert_supports_gradient_checkpointing_unlike_transformers():
    assert not transformers.AlbertModel.supports_gradient_checkpointing
    assert ALBERT.make_model("AlbertModel").supports_gradient_checkpointing


@pytest.mark.parametrize("head", ["AlbertModel", "AlbertForMaskedLM"])
def test_albert_configuration_may_enable_gradient_checkpointing(head):
    model = ALBERT.make_model(head, "gqa", gradient_checkpointing=True)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    # As in the other models of Transformers, the flag is used once and is not saved.
    assert not hasattr(model.config, "gradient_checkpointing")
