"""The languages of a multilingual tokenizer (mBART's, M2M100's, NLLB's), and what texts in a language begin with."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["TargetStart", "set_languages"]

# Languages that a message names.
SHOWN = 8


@dataclass(frozen=True)
class TargetStart:
    """How the texts of a language begin.

    Attributes:
        decoder_start_token_id: what the decoder reads first. Where a text ends with its language (mBART's first
            version), it is the language.
        forced_bos_token_id: what generation must begin with: the language, where a text begins with it; or None.
    """

    decoder_start_token_id: int | None
    forced_bos_token_id: int | None

    def give(self, model: PreTrainedModel) -> None:
        """Set it in a model's configuration and in its generation settings, with which it is saved."""
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
    """Tell a tokenizer, also once saved, the languages of sources and targets, as HF's `run_translation.py` does.

    Args:
        tokenizer: the model's.
        config: the model's configuration.
        source, target: languages as the tokenizer calls them ("en_XX", "en", "eng_Latn"); None = those that it was
            saved with.
        forced_bos_token: the language that generation must begin with; None = the target's, where texts begin with it.

    Returns:
        How targets begin; None for a tokenizer that knows no languages.

    Raises:
        ValueError: if it knows none and one is given, if it knows several and lacks one, or there is no such language.
    """
    given = {"source_lang": source, "target_lang": target, "forced_bos_token": forced_bos_token}
    name = type(tokenizer).__name__
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        if useless := [flag for flag, value in given.items() if value is not None]:
            raise ValueError(
                f"--{useless[0]} is for a tokenizer of several languages, as those of mBART, M2M100 and NLLB are; the "
                f"model has a {name}"
            )
        return None
    known = _languages(tokenizer)
    if tokenizer.tgt_lang is not None:  # otherwise the source's is a default too, English, which nobody chose
        source, target = source or tokenizer.src_lang, target or tokenizer.tgt_lang
    if source is None or target is None:
        raise ValueError(f"a {name} reads several languages: give --source_lang and --target_lang, of {_shown(known)}")
    for flag, value in {**given, "source_lang": source, "target_lang": target}.items():
        if value is not None and value not in known:
            raise ValueError(f"--{flag}: the {name} knows no language {value!r}; it has {_shown(known)}")
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    tokenizer.init_kwargs |= {"src_lang": source, "tgt_lang": target}  # this is what is saved
    language, (first, *_, last) = known[target], tokenizer(text_target="")["input_ids"]
    if language >= config.vocab_size:
        raise ValueError(f"the {name} numbers {target} {language}, and the model has {config.vocab_size} tokens")
    start = config.decoder_start_token_id
    if last == language or start is None:  # mBART's own rule
        start = last
    forced = target if first == language else None
    if forced_bos_token is not None:
        forced = forced_bos_token
    return TargetStart(start, None if forced is None else known[forced])


def _languages(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the number of each language's token, by what the tokenizer calls the language."""
    if (codes := getattr(tokenizer, "lang_code_to_id", None)) is not None:
        return dict(codes)
    # NLLB's has them among its special tokens, whose others have names in angle brackets.
    names = [token for token in tokenizer.all_special_tokens if not token.startswith("<")]
    numbers: Any = tokenizer.convert_tokens_to_ids(names)
    return dict(zip(names, numbers, strict=True))


def _shown(known: dict[str, int]) -> str:
    names = sorted(known)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
