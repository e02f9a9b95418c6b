"""Check that the multi-head variant, loaded from a Transformers checkpoint, equals the Transformers model."""

import re

import pytest
import torch
from architectures import (
    ALBERT,
    ARCHITECTURES,
    BERT,
    HEAD_IDS,
    HEADS,
    LENGTH,
    T5,
    VARIANTS,
    make_padding_mask,
    make_token_ids,
)
from fixtures.parity import assert_same_outputs, assert_same_parameter_gradients, load_variant, save_upstream

import hf_attn_variants
from hf_attn_variants.commands import convert as command

pytestmark = pytest.mark.cross_product

ATOL = 1e-5
EVERY_HEAD = pytest.mark.parametrize("architecture, head", HEADS, ids=HEAD_IDS)
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


@EVERY_HEAD
@IMPLEMENTATIONS
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_multi_head_equals_transformers(architecture, head, implementation, padded, tmp_path):
    """Check that a checkpoint loads as the multi-head variant, without a configuration."""
    upstream = save_upstream(architecture, head, tmp_path)
    variant_model = getattr(hf_attn_variants, f"AttnVariant{head}").from_pretrained(tmp_path).eval()
    assert variant_model.config.num_key_value_heads == variant_model.config.num_attention_heads
    batch = architecture.make_batch(head, labels=True)
    if not padded:
        batch = {name: value for name, value in batch.items() if not name.endswith("attention_mask")}
    for model in (upstream, variant_model):
        model.set_attn_implementation(implementation)
    assert_same_outputs(variant_model, upstream, batch)


@EVERY_HEAD
@pytest.mark.parametrize("variant", ["talking", "dynamic"])
def test_identity_projections_equal_transformers(architecture, head, variant, tmp_path):
    upstream = save_upstream(architecture, head, tmp_path)
    variant_model = load_variant(architecture, head, tmp_path, variant)
    batch = architecture.make_batch(head, labels=True)
    assert_same_outputs(variant_model, upstream, batch)


@EVERY_HEAD
def test_multi_head_gradients_equal_transformers(architecture, head, tmp_path):
    upstream = save_upstream(architecture, head, tmp_path)
    variant_model = load_variant(architecture, head, tmp_path)
    batch = architecture.make_batch(head, labels=True)
    assert_same_parameter_gradients([variant_model], upstream, batch)


@EVERY_HEAD
@pytest.mark.parametrize("variant", ["gqa", "mqa", "gqa_talking"])
@pytest.mark.parametrize("ignore_mismatched_sizes", [False, True])
def test_loading_fewer_heads_error_names_the_conversion(
    architecture, head, variant, ignore_mismatched_sizes, tmp_path
):
    save_upstream(architecture, head, tmp_path)
    config = architecture.make_config(variant, head)
    with pytest.raises(ValueError) as error:
        getattr(hf_attn_variants, f"AttnVariant{head}").from_pretrained(
            tmp_path, config=config, ignore_mismatched_sizes=ignore_mismatched_sizes
        )
    quoted = re.search(r"`attn-variants convert (.*?)`", str(error.value))[1]
    flags = command.parse_args(quoted.split())
    assert flags.num_key_value_heads == VARIANTS[variant]["num_key_value_heads"]


@pytest.mark.parametrize(
    "saved, fields, name",
    [
        ("talking", {}, "talking_heads"),
        ("dynamic", {"talking_heads": "both"}, "talking_heads_dynamic"),
        ("gqa_talking", {**VARIANTS["gqa_talking"], "num_softmax_heads": 8}, "num_softmax_heads"),
        ("mha", VARIANTS["weights"], "num_value_heads"),
    ],
)
@pytest.mark.parametrize("ignore_mismatched_sizes", [False, True])
def test_dropping_learned_projections_raises_an_error(saved, fields, name, ignore_mismatched_sizes, tmp_path):
    BERT.make_model("BertModel", saved).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        hf_attn_variants.AttnVariantBertModel.from_pretrained(
            tmp_path, config=BERT.make_config(**fields), ignore_mismatched_sizes=ignore_mismatched_sizes
        )


def test_plain_t5_needs_a_position_bias_with_equal_heads(tmp_path):
    T5.make_model("T5ForConditionalGeneration", "mha").save_pretrained(tmp_path)
    config = T5.make_config(talking_heads="both", talking_heads_init="random", num_softmax_heads=24)
    with pytest.raises(ValueError, match="`num_softmax_heads` must be 12"):
        hf_attn_variants.AttnVariantT5ForConditionalGeneration.from_pretrained(tmp_path, config=config)


def test_weights_without_a_configuration_load_into_the_given_one(tmp_path):
    model = BERT.make_model("BertModel", "gqa")
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    again = hf_attn_variants.AttnVariantBertModel.from_pretrained(tmp_path, config=BERT.make_config("gqa")).eval()
    assert_same_outputs(again, model, BERT.make_batch("BertModel"))


@pytest.mark.parametrize(
    "variant, expected",
    [
        ("mha", None),
        ("talking", "adds them. They are initialized as the identity, so the outputs do not change."),
        ("logits", 'They are initialized randomly (`talking_heads_init="random"`), which changes the outputs'),
        ("dynamic", "as the identity and the terms of `talking_heads_dynamic` as zeros. The outputs do not change"),
    ],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda row: row.name)
def test_loading_a_transformers_checkpoint_warns_once(architecture, variant, expected, logged, tmp_path):
    head = next(iter(architecture.heads))
    save_upstream(architecture, head, tmp_path)
    # A plain checkpoint has as many softmax and value heads as query heads.
    fields = {name: value for name, value in VARIANTS[variant].items() if name != "num_softmax_heads"}
    model_class = getattr(hf_attn_variants, f"AttnVariant{head}")
    config = architecture.config_class.from_pretrained(tmp_path, **fields)
    for arguments in ({"config": config}, fields):
        logged.clear()
        _, info = model_class.from_pretrained(tmp_path, **arguments, output_loading_info=True)
        assert info["missing_keys"] == set()
        assert len(logged.messages) == (expected is not None)
        assert all(expected in message and str(tmp_path) in message for message in logged.messages)


def test_missing_weights_are_reported_as_in_transformers(logged, tmp_path):
    save_upstream(BERT, "BertModel", tmp_path)
    model_class = hf_attn_variants.AttnVariantBertForSequenceClassification
    _, info = model_class.from_pretrained(tmp_path, talking_heads="both", output_loading_info=True)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert ["LOAD REPORT" in message for message in logged.messages] == [True, False]


def test_missing_talking_heads_projections_are_reported(logged, tmp_path):
    model = BERT.make_model("BertModel", "talking")
    saved_tensors = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_proj")}
    model.save_pretrained(tmp_path, state_dict=saved_tensors)
    _, info = type(model).from_pretrained(tmp_path, config=BERT.make_config("talking"), output_loading_info=True)
    assert info["missing_keys"] == {name for name in model.state_dict() if name.endswith("_proj")} != set()
    assert [message for message in logged.messages if "has no talking heads" in message] == []
    assert any("MISSING" in message for message in logged.messages)


def test_checkpoint_of_another_architecture_gives_a_warning(logged, tmp_path):
    ALBERT.make_upstream_model("AlbertModel").config.save_pretrained(tmp_path)
    hf_attn_variants.AttnVariantBertConfig.from_pretrained(tmp_path)
    assert any("model of type `albert`" in message for message in logged.messages)


@IMPLEMENTATIONS
@pytest.mark.parametrize("side", ["left", "right"])
def test_bert_decoder_with_cross_attention_equals_transformers(implementation, side, tmp_path):
    fields = {"is_decoder": True, "add_cross_attention": True}
    upstream = save_upstream(BERT, "BertLMHeadModel", tmp_path, **fields)
    variant_model = load_variant(BERT, "BertLMHeadModel", tmp_path, **fields)
    mask = make_padding_mask() if side == "right" else make_padding_mask().flip(1)
    torch.manual_seed(0)
    batch = {
        "input_ids": make_token_ids(),
        "attention_mask": mask,
        "encoder_hidden_states": torch.randn(3, LENGTH + 2, 48),
        "encoder_attention_mask": torch.cat([make_padding_mask(), torch.ones(3, 2, dtype=torch.long)], dim=1),
    }
    for model in (upstream, variant_model):
        model.set_attn_implementation(implementation)
    with torch.no_grad():
        expected, actual = upstream(**batch), variant_model(**batch)
    # A padded query on the left may have no allowed keys. Its outputs are not compared.
    torch.testing.assert_close(actual.logits[mask.bool()], expected.logits[mask.bool()], atol=ATOL, rtol=0)
