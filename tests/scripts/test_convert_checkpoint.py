"""Check `scripts/convert_checkpoint.py` like a user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from architectures import ARCHITECTURES

from hf_attn_variants.commands.convert import main, parse_args
from hf_attn_variants.errors import run_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path):
    ARCHITECTURES[0].make_upstream_model("BertForMaskedLM").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def make_arguments(source, output, *more):
    return ["--model_name_or_path", str(source), "--output_dir", str(output), *more]


def run(*argv):
    """Run the script with its error handling in this process."""
    return run_script(lambda: main(parse_args(argv)))


def test_convert_script_converts_and_prints_a_summary(source, tmp_path, capsys):
    options = ["--num_key_value_heads", "2", "--method", "first", "--dtype", "bfloat16", "--talking_heads", "both"]
    options += ["--talking_heads_dynamic", "x2l", "x2w", "--talking_heads_init", "identity", "--seed", "3"]
    assert run(*make_arguments(source, tmp_path / "out", *options)) == 0
    printed = capsys.readouterr().out
    for text in (
        "12 -> 2",
        "parameters",
        "relative error of logits",
        "x2l_proj",
        str(tmp_path / "out"),
    ):
        assert text in printed
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert model.config.num_key_value_heads == 2 and model.config.talking_heads_dynamic == ["x2l", "x2w"]


@pytest.mark.thorough
def test_convert_script_process_exits_with_status_2(tmp_path):
    argv = make_arguments(tmp_path / "missing", tmp_path / "out", "--num_key_value_heads", "4")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    script = ROOT / "scripts" / "convert_checkpoint.py"
    ended = subprocess.run(
        [sys.executable, script, *argv], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 2 and ended.stdout == ""
    assert "is neither an existing folder" in ended.stderr and ended.stderr.count("\n") == 1
