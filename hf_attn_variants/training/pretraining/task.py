"""Parts that all pretraining objectives share: the run, its evaluation and the check that a model uses its context."""

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
    "attention_zeroed",
    "context_results",
    "pretrain",
    "shuffle_positions",
    "stream_batches",
]

logger = logging.getLogger(__name__)


class BlockPreparation(Protocol):
    """Makes an example of a block of tokens."""

    block_length: int
    separator: int  # the token that ends each article

    @property
    def takes_other_block(self) -> bool:
        """Whether it is called with another block of the text as well, or None."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Return arrays of one shape for every block; `key` and the run's seed alone decide what is random.

        Called with `block`, its `key` and, where it takes one, another block or None.
        """


class PreparedBlocks(Dataset):
    """Held-out blocks, prepared in the same way at every evaluation, and in every run of one seed."""

    def __init__(self, blocks: Sequence[np.ndarray], prepare: BlockPreparation):
        self.blocks, self.prepare = blocks, prepare

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not self.prepare.takes_other_block:
            return self.prepare(self.blocks[index], (0, index))
        # From far away: text nearby may be of the same article.
        other = self.blocks[(index + len(self) // 2) % len(self)] if len(self) > 1 else None
        return self.prepare(self.blocks[index], (0, index), other)


@dataclass(frozen=True)
class PretrainingTask:
    """What is special about a way of pretraining.

    Attributes:
        name: shown above the curves.
        row_sums: (model, batch) -> of each example the sum of its items' losses, how many of them are right, and how
            many there are [b, 3]; with a sentence task also those three of its pair [b, 6].
        items: what the number of items is called among the metrics.
        shuffle: a batch -> the same with its words in another order, always the same one.
        results: entries that `all_results.json` gets besides the shared ones.
        without_context: what a model is called that does not read its context.
    """

    name: str
    prepare: BlockPreparation
    objective: Objective
    row_sums: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    items: str
    shuffle: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    results: dict[str, Any] = field(default_factory=dict)
    without_context: str = "unigram"


def stream_batches(
    settings: TrainingSettings,
    accelerator: Accelerator,
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    prepare: BlockPreparation,
    window: int,
) -> TrainingBatches:
    """Make the training batches of a stream of text, shuffled within windows of so many blocks; see `TextStream`."""
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
    """Evaluates the dev text: "loss" (nats an item), "perplexity", "accuracy" and the number of items."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        loader: DataLoader,
        task: PretrainingTask,
        settings: PretrainingSettings,
    ):
        super().__init__(self._scores)
        self.accelerator, self.model, self.loader = accelerator, model, loader
        self.task, self.settings = task, settings

    def _scores(self) -> dict[str, float]:
        (loss, accuracy, items), *pairs = _means(self._sums())
        perplexity = float(np.exp(min(loss, 700.0)))  # exp overflows above
        metrics = {"loss": loss, "perplexity": perplexity, "accuracy": accuracy, self.task.items: items}
        if pairs and pairs[0][2]:
            metrics["sentence_loss"], metrics["sentence_accuracy"], _ = pairs[0]
        return metrics

    def _sums(self, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda batch: batch) -> list[float]:
        def outputs(batch: dict[str, Tensor]) -> tuple[Tensor]:
            return (self.task.row_sums(self.model, change(batch)),)

        dataset: Any = self.loader.dataset
        in_order = range(len(dataset))
        rows = run_rows(self.accelerator, self.model, self.loader, in_order, outputs, "dev", self.settings)[0]
        return torch.from_numpy(rows).double().sum(0).tolist()  # not every device has float64

    def check_context(self) -> dict[str, Any]:
        """Evaluate twice more, without word order and without attention; see `context_results`."""
        shuffled = _means(self._sums(self.task.shuffle))[0][0]
        with attention_zeroed(self.accelerator.unwrap_model(self.model)):
            zeroed = _means(self._sums())[0][0]
        return context_results(self.metrics["loss"], shuffled, zeroed)


def _means(sums: Sequence[float]) -> list[tuple[float, float, int]]:
    """Return mean loss, share of right ones and number, of items and, where they are summed too, of pairs."""
    threes = [sums[i : i + 3] for i in range(0, len(sums), 3)]
    return [(loss / max(number, 1), right / max(number, 1), int(number)) for loss, right, number in threes]


# Nats that losing the word order, and losing attention, must each cost a model that has learned from context.
MIN_COST = 0.3


def context_results(loss: float, shuffled_loss: float, zeroed_loss: float) -> dict[str, Any]:
    """Say whether a model reads its context: what losing the word order, and attention, costs it in nats a token.

    Returns:
        "gate_shuffled_loss", "gate_zeroed_attention_loss", their costs over `loss`, and "gate_passed": whether each is
        at least `MIN_COST`.
    """
    costs = {"gate_shuffled_cost": shuffled_loss - loss, "gate_zeroed_attention_cost": zeroed_loss - loss}
    return {
        "gate_shuffled_loss": shuffled_loss,
        "gate_zeroed_attention_loss": zeroed_loss,
        **costs,
        "gate_passed": all(cost >= MIN_COST for cost in costs.values()),
    }


def shuffle_positions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the tokens of each example, with their labels, into another order; the first, the last and padding stay.

    Return the batch ("input_ids", "attention_mask", "labels" [b, n]), the same for the same examples.
    """
    lengths = batch["attention_mask"].sum(-1).tolist()
    order = torch.arange(batch["input_ids"].shape[1]).repeat(len(lengths), 1)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(int(batch["input_ids"][row].sum()))
        order[row, 1 : length - 1] = 1 + torch.randperm(max(length - 2, 0), generator=generator)
    order = order.to(batch["input_ids"].device)
    return batch | {key: batch[key].gather(1, order) for key in ("input_ids", "labels")}


@contextmanager
def attention_zeroed(model: PreTrainedModel) -> Iterator[None]:
    """Replace what every attention of a BERT or ALBERT model found by zeros, before its output projection.

    Raises:
        ValueError: if the architecture is not one of this package's.
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
    """Train, save, evaluate, and try whether the model reads its context.

    The model was made or loaded with the run's seed set. Return the results that `all_results.json` begins with.

    Raises:
        ValueError, OSError: if the text is wrong, or something cannot be written.
        NonFiniteLossError: if training diverged.
    """
    packing = tokenizer, task.prepare.block_length, task.prepare.separator
    if text.train:  # text without a token is an error now
        read_blocks(text.train, *packing, limit=1)
    set_seed(settings.seed, device_specific=True)  # processes drop out different units
    batches = stream_batches(settings, accelerator, text.train, tokenizer, task.prepare, settings.shuffle_buffer_size)
    total_steps = count_training_steps(
        None, settings.gradient_accumulation_steps, settings.num_train_epochs, settings.max_train_steps
    )
    model, optimizer, scheduler = prepare_training(settings, accelerator, model, total_steps)
    evaluator = None
    if text.dev:
        rows = PreparedBlocks(read_blocks(text.dev, *packing, settings.max_eval_samples), task.prepare)
        if not any((rows[i]["labels"] != IGNORED_LABEL).any() for i in range(len(rows))):
            raise ValueError(
                f"{text.dev[0].name} is too short: no token of the held-out text is masked, so nothing would be scored"
            )
        workers = settings.dataloader_num_workers
        loader = create_eval_dataloader(rows, settings.per_device_eval_batch_size, stack_rows, workers)
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
    shown = ["accuracy", *(["sentence_accuracy"] if "eval_sentence_accuracy" in results else [])]
    outputs.write_results(settings, results, shown, f"{task.name}: {get_model_name(settings)}")
    scores = "no held-out text"
    if "eval_loss" in results:
        scores = f"dev loss {results['eval_loss']:.4f} (perplexity {results['eval_perplexity']:.2f}), "
        scores += f"accuracy {results['eval_accuracy']:.4f}"
    if "eval_sentence_accuracy" in results:
        scores += f", of pairs {results['eval_sentence_accuracy']:.4f}"
    print(f"{scores}; {results['steps']} steps in {results['train_runtime']:.0f} s; results in {settings.output_dir}")
    if "gate_passed" in results:
        _print_context_check(results, task)


def _print_context_check(results: dict[str, Any], task: PretrainingTask) -> None:
    print(
        f"gate {'passed' if results['gate_passed'] else 'FAILED'}: shuffled words cost "
        f"{results['gate_shuffled_cost']:+.3f} nats, zeroed attention {results['gate_zeroed_attention_cost']:+.3f}; "
        f"both must be at least {MIN_COST}"
    )
    if not results["gate_passed"]:
        logger.warning(
            "this is still a %s model: it does not read its context, and no experiment on its attention shows "
            "anything. Train it longer, or with a higher --learning_rate, longer warm-up, shorter --max_length or a "
            "smaller vocabulary",
            task.without_context,
        )
