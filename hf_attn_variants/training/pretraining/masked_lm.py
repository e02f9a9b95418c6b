"""Masked-LM pretraining: masking, pairs of segments, the objective, the dev loss, and the gate that a mere unigram
model fails.

Letters: b examples, n tokens an example, m masked tokens of a batch, V tokens of the vocabulary.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..engine.dataloaders import IGNORED_LABEL
from ..engine.loop import Objective
from ..engine.models import vocabulary_size
from ..engine.tracking import progress_bar
from ..uptraining.trainable import named_attentions

__all__ = [
    "GATE_COST",
    "SENTENCE_TASKS",
    "MaskedLMEvaluator",
    "MaskedLMPreparation",
    "attention_zeroed",
    "find_head",
    "gate_results",
    "masked_lm_objective",
    "shuffle_positions",
    "word_starts",
]

# Of the chosen tokens, this share becomes the mask token, and a share up to the next bound a random token (BERT).
MASKED_SHARE, RANDOM_BOUND = 0.8, 0.9
# Nats that losing the word order, and losing attention, must each cost a model that has learned from context.
GATE_COST = 0.3
# The head's place in upstream's masked-LM classes.
HEADS = ("cls.predictions", "predictions")
MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# What random numbers are for; the first two are `text_data`'s, 4 is `span_corruption`'s.
MASKS, SHUFFLES, PAIRS = 2, 3, 5
# BERT's second task (arXiv:1810.04805, section 3.1) and ALBERT's (arXiv:1909.11942, section 3.1).
SENTENCE_TASKS = ("nsp", "sop")
# Of the pairs, this share is changed: its second segment is of other text (nsp), or both change places (sop).
CHANGED_SHARE = 0.5
UNCHANGED, CHANGED = 0, 1


def word_starts(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Says of each token whether it begins a word: a bool array [V].

    WordPiece marks the others ("##"), SentencePiece those that do ("▁"); under the latter a token without a letter or
    digit is a word of its own, as in ALBERT's code.

    Raises:
        ValueError: The vocabulary marks neither.
    """
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(vocabulary_size(tokenizer))))]
    if any(token.startswith("##") for token in tokens):
        return np.array([not token.startswith("##") for token in tokens])
    if any(token.startswith("▁") for token in tokens):
        return np.array([token.startswith("▁") or not any(map(str.isalnum, token)) for token in tokens])
    raise ValueError("--whole_word_mask: the tokenizer marks no beginnings of words (neither '##' nor '▁')")


class MaskedLMPreparation:
    """Makes a masked example of a block of tokens, padded to one length: [CLS] block [SEP], or, with a sentence task,
    [CLS] segment [SEP] segment [SEP] of the block cut in two.

    Args:
        tokenizer: Has [CLS], [SEP], [MASK] and padding tokens.
        length: n, special tokens included.
        probability: The chance of each token (with `whole_words`: of each word) to be chosen.
        seed: The run's seed.
        whole_words: Choose words instead of tokens.
        sentence_task: "nsp" (does the second segment follow, or is it of other text?), "sop" (are they in order?) or
            None.

    Raises:
        ValueError: The tokenizer lacks a token, or does not mark words.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        probability: float,
        seed: int,
        whole_words: bool = False,
        sentence_task: str | None = None,
    ):
        needed = ("cls_token_id", "sep_token_id", "mask_token_id", "pad_token_id")
        self.cls_id, self.sep_id, self.mask_id, self.pad_id = (getattr(tokenizer, name) for name in needed)
        missing = [name.removesuffix("_id") for name in needed if getattr(tokenizer, name) is None]
        if missing:
            raise ValueError(
                f"the tokenizer has no {', '.join(missing)}, and masked-LM pretraining needs one: it is for BERT and "
                "ALBERT, a T5 is pretrained by `attn-variants pretrain-t5`"
            )
        self.length, self.probability, self.seed = length, probability, seed
        self.sentence_task = sentence_task
        self.block_length, self.separator = length - (2 if sentence_task is None else 3), self.sep_id
        self.starts = word_starts(tokenizer) if whole_words else None
        self.special = np.zeros(vocabulary_size(tokenizer), dtype=bool)
        # Not `all_special_ids`: some tokenizers count punctuation among them.
        self.special[[getattr(tokenizer, name) for name in needed]] = True
        self.ordinary_ids = np.flatnonzero(~self.special)

    @property
    def needs_other(self) -> bool:
        """Whether it takes a segment from another block than its own."""
        return self.sentence_task == "nsp"

    def __call__(
        self, block: np.ndarray, key: tuple[int, ...], other: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Masks a block.

        Args:
            block: Token ids, at most `block_length`: n - 2, or n - 3 with a sentence task.
            key: (epoch, number in the epoch), of which alone, with the seed, the masks are a function.
            other: Another block, for "nsp"; without one the pair stays as it is.

        Returns:
            "input_ids", "attention_mask" and "labels" (-100 where nothing is to be predicted), each [n]; with a
            sentence task "token_type_ids" [n] and "sentence_labels" [], 1 where the pair was changed, -100 where the
            block is too short for one.
        """
        segments, sentence_label = [block], None
        if self.sentence_task is not None:
            segments, sentence_label = self._pair(block, key, other)
        ids = np.full(self.length, self.pad_id, dtype=np.int64)
        used = 1 + sum(len(segment) + 1 for segment in segments)
        ids[:used] = [self.cls_id, *(token for segment in segments for token in (*segment, self.sep_id))]
        masked, labels = self.mask(ids, np.random.default_rng((self.seed, MASKS, *key)))
        place = np.arange(self.length)
        example = {"input_ids": masked, "attention_mask": (place < used).astype(np.int64), "labels": labels}
        if sentence_label is not None:
            begin = 2 + len(segments[0])
            example["token_type_ids"] = ((place >= begin) & (place < used)).astype(np.int64)
            example["sentence_labels"] = np.array(sentence_label)
        return example

    def _pair(self, block: np.ndarray, key: tuple[int, ...], other: np.ndarray | None) -> tuple[list[np.ndarray], int]:
        if len(block) < 2:
            return [block, block[:0]], IGNORED_LABEL
        generator = np.random.default_rng((self.seed, PAIRS, *key))
        cut = generator.integers(1, len(block))
        first, second = block[:cut], block[cut:]
        if generator.random() >= CHANGED_SHARE:
            return [first, second], UNCHANGED
        if self.sentence_task == "sop":
            return [second, first], CHANGED
        if other is None:
            return [first, second], UNCHANGED
        return [first, other[: len(second)]], CHANGED

    def mask(self, ids: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Replaces chosen tokens: 80% by the mask token, 10% by a random one, 10% by themselves (arXiv:1810.04805).

        Returns:
            The inputs and the labels [n].
        """
        maskable = ~self.special[ids]
        draws = generator.random(len(ids))
        if self.starts is not None:
            after_special = np.concatenate([[True], ~maskable[:-1]])
            words = np.cumsum(self.starts[ids] | ~maskable | after_special) - 1
            draws = draws[words]
        chosen = maskable & (draws < self.probability)
        fate = generator.random(len(ids))
        replaced = np.where(fate < MASKED_SHARE, self.mask_id, generator.choice(self.ordinary_ids, len(ids)))
        inputs = np.where(chosen & (fate < RANDOM_BOUND), replaced, ids)
        return inputs, np.where(chosen, ids, IGNORED_LABEL)


def masked_lm_objective(head: nn.Module, sentence_weight: float = 0.0) -> Objective:
    """Cross-entropy of the masked tokens, summed over them, and that of the sentence task, where batches have one.

    Args:
        head: Of `find_head`; it computes the masked positions alone, which gives the same loss for a seventh of its
            work.
        sentence_weight: Masked tokens that an example's sentence label counts as; with their expected number both
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
        ValueError: The model has none that is known.
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
    attention."""

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
        """Evaluates the dev text, each batch first changed by `change`."""
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

    def gate(self) -> dict[str, Any]:
        """Evaluates twice more, without word order and without attention; see `gate_results`."""
        shuffled = self.score(shuffle_positions)
        with attention_zeroed(self.unwrapped):
            zeroed = self.score()
        return gate_results(self.metrics["loss"], shuffled.loss, zeroed.loss)


def gate_results(loss: float, shuffled_loss: float, zeroed_loss: float) -> dict[str, Any]:
    """Says whether a model reads its context: what losing the word order, and attention, costs it in nats a token.

    Returns:
        "gate_shuffled_loss", "gate_zeroed_attention_loss", their costs over `loss`, and "gate_passed": whether each is
        at least `GATE_COST`.
    """
    costs = {"gate_shuffled_cost": shuffled_loss - loss, "gate_zeroed_attention_cost": zeroed_loss - loss}
    return {
        "gate_shuffled_loss": shuffled_loss,
        "gate_zeroed_attention_loss": zeroed_loss,
        **costs,
        "gate_passed": all(cost >= GATE_COST for cost in costs.values()),
    }


def shuffle_positions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Puts the tokens of each example, with their labels, into another order; the first, the last and padding stay.

    Args:
        batch: "input_ids", "attention_mask" and "labels" [b, n].

    Returns:
        The batch, the same for the same examples.
    """
    lengths = batch["attention_mask"].sum(-1).tolist()
    order = torch.arange(batch["input_ids"].shape[1]).repeat(len(lengths), 1)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(int(batch["input_ids"][row].sum()))
        order[row, 1 : length - 1] = 1 + torch.randperm(length - 2, generator=generator)
    order = order.to(batch["input_ids"].device)
    return batch | {key: batch[key].gather(1, order) for key in ("input_ids", "labels")}


@contextmanager
def attention_zeroed(model: PreTrainedModel) -> Iterator[None]:
    """Replaces what every attention of a BERT or ALBERT model found by zeros, before its output projection.

    Raises:
        ValueError: The architecture is not one of this package's.
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
