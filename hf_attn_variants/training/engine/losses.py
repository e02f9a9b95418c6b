"""Losses that several tasks share. Letters: b examples, n target tokens, V tokens of the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .dataloaders import IGNORED_LABEL

__all__ = [
    "Objective",
    "Term",
    "compute_label_sums",
    "compute_logits",
    "compute_target_logits",
    "make_label_objective",
    "sum_by_example",
    "token_cross_entropy",
]

# Sums [b] of a loss over each example's items, and the numbers of items [b]; their quotient is the mean.
Term = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Objective:
    """What is minimised: the mean of a per-item loss over all items of a step, on every process and accumulated batch.

    Attributes:
        loss_sum: (model, batch) -> the SUM of the loss over the batch's items, a scalar with gradient.
        count: batch -> its number of items (examples, or target tokens); it must not need the model.
        examples: batch -> its number of examples, for throughput; default: the length of its first tensor.
        head_of_items: whether what follows the base model is given the counted items alone (masked tokens), which
            counts for FLOPs.
    """

    loss_sum: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    count: Callable[[dict[str, Tensor]], int]
    examples: Callable[[dict[str, Tensor]], int] = lambda batch: len(next(iter(batch.values())))
    head_of_items: bool = False


def make_label_objective(
    logits_of: Callable[[nn.Module, dict[str, Tensor]], Tensor], label_smoothing: float = 0.0
) -> Objective:
    """Cross-entropy of a batch's "labels" [b, n], summed over those that are not -100.

    Args:
        logits_of: (model, batch) -> logits [b, n, V].
        label_smoothing: the share of each label's weight that is spread evenly over all V.
    """

    def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(
            logits_of(model, batch).flatten(0, 1).float(),
            batch["labels"].flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
            label_smoothing=label_smoothing,
        )

    return Objective(loss_sum=loss_sum, count=lambda batch: int((batch["labels"] != IGNORED_LABEL).sum()))


def compute_label_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Return of each example the sum of its labels' losses, how many are predicted right, and their number [b, 3].

    Args:
        logits: [b, n, V].
        labels: [b, n], -100 where nothing is to be predicted.
    """
    losses = functional.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED_LABEL, reduction="none"
    )  # [b, n]
    right = logits.argmax(-1) == labels
    return torch.stack([part.float().sum(-1) for part in (losses, right, labels != IGNORED_LABEL)], dim=-1)


def compute_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a model's logits on a batch, its labels left out: transformers would compute a loss with them."""
    return model(**{key: value for key, value in batch.items() if key != "labels"}).logits


def compute_target_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits [b, n, V] of a batch under teacher forcing."""
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "decoder_input_ids")}
    return model(**inputs, use_cache=False).logits


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Term:
    """Cross-entropy of the labels that are not -100, in nats a token; logits [b, n, vocabulary], labels [b, n]."""
    chosen = labels >= 0
    losses = functional.cross_entropy(logits[chosen].float(), labels[chosen], reduction="none")
    return sum_by_example(losses, chosen), chosen.sum(-1)


def sum_by_example(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the sums [b] of values, one a chosen item, over the items of each example; `chosen` is [b, n]."""
    return torch.zeros(chosen.shape, device=values.device, dtype=values.dtype).masked_scatter(chosen, values).sum(-1)
