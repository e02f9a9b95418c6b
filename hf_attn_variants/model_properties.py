"""Properties of a model that its class and configuration decide: what its logits mean, and what its decoder reads."""

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import find_labels

__all__ = ["Answer", "DecoderInput", "answer_of", "decoder_input", "limits_of_the_call"]


class Answer(Enum):
    """What the logits of a model's head mean, by which they are compared with a teacher's."""

    CLASSES = "one distribution over classes"
    LABELS = "a probability for each label"
    TOKENS = "a probability for each token"
    SCORES = "scores"


def answer_of(model: PreTrainedModel) -> Answer:
    """Return what a model's logits mean: as transformers' own losses, by the class and its `problem_type`."""
    name, config = type(model).__name__, model.config
    if name.endswith("ForPreTraining") and config.model_type.endswith("electra"):
        return Answer.TOKENS  # that it was replaced: logits [b, n]
    if not name.endswith("ForSequenceClassification"):
        return Answer.CLASSES
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return Answer.LABELS
    is_regression = config.num_labels == 1 if problem is None else problem == "regression"
    return Answer.SCORES if is_regression else Answer.CLASSES


class DecoderInput(Enum):
    """What a decoder reads."""

    OWN_TARGETS = "targets, which the model can also write itself"
    TARGETS = "targets, which have to be given: there is no head that writes"
    SOURCE = "the encoder's text again: a head that classifies or answers"
    NOTHING = "nothing: the model is an encoder, or a decoder alone"

    @property
    def is_target(self) -> bool:
        """Whether it reads other text than the encoder."""
        return self in (DecoderInput.OWN_TARGETS, DecoderInput.TARGETS)


def decoder_input(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> DecoderInput:
    """Return what the decoder of a model reads, ours or upstream's.

    Args:
        model_class: its class.
        config: its configuration; that of an encoder alone may call itself an encoder-decoder's.
    """
    takes_both = "decoder_input_ids" in inspect.signature(model_class.forward).parameters
    if not takes_both or not getattr(config, "is_encoder_decoder", False):
        return DecoderInput.NOTHING
    if not find_labels(model_class):
        return DecoderInput.TARGETS
    return DecoderInput.OWN_TARGETS if model_class.can_generate() else DecoderInput.SOURCE


# What Whisper's own `generate` does wrong by transformers' rules, whatever it is called with.
INNER_CALL = "Passing `generation_config` together with generation-related"


@contextmanager
def limits_of_the_call(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Let a model's outputs be limited by the call alone: a checkpoint may bring another `max_length` too."""
    own = model.generation_config
    model.generation_config = copy.deepcopy(own)
    model.generation_config.max_length = model.generation_config.max_new_tokens = None

    def others(record: logging.LogRecord) -> bool:
        return INNER_CALL not in str(record.msg)

    logger = logging.getLogger("transformers.generation.utils")
    logger.addFilter(others)
    try:
        yield model
    finally:
        logger.removeFilter(others)
        model.generation_config = own
