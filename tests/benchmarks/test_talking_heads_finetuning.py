"""Check the fine-tuning comparison of talking heads: its variants and defaults."""

import importlib
from pathlib import Path

import pytest

import hf_attn_variants

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def comparison(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.train.talking_heads_finetuning")


def test_talking_heads_variants_are_valid_with_unique_folders(comparison):
    configs = [hf_attn_variants.AttnVariantBertConfig(**variant.fields) for variant in comparison.VARIANTS.values()]
    kinds = {(c.talking_heads, c.talking_heads_init, bool(c.talking_heads_dynamic)) for c in configs}
    slugs = {
        importlib.import_module("benchmarks.train.finetuned_variants").make_slug(name) for name in comparison.VARIANTS
    }
    assert len(kinds) == len(slugs) == len(comparison.VARIANTS) == 8


def test_default_is_two_seeds_on_three_tasks(comparison):
    folders = ["--model", "m", "--data_dir", "d", "--work_dir", "w"]
    args = comparison.parse_args(folders)
    assert (args.tasks, args.seeds) == (["sst2", "cola", "stsb"], [42, 43])
    assert Path(args.output).name == "talking_heads_finetuning.json"
    assert comparison.parse_args([*folders, "--tasks", "stsb", "--seeds", "7"]).seeds == [7]
