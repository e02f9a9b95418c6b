"""Check the calibration of a Whisper on a folder of recordings: the files, the errors, and the quality."""

import importlib.util
import json
import re
import wave

import numpy as np
import pytest
import torch
from fixtures.speech import HEAD, make_feature_extractor, save_whisper_checkpoint, write_recordings
from relatives import WHISPER
from transformers import AutoFeatureExtractor, AutoTokenizer

from hf_attn_variants import AttnVariantWhisperForConditionalGeneration
from hf_attn_variants.cli import main
from hf_attn_variants.conversion import Calibration, convert, read_audio_calibration
from hf_attn_variants.conversion.calibration.batches import (
    get_generated_tokens,
    with_known_encoder_outputs,
    without_known_encoder_outputs,
)
from hf_attn_variants.conversion.calibration.examples import load_audio, make_audio_batches

SUPPRESSED = [1, 2]  # without padding and end tokens, a random model generates up to the limit


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_whisper_checkpoint(tmp_path_factory.mktemp("source") / "whisper", suppress_tokens=SUPPRESSED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_recordings(tmp_path_factory.mktemp("audio") / "recordings", 60, seconds=0.5)


@pytest.mark.thorough
def test_convert_command_calibrates_on_a_folder_of_recordings(source, folder, tmp_path):
    """Check that fitted heads and latents have smaller errors than averages, and that the folder is complete."""
    out = tmp_path / "out"
    main([
        "convert", "--model_name_or_path", str(source), "--num_key_value_heads", "4", "--cross_kv_lora_rank", "8",
        "--encoder_num_key_value_heads", "2", "--calibration_audio_dir", str(folder), "--calibration_size", "58",
        "--fit_steps", "40", "--output_dir", str(out),
    ])  # fmt: skip
    report = json.loads((out / "conversion_report.json").read_text())
    assert report["calibration"] | {"count": 58, "kind": "files of audio", "held_out": 14} == report["calibration"]
    details = [layer["details"] for layer in report["layers"]]
    assert all(item["output_relative_error"] < 0.5 * item["output_relative_error_averaged"] for item in details)
    # In Whisper, values have a bias and keys do not. Fitting must still improve some modules.
    assert sum(item["fit_kept"] for item in details) > 2
    model = AttnVariantWhisperForConditionalGeneration.from_pretrained(out)
    assert model.generation_config.suppress_tokens == SUPPRESSED
    assert AutoFeatureExtractor.from_pretrained(out).chunk_length == 1
    assert len(AutoTokenizer.from_pretrained(out)) == 60


@pytest.mark.thorough
def test_decoder_is_calibrated_on_generated_transcripts(source, folder):
    """Check the prompt of the generation configuration and the greedy tokens, in memory and from a folder."""
    model = AttnVariantWhisperForConditionalGeneration.from_pretrained(source).eval()
    calibration = read_audio_calibration(
        folder, feature_extractor=make_feature_extractor(), max_length=30, fit_steps=0
    )
    used, held_out = make_audio_batches(model, make_feature_extractor(), calibration, torch.Generator())
    assert sum(len(batch["input_features"]) for batch in held_out) == 15  # a quarter of the 60 recordings
    batch = used[0]
    with torch.no_grad():
        logits = model(**without_known_encoder_outputs(batch)).logits
        # The recorded encoder outputs equal those of a new call.
        torch.testing.assert_close(model(**with_known_encoder_outputs(batch)).logits, logits)
    assert batch["encoder_outputs"].shape == (len(logits), 20, 48)
    ids = batch["decoder_input_ids"]
    assert ids.shape[1] == 3 + 20 - 1  # a prompt of 3 tokens, and at most half of the 40 positions are generated
    assert set(ids[:, 0].tolist()) == {2} and set(ids[:, 1].tolist()) <= {30, 31} and set(ids[:, 2].tolist()) == {39}
    logits[..., SUPPRESSED] = -torch.inf
    assert torch.equal(logits[:, 2:-1].argmax(-1), ids[:, 3:])
    prompt = {*ids[:, :3].flatten().tolist(), 30, 31}
    written = [[token for token in row if token not in prompt] for row in ids[:, 3:].tolist()]
    assert get_generated_tokens(batch, model.generation_config) == written and any(written)
    fields = {"num_key_value_heads": 4, "encoder_kv_lora_rank": 16}
    in_memory = convert(model, calibration=calibration, **fields)
    from_folder = convert(source, calibration=calibration, **fields)
    for name, tensor in in_memory.state_dict().items():
        torch.testing.assert_close(tensor, from_folder.state_dict()[name], atol=1e-5, rtol=1e-4)


def test_conversion_without_recordings_warns_about_quality(source, caplog):
    convert(source, 4)
    assert "No calibration audio was provided" in caplog.text and "--calibration_audio_dir" in caplog.text
    assert "--calibration_file" not in caplog.text


def test_encoder_only_conversion_uses_recordings(folder):
    model = WHISPER.make_model("WhisperForAudioClassification")
    calibration = Calibration(audio=sorted(folder.glob("*")), feature_extractor=make_feature_extractor(), fit_steps=0)
    grouped = convert(model, encoder_num_key_value_heads=2, calibration=calibration).eval()
    averaged = convert(model, encoder_num_key_value_heads=2, method="mean").eval()
    features = make_feature_extractor()(load_audio(calibration.audio[0])[0], sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        expected, grouped_output, averaged_output = (item(**features).logits for item in (model, grouped, averaged))
    assert (grouped_output - expected).norm() < 0.5 * (averaged_output - expected).norm()


@pytest.mark.parametrize("width, channels", [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_audio_samples_equal_those_of_the_file(width, channels, tmp_path):
    samples = np.array([0.0, 0.5, -0.5, 0.25, -1.0])
    integers = np.round(samples * 2 ** (8 * width - 1)).astype("<i4")
    data = integers.view(np.uint8).reshape(-1, 4)[:, :width]
    if width == 1:
        data = (integers + 128).astype(np.uint8)[:, None]
    with wave.open(str(tmp_path / "x.wav"), "wb") as file:
        file.setparams((channels, width, 8000, len(samples), "NONE", "not compressed"))
        file.writeframes(np.repeat(data, channels, axis=0).tobytes())
    result, rate = load_audio(tmp_path / "x.wav")
    assert rate == 8000 and result.dtype == np.float32
    np.testing.assert_allclose(result, samples, atol=1e-7)


def test_other_audio_formats_need_a_package(folder, tmp_path):
    path = tmp_path / "x.flac"
    if importlib.util.find_spec("soundfile") is None:
        path.write_bytes(b"fLaC")
        with pytest.raises(ValueError, match=r"x\.flac is a \.flac file.*`pip install soundfile`"):
            load_audio(path)
        return
    import soundfile

    samples, rate = load_audio(folder / "0.wav")
    soundfile.write(path, samples, rate)
    np.testing.assert_allclose(load_audio(path)[0], samples, atol=2**-15)
    path.write_bytes(b"fLaC")
    with pytest.raises(ValueError, match="cannot be read"):
        load_audio(path)


def test_invalid_recordings_raise_an_error(source, folder, tmp_path, capsys):
    """Check that errors name the argument before any work."""
    other_rate = write_recordings(tmp_path / "other", 2, rate=8000)
    with pytest.raises(ValueError, match=r"16000 Hz, got 8000 Hz.*ffmpeg"):
        convert(source, 4, calibration=other_rate)
    with pytest.raises(ValueError, match=r"at least 100 tokens .* in 2 files"):
        convert(source, 4, calibration=write_recordings(tmp_path / "two", 2))
    with pytest.raises(ValueError, match=r"at least 2 audio files .* got 0"):
        read_audio_calibration(source)

    (tmp_path / "short.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"short\.wav is not a PCM WAV file \(it is truncated\)"):
        load_audio(tmp_path / "short.wav")

    with pytest.raises(ValueError, match="`audio`"):
        Calibration(["a text"], audio=["x.wav", "y.wav"])
    with pytest.raises(ValueError, match="`calibration`"):
        convert(source, 4, calibration=["a text", "another"])
    with pytest.raises(ValueError, match="feature_extractor=feature_extractor"):
        convert(WHISPER.make_model(HEAD), 4, calibration=folder)
    main([
        "convert", "--model_name_or_path", str(source), "--num_key_value_heads", "4", "--output_dir", "x",
        "--calibration_audio_dir", str(folder), "--calibration_file", "y",
    ])  # fmt: skip
    assert re.search("--calibration_file .*--calibration_audio_dir", capsys.readouterr().err)
