"""Check the output folder of a conversion: it is new or empty, and is written completely or not at all."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import transformers

import hf_attn_variants
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.files import staged_folder

from .conftest import load_model


def list_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_output_folder_must_be_new_or_empty(make_source, tmp_path):
    source = make_source()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="is not empty"):
        convert_checkpoint(source, tmp_path / "full", 4)
    with pytest.raises(NotADirectoryError, match="mine"):
        convert_checkpoint(source, tmp_path / "full" / "mine", 4)
    with pytest.raises(OSError, match="deeper"):
        convert_checkpoint(source, tmp_path / "full" / "mine" / "deeper", 4)
    with pytest.raises(ValueError, match="must not be inside"):
        convert_checkpoint(source, source / "inside", 4)
    (tmp_path / "empty").mkdir()
    convert_checkpoint(source, tmp_path / "empty", 4)
    convert_checkpoint(source, tmp_path / "not" / "yet" / "there", 4)
    expected = {*os.listdir(tmp_path / "empty")}
    assert expected == {*os.listdir(tmp_path / "not" / "yet" / "there")} and "config.json" in expected


def test_output_may_be_the_working_directory(make_source, tmp_path, monkeypatch):
    source = make_source()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    inode = os.stat(".").st_ino
    report = convert_checkpoint("../source", ".", 4)
    assert report.output_dir == "." and os.stat(tmp_path / "here").st_ino == inode
    convert_checkpoint(source, tmp_path / "new", 4)
    assert sorted(os.listdir(".")) == sorted(os.listdir(tmp_path / "new"))
    assert load_model(transformers.AutoModelForMaskedLM, tmp_path / "here").config.num_key_value_heads == 4
    with pytest.raises(FileExistsError, match="is not empty"):
        convert_checkpoint(source, ".", 4)


@pytest.mark.parametrize("exists", [True, False])
def test_output_may_be_a_link_to_an_empty_or_missing_folder(make_source, tmp_path, exists):
    source = make_source()
    if exists:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    convert_checkpoint(source, tmp_path / "link", 4)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real", "source"]


def test_output_link_to_itself_raises_an_error(make_source, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        convert_checkpoint(make_source(), tmp_path / "loop", 4)


def test_output_may_be_an_empty_mount_point(make_source, tmp_path, monkeypatch):
    # A mount point cannot be removed, and files cannot be renamed into it or out of it.
    mount = tmp_path / "mount"
    mount.mkdir()
    rmdir = Path.rmdir

    def checked(move):
        def checked_move(old, new):
            if (mount in Path(old).parents) != (mount in Path(new).parents):
                raise OSError(18, "Invalid cross-device link")
            move(old, new)

        return checked_move

    def checked_rmdir(folder):
        if folder == mount:
            raise OSError(16, "Device or resource busy")
        rmdir(folder)

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, checked(getattr(os, name)))
    monkeypatch.setattr(Path, "rmdir", checked_rmdir)
    convert_checkpoint(make_source(), mount, 4)
    assert (mount / "config.json").is_file() and not list(mount.glob(".*"))


def test_existing_folder_is_filled_completely_with_config_last(tmp_path, monkeypatch):
    names = ["config.json", "a.txt", "z.safetensors"]
    moved, replace = [], os.replace

    def failing_replace(old, new):
        if Path(new).parent == tmp_path:
            moved.append(Path(new).name)
            if len(moved) == len(names) + 1:
                raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path) as stage:
        for name in names:
            (stage / name).write_text("x")
    # A notice replaces config.json first, because without this file, a class would load the weights with its defaults.
    assert moved == ["config.json", "a.txt", "z.safetensors", "config.json"] and list(tmp_path.iterdir()) == []


def test_files_written_during_the_conversion_are_not_lost(tmp_path):
    with pytest.raises(FileExistsError, match="in the meantime"), staged_folder(tmp_path) as stage:
        (stage / "config.json").write_text("ours")
        (tmp_path / "config.json").write_text("theirs")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.json", "theirs")]


def test_sigterm_leaves_no_partial_folder(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped, staged_folder(tmp_path / "out") as stage:
        (stage / "model.safetensors").write_text("x")
        os.kill(os.getpid(), signal.SIGTERM)
        (stage / "config.json").write_text("never reached")
    assert stopped.value.code == 143 and list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_unwritable_folder_raises_an_error(make_source, tmp_path):
    source = make_source()
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(PermissionError, match="is not writable"):
        convert_checkpoint(source, tmp_path / "locked" / "out", 4)


def test_full_disk_raises_before_any_work(make_source, tmp_path, monkeypatch):
    source = make_source()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(OSError, match="MiB of disk space"):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


class FailsInTheSecondLayer:
    name = "fails"

    def __init__(self, error):
        self.error = error

    def pool(self, tensors, heads, layer):
        if "layer.1." in layer.module:
            raise self.error
        return hf_attn_variants.conversion.METHODS["mean"]().pool(tensors, heads, layer)


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), KeyboardInterrupt(), OSError(28, "No space left on device")]
)
def test_failed_conversion_leaves_no_files(make_source, tmp_path, error):
    source = make_source()
    before = list_files(tmp_path)
    with pytest.raises(type(error)):
        convert_checkpoint(source, tmp_path / "new" / "out", 4, FailsInTheSecondLayer(error))
    assert list_files(tmp_path) == before
    (tmp_path / "empty").mkdir()
    with pytest.raises(type(error)):
        convert_checkpoint(source, tmp_path / "empty", 4, FailsInTheSecondLayer(error))
    assert list((tmp_path / "empty").iterdir()) == []


def test_conversion_does_not_change_the_source_folder(make_source, tmp_path):
    source = make_source()
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    convert_checkpoint(source, tmp_path / "out", 4)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
