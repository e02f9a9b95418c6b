"""Check that models with shared memory equal Transformers, for every family, cache form and generation method."""

import pytest
import torch
import transformers
from fixtures.caches import get_cache, with_cache
from fixtures.decoding import decode_in_pieces
from fixtures.upstream_seq2seq import FAMILIES, make_source_batch, make_tiny_model

from hf_attn_variants import share_memory
from hf_attn_variants.shared_memory.attention import EncoderOutputsLayer, SharedMemoryMixin, iterate_cross_attentions

pytestmark = pytest.mark.cross_product

WAYS = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "eight beams": {"num_beams": 8, "length_penalty": 0.3},
    "samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
    "sampling beams": {"do_sample": True, "num_beams": 3},
    "static": {"cache_implementation": "static"},
    "static by beams": {"cache_implementation": "static", "num_beams": 3},
    "no cache": {"use_cache": False, "num_beams": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
}
# Rounding decides between beams that are nearly as good, so searches run in float64.
TOLERANCE = {"atol": 1e-7, "rtol": 1e-7}
FLOAT32 = {"atol": 1e-3, "rtol": 1e-3}


def make_pair(name, dtype=torch.float64, **fields):
    return make_tiny_model(name, **fields).to(dtype), share_memory(make_tiny_model(name, **fields)).to(dtype)


def make_batch(name, *args, dtype=torch.float64, **options):
    return {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in make_source_batch(name, *args, **options).items()
    }


def generate(model, batch, **options):
    torch.manual_seed(5)
    if model.config.model_type == "whisper":  # otherwise a timestamp would begin a new segment
        options = {"return_timestamps": False} | options
    return model.generate(
        **batch, max_new_tokens=9, min_new_tokens=4, return_dict_in_generate=True, output_scores=True, **options
    )


def assert_same(actual, expected_output):
    assert torch.equal(actual.sequences, expected_output.sequences)
    torch.testing.assert_close(actual.scores, expected_output.scores, **TOLERANCE)
    if "sequences_scores" in expected_output:
        torch.testing.assert_close(actual.sequences_scores, expected_output.sequences_scores, **TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("decoding", WAYS)
def test_generated_tokens_equal_transformers(name, decoding, form):
    upstream, shared = make_pair(name)
    rows = 1 if decoding == "prompt lookup" else 3
    batch = make_batch(name, rows)
    assert_same(generate(shared, batch, **WAYS[decoding]), generate(upstream, batch, **WAYS[decoding]))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stepwise_logits_equal_transformers(name, implementation, padded, rows, dtype, form):
    if FAMILIES[name].implementation == "eager" and implementation == "sdpa":
        pytest.skip("the model of Transformers supports only eager attention")
    upstream, shared = make_pair(name, dtype, attn_implementation=implementation)
    batch = make_batch(name, rows, padded=padded, dtype=dtype)
    tolerance = FLOAT32 if dtype == torch.float32 else TOLERANCE
    targets = torch.randint(4, 60, (rows, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = upstream(**batch, decoder_input_ids=targets).logits
        torch.testing.assert_close(shared(**batch, decoder_input_ids=targets).logits, expected, **tolerance)
        mask, steps = {name: item for name, item in batch.items() if name == "attention_mask"}, []
        for model in (shared, upstream):
            memory = model.get_encoder()(**batch)
            steps.append(decode_in_pieces(model, targets, [2, 1, 1, 2], encoder_outputs=memory, **mask)[0])
    torch.testing.assert_close(*steps, **tolerance)


def test_fully_padded_row_equals_transformers(form):
    """Check rows of padding: T5 gives uniform weights, and BART only the value bias."""
    for name in ("t5", "umt5", "bart"):
        for implementation in ("sdpa", "eager"):
            upstream, shared = make_pair(name, attn_implementation=implementation)
            batch = make_batch(name)
            batch["attention_mask"][1] = 0
            outputs = upstream.get_encoder()(**make_batch(name))
            options = {"encoder_outputs": outputs, "attention_mask": batch["attention_mask"]}
            ids = torch.full((3, 2), 3)
            with torch.no_grad():
                expected, actual = (model(decoder_input_ids=ids, **options).logits for model in (upstream, shared))
            torch.testing.assert_close(actual, expected, **TOLERANCE)
            for number in (1, 3):
                results = []
                for model in (shared, upstream):
                    options["encoder_outputs"] = transformers.modeling_outputs.BaseModelOutput(outputs[0])
                    results.append(generate(model, options, num_beams=number))
                assert_same(*results)


@pytest.mark.parametrize("name", FAMILIES)
def test_cache_has_one_row_per_sentence(name, form):
    """Check also that encoder outputs are one tensor for all layers."""
    (_, shared), caches = make_pair(name), []
    decoder = shared.get_decoder()
    decoder.register_forward_hook(lambda module, args, output: caches.append((args, get_cache(output))))
    shared.generate(**make_batch(name), num_beams=4, max_new_tokens=5)
    layers = caches[-1][1].cross_attention_cache.layers
    if form == "source":
        assert all(type(layer) is EncoderOutputsLayer and layer.encoder_outputs.shape[0] == 3 for layer in layers)
        assert len({layer.encoder_outputs.data_ptr() for layer in layers}) == 1
    else:
        assert {layer.keys.shape[:2] for layer in layers} == {(3, 4)}


@pytest.mark.parametrize("name", ["t5", "umt5", "bart", "whisper"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_attention_weights_equal_transformers(name, num_beams, form):
    upstream, shared = make_pair(name, attn_implementation="eager")
    batch = make_batch(name)
    options = {"output_attentions": True, "num_beams": num_beams}
    expected_output, actual_output = (generate(model, batch, **options) for model in (upstream, shared))
    assert_same(actual_output, expected_output)
    torch.testing.assert_close(actual_output.cross_attentions, expected_output.cross_attentions, **TOLERANCE)


@pytest.mark.parametrize("name", ["t5", "umt5", "bart", "whisper"])
@pytest.mark.parametrize("train", [False, True])
def test_gradients_equal_transformers(name, train, form):
    dropout = {"dropout_rate": 0.0} if "t5" in name else {"dropout": 0.0, "attention_dropout": 0.0}
    models = make_pair(name, **dropout)
    batch = make_batch(name) | {"labels": torch.randint(4, 60, (3, 5), generator=torch.Generator().manual_seed(2))}
    for model in models:
        model.train(train)
        model(**batch).loss.backward()
    for (path, upstream_parameter), parameter in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert (upstream_parameter.grad is None) == (parameter.grad is None), path
        if upstream_parameter.grad is not None:
            assert torch.equal(upstream_parameter.grad, parameter.grad), path


def test_training_with_dropout_and_checkpointing_equals_transformers():
    for name in ("t5", "bart"):
        models = make_pair(name)
        batch = make_batch(name) | {"labels": torch.full((3, 5), 9)}
        losses = []
        for model in models:
            model.train()
            model.gradient_checkpointing_enable()
            torch.manual_seed(3)
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss)
        assert torch.equal(*losses)


def test_gradient_of_a_single_projection_equals_transformers(source_form):
    """Check a model in which every other parameter is frozen."""
    models = make_pair("bart")
    batch = make_batch("bart") | {"labels": torch.full((3, 5), 9)}
    gradients = []
    for model in models:
        model.requires_grad_(False)
        weight = model.model.decoder.layers[0].encoder_attn.k_proj.weight.requires_grad_()
        model(**batch).loss.backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients) and gradients[0].abs().max() > 0


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_assistant_model_shares_memory(name, form):
    upstream, shared = make_pair(name)
    helper = make_tiny_model(name, seed=1).double()
    helped = share_memory(make_tiny_model(name, seed=1).double())
    batch = make_batch(name, 1)
    expected = generate(upstream, batch, assistant_model=helper)
    assert_same(generate(shared, batch, assistant_model=helped), expected)
    assert_same(generate(shared, batch, assistant_model=helper), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shared_memory_works_in_half_precision(dtype, form):
    for name in ("t5", "bart"):
        upstream, shared = make_pair(name, dtype)
        batch = make_batch(name)
        ids = torch.full((3, 3), 3)
        exact = make_tiny_model(name)
        with torch.no_grad():
            expected, actual, right = (
                model(**batch, decoder_input_ids=ids).logits for model in (upstream, shared, exact)
            )
        # Both models round. The error of the sharing model must have about the same size.
        assert (actual - right).abs().max() <= 2 * (expected - right).abs().max() + 1e-3
        assert shared.generate(**batch, num_beams=3, max_new_tokens=5).shape[0] == 3


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["t5", pytest.param("bart", marks=pytest.mark.slow)])
def test_shared_memory_can_be_compiled(name, form):
    """Check a compiled model, and the compiled steps of a search with a static cache."""
    upstream, shared = make_pair(name)
    batch, ids = make_batch(name), torch.full((3, 3), 3)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = upstream(**batch, decoder_input_ids=ids).logits
        compiled = torch.compile(shared, backend="eager")
        torch.testing.assert_close(compiled(**batch, decoder_input_ids=ids).logits, expected, **TOLERANCE)
    for options in (WAYS["static"], WAYS["static by beams"], {"num_beams": 3}):
        expected = generate(upstream, batch, **options)
        _, steps = make_pair(name)
        steps.forward = torch.compile(steps.forward, backend="eager")
        assert_same(generate(steps, batch, **options), expected)


def test_shared_memory_works_under_autocast(form):
    upstream, shared = make_pair("bart", torch.float32)
    batch, ids = make_batch("bart"), torch.full((3, 3), 3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = upstream(**batch, decoder_input_ids=ids).logits
        assert torch.equal(shared(**batch, decoder_input_ids=ids).logits, expected)


def test_caches_can_be_exchanged_with_transformers(form):
    """Check that a sharing model continues from the cache of a Transformers model, and the reverse."""
    for name in ("t5", "bart"):
        upstream, shared = make_pair(name)
        batch, ids = make_batch(name), torch.full((3, 2), 3)
        with torch.no_grad():
            full = upstream(**batch, decoder_input_ids=ids.repeat(1, 2)).logits[:, 2:]
            for first, second in ((upstream, shared), (shared, upstream), (shared, shared)):
                begun = first(**batch, decoder_input_ids=ids, use_cache=True)
                outputs = {"encoder_outputs": (begun.encoder_last_hidden_state,), **with_cache(get_cache(begun))}
                inputs = {"attention_mask": batch["attention_mask"], **outputs}
                torch.testing.assert_close(second(**inputs, decoder_input_ids=ids).logits, full, **TOLERANCE)


def test_base_models_and_other_heads_share_memory(form):
    for name, cls in (("t5", "T5Model"), ("bart", "BartModel"), ("bart", "BartForSequenceClassification")):
        model_class = getattr(transformers, cls)
        upstream, shared = (make_tiny_model(name, model_class).double() for _ in range(2))
        share_memory(shared)
        assert any(isinstance(module, SharedMemoryMixin) for _, module in iterate_cross_attentions(shared))
        batch = make_batch(name)
        if "Sequence" in cls:
            batch["input_ids"][:, 1] = 2
        else:
            batch["decoder_input_ids"] = torch.full((3, 4), 3)
        with torch.no_grad():
            torch.testing.assert_close(shared(**batch)[0], upstream(**batch)[0], **TOLERANCE)
