"""Check the benchmark of Whisper's transcription time: the time of each engine, and whether the texts agree."""

import pytest
from fixtures.commands import run_command
from fixtures.speech import save_whisper_checkpoint, write_recordings

from benchmarks import speed_claims
from benchmarks.speed import transcription


@pytest.fixture
def options(tmp_path):
    source = save_whisper_checkpoint(tmp_path / "whisper", suppress_tokens=[1, 2])
    folder = write_recordings(tmp_path / "recordings", 2, seconds=0.5)
    result = ["--checkpoint", str(source), "--audio_dir", str(folder), "--batch_size", "2", "--num_threads", "1"]
    return [*result, "--max_new_tokens", "4", "--num_beams", "1", "2", "--rounds", "2", "--output_dir", str(tmp_path)]


@pytest.mark.usefixtures("small_maps")
def test_each_engine_has_rounds_and_texts(options):
    report = run_command(transcription, *options)
    for row, beams in zip(report["runs"], (1, 2), strict=True):
        assert row["num_beams"] == beams and len(row["tokens"]) == 2
        assert row["same_texts"]["share_memory"] == row["same_texts"]["transformers"] == 2
        assert {"int8", "share_memory, int8"} <= row["milliseconds"].keys() == row["same_texts"].keys()
        assert all(len(times) == 2 for times in row["all_milliseconds"].values())
    claims = speed_claims.iterate_claims("transcription_whisper_cpu", report)
    assert len(list(claims)) == 2 * (len(report["runs"][0]["milliseconds"]) - 1)


def test_invalid_inputs_raise_before_loading(options, tmp_path):
    with pytest.raises(SystemExit, match="has 2 recordings, but a batch needs 3"):
        run_command(transcription, *options, "--batch_size", "3")
    with pytest.raises(SystemExit, match=r"--checkpoint .*"):
        run_command(transcription, *options, "--checkpoint", tmp_path / "nothing")
    with pytest.raises(SystemExit, match="--engines 'int4' is not available; choose from share_memory; int8;"):
        run_command(transcription, *options, "--engines", "int4")


def test_text_tokens_are_between_prompt_and_end():
    engines = object.__new__(transcription.Engines)
    engines.prompt, engines.end = [9, 8], 1
    assert engines.text_of([9, 8, 4, 5, 1, 1]) == engines.text_of([4, 5]) == [4, 5]
