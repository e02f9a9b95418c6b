"""Check `run_squad.main` on a few questions with tiny models: learning, outputs, resumed runs and early errors."""

import json

import pytest
import torch
from fixtures.commands import run_command
from fixtures.squad import make_reader, write_questions
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer

from hf_attn_variants.commands.training import squad
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.training.squad.data import (
    compute_squad_metrics,
    compute_stride,
    make_window_collator,
    make_windows,
    read_squad,
)


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    return {kind: make_reader(kind, tmp_path_factory.mktemp(kind) / "mha") for kind in ("bert", "albert", "t5")}


@pytest.fixture
def run(readers, tmp_path):
    def call(*more, model=readers["bert"], version_2=False, output_dir=tmp_path / "out"):
        file = write_questions(tmp_path / f"v{1 + version_2}.json", version_2)
        argv = ["--model_name_or_path", model, "--train_file", file, "--validation_file", file]
        argv += ["--version_2_with_negative"] if version_2 else []
        argv += ["--max_length", 24, "--doc_stride", 4, "--max_query_length", 8, "--output_dir", output_dir]
        argv += ["--per_device_train_batch_size", 4, "--per_device_eval_batch_size", 3, "--learning_rate", 3e-3]
        argv += ["--logging_steps", 1, "--dropout_rate", 0, "--cpu", "--disable_tqdm", *more]
        return run_command(squad, *argv)

    call.out, call.file = tmp_path / "out", lambda version_2=False: tmp_path / f"v{1 + version_2}.json"
    return call


def load(folder, name):
    return json.loads((folder / name).read_text())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bert", "albert", "t5"])
def test_every_architecture_learns_its_questions(run, readers, kind):
    model = readers[kind]
    convert_checkpoint(model, model.parent / "gqa2", 2)
    results = run("--max_train_steps", 80, "--group_by_length", model=model.parent / "gqa2")
    assert results["eval_f1"] > 90 and results["eval_loss"] < results["train_loss"]
    assert results["train_windows"] > results["train_samples"] == 5 and results["eval_windows"] > 5
    predictions = load(run.out, "predictions_dev.json")
    scores = compute_squad_metrics(read_squad(run.file()), predictions)
    assert scores["f1"] == results["eval_f1"] and scores["exact_match"] == results["eval_exact_match"]
    nbest = load(run.out, "predictions_nbest_dev.json")
    assert {key: entries[0]["text"] for key, entries in nbest.items()} == predictions
    assert (run.out / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    inputs = set(AutoTokenizer.from_pretrained(run.out)("a question", "its context"))
    assert inputs - {"attention_mask"} == {"input_ids", *(["token_type_ids"] if kind != "t5" else [])}
    config = load(run.out, "config.json")
    assert config["architectures"][0].startswith("AttnVariant") and config["num_key_value_heads"] == 2
    again = run("--num_train_epochs", 0, model=run.out, output_dir=run.out.with_name("again"))
    assert again["eval_f1"] == results["eval_f1"]
    assert again["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-5)


def test_window_model_attends_to_the_question_globally(run, readers, tmp_path):
    windows = {"attention_pattern": "sliding_window", "attention_window": 2}
    convert_checkpoint(readers["bert"], tmp_path / "windows", **windows)
    results = run("--max_train_steps", 2, model=tmp_path / "windows")
    model = AutoModelForQuestionAnswering.from_pretrained(run.out).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.out)
    cut = make_windows(read_squad(run.file()), tokenizer, 24, 4, 8)
    losses = {}
    for marks in (False, True):
        collate = make_window_collator(tokenizer, None, marks)
        with torch.no_grad():
            losses[marks] = sum(float(model(**collate([window])).loss) for window in cut) / len(cut)
    assert results["eval_loss"] == pytest.approx(losses[True], rel=1e-5)
    assert losses[False] != pytest.approx(losses[True], rel=1e-3)


def test_squad_version_2_learns_unanswerable_questions(run):
    results = run("--max_train_steps", 120, "--metric_for_best_model", "f1", "--eval_steps", 40, version_2=True)
    assert results["eval_NoAns_total"] == 2 and results["eval_HasAns_total"] == 5 and results["eval_f1"] > 80
    assert results["eval_best_f1"] >= results["eval_f1"]
    predictions = load(run.out, "predictions_dev.json")
    odds = load(run.out, "predictions_null_odds_dev.json")
    assert all((text == "") == (odds[key] > 0) for key, text in predictions.items())
    silent = run(
        "--num_train_epochs", 0, "--null_score_diff_threshold", -1e6,
        model=run.out, version_2=True, output_dir=run.out.with_name("silent"),
    )  # fmt: skip
    assert silent["eval_NoAns_f1"] == 100 and silent["eval_HasAns_f1"] == 0
    assert silent["eval_best_f1"] == pytest.approx(results["eval_best_f1"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max_answer_length", 29, "max_answer_length was 30 and is now 29"),
        ("--n_best_size", 19, "n_best_size was 20 and is now 19"),
        ("--null_score_diff_threshold", 1, "null_score_diff_threshold was 0.0 and is now 1.0"),
        ("--max_eval_samples", 4, "hash of the dev data was"),
    ],
)
def test_resumed_squad_run_keeps_the_best_weights(run, flag, value, message):
    last = ["--max_train_steps", 2, "--checkpointing_steps", 1]
    best = [*last, "--metric_for_best_model", "f1", "--output_dir", run.out.with_name("best")]
    run(*last)
    run(*last, flag, value, "--resume_from_checkpoint", "latest")
    run(*best)
    with pytest.raises(ValueError, match=message):
        run(*best, flag, value, "--resume_from_checkpoint", "latest")


def test_squad_test_file_is_predicted(run):
    run("--max_train_steps", 1)  # also writes the question file
    results = run("--max_train_steps", 1, "--test_file", run.file(), output_dir=run.out.with_name("test"))
    folder = run.out.with_name("test")
    assert results["steps"] == 1
    assert load(folder, "predictions_test.json") == load(folder, "predictions_dev.json")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max_length", 64, "--pad_to_multiple_of", 48], "--max_length.*padded to 96"),
        (["--doc_stride", 20], "13 tokens.*--doc_stride"),
        (["--doc_stride", -1], "--doc_stride must be at least 0"),
        (["--max_query_length", 30], "leaves 0 tokens for the context"),
        (["--n_best_size", 0], "--n_best_size must be at least 1"),
        (["--metric_for_best_model", "HasAns_f1"], "must be one of loss, exact_match, f1"),
    ],
)
def test_squad_rejects_invalid_flags_before_any_work(run, more, message):
    with pytest.raises(ValueError, match=message):
        run(*more)
    assert not (run.out / "all_results.json").exists()


@pytest.mark.parametrize(("lengths", "stride"), [((128, 64), 30), ((192, 64), 62), ((196, 64), 128), ((384, 64), 128)])
def test_default_stride_fits_the_length(readers, lengths, stride):
    argv = [readers["t5"], "--output_dir", "o", "--max_length", lengths[0], "--max_query_length", lengths[1]]
    settings = squad.parse_args([str(part) for part in argv])
    tokenizer = AutoTokenizer.from_pretrained(readers["t5"])
    config = AutoConfig.from_pretrained(readers["t5"])
    free = lengths[0] - lengths[1] - tokenizer.num_special_tokens_to_add(pair=True)
    result = compute_stride(settings, config, tokenizer)
    assert result == (128 if free > 128 else free // 2) and abs(result - stride) <= 1
