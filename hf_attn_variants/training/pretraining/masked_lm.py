"""Masked language modelling: the loss to train with, and the sums to evaluate with.

Letters: b examples, n tokens an example, m masked tokens of a batch, V tokens of the vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ..engine.dataloaders import IGNORED_LABEL
from ..engine.losses import Objective

__all__ = ["find_head", "masked_lm_objective", "masked_lm_sums"]

# The head's place in upstream's masked-LM classes.
HEADS = ("cls.predictions", "predictions")
MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def masked_lm_objective(head: nn.Module, sentence_weight: float = 0.0) -> Objective:
    """Return the cross-entropy of the masked tokens, summed, and that of the sentence task, where batches have one.

    Args:
        head: of `find_head`; it computes the masked positions alone, which gives the same loss for a seventh of its
            work.
        sentence_weight: masked tokens that an example's sentence label counts as; with their expected number both
            tasks have the same weight, as in BERT.
    """

    def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels, sentence_logits = _logits(model, head, batch)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        if sentence_logits is None:
            return loss
        return loss + sentence_weight * functional.cross_entropy(
            sentence_logits, batch["sentence_labels"], ignore_index=IGNORED_LABEL, reduction="sum"
        )

    return Objective(loss_sum=loss_sum, count=lambda batch: int((batch["labels"] != IGNORED_LABEL).sum()), head=head)


def find_head(model: PreTrainedModel) -> nn.Module:
    """Find the module that maps hidden states to logits in a masked-LM model.

    Raises:
        ValueError: if the model has none that is known.
    """
    modules = dict(model.named_modules())
    for name in HEADS:
        if name in modules:
            return modules[name]
    raise ValueError(f"{type(model).__name__} has no masked-LM head named {' or '.join(HEADS)}")


def _logits(model: nn.Module, head: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the masked tokens' logits [m, V], their labels [m], and the sentence task's logits [b, 2] or None."""
    chosen = batch["labels"] != IGNORED_LABEL  # [b, n]
    # The whole model is called, since DDP and FSDP work through its forward; the head then gets [m, hidden size].
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][chosen], *inputs[1:]))
    try:
        output = model(**{name: batch[name] for name in MODEL_INPUTS if name in batch})
    finally:
        hook.remove()
    labels = batch["labels"][chosen]
    if "sentence_labels" not in batch:
        return output.logits.float(), labels, None
    sentence = output.sop_logits if "sop_logits" in output else output.seq_relationship_logits
    return output.prediction_logits.float(), labels, sentence.float()


def masked_lm_sums(model: nn.Module, head: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sums of `PretrainingTask.row_sums`: of the masked tokens and, with a sentence task, of the pairs."""
    logits, labels, sentence_logits = _logits(model, head, batch)
    losses = functional.cross_entropy(logits, labels, reduction="none")  # [m]
    right = (logits.argmax(-1) == labels).float()
    sums = torch.zeros(len(batch["labels"]), 3, device=losses.device)
    rows = (batch["labels"] != IGNORED_LABEL).nonzero()[:, 0]
    sums.index_add_(0, rows, torch.stack([losses, right, torch.ones_like(losses)], dim=-1).float())
    if sentence_logits is None:
        return sums
    wanted = batch["sentence_labels"]
    of_pairs = functional.cross_entropy(sentence_logits, wanted, ignore_index=IGNORED_LABEL, reduction="none")
    right = sentence_logits.argmax(-1) == wanted
    return torch.cat([sums, torch.stack([of_pairs, right, wanted != IGNORED_LABEL], dim=-1)], dim=-1)
