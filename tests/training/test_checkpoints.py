"""Check exact resume: a run that is killed with SIGKILL ends with the losses of an uninterrupted run."""

import json
import shutil
import signal
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from fixtures.commands import run_command
from fixtures.full_disk import full_disk
from fixtures.linear_loop import log_without_times
from fixtures.processes import Signal, draw_step, run_and_check, run_script

from hf_attn_variants.commands.training import glue as glue_command
from hf_attn_variants.training.engine import checkpoints

STEPS = 13  # past the end of an epoch (step 8, or 4 with accumulation), and not at the end of another one


def make_flags(tiny_bert, glue, out, *more):
    argv = ["--model_name_or_path", tiny_bert, "--task_name", "stsb", "--data_dir", glue / "STS-B"]
    argv += ["--output_dir", out, "--max_length", 48, "--per_device_train_batch_size", 4, "--learning_rate", "1e-3"]
    argv += ["--logging_steps", 2, "--max_train_steps", STEPS, "--checkpointing_steps", 3, "--eval_steps", 2]
    argv += ["--metric_for_best_model", "loss", "--skip_predict", "--cpu", "--disable_tqdm", *more]
    return list(map(str, argv))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("in_checkpoint", "steps", "more"),
    [
        (
            False,
            range(3, STEPS),
            ["--group_by_length", "--gradient_accumulation_steps", "2", "--save_total_limit", "2"],
        ),
        (True, (6, 9, 12), ["--mixed_precision", "bf16", "--weight_decay", "0.1"]),
    ],
)
def test_killed_run_resumes_bitwise_equal(tiny_bert, glue, tmp_path, in_checkpoint, steps, more):
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    expected = run_command(glue_command, *make_flags(tiny_bert, glue, uninterrupted, *more))
    step = draw_step(steps)
    kill = Signal(signal.SIGKILL, step, in_checkpoint=in_checkpoint)
    run_and_check(1, run_script, "run_glue", make_flags(tiny_bert, glue, killed, *more), kill, status=-signal.SIGKILL)
    result = [path.name for path in checkpoints.list_checkpoints(killed)]
    if in_checkpoint:
        assert result[-1] == f"checkpoint-{step - 3}" and (killed / f".tmp-checkpoint-{step}").is_dir()
    else:
        assert result == [f"checkpoint-{saved}" for saved in range(3, step + 1, 3)][-2:]
    results = run_command(
        glue_command, *make_flags(tiny_bert, glue, killed, *more, "--resume_from_checkpoint", "latest")
    )
    assert log_without_times(killed) == log_without_times(uninterrupted)
    untimed = [
        {k: v for k, v in r.items() if "runtime" not in k and "per_second" not in k} for r in (results, expected)
    ]
    assert json.dumps(untimed[0]) == json.dumps(untimed[1])  # as text, because NaN != NaN
    assert (killed / "model.safetensors").read_bytes() == (uninterrupted / "model.safetensors").read_bytes()
    assert not list(killed.glob(".tmp-*"))


@pytest.fixture
def trained(tiny_bert, glue, tmp_path):
    out = tmp_path / "out"
    run_command(glue_command, *make_flags(tiny_bert, glue, out))
    return out, lambda *more: run_command(glue_command, *make_flags(tiny_bert, glue, out, *more))


@pytest.fixture(scope="module")
def once_trained(tiny_bert, glue, tmp_path_factory):
    """A finished run that no test changes."""
    out = tmp_path_factory.mktemp("once") / "out"
    run_command(glue_command, *make_flags(tiny_bert, glue, out))
    return out


def test_resume_from_an_earlier_checkpoint_repeats_the_rest(trained):
    out, again = trained
    before = log_without_times(out)
    again("--resume_from_checkpoint", str(out / "checkpoint-3"))
    assert log_without_times(out) == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}", r"checkpoint-3 is damaged .*\(SafetensorError"),
        ("optimizer.bin", b"", "checkpoint-3 is damaged"),
        ("train_state.json", b'{"step": 3', r"checkpoint-3/train_state\.json must be a JSON file"),
    ],
)
def test_damaged_checkpoint_error_names_the_file(once_trained, tiny_bert, glue, tmp_path, name, content, message):
    damaged = shutil.copytree(once_trained / "checkpoint-3", tmp_path / "checkpoint-3")
    assert (damaged / name).is_file()
    (damaged / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run_command(
            glue_command, *make_flags(tiny_bert, glue, tmp_path / "out", "--resume_from_checkpoint", str(damaged))
        )


def test_inexact_resume_raises_an_error(trained, tmp_path):
    out, again = trained
    with pytest.raises(ValueError, match="per_device_train_batch_size was 4 and is now 2"):
        again("--resume_from_checkpoint", "latest", "--per_device_train_batch_size", "2")
    with pytest.raises(ValueError, match="seed was 42 and is now 7"):
        again("--resume_from_checkpoint", "latest", "--seed", "7")
    with pytest.raises(ValueError, match=r"learning_rate was 0\.001 and is now 0\.002, lr_scheduler_type was linear"):
        again("--resume_from_checkpoint", "latest", "--learning_rate", "2e-3", "--lr_scheduler_type", "cosine")
    with pytest.raises(ValueError, match="a complete checkpoint"):
        again("--resume_from_checkpoint", str(tmp_path))
    (out / "checkpoint-12/random_states_0.pkl").unlink()
    with pytest.raises(ValueError, match=r"random_states_0\.pkl"):
        again("--resume_from_checkpoint", "latest")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--weight_decay", "0.1", "weight_decay was 0.0 and is now 0.1"),
        ("--adam_beta1", "0.8", "adam_beta1 was 0.9 and is now 0.8"),
        ("--adam_beta2", "0.99", "adam_beta2 was 0.999 and is now 0.99"),
        ("--adam_epsilon", "1e-6", "adam_epsilon was 1e-08 and is now 1e-06"),
        ("--max_grad_norm", "2", "max_grad_norm was 1.0 and is now 2.0"),
        ("--lr_scheduler_kwargs", '{"num_cycles": 1}', r"lr_scheduler_kwargs was \{\} and is now \{'num_cycles': 1\}"),
        ("--num_warmup_steps", "2", "warm-up steps was 0 and is now 2"),
        ("--warmup_ratio", "0.5", "warm-up steps was 0 and is now 7"),
        ("--max_train_steps", "14", "training steps was 13 and is now 14"),
        ("--dropout_rate", "0", "dropout_rate was None and is now 0.0"),
        ("--metric_for_best_model", "pearson", "metric_for_best_model was loss and is now pearson"),
        ("--early_stopping_patience", "9", "early_stopping_patience was None and is now 9"),
        ("--model_name_or_path", None, "model_name_or_path was .* and is now .*copy"),
        ("--train_file", None, "hash of the training data was [0-9a-f]{16} and is now [0-9a-f]{16}"),
    ],
)
def test_resume_with_a_changed_option_error_names_the_option(
    once_trained, tiny_bert, glue, tmp_path, flag, value, message
):
    if flag == "--model_name_or_path":
        value = str(shutil.copytree(tiny_bert, tmp_path / "copy"))
    if flag == "--train_file":
        text = (glue / "STS-B/train.tsv").read_text()
        value = tmp_path / "train.tsv"
        value.write_text(text.replace(" a ", " one ", 1))
    # --lr_scheduler_kwargs needs a schedule with that setting, because the schedule is built before the checkpoint
    # is read.
    more = ["--lr_scheduler_type", "cosine"] if flag == "--lr_scheduler_kwargs" else []
    before = log_without_times(once_trained)
    with pytest.raises(ValueError, match=message):
        run_command(
            glue_command,
            *make_flags(tiny_bert, glue, once_trained, "--resume_from_checkpoint", "latest", *more, flag, str(value)),
        )
    assert log_without_times(once_trained) == before


def test_checkpoint_of_another_folder_needs_an_empty_output_folder(once_trained, tiny_bert, glue, tmp_path):
    argv = make_flags(
        tiny_bert, glue, tmp_path / "other", "--resume_from_checkpoint", str(once_trained / "checkpoint-12")
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other/train_log.jsonl").write_text("precious")
    with pytest.raises(ValueError, match=r"is not in --output_dir .*other, which is not empty"):
        run_command(glue_command, *argv)
    assert (tmp_path / "other/train_log.jsonl").read_text() == "precious"
    (tmp_path / "other/train_log.jsonl").unlink()
    assert run_command(glue_command, *argv)["steps"] == STEPS
    assert log_without_times(tmp_path / "other") == log_without_times(once_trained)


@pytest.mark.thorough
def test_resume_with_another_thread_count_gives_a_warning(trained, caplog):
    out, again = trained
    state = out / "checkpoint-12/train_state.json"
    again("--resume_from_checkpoint", "latest")
    assert "to rounding" not in caplog.text
    state.write_text(state.read_text().replace(f'"CPU threads": {torch.get_num_threads()}', '"CPU threads": 64'))
    again("--resume_from_checkpoint", "latest")
    assert f"CPU threads was 64 and is now {torch.get_num_threads()}" in caplog.text


def test_failed_write_keeps_the_last_checkpoint_and_no_partial_one(tiny_bert, glue, tmp_path, monkeypatch):
    save = checkpoints.save_checkpoint

    def disk_full(accelerator, state, *others):
        with full_disk(1000) if state.step == 6 else nullcontext():
            return save(accelerator, state, *others)

    monkeypatch.setattr(checkpoints, "save_checkpoint", disk_full)
    with pytest.raises(OSError, match=r"checkpoint-6 .*\(SafetensorError: .*last good checkpoint is .*checkpoint-3.$"):
        run_command(glue_command, *make_flags(tiny_bert, glue, tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").glob("*checkpoint*")] == ["checkpoint-3"]


@pytest.mark.parametrize(
    "words",
    ["[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0", "basic_ios::clear: file write failed"],
)
def test_full_disk_error_is_reported_instead_of_the_torch_error(tmp_path, monkeypatch, words):
    def save_state(folder):
        raise RuntimeError(words)

    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "save_state", save_state)
    with pytest.raises(OSError, match=r"checkpoint-.* could not be written .*disk") as caught:
        checkpoints.save_checkpoint(accelerator, checkpoints.TrainState(), tmp_path, None)
    assert words not in str(caught.value)


def test_only_complete_checkpoints_are_listed_in_order(tmp_path):
    for name in ("checkpoint-10", "checkpoint-9", ".tmp-checkpoint-11", "checkpoint-12", "checkpoint-x"):
        (tmp_path / name).mkdir()
        if name != "checkpoint-12":
            (tmp_path / name / "train_state.json").write_text("{}")
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert checkpoints.find_checkpoint("latest", tmp_path).name == "checkpoint-10"
