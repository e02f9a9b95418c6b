"""A refresh of a repository on the Hub, and its push: one commit of what changed on the commit that was read."""

import pytest
from fixtures.old_repositories import unpack_repositories
from hub.local_hub import TOKEN
from hub.test_refresh import MODELING, T5, contents, of_today
from huggingface_hub import constants, hf_api

from hf_attn_variants.hub import refresh_plan
from hf_attn_variants.hub.refresh import refresh_repository


@pytest.fixture(scope="session")
def old_files(tmp_path_factory):
    return contents(unpack_repositories(tmp_path_factory.mktemp("archive") / "0.1.0") / T5)


@pytest.fixture
def repository(old_files, hub, api, monkeypatch):
    """A repository of 0.1.0 on the local Hub, which all of huggingface_hub asks."""

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url, raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.create("me/t5", files=old_files | {"pytorch_model.bin": b"never read", ".gitattributes": b""})
    return hub.repositories["me/t5"]


@pytest.mark.thorough
def test_what_changed_is_one_commit_on_the_one_that_was_read(repository, hub, api, old_files):
    before = hub.files("me/t5")
    result = refresh_repository("me/t5", push_to_hub=True, api=api)
    after = hub.files("me/t5")
    assert len(repository.log) == 2 and result.pushed.commit == hub.head("me/t5")
    assert of_today(after) and "attn_variants_ops.py" in after
    assert {n: c for n, c in after.items() if not n.endswith(".py")} == {
        n: c for n, c in before.items() if not n.endswith(".py")
    }
    assert "neither read nor copied from the Hub: pytorch_model.bin." in result.summary()
    assert "Pushed to" in result.summary()
    again = refresh_repository("me/t5", push_to_hub=True, api=api)
    assert not again.pushed.changed and len(repository.log) == 2 and "is up to date" in again.summary()


@pytest.mark.thorough
def test_somebody_elses_push_in_the_meantime_is_not_lost(repository, hub, api):
    hub.before_commit = lambda each: each.commit("main", {**hub.files("me/t5"), "new.txt": b""}, "theirs")
    with pytest.raises(OSError, match="somebody else is pushing"):
        refresh_repository("me/t5", push_to_hub=True, api=api)
    assert "new.txt" in hub.files("me/t5") and not of_today(hub.files("me/t5"))


def test_a_hub_id_is_written_to_a_new_folder_and_the_cache_is_not(
    repository, hub, api, old_files, tmp_path, monkeypatch
):
    with pytest.raises(ValueError, match=r"is a Hub id.*--output_dir.*--push_to_hub"):
        refresh_repository("me/t5")
    assert not [each for each in hub.requests if "/api/models" in each]
    result = refresh_repository("me/t5", tmp_path / "new")
    after = contents(tmp_path / "new")
    assert of_today(after) and not any(path.is_symlink() for path in (tmp_path / "new").rglob("*"))
    assert after["model.safetensors"] == old_files["model.safetensors"] and result.output_dir == tmp_path / "new"
    assert len(repository.log) == 1
    assert refresh_repository("me/t5", dry_run=True).changes  # the cache has the old code
    monkeypatch.setattr(refresh_plan, "HfApi", None)  # asked once the files are there
    assert "the Hub cannot be reached" in refresh_repository("me/t5", dry_run=True).summary()


def test_elsewhere_goes_the_whole_folder(repository, hub, api, old_files, tmp_path):
    result = refresh_repository("me/t5", push_to_hub=True, hub_model_id="me/other", private=True, api=api)
    files = hub.files("me/other")
    assert of_today(files) and hub.repositories["me/other"].private and len(repository.log) == 1
    assert files["model.safetensors"] == old_files["model.safetensors"] and "README.md" in files
    assert result.pushed.repo_id == "me/other" and result.output_dir is None


def test_a_folder_is_refreshed_in_place_and_pushed(repository, hub, api, old_files, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, content in old_files.items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("# By hand\n")
    result = refresh_repository(folder, push_to_hub=True, api=api)
    files = hub.files("me/mine")
    assert of_today(files) and files["README.md"] == b"# By hand\n"
    assert not any(".refresh" in name for name in files) and result.backup
    # Interrupted after the folder was written: the same command pushes, and pushes nothing new.
    assert not refresh_repository(folder, push_to_hub=True, api=api).pushed.changed


def test_a_commit_is_no_branch(repository, hub, api):
    with pytest.raises(ValueError, match="give a branch"):
        refresh_repository("me/t5", push_to_hub=True, revision=hub.head("me/t5"), api=api)
    with pytest.raises(ValueError, match="is of a push"):
        refresh_repository("me/t5", hub_model_id="me/other", dry_run=True, api=api)
    assert (MODELING / "variant_names.py").read_bytes() not in hub.files("me/t5").values()
