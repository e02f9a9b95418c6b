"""Calls of `generate` that are told all they have to know, so that transformers has nothing to warn of."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

__all__ = ["limits_of_the_call"]

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
