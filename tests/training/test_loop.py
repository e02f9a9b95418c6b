"""Check the training loop on a linear model: normalization over accumulated batches, streams, NaN and logging."""

import itertools
import json
import os
import signal
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from fixtures.full_disk import full_disk
from fixtures.linear_loop import OBJECTIVE, log_of, make_loop, make_rows, read_losses, train_accumulated
from fixtures.processes import run_and_check
from safetensors.torch import load_file
from torch.utils.data import IterableDataset

from hf_attn_variants.errors import NonFiniteLossError, TerminatedError, run_script
from hf_attn_variants.modeling.mechanisms.clipped_softmax import ClippedSoftmax
from hf_attn_variants.modeling.ops.variant_attention import AttentionHeads
from hf_attn_variants.training.engine import checkpoints
from hf_attn_variants.training.engine.checkpoints import list_checkpoints
from hf_attn_variants.training.engine.loop import TrainingLoop
from hf_attn_variants.training.engine.optimization import Objective
from hf_attn_variants.training.engine.settings import count_training_steps


@pytest.fixture(autouse=True)
def fresh_accelerator():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_accumulated_batches_equal_one_large_batch(tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    # Both loops make steps of 4, 4 and 2 rows, so the last group of batches is a short one.
    large_batch_loop = make_loop(one, batch_size=4)
    large_batch_loop.run()
    split = make_loop(many, batch_size=1, gradient_accumulation_steps=4)
    split.run()
    torch.testing.assert_close(split.model.weight, large_batch_loop.model.weight)
    assert [r["loss"] for r in log_of(many)] == pytest.approx([r["loss"] for r in log_of(one)])
    assert split.state.examples == large_batch_loop.state.examples == 10 and split.state.epoch == 1


@pytest.mark.thorough
def test_two_process_step_equals_one_process_with_a_double_batch(tmp_path):
    # Plain SGD without clipping reveals a wrong factor in the gradient and wrong weights of the processes' means.
    # AdamW or clipping would hide both.
    one, two = tmp_path / "one", tmp_path / "two"
    train_accumulated(one, 4)
    run_and_check(2, train_accumulated, two, 2)
    losses, expected = ([loss for _, loss in read_losses(folder)] for folder in (two, one))
    assert losses == pytest.approx(expected, rel=1e-6) and len(losses) == 3
    result, one_process_result = (load_file(folder / "checkpoint-3/model.safetensors") for folder in (two, one))
    torch.testing.assert_close({name.removeprefix("module."): result[name] for name in result}, one_process_result)


def test_first_logged_loss_is_the_mean_over_items(tmp_path):
    loop = make_loop(tmp_path, batch_size=5, total_steps=1)
    weight = [parameter.detach().clone() for parameter in loop.model.parameters()]
    loop.run()
    batch = {key: torch.stack([row[key] for row in make_rows()[:5]]) for key in ("x", "y", "mask")}
    error = ((batch["x"] @ weight[0].T + weight[1] - batch["y"]) ** 2 * batch["mask"]).sum() / batch["mask"].sum()
    assert log_of(tmp_path)[0]["loss"] == pytest.approx(error.item())


def test_resumed_run_continues_the_open_log_window(tmp_path):
    def records():
        return [{key: record[key] for key in ("step", "loss", "lr", "epoch")} for record in log_of(tmp_path)]

    make_loop(tmp_path, total_steps=5, logging_steps=2, checkpointing_steps=5).run()
    uninterrupted_records = records()
    assert [record["step"] for record in uninterrupted_records] == [2, 4, 5]
    assert uninterrupted_records[-1]["lr"] == pytest.approx(0.1 / 5)
    make_loop(tmp_path, total_steps=5, logging_steps=2, resume_from_checkpoint="latest").run()
    assert records() == uninterrupted_records
    state = tmp_path / "checkpoint-5/train_state.json"
    state.write_text(
        json.dumps({name: value for name, value in json.loads(state.read_text()).items() if name != "lr"})
    )
    assert make_loop(tmp_path, total_steps=5, resume_from_checkpoint="latest").run().step == 5  # of an older version


def test_log_windows_contain_mean_losses_and_learning_rates(tmp_path):
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    make_loop(dense, total_steps=5).run()
    make_loop(sparse, total_steps=5, logging_steps=2).run()
    losses = [record["loss"] for record in log_of(dense)]
    assert [r["loss"] for r in log_of(sparse)] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]])
    assert [r["lr"] for r in log_of(dense)] == pytest.approx([0.1, 0.1 / 2, 0.1 / 3, 0.1 / 4, 0.1 / 5])


@pytest.mark.parametrize(("poison", "named"), [("loss", "loss became nan"), ("gradient", "gradient norm became")])
def test_nan_loss_stops_and_keeps_the_last_checkpoint(tmp_path, poison, named):
    seen = []

    def loss_sum(model, batch):
        seen.append(batch)
        loss = OBJECTIVE.loss_sum(model, batch)
        if len(seen) < 4:
            return loss
        # sqrt has an infinite slope at 0, so the loss is finite and its gradient is NaN.
        return loss * torch.nan if poison == "loss" else loss + torch.sqrt(model(batch["x"]).sum() * 0)

    loop = make_loop(
        tmp_path, objective=Objective(loss_sum, OBJECTIVE.count), total_steps=6, checkpointing_steps=1, logging_steps=3
    )
    with pytest.raises(NonFiniteLossError, match=f"{named}.*step 4"):
        loop.run()
    assert list_checkpoints(tmp_path)[-1].name == "checkpoint-3"


SCALED = {"total_steps": 40, "data": make_rows(200), "lr": 1e-3}


def test_gradients_not_finite_at_any_loss_scale_stop_the_run(tmp_path):
    def loss_sum(model, batch):
        return OBJECTIVE.loss_sum(model, batch) + torch.sqrt(model(batch["x"]).sum() * 0)

    # The loss scale starts at 65536 and is halved at each step.
    with pytest.raises(NonFiniteLossError, match="gradient norm became nan at step 17"):
        make_loop(
            tmp_path, objective=Objective(loss_sum, OBJECTIVE.count), scaler=torch.amp.GradScaler("cpu"), **SCALED
        ).run()


def test_gradients_that_overflow_at_a_large_loss_scale_continue(tmp_path):
    loop = make_loop(tmp_path, scaler=torch.amp.GradScaler("cpu"), **SCALED)
    loop.model.weight.register_hook(lambda gradient: gradient.where(gradient.abs() < 1e3, torch.inf))
    before = loop.model.weight.detach().clone()
    assert loop.run().step == 40 and loop.accelerator.scaler.get_scale() < 2**12
    assert loop.model.weight.isfinite().all() and not torch.equal(loop.model.weight, before)


def test_missing_random_states_raise_an_error(tmp_path):
    make_loop(tmp_path, checkpointing_steps=2).run()
    (path,) = tmp_path.glob("checkpoint-2/random_states_0.pkl")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"checkpoint-2 is damaged"):
        make_loop(tmp_path, resume_from_checkpoint="latest").run()


def test_unwritable_log_error_names_the_last_checkpoint(tmp_path):
    loop = make_loop(tmp_path, checkpointing_steps=2)
    loop.run()
    message = r"train_log\.jsonl could not be written \(OSError: .*File too large.*last good checkpoint is .*-2.$"
    with full_disk(64), pytest.raises(OSError, match=message):
        loop.log.write({"step": 4, "loss": 1.0})


@pytest.mark.parametrize(
    ("written", "size", "message"),
    [
        # The sizes at which the weights, the optimizer and the random states no longer fit.
        ("save_checkpoint", 64, r"checkpoint-4 could not be written \(SafetensorError: .*File too large"),
        ("save_checkpoint", 1024, r"checkpoint-4 could not be written \(.*disk"),
        ("save_checkpoint", 8192, r"checkpoint-4 could not be written \(.*disk"),
        ("save_best_weights", 64, r"best weights could not be written to .* \(SafetensorError: .*File too large"),
    ],
)
def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch, written, size, message):
    scores = itertools.count()
    settings = {"evaluate": lambda: {"a": next(scores)}, "eval_steps": 4, "metric_for_best_model": "a"}
    settings |= {"total_steps": 5, "checkpointing_steps": 2}
    write = getattr(checkpoints, written)

    def disk_full(*args, **named):
        # The disk is full after the checkpoint of step 2, which precedes the first evaluation.
        with full_disk(size) if (tmp_path / "checkpoint-2").is_dir() else nullcontext():
            return write(*args, **named)

    monkeypatch.setattr(checkpoints, written, disk_full)
    with pytest.raises(OSError, match=rf"{message}.*last good checkpoint is .*checkpoint-2.$"):
        make_loop(tmp_path, **settings).run()
    kept_files = {
        "train_log.jsonl",
        "checkpoint-2",
        *(["best_model.safetensors"] if written == "save_checkpoint" else []),
    }
    assert {path.name for path in tmp_path.iterdir()} == kept_files
    monkeypatch.undo()
    resumed = make_loop(tmp_path, **settings, resume_from_checkpoint="latest")
    resumed.run()
    uninterrupted_loop = make_loop(tmp_path / "whole", **settings)
    uninterrupted_loop.run()
    assert read_losses(tmp_path) == read_losses(tmp_path / "whole") and resumed.state.best_step == 5
    assert torch.equal(resumed.model.weight, uninterrupted_loop.model.weight)


def test_sigterm_saves_a_checkpoint(tmp_path):
    uninterrupted, cut = tmp_path / "whole", tmp_path / "cut"
    make_loop(uninterrupted, total_steps=8).run()
    calls = []

    def loss_sum(model, batch):
        calls.append(batch)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return OBJECTIVE.loss_sum(model, batch)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TerminatedError, match=r"^SIGTERM: Training stopped after step 4.$"):
        make_loop(cut, objective=Objective(loss_sum, OBJECTIVE.count), total_steps=8).run()
    assert [path.name for path in list_checkpoints(cut)] == ["checkpoint-4"]
    assert signal.getsignal(signal.SIGTERM) == before
    make_loop(cut, total_steps=8, resume_from_checkpoint="latest").run()
    assert read_losses(cut) == read_losses(uninterrupted)


def test_run_resumed_from_an_earlier_checkpoint_keeps_its_files(tmp_path):
    make_loop(tmp_path, total_steps=6, checkpointing_steps=1, save_total_limit=4).run()
    kept_steps = []

    class Watched(TrainingLoop):
        def _save_checkpoint(self):
            super()._save_checkpoint()
            kept_steps.append([int(path.name.removeprefix("checkpoint-")) for path in list_checkpoints(tmp_path)])

    back = {"resume_from_checkpoint": str(tmp_path / "checkpoint-3"), "save_total_limit": 2}
    loop = make_loop(tmp_path, total_steps=6, checkpointing_steps=1, **back)
    loop.__class__ = Watched
    loop.run()
    assert kept_steps == [[3, 4], [4, 5], [5, 6]]


def test_sigterm_during_the_last_evaluation_saves_a_checkpoint(tmp_path):
    def evaluate():
        os.kill(os.getpid(), signal.SIGTERM)
        return {"accuracy": 1.0}

    with pytest.raises(TerminatedError, match=r"stopped after step 3.$"):
        make_loop(tmp_path, evaluate=evaluate).run()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-3"]
    loop = make_loop(tmp_path, evaluate=lambda: {"accuracy": 1.0}, resume_from_checkpoint="latest")
    assert loop.run().step == 3 and not loop.has_evaluated_final_weights()


def test_final_scores_belong_to_the_final_weights(tmp_path):
    def evaluate_and_run_out_of_time():
        stopped._deadline = 0.0
        return {"a": 1.0}

    stopped = make_loop(tmp_path / "stopped", total_steps=50, evaluate=evaluate_and_run_out_of_time, eval_steps=2)
    stopped.run()
    assert (stopped.evaluated_step, stopped.state.step) == (2, 3) and not stopped.has_evaluated_final_weights()
    for name, values, current in (("up", [1.0, 2.0, 3.0], True), ("down", [3.0, 2.0, 1.0], False)):
        options = {"eval_steps": 1, "metric_for_best_model": "a"}
        result = iter(values)
        loop = make_loop(tmp_path / name, evaluate=lambda result=result: {"a": next(result)}, **options)
        loop.run()
        assert loop.has_evaluated_final_weights() == current
    last = make_loop(tmp_path / "down", evaluate=lambda: {"a": 1.0}, eval_steps=1)
    last.run()
    assert last.has_evaluated_final_weights()


def test_last_losses_are_checked_without_a_full_log_window(tmp_path):
    loop = make_loop(tmp_path, total_steps=5, logging_steps=3, data=make_rows(20))
    loop.run()
    assert [record["step"] for record in log_of(tmp_path)] == [3, 5]
    assert loop.get_results(20)["train_loss"] == pytest.approx(
        (3 * log_of(tmp_path)[0]["loss"] + 2 * log_of(tmp_path)[1]["loss"]) / 5
    )


def test_losses_are_checked_with_a_delay_of_one_step(tmp_path):
    looked = []

    class Watched(TrainingLoop):
        def _record_last_loss(self):
            looked.append(self._pending and self._pending[0])
            super()._record_last_loss()

    loop = make_loop(tmp_path, total_steps=4, logging_steps=100, data=make_rows(20))
    loop.__class__ = Watched
    loop.run()
    # The loss of the last step is checked before the time limit.
    assert looked == [None, 1, 2, 3, 4, None]


def test_sigterm_prints_one_line_and_sets_the_status(capsys):
    def main():
        raise TerminatedError("SIGTERM: stopped")

    assert run_script(main) == 143 and capsys.readouterr().err == "SIGTERM: stopped\n"


def test_time_limit_ends_training_with_a_resumable_checkpoint(tmp_path):
    state = make_loop(tmp_path, total_steps=50, max_train_minutes=1e-9).run()
    assert state.step == 1 and not state.finished
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1"]
    assert make_loop(tmp_path, total_steps=50, resume_from_checkpoint="latest").run().step == 50


class Seekable(IterableDataset):
    """Ten rows that can be read from any position, and that record each read."""

    start = 0

    def seek(self, batches, position):
        self.start = position[0] + 1
        assert self.start == 2 * batches

    def __iter__(self):
        for i in range(self.start, 10, 2):
            pair = make_rows()[i : i + 2]
            yield {key: torch.stack([row[key] for row in pair]) for key in pair[0]} | {
                "position": torch.tensor([i + 1])
            }


def test_resumed_run_seeks_to_the_position_of_the_last_batch(tmp_path):
    uninterrupted, cut = tmp_path / "whole", tmp_path / "cut"
    make_loop(uninterrupted, data=Seekable(), batch_size=None, total_steps=5).run()
    make_loop(cut, data=Seekable(), batch_size=None, total_steps=5, checkpointing_steps=3).run()
    data = Seekable()
    settings = {"total_steps": 5, "resume_from_checkpoint": "latest"}
    make_loop(cut, data=data, batch_size=None, seek=data.seek, **settings).run()
    assert data.start == 6
    assert read_losses(cut) == read_losses(uninterrupted)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(make_rows(5))


def test_stream_without_length_restarts_at_its_end(tmp_path):
    loop = make_loop(tmp_path, data=Stream(), total_steps=7)
    state = loop.run()
    assert state.step == 7 and (state.epoch, state.batch_in_epoch) == (2, 1)
    with pytest.raises(ValueError, match="--max_train_steps is required"):
        count_training_steps(None, 1, 3.0, None)


def test_loop_without_data_raises_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one batch"):
        make_loop(tmp_path, data=[]).run()


def test_gradient_clipping_bounds_the_step(tmp_path):
    loop = make_loop(tmp_path, total_steps=1, max_grad_norm=0.01, lr=1.0)
    before = torch.cat([p.detach().flatten() for p in loop.model.parameters()])
    loop.run()
    moved = torch.cat([p.detach().flatten() for p in loop.model.parameters()]) - before
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_best_weights_are_restored_and_nan_metrics_are_ignored(tmp_path):
    scores = iter([0.1, 0.5, float("nan"), 0.3])
    weights = []
    loop = make_loop(
        tmp_path,
        total_steps=4,
        eval_steps=1,
        metric_for_best_model="score",
        evaluate=lambda: weights.append(loop.model.weight.detach().clone()) or {"score": next(scores)},
    )
    state = loop.run()
    assert (state.best_step, state.best_metric, state.bad_evaluations) == (2, 0.5, 2)
    assert torch.equal(loop.model.weight, weights[1]) and not torch.equal(weights[1], weights[3])


@pytest.mark.parametrize("resumed", [False, True])
def test_clipping_moves_to_the_configured_values(resumed, tmp_path):
    """Check that training moves a clipped softmax from a plain softmax to its configured values, used to evaluate."""
    heads = AttentionHeads(1, 1, 1, 1, 1, 2, 2)

    def record(model, batch):
        seen.append(clipped.progress)
        return (model(batch["x"]) ** 2).sum()

    def loop_with_clipping(**settings):
        loop = make_loop(tmp_path, objective=replace(OBJECTIVE, loss_sum=record), total_steps=5, **settings)
        loop.model.clipped = ClippedSoftmax([-0.1, 1.0], heads, 2, torch.empty(0))
        return loop, loop.model.clipped

    evaluated, seen = [], []
    settings = {"clipping_ratio": 0.8, "checkpointing_steps": 2, "eval_steps": 1}
    loop, clipped = loop_with_clipping(evaluate=lambda: evaluated.append(clipped.progress) or {}, **settings)
    loop.run()
    assert seen == [0.0, 0.25, 0.5, 0.75, 1.0] and clipped.progress == 1.0 and {*evaluated} == {1.0}
    if resumed:
        seen.clear()
        loop, clipped = loop_with_clipping(resume_from_checkpoint=str(tmp_path / "checkpoint-2"), **settings)
        loop.run()
        assert seen == [0.5, 0.75, 1.0]


def test_total_steps_follow_from_epochs_and_batches():
    assert count_training_steps(10, 4, 3.0, None) == 9 and count_training_steps(10, 4, 0.5, None) == 2
    assert count_training_steps(10, 4, 3.0, 5) == 5 and count_training_steps(10, 1, 0, None) == 0
