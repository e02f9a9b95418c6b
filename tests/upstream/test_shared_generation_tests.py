"""Apply the ideas of Transformers' shared generation tests to our models."""

import pytest
import torch
from architectures import BERT
from fixtures.caches import get_cache, get_cache_name, with_cache
from fixtures.tested_architectures import EVERY_VARIANT, PAIRS, get_second_head, make
from relatives import ENCODERS, WHISPER
from transformers import DynamicCache, EncoderDecoderCache

WRITERS = [(row, get_second_head(row)) for row in (*PAIRS, WHISPER)]
ALONE = [(BERT, "BertLMHeadModel"), (ENCODERS[0], "RobertaForCausalLM"), (ENCODERS[1], "ElectraForCausalLM")]
EVERY_WRITER = pytest.mark.parametrize(("architecture", "head"), WRITERS, ids=[head for _, head in WRITERS])
WITH_DECODERS = pytest.mark.parametrize(
    ("architecture", "head"), WRITERS + ALONE, ids=[head for _, head in WRITERS + ALONE]
)
STEPS = {"max_new_tokens": 4, "min_new_tokens": 4}
SEARCHES = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "two of the beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams of samples": {"do_sample": True, "num_beams": 2},
}


def make_inputs(architecture, head):
    batch = architecture.make_batch(head)
    if (architecture, head) in ALONE:
        return {"input_ids": batch["input_ids"]}
    return {name: value for name, value in batch.items() if name != "decoder_input_ids"}


def get_shapes(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return [get_shapes(item) for item in value] if isinstance(value, tuple) else type(value).__name__


@pytest.mark.thorough
@pytest.mark.parametrize("search", SEARCHES)
@EVERY_WRITER
def test_generate_returns_the_shapes_of_transformers(architecture, head, search):
    """Check `_check_generate_outputs`, although beams share the encoder outputs inside."""
    actual = []
    for model in (architecture.make_upstream_model(head), make(architecture, head, "gqa")):
        model.set_attn_implementation("eager")
        torch.manual_seed(0)
        flags = dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), True)
        options = SEARCHES[search] | STEPS | flags | {"return_dict_in_generate": True}
        output = model.generate(**make_inputs(architecture, head), **options)
        actual.append({name: get_shapes(value) for name, value in output.items()})
    # In Transformers 5.15 and 5.17, T5 does not return its attention weights.
    left_out = {name for name in actual[0] if name.endswith("_attentions") and not any(actual[0][name])}
    assert actual[0].keys() == actual[1].keys() and "encoder_attentions" in actual[0]
    for name in actual[0].keys() - left_out:
        assert actual[0][name] == actual[1][name], name


@EVERY_VARIANT
@pytest.mark.parametrize(("architecture", "head"), ALONE, ids=[head for _, head in ALONE])
def test_generation_continues_with_a_returned_cache(architecture, head, variant):
    """Check `test_generate_continue_from_past_key_values`; encoder-decoders encode the source again, as in
    Transformers.
    """
    model, ids = make(architecture, head, variant), make_inputs(architecture, head)["input_ids"]
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
def test_static_cache_generates_the_tokens_of_a_dynamic_cache(architecture, head, variant):
    """Check `test_generate_with_static_cache`, also with beams."""
    model, inputs = make(architecture, head, variant), make_inputs(architecture, head)
    for search in ("greedy", "beams"):
        options = SEARCHES[search] | STEPS
        static = model.generate(**inputs, **options, cache_implementation="static")
        assert torch.equal(static, model.generate(**inputs, **options))


@WITH_DECODERS
def test_cache_argument_accepts_its_former_name(architecture, head):
    """Check `test_bc_cache_name_forward` with a Transformers that knows both names."""
    if get_cache_name() == "past_key_values":
        pytest.skip("this version of Transformers uses the former name")
    model, inputs = make(architecture, head, "gqa"), architecture.make_batch(head)
    if (architecture, head) in ALONE:
        inputs = make_inputs(architecture, head)
    actual = []
    for name in ("past_key_values", "cache"):
        cache = DynamicCache(config=model.config)
        if (architecture, head) in WRITERS:
            cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
        if name == "cache":
            output = model(**inputs, cache=cache, use_cache=True)
        else:
            with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
                output = model(**inputs, past_key_values=cache, use_cache=True)
        assert output.cache is cache and cache.get_seq_length() == output.logits.shape[1]
        actual.append(output.logits)
    assert torch.equal(*actual)


@EVERY_VARIANT
@WITH_DECODERS
def test_assisted_decoding_matches_greedy_search(architecture, head, variant):
    """Check `test_assisted_decoding_matches_greedy_search`, and prompt lookup, for one text."""
    model = make(architecture, head, variant)
    inputs = {name: value[:1] for name, value in make_inputs(architecture, head).items()}
    expected = model.generate(**inputs, **SEARCHES["greedy"], **STEPS)
    assistant = architecture.make_upstream_model(head)
    assert torch.equal(model.generate(**inputs, **SEARCHES["greedy"], **STEPS, assistant_model=assistant), expected)
    if (architecture, head) in ALONE:
        actual = model.generate(**inputs, **SEARCHES["greedy"], **STEPS, prompt_lookup_num_tokens=2)
        assert torch.equal(actual, expected)
