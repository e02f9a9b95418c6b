"""Properties of a loaded model: the meaning of its logits, its decoder input, languages, and instance attributes."""

import copy
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import find_labels


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


# The number of languages that a message lists.
SHOWN_LANGUAGES = 8


@dataclass(frozen=True)
class TargetStart:
    """First tokens of the target texts in a language.

    Attributes:
        decoder_start_token_id: the first token that the decoder reads. It is the language token if texts end with this
            token (the first version of mBART).
        forced_bos_token_id: the token with which generation must begin: the language token if texts begin with it, or
            None.
    """

    decoder_start_token_id: int | None
    forced_bos_token_id: int | None

    def apply_to(self, model: PreTrainedModel) -> None:
        """Set the tokens in the configuration and the generation configuration of a model, which are saved with it."""
        model.config.decoder_start_token_id = self.decoder_start_token_id
        if model.can_generate():
            model.generation_config.decoder_start_token_id = self.decoder_start_token_id
            model.generation_config.forced_bos_token_id = self.forced_bos_token_id


def set_languages(
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    source: str | None,
    target: str | None,
    forced_bos_token: str | None = None,
) -> TargetStart | None:
    """Set the source and target languages of a tokenizer, as Transformers' `run_translation.py` does.

    The languages are also set in the arguments with which the tokenizer is saved.

    Args:
        tokenizer: the tokenizer of the model.
        config: the configuration of the model.
        source: the source language in the tokenizer's notation ("en_XX", "en", "eng_Latn"). None means the
            language that the tokenizer was saved with.
        target: the target language, in the same notation.
        forced_bos_token: the language with which generation must begin. None means the target language if texts
            begin with it.

    Returns:
        The first tokens of the targets, or None for a tokenizer without languages.

    Raises:
        ValueError: if a language is unknown or missing.
    """
    languages = {"source_lang": source, "target_lang": target, "forced_bos_token": forced_bos_token}
    name = type(tokenizer).__name__
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        return None
    known = _get_language_tokens(tokenizer)
    if tokenizer.tgt_lang is not None:  # without a target language, the source language is only a default (English)
        source, target = source or tokenizer.src_lang, target or tokenizer.tgt_lang
    if source is None or target is None:
        raise ValueError(
            f"--source_lang and --target_lang are required, because a {name} is multilingual. "
            f"Use two of {_format_languages(known)}."
        )
    for flag, value in {**languages, "source_lang": source, "target_lang": target}.items():
        if value is not None and value not in known:
            raise ValueError(
                f"--{flag} must be a language of the {name}, got {value!r}. Use one of {_format_languages(known)}."
            )
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    tokenizer.init_kwargs |= {"src_lang": source, "tgt_lang": target}  # these arguments are saved
    language, (first, *_, last) = known[target], tokenizer(text_target="")["input_ids"]
    if language >= config.vocab_size:
        raise ValueError(
            f"The model must have a token for {target}. The {name} gives it the id {language}, but the model has only "
            f"{config.vocab_size} tokens."
        )
    start = config.decoder_start_token_id
    if last == language or start is None:  # the rule of mBART
        start = last
    forced_language = target if first == language else None
    if forced_bos_token is not None:
        forced_language = forced_bos_token
    return TargetStart(start, None if forced_language is None else known[forced_language])


def _get_language_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the token id of each language, by the tokenizer's name of the language."""
    if (codes := getattr(tokenizer, "lang_code_to_id", None)) is not None:
        return dict(codes)
    # NLLB's languages are special tokens. The names of its other special tokens begin with an angle bracket.
    names = [token for token in tokenizer.all_special_tokens if not token.startswith("<")]
    numbers: Any = tokenizer.convert_tokens_to_ids(names)
    return dict(zip(names, numbers, strict=True))


def _format_languages(known: dict[str, int]) -> str:
    names = sorted(known)
    return ", ".join(names[:SHOWN_LANGUAGES]) + (
        f" and {len(names) - SHOWN_LANGUAGES} more" if len(names) > SHOWN_LANGUAGES else ""
    )


class WeakModuleAttribute:
    """Attribute of a module that holds a weak reference to this module.

    With a strong reference, the module would be part of a reference cycle. It would keep its (GPU) memory until Python
    collects such cycles.

    Args:
        module: the module that gets the attribute.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> Any:
        """The module that has this attribute."""
        return self._module()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _module=weakref.ref(state["_module"]))


class InstanceMethod(WeakModuleAttribute):
    """Function that replaces a method of one module instance.

    Args:
        function: the function. Its first argument is the module.
        module: the module that gets the attribute.

    Example:
        >>> layer.forward = InstanceMethod(lambda module, x: 2 * module.weight @ x, layer)
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        super().__init__(module)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)
