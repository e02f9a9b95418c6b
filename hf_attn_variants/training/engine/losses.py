"""Losses that several tasks share. Letters: b examples, n target tokens, V tokens of the vocabulary."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .dataloaders import IGNORED_LABEL
from .loop import Objective

__all__ = ["Term", "seq2seq_objective", "sums_by_example", "target_logits", "token_cross_entropy"]

# Sums [b] of a loss over each example's items, and the numbers of items [b]; their quotient is the mean.
Term = tuple[Tensor, Tensor]


def seq2seq_objective(label_smoothing: float = 0.0) -> Objective:
    """Cross-entropy of the target tokens under teacher forcing, summed over them.

    Args:
        label_smoothing: The share of each target's weight that is spread evenly over the vocabulary.
    """

    def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = target_logits(model, batch)  # [b, n, V], [b, n]
        return functional.cross_entropy(
            logits.flatten(0, 1).float(),
            labels.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
            label_smoothing=label_smoothing,
        )

    return Objective(loss_sum=loss_sum, count=lambda batch: int((batch["labels"] != IGNORED_LABEL).sum()))


def target_logits(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits [b, n, V] of a batch under teacher forcing, and its labels [b, n]."""
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "decoder_input_ids")}
    return model(**inputs, use_cache=False).logits, batch["labels"]


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Term:
    """Cross-entropy of the labels that are not -100, in nats a token; logits [b, n, vocabulary], labels [b, n]."""
    chosen = labels >= 0
    losses = functional.cross_entropy(logits[chosen].float(), labels[chosen], reduction="none")
    return sums_by_example(losses, chosen), chosen.sum(-1)


def sums_by_example(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the sums [b] of values, one a chosen item, over the items of each example; `chosen` is [b, n]."""
    return torch.zeros(chosen.shape, device=values.device, dtype=values.dtype).masked_scatter(chosen, values).sum(-1)
