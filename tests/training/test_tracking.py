"""Check the records of a run: `all_results.json` and its curves."""

import io
import json

import pytest
from accelerate import Accelerator
from fixtures.full_disk import full_disk
from tqdm import tqdm

from hf_attn_variants.training.engine.session import RunLog, save_results
from hf_attn_variants.training.engine.settings import TrainingSettings


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("runs/bert", "./runs/bert"),
        ("./runs/bert", "./runs/bert"),
        ("runs/bert/", "./runs/bert"),
        ("google-bert/bert-base-uncased", "google-bert/bert-base-uncased"),
    ],
)
def test_local_folder_is_not_recorded_as_a_hub_id(name, written, tmp_path, monkeypatch):
    (tmp_path / "runs/bert").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    settings = TrainingSettings(model_name_or_path=name, output_dir="o", push_to_hub=True, hub_token="hf_secret")
    save_results("all_results.json", {"eval_loss": float("nan")}, settings)
    text = (tmp_path / "all_results.json").read_text()
    record = json.loads(text)
    assert record["arguments"] == {k: v for k, v in settings.values().items() if k != "hub_token"} | {
        "model_name_or_path": written
    }
    assert "hf_secret" not in text
    assert record["eval_loss"] is None


def test_full_disk_leaves_no_partial_records(tmp_path):
    with full_disk(64):
        with pytest.raises(OSError, match=r"results\.json cannot be written \(OSError: .*File too large"):
            save_results(
                tmp_path / "results.json", {"score": 1.0}, TrainingSettings(model_name_or_path="m", output_dir="o")
            )
    assert not list(tmp_path.iterdir())


def test_progress_bar_fits_80_columns_with_scores_above_it(tmp_path, capsys):
    screen = io.StringIO()
    bar = tqdm(total=5000, initial=1234, desc="Training", unit="step", ncols=80, file=screen)
    log = RunLog(Accelerator(cpu=True), tmp_path, bar)
    log.write({"step": 1233, "loss": 0.123456, "lr": 1e-3})
    scores = {"eval_pearson": -0.4399, "eval_spearmanr": 0.5, "eval_combined_score": 0.1, "eval_loss": 2.25}
    log.write({"step": 1234, "epoch": 1.0, **scores})
    bar.refresh()
    last_line = screen.getvalue().split("\r")[-1]
    bar.close()
    assert "loss=0.1235]" in last_line and len(last_line.split("|")[1]) >= 10 and len(last_line) <= 80
    expected = "Step 1234, dev: pearson -0.4399, spearmanr 0.5, combined_score 0.1, loss 2.25\n"
    assert capsys.readouterr().err == expected
