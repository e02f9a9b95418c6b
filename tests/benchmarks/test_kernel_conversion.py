"""The benchmark of kernels' quality: rows before and after a fit, and what is there is not measured again."""

import importlib
import json
from pathlib import Path

import pytest
from fixtures.calibrations import WordTokenizer, bert, error, text

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("kernel_conversion")


def test_rows_before_and_after_a_fit(benchmark, tmp_path, monkeypatch):
    model = bert()
    model.save_pretrained(tmp_path / "source")

    class Tiny:
        reads, source, tokenizer = (), tmp_path / "source", WordTokenizer()

        def __init__(self, data_dir):
            pass

        def calibration_lines(self, seed):
            return text(256)

        def scores_of(self, converted):
            return {"error": error(converted, model)}

    monkeypatch.setitem(benchmark.SUBJECTS, "lines", Tiny)
    flags = ["--kernels", "hedgehog", "--fit_steps", "20", "--features", "4", "--output_dir", str(tmp_path)]
    unfitted, fitted = benchmark.main(benchmark.parse_args(flags))
    assert (unfitted["fit"], fitted["fit"]) == (benchmark.UNFITTED, 20) and fitted["error"] < unfitted["error"]
    assert json.loads((tmp_path / "kernel_conversion.json").read_text())["runs"] == [unfitted, fitted]
    monkeypatch.setattr(benchmark, "convert", None)
    assert benchmark.main(benchmark.parse_args(flags)) == [unfitted, fitted]
    monkeypatch.undo()
    monkeypatch.setitem(benchmark.SUBJECTS, "lines", Tiny)
    flags = ["--kernels", "hybrid", "--fit_steps", "20", "--window", "2", "--output_dir", str(tmp_path)]
    rows = {(row["fit"], row["reads"]): row["error"] for row in benchmark.main(benchmark.parse_args(flags))[2:]}
    assert len(rows) == 6 and rows[20, "both"] < rows[benchmark.UNFITTED, "both"]
    assert all(rows[20, "both"] < rows[20, branch] for branch in ("the window", "outside of it"))
