"""Check sinusoidal positions: the formula, every architecture that supports them, any length, and caches."""

import pytest
import torch
from architectures import ALBERT, BATCH, BERT, LENGTH, T5, make_token_ids
from fixtures.decoding import decode_in_pieces, generate_with_each_cache, make_prompt
from fixtures.saving import save_and_load
from relatives import ENCODER_DECODERS, ENCODERS
from transformers import StaticCache

import hf_attn_variants
from hf_attn_variants.export.plain import export_transformers
from hf_attn_variants.modeling.mechanisms.sinusoidal_positions import compute_sinusoids
from hf_attn_variants.reference.scores import sinusoidal_positions
from hf_attn_variants.registration import get_max_input_length

pytestmark = pytest.mark.cross_product

SINUSOIDAL = {"position_embedding_type": "sinusoidal"}
UMT5 = ENCODER_DECODERS[-1]
EVERY_ENCODER = pytest.mark.parametrize("architecture", [BERT, ALBERT, *ENCODERS], ids=lambda row: row.name)
BOTH_T5S = pytest.mark.parametrize("architecture", [T5, UMT5], ids=lambda row: row.name)
WRITERS = {"t5": "T5ForConditionalGeneration", "umt5": "UMT5ForConditionalGeneration"}


@pytest.mark.parametrize("width", [1, 7, 40])
def test_sinusoids_equal_the_formula(width):
    expected = sinusoidal_positions(30, width)
    torch.testing.assert_close(
        compute_sinusoids(torch.arange(30)[None], width)[0].double(), expected, atol=1e-6, rtol=0
    )
    far = torch.tensor([[20_000]])
    by_hand = torch.tensor(20_000 / 10_000 ** (2 * (width // 2) / width), dtype=torch.float64)
    expected = by_hand.cos() if (width - 1) % 2 else by_hand.sin()
    if width % 2:  # the last column is a sine
        torch.testing.assert_close(compute_sinusoids(far, width)[0, 0, -1].double(), expected, atol=1e-6, rtol=0)


def make_base_model(architecture, head, **fields):
    model = architecture.make_model(head, "gqa", **fields)
    return getattr(model, model.base_model_prefix, model)


@EVERY_ENCODER
def test_encoder_with_sinusoids_equals_a_plain_one_with_that_table(architecture):
    head = next(iter(architecture.heads))
    model, plain = make_base_model(architecture, head, **SINUSOIDAL), make_base_model(architecture, head)
    names = plain.state_dict().keys() - model.state_dict().keys()
    assert names == {"embeddings.position_embeddings.weight"} and not model.state_dict().keys() - plain.state_dict()
    plain.load_state_dict(model.state_dict(), strict=False)
    first = model.config.pad_token_id + 1 if architecture.name == "roberta" else 0
    table = plain.embeddings.position_embeddings.weight.data
    table[first:] = sinusoidal_positions(len(table) - first, table.shape[1]) * model.config.initializer_range
    ids, mask = make_token_ids(), torch.ones(BATCH, LENGTH).long()
    ids[1, :4], mask[1, :4] = model.config.pad_token_id, 0  # on the left; RoBERTa counts positions after the padding
    with torch.no_grad():
        actual, expected = (item(input_ids=ids, attention_mask=mask).last_hidden_state for item in (model, plain))
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)
        states, positions = torch.randn(BATCH, LENGTH, table.shape[1]), torch.arange(LENGTH).flip(0)[None] + first
        for inputs in ({"inputs_embeds": states}, {"input_ids": ids, "position_ids": positions}):
            actual, expected = (item(**inputs).last_hidden_state for item in (model, plain))
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@EVERY_ENCODER
def test_sinusoidal_positions_support_any_length(architecture):
    head = next(iter(architecture.heads))
    model = make_base_model(architecture, head, **SINUSOIDAL)
    longer = make_base_model(architecture, head, max_position_embeddings=300)
    longer.load_state_dict(model.state_dict(), strict=False)
    first = model.config.pad_token_id + 1 if architecture.name == "roberta" else 0
    table = longer.embeddings.position_embeddings.weight.data
    table[first:] = sinusoidal_positions(300 - first, table.shape[1]) * model.config.initializer_range
    ids = make_token_ids(2, 290)
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[0], longer(ids)[0], atol=1e-5, rtol=0)
    assert get_max_input_length(model.config) is None and get_max_input_length(longer.config) == 300 - first


@BOTH_T5S
def test_t5_with_sinusoids_adds_them_to_its_inputs_without_a_bias(architecture):
    head = WRITERS[architecture.name]
    model, plain = architecture.make_model(head, "gqa", **SINUSOIDAL), architecture.make_model(head, "gqa")
    assert not [name for name in model.state_dict() if "relative" in name]
    plain.load_state_dict(model.state_dict(), strict=False)
    for name, parameter in plain.named_parameters():
        if "relative" in name:
            parameter.data.zero_()
    ids, targets = make_token_ids(), make_token_ids()
    mask = torch.ones(BATCH, LENGTH).long()
    mask[1, 5:] = mask[2, :4] = 0
    added = sinusoidal_positions(LENGTH, model.config.d_model).float() * model.config.initializer_factor
    placed = added.repeat(BATCH, 1, 1)
    placed[2] = torch.cat([added[:1].expand(4, -1), added[: LENGTH - 4]])  # after the padding
    words = plain.get_input_embeddings()
    with torch.no_grad():
        actual = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
        inputs = {"inputs_embeds": words(ids) + placed, "decoder_inputs_embeds": words(targets) + added}
        torch.testing.assert_close(actual, plain(**inputs, attention_mask=mask).logits, atol=1e-5, rtol=0)
        short = model.encoder(ids[2:, 4:]).last_hidden_state
        torch.testing.assert_close(model.encoder(ids[2:], mask[2:])[0][:, 4:], short, atol=1e-5, rtol=0)


@BOTH_T5S
@pytest.mark.parametrize("fields", [{}, {"attention_pattern": "sliding_window", "attention_window": 4}], ids=str)
def test_sinusoidal_positions_continue_after_the_cache(architecture, fields):
    model = architecture.make_model(WRITERS[architecture.name], "gqa", **SINUSOIDAL, **fields)
    batch = architecture.make_batch(WRITERS[architecture.name])
    ids = batch.pop("decoder_input_ids")
    mask = torch.ones(BATCH, LENGTH).index_fill(1, torch.arange(2), 0).long()
    for masks in ({}, {"decoder_attention_mask": mask}):
        with torch.no_grad():
            full_output = model(**batch, decoder_input_ids=ids, **masks, use_cache=False).logits
        steps, _ = decode_in_pieces(model, ids, [3, 4, 1, 1], masks=masks, **batch)
        torch.testing.assert_close(steps[:, 2:], full_output[:, 2:], atol=1e-5, rtol=0)


@BOTH_T5S
def test_sinusoidal_models_generate_the_same_with_and_without_a_cache(architecture):
    model = architecture.make_model(WRITERS[architecture.name], "gqa", **SINUSOIDAL)
    for beams in (1, 3):
        generate_with_each_cache(model, make_prompt(architecture, WRITERS[architecture.name]), 8, num_beams=beams)
    static, ids = StaticCache(model.config, 16), make_token_ids()
    steps, _ = decode_in_pieces(model.decoder, ids, [5, 1, 1, 2], "input_ids", cache=static)
    with torch.no_grad():
        full_output = model.decoder(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(steps, full_output, atol=1e-5, rtol=0)


def test_bert_decoder_generates_beyond_its_position_table():
    model = BERT.make_model("BertLMHeadModel", "gqa", **SINUSOIDAL)
    ids = make_token_ids(2, 30)  # the table has 32 positions
    assert generate_with_each_cache(model, {"input_ids": ids}, 8, pad_token_id=0).shape == (2, 38)


@pytest.mark.parametrize("architecture, head", [(BERT, "BertModel"), (T5, "T5Model")], ids=["bert", "t5"])
def test_loading_sinusoids_warns_that_learned_positions_are_dropped(architecture, head, tmp_path, logged):
    architecture.make_upstream_model(head).save_pretrained(tmp_path / "plain")
    model_class = getattr(hf_attn_variants, f"AttnVariant{head}")
    model = model_class.from_pretrained(tmp_path / "plain", **SINUSOIDAL)
    assert "was trained with learned positions. Sinusoidal positions replace them" in logged.text
    logged.clear()
    again = save_and_load(model, tmp_path / "sinusoidal", architecture.make_batch(head))
    assert "positions" not in logged.text and again.config.position_embedding_type == "sinusoidal"


def test_talking_heads_checkpoint_loads_with_a_pattern(tmp_path):
    BERT.make_model("BertModel", "talking").save_pretrained(tmp_path)
    window = {"attention_pattern": "sliding_window", "attention_window": 4}
    model = hf_attn_variants.AttnVariantBertModel.from_pretrained(tmp_path, **window)
    assert model.config.attention_window == 4 and model.config.talking_heads == "both"


def test_absolute_position_type_is_accepted(tmp_path):
    for architecture in (BERT, ENCODER_DECODERS[0]):
        config = architecture.make_config("mha", position_embedding_type="absolute")
        config.save_pretrained(tmp_path / architecture.name)
        assert type(config).from_pretrained(tmp_path / architecture.name).position_embedding_type == "absolute"
    with pytest.raises(ValueError, match="`position_embedding_type`"):
        type(config).from_upstream(config.to_dict() | {"position_embedding_type": "relative_key_query"})


def test_sinusoids_support_neither_conversion_nor_plain_export(tmp_path):
    model = BERT.make_model("BertModel", **SINUSOIDAL)
    with pytest.raises(ValueError, match="`position_embedding_type`"):
        hf_attn_variants.convert(BERT.make_model("BertModel"), **SINUSOIDAL)
    fewer = hf_attn_variants.convert(model, num_key_value_heads=3)
    assert fewer.config.position_embedding_type == "sinusoidal"
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="`position_embedding_type`"):
        export_transformers(tmp_path / "model", tmp_path / "plain")
