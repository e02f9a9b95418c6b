"""Check the `attn-variants` command: its list of commands, its imports, and that it acts like the scripts."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from architectures import BERT, T5
from fixtures.elsewhere import run_elsewhere

import attn_variants
import hf_attn_variants
from hf_attn_variants import AttnVariantBertModel, cli
from hf_attn_variants.commands import load_command

ROOT = Path(__file__).parents[2]
HEAVY = ("datasets", "evaluate", "matplotlib", "pandas", "peft", "rich", "sacrebleu", "sklearn")


@pytest.fixture
def source(tmp_path):
    BERT.make_upstream_model("BertForMaskedLM").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_installed_command_runs_the_package():
    actual = [item for item in entry_points(group="console_scripts") if item.name == "attn-variants"]
    if not actual or not actual[0].value.startswith("attn_variants:"):
        pytest.skip("the installed package is too old for this command; run pip install -e . again")
    assert actual[0].load() is attn_variants.main


def test_help_lists_every_command_and_version_matches_the_package(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(f"  {name} " in printed for name in cli.COMMANDS)
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert "hf_attn_variants 0." in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("module", ["attn_variants", "hf_attn_variants"])
def test_python_m_runs_the_command(module):
    ended = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (0, f"hf_attn_variants {hf_attn_variants.__version__}\n"), ended.stderr


def test_help_fits_the_terminal_and_keeps_examples(capsys, monkeypatch):
    shown = {}
    for width in (60, 300):
        monkeypatch.setenv("COLUMNS", str(width))
        with pytest.raises(SystemExit):
            cli.main(["inspect", "--help"])
        shown[width] = capsys.readouterr().out
        assert "  attn-variants inspect google-t5/t5-small --batch_size 32 --length 1024\n" in shown[width]
    narrow, wide = (text.partition("The command reads only config.json")[2] for text in shown.values())
    assert max(map(len, narrow.splitlines())) <= 60 and narrow.split() == wide.split()
    assert len(wide.splitlines()) == 1


def test_convert_choices_equal_those_of_the_conversion():
    from hf_attn_variants.commands import convert
    from hf_attn_variants.conversion import METHODS
    from hf_attn_variants.conversion.checkpoint.tensor_files import POSITION_EXTENSIONS
    from hf_attn_variants.conversion.conversions import DTYPES

    assert list(convert.METHOD_NAMES) == sorted(METHODS) and list(convert.DTYPE_NAMES) == sorted(DTYPES)
    assert convert.POSITION_EXTENSION_CHOICES == POSITION_EXTENSIONS


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_prints_its_help(name, capsys):
    module = load_command(name)
    assert callable(module.main)
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and f"usage: attn-variants {name} " in printed
    assert f"  attn-variants {name} " in printed.split("\n\nexample")[-1] and "python scripts/" not in printed


def test_help_states_the_default_of_each_option(capsys):
    for name, *shown in (
        ("glue", "Peak learning rate (default: 5e-05).", "(default: 3.0)"),
        ("uptrain", "(default: 0.001)"),
    ):
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        printed = " ".join(capsys.readouterr().out.split())
        assert all(text in printed for text in shown)
        assert "default: None" not in printed and "default: False" not in printed


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_examples_fit_80_columns(name, capsys, monkeypatch):
    """Check examples of the command and of its script, which has a longer name."""
    monkeypatch.setenv("COLUMNS", "80")
    module = load_command(name)
    for show in (lambda: cli.main([name, "--help"]), lambda: module.parse_args(["--help"])):
        with pytest.raises(SystemExit):
            show()
        examples = capsys.readouterr().out.partition("\nexample")[2].splitlines()
        assert examples and not [line for line in examples if len(line) > 80]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["conver"], "; did you mean convert?"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["convert", "bert", "--output_dir", "out", "--num_kv_heads", "4"], "; did you mean --num_key_value_heads?"),
        (["inspect", "t5", "--num-beams", "4"], "; did you mean --num_beams?"),
        (["convert", "bert", "--output_dir", "out", "--method", "men"], "; did you mean mean?"),
        (
            ["glue", "bert", "--task_name", "sst2", "--output_dir", "o", "--lr", "1"],
            "ambiguous option: --lr could match",
        ),
        (["convert", "bert", "--output_dir", "out", "--heads", "4"], "unrecognized arguments: --heads 4"),
        (["convert", "bert"], "the following arguments are required: --output_dir"),
        (["glue", "bert", "--task_name", "sst2", "--output_dir", "o", "--max_seq_length", "9"], "mean --max_length?"),
        (["squad", "--output_dir", "out"], "CHECKPOINT is required"),
        (["classify", "bert", "--train_file", "a.csv", "--train_file", "b.csv"], "--train_file can only be used once"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_command_line_error_prints_the_error_and_the_help_option(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        raise SystemExit(cli.main(argv))
    error, more = capsys.readouterr().err.splitlines()
    program = " ".join(["attn-variants", *argv[:1]]) if argv[0] in cli.COMMANDS else "attn-variants"
    assert stopped.value.code == 2 and error.startswith("error: ") and message in error
    assert more == f"Run `{program} --help` to see all options."


@pytest.mark.parametrize(
    ("flags", "field", "value", "note"),
    [
        (["--method", "mean", "--method", "first"], "method", "first", "note: --method was set twice"),
        (["--seed", "3", "--seed=4"], "seed", 4, "note: --seed was set twice"),
        (["--calibration_passages", "--no-calibration_passages"], "calibration_passages", False, ""),
        (["--token", "hf_first", "--token", "hf_secret"], "token", "hf_secret", "note: --token was set twice"),
        (["--seed", "3", "--seed", "3"], "seed", 3, ""),
    ],
)
def test_repeated_flag_uses_the_last_value_with_a_warning(flags, field, value, note, capsys):
    parse = load_command("convert").parse_args
    calibrated = ["bert", "--output_dir", "out", "--calibration_file", __file__]
    assert getattr(parse([*calibrated, *flags]), field) == value
    output_text = capsys.readouterr().err
    assert note in output_text and bool(output_text) == bool(note) and "hf_" not in output_text


@pytest.mark.thorough
def test_package_import_loads_no_heavy_modules():
    code = f"""
import sys
from transformers import BertModel, T5ForConditionalGeneration  # some versions of which import scikit-learn
upstream = set(sys.modules)
import hf_attn_variants
print("HEAVY", [name for name in {HEAVY!r} if name in set(sys.modules) - upstream])
"""
    assert "HEAVY []" in run_python("-c", code)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "argv",
    [
        ["--version"],
        ["--help"],
        [],
        ["nothing"],
        *([name, "--help"] for name in cli.COMMANDS),
        ["convert", "--method", "median"],
        ["glue", "--learning_rat", "1"],
        *([f"scripts/{path.name}", "--help"] for path in sorted((ROOT / "scripts").glob("*.py"))),
    ],
    ids=" ".join,
)
def test_help_and_invalid_flags_import_no_heavy_modules(argv):
    """Check that torch, Transformers and numpy are not imported, because each takes seconds."""
    code = f"""
import runpy, sys
argv = {argv!r}
try:
    if argv and argv[0].endswith(".py"):
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
    else:
        from attn_variants import main
        main(argv)
except SystemExit:
    pass
third_party = {{name.split(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names)
print("IMPORTED", sorted(name for name in third_party if not name.startswith("_")))
"""
    printed = run_python("-S", "-c", code)
    assert printed.splitlines()[-1] == "IMPORTED ['attn_variants', 'hf_attn_variants']"


@pytest.mark.thorough
def test_command_modules_have_the_same_public_names():
    code = """
import sys
import attn_variants
attn_variants.is_command = sys.argv[1] == "command"
import hf_attn_variants
print("torch" in sys.modules, hf_attn_variants.__version__)
print(sorted(hf_attn_variants.__all__), set(hf_attn_variants.__all__) <= set(dir(hf_attn_variants)))
from hf_attn_variants import *
print(AttnVariantBertModel, convert.__module__)
from transformers import AutoConfig
print(AutoConfig.for_model("attn_variant_bert", num_key_value_heads=1).num_key_value_heads)
"""
    library, command = (run_python("-c", code, kind).splitlines() for kind in ("library", "command"))
    assert library[0].startswith("True ") and command[0] == library[0].replace("True", "False")
    assert command[1:] == library[1:] and library[1].endswith("] True")


def run_python(*argv):
    ended = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def test_convert_and_inspect_run_like_a_user(source, tmp_path, capsys):
    output = str(tmp_path / "gqa4")
    argv = ["--model_name_or_path", str(source), "--num_key_value_heads", "4", "--output_dir", output]
    assert cli.main(["convert", *argv]) == 0
    assert AttnVariantBertModel.from_pretrained(output).config.num_key_value_heads == 4
    capsys.readouterr()
    assert cli.main(["inspect", output, "--json", "--batch_size", "8", "--length", "128"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["architecture"] == "AttnVariantBertForMaskedLM" and table["batch_size"] == 8
    assert [row["name"] for row in table["rows"] if row["current"]] == ["GQA-4"]
    assert cli.main(["inspect", output]) == 0
    printed = capsys.readouterr().out
    assert "GQA-4 *" in printed and "GQA-6 -" in printed and "no key/value cache" in printed


def test_inspect_does_not_read_weights(tmp_path, capsys):
    config = T5.make_config("gqa", "T5ForConditionalGeneration")
    config.architectures = ["AttnVariantT5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    assert cli.main(["inspect", str(tmp_path), "--length", "1024", "--batch_size", "32", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    # 2 layers x (4 + 4) heads x 8 numbers x 2 bytes = 256 bytes per token, for 32 x 2 x 1024 tokens.
    assert "bfloat16, batch 32, 1,024 tokens attended to, source 1,024" in printed
    row = next(line for line in printed.splitlines() if line.startswith("GQA-4 *"))
    assert row.split()[3:] == ["16.0", "MiB", "0", "B", "(0%)"]
    assert cli.main(["inspect", str(tmp_path), "--length", "1024", "--dtype", "bfloat16", "--details"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("GQA-4 *"))
    assert row.split()[-7:] == ["256", "B", "512.0", "KiB", "0", "B", "(0%)"]


# The other arguments of each command. An option with several values is between other options.
COMMAND_LINES = {
    "inspect": ["--length", "8"],
    "benchmark": ["--rounds", "2"],
    "frontier": ["--output_dir", "out", "--calibration_file", "a.txt", "--kv_lora_rank", "8", "4", "--seed", "3"],
    "convert": ["--output_dir", "out", "--calibration_file", "a.jsonl", "--seed", "3"],
    "uptrain": ["--objective", "mlm", "--train_file", "a.txt", "--output_dir", "out"],
    "pretrain": ["--output_dir", "out", "--train_file", "a.txt", "--max_train_steps", "3"],
    "pretrain-t5": ["--output_dir", "out", "--train_file", "a.txt", "--max_train_steps", "3"],
    "classify": ["--output_dir", "out", "--train_file", "a.csv", "--problem_type", "regression"],
    "glue": ["--task_name", "sst2", "--output_dir", "out", "--cpu"],
    "ner": ["--output_dir", "out", "--train_file", "a.txt", "--validation_file", "b.txt"],
    "squad": ["--output_dir", "out", "--learning_rate", "1e-5"],
    "seq2seq": ["--output_dir", "out", "--num_beams", "1", "4", "--task_name", "stsb"],
    "visualize": ["--text", "a text", "--layers", "1", "2", "--output_dir", "out"],
    "export": ["--to", "transformers", "--output_dir", "out"],
    "push": ["--repo_id", "me/x", "--dry_run"],
    "refresh": ["--output_dir", "out", "--hub_model_id", "me/x", "--push_to_hub"],
}
# The commands that work without a checkpoint, and the architecture that they create.
WITHOUT_CHECKPOINT = {"pretrain": "bert", "pretrain-t5": "t5", "seq2seq": "t5"}


def test_all_commands_except_two_take_a_checkpoint():
    assert set(cli.COMMANDS) == {*COMMAND_LINES, "average", "sweep"}


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_checkpoint_can_be_a_positional_or_named_argument(name, capsys):
    parse_args = load_command(name).parse_args
    options = COMMAND_LINES[name]
    named = parse_args(["--model_name_or_path", "a/b", *options])
    assert named.model_name_or_path == "a/b"
    for argv in (
        ["a/b", *options],
        [*options, "a/b"],
        [*options, "--", "a/b"],
        [*options[:2], "a/b", *options[2:]],
        ["a/b", *options, "--model_name_or_path", "a/b"],
        [*options, "--model_name_or_path=a/b"],
    ):
        assert parse_args(argv) == named, argv
    with pytest.raises(SystemExit) as stopped:
        parse_args(["a/b", *options, "--model_name_or_path", "c/d"])
    assert stopped.value.code == 2
    assert "must be the same, got 'a/b' and 'c/d'" in capsys.readouterr().err
    if name in WITHOUT_CHECKPOINT:
        new = ["--model_type", WITHOUT_CHECKPOINT[name], "--tokenizer_name", "a/b"]
        assert parse_args([*options, *new]).model_name_or_path is None
        return
    with pytest.raises(SystemExit) as stopped:
        parse_args(options)
    assert stopped.value.code == 2 and "CHECKPOINT is required" in capsys.readouterr().err


@pytest.mark.thorough
def test_inspect_of_a_hub_id_downloads_only_the_configuration(tmp_path):
    """Check in a separate process, because this one is offline."""
    from hub.local_hub import LocalHub

    with LocalHub() as hub:
        config = BERT.make_config("gqa").to_json_string().encode()
        hub.create("me/gqa4", files={"config.json": config, "model.safetensors": b"not read"})
        command = ["-m", "hf_attn_variants", "inspect", "me/gqa4", "--json"]
        printed = run_elsewhere(*command, cwd=tmp_path, hub=hub, has_package=True)
        assert json.loads(printed)["checkpoint"] == "me/gqa4"
        assert not any("safetensors" in request for request in hub.requests)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["inspect", "./nosuchmodel"], "'./nosuchmodel' is neither an existing folder nor a Hub id"),
        (["benchmark", "nosuchmodel/"], "'nosuchmodel/' is neither an existing folder nor a Hub id"),
        (
            ["convert", "--model_name_or_path", "~/nosuchmodel", "--output_dir", "{out}"],
            f"'{os.path.expanduser('~/nosuchmodel')}' is neither an existing folder",
        ),
        (["push", "--model_name_or_path", "./nosuchmodel"], "checkpoint folder './nosuchmodel'"),
        (
            ["visualize", "--model_name_or_path", "./nosuchmodel", "--text", "a", "--output_dir", "{out}"],
            "'./nosuchmodel' is neither",
        ),
        (
            "uptrain --model_name_or_path ./nosuchmodel --output_dir {out} --objective mlm --train_file x".split(),
            "'./nosuchmodel' is neither",
        ),
        (["inspect", "nowhere/at/all"], "nowhere/at/all"),
        (["inspect", "config.json-is-not-here", "--revision", "main"], "config.json-is-not-here"),
        (
            ["convert", "--model_name_or_path", "{source}", "--output_dir", "{out}", "--num_key_value_heads", "5"],
            "5 for 12",
        ),
        (["push", "--model_name_or_path", "{source}/nothing", "--repo_id", "me/x"], "checkpoint folder"),
        (["inspect", "{source}", "--length", "0"], "`length` must be at least 1"),
    ],
)
def test_user_error_exits_with_a_one_line_error_and_status_2(source, tmp_path, capsys, argv, message):
    argv = [item.format(source=source, out=tmp_path / "out") for item in argv]
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command",
    [
        *(["export", "--to", form] for form in ("transformers", "onnx", "ctranslate2")),
        ["convert", "--num_key_value_heads", "2"],
        ["visualize", "--text", "a"],
        ["refresh"],
    ],
    ids=" ".join,
)
def test_nonempty_output_folder_raises_before_slow_imports(command, tmp_path, capsys, monkeypatch):
    from hf_attn_variants import registration

    monkeypatch.setattr(registration, "register", lambda: pytest.fail("the package was imported"))
    (tmp_path / "a").touch()
    assert cli.main([*command, "--model_name_or_path", "somewhere", "--output_dir", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_tilde_after_an_equals_sign_is_expanded(monkeypatch):
    from hf_attn_variants.command_parser import CommandParser

    monkeypatch.setenv("HOME", "/somewhere")
    parser = CommandParser()
    parser.add_argument("--output_dir")
    parser.add_argument("--train_file", nargs="+")
    args = parser.parse_args(["--output_dir=~/o", "--train_file", "~/a.csv", "b~/c.csv"])
    assert (args.output_dir, args.train_file) == ("/somewhere/o", ["/somewhere/a.csv", "b~/c.csv"])
