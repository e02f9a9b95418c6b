"""Check Whisper's generation with each variant: languages, prompts, segments, word timestamps and beams."""

import pytest
import torch
import transformers
from fixtures.caches import get_cache
from fixtures.speech import HEAD, TIMES, WINDOW, save_whisper_checkpoint
from packaging.version import Version
from relatives import WHISPER

from hf_attn_variants import (
    AttnVariantWhisperConfig,
    AttnVariantWhisperForCausalLM,
    AttnVariantWhisperForConditionalGeneration,
)

pytestmark = pytest.mark.cross_product

EXACT = dict.fromkeys(AttnVariantWhisperConfig.get_rank_fields(), 48)
# With these thresholds, Whisper decodes two of three segments again.
FALLBACK = {"temperature": (0.0, 0.6), "logprob_threshold": -1.2, "compression_ratio_threshold": 0.7}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "temperature": 0.9, "num_return_sequences": 2},
    "static": {"cache_implementation": "static", "num_beams": 2},
    "prompt": {"prompt_ids": torch.tensor([38, 11, 12])},
    "times": {"return_timestamps": True},
    "long": {"long": True, "return_timestamps": True, **FALLBACK, "no_speech_threshold": 0.9},
    "long without speech": {"long": True, "return_timestamps": True, **FALLBACK, "no_speech_threshold": 1e-3},
    "long after the last segment": {"long": True, "return_timestamps": True, "condition_on_prev_tokens": True},
    "long by beams": {"long": True, "return_timestamps": True, "num_beams": 3},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_whisper_checkpoint(tmp_path_factory.mktemp("whisper"))


def load_variant(folder, **fields):
    return AttnVariantWhisperForConditionalGeneration.from_pretrained(folder, **fields).eval()


def transcribe(model, long=False, **options):
    torch.manual_seed(1)
    frames = 3 * WINDOW - 7 if long else WINDOW
    batch = {"input_features": torch.randn(2, 8, frames)}
    if long:  # the second audio ends before the first one
        batch["attention_mask"] = (torch.arange(frames) < torch.tensor([frames, WINDOW + 9])[:, None]).long()
    # Suppress timestamps unless they are requested, because Whisper starts again at a timestamp of zero.
    if not options.get("return_timestamps"):
        options["suppress_tokens"] = list(range(TIMES["no_timestamps_token_id"], 60))
    return model.generate(**batch, max_new_tokens=8, return_segments=long, **options)


def assert_same(actual, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected.keys() - {"result"}:
            assert_same(actual[name], expected[name])
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for pair in zip(actual, expected, strict=True):
            assert_same(*pair)
    else:
        assert actual == expected


@pytest.mark.thorough
@pytest.mark.parametrize("decoding", WAYS)
def test_transcripts_equal_transformers(checkpoint, decoding):
    upstream = transformers.WhisperForConditionalGeneration.from_pretrained(checkpoint).eval()
    expected = transcribe(upstream, **WAYS[decoding])
    for fields in ({}, {"cross_kv_lora_rank": 48}, EXACT):
        assert_same(transcribe(load_variant(checkpoint, **fields), **WAYS[decoding]), expected)


@pytest.mark.parametrize("decoding", [{}, {"num_beams": 3}, {"long": True}], ids=str)
def test_word_timestamps_equal_transformers(checkpoint, decoding):
    """Check word timestamps, which both forms of a latent compute from cross-attention weights."""
    options = decoding | {"return_token_timestamps": True, "return_timestamps": True}
    upstream = transformers.WhisperForConditionalGeneration.from_pretrained(checkpoint).eval()
    expected = transcribe(upstream, **options)
    for fields in ({}, EXACT):
        assert_same(transcribe(load_variant(checkpoint, **fields), **options), expected)


KERNELS = [{"attention_kernel": "elu"}, {"attention_kernel": "hybrid", "attention_window": 4}]


@pytest.mark.parametrize("kernel", KERNELS, ids=["elu", "hybrid"])
@pytest.mark.parametrize("decoding", ["greedy", "beams"])
def test_kernel_decoder_returns_all_outputs(checkpoint, kernel, decoding):
    model = load_variant(checkpoint, **kernel)
    tokens = transcribe(model, **WAYS[decoding])
    outputs = transcribe(model, **WAYS[decoding], return_dict_in_generate=True, output_scores=True)
    assert torch.equal(outputs["sequences"][:, -tokens.shape[1] :], tokens)
    assert len(outputs["scores"]) >= tokens.shape[1]


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"), reason="requires Transformers 5.17 for WhisperForCausalLM"
)
def test_variant_can_be_an_assistant_model(checkpoint):
    """Check an assistant with only a decoder, which uses the encoder outputs of the assisted model."""
    upstream = transformers.WhisperForConditionalGeneration.from_pretrained(checkpoint).eval()
    features = WHISPER.make_batch(HEAD)["input_features"][:1]
    expected = upstream.generate(features, max_new_tokens=8)
    for fields in ({}, {"cross_kv_lora_rank": 48}):
        assistant = AttnVariantWhisperForCausalLM.from_pretrained(checkpoint, **fields).eval()
        assert_same(
            load_variant(checkpoint, **fields).generate(features, max_new_tokens=8, assistant_model=assistant),
            expected,
        )


def test_beams_share_encoder_outputs(checkpoint):
    """Check rows per sentence. Whisper treats samples as sentences and encodes the audio for each of them."""
    for fields, layers in (({}, 2), (EXACT, 1)):
        model, caches = load_variant(checkpoint, **fields), []
        decoder = model.model.decoder
        decoder.register_forward_hook(lambda module, args, output, caches=caches: caches.append(get_cache(output)))
        for options, rows in (({"num_beams": 3}, 2), (WAYS["samples"], 4)):
            transcribe(model, **options)
            cross = caches[-1].cross_attention_cache.layers
            assert {layer.keys.shape[0] for layer in cross} == {rows}
            assert len({layer.keys.untyped_storage().data_ptr() for layer in cross}) == layers


@pytest.mark.parametrize(
    "fields, numbers",
    [
        ({}, 2 * 2 * 48),
        ({"num_key_value_heads": 3}, 2 * 2 * 3 * 4),
        ({"cross_kv_lora_rank": 48}, 48),
        ({"cross_kv_lora_rank": 6}, 6),
    ],
    ids=str,
)
def test_cache_size_per_audio_position_is_counted(fields, numbers):
    """Check keys and values of two layers, or one latent for both."""
    batch = WHISPER.make_batch(HEAD)
    with torch.no_grad():
        cache = get_cache(WHISPER.make_model(HEAD, **fields)(**batch, use_cache=True)).cross_attention_cache
    storages = [item.untyped_storage() for layer in cache.layers for item in (layer.keys, layer.values)]
    num_bytes = sum({item.data_ptr(): item.nbytes() for item in storages}.values())
    assert num_bytes == len(batch["input_features"]) * WINDOW // 2 * numbers * 4


def test_whisper_supports_talking_heads():
    """Check identity projections, and for random ones, both implementations and decoding with a cache."""
    fields = {"encoder_attention_heads": 12, "talking_heads": "both"}
    model = WHISPER.make_model(HEAD, "gqa", **fields)
    plain = WHISPER.make_model(HEAD, "gqa", encoder_attention_heads=12)
    plain.load_state_dict(model.state_dict(), strict=False)
    identity = type(model)(model.config).eval()
    identity.load_state_dict(plain.state_dict(), strict=False)
    batch = WHISPER.make_batch(HEAD)
    with torch.no_grad():
        torch.testing.assert_close(identity(**batch).logits, plain(**batch).logits, atol=1e-5, rtol=0)
        full_output = model(**batch, use_cache=False).logits
        assert (full_output - plain(**batch).logits).abs().max() > 1e-2
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(**batch).logits, full_output, atol=1e-5, rtol=0)
    upstream = WHISPER.make_upstream_model(HEAD, encoder_attention_heads=12)
    expected = transcribe(upstream, num_beams=3)
    variant_model = type(model)(WHISPER.make_config(encoder_attention_heads=12, talking_heads="both")).eval()
    variant_model.load_state_dict(upstream.state_dict(), strict=False)
    assert torch.equal(transcribe(variant_model, num_beams=3), expected)
