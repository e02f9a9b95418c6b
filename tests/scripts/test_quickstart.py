"""Check the quickstart on the embedded model and pairs, with a few steps of distillation."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from fixtures.glue.tiny_bert import FIXTURES, make_tiny_bert

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "quickstart.py"


@pytest.fixture
def quickstart(monkeypatch):
    import sys

    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def test_embedded_pairs_are_complete(quickstart):
    _, _, splits = quickstart._load(quickstart.parse_args([]))
    assert len(splits["train"]) == 1000 and len(splits["dev"]) == 375
    assert {path.name for path in quickstart.DATA_DIR.iterdir()} >= {"LICENSE.txt", "README.md"}


# By default, only the task of the quickstart runs, because each task takes twelve seconds.
@pytest.mark.thorough
@pytest.mark.parametrize("task", ["similarity", *(pytest.param(t, marks=pytest.mark.slow) for t in ("stsb", "cola"))])
def test_quickstart_runs_for_every_kind_of_task(quickstart, tmp_path, capsys, task):
    model = make_tiny_bert(tmp_path / "tiny", positions=256)
    arguments = ["--model", str(model), "--task", task, "--num_key_value_heads", "1", "--seeds", "0", "1"]
    arguments += ["--distillation_steps", "1", "--num_train_epochs", "0.02", "--output_dir", str(tmp_path / "out")]
    if task == "cola":  # single sentences; the other tasks use the embedded pairs
        shutil.copytree(FIXTURES / "CoLA", tmp_path / "CoLA")
        rows = (FIXTURES / "CoLA" / "train.tsv").read_text()
        texts = "".join(rows.replace("\n", f" {i}\n") for i in range(20))  # enough text for a calibration
        (tmp_path / "CoLA" / "train.tsv").write_text(texts)
        arguments += ["--data_dir", str(tmp_path / "CoLA")]
    rows = quickstart.main(quickstart.parse_args(arguments))
    assert [row["model"] for row in rows] == ["multi-head", "1 heads, averaged", "1 heads, calibrated"]
    assert all(len(row["converted"]) == len(row["distilled"]) == 2 for row in rows[1:])
    (run,) = (tmp_path / "out").iterdir()
    assert json.loads((run / "quickstart.json").read_text())["rows"] == rows
    assert (run / "quickstart.png").stat().st_size > 10_000
    printed = capsys.readouterr()
    assert "same outputs" in printed.out and "mean and half the range of 2 seeds" in printed.out
    # The trainings write their output to log.txt instead of the console.
    assert "results in" not in printed.out and "results in" in (run / "log.txt").read_text()
    assert "embedding_cosine" not in printed.err


def test_quickstart_rejects_invalid_flags_before_any_work(quickstart, capsys):
    assert quickstart.parse_args(["--seeds", "0", "1", "0"]).seeds == [0, 1]  # each seed has one folder
    with pytest.raises(SystemExit):
        quickstart.parse_args(["--distillation_steps", "0"])
    assert "--distillation_steps must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_quickstart_converts_and_distills(quickstart, minilm, tmp_path):
    arguments = ["--distillation_steps", "10", "--seeds", "0", "--output_dir", str(tmp_path)]
    source_results, averaged, calibrated = quickstart.main(quickstart.parse_args(arguments))
    for grouped in (averaged, calibrated):
        assert grouped["parameters"] < source_results["parameters"]
        # The key and value projections shrink to a third, so 2 + 2/3 of 4 projections remain.
        assert grouped["projection_flops"] == pytest.approx(source_results["projection_flops"] * (2 + 2 / 3) / 4)
    (source,), (before,), (after,) = source_results["converted"], averaged["converted"], averaged["distilled"]
    assert source > calibrated["converted"][0] > after > before > 0.8
    assert source - calibrated["converted"][0] < 0.01 and source - calibrated["distilled"][0] < 0.01
