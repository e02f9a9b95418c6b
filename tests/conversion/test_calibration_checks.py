"""Check the warnings about too little calibration text, or text of another kind than the model's."""

import random
import wave

import numpy as np
import pytest
import torch
from fixtures.speech import HEAD, make_feature_extractor, save_whisper_checkpoint

from hf_attn_variants.conversion import Calibration, convert
from hf_attn_variants.conversion.calibration.batches import (
    check_audio,
    check_source_loss,
    check_texts,
    check_token_count,
)

SYLLABLES = ["ba", "de", "ki", "lo", "mu", "na", "po", "re", "su", "ti"]
# As in real languages, few words are frequent and most are rare.
WORDS = [a + b for a in SYLLABLES for b in SYLLABLES] + [
    a + b + c for a in SYLLABLES for b in SYLLABLES for c in "nst"
]


class Tokenizer:
    """A tokenizer with one token per known word, and one per character of unknown words."""

    all_special_ids, unk_token_id = [0, 1, 2], 2
    numbers = {word: 10 + i for i, word in enumerate(WORDS)}

    def encode(self, text):
        rows = [
            [self.numbers[word]] if word in self.numbers else [500 + ord(c) for c in word] for word in text.split()
        ]
        return [0, *(token for row in rows for token in row), 1]

    def __call__(self, texts, truncation=True, max_length=64):
        return {"input_ids": list(map(self.encode, texts))}


def make_language(count=200, seed=0):
    generator = random.Random(seed)
    weights = [1 / (1 + i) for i in range(len(WORDS))]
    return [" ".join(generator.choices(WORDS, weights, k=12)) for _ in range(count)]


def get_logged_warnings(caplog, texts, encoded=None):
    caplog.clear()
    tokenizer = Tokenizer()
    joined = [text if isinstance(text, str) else " ".join(text) for text in texts]
    rows = [tokenizer.encode(text) for text in joined] if encoded is None else encoded
    check_texts(tokenizer, texts, rows)
    return caplog.text


def test_text_of_the_language_gives_no_warning(caplog):
    assert get_logged_warnings(caplog, make_language()) == ""
    assert get_logged_warnings(caplog, list(zip(make_language(), make_language(seed=1), strict=True))) == ""


def test_text_of_another_language_gives_a_warning(caplog):
    other = ["".join(reversed(text)) for text in make_language()]
    assert "splits words in the calibration texts into" in get_logged_warnings(caplog, other)
    # Formulas contain no words that a tokenizer could split.
    assert get_logged_warnings(caplog, [text.replace(" ", "=") for text in other]) == ""


def test_code_identifiers_in_text_give_no_warning(caplog):
    names = ["get_attn_mask()", "config.num_heads", "`BertModel`", "v5.24.0", "--max_length=64", "readFile"]
    texts = [f"{text} {' '.join(names)}" for text in make_language()]
    assert get_logged_warnings(caplog, texts) == ""


def test_repeated_or_unknown_text_gives_a_warning(caplog):
    targets = list(map(str, range(200)))
    repeated = Calibration(make_language(50) * 4, targets)
    assert (repeated.texts, repeated.target_texts) == (make_language(50), targets[:50])
    assert "Only 50 of the 200 calibration texts are different" in caplog.text
    rows = [[0, 2, 2, *Tokenizer().encode(text)] for text in make_language()]
    assert "unknown to the tokenizer" in get_logged_warnings(caplog, make_language(), rows)
    with pytest.raises(ValueError, match="100% of the calibration tokens are unknown to the tokenizer"):
        get_logged_warnings(caplog, make_language(), [[2] * 12] * 200)
    with pytest.raises(ValueError, match="100% of the calibration tokens are unknown to the tokenizer"):
        get_logged_warnings(caplog, make_language(20), [[0, 2, 1]] * 20)


def test_source_with_chance_level_predictions_gives_a_warning(caplog):
    check_source_loss(2.0, 30522)
    check_source_loss(None, 30522)
    assert caplog.text == ""
    check_source_loss(6.0, 30522)
    assert "loss of 6.0 nats" in caplog.text


@pytest.mark.parametrize(("stack", "tokens"), [("encoder", 512), ("decoder", 128)])
def test_too_few_tokens_warning_states_the_needed_number(caplog, stack, tokens):
    batch = {"attention_mask": torch.ones(8, 64), "decoder_attention_mask": torch.ones(8, 16)}
    check_token_count([stack], tokens // 8, [batch])
    assert caplog.text == ""
    check_token_count([stack, stack], tokens // 4, [batch])
    assert f"Calibrating the {stack} requires at least {2 * tokens} tokens" in caplog.text
    assert f"got {tokens} tokens in 8 examples" in caplog.text
    assert caplog.text.count("Provide about 16 such examples") == 1
    caplog.clear()
    check_token_count([stack], 10**6, [{"input_features": torch.ones(1, 80, 3000)}])  # audio for an encoder
    assert caplog.text == ""


def test_silent_or_wordless_recordings_give_a_warning(caplog):
    loud = [0.1, 0.2, 0.1, 0.3]
    check_audio(loud, [[5, 6]] * 4)
    check_audio(loud, [])
    assert caplog.text == ""
    check_audio([0.0, 1e-5, 0.2, 0.1], [])
    assert "2 of the 4 recordings are silent" in caplog.text
    caplog.clear()
    check_audio(loud, [[5, 6], [], [], []])
    assert "recognizes no words in 3 of the 4" in caplog.text


@pytest.mark.thorough
def test_folder_of_silent_recordings_gives_a_warning(tmp_path, caplog):
    source = save_whisper_checkpoint(tmp_path / "whisper", suppress_tokens=[1, 2])
    for number in range(60):
        with wave.open(str(tmp_path / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, make_feature_extractor().sampling_rate, 8000, "NONE", "not compressed"))
            file.writeframes(np.zeros(8000, "<i2").tobytes())
    model = convert(source, 4, calibration=tmp_path)
    assert "60 of the 60 recordings are silent" in caplog.text and type(model).__name__ == f"AttnVariant{HEAD}"
