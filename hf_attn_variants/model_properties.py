"""Properties of loaded models, such as the meaning of the logits, the decoder input and the languages."""

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
    """The meaning of a model's logits, which determines how they are compared with the logits of a teacher."""

    CLASSES = "one distribution over classes"
    LABELS = "a probability for each label"
    TOKENS = "a probability for each token"
    SCORES = "scores"


def get_logits_kind(model: PreTrainedModel) -> LogitsKind:
    """Return the kind of a model's logits.

    As in the loss functions of Transformers, it is determined by the model's class and `problem_type`.
    """
    name, config = type(model).__name__, model.config
    if name.endswith("ForPreTraining") and config.model_type.endswith("electra"):
        return LogitsKind.TOKENS  # logits [b, n] for the probability that each token was replaced
    if not name.endswith("ForSequenceClassification"):
        return LogitsKind.CLASSES
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return LogitsKind.LABELS
    is_regression = config.num_labels == 1 if problem is None else problem == "regression"
    return LogitsKind.SCORES if is_regression else LogitsKind.CLASSES


class DecoderInput(Enum):
    """The kind of input that a decoder reads."""

    OWN_TARGETS = "targets, which the model can also generate"
    TARGETS = "targets that must be provided, because the model cannot generate them"
    SOURCE = "the input of the encoder, for a model that classifies or answers questions"
    NOTHING = "nothing, because the model has only an encoder or only a decoder"

    @property
    def is_target(self) -> bool:
        """True if the decoder reads a different text than the encoder."""
        return self in (DecoderInput.OWN_TARGETS, DecoderInput.TARGETS)


def get_decoder_input(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> DecoderInput:
    """Return the kind of input that a model's decoder reads.

    Args:
        model_class: a model class from Transformers or this package.
        config: the configuration. `is_encoder_decoder` may also be true for a class with only an encoder.
    """
    takes_both = "decoder_input_ids" in inspect.signature(model_class.forward).parameters
    if not takes_both or not getattr(config, "is_encoder_decoder", False):
        return DecoderInput.NOTHING
    if not find_labels(model_class):
        return DecoderInput.TARGETS
    return DecoderInput.OWN_TARGETS if model_class.can_generate() else DecoderInput.SOURCE


def get_encoder_width(config: Any) -> int:
    """Return the size of the encoder outputs of an encoder-decoder. T5Gemma's encoder has its own configuration."""
    return config.d_model if hasattr(config, "d_model") else config.encoder.hidden_size


def get_decoder_start_token(config: Any) -> Any:
    """Return the id of the first token that the decoder reads, or None if the configuration sets none.

    The configuration of T5Gemma has no field for it because its decoder always starts with the `bos` token.
    """
    return getattr(config, "decoder_start_token_id", getattr(config, "bos_token_id", None))


# Whisper's `generate` always causes this Transformers warning, regardless of its arguments.
IGNORED_WARNING = "Passing `generation_config` together with generation-related"


@contextmanager
def ignore_saved_length_limits(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Ignore the length limits saved with a model, so that only the arguments of `generate` limit the output length.

    Example:
        >>> with ignore_saved_length_limits(model):
        ...     model.generate(**inputs, max_new_tokens=8)
    """
    original = model.generation_config
    model.generation_config = copy.deepcopy(original)
    model.generation_config.max_length = model.generation_config.max_new_tokens = None

    def is_other_message(record: logging.LogRecord) -> bool:
        return IGNORED_WARNING not in str(record.msg)

    logger = logging.getLogger("transformers.generation.utils")
    logger.addFilter(is_other_message)
    try:
        yield model
    finally:
        logger.removeFilter(is_other_message)
        model.generation_config = original


# The maximum number of languages that a message lists.
SHOWN_LANGUAGES = 8


@dataclass(frozen=True)
class TargetStartTokens:
    """The first tokens of target texts in a given language.

    Attributes:
        decoder_start_token_id: the first token that the decoder reads. It is the language token if texts end with this
            token, as in the first version of mBART.
        forced_bos_token_id: the token with which generation must begin. By default, this is the language token if
            texts begin with it, and None otherwise.
    """

    decoder_start_token_id: int | None
    forced_bos_token_id: int | None

    def apply_to(self, model: PreTrainedModel) -> None:
        """Set the tokens in the configuration and the generation configuration, which are saved with the model."""
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
) -> TargetStartTokens | None:
    """Set the source and target languages of a tokenizer, like the Transformers script `run_translation.py`.

    The languages are also stored in the arguments that are saved with the tokenizer.

    Args:
        tokenizer: the tokenizer of the model.
        config: the configuration of the model.
        source: the source language in the tokenizer's notation ("en_XX", "en", "eng_Latn"). If None, the
            language saved with the tokenizer is used.
        target: the target language, in the same notation.
        forced_bos_token: the language token with which generation must begin. If None, it is the target language if
            texts begin with it.

    Returns:
        The first tokens of the target texts, or None for a tokenizer without languages.

    Raises:
        ValueError: if a language is unknown or missing.
    """
    languages = {"source_lang": source, "target_lang": target, "forced_bos_token": forced_bos_token}
    name = type(tokenizer).__name__
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        return None
    known = _get_language_tokens(tokenizer)
    if tokenizer.tgt_lang is not None:  # otherwise, the source language is only a default (English)
        source, target = source or tokenizer.src_lang, target or tokenizer.tgt_lang
    if source is None or target is None:
        raise ValueError(
            f"--source_lang and --target_lang are required because {name} is multilingual. "
            f"Use two of {_format_languages(known)}."
        )
    for flag, value in {**languages, "source_lang": source, "target_lang": target}.items():
        if value is not None and value not in known:
            raise ValueError(
                f"--{flag} must be a language of {name}, got {value!r}. Use one of {_format_languages(known)}."
            )
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    tokenizer.init_kwargs |= {"src_lang": source, "tgt_lang": target}  # these arguments are saved
    language, (first, *_, last) = known[target], tokenizer(text_target="")["input_ids"]
    if language >= config.vocab_size:
        raise ValueError(
            f"The model must have an embedding for {target}. Its token id in {name} is {language}, but the "
            f"model has only {config.vocab_size} tokens."
        )
    start = config.decoder_start_token_id
    if last == language or start is None:  # as in mBART
        start = last
    forced_language = target if first == language else None
    if forced_bos_token is not None:
        forced_language = forced_bos_token
    return TargetStartTokens(start, None if forced_language is None else known[forced_language])


def _get_language_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the token id of each language as {name in the tokenizer: token id}."""
    if (codes := getattr(tokenizer, "lang_code_to_id", None)) is not None:
        return dict(codes)
    # In NLLB, languages are special tokens. The names of the other special tokens begin with an angle bracket.
    names = [token for token in tokenizer.all_special_tokens if not token.startswith("<")]
    numbers: Any = tokenizer.convert_tokens_to_ids(names)
    return dict(zip(names, numbers, strict=True))


def _format_languages(known: dict[str, int]) -> str:
    names = sorted(known)
    return ", ".join(names[:SHOWN_LANGUAGES]) + (
        f" and {len(names) - SHOWN_LANGUAGES} more" if len(names) > SHOWN_LANGUAGES else ""
    )


class WeakModuleAttribute:
    """A module attribute that holds a weak reference to the module.

    With a strong reference, the module would be part of a reference cycle and keep its (GPU) memory until the garbage
    collector finds the cycle.

    Args:
        module: the module that has the attribute.
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
    """A function that replaces a method of one module instance.

    Args:
        function: the function, whose first argument is the module.
        module: the module that has the attribute.

    Example:
        >>> layer.forward = InstanceMethod(lambda module, x: 2 * module.weight @ x, layer)
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        super().__init__(module)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)
