"""Check the SuperGLUE example with an encoder: whole runs per task, learning, resumed runs and cards."""

import functools
import re

import numpy as np
import pytest
import run_superglue
import superglue_data
import torch
from fixtures.data_files import read_lines, write_lines
from fixtures.resumed import check_resumed_run
from fixtures.superglue import ANIMALS, PLACES
from fixtures.uptraining import make_bert
from fixtures.worded import make_writer
from sklearn.metrics import matthews_corrcoef
from superglue_tasks import TASKS, SuperGlueSettings
from transformers import AutoModelForMultipleChoice, AutoModelForSequenceClassification, AutoTokenizer

from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.hub import generate_model_card

RTE_WORDS = "rte hypothesis premise : . The A a man sees it is in the entailment not_entailment " + " ".join(
    (*ANIMALS, *PLACES)
)


@pytest.fixture
def run(run_task, tiny_bert):
    def call(task, *flags, model=tiny_bert, out="out"):
        return run_task(model, task, "--learning_rate", "3e-3", *flags, out=out)

    return call


@pytest.mark.thorough
@pytest.mark.parametrize("task", TASKS)
def test_every_superglue_task_trains_and_writes_all_outputs(run, check_outputs, tiny_bert, tmp_path, task):
    convert_checkpoint(tiny_bert, tmp_path / "gqa", 2)
    results, out = run(task, "--max_train_steps", 2, "--group_by_length", model=tmp_path / "gqa")
    assert results["dataset"]["dataset_config"] == task
    check_outputs(task, results, out)
    head = AutoModelForMultipleChoice if task == "copa" else AutoModelForSequenceClassification
    model = head.from_pretrained(out)
    assert model.config.num_key_value_heads == 2 and (out / "training_curves.png").is_file()
    if task != "copa":
        assert model.config.id2label == dict(enumerate(TASKS[task].labels))


@pytest.mark.thorough
def test_model_learns_copa_and_boolq(run, tiny_bert, tmp_path):
    learner = make_bert(tmp_path / "learner", tiny_bert)
    flags = "--num_train_epochs", 20, "--dropout_rate", 0
    results, out = run("copa", *flags, model=learner)
    assert results["eval_accuracy"] == 1.0  # the answer is always an animal
    assert [row["label"] for row in read_lines(out / "predictions_COPA.jsonl")] == [1, 0] * 4
    results, _ = run("boolq", *flags, model=learner, out="boolq")
    assert results["eval_accuracy"] > 0.7


def test_submission_equals_predictions_of_the_saved_model(run, tmp_path):
    _, out = run("cb", "--max_train_steps", 4)
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    rows, predictions = read_lines(tmp_path / "CB/test.jsonl"), read_lines(out / "predictions_CB.jsonl")
    for row, printed in zip(rows, predictions, strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(row["premise"], row["hypothesis"], return_tensors="pt")).logits
        assert printed == {"idx": row["idx"], "label": model.config.id2label[logits.argmax().item()]}


def test_first_rows_are_whole_questions(run):
    results, out = run("multirc", "--max_train_steps", 1, "--max_eval_samples", 3, "--max_train_samples", 2)
    assert results["eval_samples"] == 7 and results["train_samples"] == 4
    assert len(read_lines(out / "predictions_dev_MultiRC.jsonl")) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["record", "copa"])
def test_resumed_superglue_run_is_bitwise_equal(run, task):
    flags = ["--max_train_steps", 5, "--eval_steps", 2, "--metric_for_best_model", "loss"]
    check_resumed_run(functools.partial(run, task), *flags)


def make_diagnostic_rows(name, count=12):
    """Return rows in the official form: AX-b with GLUE's field names, AX-g with pairs that differ in a pronoun."""
    for i in range(count):
        label = ("entailment", "not_entailment")[i // 2 % 2]
        if name == "AX-b":
            texts = {"sentence1": f"The {ANIMALS[i % 4]} is in the house.", "sentence2": f"a {PLACES[i % 4]}"}
            yield texts | {"idx": i, "label": label, "logic": "Negation"}
        else:
            texts = {"premise": f"A man sees {('it', 'a')[i % 2]}.", "hypothesis": f"a {PLACES[i // 2 % 4]}"}
            yield texts | {"idx": i, "label": label}


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_rte_model_predicts_both_diagnostic_sets(run, tiny_bert, tmp_path, architecture):
    model = tiny_bert if architecture == "bert" else make_writer("t5", RTE_WORDS, tmp_path / "t5")
    for name in ("AX-b", "AX-g"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / f"{name}.jsonl", make_diagnostic_rows(name))
    results, out = run("rte", "--max_train_steps", 6, model=model)
    truth = [row["label"] for row in make_diagnostic_rows("AX-b")]
    result = {name: read_lines(out / f"predictions_{name}.jsonl") for name in ("AX-b", "AX-g")}
    assert all([row["idx"] for row in rows] == [*range(12)] for rows in result.values())
    printed = {name: [row["label"] for row in rows] for name, rows in result.items()}
    assert results["axb_matthews_correlation"] == pytest.approx(matthews_corrcoef(truth, printed["AX-b"]))
    assert results["axg_accuracy"] == np.mean([a == b for a, b in zip(truth, printed["AX-g"], strict=True)])
    pairs = zip(printed["AX-g"][::2], printed["AX-g"][1::2], strict=True)
    assert results["axg_gender_parity"] == np.mean([first == second for first, second in pairs])
    # Remove the labels and the first row, so that the pairs are incomplete.
    rows = [{k: v for k, v in row.items() if k != "label"} for row in make_diagnostic_rows("AX-g")]
    write_lines(tmp_path / "AX-g/AX-g.jsonl", rows[1:])
    again, folder = run("rte", "--num_train_epochs", 0, model=out, out="again")
    assert "axb_matthews_correlation" in again and not [name for name in again if name.startswith("axg_")]
    assert len(read_lines(folder / "predictions_AX-g.jsonl")) == 11


def test_diagnostic_sets_of_the_hub_equal_the_official_ones(monkeypatch):
    loaded = []

    def load(dataset, name, split):
        loaded.append((dataset, name, split))
        rows = make_diagnostic_rows({"axb": "AX-b"}.get(name, "AX-g"))
        return [{**row, "label": i % 2} for i, row in enumerate(rows)]

    monkeypatch.setattr(superglue_data, "load_dataset", load)
    settings = SuperGlueSettings(model_name_or_path="m", output_dir="o", task_name="rte")
    result = superglue_data.load_examples(settings, TASKS["rte"])
    assert loaded[-2:] == [("aps/super_glue", name, "test") for name in ("axb", "axg")]
    assert result["axb"][1].texts == (("The dog is in the house.", "a street"),) and result["axb"][1].labels == (1,)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task_name", "AX-g"], "--task_name must be one of boolq, .*, got 'AX-g'"),
        (
            ["--task_name", "cb", "--metric_for_best_model", "f1"],
            "must be one of loss, accuracy, f1_macro, combined_score",
        ),
    ],
)
def test_superglue_rejects_invalid_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        run_superglue.parse_args(["m", "--output_dir", "o", *flags])


def test_card_names_superglue_instead_of_glue(run):
    _, out = run("rte", "--max_train_steps", 2)
    card = str(generate_model_card(out, "me/x"))
    assert "SuperGLUE RTE" in card and "GLUE RTE" not in card.replace("SuperGLUE RTE", "")
    assert "type: aps/super_glue" in card and "config: rte" in card
    assert "The model assigns one of 2 labels to each pair of texts: `entailment`, `not_entailment`." in card
    block = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    assert 'tokenizer("Two dogs run in the snow.", "Dogs are running outside.", ' in block
