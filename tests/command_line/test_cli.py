"""The `attn-variants` command: what it lists, what it imports, and that it does what the scripts do."""

import importlib
import json
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from architectures import BERT, T5
from fixtures.glue.tiny_bert import FIXTURES, make_tiny_bert
from fixtures.speech import whisper_checkpoint

import attn_variants
import hf_attn_variants
from hf_attn_variants import AttnVariantBertModel, cli

ROOT = Path(__file__).parents[2]
HEAVY = ("datasets", "evaluate", "matplotlib", "pandas", "peft", "rich", "sacrebleu", "sklearn")


@pytest.fixture
def source(tmp_path):
    BERT.upstream_model("BertForMaskedLM").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_the_installed_command_is_this_one():
    found = [each for each in entry_points(group="console_scripts") if each.name == "attn-variants"]
    if not found or not found[0].value.startswith("attn_variants:"):
        pytest.skip("the package was installed before it had this command; pip install -e . again")
    assert found[0].load() is attn_variants.main


def test_help_names_every_command_and_version_is_the_packages(capsys):
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
def test_the_module_is_the_command_too(module):
    ended = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (0, f"hf_attn_variants {hf_attn_variants.__version__}\n"), ended.stderr


def test_without_a_command_it_prints_the_help(capsys):
    assert cli.main([]) == 2
    assert capsys.readouterr().out.startswith("usage: attn-variants ")


def test_help_is_as_wide_as_the_terminal_and_keeps_examples(capsys, monkeypatch):
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


def test_the_literals_of_convert_are_those_of_the_conversion():
    from hf_attn_variants.commands import convert
    from hf_attn_variants.conversion import METHODS
    from hf_attn_variants.conversion.checkpoint.tensor_files import EXTENSIONS
    from hf_attn_variants.conversion.conversions import DTYPES

    assert list(convert.METHODS) == sorted(METHODS) and list(convert.DTYPES) == sorted(DTYPES)
    assert convert.POSITION_EXTENSIONS == EXTENSIONS


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_own_help(name, capsys):
    module = importlib.import_module(cli.COMMANDS[name][0])
    assert callable(module.main)
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and f"usage: attn-variants {name} " in printed
    assert f"  attn-variants {name} " in printed.split("\nexample")[-1] and "python scripts/" not in printed


def test_help_and_docs_of_export_agree_on_what_keeps_fewer_heads(capsys):
    with pytest.raises(SystemExit):
        cli.main(["export", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "a model for CTranslate2 with fewer heads in the weights and all heads in the cache" in text
    table = (ROOT / "docs/export.md").read_text(encoding="utf-8")
    assert "| `ctranslate2` | fewer heads in the file; all heads in the cache |" in table
    assert "| `transformers` | the outputs; all heads in file and cache |" in table


def test_help_says_what_an_option_is_by_default(capsys):
    for name, *shown in (
        ("glue", "Peak learning rate (default: 5e-05).", "(default: 3.0)"),
        ("uptrain", "(default: 0.001)"),
    ):
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        printed = " ".join(capsys.readouterr().out.split())
        assert all(text in printed for text in shown)
        assert "default: None" not in printed and "default: False" not in printed


def test_help_names_every_host():
    from hf_attn_variants.command_line import MODEL_NAMES
    from hf_attn_variants.registration import ARCHITECTURES

    named = {name.lower() for name in re.findall(r"\w+", MODEL_NAMES)}
    hosts = {each.model_type.removeprefix("attn_variant_").replace("_", "") for each in ARCHITECTURES}
    assert hosts and hosts <= named


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_examples_fit_80_columns(name, capsys, monkeypatch):
    """As the command and as its script, whose name is longer."""
    monkeypatch.setenv("COLUMNS", "80")
    module = importlib.import_module(cli.COMMANDS[name][0])
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
        (
            ["classify", "bert", "--train_file", "a.csv", "--train_file", "b.csv"],
            "--train_file must be given only once",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_error_of_the_command_line_is_the_error_and_where_to_read_more(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        raise SystemExit(cli.main(argv))
    error, more = capsys.readouterr().err.splitlines()
    program = " ".join(["attn-variants", *argv[:1]]) if argv[0] in cli.COMMANDS else "attn-variants"
    assert stopped.value.code == 2 and error.startswith("error: ") and message in error
    assert more == f"Run `{program} --help` to see all options."


@pytest.mark.parametrize(
    ("flags", "field", "value", "note"),
    [
        (
            ["--method", "mean", "--method", "first"],
            "method",
            "first",
            "note: --method is given twice",
        ),
        (["--seed", "3", "--seed=4"], "seed", 4, "note: --seed is given twice"),
        (["--calibration_passages", "--no-calibration_passages"], "calibration_passages", False, ""),
        (["--token", "hf_first", "--token", "hf_secret"], "token", "hf_secret", "note: --token is given twice"),
        (["--seed", "3", "--seed", "3"], "seed", 3, ""),
    ],
)
def test_of_a_flag_given_twice_the_last_value_counts_and_a_line_says_so(flags, field, value, note, capsys):
    parse = importlib.import_module(cli.COMMANDS["convert"][0]).parse_args
    calibrated = ["bert", "--output_dir", "out", "--calibration_file", __file__]
    assert getattr(parse([*calibrated, *flags]), field) == value
    said = capsys.readouterr().err
    assert note in said and bool(said) == bool(note) and "hf_" not in said


def test_the_hubs_client_says_once_that_it_tries_again(monkeypatch, capsys):
    """It prints two lines for every try and every file."""
    from huggingface_hub.utils import _http

    from hf_attn_variants.inspection import costs

    def unreachable(*arguments):
        for number in (1, 2, 3):
            _http.logger.warning(f"'refused' thrown while requesting HEAD https://hub/{number}")
            _http.logger.warning(f"Retrying in {number}s [Retry {number}/5].")
        _http.logger.warning("something else")
        raise OSError("the Hub does not answer")

    hub = logging.getLogger("huggingface_hub")
    handler = hub.handlers[0]
    monkeypatch.setattr(hub, "handlers", [handler])  # other tests add theirs
    monkeypatch.setattr(handler, "stream", sys.stderr)
    monkeypatch.setattr(costs, "read_checkpoint_config", unreachable)
    for _ in range(2):  # each command anew
        assert cli.main(["inspect", "me/x"]) == 2
        assert capsys.readouterr().err.splitlines() == [
            "'refused' thrown while requesting HEAD https://hub/1",
            "Retrying in 1s [Retry 1/5].",
            "something else",
            "error: the Hub does not answer",
        ]


@pytest.mark.thorough
def test_nothing_heavier_than_the_package_is_imported_with_it():
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
def test_help_and_mistyped_flags_wait_for_no_import(argv):
    """Neither torch nor transformers nor numpy: with them, each would take seconds."""
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
def test_a_command_has_the_same_public_names():
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


def test_convert_and_inspect_as_one_would_use_them(source, tmp_path, capsys):
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


def test_inspect_reads_no_weights(tmp_path, capsys):
    config = T5.config("gqa", "T5ForConditionalGeneration")
    config.architectures = ["AttnVariantT5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    assert cli.main(["inspect", str(tmp_path), "--length", "1024", "--batch_size", "32", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    # 2 layers x (4 + 4) heads x 8 numbers x 2 bytes = 256 bytes for a token, 32 x 2 x 1024 tokens of them
    assert "bfloat16, batch 32, 1,024 tokens attended to, source 1,024" in printed
    row = next(line for line in printed.splitlines() if line.startswith("GQA-4 *"))
    assert row.split()[3:] == ["16.0", "MiB", "0", "B", "(0%)"]
    assert cli.main(["inspect", str(tmp_path), "--length", "1024", "--dtype", "bfloat16", "--details"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("GQA-4 *"))
    assert row.split()[-7:] == ["256", "B", "512.0", "KiB", "0", "B", "(0%)"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "where, width", [("a pipe with COLUMNS", 80), ("a pipe with COLUMNS", 120), ("a terminal", 120)]
)
def test_inspect_breaks_no_word_and_no_number(tmp_path, width, where, monkeypatch, capsys):
    T5.upstream_model("T5ForConditionalGeneration").save_pretrained(tmp_path)
    argv = ["inspect", str(tmp_path), "--batch_size", "32", "--details"]

    def in_a_pipe(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        assert cli.main(argv) == 0
        return capsys.readouterr().out

    wide = in_a_pipe(1000)
    if where == "a terminal":
        env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        printed = in_a_terminal([sys.executable, "-m", "hf_attn_variants", *argv], env, width)
    else:
        printed = in_a_pipe(width)
    lines = [line for line in printed.splitlines() if str(tmp_path) not in line]  # one long word
    assert max(map(len, lines)) <= width
    assert set(printed.split()) - set(re.findall("-+", printed)) == set(wide.split()) - set(re.findall("-+", wide))
    for name in ("MHA *", "MQA", "MHA + talking heads"):  # its numbers, in the order of the wide table
        [row] = [line for line in wide.splitlines() if line.startswith(f"{name} ")]
        parts = [line.removeprefix(name) for line in lines if re.match(rf"{re.escape(name)}  ", line)]
        assert " ".join(parts).split() == row.removeprefix(name).split()


def in_a_terminal(command, env, width):
    """What a command prints on a terminal of so many columns."""
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with subprocess.Popen(command, env=env, stdout=slave, stderr=subprocess.DEVNULL, stdin=slave) as process:
        os.close(slave)
        printed = b""
        try:
            while part := os.read(master, 65536):
                printed += part
        except OSError:  # Linux: the other end is closed
            pass
    os.close(master)
    assert process.returncode == 0
    return printed.decode()


# What each command needs beside a checkpoint; an option that takes several values stands between others.
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
# The commands that can do without a checkpoint, and the architecture that they make then.
WITHOUT_CHECKPOINT = {"pretrain": "bert", "pretrain-t5": "t5", "seq2seq": "t5"}


def test_all_commands_but_two_are_about_a_checkpoint():
    assert set(cli.COMMANDS) == {*COMMAND_LINES, "average", "sweep"}


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_every_command_takes_the_checkpoint_by_its_place_and_by_name(name, capsys):
    parse_args = importlib.import_module(cli.COMMANDS[name][0]).parse_args
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


def test_an_option_of_several_values_takes_what_follows_it(capsys):
    from hf_attn_variants.commands.convert import parse_args

    argv = ["--output_dir", "out", "--calibration_columns", "a", "b"]
    assert parse_args(["ckpt", *argv]).calibration_columns == ["a", "b"]
    with pytest.raises(SystemExit):
        parse_args([*argv, "ckpt"])
    assert "before options that take several values" in capsys.readouterr().err


@pytest.mark.thorough
def test_inspect_of_a_hub_id_downloads_the_configuration_alone(tmp_path):
    """In a process of its own: this one is offline."""
    from hub.local_hub import LocalHub

    with LocalHub() as hub:
        config = BERT.config("gqa").to_json_string().encode()
        hub.create("me/gqa4", files={"config.json": config, "model.safetensors": b"not read"})
        env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-m", "hf_attn_variants", "inspect", "me/gqa4", "--json"]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stderr[-2000:]
        assert json.loads(result.stdout)["checkpoint"] == "me/gqa4"
        assert not any("safetensors" in request for request in hub.requests)


def test_glue_trains_through_the_command(tmp_path):
    model = make_tiny_bert(tmp_path / "tiny")
    argv = ["--model_name_or_path", str(model), "--task_name", "stsb", "--data_dir", str(FIXTURES / "STS-B")]
    argv += [
        "--output_dir",
        str(tmp_path / "out"),
        "--max_train_steps",
        "2",
        "--max_length",
        "48",
        "--cpu",
        "--disable_tqdm",
    ]
    assert cli.main(["glue", *argv]) == 0
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["steps"] == 2


@pytest.mark.parametrize(
    "argv, message",
    [
        (["inspect", "./nosuchmodel"], "no folder './nosuchmodel', and it is not a Hub id"),
        (["benchmark", "nosuchmodel/"], "no folder 'nosuchmodel/', and it is not a Hub id"),
        (
            ["convert", "--model_name_or_path", "~/nosuchmodel", "--output_dir", "{out}"],
            f"no folder '{os.path.expanduser('~/nosuchmodel')}'",
        ),
        (["push", "--model_name_or_path", "./nosuchmodel"], "checkpoint folder './nosuchmodel'"),
        (
            ["visualize", "--model_name_or_path", "./nosuchmodel", "--text", "a", "--output_dir", "{out}"],
            "no folder './nosuchmodel'",
        ),
        (
            "uptrain --model_name_or_path ./nosuchmodel --output_dir {out} --objective mlm --train_file x".split(),
            "no folder './nosuchmodel'",
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
def test_a_users_error_is_one_line_and_status_2(source, tmp_path, capsys, argv, message):
    argv = [each.format(source=source, out=tmp_path / "out") for each in argv]
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        "seq2seq --source_file {text} --target_file {text}",
        "uptrain --objective seq2seq --teacher {model} --source_file {text} --target_file {text}",
        "glue --task_name sst2",
        "visualize --text words",
        "frontier --calibration_file {text}",
        "pretrain --train_file {text} --max_train_steps 1",
        "pretrain-t5 --train_file {text} --max_train_steps 1",
    ],
    ids=lambda words: words.split()[0],
)
def test_what_reads_text_refuses_what_hears(words, tmp_path, capsys):
    model = whisper_checkpoint(tmp_path / "whisper")
    (tmp_path / "text.txt").write_text("a line of text\n" * 200)
    name, *rest = words.format(model=model, text=tmp_path / "text.txt").split()
    where = ["--model_name_or_path", str(model), "--output_dir", str(tmp_path / "out")]
    assert cli.main([name, *where, *rest]) == 2
    assert "reads audio" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_error_of_ours_in_a_function_that_prints_is_not_taken_for_a_full_stdout(capsys):
    """`push` of a folder that is not there was told as a stdout that cannot be written."""
    from hf_attn_variants.errors import run_script

    def main():
        if sys.stdout is None:
            print()
        raise FileNotFoundError("The checkpoint folder 'nowhere' does not exist.")

    assert run_script(main) == 2
    assert capsys.readouterr().err == "error: The checkpoint folder 'nowhere' does not exist.\n"


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
def test_a_folder_that_is_not_empty_is_refused_before_imports_that_take_seconds(
    command, tmp_path, capsys, monkeypatch
):
    from hf_attn_variants import registration

    monkeypatch.setattr(registration, "register", lambda: pytest.fail("it was imported"))
    (tmp_path / "a").touch()
    assert cli.main([*command, "--model_name_or_path", "somewhere", "--output_dir", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_home_folder_behind_an_equals_sign_is_expanded(monkeypatch):
    from hf_attn_variants.command_line import CommandParser

    monkeypatch.setenv("HOME", "/somewhere")
    parser = CommandParser()
    parser.add_argument("--output_dir")
    parser.add_argument("--train_file", nargs="+")
    args = parser.parse_args(["--output_dir=~/o", "--train_file", "~/a.csv", "b~/c.csv"])
    assert (args.output_dir, args.train_file) == ("/somewhere/o", ["/somewhere/a.csv", "b~/c.csv"])
