"""Makes batches of model inputs for calibration, and warns about texts and audio that seem unsuitable.

    texts ──► tokens ──► split_examples ──► fitting ────┐
                               │                        ├──► passages ──► group_by_length ──► make_batches
                               ├──────────► held out ───┘                    (with targets for a decoder)
                               │
                               └──────────► held out, unchanged ──► make_untruncated_batches

The fitting and held-out batches from `make_batches` are used for individual attention modules. The untruncated batches
are used to measure the quality of the whole model.
"""

import itertools
import logging
import math
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from ...model_properties import DecoderInput, get_decoder_input, get_decoder_start_token, ignore_saved_length_limits
from ...progress import progress_bar
from ...registration import get_max_input_length
from ..calibration_settings import FIT_TOKENS, MAX_DEFAULT_LENGTH, Calibration

logger = logging.getLogger(__name__)

# Recommended number of fitting tokens per hidden-state element. The output regression has one unknown per element.
TOKENS_PER_DIMENSION = 8
# The language and small shares of unknown tokens are only checked if there are at least this many tokens.
MIN_CHECKED_TOKENS = 1000
# Maximum average number of tokens per alphabetic word. English tokenizers split words in English text into 1.0 to 1.4
# tokens, even if it contains code, and words in German text into 1.9. Names and numbers in code have many tokens in
# every language, so they are ignored.
MAX_TOKENS_PER_WORD = 1.65
# If the average word is longer, the text does not consist of words. It may contain formulas or letter sequences.
MAX_WORD_LENGTH = 12.0
# Maximum number of words that are used to check the language.
MAX_WORDS = 4096
# Shares of unknown tokens that trigger a warning and an error.
WARN_UNKNOWN_SHARE, MAX_UNKNOWN_SHARE = 0.05, 0.9
# Loss of the original model that triggers a warning, relative to the loss of a random guess, ln(vocabulary). A larger
# loss suggests that the model was not trained on this type of text.
MAX_LOSS_SHARE = 0.5
# A recording is considered silent if its loudness relative to full scale is less than this value (-60 dB).
SILENCE_LOUDNESS = 1e-3
# Share of silent recordings that triggers a warning.
WARN_SHARE = 0.25


def check_token_count(stacks: Iterable[str], hidden_size: int, batches: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Warn if the fitted attention modules of an encoder or decoder read too few tokens.

    Args:
        stacks: "encoder", "decoder" or both, depending on where the fitted modules are.
        hidden_size: Hidden state size.
        batches: Model inputs for the fitting examples.
    """
    min_tokens = TOKENS_PER_DIMENSION * hidden_size
    for stack in dict.fromkeys(stacks):
        name = "decoder_attention_mask" if stack == "decoder" else "attention_mask"
        masks = [batch.get(name, batch.get("attention_mask")) for batch in batches]
        known = [mask for mask in masks if mask is not None]
        tokens, examples = sum(int(mask.sum()) for mask in known), sum(map(len, known))
        # Audio has no mask because each file fills a window of many positions.
        if len(known) == len(masks) and tokens < min_tokens:
            logger.warning(
                f"Calibrating the {stack} requires at least {min_tokens} tokens ({TOKENS_PER_DIMENSION} for each of "
                f"the {hidden_size} hidden-state elements), got {tokens} tokens in {examples} examples. The model may "
                f"lose quality on other text. Provide about {-(-min_tokens * examples // max(1, tokens))} such "
                "examples."
            )


def check_texts(tokenizer: Any, texts: Sequence[Any], encoded: Sequence[Sequence[int]]) -> None:
    """Warn if many tokens are unknown, or if the texts do not appear to be in the tokenizer's language.

    Args:
        tokenizer: The model's tokenizer.
        texts: The texts or pairs of texts.
        encoded: The token ids of the examples.

    Raises:
        ValueError: if almost all tokens are unknown, in which case any converted model would appear to be good.
    """
    joined = [text if isinstance(text, str) else " ".join(text) for text in texts]
    special, unknown = _get_special_token_ids(tokenizer), getattr(tokenizer, "unk_token_id", None)
    tokens = [token for row in encoded for token in row if token not in special]
    share = sum(token == unknown for token in tokens) / max(1, len(tokens))
    message = (
        f"{share:.0%} of the calibration tokens are unknown to the tokenizer. Check that it belongs to the model."
    )
    if share > MAX_UNKNOWN_SHARE:
        raise ValueError(message)
    if len(tokens) < MIN_CHECKED_TOKENS:
        return
    if share > WARN_UNKNOWN_SHARE:
        logger.warning(message)
    _check_language(tokenizer, [word for text in joined for word in text.split()])


def _check_language(tokenizer: Any, words: list[str]) -> None:
    """Warn if the tokenizer splits words into more tokens than expected for its own language."""
    if sum(map(len, words)) > MAX_WORD_LENGTH * len(words):
        return
    words = [word for word in map(_normalize_word, words) if word][:MAX_WORDS]
    if len(words) < MIN_CHECKED_TOKENS / 4:
        return
    special = _get_special_token_ids(tokenizer)
    word_tokens = tokenizer(words, truncation=True, max_length=MAX_WORDS)["input_ids"]
    pieces = sum(token not in special for row in word_tokens for token in row) / len(words)
    if pieces > MAX_TOKENS_PER_WORD:
        logger.warning(
            f"The tokenizer splits words in the calibration texts into {pieces:.1f} tokens on average, compared with "
            f"less than {MAX_TOKENS_PER_WORD:.1f} in its own language. Check that the texts are in this language."
        )


def _get_special_token_ids(tokenizer: Any) -> set[int]:
    """Return the ids of a tokenizer's special tokens, except the unknown token, which represents a word."""
    return set(tokenizer.all_special_ids) - {getattr(tokenizer, "unk_token_id", None)}


def _normalize_word(text: str) -> str:
    """Return a word without surrounding punctuation, or "" for identifiers in code, numbers and formulas."""
    word = text.strip(string.punctuation)
    return word if word.isalpha() and (word[1:].islower() or word[1:].isupper() or len(word) == 1) else ""


def check_source_loss(loss: float | None, vocab_size: int) -> None:
    """Warn if the original model's loss, in nats per token, is more than half the loss of a random guess."""
    if loss is not None and loss > MAX_LOSS_SHARE * math.log(vocab_size):
        logger.warning(
            f"The original model has a loss of {loss:.1f} nats per token on the calibration data, compared with a "
            f"random guess among its {vocab_size} tokens at {math.log(vocab_size):.1f}. Check that the texts are "
            "typical of the model's inputs."
        )


def check_audio(loudness: Sequence[float], transcripts: Sequence[Sequence[int]]) -> None:
    """Warn if many recordings are silent, or if the model recognizes no words in many recordings.

    Args:
        loudness: Root mean square of each file's samples, which are in [-1, 1].
        transcripts: The tokens that the model generates for each file. Empty for an encoder-only model.
    """
    silent = int((np.array(loudness) < SILENCE_LOUDNESS).sum())
    if silent > WARN_SHARE * len(loudness):
        message = "%d of the %d recordings are silent (below %.3f of full scale). Use other recordings."
        logger.warning(message, silent, len(loudness), SILENCE_LOUDNESS)
    empty = sum(not tokens for tokens in transcripts)
    if empty > WARN_SHARE * len(loudness):
        message = "The model recognizes no words in %d of the %d recordings. Check that they contain speech."
        logger.warning(message, empty, len(loudness))


# Minimum number of tokens in a passage. Single texts can be shorter.
MIN_PASSAGE_LENGTH = 16
GOLDEN_RATIO = (1 + 5**0.5) / 2
# Minimum number of tokens in the calibration data. `check_token_count` warns if there are fewer than recommended.
MIN_TOKENS = 100
# Texts are considered short if the model has more than this factor times as many positions as the longest text.
SHORT_TEXT_FACTOR = 4
# Maximum number of tokens in a batch for fitting, and in a batch for measurements, which also require logits.
BATCH_TOKENS, MEASURED_BATCH_TOKENS = 8192, 4096
# A number of tokens that is larger than the length of any text.
NO_TOKEN_LIMIT = 2**30
# Fields of the generation configuration that define tokens in the prompt. The last three are for Whisper.
PROMPT_TOKENS = ("decoder_start_token_id", "forced_bos_token_id", "no_timestamps_token_id", "lang_to_id", "task_to_id")
# Batch key for the encoder outputs [b, m, D], if they are already known.
ENCODER_OUTPUTS = "encoder_outputs"
# The label of positions for which no token is predicted.
IGNORE_INDEX = -100
# Batch key for the audio features, which are as large as the encoder outputs.
AUDIO_FEATURES = "input_features"
Batch = dict[str, torch.Tensor]
# Indices of the fitting examples and of the held-out examples.
ExampleSplit = tuple[list[int], list[int]]
# The token ids, token type ids and target ids of all examples.
EncodedExamples = tuple[list[list[int]], list[list[int]] | None, list[list[int]] | None]


def should_join_passages(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, calibration: Calibration
) -> bool:
    """Return whether to join half of the calibration texts with the texts that follow them.

    The texts of encoder-decoders are not joined because the decoder would need targets for the passages.
    """
    has_both = get_decoder_input(model_class, config) is not DecoderInput.NOTHING
    return calibration.supports_passages and not has_both and calibration.passages is not False


def join_passages(texts: Sequence[str], token_counts: Sequence[int], max_tokens: int) -> dict[int, tuple[str, int]]:
    """Join every second text with the texts that follow it.

    Passage lengths are distributed evenly on a logarithmic scale between `MIN_PASSAGE_LENGTH` and `max_tokens`. A text
    that is at least as long as its passage stays unchanged.

    Args:
        texts: The texts.
        token_counts: Number of tokens in each text without special tokens. Tokens are counted instead of words because
            Chinese text and chemical formulas are not divided into words.
        max_tokens: Maximum number of tokens in a passage.

    Returns:
        {index of the first text: (passage, number of tokens at which it is truncated)}
    """
    shortest = min(MIN_PASSAGE_LENGTH, max_tokens)
    joined = {}
    for i in range(0, len(texts), 2):
        # Multiples of the golden ratio modulo 1 are distributed evenly over any range of texts without random numbers.
        length = round(shortest * (max_tokens / shortest) ** (i // 2 * GOLDEN_RATIO % 1))
        parts, tokens = [texts[i]], token_counts[i]
        # The first text follows the last text, and no passage contains a text twice.
        for following in range(1, len(texts)):
            if tokens >= length:
                break
            parts.append(texts[(i + following) % len(texts)])
            tokens += max(1, token_counts[(i + following) % len(texts)])
        if len(parts) > 1:
            joined[i] = (" ".join(parts), length)
    return joined


def set_length_statistics(calibration: Calibration, tokenizer: Any, config: Any) -> Calibration:
    """Set `whole_length` and `cut_share` in calibration settings, and warn if texts are truncated.

    Args:
        calibration: The calibration settings. They are returned unchanged for audio, or if these fields are already
            set.
        tokenizer: The model's tokenizer.
        config: Configuration of the model that reads the texts.
    """
    if calibration.audio is not None or calibration.whole_length is not None:
        return calibration
    counts = list(map(len, tokenize_texts(config, tokenizer, calibration.texts, NO_TOKEN_LIMIT)[0]))
    if calibration.target_texts is not None:
        targets = _tokenize_targets(tokenizer, calibration.target_texts, NO_TOKEN_LIMIT)
        counts = [max(count, len(ids)) for count, ids in zip(counts, targets, strict=True)]
    limit: Any = get_max_input_length(config) or getattr(tokenizer, "model_max_length", NO_TOKEN_LIMIT)
    untruncated_length = min(max(counts), limit if limit < NO_TOKEN_LIMIT else MAX_DEFAULT_LENGTH)
    length: int = untruncated_length if calibration.max_length is None else calibration.max_length
    truncated = sum(count > length for count in counts)
    if truncated:
        reason = "--max_length" if length < untruncated_length else "the model's maximum"
        logger.warning(
            f"{truncated} of {len(counts)} calibration examples are truncated to {length} tokens ({reason}). The "
            f"longest example has {max(counts)} tokens."
        )
    return replace(calibration, whole_length=untruncated_length, cut_share=truncated / len(counts))


def limit_length(config: PreTrainedConfig, calibration: Calibration, length: int) -> int:
    """Return a maximum number of tokens, limited to the model's number of positions (half of them for audio)."""
    positions = get_max_input_length(config)
    if positions is None:
        return length
    return min(length, positions if calibration.audio is None else positions // 2)


def make_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration, generator: torch.Generator
) -> tuple[list[Batch], list[Batch]]:
    """Make the fitting and held-out batches from texts, with texts of similar lengths in each batch.

    Args:
        model: The original model, which generates the targets if the settings do not contain any.
        tokenizer: The model's tokenizer.
        calibration: The calibration settings.
        generator: Random number generator that selects the held-out texts.

    Returns:
        The fitting batches and the held-out batches.
    """
    calibration = set_length_statistics(calibration, tokenizer, model.config)
    fit_rows, held_out = split_examples(calibration, generator)
    encoded, segments, targets = _tokenize_examples(model, tokenizer, calibration, (fit_rows, held_out))
    if calibration.max_length is None:
        share = FIT_TOKENS * len(held_out) // len(encoded)
        fit_rows = _truncate_to_token_limit(fit_rows, encoded, FIT_TOKENS - share)
        held_out = _truncate_to_token_limit(held_out, encoded, share)
    chunks: Any = group_by_length(calibration, list(map(len, encoded)), (fit_rows, held_out))
    if get_decoder_input(type(model), model.config) is DecoderInput.OWN_TARGETS and targets is None:
        chunks = progress_bar(chunks, desc="generating targets", unit="batch", leave=False)
    batches: tuple[list[Batch], list[Batch]] = ([], [])
    for part, rows in chunks:
        length = calibration.max_length or calibration.generated_length
        batches[part].append(_make_batch(model, tokenizer, rows, (encoded, segments, targets), length))
    return batches


def _truncate_to_token_limit(indices: list[int], encoded: Sequence[Sequence[int]], limit: int) -> list[int]:
    """Return the leading examples that have at most `limit` tokens in total, but at least one example."""
    totals = itertools.accumulate(len(encoded[row]) for row in indices)
    return indices[: max(1, sum(total <= limit for total in totals))]


def make_untruncated_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration, generator: torch.Generator
) -> list[Batch]:
    """Make batches of the held-out examples for measuring the quality of the whole model.

    The examples are not joined into passages, and they are only truncated at the model's maximum length. They have
    targets only if `calibration` contains them.

    Args:
        model, tokenizer, calibration: See `make_batches`.
        generator: Random number generator that selects the held-out examples, with the same seed as for
            `make_batches`.
    """
    calibration = set_length_statistics(calibration, tokenizer, model.config)
    rows = split_examples(calibration, generator)[1]
    texts, length = [calibration.texts[row] for row in rows], calibration.evaluation_length
    encoded, segments = tokenize_texts(model.config, tokenizer, texts, length)
    targets = None
    if calibration.target_texts is not None:
        targets = _tokenize_targets(tokenizer, [calibration.target_texts[row] for row in rows], length)
    split: ExampleSplit = ([], list(range(len(rows))))
    chunks = group_by_length(calibration, list(map(len, encoded)), split, MEASURED_BATCH_TOKENS)
    return [_make_batch(model, tokenizer, chunk, (encoded, segments, targets), None) for _, chunk in chunks]


def split_examples(calibration: Calibration, generator: torch.Generator) -> ExampleSplit:
    """Split the examples at random, and return the indices of the fitting examples and of the held-out examples."""
    permutation = torch.randperm(len(calibration.examples), generator=generator).tolist()
    return permutation[calibration.num_held_out :], permutation[: calibration.num_held_out]


def group_by_length(
    calibration: Calibration, lengths: list[int], split: ExampleSplit, max_tokens: int = BATCH_TOKENS
) -> list[tuple[int, list[int]]]:
    """Group examples with similar lengths into batches.

    Args:
        calibration: The calibration settings with the batch size.
        lengths: Number of tokens in each example.
        split: The result of `split_examples`.
        max_tokens: Maximum number of tokens in a batch, including padding.

    Returns:
        For each batch, whether it is used for fitting (0) or held out (1), and the indices of its examples.
    """
    chunks: list[tuple[int, list[int]]] = []
    for part, rows in enumerate(split):
        for number, row in enumerate(sorted(rows, key=lambda i: (lengths[i], i))):
            chunk = chunks[-1][1] if number else []
            is_full = len(chunk) == calibration.resolved_batch_size or (len(chunk) + 1) * lengths[row] > max_tokens
            if not chunk or is_full:
                chunks.append((part, []))
            chunks[-1][1].append(row)
    return chunks


def make_decoder_arguments(generated: torch.Tensor, pad_token_id: int) -> Batch:
    """Return the decoder inputs from which a model predicts the given generated tokens [b, t].

    The generated tokens must begin with the decoder start token.
    """
    ids = generated[:, :-1].cpu()
    mask = torch.cat([torch.ones_like(ids[:, :1]), (ids[:, 1:] != pad_token_id).long()], dim=1)
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


def get_generated_tokens(batch: Batch, generation: GenerationConfig | None) -> list[list[int]]:
    """Return the generated tokens of each example, without the prompt.

    Args:
        batch: Decoder inputs from `make_decoder_arguments`.
        generation: The model's generation settings, which define the start, language and task tokens in the prompt.
    """
    prompt = _get_prompt_tokens(generation)
    rows = zip(batch["decoder_input_ids"].tolist(), batch["decoder_attention_mask"].tolist(), strict=True)
    return [[token for token, is_real in zip(*row, strict=True) if is_real and token not in prompt] for row in rows]


def make_next_token_labels(
    ids: torch.Tensor, mask: torch.Tensor, generation: GenerationConfig | None = None
) -> torch.Tensor:
    """Return the next token for each position of decoder inputs, or -100 after the last token.

    Args:
        ids: Decoder inputs, [b, t].
        mask: 1 for tokens and 0 for padding, [b, t].
        generation: Generation settings whose prompt tokens get the label -100. If None, they are also predicted.
    """
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[:, :-1] = ids[:, 1:].masked_fill(~mask[:, 1:].bool(), IGNORE_INDEX)
    prompt = torch.tensor(sorted(_get_prompt_tokens(generation)), dtype=ids.dtype, device=ids.device)
    return labels.masked_fill(torch.isin(labels, prompt), IGNORE_INDEX)


def _get_prompt_tokens(generation: GenerationConfig | None) -> set[int]:
    """Return all prompt tokens defined in the generation settings."""
    prompt: set[int] = set()
    for name in PROMPT_TOKENS:
        value = getattr(generation, name, None)
        prompt |= set(value.values()) if isinstance(value, dict) else set() if value is None else {value}
    return prompt


def with_known_encoder_outputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model inputs of a batch, in which known encoder outputs replace the audio features."""
    arguments = dict(batch)
    if (states := arguments.pop(ENCODER_OUTPUTS, None)) is not None:
        arguments.pop(AUDIO_FEATURES)
        arguments[ENCODER_OUTPUTS] = BaseModelOutput(last_hidden_state=states)
    return arguments


def without_known_encoder_outputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model inputs of a batch without known encoder outputs, so that the model runs its encoder."""
    return {name: value for name, value in batch.items() if name != ENCODER_OUTPUTS}


def pad_sequences(sequences: list[list[int]], pad_token_id: int) -> Batch:
    """Pad token id lists of different lengths on the right, and return a batch with an attention mask."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in sequences], True, pad_token_id)
    lengths = torch.tensor([len(row) for row in sequences])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


def tokenize_texts(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Any], max_length: int
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Tokenize and truncate texts, and return the token ids and the token type ids (None if the model has none).

    Args:
        config: Configuration of the model that reads the texts.
        tokenizer: The model's tokenizer.
        texts: Texts, or pairs of texts.
        max_length: Maximum number of tokens.

    Raises:
        ValueError: if the tokenizer has no padding token, or if its token ids exceed the model's vocabulary.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError("`tokenizer` must have a padding token to make batches. Set `tokenizer.pad_token`.")
    columns = [texts] if isinstance(texts[0], str) else zip(*texts, strict=True)
    has_types = getattr(config, "type_vocab_size", 0) > 1
    # ALBERT's tokenizer only returns token type ids on request.
    options = {"return_token_type_ids": True} if has_types else {}
    arguments = tokenizer(*map(list, columns), **options, truncation=True, max_length=max_length)
    encoded, segments = arguments["input_ids"], arguments.get("token_type_ids") if has_types else None
    if max(map(max, encoded)) >= config.vocab_size:
        raise ValueError(
            f"`tokenizer` produces ids outside the vocabulary of the model ({config.vocab_size} tokens). Check that "
            "it belongs to the model."
        )
    return encoded, segments


def _tokenize_targets(tokenizer: Any, targets: Sequence[str], max_length: int) -> list[list[int]]:
    """Tokenize and truncate target texts, and return their token ids."""
    ids: list[list[int]] = tokenizer(text_target=list(targets), truncation=True, max_length=max_length)["input_ids"]
    return ids


def _tokenize_examples(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration, split: ExampleSplit
) -> EncodedExamples:
    """Join, tokenize and check all examples, and return their token ids, token type ids and target ids."""
    texts: Any = calibration.texts
    config = model.config
    encoded, segments = tokenize_texts(config, tokenizer, texts, calibration.length)
    check_texts(tokenizer, texts, encoded)
    positions = get_max_input_length(config)
    if should_join_passages(type(model), config, calibration):
        longest = limit_length(config, calibration, calibration.passage_length)
        special = _get_special_token_ids(tokenizer)
        counts = [sum(token not in special for token in row) for row in encoded]
        for rows in map(sorted, split):  # joined separately, so that no fitting passage contains a held-out text
            part_texts, part_counts = [texts[row] for row in rows], [counts[row] for row in rows]
            for i, (passage, length) in join_passages(part_texts, part_counts, longest).items():
                (encoded[rows[i]],), types = tokenize_texts(config, tokenizer, [passage], length)
                if segments is not None and types is not None:
                    segments[rows[i]] = types[0]
    targets = None
    if calibration.target_texts is not None:
        targets = _tokenize_targets(tokenizer, calibration.target_texts, calibration.length)
    longest = max(map(len, [*encoded, *(targets or [])]))
    if positions is not None and longest > positions:
        raise ValueError(
            f"`max_length` in `Calibration` must be at most {positions}, the model's number of positions, got a text "
            f"with {longest} tokens. Use a smaller `max_length`."
        )
    if positions is not None and longest * SHORT_TEXT_FACTOR < positions:
        logger.warning(
            f"The longest calibration example has {longest} tokens, but the model can read up to {positions}. The "
            "model may lose quality on longer text. Provide longer examples or the lines of whole documents, or "
            "increase --max_length."
        )
    tokens = sum(map(len, encoded))
    if tokens < MIN_TOKENS:
        raise ValueError(
            f"The calibration text must contain at least {MIN_TOKENS} tokens, got {tokens} tokens in {len(encoded)} "
            "lines. Provide about a thousand lines of text that are typical of the model's inputs."
        )
    return encoded, segments, targets


def check_targets(model_class: type[PreTrainedModel], config: PreTrainedConfig, calibration: Calibration) -> None:
    """Raise `ValueError` if the decoder needs target texts but none are set, or if no decoder reads the targets."""
    reads, name = get_decoder_input(model_class, config), model_class.__name__
    if calibration.target_texts is None and reads is DecoderInput.TARGETS:
        raise ValueError(
            f"`target_texts` (--calibration_target_file) is required for {name} because it cannot generate targets."
        )
    if calibration.target_texts is not None and not reads.is_target:
        raise ValueError(
            "`target_texts` (--calibration_target_file, --calibration_target_column) is not supported for "
            f"{name} because it has no decoder that reads targets. Remove it."
        )


def generate_decoder_inputs(model: Any, batch: Batch, max_new_tokens: int) -> Batch:
    """Generate greedily from a batch of texts, and return the output as decoder inputs (`make_decoder_arguments`)."""
    positions = get_max_input_length(model.config)
    if positions is not None:
        max_new_tokens = min(max_new_tokens, positions - 1)  # one position is reserved for the start token
    model_inputs: dict[str, Any] = {name: tensor.to(model.device) for name, tensor in batch.items()}
    with ignore_saved_length_limits(model):
        generated = model.generate(**model_inputs, do_sample=False, num_beams=1, max_new_tokens=max_new_tokens)
    return make_decoder_arguments(generated, model.config.pad_token_id)


def _make_batch(
    model: PreTrainedModel, tokenizer: Any, indices: Sequence[int], examples: EncodedExamples, length: int | None
) -> Batch:
    """Return the model inputs for the given examples.

    Args:
        model: The original model.
        tokenizer: The model's tokenizer.
        indices: Indices of the examples.
        examples: Token ids, token type ids and target ids of all examples.
        length: Maximum number of tokens to generate if there are no targets. If None, nothing is generated.
    """
    encoded, segments, targets = examples
    batch = pad_sequences([encoded[i] for i in indices], tokenizer.pad_token_id)
    if segments is not None:
        batch["token_type_ids"] = pad_sequences([segments[i] for i in indices], 0)["input_ids"]
    if not get_decoder_input(type(model), model.config).is_target:
        return batch
    if targets is None:
        return batch if length is None else batch | generate_decoder_inputs(model, batch, length)
    config, start = model.config, get_decoder_start_token(model.config)
    decoder_rows = pad_sequences([[start, *targets[i][:-1]] for i in indices], config.pad_token_id)
    return batch | {f"decoder_{name}": tensor for name, tensor in decoder_rows.items()}
