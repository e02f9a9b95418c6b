"""Checks that CTranslate2 supports a model, compares their outputs, and generates example code."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from ..conversion.calibration.batches import pad_sequences
from ..conversion.checkpoint.source import list_learned_tokens
from ..model_properties import DecoderInput, get_decoder_input
from ..modeling.attention.model_mixin import AttnVariantModelMixin
from ..modeling.fields.field_table import look_up_field
from ..modeling.fields.saving_and_loading import get_effective_fields
from ..modeling.transformers_internals import get_cache, get_cache_name
from ..registration import get_max_input_length
from .plain import get_transformers_class_name

logger = logging.getLogger(__name__)

# The Transformers model types that `ctranslate2.build_model_specification` supports.
SUPPORTED_MODEL_TYPES = ("t5", "umt5", "bart", "mbart", "marian", "m2m_100", "pegasus", "whisper")
# {name of an activation in Transformers: name in CTranslate2}. Most names differ only in capitalization.
ACTIVATIONS = {
    **{name.lower(): name for name in ("GELU", "RELU", "Sigmoid", "SWISH", "Tanh")},
    "gelu_fast": "GELUTanh",
    "gelu_new": "GELUTanh",
    "gelu_python": "GELU",
    "gelu_pytorch_tanh": "GELUTanh",
    "quick_gelu": "GELUSigmoid",
    "silu": "SWISH",
}


def check_ctranslate2_support(model_class: type, config: Any) -> None:
    """Check that CTranslate2 supports a model from this package, without reading its weights.

    Layers can have any number of key/value heads, and latents are multiplied into the projections. Other variants are
    not supported.

    Raises:
        ValueError: If the class, a field or an activation is not supported.
    """
    name, model_type = get_transformers_class_name(model_class), config.transformers_model_types[0]
    generates = get_decoder_input(model_class, config) is DecoderInput.OWN_TARGETS
    if model_type not in SUPPORTED_MODEL_TYPES or not generates:
        raise ValueError(
            f"{name} cannot be exported to CTranslate2. Only encoder-decoders that generate text are supported, with "
            f"one of the model types {', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    for field in get_effective_fields(config):
        if "not_in_transformers" in look_up_field(field)[1].tags:
            raise ValueError(
                f"`{field}` {getattr(config, field)!r} is not supported because CTranslate2 only supports grouped "
                "heads. Use `--to onnx`."
            )
    activation = config.dense_act_fn if model_type in ("t5", "umt5") else config.activation_function
    # CTranslate2's Whisper encoder always uses the GELU activation.
    supported = [name for name, form in ACTIVATIONS.items() if model_type != "whisper" or form == "GELU"]
    if activation not in supported:
        raise ValueError(
            f"The activation of {name} must be one of {', '.join(supported)} in CTranslate2, got {activation!r}."
        )
    if not getattr(config, "share_encoder_decoder_embeddings", True):
        raise ValueError(
            "`share_encoder_decoder_embeddings` must be True because two vocabularies are not supported in an export."
        )


# Whisper's special tokens, and the number of seconds between consecutive timestamp tokens.
TRANSCRIPT_TOKEN, NO_TIMESTAMPS_TOKEN = "<|startoftranscript|>", "<|notimestamps|>"
TIMESTAMP_SECONDS = 0.02


@dataclass(frozen=True)
class TokenizerVocab:
    """A model's vocabulary and special tokens.

    Args:
        vocabulary: The text of each token id. All texts are distinct.
        prompt: The ids that the decoder reads first, which are the start token and forced tokens.
        end: The id of the end-of-sequence token.
        unknown: The text of the unknown token.
        suppressed_tokens: The ids that are never generated.
        initially_suppressed_tokens: The ids that are not generated as the first token.
    """

    vocabulary: list[str]
    prompt: list[int]
    end: int
    unknown: str
    suppressed_tokens: list[int]
    initially_suppressed_tokens: list[int]

    def get_texts(self, ids: list[int]) -> list[str]:
        """Return the texts of the given token ids."""
        return [self.vocabulary[token] for token in ids]


def read_tokenizer_vocab(
    tokenizer: PreTrainedTokenizerBase, config: Any, generation: GenerationConfig
) -> TokenizerVocab:
    """Return the vocabulary and the special tokens of an encoder-decoder.

    Args:
        tokenizer: The tokenizer of the model.
        config: The configuration of the model.
        generation: The generation config of the model.

    Raises:
        ValueError: If there is no start token, if there is not exactly one end-of-sequence token, or if the tokenizer
            of a Whisper model does not contain the prompt tokens.
    """
    names = ("decoder_start_token_id", "eos_token_id")
    values: list[Any] = [getattr(generation, name, None) for name in names]
    defaults: list[Any] = [getattr(config, name, None) for name in names]
    start, ends = (default if value is None else value for value, default in zip(values, defaults, strict=True))
    ends = ends if isinstance(ends, list) else [ends]
    for name, value in (("decoder_start_token_id", start), ("eos_token_id", ends[0])):
        if value is None or value >= config.vocab_size:
            raise ValueError(
                f"`{name}` must be one of the {config.vocab_size} token ids, got {value}. Set it in "
                "generation_config.json. In multilingual models, it selects the language."
            )
    if len(ends) > 1:
        raise ValueError(
            f"`eos_token_id` must be a single token for CTranslate2, got {ends}. Change generation_config.json."
        )
    is_whisper = config.transformers_model_types[0] == "whisper"
    vocabulary = _build_vocabulary(tokenizer, config.vocab_size, is_whisper)
    prompt, suppressed_tokens = [start], sorted(generation.suppress_tokens or [])
    initially_suppressed_tokens = sorted(generation.begin_suppress_tokens or []) if is_whisper else []
    if is_whisper:
        if missing := [token for token in (TRANSCRIPT_TOKEN, NO_TIMESTAMPS_TOKEN) if token not in vocabulary]:
            raise ValueError(
                f"The tokenizer of a Whisper model must have {' and '.join(missing)}. Use its original tokenizer."
            )
        prompt = [vocabulary.index(TRANSCRIPT_TOKEN), vocabulary.index(NO_TIMESTAMPS_TOKEN)]
    else:
        # Like `generate`, this ignores the end-of-sequence token in `bad_words_ids`.
        single_words = {words[0] for words in generation.bad_words_ids or [] if len(words) == 1} - set(ends)
        suppressed_tokens = sorted({*suppressed_tokens, *single_words})
        if generation.forced_bos_token_id is not None:
            prompt.append(generation.forced_bos_token_id)
    unknown = tokenizer.unk_token if tokenizer.unk_token in vocabulary else vocabulary[ends[0]]
    return TokenizerVocab(vocabulary, prompt, ends[0], unknown, suppressed_tokens, initially_suppressed_tokens)


def _build_vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, is_whisper: bool) -> list[str]:
    """Return a distinct text for each of `size` token ids. Ids that the tokenizer does not use get a placeholder."""
    ids = sorted({*tokenizer.get_vocab().values()})
    known_ids = [token for token in ids if token < size]
    if num_surplus_ids := len(ids) - len(known_ids):
        message = "The model's vocabulary has %d tokens. %d additional tokens in the tokenizer are not exported."
        logger.warning(message, size, num_surplus_ids)
    names: Any = tokenizer.convert_ids_to_tokens(known_ids)
    ids_by_name: dict[str, int] = {}
    for token, name in zip(known_ids, names, strict=True):
        if name is not None:
            ids_by_name.setdefault(name, token)
    texts = {token: name for name, token in ids_by_name.items()}
    first_timestamp = tokenizer.get_vocab().get(NO_TIMESTAMPS_TOKEN, size) + 1 if is_whisper else size
    for token in range(size):
        if token not in texts:
            seconds = (token - first_timestamp) * TIMESTAMP_SECONDS
            name = f"<unused_{token}>" if token < first_timestamp else f"<|{seconds:.2f}|>"
            while name in ids_by_name:
                name = f"_{name}"
            texts[token], ids_by_name[name] = name, token
    return [texts[token] for token in range(size)]


# Generation settings that do not need a `translate_batch` option because they are in the exported files or do not
# change the output. CTranslate2 has its own rule for ending a beam search (docs/export.md), and ends at the length
# limit without `forced_eos_token_id`.
SETTINGS_WITHOUT_OPTION = {
    *"""_from_model_config bad_words_ids bos_token_id decoder_start_token_id early_stopping eos_token_id
    forced_bos_token_id forced_eos_token_id pad_token_id suppress_tokens transformers_version use_cache""".split()
}
# {generation setting: option of `Translator.translate_batch`}.
TRANSLATOR_OPTIONS = {
    "num_beams": "beam_size",
    "length_penalty": "length_penalty",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "max_length": "max_decoding_length",
    "max_new_tokens": "max_decoding_length",
    "min_length": "min_decoding_length",
    "min_new_tokens": "min_decoding_length",
}
# Length settings that include the start token.
LENGTHS_WITH_START = ("max_length", "min_length")
# Generation settings that do not need a `Whisper.generate` option because they are in the prompt, which disables
# timestamps, or in the exported files.
WHISPER_SETTINGS_WITHOUT_OPTION = {
    *"""alignment_heads begin_suppress_tokens forced_decoder_ids is_multilingual lang_to_id language
    max_initial_timestamp_index max_length max_new_tokens median_filter_width no_timestamps_token_id prev_sot_token_id
    task task_to_id""".split()
}
# {generation setting: option of `Whisper.generate`}.
WHISPER_OPTIONS = {
    name: TRANSLATOR_OPTIONS[name]
    for name in ("num_beams", "length_penalty", "repetition_penalty", "no_repeat_ngram_size")
}
# The default of `max_decoding_length` in CTranslate2.
DEFAULT_MAX_LENGTH = 256
# The model types whose first generated token selects the language.
MULTILINGUAL_MODEL_TYPES = ("m2m_100", "mbart")


def describe_translator_usage(folder: str, vocab: TokenizerVocab, generation: GenerationConfig, config: Any) -> str:
    """Return Python code that generates text with an exported model.

    Args:
        folder: The folder of the exported model.
        vocab: The tokens of the model.
        generation: The generation config of the model.
        config: The configuration of the model.
    """
    options = _make_translator_options(vocab, generation)
    if (num_positions := get_max_input_length(config)) is not None and num_positions <= DEFAULT_MAX_LENGTH:
        options.setdefault("max_decoding_length", num_positions - 1)
    arguments = "".join(f", {name}={value!r}" for name, value in options.items())
    language = ""
    if config.transformers_model_types[0] in MULTILINGUAL_MODEL_TYPES and vocab.prompt == [vocab.end]:
        language = """
# For a multilingual model, set `tokenizer.src_lang` and pass target_prefix=[["<token of the target language>"]]."""
    return f"""\
import ctranslate2, transformers
translator = ctranslate2.Translator({folder!r})
tokenizer = transformers.AutoTokenizer.from_pretrained({folder!r}){language}
source = tokenizer.convert_ids_to_tokens(tokenizer("A text.").input_ids)
[result] = translator.translate_batch([source]{arguments})
print(tokenizer.decode(tokenizer.convert_tokens_to_ids(result.hypotheses[0]), skip_special_tokens=True))"""


def describe_whisper_usage(folder: str, vocab: TokenizerVocab, generation: GenerationConfig, config: Any) -> str:
    """Return Python code that transcribes audio with an exported Whisper model.

    Takes the same arguments as `describe_translator_usage`.
    """
    prompt, has_language = _make_whisper_prompt(vocab, generation)
    options: dict[str, Any] = {"beam_size": 1} | _make_call_options(WHISPER_OPTIONS, generation)
    lengths = [length - len(prompt) for length in (generation.max_length, get_max_input_length(config)) if length]
    if max_tokens := min(filter(None, [generation.max_new_tokens, *lengths]), default=None):
        options["max_length"] = 2 * max(1, max_tokens)  # CTranslate2 generates half of `max_length`
    arguments = "".join(f", {name}={value!r}" for name, value in options.items())
    language = "" if has_language else f"  # replace {prompt[1]} by the spoken language"
    return f"""\
import ctranslate2, numpy, transformers
whisper = ctranslate2.models.Whisper({folder!r})
processor = transformers.AutoProcessor.from_pretrained({folder!r})
audio = numpy.zeros(16000, numpy.float32)  # your audio: one channel, 16 kHz
features = processor(audio, sampling_rate=16000, return_tensors="np").input_features
prompt = processor.tokenizer.convert_tokens_to_ids({prompt!r}){language}
[result] = whisper.generate(ctranslate2.StorageView.from_array(features), [prompt]{arguments})
print(processor.decode(result.sequences_ids[0]))"""


def _make_whisper_prompt(vocab: TokenizerVocab, generation: GenerationConfig) -> tuple[list[str], bool]:
    """Return a Whisper model's prompt, and whether the language is known from the settings or the model.

    If the language is not known, the prompt selects English, or the first language if English is not supported.
    """
    languages = list(getattr(generation, "lang_to_id", None) or {})
    if not languages:
        return [TRANSCRIPT_TOKEN, NO_TIMESTAMPS_TOKEN], True
    setting, task = (getattr(generation, name, None) for name in ("language", "task"))
    setting = str(setting or "").lower()
    # `generate` only reads `forced_decoder_ids` if neither `language` nor `task` is set.
    forced_ids = [] if setting or task else getattr(generation, "forced_decoder_ids", None) or []
    forced = [vocab.vocabulary[token] for _, token in forced_ids if token is not None]
    candidates = [setting, f"<|{TO_LANGUAGE_CODE.get(setting, setting)}|>", *forced]
    language = next((token for token in candidates if token in languages), None)
    task = task or ("translate" if "<|translate|>" in forced else "transcribe")
    middle = [language or ("<|en|>" if "<|en|>" in languages else languages[0]), f"<|{task}|>"]
    prompt = [TRANSCRIPT_TOKEN, *(token for token in middle if token in vocab.vocabulary), NO_TIMESTAMPS_TOKEN]
    return prompt, language is not None or middle[0] not in vocab.vocabulary


def _make_translator_options(vocab: TokenizerVocab, generation: GenerationConfig) -> dict[str, Any]:
    """Convert a generation config to options of `Translator.translate_batch` for one text."""
    options: dict[str, Any] = {"beam_size": 1} | _make_call_options(TRANSLATOR_OPTIONS, generation)
    if sequences := [words for words in generation.bad_words_ids or [] if len(words) > 1]:
        options["suppress_sequences"] = [vocab.get_texts(words) for words in sequences]
    if forced := vocab.prompt[1:]:
        options["target_prefix"] = [vocab.get_texts(forced)]
    return options


def _make_call_options(option_names: Mapping[str, str], generation: GenerationConfig) -> dict[str, Any]:
    """Convert the settings in a generation config to options for a call.

    Args:
        option_names: {generation setting: call option}.
        generation: The generation config.
    """
    settings = generation.to_diff_dict()
    return {
        option: settings[name] - 1 if name in LENGTHS_WITH_START else settings[name]
        for name, option in option_names.items()
        if settings.get(name) is not None
    }


def list_unsupported_settings(generation: GenerationConfig, is_whisper: bool) -> dict[str, Any]:
    """Return the generation settings that are neither in the exported files nor options of a CTranslate2 call."""
    known = {*SETTINGS_WITHOUT_OPTION, *TRANSLATOR_OPTIONS}
    if is_whisper:
        known = {*SETTINGS_WITHOUT_OPTION, *WHISPER_SETTINGS_WITHOUT_OPTION, *WHISPER_OPTIONS}
        known -= {"bad_words_ids", "forced_bos_token_id"}
    return {name: value for name, value in generation.to_diff_dict().items() if value and name not in known}


# The number of tokens in each random text, the maximum number of generated tokens, and the number of audio inputs.
TEXT_LENGTHS, MAX_NEW_TOKENS, NUM_WINDOWS = (3, 17, 9, 6), 24, 2
# If the logits of two tokens differ by less than this, the order of summation can decide which token is generated (a
# tie).
MAX_TIE_MARGIN = 1e-3


@dataclass(frozen=True)
class GreedyOutput:
    """The greedy output of a model.

    Args:
        tokens: The generated token ids for each input, up to and including the end-of-sequence token.
        second: The second most likely token id at each position.
        margins: The logit difference between the most likely and the second most likely token at each position.
    """

    tokens: list[list[int]]
    second: list[list[int]]
    margins: list[list[float]]


@dataclass(frozen=True)
class Agreement:
    """Compares the greedy outputs of CTranslate2 and the model.

    Args:
        inputs: The number of inputs.
        same: The number of inputs for which all tokens are identical, or for which the first difference is a tie.
        tokens: The number of tokens that the model generates for all inputs.
        same_tokens: The number of these tokens that precede the first difference in each output.
        first: The first difference that is not a tie, as the input index, the position, the model's token id and
            CTranslate2's token id. None if there is no such difference.
    """

    inputs: int
    same: int
    tokens: int
    same_tokens: int
    first: tuple[int, int, int, int] | None

    @staticmethod
    def compare(expected: GreedyOutput, actual: list[list[int]]) -> "Agreement":
        """Compare the model's output with the token ids from CTranslate2."""
        same = same_tokens = 0
        first = None
        for number, (row, actual_row) in enumerate(zip(expected.tokens, actual, strict=True)):
            pairs = zip(row, [*actual_row, *[-1] * len(row)], strict=False)
            different = (position for position, (token, other) in enumerate(pairs) if token != other)
            split = next(different, None)
            is_tie = split is not None and (
                actual_row[split : split + 1] == [expected.second[number][split]]
                and expected.margins[number][split] < MAX_TIE_MARGIN
            )
            same += split is None or is_tie
            same_tokens += len(row) if split is None or is_tie else split
            if split is not None and not is_tie and first is None:
                first = number, split, row[split], actual_row[split] if split < len(actual_row) else -1
        return Agreement(len(actual), same, sum(map(len, expected.tokens)), same_tokens, first)


def make_random_inputs(model: AttnVariantModelMixin, tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    """Return a reproducible batch of random texts with padding on the right, or of noise for a Whisper model."""
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    if model.main_input_name == "input_features":
        shape = (NUM_WINDOWS, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator)}
    token_ids: Any = tokenizer.convert_tokens_to_ids(sorted(list_learned_tokens(tokenizer)))
    token_ids = [token for token in token_ids if token < config.vocab_size]
    random_ids = [torch.randint(len(token_ids), (length,), generator=generator).tolist() for length in TEXT_LENGTHS]
    texts: Any = [tokenizer.decode([token_ids[index] for index in indices]) for indices in random_ids]
    limit = get_max_input_length(config)
    rows = [tokenizer(text, truncation=limit is not None, max_length=limit)["input_ids"] for text in texts]
    return pad_sequences(rows, config.pad_token_id or 0)


def get_max_generated_tokens(model: AttnVariantModelMixin, vocab: TokenizerVocab) -> int:
    """Return the maximum number of tokens to generate, which is limited by the decoder's number of positions."""
    limit = get_max_input_length(model.config)
    return MAX_NEW_TOKENS if limit is None else min(MAX_NEW_TOKENS, limit - len(vocab.prompt))


@torch.no_grad()
def generate_greedily(
    model: AttnVariantModelMixin, inputs: dict[str, torch.Tensor], vocab: TokenizerVocab
) -> GreedyOutput:
    """Decode greedily with a model, and return its output with at most `get_max_generated_tokens` tokens."""
    callable_model: Any = model
    states = callable_model.get_encoder()(**inputs)
    generated = decoder_input = torch.tensor([vocab.prompt] * len(states[0]))
    arguments = {"encoder_outputs": states, "attention_mask": inputs.get("attention_mask"), "use_cache": True}
    steps: list[Any] = []
    cache = None
    for step in range(get_max_generated_tokens(model, vocab)):
        output = callable_model(decoder_input_ids=decoder_input, **arguments, **{get_cache_name(): cache})
        cache, logits = get_cache(output), output.logits[:, -1]
        logits[:, [*vocab.suppressed_tokens, *(vocab.initially_suppressed_tokens if step == 0 else [])]] = -torch.inf
        steps.append(logits.topk(2))
        decoder_input = steps[-1].indices[:, :1]
        generated = torch.cat([generated, decoder_input], 1)
        if (generated[:, len(vocab.prompt) :] == vocab.end).any(1).all():
            break
    rows: list[list[int]] = generated[:, len(vocab.prompt) :].tolist()
    lengths = [row.index(vocab.end) + 1 if vocab.end in row else len(row) for row in rows]
    return GreedyOutput(
        [row[:length] for row, length in zip(rows, lengths, strict=True)],
        torch.stack([step.indices[:, 1] for step in steps], 1).tolist(),
        torch.stack([step.values[:, 0] - step.values[:, 1] for step in steps], 1).tolist(),
    )


def generate_with_ctranslate2(
    folder: Path, inputs: dict[str, torch.Tensor], vocab: TokenizerVocab, max_tokens: int, quantization: str
) -> list[list[int]]:
    """Decode greedily with an exported model on the CPU.

    The computation uses integers if the weights are integers and the processor supports this. Otherwise, it uses
    float32.

    Args:
        folder: The folder of the exported model.
        inputs: The result of `make_random_inputs`.
        vocab: The tokens of the model.
        max_tokens: The maximum number of tokens to generate.
        quantization: The quantization type of the weights.

    Returns:
        The generated token ids for each input, including the end-of-sequence token.
    """
    import ctranslate2  # imported here because the other functions do not need it

    weight_type = "int8_float32" if quantization.startswith("int8") else quantization
    is_supported = weight_type in {"int16", "int8_float32"} & ctranslate2.get_supported_compute_types("cpu")
    compute_type = weight_type if is_supported else "float32"
    options = {"device": "cpu", "compute_type": compute_type, "intra_threads": torch.get_num_threads()}
    if "input_features" in inputs:
        features = ctranslate2.StorageView.from_array(np.ascontiguousarray(inputs["input_features"].numpy()))
        prompts = [vocab.prompt] * len(inputs["input_features"])
        results = ctranslate2.models.Whisper(os.fspath(folder), **options).generate(
            features,
            prompts,
            beam_size=1,
            max_length=2 * max_tokens,  # CTranslate2 generates half of `max_length`
        )
        ids = [list(result.sequences_ids[0]) for result in results]
        return [[*row, vocab.end] if len(row) < max_tokens else row for row in ids]
    rows = [
        vocab.get_texts(row[mask.bool()].tolist())
        for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    prefix = vocab.get_texts(vocab.prompt[1:])
    results = ctranslate2.Translator(os.fspath(folder), **options).translate_batch(
        rows,
        target_prefix=[prefix] * len(rows) if prefix else None,
        beam_size=1,
        min_decoding_length=0,  # the default is 1
        max_decoding_length=max_tokens + len(prefix),
        return_end_token=True,
    )
    numbers = {text: token for token, text in enumerate(vocab.vocabulary)}
    return [[numbers.get(text, -1) for text in result.hypotheses[0][len(prefix) :]] for result in results]
