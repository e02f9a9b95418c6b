"""Check models with linear attention, in every architecture, encoder and decoder."""

import pytest
import torch
from architectures import ALBERT, BERT, T5, make_token_ids
from fixtures.caches import get_cache, with_cache
from fixtures.checkpointing import checkpoint_layers
from fixtures.decoding import (
    decode_at_once,
    decode_in_steps,
    generate_with_each_cache,
    make_decoder_batch,
    make_prompt,
)
from fixtures.largest_tensor import LargestTensor
from fixtures.saving import save_and_load
from relatives import ENCODER_DECODERS, ENCODERS, WHISPER
from transformers import StaticCache

import hf_attn_variants
from hf_attn_variants.modeling.attention import mechanism_attention
from hf_attn_variants.modeling.attention.decoder_caches import KernelStateLayer
from hf_attn_variants.modeling.mechanisms.kernels import feature_kernel

pytestmark = pytest.mark.cross_product

KERNELS = ("elu", "relu", "hedgehog", "favor", "rfa")
EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)
ENCODER_ONLY = (BERT, ALBERT, *ENCODERS)
BART = ENCODER_DECODERS[0]
BART_FAMILY = ENCODER_DECODERS[:-1]
NAMED = {"ids": lambda row: row.name}
# With rfa, sums of weights may be near zero, which increases rounding errors.
TOLERANCE = {"rfa": 3e-4}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(feature_kernel, "CHUNK_LENGTH", 4)


def list_attentions(model):
    return [module for module in model.modules() if getattr(module, "kernel", None) is not None]


def compute_by_weights(model, **inputs):
    """Return the first output of a model that also computes attention weights, and the whole result."""
    with torch.no_grad():
        result = model(**inputs, output_attentions=True)
    return result[0], result


@EVERY_KERNEL
@pytest.mark.parametrize("architecture", ENCODER_ONLY, **NAMED)
def test_encoder_outputs_equal_the_kernel_formula(architecture, kernel):
    head = next(iter(architecture.heads))
    model, plain = (architecture.make_model(head, "gqa", attention_kernel=name) for name in (kernel, None))
    batch = architecture.make_batch(head)
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        actual = model(**batch).last_hidden_state
        expected, result = compute_by_weights(model, **batch)
        torch.testing.assert_close(actual[real], expected[real], atol=TOLERANCE.get(kernel, 1e-5), rtol=0)
        for weights in result.attentions:
            rows = weights.sum(-1)
            if kernel == "relu":  # the weights of a query without positive features are zero
                rows = rows + (rows == 0)
            if kernel != "rfa":
                torch.testing.assert_close(rows, torch.ones_like(rows))
            assert not weights.masked_select(~real[:, None, None].expand_as(weights)).any()
        assert not actual.allclose(plain(**batch).last_hidden_state, atol=1e-2)
        # Tokens in the padding do not affect the outputs.
        again = batch["input_ids"].masked_fill(~real, 7)
        torch.testing.assert_close(model(**batch | {"input_ids": again}).last_hidden_state[real], actual[real])
        model.set_attn_implementation("eager")
        assert model(**batch).last_hidden_state.equal(actual)


@EVERY_KERNEL
@pytest.mark.parametrize("stack", ["encoder", "decoder", "cross"])
def test_encoder_decoder_and_cross_attention_have_separate_kernels(kernel, stack):
    field = "attention_kernel" if stack == "decoder" else f"{stack}_attention_kernel"
    for architecture in (*BART_FAMILY, *((T5, ENCODER_DECODERS[-1]) if stack == "cross" else ())):
        head = next(iter(architecture.heads))
        model = architecture.make_model(head, "gqa", **{field: kernel})
        assert {name for name, *_ in iterate_changed_sites(model)} == {stack}
        batch = architecture.make_batch(head)
        with torch.no_grad():
            actual = model(**batch, use_cache=False)[0]
            expected, result = compute_by_weights(model, **batch, use_cache=False)
        torch.testing.assert_close(actual, expected, atol=10 * TOLERANCE.get(kernel, 1e-5), rtol=0)
        if stack == "decoder":
            assert all(not weights.triu(1).any() for weights in result.decoder_attentions)


def iterate_changed_sites(model):
    for site, path, module in model.named_attention_modules():
        if module.get_submodule(site.core).kernel is not None:
            yield site.name, path


def test_whisper_supports_kernels():
    fields = {"attention_kernel": "elu", "encoder_attention_kernel": "hedgehog", "cross_attention_kernel": "favor"}
    model = WHISPER.make_model("WhisperModel", "gqa", **fields)
    batch = WHISPER.make_batch("WhisperModel")
    with torch.no_grad():
        actual = model(**batch, use_cache=False)[0]
    torch.testing.assert_close(actual, compute_by_weights(model, **batch, use_cache=False)[0], atol=1e-4, rtol=0)


DECODERS = {
    "bert": (BERT, "BertLMHeadModel", {"attention_kernel"}),
    "bart alone": (BART, "BartForCausalLM", {"attention_kernel"}),
    "bart": (BART, "BartForConditionalGeneration", {"attention_kernel", "cross_attention_kernel"}),
    "whisper": (WHISPER, "WhisperForConditionalGeneration", {"attention_kernel", "cross_attention_kernel"}),
    "t5": (T5, "T5ForConditionalGeneration", {"cross_attention_kernel"}),
}


@EVERY_KERNEL
@pytest.mark.parametrize("architecture, head, fields", DECODERS.values(), ids=DECODERS)
def test_kernel_cache_keeps_a_state_of_constant_size(architecture, head, fields, kernel):
    """Check several tokens in one call, then single tokens; decoder-only texts are padded on the left."""
    model = architecture.make_model(head, "gqa", **dict.fromkeys(fields, kernel))
    batch, sizes = make_decoder_batch(architecture, head), set()

    def on_step(step_cache):
        if "attention_kernel" in fields:
            # The state is stored as keys, so that code can select rows of the cache.
            layers = step_cache.layers
            assert all(isinstance(layer, KernelStateLayer) and layer.keys is layer.state[0] for layer in layers)
            assert not any(layer.values.numel() for layer in layers)
            sizes.add(sum(item.numel() for layer in layers for item in layer.state if item is not None))

    steps, cache = decode_in_steps(model, batch, on_step)
    torch.testing.assert_close(steps, decode_at_once(model, batch), atol=10 * TOLERANCE.get(kernel, 1e-5), rtol=0)
    assert getattr(cache, "self_attention_cache", cache).get_seq_length() == 9 and len(sizes) <= 1


# Whisper generates with settings that a tiny model lacks, and its attention equals BART's.
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 4}], ids=str)
@pytest.mark.parametrize("name", [name for name in DECODERS if name != "whisper"])
def test_kernel_generation_is_the_same_with_and_without_states(name, search):
    architecture, head, fields = DECODERS[name]
    model = architecture.make_model(head, "gqa", **dict.fromkeys(fields, "hedgehog"))
    generate_with_each_cache(model, make_prompt(architecture, head, left=True), 10, **search)


def test_encoder_outputs_are_summed_once(monkeypatch):
    """Check that the sums are computed once, but again for another mask or other keys."""
    model = T5.make_model("T5ForConditionalGeneration", "gqa", cross_attention_kernel="elu")
    calls, sums = [], mechanism_attention.attend_with_kernel
    monkeypatch.setattr(mechanism_attention, "attend_with_kernel", lambda *args: calls.append(1) or sums(*args))
    batch = T5.make_batch("T5ForConditionalGeneration")
    ids, cache = batch.pop("decoder_input_ids"), None
    masks = [batch["attention_mask"]] * 3 + [torch.ones(3, 9).long()]
    with torch.no_grad():
        for step, mask in enumerate(masks):
            inputs = batch | {"attention_mask": mask, "decoder_input_ids": ids[:, step : step + 1]}
            result = model(**inputs, **with_cache(cache), use_cache=True)
            cache = get_cache(result)
            if step == 2:
                assert len(calls) == 2
    assert len(calls) == 4


def test_kernel_states_can_be_reordered_repeated_and_selected():
    model = BART.make_model("BartForCausalLM", attention_kernel="favor")
    ids = make_token_ids(3, 6)
    order = torch.tensor([2, 2, 0])
    with torch.no_grad():
        for change, rows in (
            (lambda cache: cache.reorder_cache(order), order),
            (lambda cache: cache.batch_select_indices(order[1:]), order[1:]),
            (lambda cache: cache.batch_repeat_interleave(2), torch.arange(3).repeat_interleave(2)),
        ):
            cache = get_cache(model(ids[:, :5], use_cache=True))
            change(cache)
            actual = model(ids[rows, 5:], **with_cache(cache), use_cache=True).logits
            expected = model(ids[rows], use_cache=False).logits[:, -1:]
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    cache.reset()
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        again = model(ids, **with_cache(cache), use_cache=True).logits
        torch.testing.assert_close(again, model(ids, use_cache=False).logits, atol=1e-5, rtol=0)


def test_unsupported_operations_on_kernel_states_raise_an_error():
    model = BART.make_model("BartForCausalLM", attention_kernel="elu")
    ids = make_token_ids(1, 4)
    cache = get_cache(model(ids, use_cache=True))
    with pytest.raises(ValueError, match="`crop` is not supported"):
        cache.crop(2)
    with pytest.raises(ValueError, match="`use_cache` must be False"):
        model(ids, use_cache=True, output_attentions=True)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(ids, assistant_model=BART.make_model("BartForCausalLM"), max_new_tokens=3)
    with pytest.raises(ValueError, match="`attention_kernel`"):
        model(ids, **with_cache(StaticCache(config=model.config, max_cache_len=8)))
    plain = get_cache(BART.make_model("BartForCausalLM")(ids, use_cache=True))
    with pytest.raises(ValueError, match="`attention_kernel`"):
        model(ids[:, :1], **with_cache(plain))
    assert not BART.make_model("BartForCausalLM")._is_stateful


@pytest.mark.parametrize("architecture", [BERT, BART], **NAMED)
@EVERY_KERNEL
def test_kernel_models_allocate_no_quadratic_tensor(architecture, kernel):
    n = 600
    fields = {"attention_kernel": kernel}
    if architecture is BART:
        fields = {f"{prefix}attention_kernel": kernel for prefix in ("", "encoder_", "cross_")}
    model = architecture.make_model(
        next(iter(architecture.heads)), "mqa", num_hidden_layers=1, max_position_embeddings=n, **fields
    )
    ids = make_token_ids(1, n)
    mask = (torch.arange(n) < n - 50).long()[None]
    with LargestTensor() as largest:
        model(input_ids=ids, attention_mask=mask).last_hidden_state.sum().backward()
    assert largest.numel < n * n


@EVERY_KERNEL
def test_kernel_parameters_are_saved_or_initialized(kernel, tmp_path):
    """Check that vectors are saved, or drawn from the seed per attention module if a checkpoint lacks them."""
    config = BERT.make_config("gqa", attention_kernel=kernel)
    torch.manual_seed(0)
    model = hf_attn_variants.AttnVariantBertModel(config).eval()
    save_and_load(model, tmp_path / "kernel", BERT.make_batch("BertModel"))
    plain = hf_attn_variants.AttnVariantBertModel(BERT.make_config("gqa"))
    plain.load_state_dict(model.state_dict(), strict=False)
    plain.save_pretrained(tmp_path / "plain")
    begun = hf_attn_variants.AttnVariantBertModel.from_pretrained(tmp_path / "plain", attention_kernel=kernel)
    for saved_item, new_item in zip(model.state_dict().items(), begun.state_dict().items(), strict=True):
        assert saved_item[0] == new_item[0] and saved_item[1].equal(new_item[1])
    if kernel in ("favor", "rfa"):
        vectors = [module.kernel_vectors for module in list_attentions(begun)]
        assert not vectors[0].equal(vectors[1])
        other_model = type(begun).from_pretrained(tmp_path / "plain", attention_kernel=kernel, attention_kernel_seed=1)
        assert not list_attentions(other_model)[0].kernel_vectors.equal(vectors[0])


@pytest.mark.parametrize("kernel", ["hedgehog", "rfa"])
def test_loading_with_another_kernel_keeps_learned_parameters(kernel, tmp_path):
    BERT.make_model("BertModel", attention_kernel=kernel).save_pretrained(tmp_path)
    load = hf_attn_variants.AttnVariantBertModel.from_pretrained
    for fields, message in (
        ({"attention_kernel": None}, f"`attention_kernel` must be '{kernel}' .* got None"),
        ({"attention_kernel_features": 7}, "`attention_kernel_features` must be None .* got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            load(tmp_path, **fields)
        with pytest.raises(ValueError, match=message):
            load(tmp_path, config=BERT.make_config("mha", **{"attention_kernel": kernel} | fields))


@EVERY_KERNEL
def test_every_kernel_parameter_gets_a_gradient(kernel):
    fields = {f"{prefix}attention_kernel": kernel for prefix in ("", "encoder_", "cross_")}
    model = BART.make_model("BartForConditionalGeneration", "gqa", **fields).train()
    batch = BART.make_batch("BartForConditionalGeneration", labels=True)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_layers(model)
        model.zero_grad()
        torch.manual_seed(0)
        model(**batch, use_cache=False).loss.backward()
        gradients.append({name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == {name for name, _ in model.named_parameters()}
    torch.testing.assert_close(*gradients)


@EVERY_KERNEL
def test_t5_with_sinusoidal_positions_and_kernel_generates_its_own_argmax(kernel):
    fields = {"position_embedding_type": "sinusoidal", "attention_kernel": kernel, "encoder_attention_kernel": kernel}
    model = T5.make_model("T5ForConditionalGeneration", "gqa", **fields)
    for beams in (1, 3):
        generate_with_each_cache(model, make_prompt(T5, "T5ForConditionalGeneration"), 11, num_beams=beams)


def test_kernels_with_other_implementations_raise_an_error():
    with pytest.raises(ValueError, match="attention_kernel"):
        BERT.make_model("BertModel", attention_kernel="elu").set_attn_implementation("flash_attention_2")
