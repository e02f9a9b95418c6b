"""Check `--push_to_hub` of a training script: the model and the card are pushed in one commit."""

import json

import pytest
import yaml
from fixtures.commands import run_command
from fixtures.glue.tiny_bert import FIXTURES
from hub.local_hub import TOKEN

from hf_attn_variants.commands.training import glue


@pytest.fixture
def arguments(converted, hub, api, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    argv = ["--model_name_or_path", str(converted), "--task_name", "stsb", "--data_dir", str(FIXTURES / "STS-B")]
    argv += ["--output_dir", str(tmp_path / "out"), "--max_length", "48", "--max_train_steps", "2", "--cpu"]
    argv += ["--disable_tqdm", "--checkpointing_steps", "1", "--with_tracking"]
    return [*argv, "--push_to_hub", "--hub_model_id", "me/stsb", "--hub_private_repo", "--hub_token", TOKEN]


@pytest.mark.thorough
def test_finished_run_is_pushed(arguments, hub, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "predictions_nbest_dev.json").write_text("{}")  # as written by other scripts
    results = run_command(glue, *arguments, "--overwrite_output_dir")
    assert f"Pushed to {hub.url}/me/stsb" in capsys.readouterr().out
    repository, remote_files = hub.repositories["me/stsb"], hub.files("me/stsb")
    assert (tmp_path / "out" / "runs").is_dir()
    assert repository.private and len(repository.log) == 2
    assert remote_files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert not any(name.startswith(("checkpoint-", "runs/", "predictions_")) for name in remote_files)
    card = remote_files["README.md"].decode()
    data = yaml.safe_load(card.split("---\n")[1])
    scores = {m["type"]: m["value"] for r in data["model-index"][0]["results"] for m in r["metrics"]}
    assert scores["pearson"] == pytest.approx(results["eval_pearson"], abs=1e-4)
    assert data["pipeline_tag"] == "text-classification" and "2 key/value heads for 4 query heads" in card
    for text in (card, remote_files["all_results.json"].decode()):
        assert TOKEN not in text and str(tmp_path) not in text


@pytest.mark.thorough
def test_failed_push_error_names_the_model_folder(arguments, hub, tmp_path):
    hub.fail("POST .*/commit/main", 403)
    with pytest.raises(OSError, match=r"write access.*The trained model is in .*attn-variants push"):
        run_command(glue, *arguments)
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["steps"] == 2
    assert {"model.safetensors", "predictions_STS-B.tsv"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert hub.files("me/stsb").keys() == {".gitattributes"}


@pytest.mark.parametrize(
    ("replaced", "value", "message"),
    [
        (TOKEN, "hf_wrong", "hf auth login"),
        ("me/stsb", "me/public", "me/public must be private"),
        ("me/stsb", "me/sts b", "Repo id"),
    ],
)
def test_push_that_must_fail_raises_before_training(replaced, value, message, arguments, hub, tmp_path):
    hub.create("me/public", private=False)
    arguments[arguments.index(replaced)] = value
    with pytest.raises((OSError, ValueError), match=message):
        run_command(glue, *arguments)
    assert not (tmp_path / "out").exists()
    assert bool(hub.requests) == (message != "Repo id")
