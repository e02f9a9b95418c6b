"""Check that Transformers' pipelines give the outputs of the model for saved variants."""

import numpy as np
import pytest
import torch
from fixtures.speech import save_whisper_checkpoint
from transformers import (
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    WhisperForConditionalGeneration,
    pipeline,
)

from hf_attn_variants import AttnVariantWhisperForConditionalGeneration

TEXTS = ["two dogs run in the snow", "a man is playing a guitar"]


def load(folder, auto_class):
    model = auto_class.from_pretrained(folder).eval()
    assert model.config.num_key_value_heads == 2 and type(model).__name__.startswith("AttnVariant")
    return model, AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def test_fill_mask_pipeline_equals_the_model(heads):
    model, tokenizer = load(heads["fill-mask"], AutoModelForMaskedLM)
    text = f"two {tokenizer.mask_token} run in the snow"
    result = pipeline("fill-mask", model=str(heads["fill-mask"]), top_k=3)(text)
    inputs = tokenizer(text, return_tensors="pt")
    logits = model(**inputs).logits[0, inputs.input_ids[0].tolist().index(tokenizer.mask_token_id)]
    scores, ids = logits.softmax(-1).topk(3)
    assert [item["token"] for item in result] == ids.tolist()
    assert [item["score"] for item in result] == pytest.approx(scores.tolist(), abs=1e-6)


@torch.no_grad()
def test_text_classification_pipeline_equals_the_model(heads):
    model, tokenizer = load(heads["text-classification"], AutoModelForSequenceClassification)
    classify = pipeline("text-classification", model=str(heads["text-classification"]), top_k=None)
    # Batches are padded, which must not change a score.
    for result, text in zip(classify(TEXTS, batch_size=2), TEXTS, strict=True):
        expected = model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0]
        scores = {item["label"]: item["score"] for item in result}
        assert scores == pytest.approx({model.config.id2label[i]: p.item() for i, p in enumerate(expected)}, abs=1e-5)


@torch.no_grad()
def test_token_classification_pipeline_equals_the_model(heads):
    model, tokenizer = load(heads["token-classification"], AutoModelForTokenClassification)
    result = pipeline("token-classification", model=str(heads["token-classification"]), ignore_labels=[])(TEXTS[0])
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    expected = model(**inputs).logits.softmax(-1)[0, 1:-1].max(-1)
    assert [item["word"] for item in result] == tokenizer.convert_ids_to_tokens(inputs.input_ids[0, 1:-1])
    assert [item["score"] for item in result] == pytest.approx(expected.values.tolist(), abs=1e-5)


@torch.no_grad()
def test_feature_extraction_pipeline_equals_the_model(heads):
    model, tokenizer = load(heads["feature-extraction"], AutoModel)
    extract = pipeline("feature-extraction", model=str(heads["feature-extraction"]), return_tensors=True)
    expected = model(**tokenizer(TEXTS[0], return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(extract(TEXTS[0]), expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_zero_shot_pipeline_equals_the_model(heads):
    model, tokenizer = load(heads["text-classification"], AutoModelForSequenceClassification)
    model.config.label2id = {"CONTRADICTION": 0, "ENTAILMENT": 1}
    model.config.id2label = {0: "CONTRADICTION", 1: "ENTAILMENT"}
    result = pipeline("zero-shot-classification", model=model, tokenizer=tokenizer)(TEXTS[0], ["dogs", "music"])
    entailed = [
        model(**tokenizer(TEXTS[0], f"This example is {label}.", return_tensors="pt")).logits[0, 1]
        for label in result["labels"]
    ]
    expected = torch.stack(entailed).softmax(-1)
    assert result["scores"] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("seconds, times", [(1, False), (1, "word"), (2.6, True)])
def test_speech_recognition_pipeline_equals_transformers(seconds, times, tmp_path):
    """Compare with Transformers' Whisper, also for long audio and with timestamps."""
    folder = save_whisper_checkpoint(tmp_path / "whisper", suppress_tokens=None if times else [*range(39, 60)])
    sound = np.random.default_rng(0).normal(0, 0.1, int(16000 * seconds)).astype(np.float32)
    parts = {
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "feature_extractor": AutoFeatureExtractor.from_pretrained(folder),
    }
    options = {"return_timestamps": times, "generate_kwargs": {"max_new_tokens": 8, "num_beams": 1}}
    result = []
    for model_class in (WhisperForConditionalGeneration, AttnVariantWhisperForConditionalGeneration):
        transcribe = pipeline("automatic-speech-recognition", model=model_class.from_pretrained(folder), **parts)
        result.append(transcribe(sound.copy(), **options))
    assert result[0] == result[1] and result[0]["text"]
    assert bool(times) is ("chunks" in result[0])
