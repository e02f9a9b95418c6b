"""Check talking heads per place (encoder, decoder, cross-attention): separately, together and per layer."""

import re

import pytest
import torch
from architectures import ALBERT, BERT, LENGTH, T5, make_padding_mask, make_token_ids
from fixtures.caches import get_cache
from fixtures.decoding import decode_in_pieces, generate_with_each_cache, make_prompt
from relatives import ENCODER_DECODERS, WHISPER
from transformers import T5Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_attn_variants
from hf_attn_variants.modeling.attention import attention_interface
from hf_attn_variants.modeling.mechanisms.talking_heads import TalkingHeadsSettings
from hf_attn_variants.modeling.variant_names import SDPA
from hf_attn_variants.reference.talking_heads import attention_core

BART, UMT5 = ENCODER_DECODERS[0], ENCODER_DECODERS[-1]
PAIRS = {"t5": T5, "umt5": UMT5, "bart": BART, "whisper": WHISPER}
BOTH, LOGITS, WEIGHTS = {"logits_proj", "weights_proj"}, {"logits_proj"}, {"weights_proj"}
# (fields, projections of the attention modules in each place, as a list if layers differ).
CASES = {
    "cross alone": ({"cross_talking_heads": "both"}, {"cross": BOTH}),
    "encoder alone": ({"encoder_talking_heads": "logits"}, {"encoder": LOGITS}),
    "decoder alone": (
        {"talking_heads": "weights", "encoder_talking_heads": "none", "cross_talking_heads": "none"},
        {"decoder": WEIGHTS},
    ),
    "each its own": (
        {
            "talking_heads": "logits",
            "talking_heads_init": "random",
            "num_softmax_heads": 8,
            "encoder_talking_heads": "weights",
            "encoder_talking_heads_init": "random",
            "encoder_num_value_heads": 6,
            "cross_talking_heads": "both",
            "cross_talking_heads_init": "random",
            "cross_num_softmax_heads": 6,
            "cross_num_value_heads": 9,
        },
        {"decoder": LOGITS, "encoder": WEIGHTS, "cross": BOTH},
    ),
    "dynamic": (
        {
            "cross_talking_heads": "both",
            "cross_talking_heads_dynamic": ["x2l", "m2l", "x2w", "m2w"],
            "cross_talking_heads_init": "random",
            "encoder_talking_heads": "logits",
            "encoder_talking_heads_dynamic": ["m2l"],
        },
        {"cross": {*BOTH, "x2l_proj", "m2l_proj", "x2w_proj", "m2w_proj"}, "encoder": {*LOGITS, "m2l_proj"}},
    ),
    "by layer": (
        {
            "per_layer_values": {
                "talking_heads": ["both", None],
                "cross_talking_heads": [None, "weights"],
                "encoder_talking_heads": ["none", "logits"],
                "cross_talking_heads_dynamic": [[], ["m2w"]],
            }
        },
        {"decoder": [BOTH, set()], "cross": [set(), {*WEIGHTS, "m2w_proj"}], "encoder": [set(), LOGITS]},
    ),
}
EVERY_PAIR = pytest.mark.parametrize("row", PAIRS.values(), ids=PAIRS)
EVERY_CASE = pytest.mark.parametrize("case", CASES)


def get_head(row):
    return next(name for name in row.heads if name.endswith("ForConditionalGeneration"))


def make_model(row, case, **more):
    return row.make_model(get_head(row), **CASES[case][0], **more)


def assert_projections(model, expected):
    """Check the projections of the modules in each place; a list has one entry per layer."""
    for site, path, module in model.named_attention_modules():
        names = expected.get(site.name, set())
        names = names[site.get_layer_index(model.config, path)] if isinstance(names, list) else names
        assert get_projections(module.get_submodule(site.core)).keys() == names, path


def list_kinds(config, layer=0):
    """Return the kind of talking heads in the self-attention of decoder and encoder, and in cross-attention."""
    return [config.get_talking_heads(prefix, layer).kind for prefix in ("", "encoder_", "cross_")]


def get_projections(module):
    return {name: item for name, item in module.named_parameters(recurse=False) if name.endswith("_proj")}


def with_the_formula(monkeypatch, model):
    """Replace the attention of a model by the reference, which uses the same inputs and parameters."""

    def note(module, args, kwargs):
        tensors = [item for item in args if isinstance(item, torch.Tensor) and item.dim() == 3]
        states = kwargs.get("hidden_states", tensors[0] if tensors else None)
        memory = kwargs.get("key_value_states", kwargs.get("encoder_hidden_states"))
        memory = tensors[1] if memory is None and len(tensors) > 1 else memory
        module.seen = {"x": states, "m": states if memory is None else memory}

    def formula(module, query, key, value, attention_mask=None, scaling=None, position_bias=None, **kwargs):
        n, m = query.shape[2], key.shape[2]
        mask = torch.zeros(n, m, dtype=query.dtype)
        if attention_mask is not None:
            mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -torch.inf)
        elif module.is_causal and n > 1:
            mask = mask.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), -torch.inf)
        module_projections = get_projections(module)
        P = {
            f"P_{name[0]}": module_projections.pop(f"{name}_proj")
            for name in ("logits", "weights")
            if f"{name}_proj" in module_projections
        }
        terms = {
            name[:3]: torch.einsum("bld,dij->blij", module.seen[name[0]], item)
            for name, item in module_projections.items()
        }
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output, weights = attention_core(query, key, value, scale=scale, bias=position_bias, mask=mask, **P, **terms)
        return output.transpose(1, 2), weights

    for site, _, module in model.named_attention_modules():
        module.get_submodule(site.core).register_forward_pre_hook(note, with_kwargs=True)
    monkeypatch.setitem(attention_interface.ATTENTION_FUNCTIONS, SDPA, formula)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, SDPA, formula)


def compute_logits_and_gradients(model, batch):
    """Return the logits of a model, and the gradient of each of its parameters."""
    model.zero_grad()
    result = model(**batch, use_cache=False)
    result.loss.backward()
    return result.logits.detach(), {
        name: item.grad.clone() for name, item in model.named_parameters() if item.requires_grad
    }


def to_double(batch):
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def equals_the_formula(model, batch, monkeypatch):
    logits, gradients = compute_logits_and_gradients(model, batch)
    with_the_formula(monkeypatch, model)
    expected, exact = compute_logits_and_gradients(model, batch)
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(gradients, exact, atol=1e-9, rtol=1e-6)
    assert all(gradient.abs().max() > 0 for name, gradient in gradients.items() if re.search("[lw]s?_proj$", name))


def make_padded_batch(row, side):
    batch = row.make_batch(get_head(row), labels=True)
    if side == "left" and "attention_mask" in batch:
        batch |= {name: batch[name].flip(-1) for name in ("input_ids", "attention_mask")}
    return to_double(batch)


@EVERY_PAIR
@EVERY_CASE
def test_each_place_equals_the_formula_with_its_own_projections(row, case, monkeypatch):
    model = make_model(row, case).double()
    assert_projections(model, CASES[case][1])
    equals_the_formula(model, make_padded_batch(row, "right"), monkeypatch)


@pytest.mark.parametrize("row", [T5, BART], ids=["t5", "bart"])
@pytest.mark.parametrize("case", ["each its own", "dynamic"])
def test_left_padded_rows_equal_the_formula(row, case, monkeypatch):
    equals_the_formula(make_model(row, case).double(), make_padded_batch(row, "left"), monkeypatch)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"cross_talking_heads": "both"}, {"cross": BOTH}),
        ({"talking_heads": "logits", "cross_talking_heads": "none"}, {"self": LOGITS}),
        ({"talking_heads": "logits", "cross_talking_heads": "weights"}, {"self": LOGITS, "cross": WEIGHTS}),
        ({"per_layer_values": {"cross_talking_heads": ["logits", None]}}, {"cross": [LOGITS, set()]}),
    ],
)
def test_bert_decoder_supports_talking_heads_in_cross_attention(fields, expected, monkeypatch):
    model = BERT.make_model("BertLMHeadModel", is_decoder=True, add_cross_attention=True, **fields).double()
    assert_projections(model, expected)
    batch = {"input_ids": make_token_ids(), "labels": make_token_ids(), "attention_mask": make_padding_mask()}
    batch |= {"encoder_hidden_states": torch.randn(3, 5, 48).double()}
    equals_the_formula(model, batch, monkeypatch)


def test_encoder_supports_talking_heads_in_some_layers(monkeypatch):
    lists = {"talking_heads": [None, "both"], "num_softmax_heads": [None, 8], "num_value_heads": [12, 6]}
    model = BERT.make_model("BertForMaskedLM", talking_heads_init="random", per_layer_values=lists).double()
    first, second = (get_projections(module.get_submodule("self")) for _, _, module in model.named_attention_modules())
    assert not first and {name: (*item.shape,) for name, item in second.items()} == {
        "logits_proj": (12, 8),
        "weights_proj": (8, 6),
    }
    equals_the_formula(model, BERT.make_batch("BertForMaskedLM", labels=True), monkeypatch)
    assert [getattr(model.config, name) for name in lists] == ["both", 12, 12]


@EVERY_PAIR
@EVERY_CASE
def test_per_place_decoding_with_a_cache_equals_the_full_forward(row, case):
    model, batch, ids = make_model(row, case), make_prompt(row, get_head(row)), make_token_ids(3, LENGTH)
    with torch.no_grad():
        full_output = model(**batch, decoder_input_ids=ids, use_cache=False).logits
    steps, _ = decode_in_pieces(model, ids, 1, **batch)
    torch.testing.assert_close(steps, full_output, atol=1e-4, rtol=0)


@pytest.mark.parametrize("row", [T5, BART], ids=["t5", "bart"])
@pytest.mark.parametrize("case", ["cross alone", "encoder alone", "decoder alone", "dynamic"])
@pytest.mark.parametrize("beams", [1, 3])
def test_per_place_generation_is_the_same_with_each_cache(row, case, beams):
    model, prompt = make_model(row, case), make_prompt(row, get_head(row))
    generate_with_each_cache(model, prompt, static=True, num_beams=beams)
    result = model.generate(**prompt, max_new_tokens=3, num_beams=beams, return_dict_in_generate=True)
    rows = {layer.keys.shape[0] for layer in get_cache(result).cross_attention_cache.layers}
    # Without talking heads, there is one row per sentence.
    assert rows == {3 * beams if case in ("cross alone", "dynamic") else 3}


@EVERY_PAIR
@pytest.mark.parametrize("place", ["cross", "encoder"])
def test_identity_projections_change_no_output_of_a_plain_checkpoint(row, place, tmp_path):
    upstream = row.make_upstream_model(get_head(row))
    upstream.save_pretrained(tmp_path)
    model_class = getattr(hf_attn_variants, f"AttnVariant{get_head(row)}")
    fields = {f"{place}_talking_heads": "both", f"{place}_talking_heads_dynamic": ["x2l"]}
    model, info = model_class.from_pretrained(tmp_path, **fields, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    batch = row.make_batch(get_head(row))
    with torch.no_grad():
        logits, expected = (item.eval()(**batch, use_cache=False).logits for item in (model, upstream))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert sum("logits_proj" in name for name, _ in model.named_parameters()) == 2


def test_missing_projections_of_a_place_give_a_warning(tmp_path):
    """Check that a projection is only new if no place of the checkpoint has talking heads."""
    make_model(T5, "cross alone").save_pretrained(tmp_path)
    model_class = hf_attn_variants.AttnVariantT5ForConditionalGeneration
    model = model_class.from_pretrained(tmp_path)
    state = {name: item for name, item in model.state_dict().items() if "layer.1.EncDecAttention.logits" not in name}
    model.save_pretrained(tmp_path / "lacking", state_dict=state)
    _, info = model_class.from_pretrained(tmp_path / "lacking", encoder_talking_heads="both", output_loading_info=True)
    assert {name.split(".")[0] for name in info["missing_keys"]} == {"decoder"} and len(info["missing_keys"]) == 2


@pytest.mark.thorough
@EVERY_PAIR
@EVERY_CASE
def test_per_place_configuration_survives_a_round_trip(row, case, tmp_path):
    model = make_model(row, case)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    config = again.config
    for prefix in ("", "encoder_", "cross_"):
        for layer in range(2):
            assert config.get_talking_heads(prefix, layer) == model.config.get_talking_heads(prefix, layer)
    assert config.to_dict() == type(config).from_dict(config.to_dict()).to_dict()
    batch = row.make_batch(get_head(row))
    with torch.no_grad():
        for name, value in model(**batch, use_cache=False).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(again(**batch, use_cache=False)[name], value)


@pytest.mark.parametrize("row", [*PAIRS.values(), BERT, ALBERT], ids=lambda row: row.name)
def test_fields_of_places_are_stored_only_if_they_are_set(row):
    equal = {"encoder_attention_heads": 12} if row in (BART, WHISPER) else {}
    for fields in ({}, {"talking_heads": "both"}, {"num_key_value_heads": 4}):
        values = row.make_config(**equal, **fields).to_dict()
        assert values["per_layer_values"] is None
        of_places = re.compile("(encoder|cross)_.*(talking|softmax|(?<!key_)value_heads$)")
        assert not [name for name in values if of_places.match(name)]


def test_place_uses_only_its_own_fields_if_one_of_them_is_given():
    model_fields = {"talking_heads": "both", "talking_heads_init": "random", "talking_heads_dynamic": ["x2l"]}
    config = T5.make_config(**model_fields, num_softmax_heads=8, cross_talking_heads="both")
    for prefix in ("", "encoder_"):
        assert config.get_talking_heads(prefix, 1) == TalkingHeadsSettings("both", 8, 12, "random", ("x2l",))
    assert config.get_talking_heads("cross_", 1) == TalkingHeadsSettings("both", 12, 12)
    listed = T5.make_config(**model_fields, per_layer_values={"cross_talking_heads": ["weights", None]})
    for layer, kind in enumerate(["weights", None]):
        assert listed.get_talking_heads("cross_", layer) == TalkingHeadsSettings(kind, 12, 12)
    none = T5.make_config(encoder_talking_heads="none", encoder_num_softmax_heads=8)
    assert none.get_talking_heads("encoder_", 0) == TalkingHeadsSettings(None, 12, 12)


def test_talking_heads_of_a_place_allow_other_mechanisms_elsewhere():
    window = {"encoder_attention_pattern": "sliding_window", "encoder_attention_window": 4}
    config = T5.make_config(cross_talking_heads="both", **window)
    assert config.get_talking_heads("encoder_", 0).kind is None and config.use_cache
    kernel = BART.make_config(cross_attention_kernel="elu", encoder_talking_heads="both")
    assert kernel.get_talking_heads("cross_", 0).kind is None
    key_side = {"talking_heads": "both", "talking_heads_dynamic": ["m2l"]}
    assert not T5.make_config(**key_side, cross_talking_heads="none").use_cache
    latent = {"cross_talking_heads": "both", "cross_talking_heads_dynamic": ["m2l"]}
    assert T5.make_config(**latent).use_cache and T5.make_config(**latent, cross_kv_lora_rank=40).use_cache
    assert not T5.make_config(**latent, cross_kv_lora_rank=16).use_cache


def test_key_side_terms_with_a_latent_disable_the_cache():
    fields = {"cross_talking_heads": "both", "cross_talking_heads_dynamic": ["m2l"], "cross_kv_lora_rank": 16}
    model, batch = T5.make_model(get_head(T5), **fields), make_prompt(T5, get_head(T5))
    assert model.generate(**batch, max_new_tokens=3).shape[0] == 3
    with pytest.raises(ValueError, match="`cross_talking_heads_dynamic`"):
        model(**batch, decoder_input_ids=make_token_ids(3, 2), use_cache=True)


def test_loading_cannot_change_the_talking_heads_of_a_checkpoint(tmp_path):
    make_model(T5, "cross alone").save_pretrained(tmp_path)
    model_class = hf_attn_variants.AttnVariantT5ForConditionalGeneration
    for fields, message in (
        ({"cross_talking_heads": "none"}, "`cross_talking_heads` must be 'both'.*None"),
        ({"cross_talking_heads": "logits"}, "`cross_talking_heads` must be 'both'.*'logits'"),
        ({"cross_talking_heads_dynamic": ["x2l"]}, "`cross_talking_heads_dynamic` must be"),
    ):
        with pytest.raises(ValueError, match=message):
            model_class.from_pretrained(tmp_path, **fields)
    added = model_class.from_pretrained(tmp_path, encoder_talking_heads="both")
    assert list_kinds(added.config, 1) == [None, "both", "both"]


def test_per_place_fields_convert_from_and_to_transformers_configurations():
    upstream = T5Config(**T5.tiny)
    config = T5.config_class.from_upstream(upstream, cross_talking_heads="both")
    again = T5.config_class.from_upstream(config, encoder_talking_heads="logits")
    assert list_kinds(again) == [None, "logits", "both"]
    none = T5.config_class.from_upstream(again, cross_talking_heads="none", encoder_talking_heads=None)
    assert list_kinds(none) == [None, None, None]
    listed = T5.config_class.from_upstream(again, per_layer_values={"cross_talking_heads": ["weights", None]})
    assert [listed.get_talking_heads("cross_", layer).kind for layer in (0, 1)] == ["weights", None]
    assert listed.cross_talking_heads == "weights" and listed.encoder_talking_heads == "logits"
