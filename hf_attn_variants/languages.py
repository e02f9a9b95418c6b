"""Source and target languages of multilingual tokenizers (mBART, M2M100, NLLB)."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["TargetStart", "set_languages"]

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
        ValueError: if a language is unknown or missing, or is given for a tokenizer without languages.
    """
    languages = {"source_lang": source, "target_lang": target, "forced_bos_token": forced_bos_token}
    name = type(tokenizer).__name__
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        if unsupported := [flag for flag, value in languages.items() if value is not None]:
            raise ValueError(f"--{unsupported[0]} is only for multilingual tokenizers, got a {name}. Leave it out.")
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
