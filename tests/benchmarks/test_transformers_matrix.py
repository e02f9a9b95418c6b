"""The matrix of saved repositories and transformers versions: what it finds the same, and what it does not."""

import importlib
import json
from pathlib import Path

import architectures
import pytest
import relatives
import transformers
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def matrix(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("transformers_matrix")


@pytest.mark.slow
def test_repositories_that_differ_or_fail_are_found(matrix, monkeypatch, tmp_path):
    worker = importlib.import_module("matrix_worker")
    monkeypatch.setattr(architectures, "ARCHITECTURES", [architectures.T5])
    monkeypatch.setattr(relatives, "RELATIVES", ())
    head = "T5ForConditionalGeneration"
    saved = worker.save(tmp_path / "saved")
    assert saved["repositories"] == [f"{head}-{variant}" for variant in worker.VARIANTS]
    monkeypatch.setattr(matrix, "KEPT", tmp_path / "kept")
    matrix.keep(tmp_path / "saved", "0.0")
    [(name, kept)] = matrix.kept_repositories(tmp_path).items()
    assert name == "0.0, kept" and [path.name for path in kept.iterdir()] == [f"{head}-latent"]
    for path in (tmp_path / f"saved/{head}-latent").iterdir():
        assert (kept / f"{head}-latent" / path.name).read_bytes() == path.read_bytes()
    weights = tmp_path / f"saved/{head}-gqa/model.safetensors"
    tensors = load_file(weights)
    tensors["shared.weight"][7] += 0.01
    save_file(tensors, weights, metadata={"format": "pt"})
    (tmp_path / f"saved/{head}-talking/talking_heads.py").write_text("raise ImportError('gone')\n")
    # The transformers that is there, as one that was installed.
    (tmp_path / f"transformers-{transformers.__version__}").mkdir()
    found = matrix.run_under(transformers.__version__, "load", tmp_path / "saved", tmp_path)
    rows = {row["repository"]: row for row in found["rows"]}
    assert [matrix.is_same(rows[f"{head}-{variant}"]) for variant in worker.VARIANTS] == [False, True, False]
    assert rows[f"{head}-talking"]["error"] == "ImportError: gone" and rows[f"{head}-gqa"]["largest_difference"] > 1e-4
    assert rows[f"{head}-latent"]["same_tokens"]


def test_the_table_counts_what_is_the_same(matrix):
    same = {"largest_difference": 1e-6, "largest_logit": 2.0}
    rows = [
        {"saved_by": "a", "loaded_with": "5.15.1"} | same,
        {"saved_by": "a", "loaded_with": "5.15.1", "same_tokens": False} | same,
        {"saved_by": "a", "loaded_with": "5.16.0", "error": "x"},
        {"saved_by": "b", "loaded_with": "5.16.0", "same_tokens": True} | same,
    ]
    assert matrix.table({"rows": rows}).splitlines()[2:] == [
        "| 5.15.1 | 1 of 2 the same | 0 of 0 the same |",
        "| 5.16.0 | 0 of 1 the same | 1 of 1 the same |",
    ]


def test_the_document_has_the_table_of_the_results(matrix):
    results = json.loads((ROOT / "benchmarks/results/transformers_matrix.json").read_text(encoding="utf-8"))
    assert matrix.table(results) in (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
