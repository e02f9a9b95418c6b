"""The fine-tuning comparison: its checkpoints, its commands and its table."""

import argparse
import gzip
import importlib
import itertools
import json
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from hf_attn_variants.training import run_glue, run_squad

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
        script, *flags = comparison._command(args, name, 7, "checkpoint", "out")
        parsed = scripts[script].parse_args(flags)
        assert (parsed.seed, parsed.num_train_epochs, parsed.learning_rate) == (7, task.epochs, 1e-4)
        data = parsed.data_dir if name != "squad" else parsed.train_file
        assert Path(data).is_relative_to(tmp_path) and parsed.max_length == (128 if name != "squad" else 256)


def test_a_checkpoint_is_made_once(comparison, tmp_path):
    config = BertConfig(hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, vocab_size=20)
    BertModel(config).save_pretrained(tmp_path / "source")
    args = argparse.Namespace(model=tmp_path / "source", work_dir=tmp_path / "work", data_dir=tmp_path)
    variants = {"MHA": comparison.Variant(), "GQA-2 (mean)": comparison.Variant({"num_key_value_heads": 2})}
    assert comparison.make_checkpoint(args, "MHA", variants, "cola") == args.model
    folder = comparison.make_checkpoint(args, "GQA-2 (mean)", variants, "cola")
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 2
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert comparison.make_checkpoint(args, "GQA-2 (mean)", variants, "cola") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_a_distilled_variant_starts_from_its_calibrated_one(comparison, tmp_path, monkeypatch):
    (tmp_path / "wikipedia").mkdir()
    with gzip.open(tmp_path / "wikipedia/train-00000.txt.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"Line number {number} of a text that is long enough to be used.\n" for number in range(4000))
    commands = []
    monkeypatch.setattr(comparison.subprocess, "run", lambda command, **options: commands.append(command))
    args = argparse.Namespace(model=tmp_path / "source", work_dir=tmp_path, data_dir=tmp_path, threads=1)
    (tmp_path / "checkpoints" / "gqa-4-calibrated").mkdir(parents=True)
    name = "GQA-4 (calibrated, distilled)"
    folder = comparison.make_checkpoint(args, name, comparison.VARIANTS, "cola")
    (command,) = commands
    flags = dict(itertools.pairwise(command))
    assert flags["--model_name_or_path"] == str(tmp_path / "checkpoints" / "gqa-4-calibrated")
    assert flags["--output_dir"] == str(folder) and flags["--teacher"] == str(args.model)
    texts = Path(flags["--train_file"]).read_text(encoding="utf-8").splitlines()
    assert 0.95 * len(texts) >= int(flags["--max_train_steps"]) * int(flags["--per_device_train_batch_size"])


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
    folder = comparison._folder(tmp_path, "cola", 42, "MHA")
    folder.mkdir(parents=True)
    _, *used = comparison._command(args, "cola", 42, "somewhere/old-model", folder)
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
