"""Check transient-global attention: the formula, and LongT5's encoder with its weights under our names."""

import math

import pytest
import torch
import transformers
from architectures import T5, make_token_ids
from fixtures.gradients import assert_same_with_gradients
from fixtures.largest_tensor import LargestTensor
from fixtures.saving import save_and_load

import hf_attn_variants
from hf_attn_variants.modeling.mechanisms.patterns import transient_global
from hf_attn_variants.reference.patterns import transient_global_attention

pytestmark = pytest.mark.cross_product

SUMMARIES = {
    "encoder_attention_pattern": "transient_global",
    "encoder_attention_window": 6,
    "encoder_attention_block_size": 4,
}
LENGTHS = (23, 15, 9, 3)


@pytest.fixture(params=[5, 128], ids=["blocks", "one block"])
def rows(request, monkeypatch):
    monkeypatch.setattr(transient_global, "SUMMARY_ROWS", request.param)


def make_padding(length=23):
    return (torch.arange(length) < torch.tensor(LENGTHS)[:, None]).long()


def make_encoder(variant="gqa", **fields):
    return T5.make_model("T5EncoderModel", variant, **SUMMARIES | fields).encoder


def compute_distance_bias(attention, embedding, distances):
    buckets = attention._relative_position_bucket(distances, True, 8, 10)
    return embedding.double()[buckets].T


@pytest.mark.parametrize("fields", [{}, {"position_embedding_type": "sinusoidal"}], ids=["bias", "sinusoids"])
@pytest.mark.parametrize("variant", ["mha", "gqa"])
def test_transient_global_attention_equals_the_formula(variant, fields, rows):
    attention = make_encoder(variant, **fields).block[0].layer[0].SelfAttention
    states = torch.randn(4, 23, 40, requires_grad=True)
    actual = attention(states, mask=make_padding().bool()[:, None, None])[0]
    exact = states.detach().double().requires_grad_()
    heads = [getattr(attention, name).weight.detach().double() for name in "qkv"]
    heads = [weight.unflatten(0, (-1, 8)).transpose(1, 2) for weight in heads]
    gamma, options = attention.global_input_layer_norm.weight.detach().double(), {}
    if not fields:
        tables = (attention.relative_attention_bias.weight, attention.global_relative_attention_bias.weight)
        distances = (torch.arange(-22, 23), torch.arange(-4, 5))
        tables = [
            compute_distance_bias(attention, *item)
            for item in zip([t.detach() for t in tables], distances, strict=True)
        ]
        options = {"bias": tables[0], "block_bias": tables[1]}
    weights, losses = torch.randn(4, 23, 40, dtype=torch.float64), []
    for row, length in enumerate(LENGTHS):
        call = {"window": 6, "block": 4, "length": length, **options}
        formula_output = transient_global_attention(exact[row], *heads, gamma, **call)
        expected = formula_output.flatten(1) @ attention.o.weight.detach().double().T
        torch.testing.assert_close(actual[row, :length].double(), expected, atol=1e-5, rtol=0)
        losses.append((expected * weights[row, :length]).sum())
    (expected,) = torch.autograd.grad(sum(losses), exact)
    (gradient,) = torch.autograd.grad((actual * weights.float() * make_padding()[..., None]).sum(), states)
    torch.testing.assert_close(gradient.double(), expected, atol=1e-5 * max(1, expected.abs().max()), rtol=0)


@pytest.mark.parametrize("length", [23, 24, 3])
def test_transient_global_encoder_equals_longt5(length, rows):
    torch.manual_seed(0)
    sizes = {name: value for name, value in T5.tiny.items() if name != "initializer_factor"}
    config = transformers.LongT5Config(
        **sizes, encoder_attention_type="transient-global", local_radius=3, global_block_size=4, initializer_factor=0.5
    )
    upstream = transformers.LongT5EncoderModel(config).eval()
    with torch.no_grad():
        for parameter in upstream.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    variant_model = hf_attn_variants.AttnVariantT5EncoderModel(T5.make_config("mha", **SUMMARIES)).eval()
    state = {k.replace("TransientGlobalSelf", "Self"): v for k, v in upstream.state_dict().items()}
    assert state.keys() == variant_model.state_dict().keys()
    variant_model.load_state_dict(state)
    ids, mask = make_token_ids(4, length), make_padding(length)
    with torch.no_grad():
        actual, expected = (model(ids, attention_mask=mask).last_hidden_state for model in (variant_model, upstream))
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", ["mha", "gqa", "talking", "gqa_talking"])
@pytest.mark.parametrize("more", [{}, {"score_function": "additive"}], ids=["", "additive"])
def test_transient_global_blocks_equal_the_returned_weights(variant, more, monkeypatch):
    monkeypatch.setattr(transient_global, "SUMMARY_ROWS", 5)
    model = make_encoder(variant, **more)
    ids, mask = make_token_ids(4, 23), make_padding()
    actual = model(ids, attention_mask=mask)[0]
    output_with_weights = model(ids, attention_mask=mask, output_attentions=True)
    assert output_with_weights.attentions[0].shape[-2:] == (23, 5 + 23)
    real, parameters = mask.bool(), list(model.parameters())
    assert_same_with_gradients(actual[real], output_with_weights[0][real], parameters, parameters)


def test_transient_global_attention_allocates_no_quadratic_tensor(monkeypatch):
    monkeypatch.setattr(transient_global, "SUMMARY_ROWS", 16)
    model, sizes = make_encoder("gqa", encoder_attention_block_size=64), []
    for length in (512, 1024):
        with LargestTensor() as largest:
            model(make_token_ids(1, length))[0].sum().backward()
        sizes.append(largest.numel)
    assert sizes[1] <= 2 * sizes[0]


def test_t5_checkpoint_loads_with_transient_global_attention_and_is_saved(tmp_path):
    T5.make_upstream_model("T5ForConditionalGeneration").save_pretrained(tmp_path / "plain")
    model_class = hf_attn_variants.AttnVariantT5ForConditionalGeneration
    model = model_class.from_pretrained(tmp_path / "plain", **SUMMARIES).eval()
    first, second = (block.layer[0].SelfAttention for block in model.encoder.block)
    assert first.global_input_layer_norm.weight.eq(0.5).all()  # T5 initializes it with `initializer_factor`
    std = 0.5 * model.config.d_model**-0.5
    assert first.global_relative_attention_bias.weight.std().item() == pytest.approx(std, rel=0.4)
    assert not hasattr(second, "global_relative_attention_bias") and math.isclose(second.key_range.radius, 3)
    save_and_load(model, tmp_path / "summaries", T5.make_batch("T5ForConditionalGeneration"))


def test_unsupported_masks_and_conversions_with_transient_global_raise():
    model = make_encoder()
    with pytest.raises(ValueError, match="mask must be a boolean padding mask"):
        model(make_token_ids(2, 9), attention_mask=torch.ones(2, 1, 9, 9).tril().bool())
    generator = T5.make_model("T5ForConditionalGeneration", **SUMMARIES)
    with pytest.raises(ValueError, match="transient_global"):
        hf_attn_variants.convert(generator, num_key_value_heads=3)
