"""Check `uptrain --objective span_corruption`: batches, schedule, length, resumed runs and errors."""

import dataclasses
import json
import logging
import math
import shutil

import pytest
import torch
from fixtures.commands import run_command
from fixtures.data_files import write_lines
from fixtures.licence_text import LICENCE
from fixtures.linear_loop import log_of
from fixtures.processes import run_and_check, run_script
from fixtures.span_corruption import make_sentinel_tokenizer
from fixtures.uptraining import make_bert, make_t5
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_attn_variants.commands.training import pretrain_t5, uptrain
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.training.engine.loop import TrainingLoop
from hf_attn_variants.training.engine.optimization import create_optimizer, create_scheduler
from hf_attn_variants.training.uptraining import UptrainingSettings

LENGTH = ["--max_length", 32]
# The default of the tests: one batch per step.
BATCH = ["--per_device_train_batch_size", 8, "--gradient_accumulation_steps", 1]


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A multi-head T5 with dropout 0.1 and sentinels, and in "mqa" the same model with averaged heads."""
    folder = tmp_path_factory.mktemp("t5")
    make_sentinel_tokenizer(folder / "mha")
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    vocabulary = len(AutoTokenizer.from_pretrained(folder / "mha"))
    config = T5Config(vocab_size=vocabulary, relative_attention_num_buckets=8, decoder_start_token_id=0, **sizes)
    T5ForConditionalGeneration(config).save_pretrained(folder / "mha")
    convert_checkpoint(folder / "mha", folder / "mqa", 1, method="mean")
    return folder


def make_file_flags(text):
    return ["--train_file", *sorted(text.glob("train-*.txt.gz")), "--validation_file", text / "valid.txt"]


@pytest.fixture
def run(text, t5, tmp_path):
    def flags(*more, model=t5 / "mqa", output_dir=tmp_path / "out", files=None):
        argv = ["--model_name_or_path", model, "--objective", "span_corruption", "--output_dir", output_dir, *LENGTH]
        argv += [*(make_file_flags(text) if files is None else files), "--max_eval_samples", 8]
        argv += ["--shuffle_buffer_size", 16]
        return [str(part) for part in [*argv, "--logging_steps", 1, "--cpu", "--disable_tqdm", *more]]

    def call(*more, **options):
        return run_command(uptrain, *flags(*more, **options))

    call.flags, call.out = flags, tmp_path / "out"
    return call


def make_settings(**changed):
    files = {"train_file": ("a",), "validation_file": ("b",)}
    shared = {"model_name_or_path": "t5", "objective": "span_corruption", "output_dir": "o"}
    return UptrainingSettings(**shared | files | changed)


def test_batches_equal_those_of_the_pretraining(run, text, t5, tmp_path, monkeypatch):
    seen, step = [], TrainingLoop._run_optimizer_step

    def watched(self, group):
        seen.append([{name: tensor.clone() for name, tensor in batch.items()} for batch in group])
        step(self, group)

    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", watched)
    steps = ["--max_train_steps", 4, "--seed", 7, "--gradient_accumulation_steps", 2]
    steps += ["--per_device_train_batch_size", 5]
    results = run(*steps, "--noise_density", 0.2)
    uptraining_batches, seen = seen, []
    argv = [
        "--model_name_or_path",
        t5 / "mqa",
        "--output_dir",
        tmp_path / "pretrained",
        *make_file_flags(text),
        *LENGTH,
    ]
    argv += [*steps, "--shuffle_buffer_size", 16, "--cpu", "--disable_tqdm", "--max_eval_samples", 8]
    run_command(pretrain_t5, *argv, "--noise_density", 0.2)
    assert len(uptraining_batches) == len(seen) == 4 and all(len(group) == 2 for group in uptraining_batches)
    for group, expected in zip(uptraining_batches, seen, strict=True):
        for batch, other in zip(group, expected, strict=True):
            assert batch.keys() == other.keys() >= {"input_ids", "decoder_input_ids", "labels", "position"}
            assert all(torch.equal(batch[name], other[name]) for name in batch)
    assert results["sequences_per_step"] == 10 and results["train_samples"] == 40


@pytest.mark.thorough
def test_loss_decreases_and_equals_the_pretraining_loss(run, text, t5, tmp_path):
    results = run(*BATCH, "--max_train_steps", 60, "--learning_rate", 2e-2)
    assert results["eval_loss"] == results["eval_cross_entropy"] < 0.8 * results["initial_eval_loss"]
    log = log_of(run.out)
    assert [record["step"] for record in log if "eval_loss" in record] == [0, 12, 24, 36, 48, 60]
    assert (results["block_length"], results["target_length"], results["objective"]) == (34, 8, "span_corruption")
    for folder, expected in ((t5 / "mqa", "initial_eval_loss"), (run.out, "eval_loss")):
        argv = ["--model_name_or_path", folder, "--output_dir", tmp_path / expected, *make_file_flags(text), *LENGTH]
        argv += ["--num_train_epochs", 0, "--max_eval_samples", 8, "--cpu", "--disable_tqdm"]
        again = run_command(pretrain_t5, *argv)
        assert again["eval_loss"] == pytest.approx(results[expected], rel=1e-5)
    before, after = (load_file(folder / "model.safetensors") for folder in (t5 / "mqa", run.out))
    assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)
    assert results["num_trainable_parameters"] == sum(tensor.numel() for tensor in before.values())
    # Training turns dropout off, as for T5 1.1, but the checkpoint keeps its dropout rate.
    assert AutoConfig.from_pretrained(run.out).dropout_rate == 0.1


def test_teacher_adds_distillation_terms(run, t5):
    results = run(*BATCH, "--max_train_steps", 30, "--learning_rate", 1e-2, "--teacher", t5 / "mha")
    terms = ["cross_entropy", "logits_divergence"]
    sides = ("encoder", "decoder")
    terms += [f"{side}_{kind}_error" for side in sides for kind in ("hidden_states", "attention_outputs")]
    assert results["eval_loss"] == pytest.approx(sum(results[f"eval_{name}"] for name in terms), rel=1e-5)
    name = "decoder_attention_outputs_error"
    assert results[f"eval_{name}"] < results[f"initial_eval_{name}"]


def test_resumed_stream_uptraining_is_bitwise_equal(run, tmp_path):
    flags = [*BATCH, "--max_train_steps", 9, "--checkpointing_steps", 4, "--dropout_rate", 0.1, "--eval_steps", 3]
    complete_run = run(*flags)
    shutil.copytree(run.out, tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoint-8")
    resumed = run(*flags, "--resume_from_checkpoint", "latest", output_dir=tmp_path / "again")
    assert resumed["train_loss"] == complete_run["train_loss"] and resumed["eval_loss"] == complete_run["eval_loss"]
    weights = [(folder / "model.safetensors").read_bytes() for folder in (run.out, tmp_path / "again")]
    assert weights[0] == weights[1]
    for more, message in (
        (["--noise_density", 0.3], r"noise was \[0.15, 3.0\] and is now \[0.3, 3.0\]"),
        (["--shuffle_buffer_size", 8], "shuffle_buffer_size was 16 and is now 8"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*flags, *more, "--resume_from_checkpoint", "latest", output_dir=tmp_path / "again")


@pytest.mark.thorough
def test_stream_uptraining_in_two_processes_equals_one(run, tmp_path):
    more = ["--max_train_steps", 3, "--total_train_batch_size", 16]
    expected = run(*more, "--per_device_train_batch_size", 8, output_dir=tmp_path / "one")
    argv = run.flags(*more, "--per_device_train_batch_size", 4, output_dir=tmp_path / "two")
    printed = run_and_check(2, run_script, "uptrain", argv)
    results = json.loads((tmp_path / "two/all_results.json").read_text())
    assert (
        printed.count("A step reads 16 sequences (processes: 2, batch size per device: 4, accumulation steps: 2)") == 1
    )
    for name in ("eval_loss", "initial_eval_loss", "train_loss"):
        assert results[name] == pytest.approx(expected[name], rel=1e-4)
    assert results["train_samples"] == expected["train_samples"] == 48


@pytest.mark.parametrize(
    ("alpha", "steps", "expected"),
    [(0.05, 1_000_000, 50_000), (0.05, 41, 3), (0.07, 100, 7), (0.1, 3, 1), (0, 10, 0), (1, 7, 7), (1e-6, 10, 1)],
)
def test_alpha_steps_are_rounded_up(alpha, steps, expected):
    assert make_settings(alpha=alpha, pretraining_steps=steps).alpha_steps == expected


def test_alpha_determines_the_length_of_the_run(run, caplog):
    with caplog.at_level(logging.INFO, logger="hf_attn_variants"):
        results = run(*BATCH, "--alpha", 0.05, "--pretraining_steps", 41)
    assert results["steps"] == 3 and results["train_samples"] == 24
    assert "3 steps, which is 0.05 of 41" in caplog.text
    assert (
        "A step reads 8 sequences (processes: 1, batch size per device: 8, accumulation steps: 1). These are 256 input"
        in caplog.text
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_text_shorter_than_a_step_gives_a_warning(run, caplog):
    results = run("--total_train_batch_size", 4096, "--per_device_train_batch_size", 64, "--max_train_steps", 2)
    blocks = results["sequences_per_step"]
    assert 1 < blocks < 4096 and results["train_samples"] == 2 * blocks
    assert f"only {blocks} sequences, but a step requires 4096" in caplog.text


def test_defaults_equal_t5_pretraining():
    settings = make_settings(alpha=0.05, pretraining_steps=1_000_000)
    assert (settings.optim, settings.adafactor_scale_parameter, settings.adafactor_relative_step) == (
        "adafactor",
        True,
        False,
    )
    assert (settings.max_length, settings.total_train_batch_size, settings.trainable) == (512, 2048, "all")
    assert (settings.max_grad_norm, settings.warmup_ratio, settings.learning_rate) == (0.0, 0.0, 1e-3)
    assert dataclasses.replace(settings, seed=1).values() == settings.values() | {"seed": 1}
    assert make_settings(max_train_steps=3, gradient_accumulation_steps=4).total_train_batch_size is None
    others = make_settings(max_train_steps=3, optim="adamw", adafactor_scale_parameter=None)
    assert (others.adafactor_scale_parameter, others.max_grad_norm) == (False, 1.0)
    assert not make_settings(max_train_steps=3, adafactor_scale_parameter=False).adafactor_scale_parameter
    flags = "m --objective span_corruption --train_file a.txt --validation_file b.txt --output_dir o"
    assert uptrain.parse_args([*flags.split(), "--max_train_steps", "3"]).adafactor_scale_parameter
    rows = UptrainingSettings(model_name_or_path="t5", objective="mlm", output_dir="o", train_file=("a",))
    assert (rows.optim, rows.max_length, rows.lr_scheduler_type, rows.warmup_ratio) == ("adamw", 64, "linear", 0.05)
    assert (rows.trainable, rows.max_grad_norm, rows.lr_scheduler_kwargs) == ("attention", 1.0, {})


@pytest.mark.parametrize("pretrained", [20_000, 1_000_000])
def test_learning_rate_continues_from_the_pretraining(pretrained):
    settings = make_settings(alpha=0.05, pretraining_steps=pretrained)
    optimizer = create_optimizer(torch.nn.Linear(2, 2), settings)
    scheduler = create_scheduler(optimizer, settings, settings.alpha_steps)
    for step in range(300):
        expected = 1 / math.sqrt(max(pretrained + step, 10_000))  # arXiv:1910.10683, section 3.1.2
        assert scheduler.get_last_lr()[0] == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_given_settings_change_the_schedule():
    constant = make_settings(max_train_steps=9)
    assert (constant.lr_scheduler_type, constant.learning_rate, constant.lr_scheduler_kwargs) == ("constant", 1e-3, {})
    short = make_settings(max_train_steps=9, pretraining_steps=500)
    assert (short.learning_rate, short.lr_scheduler_kwargs) == (0.01, {"timescale": 10_000})
    assert make_settings(max_train_steps=9, num_warmup_steps=3).lr_scheduler_type == "constant_with_warmup"
    linear = make_settings(max_train_steps=9, pretraining_steps=500, lr_scheduler_type="linear")
    assert (linear.lr_scheduler_type, linear.lr_scheduler_kwargs) == ("linear", {})
    changed_settings = make_settings(max_train_steps=9, pretraining_steps=500, adafactor_relative_step=True)
    assert changed_settings.lr_scheduler_kwargs == {}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--alpha", 0.05, "--pretraining_steps", 100, "--max_train_steps", 4], "--alpha.*--max_train_steps"),
        (["--alpha", 0.05], "--alpha"),
        ([], "--max_train_steps.*--alpha.*--pretraining_steps"),
        (["--num_train_epochs", 2], "--max_train_steps.*stream"),
        (["--max_train_steps", 1, "--dataset_name", "x"], "--train_file.*--dataset_name"),
        (["--max_train_steps", 1, "--dataloader_num_workers", 2], "--dataloader_num_workers.*got 2"),
        (["--max_train_steps", 1, "--total_train_batch_size", 20], "--total_train_batch_size.*32.*got 20"),
        (
            ["--max_train_steps", 1, "--total_train_batch_size", 64, "--gradient_accumulation_steps", 2],
            "--total_train_batch_size.*--gradient_accumulation_steps",
        ),
    ],
)
def test_stream_uptraining_errors_are_raised_before_any_work(run, more, message, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    with pytest.raises(ValueError, match=message):
        run(*more)
    assert not run.out.exists()


def test_invalid_pretraining_text_raises_an_error(run, text, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    steps = ["--max_train_steps", 1]
    with pytest.raises(ValueError, match="--validation_file"):
        run(*steps, files=["--train_file", text / "train-0.txt.gz"])
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    table = ["--train_file", tmp_path / "rows.jsonl", "--validation_file", text / "valid.txt"]
    with pytest.raises(ValueError, match=r"rows\.jsonl.*--dataset_name"):
        run(*steps, files=table)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text('{"body": "some text"}\n' * 50)
    source = ["--dataset_name", tmp_path / "data", "--text_columns", "body"]
    with pytest.raises(ValueError, match="'validation'"):
        run(*steps, files=source)


def test_dataset_is_read_as_a_stream(run, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    articles = LICENCE.read_text().split("\n\n")
    for name, rows in (("train", articles[1:9]), ("validation", articles[9:12])):
        write_lines(folder / f"{name}.jsonl", ({"body": row} for row in rows))
    results = run(*BATCH, "--max_train_steps", 2, files=["--dataset_name", folder, "--text_columns", "body"])
    assert results["steps"] == 2 and results["eval_samples"] == 8


def test_models_with_another_objective_raise_an_error(run, tiny_bert, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    steps = ["--max_train_steps", 1]
    bert = make_bert(tmp_path / "bert", tiny_bert)
    with pytest.raises(ValueError, match=r"\(bert\)"):
        run(*steps, model=bert)
    plain = make_t5(tmp_path / "plain-t5")
    with pytest.raises(ValueError, match=r"sentinels \(<extra_id_0>"):
        run(*steps, model=plain)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 200}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    make_sentinel_tokenizer(tmp_path / "bart")
    BartForConditionalGeneration(BartConfig(**sizes, **heads)).save_pretrained(tmp_path / "bart")
    with pytest.raises(ValueError, match=r"\(bart\)"):
        run(*steps, model=tmp_path / "bart")


@pytest.mark.slow
def test_real_t5_learns_span_corruption(shared_data, tmp_path):
    """Check a T5 that translates captions and has no sentinels: the test adds them, and the T5 learns to use them."""
    source = shared_data / "checkpoints/t5-mini-multi30k-en-de"
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([f"<extra_id_{i}>" for i in range(20)], special_tokens=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(source)
    model.resize_token_embeddings(len(tokenizer))
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "mha")
    convert_checkpoint(tmp_path / "mha", tmp_path / "mqa", 1, method="mean")
    wikipedia = shared_data / "wikipedia"
    argv = ["--model_name_or_path", tmp_path / "mqa", "--objective", "span_corruption", "--output_dir", tmp_path / "o"]
    argv += ["--train_file", wikipedia / "train-00000.txt.gz", "--validation_file", wikipedia / "valid.txt.gz"]
    argv += ["--max_length", 64, "--max_train_steps", 60, "--pretraining_steps", 7543, *BATCH, "--cpu"]
    argv += ["--max_eval_samples", 32, "--eval_steps", 60, "--shuffle_buffer_size", 256, "--disable_tqdm"]
    results = run_command(uptrain, *argv)
    assert results["eval_loss"] < results["initial_eval_loss"] - 1
