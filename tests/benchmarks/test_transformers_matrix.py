"""Check the matrix of saved repositories and Transformers versions: the differences that it reports."""

import json
from pathlib import Path
from types import SimpleNamespace

import architectures
import pytest
import relatives
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.versions import matrix_worker, transformers_matrix

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_matrix_reports_differing_and_failing_repositories(monkeypatch, tmp_path):
    monkeypatch.setattr(architectures, "ARCHITECTURES", [architectures.T5])
    monkeypatch.setattr(relatives, "RELATIVES", ())
    head = "T5ForConditionalGeneration"
    saved = matrix_worker.save(tmp_path / "saved")
    assert saved["repositories"] == [f"{head}-{variant}" for variant in matrix_worker.VARIANTS]
    monkeypatch.setattr(transformers_matrix, "KEPT", tmp_path / "kept")
    transformers_matrix.keep(tmp_path / "saved", "0.0")
    [(name, repository)] = transformers_matrix.unpack_kept_repositories(tmp_path).items()
    assert name == "0.0, kept"
    assert {path.name for path in repository.iterdir()} == {f"{head}-{item}" for item in ("latent", "hybrid")}
    for path in (tmp_path / f"saved/{head}-latent").iterdir():
        assert (repository / f"{head}-latent" / path.name).read_bytes() == path.read_bytes()
    weights = tmp_path / f"saved/{head}-gqa/model.safetensors"
    tensors = load_file(weights)
    tensors["shared.weight"][7] += 0.01
    save_file(tensors, weights, metadata={"format": "pt"})
    (tmp_path / f"saved/{head}-talking/talking_heads.py").write_text("raise ImportError('gone')\n")
    # This folder makes the installed Transformers a version of the matrix.
    (tmp_path / f"transformers-{transformers.__version__}").mkdir()
    result = transformers_matrix.run_under(transformers.__version__, "load", tmp_path / "saved", tmp_path)
    rows = {row["repository"]: row for row in result["rows"]}
    result = {variant: transformers_matrix.is_same(rows[f"{head}-{variant}"]) for variant in matrix_worker.VARIANTS}
    assert result == dict.fromkeys(matrix_worker.VARIANTS, True) | {"gqa": False, "talking": False}
    assert rows[f"{head}-talking"]["error"] == "ImportError: gone" and rows[f"{head}-gqa"]["largest_difference"] > 1e-4
    assert rows[f"{head}-latent"]["same_tokens"] and rows[f"{head}-latent"]["same_greedy"]
    assert "cache_lengths" not in rows[f"{head}-dynamic"]


def test_matrix_detects_a_lost_cache(monkeypatch):
    """Check a cache that is dropped, as by Transformers 5.24 for older code: single passes are still right."""
    name = matrix_worker._cache_name()
    for row, head in ((architectures.T5, "T5ForConditionalGeneration"), (architectures.BERT, "BertLMHeadModel")):
        model, inputs = row.make_model(head, "gqa"), row.make_batch(head)
        if row is architectures.BERT:
            inputs = {"input_ids": inputs["input_ids"]}
        logits = {"largest_difference": 0.0, "largest_logit": 1.0}
        assert transformers_matrix.is_same(logits | matrix_worker._compare_cached_steps(model, inputs))
        forward = type(model).forward

        def without(self, *args, forward=forward, **kwargs):
            return forward(self, *args, **{item: value for item, value in kwargs.items() if item != name})

        monkeypatch.setattr(type(model), "forward", without)
        lost = matrix_worker._compare_cached_steps(model, inputs)
        assert lost["cache_lengths"] == list(matrix_worker.PIECES) and lost["steps_difference"] > 1e-3
        assert not transformers_matrix.is_same(logits | lost)


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
def test_every_kind_of_fault_is_counted(fault):
    same = {"largest_difference": 1e-6, "largest_logit": 2.0, "steps_difference": 1e-6}
    same |= {"cache_lengths": transformers_matrix.CACHE_LENGTHS, "same_greedy": True, "same_tokens": True}
    assert transformers_matrix.is_same(same) and not transformers_matrix.is_same(same | fault)


def test_versions_are_read_from_the_package_index(monkeypatch):
    final = "transformers (5.24.1)\nAvailable versions: 5.24.1, 5.24.0, 5.23.0, 5.15.1, 5.15.0, 5.14.9, 4.57.6\n"

    def listed(command, **options):
        more = "6.0.0rc1, 5.25.0rc0, " if "--pre" in command else ""
        return SimpleNamespace(stdout=final.replace("versions: ", f"versions: {more}"))

    monkeypatch.setattr(transformers_matrix.subprocess, "run", listed)
    monkeypatch.setattr(transformers_matrix, "NEWEST_TESTED", "5.23")
    assert transformers_matrix.list_published_versions() == ["5.15.1", "5.23.0", "5.24.1"]
    assert transformers_matrix.get_newest_versions() == ["5.23.0", "5.24.1", "6.0.0rc1"]


def test_matrix_table_counts_equal_repositories():
    same = {"largest_difference": 1e-6, "largest_logit": 2.0}
    rows = [
        {"saved_by": "a", "loaded_with": "5.15.1"} | same,
        {"saved_by": "a", "loaded_with": "5.15.1", "same_tokens": False} | same,
        {"saved_by": "a", "loaded_with": "5.16.0", "error": "x"},
        {"saved_by": "b", "loaded_with": "5.16.0", "same_tokens": True} | same,
    ]
    assert transformers_matrix.format_table({"rows": rows}).splitlines()[2:] == [
        "| 5.15.1 | 1 of 2 the same | 0 of 0 the same |",
        "| 5.16.0 | 0 of 1 the same | 1 of 1 the same |",
    ]


def test_compatibility_page_contains_the_table_of_the_results():
    results = json.loads((ROOT / "benchmarks/versions/results/transformers_matrix.json").read_text(encoding="utf-8"))
    assert transformers_matrix.format_table(results) in (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
