"""Check kernels in some layers and a softmax in the others, with and without a cache."""

import pytest
import torch
from architectures import BERT, T5, make_token_ids
from fixtures.caches import with_cache
from fixtures.decoding import (
    decode_at_once,
    decode_in_steps,
    generate_with_each_cache,
    make_decoder_batch,
    make_prompt,
)
from relatives import ENCODER_DECODERS, WHISPER
from transformers import AutoModel, DynamicCache, StaticCache

import hf_attn_variants
from hf_attn_variants.inspection.costs import get_variant_name
from hf_attn_variants.modeling.attention.decoder_caches import KernelStateLayer

BART = ENCODER_DECODERS[0]
LISTS = [[None, "{}"], ["{}", None]]
DECODERS = {
    "bert": (BERT, "BertLMHeadModel", ("attention_kernel",)),
    "bart alone": (BART, "BartForCausalLM", ("attention_kernel",)),
    "bart": (BART, "BartForConditionalGeneration", ("attention_kernel", "encoder_attention_kernel")),
    "bart's memory": (BART, "BartForConditionalGeneration", ("attention_kernel", "cross_attention_kernel")),
    "whisper": (WHISPER, "WhisperForConditionalGeneration", ("attention_kernel", "cross_attention_kernel")),
    "t5": (T5, "T5ForConditionalGeneration", ("cross_attention_kernel",)),
    "t5 of sinusoids": (T5, "T5ForConditionalGeneration", ("attention_kernel",)),
}
EVERY_DECODER = pytest.mark.parametrize("architecture, head, names", DECODERS.values(), ids=DECODERS)


def make_per_layer_fields(values, kernel, *names):
    values = [item and item.format(kernel) for item in values]
    return {"per_layer_values": {name: values for name in names}}


def get_position_fields(head, names):
    """Return sinusoidal positions for T5, whose position bias cannot be combined with a kernel."""
    return {"position_embedding_type": "sinusoidal"} if head.startswith("T5") and "attention_kernel" in names else {}


def get_kernel_names(model):
    cores = (module.get_submodule(site.core) for site, _, module in model.named_attention_modules())
    return [core.kernel and core.kernel.name for core in cores]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("first", [None, "hedgehog"])
def test_each_layer_uses_its_own_kernel(first, implementation):
    """Check that the first layer equals Transformers, or a model with the kernel in all layers."""
    values = [first, "hedgehog" if first is None else None]
    model = BERT.make_model("BertModel", per_layer_values={"attention_kernel": values})
    assert model.config.attention_kernel == "hedgehog" and get_kernel_names(model) == values
    model.set_attn_implementation(implementation)
    alike = BERT.make_upstream_model("BertModel")
    if first:
        alike = BERT.make_model("BertModel", attention_kernel="hedgehog")
    alike.load_state_dict(model.state_dict(), strict=False)
    ids, mask = make_token_ids(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, 6:] = 0
    with torch.no_grad():
        actual, expected = (
            item(ids, attention_mask=mask, output_hidden_states=True).hidden_states for item in (model, alike)
        )
    torch.testing.assert_close(actual[1][mask.bool()], expected[1][mask.bool()])
    assert (actual[2] - expected[2])[mask.bool()].abs().max() > 1e-3
    weights = model(make_token_ids(1, 9), output_attentions=True).attentions
    torch.testing.assert_close(torch.stack(weights).sum(-1), torch.ones(2, 1, 12, 9))


@EVERY_DECODER
@pytest.mark.parametrize("values", LISTS, ids=["softmax first", "kernel first"])
@pytest.mark.parametrize("implementation, kernel", [("sdpa", "hedgehog"), ("eager", "hedgehog"), ("sdpa", "hybrid")])
def test_mixed_cache_keeps_states_and_keys(architecture, head, names, values, implementation, kernel):
    """Check several tokens in one call, then single tokens; decoder-only texts are padded on the left."""
    if kernel == "hybrid" and "cross_attention_kernel" in names:
        pytest.skip("only self-attention supports the hybrid kernel")
    windows = {name.replace("kernel", "window"): 4 for name in names if kernel == "hybrid"}
    model = architecture.make_model(
        head, "gqa", **make_per_layer_fields(values, kernel, *names), **windows, **get_position_fields(head, names)
    )
    model.set_attn_implementation(implementation)
    batch = make_decoder_batch(architecture, head)
    full_output, (steps, cache) = decode_at_once(model, batch), decode_in_steps(model, batch)
    torch.testing.assert_close(steps, full_output, atol=1e-5, rtol=0)
    later = batch.ids.clone()
    later[:, -1] = (later[:, -1] + 1) % 20
    assert decode_at_once(model, batch._replace(ids=later))[:, :-1].equal(full_output[:, :-1])
    self_attention_cache = getattr(cache, "self_attention_cache", cache)
    has_state = [item is not None and "attention_kernel" in names for item in values]
    assert [isinstance(layer, KernelStateLayer) for layer in self_attention_cache.layers] == has_state
    assert self_attention_cache.get_seq_length() == 9


@EVERY_DECODER
@pytest.mark.parametrize("beams", [1, 3])
def test_mixed_kernels_generate_the_same_with_and_without_a_cache(architecture, head, names, beams):
    model = architecture.make_model(
        head, "gqa", **make_per_layer_fields(LISTS[0], "elu", *names), **get_position_fields(head, names)
    )
    generate_with_each_cache(model, make_prompt(architecture, head, left=True), 8, num_beams=beams)


def test_unsupported_operations_on_a_mixed_cache_raise_an_error():
    model = BERT.make_model("BertLMHeadModel", **make_per_layer_fields(LISTS[0], "elu", "attention_kernel"))
    cache = DynamicCache(config=model.config)
    model(make_token_ids(1, 4), **with_cache(cache))
    with pytest.raises(ValueError, match="`attention_kernel`"):
        cache.crop(-1)
    static = StaticCache(config=model.config, max_cache_len=8)
    with pytest.raises(ValueError, match="`attention_kernel`"):
        model(make_token_ids(1, 4), **with_cache(static))


def test_mixed_kernels_are_saved_and_loaded_completely(tmp_path):
    lists = make_per_layer_fields(LISTS[0], "hedgehog", "attention_kernel")
    model = BERT.make_model("BertModel", **lists)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert get_kernel_names(loaded) == [None, "hedgehog"]
    assert loaded.config.per_layer_values == lists["per_layer_values"]
    ids = make_token_ids(1, 9)
    with torch.no_grad():
        assert loaded(ids)[0].equal(model(ids)[0])
    load = hf_attn_variants.AttnVariantBertModel.from_pretrained
    for fields in (
        make_per_layer_fields(LISTS[1], "hedgehog", "attention_kernel"),
        {"per_layer_config": {0: {"attention_kernel": "hedgehog"}}},
        {"attention_kernel": "hedgehog"},
        {"attention_kernel": None},
    ):
        with pytest.raises(ValueError, match="`attention_kernel` must be"):
            load(tmp_path, **fields)
    assert get_kernel_names(load(tmp_path, **lists)) == [None, "hedgehog"]


def test_plain_checkpoint_loads_with_kernels_in_some_layers(tmp_path):
    BERT.make_upstream_model("BertModel").save_pretrained(tmp_path)
    load = hf_attn_variants.AttnVariantBertModel.from_pretrained
    lists = make_per_layer_fields(LISTS[1], "elu", "attention_kernel")
    assert get_kernel_names(load(tmp_path, **lists)) == ["elu", None]
    assert get_kernel_names(load(tmp_path, per_layer_config={1: {"attention_kernel": "elu"}})) == [None, "elu"]


def test_equal_kernels_per_layer_become_one_kernel():
    config = BERT.make_config("mha", per_layer_values={"attention_kernel": ["elu", "elu"]})
    assert config.attention_kernel == "elu" and config.per_layer_values is None
    config = BERT.make_config("mha", per_layer_values={"attention_kernel": [None, None]})
    assert config.attention_kernel is None and config.per_layer_values is None


def test_every_parameter_of_mixed_kernels_gets_a_gradient():
    lists = make_per_layer_fields(
        LISTS[0], "hedgehog", "attention_kernel", "encoder_attention_kernel", "cross_attention_kernel"
    )
    model = BART.make_model("BartForConditionalGeneration", "gqa", **lists).train()
    model(**BART.make_batch("BartForConditionalGeneration", labels=True), use_cache=False).loss.backward()
    assert all(parameter.grad.any() for name, parameter in model.named_parameters() if "k_proj.bias" not in name)


def test_variant_name_counts_the_layers_with_a_kernel():
    lists = make_per_layer_fields(LISTS[0], "hedgehog", "attention_kernel")
    assert get_variant_name(BERT.make_config("mha", **lists)) == "MHA + hedgehog in 1 of 2 layers"
    assert get_variant_name(BERT.make_config("mha", attention_kernel="hedgehog")) == "MHA + hedgehog"
