"""Check the benchmark of converted kernels: rows before and after a fit, without repeated measurements."""

import json

import pytest
from fixtures.calibrations import WordTokenizer, compute_error, make_bert, make_texts
from fixtures.commands import run_command
from fixtures.glue.tiny_bert import make_tiny_bert
from transformers import AutoTokenizer

from benchmarks.convert import kernel_conversion


@pytest.mark.thorough
def test_kernel_benchmark_has_rows_before_and_after_the_fit(tmp_path, monkeypatch):
    model = make_bert()
    model.save_pretrained(tmp_path / "source")

    class Tiny:
        reads, source, tokenizer = (), tmp_path / "source", WordTokenizer()

        def __init__(self, data_dir):
            pass

        def sample_calibration_lines(self, seed):
            return make_texts(256)

        def compute_scores(self, converted):
            return {"error": compute_error(converted, model)}

    monkeypatch.setitem(kernel_conversion.SUBJECTS, "lines", Tiny)
    flags = ["--kernels", "hedgehog", "--fit_steps", "20", "--features", "4", "--output_dir", str(tmp_path)]
    unfitted, fitted = run_command(kernel_conversion, *flags)
    assert (unfitted["fit"], fitted["fit"]) == (kernel_conversion.UNFITTED, 20) and fitted["error"] < unfitted["error"]
    assert json.loads((tmp_path / "kernel_conversion.json").read_text())["runs"] == [unfitted, fitted]
    monkeypatch.setattr(kernel_conversion, "convert", None)
    assert run_command(kernel_conversion, *flags) == [unfitted, fitted]
    monkeypatch.undo()
    monkeypatch.setitem(kernel_conversion.SUBJECTS, "lines", Tiny)
    flags = ["--kernels", "hybrid", "--fit_steps", "20", "--window", "2", "--output_dir", str(tmp_path)]
    rows = {(row["fit"], row["reads"]): row["error"] for row in run_command(kernel_conversion, *flags)[2:]}
    assert len(rows) == 6 and rows[20, "both"] < rows[kernel_conversion.UNFITTED, "both"]
    assert all(rows[20, "both"] < rows[20, branch] for branch in ("the window", "outside of it"))


@pytest.mark.thorough
def test_token_matching_layers_and_distillation_have_separate_rows(tmp_path, monkeypatch):
    source, lines = make_tiny_bert(tmp_path / "source"), [f"the cat saw the cat and a dog {i}" for i in range(300)]

    class Tiny:
        uptraining, batch_size = ("--objective", "distill", "--max_length", "16"), 4
        reads, tokenizer = (), AutoTokenizer.from_pretrained(source)

        def __init__(self, data_dir):
            self.source = source

        def sample_calibration_lines(self, seed):
            return lines

        def write_training_texts(self, folder, seed, steps):
            (folder / "lines.txt").write_text("\n".join(lines))
            return ["--train_file", str(folder / "lines.txt")]

        def compute_scores(self, converted):
            return {"heads": str(converted.config.per_layer_values)}

    monkeypatch.setitem(kernel_conversion.SUBJECTS, "lines", Tiny)
    flags = ["--kernels", "elu", "--fit_steps", "2", "--output_dir", str(tmp_path), "--max_length", "16"]
    plain = run_command(kernel_conversion, *flags)
    rows = run_command(kernel_conversion, *flags, "--keep_matching_layers", "1", "--distillation_steps", "2")
    assert rows[:2] == plain and [row.get("distillation_steps") for row in rows[2:]] == [None, 2]
    assert all("'elu'" in row["heads"] and row["keep_matching_layers"] == 1 for row in rows[2:])
    assert [row["heads"] for row in plain] == ["None"] * 2
    monkeypatch.setattr(kernel_conversion, "convert", None)
    assert len(run_command(kernel_conversion, *flags)) == 4
