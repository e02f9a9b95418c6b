"""Check the records of benchmark runs: rows are added to a file, and a finished run is reused only if it matches."""

import json
from pathlib import Path

import pytest

from benchmarks import run_records
from hf_attn_variants.commands.training import glue as run_glue

FLAGS = ["--model_name_or_path", "models/a", "--task_name", "cola", "--output_dir", "o", "--data_dir", "here/cola"]


def test_rows_are_added_or_replaced_by_key(tmp_path):
    path = tmp_path / "rows.json"
    run_records.write_rows(
        path, {"commands": {"a": "x"}, "device": "one"}, [{"name": "a", "seed": 1, "score": 1}], ["name"]
    )
    rows = [{"name": "b", "seed": 1, "score": 2}, {"name": "a", "seed": 1, "score": 3}]
    row = {"name": "a", "seed": 1, "score": 1}
    run_records.write_rows(path, {"commands": {"a": "x"}, "device": "one"}, [row], ["name", "seed"])
    rows = [{"name": "b", "seed": 1, "score": 2}, {"name": "a", "seed": 1, "score": 3}]
    run_records.write_rows(path, {"commands": {"b": "y"}, "device": "two"}, rows, ["name", "seed"])
    result = json.loads(path.read_text())
    assert result["commands"] == {"a": "x", "b": "y"} and result["device"] == "two"
    assert [(row["name"], row["score"]) for row in result["runs"]] == [("a", 3), ("b", 2)]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.json"]


def test_run_with_other_arguments_raises_an_error_that_names_them(tmp_path):
    arguments = json.loads(json.dumps(vars(run_glue.parse_args(FLAGS)), default=str))
    (tmp_path / "all_results.json").write_text(json.dumps({"eval_loss": 1.0, "arguments": arguments}))
    elsewhere = [*FLAGS[:-1], "there/cola", "--overwrite_output_dir"]
    assert run_records.check_arguments(tmp_path, run_glue.parse_args, elsewhere)["eval_loss"] == 1.0
    with pytest.raises(SystemExit, match=r"other arguments .*seed.*42, now 7"):
        run_records.check_arguments(tmp_path, run_glue.parse_args, [*FLAGS, "--seed", "7"])
    with pytest.raises(SystemExit, match=r"model_name_or_path.*models/a.*models/b"):
        run_records.check_arguments(tmp_path, run_glue.parse_args, ["--model_name_or_path", "models/b", *FLAGS[2:]])


def test_checkpoint_of_another_model_raises_an_error(tmp_path):
    run_records.check_source(tmp_path, "a/minilm")  # the folder has no conversion report yet
    (tmp_path / "conversion_report.json").write_text(json.dumps({"source": "a/minilm"}))
    run_records.check_source(tmp_path, Path("b/minilm"))
    with pytest.raises(SystemExit, match="converted from a/minilm, not from a/bert"):
        run_records.check_source(tmp_path, "a/bert")
