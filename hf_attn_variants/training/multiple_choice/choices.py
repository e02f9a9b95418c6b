"""Questions with their choices as rows, as batches of tokens, and what a model makes of them.

Letters: b questions, c the choices of the question that has most, n tokens.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from ..classification.splits import ClassificationSplit
from ..engine.losses import Objective, plain_logits

__all__ = ["ChoiceCollator", "ChoiceSplit", "choice_logits", "choice_objective", "tokenize_choices", "word_choice"]

logger = logging.getLogger(__name__)


@dataclass
class ChoiceSplit(ClassificationSplit):
    """The questions of one split.

    `data` has the columns `text1` (what each choice is read behind: the context, or the question where there is none),
    `text2` (a list: the texts that are read behind it, one a choice), `choices` (a list: their own texts), `question`
    (None where `text1` is all there is), `label` (the place of the right one, where it is known), and `index` and
    `file` as every split.
    """

    @property
    def most_choices(self) -> int:
        """The choices of the question that has most."""
        return max(map(len, self.data["text2"]), default=0)


def word_choice(question: str | None, choice: str, blank: str | None = None) -> str:
    """Return a question and a choice as one text: the choice in the place of the blank, or behind the question."""
    if question and blank and blank in question:
        return question.replace(blank, choice)
    return f"{question} {choice}" if question else choice


def tokenize_choices(split: ChoiceSplit, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Tokenise a split without padding; that is done per batch. The longer text of a pair is cut first.

    Return the tokenizer's columns (of each question a list of ints a choice), `label` where there is one, and
    `length`: the tokens of all its choices.
    """

    def encode(rows: dict) -> dict:
        counts = [len(texts) for texts in rows["text2"]]
        firsts = [text for text, count in zip(rows["text1"], counts, strict=True) for _ in range(count)]
        seconds = list(itertools.chain.from_iterable(rows["text2"]))
        flat = dict(tokenizer(firsts, seconds, truncation=True, max_length=max_length, padding=False))
        encoded: dict[str, Any] = {name: _by_question(values, counts) for name, values in flat.items()}
        encoded["length"] = [sum(map(len, choices)) for choices in encoded["input_ids"]]
        encoded["alike"] = [len({*map(tuple, choices)}) < len(choices) for choices in encoded["input_ids"]]
        encoded["full"] = [any(len(ids) == max_length for ids in choices) for choices in encoded["input_ids"]]
        return encoded

    unused = [name for name in split.data.column_names if name != "label"]
    # A longer name than this leaves no room for the bar in 80 columns.
    shown = f"{split.name.replace('validation', 'dev')} tokens"
    data = split.data.map(encode, batched=True, remove_columns=unused, desc=shown)
    if full := sum(data["full"]):
        message = (
            "%s: %d of %d questions have a choice that fills --max_length %d: it, or its context, may have been cut"
        )
        logger.info(message, split.name, full, len(data), max_length)
    if alike := [i for i, same in enumerate(data["alike"]) if same]:
        message = (
            "%s: %d of %d questions have choices that are the same tokens to the model, written so or cut at "
            "--max_length %d; the first is %s"
        )
        logger.warning(message, split.name, len(alike), len(data), max_length, split.where(alike[0]))
    return data.remove_columns(["alike", "full"])


def _by_question(values: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    ends = list(itertools.accumulate(counts))
    return [values[end - count : end] for end, count in zip(ends, counts, strict=True)]


class ChoiceCollator:
    """Makes batches of rows of `tokenize_choices`: the tokenizer's inputs [b, c, n], and "labels" [b] where known.

    Where a question has fewer than c choices, the last ones have no token in their "attention_mask".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pad_to_multiple_of: int | None):
        self.pad = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=pad_to_multiple_of)
        self.padding: dict[str, Any] = {"input_ids": tokenizer.pad_token_id}

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        counts = [len(row["input_ids"]) for row in rows]
        names = [name for name in rows[0] if name not in ("label", "length")]
        flat = [{name: row[name][i] for name in names} for row in rows for i in range(len(row["input_ids"]))]
        most = max(counts)
        there = (torch.arange(most) < torch.tensor(counts).unsqueeze(1)).flatten()  # [b * c]
        batch = {}
        for name, values in self.pad(flat).items():  # [choices of all, n]
            full = values.new_full((len(there), values.shape[-1]), self.padding.get(name, 0))
            full[there] = values
            batch[name] = full.unflatten(0, (len(rows), most))
        if "label" in rows[0]:
            batch["labels"] = torch.tensor([row["label"] for row in rows])
        return batch


def choice_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits of a batch's choices [b, c], minus infinity where a question has no such choice.

    Transformers' multiple-choice heads score each choice by itself, but take the same number of choices for every
    question. So each choice is passed as a question with one choice, and choices that are not there are not computed.
    """
    there = batch["attention_mask"].any(-1)  # [b, c]
    inputs = {name: tensor[there].unsqueeze(1) for name, tensor in batch.items() if name != "labels"}
    found = plain_logits(model, inputs).float()  # [choices, 1]
    return found.new_full(there.shape, -torch.inf).masked_scatter(there, found)


def choice_objective() -> Objective:
    """Return the loss: the cross-entropy of each question's right choice among its choices, summed over questions."""
    return Objective(
        loss_sum=lambda model, batch: functional.cross_entropy(
            choice_logits(model, batch), batch["labels"], reduction="sum"
        ),
        count=lambda batch: len(batch["labels"]),
    )
