"""Check that decoding with a cache equals the full forward, and that the cache holds only key/value heads."""

import pytest
import torch
from architectures import BERT, LENGTH, VARIANTS, make_padding_mask, make_token_ids
from fixtures.caches import get_cache, with_cache
from fixtures.decoding import decode_in_pieces, generate_with_each_cache
from transformers import StaticCache

pytestmark = pytest.mark.cross_product

# test_latent_cache.py checks the caches of latents.
CACHED = [name for name in VARIANTS if name not in ("dynamic", "latent")]


@pytest.mark.parametrize("variant", CACHED)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("steps", [[1] * LENGTH, [4, 3, 2], [LENGTH - 1, 1]], ids=["single", "several", "prefill"])
def test_cached_decoding_equals_the_full_forward(variant, implementation, steps):
    model = BERT.make_model("BertLMHeadModel", variant, is_decoder=True, add_cross_attention=True)
    model.set_attn_implementation(implementation)
    ids = make_token_ids()
    memory = {"encoder_hidden_states": torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(3))}
    with torch.no_grad():
        full = model(ids, **memory, use_cache=False).logits
    pieces, cache = decode_in_pieces(model, ids, steps, "input_ids", **memory)
    torch.testing.assert_close(pieces, full, atol=1e-5, rtol=0)
    config = model.config
    k = config.num_key_value_heads
    value_heads = config.num_value_heads if k == config.num_attention_heads else k
    for part, length in ((cache.self_attention_cache, LENGTH), (cache.cross_attention_cache, 5)):
        for layer in part.layers:
            assert layer.keys.shape == (3, k, length, config.get_attention_head_dim())
            assert layer.values.shape == (3, value_heads, length, config.get_attention_value_dim())


@pytest.mark.parametrize("variant", CACHED)
def test_left_padding_does_not_change_generated_tokens(variant):
    model = BERT.make_model("BertLMHeadModel", variant)
    ids = make_token_ids(1, 4)
    padded = torch.cat([torch.full((1, 3), 0), ids], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 4])
    # BERT's positions are absolute, so the padded row needs position ids.
    positions = torch.tensor([[0, 0, 0, 0, 1, 2, 3]])
    with torch.no_grad():
        plain = model(ids).logits
        shifted = model(padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
    torch.testing.assert_close(shifted, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", CACHED)
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_returns_the_same_with_and_without_cache(variant, beams):
    model = BERT.make_model("BertLMHeadModel", variant)
    ids = make_token_ids(3, 4)
    tokens = generate_with_each_cache(model, {"input_ids": ids}, num_beams=beams, pad_token_id=0)
    assert tokens.shape == (3, 10)


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "talking", "gqa_talking"])
def test_static_cache_generates_the_same_tokens(variant):
    model = BERT.make_model("BertLMHeadModel", variant)
    ids = make_token_ids(2, 6)
    cache = StaticCache(config=model.config, max_cache_len=12)
    pieces, _ = decode_in_pieces(model, ids, [4, 1, 1], "input_ids", cache=cache)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    torch.testing.assert_close(pieces, full, atol=1e-5, rtol=0)


def test_static_cache_with_unequal_heads_raises_an_error():
    model = BERT.make_model("BertLMHeadModel", "weights")
    with pytest.raises(ValueError, match="`num_value_heads`"):
        model(make_token_ids(), **with_cache(StaticCache(config=model.config, max_cache_len=12)))


def test_key_side_dynamic_projections_disable_the_cache():
    model = BERT.make_model("BertLMHeadModel", "dynamic")
    with pytest.raises(ValueError, match="`use_cache` must be False"):
        model(make_token_ids(), attention_mask=make_padding_mask(), use_cache=True)
    assert get_cache(model(make_token_ids(), attention_mask=make_padding_mask())) is None
    assert model.generate(make_token_ids(2, 4), max_new_tokens=2, pad_token_id=0).shape == (2, 6)


def test_query_side_dynamic_projections_support_the_cache():
    model = BERT.make_model("BertLMHeadModel", "talking", talking_heads_dynamic=["x2l", "x2w"])
    ids = make_token_ids(2, 6)
    pieces, _ = decode_in_pieces(model, ids, [5, 1], "input_ids")
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    torch.testing.assert_close(pieces, full, atol=1e-5, rtol=0)
