"""The training loop shared by all training commands. It also measures throughput and model FLOPs utilization.

Accelerate distributes the training, and the task's objective computes the loss. Model FLOPs utilization is defined in
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
from ...modeling.attention.model_mixin import AttnVariantModelMixin
from ...modeling.mechanisms.clipped_softmax import set_clipping_progress
from ...progress import progress_bar
from . import checkpoints
from .models import find_variant_class
from .optimization import Objective
from .session import RunLog
from .settings import TrainingSettings, check_metric_for_best_model, get_warmup_steps, is_greater_better

logger = logging.getLogger(__name__)


class TrainingCostCounter:
    """Counts the tokens in a batch and the FLOPs required to train on it.

    Args:
        model: The model to train, without wrappers. If this package does not support its architecture, the reported
            FLOPs are 0.
        applies_head_to_items_only: Whether the layers after the base model process only the counted items (such as
            masked tokens) instead of all tokens.

    Attributes:
        flops_per_token: The forward FLOPs per token in the encoder and in the decoder, as returned by
            `_compute_flops_per_token`.
        passes: The ratio of the FLOPs in a training step to the FLOPs in a forward pass.
        head: The forward FLOPs in the head per counted item. 0 unless `applies_head_to_items_only` is set.
    """

    def __init__(self, model: nn.Module, applies_head_to_items_only: bool = False):
        config = getattr(model, "config", None)
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.flops_per_token = _compute_flops_per_token(model, config)
        # Computing the gradients of the activations costs as much as a forward pass. Computing the weight gradients of
        # the trained layers costs as much as a forward pass through these layers. A frozen head is counted as if
        # gradients passed through it.
        self.passes = 2 + _compute_trainable_flops_share(model, config)
        self.head = 0
        if applies_head_to_items_only and self.flops_per_token:
            self.head = sum(2 * layer.weight.numel() for layer in _find_head_layers(model))
        if self.head:
            part = next(iter(self.flops_per_token))  # a masked language model has only an encoder
            per_token, flops_per_attended_key = self.flops_per_token[part]
            self.flops_per_token[part] = per_token - self.head, flops_per_attended_key

    def count(self, batch: dict[str, Tensor], num_items: int) -> tuple[int, int]:
        """Return the number of tokens in a batch (without padding) and the FLOPs required to train on the batch.

        Args:
            batch: A batch with "input_ids" or "attention_mask", whose shape is [b, n], or [b, c, n] with c choices.
                For encoder-decoder models, it also contains "labels" [b, t], which are negative for padding.
            num_items: The number of items in the batch that the objective counts.
        """
        if "attention_mask" in batch:
            lengths = batch["attention_mask"].sum(-1).flatten().tolist()
        elif "input_ids" in batch:
            lengths = [batch["input_ids"].shape[-1]] * len(batch["input_ids"])
        else:
            return 0, 0
        labels = batch.get("labels")
        has_targets = self.is_encoder_decoder and labels is not None and labels.ndim == 2
        targets = (labels >= 0).sum(-1).tolist() if has_targets and labels is not None else lengths
        tokens = sum(lengths) + (sum(targets) if has_targets else 0)
        flops = self.head * num_items
        for n, t in zip(lengths, targets, strict=True):
            for part, (flops_per_token, (flops_per_key, per_source_key)) in self.flops_per_token.items():
                length = n if part == "encoder" else t
                flops += length * (flops_per_token + flops_per_key * length + per_source_key * n)
        return tokens, round(self.passes * flops)


def _compute_flops_per_token(model: nn.Module, config: Any) -> dict[str, tuple[int, tuple[int, int]]]:
    """Compute the forward FLOPs per token in the encoder and the decoder.

    Returns:
        A dictionary with the keys "encoder" and "decoder", or only one of them if the model lacks the other part. The
        first item of each value is the number of FLOPs per token without attention scores. The second item is a pair
        with the FLOPs per token and key in self-attention and in cross-attention. The dictionary is empty if this
        package does not support the architecture.
    """
    from ...inspection.costs import count_flops_per_token, make_variant_config

    if config is None:
        return {}
    try:
        with torch.device("meta"):
            meta_model = find_variant_class(model)(make_variant_config(config.to_dict()))
    except ValueError:
        return {}
    no_keys, one_key, one_source_key = (
        count_flops_per_token(meta_model, *lengths) for lengths in ((0, 0), (1, 0), (0, 1))
    )
    return {
        part: (no_keys[part], (one_key[part] - no_keys[part], one_source_key[part] - no_keys[part]))
        for part in no_keys
    }


def _find_head_layers(model: Any) -> list[nn.Linear]:
    """Find the linear layers outside the base model that process every token."""
    from ...inspection.costs import runs_once_per_sequence

    base = {id(module) for module in model.base_model.modules()}
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [module for name, module in linears if id(module) not in base and not runs_once_per_sequence(model, name)]


def _compute_trainable_flops_share(model: nn.Module, config: Any) -> float:
    """Compute the share of the linear-layer FLOPs that is spent in layers with trainable weights."""
    try:
        module_runs = find_variant_class(model).count_module_runs
    except ValueError:
        module_runs = AttnVariantModelMixin.count_module_runs
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    runs = trained = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            size = module.weight.numel() * (module_runs(config, name.removeprefix(prefix)) if config else 1)
            runs += size
            trained += size if module.weight.requires_grad else 0
    return trained / max(runs, 1)


def compute_flops_utilization(
    accelerator: Accelerator, flops: int, seconds: float, peak_tflops: float | None
) -> dict[str, float]:
    """Compute the training FLOPs per second and the model FLOPs utilization.

    Args:
        accelerator: The accelerator of the run.
        flops: The total training FLOPs on all processes.
        seconds: The training time in seconds.
        peak_tflops: The peak performance of a single device in TFLOPS, or None if it is unknown.

    Returns:
        A dictionary with "train_tflops_per_second" (summed over all processes) and, if `peak_tflops` is set,
        "train_mfu" and "peak_tflops". The dictionary is empty if no FLOPs were counted.
    """
    if not (flops and seconds):
        return {}
    figures = {"train_tflops_per_second": flops / seconds / 1e12}
    if peak_tflops is not None:
        figures["train_mfu"] = figures["train_tflops_per_second"] / (peak_tflops * accelerator.num_processes)
        figures["peak_tflops"] = peak_tflops
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


# If gradients are not finite although the fp16 loss scale is lower than this, the loss scale is not the cause.
MIN_LOSS_SCALE = 1.0


class TrainingLoop:
    """Trains a prepared model. `run` must be called once on every process.

    Args:
        accelerator: The accelerator. It must be created with `gradient_accumulation_steps=1` (because the loop
            accumulates gradients) and `step_scheduler_with_optimizer=False`.
        model: The model. Like the next three arguments, it must be prepared by the accelerator.
        optimizer: The optimizer.
        scheduler: The learning-rate schedule, measured in optimizer steps.
        dataloader: The training batches, which are dictionaries of tensors.
        objective: The training objective.
        settings: The settings of the run, such as the intervals for logging, evaluating and saving.
        total_steps: The number of optimizer steps.
        default_metric: The dev metric that selects the best weights if the settings do not specify a metric.
        fingerprint: Values that must be the same in a resumed run, in addition to the settings (see `TrainState`).
        eval_steps: The number of steps between evaluations, if it differs from the settings.
        evaluate: A function that returns the dev metrics without a prefix ("accuracy", "loss", ...). If None, the
            model is not evaluated.
        start_epoch: A function that is called with the epoch number before the first batch of each epoch, for example
            to update the sampler.
        seek: A function that lets a resumed run continue in the middle of an epoch. It is called with the number of
            batches already used and the "position" of the last batch (an integer tensor in the batch), and must ensure
            that the dataloader continues with the next batch. If None, the batches already used are read again and
            skipped.

    Example:
        ```python
        loop = TrainingLoop(accelerator, model, optimizer, scheduler, dataloader, objective, settings, total_steps=100)
        state = loop.run()
        results = loop.get_results(samples=len(dataset))
        ```
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        dataloader: Any,
        objective: Objective,
        settings: TrainingSettings,
        total_steps: int,
        default_metric: str = "loss",
        fingerprint: dict[str, Any] | None = None,
        eval_steps: int | None = None,
        evaluate: Callable[[], dict[str, float]] | None = None,
        start_epoch: Callable[[int], None] | None = None,
        seek: Callable[[int, list[int]], None] | None = None,
    ):
        self.accelerator, self.model, self.optimizer, self.scheduler = accelerator, model, optimizer, scheduler
        self.dataloader, self.objective, self.settings = dataloader, objective, settings
        self.evaluate, self.start_epoch, self.seek = evaluate, start_epoch, seek
        self.total_steps, self.eval_interval = total_steps, eval_steps or settings.eval_steps or "epoch"
        self.best_metric = (settings.metric_for_best_model or default_metric).removeprefix("eval_")
        self.state = checkpoints.TrainState()
        self.cost = TrainingCostCounter(
            accelerator.unwrap_model(model, keep_torch_compile=False), objective.applies_head_to_items_only
        )
        self.fingerprint = {
            "processes": accelerator.num_processes,
            "gradient_accumulation_steps": settings.gradient_accumulation_steps,
            "training steps": total_steps,
            "max_grad_norm": settings.max_grad_norm,
            "metric_for_best_model": self.best_metric if settings.keeps_best_weights else None,
            "early_stopping_patience": settings.early_stopping_patience,
            **(fingerprint or {}),
            **settings.get_resume_fingerprint(settings.keeps_best_weights),
            "warm-up steps": get_warmup_steps(settings, total_steps),
        }
        self.log = RunLog(accelerator, settings.output_dir)
        # The number, loss and gradient norm of the last step. Reading the loss from a GPU would wait for the step to
        # finish, so it is deferred.
        self._pending: tuple[int, Tensor, Tensor] | None = None
        self._lr = 0.0
        self._position: Tensor | None = None
        self._signals = checkpoints.StopSignalRecorder()
        # True if any process should stop. The processes exchange this information with the counts of the next step.
        self._stopping = False
        self._deadline = math.inf
        self._saved_step: int | None = None
        # The last step after which this process evaluated the weights. The value is 0 for an evaluation before
        # training.
        self.evaluated_step: int | None = None

    def run(self) -> checkpoints.TrainState:
        """Train the model, and load the best weights at the end if they were saved.

        Training ends after the last step, with early stopping, or after `max_train_minutes`. If the time limit is
        reached or if SIGTERM or Ctrl-C is received, the loop finishes the current step, evaluates the model if an
        evaluation is due, and saves a checkpoint. A second Ctrl-C stops the run immediately.

        Returns:
            The final progress of the run.

        Raises:
            NonFiniteLossError: If the loss or the gradient norm became NaN or infinite. The batches of the failed step
                are saved in the output folder.
            TerminatedError: If the process received SIGTERM. `session.open_session` adds instructions for resuming.
            KeyboardInterrupt: If Ctrl-C was pressed. `session.open_session` adds instructions for resuming.
            ValueError, OSError: If a checkpoint cannot be read or written.
        """
        settings, state = self.settings, self.state
        if settings.resume_from_checkpoint:
            path = checkpoints.find_checkpoint(settings.resume_from_checkpoint, settings.output_dir)
            state = self.state = checkpoints.load_checkpoint(
                self.accelerator, path, settings.output_dir, self.fingerprint
            )
            self._lr = state.lr
            if self.accelerator.is_main_process:
                logger.info("Resuming from %s at step %d of %d.", path, state.step, self.total_steps)
        state.fingerprint = self.fingerprint
        self._deadline = time.monotonic() + 60 * (settings.max_train_minutes or math.inf)
        disable = settings.disable_tqdm or not self.accelerator.is_main_process
        options = {"total": self.total_steps, "initial": state.step, "desc": "Training", "unit": "step"}
        self.log.bar = bar = progress_bar(disable=disable, **options)
        try:
            with self._signals.record_signals():
                while state.step < self.total_steps and not state.finished and not self._stopping:
                    self._run_epoch(bar)
                self._raise_if_signaled()
        finally:
            bar.close()
            set_clipping_progress(self.model, 1.0)
        if state.window_steps or self._pending is not None:
            self._log_progress()
        if settings.keeps_best_weights and state.best_step is not None:
            checkpoints.load_weights(self.accelerator, self.model, Path(settings.output_dir) / BEST_MODEL_FILE)
        return state

    def has_evaluated_final_weights(self) -> bool:
        """Return whether the last evaluation used the final weights, which are either the last or the best weights."""
        best = self.state.best_step if self.settings.keeps_best_weights else None
        return self.evaluated_step == (self.state.step if best is None else best)

    def _raise_if_signaled(self) -> None:
        """Save a checkpoint and raise an error on all processes if any process received a stop signal."""
        # The signal may have been received after the processes exchanged counts in the last step.
        counts = [int(self._signals.number == number) for number in checkpoints.STOP_SIGNALS]
        counts = self.accelerator.reduce(torch.tensor(counts, device=self.accelerator.device), "sum").tolist()
        if not any(counts):
            return
        if self.state.step and self._saved_step != self.state.step:
            self._save_checkpoint()
        name, error = ("SIGTERM", TerminatedError) if counts[0] else ("Ctrl-C", KeyboardInterrupt)
        point = f"after step {self.state.step}" if self.state.step else "before the first step"
        raise error(f"{name}: Training stopped {point}.")

    def _run_epoch(self, bar: Any) -> None:
        """Train on the remaining batches of an epoch, and log, evaluate and save at the configured intervals."""
        settings, state = self.settings, self.state
        if self.start_epoch is not None:
            self.start_epoch(state.epoch)
        loader = self._get_remaining_batches()
        self.model.train()
        is_empty = True
        clock = time.perf_counter()
        for group, is_last in _group_batches(loader, settings.gradient_accumulation_steps):
            is_empty = False
            if settings.clipping_ratio is not None:
                set_clipping_progress(self.model, min(1.0, state.step / (settings.clipping_ratio * self.total_steps)))
            self._run_optimizer_step(group)
            state.batch_in_epoch += len(group)
            if is_last:
                state.epoch, state.batch_in_epoch = state.epoch + 1, 0
            is_last_step = state.step >= self.total_steps
            log_is_due = state.step % settings.logging_steps == 0
            checkpoint_is_due = self._stopping or self._is_interval_end(settings.checkpointing_steps, is_last)
            evaluation_is_due = is_last_step or self._is_interval_end(self.eval_interval, is_last)
            if log_is_due or evaluation_is_due or checkpoint_is_due:
                self._record_last_loss()  # waits for the step to finish, so that its full time is measured
            state.train_seconds += time.perf_counter() - clock
            if log_is_due:
                self._log_progress()
            bar.update()
            if evaluation_is_due and self.evaluate is not None:
                self._log_evaluation(self.evaluate)
            if checkpoint_is_due:
                self._save_checkpoint()
            clock = time.perf_counter()
            if is_last_step or state.finished or self._stopping:
                return
        if is_empty:
            raise ValueError("The training data must contain at least one batch, got none.")

    def _get_remaining_batches(self) -> Iterable[dict[str, Tensor]]:
        """Return the batches of the current epoch that have not been used yet."""
        done = self.state.batch_in_epoch
        if done and self.seek is not None and self.state.position is not None:
            self.seek(done, self.state.position)
            return self.dataloader
        return skip_first_batches(self.dataloader, done) if done else self.dataloader

    def _run_optimizer_step(self, batches: list[dict[str, Tensor]]) -> None:
        """Run one optimizer step on the mean loss over all items in the batches of all processes."""
        accelerator, state = self.accelerator, self.state
        local_items = [self.objective.count(batch) for batch in batches]
        examples = [self.objective.examples(batch) for batch in batches]
        # A batch without examples only serves to keep the processes synchronized.
        costs = [
            self.cost.count(batch, count) if used else (0, 0)
            for batch, count, used in zip(batches, local_items, examples, strict=True)
        ]
        stops = int(self._signals.number is not None or time.monotonic() >= self._deadline)
        counts = [sum(local_items), sum(examples), *(sum(column) for column in zip(*costs, strict=True)), stops]
        totals = accelerator.reduce(torch.tensor(counts, device=accelerator.device), "sum")
        items, examples, tokens, flops, stopping = totals.tolist()
        # `reduce` has already waited for the previous step, so reading the loss of that step takes no extra time.
        self._record_last_loss()
        self._stopping = stopping > 0
        state.examples += examples
        state.tokens += tokens
        state.flops += flops
        loss_sum = torch.zeros((), device=accelerator.device)
        for i, batch in enumerate(batches):
            # Gradients are exchanged only in the last backward pass. DDP averages them over the processes, and the
            # factor `num_processes` turns the average into a sum.
            with accelerator.no_sync(self.model) if i < len(batches) - 1 else nullcontext():
                loss = self.objective.loss_sum(self.model, batch)
                accelerator.backward(loss * (accelerator.num_processes / max(items, 1)))
                loss_sum += loss.detach()
        limit = self.settings.max_grad_norm or math.inf
        norm = accelerator.clip_grad_norm_(self.model.parameters(), limit)
        self._lr = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        # The fp16 loss scaler can skip a step. Fused AdamW skips the step inside its kernel, which cannot be observed.
        # In this case, the schedule also counts the skipped step.
        if not accelerator.optimizer_step_was_skipped:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self._position = batches[-1].get("position")
        state.step += 1
        self._pending = state.step, accelerator.reduce(loss_sum, "sum") / max(items, 1), norm

    def _record_last_loss(self) -> None:
        """Add the loss of the last step to the totals, or raise `NonFiniteLossError` if it is not finite."""
        if self._pending is None:
            return
        (step, loss, norm), self._pending = self._pending, None
        values = {"loss": float(loss)}
        # With fp16, gradients can be infinite until the loss scaler has found its scale. These steps are skipped.
        scaler = self.accelerator.scaler
        if scaler is None or scaler.get_scale() < MIN_LOSS_SCALE:
            values["gradient norm"] = float(norm)
        for name, value in values.items():
            if not math.isfinite(value):
                last = checkpoints.describe_last_checkpoint(self.settings.output_dir)
                raise NonFiniteLossError(
                    f"The {name} became {value} at step {step}, so training was stopped.{last} Try a lower "
                    "--learning_rate, a longer warm-up or --mixed_precision no."
                )
        self.state.loss_total += values["loss"]
        self.state.window_loss += values["loss"]
        self.state.window_steps += 1

    def _log_progress(self) -> None:
        """Log the mean loss and the throughput since the last log record."""
        state = self.state
        self._record_last_loss()
        tokens, seconds = state.tokens - state.window_tokens, state.train_seconds - state.window_begin
        record = {
            "step": state.step,
            "loss": state.window_loss / state.window_steps,
            "lr": float(self._lr),  # a tensor if Adafactor computes the learning rate
            "epoch": round(self.compute_finished_epochs(), 4),
            "time": round(state.train_seconds, 3),
            "tokens_per_second": _compute_rate(tokens, seconds),
        }
        self.log.write(record)
        state.window_loss, state.window_steps = 0.0, 0
        state.window_tokens, state.window_begin = state.tokens, state.train_seconds

    def get_results(self, samples: int, unit: str = "samples") -> dict[str, Any]:
        """Return the training results that all commands report.

        Args:
            samples: The number of training examples.
            unit: The plural noun for examples in the keys of the results.

        Returns:
            A dictionary with "train_loss" (the mean over all steps), "epoch", "steps", "train_samples",
            "train_runtime" (the seconds spent in training steps, without evaluations and checkpoints),
            "train_<unit>_per_second", "train_tokens" (without padding, but including decoder targets),
            "train_tokens_per_second", "train_tflops_per_second", "train_mfu" and "peak_tflops" (see
            `compute_flops_utilization`), "best_step" and "num_parameters".
        """
        state = self.state
        return {
            "train_loss": state.loss_total / state.step if state.step else None,
            "epoch": round(self.compute_finished_epochs(), 4),
            "steps": state.step,
            "train_samples": samples,
            "train_runtime": round(state.train_seconds, 3),
            f"train_{unit}_per_second": _compute_rate(state.examples, state.train_seconds),
            "train_tokens": state.tokens,
            "train_tokens_per_second": _compute_rate(state.tokens, state.train_seconds),
            **compute_flops_utilization(self.accelerator, state.flops, state.train_seconds, self.settings.peak_tflops),
            "best_step": state.best_step,
            "num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
        }

    def compute_finished_epochs(self) -> float:
        """Return the number of finished epochs, plus the fraction of the current epoch if its length is known."""
        try:
            return self.state.epoch + self.state.batch_in_epoch / max(len(self.dataloader), 1)
        except TypeError:  # raised by the `__len__` of a stream's dataloader
            return float(self.state.epoch)

    def _is_interval_end(self, interval: int | str | None, epoch_ended: bool) -> bool:
        """Return whether the current step is at the end of an interval.

        The interval is a number of steps or "epoch". If it is None, this function always returns False.
        """
        if isinstance(interval, int):
            return self.state.step % interval == 0
        return interval == "epoch" and epoch_ended

    def _log_evaluation(self, evaluate: Callable[[], dict[str, float]]) -> None:
        """Evaluate, log the metrics, and save the weights if they are the best so far or check whether to stop."""
        settings, state = self.settings, self.state
        set_clipping_progress(self.model, 1.0)  # a saved model also has the configured values
        self.model.eval()
        metrics = evaluate()
        self.model.train()
        self.evaluated_step = state.step
        epoch = round(self.compute_finished_epochs(), 4)
        self.log.write(
            {"step": state.step, "epoch": epoch, **{f"eval_{key}": value for key, value in metrics.items()}}
        )
        if not settings.keeps_best_weights:
            return
        check_metric_for_best_model(self.best_metric, list(metrics))
        value, greater_is_better = metrics[self.best_metric], settings.greater_is_better
        if greater_is_better is None:
            greater_is_better = is_greater_better(self.best_metric)
        best = state.best_metric
        is_better = best is None or (value > best if greater_is_better else value < best)
        if is_better and not math.isnan(value):
            state.best_metric, state.best_step, state.bad_evaluations = value, state.step, 0
            checkpoints.save_best_weights(self.accelerator, self.model, settings.output_dir)
            return
        state.bad_evaluations += 1
        state.finished = state.bad_evaluations >= (settings.early_stopping_patience or math.inf)

    def _save_checkpoint(self) -> None:
        """Save a checkpoint, including the loss and the data position of the last step."""
        self._record_last_loss()
        if self._position is not None:
            self.state.position = self._position.tolist()
        self.state.lr = float(self._lr)
        checkpoints.save_checkpoint(
            self.accelerator, self.state, self.settings.output_dir, self.settings.save_total_limit
        )
        self._saved_step = self.state.step


def _compute_rate(amount: float, seconds: float) -> float | None:
    """Return the amount per second, or None if no time was measured."""
    return round(amount / seconds, 2) if seconds else None


def _group_batches(batches: Iterable[dict], size: int) -> Iterator[tuple[list[dict], bool]]:
    """Yield lists of `size` batches, each with a flag that is True for the last list. The last list may be shorter."""
    iterator = iter(batches)
    group = list(itertools.islice(iterator, size))
    while group:
        following = list(itertools.islice(iterator, size))
        yield group, not following
        group = following
