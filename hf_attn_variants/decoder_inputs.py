"""What the decoder of a model reads beside the encoder: which texts such a model has to be given."""

import inspect
from enum import Enum

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import find_labels

__all__ = ["DecoderInput", "decoder_input"]


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
