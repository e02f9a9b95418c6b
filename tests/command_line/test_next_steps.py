"""The commands that `attn-variants convert` prints: the training commands' own parsers take them, and they run."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from fixtures.named_checkpoints import CheckpointShelf, write_glue_folder, write_text
from fixtures.squad import write_questions
from huggingface_hub import constants
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    T5EncoderModel,
)

from hf_attn_variants import cli
from hf_attn_variants.commands import convert as command
from hf_attn_variants.commands import glue as run_glue
from hf_attn_variants.commands import ner, uptrain
from hf_attn_variants.commands import seq2seq as run_seq2seq
from hf_attn_variants.commands import squad as run_squad
from hf_attn_variants.commands.next_steps import next_steps
from hf_attn_variants.conversion.checkpoint import source

MODULES = {"uptrain": uptrain, "glue": run_glue, "squad": run_squad, "seq2seq": run_seq2seq, "ner": ner}
FEW = ["--cpu", "--disable_tqdm", "--max_train_steps", "1", "--max_eval_samples", "2", "--max_train_samples", "32"]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return CheckpointShelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def converted(shelf, tmp_path, monkeypatch, capsys):
    """A function that converts as a user does in a folder of its own, and returns the printed lines and commands."""
    monkeypatch.chdir(tmp_path)
    for name in ("my text.txt", "source.txt", "target.txt", "pairs.jsonl"):
        write_text(Path(name))

    def convert(kind, *flags):
        if not Path(kind).exists() and "--revision" not in flags:
            shelf.put(kind, Path(kind))
        command.main(command.parse_args(["--model_name_or_path", kind, *flags]))
        lines = capsys.readouterr().out.splitlines()
        lines = lines[next((i for i, line in enumerate(lines) if line.startswith("Next: ")), len(lines)) :]
        return lines, [shlex.split(line) for line in lines if line.startswith("  attn-variants ")]

    return convert


def parsed(words):
    assert words[0] == "attn-variants" and words[1] in cli.COMMANDS
    return MODULES[words[1]].parse_args(words[2:])


LINES = ("--calibration_file", "my text.txt", "--fit_steps", "0", "--max_length", "16")
PAIRS = ("--calibration_file", "pairs.jsonl", "--fit_steps", "0", "--calibration_columns", "question", "context")
PARALLEL = ("--calibration_file", "source.txt", "--calibration_target_file", "target.txt", "--fit_steps", "0")


@pytest.mark.parametrize(
    ("kind", "flags", "commands"),
    [("minilm", LINES, "uptrain glue"), ("squad", PAIRS, "uptrain squad"), ("t5", PARALLEL, "uptrain seq2seq")],
)
def test_the_printed_commands_run(converted, kind, flags, commands):
    lines, found = converted(kind, "--num_key_value_heads", "4", *flags, "--output_dir", "new model/")
    assert [words[1] for words in found] == commands.split()
    assert ("reads no labels" in lines[0]) is (kind != "t5")
    assert ("--keep_matching_layers 2" in lines[-1]) is (kind == "minilm")
    write_glue_folder(Path("glue"), "SST-2")
    write_questions(Path("questions.json"))
    local = {"glue": ["--data_dir", "glue"], "squad": ["--train_file", "questions.json"]}
    local["squad"] += ["--validation_file", "questions.json"]
    model = "new model"
    for words in found:
        args = parsed(words)
        assert args.model_name_or_path == model
        assert cli.main([*words[1:], *FEW, *local.get(words[1], [])]) == 0
        model = args.output_dir
        assert AutoConfig.from_pretrained(model).num_key_value_heads == 4
    distilled = parsed(found[0])
    assert distilled.teacher == kind and distilled.output_dir == "new model-distilled" and distilled.group_by_length
    read = distilled.source_file or distilled.train_file[0]
    assert read == flags[1]
    rates = {"minilm": ("all", 1e-4, 150, 16), "squad": ("all", 2e-5, 280, 64), "t5": ("attention", 1e-3, None, 64)}
    got = (distilled.trainable, distilled.learning_rate, distilled.max_train_steps, distilled.max_length)
    assert got == rates[kind]


def test_layers_that_compare_are_told_of_where_none_was_kept(converted):
    kept = ("--num_key_value_heads", "4", *LINES, "--keep_matching_layers", "1", "--output_dir", "kept")
    lines, found = converted("minilm", *kept)
    assert found and "--keep_matching_layers" not in lines[-1]
    mean = ("--num_key_value_heads", "4", "--method", "mean", "--output_dir", "mean")
    assert "--keep_matching_layers" not in "".join(converted("minilm", *mean)[0])


def test_what_is_the_users_own_is_named(converted):
    lines, (distil, tune) = converted("t5", "--num_key_value_heads", "4", "--method", "mean", "--output_dir", "mean")
    assert "without text need training" in lines[0]
    assert lines[-1].startswith("  with yours in place of TEXT.txt, ") and "TARGETS.txt, " in lines[-1]
    assert parsed(distil).source_file == "TEXT.txt" and parsed(tune).target_file == "TARGETS.txt"
    table = ("--calibration_columns", "question", "--calibration_target_column", "context", "--fit_steps", "0")
    out = ("--num_key_value_heads", "4", "--output_dir", "table")
    lines, found = converted("t5", *out, "--calibration_file", "pairs.jsonl", *table)
    for args in map(parsed, found):
        assert (args.train_file, args.source_column, args.target_column) == (("pairs.jsonl",), "question", "context")
    assert lines[-1].startswith("  attn-variants seq2seq ")


def test_a_t5_calibrated_on_a_table_without_targets_trains_on_that_table(converted):
    table = ("--num_key_value_heads", "4", "--calibration_file", "pairs.jsonl", "--fit_steps", "0")
    one = ("--calibration_columns", "question", "--output_dir", "one")
    lines, found = converted("t5", *table, *one)
    assert [words[1] for words in found] == ["uptrain", "seq2seq"]
    for args in map(parsed, found):
        assert (args.train_file, args.source_column, args.target_column) == (("pairs.jsonl",), "question", "TARGET")
        assert args.source_file is None
    assert lines[-1] == "  with yours in place of TARGET, the table's column of targets"
    two = ("--calibration_columns", "question", "context", "--output_dir", "two")
    assert converted("t5", *table, *two) == ([], [])  # no command joins two columns


def test_nothing_is_proposed_that_would_throw_a_head_away(converted, shelf):
    shelf.put("bert", Path("tuned"))
    AutoModelForSequenceClassification.from_pretrained("tuned").save_pretrained("tuned")
    mean = ("--num_key_value_heads", "4", "--method", "mean", "--output_dir")
    lines, found = converted("tuned", *mean, "tuned-4")
    assert [words[1] for words in found] == ["uptrain"] and "fine-tune" not in lines[0]
    shelf.put("t5", Path("encoder"))
    T5EncoderModel.from_pretrained("encoder").save_pretrained("encoder")
    encoder = ("--encoder_num_key_value_heads", "4", "--method", "mean", "--output_dir", "encoder-4")
    assert [words[1] for words in converted("encoder", *encoder)[1]] == ["uptrain"]


def test_a_tagger_goes_on_with_tagged_words(converted, shelf):
    shelf.put("bert", Path("tuned"))
    AutoModelForTokenClassification.from_pretrained("tuned").save_pretrained("tuned")
    mean = ("--num_key_value_heads", "4", "--method", "mean", "--output_dir", "tuned-4")
    lines, (distil, tune) = converted("tuned", *mean)
    assert (distil[1], tune[1]) == ("uptrain", "ner") and parsed(tune).model_name_or_path == "tuned-4-distilled"
    assert "TAGGED.txt, a file of tagged words" in lines[-1] and "TAGGED-DEV.txt, one to evaluate on" in lines[-1]


def test_the_hub_is_asked_once(converted, shelf, tmp_path, monkeypatch):
    commit, cache = "a" * 40, tmp_path / "cache"
    snapshot = cache / "models--me--bert" / "snapshots" / commit
    shelf.put("bert", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "v1").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    asked, download = [], source._download

    def once(*args):
        asked.append(args)
        if len(asked) > 1:
            raise OSError("the Hub is away")
        return download(*args)

    monkeypatch.setattr(source, "_download", once)
    mean = ("--num_key_value_heads", "4", "--method", "mean", "--revision", "v1")
    _, (distil, _) = converted("me/bert", *mean, "--output_dir", "out")
    assert parsed(distil).teacher == str(snapshot)
    asked.clear()

    def forget(report, args):
        shutil.rmtree(cache)
        return next_steps(report, args)

    # Where the command finds it, whether it imports it at its top or when it is called.
    monkeypatch.setattr(command, "next_steps", forget, raising=False)
    monkeypatch.setattr("hf_attn_variants.commands.next_steps.next_steps", forget)

    _, (distil, _) = converted("me/bert", *mean, "--output_dir", "again")
    assert parsed(distil).teacher == "me/bert"


def test_nothing_is_proposed_where_nothing_was_lost_or_added(converted):
    converted("bert", "--num_key_value_heads", "4", "--method", "mean", "--output_dir", "grouped")
    assert converted("grouped", "--num_key_value_heads", "12", "--output_dir", "wide") == ([], [])
    assert converted("bert", "--dtype", "bfloat16", "--output_dir", "half") == ([], [])


def test_talking_heads_alone_are_fine_tuned(converted):
    lines, (tune,) = converted("bert", "--talking_heads", "both", "--output_dir", "talking")
    assert lines[0] == "Next: fine-tune it:"
    assert tune[1] == "glue" and parsed(tune).model_name_or_path == "talking"


def test_a_classifier_goes_on_with_its_own_task(converted, shelf):
    shelf.put("bert", Path("tuned"))
    AutoModelForSequenceClassification.from_pretrained("tuned").save_pretrained("tuned")
    Path("tuned/all_results.json").write_text(json.dumps({"task_name": "qnli"}))
    _, (distil, tune) = converted("tuned", "--num_key_value_heads", "4", *PAIRS, "--output_dir", "tuned-4")
    assert parsed(tune).task_name == "qnli"
    args = parsed(distil)
    assert (args.logits_weight, args.text_columns, args.max_length) == (1.0, ("question", "context"), 64)


def test_a_t5_that_answers_by_spans_is_distilled_on_its_text(converted, shelf):
    shelf.put("t5", Path("t5"))
    AutoModelForQuestionAnswering.from_pretrained("t5").save_pretrained("t5")
    lines, (distil, tune) = converted("t5", "--num_key_value_heads", "4", "--method", "mean", "--output_dir", "out")
    assert parsed(distil).objective == "distill" and parsed(distil).train_file == ("TEXT.txt",)
    assert tune[1] == "squad" and parsed(tune).model_name_or_path == "out-distilled"
    assert lines[0].startswith("Next: heads merged without text need training; draw it towards its source")
