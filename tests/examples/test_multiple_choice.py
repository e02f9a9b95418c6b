"""Check the multiple-choice example: Transformers' loss, any number of choices, whole runs, and two processes."""

import json

import numpy as np
import pytest
import run_multiple_choice
import torch
from architectures import ALBERT, BERT, make_token_ids
from choice_models import ChoiceCollator, ChoiceHead
from fixtures.commands import run_command
from fixtures.data_files import read_lines
from fixtures.processes import run_and_check, run_script
from fixtures.resumed import check_resumed_run
from fixtures.uptraining import make_bert
from fixtures.worded import make_questions, write_questions
from relatives import ENCODERS
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForMultipleChoice, AutoTokenizer

from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.hub import generate_model_card
from hf_attn_variants.training.engine.loop import TrainingCostCounter

SCRIPT = "../examples/multiple_choice/run_multiple_choice"


@pytest.fixture
def files(tmp_path):
    return write_questions(tmp_path, make_questions())


@pytest.fixture
def flags(files, tiny_bert, tmp_path):
    def make(*more, model=tiny_bert, out="out", train=files["train"], dev=files["dev"], test=files["test"], batch=4):
        argv = [model, "--output_dir", tmp_path / out, "--max_length", 24, "--cpu", "--disable_tqdm"]
        argv += ["--per_device_train_batch_size", batch, "--learning_rate", "3e-3"]
        for name, path in (("train", train), ("validation", dev), ("test", test)):
            argv += [f"--{name}_file", path] if path is not None else []
        return [str(item) for item in [*argv, *more]]

    return make


@pytest.fixture
def run(flags, tmp_path):
    def call(*more, out="out", **kwargs):
        return run_command(run_multiple_choice, *flags(*more, out=out, **kwargs)), tmp_path / out

    return call


# The loss


@pytest.mark.parametrize("row", [BERT, ALBERT, *ENCODERS], ids=lambda row: row.name)
@pytest.mark.parametrize("variant", ["mha", "gqa", "gqa_talking"])
def test_loss_equals_transformers_and_questions_are_independent(row, variant):
    head = next(name for name in row.heads if name.endswith("ForMultipleChoice"))
    model = row.make_model(head, variant)
    torch.manual_seed(1)
    ids = make_token_ids(3, 4, 9)  # [b, c, n]
    mask = (torch.arange(9) < torch.randint(3, 10, (3, 4, 1))).long()
    batch, labels = {"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 2, 1])
    output = model(**batch, labels=labels)
    choice_model = ChoiceHead.__new__(ChoiceHead)  # the loss needs no settings or tokenizer
    actual = choice_model.scores(model, batch)
    assert_close(actual, output.logits, atol=1e-5, rtol=1e-5)
    loss = choice_model.make_objective().loss_sum(model, {**batch, "labels": labels})
    assert_close(loss / len(ids), output.loss, atol=1e-5, rtol=1e-5)
    # Remove the last choice of the first question.
    batch["attention_mask"] = batch["attention_mask"].clone()
    batch["attention_mask"][0, -1] = 0
    fewer = choice_model.scores(model, batch)
    assert fewer[0, -1] == -torch.inf
    assert_close(fewer[0, :-1], actual[0, :-1], atol=1e-5, rtol=1e-5)
    assert_close(fewer[1:], actual[1:], atol=1e-5, rtol=1e-5)
    loss = choice_model.make_objective().loss_sum(model, {**batch, "labels": labels})
    expected = sum(-row[row > -torch.inf].log_softmax(-1)[label] for row, label in zip(fewer, labels, strict=True))
    assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    loss.backward()
    assert all(torch.isfinite(item.grad).all() for item in model.parameters() if item.grad is not None)


def test_batch_is_padded_to_its_largest_number_of_choices(tiny_bert):
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    texts = [["a cat", "a dog in a house"], ["a", "b", "c"]]
    rows = [{**tokenizer(["man"] * len(item), item), "label": i, "length": 1} for i, item in enumerate(texts)]
    batch = ChoiceCollator(tokenizer, None)(rows)
    counts = [[len(tokenizer("man", text)["input_ids"]) for text in item] for item in texts]
    most, first = counts[0][1], len(tokenizer("man")["input_ids"])
    assert batch["input_ids"].shape == (2, 3, most) and batch["labels"].tolist() == [0, 1]
    assert batch["attention_mask"].sum(-1).tolist() == [[*counts[0], 0], counts[1]]
    assert batch["token_type_ids"][0, 1].tolist() == [0] * first + [1] * (most - first)
    assert set(batch["input_ids"][0, 2].tolist()) == {tokenizer.pad_token_id}
    assert ChoiceCollator(tokenizer, 8)(rows)["input_ids"].shape[2] % 8 == 0
    model = AutoModelForMultipleChoice.from_pretrained(tiny_bert)
    tokens, flops = TrainingCostCounter(model).count(batch, 2)
    flattened_cost = TrainingCostCounter(model).count({"attention_mask": batch["attention_mask"].flatten(0, 1)}, 5)
    assert tokens == sum(map(sum, counts)) and (tokens, flops) == flattened_cost and flops > 0


# Whole runs


def test_variant_learns_choices_and_predicts_probabilities(run, tiny_bert, tmp_path):
    learner = make_bert(tmp_path / "learner", tiny_bert)
    convert_checkpoint(learner, tmp_path / "gqa", 2)
    results, out = run("--num_train_epochs", 12, "--dropout_rate", 0, "--group_by_length", model=tmp_path / "gqa")
    assert results["eval_accuracy"] > 0.9 and results["eval_samples"] == 8
    assert results["answer_format"] == "letter" and results["choices_columns"] == ("choices",)
    model, tokenizer = AutoModelForMultipleChoice.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    assert model.config.num_key_value_heads == 2
    rows = make_questions()
    for i, (row, printed) in enumerate(zip(rows, read_lines(out / "predictions_test.jsonl"), strict=True), start=1):
        seconds = [f"{row['question']} {choice}" for choice in row["choices"]]
        inputs = tokenizer([row["context"]] * len(seconds), seconds, padding=True, return_tensors="pt")
        with torch.no_grad():
            shares = model(**{name: item.unsqueeze(0) for name, item in inputs.items()}).logits.softmax(-1)[0].tolist()
        best = int(np.argmax(shares))
        assert printed["probabilities"] == pytest.approx(shares, abs=1e-4) and "answer" not in printed
        assert (printed["row"], printed["prediction"], printed["choice"]) == (i, "ABCD"[best], row["choices"][best])
        assert all(printed[name] == row[name] for name in ("context", "question", "choices"))
    scored = read_lines(out / "predictions_dev.jsonl")
    right = np.mean([row["answer"] == row["prediction"] for row in scored])
    assert right == pytest.approx(results["eval_accuracy"]) and (out / "training_curves.png").is_file()
    losses = [-np.log(row["probabilities"]["ABCD".index(row["answer"])]) for row in scored]
    assert results["eval_loss"] == pytest.approx(np.mean(losses), rel=1e-4, abs=1e-6)


@pytest.mark.thorough
def test_saved_model_evaluates_and_predicts(run, files, capsys):
    first, out = run("--max_train_steps", 3, test=files["dev"])
    assert first["test_accuracy"] == first["eval_accuracy"] and first["test_loss"] == pytest.approx(first["eval_loss"])
    again, _ = run("--num_train_epochs", 0, model=out, out="again", train=None)
    assert again["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-5) and again["steps"] == 0
    capsys.readouterr()
    alone, folder = run("--num_train_epochs", 0, model=out, out="alone", train=None, dev=None)
    assert not [name for name in alone if name.startswith("eval_")] and alone["test_samples"] == 16
    assert len(read_lines(folder / "predictions_test.jsonl")) == 16
    assert "multiple choice test (16 rows); 0 steps" in capsys.readouterr().out
    cut, _ = run("--max_train_steps", 1, "--max_train_samples", 3, "--max_eval_samples", 2, out="cut")
    assert (cut["train_samples"], cut["eval_samples"]) == (3, 2)


def test_resumed_multiple_choice_run_is_bitwise_equal(run):
    flags = ["--max_train_steps", 6, "--eval_steps", 2, "--metric_for_best_model", "accuracy"]
    checkpoint = check_resumed_run(run, *flags)
    with pytest.raises(ValueError, match=r"resume exactly from .*answer_format"):
        run(*flags, "--resume_from_checkpoint", checkpoint, "--answer_format", "letter", out="third")


@pytest.mark.thorough
def test_two_processes_equal_one_process_with_a_double_batch(run, flags, tmp_path):
    more = ["--num_train_epochs", 2, "--dropout_rate", 0, "--logging_steps", 1, "--per_device_eval_batch_size", 3]
    expected, out = run(*more, batch=8)
    run_and_check(2, run_script, SCRIPT, flags(*more, out="two", batch=4))
    results = json.loads((tmp_path / "two/all_results.json").read_text())
    for name in ("train_loss", "eval_loss", "eval_accuracy", "eval_samples", "train_tokens"):
        assert results[name] == pytest.approx(expected[name], rel=1e-4), name
    actual, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "two", out))
    for weights in (actual, expected):
        weights.pop("classifier.bias")  # equal for all choices, so its gradient is only rounding
    assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    one, two = (read_lines(folder / "predictions_test.jsonl") for folder in (out, tmp_path / "two"))
    assert [row["prediction"] for row in two] == [row["prediction"] for row in one]


def test_other_heads_are_initialized_and_other_models_raise(run, tiny_bert, tmp_path):
    from transformers import AutoModelForSequenceClassification

    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_bert, num_labels=3)
    classifier.save_pretrained(tmp_path / "classifier")
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path / "classifier")
    results, out = run("--max_train_steps", 1, model=tmp_path / "classifier")
    assert results["steps"] == 1
    assert AutoModelForMultipleChoice.from_pretrained(out).config.problem_type is None
    with pytest.raises(
        ValueError, match=r"requires a model that was trained to choose, .* saved as BertForSequenceClass"
    ):
        run("--num_train_epochs", 0, model=tmp_path / "classifier", out="no")
    with pytest.raises(ValueError, match=r"--max_length.*65"):
        run("--max_length", 65, out="no")
    assert not (tmp_path / "no").exists()


def test_card_shows_how_to_choose_an_answer(run):
    results, out = run("--max_train_steps", 1)
    card = str(generate_model_card(out, "me/x"))
    assert "pipeline_tag: multiple-choice" in card and "AutoModelForMultipleChoice" in card
    assert f"| dev.jsonl | validation | accuracy | {round(results['eval_accuracy'], 4)} |" in card
