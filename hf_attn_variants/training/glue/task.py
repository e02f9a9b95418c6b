"""Fine-tunes and evaluates a checkpoint on a GLUE task; the body of `scripts/run_glue.py`."""

import argparse
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

import hf_attn_variants  # noqa: F401  (registers our architectures with the Auto classes)

from ...command_line import HelpFormatter, parse_with_checkpoint, program_name
from ...glue_tasks import TASKS, GlueTask, format_prediction, get_task
from ..engine import arguments, outputs
from ..engine.dataloaders import create_eval_dataloader, prepare_train_dataloader
from ..engine.loop import TrainingLoop
from ..engine.loop_settings import LoopSettings, total_training_steps
from ..engine.models import (
    LabelMap,
    check_max_length,
    close_texts,
    give_token_types,
    load_classifier,
    load_config,
    load_tokenizer,
)
from ..engine.optimization import prepare_training
from ..engine.session import open_session, start_run
from .data import GlueSplit, hash_rows, load_ax, load_glue, make_rows, tokenize_split
from .evaluation import EvalSet, GlueEvaluator, classification_objective

__all__ = ["main", "parse_args"]

logger = logging.getLogger(__name__)
NO_ROWS = GlueSplit("train", "", make_rows({}))

EPILOG = """example (STS-B from a folder of TSVs, on the CPU):
  %(prog)s --model_name_or_path ./minilm-gqa4 --task_name stsb --data_dir glue/STS-B \\
      --output_dir runs/stsb --num_train_epochs 3 --learning_rate 5e-5 --group_by_length --cpu

Without --data_dir the task is read from nyu-mll/glue on the Hub. --output_dir gets the model, all_results.json,
train_log.jsonl, training_curves.png, predictions_dev_<task>.tsv and, where there is a test file,
predictions_<task>.tsv; drop the prefix to submit it to GLUE. Scores are those of the dev set; --metric_for_best_model
and --early_stopping_patience choose the weights on it, so that its scores flatter the model a little.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (`sys.argv` without an argument)."""
    parser = argparse.ArgumentParser(
        prog=program_name("run_glue.py"),
        description="Fine-tune and evaluate a sequence classifier on a GLUE task.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    task = parser.add_argument_group("task")
    task.add_argument(
        "--task_name", required=True, help=f"One of {', '.join(n for n, t in TASKS.items() if t.eval_splits)}."
    )
    task.add_argument(
        "--data_dir", help="Folder with the task's TSVs (train.tsv, dev.tsv, test.tsv); default: the Hub."
    )
    for name in ("train", "validation", "test"):
        task.add_argument(f"--{name}_file", help=f"The {name} TSV, instead of the folder's.")
    task.add_argument(
        "--skip_predict", action="store_true", help="Do not predict the test split (and AX, after MNLI)."
    )
    arguments.add_shared_arguments(parser)
    return parse_with_checkpoint(parser, argv)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Fine-tunes, evaluates, predicts and saves.

    Args:
        args: Of `parse_args`.

    Returns:
        The results that `all_results.json` begins with: `eval_<metric>`, `train_loss` (the mean over all steps),
        `epoch`, `steps`, `train_runtime` (seconds in training steps, without evaluation and checkpoints),
        `train_samples_per_second`, ...

    Raises:
        ValueError, OSError: An argument, the data or the checkpoint is wrong; found before training where it can be.
        NonFiniteLossError: Training diverged.
    """
    arguments.check_arguments(args)
    task = get_task(args.task_name)
    _check_metric(args, task, len(task.eval_splits))
    with open_session(args) as accelerator:
        return _run(args, task, accelerator)


def _check_metric(args: argparse.Namespace, task: GlueTask, dev_sets: int) -> None:
    known = {"loss", *task.metrics, *(["combined_score"] if len(task.metrics) > 1 else [])}
    if dev_sets > 1:
        known |= {f"{name}_mm" for name in known}
    if args.metric_for_best_model is not None and args.metric_for_best_model.removeprefix("eval_") not in known:
        raise ValueError(
            f"--metric_for_best_model {args.metric_for_best_model!r}: {task.name} has {', '.join(sorted(known))}"
        )


def _run(args: argparse.Namespace, task: GlueTask, accelerator: Accelerator) -> dict[str, Any]:
    config = load_config(args)
    tokenizer = load_tokenizer(args, config)
    give_token_types(tokenizer, config)
    pair = len(task.text_columns) == 2
    close_texts(tokenizer, config, pair)
    check_max_length(args.max_length, config, tokenizer, pair)
    splits, tests = _load_splits(args, task)
    _check_metric(args, task, len(task.eval_splits.keys() & splits.keys()))
    set_seed(args.seed)
    model, label_map = load_classifier(args, config, task.labels)
    set_seed(args.seed, device_specific=True)  # processes drop out different units
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=args.pad_to_multiple_of)
    train = _training_rows(args, accelerator, splits["train"], tokenizer, label_map)
    train_loader, sampler = prepare_train_dataloader(
        args, accelerator, train.remove_columns("length"), collate, lengths=lambda: train["length"]
    )
    eval_sets = [
        _eval_set(args, accelerator, task, splits[name], tokenizer, collate)
        for name in task.eval_splits
        if name in splits
    ]
    total_steps = total_training_steps(
        len(train_loader), args.gradient_accumulation_steps, args.num_train_epochs, args.max_train_steps
    )
    model, optimizer, scheduler = prepare_training(args, accelerator, model, total_steps)
    evaluator = GlueEvaluator(accelerator, model, eval_sets, label_map, args.disable_tqdm)
    settings = _loop_settings(args, task, total_steps, splits["train"], [dev.split for dev in eval_sets])
    loop = TrainingLoop(
        accelerator,
        model,
        optimizer,
        scheduler,
        train_loader,
        classification_objective(),
        settings,
        evaluate=evaluator,
        start_epoch=sampler.start_epoch,
    )
    history = start_run(args, accelerator)
    loop.run()
    outputs.save_model(accelerator, model, tokenizer, args.output_dir, history)
    if not loop.scores_are_current():
        evaluator()
    results = _results(args, evaluator, loop, len(splits["train"]))
    if accelerator.is_main_process:
        for dev in eval_sets:
            _write_predictions(args, dev, "dev_", evaluator.predictions[dev.split.name])
        _write_outputs(args, task, results)
    # Whatever ends this, the scores are written.
    for test_task, split in tests:
        test = _eval_set(args, accelerator, test_task, split, tokenizer, collate)
        predictions = evaluator.to_predictions(test_task, evaluator.predict_logits(test))
        if accelerator.is_main_process:
            _write_predictions(args, test, "", predictions)
    if accelerator.is_main_process:
        outputs.push_folder(args)
    return results


def _load_splits(
    args: argparse.Namespace, task: GlueTask
) -> tuple[dict[str, GlueSplit], list[tuple[GlueTask, GlueSplit]]]:
    """Train and dev splits by name, and what is predicted after training: read now, so that it cannot fail then."""
    with_train = not arguments.only_evaluates(args)
    splits = load_glue(task, args.data_dir, vars(args), with_train=with_train)
    splits["train"] = splits["train"].first(args.max_train_samples) if with_train else NO_ROWS
    for name in task.eval_splits.keys() & splits.keys():
        splits[name] = splits[name].first(args.max_eval_samples)
    if args.skip_predict:
        return splits, []
    tests = [(task, splits[name]) for name in task.test_splits if name in splits]
    from_hub = args.data_dir is None and not any((args.train_file, args.validation_file, args.test_file))
    if task.name == "mnli" and (from_hub or args.data_dir is not None):
        ax = load_ax(args.data_dir)
        tests += [(TASKS["ax"], ax)] if ax is not None else []
    return splits, tests


def _loop_settings(
    args: argparse.Namespace, task: GlueTask, total_steps: int, train: GlueSplit, dev: list[GlueSplit]
) -> LoopSettings:
    return LoopSettings.from_args(
        args,
        total_steps,
        default_metric=task.main_metric,
        greater_is_better=lambda metric: not metric.startswith("loss"),
        data={
            "task_name": task.name,
            "training examples": len(train),
            "hash of the training data": hash_rows(train),
        },
        evaluation={"hash of the dev data": [hash_rows(split) for split in dev]},
    )


def _tokenize(
    accelerator: Accelerator, split: GlueSplit, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Dataset:
    with accelerator.main_process_first():  # the others read the Hub dataset's cache
        return tokenize_split(split, tokenizer, max_length)


def _training_rows(
    args: argparse.Namespace,
    accelerator: Accelerator,
    split: GlueSplit,
    tokenizer: PreTrainedTokenizerBase,
    label_map: LabelMap,
) -> Dataset:
    if not len(split):
        return make_rows({"length": []})
    data = _tokenize(accelerator, split, tokenizer, args.max_length)
    if label_map.to_task != tuple(sorted(label_map.to_task)):
        data = data.map(lambda row: {"label": label_map.to_model[row["label"]]})
    return data


def _eval_set(
    args: argparse.Namespace,
    accelerator: Accelerator,
    task: GlueTask,
    split: GlueSplit,
    tokenizer: PreTrainedTokenizerBase,
    collate: DataCollatorWithPadding,
) -> EvalSet:
    data = _tokenize(accelerator, split, tokenizer, args.max_length)
    # Longest first: little padding, and a batch that does not fit into memory fails at once.
    order = np.argsort(-np.asarray(data["length"]), kind="stable")
    labels = np.asarray(data["label"]) if "label" in data.column_names else None
    unused = [name for name in ("length", "label") if name in data.column_names]
    loader = create_eval_dataloader(
        data.remove_columns(unused).select(order),
        args.per_device_eval_batch_size,
        collate,
        args.dataloader_num_workers,
    )
    return EvalSet(task, split, accelerator.prepare(loader), order, labels)


def _results(
    args: argparse.Namespace, evaluator: GlueEvaluator, loop: TrainingLoop, train_samples: int
) -> dict[str, Any]:
    eval_rows = sum(len(eval_set.split) for eval_set in evaluator.sets)
    return {
        **{f"eval_{key}": value for key, value in evaluator.metrics.items()},
        "eval_samples": eval_rows,
        "eval_runtime": round(evaluator.seconds, 3),
        "eval_samples_per_second": round(eval_rows / max(evaluator.seconds, 1e-9), 2),
        **loop.results(train_samples),
        "task_name": get_task(args.task_name).name,
        "seed": args.seed,
    }


def _write_predictions(args: argparse.Namespace, found: EvalSet, prefix: str, predictions: Iterable[Any]) -> None:
    name = f"{outputs.PREDICTIONS_PREFIX}{prefix}{found.task.submission_file(found.split.name)}"
    texts = [format_prediction(found.task, value) for value in predictions]
    outputs.save_predictions(Path(args.output_dir) / name, found.split.data["index"], texts)


def _write_outputs(args: argparse.Namespace, task: GlueTask, results: dict[str, Any]) -> None:
    names = [key.removeprefix("eval_") for key in results if key.startswith("eval_")]
    shown = [name for name in names if name.removesuffix("_mm") in (*task.metrics, "combined_score")]
    outputs.write_results(args, results, shown, f"{task.folder}: {Path(args.model_name_or_path).name}")
    scores = ", ".join(f"{name} {results[f'eval_{name}']:.4f}" for name in shown)
    print(
        f"{task.folder} dev ({results['eval_samples']} rows): {scores}; {results['steps']} steps in "
        f"{results['train_runtime']:.0f} s; results in {args.output_dir}"
    )
