"""Check `scripts/convert_checkpoint.py` like a user."""

import json
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
    ARCHITECTURES[0].upstream_model("BertForMaskedLM").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def arguments(source, output, *more):
    return ["--model_name_or_path", str(source), "--output_dir", str(output), *more]


def run(*argv):
    """Run the script with its error handling in this process."""
    return run_script(lambda: main(parse_args(argv)))


def test_convert_script_converts_and_prints_a_summary(source, tmp_path, capsys):
    options = ["--num_key_value_heads", "2", "--method", "first", "--dtype", "bfloat16", "--talking_heads", "both"]
    options += ["--talking_heads_dynamic", "x2l", "x2w", "--talking_heads_init", "identity", "--seed", "3"]
    assert run(*arguments(source, tmp_path / "out", *options)) == 0
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


@pytest.mark.parametrize(
    "options, message",
    [
        (["--num_key_value_heads", "5"], "got 5 for 12"),
        (["--num_key_value_heads", "4", "--encoder_num_key_value_heads", "2"], "encoder_num_key_value_heads"),
        (
            [],
            "nothing to convert. Give one of `num_key_value_heads`, `kv_lora_rank`, `talking_heads`",
        ),
        (["--seed", "1"], "`per_layer_values` (or the flag of the same name)."),
    ],
)
def test_convert_script_user_error_is_one_line_with_status_2(source, tmp_path, capsys, options, message):
    assert run(*arguments(source, tmp_path / "out", *options)) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and "Traceback" not in printed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("fields", [{"hidden_act": "foo"}, {"architectures": 5}, {"hidden_size": "wide"}])
def test_convert_script_invalid_config_is_one_line_with_status_2(source, tmp_path, capsys, fields):
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert run(*arguments(source, tmp_path / "out", "--num_key_value_heads", "4")) == 2
    printed = capsys.readouterr()
    assert str(path) in printed.err and printed.err.count("\n") == 1 and "Traceback" not in printed.err


@pytest.mark.parametrize(
    "option", [["--method", "median"], ["--dtype", "int8"], ["--talking_heads", "all"], ["--heads"]]
)
def test_convert_script_invalid_flag_exits_with_status_2(source, tmp_path, option):
    with pytest.raises(SystemExit) as stopped:
        parse_args(arguments(source, tmp_path / "out", *option))
    assert stopped.value.code == 2


def test_convert_script_help_ends_with_examples(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    _, examples = capsys.readouterr().out.split("\nexamples")
    assert examples.count("python scripts/convert_checkpoint.py ") == 4
    assert all(flag in examples for flag in ("--num_key_value_heads", "--cross_kv_lora_rank"))


@pytest.mark.thorough
def test_convert_script_process_exits_with_status_2(tmp_path):
    argv = arguments(tmp_path / "missing", tmp_path / "out", "--num_key_value_heads", "4")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    script = ROOT / "scripts" / "convert_checkpoint.py"
    ended = subprocess.run(
        [sys.executable, script, *argv], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: There is no folder") and ended.stderr.count("\n") == 1
