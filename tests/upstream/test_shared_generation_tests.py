"""What transformers' shared tests ask of models that generate."""

import pytest
import torch
from architectures import BERT
from fixtures.caches import get_cache, get_cache_name, with_cache
from fixtures.hosts import EVERY_VARIANT, PAIRS, make, second_head
from relatives import ENCODERS, WHISPER
from transformers import DynamicCache, EncoderDecoderCache

WRITERS = [(row, second_head(row)) for row in (*PAIRS, WHISPER)]
ALONE = [(BERT, "BertLMHeadModel"), (ENCODERS[0], "RobertaForCausalLM"), (ENCODERS[1], "ElectraForCausalLM")]
EVERY_WRITER = pytest.mark.parametrize(("host", "head"), WRITERS, ids=[head for _, head in WRITERS])
WITH_DECODERS = pytest.mark.parametrize(("host", "head"), WRITERS + ALONE, ids=[head for _, head in WRITERS + ALONE])
STEPS = {"max_new_tokens": 4, "min_new_tokens": 4}
SEARCHES = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "two of the beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams of samples": {"do_sample": True, "num_beams": 2},
}


def inputs_of(host, head):
    batch = host.batch(head)
    if (host, head) in ALONE:
        return {"input_ids": batch["input_ids"]}
    return {name: value for name, value in batch.items() if name != "decoder_input_ids"}


def shapes(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return [shapes(each) for each in value] if isinstance(value, tuple) else type(value).__name__


@pytest.mark.thorough
@pytest.mark.parametrize("search", SEARCHES)
@EVERY_WRITER
def test_all_that_generate_returns_has_upstreams_shapes(host, head, search):
    """`_check_generate_outputs`: beams share what the encoder made, and say so in no shape."""
    found = []
    for model in (host.upstream_model(head), make(host, head, "gqa")):
        model.set_attn_implementation("eager")
        torch.manual_seed(0)
        flags = dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), True)
        options = SEARCHES[search] | STEPS | flags | {"return_dict_in_generate": True}
        output = model.generate(**inputs_of(host, head), **options)
        found.append({name: shapes(value) for name, value in output.items()})
    # T5 of 5.15 and 5.17 leaves its weights out.
    left_out = {name for name in found[0] if name.endswith("_attentions") and not any(found[0][name])}
    assert found[0].keys() == found[1].keys() and "encoder_attentions" in found[0]
    for name in found[0].keys() - left_out:
        assert found[0][name] == found[1][name], name


@EVERY_VARIANT
@pytest.mark.parametrize(("host", "head"), ALONE, ids=[head for _, head in ALONE])
def test_generation_goes_on_with_the_cache_that_it_returned(host, head, variant):
    """`test_generate_continue_from_past_key_values`; a pair of stacks reads its own text anew, in upstream's too."""
    model, ids = make(host, head, variant), inputs_of(host, head)["input_ids"]
    options = {"do_sample": False, "return_dict_in_generate": True}

    def generate(ids, tokens, **cache):
        mask = torch.ones_like(ids)
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        return model.generate(input_ids=ids, attention_mask=mask, **options, **lengths, **cache)

    first = generate(ids, 4)
    assert get_cache(first).get_seq_length() == ids.shape[1] + 3
    second = generate(first.sequences, 2, **with_cache(get_cache(first)))
    assert torch.equal(second.sequences, generate(ids, 6).sequences)
    assert get_cache(second).get_seq_length() == ids.shape[1] + 5


@pytest.mark.thorough
@EVERY_VARIANT
@WITH_DECODERS
def test_a_static_cache_finds_what_a_dynamic_one_finds(host, head, variant):
    """`test_generate_with_static_cache`, with beams too."""
    model, inputs = make(host, head, variant), inputs_of(host, head)
    for search in ("greedy", "beams"):
        options = SEARCHES[search] | STEPS
        static = model.generate(**inputs, **options, cache_implementation="static")
        assert torch.equal(static, model.generate(**inputs, **options))


@WITH_DECODERS
def test_a_cache_by_its_former_name(host, head):
    """`test_bc_cache_name_forward`, of transformers with two names."""
    if get_cache_name() == "past_key_values":
        pytest.skip("it has its first name")
    model, inputs = make(host, head, "gqa"), host.batch(head)
    if (host, head) in ALONE:
        inputs = inputs_of(host, head)
    found = []
    for name in ("past_key_values", "cache"):
        cache = DynamicCache(config=model.config)
        if (host, head) in WRITERS:
            cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
        if name == "cache":
            output = model(**inputs, cache=cache, use_cache=True)
        else:
            with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
                output = model(**inputs, past_key_values=cache, use_cache=True)
        assert output.cache is cache and cache.get_seq_length() == output.logits.shape[1]
        found.append(output.logits)
    assert torch.equal(*found)


@EVERY_VARIANT
@WITH_DECODERS
def test_guessed_tokens_change_nothing(host, head, variant):
    """`test_assisted_decoding_matches_greedy_search`, and tokens guessed from the prompt; of one text."""
    model = make(host, head, variant)
    inputs = {name: value[:1] for name, value in inputs_of(host, head).items()}
    expected = model.generate(**inputs, **SEARCHES["greedy"], **STEPS)
    assistant = host.upstream_model(head)
    assert torch.equal(model.generate(**inputs, **SEARCHES["greedy"], **STEPS, assistant_model=assistant), expected)
    if (host, head) in ALONE:
        found = model.generate(**inputs, **SEARCHES["greedy"], **STEPS, prompt_lookup_num_tokens=2)
        assert torch.equal(found, expected)
