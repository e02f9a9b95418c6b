"""Check head counts and ranks that differ between layers: in memory, on disk and in other processes."""

import json
import re

import pytest
import torch
from architectures import ARCHITECTURES, BERT, LENGTH, T5, make_token_ids
from fixtures.caches import get_cache
from fixtures.decoding import decode_in_pieces, generate_with_each_cache
from transformers import StaticCache

import hf_attn_variants
from hf_attn_variants import AttnVariantT5Config, AttnVariantT5ForConditionalGeneration

pytestmark = pytest.mark.cross_product

# BERT has four layers, ALBERT two groups of two layers, and T5 three encoder layers and two decoder layers.
MIXED = {
    "bert": {
        "num_hidden_layers": 4,
        "per_layer_values": {"num_key_value_heads": [12, 4, 1, 4], "kv_lora_rank": [None, 16, 48, 20]},
    },
    "albert": {
        "num_hidden_layers": 4,
        "num_hidden_groups": 2,
        "inner_group_num": 2,
        "per_layer_values": {"num_key_value_heads": [12, 4, 1, 4], "kv_lora_rank": [None, 16, 48, 20]},
    },
    "t5": {
        "num_layers": 3,
        "num_decoder_layers": 2,
        "cross_kv_lora_rank": 24,
        "per_layer_values": {
            "num_key_value_heads": [12, 1],
            "kv_lora_rank": [16, None],
            "encoder_num_key_value_heads": [3, 12, 12],
            "encoder_kv_lora_rank": [None, 20, 40],
        },
    },
}
# (place, key/value heads, rank, input width of the key projection) of each attention module, in order.
FOUR = [("self", 12, None, 48), ("self", 4, 16, 16), ("self", 1, 48, 48), ("self", 4, 20, 20)]
FOUND = {
    "bert": FOUR,
    "albert": FOUR,
    "t5": [
        ("encoder", 3, None, 40),
        ("encoder", 12, 20, 20),
        ("encoder", 12, 40, 40),
        ("decoder", 12, 16, 16),
        ("cross", 12, 24, 24),
        ("decoder", 1, None, 40),
        ("cross", 1, 24, 24),
    ],
}
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda row: row.name)
BASES = {architecture.name: next(iter(architecture.heads)) for architecture in ARCHITECTURES}


def make_mixed_model(architecture, head=None, **fields):
    return architecture.make_model(head or BASES[architecture.name], **MIXED[architecture.name], **fields)


def compute_outputs(model, batch):
    with torch.no_grad():
        return model(**batch, use_cache=False).last_hidden_state


@EVERY_ARCHITECTURE
def test_attention_modules_use_the_values_of_their_layer(architecture):
    model, actual = make_mixed_model(architecture), []
    for site, path, module in model.named_attention_modules():
        heads = site.get_heads(model.config, path)
        key, value = (module.get_submodule(p) for p in (site.key, site.value))
        assert key.out_features == value.out_features == heads.key * heads.head_dim
        assert module.get_submodule(site.core).heads == heads
        compute_own_latent = hasattr(module.get_submodule(site.core), "kv_a_proj")
        assert compute_own_latent == (heads.rank in (16, 20)) and key.in_features == value.in_features
        actual.append((site.name, heads.key, heads.rank, key.in_features))
    assert actual == FOUND[architecture.name]


@EVERY_ARCHITECTURE
def test_per_layer_values_are_saved_and_loaded(architecture, tmp_path):
    model, batch = make_mixed_model(architecture), architecture.make_batch(BASES[architecture.name])
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["per_layer_values"] == MIXED[architecture.name]["per_layer_values"]
    # Code that reads a single number gets the largest one.
    assert saved["num_key_value_heads"] == 12 and saved["kv_lora_rank"] in (16, 48)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    torch.testing.assert_close(compute_outputs(again.eval(), batch), compute_outputs(model, batch), atol=1e-6, rtol=0)
    values = {"per_layer_values": model.config.per_layer_values}
    for arguments in ({"config": model.config}, {"num_labels": 3}, values):
        other = type(model).from_pretrained(tmp_path, **arguments).eval()
        torch.testing.assert_close(compute_outputs(other, batch), compute_outputs(model, batch), atol=1e-6, rtol=0)
    both = [item.config.to_dict() | {"_name_or_path": ""} for item in (again, model)]
    assert both[0] == both[1]
    assert type(model.config)(**saved).per_layer_values == saved["per_layer_values"]


@EVERY_ARCHITECTURE
def test_equal_per_layer_values_become_one_value(architecture):
    field = {"num_key_value_heads": 4, "kv_lora_rank": 16}
    count = architecture.make_config().get_num_layers("kv_lora_rank")
    config = architecture.make_config(per_layer_values={name: [value] * count for name, value in field.items()})
    assert config.per_layer_values is None and (config.num_key_value_heads, config.kv_lora_rank) == (4, 16)
    none = architecture.make_config(per_layer_values={"kv_lora_rank": [None] * count})
    assert none.to_dict() == architecture.make_config().to_dict()


@pytest.mark.parametrize("as_text", [False, True])
def test_per_layer_config_of_transformers_agrees(as_text, tmp_path):
    by_layer = {0: {"num_key_value_heads": 4}, 2: {"num_key_value_heads": 1, "kv_lora_rank": 16}}
    by_layer = {str(layer): fields for layer, fields in by_layer.items()} if as_text else by_layer
    expected = {"num_key_value_heads": [4, 12, 1, 12], "kv_lora_rank": [None, None, 16, None]}
    config = BERT.make_config(num_hidden_layers=4, per_layer_config=by_layer)
    assert config.per_layer_values == expected
    plain = BERT.upstream_config_class(**BERT.tiny | {"num_hidden_layers": 4})
    plain.save_pretrained(tmp_path)
    config_class = BERT.config_class
    assert config_class.from_upstream(plain, per_layer_config=by_layer).per_layer_values == expected
    assert config_class.from_pretrained(tmp_path, per_layer_config=by_layer).per_layer_values == expected
    # With both arguments, `per_layer_config` replaces the values of its layers in the lists.
    lists = {"num_key_value_heads": [2, 2, 2, 6]}
    base = BERT.make_config(
        num_hidden_layers=3, num_key_value_heads=4, per_layer_config={1: {"num_key_value_heads": 12}}
    )
    assert base.per_layer_values == {"num_key_value_heads": [4, 12, 4]} and base.num_key_value_heads == 12
    both = BERT.make_config(num_hidden_layers=4, per_layer_values=lists, per_layer_config=by_layer)
    assert both.per_layer_values == {**expected, "num_key_value_heads": [4, 2, 1, 6]}
    assert lists == {"num_key_value_heads": [2, 2, 2, 6]}


def test_single_value_replaces_per_layer_values(tmp_path):
    config = T5.make_config(**MIXED["t5"])
    config.save_pretrained(tmp_path)
    for again in (
        AttnVariantT5Config.from_pretrained(tmp_path, num_key_value_heads=2, kv_lora_rank=None),
        AttnVariantT5Config.from_upstream(config, num_key_value_heads=2, kv_lora_rank=None),
    ):
        assert again.per_layer_values.keys() == {"encoder_num_key_value_heads", "encoder_kv_lora_rank"}
        assert (again.num_key_value_heads, again.kv_lora_rank, again.cross_kv_lora_rank) == (2, None, 24)


@pytest.mark.parametrize("variant", ["mha", "talking"])
@pytest.mark.parametrize("beams", [1, 3])
def test_per_layer_t5_generates_the_same_with_and_without_a_cache(variant, beams, form):
    model = T5.make_model("T5ForConditionalGeneration", variant, **MIXED["t5"])
    prompt = T5.make_batch("T5EncoderModel")
    generate_with_each_cache(model, prompt, 7, static=True, num_beams=beams)
    options = {"max_new_tokens": 7, "cache_implementation": "static", "num_beams": beams}
    result = model.generate(**prompt, **options, return_dict_in_generate=True)
    # Transformers creates as many cache layers as the encoder has.
    key_shapes = [layer.keys.shape[1::2] for layer in get_cache(result).self_attention_cache.layers[:2]]
    assert key_shapes == [(1, 16), (1, 8)]


def test_per_layer_bert_decodes_the_same_with_and_without_a_cache():
    model = make_mixed_model(BERT, "BertLMHeadModel", is_decoder=True)
    ids = make_token_ids(3, LENGTH)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for cache in (None, StaticCache(config=model.config, max_cache_len=12)):
        pieces, _ = decode_in_pieces(model, ids, [4, 1, 1, 3], "input_ids", cache=cache)
        torch.testing.assert_close(pieces, expected, atol=1e-5, rtol=0)


# (fields of the checkpoint, requested fields, pattern of the error, value in the suggested conversion)
T5_REFUSED = [
    ({}, {"cross_kv_lora_rank": 24}, "`cross_kv_lora_rank` must be None .* got 24", 24),
    ({"cross_kv_lora_rank": 40}, {"cross_kv_lora_rank": 24}, "`cross_kv_lora_rank` must be 40 .* got 24", 24),
    ({"cross_kv_lora_rank": 24}, {"cross_kv_lora_rank": 16}, "`cross_kv_lora_rank` must be 24 .* got 16", 16),
    ({"cross_kv_lora_rank": 24}, {"cross_kv_lora_rank": 40}, "`cross_kv_lora_rank` must be 24 .* got 40", 40),
    ({}, {"kv_lora_rank": 16}, "`kv_lora_rank` must be None .* got 16", 16),
    ({}, {"encoder_kv_lora_rank": 16}, "`encoder_kv_lora_rank` must be None .* got 16", 16),
    ({}, {"per_layer_values": {"kv_lora_rank": [16, 40]}}, r"got \[16, 40\]", {"kv_lora_rank": [16, 40]}),
    (
        {},
        {"per_layer_config": {1: {"num_key_value_heads": 4}}},
        r"`num_key_value_heads` must be 12 .* got \[12, 4\]",
        {"num_key_value_heads": [12, 4]},
    ),
    (
        {"per_layer_values": {"num_key_value_heads": [4, 12]}},
        {"num_key_value_heads": 12},
        r"`num_key_value_heads` must be \[4, 12\] .* got 12",
        12,
    ),
    (
        {"per_layer_values": {"num_key_value_heads": [4, 12]}},
        {"per_layer_values": {"num_key_value_heads": [12, 4]}},
        r"`num_key_value_heads` must be \[4, 12\] .* got \[12, 4\]",
        {"num_key_value_heads": [12, 4]},
    ),
]


@pytest.mark.parametrize("saved_fields, new_fields, message, value", T5_REFUSED, ids=str)
@pytest.mark.parametrize("as_config", [False, True], ids=["keywords", "configuration"])
def test_changed_rank_or_layers_error_names_the_conversion(
    saved_fields, new_fields, message, value, as_config, tmp_path
):
    T5.make_model("T5ForConditionalGeneration", **saved_fields).save_pretrained(tmp_path)
    arguments = {"config": T5.make_config(**new_fields)} if as_config else new_fields
    with pytest.raises(ValueError, match=message) as error:
        AttnVariantT5ForConditionalGeneration.from_pretrained(tmp_path, **arguments)
    quoted = re.search(r"`attn-variants convert (.*?) --output_dir", str(error.value))[1]
    option = f"--per_layer_values '{json.dumps(value)}'" if isinstance(value, dict) else str(value)
    assert option in quoted and str(tmp_path) in quoted
    code = re.search(r"`hf_attn_variants\.convert\((.*)\)`", str(error.value))[1]
    assert repr(value) in code and repr(str(tmp_path)) in code


@pytest.mark.parametrize("saved_fields", [{}, {"cross_kv_lora_rank": 40, "kv_lora_rank": 40}], ids=str)
def test_full_width_rank_needs_no_conversion(saved_fields, tmp_path):
    model = T5.make_model("T5ForConditionalGeneration", **saved_fields)
    model.save_pretrained(tmp_path)
    batch = T5.make_batch("T5ForConditionalGeneration")
    with torch.no_grad():
        expected = model(**batch).logits
        for new_fields in (
            {"cross_kv_lora_rank": 40},
            {"cross_kv_lora_rank": None, "kv_lora_rank": None},
            {"per_layer_values": {"kv_lora_rank": [40, None]}},
            {"per_layer_config": {0: {"encoder_kv_lora_rank": 40}}},
        ):
            actual = AttnVariantT5ForConditionalGeneration.from_pretrained(tmp_path, **new_fields).eval()
            torch.testing.assert_close(actual(**batch).logits, expected, atol=1e-5, rtol=0)


@EVERY_ARCHITECTURE
def test_missing_weights_of_per_layer_models_are_initialized(architecture):
    """Check weights that a checkpoint lacks, which start in uninitialized memory."""
    config = architecture.make_config(**MIXED[architecture.name])
    model_class = getattr(hf_attn_variants, f"AttnVariant{BASES[architecture.name]}")
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        weights.append(model_class.from_pretrained(None, config=config, state_dict={}).state_dict())
    for name, tensor in weights[0].items():
        assert tensor.isfinite().all() and tensor.abs().max() < 10 and tensor.equal(weights[1][name]), name
