"""Check `attn-variants classify`: whole runs on tables, GLUE's scores, output files, resumed runs and flags."""

import functools
import json
import logging
import re

import numpy as np
import pytest
import torch
from fixtures.commands import run_command
from fixtures.data_files import read_lines, write_csv, write_lines
from fixtures.resumed import check_resumed_run
from fixtures.uptraining import make_t5
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from hf_attn_variants import convert
from hf_attn_variants.commands.training import classify
from hf_attn_variants.commands.training import glue as glue_command
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.errors import NonFiniteLossError
from hf_attn_variants.glue_tasks import get_task
from hf_attn_variants.hub import generate_model_card
from hf_attn_variants.training.glue.task import load_glue

ANIMALS, PLACES = ("cat", "dog", "horse", "bird"), ("house", "street", "guitar", "mat")


@pytest.fixture
def run(tiny_bert, tmp_path):
    def call(train=None, dev=None, *flags, model=tiny_bert, out="out", test=None):
        argv = [model, "--output_dir", tmp_path / out, "--max_length", 24, "--cpu", "--disable_tqdm"]
        argv += ["--per_device_train_batch_size", 6, "--learning_rate", "5e-3"]
        for name, path in (("train", train), ("validation", dev), ("test", test)):
            argv += [f"--{name}_file", path] if path is not None else []
        return run_command(classify, *argv, *flags), tmp_path / out

    return call


@pytest.fixture
def sorts(tmp_path):
    """Texts about an animal, a thing, or both: with one label, several labels, or a number."""
    both = [(f"{a} {p}", "both", f"animal|{p}", 2.5) for a in ANIMALS for p in PLACES]
    rows = [(a, "animal", "animal", 1) for a in ANIMALS for _ in range(4)]
    rows += [(p, "thing", p, -1) for p in PLACES for _ in range(4)]
    rows += [("a man", "thing", "", -1), *both]
    table = [(i, text, one, several, number) for i, (text, one, several, number) in enumerate(rows)]
    header = ("id", "what is said", "kind of $", "tags", "size")
    train = write_csv(tmp_path / "train.csv", header, table)
    dev = write_csv(tmp_path / "dev.csv", header, table[2::3])
    write_lines(tmp_path / "test.jsonl", ({"what is said": row[1]} for row in table[::5]))
    return train, dev, tmp_path / "test.jsonl", [row[1] for row in table[::5]]


TEXT = ("--text_columns", "what is said")
LEARNS = ("--learning_rate", "3e-3", "--dropout_rate", 0, "--num_train_epochs", 8)


# Scores of GLUE tasks


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("task", "folder", "flags"),
    [
        ("cola", "CoLA", ()),
        ("stsb", "STS-B", ()),
        ("mnli", "MNLI", ("--labels", "entailment", "neutral", "contradiction")),
    ],
)
def test_plain_table_gives_the_scores_of_glue(run, tiny_bert, glue, tmp_path, task, folder, flags):
    spec, loaded = get_task(task), load_glue(get_task(task), str(glue / folder))
    dev_name = next(iter(spec.eval_splits))
    columns = ["Text A", "Text B", "the $label"] if len(spec.text_columns) == 2 else ["Text A", "the $label"]
    paths = {}
    for name in ("train", dev_name):
        data = loaded[name].data
        labels = data["label"][:]
        labels = labels if spec.is_regression else [spec.labels[i] if spec.submits_class_names else i for i in labels]
        texts = [data[f"text{i + 1}"][:] for i in range(len(spec.text_columns))]
        paths[name] = write_csv(tmp_path / f"{name}.csv", columns, zip(*texts, labels, strict=True))
    shared = ["--max_train_steps", 4, "--eval_steps", 2, "--group_by_length"]
    results, out = run(
        paths["train"], paths[dev_name], "--text_columns", *columns[:-1], "--label_column", columns[-1],
        *flags, *shared,
    )  # fmt: skip
    argv = [tiny_bert, "--task_name", task, "--data_dir", glue / folder, "--output_dir", tmp_path / "glue", *shared]
    argv += ["--max_length", 24, "--cpu", "--disable_tqdm", "--per_device_train_batch_size", 6]
    argv += ["--learning_rate", "5e-3", "--skip_predict"]
    glue_results = run_command(glue_command, *argv)
    same = {"train_loss", "eval_loss", "train_tokens", *(f"eval_{name}" for name in spec.metrics)}
    assert {name: results[name] for name in same} == {name: glue_results[name] for name in same}
    actual, expected = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "glue"))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


# Whole runs


@pytest.mark.thorough
def test_single_label_model_is_trained_saved_and_predicts(run, sorts, bert, tmp_path):
    train, dev, test, texts = sorts
    convert_checkpoint(bert, tmp_path / "gqa", 2)
    label = "--label_column", "kind of $"
    results, out = run(train, dev, *TEXT, *label, *LEARNS, model=tmp_path / "gqa", test=test)
    assert results["eval_accuracy"] > 0.9 and results["eval_f1_macro"] > 0.9 and results["eval_roc_auc"] > 0.9
    assert results["problem_type"] == "single_label_classification" and "test_accuracy" not in results
    assert results["labels"] == ["animal", "both", "thing"] and results["label_column"] == "kind of $"
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert model.config.id2label == {0: "animal", 1: "both", 2: "thing"} and model.config.num_key_value_heads == 2
    assert model.config.problem_type == "single_label_classification"
    written, tokenizer = read_lines(out / "predictions_test.jsonl"), AutoTokenizer.from_pretrained(out)
    assert [row["row"] for row in written] == list(range(1, len(texts) + 1)) and "label" not in written[0]
    with torch.no_grad():
        shares = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts]).softmax(-1)
    for row, text, expected in zip(written, texts, shares.tolist(), strict=True):
        assert list(row["text"].values()) == [text]
        assert list(row["probabilities"].values()) == pytest.approx(expected, abs=1e-4)
        assert row["prediction"] == max(row["probabilities"], key=row["probabilities"].get)
    scored = read_lines(out / "predictions_dev.jsonl")
    right = sum(row["label"] == row["prediction"] for row in scored)
    assert right / len(scored) == pytest.approx(results["eval_accuracy"]) and len(scored) == results["eval_samples"]
    saved = json.loads((out / "all_results.json").read_text())
    assert np.trace(saved["eval_confusion_matrix"]) == right and saved["eval_per_class"]["both"]["f1"] > 0.5
    assert (out / "confusion_matrix.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "confusion_matrix_test.png").exists()


@pytest.mark.thorough
def test_saved_classifier_evaluates_and_predicts(run, sorts, tmp_path):
    train, dev, test, _ = sorts
    label = "--label_column", "kind of $"
    first, out = run(train, dev, *TEXT, *label, "--max_train_steps", 12, test=dev)
    assert first["test_accuracy"] == first["eval_accuracy"] and (out / "confusion_matrix_test.png").is_file()
    # Make another model whose labels are in a different order.
    model, order = AutoModelForSequenceClassification.from_pretrained(out), [2, 0, 1]
    model.classifier.weight.data = model.classifier.weight.data[order]
    model.classifier.bias.data = model.classifier.bias.data[order]
    names = [first["labels"][i] for i in order]
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(out).save_pretrained(tmp_path / "other")
    again, _ = run(None, dev, *TEXT, *label, "--num_train_epochs", 0, model=tmp_path / "other", out="again")
    assert again["labels"] == names and again["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-5)
    alone, folder = run(None, None, *TEXT, "--num_train_epochs", 0, model=out, out="alone", test=test)
    assert not [name for name in alone if name.startswith("eval_")] and alone["test_samples"] == 10
    assert len(read_lines(folder / "predictions_test.jsonl")) == 10 and (folder / "training_curves.png").is_file()
    on, _ = run(train, dev, *TEXT, *label, "--max_train_steps", 3, "--dropout_rate", 0, model=out, out="on")
    off, _ = run(
        train, dev, *TEXT, *label, "--max_train_steps", 3, "--dropout_rate", 0, model=tmp_path / "other", out="off"
    )
    assert off["labels"] == ["animal", "both", "thing"]
    assert off["train_loss"] == pytest.approx(on["train_loss"], rel=1e-5)


@pytest.mark.thorough
def test_multilabel_model_is_trained(run, sorts, bert):
    train, dev, test, texts = sorts
    flags = "--label_column", "tags", "--label_separator", "|"
    results, out = run(train, dev, *TEXT, *flags, *LEARNS, test=test, model=bert)
    assert results["labels"] == ["animal", "guitar", "house", "mat", "street"]
    assert results["eval_f1_micro"] > 0.9 and results["eval_roc_auc"] > 0.9
    assert not (out / "confusion_matrix.png").exists() and "eval_confusion_matrix" not in results
    rows = read_lines(out / "predictions_dev.jsonl")
    assert any(row["label"] == ["animal", "guitar"] for row in rows) and any(row["label"] == [] for row in rows)
    for row in rows:
        assert row["prediction"] == [name for name, share in row["probabilities"].items() if share > 0.5]
    # The pipeline of Transformers gives the same labels.
    classifier = pipeline("text-classification", model=str(out), top_k=None, device="cpu")
    for text, row in zip(texts, read_lines(out / "predictions_test.jsonl"), strict=True):
        printed = {item["label"]: item["score"] for item in classifier([text])[0]}
        assert printed == pytest.approx(row["probabilities"], abs=1e-4)


@pytest.mark.thorough
def test_regression_model_is_trained(run, sorts, bert):
    train, dev, test, _ = sorts
    flags = "--label_column", "size", *LEARNS, "--metric_for_best_model", "rmse", "--eval_steps", 8
    results, out = run(train, dev, *TEXT, *flags, test=test, model=bert)
    assert results["eval_pearson"] > 0.9 and results["eval_rmse"] < 1 and "labels" not in results
    records = [row for row in read_lines(out / "train_log.jsonl") if "eval_rmse" in row]
    assert results["eval_rmse"] == min(row["eval_rmse"] for row in records)
    rows = read_lines(out / "predictions_dev.jsonl")
    errors = [row["prediction"] - row["label"] for row in rows]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(results["eval_rmse"], rel=1e-4)
    assert isinstance(read_lines(out / "predictions_test.jsonl")[0]["prediction"], float)


@pytest.mark.thorough
def test_class_weights_favor_the_rare_class(run, tmp_path):
    rows = [("a man sees the cat", "common")] * 40 + [("a man sees the cat", "rare")] * 8
    table = write_csv(tmp_path / "t.csv", ("text", "label"), rows)
    flags = "--num_train_epochs", 6, "--dropout_rate", 0
    plain, out = run(table, table, *flags)
    balanced, other = run(table, table, *flags, "--class_weights", "balanced", out="balanced")
    weighted, _ = run(table, table, *flags, "--class_weights", '{"rare": 5}', out="given")
    assert balanced["class_weights"] == pytest.approx({"common": 0.6, "rare": 3.0}) and "class_weights" not in plain
    assert weighted["class_weights"] == {"common": 1.0, "rare": 5.0}
    share = [read_lines(folder / "predictions_dev.jsonl")[0]["probabilities"]["rare"] for folder in (out, other)]
    assert share[0] < 0.3 < 0.35 < share[1]


def test_resumed_classification_is_bitwise_equal(run, sorts, caplog):
    train, dev, _, _ = sorts
    flags = [*TEXT, "--label_column", "tags", "--label_separator", "|", "--max_train_steps", 6, "--eval_steps", 2]
    flags += ["--metric_for_best_model", "f1_macro", "--class_weights", "balanced", "--shuffle_train_dataset"]
    with caplog.at_level(logging.INFO):
        checkpoint = check_resumed_run(functools.partial(run, train, dev), *flags)
    assert f"Resuming from {checkpoint} at step 3 of 6" in caplog.text
    for changed, name in (
        (["--class_weights", '{"mat": 2}'], "class_weights"),
        (["--labels", "street", "mat", "house", "guitar", "animal"], "labels"),
    ):
        with pytest.raises(ValueError, match=f"resume exactly from .*{name}"):
            run(train, dev, *flags, *changed, "--resume_from_checkpoint", checkpoint, out="third")


@pytest.mark.thorough
def test_finished_model_remembers_its_columns(run, sorts, tmp_path, caplog):
    train, dev, test, _ = sorts
    _, out = run(train, dev, *TEXT, "--label_column", "tags", "--label_separator", "|", "--max_train_steps", 1)
    known = "--num_train_epochs", 0
    with caplog.at_level(logging.INFO, "hf_attn_variants"):
        scored, again = run(None, None, *known, model=out, out="again", test=dev)
    printed = "--text_columns 'what is said' --label_column 'tags' --label_separator '|'"
    assert f"model's training: {printed}" in caplog.text
    assert scored["test_samples"] == len(read_lines(again / "predictions_test.jsonl")) and "test_f1_micro" in scored
    # A prediction also uses the columns of the training, and explicit columns take precedence.
    alone, _ = run(None, None, *known, model=again, out="alone", test=test)
    assert "test_f1_micro" not in alone and alone["text_columns"] == ["what is said"]
    overridden, _ = run(None, None, *known, "--text_columns", "id", model=out, out="given", test=dev)
    assert overridden["text_columns"] == ["id"] and overridden["label_column"] == "tags"
    other = write_csv(tmp_path / "other.csv", ("said", "tags"), [("a cat", "animal")])
    with pytest.raises(ValueError, match=r"other.csv, line 1, the header: No column has a common name for texts"):
        run(None, None, *known, model=out, out="other", test=other)
    (out / "all_results.json").write_text("[1")
    with pytest.raises(ValueError, match="No column has a common name for texts"):
        run(None, None, *known, model=out, out="broken", test=dev)


def test_finished_model_keeps_its_problem_type(run, sorts, caplog):
    train, dev, _, _ = sorts
    several = *TEXT, "--label_column", "tags", "--label_separator", "|"
    results, out = run(train, dev, *several, "--threshold", 0.3, "--max_train_steps", 1)
    again, _ = run(None, dev, "--num_train_epochs", 0, model=out, out="again")
    assert again["threshold"] == results["threshold"] == 0.3 and again["eval_f1_micro"] == results["eval_f1_micro"]
    with_threshold, _ = run(None, dev, "--num_train_epochs", 0, "--threshold", 0.6, model=out, out="given")
    assert with_threshold["threshold"] == 0.6
    assert "trained with" not in caplog.text
    run(None, dev, "--num_train_epochs", 0, "--max_length", 12, model=out, out="shorter")
    printed = "truncated to 12 tokens, but the model was trained with --max_length 24"
    assert printed in caplog.text


@pytest.mark.parametrize("rows", [1, 3])
def test_partly_labeled_test_rows_raise_an_error(run, sorts, tmp_path, rows):
    train, dev, _, _ = sorts
    test = tmp_path / "some.jsonl"
    some = [{"what is said": "a cat"}] * rows + [{"what is said": "a dog", "kind of $": "animal"}]
    write_lines(test, some)
    message = f"some.jsonl, line 1, row 1: There is no column 'kind of \\$', but .*row {rows + 1} has one"
    with pytest.raises(ValueError, match=message):
        run(train, dev, *TEXT, "--label_column", "kind of $", test=test)


def test_evaluation_reads_only_the_label_column_of_the_training(run, sorts, tmp_path):
    train, dev, _, _ = sorts
    _, out = run(train, dev, *TEXT, "--label_column", "kind of $", "--max_train_steps", 1)
    rows = [("a cat", "animal", 5), ("a mat", "thing", 4)]
    test = write_csv(tmp_path / "new.csv", ("what is said", "target", "rating"), rows)
    results, _ = run(None, None, "--num_train_epochs", 0, model=out, out="new", test=test)
    assert "test_accuracy" not in results and results["test_samples"] == 2
    with pytest.raises(ValueError, match=r"--num_train_epochs 0 requires a model that classifies texts"):
        run(None, None, "--num_train_epochs", 0, *TEXT, out="no_head", test=test)
    named, _ = run(None, None, "--num_train_epochs", 0, "--label_column", "target", model=out, out="named", test=test)
    assert "test_accuracy" in named


def test_nan_outputs_raise_an_error(run, sorts, tmp_path):
    train, dev, _, _ = sorts
    _, out = run(train, dev, *TEXT, "--label_column", "kind of $", "--max_train_steps", 1)
    weights = load_file(out / "model.safetensors")
    name, value = "classifier.bias", weights["classifier.bias"].clone()
    only = None, dev, "--num_train_epochs", 0
    save_file(weights | {name: torch.full_like(value, torch.nan)}, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"contains NaN values in 1 of its tensors, such as classifier\.bias"):
        run(*only, model=out, out="damaged")
    # All weights are finite, but the logits overflow.
    inputs = weights["classifier.weight"].clone()
    inputs[:] = 3e38
    save_file(weights | {"classifier.weight": inputs}, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(NonFiniteLossError, match=r"are NaN or infinite for .* in validation"):
        run(*only, model=out, out="overflow")


def test_rows_are_shuffled_before_selection(run, tmp_path, caplog):
    table = write_csv(tmp_path / "t.csv", ("text", "label"), [("a cat", "x")] * 20 + [("a dog", "y")] * 20)
    taken = "--max_train_samples", 10, "--max_train_steps", 1
    results, _ = run(table, table, *taken, "--class_weights", "balanced", "--shuffle_train_dataset")
    assert results["train_samples"] == 10 and set(results["class_weights"]) == {"x", "y"}
    with pytest.raises(ValueError, match="no training row has the label 'y'"):
        run(table, table, *taken, "--class_weights", "balanced", out="first")


def test_run_without_dev_rows_saves_a_model(run, sorts):
    train, _, test, _ = sorts
    results, out = run(train, None, *TEXT, "--label_column", "size", "--max_train_steps", 1, test=test)
    assert "eval_loss" not in results and (out / "model.safetensors").is_file()
    assert len(read_lines(out / "predictions_test.jsonl")) == results["test_samples"]


def test_undefined_scores_are_null_with_a_reason(run, tmp_path, capsys):
    train = write_csv(tmp_path / "t.csv", ("text", "label"), [("a cat", "x"), ("a dog", "y")] * 4)
    dev = write_csv(tmp_path / "d.csv", ("text", "label"), [("a cat", "x")] * 2)
    _, out = run(train, dev, "--max_train_steps", 1, "--metric_for_best_model", "roc_auc")
    saved = json.loads((out / "all_results.json").read_text())
    assert saved["eval_roc_auc"] is None
    assert saved["eval_undefined"] == {"roc_auc": "all 2 rows have 'x' and no row has 'y': it is not defined"}
    assert "roc_auc none" in capsys.readouterr().out


def test_encoder_decoder_classifies_and_end_tokens_in_text_raise(run, tmp_path):
    t5 = make_t5(tmp_path / "t5")
    rows = [("the dog", "a cat", "x"), ("a man", "the house", "y")] * 4
    table = write_csv(tmp_path / "t.csv", ("text1", "text2", "label"), rows)
    results, _ = run(table, table, "--max_train_steps", 2, model=t5)
    assert results["text_columns"] == ["text1", "text2"] and results["steps"] == 2
    bad = write_csv(tmp_path / "bad.csv", ("text1", "text2", "label"), [*rows, ("the </s> dog", "a", "x")])
    with pytest.raises(ValueError, match=r"bad\.csv.*line 10.*row 9"):
        run(bad, table, "--max_train_steps", 2, model=t5, out="bad")


def test_converted_classifier_drops_the_scores(run, sorts, tmp_path):
    train, dev, _, _ = sorts
    _, out = run(train, dev, *TEXT, "--label_column", "kind of $", "--max_train_steps", 1, test=dev)
    convert(out, 2, output_dir=tmp_path / "converted")
    left = {path.name for path in (tmp_path / "converted").iterdir()}
    assert not [name for name in left if name.startswith(("confusion", "predictions", "training"))]


# The model card


def test_card_names_the_problem_labels_and_scores(run, tmp_path):
    rows = [("a cat", "a dog", "i$_*|"), ("a dog", "a cat", "b`c")] * 4
    table = write_csv(tmp_path / "pairs.csv", ("premise", "hypothesis", "label"), rows)
    results, out = run(table, table, "--max_train_steps", 2, test=table)
    card = str(generate_model_card(out, "me/x"))
    assert "The model assigns one of 2 labels to each pair of texts: `` b`c ``, `i$_*|`." in card
    assert "pipeline_tag: text-classification" in card
    for split, prefix in (("validation", "eval"), ("test", "test")):
        for name in ("accuracy", "f1_macro", "roc_auc"):
            assert f"| pairs.csv | {split} | {name} | {round(results[f'{prefix}_{name}'], 4)} |" in card
    assert "per_class" not in card and "undefined" not in card
    block = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    assert 'tokenizer("Two dogs run in the snow.", "Dogs are running outside.", ' in block


# Flags


FILES = ("--train_file", "a.csv", "--validation_file", "b.csv")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--train_file, .* or --dataset_name"),
        ((*FILES, "--dataset_name", "d"), "or --dataset_name, got both"),
        (("--validation_file", "a.csv"), r"--train_file is required"),
        ((*FILES, "--text_columns", "a", "b", "c"), "--text_columns.*got a, b, c"),
        ((*FILES, "--text_columns", "a", "a"), "--text_columns.*got a, a"),
        ((*FILES, "--problem_type", "binary"), "invalid choice|must be one of"),
        ((*FILES, "--labels", "a", "a"), r"--labels must be distinct.*got \['a', 'a'\]"),
        ((*FILES, "--labels", "a", " b"), "--labels"),
        ((*FILES, "--class_weights", "equal"), "--class_weights.*'equal'"),
        ((*FILES, "--class_weights", '{"a": 0}'), "--class_weights.*'a': 0"),
        ((*FILES, "--class_weights", '{"a": "2"}'), "--class_weights.*'a'"),
        ((*FILES, "--class_weights", '{"a": 3'), "not valid JSON: "),
        ((*FILES, "--class_weights", '{"a": 3, "a": 1}'), "not valid JSON: The key 'a' occurs twice"),
        ((*FILES, "--threshold", "1"), r"--threshold must be in \(0, 1\), got 1"),
        ((*FILES, "--metric_for_best_model", "bleu"), "must be one of loss, accuracy, f1_macro, .* got 'bleu'"),
        ((*FILES, "--metric_for_best_model", "mae", "--problem_type", "multi_label_classification"), "of loss, f1"),
        ((*FILES[:2], "--early_stopping_patience", "2"), "--early_stopping_patience requires dev rows"),
    ],
)  # fmt: skip
def test_classify_rejects_invalid_flags(flags, message, capsys):
    try:
        with pytest.raises(ValueError, match=message):
            classify.parse_args(["m", "--output_dir", "o", *flags])
    except SystemExit:
        assert re.search(message, capsys.readouterr().err)


def test_metric_of_another_problem_raises_before_training(run, sorts, tmp_path):
    train, dev, _, _ = sorts
    with pytest.raises(ValueError, match="one of loss, rmse, mae, pearson, spearmanr, got 'accuracy'"):
        run(train, dev, *TEXT, "--label_column", "size", "--metric_for_best_model", "accuracy")
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_resumed_run_does_not_report_new_weights(run, sorts, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    train, dev, _, _ = sorts
    flags = (*TEXT, "--label_column", "kind of $", "--max_train_steps", 2, "--checkpointing_steps", 1)
    log = logging.getLogger("transformers.modeling_utils")
    for out, more in (("out", ()), ("resumed", ("--resume_from_checkpoint", "out/checkpoint-1"))):
        caplog.clear()
        log.setLevel(logging.WARNING)
        try:
            run(train, dev, *flags, *more[:1], *(str(sorts[0].parent / item) for item in more[1:]), out=out)
        finally:
            log.setLevel(logging.NOTSET)
        assert ("newly initialized" in caplog.text) == (out == "out")
