"""Fine-tunes and evaluates a checkpoint on a GLUE task; the body of `scripts/run_glue.py`."""

import argparse
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

import hf_attn_variants  # noqa: F401  (registers our architectures with the Auto classes)
from hf_attn_variants.training import arguments, outputs
from hf_attn_variants.training.data import EpochSampler, create_eval_dataloader, create_train_dataloader
from hf_attn_variants.training.glue import TASKS, GlueTask, format_prediction, get_task
from hf_attn_variants.training.glue_data import GlueSplit, load_ax, load_glue, tokenize_split
from hf_attn_variants.training.loop import LoopSettings, Objective, TrainingLoop, total_training_steps
from hf_attn_variants.training.metrics import compute_metrics
from hf_attn_variants.training.models import LabelMap, check_max_length, load_classifier, load_config, load_tokenizer
from hf_attn_variants.training.optimization import create_optimizer, create_scheduler
from hf_attn_variants.training.tracking import plot_curves, progress_bar, read_log, save_results

__all__ = ["classification_objective", "main", "parse_args"]

logger = logging.getLogger(__name__)

EPILOG = """example (STS-B from a folder of TSVs, on the CPU):
  python scripts/run_glue.py --model_name_or_path ./minilm-gqa4 --task_name stsb --data_dir glue/STS-B \\
      --output_dir runs/stsb --num_train_epochs 3 --learning_rate 5e-5 --group_by_length --mixed_precision bf16

Without --data_dir the task is read from nyu-mll/glue on the Hub. --output_dir gets the model, all_results.json, train_log.jsonl,
training_curves.png, predictions_dev_<task>.tsv and, where there is a test file, predictions_<task>.tsv: drop the prefix to submit.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (`sys.argv` without an argument)."""
    parser = argparse.ArgumentParser(
        prog="run_glue.py", description="Fine-tune and evaluate a sequence classifier on a GLUE task.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    task = parser.add_argument_group("task")
    task.add_argument("--task_name", required=True, help=f"One of {', '.join(n for n, t in TASKS.items() if t.eval_splits)}.")
    task.add_argument("--data_dir", help="Folder with the task's TSVs (train.tsv, dev.tsv, test.tsv); default: the Hub.")
    for name in ("train", "validation", "test"):
        task.add_argument(f"--{name}_file", help=f"The {name} TSV, instead of the folder's.")
    task.add_argument("--skip_predict", action="store_true", help="Do not predict the test split (and AX, after MNLI).")
    arguments.add_model_arguments(parser)
    arguments.add_data_arguments(parser)
    arguments.add_training_arguments(parser)
    arguments.add_output_arguments(parser)
    arguments.add_hub_arguments(parser)
    return parser.parse_args(argv)


def classification_objective() -> Objective:
    """Cross-entropy of class ids, or squared error of one score; summed over examples."""

    def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits.float()  # [b, labels]
        return _loss_sum(logits, labels)

    return Objective(loss_sum=loss_sum, count=lambda batch: len(batch["labels"]))


def _loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.is_floating_point():
        return functional.mse_loss(logits.squeeze(-1), labels.float(), reduction="sum")
    return functional.cross_entropy(logits, labels, reduction="sum")


@dataclass
class EvalSet:
    """A tokenised split to evaluate or predict: its rows are run longest first, `order` says which row came when."""

    task: GlueTask
    split: GlueSplit
    loader: DataLoader
    order: np.ndarray
    labels: np.ndarray | None  # the task's numbering


class GlueEvaluator:
    """Evaluates dev splits; keeps the last predictions, so that the final ones need no second pass."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, sets: list[EvalSet], label_map: LabelMap, quiet: bool):
        self.accelerator, self.model, self.sets, self.label_map, self.quiet = accelerator, model, sets, label_map, quiet
        self.predictions: dict[str, np.ndarray] = {}
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0

    def __call__(self) -> dict[str, float]:
        """Metrics of every dev split; those of a second one (MNLI mismatched) end in `_mm`."""
        start = time.perf_counter()
        self.metrics = {}
        for i, eval_set in enumerate(self.sets):
            logits = self.predict_logits(eval_set)
            predictions = self.to_predictions(eval_set.task, logits)
            self.predictions[eval_set.split.name] = predictions
            values = compute_metrics(eval_set.task.metrics, predictions, eval_set.labels)
            values["loss"] = self._loss(eval_set, logits)
            self.metrics |= {key + ("_mm" if i else ""): value for key, value in values.items()}
        self.seconds = time.perf_counter() - start
        return dict(self.metrics)

    @torch.no_grad()
    def predict_logits(self, eval_set: EvalSet) -> np.ndarray:
        """Logits of a split [rows, labels], in the rows' order."""
        self.model.eval()
        gathered = []
        bar = progress_bar(self.accelerator, self.quiet, iterable=eval_set.loader, desc=f"Running {eval_set.split.name}",
                           leave=False)
        for batch in bar:
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            logits = self.model(**inputs).logits.float()
            gathered.append(self.accelerator.gather_for_metrics(logits).cpu())
        logits = torch.cat(gathered).numpy()
        restored = np.empty_like(logits)
        restored[eval_set.order] = logits
        return restored

    def to_predictions(self, task: GlueTask, logits: np.ndarray) -> np.ndarray:
        """Scores, or class ids in the task's numbering [rows]."""
        return logits[:, 0] if task.is_regression else np.asarray(self.label_map.to_task)[logits.argmax(-1)]

    def _loss(self, eval_set: EvalSet, logits: np.ndarray) -> float:
        labels = eval_set.labels
        if not eval_set.task.is_regression:
            labels = np.asarray(self.label_map.to_model)[labels]
        return float(_loss_sum(torch.from_numpy(logits), torch.from_numpy(labels))) / len(labels)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Fine-tunes, evaluates, predicts and saves.

    Args:
        args: Of `parse_args`.

    Returns:
        The results that `all_results.json` begins with: `eval_<metric>`, `train_loss`, `epoch`, `steps`, `train_runtime` (seconds
        in training steps, without evaluation and checkpoints), `train_samples_per_second`, ...

    Raises:
        ValueError, OSError: An argument, the data or the checkpoint is wrong; found before any training where it can be.
        NonFiniteLossError: Training diverged.
    """
    arguments.check_arguments(args)
    task = get_task(args.task_name)
    _check_metric(args, task)
    arguments.prepare_output_dir(args, write=False)
    outputs.check_hub_access(args)
    accelerator = Accelerator(
        cpu=args.cpu, mixed_precision=args.mixed_precision, log_with=args.report_to if args.with_tracking else None,
        project_dir=args.output_dir, step_scheduler_with_optimizer=False, rng_types=[],
    )
    try:
        accelerator.wait_for_everyone()  # every process has seen the folder before one writes into it
        arguments.prepare_output_dir(args, write=accelerator.is_main_process)
        return _run(args, task, accelerator)
    finally:
        accelerator.end_training()
        # A second call in this process may want another precision or device.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _check_metric(args: argparse.Namespace, task: GlueTask) -> None:
    known = {"loss", *task.metrics, *(["combined_score"] if len(task.metrics) > 1 else [])}
    if len(task.eval_splits) > 1:
        known |= {f"{name}_mm" for name in known}
    if args.metric_for_best_model is not None and args.metric_for_best_model.removeprefix("eval_") not in known:
        raise ValueError(f"--metric_for_best_model {args.metric_for_best_model!r}: {task.name} has {', '.join(sorted(known))}")


def _run(args: argparse.Namespace, task: GlueTask, accelerator: Accelerator) -> dict[str, Any]:
    splits = load_glue(task, args.data_dir, vars(args))
    splits["train"] = splits["train"].first(args.max_train_samples)
    for name in task.eval_splits.keys() & splits.keys():
        splits[name] = splits[name].first(args.max_eval_samples)
    set_seed(args.seed)
    config = load_config(args)
    tokenizer = load_tokenizer(args, config)
    arguments_fit = (args.max_length, config, tokenizer)
    check_max_length(*arguments_fit)
    model, label_map = load_classifier(args, config, task.labels)
    set_seed(args.seed, device_specific=True)  # processes drop out different units
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=args.pad_to_multiple_of)
    train_loader, sampler = _train_loader(args, accelerator, splits["train"], tokenizer, collate, label_map)
    eval_sets = [_eval_set(args, accelerator, task, splits[name], tokenizer, collate)
                 for name in task.eval_splits if name in splits]
    model, train_loader = accelerator.prepare(model, train_loader)
    total_steps = total_training_steps(
        len(train_loader), args.gradient_accumulation_steps, args.num_train_epochs, args.max_train_steps
    )
    optimizer = create_optimizer(model, args)
    optimizer, scheduler = accelerator.prepare(optimizer, create_scheduler(optimizer, args, total_steps))
    if args.with_tracking:
        config_values = {k: v if isinstance(v, int | float | str) else str(v) for k, v in vars(args).items() if k != "hub_token"}
        accelerator.init_trackers("hf_attn_variants", config_values)
    evaluator = GlueEvaluator(accelerator, model, eval_sets, label_map, args.disable_tqdm)
    settings = _loop_settings(args, task, total_steps, len(splits["train"]))
    loop = TrainingLoop(accelerator, model, optimizer, scheduler, train_loader, classification_objective(), settings,
                        evaluate=evaluator, start_epoch=sampler.start_epoch)
    state = loop.run()
    if not evaluator.metrics or (settings.keep_best and state.best_step != state.step):
        evaluator()
    results = _results(args, model, evaluator, loop, splits)
    outputs.save_model(accelerator, model, tokenizer, args.output_dir)
    _write_predictions(args, task, accelerator, evaluator, splits, tokenizer, collate)
    if accelerator.is_main_process:
        _write_outputs(args, task, results)
    accelerator.wait_for_everyone()
    return results


def _loop_settings(args: argparse.Namespace, task: GlueTask, total_steps: int, examples: int) -> LoopSettings:
    metric = (args.metric_for_best_model or task.main_metric).removeprefix("eval_")
    return LoopSettings.from_args(
        args,
        total_steps=total_steps,
        metric_for_best_model=metric,
        greater_is_better=not metric.startswith("loss"),
        keep_best=args.metric_for_best_model is not None or args.early_stopping_patience is not None,
        fingerprint={
            "task_name": task.name, "training examples": examples, "seed": args.seed, "max_length": args.max_length,
            "per_device_train_batch_size": args.per_device_train_batch_size, "group_by_length": args.group_by_length,
        },
    )


def _tokenize(accelerator: Accelerator, split: GlueSplit, tokenizer: PreTrainedTokenizerBase, max_length: int):
    with accelerator.main_process_first():  # the others read the Hub dataset's cache
        return tokenize_split(split, tokenizer, max_length)


def _train_loader(args, accelerator, split, tokenizer, collate, label_map) -> tuple[DataLoader, EpochSampler]:
    data = _tokenize(accelerator, split, tokenizer, args.max_length)
    if label_map.to_task != tuple(sorted(label_map.to_task)):
        data = data.map(lambda row: {"label": label_map.to_model[row["label"]]})
    batch_size = args.per_device_train_batch_size
    sampler = EpochSampler(len(data), args.seed, data["length"] if args.group_by_length else None,
                           batch_size * accelerator.num_processes)
    loader = create_train_dataloader(data.remove_columns("length"), sampler, batch_size, collate, args.seed,
                                     args.dataloader_num_workers)
    return loader, sampler


def _eval_set(args, accelerator, task, split, tokenizer, collate) -> EvalSet:
    data = _tokenize(accelerator, split, tokenizer, args.max_length)
    order = np.argsort(-np.asarray(data["length"]), kind="stable")  # longest first: little padding, an early out-of-memory
    labels = np.asarray(data["label"]) if "label" in data.column_names else None
    unused = [name for name in ("length", "label") if name in data.column_names]
    loader = create_eval_dataloader(data.remove_columns(unused).select(order), args.per_device_eval_batch_size, collate,
                                    args.dataloader_num_workers)
    return EvalSet(task, split, accelerator.prepare(loader), order, labels)


def _results(args, model, evaluator: GlueEvaluator, loop: TrainingLoop, splits: dict[str, GlueSplit]) -> dict[str, Any]:
    state = loop.state
    eval_rows = sum(len(eval_set.split) for eval_set in evaluator.sets)
    return {
        **{f"eval_{key}": value for key, value in evaluator.metrics.items()},
        "eval_samples": eval_rows,
        "eval_runtime": round(evaluator.seconds, 3),
        "eval_samples_per_second": round(eval_rows / max(evaluator.seconds, 1e-9), 2),
        "train_loss": state.loss_total / state.step if state.step else None,
        "epoch": round(loop.epochs_done(), 4),
        "steps": state.step,
        "train_samples": len(splits["train"]),
        "train_runtime": round(state.train_seconds, 3),
        "train_samples_per_second": round(state.examples / state.train_seconds, 2) if state.train_seconds else None,
        "best_step": state.best_step,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "task_name": get_task(args.task_name).name,
        "seed": args.seed,
    }


def _write_predictions(args, task, accelerator, evaluator, splits, tokenizer, collate) -> None:
    todo = [] if args.skip_predict else [(task, splits[name]) for name in task.test_splits if name in splits]
    if task.name == "mnli" and not args.skip_predict:
        ax = load_ax(args.data_dir)
        todo += [(TASKS["ax"], ax)] if ax is not None else []
    found = [(task, eval_set.split, evaluator.predictions[eval_set.split.name], "dev_") for eval_set in evaluator.sets]
    for test_task, split in todo:
        logits = evaluator.predict_logits(_eval_set(args, accelerator, test_task, split, tokenizer, collate))
        found.append((test_task, split, evaluator.to_predictions(test_task, logits), ""))
    if accelerator.is_main_process:
        for row_task, split, predictions, prefix in found:
            path = Path(args.output_dir) / f"predictions_{prefix}{row_task.submission_file(split.name)}"
            texts = [format_prediction(row_task, value) for value in predictions]
            outputs.save_predictions(path, split.data["index"], texts)


def _write_outputs(args: argparse.Namespace, task: GlueTask, results: dict[str, Any]) -> None:
    folder = Path(args.output_dir)
    save_results(folder / "all_results.json", results, args)
    names = [key.removeprefix("eval_") for key in results if key.startswith("eval_")]
    shown = [name for name in names if name.removesuffix("_mm") in (*task.metrics, "combined_score")]
    plot_curves(read_log(folder / "train_log.jsonl"), shown, folder / "training_curves.png",
                f"{task.folder}: {Path(args.model_name_or_path).name}, seed {args.seed}")
    if args.push_to_hub:
        print(f"pushed to {outputs.push_folder(args)}")
    scores = ", ".join(f"{name} {results[f'eval_{name}']:.4f}" for name in shown)
    print(f"{task.folder} dev ({results['eval_samples']} rows): {scores}; {results['steps']} steps in "
          f"{results['train_runtime']:.0f} s; results in {folder}")
