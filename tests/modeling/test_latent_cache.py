"""Check the cache of latents: one latent for all cross-attention layers, also after changes of the cache."""

import copy

import pytest
import torch
from architectures import BATCH, LENGTH, T5, VOCABULARY, make_token_ids, with_latents
from fixtures.caches import get_cache, with_cache
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from hf_attn_variants.modeling.attention.latent_attention import should_store_expanded_latent

pytestmark = pytest.mark.cross_product

WIDTH, OWN = T5.tiny["d_model"], 16
CROSS_RANKS = pytest.mark.parametrize("rank", [WIDTH, 24], ids=["exact", "low rank"])
VARIANTS = pytest.mark.parametrize("variant", ["mha", "gqa_talking"])


def make_t5(rank, variant="mha"):
    return T5.make_model("T5ForConditionalGeneration", variant, cross_kv_lora_rank=rank, kv_lora_rank=OWN)


def count_stored_bytes(cache):
    """Return the bytes of a cache's distinct storages."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum({item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in tensors}.values())


def make_pieces():
    """Return a source and a target in two parts: the first one fills a cache, and the second one is compared."""
    batch = T5.make_batch("T5ForConditionalGeneration")
    target = batch.pop("decoder_input_ids")
    return batch, target[:, :5], target[:, 5:]


def start(model, batch, first, cache=None):
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if cache is None else cache
    with torch.no_grad():
        return get_cache(model(**batch, decoder_input_ids=first, **with_cache(cache)))


def continue_decoding(model, batch, last, cache):
    # These encoder outputs are NaN, so that the model must use those in the cache.
    nothing = BaseModelOutput(last_hidden_state=torch.full((len(last), LENGTH, WIDTH), torch.nan))
    with torch.no_grad():
        mask = batch["attention_mask"]
        return model(encoder_outputs=nothing, attention_mask=mask, decoder_input_ids=last, **with_cache(cache)).logits


def decode_at_once(model, batch, first, last):
    with torch.no_grad():
        concatenated = torch.cat([first, last], dim=1)
        return model(**batch, decoder_input_ids=concatenated, use_cache=False).logits[:, first.shape[1] :]


def assert_continues(model, batch, first, last, cache):
    """Check that decoding `last` with a cache equals decoding both parts of the target at once."""
    expected = decode_at_once(model, batch, first, last)
    torch.testing.assert_close(continue_decoding(model, batch, last, cache), expected, atol=1e-5, rtol=0)


def assert_holds(cache, sentences, rank, beams=1, length=5):
    cross = cache.cross_attention_cache
    assert count_stored_bytes(cross) == 4 * sentences * LENGTH * rank
    assert {layer.keys.shape for layer in cross.layers} == {(sentences, 1, LENGTH, rank)}
    assert {layer.values.shape for layer in cross.layers} == {(sentences, 1, LENGTH, 0)}
    self_attention_cache = cache.self_attention_cache
    assert [layer.keys.shape for layer in self_attention_cache.layers] == [(sentences * beams, 1, length, OWN)] * 2
    assert [layer.values.shape for layer in self_attention_cache.layers] == [(sentences * beams, 1, length, 0)] * 2


@CROSS_RANKS
@VARIANTS
def test_cached_latent_is_stored_once_for_all_layers(rank, variant, form):
    model = make_t5(rank, variant)
    batch, first, last = make_pieces()
    cache = start(model, batch, first)
    assert_holds(cache, BATCH, rank)
    assert_continues(model, batch, first, last, cache)
    assert_holds(cache, BATCH, rank, length=LENGTH)


@pytest.mark.parametrize("layers", [2, 5])
def test_layers_increase_a_multi_head_cache_but_not_a_latent_cache(layers):
    plain = T5.make_model("T5ForConditionalGeneration", num_layers=layers)
    exact = T5.make_model("T5ForConditionalGeneration", num_layers=layers, cross_kv_lora_rank=WIDTH)
    batch, first, _ = make_pieces()
    sizes = [count_stored_bytes(start(model, batch, first).cross_attention_cache) for model in (plain, exact)]
    per_token = [size / (4 * BATCH * LENGTH) for size in sizes]
    assert per_token == [2 * layers * 12 * 8, WIDTH]


@CROSS_RANKS
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    "search", [{"num_beams": 1}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str
)
def test_generation_stores_the_latent_once_per_sentence(rank, kind, search):
    model = make_t5(rank)
    batch, *_ = make_pieces()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    result = model.generate(**batch, **(options | search), cache_implementation=kind)
    beams = search.get("num_beams", 1) * search.get("num_return_sequences", 1)
    assert_holds(get_cache(result), BATCH, rank, beams, length=6)


@CROSS_RANKS
def test_talking_heads_store_the_encoder_outputs_per_beam(rank):
    model = make_t5(rank, "gqa_talking")
    batch, *_ = make_pieces()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": 3, "return_dict_in_generate": True}
    assert_holds(get_cache(model.generate(**batch, **options)), 3 * BATCH, rank, length=6)


def repeat_cache(cache):
    cache.batch_repeat_interleave(2)
    return torch.arange(BATCH).repeat_interleave(2)


def select_cache_rows(cache):
    selected_rows = torch.tensor([2, 0])
    cache.batch_select_indices(selected_rows)
    return selected_rows


def reorder_cache(cache):
    beams = torch.tensor([1, 1, 0])
    cache.reorder_cache(beams)
    return beams


@CROSS_RANKS
@VARIANTS
@pytest.mark.parametrize("change", [repeat_cache, select_cache_rows, reorder_cache])
def test_reordered_cache_still_stores_one_latent(rank, variant, change, form):
    model = make_t5(rank, variant)
    batch, first, last = make_pieces()
    cache = start(model, batch, first)
    selected_rows = change(cache)
    assert_holds(cache, len(selected_rows), rank)
    batch = {name: tensor[selected_rows] for name, tensor in batch.items()}
    assert_continues(model, batch, first[selected_rows], last[selected_rows], cache)


@CROSS_RANKS
def test_copied_cache_stores_one_latent(rank, form):
    model = make_t5(rank)
    batch, first, last = make_pieces()
    cache = start(model, batch, first)
    again = copy.deepcopy(cache)
    assert_holds(again, BATCH, rank)
    cache.cross_attention_cache.layers[0].keys.fill_(torch.nan)
    assert_continues(model, batch, first, last, again)


@CROSS_RANKS
@pytest.mark.parametrize("crop", [-2, -4])
def test_latent_cache_can_be_cropped(rank, crop, form):
    model = make_t5(rank)
    batch, first, last = make_pieces()
    cache = start(model, batch, first)
    cache.crop(crop)
    assert_holds(cache, BATCH, rank, length=5 + crop)
    assert_continues(model, batch, first[:, :crop], last, cache)


@CROSS_RANKS
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_latent_cache_can_be_reset_and_reused(rank, kind, form):
    """Check also that a reset does not change the encoder outputs that the cache stores."""
    model = make_t5(rank)
    batch, first, last = make_pieces()
    with torch.no_grad():
        memory = model.encoder(**batch)
    states = memory.last_hidden_state.clone()
    cache = make_static_caches(model) if kind == "static" else EncoderDecoderCache(DynamicCache(), DynamicCache())
    start(model, {"encoder_outputs": memory, "attention_mask": batch["attention_mask"]}, first, cache)
    cache.reset()
    assert memory.last_hidden_state.equal(states)
    if kind == "dynamic":  # before Transformers 5.23, a reset does not shorten this cache
        cache = EncoderDecoderCache(DynamicCache(), cache.cross_attention_cache)
    others = batch | {"input_ids": make_token_ids(BATCH, LENGTH)}
    start(model, others, last, cache)
    assert_holds(cache, BATCH, rank, length=12 if kind == "static" else last.shape[1])
    assert_continues(model, others, last, first, cache)


def make_static_caches(model, length=12):
    return EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=size) for size in (length, LENGTH)))


@CROSS_RANKS
@pytest.mark.parametrize("variant", ["mha", "gqa", "weights"])
def test_latents_support_a_pair_of_static_caches(rank, variant):
    """Check also unequal head counts of keys and values, although the cache stores neither of them."""
    model = make_t5(rank, variant)
    batch, first, last = make_pieces()
    cache = start(model, batch, first, make_static_caches(model))
    assert_holds(cache, BATCH, rank, length=12)
    assert_continues(model, batch, first, last, cache)


@CROSS_RANKS
@pytest.mark.parametrize("kind", ["dynamic", "static", "configured"])
def test_cache_in_a_new_wrapper_keeps_its_contents(rank, kind, form):
    model = make_t5(rank)
    batch, first, last = make_pieces()
    options = {
        "dynamic": lambda: None,
        "static": lambda: make_static_caches(model),
        "configured": lambda: EncoderDecoderCache(*(DynamicCache(config=model.config) for _ in range(2))),
    }
    cache = start(model, batch, first, options[kind]())
    again = EncoderDecoderCache(cache.self_attention_cache, cache.cross_attention_cache)
    assert_continues(model, batch, first, last, again)


def test_returned_cache_continues_generation(form):
    """Compare with a model without latents."""
    plain = T5.make_model("T5ForConditionalGeneration")
    exact = with_latents(plain, cross_kv_lora_rank=WIDTH, kv_lora_rank=WIDTH)
    batch, *_ = make_pieces()
    sequences = []
    for model in (plain, exact):
        model.generation_config.eos_token_id = None
        options = batch | {"do_sample": False, "return_dict_in_generate": True}
        first = model.generate(**options, max_new_tokens=3)
        options |= with_cache(get_cache(first)) | {"decoder_input_ids": first.sequences}
        again = model.generate(**options, max_new_tokens=5)
        sequences.append(again.sequences)
        if model is exact:
            assert count_stored_bytes(get_cache(again).cross_attention_cache) == 4 * BATCH * LENGTH * WIDTH
    assert sequences[0].shape == (BATCH, 9) and sequences[1].equal(sequences[0])


@CROSS_RANKS
def test_generation_fills_a_cache_that_is_passed(rank):
    model = make_t5(rank)
    batch, *_ = make_pieces()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    expected = model.generate(**batch, max_new_tokens=6, do_sample=False)
    assert model.generate(**batch, max_new_tokens=6, do_sample=False, **with_cache(cache)).equal(expected)


def test_cache_without_the_latent_raises_an_error():
    batch, first, _ = make_pieces()
    model = make_t5(WIDTH)
    others = start(T5.make_model("T5ForConditionalGeneration"), batch, first)
    others = EncoderDecoderCache(others.self_attention_cache, DynamicCache())
    with pytest.raises(ValueError, match="`kv_lora_rank`"):
        model(**batch, decoder_input_ids=first, **with_cache(others))


def test_keys_and_values_of_short_encoder_outputs_are_cached(monkeypatch):
    """Check that keys and values that are no larger than their projections are computed once."""
    model = make_t5(WIDTH)
    batch, first, last = make_pieces()
    latent = torch.empty(BATCH, 1, LENGTH, WIDTH)
    assert should_store_expanded_latent(latent) and not should_store_expanded_latent(latent.repeat(2, 1, 1, 1))
    cache = start(model, batch, first)
    cross = model.decoder.block[1].layer[1].EncDecAttention
    cross.k.register_forward_hook(lambda *_: pytest.fail("the keys were computed again"))
    continue_decoding(model, batch, last, cache)


@pytest.mark.parametrize("crosses", [False, True])
def test_decoder_without_encoder_uses_a_plain_cache(crosses):
    """Check that a plain cache works, although it cannot store the latent, which is computed in every step."""
    model = make_t5(24)
    ids = torch.randint(5, VOCABULARY, (2, 6))
    memory = {"encoder_hidden_states": torch.randn(2, LENGTH, WIDTH)} if crosses else {}
    with torch.no_grad():
        expected = model.decoder(input_ids=ids, use_cache=False, **memory).last_hidden_state
        cache = DynamicCache()
        model.decoder(input_ids=ids[:, :4], **with_cache(cache), **memory)
        actual = model.decoder(input_ids=ids[:, 4:], **with_cache(cache), **memory).last_hidden_state
    torch.testing.assert_close(actual, expected[:, 4:], atol=1e-5, rtol=0)
