"""Check SIGKILL at random points of real runs: results are complete or absent, and the next run continues.

The default tests kill a conversion and a push at two points each. With `-m slow` there are twenty points, also of a
training. `training/test_checkpoints.py` kills trainings by default.
"""

import json
import shutil
from pathlib import Path

import pytest
from fixtures.commands import run_command
from fixtures.glue.tiny_bert import make_tiny_bert
from fixtures.kills import draw_points, run_killed, run_watched
from fixtures.linear_loop import log_without_times
from hub.local_hub import TOKEN, LocalHub
from safetensors import safe_open

from hf_attn_variants import AttnVariantBertModel
from hf_attn_variants.commands import convert
from hf_attn_variants.commands.training import glue
from hf_attn_variants.files import staged_folder
from hf_attn_variants.hub import plan_push, push_checkpoint
from hf_attn_variants.model_folder import describe_unfinished_model
from hf_attn_variants.training.engine.checkpoints import list_checkpoints

DATA = Path(__file__).resolve().parents[1] / "fixtures/glue/STS-B"
COUNTS = pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
REPO = "me/bert-gqa2"


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return make_tiny_bert(tmp_path_factory.mktemp("kills") / "bert")


def read_contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_readable(folder):
    """Check that every file with its final name is complete."""
    for path in folder.rglob("*"):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as tensors:
                assert all(tensors.get_tensor(name) is not None for name in tensors.keys())


def train(bert, out, *more):
    argv = ["--model_name_or_path", bert, "--task_name", "stsb", "--data_dir", DATA, "--output_dir", out]
    argv += ["--max_length", 16, "--per_device_train_batch_size", 4, "--learning_rate", "1e-3", "--logging_steps", 1]
    argv += ["--max_train_steps", 7, "--checkpointing_steps", 2, "--eval_steps", 3, "--metric_for_best_model", "loss"]
    argv += ["--save_total_limit", 2, "--cpu", "--disable_tqdm", *more]
    run_command(glue, *argv)


@pytest.mark.slow
def test_killed_training_resumes(bert, tmp_path):
    uninterrupted = tmp_path / "whole"
    num_operations, seconds = run_watched(train, bert, uninterrupted)
    expected = read_contents(uninterrupted)
    for number, point in enumerate(draw_points(num_operations, seconds, 20, "training")):
        out = tmp_path / f"out-{number}"
        run_killed(point, train, bert, out)
        if out.exists():
            assert_readable(out)
            if (out / "config.json").exists() and not describe_unfinished_model(out):
                assert (out / "model.safetensors").read_bytes() == expected["model.safetensors"], point
        if list_checkpoints(out):
            train(bert, out, "--resume_from_checkpoint", "latest")
        else:
            train(bert, out, *(["--overwrite_output_dir"] if out.exists() and any(out.iterdir()) else []))
        assert log_without_times(out) == log_without_times(uninterrupted), point
        result = read_contents(out)
        assert result["model.safetensors"] == expected["model.safetensors"], point
        assert result.keys() == expected.keys(), point
        shutil.rmtree(out)


def convert_to(bert, out):
    run_command(convert, bert, "--output_dir", out, "--num_key_value_heads", "2")


@pytest.mark.thorough
@COUNTS
@pytest.mark.parametrize("exists", [False, True])
def test_killed_conversion_can_be_repeated(bert, tmp_path, count, exists):
    uninterrupted = tmp_path / "whole"
    if exists:
        uninterrupted.mkdir()
    num_operations, seconds = run_watched(convert_to, bert, uninterrupted)
    expected = read_contents(uninterrupted)
    for number, point in enumerate(draw_points(num_operations, seconds, count, f"conversion {exists}")):
        out = tmp_path / f"out-{number}"
        if exists:
            out.mkdir()
        run_killed(point, convert_to, bert, out)
        if (out / "config.json").exists() and not describe_unfinished_model(out):
            assert remove_names(read_contents(out), out) == remove_names(expected, uninterrupted), point
        elif exists:
            # The next run raises an error that names the leftovers, and no leftover is a checkpoint.
            if any(out.iterdir()):
                assert_refused(out)
                with pytest.raises(FileExistsError, match="is not empty"):
                    convert_to(bert, out)
                shutil.rmtree(out)
            convert_to(bert, out)
        else:
            assert not out.exists()
            convert_to(bert, out)
        assert remove_names(read_contents(out), out) == remove_names(expected, uninterrupted), point


def assert_refused(folder):
    with pytest.raises((OSError, ValueError)):
        AttnVariantBertModel.from_pretrained(folder)


def fill(weights, out):
    with staged_folder(out) as stage:
        for path in weights.iterdir():
            shutil.copyfile(path, stage / path.name)


@pytest.mark.thorough
def test_empty_folder_is_not_a_model_before_the_conversion_ends(bert, tmp_path):
    (tmp_path / "whole").mkdir()
    convert_to(bert, tmp_path / "model")
    num_operations, _ = run_watched(fill, tmp_path / "model", tmp_path / "whole")
    assert read_contents(tmp_path / "whole") == read_contents(tmp_path / "model")
    moves = len(read_contents(tmp_path / "model")) + 3  # plus opening and renaming a notice, and removing the stage
    for point in range(num_operations - moves, num_operations + 1):
        out = tmp_path / f"out-{point}"
        out.mkdir()
        assert run_killed(point, fill, tmp_path / "model", out)
        if point < num_operations:
            assert_refused(out)
        else:
            AttnVariantBertModel.from_pretrained(out)


def remove_names(files, folder):
    """Return files without times and the card, and with one name for the folder.

    A kill can come between the move of the checkpoint and the write of its card, which contains the folder's name.
    """
    report = json.loads(files["conversion_report.json"])
    report = {name: value for name, value in report.items() if "second" not in name and name != "output_dir"}
    others = {name: content for name, content in files.items() if name != "README.md"}
    return others | {"conversion_report.json": report}


def push(folder, url):
    from huggingface_hub import HfApi, constants

    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True
    push_checkpoint(plan_push(folder, REPO), api=HfApi(endpoint=url, token=TOKEN))


@pytest.mark.thorough
@COUNTS
def test_killed_push_can_be_repeated(bert, tmp_path, count, monkeypatch):
    convert_to(bert, tmp_path / "bert-gqa2")
    before = read_contents(tmp_path / "bert-gqa2")
    with LocalHub() as hub:
        num_operations, seconds = run_watched(push, tmp_path / "bert-gqa2", hub.url)
        expected = hub.files(REPO)
    assert num_operations >= 10 and "model.safetensors" in expected
    for point in draw_points(num_operations, seconds, count, "push"):
        with LocalHub() as hub:
            run_killed(point, push, tmp_path / "bert-gqa2", hub.url)
            if REPO in hub.repositories:
                assert hub.files(REPO) in (expected, {".gitattributes": b""}), point
            run_watched(push, tmp_path / "bert-gqa2", hub.url)
            assert hub.files(REPO) == expected, point
            # A repeated push changes nothing, so there is one commit after the first one.
            assert len(hub.repositories[REPO].log) == 2, point
    assert read_contents(tmp_path / "bert-gqa2") == before
