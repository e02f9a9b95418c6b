"""Check word error rates: the counted differences, and the script on a tiny Whisper."""

import importlib
import json
from pathlib import Path

import pytest
from fixtures.speech import save_whisper_checkpoint, write_recordings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.convert.word_errors")


def test_words_are_compared_without_case_and_punctuation(script):
    result = script.compute_word_error_rate(["He said: yes, indeed.", "Don't go"], ["he said yes", "don't go now"])
    assert result["words"] == 6 and result["recordings"] == 2
    assert result["word_error_rate"] == pytest.approx(2 / 6, abs=1e-4)
    low, high = result["interval"]
    assert low <= 2 / 6 <= high


def test_model_compared_with_itself_has_no_word_errors(script, tmp_path, capsys):
    source = save_whisper_checkpoint(tmp_path / "whisper", suppress_tokens=[1, 2])
    folder = write_recordings(tmp_path / "recordings", 3, seconds=0.5)
    table = tmp_path / "texts.tsv"
    table.write_text("file\ttext\n" + "".join(f"{path.name}\ta word\n" for path in folder.glob("*.wav")))
    report = script.main(script.parse_args([
        "--source", str(source), "--converted", str(source), "--audio_dir", str(folder), "--texts", str(table),
        "--max_new_tokens", "4",
    ]))  # fmt: skip
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
def test_words_of_other_scripts_are_split(script, text, words):
    result = script.split_words(text)
    assert (len(result) if isinstance(words, int) else result) == words


def test_timestamps_are_compared_for_common_tokens(script):
    source = [script.Transcript("", [5, 6, 7], [0.0, 1.0, 2.0])]
    converted = [script.Transcript("", [5, 9, 7], [0.5, 1.0, 2.0])]
    assert script.compare_times(source, source)["shift_of_95_percent"] == 0
    assert script.compare_times(source, converted) == {
        "tokens": 2,
        "median_shift": 0.25,
        "shift_of_95_percent": 0.5,
    }
    assert script.compare_times(source, [script.Transcript("", [1], [0.0])])["tokens"] == 0
