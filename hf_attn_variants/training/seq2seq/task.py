"""Trains and evaluates an encoder-decoder on text to text; the body of `scripts/run_seq2seq.py`."""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import PreTrainedTokenizerBase

import hf_attn_variants  # noqa: F401  (registers our architectures with the Auto classes)

from ...files import atomic_write
from ..engine import arguments, outputs
from ..engine.dataloaders import create_eval_dataloader, prepare_train_dataloader
from ..engine.loop import TrainingLoop
from ..engine.loop_settings import LoopSettings, total_training_steps
from ..engine.optimization import prepare_training
from ..engine.seq2seq_model import load_seq2seq_config, load_seq2seq_model
from ..engine.session import open_session, start_run
from ..uptraining.data import Collator, TextRows, hash_texts, pair_collator
from .data import (
    Seq2SeqData,
    Seq2SeqSplit,
    check_seq2seq_lengths,
    load_seq2seq_data,
    warn_of_cuts,
)
from .evaluation import (
    Decoder,
    GenerationSet,
    Seq2SeqEvaluator,
    beam_suffix,
    decode_and_score,
    seq2seq_objective,
)
from .settings import check_seq2seq_arguments, parse_args
from .worded_tasks import load_task

__all__ = ["main", "parse_args"]

logger = logging.getLogger(__name__)
# What decides the weights a run ends with, beyond `arguments.RESUME_ARGUMENTS`.
RESUME_ARGUMENTS = (
    "model_type",
    "config_overrides",
    "num_key_value_heads",
    "talking_heads",
    "max_target_length",
    "label_smoothing_factor",
)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, evaluates, predicts and saves.

    Args:
        args: Of `parse_args`.

    Returns:
        The results that `all_results.json` begins with: `eval_loss` (nats a target token), `eval_<metric>`,
        `eval_decode_tokens_per_second`, the same with the suffix `_beam<number>` for further numbers of beams and as
        `test_<metric>` for a test split, `train_loss` (the mean over all steps), `steps`, `train_runtime` (seconds in
        training steps, without evaluation and checkpoints), ...

    Raises:
        ValueError, OSError: An argument, the data or the checkpoint is wrong; found before training where it can be.
        NonFiniteLossError: Training diverged.
    """
    arguments.check_arguments(args)
    check_seq2seq_arguments(args)
    with open_session(args) as accelerator:
        return _run(args, accelerator)


def _run(args: argparse.Namespace, accelerator: Accelerator) -> dict[str, Any]:
    config, tokenizer = load_seq2seq_config(args)
    check_seq2seq_lengths(args, config, tokenizer)
    data = _load_data(args)
    _check_metric(args, data)
    for split in data.splits.values():
        warn_of_cuts(split, tokenizer, args.max_length, args.max_target_length)
    collate = pair_collator(
        tokenizer, args.max_length, args.pad_to_multiple_of, args.max_target_length, config.decoder_start_token_id
    )
    set_seed(args.seed)
    model = load_seq2seq_model(args, config)
    set_seed(args.seed, device_specific=True)  # processes drop out different units
    rows = TextRows(data.splits["train"].pairs()) if "train" in data.splits else TextRows([])
    loader, sampler = prepare_train_dataloader(args, accelerator, rows, collate, rows.lengths)
    total_steps = total_training_steps(
        len(loader), args.gradient_accumulation_steps, args.num_train_epochs, args.max_train_steps
    )
    model, optimizer, scheduler = prepare_training(args, accelerator, model, total_steps)
    decoder = _decoder(args, accelerator, model, tokenizer)
    sets = {
        name: _generation_set(args, accelerator, data.splits[name], collate)
        for name in ("dev", "test")
        if name in data.splits
    }
    evaluator = _evaluator(args, accelerator, model, sets["dev"], decoder, data) if "dev" in sets else None
    loop = TrainingLoop(
        accelerator,
        model,
        optimizer,
        scheduler,
        loader,
        seq2seq_objective(args.label_smoothing_factor),
        _loop_settings(args, total_steps, rows, data),
        evaluate=evaluator,
        start_epoch=lambda epoch: (sampler.start_epoch(epoch), rows.start_epoch(epoch)),
    )
    history = start_run(args, accelerator)
    loop.run()
    outputs.save_model(accelerator, model, tokenizer, args.output_dir, history)
    results = {**loop.results(len(rows)), "seed": args.seed, **data.results}
    if evaluator is not None:
        evaluator.evaluate(args.num_beams, afresh=not loop.scores_are_current())
        results = {**_dev_results(evaluator), **results}
    if accelerator.is_main_process:
        if evaluator is not None:
            _write_predictions(args, sets["dev"].split, evaluator.texts)
        _write_outputs(args, results, data)
    if "test" in sets:  # whatever ends this, the dev scores are written
        found, texts = _predict(args, decoder, sets["test"], data)
        results |= found
        if accelerator.is_main_process:
            _write_predictions(args, sets["test"].split, texts)
            _write_outputs(args, results, data)
    if accelerator.is_main_process:
        _print_scores(args, results, data)
        outputs.push_folder(args)
    return results


def _load_data(args: argparse.Namespace) -> Seq2SeqData:
    data = load_task(args) if args.task_name is not None else load_seq2seq_data(args)
    limits = {"train": args.max_train_samples, "dev": args.max_eval_samples}
    data.splits.update({name: split.first(limits.get(name)) for name, split in data.splits.items()})
    if args.skip_predict:
        data.splits.pop("test", None)
    only_evaluates = arguments.only_evaluates(args)
    if "train" not in data.splits and not only_evaluates:
        raise ValueError("there is no training split: give one, or --num_train_epochs 0 to evaluate only")
    if only_evaluates and not data.splits.keys() & {"dev", "test"}:
        raise ValueError("there is neither a dev nor a test split to evaluate")
    return data


def _check_metric(args: argparse.Namespace, data: Seq2SeqData) -> None:
    metric = args.metric_for_best_model
    known = ("loss", *(() if args.eval_loss_only else data.metric_names))
    if metric is not None and metric.removeprefix("eval_") not in known:
        raise ValueError(f"--metric_for_best_model {metric!r}: there are {', '.join(known)}")
    for name in ("metric_for_best_model", "early_stopping_patience", "eval_steps"):
        if getattr(args, name) is not None and "dev" not in data.splits:
            raise ValueError(f"--{name} needs a dev split: --validation_source_file or --validation_file")


def _generation_set(
    args: argparse.Namespace, accelerator: Accelerator, split: Seq2SeqSplit, collate: Collator
) -> GenerationSet:
    rows = TextRows(split.pairs())
    # Longest first: little padding, and a batch that does not fit into memory fails at once.
    order = sorted(range(len(rows)), key=lambda i: -len(split.sources[i]))
    ordered = TextRows([rows.texts[i] for i in order])
    loader = create_eval_dataloader(ordered, args.per_device_eval_batch_size, collate, args.dataloader_num_workers)
    return GenerationSet(split, accelerator.prepare(loader), order)


def _decoder(
    args: argparse.Namespace, accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> Decoder:
    options = {"no_repeat_ngram_size": args.no_repeat_ngram_size} if args.no_repeat_ngram_size is not None else {}
    return Decoder(
        accelerator,
        model,
        tokenizer,
        args.max_target_length,
        args.disable_tqdm,
        {"length_penalty": args.length_penalty},
        options,
    )


def _evaluator(
    args: argparse.Namespace,
    accelerator: Accelerator,
    model: nn.Module,
    dev: GenerationSet,
    decoder: Decoder,
    data: Seq2SeqData,
) -> Seq2SeqEvaluator:
    return Seq2SeqEvaluator(
        accelerator, model, dev, decoder, data.score, args.num_beams, args.eval_loss_only, args.disable_tqdm
    )


def _loop_settings(args: argparse.Namespace, total_steps: int, rows: TextRows, data: Seq2SeqData) -> LoopSettings:
    dev = data.splits.get("dev")
    dev_rows = [(source, *right) for source, right in zip(dev.sources, dev.references, strict=True)] if dev else []
    return LoopSettings.from_args(
        args,
        total_steps,
        default_metric="loss" if args.eval_loss_only else data.main_metric,
        greater_is_better=lambda metric: metric != "loss",
        data={"training examples": len(rows), "hash of the training data": hash_texts(rows.texts)},
        resume_arguments=RESUME_ARGUMENTS,
        evaluation={
            "hash of the dev data": hash_texts(dev_rows),
            "num_beams": args.num_beams[0],  # what evaluations in training decode with
        },
    )


def _dev_results(evaluator: Seq2SeqEvaluator) -> dict[str, Any]:
    return {
        **{f"eval_{key}": value for key, value in evaluator.metrics.items()},
        "eval_samples": len(evaluator.data.split),
        "eval_runtime": round(evaluator.seconds, 3),
    }


def _predict(
    args: argparse.Namespace, decoder: Decoder, test: GenerationSet, data: Seq2SeqData
) -> tuple[dict[str, Any], dict[int, list[str]]]:
    """The test split's results and its texts, by number of beams."""
    results: dict[str, Any] = {}
    texts = {}
    for i, num_beams in enumerate(args.num_beams):
        metrics, texts[num_beams] = decode_and_score(decoder, test, data.score, num_beams)
        results |= {f"test_{key}{beam_suffix(i, num_beams)}": value for key, value in metrics.items()}
    return {**results, "test_samples": len(test.split)}, texts


def _write_predictions(args: argparse.Namespace, split: Seq2SeqSplit, texts: dict[int, list[str]]) -> None:
    lines = []
    for row, source in enumerate(split.sources):
        record: dict[str, Any] = {"source": source}
        if split.references is not None:
            record["references"] = list(split.references[row])
        for i, (num_beams, found) in enumerate(texts.items()):
            record[f"prediction{beam_suffix(i, num_beams)}"] = found[row]
        lines.append(json.dumps(record, ensure_ascii=False))
    atomic_write(Path(args.output_dir) / f"{outputs.PREDICTIONS_PREFIX}{split.name}.jsonl", "\n".join(lines) + "\n")


def _write_outputs(args: argparse.Namespace, results: dict[str, Any], data: Seq2SeqData) -> None:
    name = Path(args.model_name_or_path).name if args.model_name_or_path else f"new {args.model_type}"
    metrics = [] if args.eval_loss_only else list(data.metric_names)
    outputs.write_results(args, results, metrics, f"text to text: {name}")


def _print_scores(args: argparse.Namespace, results: dict[str, Any], data: Seq2SeqData) -> None:
    for prefix, split in (("eval_", "dev"), ("test_", "test")):
        if f"{prefix}samples" in results:
            print(f"{split} ({results[f'{prefix}samples']} rows): {_scores(args, results, prefix, data)}")
    print(f"{results['steps']} steps in {results['train_runtime']:.0f} s; results in {args.output_dir}")


def _scores(args: argparse.Namespace, results: dict[str, Any], prefix: str, data: Seq2SeqData) -> str:
    parts = [f"loss {results['eval_loss']:.4f}"] if prefix == "eval_" else []
    for i, num_beams in enumerate(args.num_beams):
        suffix = beam_suffix(i, num_beams)
        values = [f"{n} {results[key]:.2f}" for n in data.metric_names if (key := f"{prefix}{n}{suffix}") in results]
        speed = f"{results[f'{prefix}decode_tokens_per_second{suffix}']:.0f} tokens/s"
        parts.append(f"{'greedy' if num_beams == 1 else f'{num_beams} beams'}: {', '.join([*values, speed])}")
    return "; ".join(parts)
