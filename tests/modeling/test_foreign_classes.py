"""Check Transformers' model classes with a configuration of this package: they load if the fields change nothing."""

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from relatives import RELATIVES, ROTARY

import hf_attn_variants
from hf_attn_variants.modeling.fields.saving_and_loading import get_effective_fields
from hf_attn_variants.modeling.variant_names import EAGER

EVERY = {item.name: item for item in (*ARCHITECTURES, *RELATIVES)}
each_architecture = pytest.mark.parametrize("architecture", EVERY.values(), ids=EVERY)


def get_base_head(architecture):
    return next(iter(architecture.heads))


def iterate_fields(architecture):
    """Yield sets of fields, each of which changes the outputs."""
    config = architecture.make_config()
    prefixes = ("", "encoder_") if hasattr(config, "encoder_decoder_layers") else ("",)
    for prefix in prefixes:
        yield {f"{prefix}attention_pattern": "sliding_window", f"{prefix}attention_window": 4}
        if architecture not in ROTARY:
            yield {f"{prefix}score_function": "additive"}
        if prefix == prefixes[-1]:  # BART's encoder and decoder have different numbers of heads here
            yield {f"{prefix}talking_heads": "both", f"{prefix}talking_heads_init": "random"}
        yield {f"{prefix}num_key_value_heads": 2}
    if "sinusoidal" in config.position_types:
        yield {"position_embedding_type": "sinusoidal"}


@each_architecture
def test_transformers_class_raises_if_fields_change_outputs(architecture, tmp_path):
    head = get_base_head(architecture)
    upstream_class = getattr(transformers, head)
    for fields in iterate_fields(architecture):
        config = architecture.make_config(head=head, **fields)
        assert next(iter(fields)) in get_effective_fields(config)
        for build in (upstream_class, upstream_class._from_config):
            with pytest.raises(ValueError, match=f"AttnVariant{head}"):
                build(config)
    model = architecture.make_model(head, **fields)
    with pytest.raises(ValueError, match=f"AttnVariant{head}"):  # the configuration of a live model
        upstream_class(model.config)
    model.save_pretrained(tmp_path)
    for options in ({}, {"attn_implementation": "eager"}):
        with pytest.raises(ValueError, match=f"AttnVariant{head}"):
            upstream_class.from_pretrained(tmp_path, config=type(config).from_pretrained(tmp_path), **options)


@each_architecture
def test_transformers_class_loads_variants_with_equal_outputs(architecture, tmp_path):
    head = get_base_head(architecture)
    model, batch = architecture.make_model(head), architecture.make_batch(head)
    model.save_pretrained(tmp_path)
    upstream = getattr(transformers, head).from_pretrained(tmp_path, config=model.config).eval()
    with torch.no_grad():
        torch.testing.assert_close(upstream(**batch)[0], model(**batch)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("fields", [{}, {"cross_kv_lora_rank": 40}, {"kv_lora_rank": 40}])
def test_full_width_latents_change_no_output(fields):
    assert get_effective_fields(EVERY["t5"].make_config(**fields)) == []


def make_head_class(base, model_class):
    """Return a user's head, derived from `base`, with a model of `model_class` inside."""

    class Head(base):
        def __init__(self, config):
            super().__init__(config)
            self.bert = model_class(config)
            self.post_init()

    return Head


OURS, THEIRS = hf_attn_variants.AttnVariantBertModel, transformers.BertModel


@pytest.mark.parametrize("base", [transformers.BertPreTrainedModel, hf_attn_variants.AttnVariantBertPreTrainedModel])
def test_user_defined_head_contains_our_model(base):
    config = EVERY["bert"].make_config(attention_pattern="sliding_window", attention_window=4)
    assert type(make_head_class(base, OURS)(config).bert) is OURS
    if base is transformers.BertPreTrainedModel:
        with pytest.raises(ValueError, match="AttnVariantBertModel"):
            make_head_class(base, THEIRS)(config)
    else:
        assert type(make_head_class(base, THEIRS)(config).bert) is OURS


def test_encoder_decoder_model_switches_its_attention_implementation():
    bert = EVERY["bert"]
    encoder = bert.make_model("BertModel", num_key_value_heads=4)
    decoder = bert.make_model("BertLMHeadModel", is_decoder=True, add_cross_attention=True, num_key_value_heads=4)
    pair = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder)
    pair.set_attn_implementation("eager")
    assert encoder.config._attn_implementation == EAGER
