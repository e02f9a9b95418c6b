"""Check that changes of Transformers' internal names, signatures and attributes raise errors."""

import json
import sys
import time

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, make_token_ids
from fixtures.caches import with_cache
from relatives import RELATIVES
from torch import nn
from transformers import AutoConfig, DynamicCache, EncoderDecoderCache
from transformers.models.auto import modeling_auto
from transformers.models.mpnet.modeling_mpnet import MPNetAttention, MPNetSelfAttention

import hf_attn_variants
from hf_attn_variants.modeling import transformers_internals, transformers_trial
from hf_attn_variants.modeling.architectures import configuration_attn_variants
from hf_attn_variants.modeling.architectures.configuration_attn_variants import CONFIG_CLASSES
from hf_attn_variants.modeling.attention.attention_mixin import AttentionVariantMixin
from hf_attn_variants.modeling.transformers_internals import MethodSignature, TransformersChangedError
from hf_attn_variants.modeling.variant_names import MODEL_FOLDERS

ALL_ARCHITECTURES = (*ARCHITECTURES, *RELATIVES)
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ALL_ARCHITECTURES, ids=lambda row: row.name)
ROWS = {row.name: row for row in ALL_ARCHITECTURES}


class Layer(nn.Module):
    """A stand-in for an attention module of Transformers."""

    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        return hidden_states, None


class RenamedLayer(nn.Module):
    def forward(self, hidden_states, mask=None, memory_store=None, **kwargs):
        return hidden_states, None, None


class OtherOrder(nn.Module):
    def forward(self, past_key_values=None, attention_mask=None, *, hidden_states, **kwargs):
        pair = (hidden_states, None)
        return pair


def test_arguments_are_read_by_role_in_any_order_and_under_former_names():
    arguments = MethodSignature(Layer, ("cache", "states", "mask"), returns=2)
    assert arguments.names == ("cache", "hidden_states", "mask")
    assert arguments.read(("h",), {"cache": "c"}) == ["c", "h", None]
    assert arguments.read(("h", "m", "c"), {}) == ["c", "h", "m"]
    assert arguments.split(("h",), {"past_key_values": "c", "other": 1}) == (["c", "h", None], {"other": 1})
    assert arguments.to_keywords(("h",), {"other": 1}, cache="d") == {"hidden_states": "h", "other": 1, "cache": "d"}
    arguments = MethodSignature(OtherOrder, ("states", "mask", "cache"))
    assert arguments.names == ("hidden_states", "attention_mask", "past_key_values")
    assert arguments.read(("c",), {"hidden_states": "h"}) == ["h", None, "c"]


@pytest.mark.parametrize("owner", [MPNetSelfAttention, MPNetAttention])
def test_missing_attention_interface_is_not_reported_as_a_change(owner):
    with pytest.raises(TypeError, match=rf"`{owner.__name__}` .*modeling_mpnet` has no `eager_attention_forward`"):
        type("Variant", (AttentionVariantMixin, owner), {"roles": ("states", "mask")})


def test_model_folders_match_the_configurations():
    assert sorted(MODEL_FOLDERS) == sorted(config_class.transformers_model_types[0] for config_class in CONFIG_CLASSES)


def test_changed_method_error_names_the_method_and_a_workaround():
    with pytest.raises(TransformersChangedError, match="memory_store, but none of cache, past_key_values") as caught:
        MethodSignature(RenamedLayer, ("states", "cache"))
    message = str(caught.value)
    assert "\n" not in message and "a newer hf_attn_variants" in message and "attn-variants refresh" in message
    assert f"{transformers_internals.OLDEST_TESTED} to {transformers_internals.NEWEST_TESTED}" in message
    assert transformers.__version__ in message
    assert "pip install" not in message
    for layer, returned in ((RenamedLayer, "3"), (OtherOrder, "no tuple")):
        with pytest.raises(TransformersChangedError, match=f"returns {returned} values, but this code expects 2"):
            MethodSignature(layer, ("states",), returns=2)
    with pytest.raises(
        TransformersChangedError, match=r"`Layer.forward` takes hidden_states, mask, cache, but this code expects mask"
    ):
        transformers_internals.check_method(Layer, "forward", ("mask",))
    with pytest.raises(TransformersChangedError, match="`Layer` has no `reorder_cache`"):
        transformers_internals.check_method(Layer, "reorder_cache", ())
    with pytest.raises(TransformersChangedError, match="no longer calls `_reorder_cache`"):
        transformers_internals.check_method_calls(Layer, "forward", "_reorder_cache")
    with (
        pytest.raises(TransformersChangedError, match="cannot import name 'T6Attention'"),
        transformers_internals.guarded_imports(),
    ):
        from transformers.models.t5.modeling_t5 import T6Attention  # noqa: F401


def test_upstream_checks_are_fast():
    """Check the best time of several runs for all architectures, which is 5 to 7 ms."""
    from hf_attn_variants.modeling.attention import attention_mixin

    begin = time.perf_counter()
    classes = [
        item
        for row in ALL_ARCHITECTURES
        for item in row.make_model(next(iter(row.heads))).modules()
        if isinstance(item, attention_mixin.AttentionVariantMixin)
    ]
    classes = list({type(item): None for item in classes})
    building = time.perf_counter() - begin
    assert len(classes) >= len(ALL_ARCHITECTURES)

    def check():
        transformers_internals.check_model_internals()
        transformers_internals.check_cache_internals()
        for item in classes:
            owner = transformers_internals.get_transformers_class(item, attention_mixin.AttentionVariantMixin)
            MethodSignature(owner, item.roles, returns=item.returns)
            transformers_internals.check_attention_function(owner)

    took = []
    for _ in range(5):
        begin = time.perf_counter()
        check()
        took.append(time.perf_counter() - begin)
    assert min(took) < building / 4, (took, building)


@EVERY_ARCHITECTURE
def test_every_model_has_an_auto_class_and_every_name_exists(architecture):
    base = getattr(hf_attn_variants, architecture.config_class.auto_classes["AutoModel"])
    models = {name for name in sys.modules[base.__module__].__all__ if not name.endswith("PreTrainedModel")}
    assert set(architecture.config_class.auto_classes.values()) == models


def test_auto_classes_agree_with_transformers(monkeypatch):
    heads = ("Model", "ForConditionalGeneration")
    monkeypatch.setitem(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "m2m_100", "M2M100ForConditionalGeneration")
    monkeypatch.setitem(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "m2m_100", "M2M100ForCausalLM")
    assert configuration_attn_variants._get_variant_auto_classes("m2m_100", "M2M100", heads) == {
        "AutoModel": "AttnVariantM2M100Model",
        "AutoModelForMaskedLM": "AttnVariantM2M100ForConditionalGeneration",
        "AutoModelForSeq2SeqLM": "AttnVariantM2M100ForConditionalGeneration",
    }
    monkeypatch.delitem(modeling_auto.MODEL_MAPPING_NAMES, "m2m_100")
    with pytest.raises(TransformersChangedError, match="`AutoModel` has no class for m2m_100"):
        configuration_attn_variants._get_variant_auto_classes("m2m_100", "M2M100", heads)


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_unknown_attention_argument_raises_an_error(architecture, implementation):
    """Check the arguments of packed sequences, which Transformers would process as one text."""
    head = next(iter(architecture.heads))
    for fields in ({}, dict.fromkeys(architecture.config_class.get_rank_fields(), 16)):
        model, batch = architecture.make_model(head, **fields), architecture.make_batch(head)
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            expected = model(**batch)[0]
            assert torch.equal(model(**batch, num_items_in_batch=torch.tensor(3), softcap=None)[0], expected)
            for name in ("cu_seq_lens_q", "softcap"):
                with pytest.raises(ValueError, match=f"`{name}`"):
                    model(**batch, **{name: torch.tensor([0, 3])})


@pytest.mark.parametrize("name", ["bart", "whisper", "t5", "umt5"])
@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 4}, {"kv_lora_rank": 16, "cross_kv_lora_rank": 16}])
def test_encoder_and_decoder_are_the_same_alone_and_in_the_model(name, fields):
    architecture = ROWS[name]
    head = next(iter(architecture.heads))
    model = architecture.make_model(head, **fields)
    for stack in (model.encoder, model.decoder):
        alone = type(stack)(stack.config).eval()
        if "embed_tokens" in dict(stack.named_modules()):
            alone.set_input_embeddings(stack.get_input_embeddings())
        alone.load_state_dict(stack.state_dict())
        batch = architecture.make_batch(head)
        inputs = {"input_ids": make_token_ids()} if "input_features" not in batch or stack is model.decoder else batch
        inputs = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
        if stack is model.decoder:
            inputs["encoder_hidden_states"] = torch.randn(len(make_token_ids()), 7, model.config.d_model)
        with torch.no_grad():
            assert torch.equal(alone(**inputs)[0], stack(**inputs)[0])


def test_latent_projection_exposes_a_dtype():
    architecture = ROWS["t5"]
    model = architecture.make_model("T5ForConditionalGeneration", cross_kv_lora_rank=16)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    model(input_ids=make_token_ids(), decoder_input_ids=make_token_ids(), **with_cache(cache))
    assert {layer.dtype for layer in cache.cross_attention_cache.layers[1:]} == {torch.float32}


def test_umt5_output_scaling_follows_the_checkpoint():
    architecture = ROWS["umt5"]
    plain = architecture.upstream_config_class(**architecture.tiny).to_dict()
    plain.pop("scale_decoder_outputs", None)
    configs = {}
    for tied in (True, False):
        configs[tied] = hf_attn_variants.AttnVariantUMT5Config.from_upstream(plain | {"tie_word_embeddings": tied})
        again = type(configs[tied]).from_dict(configs[tied].to_dict())
        assert again.scale_decoder_outputs == configs[tied].scale_decoder_outputs == tied
    models = {
        tied: hf_attn_variants.AttnVariantUMT5ForConditionalGeneration(config).eval()
        for tied, config in configs.items()
    }
    models[False].load_state_dict(models[True].state_dict())
    inputs = {"input_ids": make_token_ids(), "decoder_input_ids": make_token_ids()}
    with torch.no_grad():
        scaled, unscaled = (models[tied](**inputs).logits for tied in (True, False))
    torch.testing.assert_close(unscaled, scaled * configs[True].d_model ** 0.5)


def test_saved_configuration_needs_its_format_number(tmp_path):
    row = ROWS["bert"]
    config = row.make_config()
    config_class, values = type(config), config.to_dict()
    assert values["attn_variants_format"] == 5
    without = {name: value for name, value in values.items() if name != "attn_variants_format"}
    cases = [without, *(values | {"attn_variants_format": wrong} for wrong in (1, 2, 3, 4, 6, 5.0, "5", None, True))]
    for stored in cases:
        (tmp_path / "config.json").write_text(json.dumps(stored))
        for read in (
            lambda stored: config_class.from_dict(stored),
            lambda stored: config_class.from_upstream(stored),
            lambda _: config_class.from_pretrained(tmp_path),
            lambda _: AutoConfig.from_pretrained(tmp_path),
        ):
            with pytest.raises(ValueError, match="`attn_variants_format` must be 5"):
                read(stored)
    with pytest.raises(ValueError, match="`attn_variants_format` must be 5"):
        row.make_config(attn_variants_format=2)
    # Configurations of Transformers have no format number, and very old ones have no model type either.
    plain = {name: value for name, value in without.items() if name != "model_type"}
    for stored in (plain, plain | {"model_type": "bert"}):
        (tmp_path / "config.json").write_text(json.dumps(stored))
        for result in (config_class.from_dict(stored), config_class.from_pretrained(tmp_path)):
            assert result.attn_variants_format == 5


def test_versions_are_compared_by_minor_release():
    for version, is_newer in {"5.24.3": False, "5.9.0": False, "5.25.0.dev0": True, "6.0.0rc1": True}.items():
        assert transformers_trial.is_newer(version, "5.24") == is_newer


@pytest.fixture
def newer(monkeypatch):
    """Pretend that the installed Transformers is newer than the tested releases."""
    monkeypatch.setattr(transformers_trial.transformers, "__version__", "5.99.0")
    monkeypatch.setattr(transformers_trial, "_trial_errors", {})


@EVERY_ARCHITECTURE
def test_newer_release_runs_one_trial_per_architecture(architecture, newer, tmp_path):
    head = next(iter(architecture.heads))
    torch.manual_seed(0)
    model = getattr(hf_attn_variants, f"AttnVariant{head}")(architecture.make_config(head=head))
    assert transformers_trial._trial_errors == {architecture.config_class.model_type: None}
    torch.manual_seed(0)
    again = getattr(hf_attn_variants, f"AttnVariant{head}")(architecture.make_config(head=head))
    for first, second in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(first, second)  # the trial did not draw random numbers


@EVERY_ARCHITECTURE
def test_newer_release_with_other_outputs_raises_an_error(architecture, newer, monkeypatch):
    """Check a change of outputs under the same names and signatures, which only the trial detects."""
    from hf_attn_variants.modeling.attention import attention_interface

    exact = attention_interface.fused_attention
    monkeypatch.setattr(attention_interface, "fused_attention", lambda *args, **kwargs: exact(*args, **kwargs) * 1.01)
    head = next(iter(architecture.heads))
    for _ in range(2):  # code that catches the first error gets it again
        with pytest.raises(TransformersChangedError, match=r"a tiny AttnVariant\w+ for a whole text differ"):
            getattr(hf_attn_variants, f"AttnVariant{head}")(architecture.make_config(head=head))
