"""Check the rows of the comparison, which come from the tables of the package, and what its tables say."""

import json
from pathlib import Path

import pytest
from fixtures.plugins import restored_tables
from transformers import AutoModel

from benchmarks.comparison import tables
from benchmarks.comparison.report import collect
from benchmarks.comparison.rows import MODELS, build_config, list_head_rows, list_mechanism_rows
from benchmarks.comparison.stages import BUDGETS, Stage, iterate_stages
from hf_attn_variants import load_plugin
from hf_attn_variants.modeling.fields.field_table import VARIANT_FIELDS
from hf_attn_variants.modeling.mechanisms.kernels.kernel_table import KERNELS
from hf_attn_variants.modeling.mechanisms.patterns.pattern_table import PATTERNS

__all__ = ["restored_tables"]

EXAMPLE = Path(__file__).parents[2] / "examples/my_attention.py"
LOSSES = {"MHA, 8 heads": (2.0, 2.1), "MQA, 8 heads": (2.12, 2.16), "talking heads, 8 heads": (1.8, 1.9)}


@pytest.mark.parametrize("name", MODELS)
def test_each_mechanism_of_the_tables_has_a_row(name):
    names = " ".join(row.name for row in list_mechanism_rows(MODELS[name]))
    extensions = [row.name.replace("_", " ") for row in VARIANT_FIELDS if "extension" in row.tags]
    for expected in (*KERNELS, *PATTERNS, *extensions, "kv lora rank", "value head dim", "additive"):
        assert expected in names


@pytest.mark.parametrize("name", MODELS)
def test_mechanisms_of_a_plugin_have_rows(name, restored_tables):
    before = {row.name for row in list_mechanism_rows(MODELS[name])}
    load_plugin(EXAMPLE)
    new = [row for row in list_mechanism_rows(MODELS[name]) if row.name not in before]
    assert [row.fields["score_function"] for row in new if "score" in row.name] == ["cosine"]
    assert [row.fields["attention_kernel"] for row in new if "kernel" in row.name] == ["square"] and len(new) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_models_from_scratch_have_the_same_number_of_parameters(name):
    counts = []
    for row in (*list_head_rows(), *list_mechanism_rows(MODELS[name])):
        if row.unsupported is None:
            model = AutoModel.from_config(build_config(MODELS[name], row, vocab_size=100))
            counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert len(counts) > 30 and max(counts) < 1.002 * min(counts)


def test_stages_share_their_flags_and_train_the_head_rows_with_two_seeds(tmp_path):
    stages = iterate_stages(tmp_path, tmp_path, BUDGETS["small"], "plugin.py")
    bert, t5, mechanisms = (next(stages) for _ in range(3))
    assert (bert.content["seeds"], t5.content["seeds"], mechanisms.content["seeds"]) == ([0, 1], [0, 1], [0])
    assert [*bert.content["variants"]] == [*t5.content["variants"]] == [row.name for row in list_head_rows()[:4]]
    assert bert.content["flags"] == mechanisms.content["flags"] and bert.content["flags"]["plugin"] == "plugin.py"


def test_conversions_load_the_plugin(tmp_path):
    stages = iterate_stages(tmp_path, tmp_path, BUDGETS["small"], "plugin.py")
    for name in MODELS:
        variants = next(stage for stage in stages if stage.name == f"{name}-converted").content["variants"]
        assert {row["convert"]["plugin"] for row in variants.values() if "convert" in row} == {"plugin.py"}


def test_curve_gives_text_to_the_methods_that_use_it(tmp_path):
    *_, curve = iterate_stages(tmp_path, tmp_path, BUDGETS["small"], None)
    has_text = {name: "calibration_file" in row["convert"] for name, row in curve.content["variants"].items()}
    assert [name for name, found in has_text.items() if found] == ["similarity grouping (aligned)", "calibrated"]


def make_stage(tmp_path, losses):
    """Return a stage with one more row than there are results, and the folder of its sweep."""
    runs = {
        name: {str(seed): {"eval_loss": loss, "steps": 2} for seed, loss in enumerate(found)}
        for name, found in losses.items()
    }
    contestants = [{"name": name, "runs": found} for name, found in runs.items()]
    (tmp_path / "sweep_results.json").write_text(json.dumps({"contestants": contestants}))
    variants = {name: {} for name in (*losses, "not run")}
    return Stage("bert-heads", {"variants": variants}, {"linformer": "no"})


def test_rows_without_a_run_are_kept_without_results(tmp_path):
    report = collect({}, make_stage(tmp_path, LOSSES), tmp_path)["bert-heads"]
    assert report["rows"]["not run"] == {} and report["rows"]["MHA, 8 heads"]["1"] == {"eval_loss": 2.1, "steps": 2}
    assert report["unsupported"] == {"linformer": "no"}


def test_report_keeps_the_results_of_runs_that_are_not_in_the_work_folder(tmp_path):
    earlier = collect({}, make_stage(tmp_path, LOSSES), tmp_path)
    stage = Stage("bert-heads", {"variants": {"MHA, 8 heads": {}, "new": {}}}, {})
    report = collect({}, stage, tmp_path / "no folder", earlier)["bert-heads"]
    assert report["rows"] == {"MHA, 8 heads": earlier["bert-heads"]["rows"]["MHA, 8 heads"], "new": {}}
    assert collect({}, stage, tmp_path / "no folder")["bert-heads"]["rows"] == {"MHA, 8 heads": {}, "new": {}}


def test_differences_within_the_seed_range_are_not_distinguishable(tmp_path):
    rows = collect({}, make_stage(tmp_path, LOSSES), tmp_path)["bert-heads"]["rows"]
    losses = tables.Losses(rows, rows["MHA, 8 heads"])
    compared = {name: (losses.compare(name), losses.rank(name)) for name in rows}
    assert compared == {
        "MHA, 8 heads": ("not distinguishable", "2"),
        "MQA, 8 heads": ("not distinguishable", "2"),
        "talking heads, 8 heads": ("-0.200", "1"),
        "not run": ("missing", ""),
    }


def test_without_two_seeds_nothing_is_compared(tmp_path):
    rows = collect({}, make_stage(tmp_path, {name: found[:1] for name, found in LOSSES.items()}), tmp_path)
    rows = rows["bert-heads"]["rows"]
    losses = tables.Losses(rows, rows["MHA, 8 heads"])
    assert {losses.compare(name) for name in rows} == {"missing"} and {losses.rank(name) for name in rows} == {""}
