"""Check `attn-variants refresh`: a repository with older code gets the current code, and other files stay."""

import json
import shutil

import pytest
import torch
from architectures import ARCHITECTURES
from fixtures.commands import run_command
from hub.local_hub import TOKEN
from huggingface_hub import constants, hf_api
from relatives import RELATIVES
from safetensors.torch import load_file, save_file

import hf_attn_variants
from hf_attn_variants.commands import refresh
from hf_attn_variants.hub.card import generate_model_card, is_unedited_card
from hf_attn_variants.modeling.fields.composition import get_used_mechanisms
from hf_attn_variants.modeling.remote_code import get_code_files

OLD_CODE = "raise SystemExit('the old code was run')\n"


@pytest.fixture
def old(converted, tmp_path):
    """A repository with the code of another version, a card, a user's file and the files of a training."""
    folder = shutil.copytree(converted, tmp_path / "old")
    for path in folder.glob("*.py"):
        path.write_text(OLD_CODE)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text("{}")
    (folder / "own.py").write_text("MINE = 1\n")
    (folder / "checkpoint-3").mkdir()
    (folder / "checkpoint-3/state.json").write_text("{}")
    (folder / "README.md").write_text(str(generate_model_card(folder, "me/old")).replace("to 5.", "to 4."))
    return folder


def refresh_folder(source, output, *options):
    return run_command(refresh, source, "--output_dir", output, *options)


def read_contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_refresh_replaces_only_the_code(old, tmp_path, capsys):
    before = read_contents(old)
    assert refresh_folder(old, tmp_path / "new") == tmp_path / "new"
    after = read_contents(tmp_path / "new")
    config_class = hf_attn_variants.AttnVariantBertConfig
    mechanisms = get_used_mechanisms(config_class.from_pretrained(old))
    code = get_code_files(config_class, "modeling_attn_variant_bert", mechanisms)
    assert {name: after.pop(name).decode() for name in code} == code
    tensors = [load_file(folder / "model.safetensors") for folder in (old, tmp_path / "new")]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(tensors[0][name].equal(tensors[1][name]) for name in tensors[0])
    configs = [json.loads(files["config.json"]) for files in (before, after)]
    assert configs[0] == configs[1]
    same = before.keys() - code.keys() - {"model.safetensors", "config.json", "README.md", "checkpoint-3/state.json"}
    assert {name: after[name] for name in same} == {name: before[name] for name in same} and "own.py" in same
    assert "checkpoint-3/state.json" not in after and read_contents(old) == before
    assert "The largest difference between the outputs before and after saving is 0." in capsys.readouterr().out


def test_refresh_keeps_an_edited_card(old, tmp_path):
    card = (old / "README.md").read_text()
    assert not is_unedited_card(card)
    refresh_folder(old, tmp_path / "new")
    assert (tmp_path / "new/README.md").read_text() == card


@pytest.mark.parametrize("change, message", [("missing", r"key\.weight"), ("shape", "ignore_mismatched_sizes")])
def test_refresh_with_mismatched_weights_raises_an_error(old, tmp_path, change, message):
    tensors = load_file(old / "model.safetensors")
    name = next(name for name in tensors if name.endswith("key.weight"))
    tensors[name] = torch.zeros(3, 3)
    if change == "missing":
        del tensors[name]
    save_file(tensors, old / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        refresh_folder(old, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_refresh_with_other_outputs_raises_an_error(old, tmp_path, monkeypatch):
    monkeypatch.setattr(refresh, "_measure_difference", lambda *models: float("nan"))
    with pytest.raises(ValueError, match="outputs differ"):
        refresh_folder(old, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_refresh_of_a_plain_checkpoint_raises_an_error(plain_bert, tmp_path):
    with pytest.raises(ValueError, match="must be a repository created with this package, got model type 'bert'"):
        refresh_folder(plain_bert, tmp_path / "new")


def test_refresh_pushes_one_commit(old, hub, api, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url, raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda token=None: api)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.create("me/old", files={n: c for n, c in read_contents(old).items() if not n.startswith("checkpoint")})
    result = refresh_folder("me/old", tmp_path / "new", "--push_to_hub")
    files = hub.files("me/old")
    assert result.repo_id == "me/old" and len(hub.repositories["me/old"].log) == 2
    assert OLD_CODE.encode() not in files.values() and files["own.py"] == b"MINE = 1\n"
    assert refresh_folder(old, tmp_path / "again", "--push_to_hub", "--hub_model_id", "me/other", "--private").changed
    assert hub.repositories["me/other"].private


@pytest.mark.thorough
@pytest.mark.parametrize("row", [*ARCHITECTURES, *RELATIVES], ids=lambda row: row.name)
def test_refresh_has_inputs_for_every_head(row):
    for head in row.heads:
        model = row.make_model(head, "gqa").eval()
        assert refresh._measure_difference(model, model) == 0, head
