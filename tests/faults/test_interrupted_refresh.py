"""A refresh in place that ends at any instant: the repository is old, or new, or loads nowhere until it is ended."""

import json
import shutil
from pathlib import Path

import pytest
from fixtures.kills import draw_points, run_killed, run_watched
from fixtures.old_repositories import copy_repository, unpack_repositories
from transformers import AutoConfig

from hf_attn_variants import AttnVariantBertForMaskedLM
from hf_attn_variants.conversion.checkpoint.source import read_config
from hf_attn_variants.files import UNFINISHED_REFRESH
from hf_attn_variants.hub import refresh, refresh_write
from hf_attn_variants.hub.refresh import refresh_repository
from hf_attn_variants.hub.refresh_plan import make_plan, read_repository

NAME = "BertForMaskedLM-latent"
COUNTS = pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return unpack_repositories(tmp_path_factory.mktemp("archive") / "0.1.0")


def visible(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    named = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return {name: content for name, content in named.items() if not name.startswith(".")}


def assert_old_new_or_unloadable(folder, old, new):
    found = visible(folder)
    if "interrupted" not in found["config.json"].decode():
        assert found in (old, new)
        return
    assert (folder / UNFINISHED_REFRESH / "refresh.json").is_file()
    for loads in (AutoConfig, AttnVariantBertForMaskedLM):
        with pytest.raises(OSError, match="not a valid JSON file"):
            loads.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(ValueError, match=f"`attn-variants refresh {folder}` ends it"):
        read_config(folder)
    with pytest.raises(ValueError, match="was interrupted, and it does not load as it is"):
        refresh_repository(folder, dry_run=True)


def hidden(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


class EndedHere(BaseException):
    """What no code of ours catches and goes on after."""


@pytest.mark.thorough
def test_it_may_end_before_any_of_its_steps(archive, tmp_path, monkeypatch):
    """The writing alone, ended before its first, second, ... change of a file until it comes to its end."""
    monkeypatch.setattr(refresh, "_checks", lambda *args: [])
    copy_repository(archive / NAME, tmp_path / "new")
    refresh_repository(tmp_path / "new")
    old, new = visible(archive / NAME), visible(tmp_path / "new")
    state = {"left": 0}

    def counted(function):
        def call(*args, **kwargs):
            state["left"] -= 1
            if state["left"] < 0:
                raise EndedHere
            return function(*args, **kwargs)

        return call

    backup = make_plan(read_repository(archive / NAME)).repository.version
    for steps in range(1000):
        folder = copy_repository(archive / NAME, tmp_path / "folder")
        state["left"] = steps
        with monkeypatch.context() as patched:
            for owner, name in ((refresh_write.os, "rename"), (refresh_write.os, "replace")):
                patched.setattr(owner, name, counted(getattr(owner, name)))
            for name in ("copy2", "rmtree"):
                patched.setattr(refresh_write.shutil, name, counted(getattr(shutil, name)))
            for name in ("write_bytes", "write_text", "unlink", "mkdir"):
                patched.setattr(Path, name, counted(getattr(Path, name)))
            try:
                refresh_repository(folder)
                ended = False
            except EndedHere:
                ended = True
        assert_old_new_or_unloadable(folder, old, new)
        refresh_repository(folder)
        assert visible(folder) == new and hidden(folder) == [f".refresh-backup-{backup}"], steps
        kept = visible(folder / f".refresh-backup-{backup}")
        assert {**kept, "refresh.json": b""} == {**{n: old[n] for n in kept if n in old}, "refresh.json": b""}
        shutil.rmtree(folder)
        if not ended:
            break
    assert steps > 30


@pytest.mark.parametrize("number", [0, 5])
def test_a_disk_that_is_full_leaves_the_repository_as_it_was(archive, tmp_path, monkeypatch, number):
    monkeypatch.setattr(refresh, "_checks", lambda *args: [])
    folder = copy_repository(archive / NAME, tmp_path / "folder")
    write, written = Path.write_bytes, []

    def fails(path, content):
        written.append(path)
        if len(written) > number:
            raise OSError(28, "No space left on device")
        return write(path, content)

    for output in (None, tmp_path / "new"):
        written.clear()
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_bytes", fails)
            with pytest.raises(OSError, match="No space left"):
                refresh_repository(folder, output)
        assert visible(folder) == visible(archive / NAME) and hidden(folder) == []
        assert not (tmp_path / "new").exists()
    assert refresh_repository(folder).backup


@pytest.mark.thorough
@COUNTS
def test_killed(archive, tmp_path, count):
    copy_repository(archive / NAME, tmp_path / "new")
    things, seconds = run_watched(refresh_repository, tmp_path / "new")
    old, new = visible(archive / NAME), visible(tmp_path / "new")
    for at in draw_points(things, seconds, count, "refresh"):
        folder = copy_repository(archive / NAME, tmp_path / "folder")
        run_killed(at, refresh_repository, folder)
        assert_old_new_or_unloadable(folder, old, new)
        refresh_repository(folder)
        assert visible(folder) == new and len(hidden(folder)) == 1, at
        shutil.rmtree(folder)


def test_an_error_halfway_is_told_and_mended_by_the_next(archive, tmp_path, monkeypatch, caplog):
    folder = copy_repository(archive / NAME, tmp_path / "folder")
    replace = refresh_write.os.replace

    def fails(source, target):
        if Path(target).name == "variant_names.py":
            raise PermissionError(13, "no")
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(refresh_write.os, "replace", fails)
        with pytest.raises(OSError, match=r"its refresh stopped half-way .*repeat the command"):
            refresh_repository(folder)
    result = refresh_repository(folder)
    assert result.changes == [] and "an earlier refresh was interrupted, and is ended" in result.summary()
    assert (folder / "config.json").exists() and hidden(folder) == [".refresh-backup-0.1.0"]


@pytest.mark.parametrize(
    "journal, file",
    [
        ({"backup": "../elsewhere"}, "additive_score.py"),
        ({"backup": ".refresh-backup-1", "removed": ["../victim.py"]}, "additive_score.py"),
        ({"backup": ".refresh-backup-1"}, "tokenizer.json"),
        ({"backup": ".refresh-backup-1"}, "link"),
        ([], "additive_score.py"),
    ],
)
def test_what_no_refresh_left_is_not_acted_on(archive, tmp_path, journal, file):
    folder = copy_repository(archive / NAME, tmp_path / "folder")
    (tmp_path / "victim.py").write_text("x")
    unfinished = folder / UNFINISHED_REFRESH
    (unfinished / "new").mkdir(parents=True)
    (unfinished / "old").mkdir()
    (unfinished / "refresh.json").write_text(json.dumps(journal))
    (unfinished / "new/config.json").write_text("{}")
    if file == "link":
        (unfinished / "new/additive_score.py").symlink_to(tmp_path / "victim.py")
    else:
        (unfinished / "new" / file).write_text("x")
    before = visible(folder)
    with pytest.raises(ValueError, match="was left by no refresh of this package"):
        refresh_repository(folder)
    assert visible(folder) == before and (tmp_path / "victim.py").exists()


def test_two_at_once_are_one(archive, tmp_path):
    folder = copy_repository(archive / NAME, tmp_path / "folder")
    with refresh_write.held(folder), pytest.raises(OSError, match="another process is refreshing it"):
        refresh_repository(folder)
    assert refresh_repository(folder).backup
