"""Check memory-compressed attention: outputs and gradients of the formula, in every encoder that supports it."""

import pytest
import torch
from architectures import ALBERT, BERT, T5, make_token_ids
from fixtures.gradients import assert_same_with_gradients, to_exact
from fixtures.saving import save_and_load
from relatives import ENCODER_DECODERS, ENCODERS, WHISPER

import hf_attn_variants
from hf_attn_variants.modeling.mechanisms.patterns.compressed_pattern import MemoryCompression
from hf_attn_variants.modeling.ops.softmax_attention import fused_attention
from hf_attn_variants.reference import patterns as reference_patterns

pytestmark = pytest.mark.cross_product

COMPRESSED = {"attention_pattern": "memory_compressed", "attention_block_size": 3}
LENGTH, D = 11, 5


def add_encoder_prefix(fields):
    return {f"encoder_{name}": value for name, value in fields.items()}


@pytest.mark.parametrize("length", [1, 9, 11])
@pytest.mark.parametrize("groups", [4, 2])
def test_compressed_keys_and_values_equal_the_formula(length, groups):
    torch.manual_seed(0)
    compression = MemoryCompression(groups, groups, D, D, 3, torch.empty(0))
    leaves = [torch.randn(3, heads, n, D) for heads, n in ((4, 7), (groups, length), (groups, length))]
    for parameter in compression.parameters():
        torch.nn.init.normal_(parameter)
    leaves = [*(leaf.requires_grad_() for leaf in leaves), *compression.parameters()]
    places = torch.arange(length)
    padding = torch.stack([places < length, places < length // 2, places >= length - 2])
    exact = to_exact(leaves)
    convs = [conv.unflatten(1, (3, D)) for conv in exact[3:]]
    expected = reference_patterns.memory_compressed_attention(*exact[:3], *convs, scale=0.4, padding=padding)
    key, value, mask = compression(*leaves[1:3], padding[:, None, None])
    actual = fused_attention(leaves[0], key, value, mask, scaling=0.4)
    assert_same_with_gradients(actual, expected.transpose(1, 2), leaves, exact)
    first = [leaf[:1] for leaf in leaves[1:3]]  # a text without padding
    assert compression(*first, padding[:1, None, None])[0].equal(compression(*leaves[1:3], None)[0][:1])


CASES = [(row, COMPRESSED) for row in (BERT, ALBERT, *ENCODERS)]
CASES += [(row, add_encoder_prefix(COMPRESSED)) for row in (*ENCODER_DECODERS[:-1], WHISPER)]
CASES += [
    (row, add_encoder_prefix(COMPRESSED) | {"position_embedding_type": "sinusoidal"})
    for row in (T5, ENCODER_DECODERS[-1])
]


@pytest.mark.parametrize("architecture, fields", CASES, ids=[row.name for row, _ in CASES])
def test_compressed_encoder_attends_to_fewer_keys_without_padding(architecture, fields):
    model = architecture.make_model(next(iter(architecture.heads)), "gqa", **fields).eval()
    stack = model.get_encoder() if "encoder_attention_pattern" in fields else model
    named = [name for name, _ in model.named_parameters() if ".compression." in name]
    assert named and len(named) % 2 == 0 and not [name for name in named if "decoder" in name or "cross" in name]
    with torch.no_grad():
        if architecture is WHISPER:
            result = stack(architecture.make_batch("WhisperModel")["input_features"], output_attentions=True)
            assert result.attentions[0].shape[-2:] == (20, 7)
            return
        ids, mask = make_token_ids(2, LENGTH), torch.ones(2, LENGTH).long()
        mask[:, 8:] = 0
        result = stack(ids, attention_mask=mask, output_attentions=True)
        assert result.attentions[0].shape[-2:] == (LENGTH, 4) and not result.attentions[0][..., 3].any()
        other = stack(ids.index_fill(1, torch.arange(8, LENGTH), 7), attention_mask=mask)
        torch.testing.assert_close(other[0][:, :8], result[0][:, :8], atol=1e-5, rtol=0)
        torch.testing.assert_close(stack(ids[:, :8])[0], result[0][:, :8], atol=1e-5, rtol=0)


@pytest.mark.parametrize("fields", [{"score_function": "additive"}, {}], ids=["additive", ""])
def test_compression_works_with_talking_heads_and_scores(fields):
    model = BERT.make_model("BertModel", "gqa_talking", **COMPRESSED, **fields)
    ids, mask = make_token_ids(2, 30), torch.ones(2, 30)
    mask[1, 20:] = 0
    with torch.no_grad():
        actual = model(ids, attention_mask=mask)[0]
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(ids, attention_mask=mask)[0], actual, atol=1e-5, rtol=0)


def test_plain_checkpoint_loads_with_mean_compression_and_is_saved(tmp_path):
    BERT.make_upstream_model("BertModel").save_pretrained(tmp_path / "plain")
    model_class, ids = hf_attn_variants.AttnVariantBertModel, make_token_ids(2, LENGTH)
    model = model_class.from_pretrained(tmp_path / "plain", **COMPRESSED).eval()
    conv = model.encoder.layer[1].attention.self.compression.key_conv
    mean = torch.eye(4).repeat(3, 1) / 3
    assert all(item.equal(mean) for item in conv.detach())
    with torch.no_grad():
        conv.add_(torch.randn_like(conv))
        save_and_load(model, tmp_path / "compressed", {"input_ids": ids})
        one = BERT.make_model("BertModel", **COMPRESSED | {"attention_block_size": 1})
        plain = BERT.make_model("BertModel")
        plain.load_state_dict({k: v for k, v in one.state_dict().items() if "compression" not in k})
        for layer in one.encoder.layer:
            layer.attention.self.compression.init_variant_parameters()
        torch.testing.assert_close(one(ids)[0], plain(ids)[0])


def test_compression_is_not_a_conversion():
    for model, fields in (
        (BERT.make_model("BertModel"), COMPRESSED),
        (BERT.make_model("BertModel", **COMPRESSED), {"num_key_value_heads": 3}),
    ):
        with pytest.raises(ValueError, match="memory_compressed"):
            hf_attn_variants.convert(model, **fields)


def test_unsupported_masks_with_compression_raise_an_error():
    model, ids = BERT.make_model("BertModel", **COMPRESSED), make_token_ids(2, LENGTH)
    with pytest.raises(ValueError, match="mask must be a boolean padding mask"):
        model(ids, attention_mask=torch.ones(2, 1, LENGTH, LENGTH).tril().bool())
    with pytest.raises(ValueError, match="`global_attention_mask`"):
        model(ids, global_attention_mask=torch.ones(2, LENGTH).long())
