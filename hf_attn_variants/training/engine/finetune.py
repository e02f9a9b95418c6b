"""The fine-tuning procedure shared by all tasks, and the base class for the task-specific parts."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import NonFiniteLossError
from ...files import CURVES_FILE, LOG_FILE, RESULTS_NAME, atomic_write, save_plot
from ...model_folder import ModelHistory
from ...modeling.mechanisms.clipped_softmax import ClippedSoftmax
from .dataloaders import EpochSampler, EvalBatches, TextDataset, TrainingBatchSource, create_dataloader
from .dataset_splits import warn_about_max_length
from .loop import TrainingLoop
from .models import get_model_name
from .optimization import Objective, prepare_training
from .session import (
    PREDICTIONS_PREFIX,
    make_curves_figure,
    open_session,
    read_log,
    save_model,
    save_results,
    show_progress,
    start_run,
)
from .settings import TrainingSettings, count_training_steps


def _check_outputs_finite(outputs: Sequence[Tensor], name: str) -> None:
    """Raise `NonFiniteLossError` if the outputs [rows, ...] contain NaN or plus infinity."""
    bad_parts = [part.isnan() | part.isposinf() for part in outputs]
    rows = torch.stack([part.flatten(1).any(1) if part.dim() > 1 else part for part in bad_parts]).any(0)
    if num_invalid := int(rows.sum()):
        raise NonFiniteLossError(
            f"The model outputs are NaN or infinite for {num_invalid} of {len(rows)} rows in {name}, so they cannot "
            "be scored. Try --mixed_precision no. If that does not help, the weights contain NaN values."
        )


SettingsT = TypeVar("SettingsT", bound=TrainingSettings)


class FineTuningTask(ABC, Generic[SettingsT]):
    """Base class for the task-specific parts of a fine-tuning run.

    `__init__` loads the configuration, the tokenizer and the data, so that errors in them are reported before the
    model is loaded. `fine_tune` then calls the methods in this order: `load_model` (which may set `rows`),
    `make_training_batches`, `compute_total_steps`, `prepare_evaluation`, `make_objective`, the fingerprint methods,
    `before_training`, `after_training`, and finally the methods for results and predictions.

    Attributes:
        settings: The settings of the run.
        accelerator: The accelerator of the run.
        model: The prepared model. `fine_tune` sets it before it calls `prepare_evaluation`.
        metrics: The dev metrics from the last evaluation, without the "eval_" prefix.
        eval_seconds: The duration of the last evaluation in seconds.
        tokenizer: The tokenizer, which is saved with the model.
        rows: The training examples by index. Empty if the run only evaluates, and not required if the task overrides
            `make_training_batches`.
        collate: A function that combines a list of rows into a batch, which is a dictionary of tensors.
        main_metric: The dev metric that selects the best weights if the settings do not specify a metric.
        shown_metrics: The dev metrics to plot and print if the results contain them.
        unit: The plural noun for examples in the results.
        name: The name of the task in plot titles and printed scores.

    Example:
        ```python
        class WeightedFineTuning(ClassificationFineTuning):
            def make_objective(self):
                return make_classification_objective(weights=torch.tensor([1.0, 3.0]))


        results = fine_tune(WeightedFineTuning, settings)
        ```
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    rows: Any
    collate: Callable[[list], dict[str, Tensor]]
    main_metric: str
    shown_metrics: Sequence[str]
    unit = "samples"
    name: str

    def __init__(self, settings: SettingsT, accelerator: Accelerator):
        self.settings, self.accelerator = settings, accelerator
        self.metrics: dict[str, float] = {}
        self.eval_seconds = 0.0
        warn_about_max_length(settings)

    @abstractmethod
    def load_model(self) -> PreTrainedModel:
        """Return the model to train. The random seed of the run has already been set."""

    @abstractmethod
    def make_objective(self) -> Objective:
        """Return the training objective."""

    @abstractmethod
    def prepare_evaluation(self) -> bool:
        """Prepare the dev data, and return whether the run has dev data."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Evaluate the model on the dev data, and return "loss" and other metrics without the "eval_" prefix."""

    def run_evaluation(self) -> dict[str, float]:
        """Evaluate the model on the dev data, and store the metrics and the duration."""
        start = time.perf_counter()
        self.metrics = self.evaluate()
        self.eval_seconds = time.perf_counter() - start
        return dict(self.metrics)

    def make_eval_batches(self, rows: Any, lengths: Sequence[int]) -> EvalBatches:
        """Create batches for evaluation or prediction, with the longest rows first.

        This order reduces padding, and causes the run to fail immediately if memory is insufficient.
        """
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        options: Any = {"batch_size": self.settings.per_device_eval_batch_size, "collate_fn": self.collate}
        loader = create_dataloader(Subset(rows, order), self.settings.dataloader_num_workers, **options)
        return self.accelerator.prepare(loader), order

    @torch.no_grad()
    def run_model_on_rows(
        self, batches: EvalBatches, compute_outputs: Callable[[dict[str, Tensor]], tuple[Tensor, ...]], name: str
    ) -> list[np.ndarray]:
        """Run the model on all rows of the batches from `make_eval_batches`.

        Args:
            batches: The batches and the order of their rows.
            compute_outputs: A function that maps a batch to one or more tensors [b, ...]. All dimensions except b must
                be the same for all batches.
            name: The name of the data in the progress bar and in messages.

        Returns:
            One array [rows, ...] per tensor, with the rows in their original order.

        Raises:
            NonFiniteLossError: If an output is NaN or plus infinity. Without this check, the first class or word would
                be scored as the prediction. Minus infinity is allowed because it marks excluded choices.
        """
        self.model.eval()
        loader, order = batches
        gathered: list[Any] = []
        for batch in show_progress(self.accelerator, loader, f"Running {name}"):
            # `gather_for_metrics` drops the rows that were repeated to fill the last batch on each process.
            gathered.append([part.cpu() for part in self.accelerator.gather_for_metrics(compute_outputs(batch))])
        parts = [torch.cat(tensors) for tensors in zip(*gathered, strict=True)]
        _check_outputs_finite(parts, name)
        return [part.numpy()[np.argsort(order)] for part in parts]

    @abstractmethod
    def get_fingerprint(self) -> dict[str, Any]:
        """Return values that identify the training data, which must not change when a run resumes."""

    @abstractmethod
    def get_dev_fingerprint(self) -> dict[str, Any]:
        """Return values that identify the dev data and the way in which it is scored."""

    def format_summary(self, results: dict[str, Any]) -> str:
        """Return the text that is printed at the end of the run, before "N steps in ..."."""
        scores = [f"{name} {results[f'eval_{name}']:.4f}" for name in list_shown_metrics(self, results)]
        return f"{self.name} dev ({results['eval_samples']} rows): {', '.join(scores)}; "

    def get_lengths(self) -> Sequence[int]:
        """Return the length of each training row, which is used if `group_by_length` is set."""
        if isinstance(self.rows, TextDataset):
            return self.rows.get_lengths()
        return [len(self.rows[index]["input_ids"]) for index in range(len(self.rows))]

    def make_training_batches(self) -> TrainingBatchSource:
        """Return the training batches, which are created from `rows` by default."""
        settings: Any = self.settings  # `FineTuningSettings`, unless the task creates its own batches
        size, count = settings.per_device_train_batch_size, len(self.rows)
        lengths = self.get_lengths() if settings.group_by_length else None
        sampler = EpochSampler(count, settings.seed, lengths, size * self.accelerator.num_processes)

        def start_epoch(epoch: int) -> None:
            sampler.start_epoch(epoch)
            if isinstance(self.rows, TextDataset):
                self.rows.start_epoch(epoch)

        if not count:  # a run that only evaluates
            return TrainingBatchSource([], start_epoch, 0, 0)
        options = {"batch_size": size, "sampler": sampler, "collate_fn": self.collate}
        loader = create_dataloader(self.rows, settings.dataloader_num_workers, settings.seed, **options)
        loader = self.accelerator.prepare(loader)
        return TrainingBatchSource(loader, start_epoch, len(loader), count)

    def compute_total_steps(self, batches_per_epoch: int | None) -> int:
        """Return the number of optimizer steps of the run.

        Args:
            batches_per_epoch: The number of batches per process and epoch, or None if it is unknown.
        """
        settings = self.settings
        return count_training_steps(
            batches_per_epoch,
            settings.gradient_accumulation_steps,
            settings.num_train_epochs,
            settings.max_train_steps,
        )

    def compute_eval_steps(self, total_steps: int) -> int | None:
        """Return the number of steps between evaluations, or None to evaluate after every epoch."""
        return self.settings.eval_steps

    def before_training(self, loop: TrainingLoop) -> None:
        """Run task-specific code before the first training step. This is not called if the run resumes."""

    def after_training(self, loop: TrainingLoop, model: nn.Module) -> nn.Module:
        """Return the model to save, which is the trained model by default."""
        return model

    def save(self, model: nn.Module, history: ModelHistory) -> None:
        """Save the model."""
        save_model(self.accelerator, model, self.tokenizer, self.settings, history)

    def evaluate_final_weights(self, loop: TrainingLoop) -> None:
        """Evaluate the final weights, unless they were used in the last evaluation."""
        if not loop.has_evaluated_final_weights():
            self.run_evaluation()

    def get_dev_results(self) -> dict[str, Any]:
        """Return additional results for the dev data, such as "eval_samples"."""
        return {}

    def get_results(self) -> dict[str, Any]:
        """Return additional results of the run."""
        return {}

    def get_prediction_files(self) -> dict[str, str]:
        """Return the dev predictions, as a dictionary from file names (without `PREDICTIONS_PREFIX`) to contents."""
        return {}

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Make predictions for the test data.

        Returns:
            The results for the test data, and the prediction files in the same format as in `get_prediction_files`.
        """
        return {}, {}


def fine_tune(task: type[FineTuningTask[SettingsT]], settings: SettingsT) -> dict[str, Any]:
    """Fine-tune a checkpoint, save it, evaluate it on the dev data, and make predictions for the test data.

    Args:
        task: The task class, such as `GlueFineTuning`.
        settings: The settings of the task.

    Returns:
        The results, which are also saved at the beginning of `all_results.json`. They include "eval_<metric>",
        "eval_runtime" (in seconds), the training results from `TrainingLoop.get_results`, "data_hashes", "seed" and
        task-specific results.

    Raises:
        ValueError, OSError: If a setting, the data or the checkpoint is invalid. Most of these errors are raised
            before training starts.
        NonFiniteLossError: If the loss, the gradients or the model's outputs are NaN or infinite.

    Example:
        ```python
        from hf_attn_variants.training import GlueFineTuning, GlueSettings, fine_tune

        settings = GlueSettings(model_name_or_path="bert-gqa4", task_name="sst2", output_dir="out")
        results = fine_tune(GlueFineTuning, settings)
        ```
    """
    with open_session(settings) as accelerator:
        return _run_task(task(settings, accelerator))


def list_shown_metrics(task: FineTuningTask, results: dict[str, Any]) -> list[str]:
    """List the names of the dev metrics to plot and print, without the "eval_" prefix."""
    return [name for name in task.shown_metrics if f"eval_{name}" in results]


def _run_task(task: FineTuningTask) -> dict[str, Any]:
    """Train, evaluate and save the model of a task, and return the results."""
    settings, accelerator = task.settings, task.accelerator
    set_seed(settings.seed)
    model: nn.Module = task.load_model()
    if settings.clipping_ratio is not None and not any(isinstance(part, ClippedSoftmax) for part in model.modules()):
        raise ValueError("--clipping_ratio requires a model with `clipped_softmax`. Remove it.")
    set_seed(settings.seed, device_specific=True)  # so that each process uses different dropout masks
    batches = task.make_training_batches()
    total_steps = task.compute_total_steps(batches.count)
    model, optimizer, scheduler = prepare_training(settings, accelerator, model, total_steps)
    task.model = model
    has_dev = task.prepare_evaluation()
    objective = task.make_objective()
    if batches.examples is None:  # because the last batches of a stream may contain padding rows
        objective = replace(objective, examples=lambda batch: int(batch["examples"]))
    fingerprint, dev_fingerprint = task.get_fingerprint(), task.get_dev_fingerprint() if has_dev else {}
    hashes = {name: value for name, value in (fingerprint | dev_fingerprint).items() if name.startswith("hash of")}
    fingerprint |= dev_fingerprint if settings.keeps_best_weights else {}
    run = settings, total_steps, task.main_metric, fingerprint, task.compute_eval_steps(total_steps)
    callbacks = task.run_evaluation if has_dev else None, batches.start_epoch, batches.seek
    loop = TrainingLoop(accelerator, model, optimizer, scheduler, batches.loader, objective, *run, *callbacks)
    history = start_run(settings, accelerator)
    if not settings.resume_from_checkpoint:
        task.before_training(loop)
    state = loop.run()
    trained = loop.get_results(state.examples if batches.examples is None else batches.examples, task.unit)
    task.save(task.after_training(loop, model), history)
    results: dict[str, Any] = {}
    if has_dev:
        task.evaluate_final_weights(loop)
        results = {f"eval_{key}": value for key, value in task.metrics.items()}
        results |= {**task.get_dev_results(), "eval_runtime": round(task.eval_seconds, 3)}
    results |= {**trained, **task.get_results(), "data_hashes": hashes, "seed": settings.seed}
    _write_outputs(task, results, task.get_prediction_files() if has_dev else {})
    test_results, files = task.predict()  # the dev scores have already been written in case this fails
    results |= test_results
    if test_results or files:
        _write_outputs(task, results, files)
    if accelerator.is_main_process:
        steps = f"{results['steps']} steps in {results['train_runtime']:.0f} s; results in {settings.output_dir}"
        print(f"{task.format_summary(results)}{steps}")
    return results


def _write_outputs(task: FineTuningTask, results: dict[str, Any], predictions: dict[str, str]) -> None:
    """Write predictions, results and plots on the main process."""
    if not task.accelerator.is_main_process:
        return
    folder = Path(task.settings.output_dir)
    for name, content in predictions.items():
        atomic_write(folder / f"{PREDICTIONS_PREFIX}{name}", content)
    save_results(folder / RESULTS_NAME, results, task.settings)
    title = f"{task.name}: {get_model_name(task.settings)}, seed {task.settings.seed}"
    figure = partial(make_curves_figure, read_log(folder / LOG_FILE), list_shown_metrics(task, results), title)
    save_plot(folder / CURVES_FILE, figure, dpi=120)
