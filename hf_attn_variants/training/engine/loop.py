"""The training loop of all commands, with the throughput (tokens per second, model FLOPs utilization) of its batches.

accelerate distributes the work, and a task's objective computes the loss. Model FLOPs utilization is defined in
arXiv 2204.02311, appendix B.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from torch import Tensor, nn

from ...errors import NonFiniteLossError, TerminatedError
from ...files import BEST_MODEL_FILE
from ...modeling.attention.variant_mixins import AttnVariantModelMixin
from ...registration import variant_model_class
from .checkpoints import (
    STOP_SIGNALS,
    StopSignals,
    TrainState,
    describe_last_checkpoint,
    find_checkpoint,
    load_checkpoint,
    load_weights,
    save_best_weights,
    save_checkpoint,
)
from .losses import Objective
from .outputs import RunLog, progress_bar, save_bad_batch
from .settings import LoopSettings

__all__ = ["TrainingCost", "TrainingLoop", "compute_utilization"]

logger = logging.getLogger(__name__)


class TrainingCost:
    """Counts the tokens and the training FLOPs of batches.

    Args:
        model: the model that is trained, not wrapped; one that is no architecture here has tokens and no FLOPs.
        head_of_items: whether what follows the base model is given the counted items of a batch alone (masked
            tokens), and not all tokens.
    """

    def __init__(self, model: nn.Module, head_of_items: bool = False):
        config = getattr(model, "config", None)
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.stacks = _compute_flops_per_token(model, config)
        # The gradient of activations costs a forward pass, that of weights another one where they are trained. A
        # frozen head counts as if the gradient went through it.
        self.passes = 2 + _compute_trained_share(model, config)
        self.head = (
            sum(2 * each.weight.numel() for each in _find_head_layers(model)) if head_of_items and self.stacks else 0
        )
        if self.head:
            stack = next(iter(self.stacks))  # a masked-LM model has one
            per_token, per_attended = self.stacks[stack]
            self.stacks[stack] = per_token - self.head, per_attended

    def count(self, batch: dict[str, Tensor], items: int) -> tuple[int, int]:
        """Return the tokens of a batch, without padding, and the FLOPs of training on it.

        It has "input_ids" or "attention_mask" [b, n], or [b, c, n] of c choices; and "labels" [b, t] of a decoder,
        negative at padding.
        """
        lengths = _count_tokens(batch)
        if not lengths:
            return 0, 0
        labels = batch.get("labels")
        own_targets = self.is_encoder_decoder and labels is not None and labels.ndim == 2
        targets = (labels >= 0).sum(-1).tolist() if own_targets and labels is not None else lengths
        tokens = sum(lengths) + (sum(targets) if own_targets else 0)
        flops = self.head * items
        for n, t in zip(lengths, targets, strict=True):
            for stack, (per_token, (own, source)) in self.stacks.items():
                length = n if stack == "encoder" else t
                flops += length * (per_token + own * length + source * n)
        return tokens, round(self.passes * flops)


def _compute_flops_per_token(model: nn.Module, config: Any) -> dict[str, tuple[int, tuple[int, int]]]:
    """Return of each stack the FLOPs a token, and those for each token attended to, its own and the source's."""
    from ...inspection.costs import variant_config
    from ...inspection.counting import flops_per_token

    if config is None:
        return {}
    try:
        with torch.device("meta"):
            twin = _find_variant_class(model)(variant_config(config.to_dict()))
    except ValueError:
        return {}
    none, own, source = (flops_per_token(twin, *lengths) for lengths in ((0, 0), (1, 0), (0, 1)))
    return {stack: (none[stack], (own[stack] - none[stack], source[stack] - none[stack])) for stack in none}


def _find_head_layers(model: Any) -> list[nn.Linear]:
    """Return the linear maps behind the base model that read each token."""
    from ...inspection.counting import runs_once_a_sequence

    base = {id(each) for each in model.base_model.modules()}
    found = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    return [each for name, each in found if id(each) not in base and not runs_once_a_sequence(model, name)]


def _find_variant_class(model: nn.Module) -> type[AttnVariantModelMixin]:
    """Return our class for a model of ours or of upstream's; raise ValueError where there is none."""
    # FSDP2 makes a class of this prefix for a model it shards.
    return variant_model_class(type(model).__name__.removeprefix("FSDP"))


def _compute_trained_share(model: nn.Module, config: Any) -> float:
    """Return the share of a pass through the model's matrices that goes through trained ones."""
    try:
        module_runs = _find_variant_class(model).module_runs
    except ValueError:
        module_runs = AttnVariantModelMixin.module_runs
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    runs = trained = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            size = module.weight.numel() * (module_runs(config, name.removeprefix(prefix)) if config else 1)
            runs += size
            trained += size if module.weight.requires_grad else 0
    return trained / max(runs, 1)


def _count_tokens(batch: dict[str, Tensor]) -> list[int]:
    if "attention_mask" in batch:
        return batch["attention_mask"].sum(-1).flatten().tolist()
    ids = batch.get("input_ids")
    return [] if ids is None else [ids.shape[-1]] * len(ids)


def compute_utilization(
    accelerator: Accelerator, flops: int, seconds: float, peak_tflops: float | None
) -> dict[str, float]:
    """Return "train_tflops_per_second" of all processes and, with a device's peak, "train_mfu" and "peak_tflops".

    Return nothing where no FLOPs were counted.
    """
    if not (flops and seconds):
        return {}
    figures = {"train_tflops_per_second": flops / seconds / 1e12}
    if peak_tflops is not None:
        figures["train_mfu"] = figures["train_tflops_per_second"] / (peak_tflops * accelerator.num_processes)
        figures["peak_tflops"] = peak_tflops
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


# Gradients that are not finite at this scale of an fp16 loss are not so because of it.
MIN_LOSS_SCALE = 1.0


class TrainingLoop:
    """Trains a prepared model; call `run()` once, on every process.

    Args:
        accelerator: Made with `gradient_accumulation_steps` 1 (this loop accumulates) and
            `step_scheduler_with_optimizer=False`.
        model: Prepared by it, like the next three.
        optimizer: The optimiser.
        scheduler: The learning-rate schedule, in optimiser steps.
        dataloader: Training batches: dicts of tensors.
        objective: The loss.
        settings: The rhythm.
        evaluate: Returns dev metrics without prefix ("accuracy", "loss", ...); None: no evaluation.
        start_epoch: Called with the epoch before its first batch; tells the sampler.
        seek: Called in a resumed epoch with the number of its batches already used and the "position" of the last one
            (an entry of the batch, a tensor of ints), where batches have one: the data goes on from there. None: the
            dataloader reads those batches again and drops them.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        dataloader: Any,
        objective: Objective,
        settings: LoopSettings,
        evaluate: Callable[[], dict[str, float]] | None = None,
        start_epoch: Callable[[int], None] | None = None,
        seek: Callable[[int, list[int]], None] | None = None,
    ):
        self.accelerator, self.model, self.optimizer, self.scheduler = accelerator, model, optimizer, scheduler
        self.dataloader, self.objective, self.settings = dataloader, objective, settings
        self.evaluate, self.start_epoch, self.seek = evaluate, start_epoch, seek
        self.state = TrainState()
        self.cost = TrainingCost(accelerator.unwrap_model(model, keep_torch_compile=False), objective.head_of_items)
        self.fingerprint = {
            "processes": accelerator.num_processes,
            "gradient_accumulation_steps": settings.gradient_accumulation_steps,
            "training steps": settings.total_steps,
            "max_grad_norm": settings.max_grad_norm,
            "metric_for_best_model": settings.metric_for_best_model if settings.keep_best else None,
            "early_stopping_patience": settings.early_stopping_patience,
            **settings.fingerprint,
        }
        self.log = RunLog(accelerator, settings.output_dir)
        # Losses, gradient norms and batches of steps not yet looked at: on a GPU, looking waits for the step to end.
        self._pending: tuple[int, Tensor, Tensor, list[dict[str, Tensor]]] | None = None
        self._lr = 0.0
        self._position: Tensor | None = None
        self._signals = StopSignals()
        # Whether any process wants to stop: known to all after the next step's exchange of counts.
        self._stopping = False
        self._deadline = math.inf
        self._saved_step: int | None = None
        # The step whose weights were evaluated last, by this process; 0: before training.
        self.evaluated_step: int | None = None
        try:
            self._has_length = len(dataloader) > 0
        except TypeError:  # a dataloader over a stream has __len__ and raises in it
            self._has_length = False

    def run(self) -> TrainState:
        """Trains to the last step, to early stopping, or for `max_train_minutes`; ends with the best weights where
        they are kept.

        Stopped by the clock, by SIGTERM or by Ctrl-C, it finishes the step (with the evaluation, where one is due) and
        saves a checkpoint; a second Ctrl-C stops at once.

        Returns:
            The final state.

        Raises:
            NonFiniteLossError: The loss or gradient norm became NaN or infinite. Checkpoints are from before that; the
                step's batches are saved beside them.
            TerminatedError: The process was sent SIGTERM. `session.open_session` adds how to go on.
            KeyboardInterrupt: Ctrl-C. Likewise.
            ValueError, OSError: A checkpoint cannot be read or written.
        """
        settings, state = self.settings, self.state
        if settings.resume_from_checkpoint:
            path = find_checkpoint(settings.resume_from_checkpoint, settings.output_dir)
            state = self.state = load_checkpoint(self.accelerator, path, settings.output_dir, self.fingerprint)
            self._lr = state.lr
            if self.accelerator.is_main_process:
                logger.info("going on from %s, step %d of %d", path, state.step, settings.total_steps)
        state.fingerprint = self.fingerprint
        self._deadline = time.monotonic() + 60 * (settings.max_train_minutes or math.inf)
        bar = progress_bar(
            self.accelerator,
            settings.disable_tqdm,
            total=settings.total_steps,
            initial=state.step,
            desc="Training",
            unit="step",
        )
        self.log.bar = bar
        try:
            with self._signals.watch():
                while state.step < settings.total_steps and not state.finished and not self._stopping:
                    self._run_epoch(bar)
                self._raise_if_signaled()
        finally:
            bar.close()
        if state.window_steps or self._pending is not None:
            self._log_window()
        if settings.keep_best and state.best_step is not None:
            load_weights(self.accelerator, self.model, Path(settings.output_dir) / BEST_MODEL_FILE)
        return state

    def has_current_scores(self) -> bool:
        """Whether the last evaluation was of the weights that `run` ended with: the last ones, or the best."""
        best = self.state.best_step if self.settings.keep_best else None
        return self.evaluated_step == (self.state.step if best is None else best)

    def _raise_if_signaled(self) -> None:
        # One process that was sent a signal ends them all; it may have come after the last step's exchange.
        came = [int(self._signals.number == number) for number in STOP_SIGNALS]
        came = self.accelerator.reduce(torch.tensor(came, device=self.accelerator.device), "sum").tolist()
        if not any(came):
            return
        if self.state.step and self._saved_step != self.state.step:
            self._save_checkpoint()
        name, error = ("SIGTERM", TerminatedError) if came[0] else ("Ctrl-C", KeyboardInterrupt)
        raise error(
            f"{name}: stopped {f'after step {self.state.step}' if self.state.step else 'before the first step'}"
        )

    def _run_epoch(self, bar: Any) -> None:
        settings, state = self.settings, self.state
        if self.start_epoch is not None:
            self.start_epoch(state.epoch)
        loader = self._remaining_batches()
        self.model.train()
        empty = True
        clock = time.perf_counter()
        for group, is_last in _group_batches(loader, settings.gradient_accumulation_steps):
            empty = False
            self._step(group)
            state.batch_in_epoch += len(group)
            if is_last:
                state.epoch, state.batch_in_epoch = state.epoch + 1, 0
            log_is_due = state.step % self.settings.logging_steps == 0
            ends = state.step >= settings.total_steps
            if log_is_due or ends or self._evaluation_is_due(is_last) or self._checkpoint_is_due(is_last):
                self._check_last_loss()  # waits for the step, whose time that is
            state.train_seconds += time.perf_counter() - clock
            if log_is_due:
                self._log_window()
            bar.update()
            self._maybe_evaluate(is_last)
            self._maybe_checkpoint(is_last)
            clock = time.perf_counter()
            if state.step >= settings.total_steps or state.finished or self._stopping:
                return
        if empty:
            raise ValueError("the training data gave no batch")

    def _remaining_batches(self) -> Iterable[dict[str, Tensor]]:
        done = self.state.batch_in_epoch
        if done and self.seek is not None and self.state.position is not None:
            self.seek(done, self.state.position)
            return self.dataloader
        return skip_first_batches(self.dataloader, done) if done else self.dataloader

    def _step(self, group: list[dict[str, Tensor]]) -> None:
        """One optimiser step: the gradient of the mean loss over all items of all batches on all processes."""
        accelerator, state = self.accelerator, self.state
        own_items = [self.objective.count(batch) for batch in group]
        examples = [self.objective.examples(batch) for batch in group]
        # A batch without examples only keeps this process in step.
        costs = [
            self.cost.count(batch, counted) if used else (0, 0)
            for batch, counted, used in zip(group, own_items, examples, strict=True)
        ]
        counts = torch.tensor(
            [
                sum(own_items),
                sum(examples),
                *(sum(column) for column in zip(*costs, strict=True)),
                int(self._signals.number is not None or time.monotonic() >= self._deadline),
            ],
            device=accelerator.device,
        )
        items, examples, tokens, flops, stopping = accelerator.reduce(counts, "sum").tolist()
        # That has waited for the step before on any device: its loss costs nothing to look at now.
        self._check_last_loss()
        self._stopping = stopping > 0
        state.examples += examples
        state.tokens += tokens
        state.flops += flops
        loss_sum = torch.zeros((), device=accelerator.device)
        for i, batch in enumerate(group):
            # Only the last backward exchanges gradients; DDP averages them over processes, which the factor undoes.
            with accelerator.no_sync(self.model) if i < len(group) - 1 else nullcontext():
                loss = self.objective.loss_sum(self.model, batch)
                accelerator.backward(loss * (accelerator.num_processes / max(items, 1)))
                loss_sum += loss.detach()
        limit = self.settings.max_grad_norm or math.inf
        norm = accelerator.clip_grad_norm_(self.model.parameters(), limit)
        self._lr = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        # By the loss scaler of fp16; fused AdamW skips within its kernel, unseen, and the schedule counts such a step.
        if not accelerator.optimizer_step_was_skipped:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self._position = group[-1].get("position")
        state.step += 1
        self._pending = state.step, accelerator.reduce(loss_sum, "sum") / max(items, 1), norm, group

    def _check_last_loss(self) -> None:
        """Counts the loss of the step before, and stops the run if it is no number."""
        if self._pending is None:
            return
        (step, loss, norm, group), self._pending = self._pending, None
        value, norm_value = float(loss), float(norm)
        # Under fp16 an infinite gradient is how the loss scaler finds its scale; it skips that step.
        bad = "loss" if not math.isfinite(value) else "gradient norm" if not math.isfinite(norm_value) else None
        if bad == "loss" or (bad and not self._scaler_can_answer()):
            shown = value if bad == "loss" else norm_value
            saved = save_bad_batch(self.accelerator, group, self.settings.output_dir, step)
            raise NonFiniteLossError(
                f"the {bad} became {shown} at step {step}: training stopped; the step's batches {saved}"
                f"{describe_last_checkpoint(self.settings.output_dir)}. Try a lower --learning_rate, more warm-up or "
                "--mixed_precision no"
            )
        self.state.loss_total += value
        self.state.window_loss += value
        self.state.window_steps += 1

    def _scaler_can_answer(self) -> bool:
        scaler = self.accelerator.scaler
        return scaler is not None and scaler.get_scale() >= MIN_LOSS_SCALE

    def _log_window(self) -> None:
        state = self.state
        self._check_last_loss()
        self.log.write(
            {
                "step": state.step,
                "loss": state.window_loss / state.window_steps,
                "lr": float(self._lr),  # Adafactor's own is a tensor
                "epoch": round(self.epochs_done(), 4),
                "time": round(state.train_seconds, 3),
                "tokens_per_second": _compute_rate(
                    state.tokens - state.window_tokens, state.train_seconds - state.window_begin
                ),
            }
        )
        state.window_loss, state.window_steps = 0.0, 0
        state.window_tokens, state.window_begin = state.tokens, state.train_seconds

    def results(self, samples: int, unit: str = "samples") -> dict[str, Any]:
        """What every script reports of its training.

        Args:
            samples: Training examples there are.
            unit: What an example is called.

        Returns:
            "train_loss" (the mean over all steps), "epoch", "steps", "train_samples", "train_runtime" (seconds in
            training steps, without evaluation and checkpoints), "train_<unit>_per_second", "train_tokens" (what the
            model was given, without padding, a decoder's targets with it), "train_tokens_per_second",
            "train_tflops_per_second", "train_mfu" and "peak_tflops" (see `throughput`; the last two where the
            settings have a `peak_tflops`), "best_step" and "num_parameters".
        """
        state = self.state
        return {
            "train_loss": state.loss_total / state.step if state.step else None,
            "epoch": round(self.epochs_done(), 4),
            "steps": state.step,
            "train_samples": samples,
            "train_runtime": round(state.train_seconds, 3),
            f"train_{unit}_per_second": _compute_rate(state.examples, state.train_seconds),
            "train_tokens": state.tokens,
            "train_tokens_per_second": _compute_rate(state.tokens, state.train_seconds),
            **compute_utilization(self.accelerator, state.flops, state.train_seconds, self.settings.peak_tflops),
            "best_step": state.best_step,
            "num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
        }

    def epochs_done(self) -> float:
        """Epochs trained, with the fraction of the current one where its length is known."""
        return self.state.epoch + (self.state.batch_in_epoch / len(self.dataloader) if self._has_length else 0.0)

    def _is_due(self, every: int | str | None, epoch_ended: bool) -> bool:
        return self.state.step % every == 0 if isinstance(every, int) else every == "epoch" and epoch_ended

    def _evaluation_is_due(self, epoch_ended: bool) -> bool:
        last = self.state.step >= self.settings.total_steps
        return self.evaluate is not None and (self._is_due(self.settings.eval_steps or "epoch", epoch_ended) or last)

    def _checkpoint_is_due(self, epoch_ended: bool) -> bool:
        return self._is_due(self.settings.checkpointing_steps, epoch_ended) or self._stopping

    def _maybe_evaluate(self, epoch_ended: bool) -> None:
        settings, state = self.settings, self.state
        if self.evaluate is None or not self._evaluation_is_due(epoch_ended):
            return
        self._check_last_loss()
        self.model.eval()
        metrics = self.evaluate()
        self.model.train()
        self.evaluated_step = state.step
        self.log.write(
            {
                "step": state.step,
                "epoch": round(self.epochs_done(), 4),
                **{f"eval_{key}": value for key, value in metrics.items()},
            }
        )
        if not settings.keep_best:
            return
        name = (settings.metric_for_best_model or "").removeprefix("eval_")
        if name not in metrics:
            raise ValueError(f"--metric_for_best_model {name!r}: the dev metrics are {', '.join(metrics)}")
        self._remember_best(metrics[name])

    def _remember_best(self, value: float) -> None:
        settings, state = self.settings, self.state
        sign = 1 if settings.greater_is_better else -1
        if not math.isnan(value) and (state.best_metric is None or sign * value > sign * state.best_metric):
            state.best_metric, state.best_step, state.bad_evaluations = value, state.step, 0
            save_best_weights(self.accelerator, self.model, settings.output_dir)
            return
        state.bad_evaluations += 1
        if settings.early_stopping_patience is not None and state.bad_evaluations >= settings.early_stopping_patience:
            state.finished = True

    def _maybe_checkpoint(self, epoch_ended: bool) -> None:
        if self._checkpoint_is_due(epoch_ended):
            self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        self._check_last_loss()
        if self._position is not None:
            self.state.position = self._position.tolist()
        self.state.lr = float(self._lr)
        save_checkpoint(self.accelerator, self.state, self.settings.output_dir, self.settings.save_total_limit)
        self._saved_step = self.state.step


def _compute_rate(amount: float, seconds: float) -> float | None:
    return round(amount / seconds, 2) if seconds else None


def _group_batches(batches: Iterable[dict], size: int) -> Iterator[tuple[list[dict], bool]]:
    """Yields lists of `size` batches (the last may be shorter), each with whether it is the last."""
    iterator = iter(batches)
    group = list(itertools.islice(iterator, size))
    while group:
        following = list(itertools.islice(iterator, size))
        yield group, not following
        group = following
