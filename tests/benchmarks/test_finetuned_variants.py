"""The fine-tuning comparison: its checkpoints, its commands and its table."""

import argparse
import gzip
import importlib
import itertools
import json
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from hf_attn_variants.training import run_glue, run_squad, uptrain

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def comparison(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("finetuned_variants")


def test_each_variant_has_a_folder_of_its_own_and_starts_from_one_that_is_there(comparison):
    assert len({comparison.slug(name) for name in comparison.VARIANTS}) == len(comparison.VARIANTS)
    starts = {variant.distilled_from for variant in comparison.VARIANTS.values()} - {None}
    assert starts and starts <= comparison.VARIANTS.keys()


def test_commands_are_what_the_scripts_take(comparison, tmp_path):
    args = comparison.parse_args(["--model", "m", "--data_dir", str(tmp_path), "--work_dir", "w"])
    scripts = {"scripts/run_glue.py": run_glue, "scripts/run_squad.py": run_squad}
    for name, task in comparison.TASKS.items():
        run = comparison.Run(name, 7, "MHA")
        script, *flags = comparison._command(args, run, "checkpoint", "out", comparison.VARIANTS)
        parsed = scripts[script].parse_args(flags)
        assert (parsed.seed, parsed.num_train_epochs, parsed.learning_rate) == (7, task.epochs, 1e-4)
        data = parsed.data_dir if name != "squad" else parsed.train_file
        assert Path(data).is_relative_to(tmp_path) and parsed.max_length == (128 if name != "squad" else 256)


def test_a_checkpoint_is_made_once(comparison, tmp_path):
    config = BertConfig(hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, vocab_size=20)
    BertModel(config).save_pretrained(tmp_path / "source")
    args = argparse.Namespace(model=tmp_path / "source", work_dir=tmp_path / "work", data_dir=tmp_path)
    variants = {"MHA": comparison.Variant(), "GQA-2 (mean)": comparison.Variant({"num_key_value_heads": 2})}
    assert comparison.make_checkpoint(args, comparison.Run("cola", 0, "MHA"), variants) == args.model
    run = comparison.Run("cola", 0, "GQA-2 (mean)")
    folder = comparison.make_checkpoint(args, run, variants)
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 2
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert comparison.make_checkpoint(args, run, variants) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_a_distilled_variant_starts_from_its_calibrated_one(comparison, tmp_path, monkeypatch):
    (tmp_path / "wikipedia").mkdir()
    with gzip.open(tmp_path / "wikipedia/train-00000.txt.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"Line number {number} of a text that is long enough to be used.\n" for number in range(4000))
    commands = []
    monkeypatch.setattr(comparison.subprocess, "run", lambda command, **options: commands.append(command))
    args = argparse.Namespace(model=tmp_path / "source", work_dir=tmp_path, data_dir=tmp_path, threads=1)
    (tmp_path / "checkpoints" / "gqa-4-calibrated").mkdir(parents=True)
    run = comparison.Run("cola", 0, "GQA-4 (calibrated, distilled)")
    folder = comparison.make_checkpoint(args, run, comparison.VARIANTS)
    (command,) = commands
    flags = dict(itertools.pairwise(command))
    assert flags["--model_name_or_path"] == str(tmp_path / "checkpoints" / "gqa-4-calibrated")
    assert flags["--output_dir"] == str(folder) and flags["--teacher"] == str(args.model)
    texts = Path(flags["--train_file"]).read_text(encoding="utf-8").splitlines()
    assert 0.95 * len(texts) >= int(flags["--max_train_steps"]) * int(flags["--per_device_train_batch_size"])


def test_a_fine_tuned_model_is_its_variants_source_and_teacher_and_they_are_only_evaluated(
    comparison, tmp_path, monkeypatch, shared_data
):
    commands, runs = [], []
    monkeypatch.setattr(comparison.subprocess, "run", lambda command, **options: commands.append(command))
    monkeypatch.setattr(comparison, "_run", lambda args, checkpoint, run, variants: runs.append((checkpoint, run)))
    name = "GQA-4 (the fine-tuned MHA, calibrated on the task, distilled on it)"
    calibrated = comparison.VARIANTS[name].distilled_from
    start = tmp_path / "checkpoints" / f"{comparison.slug(calibrated)}-squad-7"
    start.mkdir(parents=True)
    monkeypatch.setattr(comparison, "check_source", lambda folder, source: None)
    flags = ["--model", "m", "--data_dir", str(shared_data), "--work_dir", str(tmp_path), "--max_train_steps", "2"]
    args, run = comparison.parse_args(flags), comparison.Run("squad", 7, name)
    folder = comparison.make_checkpoint(args, run, comparison.VARIANTS)
    (command,) = commands
    flags = dict(itertools.pairwise(command))
    assert flags["--model_name_or_path"] == str(start) and flags["--output_dir"] == str(folder)
    assert flags["--teacher"] == str(tmp_path / "runs/mha-squad-7")
    assert (args.model, comparison.Run("squad", 7, "MHA")) in runs
    parsed = uptrain.parse_args(command[2:])
    rows = [json.loads(line) for line in Path(parsed.train_file[0]).read_text().splitlines()]
    assert set(rows[0]) == {parsed.source_column, parsed.target_column}
    assert 0.95 * len(rows) >= parsed.max_train_steps * parsed.per_device_train_batch_size
    _, *flags = comparison._command(args, run, folder, "out", comparison.VARIANTS)
    assert run_squad.parse_args(flags).num_train_epochs == 0 and "--max_train_steps" not in flags


def test_a_task_is_calibrated_on_its_own_texts(comparison, shared_data):
    args = argparse.Namespace(data_dir=shared_data)
    for name, kind in (("cola", str), ("stsb", tuple), ("squad", tuple)):
        texts = comparison.task_texts(args, name)
        assert len(texts) == comparison.TASK_TEXTS and all(isinstance(text, kind) for text in texts)
    question, context = texts[0]
    assert len(context) > len(question) > 5


def test_a_finished_run_of_another_model_is_refused_before_any_run(comparison, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "_run", lambda *run: pytest.fail("a run was begun"))
    flags = ["--model", "new-model", "--data_dir", str(tmp_path), "--work_dir", str(tmp_path), "--tasks", "cola"]
    args = comparison.parse_args([*flags, "--variants", "MHA", "--output", str(tmp_path / "rows.json")])
    run = comparison.Run("cola", 42, "MHA")
    folder = comparison._folder(tmp_path, run)
    folder.mkdir(parents=True)
    _, *used = comparison._command(args, run, "somewhere/old-model", folder, comparison.VARIANTS)
    arguments = json.loads(json.dumps(vars(run_glue.parse_args(used)), default=str))
    (folder / "all_results.json").write_text(json.dumps({"arguments": arguments}))
    with pytest.raises(SystemExit, match=r"old-model.*now 'new-model'"):
        comparison.main(args)
    assert not (tmp_path / "rows.json").exists()


def test_the_table_has_means_ranges_and_gaps(comparison):
    rows = [
        {"variant": "MHA", "task": "cola", "seed": 1, "matthews_correlation": 0.2},
        {"variant": "MHA", "task": "cola", "seed": 2, "matthews_correlation": 0.3},
        {"variant": "MHA", "task": "squad", "seed": 1, "exact_match": 70.0, "f1": 80.0},
        {"variant": "MQA (mean)", "task": "cola", "seed": 1, "matthews_correlation": 0.1},
    ]
    assert comparison.table(rows).splitlines() == [
        "| | CoLA matthews_correlation | SQuAD v1.1 exact_match | SQuAD v1.1 f1 |",
        "| --- | --- | --- | --- |",
        "| MHA | 0.250 (0.200 to 0.300) | 70.000 | 80.000 |",
        "| MQA (mean) | 0.100 |  |  |",
    ]
