"""Check Whisper's generation with each variant: languages, prompts, segments, word timestamps and beams."""

import pytest
import torch
import transformers
from fixtures.caches import get_cache
from fixtures.speech import (
    DECODINGS,
    HEAD,
    WINDOW,
    assert_same_transcripts,
    save_whisper_checkpoint,
    transcribe,
)
from packaging.version import Version
from relatives import WHISPER

from hf_attn_variants import (
    AttnVariantWhisperConfig,
    AttnVariantWhisperForCausalLM,
    AttnVariantWhisperForConditionalGeneration,
)

pytestmark = pytest.mark.cross_product

EXACT = dict.fromkeys(AttnVariantWhisperConfig.get_rank_fields(), 48)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_whisper_checkpoint(tmp_path_factory.mktemp("whisper"))


def load_variant(folder, **fields):
    return AttnVariantWhisperForConditionalGeneration.from_pretrained(folder, **fields).eval()


@pytest.mark.thorough
@pytest.mark.parametrize("decoding", DECODINGS)
def test_transcripts_equal_transformers(checkpoint, decoding):
    upstream = transformers.WhisperForConditionalGeneration.from_pretrained(checkpoint).eval()
    expected = transcribe(upstream, **DECODINGS[decoding])
    for fields in ({}, {"cross_kv_lora_rank": 48}, EXACT):
        assert_same_transcripts(transcribe(load_variant(checkpoint, **fields), **DECODINGS[decoding]), expected)


@pytest.mark.parametrize("decoding", [{}, {"num_beams": 3}, {"long": True}], ids=str)
def test_word_timestamps_equal_transformers(checkpoint, decoding):
    """Check word timestamps, which both forms of a latent compute from cross-attention weights."""
    options = decoding | {"return_token_timestamps": True, "return_timestamps": True}
    upstream = transformers.WhisperForConditionalGeneration.from_pretrained(checkpoint).eval()
    expected = transcribe(upstream, **options)
    for fields in ({}, EXACT):
        assert_same_transcripts(transcribe(load_variant(checkpoint, **fields), **options), expected)


KERNELS = [{"attention_kernel": "elu"}, {"attention_kernel": "hybrid", "attention_window": 4}]


@pytest.mark.parametrize("kernel", KERNELS, ids=["elu", "hybrid"])
@pytest.mark.parametrize("decoding", ["greedy", "beams"])
def test_kernel_decoder_returns_all_outputs(checkpoint, kernel, decoding):
    model = load_variant(checkpoint, **kernel)
    tokens = transcribe(model, **DECODINGS[decoding])
    outputs = transcribe(model, **DECODINGS[decoding], return_dict_in_generate=True, output_scores=True)
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
        assert_same_transcripts(
            load_variant(checkpoint, **fields).generate(features, max_new_tokens=8, assistant_model=assistant),
            expected,
        )


def test_beams_share_encoder_outputs(checkpoint):
    """Check rows per sentence. Whisper treats samples as sentences and encodes the audio for each of them."""
    for fields, layers in (({}, 2), (EXACT, 1)):
        model, caches = load_variant(checkpoint, **fields), []
        decoder = model.model.decoder
        decoder.register_forward_hook(lambda module, args, output, caches=caches: caches.append(get_cache(output)))
        for options, rows in (({"num_beams": 3}, 2), (DECODINGS["samples"], 4)):
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
    """Check both implementations, and a search with projections that start as the identity."""
    fields = {"encoder_attention_heads": 12, "talking_heads": "both"}
    model, batch = WHISPER.make_model(HEAD, "gqa", **fields), WHISPER.make_batch(HEAD)
    with torch.no_grad():
        expected = model(**batch).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=0)
    upstream = WHISPER.make_upstream_model(HEAD, encoder_attention_heads=12)
    expected = transcribe(upstream, num_beams=3)
    variant_model = type(model)(WHISPER.make_config(**fields)).eval()
    variant_model.load_state_dict(upstream.state_dict(), strict=False)
    assert torch.equal(transcribe(variant_model, num_beams=3), expected)
