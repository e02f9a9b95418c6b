"""Check encoder-decoders of unequal depth: the caches of Transformers have too few layers for a deeper T5 decoder."""

import pytest
import torch
from architectures import T5
from fixtures.caches import get_cache
from fixtures.decoding import make_prompt
from relatives import ENCODER_DECODERS, UMT5

ARCHITECTURES = {"t5": (T5, "num_layers", "num_decoder_layers"), "umt5": (UMT5, "num_layers", "num_decoder_layers")}
ARCHITECTURES["bart"] = (ENCODER_DECODERS[0], "encoder_layers", "decoder_layers")
VARIANTS = {
    "mha": {},
    "mqa": {"num_key_value_heads": 1},
    "latent": {"num_key_value_heads": 4, "kv_lora_rank": 16},
    "cross latent": {"num_key_value_heads": 4, "cross_kv_lora_rank": 24},
    "exact": {"cross_kv_lora_rank": "hidden_size"},
    "by layer": {"per_layer_values": {"num_key_value_heads": [12, 4, 1, 12, 4]}},
    "talking": {"talking_heads": "both", "talking_heads_init": "random"},
    "elu": {"attention_kernel": "elu", "position_embedding_type": "sinusoidal"},
    "hybrid": {"attention_kernel": "hybrid", "attention_window": 4, "position_embedding_type": "sinusoidal"},
}
SEARCHES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "static beams": {"cache_implementation": "static", "num_beams": 2},
}
HEAD, DEEP = "ForConditionalGeneration", 5
OPTIONS = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}


def get_head(row):
    return next(name for name in row.heads if name.endswith(HEAD))


def make_model(architecture, encoder, decoder, **fields):
    row, *names = ARCHITECTURES[architecture]
    if "talking_heads" in fields and architecture == "bart":
        fields["encoder_attention_heads"] = 12
    if fields.get("cross_kv_lora_rank") == "hidden_size":
        fields["cross_kv_lora_rank"] = row.tiny["d_model"]
    if "attention_kernel" in fields and architecture == "bart":
        del fields["position_embedding_type"]
    return row.make_model(get_head(row), **dict(zip(names, (encoder, decoder), strict=True)), **fields)


@pytest.mark.thorough
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.cross_product
def test_deeper_decoder_generates_the_same_with_and_without_a_cache(architecture, variant, search):
    if "static" in search and variant in ("elu", "hybrid"):
        pytest.skip("kernels do not use static caches")
    model, options = make_model(architecture, 1, DEEP, **VARIANTS[variant]), OPTIONS | SEARCHES[search]
    row = ARCHITECTURES[architecture][0]
    prompt = make_prompt(row, get_head(row))
    actual = model.generate(**prompt, **options)
    plain = {name: value for name, value in options.items() if name != "cache_implementation"}
    expected = model.generate(**prompt, **plain, use_cache=False)
    assert torch.equal(actual.sequences, expected.sequences)
    pair = get_cache(actual)
    assert [len(item.layers) for item in (pair.self_attention_cache, pair.cross_attention_cache)] == [DEEP, DEEP]


@pytest.mark.parametrize("search", ["greedy", "beams"])
@pytest.mark.parametrize("depths", [(1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("architecture", ["t5", "umt5"])
def test_unequal_depths_generate_the_tokens_of_transformers(architecture, depths, search):
    row, *names = ARCHITECTURES[architecture]
    upstream = row.make_upstream_model(get_head(row), **dict(zip(names, depths, strict=True)))
    model = make_model(architecture, *depths)
    model.load_state_dict(upstream.state_dict())
    options, prompt = OPTIONS | SEARCHES[search], make_prompt(row, get_head(row))
    # The cache of Transformers has as many layers as the encoder, so a deeper decoder cannot use it.
    expected = upstream.generate(**prompt, **options, use_cache=depths[0] > depths[1])
    assert torch.equal(model.generate(**prompt, **options).sequences, expected.sequences)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decoder_configuration_has_its_own_number_of_layers(architecture):
    config = make_model(architecture, 1, 3).config
    assert config.get_text_config(decoder=True).num_hidden_layers == 3
    assert config.get_text_config(encoder=True).num_hidden_layers == 1
    assert config.get_text_config() is config and config.num_hidden_layers == 1
