"""Check invalid checkpoints, arguments and environments: a one-line error, status 2, and no lost results."""

import json
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from fixtures.data_files import edit_json
from fixtures.glue.tiny_bert import make_tiny_bert
from fixtures.speech import save_whisper_checkpoint, write_recordings
from fixtures.tiny_t5 import make_lines_of_words, make_tiny_t5
from safetensors.torch import load_file, save_file

from hf_attn_variants import cli, files
from hf_attn_variants.conversion import Calibration, convert
from hf_attn_variants.errors import run_script
from hf_attn_variants.files import is_unicode
from hf_attn_variants.inspection import frontier
from hf_attn_variants.modeling.architectures.configuration_attn_variants import AttnVariantT5Config

REPOSITORY = Path(__file__).parents[2]
KEY = "encoder.layer.0.attention.self.key.weight"
TAGGED = "Ann B-PER\nsleeps O\n\n" * 6


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    (folder / "text.txt").write_text("\n".join(make_lines_of_words(80)) + "\n")
    (folder / "words.txt").write_text(TAGGED)
    return {"bert": make_tiny_bert(folder / "bert"), "t5": make_tiny_t5(folder), "text": folder / "text.txt"}


@pytest.fixture
def bert(sources, tmp_path):
    return shutil.copytree(sources["bert"], tmp_path / "bert")


def run(capsys, *argv):
    """Return the exit status and the lines of the error."""
    capsys.readouterr()
    status = cli.main([str(item) for item in argv])
    return status, [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error", "Traceback"))]


def read_single_line(capsys, *argv):
    status, lines = run(capsys, *argv)
    assert status == 2 and len(lines) == 1 and lines[0].startswith("error: "), (status, lines)
    return lines[0]


def iterate_conversion_commands(source, out, text):
    yield ["convert", source, "--output_dir", out, "--num_key_value_heads", 2, "--method", "mean"]
    yield ["convert", source, "--output_dir", out, "--kv_lora_rank", 4, "--method", "mean"]
    yield ["convert", source, "--output_dir", out, "--num_key_value_heads", 2, "--calibration_file", text]
    yield ["convert", source, "--output_dir", out, "--talking_heads", "both"]
    yield ["frontier", source, "--output_dir", out, "--num_key_value_heads", 2, "--calibration_file", text]


@pytest.mark.parametrize(
    ("number", "dtype"), [(float("nan"), None), (float("-inf"), None), (float("nan"), "bfloat16")]
)
@pytest.mark.parametrize("name", [KEY, "embeddings.word_embeddings.weight"])
def test_nonfinite_tensor_error_names_the_tensor(bert, sources, tmp_path, capsys, number, dtype, name):
    tensors = load_file(bert / "model.safetensors")
    tensors[name].view(-1)[3] = number
    tensors = {key: item.to(getattr(torch, dtype or "float32")) for key, item in tensors.items()}
    save_file(tensors, bert / "model.safetensors", {"format": "pt"})
    for argv in iterate_conversion_commands(bert, tmp_path / "out", sources["text"]):
        line = read_single_line(capsys, *argv)
        assert name in line and ("NaN" if number != number else "infinite") in line
        assert not (tmp_path / "out").exists()


def test_nonfinite_tensor_in_memory_error_names_the_tensor(bert):
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(bert)
    model.get_parameter(KEY).data[0, 0] = torch.inf
    calibration = Calibration(make_lines_of_words(9), tokenizer=AutoTokenizer.from_pretrained(bert))
    for options in ({"method": "mean"}, {"calibration": calibration}):
        with pytest.raises(ValueError, match=f"'{KEY}' .*must be finite"):
            convert(model, 2, **options)


def test_too_large_weights_error_names_the_tensor(bert, sources, tmp_path, capsys):
    tensors = load_file(bert / "model.safetensors")
    tensors[KEY][:] = 1e30
    save_file(tensors, bert / "model.safetensors", {"format": "pt"})
    *_, calibrated, _, frontier = iterate_conversion_commands(bert, tmp_path / "out", sources["text"])
    for argv in (calibrated, frontier):
        assert "'encoder.layer.0.attention' cannot be fitted" in read_single_line(capsys, *argv)


@pytest.mark.parametrize("change", [float, str, bool, lambda x: [x]])
def test_safetensors_offsets_must_be_integers(bert, sources, tmp_path, capsys, change):
    path = bert / "model.safetensors"
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [change(item) for item in entry["data_offsets"]]
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + raw[8 + length :])
    for argv in iterate_conversion_commands(bert, tmp_path / "out", sources["text"]):
        assert str(bert) in read_single_line(capsys, *argv)


@pytest.mark.parametrize("field", ["vocab_size", "max_position_embeddings"])
def test_config_sizes_that_differ_from_the_weights_raise_an_error(bert, sources, tmp_path, capsys, field):
    edit_json(bert / "config.json", **{field: 10**12})
    words = ["--train_file", sources["text"].with_name("words.txt")]
    words += ["--validation_file", words[-1], "--max_train_steps", 1, "--max_length", 16, "--cpu"]
    for argv in [
        *iterate_conversion_commands(bert, tmp_path / "out", sources["text"]),
        ["visualize", "--model_name_or_path", bert, "--text", "a", "--output_dir", tmp_path / "out"],
        ["ner", bert, *words, "--output_dir", tmp_path / "out"],
    ]:
        line = read_single_line(capsys, *argv)
        assert "1000000000000" in line or "ignore_mismatched_sizes" in line


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"relative_attention_num_buckets": 0}, "must be at least 4"),
        ({"relative_attention_num_buckets": -32}, "must be at least 4"),
        ({"relative_attention_max_distance": 0}, "more than half of it, got 32 and 0"),
        ({"layer_norm_epsilon": 1}, "'layer_norm_epsilon' expected float, got int"),
        ({"output_hidden_states": 0.5}, "configuration is (wrong|not valid): TypeError: .+"),
    ],
)
def test_invalid_t5_configurations_raise_an_error(sources, tmp_path, capsys, fields, message):
    source = shutil.copytree(sources["t5"], tmp_path / "t5")
    edit_json(source / "config.json", **fields)
    assert re.search(message, read_single_line(capsys, "benchmark", source, "--length", 8))
    if "output_hidden_states" not in fields:
        assert re.search(message, read_single_line(capsys, "inspect", source))


def test_bucket_settings_of_transformers_are_accepted():
    AttnVariantT5Config(relative_attention_num_buckets=8, relative_attention_max_distance=10)
    AttnVariantT5Config()


def test_unusable_tokenizer_files_are_listed(sources, tmp_path, capsys):
    source = shutil.copytree(sources["t5"], tmp_path / "t5")
    for path in source.glob("*token*"):
        path.unlink()
    (source / "vocab.txt").write_text("[PAD]\na\n")
    pair = ["--calibration_file", sources["text"], "--calibration_target_file", sources["text"]]
    line = read_single_line(
        capsys, "convert", source, "--num_key_value_heads", 2, *pair, "--output_dir", tmp_path / "out"
    )
    assert re.search("vocab.txt, but AutoTokenizer .*empty", line)
    (source / "vocab.txt").unlink()
    line = read_single_line(
        capsys, "convert", source, "--num_key_value_heads", 2, *pair, "--output_dir", tmp_path / "out"
    )
    assert "has no tokenizer files" in line


@pytest.mark.parametrize("text", ["a \udcff cat", "\ud83d"])
def test_non_text_arguments_raise_an_error(bert, tmp_path, capsys, text):
    argv = ["--output_dir", tmp_path / "out"]
    assert "must be Unicode text" in read_single_line(
        capsys, "visualize", "--model_name_or_path", bert, "--text", text, *argv
    )
    assert "is neither an existing folder" in read_single_line(
        capsys, "convert", f"{bert}{text}", "--num_key_value_heads", 2, *argv
    )
    assert not is_unicode(text)
    with pytest.raises(ValueError, match=r"`texts\[1\]`"):
        Calibration(["a", text])


# Names with a $, and plots that fail.


def test_dollar_signs_in_names_are_plotted_literally(sources, tmp_path, capsys):
    source = shutil.copytree(sources["bert"], tmp_path / "be$rt_{$x")
    words = ["--train_file", sources["text"].with_name("words.txt")]
    words += ["--validation_file", words[-1], "--max_train_steps", 1, "--max_length", 16, "--cpu", "--disable_tqdm"]
    assert run(capsys, "ner", source, *words, "--output_dir", tmp_path / "n$er_{")[0] == 0
    assert (tmp_path / "n$er_{/training_curves.png").is_file()
    *_, frontier = iterate_conversion_commands(source, tmp_path / "f$_{", sources["text"])
    assert run(capsys, *frontier)[0] == 0 and (tmp_path / "f$_{/frontier.png").is_file()
    arguments = ["--text", "a $x_{ cat", "--output_dir", tmp_path / "v$_{"]
    assert run(capsys, "visualize", "--model_name_or_path", source, *arguments)[0] == 0


def test_failed_plot_gives_a_warning(tmp_path, caplog):
    def draw():
        raise RuntimeError("no\nfont")

    assert not files.save_plot(tmp_path / "a.png", draw)
    assert "a.png (RuntimeError: no font)" in caplog.text
    assert not list(tmp_path.iterdir())


# An interrupted frontier.


def test_interrupted_frontier_continues(sources, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    *_, argv = iterate_conversion_commands(sources["bert"], out, sources["text"])
    argv = [*argv, "--kv_lora_rank", 8, 4, "--disable_tqdm"]
    save = frontier.FrontierFile.save

    def stopped(self, frontier, left):
        save(self, frontier, left)
        if left == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(frontier.FrontierFile, "save", stopped)
    assert cli.main([str(item) for item in argv]) == 130
    assert "frontier.json contains the finished measurements" in capsys.readouterr().err
    before = json.loads((out / "frontier.json").read_text())
    assert len(before["rows"]) == 3 and before["unfinished"]["variants_left"] == 1
    monkeypatch.setattr(frontier.FrontierFile, "save", save)
    assert "belongs to an interrupted call with different" in read_single_line(capsys, *argv, "--seed", 4)
    assert json.loads((out / "frontier.json").read_text()) == before
    assert run(capsys, *argv)[0] == 0
    after = json.loads((out / "frontier.json").read_text())
    assert "unfinished" not in after and len(after["rows"]) == 4
    known = {row["name"]: row | {"on_frontier": None} for row in after["rows"]}
    assert all(known[row["name"]] == row | {"on_frontier": None} for row in before["rows"])
    at_once = [*argv[:3], tmp_path / "at_once", *argv[4:]]
    assert run(capsys, *at_once)[0] == 0
    losses = [
        {row["name"]: row["loss"] for row in json.loads((item / "frontier.json").read_text())["rows"]}
        for item in (out, tmp_path / "at_once")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "is not empty" in read_single_line(capsys, *argv)


# Environment variables and working directories.


def call(*argv, cwd=None, prefix="", **variables):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | variables
    command = " ".join([sys.executable, "-m", "attn_variants", *map(str, argv)])
    return subprocess.run(["sh", "-c", prefix + command], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.thorough
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_stdout_is_handled(sources, tmp_path, unbuffered):
    argv = ["convert", sources["bert"], "--num_key_value_heads", 2, "--method", "mean", "--output_dir", tmp_path / "o"]
    result = call(*argv, ">/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert result.returncode == 2 and "Traceback" not in result.stderr and "Exception ignored" not in result.stderr
    assert "No space left on device" in result.stderr
    assert (tmp_path / "o/model.safetensors").is_file() and (tmp_path / "o/config.json").is_file()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
        OSError(12, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    ],
)
def test_out_of_memory_prints_one_line(error, capsys):
    def work():
        raise error

    assert run_script(work) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: There is not enough memory (")


def test_error_of_a_data_loader_worker_prints_its_original_message(capsys):
    """A worker raises an error of the same type whose message is the traceback in the worker."""

    def work():
        trace = "Traceback (most recent call last):\n  ...\nValueError: rows.csv, line 3: no label"
        raise ValueError(f"Caught ValueError in DataLoader worker process 0.\nOriginal {trace}")

    assert run_script(work) == 2
    assert capsys.readouterr().err == "error: rows.csv, line 3: no label\n"


def test_deeply_nested_configuration_is_rejected(tmp_path, capsys):
    (tmp_path / "config.json").write_text(f'{{"model_type": "bert", "extra": {500 * "["}{500 * "]"}}}')
    assert "must not be nested" in read_single_line(capsys, "inspect", tmp_path)


# Warnings of Transformers about valid calls.


@pytest.mark.thorough
def test_transcription_prints_no_warnings(tmp_path, capsys):
    source = save_whisper_checkpoint(tmp_path / "w", suppress_tokens=[1], pad_token_id=2)
    edit_json(source / "generation_config.json", max_length=448)
    folder = write_recordings(tmp_path / "audio", 60, seconds=0.5)
    argv = ["--calibration_audio_dir", folder, "--fit_steps", 0, "--output_dir", tmp_path / "out", "--disable_tqdm"]
    result = call("convert", source, "--num_key_value_heads", 4, *argv)
    assert result.returncode == 0 and "[transformers]" not in result.stderr, result.stderr


def test_trainer_files_are_kept(bert, tmp_path):
    left = ["trainer_state.json", "eval_results.json", "train_results.json", "global_step5/mp_rank_00.txt"]
    for name in left:
        (bert / name).parent.mkdir(exist_ok=True)
        (bert / name).write_text("{}")
    report = convert(bert, 2, "mean", output_dir=tmp_path / "out")
    assert not any((tmp_path / "out" / name).exists() for name in left)
    assert "trainer_state.json" in report.files_left_out and "global_step5/" in report.files_left_out


def test_inspect_states_what_is_counted(sources, tmp_path, capsys):
    assert cli.main(["inspect", str(sources["t5"]), "--details"]) == 0
    printed = capsys.readouterr().out
    assert "Tied parameters are counted once" in printed and " B more" in printed
    assert not re.search(r"-[\d.]+ (B|KiB)", printed)
    argv = ["convert", str(sources["bert"]), "--num_key_value_heads", "2", "--output_dir", str(tmp_path / "o")]
    assert cli.main(argv) == 0 and "parameters in the files" in capsys.readouterr().out


def test_missing_tensors_report_names_the_folder(bert, sources, tmp_path, caplog):
    tensors = {name: item for name, item in load_file(bert / "model.safetensors").items() if "pooler" not in name}
    save_file(tensors, bert / "model.safetensors", {"format": "pt"})
    transformers.logging.set_verbosity_warning()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        convert(bert, 2, calibration=Calibration(make_lines_of_words(40), fit_steps=0), output_dir=tmp_path / "out")
    finally:
        logger.removeHandler(caplog.handler)
    assert f"from: {bert}" in caplog.text and "from: None" not in caplog.text
