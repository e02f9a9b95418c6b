"""Compare the two forms of latent attention with the formula and with each other: outputs and gradients."""

import math
from types import SimpleNamespace

import pytest
import torch
from architectures import ALBERT, BATCH, BERT, LENGTH, T5
from fixtures.decoding import decode_in_pieces, generate_with_each_cache
from torch import nn

from hf_attn_variants.modeling.attention import latent_attention
from hf_attn_variants.modeling.attention.latent_attention import attend_to_latent
from hf_attn_variants.modeling.ops.padded_rows import KEEP_ROWS
from hf_attn_variants.modeling.ops.variant_attention import AttentionHeads
from hf_attn_variants.modeling.variant_names import EAGER, SDPA
from hf_attn_variants.reference import heads
from hf_attn_variants.reference.talking_heads import attention_core

pytestmark = pytest.mark.cross_product

RANK, DIM, KEYS = 6, 4, 7
RANKS = {
    "t5": {"cross_kv_lora_rank": 24, "kv_lora_rank": 16, "encoder_kv_lora_rank": 20},
    "bert": {"kv_lora_rank": 16},
    "albert": {"kv_lora_rank": 16},
}
ROWS = [(T5, "T5ForConditionalGeneration"), (BERT, "BertForMaskedLM"), (ALBERT, "AlbertForMaskedLM")]
VARIANTS = {
    "mha": {},
    "grouped": {"num_key_value_heads": 4},
    "talking": {"num_key_value_heads": 4, "talking_heads": "both", "talking_heads_dynamic": ["x2l", "m2l", "m2w"]},
}


@pytest.mark.parametrize("architecture, head", ROWS, ids=[head for _, head in ROWS])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_absorbed_and_expanded_forms_have_equal_gradients(architecture, head, variant, implementation, monkeypatch):
    model = architecture.make_model(head, **RANKS[architecture.name], **VARIANTS[variant]).double()
    model.set_attn_implementation(implementation)
    batch = architecture.make_batch(head, labels=True)
    actual = {}
    for form in (True, False):
        has_m2l = "m2l" in model.config.talking_heads_dynamic
        absorbs = form and not (has_m2l and architecture is not T5)  # with m2l, key biases affect the outputs
        monkeypatch.setattr(latent_attention, "should_absorb_projections", lambda *_, absorbs=absorbs: absorbs)
        model.zero_grad()
        result = model(**batch)
        result.loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        actual[form] = {"logits": result.logits, **gradients}
    assert actual[True].keys() == actual[False].keys()
    for name, expected in actual[False].items():
        if name.endswith("key.bias") and "m2l" not in model.config.talking_heads_dynamic:
            # A key bias does not change a softmax, so its gradient is zero except for rounding. It must not be None,
            # because DDP would raise an error.
            assert actual[True][name].abs().max() == 0 and expected.abs().max() < 1e-10
            continue
        assert expected.abs().max() > 1e-8 or "pooler" in name, name
        torch.testing.assert_close(actual[True][name], expected, atol=1e-10, rtol=0, msg=name)


def make_attention(query, key, value, output, implementation=EAGER, **projections):
    heads = AttentionHeads(query, key, value, query, output, DIM, DIM, RANK)
    module = SimpleNamespace(
        heads=heads,
        implementation=implementation,
        is_own=True,
        dynamic_names=(),
        layer_idx=0,
        is_causal=False,
        key_range=None,
        score=None,
        extensions={},
        kernel=None,
        compression=None,
        padding_rule=KEEP_ROWS,
    )
    vars(module).update(projections, projection_names=tuple(projections))
    module.config = SimpleNamespace(_output_attentions=False)
    return module


def make_projections(key, value, bias):
    torch.manual_seed(3)
    maps = [nn.Linear(RANK, heads * DIM, bias=bias, dtype=torch.float64) for heads in (key, value)]
    with torch.no_grad():
        for parameter in (parameter for item in maps for parameter in item.parameters()):
            parameter.normal_()
    return tuple(maps)


@pytest.mark.parametrize("form", [True, False], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("implementation", [EAGER, SDPA])
@pytest.mark.parametrize("key, value, output", [(4, 4, 4), (2, 2, 4), (1, 1, 4), (4, 6, 6)])
@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "a masked row"])
@pytest.mark.parametrize("beams", [1, 3])
def test_latent_forms_equal_the_formula(form, implementation, key, value, output, bias, masked, beams, monkeypatch):
    monkeypatch.setattr(latent_attention, "should_absorb_projections", lambda *_: form)
    torch.manual_seed(0)
    projections = {}
    if output != 4:
        projections = {"weights_proj": torch.randn(4, output, dtype=torch.float64)}
    module = make_attention(4, key, value, output, implementation, **projections)
    maps = make_projections(key, value, bias)
    query = torch.randn(2 * beams, 4, 5, DIM, dtype=torch.float64, requires_grad=True)
    latent = torch.randn(2, 1, KEYS, RANK, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2 * beams, 1, 5, KEYS, dtype=torch.bool).tril(1)
    if masked:
        mask[1, :, 2] = False
    position_bias = torch.randn(1, 4, 5, KEYS, dtype=torch.float64, requires_grad=True)
    actual, weights = attend_to_latent(
        module, query, latent, mask, maps, scaling=0.7, position_bias=position_bias, output_attentions=True
    )
    memory = latent.repeat_interleave(beams, 0)[:, 0]
    keys, values = (item(memory).unflatten(-1, (-1, DIM)).transpose(1, 2) for item in maps)
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    expected, expected_weights = attention_core(
        query, keys, values, scale=0.7, bias=position_bias, mask=additive, P_w=projections.get("weights_proj")
    )
    torch.testing.assert_close(weights, expected_weights, atol=1e-10, rtol=0)
    torch.testing.assert_close(actual, expected.transpose(1, 2), atol=1e-10, rtol=0)
    if masked:
        assert actual[1, 2].abs().max() == 0
    leaves = [query, latent, position_bias, maps[0].weight, *maps[1].parameters()]
    output_gradient = torch.randn_like(actual)
    expected_gradients = torch.autograd.grad((expected.transpose(1, 2) * output_gradient).sum(), leaves)
    for gradient, expected_gradient in zip(
        torch.autograd.grad((actual * output_gradient).sum(), leaves), expected_gradients, strict=True
    ):
        assert expected_gradient.abs().max() > 1e-3
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-10, rtol=0)


def test_key_bias_affects_key_side_dynamic_projections():
    """Check one query with many keys, for which the absorbed form without a key bias would cost less."""
    torch.manual_seed(0)
    projections = {"logits_proj": torch.randn(4, 4, dtype=torch.float64)}
    module, maps = make_attention(4, 4, 4, 4, **projections), make_projections(4, 4, True)
    query, latent = torch.randn(2, 4, 1, DIM).double(), torch.randn(2, 1, 50, RANK).double()
    m2l = torch.randn(2, 50, 4, 4, dtype=torch.float64)
    assert latent_attention.should_absorb_projections(module, query, latent, maps, {})
    module.dynamic_names = ("m2l",)
    actual, _ = attend_to_latent(module, query, latent, None, maps, scaling=0.7, m2l=m2l)
    keys, values = (item(latent[:, 0]).unflatten(-1, (-1, DIM)).transpose(1, 2) for item in maps)
    expected, _ = attention_core(query, keys, values, scale=0.7, P_l=projections["logits_proj"], m2l=m2l)
    torch.testing.assert_close(actual, expected.transpose(1, 2), atol=1e-10, rtol=0)


@pytest.mark.parametrize("form", [True, False], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("implementation", [EAGER, SDPA])
@pytest.mark.parametrize("talking", [False, True])
def test_dropout_scales_the_value_bias(form, implementation, talking, monkeypatch):
    """Check that outputs add the bias times the sum of weights, which is not one after dropout or P_w."""
    monkeypatch.setattr(latent_attention, "should_absorb_projections", lambda *_: form)
    torch.manual_seed(0)
    projections = {"weights_proj": torch.randn(4, 4, dtype=torch.float64)} if talking else {}
    module, maps = make_attention(4, 2, 2, 4, implementation, **projections), make_projections(2, 2, True)
    query, latent = torch.randn(2, 4, 5, DIM).double(), torch.randn(2, 1, KEYS, RANK).double()
    options = {"scaling": DIM**-0.5, "output_attentions": True}
    torch.manual_seed(5)
    actual, weights = attend_to_latent(module, query, latent, None, maps, dropout=0.5, **options)
    _, undropped = attend_to_latent(module, query, latent, None, maps, **options)
    # Draw the same mask from the same seed. Inverted dropout scales it.
    torch.manual_seed(5)
    mask = nn.functional.dropout(torch.ones_like(undropped), p=0.5)
    torch.testing.assert_close(weights, undropped * mask, atol=1e-12, rtol=0)
    assert (weights.sum(-1) - 1).abs().max() > 0.1
    values = maps[1](latent[:, 0]).unflatten(-1, (-1, DIM)).transpose(1, 2).repeat_interleave(2, dim=1)
    torch.testing.assert_close(actual, (undropped * mask @ values).transpose(1, 2), atol=1e-10, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_latent_forms_drop_the_same_weights_in_training(implementation, monkeypatch):
    """Check value biases, for which the absorbed form drops weights like the expanded form under "eager"."""
    model = BERT.make_model(
        "BertModel", kv_lora_rank=16, num_key_value_heads=4, attention_probs_dropout_prob=0.5
    ).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p != 0.5:
            module.p = 0.0
    batch, actual = BERT.make_batch("BertModel"), []
    for form, name in ((True, implementation), (False, "eager")):
        monkeypatch.setattr(latent_attention, "should_absorb_projections", lambda *_, form=form: form)
        model.set_attn_implementation(name)
        torch.manual_seed(0)
        actual.append(model(**batch).last_hidden_state)
    torch.testing.assert_close(actual[0], actual[1], atol=1e-5, rtol=0)
    assert (actual[0] - model.eval()(**batch).last_hidden_state).abs().max() > 0.1


@pytest.mark.parametrize("variant", ["mha", "gqa", "gqa_talking"])
@pytest.mark.parametrize("steps", [[1] * LENGTH, [5, 1, 3]], ids=["single", "several"])
def test_latent_t5_decodes_the_same_with_and_without_a_cache(variant, steps, form):
    model = T5.make_model("T5ForConditionalGeneration", variant, **RANKS["t5"])
    batch = T5.make_batch("T5ForConditionalGeneration")
    target = batch.pop("decoder_input_ids")
    with torch.no_grad():
        full = model(**batch, decoder_input_ids=target, use_cache=False).logits
    pieces, _ = decode_in_pieces(model, target, steps, **batch)
    torch.testing.assert_close(pieces, full, atol=1e-5, rtol=0)
    for beams in (1, 3):
        generate_with_each_cache(model, batch, static=True, num_beams=beams)


def test_latent_form_is_chosen_by_cost(monkeypatch):
    """Check that single tokens attend in the latent, and whole texts compute keys and values."""
    model = T5.make_model("T5ForConditionalGeneration", cross_kv_lora_rank=24)
    absorbed = []
    inner = latent_attention._attend_in_absorbed_form
    monkeypatch.setattr(
        latent_attention,
        "_attend_in_absorbed_form",
        lambda *args, **kwargs: absorbed.append(args[1].shape[2]) or inner(*args, **kwargs),
    )
    batch = T5.make_batch("T5ForConditionalGeneration")
    model(**batch)
    assert absorbed == []
    model.generate(input_ids=batch["input_ids"], max_new_tokens=3, min_new_tokens=3)
    assert absorbed == [1] * 3 * model.config.num_layers


def test_all_layers_share_one_latent(monkeypatch):
    model = T5.make_model("T5ForConditionalGeneration", cross_kv_lora_rank=24)
    names = [name for name, _ in model.named_parameters() if "kv_a_proj" in name]
    assert names == ["decoder.cross_kv_a_proj.weight"]
    assert model.decoder.cross_kv_a_proj.weight.shape == (24, 40)
    for block in model.decoder.block:
        cross = block.layer[1].EncDecAttention
        assert cross.k.weight.shape == cross.v.weight.shape == (96, 24)
    calls, makes_latent = [], model.decoder.cross_kv_a_proj.forward

    def counted(memory):
        calls.append(memory.shape)
        return makes_latent(memory)

    # With a forward hook, the module would get one row per beam.
    monkeypatch.setattr(model.decoder.cross_kv_a_proj, "forward", counted)
    model.generate(**{"input_ids": T5.make_batch("T5EncoderModel")["input_ids"]}, max_new_tokens=5, num_beams=2)
    assert calls == [(BATCH, LENGTH, 40)]  # one call with one row per sentence


@pytest.mark.parametrize("rank", [24, 40])
def test_latent_cross_attention_of_a_model_equals_the_formula(rank):
    """Compare the cross-attention of a model with `heads.latent_attention` and the weights of the model."""
    model = T5.make_model("T5ForConditionalGeneration", cross_kv_lora_rank=rank).double()
    attention = model.decoder.block[1].layer[1].EncDecAttention
    X, M = torch.randn(2, 5, 40, dtype=torch.float64), torch.randn(2, KEYS, 40, dtype=torch.float64)
    A = model.decoder.cross_kv_a_proj.weight.T if rank < 40 else torch.eye(40, dtype=torch.float64)
    P_q, P_k, P_v = (
        item.weight.unflatten(0, (12, 8)).transpose(1, 2) for item in (attention.q, attention.k, attention.v)
    )
    P_o = attention.o.weight.unflatten(1, (12, 8)).transpose(0, 1)
    with torch.no_grad():
        expected = heads.latent_attention(X, M, A, P_q, P_k, P_v, P_o)
        actual = attention(X, key_value_states=M @ A)[0]
    assert math.isfinite(expected.sum()) and expected.abs().max() > 1e-3
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
