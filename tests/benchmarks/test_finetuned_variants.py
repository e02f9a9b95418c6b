"""Check the fine-tuning comparison: its checkpoints, commands and table."""

import argparse
import json
from pathlib import Path

from transformers import BertConfig, BertModel

from benchmarks.train import finetuned_variants
from hf_attn_variants.commands.training import glue as run_glue
from hf_attn_variants.commands.training import squad as run_squad


def test_variants_have_separate_folders_and_existing_sources():
    assert len({finetuned_variants.make_slug(name) for name in finetuned_variants.VARIANTS}) == len(
        finetuned_variants.VARIANTS
    )
    starts = {variant.distilled_from for variant in finetuned_variants.VARIANTS.values()} - {None}
    assert starts and starts <= finetuned_variants.VARIANTS.keys()


def test_commands_are_accepted_by_their_scripts(tmp_path):
    args = finetuned_variants.parse_args(["--model", "m", "--data_dir", str(tmp_path), "--work_dir", "w"])
    scripts = {"scripts/run_glue.py": run_glue, "scripts/run_squad.py": run_squad}
    for name, task in finetuned_variants.TASKS.items():
        run = finetuned_variants.Run(name, 7, "MHA")
        script, *flags = finetuned_variants._make_command(args, run, "checkpoint", "out", finetuned_variants.VARIANTS)
        parsed = scripts[script].parse_args(flags)
        assert (parsed.seed, parsed.num_train_epochs, parsed.learning_rate) == (7, task.epochs, 1e-4)
        data = parsed.data_dir if name != "squad" else parsed.train_file
        assert Path(data).is_relative_to(tmp_path) and parsed.max_length == (128 if name != "squad" else 256)


def test_existing_checkpoint_is_not_made_again(tmp_path):
    config = BertConfig(hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, vocab_size=20)
    BertModel(config).save_pretrained(tmp_path / "source")
    args = argparse.Namespace(model=tmp_path / "source", work_dir=tmp_path / "work", data_dir=tmp_path)
    variants = {
        "MHA": finetuned_variants.Variant(),
        "GQA-2 (mean)": finetuned_variants.Variant({"num_key_value_heads": 2}),
    }
    assert (
        finetuned_variants.get_checkpoint_folder(args, finetuned_variants.Run("cola", 0, "MHA"), variants)
        == args.model
    )
    run = finetuned_variants.Run("cola", 0, "GQA-2 (mean)")
    finetuned_variants.make_checkpoint(args, run, variants)
    folder = finetuned_variants.get_checkpoint_folder(args, run, variants)
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 2
    modified_time = (folder / "model.safetensors").stat().st_mtime_ns
    finetuned_variants.make_checkpoint(args, run, variants)
    assert (folder / "model.safetensors").stat().st_mtime_ns == modified_time


def test_finetuning_table_has_means_ranges_and_gaps():
    rows = [
        {"variant": "MHA", "task": "cola", "seed": 1, "matthews_correlation": 0.2},
        {"variant": "MHA", "task": "cola", "seed": 2, "matthews_correlation": 0.3},
        {"variant": "MHA", "task": "squad", "seed": 1, "exact_match": 70.0, "f1": 80.0},
        {"variant": "MQA (mean)", "task": "cola", "seed": 1, "matthews_correlation": 0.1},
    ]
    assert finetuned_variants.format_table(rows).splitlines() == [
        "| | CoLA matthews_correlation | SQuAD v1.1 exact_match | SQuAD v1.1 f1 |",
        "| --- | --- | --- | --- |",
        "| MHA | 0.250 (0.200 to 0.300) | 70.000 | 80.000 |",
        "| MQA (mean) | 0.100 |  |  |",
    ]
