"""The quickstart, end to end on the embedded model and pairs, with two training steps for each model."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "quickstart.py"


@pytest.fixture
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_embedded_pairs_are_whole(quickstart):
    from hf_attn_variants.training.glue import get_task
    from hf_attn_variants.training.glue_data import load_glue

    splits = load_glue(get_task("stsb"), str(quickstart.DATA_DIR))
    assert len(splits["train"]) == 1000 and len(splits["validation"]) == 375
    assert {path.name for path in quickstart.DATA_DIR.iterdir()} >= {"LICENSE.txt", "README.md"}


@pytest.mark.slow
def test_quickstart(quickstart, minilm, tmp_path, capsys):
    rows = quickstart.main(quickstart.parse_args(["--num_train_epochs", "0.02", "--output_dir", str(tmp_path)]))
    whole, pooled, calibrated = rows
    for grouped in (pooled, calibrated):
        assert grouped["parameters"] < whole["parameters"]
        # Keys and values shrink to a third: (2 + 2/3) of 4 projections are left.
        assert grouped["projection_flops"] == pytest.approx(whole["projection_flops"] * (2 + 2 / 3) / 4)
    assert whole["before"] > calibrated["before"] > pooled["before"] > 0.7
    assert whole["before"] - calibrated["before"] < 0.01
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "quickstart.json").read_text()) == rows
    assert (run / "quickstart.png").stat().st_size > 10_000
    assert "same predictions" in capsys.readouterr().out
