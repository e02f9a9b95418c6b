"""Check the matrix of saved repositories and Transformers versions: the differences that it reports."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import architectures
import pytest
import relatives
import transformers
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def matrix(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.versions.transformers_matrix")


@pytest.mark.slow
def test_matrix_reports_differing_and_failing_repositories(matrix, monkeypatch, tmp_path):
    worker = importlib.import_module("benchmarks.versions.matrix_worker")
    monkeypatch.setattr(architectures, "ARCHITECTURES", [architectures.T5])
    monkeypatch.setattr(relatives, "RELATIVES", ())
    head = "T5ForConditionalGeneration"
    saved = worker.save(tmp_path / "saved")
    assert saved["repositories"] == [f"{head}-{variant}" for variant in worker.VARIANTS]
    monkeypatch.setattr(matrix, "KEPT", tmp_path / "kept")
    matrix.keep(tmp_path / "saved", "0.0")
    [(name, repository)] = matrix.unpack_kept_repositories(tmp_path).items()
    assert name == "0.0, kept" and {path.name for path in repository.iterdir()} == {
        f"{head}-{item}" for item in ("latent", "hybrid")
    }
    for path in (tmp_path / f"saved/{head}-latent").iterdir():
        assert (repository / f"{head}-latent" / path.name).read_bytes() == path.read_bytes()
    weights = tmp_path / f"saved/{head}-gqa/model.safetensors"
    tensors = load_file(weights)
    tensors["shared.weight"][7] += 0.01
    save_file(tensors, weights, metadata={"format": "pt"})
    (tmp_path / f"saved/{head}-talking/talking_heads.py").write_text("raise ImportError('gone')\n")
    # This folder makes the installed Transformers a version of the matrix.
    (tmp_path / f"transformers-{transformers.__version__}").mkdir()
    result = matrix.run_under(transformers.__version__, "load", tmp_path / "saved", tmp_path)
    rows = {row["repository"]: row for row in result["rows"]}
    result = {variant: matrix.is_same(rows[f"{head}-{variant}"]) for variant in worker.VARIANTS}
    assert result == dict.fromkeys(worker.VARIANTS, True) | {"gqa": False, "talking": False}
    assert rows[f"{head}-talking"]["error"] == "ImportError: gone" and rows[f"{head}-gqa"]["largest_difference"] > 1e-4
    assert rows[f"{head}-latent"]["same_tokens"] and rows[f"{head}-latent"]["same_greedy"]
    assert "cache_lengths" not in rows[f"{head}-dynamic"]


def test_matrix_detects_a_lost_cache(matrix, monkeypatch):
    """Check a cache that is dropped, as by Transformers 5.24 for older code: single passes are still right."""
    worker = importlib.import_module("benchmarks.versions.matrix_worker")
    name = worker._cache_name()
    for row, head in ((architectures.T5, "T5ForConditionalGeneration"), (architectures.BERT, "BertLMHeadModel")):
        model, inputs = row.make_model(head, "gqa"), row.make_batch(head)
        if row is architectures.BERT:
            inputs = {"input_ids": inputs["input_ids"]}
        logits = {"largest_difference": 0.0, "largest_logit": 1.0}
        assert matrix.is_same(logits | worker._compare_cached_steps(model, inputs))
        forward = type(model).forward

        def without(self, *args, forward=forward, **kwargs):
            return forward(self, *args, **{item: value for item, value in kwargs.items() if item != name})

        monkeypatch.setattr(type(model), "forward", without)
        lost = worker._compare_cached_steps(model, inputs)
        assert lost["cache_lengths"] == list(worker.PIECES) and lost["steps_difference"] > 1e-3
        assert not matrix.is_same(logits | lost)


@pytest.mark.parametrize(
    "fault",
    [
        {"error": "x"},
        {"warnings": ["x"]},
        {"largest_difference": 1e-3},
        {"steps_difference": 1e-3},
        {"steps_difference": float("nan")},
        {"cache_lengths": [3, 4, 5, 6, 7, 8, 8]},
        {"same_greedy": False},
        {"same_tokens": False},
    ],
    ids=str,
)
def test_every_kind_of_fault_is_counted(matrix, fault):
    same = {"largest_difference": 1e-6, "largest_logit": 2.0, "steps_difference": 1e-6}
    same |= {"cache_lengths": matrix.CACHE_LENGTHS, "same_greedy": True, "same_tokens": True}
    assert matrix.is_same(same) and not matrix.is_same(same | fault)


def test_versions_are_read_from_the_package_index(matrix, monkeypatch):
    final = "transformers (5.24.1)\nAvailable versions: 5.24.1, 5.24.0, 5.23.0, 5.15.1, 5.15.0, 5.14.9, 4.57.6\n"

    def listed(command, **options):
        more = "6.0.0rc1, 5.25.0rc0, " if "--pre" in command else ""
        return SimpleNamespace(stdout=final.replace("versions: ", f"versions: {more}"))

    monkeypatch.setattr(matrix.subprocess, "run", listed)
    monkeypatch.setattr(matrix, "NEWEST_TESTED", "5.23")
    assert matrix.list_published_versions() == ["5.15.1", "5.23.0", "5.24.1"]
    assert matrix.get_newest_versions() == ["5.23.0", "5.24.1", "6.0.0rc1"]


def test_matrix_table_counts_equal_repositories(matrix):
    same = {"largest_difference": 1e-6, "largest_logit": 2.0}
    rows = [
        {"saved_by": "a", "loaded_with": "5.15.1"} | same,
        {"saved_by": "a", "loaded_with": "5.15.1", "same_tokens": False} | same,
        {"saved_by": "a", "loaded_with": "5.16.0", "error": "x"},
        {"saved_by": "b", "loaded_with": "5.16.0", "same_tokens": True} | same,
    ]
    assert matrix.format_table({"rows": rows}).splitlines()[2:] == [
        "| 5.15.1 | 1 of 2 the same | 0 of 0 the same |",
        "| 5.16.0 | 0 of 1 the same | 1 of 1 the same |",
    ]


def test_compatibility_page_contains_the_table_of_the_results(matrix):
    results = json.loads((ROOT / "benchmarks/versions/results/transformers_matrix.json").read_text(encoding="utf-8"))
    assert matrix.format_table(results) in (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
