"""How an exported CTranslate2 model is used: lines of Python, with the options that its generation settings mean."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from .ctranslate2_tokens import NO_TIMES, TRANSCRIPT, Tokens

__all__ = ["hearing_lines", "unsaid_settings", "writing_lines"]

# Settings of generation that are no option of a call: the file says them, or they change no token. Of the end of a
# search CTranslate2 has a rule of its own (docs/export.md).
NO_OPTIONS = {
    "_from_model_config",
    "bad_words_ids",
    "bos_token_id",
    "decoder_start_token_id",
    "early_stopping",
    "eos_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",  # that of the last place, where CTranslate2 ends without one
    "pad_token_id",
    "suppress_tokens",
    "transformers_version",
    "use_cache",
}
# What the others are called in `Translator.translate_batch`.
OPTIONS = {
    "num_beams": "beam_size",
    "length_penalty": "length_penalty",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "max_length": "max_decoding_length",
    "max_new_tokens": "max_decoding_length",
    "min_length": "min_decoding_length",
    "min_new_tokens": "min_decoding_length",
}
COUNT_THE_START = ("max_length", "min_length")
# The same of a Whisper: its prompt, and what the file says.
NO_HEARING_OPTIONS = {
    "alignment_heads",
    "begin_suppress_tokens",
    "forced_decoder_ids",
    "is_multilingual",
    "lang_to_id",
    "language",
    "max_initial_timestamp_index",  # of timestamps, which the prompt leaves out
    "max_length",
    "max_new_tokens",
    "median_filter_width",
    "no_timestamps_token_id",
    "prev_sot_token_id",
    "task",
    "task_to_id",
}
# What the others are called in `Whisper.generate`.
HEARING_OPTIONS = {
    name: OPTIONS[name] for name in ("num_beams", "length_penalty", "repetition_penalty", "no_repeat_ngram_size")
}
# Tokens of a text that CTranslate2 writes at most where nothing is said.
MOST_WRITTEN = 256
# Decoders that are told the language by their first token.
OF_MANY_LANGUAGES = ("m2m_100", "mbart")


def writing_lines(
    folder: str, tokens: Tokens, generation: GenerationConfig, places: int | None, model_type: str
) -> str:
    """Return lines that have a model of upstream's type write, whose decoder has so many places."""
    found = _call_options(tokens, generation)
    if places is not None and places <= MOST_WRITTEN:
        found.setdefault("max_decoding_length", places - 1)
    options = "".join(f", {name}={value!r}" for name, value in found.items())
    language = ""
    if model_type in OF_MANY_LANGUAGES and tokens.prompt == [tokens.end]:
        language = """
# Of several languages: set `tokenizer.src_lang`, and pass target_prefix=[["the target language's token"]]."""
    return f"""\
import ctranslate2, transformers
translator = ctranslate2.Translator({folder!r})
tokenizer = transformers.AutoTokenizer.from_pretrained({folder!r}){language}
source = tokenizer.convert_ids_to_tokens(tokenizer("A text.").input_ids)
[result] = translator.translate_batch([source]{options})
print(tokenizer.decode(tokenizer.convert_tokens_to_ids(result.hypotheses[0]), skip_special_tokens=True))"""


def hearing_lines(folder: str, tokens: Tokens, generation: GenerationConfig, places: int | None) -> str:
    """Return lines that have a Whisper transcribe, whose decoder has so many places."""
    prompt, is_said = _hearing_prompt(tokens, generation)
    found: dict[str, Any] = {"beam_size": 1} | _said(HEARING_OPTIONS, generation)
    limits = [generation.max_new_tokens, *(each - len(prompt) for each in (generation.max_length, places) if each)]
    if most := min(filter(None, limits), default=None):
        found["max_length"] = 2 * max(1, most)  # it writes half as many tokens as it is told
    options = "".join(f", {name}={value!r}" for name, value in found.items())
    language = "" if is_said else f"  # {prompt[1]}: say which language is spoken"
    return f"""\
import ctranslate2, numpy, transformers
whisper = ctranslate2.models.Whisper({folder!r})
processor = transformers.AutoProcessor.from_pretrained({folder!r})
audio = numpy.zeros(16000, numpy.float32)  # yours: one channel, 16 kHz
features = processor(audio, sampling_rate=16000, return_tensors="np").input_features
prompt = processor.tokenizer.convert_tokens_to_ids({prompt!r}){language}
[result] = whisper.generate(ctranslate2.StorageView.from_array(features), [prompt]{options})
print(processor.decode(result.sequences_ids[0]))"""


def _hearing_prompt(tokens: Tokens, generation: GenerationConfig) -> tuple[list[str], bool]:
    """Return a Whisper's prompt, and whether its language is known: said, or English for want of any other.

    Where it is not, the prompt has English, or the first language that there is.
    """
    languages = list(getattr(generation, "lang_to_id", None) or {})
    if not languages:
        return [TRANSCRIPT, NO_TIMES], True
    said, task = (getattr(generation, name, None) for name in ("language", "task"))
    said = str(said or "").lower()
    # `generate` reads the older setting where neither of the others is there.
    older = [] if said or task else getattr(generation, "forced_decoder_ids", None) or []
    forced = [tokens.vocabulary[number] for _, number in older if number is not None]
    named = [said, f"<|{TO_LANGUAGE_CODE.get(said, said)}|>", *forced]
    language = next((each for each in named if each in languages), None)
    task = task or ("translate" if "<|translate|>" in forced else "transcribe")
    asked = [language or ("<|en|>" if "<|en|>" in languages else languages[0]), f"<|{task}|>"]
    prompt = [TRANSCRIPT, *(each for each in asked if each in tokens.vocabulary), NO_TIMES]
    return prompt, language is not None or asked[0] not in tokens.vocabulary


def _call_options(tokens: Tokens, generation: GenerationConfig) -> dict[str, Any]:
    """Return the options of `Translator.translate_batch` for one text that a model's generation settings mean."""
    found: dict[str, Any] = {"beam_size": 1} | _said(OPTIONS, generation)
    if several := [words for words in generation.bad_words_ids or [] if len(words) > 1]:
        found["suppress_sequences"] = [tokens.texts(words) for words in several]
    if forced := tokens.prompt[1:]:
        found["target_prefix"] = [tokens.texts(forced)]
    return found


def _said(options: Mapping[str, str], generation: GenerationConfig) -> dict[str, Any]:
    """Return the options of a call that some settings mean, by the call's names."""
    said = generation.to_diff_dict()
    return {
        option: said[name] - 1 if name in COUNT_THE_START else said[name]
        for name, option in options.items()
        if said.get(name) is not None
    }


def unsaid_settings(generation: GenerationConfig, hears: bool) -> dict[str, Any]:
    """Return the settings of a text's generation that neither the file nor the options above say."""
    known = {*NO_OPTIONS, *OPTIONS}
    if hears:
        known = {*NO_OPTIONS, *NO_HEARING_OPTIONS, *HEARING_OPTIONS} - {"bad_words_ids", "forced_bos_token_id"}
    return {name: value for name, value in generation.to_diff_dict().items() if value and name not in known}
