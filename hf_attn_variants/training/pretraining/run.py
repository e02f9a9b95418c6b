"""What the two pretraining scripts share: a stream of text in; a model, its dev loss and its gate out."""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..engine import outputs
from ..engine.dataloaders import create_eval_dataloader, create_stream_dataloader
from ..engine.loop import Objective, TrainingLoop
from ..engine.loop_settings import LoopSettings, total_training_steps
from ..engine.optimization import prepare_training
from ..engine.session import start_run
from .masked_lm import GATE_COST
from .text_sources import PretrainingText
from .text_stream import TextSource, TextStream, read_blocks, stack_rows

__all__ = ["METRICS", "BlockPreparation", "PreparedBlocks", "PretrainingTask", "TextEvaluator", "pretrain"]

logger = logging.getLogger(__name__)
METRICS = ("loss", "perplexity", "accuracy")
# What decides the weights a run ends with, beyond `arguments.RESUME_ARGUMENTS` and the task's own.
RESUME_ARGUMENTS = (
    "model_type",
    "config_overrides",
    "num_key_value_heads",
    "talking_heads",
    "shuffle_buffer_size",
)


class BlockPreparation(Protocol):
    """Makes an example of a block of tokens.

    Attributes:
        block_length: Tokens of a block.
        separator: The token that ends each article.
        needs_other: Whether it is called with another block of the text as well.
    """

    block_length: int
    separator: int
    needs_other: bool

    def __call__(self, block: np.ndarray, key: tuple[int, ...], *other: np.ndarray | None) -> dict[str, np.ndarray]:
        """Arrays of one shape for every block; `key` alone, with the run's seed, decides what is random in them."""


class TextEvaluator(Protocol):
    """Computes the dev metrics.

    Attributes:
        metrics: Those of the last evaluation; empty before the first.
        seconds: What it took.
        loader: Its batches.
    """

    metrics: dict[str, float]
    seconds: float
    loader: DataLoader

    def __call__(self) -> dict[str, float]:
        """Evaluates the dev text: "loss", "perplexity", "accuracy", ..."""

    def gate(self) -> dict[str, Any]:
        """Says whether the model reads its context; see `masked_lm.gate_results`."""


class PreparedBlocks(Dataset):
    """Held-out blocks, prepared in the same way at every evaluation, and in every run of one seed."""

    def __init__(self, blocks: Sequence[np.ndarray], prepare: BlockPreparation):
        self.blocks, self.prepare = blocks, prepare

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not self.prepare.needs_other:
            return self.prepare(self.blocks[index], (0, index))
        # From far away: text nearby may be of the same article.
        other = self.blocks[(index + len(self) // 2) % len(self)] if len(self) > 1 else None
        return self.prepare(self.blocks[index], (0, index), other)


@dataclass(frozen=True)
class PretrainingTask:
    """What is special about a way of pretraining.

    Attributes:
        name: Shown above the curves.
        prepare: Makes examples.
        objective: The loss of their batches.
        evaluator: (model, loader of the held-out text) -> its evaluator.
        resume_arguments: Names of the arguments that a resumed run must share, beyond those of any pretraining.
        results: Entries that `all_results.json` gets besides the shared ones.
    """

    name: str
    prepare: BlockPreparation
    objective: Objective
    evaluator: Callable[[nn.Module, DataLoader], TextEvaluator]
    resume_arguments: tuple[str, ...]
    results: dict[str, Any] = field(default_factory=dict)


def pretrain(
    args: argparse.Namespace,
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: PretrainingText,
    task: PretrainingTask,
) -> dict[str, Any]:
    """Trains, evaluates, tries the gate and saves.

    Args:
        args: Checked arguments.
        accelerator: Of `open_session`.
        model: Made or loaded with the run's seed set.
        tokenizer: Its tokenizer.
        text: Of `open_text_sources`.
        task: What is learned.

    Returns:
        The results that `all_results.json` begins with.

    Raises:
        ValueError, OSError: The text is wrong, or something cannot be written.
        NonFiniteLossError: Training diverged.
    """
    if text.train:  # text without a token is an error now
        read_blocks(text.train, tokenizer, task.prepare.block_length, task.prepare.separator, limit=1)
    set_seed(args.seed, device_specific=True)  # processes drop out different units
    stream = TextStream(
        text.train,
        tokenizer,
        task.prepare.block_length,
        task.prepare.separator,
        task.prepare,
        args.per_device_train_batch_size,
        args.seed,
        args.shuffle_buffer_size,
        accelerator.process_index,
        accelerator.num_processes,
        task.prepare.needs_other,
    )
    train_loader = create_stream_dataloader(accelerator, stream, args.seed, args.dataloader_num_workers)
    total_steps = total_training_steps(
        None, args.gradient_accumulation_steps, args.num_train_epochs, args.max_train_steps
    )
    model, optimizer, scheduler = prepare_training(args, accelerator, model, total_steps)
    evaluator = _evaluator(args, accelerator, model, text.dev, tokenizer, task) if text.dev else None
    settings = LoopSettings.from_args(
        args,
        total_steps,
        default_metric="loss",
        greater_is_better=lambda metric: metric == "accuracy",
        data=text.train_fingerprint,
        evaluation=text.dev_fingerprint,
        resume_arguments=(*RESUME_ARGUMENTS, *task.resume_arguments),
    )
    loop = TrainingLoop(
        accelerator,
        model,
        optimizer,
        scheduler,
        train_loader,
        replace(task.objective, examples=lambda batch: int(batch["examples"])),
        settings,
        evaluate=evaluator,
        start_epoch=stream.start_epoch,
        seek=stream.seek,
    )
    history = start_run(args, accelerator)
    state = loop.run()
    outputs.save_model(accelerator, model, tokenizer, args.output_dir, history)
    results = {**loop.results(state.examples), **task.results}
    results |= {"epoch": state.epoch, "seed": args.seed}
    if evaluator is not None:
        if not loop.scores_are_current():
            evaluator()
        results = {**_dev_results(evaluator), **results}
    if accelerator.is_main_process:
        _write_outputs(args, results, task.name)
        outputs.push_folder(args)
    return results


def _evaluator(
    args: argparse.Namespace,
    accelerator: Accelerator,
    model: nn.Module,
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    task: PretrainingTask,
) -> TextEvaluator:
    blocks = read_blocks(sources, tokenizer, task.prepare.block_length, task.prepare.separator, args.max_eval_samples)
    loader = create_eval_dataloader(
        PreparedBlocks(blocks, task.prepare),
        args.per_device_eval_batch_size,
        stack_rows,
        args.dataloader_num_workers,
    )
    return task.evaluator(model, accelerator.prepare(loader))


def _dev_results(evaluator: TextEvaluator) -> dict[str, Any]:
    return {
        **{f"eval_{key}": value for key, value in evaluator.metrics.items()},
        "eval_samples": len(evaluator.loader.dataset),
        "eval_runtime": round(evaluator.seconds, 3),
        **evaluator.gate(),
    }


def _write_outputs(args: argparse.Namespace, results: dict[str, Any], task_name: str) -> None:
    model = Path(args.model_name_or_path).name if args.model_name_or_path else f"new {args.model_type}"
    shown = ["accuracy", *(["sentence_accuracy"] if "eval_sentence_accuracy" in results else [])]
    outputs.write_results(args, results, shown, f"{task_name}: {model}")
    scores = "no held-out text"
    if "eval_loss" in results:
        scores = f"dev loss {results['eval_loss']:.4f} (perplexity {results['eval_perplexity']:.2f}), "
        scores += f"accuracy {results['eval_accuracy']:.4f}"
    if "eval_sentence_accuracy" in results:
        scores += f", of pairs {results['eval_sentence_accuracy']:.4f}"
    print(f"{scores}; {results['steps']} steps in {results['train_runtime']:.0f} s; results in {args.output_dir}")
    if "gate_passed" in results:
        _print_gate(results)


def _print_gate(results: dict[str, Any]) -> None:
    print(
        f"gate {'passed' if results['gate_passed'] else 'FAILED'}: shuffled words cost "
        f"{results['gate_shuffled_cost']:+.3f} nats, zeroed attention {results['gate_zeroed_attention_cost']:+.3f}; "
        f"both must be at least {GATE_COST}"
    )
    if not results["gate_passed"]:
        logger.warning(
            "this is still a unigram model: it does not read its context, and no experiment on its attention shows "
            "anything. Train it longer, or with a higher --learning_rate, longer warm-up, shorter --max_length or a "
            "smaller vocabulary"
        )
