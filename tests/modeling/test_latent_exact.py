"""Check cached encoder outputs: with latents as wide as the input, any T5 or mT5 checkpoint decodes unchanged."""

import pytest
import torch
from architectures import (
    ALBERT,
    BATCH,
    BERT,
    LENGTH,
    T5,
    make_padding_mask,
    make_text_inputs,
    make_token_ids,
    with_latents,
)
from architectures import VARIANTS as ARCHITECTURE_VARIANTS
from fixtures.checkpointing import checkpoint_layers
from fixtures.decoding import decode_in_pieces
from fixtures.tested_architectures import T5_FLAVOURS
from transformers.modeling_outputs import BaseModelOutput

from hf_attn_variants import AttnVariantT5ForConditionalGeneration

pytestmark = pytest.mark.cross_product

WIDTH = T5.tiny["d_model"]
CROSS = {"cross_kv_lora_rank": WIDTH}
ALL = CROSS | {"kv_lora_rank": WIDTH, "encoder_kv_lora_rank": WIDTH}
RANKS = {"cross": CROSS, "all": ALL}
# Without ranks, decoding is that of multi-head attention.
EVERY_RANK = {"none": {}} | RANKS
MASKS = {"full": lambda: None, "right": make_padding_mask, "left": lambda: make_padding_mask().flip(1)}
SEARCHES = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 4, "do_sample": False},
    "beams returned": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    "samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
    "sampled beams": {"do_sample": True, "num_beams": 2},
}
VARIANTS = {
    "2 heads": {"num_key_value_heads": 2},
    "1 head": {"num_key_value_heads": 1, "encoder_num_key_value_heads": 3},
    "talking": {"talking_heads": "both"},
    "grouped talking": ARCHITECTURE_VARIANTS["gqa_talking"],
    "more values": ARCHITECTURE_VARIANTS["weights"],
    "query terms": {"talking_heads": "both", "talking_heads_dynamic": ["x2l", "x2w"]},
    "dynamic": ARCHITECTURE_VARIANTS["dynamic"],
}
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def assert_close(actual, expected):
    atol = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def generate(model, inputs, **kwargs):
    torch.manual_seed(11)
    return model.generate(**inputs, max_new_tokens=7, **kwargs)


def make_source(padding="right"):
    torch.manual_seed(1)
    inputs = make_text_inputs()
    return inputs | {"attention_mask": MASKS[padding]()}


@pytest.mark.thorough
@pytest.mark.parametrize("flavour", T5_FLAVOURS)
@pytest.mark.parametrize("ranks", EVERY_RANK)
@IMPLEMENTATIONS
def test_t5_decodes_like_transformers(flavour, ranks, implementation, tmp_path):
    model_class, config_class, fields = T5_FLAVOURS[flavour]
    torch.manual_seed(0)
    upstream = model_class(config_class(**T5.tiny, **fields)).eval()
    with torch.no_grad():
        for parameter in upstream.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    upstream.save_pretrained(tmp_path)
    variant_model, info = AttnVariantT5ForConditionalGeneration.from_pretrained(
        tmp_path, **EVERY_RANK[ranks], output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for model in (upstream, upstream.encoder, upstream.decoder, variant_model):
        model.set_attn_implementation(implementation)
    for padding in MASKS:
        inputs = make_source(padding)
        with torch.no_grad():
            expected, actual = (
                model(**inputs, decoder_input_ids=inputs["input_ids"]) for model in (upstream, variant_model.eval())
            )
        for name in ("encoder_last_hidden_state", "logits"):
            assert_close(actual[name], expected[name])
        for search in SEARCHES if padding == "left" else ["beams"]:
            actual, expected = (generate(model, inputs, **SEARCHES[search]) for model in (variant_model, upstream))
            assert actual.equal(expected), (padding, search)


@pytest.mark.parametrize("variant", VARIANTS)
@IMPLEMENTATIONS
def test_cached_encoder_outputs_keep_outputs_of_grouped_and_talking_heads(variant, implementation, form):
    model = T5.make_model("T5ForConditionalGeneration", **VARIANTS[variant])
    exact = with_latents(model, **ALL)
    for item in (model, exact):
        item.set_attn_implementation(implementation)
    inputs = make_source("left")
    with torch.no_grad():
        plain, actual = (item(**inputs, decoder_input_ids=inputs["input_ids"]) for item in (model, exact))
    assert_close(actual.logits, plain.logits)
    kwargs = SEARCHES["samples" if implementation == "eager" else "beams returned"]
    assert generate(exact, inputs, **kwargs).equal(generate(model, inputs, **kwargs))


@pytest.mark.parametrize("variant", ["gqa", "gqa_talking"])
@pytest.mark.parametrize("search", ["greedy", "beams", "samples"])
def test_encoder_outputs_are_reused_without_changes(variant, search):
    model = with_latents(T5.make_model("T5ForConditionalGeneration", variant), **ALL)
    inputs = make_source()
    with torch.no_grad():
        states = model.encoder(**inputs).last_hidden_state
    original_states, expected = states.clone(), generate(model, inputs, **SEARCHES[search])
    for _ in range(2):
        # Make a new object each time, because Transformers repeats its contents in place if beams do not share them.
        outputs = BaseModelOutput(last_hidden_state=states)
        reused = {"encoder_outputs": outputs, "attention_mask": inputs["attention_mask"]}
        assert generate(model, reused, **SEARCHES[search]).equal(expected)
        assert states.equal(original_states)


@pytest.mark.parametrize("ranks", RANKS)
def test_cached_encoder_outputs_support_assisted_decoding(ranks, form):
    plain = T5.make_model("T5ForConditionalGeneration", "gqa")
    model = with_latents(plain, **RANKS[ranks])
    # One assistant is often right, one is mostly wrong, and one is often right and uses latents.
    near, far = (T5.make_model("T5ForConditionalGeneration", "gqa", seed=seed) for seed in (0, 1))
    with torch.no_grad():
        near.lm_head.weight.add_(torch.randn_like(near.lm_head.weight), alpha=0.02)
    inputs = {"input_ids": make_token_ids(1, LENGTH)}
    expected = plain.generate(**inputs, max_new_tokens=12, do_sample=False)
    for assistant in (near, far, with_latents(near, **ALL)):
        actual = model.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=assistant)
        assert actual.equal(expected)
    actual = model.generate(**inputs, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
    assert actual.equal(expected)


@pytest.mark.parametrize("variant", ["gqa", "gqa_talking"])
@IMPLEMENTATIONS
def test_cached_encoder_outputs_return_attention_weights(variant, implementation, form):
    plain = T5.make_model("T5ForConditionalGeneration", variant)
    exact = with_latents(plain, **ALL)
    for item in (plain, exact):
        item.set_attn_implementation(implementation)
    batch = T5.make_batch("T5ForConditionalGeneration")
    with torch.no_grad():
        expected, actual = (item(**batch, output_attentions=True) for item in (plain, exact))
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        torch.testing.assert_close(actual[name], expected[name], atol=1e-5, rtol=0)
    kwargs = {"num_beams": 3, "output_attentions": True, "return_dict_in_generate": True, "do_sample": False}
    expected, actual = (item.generate(**make_source(), max_new_tokens=4, **kwargs) for item in (plain, exact))
    assert {weights.shape[0] for step in actual.cross_attentions for weights in step} == {3 * BATCH}
    torch.testing.assert_close(actual.cross_attentions, expected.cross_attentions, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", ["mha", "gqa_talking"])
@IMPLEMENTATIONS
def test_fully_masked_source_keeps_its_outputs(variant, implementation, form):
    plain = T5.make_model("T5ForConditionalGeneration", variant)
    exact = with_latents(plain, **CROSS)
    batch = T5.make_batch("T5ForConditionalGeneration")
    batch["attention_mask"][1] = 0
    states, logits = [], []
    for item in (plain, exact):
        item.set_attn_implementation(implementation)
        attention = item.decoder.block[1].layer[1].EncDecAttention
        attention.register_forward_hook(lambda module, _, output: states.append(output[0][1]))
        with torch.no_grad():
            logits.append(item(**batch).logits)
    if implementation == "sdpa":  # sdpa uses boolean masks, and eager adds the lowest number
        assert states[0].abs().max() == 0 == states[1].abs().max()
    assert_close(states[1], states[0])
    assert_close(logits[1], logits[0])


@pytest.mark.parametrize("variant", ["mha", "mqa", "talking"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("search", ["greedy", "beams"])
def test_cached_encoder_outputs_support_static_caches(variant, ranks, search):
    plain = T5.make_model("T5ForConditionalGeneration", variant)
    exact = with_latents(plain, **RANKS[ranks])
    expected = generate(plain, make_source(), **SEARCHES[search])
    for _ in range(2):  # the second call reuses the cache of the first one
        actual = generate(exact, make_source(), cache_implementation="static", **SEARCHES[search])
        assert actual.equal(expected)


@pytest.mark.parametrize("variant", ["gqa", "gqa_talking"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_cached_encoder_outputs_support_gradient_checkpointing(variant, reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = T5.make_model("T5ForConditionalGeneration", variant, dropout_rate=0.0, **ALL).train()
        if checkpointing:
            checkpoint_layers(model, reentrant)
            model.enable_input_require_grads()
        model(**T5.make_batch("T5ForConditionalGeneration", labels=True)).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("variant", ["gqa", "gqa_talking"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("automatic", [False, True], ids=["cast", "autocast"])
def test_cached_encoder_outputs_work_in_half_precision(variant, dtype, automatic, form):
    exact = with_latents(T5.make_model("T5ForConditionalGeneration", variant), **ALL)
    inputs, target = make_source(), make_token_ids()
    with torch.no_grad():
        expected = exact(**inputs, decoder_input_ids=target).logits
        if not automatic:
            exact = exact.to(dtype)
        with torch.autocast("cpu", dtype, enabled=automatic):
            memory = {"encoder_outputs": exact.encoder(**inputs), "attention_mask": inputs["attention_mask"]}
            pieces, _ = decode_in_pieces(exact, target, [4, 1, 1, 1, 2], **memory)
            tokens = exact.generate(**inputs, max_new_tokens=4, num_beams=2, do_sample=False)
    assert tokens.shape[0] == BATCH
    atol = 40 * torch.finfo(dtype).eps * expected.abs().max()
    torch.testing.assert_close(pieces.float(), expected, atol=atol, rtol=0)


CAUSAL = {"is_decoder": True}
CROSSING = CAUSAL | {"add_cross_attention": True}
BERT_VARIANTS = ("2 heads", "talking", "more values", "query terms", "dynamic")


def make_biased_pair(architecture, head, variant, implementation, **fields):
    """Return a model with random biases of keys and values, and a copy with latents as wide as the input."""
    plain = architecture.make_model(head, **VARIANTS[variant], **fields)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith(("key.bias", "value.bias")):
                parameter.normal_()
    exact = with_latents(plain, kv_lora_rank=48)
    for model in (plain, exact):
        model.set_attn_implementation(implementation)
    return plain, exact


@pytest.mark.parametrize("variant", BERT_VARIANTS)
@pytest.mark.parametrize("architecture, head", [(BERT, "BertModel"), (ALBERT, "AlbertModel")])
@IMPLEMENTATIONS
def test_encoder_biases_are_kept_by_latents(architecture, head, variant, implementation, form):
    plain, exact = make_biased_pair(architecture, head, variant, implementation)
    batch = architecture.make_batch(head)
    with torch.no_grad():
        assert_close(exact(**batch).last_hidden_state, plain(**batch).last_hidden_state)
        weights = [item(**batch, output_attentions=True).attentions for item in (exact, plain)]
    torch.testing.assert_close(*weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", BERT_VARIANTS[:-1])
@pytest.mark.parametrize("fields", [CAUSAL, CROSSING], ids=["alone", "crossing"])
@IMPLEMENTATIONS
def test_bert_decoder_with_latents_decodes_with_a_cache(variant, fields, implementation, form):
    plain, exact = make_biased_pair(BERT, "BertLMHeadModel", variant, implementation, **fields)
    ids = make_token_ids(BATCH, LENGTH)
    memory = {"encoder_hidden_states": torch.randn(BATCH, 5, 48)} if "add_cross_attention" in fields else {}
    with torch.no_grad():
        expected = plain(ids, use_cache=False, **memory).logits
    pieces, cache = decode_in_pieces(exact, ids, [4, 1, 1, 3], "input_ids", **memory)
    assert_close(pieces, expected)
    layers = getattr(cache, "self_attention_cache", cache).layers
    assert all(layer.keys.shape == (BATCH, 1, LENGTH, 48) and not layer.values.numel() for layer in layers)
    if not memory and implementation == "sdpa":
        mask = make_padding_mask().flip(1)
        kwargs = {"attention_mask": mask, "max_new_tokens": 5, "num_beams": 2, "do_sample": False, "pad_token_id": 0}
        assert exact.generate(ids, **kwargs).equal(plain.generate(ids, **kwargs))
