"""Check Transformers' Trainer and Seq2SeqTrainer: a training step, and loading the saved model."""

import pytest
import torch
from architectures import ARCHITECTURES, BERT
from relatives import RELATIVES
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

KINDS = ("activation", "gradient")
LEARN = ("MaskedLM", "LMHeadModel", "ConditionalGeneration", "MTModel", "SequenceClassification", "CausalLM")
TEXTS = ["two dogs run in the snow", "a man is playing a guitar", "a woman", "the dog"]
SETTINGS = {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "report_to": "none"}
SETTINGS |= {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
# Transformers 5.24 renamed this argument.
CHECKPOINTING = next(f"{kind}_checkpointing" for kind in KINDS if hasattr(TrainingArguments, f"{kind}_checkpointing"))
ARCHITECTURE_HEADS = [
    (architecture, head)
    for architecture in (*ARCHITECTURES, *RELATIVES)
    for head in architecture.heads
    if head.endswith(LEARN)
]
CLASSIFIERS = [
    (architecture, head) for architecture, head in ARCHITECTURE_HEADS if head.endswith("SequenceClassification")
]


def get_changed_names(before, model):
    return [name for name, p in model.named_parameters() if not torch.equal(before[name], p)]


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, atol=1e-5, rtol=1e-4, msg=lambda text, at=name: f"{at}: {text}"
        )


def copy_parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_trainer_takes_a_step(heads, tmp_path):
    folder = heads["text-classification"]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = copy_parameters(model)
    trainer = Trainer(
        model,
        TrainingArguments(tmp_path / "out", **SETTINGS, **{CHECKPOINTING: True}),
        train_dataset=[tokenizer(text) | {"labels": i % 2} for i, text in enumerate(TEXTS)],
        eval_dataset=[tokenizer(text) | {"labels": 0} for text in TEXTS],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
    )
    assert trainer.train().training_loss > 0
    moved = get_changed_names(before, model)
    assert any("self.key.weight" in name for name in moved) and any("classifier" in name for name in moved)
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert again.config.num_key_value_heads == 2 and (tmp_path / "saved" / "modeling_attn_variant_bert.py").is_file()
    torch.testing.assert_close(again.classifier.weight, model.classifier.weight)


@pytest.mark.parametrize(("architecture", "head"), CLASSIFIERS, ids=[head for _, head in CLASSIFIERS])
def test_compute_metrics_receives_the_outputs_of_transformers(architecture, head, tmp_path):
    batch = architecture.make_batch(head, labels=True)
    rows = [{name: value[row] for name, value in batch.items()} for row in range(2)]
    upstream = architecture.make_upstream_model(head)
    plain = architecture.make_model(head)
    plain.load_state_dict(upstream.state_dict())
    seen = []

    def metrics(predicted):
        seen.append(predicted)
        logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
        return {"accuracy": (logits.argmax(-1) == predicted.label_ids).mean()}

    for model in (upstream, plain):
        trainer = Trainer(model, TrainingArguments(tmp_path, **SETTINGS), eval_dataset=rows, compute_metrics=metrics)
        assert 0 <= trainer.evaluate()["eval_accuracy"] <= 1
    expected, actual = seen
    assert (actual.label_ids == expected.label_ids).all()
    torch.testing.assert_close(actual.predictions, expected.predictions, atol=1e-5, rtol=1e-4)


def test_optuna_search_trains_variants(heads, tmp_path):
    """Check that each trial starts with a new model, and that the best learning rate is returned."""
    pytest.importorskip("optuna")
    folder = heads["text-classification"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(text) | {"labels": i % 2} for i, text in enumerate(TEXTS)]
    rates, losses = iter([1e-2, 1e-9, 1e-3]), []
    trainer = Trainer(
        args=TrainingArguments(tmp_path, **SETTINGS | {"max_steps": 4}),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        model_init=lambda trial: AutoModelForSequenceClassification.from_pretrained(folder),
    )

    def objective(scores):
        losses.append(scores["eval_loss"])
        return losses[-1]

    def space(trial):
        rate = next(rates)
        return {"learning_rate": trial.suggest_float("learning_rate", rate, rate)}

    best = trainer.hyperparameter_search(space, objective, n_trials=3, direction="minimize", backend="optuna")
    assert best.hyperparameters["learning_rate"] == [1e-2, 1e-9, 1e-3][losses.index(min(losses))]
    assert len(set(losses)) == 3 and losses[1] == max(losses)  # a rate of almost 0 learns nothing


@pytest.mark.parametrize("variant", ["gqa", "talking"])
def test_label_smoothing_shifts_decoder_labels(variant, tmp_path):
    """Compare with Transformers' formula, which scores each position on the next token."""
    model, factor = BERT.make_model("BertLMHeadModel", variant), 0.2
    trainer = Trainer(model, TrainingArguments(tmp_path, **SETTINGS, label_smoothing_factor=factor))
    batch = BERT.make_batch("BertLMHeadModel", labels=True)
    with torch.no_grad():
        loss = trainer.compute_loss(model, dict(batch))
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=factor
    )
    torch.testing.assert_close(loss, expected)


# By default, test the first head of each architecture.
@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        pytest.param(
            architecture,
            head,
            id=head,
            marks=() if ARCHITECTURE_HEADS[place - 1][0] is not architecture else pytest.mark.slow,
        )
        for place, (architecture, head) in enumerate(ARCHITECTURE_HEADS)
    ],
)
def test_accumulated_gradients_equal_transformers(architecture, head, tmp_path):
    """Check the keyword with which Trainer passes the number of labels of all batches of a step."""
    batch = architecture.make_batch(head, labels=True)
    rows = [{name: value[row] for name, value in batch.items()} for row in range(2)]
    settings = SETTINGS | {"per_device_train_batch_size": 1, "optim": "sgd", "max_grad_norm": 1e9}
    upstream = architecture.make_upstream_model(head)
    plain = architecture.make_model(head)
    plain.load_state_dict(upstream.state_dict())
    for model in (upstream, plain, architecture.make_model(head, num_key_value_heads=4)):
        before = copy_parameters(model)
        arguments = TrainingArguments(tmp_path, **settings, gradient_accumulation_steps=2)
        for module in model.modules():  # different kernels draw dropout masks in different orders
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        Trainer(model, arguments, train_dataset=rows).train()
        assert get_changed_names(before, model)
    assert_close(dict(plain.named_parameters()), dict(upstream.named_parameters()))


def test_seq2seq_trainer_takes_a_step_and_generates(tiny_t5, tmp_path):
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(tiny_t5), AutoTokenizer.from_pretrained(tiny_t5)
    before = copy_parameters(model)
    rows = [
        {"input_ids": tokenizer(text).input_ids, "attention_mask": tokenizer(text).attention_mask}
        | {"labels": tokenizer(text[::-1]).input_ids}
        for text in TEXTS
    ]
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(tmp_path / "out", **SETTINGS, predict_with_generate=True),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        processing_class=tokenizer,
    )
    assert trainer.train().training_loss > 0
    assert any("EncDecAttention.k" in name for name in get_changed_names(before, model))
    predictions = torch.tensor(trainer.predict(rows, max_new_tokens=4, num_beams=2).predictions)
    batch = DataCollatorForSeq2Seq(tokenizer, model)([dict(row) for row in rows])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model.generate(**inputs, max_new_tokens=4, num_beams=2)
    assert torch.equal(predictions[:, : expected.shape[1]], expected)
