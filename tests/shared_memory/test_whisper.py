"""Check Whisper's generation with shared memory: segments, word timestamps, returned caches and pipelines."""

import pytest
import torch
import transformers
from fixtures.caches import get_cache
from fixtures.speech import TIMES, WINDOW, save_whisper_checkpoint

from hf_attn_variants import share_memory

FALLBACK = {"temperature": (0.0, 0.6), "logprob_threshold": -1.2, "compression_ratio_threshold": 0.7}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "temperature": 0.9, "num_return_sequences": 2},
    "static": {"cache_implementation": "static", "num_beams": 2},
    "prompt": {"prompt_ids": torch.tensor([38, 11, 12])},
    "times": {"return_timestamps": True},
    "long": {"long": True, "return_timestamps": True, **FALLBACK, "no_speech_threshold": 0.9},
    "long by beams": {"long": True, "return_timestamps": True, "num_beams": 3},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_whisper_checkpoint(tmp_path_factory.mktemp("whisper"))


def load_model(folder, **options):
    return transformers.WhisperForConditionalGeneration.from_pretrained(folder, **options).eval()


def transcribe(model, long=False, **options):
    torch.manual_seed(1)
    frames = 3 * WINDOW - 7 if long else WINDOW
    batch = {"input_features": torch.randn(2, 8, frames)}
    if long:
        batch["attention_mask"] = (torch.arange(frames) < torch.tensor([frames, WINDOW + 9])[:, None]).long()
    if not options.get("return_timestamps"):
        options["suppress_tokens"] = list(range(TIMES["no_timestamps_token_id"], 60))
    return model.generate(**batch, max_new_tokens=8, return_segments=long, **options)


def assert_same(actual, expected):
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected.keys() - {"result"}:
            assert_same(actual[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for pair in zip(actual, expected, strict=True):
            assert_same(*pair)
    else:
        assert actual == expected


@pytest.mark.thorough
@pytest.mark.parametrize("decoding", WAYS)
def test_sharing_whisper_transcripts_equal_transformers(checkpoint, decoding, form):
    expected = transcribe(load_model(checkpoint), **WAYS[decoding])
    assert_same(transcribe(share_memory(load_model(checkpoint)), **WAYS[decoding]), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("decoding", [{}, {"num_beams": 3}, {"long": True}], ids=str)
def test_sharing_whisper_word_timestamps_equal_transformers(checkpoint, decoding, form):
    options = decoding | {"return_token_timestamps": True, "return_timestamps": True}
    models = (load_model(checkpoint, attn_implementation="eager") for _ in range(2))
    expected = transcribe(next(models), **options)
    assert_same(transcribe(share_memory(next(models)), **options), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("decoding", ["greedy", "beams", "samples"])
def test_returned_dictionary_contains_the_cache(checkpoint, decoding, form):
    """Check the cache that Whisper splits by batch row and layer, and joins again."""
    options = WAYS[decoding] | {
        "return_dict_in_generate": True,
        "output_scores": True,
        "force_unique_generate_call": True,
    }
    expected, actual = (
        transcribe(item, **options) for item in (load_model(checkpoint), share_memory(load_model(checkpoint)))
    )
    assert_same(actual["sequences"], expected["sequences"])
    options.pop("force_unique_generate_call")
    expected, actual = (
        transcribe(item, **options) for item in (load_model(checkpoint), share_memory(load_model(checkpoint)))
    )
    if not isinstance(expected, torch.Tensor):
        assert_same(actual["sequences"], expected["sequences"])
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
        transcribe = transformers.pipeline(
            "automatic-speech-recognition",
            model=share_memory(model) if share else model,
            tokenizer=transformers.AutoTokenizer.from_pretrained(checkpoint),
            feature_extractor=transformers.AutoFeatureExtractor.from_pretrained(checkpoint),
        )
        sound = np.random.default_rng(0).normal(size=16000).astype(np.float32)
        transcripts.append(transcribe(sound, generate_kwargs={"max_new_tokens": 8, "num_beams": 2})["text"])
    assert transcripts[0] == transcripts[1]
