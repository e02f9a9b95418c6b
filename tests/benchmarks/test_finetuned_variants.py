"""Check the fine-tuning comparison: its checkpoints, commands and table."""

import argparse
import importlib
import json
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from hf_attn_variants.commands.training import glue as run_glue
from hf_attn_variants.commands.training import squad as run_squad

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
