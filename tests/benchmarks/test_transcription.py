"""Check the benchmark of Whisper's transcription time: the time of each engine, and whether the texts agree."""

import importlib
from pathlib import Path

import pytest
from fixtures.speech import save_whisper_checkpoint, write_recordings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    for name in ("packed_linear", "quantize"):
        monkeypatch.setattr(importlib.import_module(f"hf_attn_variants.quantization.{name}"), "MIN_WEIGHTS", 1)
    return importlib.import_module("benchmarks.speed.transcription")


@pytest.fixture
def options(tmp_path):
    source = save_whisper_checkpoint(tmp_path / "whisper", suppress_tokens=[1, 2])
    folder = write_recordings(tmp_path / "recordings", 2, seconds=0.5)
    result = ["--checkpoint", str(source), "--audio_dir", str(folder), "--batch_size", "2", "--num_threads", "1"]
    return [*result, "--max_new_tokens", "4", "--num_beams", "1", "2", "--rounds", "2", "--output_dir", str(tmp_path)]


def test_each_engine_has_rounds_and_texts(script, options):
    report = script.main(script.parse_args(options))
    for row, beams in zip(report["runs"], (1, 2), strict=True):
        assert row["num_beams"] == beams and len(row["tokens"]) == 2
        assert row["same_texts"]["share_memory"] == row["same_texts"]["transformers"] == 2
        assert {"int8", "share_memory, int8"} <= row["milliseconds"].keys() == row["same_texts"].keys()
        assert all(len(times) == 2 for times in row["all_milliseconds"].values())
    claims = importlib.import_module("benchmarks.speed_claims").iterate_claims("transcription_whisper_cpu", report)
    assert len(list(claims)) == 2 * (len(report["runs"][0]["milliseconds"]) - 1)


def test_invalid_inputs_raise_before_loading(script, options, tmp_path):
    with pytest.raises(SystemExit, match="has 2 recordings, but a batch needs 3"):
        script.main(script.parse_args([*options, "--batch_size", "3"]))
    with pytest.raises(SystemExit, match=r"--checkpoint .*"):
        script.main(script.parse_args([*options, "--checkpoint", str(tmp_path / "nothing")]))
    with pytest.raises(SystemExit, match="--engines 'int4' is not available; choose from share_memory; int8;"):
        script.main(script.parse_args([*options, "--engines", "int4"]))


def test_text_tokens_are_between_prompt_and_end(script):
    engines = object.__new__(script.Engines)
    engines.prompt, engines.end = [9, 8], 1
    assert engines.text_of([9, 8, 4, 5, 1, 1]) == engines.text_of([4, 5]) == [4, 5]
