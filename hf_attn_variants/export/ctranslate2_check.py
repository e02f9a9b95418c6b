"""Models and tokens that CTranslate2 supports, a check of an export's output, and the lines of Python that use it."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from ..conversion.checkpoint.source import learned_tokens
from ..model_properties import DecoderInput, decoder_input
from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..modeling.fields.field_table import row_of
from ..modeling.fields.foreign_classes import fields_in_effect
from ..modeling.upstream import cache_name, cache_of
from ..registration import longest_input
from .plain import upstream_architecture

__all__ = [
    "ACTIVATIONS",
    "NO_TIMES",
    "SPECIFIED",
    "TRANSCRIPT",
    "Agreement",
    "Tokens",
    "Written",
    "check_has_form",
    "drawn_inputs",
    "greedy",
    "hearing_lines",
    "model_tokens",
    "read_back",
    "unsaid_settings",
    "writing_lines",
    "written_tokens",
]

logger = logging.getLogger(__name__)

# By upstream's `model_type`: the hosts that `ctranslate2_specs` knows.
SPECIFIED = ("t5", "umt5", "bart", "mbart", "marian", "m2m_100", "pegasus", "whisper")
# CTranslate2's activations by transformers' names, which are its own in small letters or others.
ACTIVATIONS = {
    **{name.lower(): name for name in ("GELU", "RELU", "Sigmoid", "SWISH", "Tanh")},
    "gelu_fast": "GELUTanh",
    "gelu_new": "GELUTanh",
    "gelu_python": "GELU",
    "gelu_pytorch_tanh": "GELUTanh",
    "quick_gelu": "GELUSigmoid",
    "silu": "SWISH",
}


def check_has_form(model_class: type, config: Any) -> None:
    """Check that CTranslate2 computes what a model of a variant configuration does; no tensor is asked.

    Heads may be any, in each layer. Latents are multiplied in. Every other field of the table has to be as in a model
    without a variant.

    Raises:
        ValueError: if it does not; the message names the class, or the field.
    """
    name, host = upstream_architecture(model_class), config.upstream_model_types[0]
    if host not in SPECIFIED or decoder_input(model_class, config) is not DecoderInput.OWN_TARGETS:
        raise ValueError(
            f"a {name} cannot be exported to CTranslate2: encoder-decoders that generate can, of "
            f"{', '.join(SPECIFIED)}."
        )
    for field in fields_in_effect(config):
        if "not_in_transformers" in row_of(field)[1].facts:
            raise ValueError(
                f"`{field}` is {getattr(config, field)!r}, which CTranslate2 cannot compute: of the variants it has "
                "grouped heads only. Try `--to onnx`."
            )
    activation = config.dense_act_fn if host in ("t5", "umt5") else config.activation_function
    # A Whisper's encoder has no field of its own for it.
    known = [each for each, form in ACTIVATIONS.items() if host != "whisper" or form == "GELU"]
    if activation not in known:
        raise ValueError(
            f"the activation {activation!r} of a {name} has no form in CTranslate2: {', '.join(known)} have."
        )
    if not getattr(config, "share_encoder_decoder_embeddings", True):
        raise ValueError(
            "`share_encoder_decoder_embeddings` is False: a model with two vocabularies cannot be exported."
        )


# Of a Whisper.
TRANSCRIPT, NO_TIMES = "<|startoftranscript|>", "<|notimestamps|>"
SECONDS_A_STEP = 0.02


@dataclass(frozen=True)
class Tokens:
    """The tokens of a model, and those with a meaning.

    Args:
        vocabulary: the text of each number, no two the same.
        prompt: what the decoder reads before it writes: the start, and what generation is forced to begin with.
        end: the end token.
        unknown: the text of the unknown token.
        never: what is never written.
        never_first: what is not written first.
    """

    vocabulary: list[str]
    prompt: list[int]
    end: int
    unknown: str
    never: list[int]
    never_first: list[int]

    def texts(self, numbers: list[int]) -> list[str]:
        """Return the texts of tokens."""
        return [self.vocabulary[number] for number in numbers]


def model_tokens(tokenizer: PreTrainedTokenizerBase, config: Any, generation: GenerationConfig) -> Tokens:
    """Return the tokens of an encoder-decoder.

    Raises:
        ValueError: if the decoder has no start token, or not one end token, or a Whisper's tokenizer not its prompt.
    """
    start, ends = (_setting(name, config, generation) for name in ("decoder_start_token_id", "eos_token_id"))
    ends = ends if isinstance(ends, list) else [ends]
    for name, value in (("decoder_start_token_id", start), ("eos_token_id", ends[0])):
        if value is None or value >= config.vocab_size:
            raise ValueError(
                f"`{name}` must be one of the {config.vocab_size} tokens; got {value}: set it in "
                "generation_config.json (of a multilingual model it says the language)."
            )
    if len(ends) > 1:
        raise ValueError(f"`eos_token_id` must be one token: CTranslate2's configuration has one; got {ends}.")
    hears = config.upstream_model_types[0] == "whisper"
    vocabulary = _vocabulary(tokenizer, config.vocab_size, hears)
    prompt, never = [start], sorted(generation.suppress_tokens or [])
    never_first = sorted(generation.begin_suppress_tokens or []) if hears else []
    if hears:
        if missing := [token for token in (TRANSCRIPT, NO_TIMES) if token not in vocabulary]:
            raise ValueError(f"the tokenizer of a Whisper must know {' and '.join(missing)}.")
        prompt = [vocabulary.index(TRANSCRIPT), vocabulary.index(NO_TIMES)]
    else:
        # The end token among them is ignored by `generate`, too.
        alone = {words[0] for words in generation.bad_words_ids or [] if len(words) == 1} - set(ends)
        never = sorted({*never, *alone})
        if generation.forced_bos_token_id is not None:
            prompt.append(generation.forced_bos_token_id)
    unknown = tokenizer.unk_token if tokenizer.unk_token in vocabulary else vocabulary[ends[0]]
    return Tokens(vocabulary, prompt, ends[0], unknown, never, never_first)


def _setting(name: str, config: Any, generation: GenerationConfig) -> Any:
    value = getattr(generation, name, None)
    return getattr(config, name, None) if value is None else value


def _vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, hears: bool) -> list[str]:
    """Return `size` texts, no two the same, each by its number; numbers that the tokenizer does not use get some."""
    numbers = sorted({*tokenizer.get_vocab().values()})
    if beyond := [number for number in numbers if number >= size]:
        logger.warning("the model has %d tokens: the tokenizer's %d others are left out", size, len(beyond))
    known = [number for number in numbers if number < size]
    names: Any = tokenizer.convert_ids_to_tokens(known)
    found: dict[int, str] = {}
    taken: set[str] = set()
    for number, name in zip(known, names, strict=True):
        if name is not None and name not in taken:
            found[number] = name
            taken.add(name)
    first = tokenizer.get_vocab().get(NO_TIMES, size) + 1 if hears else size
    for number in range(size):
        if number not in found:
            name = f"<unused_{number}>" if number < first else f"<|{(number - first) * SECONDS_A_STEP:.2f}|>"
            while name in taken:
                name = f"_{name}"
            found[number] = name
            taken.add(name)
    return [found[number] for number in range(size)]


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


# Tokens of each drawn text, and how many are written at most.
LENGTHS, NEW_TOKENS = (3, 17, 9, 6), 24
# Of a Whisper's noise.
WINDOWS = 2
# Between logits: two tokens nearer than this are a tie, which sums in another order may break otherwise.
TIE = 1e-3


@dataclass(frozen=True)
class Written:
    """What a model writes.

    Args:
        tokens: of each input, to the end token where there is one.
        second: what would have been written in the place of each token.
        margins: by how much of a logit it was not.
    """

    tokens: list[list[int]]
    second: list[list[int]]
    margins: list[list[float]]


@dataclass(frozen=True)
class Agreement:
    """How far CTranslate2 writes what the model does.

    Args:
        inputs: how many there were.
        same: of how many all tokens are the same, or the first that is not is a tie.
        tokens: how many the model writes.
        same_tokens: how many of these come before the first other one.
        first: where an input parts, (its number, the place, the model's token, CTranslate2's); None: nowhere.
    """

    inputs: int
    same: int
    tokens: int
    same_tokens: int
    first: tuple[int, int, int, int] | None

    @staticmethod
    def of(expected: Written, found: list[list[int]]) -> "Agreement":
        """Compare token by token."""
        same = same_tokens = 0
        first = None
        for number, (row, other) in enumerate(zip(expected.tokens, found, strict=True)):
            pairs = zip(row, [*other, *[-1] * len(row)], strict=False)
            parted = next((at for at, (one, two) in enumerate(pairs) if one != two), None)
            is_tie = parted is not None and (
                other[parted : parted + 1] == [expected.second[number][parted]]
                and expected.margins[number][parted] < TIE
            )
            same += parted is None or is_tie
            same_tokens += len(row) if parted is None or is_tie else parted
            if parted is not None and not is_tie and first is None:
                first = number, parted, row[parted], other[parted] if parted < len(other) else -1
        return Agreement(len(found), same, sum(map(len, expected.tokens)), same_tokens, first)


def drawn_inputs(model: AttnVariantModelMixin, tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    """Return a batch of inputs, the same each time: texts of drawn tokens, padded on the right; a Whisper's noise."""
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    if model.main_input_name == "input_features":
        shape = (WINDOWS, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator)}
    learned: Any = tokenizer.convert_tokens_to_ids(sorted(learned_tokens(tokenizer)))
    learned = [number for number in learned if number < config.vocab_size]
    drawn = [torch.randint(len(learned), (length,), generator=generator).tolist() for length in LENGTHS]
    texts: Any = [tokenizer.decode([learned[at] for at in each]) for each in drawn]
    places = longest_input(config)
    rows = [tokenizer(text, truncation=places is not None, max_length=places)["input_ids"] for text in texts]
    longest = max(map(len, rows))
    padding = config.pad_token_id or 0
    ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


def written_tokens(model: AttnVariantModelMixin, tokens: Tokens) -> int:
    """Return how many tokens are written at most: not more than the decoder has places for."""
    places = longest_input(model.config)
    return NEW_TOKENS if places is None else min(NEW_TOKENS, places - len(tokens.prompt))


@torch.no_grad()
def greedy(model: AttnVariantModelMixin, inputs: dict[str, torch.Tensor], tokens: Tokens) -> Written:
    """Return what a model writes greedily; at most `written_tokens`."""
    callable_model: Any = model
    states = callable_model.get_encoder()(**inputs)
    written = read = torch.tensor([tokens.prompt] * len(states[0]))
    given = {"encoder_outputs": states, "attention_mask": inputs.get("attention_mask"), "use_cache": True}
    steps: list[Any] = []
    cache = None
    for step in range(written_tokens(model, tokens)):
        output = callable_model(decoder_input_ids=read, **given, **{cache_name(): cache})
        cache, logits = cache_of(output), output.logits[:, -1]
        logits[:, [*tokens.never, *(tokens.never_first if step == 0 else [])]] = -torch.inf
        steps.append(logits.topk(2))
        read = steps[-1].indices[:, :1]
        written = torch.cat([written, read], 1)
        if (written[:, len(tokens.prompt) :] == tokens.end).any(1).all():
            break
    rows: list[list[int]] = written[:, len(tokens.prompt) :].tolist()
    lengths = [row.index(tokens.end) + 1 if tokens.end in row else len(row) for row in rows]
    return Written(
        [row[:length] for row, length in zip(rows, lengths, strict=True)],
        torch.stack([step.indices[:, 1] for step in steps], 1).tolist(),
        torch.stack([step.values[:, 0] - step.values[:, 1] for step in steps], 1).tolist(),
    )


def read_back(
    folder: Path, inputs: dict[str, torch.Tensor], tokens: Tokens, most: int, quantization: str
) -> list[list[int]]:
    """Return what CTranslate2 writes greedily, on the CPU, at most so many tokens, the end token among them.

    Quantised weights are computed with as they are where this processor can, all others in float32.
    """
    wanted = {"int16": "int16"}.get(quantization, "int8_float32" if quantization.startswith("int8") else "float32")
    compute_type = wanted if wanted in ctranslate2.get_supported_compute_types("cpu") else "float32"
    options = {"device": "cpu", "compute_type": compute_type, "intra_threads": torch.get_num_threads()}
    if "input_features" in inputs:
        return _heard(ctranslate2.models.Whisper(os.fspath(folder), **options), inputs["input_features"], tokens, most)
    rows = [
        tokens.texts(row[mask.bool()].tolist())
        for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    prefix = tokens.texts(tokens.prompt[1:])
    results = ctranslate2.Translator(os.fspath(folder), **options).translate_batch(
        rows,
        target_prefix=[prefix] * len(rows) if prefix else None,
        beam_size=1,
        min_decoding_length=0,  # by default it writes one
        max_decoding_length=most + len(prefix),
        return_end_token=True,
    )
    numbers = {text: number for number, text in enumerate(tokens.vocabulary)}
    return [[numbers.get(text, -1) for text in each.hypotheses[0][len(prefix) :]] for each in results]


def _heard(whisper: Any, features: torch.Tensor, tokens: Tokens, most: int) -> list[list[int]]:
    # It writes half as many tokens as `max_length`.
    results = whisper.generate(
        ctranslate2.StorageView.from_array(np.ascontiguousarray(features.numpy())),
        [tokens.prompt] * len(features),
        beam_size=1,
        max_length=2 * most,
    )
    found = [list(each.sequences_ids[0]) for each in results]
    return [[*row, tokens.end] if len(row) < most else row for row in found]
