"""Check the fine-tuning comparison: its checkpoints, commands and table."""

import argparse
import dataclasses
import gzip
import importlib
import json
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from hf_attn_variants.commands.training import glue as run_glue
from hf_attn_variants.commands.training import squad as run_squad
from hf_attn_variants.commands.training import uptrain

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def comparison(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.train.finetuned_variants")


def test_variants_have_separate_folders_and_existing_sources(comparison):
    assert len({comparison.make_slug(name) for name in comparison.VARIANTS}) == len(comparison.VARIANTS)
    starts = {variant.distilled_from for variant in comparison.VARIANTS.values()} - {None}
    assert starts and starts <= comparison.VARIANTS.keys()


def test_commands_are_accepted_by_their_scripts(comparison, tmp_path):
    args = comparison.parse_args(["--model", "m", "--data_dir", str(tmp_path), "--work_dir", "w"])
    scripts = {"scripts/run_glue.py": run_glue, "scripts/run_squad.py": run_squad}
    for name, task in comparison.TASKS.items():
        run = comparison.Run(name, 7, "MHA")
        script, *flags = comparison._make_command(args, run, "checkpoint", "out", comparison.VARIANTS)
        parsed = scripts[script].parse_args(flags)
        assert (parsed.seed, parsed.num_train_epochs, parsed.learning_rate) == (7, task.epochs, 1e-4)
        data = parsed.data_dir if name != "squad" else parsed.train_file
        assert Path(data).is_relative_to(tmp_path) and parsed.max_length == (128 if name != "squad" else 256)


def test_existing_checkpoint_is_not_made_again(comparison, tmp_path):
    config = BertConfig(hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, vocab_size=20)
    BertModel(config).save_pretrained(tmp_path / "source")
    args = argparse.Namespace(model=tmp_path / "source", work_dir=tmp_path / "work", data_dir=tmp_path)
    variants = {"MHA": comparison.Variant(), "GQA-2 (mean)": comparison.Variant({"num_key_value_heads": 2})}
    assert comparison.get_checkpoint_folder(args, comparison.Run("cola", 0, "MHA"), variants) == args.model
    run = comparison.Run("cola", 0, "GQA-2 (mean)")
    comparison.make_checkpoint(args, run, variants)
    folder = comparison.get_checkpoint_folder(args, run, variants)
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 2
    modified_time = (folder / "model.safetensors").stat().st_mtime_ns
    comparison.make_checkpoint(args, run, variants)
    assert (folder / "model.safetensors").stat().st_mtime_ns == modified_time


def _finish(folder, arguments):
    folder.mkdir(parents=True, exist_ok=True)
    arguments = json.loads(json.dumps(vars(arguments), default=str))
    (folder / "all_results.json").write_text(json.dumps({"arguments": arguments}))


@pytest.fixture
def distillations(comparison, monkeypatch):
    """The recorded arguments of uptrain.py, which is replaced by a function that writes its results."""
    calls = []

    def run(command, **options):
        calls.append(uptrain.parse_args(command[2:]))
        _finish(Path(calls[-1].output_dir), calls[-1])

    monkeypatch.setattr(comparison.subprocess, "run", run)
    return calls


def test_distilled_variant_starts_from_the_calibrated_variant(comparison, tmp_path, monkeypatch, distillations):
    (tmp_path / "wikipedia").mkdir()
    with gzip.open(tmp_path / "wikipedia/train-00000.txt.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"Line number {number} of a text that is long enough to be used.\n" for number in range(4000))
    monkeypatch.setattr(comparison, "check_source", lambda folder, source: None)
    flags = ["--model", "source", "--data_dir", str(tmp_path), "--work_dir", str(tmp_path)]
    args = comparison.parse_args(flags)
    start = tmp_path / "checkpoints" / "gqa-4-calibrated"
    start.mkdir(parents=True)
    run = comparison.Run("cola", 0, "GQA-4 (calibrated, distilled)")
    comparison.make_checkpoint(args, run, comparison.VARIANTS)
    (used,) = distillations
    folder = comparison.get_checkpoint_folder(args, run, comparison.VARIANTS)
    assert (used.model_name_or_path, used.teacher, used.output_dir) == (str(start), "source", str(folder))
    texts = Path(used.train_file[0]).read_text(encoding="utf-8").splitlines()
    assert 0.95 * len(texts) >= used.max_train_steps * used.per_device_train_batch_size
    comparison.make_checkpoint(args, run, comparison.VARIANTS)  # it is there
    (folder / "all_results.json").unlink()  # it was killed
    args = comparison.parse_args([*flags, "--max_train_steps", "2"])
    comparison.make_checkpoint(args, run, comparison.VARIANTS)
    assert [call.max_train_steps for call in distillations] == [used.max_train_steps, 2]
    with pytest.raises(SystemExit, match="max_train_steps"):
        comparison.make_checkpoint(comparison.parse_args(flags), run, comparison.VARIANTS)


@pytest.mark.parametrize("task", ["squad", "stsb", "cola"])
def test_fine_tuned_model_is_source_and_teacher_of_evaluated_variants(
    comparison, tmp_path, monkeypatch, shared_data, distillations, task
):
    monkeypatch.setattr(comparison, "check_source", lambda folder, source: None)
    name = "GQA-4 (the fine-tuned MHA, calibrated on the task, distilled on it)"
    calibrated = comparison.VARIANTS[name].distilled_from
    args = comparison.parse_args(["--model", "m", "--data_dir", str(shared_data), "--work_dir", str(tmp_path)])
    run = comparison.Run(task, 7, name)
    start = comparison.get_checkpoint_folder(args, run._replace(variant=calibrated), comparison.VARIANTS)
    start.mkdir(parents=True)
    comparison.make_checkpoint(args, run, comparison.VARIANTS)
    (used,) = distillations
    assert (used.model_name_or_path, used.teacher) == (str(start), str(tmp_path / f"runs/mha-{task}-7"))
    assert used.logits_weight == 1 and used.learning_rate == 2e-5
    rows = [json.loads(line) for line in Path(used.train_file[0]).read_text().splitlines()]
    assert tuple(rows[0]) == used.text_columns and len(used.text_columns) == (1 if task == "cola" else 2)
    if task == "squad":
        assert len(rows) - 512 >= used.max_train_steps * used.per_device_train_batch_size
    args.max_train_steps = 2
    _, *flags = comparison._make_command(args, run, "checkpoint", "out", comparison.VARIANTS)
    script = run_squad if task == "squad" else run_glue
    assert script.parse_args(flags).num_train_epochs == 0 and "--max_train_steps" not in flags
    variants = {name: dataclasses.replace(comparison.VARIANTS[name], trained_again=name)}
    _, *flags = comparison._make_command(args, run, "checkpoint", "out", variants)
    assert script.parse_args(flags).num_train_epochs == comparison.TASKS[task].epochs
    assert script.parse_args(flags).max_train_steps == 2


def test_calibration_uses_the_texts_of_the_task(comparison, shared_data):
    args = argparse.Namespace(data_dir=shared_data)
    for name, kind in (("cola", str), ("stsb", tuple), ("squad", tuple)):
        texts = comparison.read_task_texts(args, name)
        assert len(texts) == comparison.TASK_TEXTS and all(isinstance(text, kind) for text in texts)
    question, context = texts[0]
    assert len(context) > len(question) > 5


@pytest.mark.parametrize("variant", ["MHA", "GQA-4 (the fine-tuned MHA, calibrated on the task)"])
def test_finished_run_of_another_model_raises_before_any_run(comparison, tmp_path, monkeypatch, variant):
    for name in ("_run", "make_checkpoint"):
        monkeypatch.setattr(comparison, name, lambda *run: pytest.fail("work was begun"))
    (tmp_path / "glue/CoLA").mkdir(parents=True)
    flags = ["--model", "new-model", "--data_dir", str(tmp_path), "--work_dir", str(tmp_path), "--tasks", "cola"]
    args = comparison.parse_args([*flags, "--variants", variant, "--output", str(tmp_path / "rows.json")])
    run = comparison.Run("cola", 42, "MHA")
    folder = comparison._get_run_folder(tmp_path, run)
    _, *used = comparison._make_command(args, run, "somewhere/old-model", folder, comparison.VARIANTS)
    _finish(folder, run_glue.parse_args(used))
    with pytest.raises(SystemExit, match=r"old-model.*now 'new-model'"):
        comparison.main(args)
    assert not (tmp_path / "rows.json").exists()


def test_finetuning_table_has_means_ranges_and_gaps(comparison):
    rows = [
        {"variant": "MHA", "task": "cola", "seed": 1, "matthews_correlation": 0.2},
        {"variant": "MHA", "task": "cola", "seed": 2, "matthews_correlation": 0.3},
        {"variant": "MHA", "task": "squad", "seed": 1, "exact_match": 70.0, "f1": 80.0},
        {"variant": "MQA (mean)", "task": "cola", "seed": 1, "matthews_correlation": 0.1},
    ]
    assert comparison.format_table(rows).splitlines() == [
        "| | CoLA matthews_correlation | SQuAD v1.1 exact_match | SQuAD v1.1 f1 |",
        "| --- | --- | --- | --- |",
        "| MHA | 0.250 (0.200 to 0.300) | 70.000 | 80.000 |",
        "| MQA (mean) | 0.100 |  |  |",
    ]
