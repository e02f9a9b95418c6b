"""Check the comparison of attention variants on Multi30k: its models, defaults and table."""

import argparse
import importlib
import json
from pathlib import Path

import pytest
from transformers import T5Config, T5ForConditionalGeneration

from hf_attn_variants import AttnVariantT5Config, AttnVariantT5ForConditionalGeneration

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["--data_dir", "d", "--work_dir", "w"]


@pytest.fixture
def comparison(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.train.t5_multi30k")


def test_multi30k_variants_have_unique_names_and_folders(comparison):
    for variants in comparison.VARIANTS.values():
        assert len({comparison._make_slug(variant.name) for variant in variants}) == len(variants) >= 8


def test_flags_of_a_new_model_are_accepted_by_the_command(comparison):
    args = argparse.Namespace(tokenizer="folder")
    for model in comparison.VARIANTS["scratch"]:
        settings = comparison.run_seq2seq.parse_args(
            [*model.flags(args), "--output_dir", "out", "--source_file", "s", "--target_file", "t"]
        )
        assert settings.position_embedding_type == model.positions, model.name
        assert settings.talking_heads == model.talking_heads, model.name
        assert settings.score_function == model.score, model.name


def test_variants_with_fewer_heads_have_equal_parameter_counts(comparison):
    def parameters(model):
        fields = comparison.SHAPE | {"num_heads": model.heads, "d_kv": comparison.WIDTH // model.heads}
        fields |= {"d_ff": model.feed_forward, "num_key_value_heads": model.kv_heads, "vocab_size": 100}
        return AttnVariantT5ForConditionalGeneration(AttnVariantT5Config(**fields)).num_parameters()

    multi_head, *grouped = comparison.VARIANTS["scratch"][:3]
    for model in grouped:
        assert parameters(model) == pytest.approx(parameters(multi_head), rel=2e-3)


def test_missing_start_folder_raises_an_error(comparison, capsys):
    for start, needed in (("scratch", "--tokenizer"), ("finetune", "--model")):
        with pytest.raises(SystemExit):
            comparison.parse_args([start, *FOLDERS])
        assert f"{start} needs {needed}" in capsys.readouterr().err


def test_unknown_variant_error_lists_the_known_variants(comparison, capsys):
    with pytest.raises(SystemExit):
        comparison.parse_args(["finetune", *FOLDERS, "--model", "m", "--variants", "MHX"])
    assert "MHX" in (message := capsys.readouterr().err) and "both, identity" in message


def test_existing_converted_variant_is_not_made_again(comparison, tmp_path):
    config = T5Config(d_model=16, num_heads=4, d_kv=4, d_ff=8, num_layers=1, vocab_size=20)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "source")
    args = argparse.Namespace(model=str(tmp_path / "source"), work_dir=tmp_path)
    variant = comparison.ConvertedModel("both", "random")
    flags = variant.flags(args)
    modified_time = Path(flags[1], "model.safetensors").stat().st_mtime_ns
    assert variant.flags(args) == flags and Path(flags[1], "model.safetensors").stat().st_mtime_ns == modified_time
    assert comparison.ConvertedModel().flags(args) == ["--model_name_or_path", args.model]


def test_each_part_adds_its_runs_to_the_report(comparison, tmp_path, monkeypatch):
    monkeypatch.setattr(
        comparison, "_run", lambda args, variant, seed: {"variant": variant.name, "seed": seed, "flags": ""}
    )
    for split in ("train", "val"):
        for language in ("en", "de"):
            (tmp_path / f"{split}.{language}.gz").touch()
    folders = ["--data_dir", str(tmp_path), "--work_dir", "w", "--tokenizer", "t"]
    folders += ["--output", str(tmp_path / "runs.json")]
    for name in ("MHA 8x16", "MQA 8x16"):
        comparison.main(comparison.parse_args(["scratch", *folders, "--variants", name]))
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [run["variant"] for run in runs] == ["MHA 8x16", "MQA 8x16"]


def test_multi30k_table_has_means_ranges_and_common_metrics(comparison):
    rows = [
        {"variant": "MHA", "seed": seed, "dev_loss": loss, "test_bleu": 30.0, "num_parameters": 2_000_000}
        for seed, loss in ((0, 2.0), (1, 3.0))
    ]
    assert comparison.format_table(rows).splitlines() == [
        "| | dev ln(PPL) | test BLEU, greedy | parameters |",
        "| --- | --- | --- | --- |",
        "| MHA | 2.500 (2.000 to 3.000) | 30.0 | 2.000 M |",
    ]
