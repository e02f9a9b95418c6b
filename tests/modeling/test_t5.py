"""Check the features of T5: mT5, relative positions, head counts of encoder and decoder, and generation."""

import gzip
import json

import pytest
import torch
import transformers
from architectures import BATCH, LENGTH, T5, VARIANTS, VOCABULARY, make_padding_mask, make_text_inputs, make_token_ids
from fixtures.caches import get_cache, with_cache
from fixtures.checkpointing import checkpoint_layers
from fixtures.decoding import decode_in_pieces, generate_with_each_cache
from fixtures.tested_architectures import T5_FLAVOURS
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from hf_attn_variants import AttnVariantT5Config, AttnVariantT5ForConditionalGeneration, AttnVariantT5Model
from hf_attn_variants.modeling.variant_names import EAGER

pytestmark = pytest.mark.cross_product

# test_latent_cache.py checks the caches of latents.
CACHED = [name for name in VARIANTS if name not in ("dynamic", "latent")]
SEARCHES = {"greedy": {}, "beams": {"num_beams": 3}, "beams returned": {"num_beams": 4, "num_return_sequences": 2}}


@pytest.mark.parametrize("flavour, scaled", [("t5", True), ("v1.1", False), ("mt5", False)])
def test_scale_decoder_outputs_survives_every_way_of_loading(flavour, scaled, tmp_path):
    _, config_class, fields = T5_FLAVOURS[flavour]
    upstream = config_class(**T5.tiny, **fields)
    upstream.save_pretrained(tmp_path)
    configs = [
        AttnVariantT5Config.from_upstream(upstream),
        AttnVariantT5Config.from_upstream(upstream.to_dict(), num_key_value_heads=3),
        AttnVariantT5Config.from_pretrained(tmp_path),
    ]
    configs.append(AttnVariantT5Config.from_upstream(configs[1]))
    configs.append(AttnVariantT5Config.from_dict(configs[0].to_dict()))
    for config in configs:
        assert config.scale_decoder_outputs is scaled
        assert config.model_type == "attn_variant_t5"
    assert configs[3].num_key_value_heads == 3


def test_untied_output_layer_stays_untied(tmp_path):
    upstream = T5.make_upstream_model("T5ForConditionalGeneration", tie_word_embeddings=False)
    upstream.lm_head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, 40))
    upstream.config.tie_word_embeddings = False
    upstream.save_pretrained(tmp_path)
    variant_model = AttnVariantT5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert variant_model.lm_head.weight.equal(upstream.lm_head.weight)
    assert not variant_model.lm_head.weight.equal(variant_model.shared.weight)
    batch = T5.make_batch("T5ForConditionalGeneration")
    with torch.no_grad():
        torch.testing.assert_close(variant_model(**batch).logits, upstream(**batch).logits, atol=1e-5, rtol=0)
    # Saving and loading the variant model does not change the weights.
    variant_model.save_pretrained(tmp_path / "again")
    again = AttnVariantT5ForConditionalGeneration.from_pretrained(tmp_path / "again")
    assert again.lm_head.weight.equal(upstream.lm_head.weight) and not again.lm_head.weight.equal(again.shared.weight)


def test_encoder_and_decoder_have_separate_head_counts():
    model = T5.make_model("T5Model", num_key_value_heads=2, encoder_num_key_value_heads=6)
    rows = {
        (site.name, module.k.out_features, module.v.out_features)
        for site, _, module in model.named_attention_modules()
    }
    assert rows == {("encoder", 48, 48), ("decoder", 16, 16), ("cross", 16, 16)}
    assert AttnVariantT5Config(num_heads=8, num_key_value_heads=2).encoder_num_key_value_heads == 8
    with pytest.raises(ValueError, match=r"`encoder_num_key_value_heads`.*`num_value_heads`"):
        T5.make_config("weights", encoder_num_key_value_heads=6)


def test_position_bias_is_added_to_the_softmax_heads():
    model = T5.make_model("T5Model", "gqa_talking")
    attention = model.encoder.block[0].layer[0].SelfAttention
    assert attention.relative_attention_bias.weight.shape == (8, model.config.num_softmax_heads)
    states = torch.randn(BATCH, LENGTH, 40)
    with torch.no_grad():
        output, bias, _ = attention(states)
        query, key, value = (
            projection(states).unflatten(2, (-1, 8)).transpose(1, 2)
            for projection in (attention.q, attention.k, attention.v)
        )
        logits = torch.einsum("bhnm,hs->bsnm", query @ key.transpose(2, 3), attention.logits_proj) + bias
        weights = torch.einsum("bsnm,sv->bvnm", logits.softmax(-1), attention.weights_proj)
        expected = attention.o((weights @ value).transpose(1, 2).flatten(2))
    assert bias.shape == (1, 6, LENGTH, LENGTH)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", CACHED)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "steps, padded",
    [([1] * LENGTH, False), ([4, 3, 2], True), ([4, 3, 2], False), ([LENGTH - 1, 1], True)],
    ids=["single", "several padded", "several", "prefill padded"],
)
def test_cached_decoding_equals_the_full_forward(variant, implementation, steps, padded):
    model = T5.make_model("T5ForConditionalGeneration", variant)
    model.set_attn_implementation(implementation)
    batch = T5.make_batch("T5ForConditionalGeneration")
    target = batch.pop("decoder_input_ids")
    mask = make_padding_mask().flip(1) if padded else torch.ones(BATCH, LENGTH).long()
    masks = {"decoder_attention_mask": mask}
    with torch.no_grad():
        inputs = {"encoder_outputs": model.encoder(**batch), "attention_mask": batch["attention_mask"]}
        full = model(**inputs, decoder_input_ids=target, **masks, use_cache=False).logits
    pieces, cache = decode_in_pieces(model, target, steps, masks=masks, **inputs)
    is_token = mask.bool()
    torch.testing.assert_close(pieces[is_token], full[is_token], atol=1e-5, rtol=0)
    config = model.config
    k = config.num_key_value_heads
    value_heads = config.num_value_heads if k == config.num_attention_heads else k
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        for layer in part.layers:
            assert layer.keys.shape == (BATCH, k, LENGTH, 8)
            assert layer.values.shape == (BATCH, value_heads, LENGTH, config.get_attention_value_dim())


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "talking", "gqa_talking"])
def test_static_cache_generates_the_same_tokens_with_t5(variant):
    model = T5.make_model("T5ForConditionalGeneration", variant)
    batch = T5.make_batch("T5ForConditionalGeneration")
    target = batch.pop("decoder_input_ids")
    config = model.config
    cache = EncoderDecoderCache(
        StaticCache(config=config, max_cache_len=12), StaticCache(config=config, max_cache_len=LENGTH)
    )
    pieces, _ = decode_in_pieces(model, target, [4, 1, 4], cache=cache, **batch)
    with torch.no_grad():
        full = model(**batch, decoder_input_ids=target, use_cache=False).logits
    torch.testing.assert_close(pieces, full, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", CACHED)
@pytest.mark.parametrize("search", SEARCHES)
def test_t5_generates_the_same_with_and_without_cache(variant, search):
    model = T5.make_model("T5ForConditionalGeneration", variant)
    generate_with_each_cache(model, make_text_inputs(), 7, **SEARCHES[search])


@pytest.mark.parametrize("search", ["greedy", "beams"])
def test_t5_generates_from_encoder_outputs(search):
    model = T5.make_model("T5ForConditionalGeneration", "gqa")
    inputs = make_text_inputs()
    kwargs = {**SEARCHES[search], "attention_mask": inputs["attention_mask"], "max_new_tokens": 7, "do_sample": False}
    with torch.no_grad():
        states = model.encoder(**inputs).last_hidden_state
    reused = model.generate(encoder_outputs=BaseModelOutput(last_hidden_state=states.clone()), **kwargs)
    assert reused.equal(model.generate(input_ids=inputs["input_ids"], **kwargs))


def test_beam_search_does_not_move_shared_encoder_outputs():
    model = T5.make_model("T5ForConditionalGeneration", "mqa")
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.no_grad():
        model(**T5.make_batch("T5ForConditionalGeneration"), **with_cache(cache))
    self_attention_keys, shared = cache.self_attention_cache.layers[0].keys, cache.cross_attention_cache.layers[0].keys
    moved = model._reorder_cache(cache, torch.tensor([2, 0, 0]))
    assert moved.self_attention_cache.layers[0].keys.equal(self_attention_keys[[2, 0, 0]])
    assert moved.cross_attention_cache.layers[0].keys is shared


@pytest.mark.parametrize("variant", ["mha", "gqa", "talking"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_source_padding_changes_no_output(variant, side):
    """Check that a source that is padded on either side gives the outputs of the source without padding."""
    model = T5.make_model("T5ForConditionalGeneration", variant)
    ids, target, padding = make_token_ids(1, 5), make_token_ids(1, 4), torch.zeros(1, 3, dtype=torch.long)
    parts = (padding, ids) if side == "left" else (ids, padding)
    padded = torch.cat(parts, dim=1)
    with torch.no_grad():
        plain = model(input_ids=ids, decoder_input_ids=target).logits
        result = model(input_ids=padded, attention_mask=(padded > 0).long(), decoder_input_ids=target).logits
    torch.testing.assert_close(result, plain, atol=1e-5, rtol=0)


def test_t5_key_side_dynamic_projections_disable_the_cache(tmp_path):
    model = T5.make_model("T5ForConditionalGeneration", "dynamic")
    with pytest.raises(ValueError, match="`use_cache` must be False"):
        model.generate(**make_text_inputs(), max_new_tokens=3, use_cache=True)
    model.save_pretrained(tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(generation | {"use_cache": True}))
    for actual in (model, type(model).from_pretrained(tmp_path)):
        assert actual.generate(**make_text_inputs(), max_new_tokens=3).shape == (BATCH, 4)
        assert get_cache(actual(**make_text_inputs(), labels=make_token_ids())) is None


def test_t5_query_side_dynamic_projections_support_the_cache():
    model = T5.make_model("T5ForConditionalGeneration", "talking", talking_heads_dynamic=["x2l", "x2w"])
    generate_with_each_cache(model, make_text_inputs())


def test_large_activations_are_clamped_in_float16():
    model = T5.make_model("T5Model", "gqa").half()
    with torch.no_grad():
        for block in (*model.encoder.block, *model.decoder.block):
            block.layer[-1].DenseReluDense.wo.weight.mul_(3e4)
        states = model(**T5.make_batch("T5Model"), use_cache=False).last_hidden_state
    assert states.isfinite().all()


@pytest.mark.parametrize("variant", ["gqa", "talking"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_reach_the_position_bias(variant, reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = T5.make_model("T5Model", variant, dropout_rate=0.0).train()
        if checkpointing:
            checkpoint_layers(model, reentrant)
            model.enable_input_require_grads()
        model(**T5.make_batch("T5Model"), use_cache=False).last_hidden_state.square().mean().backward()
        gradients.append(model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-7, rtol=1e-4)


def test_attention_implementation_applies_to_encoder_and_decoder():
    model = T5.make_model("T5ForSequenceClassification", "gqa")
    model.set_attn_implementation("eager")
    assert {module.config._attn_implementation for _, _, module in model.named_attention_modules()} == {EAGER}


def test_base_model_loads_from_a_checkpoint_with_a_head(tmp_path):
    model = T5.make_model("T5ForConditionalGeneration", "gqa")
    model.save_pretrained(tmp_path)
    base = AttnVariantT5Model.from_pretrained(tmp_path).eval()
    batch = T5.make_batch("T5Model")
    with torch.no_grad():
        states = base(**batch).last_hidden_state
        logits = model(**batch).logits
    torch.testing.assert_close(model.lm_head(states * 40**-0.5), logits, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mha", "mqa", "talking"])
def test_compiled_step_with_a_static_cache_gives_equal_logits(variant):
    model = T5.make_model("T5ForConditionalGeneration", variant)
    kwargs = {**make_text_inputs(), "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**kwargs)
    model.forward = torch.compile(model.forward)
    assert model.generate(**kwargs, cache_implementation="static").equal(expected)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{}, {"cross_kv_lora_rank": 256}, {"cross_kv_lora_rank": 256, "kv_lora_rank": 256}])
def test_real_checkpoint_translates_like_transformers(ranks, shared_data):
    folder = shared_data / "checkpoints" / "t5-mini-multi30k-en-de"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = gzip.decompress((shared_data / "multi30k" / "val.en.gz").read_bytes()).decode().splitlines()[:16]
    batch = tokenizer(text, return_tensors="pt", padding=True)
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    upstream = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    variant_model = AttnVariantT5ForConditionalGeneration.from_pretrained(folder, **ranks).eval()
    with torch.no_grad():
        expected, actual = (
            model(**batch, decoder_input_ids=batch["input_ids"]) for model in (upstream, variant_model)
        )
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5 * expected.logits.abs().max().item(), rtol=0)
    for search in SEARCHES.values():
        kwargs = {**batch, **search, "max_new_tokens": 40, "do_sample": False}
        assert variant_model.generate(**kwargs).equal(upstream.generate(**kwargs))
