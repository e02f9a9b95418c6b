"""Two ways to choose: an encoder with a multiple-choice head, and an encoder-decoder that writes the answer.

Letters in shapes: b questions, c choices of the question with the most, n tokens of a text, t tokens of a choice.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForMultipleChoice, AutoModelForSeq2SeqLM, DataCollatorWithPadding, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_attn_variants.training.classification.data import ClassificationSplit
from hf_attn_variants.training.engine.dataloaders import IGNORED_LABEL
from hf_attn_variants.training.engine.losses import (
    Objective,
    compute_logits,
    compute_target_logits,
    make_label_objective,
)
from hf_attn_variants.training.engine.models import check_end_token, check_trained_head, load_model
from hf_attn_variants.training.engine.tokenizers import check_max_length, fit_token_types, load_tokenizer

HEAD = "ForMultipleChoice"


class ChoiceHead:
    """An encoder reads each choice after its context, and its head gives the choice a score."""

    def __init__(self, settings: Any, config: Any, *others: Any):
        check_trained_head(settings, config, HEAD, "was trained to choose")
        self.settings, self.config, multiple = settings, config, settings.pad_to_multiple_of
        self.tokenizer = load_tokenizer(settings, config)
        fit_token_types(self.tokenizer, config)
        check_max_length(settings.max_length, config, self.tokenizer, pair=True, multiple=multiple)
        self.collate = ChoiceCollator(self.tokenizer, multiple)

    def load_model(self) -> PreTrainedModel:
        """Return the model to train."""
        self.config.num_labels, self.config.problem_type = 1, None  # a classifier has others
        had_head = any(HEAD in name for name in self.config.architectures or [])
        return load_model(self.settings, self.config, AutoModelForMultipleChoice, ignore_mismatched_sizes=not had_head)

    def objective(self) -> Objective:
        """Return the cross-entropy of the right choice among the choices of its question."""

        def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return functional.cross_entropy(self.scores(model, batch), batch["labels"], reduction="sum")

        return Objective(loss_sum=loss_sum, count=lambda batch: len(batch["labels"]))

    def tokenize(self, split: ClassificationSplit) -> Dataset:
        """Return rows with the tokenizer's columns (one list of ints per choice), `label` if known, and `length`."""
        tokenizer, max_length = self.tokenizer, self.settings.max_length

        def encode(rows: dict[str, list]) -> dict[str, Any]:
            pairs = zip(rows["text1"], rows["text2"], strict=True)
            texts = zip(*((text, choice) for text, choices in pairs for choice in choices), strict=True)
            flat = tokenizer(*map(list, texts), truncation=True, max_length=max_length, padding=False)
            encoded = {name: _by_question(values, rows["text2"]) for name, values in flat.items()}
            return {**encoded, "length": [sum(map(len, choices)) for choices in encoded["input_ids"]]}

        return _tokenized(split, encode, "input_ids")

    def scores(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits of the choices [b, c], minus infinity for a choice that a question does not have.

        Each choice is passed as a question with one choice, because the heads of Transformers expect the same number
        of choices for all questions.
        """
        there = batch["attention_mask"].any(-1)  # [b, c]
        inputs = {name: tensor[there].unsqueeze(1) for name, tensor in batch.items() if name != "labels"}
        found = compute_logits(model, inputs).float()  # [choices, 1]
        return found.new_full(there.shape, -torch.inf).masked_scatter(there, found)


class ChoiceWords:
    """An encoder-decoder reads a question as one text; the choice with the largest log-probability is the answer.

    The log-probability is that of the whole choice and its end (T0, arXiv 2110.08207). `word` makes a row's text.
    """

    def __init__(self, settings: Any, config: Any, accelerator: Accelerator, word: Callable[[dict[str, Any]], str]):
        self.settings, self.config, self.accelerator, self.word = settings, config, accelerator, word
        self.tokenizer, multiple = load_tokenizer(settings, config), settings.pad_to_multiple_of
        if config.decoder_start_token_id is None or hasattr(self.tokenizer, "src_lang"):
            raise ValueError(
                "--model_name_or_path must be an encoder, or an encoder-decoder for one language such as T5 or BART, "
                f"got {settings.model_name_or_path} ({config.model_type})."
            )
        check_end_token(settings, self.tokenizer)
        check_max_length(settings.max_length, config, self.tokenizer, multiple=multiple)
        self.collate = WordedCollator(self.tokenizer, config.decoder_start_token_id, multiple)

    def load_model(self) -> PreTrainedModel:
        """Return the model to train."""
        return load_model(self.settings, self.config, AutoModelForSeq2SeqLM)

    def objective(self) -> Objective:
        """Return the cross-entropy of the tokens of the right choices."""
        return make_label_objective(compute_target_logits)

    def tokenize(self, split: ClassificationSplit) -> Dataset:
        """Return rows with the tokenizer's columns, `choices` (token ids of each), `label` if known, and `length`."""
        # Not `self`: `datasets` hashes all that the function refers to, and an accelerator takes seconds.
        tokenizer, word = self.tokenizer, self.word
        options: dict[str, Any] = {"truncation": True, "max_length": self.settings.max_length, "padding": False}

        def encode(rows: dict[str, list]) -> dict[str, Any]:
            each = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
            encoded = dict(tokenizer([word(row) for row in each], **options))
            flat = [choice for choices in rows["choices"] for choice in choices]
            choices = _by_question(tokenizer(text_target=flat, **options)["input_ids"], rows["choices"])
            return {**encoded, "choices": choices, "length": [len(ids) for ids in encoded["input_ids"]]}

        return _tokenized(split, encode, "choices")

    def scores(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the log-probabilities of the choices [b, c], in nats; minus infinity as of `ChoiceHead.scores`."""
        with self.accelerator.autocast():  # accelerate's own does not reach an encoder that is called alone
            return choice_log_probabilities(self.accelerator.unwrap_model(model), batch)


def choice_log_probabilities(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return the log-probability of each choice after its question [b, c]; the encoder reads a question once."""
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


class ChoiceCollator:
    """Make batches of rows of `ChoiceHead.tokenize`: tensors [b, c, n], and "labels" [b] if they are known."""

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None):
        self.pad = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=pad_to_multiple_of)
        self.padding = {"input_ids": tokenizer.pad_token_id}

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        counts = torch.tensor([len(row["input_ids"]) for row in rows])
        names = [name for name in rows[0] if name not in ("label", "length")]
        flat = [{name: row[name][i] for name in names} for row in rows for i in range(len(row["input_ids"]))]
        there = torch.arange(int(counts.max())) < counts.unsqueeze(1)  # [b, c]; the masks of others stay 0
        batch = {}
        for name, values in self.pad(flat).items():  # [choices, n]
            batch[name] = values.new_full((*there.shape, values.shape[-1]), self.padding.get(name, 0))
            batch[name][there] = values
        labels = {"labels": torch.tensor([row["label"] for row in rows])} if "label" in rows[0] else {}
        return batch | labels


class WordedCollator:
    """Make batches of rows of `ChoiceWords.tokenize`: the tokenizer's tensors [b, n], and what the decoder reads.

    With labels: "labels" and "decoder_input_ids" [b, t] of the right choices. Without: "choices" and
    "decoder_input_ids" [b, c, t]. Labels and choices are -100 where there is no token.
    """

    def __init__(self, tokenizer: Any, decoder_start_token_id: int, pad_to_multiple_of: int | None):
        self.pad = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=pad_to_multiple_of)
        self.padding, self.start = tokenizer.pad_token_id, decoder_start_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        sources = [{k: v for k, v in row.items() if k not in ("choices", "label", "length")} for row in rows]
        has_label = "label" in rows[0]
        choices = [[row["choices"][row["label"]]] if has_label else row["choices"] for row in rows]
        most, longest = max(map(len, choices)), max(len(ids) for each in choices for ids in each)
        labels = torch.full((len(rows), most, longest), IGNORED_LABEL)
        for i, each in enumerate(choices):
            for j, ids in enumerate(each):
                labels[i, j, : len(ids)] = torch.tensor(ids)
        labels = labels[:, 0] if has_label else labels
        read = labels.masked_fill(labels == IGNORED_LABEL, self.padding).roll(1, -1)
        read[..., 0] = self.start
        return {**self.pad(sources), "labels" if has_label else "choices": labels, "decoder_input_ids": read}


def _by_question(values: Any, choices: list[list[str]]) -> list[list[Any]]:
    """Return one value per choice as one list per question."""
    rest = iter(values)
    return [[next(rest) for _ in each] for each in choices]


def _tokenized(split: ClassificationSplit, encode: Callable[[dict[str, list]], dict[str, Any]], name: str) -> Dataset:
    """Return a split as `encode` makes it; warn of questions with equal lists of tokens in the column `name`."""
    unused = [column for column in split.data.column_names if column != "label"]
    data = split.data.map(encode, batched=True, remove_columns=unused, desc=f"{split.name} tokens")
    if equal := [i for i, choices in enumerate(data[name]) if len({*map(tuple, choices)}) < len(choices)]:
        message = "%s: %d of %d questions have choices that are the same tokens; the first is %s"
        logging.getLogger(__name__).warning(message, split.name, len(equal), len(data), split.where(equal[0]))
    return data
