"""The course of every fine-tuning: load, train, save, evaluate and predict. A task supplies what is specific to it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import NonFiniteLossError
from ...files import atomic_write
from ...model_history import ModelHistory
from . import outputs
from .dataloaders import Rows, TrainingBatches, prepare_train_dataloader, restore_row_order
from .loop import TrainingLoop
from .losses import Objective
from .models import get_model_name
from .optimization import prepare_training
from .outputs import progress_bar
from .session import open_session, start_run
from .settings import FineTuningSettings, LoopSettings, OutputSettings, count_training_steps
from .tables import warn_about_max_length

__all__ = ["Evaluator", "FineTuningTask", "MetricEvaluator", "fine_tune", "list_shown_metrics", "run_rows"]


class MetricEvaluator:
    """Computes dev metrics when called, and keeps them; what an `Evaluator` is made of.

    Args:
        compute: returns the dev metrics, by name without "eval_".
    """

    def __init__(self, compute: Callable[[], dict[str, float]]):
        self.compute = compute
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0

    def __call__(self) -> dict[str, float]:
        start = time.perf_counter()
        self.metrics = self.compute()
        self.seconds = time.perf_counter() - start
        return dict(self.metrics)


@torch.no_grad()
def run_rows(
    accelerator: Accelerator,
    model: nn.Module,
    loader: DataLoader,
    order: Sequence[int],
    outputs: Callable[[dict[str, Tensor]], tuple[Tensor, ...]],
    name: str,
    settings: OutputSettings,
) -> list[np.ndarray]:
    """Run a model over the rows of `prepare_eval_dataloader`.

    Args:
        accelerator, model: the run's.
        loader, order: the batches, and which rows they hold.
        outputs: a batch -> tensors [b, ...] of one shape beyond b for all batches.
        name: what the progress bar says.
        settings: the run's: whether there is a bar.

    Returns:
        Each of the tensors for all rows, in the rows' own order.

    Raises:
        NonFiniteLossError: if some of them are NaN or infinite: the likeliest of these is the first class or word, and
            would be scored as an answer. Minus infinity is what there is no choice for.
    """
    model.eval()
    gathered: list[Any] = []
    for batch in progress_bar(
        accelerator, settings.disable_tqdm, iterable=loader, desc=f"Running {name}", leave=False
    ):
        # Rows repeated to fill the last batch of each process are left out again.
        gathered.append([part.cpu() for part in accelerator.gather_for_metrics(outputs(batch))])
    parts = [torch.cat(each) for each in zip(*gathered, strict=True)]
    _check_finite(parts, name)
    return [restore_row_order(part, order) for part in parts]


def _check_finite(parts: Sequence[Tensor], name: str) -> None:
    """Check that no row has an output that is NaN or infinite; minus infinity stands for none."""
    bad_parts = [part.isnan() | part.isposinf() for part in parts]
    rows = torch.stack([part.flatten(1).any(1) if part.dim() > 1 else part for part in bad_parts]).any(0)
    if bad := int(rows.sum()):
        raise NonFiniteLossError(
            f"the model's outputs are NaN or infinite for {bad} of {len(rows)} rows of {name}: no scores are made. "
            "Its weights have NaN in them, or its numbers grow too large: try --mixed_precision no"
        )


SettingsT = TypeVar("SettingsT", bound=FineTuningSettings)
# What evaluates is of the task: so its own methods know it by its class.
EvaluatorT = TypeVar("EvaluatorT", bound="Evaluator")


class Evaluator(Protocol):
    """Computes the dev metrics.

    Attributes:
        metrics: those of the last evaluation, by name without "eval_".
        seconds: what it took.
    """

    metrics: dict[str, float]
    seconds: float

    def __call__(self) -> dict[str, float]:
        """Evaluate the dev data: "loss", the task's metrics."""


class FineTuningTask(ABC, Generic[SettingsT, EvaluatorT]):
    """One run's task. `__init__` loads configuration, tokenizer and data: what is wrong with them is said first.

    The methods are called in this order: `load_model`, which may set `rows`, then `make_evaluator`, `objective` and
    the fingerprints, then those of the training, then those of what comes of it.

    Attributes:
        settings, accelerator: the run's.
        tokenizer: saved with the model.
        rows: the training examples by index; none for a run that only evaluates. A task whose `training_batches` are
            others has no need of it.
        collate: a list of rows -> a batch, a dict of tensors.
        main_metric: the dev metric that tells the best weights where the settings name none.
        shown_metrics: those that are drawn and printed, where the results have them.
        unit: what an example is called in the results.
        name: what is learned, as it stands above the curves and before the scores.
    """

    tokenizer: PreTrainedTokenizerBase
    rows: Rows
    collate: Callable[[list], dict[str, Tensor]]
    main_metric: str
    shown_metrics: Sequence[str]
    unit = "samples"
    name: str

    def __init__(self, settings: SettingsT, accelerator: Accelerator):
        self.settings, self.accelerator = settings, accelerator
        warn_about_max_length(settings)

    @abstractmethod
    def load_model(self) -> PreTrainedModel:
        """Return the model to train; new weights are drawn with the run's seed set."""

    @abstractmethod
    def objective(self) -> Objective:
        """Return the loss of a batch."""

    @abstractmethod
    def make_evaluator(self, model: nn.Module) -> EvaluatorT | None:
        """Return what evaluates the model, prepared by accelerate; None where there are no dev data."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return what tells this run's training data from others."""

    @abstractmethod
    def dev_fingerprint(self) -> dict[str, Any]:
        """Return what tells its dev data and their scoring from others."""

    def summary(self, results: dict[str, Any]) -> str:
        """Return what is printed at the end, up to the "N steps in ..." that follows it."""
        scores = [f"{name} {results[f'eval_{name}']:.4f}" for name in list_shown_metrics(self, results)]
        return f"{self.name} dev ({results['eval_samples']} rows): {', '.join(scores)}; "

    def lengths(self) -> Sequence[int]:
        """Return the length of each training row, for `group_by_length`."""
        return [len(self.rows[index]["input_ids"]) for index in range(len(self.rows))]

    def start_epoch(self, epoch: int) -> None:
        """Be told which epoch begins."""

    def training_batches(self) -> TrainingBatches:
        """Return the training batches: those of `rows`, unless a task has others."""
        loader, sampler = prepare_train_dataloader(
            self.settings, self.accelerator, self.rows, self.collate, self.lengths
        )

        def start_epoch(epoch: int) -> None:
            sampler.start_epoch(epoch)
            self.start_epoch(epoch)

        return TrainingBatches(loader, start_epoch, len(loader), len(self.rows))

    def total_steps(self, batches_per_epoch: int | None) -> int:
        """Return the optimiser steps of the run; an epoch of unknown length has None batches."""
        settings = self.settings
        return count_training_steps(
            batches_per_epoch,
            settings.gradient_accumulation_steps,
            settings.num_train_epochs,
            settings.max_train_steps,
        )

    def loop_options(self, total_steps: int) -> dict[str, Any]:
        """Return fields of `LoopSettings` that are not as the run's settings have them."""
        return {}

    def before_training(self, loop: TrainingLoop, evaluator: EvaluatorT | None) -> None:
        """Look at the model once all is loaded, unless the run resumes."""

    def after_training(self, loop: TrainingLoop, evaluator: EvaluatorT | None, model: nn.Module) -> nn.Module:
        """Return the trained model as it is to be saved."""
        return model

    def save(self, model: nn.Module, history: ModelHistory) -> None:
        """Save the model."""
        outputs.save_model(self.accelerator, model, self.tokenizer, self.settings, history)

    def last_evaluation(self, loop: TrainingLoop, evaluator: EvaluatorT) -> None:
        """Evaluate the weights that training ended with, unless that was done."""
        if not loop.has_current_scores():
            evaluator()

    def dev_results(self, evaluator: EvaluatorT) -> dict[str, Any]:
        """Return further results of the dev data, "eval_samples" among them."""
        return {}

    def results(self) -> dict[str, Any]:
        """Return further results of the run."""
        return {}

    def predictions(self, evaluator: EvaluatorT) -> dict[str, str]:
        """Return the contents of the files of dev predictions, by name without `outputs.PREDICTIONS_PREFIX`."""
        return {}

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Predict the test data. Return their results, and the files' contents as `predictions` does."""
        return {}, {}


def fine_tune(task: type[FineTuningTask[SettingsT, Any]], settings: SettingsT) -> dict[str, Any]:
    """Fine-tune a checkpoint, save it, score it on the dev data and predict the test data.

    Args:
        task: what is learned, `GlueFineTuning` for example.
        settings: its settings.

    Returns:
        The results that `all_results.json` begins with: "eval_<metric>" and "eval_runtime" (seconds), what
        `TrainingLoop.results` says of the training, "seed", and the task's own.

    Raises:
        ValueError, OSError: if a setting, the data or the checkpoint is wrong; said before training where it can be.
        NonFiniteLossError: if training diverged.
    """
    with open_session(settings) as accelerator:
        return _run_task(task(settings, accelerator))


def list_shown_metrics(task: FineTuningTask, results: dict[str, Any]) -> list[str]:
    """Return the task's dev metrics that are drawn and printed."""
    return [name for name in task.shown_metrics if f"eval_{name}" in results]


def _run_task(task: FineTuningTask) -> dict[str, Any]:
    settings, accelerator = task.settings, task.accelerator
    set_seed(settings.seed)
    model: nn.Module = task.load_model()
    set_seed(settings.seed, device_specific=True)  # processes drop out different units
    batches = task.training_batches()
    total_steps = task.total_steps(batches.count)
    model, optimizer, scheduler = prepare_training(settings, accelerator, model, total_steps)
    evaluator = task.make_evaluator(model)
    loop = TrainingLoop(
        accelerator,
        model,
        optimizer,
        scheduler,
        batches.loader,
        task.objective(),
        LoopSettings.from_settings(
            settings,
            total_steps,
            task.main_metric,
            task.fingerprint(),
            task.dev_fingerprint(),
            **task.loop_options(total_steps),
        ),
        evaluate=evaluator,
        start_epoch=batches.start_epoch,
        seek=batches.seek,
    )
    history = start_run(settings, accelerator)
    if not settings.resume_from_checkpoint:
        task.before_training(loop, evaluator)
    state = loop.run()
    trained = loop.results(state.examples if batches.examples is None else batches.examples, task.unit)
    task.save(task.after_training(loop, evaluator, model), history)
    results: dict[str, Any] = {}
    if evaluator is not None:
        task.last_evaluation(loop, evaluator)
        results = {f"eval_{key}": value for key, value in evaluator.metrics.items()}
        results |= {**task.dev_results(evaluator), "eval_runtime": round(evaluator.seconds, 3)}
    results |= {**trained, **task.results(), "seed": settings.seed}
    _write_outputs(task, results, task.predictions(evaluator) if evaluator is not None else {})
    found, files = task.predict()  # whatever ends this, the dev scores are written
    results |= found
    if found or files:
        _write_outputs(task, results, files)
    if accelerator.is_main_process:
        steps = f"{results['steps']} steps in {results['train_runtime']:.0f} s; results in {settings.output_dir}"
        print(f"{task.summary(results)}{steps}")
    return results


def _write_outputs(task: FineTuningTask, results: dict[str, Any], predictions: dict[str, str]) -> None:
    if not task.accelerator.is_main_process:
        return
    folder = Path(task.settings.output_dir)
    for name, content in predictions.items():
        atomic_write(folder / f"{outputs.PREDICTIONS_PREFIX}{name}", content)
    title = f"{task.name}: {get_model_name(task.settings)}"
    outputs.write_results(task.settings, results, list_shown_metrics(task, results), title)
