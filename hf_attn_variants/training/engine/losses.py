"""Losses that several tasks share.

Shapes use these letters: b is the number of examples, n the number of target tokens, and V the vocabulary size.
"""

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

# The sum [b] of a loss over the items of each example, and the number of items [b]. Their quotient is the mean.
Term = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Objective:
    """The training loss: a mean over all items of an optimizer step, on all processes and accumulated batches.

    Attributes:
        loss_sum: Maps (model, batch) to the sum (not the mean) of the loss over the items of the batch, a scalar with
            gradient.
        count: Maps a batch to its number of items (examples or target tokens). It does not need the model.
        examples: Maps a batch to its number of examples, for the throughput. The default is the length of the first
            tensor.
        head_of_items: Whether the layers after the base model process only the counted items (the masked tokens).
            The FLOPs depend on it.
    """

    loss_sum: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    count: Callable[[dict[str, Tensor]], int]
    examples: Callable[[dict[str, Tensor]], int] = lambda batch: len(next(iter(batch.values())))
    head_of_items: bool = False


def make_label_objective(
    logits_of: Callable[[nn.Module, dict[str, Tensor]], Tensor], label_smoothing: float = 0.0
) -> Objective:
    """Make an objective that sums the cross-entropy of all "labels" [b, n] of a batch that are not -100.

    Args:
        logits_of: Maps (model, batch) to logits [b, n, V].
        label_smoothing: The share of the weight of each label that is distributed evenly over all V classes.
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
    """Return the sum of losses, the number of correct predictions and the number of labels per example [b, 3].

    Args:
        logits: [b, n, V].
        labels: [b, n], -100 at positions without a label.
    """
    losses = functional.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED_LABEL, reduction="none"
    )  # [b, n]
    correct = logits.argmax(-1) == labels
    return torch.stack([part.float().sum(-1) for part in (losses, correct, labels != IGNORED_LABEL)], dim=-1)


def compute_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits of a model for a batch, without its labels, because Transformers would compute a loss."""
    return model(**{key: value for key, value in batch.items() if key != "labels"}).logits


def compute_target_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits [b, n, V] of an encoder-decoder for a batch, with teacher forcing."""
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "decoder_input_ids")}
    return model(**inputs, use_cache=False).logits


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Term:
    """Return the cross-entropy of the labels that are not -100, in nats.

    Args:
        logits: [b, n, V].
        labels: [b, n].

    Returns:
        The sums [b] over the tokens of each example, and the numbers of tokens [b].
    """
    chosen = labels >= 0
    losses = functional.cross_entropy(logits[chosen].float(), labels[chosen], reduction="none")
    return sum_by_example(losses, chosen), chosen.sum(-1)


def sum_by_example(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the sums [b] over the chosen items of each example.

    Args:
        values: One value per chosen item, example by example.
        chosen: [b, n], True for the chosen items.
    """
    return torch.zeros(chosen.shape, device=values.device, dtype=values.dtype).masked_scatter(chosen, values).sum(-1)
