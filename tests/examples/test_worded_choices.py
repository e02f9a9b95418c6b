"""Check both examples with an encoder-decoder: T5's wording, the probabilities of choices, and whole runs."""

from types import SimpleNamespace

import numpy as np
import pytest
import run_multiple_choice
import torch
from architectures import T5, make_token_ids
from choice_models import compute_choice_log_probabilities
from choice_task import format_question
from fixtures.commands import run_command
from fixtures.data_files import read_lines
from fixtures.multilingual import TOKENIZERS
from fixtures.resumed import check_resumed_run
from fixtures.superglue import ANIMALS, PLACES, make_official_rows
from fixtures.worded import make_questions, make_writer, write_questions
from relatives import ENCODER_DECODERS
from scipy.special import log_softmax
from superglue_data import make_examples
from superglue_task import SuperGlueChoice
from superglue_tasks import TASKS, get_superglue_task
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MBartConfig, MBartForConditionalGeneration

from hf_attn_variants.conversion import convert_checkpoint

# All words of the tiny files, including the words of the tasks' fields and labels.
TEXT = (
    "boolq cb copa multirc record rte wic wsc passage question hypothesis premise choice1 choice2 answer paragraph "
    "query entities sentence1 sentence2 word text is it a A sees in the The What does see man big and of It cause "
    "effect True False entailment contradiction neutral not_entailment @placeholder highlight placeholder B C D E n "
    "( ) \\ . , : ? # * @ Sent 1 2 " + " ".join((*ANIMALS, *PLACES))
)


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    return make_writer("t5", TEXT, tmp_path_factory.mktemp("writer"))


# The wording


@pytest.mark.parametrize(
    ("task", "t5_texts"),
    [
        ("boolq", ["boolq passage: A cat sees a house. question: is it a cat"]),
        ("cb", ["cb hypothesis: a cat premise: The cat is in the house."]),
        ("rte", ["rte hypothesis: a house premise: The cat is in the house."]),
        ("copa", ["copa choice1: It is a house. choice2: It is a cat. premise: A man sees it. question: cause"]),
        (
            "multirc",
            [
                f"multirc question: What does it see? answer: {answer} paragraph: A cat sees a house and a man."
                for answer in ("cat", "house")
            ],
        ),
        (
            "record",
            [
                "record query: It is a @placeholder . entities: cat, house, man "
                "passage: A cat sees a house and a man. The cat is big"
            ],
        ),
        ("wic", ["wic sentence1: The house of a cat. sentence2: A man in a house word: house"]),
        ("wsc", ["wsc text: The * cat man * sees a house, and # it # is big."]),
    ],
)
def test_rows_are_worded_like_t5(task, t5_texts):
    [example] = make_examples(get_superglue_task(task), [("row 1", make_official_rows(task, 1)[0])])
    assert list(example.t5_texts) == t5_texts


def test_multirc_paragraphs_have_no_html():
    row = make_official_rows("multirc", 1)[0]
    row["passage"]["text"] = "<b>Sent 1: </b>A cat.<br><b>Sent 2: </b>A dog.<br>"
    [example] = make_examples(get_superglue_task("multirc"), [("row 1", row)])
    assert example.t5_texts[0].endswith("paragraph: Sent 1: A cat. Sent 2: A dog. ")


def test_record_query_has_one_training_row_per_right_answer():
    training = SuperGlueChoice.__new__(SuperGlueChoice)
    training.task, training.config = get_superglue_task("record"), SimpleNamespace(is_encoder_decoder=True)
    examples = make_examples(
        training.task, [(f"row {i}", row) for i, row in enumerate(make_official_rows("record", 2))]
    )
    training.examples = {"train": examples, "validation": examples}
    train, dev = training._make_questions("train"), training._make_questions("validation")
    assert train.data["label"][:] == [0, 0, 1, 2] and dev.data["label"][:] == [[0], [0], [1, 2]]
    assert dev.data["choices"][1] == ["dog", "house", "man"]
    log_probabilities = np.log(np.array([[0.2, 0.5, 0.3], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]]))
    assert training._to_logits(examples, log_probabilities)[:, 1] == pytest.approx(log_probabilities.ravel())


def test_questions_are_worded_like_unifiedqa():
    row = {"question": None, "text1": "which is best conductor?", "choices": ["iron", "feather"]}
    assert format_question(row) == r"which is best conductor? \n (A) iron (B) feather"
    t5_texts = format_question({"question": "Who?", "text1": "A man.", "choices": ["he"] * 28})
    assert t5_texts.startswith(r"Who? \n (A) he (B) he") and t5_texts.endswith(r"(Z) he (27) he (28) he \n A man.")


# The probabilities


@pytest.mark.parametrize("row", [T5, *ENCODER_DECODERS], ids=lambda row: row.name)
@pytest.mark.parametrize("variant", ["mha", "gqa", "latent"])
def test_choice_log_probabilities_are_independent(row, variant):
    head = next(name for name in row.heads if name.endswith(("ForConditionalGeneration", "MTModel")))
    model = row.make_model(head, variant)
    sources, choices = make_token_ids(2, 9), make_token_ids(2, 3, 4)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    choices[0, 1, 2:] = choices[1, 2] = -100  # a shorter choice and a missing one
    starts = torch.full_like(choices[..., :1], 2)
    read = torch.cat([starts, choices[..., :-1].masked_fill(choices[..., :-1] < 0, 1)], dim=-1)
    batch = {"input_ids": sources, "attention_mask": mask, "choices": choices, "decoder_input_ids": read}
    with torch.no_grad():
        actual = compute_choice_log_probabilities(model, batch)
        assert actual.shape == (2, 3) and actual[1, 2] == -torch.inf
        for i, j in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
            ids = choices[i, j][choices[i, j] >= 0]
            read = torch.cat([torch.tensor([2]), ids[:-1]])
            length = int(mask[i].sum())
            logits = model(input_ids=sources[i : i + 1, :length], decoder_input_ids=read[None]).logits[0]
            expected = logits.log_softmax(-1)[torch.arange(len(ids)), ids].sum()
            assert_close(actual[i, j], expected, atol=1e-4, rtol=1e-4)


# Multiple choice


@pytest.fixture
def choose(tmp_path, writer):
    files = write_questions(tmp_path, make_questions("What is it?"))

    def call(*more, model=writer, out="out"):
        argv = [model, "--output_dir", tmp_path / out, "--max_length", 48, "--cpu", "--disable_tqdm"]
        argv += ["--per_device_train_batch_size", 4, "--learning_rate", "1e-2"]
        argv += ["--train_file", files["train"], "--validation_file", files["dev"], "--test_file", files["test"]]
        return run_command(run_multiple_choice, *argv, *more), tmp_path / out

    return call


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoder_variant_learns_to_answer_in_words(choose, tmp_path, kind):
    source = make_writer(kind, TEXT, tmp_path / "source")
    convert_checkpoint(source, tmp_path / "gqa", 2)
    results, out = choose("--num_train_epochs", 15, "--dropout_rate", 0, "--group_by_length", model=tmp_path / "gqa")
    assert results["eval_accuracy"] > 0.9 and results["worded"] is True
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    assert model.config.num_key_value_heads == 2
    for row, printed in zip(make_questions(), read_lines(out / "predictions_test.jsonl"), strict=True):
        listed = " ".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", row["choices"], strict=False))
        inputs = tokenizer(rf"What is it? \n {listed} \n A man sees it.", return_tensors="pt")
        actual = []
        for choice in row["choices"]:
            labels = tokenizer(text_target=choice, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                actual.append(-float(model(**inputs, labels=labels).loss) * labels.shape[1])
        assert printed["probabilities"] == pytest.approx(np.exp(log_softmax(actual)), abs=1e-4)
        assert printed["choice"] == row["choices"][int(np.argmax(actual))]
    scored = read_lines(out / "predictions_dev.jsonl")
    losses = [-np.log(row["probabilities"]["ABCD".index(row["answer"])]) for row in scored]
    assert results["eval_loss"] == pytest.approx(np.mean(losses), rel=1e-4, abs=1e-6)
    again, _ = choose("--num_train_epochs", 0, model=out, out="again")
    assert again["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-5) and again["steps"] == 0


@pytest.mark.thorough
def test_resumed_text_run_is_bitwise_equal(choose):
    check_resumed_run(choose, "--max_train_steps", 6, "--eval_steps", 2, "--metric_for_best_model", "loss")


def test_multilingual_models_raise_an_error(choose, tmp_path):
    folder = tmp_path / "mbart"
    folder.mkdir()
    TOKENIZERS["mbart50"](folder).save_pretrained(folder)
    sizes = {f"{side}_{name}": 4 for side in ("encoder", "decoder") for name in ("ffn_dim", "attention_heads")}
    config = MBartConfig(vocab_size=200, d_model=16, encoder_layers=1, decoder_layers=1, **sizes)
    MBartForConditionalGeneration(config).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"monolingual encoder-decoder such as T5 or BART, got .*\(mbart\)"):
        choose(model=folder)


# SuperGLUE


@pytest.fixture
def run(run_task, writer):
    return lambda task, *flags: run_task(writer, task, "--learning_rate", "1e-2", *flags)


# The default tasks are one whose answers are labels, and the two whose rows have several answers.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "task",
    [pytest.param(task, marks=() if task in ("cb", "record", "multirc") else pytest.mark.slow) for task in TASKS],
)
def test_every_task_trains_text_to_text_and_writes_all_outputs(run, check_outputs, caplog, task):
    results, out = run(task, "--max_train_steps", 2, "--group_by_length")
    assert results["worded"] is True and results["eval_loss"] > 0 and "same tokens" not in caplog.text
    check_outputs(task, results, out)


@pytest.mark.thorough
def test_submission_is_the_likeliest_answer_of_the_saved_model(run, tmp_path):
    _, out = run("cb", "--max_train_steps", 6)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    rows, predictions = read_lines(tmp_path / "CB/test.jsonl"), read_lines(out / "predictions_CB.jsonl")
    for row, printed in zip(rows, predictions, strict=True):
        inputs = tokenizer(f"cb hypothesis: {row['hypothesis']} premise: {row['premise']}", return_tensors="pt")
        actual = {}
        for label in ("entailment", "contradiction", "neutral"):
            labels = tokenizer(text_target=label, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                actual[label] = float(model(**inputs, labels=labels).loss) * labels.shape[1]
        assert printed == {"idx": row["idx"], "label": min(actual, key=actual.get)}
