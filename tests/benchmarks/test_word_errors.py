"""Check word error rates: the counted differences, and the script on a tiny Whisper."""

import json

import pytest
from fixtures.commands import run_command
from fixtures.speech import save_whisper_checkpoint, write_recordings

from benchmarks.convert import word_errors


def test_words_are_compared_without_case_and_punctuation():
    result = word_errors.compute_word_error_rate(
        ["He said: yes, indeed.", "Don't go"], ["he said yes", "don't go now"]
    )
    assert result["words"] == 6 and result["recordings"] == 2
    assert result["word_error_rate"] == pytest.approx(2 / 6, abs=1e-4)
    low, high = result["interval"]
    assert low <= 2 / 6 <= high


def test_model_compared_with_itself_has_no_word_errors(tmp_path, capsys):
    source = save_whisper_checkpoint(tmp_path / "whisper", suppress_tokens=[1, 2])
    folder = write_recordings(tmp_path / "recordings", 3, seconds=0.5)
    table = tmp_path / "texts.tsv"
    table.write_text("file\ttext\n" + "".join(f"{path.name}\ta word\n" for path in folder.glob("*.wav")))
    flags = ["--source", source, "--converted", source, "--audio_dir", folder, "--texts", table]
    report = run_command(word_errors, *flags, "--max_new_tokens", 4)
    assert [row["against_source"]["word_error_rate"] for row in report["rows"]] == [0.0, 0.0]
    assert report["rows"][1]["against_texts"]["words"] == 6
    assert json.loads(capsys.readouterr().out.splitlines()[0])["model"] == "whisper"


@pytest.mark.parametrize(
    "text, words",
    [
        ("one, two", ["one", "two"]),
        (
            "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e\u0964",
            2,
        ),  # Hindi: vowel signs do not separate words
        ("\u3053\u3093\u306b\u3061\u306f\u3001\u4e16\u754c", 7),  # Japanese: by characters
        ("e\u0301te\u0301", ["\u00e9t\u00e9"]),  # one form of accents
    ],
)
def test_words_of_other_scripts_are_split(text, words):
    result = word_errors.split_words(text)
    assert (len(result) if isinstance(words, int) else result) == words


def test_timestamps_are_compared_for_common_tokens():
    source = [word_errors.Transcript("", [5, 6, 7], [0.0, 1.0, 2.0])]
    converted = [word_errors.Transcript("", [5, 9, 7], [0.5, 1.0, 2.0])]
    assert word_errors.compare_times(source, source)["shift_of_95_percent"] == 0
    assert word_errors.compare_times(source, converted) == {
        "tokens": 2,
        "median_shift": 0.25,
        "shift_of_95_percent": 0.5,
    }
    assert word_errors.compare_times(source, [word_errors.Transcript("", [1], [0.0])])["tokens"] == 0
