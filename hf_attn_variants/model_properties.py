"""Properties that follow from the class and configuration of a model: the meaning of its logits, its decoder input."""

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import find_labels

__all__ = ["DecoderInput", "LogitsKind", "decoder_input", "ignore_saved_length_limits", "logits_kind"]


class LogitsKind(Enum):
    """Meaning of the logits of a model. It decides how they are compared with the logits of a teacher."""

    CLASSES = "one distribution over classes"
    LABELS = "a probability for each label"
    TOKENS = "a probability for each token"
    SCORES = "scores"


def logits_kind(model: PreTrainedModel) -> LogitsKind:
    """Return the meaning of a model's logits by its class and `problem_type`, as the losses of Transformers do."""
    name, config = type(model).__name__, model.config
    if name.endswith("ForPreTraining") and config.model_type.endswith("electra"):
        return LogitsKind.TOKENS  # the probability that the token was replaced: logits of shape [b, n]
    if not name.endswith("ForSequenceClassification"):
        return LogitsKind.CLASSES
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return LogitsKind.LABELS
    is_regression = config.num_labels == 1 if problem is None else problem == "regression"
    return LogitsKind.SCORES if is_regression else LogitsKind.CLASSES


class DecoderInput(Enum):
    """Input of a decoder."""

    OWN_TARGETS = "targets, which the model can also generate"
    TARGETS = "targets that must be given, because the model cannot generate"
    SOURCE = "the text of the encoder, for a model that classifies or answers questions"
    NOTHING = "nothing, because the model has only an encoder or only a decoder"

    @property
    def is_target(self) -> bool:
        """True if the decoder reads another text than the encoder."""
        return self in (DecoderInput.OWN_TARGETS, DecoderInput.TARGETS)


def decoder_input(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> DecoderInput:
    """Return the input of the decoder of a model.

    Args:
        model_class: a class of Transformers or of this package.
        config: its configuration. `is_encoder_decoder` may also be true for a class with only an encoder.
    """
    takes_both = "decoder_input_ids" in inspect.signature(model_class.forward).parameters
    if not takes_both or not getattr(config, "is_encoder_decoder", False):
        return DecoderInput.NOTHING
    if not find_labels(model_class):
        return DecoderInput.TARGETS
    return DecoderInput.OWN_TARGETS if model_class.can_generate() else DecoderInput.SOURCE


# Whisper's `generate` always causes this warning of Transformers, whatever its arguments are.
INNER_CALL = "Passing `generation_config` together with generation-related"


@contextmanager
def ignore_saved_length_limits(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Ignore the length limits that are saved with a model, so that only the arguments of a call limit its outputs.

    Example:
        >>> with ignore_saved_length_limits(model):
        ...     model.generate(**inputs, max_new_tokens=8)
    """
    original = model.generation_config
    model.generation_config = copy.deepcopy(original)
    model.generation_config.max_length = model.generation_config.max_new_tokens = None

    def is_other_message(record: logging.LogRecord) -> bool:
        return INNER_CALL not in str(record.msg)

    logger = logging.getLogger("transformers.generation.utils")
    logger.addFilter(is_other_message)
    try:
        yield model
    finally:
        logger.removeFilter(is_other_message)
        model.generation_config = original
