"""Parts of all pretraining objectives: the run, the evaluation, and the check that a model uses its context."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..engine import outputs
from ..engine.dataloaders import IGNORED_LABEL, TrainingBatches, create_eval_dataloader, create_stream_dataloader
from ..engine.finetune import MetricEvaluator, run_rows
from ..engine.loop import TrainingLoop
from ..engine.losses import Objective
from ..engine.models import get_model_name, iterate_attentions
from ..engine.optimization import prepare_training
from ..engine.session import start_run
from ..engine.settings import LoopSettings, TrainingSettings, count_training_steps
from .settings import PretrainingSettings
from .text_stream import PretrainingText, TextSource, TextStream, read_blocks, stack_rows

__all__ = [
    "MIN_COST",
    "BlockPreparation",
    "PreparedBlocks",
    "PretrainingTask",
    "TextEvaluator",
    "compute_context_results",
    "make_stream_batches",
    "pretrain",
    "shuffle_positions",
    "zero_attention",
]

logger = logging.getLogger(__name__)


class BlockPreparation(Protocol):
    """Preparation of an example from a block of tokens.

    Attributes:
        block_length: The length of a block in tokens.
        separator: The token that ends each article.
    """

    block_length: int
    separator: int

    @property
    def takes_other_block(self) -> bool:
        """Whether the preparation also takes another block of the text, or None."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Return arrays that have the same shapes for every block.

        The arguments are `block`, its `key` and, if `takes_other_block` is true, another block or None. Randomness
        depends only on `key` and on the seed of the run.
        """


class PreparedBlocks(Dataset):
    """Held-out blocks. They are prepared in the same way in every evaluation and in every run with the same seed."""

    def __init__(self, blocks: Sequence[np.ndarray], prepare: BlockPreparation):
        self.blocks, self.prepare = blocks, prepare

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not self.prepare.takes_other_block:
            return self.prepare(self.blocks[index], (0, index))
        # The other block is far away, because neighboring text may be from the same article.
        other = self.blocks[(index + len(self) // 2) % len(self)] if len(self) > 1 else None
        return self.prepare(self.blocks[index], (0, index), other)


@dataclass(frozen=True)
class PretrainingTask:
    """The parts in which a pretraining objective differs from others.

    Attributes:
        name: The title of the curves.
        prepare: The preparation of examples.
        objective: The training loss.
        row_sums: Maps (model, batch) to sums over the items of each example: the loss, the number of correct items and
            the number of items [b, 3]. A sentence task adds the same three sums of the pairs [b, 6].
        items: The name of the number of items among the metrics.
        shuffle: Maps a batch to the same batch with shuffled words. The order is always the same.
        results: Additional entries of `all_results.json`.
        without_context: The name of a model that does not use its context, such as "unigram".
    """

    name: str
    prepare: BlockPreparation
    objective: Objective
    row_sums: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    items: str
    shuffle: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    results: dict[str, Any] = field(default_factory=dict)
    without_context: str = "unigram"


def make_stream_batches(
    settings: TrainingSettings,
    accelerator: Accelerator,
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    prepare: BlockPreparation,
    window: int,
) -> TrainingBatches:
    """Make the training batches of a text stream.

    Args:
        settings: The settings of the run.
        accelerator: The accelerator.
        sources: The text.
        tokenizer: The tokenizer.
        prepare: The preparation of examples.
        window: The number of blocks that are shuffled together (see `TextStream`).
    """
    stream = TextStream(
        sources,
        tokenizer,
        prepare.block_length,
        prepare.separator,
        prepare,
        settings.per_device_train_batch_size,
        settings.seed,
        window,
        accelerator.process_index,
        accelerator.num_processes,
        prepare.takes_other_block,
    )
    loader = create_stream_dataloader(accelerator, stream, settings.seed, settings.dataloader_num_workers)
    return TrainingBatches(loader, stream.start_epoch, seek=stream.seek)


class TextEvaluator(MetricEvaluator):
    """Evaluator of held-out text: "loss" (nats per item), "perplexity", "accuracy" and the number of items."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        loader: DataLoader,
        task: PretrainingTask,
        settings: PretrainingSettings,
    ):
        super().__init__(self._compute_scores)
        self.accelerator, self.model, self.loader = accelerator, model, loader
        self.task, self.settings = task, settings

    def _compute_scores(self) -> dict[str, float]:
        """Return the metrics of the held-out text."""
        (loss, accuracy, items), *pairs = _compute_means(self._compute_sums())
        perplexity = float(np.exp(min(loss, 700.0)))  # larger losses would overflow
        metrics = {"loss": loss, "perplexity": perplexity, "accuracy": accuracy, self.task.items: items}
        if pairs and pairs[0][2]:
            metrics["sentence_loss"], metrics["sentence_accuracy"], _ = pairs[0]
        return metrics

    def _compute_sums(
        self, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda batch: batch
    ) -> list[float]:
        """Return the sums of `PretrainingTask.row_sums` over all rows, with batches that `change` modifies."""

        def outputs(batch: dict[str, Tensor]) -> tuple[Tensor]:
            return (self.task.row_sums(self.model, change(batch)),)

        dataset: Any = self.loader.dataset
        row_order = range(len(dataset))
        rows = run_rows(self.accelerator, self.model, self.loader, row_order, outputs, "dev", self.settings)[0]
        return torch.from_numpy(rows).double().sum(0).tolist()  # on the CPU, because not every device has float64

    def check_context(self) -> dict[str, Any]:
        """Evaluate the model without word order and without attention. See `compute_context_results`."""
        shuffled = _compute_means(self._compute_sums(self.task.shuffle))[0][0]
        with zero_attention(self.accelerator.unwrap_model(self.model)):
            zeroed = _compute_means(self._compute_sums())[0][0]
        return compute_context_results(self.metrics["loss"], shuffled, zeroed)


def _compute_means(sums: Sequence[float]) -> list[tuple[float, float, int]]:
    """Return the mean loss, the accuracy and the number of items, and the same of pairs if their sums are present."""
    triples = [sums[i : i + 3] for i in range(0, len(sums), 3)]
    return [(loss / max(number, 1), right / max(number, 1), int(number)) for loss, right, number in triples]


# The minimum increase of the loss in nats without word order, and without attention, if a model uses its context.
MIN_COST = 0.3


def compute_context_results(loss: float, shuffled_loss: float, zeroed_loss: float) -> dict[str, Any]:
    """Return whether a model uses its context, from the increase of its loss without word order or attention.

    Args:
        loss: The loss in nats per token.
        shuffled_loss: The loss with shuffled words.
        zeroed_loss: The loss with zeroed attention outputs.

    Returns:
        "gate_shuffled_loss" and "gate_zeroed_attention_loss", the increases "gate_shuffled_cost" and
        "gate_zeroed_attention_cost", and "gate_passed", which is true if both increases are at least `MIN_COST`.
    """
    costs = {"gate_shuffled_cost": shuffled_loss - loss, "gate_zeroed_attention_cost": zeroed_loss - loss}
    return {
        "gate_shuffled_loss": shuffled_loss,
        "gate_zeroed_attention_loss": zeroed_loss,
        **costs,
        "gate_passed": all(cost >= MIN_COST for cost in costs.values()),
    }


def shuffle_positions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Shuffle the tokens of each example together with their labels, always in the same way.

    The first token, the last token and padding do not move.

    Args:
        batch: "input_ids", "attention_mask" and "labels" [b, n].
    """
    lengths = batch["attention_mask"].sum(-1).tolist()
    order = torch.arange(batch["input_ids"].shape[1]).repeat(len(lengths), 1)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(int(batch["input_ids"][row].sum()))
        order[row, 1 : length - 1] = 1 + torch.randperm(max(length - 2, 0), generator=generator)
    order = order.to(batch["input_ids"].device)
    return batch | {key: batch[key].gather(1, order) for key in ("input_ids", "labels")}


@contextmanager
def zero_attention(model: PreTrainedModel) -> Iterator[None]:
    """Replace the attention outputs of a model by zeros, before the output projections.

    Raises:
        ValueError: If this package does not support the architecture.
    """
    outputs = [module.get_submodule(site.output) for site, _, module in iterate_attentions(model)]
    hooks = [
        output.register_forward_pre_hook(lambda _, inputs: (torch.zeros_like(inputs[0]), *inputs[1:]))
        for output in outputs
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def pretrain(
    settings: PretrainingSettings,
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: PretrainingText,
    task: PretrainingTask,
) -> dict[str, Any]:
    """Train a model, save and evaluate it, check whether it uses its context, and return the results.

    Args:
        model: It must have been made or loaded after the seed of the run was set.
        text: The text for training and evaluation.
        task: The objective.

    Raises:
        ValueError, OSError: If the text is wrong, or if a file cannot be written.
        NonFiniteLossError: If training diverges.
    """
    packing = tokenizer, task.prepare.block_length, task.prepare.separator
    if text.train:  # raises an error now if the text has no tokens
        read_blocks(text.train, *packing, limit=1)
    set_seed(settings.seed, device_specific=True)  # each process has its own dropout
    buffer_size, epochs = settings.shuffle_buffer_size, settings.num_train_epochs
    batches = make_stream_batches(settings, accelerator, text.train, tokenizer, task.prepare, buffer_size)
    total_steps = count_training_steps(None, settings.gradient_accumulation_steps, epochs, settings.max_train_steps)
    model, optimizer, scheduler = prepare_training(settings, accelerator, model, total_steps)
    evaluator = None
    if text.dev:
        rows = PreparedBlocks(read_blocks(text.dev, *packing, settings.max_eval_samples), task.prepare)
        if not any((rows[i]["labels"] != IGNORED_LABEL).any() for i in range(len(rows))):
            raise ValueError(f"{text.dev[0].name} must have a masked token to evaluate. Use longer text.")
        batch_size, workers = settings.per_device_eval_batch_size, settings.dataloader_num_workers
        loader = create_eval_dataloader(rows, batch_size, stack_rows, workers)
        evaluator = TextEvaluator(accelerator, model, accelerator.prepare(loader), task, settings)
    loop = TrainingLoop(
        accelerator,
        model,
        optimizer,
        scheduler,
        batches.loader,
        replace(task.objective, examples=lambda batch: int(batch["examples"])),
        LoopSettings.from_settings(settings, total_steps, "loss", text.train_fingerprint, text.dev_fingerprint),
        evaluate=evaluator,
        start_epoch=batches.start_epoch,
        seek=batches.seek,
    )
    history = start_run(settings, accelerator)
    state = loop.run()
    outputs.save_model(accelerator, model, tokenizer, settings, history)
    results = {**loop.results(state.examples), **task.results, "epoch": state.epoch, "seed": settings.seed}
    if evaluator is not None:
        if not loop.has_current_scores():
            evaluator()
        dev = {f"eval_{key}": value for key, value in evaluator.metrics.items()}
        dev |= {"eval_samples": len(rows), "eval_runtime": round(evaluator.seconds, 3), **evaluator.check_context()}
        results = dev | results
    if accelerator.is_main_process:
        _write_outputs(settings, results, task)
    return results


def _write_outputs(settings: PretrainingSettings, results: dict[str, Any], task: PretrainingTask) -> None:
    """Write the results, and print their summary."""
    shown_metrics = ["accuracy", *(["sentence_accuracy"] if "eval_sentence_accuracy" in results else [])]
    outputs.write_results(settings, results, shown_metrics, f"{task.name}: {get_model_name(settings)}")
    scores = "no held-out text"
    if "eval_loss" in results:
        scores = f"dev loss {results['eval_loss']:.4f} (perplexity {results['eval_perplexity']:.2f}), "
        scores += f"accuracy {results['eval_accuracy']:.4f}"
    if "eval_sentence_accuracy" in results:
        scores += f", accuracy of pairs {results['eval_sentence_accuracy']:.4f}"
    print(f"{scores}; {results['steps']} steps in {results['train_runtime']:.0f} s; results in {settings.output_dir}")
    if "gate_passed" in results:
        _print_context_check(results, task)


def _print_context_check(results: dict[str, Any], task: PretrainingTask) -> None:
    """Print whether the model uses its context, and warn if it does not."""
    print(
        f"context check {'passed' if results['gate_passed'] else 'FAILED'}: shuffled words increase the loss by "
        f"{results['gate_shuffled_cost']:+.3f} nats, zeroed attention by "
        f"{results['gate_zeroed_attention_cost']:+.3f}; both must be at least {MIN_COST}"
    )
    if not results["gate_passed"]:
        logger.warning(
            "The model is still a %s model. It does not use its context, so experiments on its attention show "
            "nothing. Train it longer, or with a higher --learning_rate, a longer warm-up, a shorter --max_length or "
            "a smaller vocabulary.",
            task.without_context,
        )
