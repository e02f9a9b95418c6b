"""Check two gloo processes: equal losses, exact resume after signals, Ctrl-C, and unrelated processes."""

import json
import signal
from pathlib import Path

import pytest
import torch
from fixtures.commands import run_command
from fixtures.linear_loop import log_of
from fixtures.processes import Signal, draw_step, run_and_check, run_script
from fixtures.span_corruption import make_sentinel_tokenizer
from safetensors.torch import load_file
from torch.testing import assert_close

from hf_attn_variants.commands.training import glue as run_glue
from hf_attn_variants.commands.training import pretrain, pretrain_t5
from hf_attn_variants.training.engine.checkpoints import list_checkpoints

ROOT = Path(__file__).parents[2]
SIZES = {
    "pretrain_mlm": "hidden_size=16,num_hidden_layers=1,num_attention_heads=4,intermediate_size=32",
    "pretrain_span_corruption": "d_model=16,d_kv=4,d_ff=32,num_layers=1,num_heads=4",
}
COMMANDS = {"pretrain_mlm": pretrain, "pretrain_span_corruption": pretrain_t5}


@pytest.fixture
def flags(tiny_bert, tmp_path):
    text = ROOT / "LICENSE"

    def make(script, out, batch_size, *more):
        bert = script == "pretrain_mlm"
        tokenizer = tiny_bert if bert else make_sentinel_tokenizer(tmp_path / "tokenizer")
        argv = ["--model_type", "bert" if bert else "t5", "--tokenizer_name", tokenizer, "--output_dir", out]
        argv += ["--config_overrides", SIZES[script], "--num_key_value_heads", 2, "--train_file", text]
        argv += ["--max_length", 24, "--per_device_train_batch_size", batch_size, "--gradient_accumulation_steps", 2]
        argv += ["--learning_rate", "1e-2", "--shuffle_buffer_size", 16, "--logging_steps", 1, "--cpu"]
        return [str(part) for part in [*argv, "--disable_tqdm", *more]]

    return make


def read_records(out):
    return [(record["step"], record["loss"], record["lr"]) for record in log_of(out) if "loss" in record]


@pytest.mark.thorough
@pytest.mark.parametrize("name", SIZES)
def test_two_gloo_processes_equal_one_process_with_a_double_batch(flags, tmp_path, name):
    script = COMMANDS[name]
    # Each process evaluates five of the nine rows, so one row is evaluated twice.
    more = ["--max_train_steps", 5, "--dropout_rate", 0, "--validation_file", ROOT / "README.md"]
    more += ["--max_eval_samples", 9, "--per_device_eval_batch_size", 2]
    expected = run_command(script, *flags(name, tmp_path / "one", 4, *more))
    run_and_check(2, run_script, name, flags(name, tmp_path / "two", 2, *more))
    one, two = ([loss for _, loss, _ in read_records(tmp_path / out)] for out in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5) and len(one) == 5 and expected["epoch"] == 0
    results = json.loads((tmp_path / "two/all_results.json").read_text())
    for key in ("eval_loss", "gate_shuffled_cost", "train_loss", "train_tokens", "eval_samples"):
        assert results[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key
    actual, expected = (load_file(tmp_path / out / "model.safetensors") for out in ("two", "one"))
    assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.thorough
def test_killed_and_terminated_processes_resume_bitwise_equal(flags, tmp_path):
    more = ["--max_train_steps", 12, "--checkpointing_steps", 2, "--dropout_rate", 0.1]
    uninterrupted, cut, script = tmp_path / "whole", tmp_path / "cut", "pretrain_mlm"
    run_and_check(2, run_script, script, flags(script, uninterrupted, 2, *more))
    resumed = flags(script, cut, 2, *more, "--resume_from_checkpoint", "latest")
    killed = draw_step(range(2, 6))
    run_and_check(2, run_script, script, resumed[:-2], Signal(signal.SIGKILL, killed), status=-signal.SIGKILL)
    assert list_checkpoints(cut)[-1].name == f"checkpoint-{killed // 2 * 2}"
    # Only one process gets the signal. Its data worker must survive until the checkpoint is written.
    terminated = draw_step(range(6, 11))
    workers = ["--dataloader_num_workers", "1"]
    output = run_and_check(
        2,
        run_script,
        script,
        [*resumed, *workers],
        Signal(signal.SIGTERM, terminated, "1"),
        status=128 + signal.SIGTERM,
    )
    assert output.count(f"SIGTERM: Training stopped after step {terminated + 1}. The last checkpoint is") == 2, output
    assert list_checkpoints(cut)[-1].name == f"checkpoint-{terminated + 1}"
    assert not (cut / "model.safetensors").exists()
    run_and_check(2, run_script, script, resumed)
    assert read_records(cut) == read_records(uninterrupted) and len(read_records(uninterrupted)) == 12
    assert (cut / "model.safetensors").read_bytes() == (uninterrupted / "model.safetensors").read_bytes()


def test_ctrl_c_stops_all_processes_and_prints_one_message(flags, tmp_path):
    argv = flags("pretrain_mlm", tmp_path / "out", 2, "--max_train_steps", 12, "--dataloader_num_workers", 1)
    pressed = Signal(signal.SIGINT, 5)
    output = run_and_check(2, run_script, "pretrain_mlm", argv, pressed, status=128 + signal.SIGINT)
    assert output.count("Ctrl-C: Training stopped after step 6. The last checkpoint is") == 1
    assert "Traceback" not in output
    assert [path.name for path in list_checkpoints(tmp_path / "out")] == ["checkpoint-6"]


SCRIPTS = {
    "pretrain_mlm": [],
    "pretrain_span_corruption": [],
    "run_glue": ["--task_name", "cola"],
    "run_squad": ["--train_file", "x.json", "--validation_file", "x.json"],
    "run_seq2seq": ["--train_file", "x.tsv", "--source_column", "a", "--target_column", "b"],
    "uptrain": ["--objective", "mlm", "--train_file", "x.txt"],
}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="processes on accelerators are connected")
@pytest.mark.parametrize("name", SCRIPTS)
def test_unconnected_processes_raise_before_any_work(name, tmp_path):
    argv = ["--output_dir", str(tmp_path / "runs/out"), "--model_name_or_path", "no/model", *SCRIPTS[name]]
    argv += ["--train_file", "x.txt", "--max_train_steps", "1"] if name.startswith("pretrain") else []
    output = run_and_check(2, run_script, name, argv, status=2)
    assert output.count("error: 2 processes were launched (WORLD_SIZE=2)") == 2
    assert "add --cpu if there is no GPU" in output
    assert output.count("\n") == 2 and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variable", "advice"),
    [("SLURM_STEP_NUM_TASKS", "unset SLURM_STEP_NUM_TASKS"), ("OMPI_COMM_WORLD_SIZE", "--cpu|accelerate launch")],
)
def test_unconnected_processes_of_other_launchers_raise_before_any_work(variable, advice, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, "4")
    argv = ["--output_dir", str(tmp_path / "out"), "--model_name_or_path", "no/model", "--task_name", "cola"]
    with pytest.raises(ValueError, match=rf"4 processes were launched \({variable}=4\).*({advice})"):
        run_command(run_glue, *argv)
    assert not (tmp_path / "out").exists()
