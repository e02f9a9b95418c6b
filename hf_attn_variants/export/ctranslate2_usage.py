"""How an exported CTranslate2 model is used: lines of Python, with the options that its generation settings mean."""

from typing import Any

from transformers import GenerationConfig

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
# Tokens that CTranslate2 writes at most where nothing is said, of texts and of a Whisper.
MOST_WRITTEN, MOST_HEARD = 256, 448


def writing_lines(folder: str, tokens: Tokens, generation: GenerationConfig, places: int | None) -> str:
    """Return lines that have a model write, whose decoder has so many places."""
    found = _call_options(tokens, generation)
    if places is not None and places <= MOST_WRITTEN:
        found.setdefault("max_decoding_length", places - 1)
    options = "".join(f", {name}={value!r}" for name, value in found.items())
    return f"""\
import ctranslate2, transformers
translator = ctranslate2.Translator({folder!r})
tokenizer = transformers.AutoTokenizer.from_pretrained({folder!r})
source = tokenizer.convert_ids_to_tokens(tokenizer("A text.").input_ids)
[result] = translator.translate_batch([source]{options})
print(tokenizer.decode(tokenizer.convert_tokens_to_ids(result.hypotheses[0]), skip_special_tokens=True))"""


def hearing_lines(folder: str, tokens: Tokens, generation: GenerationConfig, places: int | None) -> str:
    """Return lines that have a Whisper transcribe, whose decoder has so many places."""
    limit = "" if places is None or places >= MOST_HEARD else f", max_length={places}"
    languages = list(getattr(generation, "lang_to_id", None) or {})
    asked = ["<|en|>" if "<|en|>" in languages else languages[0], "<|transcribe|>"] if languages else []
    prompt = [TRANSCRIPT, *(each for each in asked if each in tokens.vocabulary), NO_TIMES]
    return f"""\
import ctranslate2, numpy, transformers
whisper = ctranslate2.models.Whisper({folder!r})
processor = transformers.AutoProcessor.from_pretrained({folder!r})
audio = numpy.zeros(16000, numpy.float32)  # yours: one channel, 16 kHz
features = processor(audio, sampling_rate=16000, return_tensors="np").input_features
prompt = processor.tokenizer.convert_tokens_to_ids({prompt!r})
[result] = whisper.generate(ctranslate2.StorageView.from_array(features), [prompt]{limit})
print(processor.decode(result.sequences_ids[0]))"""


def _call_options(tokens: Tokens, generation: GenerationConfig) -> dict[str, Any]:
    """Return the options of `Translator.translate_batch` for one text that a model's generation settings mean."""
    said = generation.to_diff_dict()
    found: dict[str, Any] = {"beam_size": 1}
    for name, option in OPTIONS.items():
        if said.get(name) is not None:
            found[option] = said[name] - 1 if name in COUNT_THE_START else said[name]
    if several := [words for words in generation.bad_words_ids or [] if len(words) > 1]:
        found["suppress_sequences"] = [tokens.texts(words) for words in several]
    if forced := tokens.prompt[1:]:
        found["target_prefix"] = [tokens.texts(forced)]
    return found


def unsaid_settings(generation: GenerationConfig) -> dict[str, Any]:
    """Return the settings of a text's generation that neither the file nor the options above say."""
    known = {*NO_OPTIONS, *OPTIONS}
    return {name: value for name, value in generation.to_diff_dict().items() if value and name not in known}
