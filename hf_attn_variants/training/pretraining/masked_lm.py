"""Masked language modelling: the objective and the dev loss.

Letters: b examples, n tokens an example, m masked tokens of a batch, V tokens of the vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from ..engine.dataloaders import IGNORED_LABEL
from ..engine.losses import Objective
from ..engine.tracking import progress_bar
from .context_check import attention_zeroed, context_results, shuffle_positions

__all__ = ["MaskedLMEvaluator", "find_head", "masked_lm_objective"]

# The head's place in upstream's masked-LM classes.
HEADS = ("cls.predictions", "predictions")
MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def masked_lm_objective(head: nn.Module, sentence_weight: float = 0.0) -> Objective:
    """Cross-entropy of the masked tokens, summed over them, and that of the sentence task, where batches have one.

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
    """The module that maps hidden states to logits in a masked-LM model.

    Raises:
        ValueError: if the model has none that is known.
    """
    modules = dict(model.named_modules())
    for name in HEADS:
        if name in modules:
            return modules[name]
    raise ValueError(f"{type(model).__name__} has no masked-LM head named {' or '.join(HEADS)}")


def _logits(model: nn.Module, head: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    # Those of the masked tokens [m, V], their labels [m], and those of the sentence task [b, 2].
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


@dataclass(frozen=True)
class MaskedLMScores:
    """Means over the masked tokens of an evaluation, and over its pairs where there is a sentence task."""

    loss: float
    accuracy: float
    tokens: int
    sentence_loss: float
    sentence_accuracy: float
    pairs: int


class MaskedLMEvaluator:
    """The dev loss (ln of the pseudo-perplexity, in nats a masked token), accuracy, and both without word order or
    attention.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, loader: DataLoader, quiet: bool):
        self.accelerator, self.model, self.loader, self.quiet = accelerator, model, loader, quiet
        self.unwrapped = accelerator.unwrap_model(model)
        self.head = find_head(self.unwrapped)
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0

    def __call__(self) -> dict[str, float]:
        """Metrics of the dev text."""
        start = time.perf_counter()
        scores = self.score()
        self.metrics = {
            "loss": scores.loss,
            "perplexity": float(np.exp(min(scores.loss, 700.0))),  # exp overflows above
            "accuracy": scores.accuracy,
            "masked_tokens": scores.tokens,
        }
        if scores.pairs:
            self.metrics |= {"sentence_loss": scores.sentence_loss, "sentence_accuracy": scores.sentence_accuracy}
        self.seconds = time.perf_counter() - start
        return dict(self.metrics)

    @torch.no_grad()
    def score(self, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None) -> MaskedLMScores:
        """Evaluate the dev text, each batch first changed by `change`."""
        self.model.eval()
        gathered = []
        bar = progress_bar(self.accelerator, self.quiet, iterable=self.loader, desc="Running dev", leave=False)
        for batch in bar:
            batch = change(batch) if change is not None else batch
            logits, labels, sentence_logits = _logits(self.model, self.head, batch)
            losses = functional.cross_entropy(logits, labels, reduction="none")  # [m]
            right = (logits.argmax(-1) == labels).float()
            sums = torch.zeros(len(batch["labels"]), 6, device=losses.device)  # float64 is not on every device
            rows = (batch["labels"] != IGNORED_LABEL).nonzero()[:, 0]
            sums[:, :3].index_add_(0, rows, torch.stack([losses, right, torch.ones_like(losses)], dim=-1).float())
            if sentence_logits is not None:
                wanted = batch["sentence_labels"]
                of_pairs = functional.cross_entropy(
                    sentence_logits, wanted, ignore_index=IGNORED_LABEL, reduction="none"
                )
                sums[:, 3:] = torch.stack(
                    [of_pairs, sentence_logits.argmax(-1) == wanted, wanted != IGNORED_LABEL], dim=-1
                )
            # Rows, and not sums over batches: the last batch repeats some to give every process one.
            gathered.append(self.accelerator.gather_for_metrics(sums).cpu().double())
        loss, right, tokens, pair_loss, pair_right, pairs = torch.cat(gathered).sum(0).tolist()
        of_tokens, of_pairs = max(tokens, 1), max(pairs, 1)
        return MaskedLMScores(
            loss / of_tokens, right / of_tokens, int(tokens), pair_loss / of_pairs, pair_right / of_pairs, int(pairs)
        )

    def check_context(self) -> dict[str, Any]:
        """Evaluate twice more, without word order and without attention; see `context_results`."""
        shuffled = self.score(shuffle_positions)
        with attention_zeroed(self.unwrapped):
            zeroed = self.score()
        return context_results(self.metrics["loss"], shuffled.loss, zeroed.loss)
