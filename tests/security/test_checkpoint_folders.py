"""Check untrusted checkpoint folders: links out of them, adapters next to weights, pickles, and pipes."""

import importlib.util
import json
import os
import shutil
import time

import pytest
import torch
from fixtures.glue.tiny_bert import make_tiny_bert
from safetensors.torch import load_file

from hf_attn_variants import cli

SECRET = "hf_secret"
DATA = ["--train_file", "DATA", "--validation_file", "DATA", "--max_train_steps", "1", "--cpu", "--disable_tqdm"]
STSB = ["--task_name", "stsb", "--data_dir", "tests/fixtures/glue/STS-B", "--max_train_steps", "1", "--cpu"]
TEXT = ["--calibration_file", "LINES"]
# The arguments of every command that reads a checkpoint, which is FOLDER here.
COMMANDS = {
    "convert": ["convert", "FOLDER", "--num_key_value_heads", "2", "--output_dir", "OUT"],
    "export": ["export", "FOLDER", "--to", "transformers", "--output_dir", "OUT"],
    "export onnx": ["export", "FOLDER", "--to", "onnx", "--output_dir", "OUT"],
    "export ctranslate2": ["export", "FOLDER", "--to", "ctranslate2", "--output_dir", "OUT"],
    "push": ["push", "FOLDER", "--repo_id", "me/x", "--dry_run"],
    "inspect": ["inspect", "FOLDER"],
    "benchmark": ["benchmark", "FOLDER"],
    "frontier": ["frontier", "FOLDER", *TEXT, "--output_dir", "OUT"],
    "visualize": ["visualize", "FOLDER", "--text", "a cat", "--output_dir", "OUT"],
    "glue": ["glue", "--model_name_or_path", "FOLDER", *STSB, "--output_dir", "OUT"],
    "ner": ["ner", "--model_name_or_path", "FOLDER", *DATA, "--output_dir", "OUT"],
    "squad": ["squad", "--model_name_or_path", "FOLDER", *DATA, "--output_dir", "OUT"],
    "uptrain": ["uptrain", "--model_name_or_path", "FOLDER", "--objective", "mlm", "--train_file", "LINES",
                "--max_train_steps", "1", "--cpu", "--output_dir", "OUT"],
    "teacher": ["uptrain", "--model_name_or_path", "PLAIN", "--teacher", "FOLDER", "--objective", "distill",
                "--train_file", "LINES", "--max_train_steps", "1", "--cpu", "--output_dir", "OUT"],
    "pretrain": ["pretrain", "--model_name_or_path", "FOLDER", "--train_file", "LINES", "--max_train_steps", "1",
                 "--cpu", "--output_dir", "OUT"],
    "seq2seq": ["seq2seq", "--model_name_or_path", "FOLDER", "--source_file", "LINES", "--target_file", "LINES",
                "--max_train_steps", "1", "--cpu", "--output_dir", "OUT"],
    "pretrain-t5": ["pretrain-t5", "--model_name_or_path", "FOLDER", "--train_file", "LINES", "--max_train_steps",
                    "1", "--cpu", "--output_dir", "OUT"],
}  # fmt: skip
if importlib.util.find_spec("ctranslate2") is None:
    del COMMANDS["export ctranslate2"]
OF_CONFIGS = ("inspect", "benchmark")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_tiny_bert(tmp_path_factory.mktemp("folders") / "plain")


@pytest.fixture
def folder(plain, tmp_path):
    return shutil.copytree(plain, tmp_path / "folder")


@pytest.fixture
def call(plain, tmp_path, capsys):
    """Run a command of COMMANDS on a folder; return its status and its one-line error."""
    lines, data, out = tmp_path / "lines.txt", tmp_path / "data.json", tmp_path / "out"
    lines.write_text("".join(f"a cat sat on the mat {i}\n" for i in range(40)))
    data.write_text('{"text": "a"}\n')

    def run(name, folder, *more):
        places = {"FOLDER": folder, "PLAIN": plain, "LINES": lines, "DATA": data, "OUT": out}
        status = cli.main([str(places.get(item, item)) for item in (*COMMANDS[name], *more)])
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error", "Traceback"))]
        assert not out.exists() or status == 0, list(out.iterdir())
        return status, "".join(errors)

    return run


def add_adapter(folder, kind="safetensors"):
    printed = {"base_model_name_or_path": "me/base", "auto_mapping": {"base_model_class": "BertForMaskedLM"}}
    (folder / "adapter_config.json").write_text(json.dumps(printed | {"peft_type": "LORA"}))
    (folder / f"adapter_model.{kind}").write_bytes(b"x")


def save_pickled_weights(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("name", COMMANDS)
def test_adapter_next_to_weights_raises_before_any_work(name, folder, call):
    add_adapter(folder)
    status, error = call(name, folder)
    assert status == 2 and "an adapter next to complete weights (adapter_config.json," in error, error
    assert "Merge the adapter into its base model first" in error, error


@pytest.mark.parametrize("name", ["convert", "push", "inspect", "ner"])
def test_folder_with_only_an_adapter_raises_an_error(name, folder, call):
    add_adapter(folder, "bin")
    for file in ("model.safetensors", "config.json"):
        (folder / file).unlink()
    status, error = call(name, folder)
    assert status == 2 and "got only an adapter" in error, error


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin in someone/model is a pickle"),
        (["adapter_config.json", "adapter_model.bin"], "someone/model must be a model without an adapter, got only"),
        (
            ["config.json", "model.safetensors", "adapter_config.json"],
            "someone/model must be a model without an adapter, got an adapter next to",
        ),
    ],
)
def test_hub_repository_with_an_adapter_raises_before_the_download(files, message, call, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *args, **kwargs: files)
    for name in ("ner", "uptrain", "convert", "frontier"):
        status, error = call(name, "someone/model")
        assert status == 2 and message in error, (name, error)


@pytest.mark.parametrize("output", [None, "out"])
def test_forbidden_token_reaches_the_hub_functions(output, tmp_path, monkeypatch):
    """Check that `token=False` of `convert` is not replaced by None, with which the stored token would be sent."""
    from hf_attn_variants.conversion import conversions

    def resolve(name, revision, token, *args):
        raise OSError(f"token {token}")

    monkeypatch.setattr(conversions, "resolve_checkpoint_folder", resolve)
    with pytest.raises(OSError, match="token False"):
        conversions.convert("someone/model", 2, token=False, output_dir=output and tmp_path / output)


def test_adapter_in_a_subfolder_is_ignored(folder, call, tmp_path):
    (folder / "lora").mkdir()
    add_adapter(folder / "lora")
    assert call("convert", folder)[0] == 0
    assert not (tmp_path / "out/lora").exists()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in OF_CONFIGS])
def test_every_command_rejects_pickles(name, folder, call):
    save_pickled_weights(folder)
    status, error = call(name, folder)
    assert status == 2 and f"pytorch_model.bin in {folder} is a pickle" in error, error


@pytest.mark.parametrize("name", ["convert", "push", "ner", "inspect"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json", "README.md"])
def test_links_of_model_files_out_of_the_folder_raise_an_error(name, file, folder, call, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder / file).touch()
    shutil.move(folder / file, tmp_path / "elsewhere/there")
    (folder / file).symlink_to(tmp_path / "elsewhere/there")
    status, error = call(name, folder)
    assert status == 2 and f"{folder / file} is a link that leads out of the folder, to {tmp_path}" in error, error


@pytest.mark.parametrize("relative", [False, True])
def test_other_links_out_of_the_folder_are_skipped_and_named(relative, folder, call, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "token").write_text(SECRET)
    (folder / "inside.txt").write_text("inside")
    (folder / "sub").mkdir()
    at = "../elsewhere" if relative else elsewhere
    (folder / "notes.txt").symlink_to(f"{at}/token")
    (folder / "assets").symlink_to(at)
    (folder / "sub/more").symlink_to("../notes.txt")  # a link to another link
    (folder / "same.txt").symlink_to("inside.txt")
    assert call("convert", folder)[0] == 0
    out = tmp_path / "out"
    assert (out / "same.txt").read_text() == "inside"
    assert not any(SECRET in path.read_bytes().decode("latin-1") for path in out.rglob("*") if path.is_file())
    left_out = json.loads((out / "conversion_report.json").read_text())["files_left_out"]
    assert {"notes.txt", "assets/", "sub/more"} <= {*left_out}
    assert cli.main(["push", str(folder), "--repo_id", "me/x", "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "left out: notes.txt (a link that leads out of the folder)" in shown and "left out: assets (a link" in shown
    assert "token" not in shown.split("Use")[0].replace("tokenizer", "").replace("a token", "")


def test_module_link_out_of_the_folder_raises_an_error(folder, call, tmp_path):
    (tmp_path / "pooling").mkdir()
    (tmp_path / "pooling/config.json").write_text("{}")
    (folder / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}]))
    (folder / "1_Pooling").symlink_to(tmp_path / "pooling")
    status, error = call("convert", folder)
    assert status == 2 and "1_Pooling is a link that leads out of the folder" in error, error


def test_folder_named_like_the_hub_cache_gets_no_exception(folder, tmp_path):
    from hf_attn_variants.conversion.checkpoint.source import get_unsafe_path_reason

    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(SECRET)
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots/0a"
    snapshot.mkdir(parents=True)
    (repository / "blobs").symlink_to(tmp_path / "etc")
    (snapshot / "notes.txt").symlink_to("../../blobs/passwd")
    assert "a link that leads out of the folder" in get_unsafe_path_reason(snapshot / "notes.txt", snapshot)


@pytest.mark.parametrize("name", ["convert", "push", "ner"])
@pytest.mark.parametrize("file", ["modules.json", "config.json", "tokenizer.json", "generation_config.json"])
def test_pipe_instead_of_a_file_raises_immediately(name, file, folder, call):
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    start = time.monotonic()
    status, error = call(name, folder)
    assert status == 2 and f"{folder / file} is neither a file nor a folder" in error, error
    assert time.monotonic() - start < 5


def test_pipe_next_to_the_weights_is_ignored(folder, call, tmp_path, capsys):
    os.mkfifo(folder / "notes.txt")
    assert call("convert", folder)[0] == 0 and not (tmp_path / "out/notes.txt").exists()
    assert cli.main(["push", str(folder), "--repo_id", "me/x", "--dry_run"]) == 0
    assert "left out: notes.txt (neither a file nor a folder)" in capsys.readouterr().out
