"""Fine-tunes and evaluates a checkpoint on SQuAD; the body of `scripts/run_squad.py`."""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import (
    AutoModelForQuestionAnswering,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import hf_attn_variants  # noqa: F401  (registers our architectures with the Auto classes)

from ...files import atomic_write
from ..engine import arguments, outputs
from ..engine.dataloaders import create_eval_dataloader, prepare_train_dataloader
from ..engine.loop import TrainingLoop
from ..engine.loop_settings import LoopSettings, total_training_steps
from ..engine.models import (
    enable_gradient_checkpointing,
    give_token_types,
    load_config,
    load_model,
    load_tokenizer,
)
from ..engine.optimization import prepare_training
from ..engine.session import open_session, start_run
from .answers import Prediction, nbest_entries
from .data import (
    Question,
    check_unanswerable,
    hash_questions,
    load_squad_hub,
    read_squad,
)
from .evaluation import QuestionSet, SpanSettings, SquadEvaluator, span_objective
from .settings import check_squad_arguments, parse_args
from .windows import (
    Window,
    WindowRows,
    check_squad_lengths,
    make_windows,
    window_collator,
)

__all__ = ["main", "parse_args"]

logger = logging.getLogger(__name__)
# What decides the weights a run ends with, beyond `arguments.RESUME_ARGUMENTS`.
RESUME_ARGUMENTS = ("version_2_with_negative", "doc_stride", "max_query_length")
SHOWN_METRICS = ("exact_match", "exact", "f1", "HasAns_f1", "NoAns_f1")


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Fine-tunes, evaluates, predicts and saves.

    Args:
        args: Of `parse_args`.

    Returns:
        The results that `all_results.json` begins with: `eval_exact_match` and `eval_f1` (v2.0: `eval_exact`,
        `eval_f1`, those of questions with and without an answer, and those of the best threshold), `train_loss` (the
        mean over all steps), `steps`, `train_runtime` (seconds in training steps, without evaluation and checkpoints),
        ...

    Raises:
        ValueError, OSError: An argument, the data or the checkpoint is wrong; found before training where it can be.
        NonFiniteLossError: Training diverged.
    """
    arguments.check_arguments(args)
    check_squad_arguments(args)
    with open_session(args) as accelerator:
        return _run(args, accelerator)


def _run(args: argparse.Namespace, accelerator: Accelerator) -> dict[str, Any]:
    config = load_config(args)
    tokenizer = load_tokenizer(args, config)
    give_token_types(tokenizer, config)
    check_squad_lengths(args, config, tokenizer)
    splits = _load_splits(args, accelerator)
    _check_metric(args, splits["dev"])
    set_seed(args.seed)
    model = _model(args, config)
    set_seed(args.seed, device_specific=True)  # processes drop out different units
    collate = window_collator(tokenizer, args.pad_to_multiple_of)
    train = splits.get("train", [])
    train_windows = _windows(args, config, tokenizer, train, for_training=True)
    rows = WindowRows(train_windows)
    loader, sampler = prepare_train_dataloader(args, accelerator, rows, collate, rows.lengths)
    total_steps = total_training_steps(
        len(loader), args.gradient_accumulation_steps, args.num_train_epochs, args.max_train_steps
    )
    model, optimizer, scheduler = prepare_training(args, accelerator, model, total_steps)
    sets = {
        name: _question_set(args, accelerator, name, splits[name], config, tokenizer, collate)
        for name in ("dev", "test")
        if name in splits
    }
    evaluator = SquadEvaluator(
        accelerator, model, sets["dev"], args.max_length, _span_settings(args), args.disable_tqdm
    )
    settings = _loop_settings(args, total_steps, train, splits["dev"])
    loop = TrainingLoop(
        accelerator,
        model,
        optimizer,
        scheduler,
        loader,
        span_objective(),
        settings,
        evaluate=evaluator,
        start_epoch=sampler.start_epoch,
    )
    history = start_run(args, accelerator)
    loop.run()
    outputs.save_model(accelerator, model, tokenizer, args.output_dir, history)
    if not loop.scores_are_current():
        evaluator()
    results = _results(args, evaluator, loop, len(train), len(train_windows))
    if accelerator.is_main_process:
        _write_predictions(args, "dev", evaluator.predictions)
        _write_outputs(args, results)
    if "test" in sets:  # whatever ends this, the scores are written
        predictions = evaluator.predict(sets["test"])[0]
        if accelerator.is_main_process:
            _write_predictions(args, "test", predictions)
    if accelerator.is_main_process:
        outputs.push_folder(args)
    return results


def _load_splits(args: argparse.Namespace, accelerator: Accelerator) -> dict[str, list[Question]]:
    wanted = {"train": "train", "dev": "validation", "test": "test"}
    if arguments.only_evaluates(args):
        del wanted["train"]
    splits = {}
    for name, flag in wanted.items():
        path = getattr(args, f"{flag}_file")
        if path is not None:
            splits[name] = read_squad(path, has_answers=name != "test")
        elif args.validation_file is None and name != "test":
            with accelerator.main_process_first():  # the others read the Hub dataset's cache
                splits[name] = load_squad_hub(flag, args.version_2_with_negative)
        if name != "test" and name in splits:
            check_unanswerable(path or f"the Hub's {flag} split", splits[name], args.version_2_with_negative)
    limits = {"train": args.max_train_samples, "dev": args.max_eval_samples}
    return {name: questions[: limits.get(name)] for name, questions in splits.items()}


def _check_metric(args: argparse.Namespace, dev: list[Question]) -> None:
    metric = (args.metric_for_best_model or "").removeprefix("eval_")
    for prefix, answered in (("HasAns_", True), ("NoAns_", False)):
        if metric.startswith(prefix) and not any(bool(question.answers) == answered for question in dev):
            kind = "an answer" if answered else "no answer"
            raise ValueError(f"--metric_for_best_model {metric!r}: no question of the dev split has {kind}")


def _model(args: argparse.Namespace, config: PreTrainedConfig) -> PreTrainedModel:
    config.num_labels = 2  # a start and an end, whatever the checkpoint classified
    model = load_model(args, args.model_name_or_path, config, AutoModelForQuestionAnswering)
    if args.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def _windows(
    args: argparse.Namespace,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[Question],
    for_training: bool = False,
) -> list[Window]:
    return make_windows(
        questions,
        tokenizer,
        args.max_length,
        args.doc_stride,
        args.max_query_length,
        token_types=getattr(config, "type_vocab_size", 0) > 1,
        for_training=for_training,
    )


def _question_set(
    args: argparse.Namespace,
    accelerator: Accelerator,
    name: str,
    questions: list[Question],
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    collate: Any,
) -> QuestionSet:
    windows = _windows(args, config, tokenizer, questions)
    # Longest first: little padding, and a batch that does not fit into memory fails at once.
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].input_ids))
    rows = WindowRows([windows[i] for i in order])
    loader = create_eval_dataloader(rows, args.per_device_eval_batch_size, collate, args.dataloader_num_workers)
    return QuestionSet(name, questions, windows, accelerator.prepare(loader), order)


def _span_settings(args: argparse.Namespace) -> SpanSettings:
    threshold = args.null_score_diff_threshold if args.version_2_with_negative else None
    return SpanSettings(args.n_best_size, args.max_answer_length, threshold)


def _loop_settings(
    args: argparse.Namespace, total_steps: int, train: list[Question], dev: list[Question]
) -> LoopSettings:
    return LoopSettings.from_args(
        args,
        total_steps,
        default_metric="f1",
        greater_is_better=lambda metric: metric != "loss",
        data={"training examples": len(train), "hash of the training data": hash_questions(train)},
        resume_arguments=RESUME_ARGUMENTS,
        evaluation={"hash of the dev data": hash_questions(dev)},
    )


def _results(
    args: argparse.Namespace, evaluator: SquadEvaluator, loop: TrainingLoop, train_samples: int, train_windows: int
) -> dict[str, Any]:
    return {
        **{f"eval_{key}": value for key, value in evaluator.metrics.items()},
        "eval_samples": len(evaluator.data.questions),
        "eval_windows": len(evaluator.data.windows),
        "eval_runtime": round(evaluator.seconds, 3),
        **loop.results(train_samples, unit="windows"),
        "train_windows": train_windows,
        "seed": args.seed,
    }


def _write_predictions(args: argparse.Namespace, split: str, predictions: list[Prediction]) -> None:
    threshold = _span_settings(args).null_score_diff_threshold
    files: dict[str, dict[str, Any]] = {
        split: {p.id: p.answer(threshold) for p in predictions},
        f"nbest_{split}": {p.id: nbest_entries(p, threshold is not None, args.n_best_size) for p in predictions},
    }
    if threshold is not None:
        files[f"null_odds_{split}"] = {p.id: p.null_odds for p in predictions}
    for name, content in files.items():
        path = Path(args.output_dir) / f"{outputs.PREDICTIONS_PREFIX}{name}.json"
        atomic_write(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def _write_outputs(args: argparse.Namespace, results: dict[str, Any]) -> None:
    shown = [name for name in SHOWN_METRICS if f"eval_{name}" in results]
    version = "SQuAD v2.0" if args.version_2_with_negative else "SQuAD v1.1"
    outputs.write_results(args, results, shown, f"{version}: {Path(args.model_name_or_path).name}")
    scores = ", ".join(f"{name} {results[f'eval_{name}']:.2f}" for name in shown)
    print(
        f"{version} dev ({results['eval_samples']} questions, {results['eval_windows']} windows): {scores}; "
        f"{results['steps']} steps in {results['train_runtime']:.0f} s; results in {args.output_dir}"
    )
