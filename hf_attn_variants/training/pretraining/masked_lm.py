"""Masked language modelling: the loss to train with, and the sums to evaluate with.

Letters: b examples, n tokens an example, m masked tokens of a batch, V tokens of the vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..engine.dataloaders import IGNORED_LABEL
from ..engine.losses import Objective

__all__ = ["masked_lm_objective", "masked_lm_sums"]

MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def masked_lm_objective(model: PreTrainedModel, sentence_weight: float = 0.0) -> Objective:
    """Return the cross-entropy of the masked tokens, summed, and that of the sentence task, where batches have one.

    Args:
        model: a masked-LM model, not yet wrapped. What follows its base model, whatever it is called, computes the
            masked positions alone, which gives the same loss for a seventh of its work.
        sentence_weight: masked tokens that an example's sentence label counts as; with their expected number both
            tasks have the same weight, as in BERT.
    """

    base_model = model.base_model

    def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels, sentence_logits = _logits(model, base_model, batch)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        if sentence_logits is None:
            return loss
        return loss + sentence_weight * functional.cross_entropy(
            sentence_logits, batch["sentence_labels"], ignore_index=IGNORED_LABEL, reduction="sum"
        )

    def count(batch: dict[str, Tensor]) -> int:
        return int((batch["labels"] != IGNORED_LABEL).sum())

    return Objective(loss_sum=loss_sum, count=count, head_of_items=True)


def _logits(model: nn.Module, base_model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the masked tokens' logits [m, V], their labels [m], and the sentence task's logits [b, 2] or None."""
    chosen = batch["labels"] != IGNORED_LABEL  # [b, n]

    def keep_chosen(_: nn.Module, inputs: tuple, output: ModelOutput) -> ModelOutput:
        output["last_hidden_state"] = output["last_hidden_state"][chosen]  # [m, hidden size]
        return output

    # The whole model is called, since DDP and FSDP work through its forward.
    hook = base_model.register_forward_hook(keep_chosen)
    try:
        output = model(**{name: batch[name] for name in MODEL_INPUTS if name in batch})
    finally:
        hook.remove()
    labels = batch["labels"][chosen]
    if "sentence_labels" not in batch:
        return output.logits.float(), labels, None
    sentence = output.sop_logits if "sop_logits" in output else output.seq_relationship_logits
    return output.prediction_logits.float(), labels, sentence.float()


def masked_lm_sums(model: nn.Module, base_model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sums of `PretrainingTask.row_sums`: of the masked tokens and, with a sentence task, of the pairs."""
    logits, labels, sentence_logits = _logits(model, base_model, batch)
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
