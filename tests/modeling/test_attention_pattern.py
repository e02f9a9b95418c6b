"""Compare models with an attention pattern with plain models under the pattern's mask, in every architecture."""

import pytest
import torch
from architectures import ALBERT, ARCHITECTURES, BERT, T5, make_token_ids
from fixtures.caches import with_cache
from fixtures.checkpointing import checkpoint_layers
from fixtures.decoding import (
    decode_at_once,
    decode_in_steps,
    generate_with_each_cache,
    make_decoder_batch,
    make_prompt,
)
from fixtures.largest_tensor import LargestTensor
from fixtures.pattern_masks import LENGTH, assert_same_under_mask, make_padding
from fixtures.saving import save_and_load
from relatives import ENCODER_DECODERS, ENCODERS, RELATIVES, WHISPER
from transformers import StaticCache

import hf_attn_variants
from hf_attn_variants.modeling.attention import mechanism_attention
from hf_attn_variants.modeling.ops import key_ranges
from hf_attn_variants.reference.patterns import sliding_window_mask

pytestmark = pytest.mark.cross_product

WINDOW, GLOBAL = {"attention_pattern": "sliding_window", "attention_window": 4}, {"num_global_tokens": 1}
ENCODER_ONLY = (BERT, ALBERT, *ENCODERS)
TWO_STACKS = (T5, *ENCODER_DECODERS)
NAMED = {"ids": lambda row: row.name}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Use blocks of two queries, so that a text of LENGTH tokens has several, and return the list of blocked calls."""
    monkeypatch.setattr(key_ranges, "QUERIES_PER_BLOCK", (2,))
    calls, attend = [], mechanism_attention.windowed_attention

    def counted(*args, **options):
        calls.append(options.get("key_range"))
        return attend(*args, **options)

    monkeypatch.setattr(mechanism_attention, "windowed_attention", counted)
    return calls


def add_encoder_prefix(fields):
    return {f"encoder_{name}": value for name, value in fields.items()}


@pytest.mark.parametrize("architecture", [*ENCODER_ONLY, *TWO_STACKS], **NAMED)
@pytest.mark.parametrize("variant", ["gqa", "latent"])
def test_encoder_with_window_equals_plain_encoder_under_the_mask(architecture, variant, short_blocks):
    two_stacks = architecture in TWO_STACKS
    fields = add_encoder_prefix(WINDOW | GLOBAL) if two_stacks else WINDOW | GLOBAL
    head = next(iter(architecture.heads))
    models = [architecture.make_model(head, variant, **item) for item in (fields, {})]
    stacks = [model.get_encoder() if two_stacks else model for model in models]
    inputs, allowed = {"input_ids": make_token_ids(3, LENGTH)}, sliding_window_mask(LENGTH, window=4, global_tokens=1)
    assert_same_under_mask(*stacks, inputs, make_padding(), allowed[None, None])
    assert short_blocks == [(2, 2, 1, 1)] * 2


@pytest.mark.parametrize("architecture", [BERT, *TWO_STACKS, WHISPER], **NAMED)
@pytest.mark.parametrize("variant", ["gqa", "latent"])
def test_decoder_with_window_equals_plain_decoder_under_the_mask(architecture, variant, short_blocks):
    head = "BertLMHeadModel" if architecture is BERT else next(iter(architecture.heads))
    models = [architecture.make_model(head, variant, **item) for item in (WINDOW | {"attention_dilation": 2}, {})]
    inputs = {"input_ids": make_token_ids(3, LENGTH), "use_cache": False}
    if architecture is BERT:
        stacks = [model.bert for model in models]
    else:
        stacks = [model.get_decoder() for model in models]
        inputs["encoder_hidden_states"] = torch.randn(3, 7, models[0].config.d_model)
    allowed = sliding_window_mask(LENGTH, window=4, dilation=2, causal=True)
    assert_same_under_mask(*stacks, inputs, make_padding(left=True), allowed[None, None])
    assert short_blocks == [(6, 0, 2, 0)] * 2


def test_whisper_encoder_with_window_agrees_between_implementations(short_blocks):
    model = WHISPER.make_model("WhisperModel", "gqa", **add_encoder_prefix(WINDOW)).get_encoder()
    features = WHISPER.make_batch("WhisperModel")["input_features"]
    with torch.no_grad():
        actual = model(features).last_hidden_state
        assert len(short_blocks) == 2
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(features).last_hidden_state, actual, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *RELATIVES], **NAMED)
def test_window_wider_than_the_text_changes_no_output(architecture, short_blocks):
    head = next(iter(architecture.heads))
    wide = WINDOW | {"attention_window": 200}
    wide |= add_encoder_prefix(wide) if hasattr(architecture.config_class, "encoder_attention_window") else GLOBAL
    pattern, plain = architecture.make_model(head, "gqa", **wide), architecture.make_model(head, "gqa")
    batch = architecture.make_batch(head)
    with torch.no_grad():
        torch.testing.assert_close(pattern(**batch)[0], plain(**batch)[0], atol=1e-6, rtol=0)
    assert not short_blocks


@pytest.mark.parametrize(
    "architecture, head",
    [
        (BERT, "BertLMHeadModel"),
        (T5, "T5ForConditionalGeneration"),
        (ENCODER_DECODERS[0], "BartForConditionalGeneration"),
        (ENCODER_DECODERS[-1], "UMT5ForConditionalGeneration"),
        (WHISPER, "WhisperForConditionalGeneration"),
    ],
    ids=["bert", "t5", "bart", "umt5", "whisper"],
)
@pytest.mark.parametrize("variant", ["gqa", "latent"])
def test_window_cache_keeps_only_the_tokens_of_the_window(architecture, head, variant):
    """Check windows of two sizes, with several tokens in one call, then single tokens. Cross-attention caches all."""
    windows = {"attention_pattern": "sliding_window", "per_layer_values": {"attention_window": [4, 6]}}
    model = architecture.make_model(head, variant, **windows)
    batch = make_decoder_batch(architecture, head)
    steps, cache = decode_in_steps(model, batch)
    torch.testing.assert_close(steps, decode_at_once(model, batch), atol=1e-5, rtol=0)
    self_attention_cache = getattr(cache, "self_attention_cache", cache)
    assert [layer.keys.shape[2] for layer in self_attention_cache.layers] == [3, 5]
    assert self_attention_cache.get_seq_length() == 9
    if self_attention_cache is not cache:
        source = 20 if architecture is WHISPER else 9
        assert {layer.keys.shape[2] for layer in cache.cross_attention_cache.layers} == {source}


@pytest.mark.parametrize("beams", [1, 3])
def test_window_generation_is_the_same_with_and_without_a_cache(beams):
    for architecture, head in ((T5, "T5ForConditionalGeneration"), (ENCODER_DECODERS[0], "BartForCausalLM")):
        model = architecture.make_model(head, "gqa", **WINDOW | {"attention_dilation": 2})
        generate_with_each_cache(model, make_prompt(architecture, head, left=True), 12, num_beams=beams)


GLOBAL_ROWS = torch.zeros(3, LENGTH).long()
# Position 18 of the second row is padding. The third row has no global tokens.
GLOBAL_ROWS[0, [0, 11, 12, 20]] = GLOBAL_ROWS[1, [4, 18]] = 1


def make_allowed_mask(first):
    is_global = GLOBAL_ROWS.bool() | (torch.arange(LENGTH) < first)
    return (sliding_window_mask(LENGTH, window=4) | is_global[:, None] | is_global[:, :, None])[:, None]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("architecture", ENCODER_ONLY, **NAMED)
@pytest.mark.parametrize("variant", ["gqa", "latent", "talking"])
def test_global_attention_mask_selects_tokens_anywhere(architecture, variant, first):
    head = next(iter(architecture.heads))
    pattern = architecture.make_model(head, variant, **WINDOW, num_global_tokens=first)
    inputs = {"input_ids": make_token_ids(3, LENGTH)}

    class WithMask(torch.nn.Module):  # passes the mask only to the model with the pattern
        def __init__(self):
            super().__init__()
            self.model = pattern

        state_dict, set_attn_implementation = pattern.state_dict, pattern.set_attn_implementation

        def forward(self, **options):
            return self.model(**options, global_attention_mask=GLOBAL_ROWS)

    plain = architecture.make_model(head, variant)
    assert_same_under_mask(WithMask(), plain, inputs, make_padding(), make_allowed_mask(first))


def test_every_head_class_passes_the_global_attention_mask():
    for architecture in ENCODER_ONLY:
        for head in architecture.heads:
            if head.endswith(("LMHeadModel", "ForCausalLM", "ForMultipleChoice")):
                continue  # decoders, and heads with several texts per row
            model = architecture.make_model(head, **WINDOW)
            batch = {"input_ids": make_token_ids(3, LENGTH)}
            with torch.no_grad():
                actual = [model(**batch, **mask)[0] for mask in ({}, {"global_attention_mask": GLOBAL_ROWS})]
            assert not actual[0].allclose(actual[1]), head


def test_invalid_global_attention_mask_raises_an_error():
    ids = make_token_ids(3, LENGTH)
    with pytest.raises(ValueError, match=r"one value per token, \[3, 23\], got the shape \[23\]"):
        BERT.make_model("BertModel", **WINDOW)(ids, global_attention_mask=GLOBAL_ROWS[0])
    with pytest.raises(ValueError, match="is not supported for models with a relative position bias"):
        T5.make_model("T5EncoderModel", **add_encoder_prefix(WINDOW))(ids, global_attention_mask=GLOBAL_ROWS)


def test_attention_weights_are_zero_outside_the_pattern():
    model = BERT.make_model("BertModel", "talking", **WINDOW | GLOBAL)
    inputs = {"input_ids": make_token_ids(3, LENGTH)}
    outside = ~sliding_window_mask(LENGTH, window=4, global_tokens=1)
    with torch.no_grad():
        result = model(**inputs, output_attentions=True)
        torch.testing.assert_close(model(**inputs).last_hidden_state, result.last_hidden_state, atol=1e-5, rtol=0)
    assert all(not weights[..., outside].any() for weights in result.attentions)
    assert all((weights[..., ~outside] != 0).all() for weights in result.attentions)


def test_layers_have_separate_windows():
    """Check that None disables the window of a layer, also with a mask that is not causal."""
    by_layer = {"attention_pattern": "sliding_window", "per_layer_values": {"attention_window": [4, None]}}
    config = BERT.make_config("mha", **by_layer)
    assert (config.attention_window, config.get_layer_value("attention_window", 1)) == (4, None)
    for architecture, head in ((BERT, "BertLMHeadModel"), (T5, "T5ForConditionalGeneration")):
        model = architecture.make_model(head, **by_layer)
        batch = architecture.make_batch(head)
        name = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
        batch.pop("attention_mask")
        with torch.no_grad():
            full_output = model(**batch, use_cache=False).logits
            changed = model(**batch | {name: batch[name].index_fill(1, torch.tensor(8), 7)}, use_cache=False).logits
            far = model(**batch | {name: batch[name].index_fill(1, torch.tensor(0), 7)}, use_cache=False).logits
        torch.testing.assert_close(full_output[:, :8], changed[:, :8])
        assert (full_output[:, 8] - far[:, 8]).abs().max() > 1e-4  # farther away than two windows


@pytest.mark.parametrize("architecture", [BERT, T5, ENCODER_DECODERS[0]], **NAMED)
def test_pattern_models_allocate_no_quadratic_tensor(architecture, monkeypatch):
    monkeypatch.setattr(key_ranges, "QUERIES_PER_BLOCK", (8,))
    n = 600
    fields = add_encoder_prefix(WINDOW | GLOBAL) | WINDOW if architecture is not BERT else WINDOW | GLOBAL
    longer = {} if architecture is T5 else {"max_position_embeddings": n}
    model = architecture.make_model(next(iter(architecture.heads)), "gqa", num_hidden_layers=1, **fields | longer)
    ids = make_token_ids(1, n)
    mask = (torch.arange(n) < n - 50).long()[None]
    stacks = [model] if architecture is BERT else [model.get_encoder(), model.get_decoder()]
    for stack in stacks:
        with LargestTensor() as largest:
            stack(input_ids=ids, attention_mask=mask).last_hidden_state.sum().backward()
        assert largest.numel < n * n / 2


def test_gradient_checkpointing_with_patterns_keeps_gradients():
    """Check T5, whose layers share a position bias per distance."""
    fields = add_encoder_prefix(WINDOW | GLOBAL) | WINDOW
    model = T5.make_model("T5Model", "gqa", dropout_rate=0.0, **fields).train()
    ids, gradients = make_token_ids(3, LENGTH), []
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_layers(model)
        model.zero_grad()
        inputs = {"input_ids": ids, "attention_mask": make_padding(), "decoder_input_ids": ids}
        model(**inputs, use_cache=False).last_hidden_state.square().sum().backward()
        gradients.append([item.grad.clone() for item in model.parameters() if item.grad is not None])
    torch.testing.assert_close(*gradients)


def test_pattern_with_unsupported_implementation_raises_an_error():
    config = BERT.make_config("mha", **WINDOW)
    with pytest.raises(ValueError, match="attention_pattern"):
        hf_attn_variants.AttnVariantBertModel._from_config(config, attn_implementation="flex_attention")
    model = T5.make_model("T5ForConditionalGeneration", **WINDOW)
    with pytest.raises(ValueError, match="`attention_pattern`"):
        model.decoder(input_ids=make_token_ids(), **with_cache(StaticCache(model.config, 16)), use_cache=True)


def test_plain_checkpoint_loads_and_converts_with_a_pattern(tmp_path):
    BERT.make_upstream_model("BertModel").save_pretrained(tmp_path / "plain")
    model_class, ids = hf_attn_variants.AttnVariantBertModel, make_token_ids(3, LENGTH)
    config = BERT.config_class.from_pretrained(tmp_path / "plain", **WINDOW | GLOBAL)
    model = model_class.from_pretrained(tmp_path / "plain", config=config).eval()
    again = save_and_load(model, tmp_path / "window", {"input_ids": ids})
    assert again.config.attention_window == 4 and again.config.num_global_tokens == 1
    plain = model_class.from_pretrained(tmp_path / "plain").eval()
    converted = hf_attn_variants.convert(plain, num_key_value_heads=12, **WINDOW | GLOBAL).eval()
    with torch.no_grad():
        outputs = [item(ids).last_hidden_state for item in (model, converted, plain)]
    assert outputs[0].equal(outputs[1]) and (outputs[0] - outputs[2]).abs().max() > 1e-3
