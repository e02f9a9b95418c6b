"""What a run writes of itself: `all_results.json` and its curves."""

import argparse
import json

import pytest
from fixtures.full_disk import full_disk

from hf_attn_variants.training.tracking import plot_curves, save_results


@pytest.mark.parametrize(
    ("given", "written"),
    [("runs/bert", "./runs/bert"), ("google-bert/bert-base-uncased", "google-bert/bert-base-uncased")],
)
def test_a_folder_does_not_read_like_a_hub_id(given, written, tmp_path, monkeypatch):
    (tmp_path / "runs/bert").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    args = argparse.Namespace(model_name_or_path=given, hub_token="hf_secret", seed=3)
    save_results("all_results.json", {"eval_loss": float("nan")}, args)
    text = (tmp_path / "all_results.json").read_text()
    record = json.loads(text)
    assert record["arguments"] == {"model_name_or_path": written, "seed": 3} and "hf_secret" not in text
    assert record["eval_loss"] is None


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    with full_disk(64):
        with pytest.raises(OSError, match=r"could not write .*results\.json \(OSError: .*File too large"):
            save_results(tmp_path / "results.json", {"score": 1.0}, argparse.Namespace())
        with pytest.raises(OSError, match=r"could not write .*curves\.png"):
            plot_curves([{"step": 1, "loss": 1.0}], [], tmp_path / "curves.png", "title")
    assert not list(tmp_path.iterdir())
