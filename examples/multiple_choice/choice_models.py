"""Multiple-choice models: an encoder with a multiple-choice head, and an encoder-decoder that scores texts.

In shapes, b is the number of questions, c the maximum number of choices per question, n the number of tokens per text,
and t the number of tokens per choice.
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
from hf_attn_variants.training.engine.models import (
    check_appends_eos_token,
    check_max_length,
    check_trained_head,
    configure_token_types,
    load_model,
    load_tokenizer,
)
from hf_attn_variants.training.engine.optimization import (
    Objective,
    compute_logits,
    compute_target_logits,
    make_cross_entropy_objective,
)

HEAD = "ForMultipleChoice"


class ChoiceHead:
    """An encoder that reads the context followed by each choice, with a head that scores the choice."""

    def __init__(self, settings: Any, config: Any, *unused: Any):
        check_trained_head(settings, config, HEAD, "was trained to choose")
        self.settings, self.config, multiple = settings, config, settings.pad_to_multiple_of
        self.tokenizer = load_tokenizer(settings, config)
        configure_token_types(self.tokenizer, config)
        check_max_length(settings.max_length, config, self.tokenizer, pair=True, pad_to_multiple_of=multiple)
        self.collate = ChoiceCollator(self.tokenizer, multiple)

    def load_model(self) -> PreTrainedModel:
        """Return the model to train."""
        self.config.num_labels, self.config.problem_type = (
            1,
            None,
        )  # the checkpoint may be a different kind of classifier
        had_head = any(HEAD in name for name in self.config.architectures or [])
        return load_model(self.settings, self.config, AutoModelForMultipleChoice, ignore_mismatched_sizes=not had_head)

    def make_objective(self) -> Objective:
        """Return the cross-entropy objective over the choices for each question."""

        def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return functional.cross_entropy(self.scores(model, batch), batch["labels"], reduction="sum")

        return Objective(loss_sum=loss_sum, count=lambda batch: len(batch["labels"]))

    def tokenize(self, split: ClassificationSplit) -> Dataset:
        """Return rows with the tokenizer outputs (one list per choice), `label` if known, and `length`."""
        tokenizer, max_length = self.tokenizer, self.settings.max_length

        def encode(rows: dict[str, list]) -> dict[str, Any]:
            pairs = zip(rows["text1"], rows["text2"], strict=True)
            texts = zip(*((text, choice) for text, choices in pairs for choice in choices), strict=True)
            flat = tokenizer(*map(list, texts), truncation=True, max_length=max_length, padding=False)
            encoded = {name: _group_by_question(values, rows["text2"]) for name, values in flat.items()}
            return {**encoded, "length": [sum(map(len, choices)) for choices in encoded["input_ids"]]}

        return _tokenize_split(split, encode, "input_ids")

    def scores(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits of the choices [b, c], with minus infinity for missing choices.

        Each choice is passed as a question with one choice, because the Transformers heads expect the same number of
        choices for all questions.
        """
        is_choice = batch["attention_mask"].any(-1)  # [b, c]
        inputs = {name: tensor[is_choice].unsqueeze(1) for name, tensor in batch.items() if name != "labels"}
        logits = compute_logits(model, inputs).float()  # [choices, 1]
        return logits.new_full(is_choice.shape, -torch.inf).masked_scatter(is_choice, logits)


class ChoiceLikelihood:
    """An encoder-decoder that reads a question as one text and selects the most probable choice.

    The probability covers all tokens of the choice and the end-of-sequence token (T0, arXiv 2110.08207).

    Args:
        settings: The settings of the run.
        config: The configuration of the model.
        accelerator: The accelerator.
        format_row: A function that converts a row to the text that the encoder reads.
    """

    def __init__(
        self, settings: Any, config: Any, accelerator: Accelerator, format_row: Callable[[dict[str, Any]], str]
    ):
        self.settings, self.config, self.accelerator, self.format_row = settings, config, accelerator, format_row
        self.tokenizer, multiple = load_tokenizer(settings, config), settings.pad_to_multiple_of
        if config.decoder_start_token_id is None or hasattr(self.tokenizer, "src_lang"):
            raise ValueError(
                "--model_name_or_path must be an encoder, or a monolingual encoder-decoder such as T5 or BART, "
                f"got {settings.model_name_or_path} ({config.model_type}). Use another model."
            )
        check_appends_eos_token(settings, self.tokenizer)
        check_max_length(settings.max_length, config, self.tokenizer, pad_to_multiple_of=multiple)
        self.collate = LikelihoodCollator(self.tokenizer, config.decoder_start_token_id, multiple)

    def load_model(self) -> PreTrainedModel:
        """Return the model to train."""
        return load_model(self.settings, self.config, AutoModelForSeq2SeqLM)

    def make_objective(self) -> Objective:
        """Return the cross-entropy objective over the tokens in the correct choices."""
        return make_cross_entropy_objective(compute_target_logits)

    def tokenize(self, split: ClassificationSplit) -> Dataset:
        """Return rows with the tokenizer outputs, `choices` (token ids), `label` if known, and `length`."""
        # `encode` must not refer to `self`, because `datasets` hashes all references, which takes seconds for an
        # accelerator.
        tokenizer, format_row = self.tokenizer, self.format_row
        options: dict[str, Any] = {"truncation": True, "max_length": self.settings.max_length, "padding": False}

        def encode(rows: dict[str, list]) -> dict[str, Any]:
            row_list = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
            encoded = dict(tokenizer([format_row(row) for row in row_list], **options))
            flat = [choice for choices in rows["choices"] for choice in choices]
            choices = _group_by_question(tokenizer(text_target=flat, **options)["input_ids"], rows["choices"])
            return {**encoded, "choices": choices, "length": [len(ids) for ids in encoded["input_ids"]]}

        return _tokenize_split(split, encode, "choices")

    def scores(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the log-probabilities of the choices [b, c] in nats, with minus infinity for missing choices."""
        # The autocast of the prepared model does not cover an encoder that is called separately.
        with self.accelerator.autocast():
            return compute_choice_log_probabilities(self.accelerator.unwrap_model(model), batch)


def compute_choice_log_probabilities(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return the log-probability of each choice after its question [b, c]. The encoder reads each question once."""
    choices = batch["choices"]  # [b, c, t]
    is_choice = (choices != IGNORED_LABEL).any(-1)  # [b, c]
    counts, mask = is_choice.sum(-1), batch["attention_mask"]
    states = model.get_encoder()(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state  # [b, n, d]
    logits = model(
        encoder_outputs=BaseModelOutput(last_hidden_state=states.repeat_interleave(counts, 0)),
        attention_mask=mask.repeat_interleave(counts, 0),
        decoder_input_ids=batch["decoder_input_ids"][is_choice],
        use_cache=False,
    ).logits  # [choices, t, V]
    labels = choices[is_choice]
    chosen = logits.float().log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    log_probabilities = chosen.masked_fill(labels == IGNORED_LABEL, 0.0).sum(-1)
    return log_probabilities.new_full(is_choice.shape, -torch.inf).masked_scatter(is_choice, log_probabilities)


class ChoiceCollator:
    """Collator of rows of `ChoiceHead.tokenize`: tensors [b, c, n], and "labels" [b] if they are known."""

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None):
        self.pad = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=pad_to_multiple_of)
        self.padding = {"input_ids": tokenizer.pad_token_id}

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        counts = torch.tensor([len(row["input_ids"]) for row in rows])
        names = [name for name in rows[0] if name not in ("label", "length")]
        flat = [{name: row[name][i] for name in names} for row in rows for i in range(len(row["input_ids"]))]
        is_choice = torch.arange(int(counts.max())) < counts.unsqueeze(
            1
        )  # [b, c]; the masks of missing choices stay 0
        batch = {}
        for name, values in self.pad(flat).items():  # [choices, n]
            batch[name] = values.new_full((*is_choice.shape, values.shape[-1]), self.padding.get(name, 0))
            batch[name][is_choice] = values
        labels = {"labels": torch.tensor([row["label"] for row in rows])} if "label" in rows[0] else {}
        return batch | labels


class LikelihoodCollator:
    """Collator for rows from `ChoiceLikelihood.tokenize`, which adds decoder inputs to the padded tokens [b, n].

    For rows with labels, the batch contains "labels" and "decoder_input_ids" [b, t] for the correct choices. For other
    rows, it contains "choices" and "decoder_input_ids" [b, c, t]. Padding in labels and choices is -100.
    """

    def __init__(self, tokenizer: Any, decoder_start_token_id: int, pad_to_multiple_of: int | None):
        self.pad = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=pad_to_multiple_of)
        self.padding, self.start = tokenizer.pad_token_id, decoder_start_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        sources = [{k: v for k, v in row.items() if k not in ("choices", "label", "length")} for row in rows]
        has_label = "label" in rows[0]
        choices = [[row["choices"][row["label"]]] if has_label else row["choices"] for row in rows]
        num_choices, longest = max(map(len, choices)), max(len(ids) for row_choices in choices for ids in row_choices)
        labels = torch.full((len(rows), num_choices, longest), IGNORED_LABEL)
        for i, row_choices in enumerate(choices):
            for j, ids in enumerate(row_choices):
                labels[i, j, : len(ids)] = torch.tensor(ids)
        labels = labels[:, 0] if has_label else labels
        decoder_input_ids = labels.masked_fill(labels == IGNORED_LABEL, self.padding).roll(1, -1)
        decoder_input_ids[..., 0] = self.start
        key = "labels" if has_label else "choices"
        return {**self.pad(sources), key: labels, "decoder_input_ids": decoder_input_ids}


def _group_by_question(values: Any, choices: list[list[str]]) -> list[list[Any]]:
    """Group the values of all choices by question."""
    rest = iter(values)
    return [[next(rest) for _ in question_choices] for question_choices in choices]


def _tokenize_split(
    split: ClassificationSplit, encode: Callable[[dict[str, list]], dict[str, Any]], name: str
) -> Dataset:
    """Tokenize a split with `encode`, and warn about questions with equal token lists in the column `name`."""
    unused = [column for column in split.data.column_names if column != "label"]
    data = split.data.map(encode, batched=True, remove_columns=unused, desc=f"{split.name} tokens")
    if equal := [i for i, choices in enumerate(data[name]) if len({*map(tuple, choices)}) < len(choices)]:
        message = "%s: %d of %d questions contain choices with the same tokens. The first one is %s."
        logging.getLogger(__name__).warning(message, split.name, len(equal), len(data), split.describe_row(equal[0]))
    return data
