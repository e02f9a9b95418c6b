"""Check `run_glue.main` on rows of the repository with a tiny BERT: outputs, labels, early errors, early stopping."""

import json
import logging
import os
import shutil
import signal
from functools import partial

import numpy as np
import pytest
import torch
from fixtures.commands import run_command
from fixtures.data_files import edit_json
from fixtures.linear_loop import log_of
from fixtures.uptraining import copy_left_sided, make_t5
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.bert.modeling_bert import BertIntermediate

from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertModel
from hf_attn_variants.commands.training import glue as glue_command
from hf_attn_variants.errors import TerminatedError
from hf_attn_variants.training.engine import session
from hf_attn_variants.training.engine.loop import TrainingLoop
from hf_attn_variants.training.glue.task import GlueFineTuning


@pytest.fixture
def run(tiny_bert, glue, tmp_path):
    def call(task="stsb", *flags, output_dir=tmp_path / "out", model=tiny_bert):
        folder = {"stsb": "STS-B", "cola": "CoLA", "mnli": "MNLI"}.get(task, task)
        argv = ["--model_name_or_path", model, "--task_name", task, "--data_dir", glue / folder]
        argv += ["--output_dir", output_dir, "--max_length", 48, "--per_device_train_batch_size", 4]
        argv += ["--learning_rate", "1e-3", "--logging_steps", 1, "--cpu", "--disable_tqdm", *flags]
        return run_command(glue_command, *argv), output_dir

    return call


@pytest.mark.thorough
def test_regression_task_trains_and_writes_all_outputs(run):
    results, out = run("stsb", "--num_train_epochs", 4, "--with_tracking", "--learning_rate", "1e-2")
    assert results["steps"] == 32 and results["epoch"] == 4.0
    names = "eval_pearson eval_spearmanr eval_combined_score eval_loss train_loss train_runtime"
    assert {*names.split()} <= results.keys()
    saved = json.loads((out / "all_results.json").read_text())
    assert saved["eval_pearson"] == results["eval_pearson"]
    assert saved["data_hashes"].keys() == {"hash of the training data", "hash of the dev data"}
    assert saved["arguments"]["learning_rate"] == 1e-2 and saved["versions"]["torch"] == torch.__version__
    records = log_of(out)
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 32 and sum(losses[-8:]) < 0.7 * sum(losses[:8])
    assert sum(losses) / 32 == pytest.approx(results["train_loss"])
    assert [record["step"] for record in records if "eval_pearson" in record] == [8, 16, 24, 32]
    assert (out / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    lines = (out / "predictions_STS-B.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 9
    assert all(0 <= float(line.split("\t")[1]) <= 5 for line in lines[1:])
    assert not list(out.glob(".tmp-*"))
    assert {path.parent for path in out.rglob("events.out.tfevents.*")} >= {out / "runs"}
    events = EventAccumulator(str(out / "runs")).Reload()
    for name in ("loss", "lr", "eval_pearson"):
        tracked = [(event.step, event.value) for event in events.Scalars(name)]
        assert tracked == [(r["step"], pytest.approx(r[name], rel=1e-6)) for r in records if name in r]
    # Not "time", because trackio already has a column of this name.
    assert {"train_seconds", "tokens_per_second"} < set(events.Tags()["scalars"])
    assert "time" not in events.Tags()["scalars"]
    config = AutoConfig.from_pretrained(out)
    assert config.num_labels == 1 and config.problem_type == "regression"


def test_scores_are_written_before_the_test_split_is_predicted(run, tmp_path, monkeypatch):
    def interrupted(evaluator, eval_set):
        if eval_set.split.name == "test":
            raise KeyboardInterrupt
        return predict(evaluator, eval_set)

    predict = GlueFineTuning.predict_logits
    monkeypatch.setattr(GlueFineTuning, "predict_logits", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^Stopped by Ctrl-C\. There is no checkpoint in .*out"):
        run("cola", "--max_train_steps", 1)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "all_results.json", "predictions_dev_CoLA.tsv"} <= written
    assert "predictions_CoLA.tsv" not in written
    assert (tmp_path / "out/model.safetensors").stat().st_mode & 0o777 == 0o666 & ~_get_umask()


def _get_umask():
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_saved_model_reproduces_the_dev_predictions(run, glue):
    results, out = run("cola", "--num_train_epochs", 1)
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.id2label == {0: "unacceptable", 1: "acceptable"}
    sentences = [line.split("\t")[3] for line in (glue / "CoLA/dev.tsv").read_text().splitlines()]
    predicted = [
        str(model(**tokenizer(sentence, return_tensors="pt")).logits.argmax().item()) for sentence in sentences
    ]
    written = [line.split("\t")[1] for line in (out / "predictions_dev_CoLA.tsv").read_text().splitlines()[1:]]
    assert predicted == written
    assert (out / "predictions_CoLA.tsv").read_text().splitlines()[1].startswith("0\t")
    assert "eval_matthews_correlation" in results


@pytest.mark.thorough
def test_predictions_are_in_row_order(run, tiny_bert, glue, tmp_path):
    lines = (glue / "STS-B/dev.tsv").read_text().splitlines()
    header, rows = lines[0].split("\t"), [line.split("\t") for line in lines[1:]]
    pairs = [(row[header.index("sentence1")], row[header.index("sentence2")]) for row in rows]
    labels = [float(row[header.index("score")]) for row in rows]
    # Use large weights, because `tiny_bert` gives every row nearly the same score.
    model = AutoModelForSequenceClassification.from_pretrained(tiny_bert, num_labels=1).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2 if name == "classifier.weight" else 0.5)
    torch.nn.init.constant_(model.classifier.bias, 2.5)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    model.save_pretrained(tmp_path / "large"), tokenizer.save_pretrained(tmp_path / "large")
    flags = ["--num_train_epochs", 0, "--per_device_eval_batch_size", 3]
    results, out = run("stsb", *flags, model=tmp_path / "large")
    encoded = [tokenizer(*pair, return_tensors="pt") for pair in pairs]
    with torch.no_grad():
        one_at_a_time = np.array([model(**inputs).logits.item() for inputs in encoded])
    expected = one_at_a_time.clip(0, 5)
    # A wrong order would not be detected if the rows were already sorted by length or the predictions were equal.
    order = np.argsort([-inputs["input_ids"].shape[1] for inputs in encoded], kind="stable")
    assert (np.abs(expected[order] - expected) > 0.01).sum() > len(pairs) / 2
    written = [line.split("\t") for line in (out / "predictions_dev_STS-B.tsv").read_text().splitlines()[1:]]
    assert [row[0] for row in written] == [str(i) for i in range(len(pairs))]
    assert [float(row[1]) for row in written] == pytest.approx(expected, abs=1e-3)
    assert results["eval_pearson"] == pytest.approx(np.corrcoef(one_at_a_time, labels)[0, 1], abs=1e-4)


def test_mnli_evaluates_two_dev_sets_and_predicts_ax(run):
    results, out = run("mnli", "--max_train_steps", 2)
    assert {"eval_accuracy", "eval_accuracy_mm"} <= results.keys() and results["eval_samples"] == 5
    for name in ("MNLI-m", "MNLI-mm", "AX"):
        lines = (out / f"predictions_{name}.tsv").read_text().splitlines()
        assert len(lines) == 3 and lines[1].split("\t")[1] in ("entailment", "neutral", "contradiction")


def test_classifier_with_other_label_names_gives_a_warning(run, tmp_path, caplog):
    _, out = run("cola", "--max_train_steps", 1)
    assert "differ from" not in caplog.text  # the original model was not a classifier

    def warnings_for(*names):
        numbers = {name: i for i, name in enumerate(names)}
        edit_json(out / "config.json", id2label={str(i): name for name, i in numbers.items()}, label2id=numbers)
        caplog.clear()
        run("cola", "--num_train_epochs", 0, model=out, output_dir=tmp_path / "-".join(names))
        return "differ from those of the task" in caplog.text

    assert warnings_for("negative", "positive")
    assert "'negative' as 'unacceptable', 'positive' as 'acceptable'" in caplog.text
    assert not warnings_for("LABEL_0", "LABEL_1")  # the default names of Transformers
    assert not warnings_for("Acceptable", "unacceptable")


@pytest.mark.thorough
def test_label_order_of_the_checkpoint_is_kept(run, tmp_path):
    _, out = run("mnli", "--max_train_steps", 2)
    model = AutoModelForSequenceClassification.from_pretrained(out)
    order = [2, 0, 1]  # contradiction, entailment, neutral
    model.classifier.weight.data = model.classifier.weight.data[order]
    model.classifier.bias.data = model.classifier.bias.data[order]
    names = ["contradiction", "entailment", "neutral"]
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    permuted = tmp_path / "permuted"
    model.save_pretrained(permuted)
    AutoTokenizer.from_pretrained(out).save_pretrained(permuted)
    plain, a = run("mnli", "--num_train_epochs", 0, model=out, output_dir=tmp_path / "a")
    other, b = run("mnli", "--num_train_epochs", 0, model=permuted, output_dir=tmp_path / "b")
    assert other["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6) and plain["steps"] == 0
    assert (a / "predictions_dev_MNLI-m.tsv").read_text() == (b / "predictions_dev_MNLI-m.tsv").read_text()
    trained = [
        run("mnli", "--max_train_steps", 3, "--dropout_rate", 0, model=m, output_dir=tmp_path / m.name / "t")[0]
        for m in (out, permuted)
    ]
    assert trained[0]["train_loss"] == pytest.approx(trained[1]["train_loss"], rel=1e-5)


def test_checkpoint_of_another_task_gets_a_new_head_with_a_warning(run, tmp_path, caplog):
    _, out = run("mnli", "--max_train_steps", 1, "--skip_predict")
    results, _ = run("cola", "--max_train_steps", 1, model=out, output_dir=tmp_path / "cola")
    assert "has 3 labels" in caplog.text and results["steps"] == 1


def test_metric_of_a_missing_dev_set_raises_before_training(run, glue, tmp_path):
    shutil.copytree(glue / "MNLI", tmp_path / "mnli", ignore=shutil.ignore_patterns("*mismatched*"))
    flags = ["--data_dir", tmp_path / "mnli", "--metric_for_best_model", "accuracy_mm"]
    with pytest.raises(ValueError, match="'accuracy_mm'"):
        run("mnli", *flags)


@pytest.mark.thorough
def test_predictions_and_scores_belong_to_the_saved_model(run):
    # The time limit ends the run after its first step, long before the evaluation at the end of the epoch.
    first, out = run("cola", "--max_train_minutes", 1e-9, "--num_train_epochs", 2)
    again, _ = run("cola", "--num_train_epochs", 0, model=out, output_dir=out.with_name("again"))
    assert first["steps"] == 1 and first["eval_loss"] == pytest.approx(again["eval_loss"], rel=1e-5)


@pytest.mark.thorough
def test_resumed_run_keeps_the_metric_for_the_best_weights(run, glue, tmp_path):
    folder = shutil.copytree(glue / "STS-B", tmp_path / "stsb")
    flags = ["--metric_for_best_model", "loss", "--checkpointing_steps", 2, "--max_train_steps", 4]
    flags += ["--data_dir", folder]
    run("stsb", *flags, "--eval_steps", 2)
    with pytest.raises(ValueError, match="eval_steps"):
        run("stsb", *flags, "--eval_steps", 3, "--resume_from_checkpoint", "latest")
    (folder / "dev.tsv").write_text("".join((folder / "dev.tsv").read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="hash of the dev data was"):
        run("stsb", *flags, "--eval_steps", 2, "--resume_from_checkpoint", "latest")


@pytest.mark.thorough
def test_early_stopping_ends_with_the_best_weights(run):
    # With a learning rate of zero the score never improves, so the first evaluation stays the best.
    flags = ["--learning_rate", 0, "--eval_steps", 2, "--early_stopping_patience", 3]
    results, out = run("stsb", *flags, "--metric_for_best_model", "pearson")
    assert results["steps"] == 8 and results["best_step"] == 2
    flags = ["--eval_steps", 2, "--max_train_steps", 12, "--learning_rate", "3e-2", "--overwrite_output_dir"]
    results, out = run("stsb", *flags, "--metric_for_best_model", "eval_loss")
    records = log_of(out)
    dev = {record["step"]: record["eval_loss"] for record in records if "eval_loss" in record}
    assert len(dev) == 6 and results["best_step"] == min(dev, key=dev.get)
    assert results["eval_loss"] == min(dev.values())


def test_gradient_checkpointing_and_bf16_train(run, tiny_bert, monkeypatch):
    forward, dtypes = BertIntermediate.forward, []

    def watched(layer, hidden_states):
        output = forward(layer, hidden_states)
        if layer.training:
            dtypes.append(output.dtype)
        return output

    monkeypatch.setattr(BertIntermediate, "forward", watched)
    flags = ["--max_train_steps", 2, "--gradient_checkpointing", "--mixed_precision", "bf16", "--group_by_length"]
    flags += ["--pad_to_multiple_of", 8, "--lr_scheduler_type", "cosine", "--warmup_ratio", 0.5]
    results, out = run("stsb", *flags, "--max_eval_samples", 5)
    assert results["eval_samples"] == 5
    # Both steps run each layer twice under autocast: in the forward pass, and again during the backward pass.
    assert dtypes == [torch.bfloat16] * (2 * 2 * AutoConfig.from_pretrained(tiny_bert).num_hidden_layers)
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize(
    ("task", "flags", "message"),
    [
        ("sst3", [], "got 'sst3'"),
        ("ax", [], "labels of ax, train on mnli"),
        ("cola", ["--max_length", 65], "--max_length must be at most 64"),
        ("cola", ["--max_length", 2], "--max_length must be at least 3"),
        ("stsb", ["--max_length", 3], "--max_length must be at least 4"),
        ("cola", ["--attn_implementation", "flash_attention_2"], "ImportError: FlashAttention2"),
        ("cola", ["--with_tracking", "--report_to", "wandb"], "must be an installed tracker .*, got 'wandb'"),
        ("cola", ["--with_tracking", "--report_to", "paper"], "--report_to must be"),
        ("cola", ["--metric_for_best_model", "f1"], "--metric_for_best_model.*'f1'"),
        ("cola", ["--checkpointing_steps", "often"], "--checkpointing_steps must be"),
        ("cola", ["--lr_scheduler_type", "constant", "--warmup_ratio", 0.1], "constant does not support warm-up"),
        (
            "cola",
            ["--lr_scheduler_type", "constant_with_warmup", "--lr_scheduler_kwargs", '{"a": 1}'],
            "constant_with_warmup does not support --lr_scheduler_kwargs",
        ),
        ("cola", ["--mixed_precision", "fp16"], "fp16 requires an accelerator"),
        ("cola", ["--resume_from_checkpoint", "latest"], "requires a complete checkpoint"),
        ("cola", ["--max_train_steps", 5, "--num_warmup_steps", 6], "at most 5"),
        ("cola", ["--train_file", "/nowhere/train.tsv"], r"/nowhere/train\.tsv"),
        ("cola", ["--data_dir", "/nowhere"], "/nowhere/train.*--data_dir"),
        ("cola", ["--model_name_or_path", "/nowhere/model"], "'/nowhere/model' is neither"),
        ("cola", ["--tokenizer_name", "./nosuch"], "'./nosuch' is neither"),
    ],
)
def test_early_errors_leave_no_folder(run, task, flags, message, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    monkeypatch.setattr(session, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises((ValueError, OSError), match=message):
        run(task, *flags, output_dir=tmp_path / "not/made")
    assert not (tmp_path / "not").exists()


def test_output_folder_must_be_empty_and_writable(run, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        run("cola", output_dir=tmp_path / "used")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match="neither an existing folder"):
        run("cola", model="./nosuch", output_dir=tmp_path / "empty")
    assert (tmp_path / "empty").is_dir()  # the run did not create it
    with pytest.raises(OSError, match="cannot be written to"):
        run("cola", output_dir=tmp_path / "used/notes.txt/out")


@pytest.mark.thorough
def test_resume_advice_after_an_interruption_works(run, tmp_path, monkeypatch):
    def interrupted(loop, group):
        if loop.state.step == 3:
            raise KeyboardInterrupt
        step(loop, group)

    step, flags, out = TrainingLoop._run_optimizer_step, ["cola", "--max_train_steps", 4], tmp_path / "out"
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", interrupted)
    with pytest.raises(KeyboardInterrupt, match="There is no checkpoint in"):
        run(*flags)
    assert (out / "train_log.jsonl").is_file()
    with pytest.raises(ValueError) as refused:
        run(*flags)
    assert "new run with --overwrite_output_dir" in str(refused.value)
    with pytest.raises(ValueError, match="--resume_from_checkpoint latest requires a complete checkpoint"):
        run(*flags, "--resume_from_checkpoint", "latest")
    flags += ["--checkpointing_steps", 2]
    going_on = "instead of --overwrite_output_dir."
    with pytest.raises(KeyboardInterrupt, match=f"The last checkpoint is .*checkpoint-2. .*latest {going_on}$"):
        run(*flags, "--overwrite_output_dir")
    with pytest.raises(ValueError, match="--resume_from_checkpoint latest"):
        run(*flags)
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", step)
    assert run(*flags, "--resume_from_checkpoint", "latest")[0]["steps"] == 4


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_first_signal_prints_valid_resume_flags(number, name, run, monkeypatch):
    def step(loop, group):
        plain(loop, group)
        if loop.state.step == 1:
            os.kill(os.getpid(), number)

    def at_start(args, config):
        raise KeyboardInterrupt

    plain, before = TrainingLoop._run_optimizer_step, signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", step)
    flags = ("cola", "--max_train_steps", 4, "--overwrite_output_dir")
    advice = r"The last checkpoint is .*checkpoint-2. .*latest instead of --overwrite_output_dir"
    try:
        with pytest.raises((KeyboardInterrupt, TerminatedError), match=f"^{name}: .* step 2. {advice}"):
            run(*flags)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", plain)
    with monkeypatch.context() as loading:  # before training starts, the folder still contains the earlier run
        loading.setattr("hf_attn_variants.training.engine.models.load_tokenizer", at_start)
        with pytest.raises(KeyboardInterrupt, match=r"^Stopped by Ctrl-C. No files were changed.$"):
            run(*flags)
    assert run(*flags[:-1], "--resume_from_checkpoint", "latest")[0]["steps"] == 4


def test_t5_pairs_end_with_an_end_token(run, tmp_path, caplog):
    t5 = make_t5(tmp_path / "t5")
    assert AutoTokenizer.from_pretrained(t5)("a", "dog")["input_ids"].count(1) == 0
    with caplog.at_level(logging.INFO, "hf_attn_variants"):
        _, out = run("stsb", "--max_train_steps", 2, model=t5)
    assert caplog.text.count("The tokenizer now appends </s> to each text") == 1
    saved = AutoTokenizer.from_pretrained(out)
    assert saved.convert_ids_to_tokens(saved("a", "big dog")["input_ids"]) == ["a", "</s>", "big", "dog", "</s>"]
    assert saved("a")["input_ids"].count(1) == 1
    tokenizer = AutoTokenizer.from_pretrained(t5)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A </s>", pair="<pad> $A $B", special_tokens=[("<pad>", 0), ("</s>", 1)]
    )
    tokenizer.save_pretrained(t5)
    with pytest.raises(ValueError, match="the texts of a pair"):
        run("stsb", model=t5, output_dir=tmp_path / "other")
    config = AutoConfig.from_pretrained(t5)
    config.eos_token_id = 2
    config.save_pretrained(t5)
    with pytest.raises(ValueError, match="the texts of a pair"):
        run("stsb", model=t5, output_dir=tmp_path / "other")


EARLIER_RUN = "checkpoint-7/train_state.json .tmp-checkpoint-9/model.safetensors best_model.safetensors".split()
EARLIER_RUN += "train_log.jsonl all_results.json predictions_CoLA.tsv predictions_dev_CoLA.tsv".split()
EARLIER_RUN += ["training_curves.png"]


@pytest.fixture
def used(tmp_path):
    for name in ["notes.txt", "my_predictions.tsv", *EARLIER_RUN]:
        path = tmp_path / "used" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("old")
    return tmp_path / "used"


def test_overwriting_removes_only_the_earlier_run(run, used, monkeypatch):
    seen = []
    train = TrainingLoop.run

    def look(loop):
        seen.extend(path.name for path in used.iterdir())
        return train(loop)

    monkeypatch.setattr(TrainingLoop, "run", look)
    run("cola", "--max_train_steps", 1, "--overwrite_output_dir", "--skip_predict", output_dir=used)
    assert sorted(seen) == ["my_predictions.tsv", "notes.txt"] and (used / "notes.txt").read_text() == "old"
    assert not (used / "predictions_CoLA.tsv").exists() and (used / "all_results.json").read_text() != "old"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train_file", "/nowhere/train.tsv"], "/nowhere/train.tsv"),
        (["--model_name_or_path", "/nowhere/model"], "/nowhere/model"),
        (["--attn_implementation", "flash_attention_2"], "FlashAttention2"),
        (["--max_train_steps", 5, "--num_warmup_steps", 6], "at most 5"),
    ],
)
def test_overwriting_keeps_the_earlier_run_until_the_new_one_can_start(run, used, flags, message):
    with pytest.raises((ValueError, OSError), match=message):
        run("cola", "--overwrite_output_dir", *flags, output_dir=used)
    assert all((used / name).read_text() == "old" for name in EARLIER_RUN)


def _edit_config(folder, **values):
    edit_json(folder / "config.json", **values)


def _truncate_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:500])


def _remove_tokenizer(folder):
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (_truncate_weights, ValueError, "damaged: SafetensorError: "),
        (partial(_edit_config, hidden_size="wide"), ValueError, "damaged: StrictDataclass.*hidden_size.*expected int"),
        (partial(_edit_config, intermediate_size=16), ValueError, "damaged: RuntimeError: "),
        (partial(_edit_config, hidden_act="foo"), ValueError, "damaged: KeyError: 'foo'"),
        (_remove_tokenizer, OSError, "damaged has no tokenizer files.*--tokenizer_name"),
    ],
)
def test_damaged_checkpoint_is_a_user_error(run, tiny_bert, tmp_path, damage, error, message):
    shutil.copytree(tiny_bert, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    with pytest.raises(error, match=message) as raised:
        run("cola", model=tmp_path / "damaged")
    assert "\n" not in str(raised.value)


def test_tokenizer_name_completes_a_checkpoint_without_a_tokenizer(run, tiny_bert, tmp_path):
    shutil.copytree(tiny_bert, tmp_path / "bare")
    _remove_tokenizer(tmp_path / "bare")
    results, _ = run("cola", "--max_train_steps", 1, "--tokenizer_name", tiny_bert, model=tmp_path / "bare")
    assert results["steps"] == 1


def test_left_padding_tokenizer_gives_equal_training(run, tiny_bert, tmp_path):
    flags = ["--max_train_steps", 2, "--skip_predict", "--max_length", 8]
    plain, _ = run("stsb", *flags)
    left, _ = run("stsb", *flags, model=copy_left_sided(tiny_bert, tmp_path / "left"), output_dir=tmp_path / "other")
    assert left["train_loss"] == plain["train_loss"] and left["eval_loss"] == plain["eval_loss"]


def test_grouped_talking_heads_checkpoint_trains_its_projections(run, tiny_bert, tmp_path):
    fields = AutoConfig.from_pretrained(tiny_bert).to_dict() | {"num_key_value_heads": 2, "talking_heads": "both"}
    config = AttnVariantBertConfig(**fields)
    variant = tmp_path / "variant"
    AttnVariantBertModel(config).save_pretrained(variant)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(variant)
    results, out = run("cola", "--num_train_epochs", 2, model=variant)
    assert results["steps"] == 6 and json.loads((out / "config.json").read_text())["num_key_value_heads"] == 2
    assert (out / "modeling_attn_variant_bert.py").is_file() and (out / "configuration_attn_variants.py").is_file()
    model = AutoModelForSequenceClassification.from_pretrained(out)
    moved = [p for name, p in model.named_parameters() if name.endswith(("logits_proj", "weights_proj"))]
    assert len(moved) == 4 and all(0 < (p - torch.eye(4)).abs().max() < 0.1 for p in moved)
