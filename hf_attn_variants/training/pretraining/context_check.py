"""Whether a pretrained model reads its context at all, or only knows how frequent tokens are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..uptraining.trainable import named_attentions

__all__ = ["MIN_COST", "attention_zeroed", "context_results", "shuffle_positions"]

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
    outputs = [module.get_submodule(site.output) for site, _, module in named_attentions(model)]
    hooks = [
        output.register_forward_pre_hook(lambda _, inputs: (torch.zeros_like(inputs[0]), *inputs[1:]))
        for output in outputs
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
