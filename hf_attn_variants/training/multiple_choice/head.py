"""Encoders choose by a head: it gives each choice, read behind its context, a score; the highest is the answer."""

from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForMultipleChoice, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING

from ..engine.losses import Objective
from ..engine.models import check_trained_head, load_model
from ..engine.settings import FineTuningSettings
from ..engine.tokenizers import check_max_length, fit_token_types, load_tokenizer
from .choices import ChoiceCollator, ChoiceSplit, choice_logits, choice_objective, tokenize_choices

__all__ = ["ChoiceHead"]

HEAD = "ForMultipleChoice"


class ChoiceHead:
    """The way in which an encoder chooses.

    Args:
        settings, config: the run's, and the checkpoint's.

    Attributes:
        tokenizer: the model's, made to fit it.
        collate: rows of `tokenize` -> a batch.

    Raises:
        ValueError: if the architecture has no such head, is only evaluated and was saved without it, or texts of the
            length asked for do not fit.
    """

    def __init__(self, settings: FineTuningSettings, config: PreTrainedConfig):
        _check_model(settings, config)
        self.settings, self.config = settings, config
        self.tokenizer = load_tokenizer(settings, config)
        fit_token_types(self.tokenizer, config)
        check_max_length(settings.max_length, config, self.tokenizer, pair=True, multiple=settings.pad_to_multiple_of)
        self.collate = ChoiceCollator(self.tokenizer, settings.pad_to_multiple_of)

    def load_model(self) -> PreTrainedModel:
        """Return the model to train."""
        self.config.num_labels, self.config.problem_type = 1, None  # whatever the checkpoint classified
        had_head = any(HEAD in name for name in self.config.architectures or [])
        return load_model(self.settings, self.config, AutoModelForMultipleChoice, ignore_mismatched_sizes=not had_head)

    def objective(self) -> Objective:
        """Return the loss."""
        return choice_objective()

    def tokenize(self, split: ChoiceSplit) -> Dataset:
        """Return a split's rows; see `tokenize_choices`."""
        return tokenize_choices(split, self.tokenizer, self.settings.max_length)

    def scores(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the scores of a batch's choices [b, c], minus infinity where a question has no such choice."""
        return choice_logits(model, batch)


def _check_model(settings: FineTuningSettings, config: PreTrainedConfig) -> None:
    """Raise ValueError if the architecture has no multiple-choice head, or is only evaluated and was saved without."""
    name = settings.model_name_or_path
    auto_map: Any = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_MULTIPLE_CHOICE_MAPPING and "AutoModelForMultipleChoice" not in auto_map:
        raise ValueError(
            f"{name} ({config.model_type}) has no multiple-choice head in transformers: take an encoder such as BERT, "
            "RoBERTa, ALBERT, ELECTRA or DistilBERT, or an encoder-decoder such as T5 or BART"
        )
    check_trained_head(settings, config, HEAD, "was trained to choose")
