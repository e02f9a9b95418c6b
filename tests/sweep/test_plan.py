"""Check the plan of a sweep: the commands of its runs, and the errors in its file."""

import json
import re
import shlex
from pathlib import Path

import pytest
from fixtures.glue.tiny_bert import make_tiny_bert

from hf_attn_variants import cli
from hf_attn_variants.commands import sweep as command
from hf_attn_variants.sweep import runner

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "sweeps").glob("*.yaml"))

FLAGS = {
    "model_type": "bert",
    "tokenizer_name": "a/tokenizer",
    "train_file": ["a.txt"],
    "max_train_steps": 3,
    "config_overrides": {"hidden_size": 32, "num_hidden_layers": 1},
}
VARIANTS = {"multi-head": {}, "multi-query": {"num_key_value_heads": 1}}
BASE = {"command": "pretrain", "seeds": [0, 1], "flags": FLAGS, "variants": VARIANTS}


@pytest.fixture
def dry_run(tmp_path, capsys):
    """Return the output of a dry run of a file's content, as (name, words) of each command."""

    def call(content, *more, name="a_sweep.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        status = cli.main(["sweep", str(path), "--dry_run", *more])
        printed = capsys.readouterr()
        if status != 0:
            assert status == 2 and printed.err.count("\n") == 1, printed.err
            return printed.err
        call.last = printed.out.splitlines()[-1]
        result, variant_name = [], None
        for line in printed.out.splitlines()[:-1]:
            if line.startswith("# "):
                variant_name = line[2:]
            else:
                result.append((variant_name, shlex.split(line)))
        return result

    return call


def value_of(words, flag):
    return words[words.index(f"--{flag}") + 1]


def test_plan_has_a_run_per_variant_and_seed(dry_run):
    result = dry_run(BASE, "--output_dir", "out")
    names = ["multi-head, seed 0", "multi-query, seed 0", "multi-head, seed 1", "multi-query, seed 1"]
    assert [name for name, _ in result] == names
    assert dry_run.last == "# 4 runs, 2 variants"
    words = result[3][1]
    assert words[:2] == ["attn-variants", "pretrain"]
    assert json.loads(value_of(words, "config_overrides")) == FLAGS["config_overrides"]
    assert (value_of(words, "seed"), value_of(words, "num_key_value_heads")) == ("1", "1")
    assert value_of(words, "output_dir") == "out/runs/multi-query/seed-1/trained"
    assert "--num_key_value_heads" not in result[2][1]


def test_grid_multiplies_variants_and_merges_objects(dry_run):
    heads = {"2": {"config_overrides": {"num_attention_heads": 2}}, "4": {"config_overrides": {"hidden_size": 64}}}
    result = dry_run(BASE | {"seeds": [5], "grid": {"heads": heads, "learning_rate": [1e-3, 1e-4]}})
    assert len(result) == 8 and dry_run.last == "# 8 runs, 8 variants"
    name, words = result[-1]
    assert name == "multi-query, heads 4, learning_rate 0.0001, seed 5"
    assert json.loads(value_of(words, "config_overrides")) == {"hidden_size": 64, "num_hidden_layers": 1}
    assert value_of(words, "learning_rate") == "0.0001"


def test_conversions_come_first_and_references_are_not_multiplied(dry_run):
    flags = {"objective": "mlm", "train_file": ["a.txt"]}
    content = {
        "command": "uptrain",
        "seeds": 3,
        "flags": flags,
        "convert": {"model_name_or_path": "a/model"},
        "variants": {"mean": {"convert": {"method": "mean"}}},
        "references": {"as it is": {"convert": None}},
        "grid": {"convert.num_key_value_heads": [1, 2]},
    }
    result = dry_run(content, "--output_dir", "out")
    assert [name for name, _ in result] == [
        *["mean, num_key_value_heads 1, seed 3"] * 2,
        *["mean, num_key_value_heads 2, seed 3"] * 2,
        "as it is, seed 3",
    ]
    convert, train = (words for _, words in result[2:4])
    assert convert[1] == "convert" and value_of(convert, "num_key_value_heads") == "2"
    assert value_of(convert, "seed") == "3" and value_of(convert, "method") == "mean"
    assert value_of(convert, "output_dir") == value_of(train, "model_name_or_path")
    assert value_of(result[-1][1], "model_name_or_path") == "a/model"


def test_flag_kinds_become_arguments_and_launchers(dry_run, tmp_path):
    (tmp_path / "b-2.txt").touch()
    (tmp_path / "b-1.txt").touch()
    flags = FLAGS | {"cpu": True, "whole_word_mask": False, "train_file": ["a.txt", f"{tmp_path}/b-*.txt"]}
    variants = {"a": {"dropout_rate": 0.1}, "b": {"cpu": False, "max_eval_samples": None}}
    content = BASE | {"flags": flags, "variants": variants, "launch": ["torchrun", "--nproc_per_node", 2]}
    words = dry_run(content)[0][1]
    assert words[:7] == ["torchrun", "--nproc_per_node", "2", "-m", "attn_variants", "pretrain", "--model_type"]
    index = words.index("--train_file")
    assert words[index + 1 : index + 4] == ["a.txt", f"{tmp_path}/b-1.txt", f"{tmp_path}/b-2.txt"]
    assert "--cpu" in words and "--whole_word_mask" not in words
    assert "--cpu" not in dry_run(content)[1][1]


def test_patterns_are_replaced_only_in_file_names(dry_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("C1", "C#", "questions", "score 1"):
        (tmp_path / name).touch()
    flags = {"labels": ["C#", "C*", "?"], "text_columns": ["question?"], "train_file": ["C?"], "validation_file": "C#"}
    flags = {"model_name_or_path": "m", **flags, "label_column": "score [0-5]"}
    words = dry_run({"command": "classify", "flags": flags, "variants": {"a": {}}})[0][1]
    index, files = words.index("--labels"), words.index("--train_file")
    assert words[index + 1 : index + 4] == ["C#", "C*", "?"] and words[files + 1 : files + 3] == ["C#", "C1"]
    assert value_of(words, "text_columns") == "question?" and value_of(words, "label_column") == "score [0-5]"


YAML = """
title: ${WHAT} on text
command: pretrain
seeds: [0]
variables:
  WHAT: null
  STEPS: 7
  LAYERS: 1
flags:
  model_type: bert
  tokenizer_name: ${WHAT}/tokenizer
  train_file: a.txt
  learning_rate: 1e-3
  max_train_steps: ${STEPS}
  config_overrides:
    num_hidden_layers: ${LAYERS}
grid:
  num_warmup_steps: [0, 1]
"""


def test_variables_keep_their_type(dry_run):
    result = dry_run(YAML, "--set", "WHAT=x/y", "LAYERS=2", name="a.yaml")
    assert [name for name, _ in result] == ["num_warmup_steps 0, seed 0", "num_warmup_steps 1, seed 0"]
    words = result[0][1]
    assert value_of(words, "tokenizer_name") == "x/y/tokenizer" and value_of(words, "max_train_steps") == "7"
    assert json.loads(value_of(words, "config_overrides")) == {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sed": [0]}, "Unknown key `sed`"),
        ({"command": "pretain"}, "`command` must be one of"),
        ({"command": None}, "`command` must be one of"),
        ({"seeds": [0, 0]}, "would use the same folder"),
        ({"seeds": ["one"]}, "--seed"),
        ({"seeds": []}, "`seeds` must not be empty"),
        ({"variants": {"a": {"train_file": []}}}, "--train_file"),
        ({"variants": []}, "`variants` must be a mapping"),
        ({"variants": {}}, "must contain `variants`"),
        ({"variants": {"a b": {}, "a-B": {"optim": "adafactor"}}}, "would use the same folder runs/a-b"),
        ({"variants": {"a": {"learning_reat": 1}}}, "did you mean --learning_rate?"),
        ({"variants": {"a": {"learning_reat": True}}}, "`learning_reat` must be text or a number"),
        ({"variants": {"a": {"max_steps": 1}}}, "--max_train_steps"),
        ({"variants": {"a": {"output_dir": "x"}}}, "`output_dir` must not be set"),
        ({"variants": {"a": {"talking_heads": "logit"}}}, "--talking_heads"),
        ({"variants": {"a": {"warmup_ratio": 2}}}, "--warmup_ratio must be in [0, 1), got 2.0"),
        ({"variants": {"a": {"max_length": [1, 2]}}}, "'a': "),
        ({"variants": {"a": {"cpu": "yes"}}}, "`cpu` must be true or false, got 'yes'"),
        ({"variants": {"a": {"lr_scheduler_type": False}}}, "`lr_scheduler_type` must be text or a number"),
        ({"variants": {"a": 3}}, "`variants`, `a` must be a mapping"),
        ({"grid": {"learning_rate": []}}, "`learning_rate` in `grid` must be a list"),
        ({"grid": {"learning_rate": [1, 1]}}, "`learning_rate` in `grid` must be a list of distinct values"),
        ({"convert": {"methd": "mean"}}, "--method"),
        ({"convert": {"model_name_or_path": "a"}, "flags": FLAGS | {"model_name_or_path": "a"}}, "under `convert`"),
        ({"flags": FLAGS | {"train_file": ["${DAT}"]}, "variables": {"DATA": "x"}}, "uses the variable `DAT`"),
        ({"flags": FLAGS | {"train_file": ["${DATA}"]}, "variables": {"DATA": None}}, "--set DATA=VALUE"),
    ],
)
def test_sweep_file_error_is_one_line(dry_run, change, message):
    result = dry_run(BASE | change)
    assert isinstance(result, str) and message in result, result


@pytest.mark.parametrize(
    "text, message",
    [
        ("command: pretrain\nseeds: [0]\nseeds: [1]\n", "`seeds` must not occur more than once in the object"),
        ("command: pretrain\nvariants:\n  a: {}\n  a: {}\n", "`a` must not occur more than once in the object"),
        ("command: pretrain\nvariants: {a: {}, a: {}}\n", "`a` must not occur more than once in the object at line 2"),
        ("command: [\n", "must be valid YAML: "),
        ("command: pretrain\nflags:\n\tmodel_type: bert\n", "line 3, column 1"),
        ("- a\n", "The file must be a mapping"),
        ('{"command": "pretrain", "command": "glue"}', "`command` must not occur more than once"),
    ],
)
def test_duplicate_keys_and_invalid_yaml_raise_an_error(dry_run, text, message):
    assert message in dry_run(text, name="a.yml")


def test_unknown_variable_raises_an_error(dry_run):
    assert "--set must name variables from the file" in dry_run(BASE, "--set", "A=1")


def test_sweep_command_line_rejects_invalid_arguments(capsys):
    for argv, message in (
        (["a.yaml"], "--output_dir is required"),
        (["a.yaml", "--dry_run", "--set", "A"], "--set must be NAME=VALUE, got A"),
    ):
        with pytest.raises(SystemExit) as stopped:
            command.parse_args(argv)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    args = command.parse_args(["--output_dir", "out", "a.yaml", "--set", "A=x=1", "B=2"])
    assert args.set == {"A": "x=1", "B": "2"} and args.file == "a.yaml"


def test_invalid_model_raises_before_the_first_run(tmp_path, capsys):
    flags = FLAGS | {"tokenizer_name": str(make_tiny_bert(tmp_path / "bert"))}
    flags["config_overrides"] = flags["config_overrides"] | {"num_attention_heads": 4}
    content = BASE | {"flags": flags, "variants": VARIANTS | {"of three": {"num_key_value_heads": 3}}}
    (tmp_path / "b.json").write_text(json.dumps(content))
    assert cli.main(["sweep", str(tmp_path / "b.json"), "--output_dir", str(tmp_path / "out")]) == 2
    assert "`num_key_value_heads` must divide `num_attention_heads`, got 3" in capsys.readouterr().err
    # If the tokenizer is missing, no model can be built, and no training starts.
    content = BASE | {"flags": flags | {"tokenizer_name": "a/tokenizer"}}
    (tmp_path / "c.json").write_text(json.dumps(content))
    assert cli.main(["sweep", str(tmp_path / "c.json"), "--output_dir", str(tmp_path / "out")]) == 2
    assert "'multi-head': " in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_models_of_finished_runs_are_not_checked(tmp_path, monkeypatch, capsys):
    """Check a finished run whose tokenizer was removed: only the table is written again."""
    (tmp_path / "b.json").write_text(json.dumps(BASE))
    monkeypatch.setattr(runner.RunFolder, "load_record", lambda self: setattr(self, "results", {"eval_loss": 1.0}))
    assert cli.main(["sweep", str(tmp_path / "b.json"), "--output_dir", str(tmp_path / "out"), "--disable_tqdm"]) == 0
    assert "a/tokenizer" not in capsys.readouterr().err


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_sweep_file_of_the_repository_is_valid(path, tmp_path, capsys, monkeypatch):
    """Check that the flags of each file exist for its command."""
    monkeypatch.chdir(tmp_path)
    for name in ("wikipedia/train-0.txt.gz", "wikipedia/valid.txt.gz", "train-0.txt.gz", "valid.txt.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    text = path.read_text()
    needed = re.findall(r"^  (\w+): +null", text, re.M)
    flags = ["--set", *(f"{name}={tmp_path}" for name in needed)] if needed else []
    assert cli.main(["sweep", str(path), "--dry_run", *flags]) == 0, capsys.readouterr().err
    assert "runs, " in capsys.readouterr().out.splitlines()[-1]
    assert max(map(len, text.splitlines())) <= 119
    assert len(FILES) == 18
    if path.stem.endswith("_cluster"):
        assert (path.with_name(path.name.replace("_cluster", ""))).is_file()
        assert "Not yet tested." in re.sub(r"\s+#?\s*", " ", text)


def test_documented_sweep_file_is_valid(dry_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wikipedia").mkdir()
    (tmp_path / "wikipedia/train-0.txt.gz").touch()
    page = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    [text] = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    assert len(dry_run(text, "--set", "DATA=.", name="docs.yaml")) == 4
