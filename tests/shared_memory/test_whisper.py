"""Check Whisper's generation with shared memory: segments, word timestamps, returned caches and pipelines."""

import pytest
import torch
import transformers
from fixtures.caches import get_cache
from fixtures.speech import DECODINGS, assert_same_transcripts, save_whisper_checkpoint, transcribe

from hf_attn_variants import share_memory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_whisper_checkpoint(tmp_path_factory.mktemp("whisper"))


def load_model(folder, **options):
    return transformers.WhisperForConditionalGeneration.from_pretrained(folder, **options).eval()


@pytest.mark.thorough
@pytest.mark.parametrize("decoding", DECODINGS)
def test_sharing_whisper_transcripts_equal_transformers(checkpoint, decoding, form):
    expected = transcribe(load_model(checkpoint), **DECODINGS[decoding])
    assert_same_transcripts(transcribe(share_memory(load_model(checkpoint)), **DECODINGS[decoding]), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("decoding", [{}, {"num_beams": 3}, {"long": True}], ids=str)
def test_sharing_whisper_word_timestamps_equal_transformers(checkpoint, decoding, form):
    options = decoding | {"return_token_timestamps": True, "return_timestamps": True}
    models = (load_model(checkpoint, attn_implementation="eager") for _ in range(2))
    expected = transcribe(next(models), **options)
    assert_same_transcripts(transcribe(share_memory(next(models)), **options), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("decoding", ["greedy", "beams", "samples"])
def test_returned_dictionary_contains_the_cache(checkpoint, decoding, form):
    """Check the cache that Whisper splits by batch row and layer, and joins again."""
    options = DECODINGS[decoding] | {
        "return_dict_in_generate": True,
        "output_scores": True,
        "force_unique_generate_call": True,
    }
    models = load_model(checkpoint), share_memory(load_model(checkpoint))
    expected, actual = (transcribe(model, **options) for model in models)
    assert_same_transcripts(actual["sequences"], expected["sequences"])
    options.pop("force_unique_generate_call")
    expected, actual = (transcribe(model, **options) for model in models)
    if not isinstance(expected, torch.Tensor):
        assert_same_transcripts(actual["sequences"], expected["sequences"])
        actual_layers, expected_layers = (get_cache(item).cross_attention_cache.layers for item in (actual, expected))
        for layer, expected_layer in zip(actual_layers, expected_layers, strict=True):
            assert layer.keys.shape == expected_layer.keys.shape
            if decoding != "beams":  # with beams, Transformers returns only rows of the first sentence
                torch.testing.assert_close(layer.keys, expected_layer.keys, atol=1e-5, rtol=1e-5)


def test_sharing_whisper_works_in_a_pipeline(checkpoint):
    import numpy as np

    transcripts = []
    for share in (False, True):
        model = load_model(checkpoint)
        pipeline = transformers.pipeline(
            "automatic-speech-recognition",
            model=share_memory(model) if share else model,
            tokenizer=transformers.AutoTokenizer.from_pretrained(checkpoint),
            feature_extractor=transformers.AutoFeatureExtractor.from_pretrained(checkpoint),
        )
        sound = np.random.default_rng(0).normal(size=16000).astype(np.float32)
        transcripts.append(pipeline(sound, generate_kwargs={"max_new_tokens": 8, "num_beams": 2})["text"])
    assert transcripts[0] == transcripts[1]
