"""Encoder-decoders choose in words: they read a question with its choices, and the likeliest choice is the answer.

A question is worded as UnifiedQA words it (arXiv:2005.00700), and learned by writing the text of the right choice. The
answer is the choice with the largest log-probability, as T0 ranks choices (arXiv:2110.08207): that of the whole text
with its end, not divided by its length.

Letters: b questions, c the choices of the question that has most, n tokens of a source, t of a choice.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, DataCollatorWithPadding, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ...languages import set_languages
from ..engine.dataloaders import IGNORED_LABEL
from ..engine.losses import Objective, label_objective, target_logits
from ..engine.models import load_model
from ..engine.new_model import check_end_token
from ..engine.settings import FineTuningSettings
from ..engine.tokenizers import check_max_length, load_tokenizer
from .choices import ChoiceSplit

__all__ = ["ChoiceWords", "WordedCollator", "choice_log_probabilities", "word_question"]

logger = logging.getLogger(__name__)
# UnifiedQA's mark between a question, its choices and its context: a backslash and an n, for T5 reads no line breaks.
# T5 has no backslash either, and reads its unknown token there, as UnifiedQA's models do.
BREAK = " \\n "


def word_question(question: str | None, context: str, choices: Sequence[str]) -> str:
    r"""Return a question, its choices and its context as one text: "question \n (A) yes (B) no \n context".

    The context comes last, so that it is what `max_length` cuts. Without a question the context stands in its place.
    """
    listed = " ".join(f"({_letter(i)}) {choice}" for i, choice in enumerate(choices))
    return BREAK.join((context, listed) if question is None else (question, listed, context))


def _letter(place: int) -> str:
    """Return A to Z for the first choices, and numbers from 27 on for others."""
    return chr(ord("A") + place) if place < 26 else str(place + 1)


def _word_row(row: dict[str, Any]) -> str:
    return word_question(row["question"], row["text1"], row["choices"])


class ChoiceWords:
    """The way in which an encoder-decoder chooses.

    Args:
        settings, config: the run's, and the checkpoint's.
        accelerator: the run's.
        word: a row of a split -> what the model reads.

    Attributes:
        tokenizer: the model's.
        collate: rows of `tokenize` -> a batch.

    Raises:
        ValueError: if texts of the length asked for do not fit, the decoder cannot begin or its texts do not end, or
            the model reads several languages and was not saved with two of them.
    """

    def __init__(
        self,
        settings: FineTuningSettings,
        config: PreTrainedConfig,
        accelerator: Accelerator,
        word: Callable[[dict[str, Any]], str] = _word_row,
    ):
        self.settings, self.config, self.accelerator, self.word = settings, config, accelerator, word
        name = settings.model_name_or_path
        self.tokenizer = load_tokenizer(settings, config)
        if hasattr(self.tokenizer, "src_lang") and getattr(self.tokenizer, "tgt_lang", None) is None:
            raise ValueError(
                f"{name} ({config.model_type}) reads several languages, and was not saved with those to read and to "
                "write: train it by `attn-variants seq2seq` with --source_lang and --target_lang, or take a T5 or BART"
            )
        self.target_start = set_languages(self.tokenizer, config, None, None)
        if self.target_start is not None:
            config.decoder_start_token_id = self.target_start.decoder_start_token_id
        if config.decoder_start_token_id is None:
            raise ValueError(f"{name} has no decoder_start_token_id: its decoder could not begin")
        logger.info("%s (%s) reads each question as text; its likeliest choice is the answer", name, config.model_type)
        check_end_token(settings, self.tokenizer)
        check_max_length(settings.max_length, config, self.tokenizer, multiple=settings.pad_to_multiple_of)
        self.collate = WordedCollator(self.tokenizer, config.decoder_start_token_id, settings.pad_to_multiple_of)

    def load_model(self) -> PreTrainedModel:
        """Return the model to train."""
        model = load_model(self.settings, self.config, AutoModelForSeq2SeqLM)
        if self.target_start is not None:
            self.target_start.give(model)
        return model

    def objective(self) -> Objective:
        """Return the loss: the cross-entropy of the right choices' tokens."""
        return label_objective(target_logits)

    def tokenize(self, split: ChoiceSplit) -> Dataset:
        """Return a split's rows: the tokenizer's columns, `choices` (token ids each), `label` if known, `length`."""

        # Without `self`: datasets takes a hash of all that the function holds, of an accelerator for two seconds.
        tokenizer, word = self.tokenizer, self.word
        options: dict[str, Any] = {"truncation": True, "max_length": self.settings.max_length, "padding": False}

        def encode(rows: dict[str, list]) -> dict[str, Any]:
            each = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
            encoded = dict(tokenizer([word(row) for row in each], **options))
            encoded["length"] = [len(ids) for ids in encoded["input_ids"]]
            choices = [choice for row in each for choice in row["choices"]]
            ids = iter(tokenizer(text_target=choices, **options)["input_ids"])
            encoded["choices"] = [[next(ids) for _ in row["choices"]] for row in each]
            encoded["alike"] = [len({*map(tuple, choices)}) < len(choices) for choices in encoded["choices"]]
            return encoded

        unused = [name for name in split.data.column_names if name != "label"]
        # A longer name than this leaves no room for the bar in 80 columns.
        shown = f"{split.name.replace('validation', 'dev')} tokens"
        data = split.data.map(encode, batched=True, remove_columns=unused, desc=shown)
        if full := sum(length == self.settings.max_length for length in data["length"]):
            message = "%s: %d of %d questions fill --max_length %d and may have been cut"
            logger.info(message, split.name, full, len(data), self.settings.max_length)
        if alike := [i for i, same in enumerate(data["alike"]) if same]:
            message = "%s: %d of %d questions have choices that are the same tokens to the model; the first is %s"
            logger.warning(message, split.name, len(alike), len(data), split.where(alike[0]))
        return data.remove_columns("alike")

    def scores(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the log-probabilities of a batch's choices [b, c], minus infinity where there is no such choice."""
        with self.accelerator.autocast():  # accelerate's own is around the model, whose encoder is called alone
            return choice_log_probabilities(self.accelerator.unwrap_model(model), batch)


class WordedCollator:
    """Makes batches of rows of `ChoiceWords.tokenize`.

    They have the tokenizer's inputs [b, n]. Rows with a label make a batch of teacher forcing: "labels" and
    "decoder_input_ids" [b, t] of the right choices. Others make one to choose from: "choices" and
    "decoder_input_ids" [b, c, t]. Labels and choices are -100 where there is no token.
    """

    def __init__(self, tokenizer: Any, decoder_start_token_id: int, pad_to_multiple_of: int | None):
        self.pad = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=pad_to_multiple_of)
        self.padding, self.start = tokenizer.pad_token_id, decoder_start_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        sources = [{k: v for k, v in row.items() if k not in ("choices", "label", "length")} for row in rows]
        batch = dict(self.pad(sources))
        if "label" in rows[0]:
            labels = self._padded([[row["choices"][row["label"]]] for row in rows])[:, 0]
            return {**batch, "labels": labels, "decoder_input_ids": self._shifted(labels)}
        choices = self._padded([row["choices"] for row in rows])
        return {**batch, "choices": choices, "decoder_input_ids": self._shifted(choices)}

    def _padded(self, questions: list[list[list[int]]]) -> Tensor:
        most, longest = max(map(len, questions)), max(len(ids) for each in questions for ids in each)
        found = torch.full((len(questions), most, longest), IGNORED_LABEL)
        for i, choices in enumerate(questions):
            for j, ids in enumerate(choices):
                found[i, j, : len(ids)] = torch.tensor(ids)
        return found

    def _shifted(self, labels: Tensor) -> Tensor:
        """Return what a decoder reads: labels one to the right, behind its start."""
        ids = labels.masked_fill(labels == IGNORED_LABEL, self.padding)
        return torch.cat([torch.full_like(ids[..., :1], self.start), ids[..., :-1]], dim=-1)


def choice_log_probabilities(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return the log-probability of each choice's tokens behind its question, in nats, summed over them [b, c].

    It is minus infinity where a question has no such choice. The encoder reads a question once.

    Args:
        model: an encoder-decoder, not wrapped.
        batch: of `WordedCollator`, to choose from.
    """
    choices = batch["choices"]  # [b, c, t]
    there = (choices != IGNORED_LABEL).any(-1)  # [b, c]
    counts, mask = there.sum(-1), batch["attention_mask"]
    states = model.get_encoder()(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state  # [b, n, d]
    logits = model(
        encoder_outputs=BaseModelOutput(last_hidden_state=states.repeat_interleave(counts, 0)),
        attention_mask=mask.repeat_interleave(counts, 0),
        decoder_input_ids=batch["decoder_input_ids"][there],
        use_cache=False,
    ).logits  # [choices, t, V]
    labels = choices[there]
    chosen = logits.float().log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    found = chosen.masked_fill(labels == IGNORED_LABEL, 0.0).sum(-1)
    return found.new_full(there.shape, -torch.inf).masked_scatter(there, found)
