"""Batches of a model's inputs for calibration, and warnings about texts or audio that look unsuitable."""

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

from ...model_properties import DecoderInput, decoder_input, ignore_saved_length_limits
from ...progress import progress_bar
from ...registration import longest_input
from ..calibration_settings import FIT_TOKENS, LONGEST, Calibration

__all__ = [
    "ENCODER_OUTPUTS",
    "IGNORED",
    "MIN_TOKENS",
    "Batch",
    "check_amount",
    "check_audio",
    "check_source_loss",
    "check_targets",
    "check_texts",
    "chunks_of",
    "continuations",
    "drawn_parts",
    "from_generated",
    "make_batches",
    "own_targets",
    "padded",
    "passages",
    "read_by_decoder",
    "read_by_encoder",
    "reads_passages",
    "tokens_of",
    "whole_batches",
    "with_lengths",
    "written_tokens",
]

logger = logging.getLogger(__name__)

# Tokens for each number of a hidden state, of which a regression of the outputs has as many unknowns.
WANTED = 8
# With fewer tokens the language is not judged.
LEAST_TOKENS = 1000
# Tokens of a word of letters: English has 1.0 to 1.4 in English tokenizers, also beside code, and German 1.9. Names
# and numbers of code are cut into many pieces in any language, so they are not judged.
PIECES = 1.65
# Text whose words are longer on average has none: formulas, sequences of letters.
LONGEST_WORD = 12.0
# So many words are enough to judge the language by.
MOST_WORDS = 4096
# Different tokens, as a share of those of uniform draws: text has 0.1 to 0.3, random tokens 0.9.
DISTINCT = 0.6
# Of the tokens: what is told, and what is refused.
UNKNOWN, MOSTLY_UNKNOWN = 0.05, 0.9
# Of the loss of a guess, ln(vocabulary): a source that is hardly better does not know this kind of text.
LOSS = 0.5
# As a part of the full range: -60 dB.
SILENT = 1e-3
# This part of the examples is silent, or the same as others, before a warning says so.
MANY = 0.25


def check_amount(stacks: Iterable[str], width: int, batches: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Warn if the attentions of a stack read fewer tokens than they should be fitted to.

    Args:
        stacks: "encoder", "decoder" or both: those with attentions that are fitted.
        width: numbers of a hidden state.
        batches: the model's arguments for the examples that are fitted to.
    """
    wanted = WANTED * width
    for stack in dict.fromkeys(stacks):
        name = "decoder_attention_mask" if stack == "decoder" else "attention_mask"
        masks = [batch.get(name, batch.get("attention_mask")) for batch in batches]
        known = [mask for mask in masks if mask is not None]
        if len(known) < len(masks):
            continue  # audio: each file is a window of many positions
        tokens, examples = sum(int(mask.sum()) for mask in known), sum(map(len, known))
        if tokens < wanted:
            logger.warning(
                "the %s is fitted to %d tokens of %d examples, and %d are wanted (%d for each of the %d numbers of a "
                "hidden state): what is fitted to few holds less for others. Give some %d examples like these.",
                stack,
                tokens,
                examples,
                wanted,
                WANTED,
                width,
                -(-wanted * examples // max(1, tokens)),
            )


def check_texts(tokenizer: Any, texts: Sequence[Any], encoded: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Warn of texts that look like no text of a tokenizer's language, or are mostly the same.

    Args:
        tokenizer: the model's.
        texts: the examples, or pairs of texts.
        encoded: the numbers of their tokens.
        vocabulary: how many tokens the model has.

    Raises:
        ValueError: if hardly a token is known: whatever comes out would count as kept.
    """
    joined = [text if isinstance(text, str) else " ".join(text) for text in texts]
    if (different := len(set(joined))) < (1 - MANY) * len(joined):
        logger.warning("only %d of the %d calibration texts are different.", different, len(joined))
    special, unknown = set(tokenizer.all_special_ids), getattr(tokenizer, "unk_token_id", None)
    rows = [[token for token in row if token not in special or token == unknown] for row in encoded]
    tokens = [token for row in rows for token in row]
    if len(tokens) < LEAST_TOKENS:
        return
    share = sum(token == unknown for token in tokens) / len(tokens)
    if share > MOSTLY_UNKNOWN:
        raise ValueError(f"{share:.0%} of the calibration's tokens are unknown to the tokenizer: is it the model's?")
    if share > UNKNOWN:
        message = "%.0f %% of the calibration's tokens are unknown to the tokenizer: is it the model's?"
        logger.warning(message, 100 * share)
    drawn = vocabulary * -math.expm1(-len(tokens) / vocabulary)  # different ones among as many uniform draws
    if vocabulary > len(tokens) / 8 and (distinct := len(set(tokens))) > DISTINCT * drawn:
        logger.warning(
            "the calibration's %d tokens are %d different ones, as of random draws, and text repeats its words: is it "
            "the model's kind of text?",
            len(tokens),
            distinct,
        )
    words = [word for text in joined for word in text.split()]
    if sum(map(len, words)) > LONGEST_WORD * len(words):
        return
    words = [word for word in map(_plain_word, words) if word][:MOST_WORDS]
    if len(words) < LEAST_TOKENS / 4:
        return
    cut = tokenizer(words, truncation=True, max_length=MOST_WORDS)["input_ids"]
    pieces = sum(token not in special or token == unknown for row in cut for token in row) / len(words)
    if pieces > PIECES:
        logger.warning(
            "the tokenizer cuts a word of the calibration into %.1f tokens on average, and those of its own language "
            "into less than %.1f: is it text of the model's language?",
            pieces,
            PIECES,
        )


def _plain_word(text: str) -> str:
    """Return a word of letters without the punctuation around it; "" for names of code, numbers and formulas."""
    word = text.strip(string.punctuation)
    return word if word.isalpha() and (word[1:].islower() or word[1:].isupper() or len(word) == 1) else ""


def check_source_loss(loss: float | None, vocabulary: int) -> None:
    """Warn if the source itself knows little of what the calibration is: `loss` in nats a token."""
    if loss is not None and loss > LOSS * math.log(vocabulary):
        logger.warning(
            "the source's own loss on the calibration is %.1f nats a token, and a guess among its %d tokens has %.1f: "
            "is it the model's kind of text?",
            loss,
            vocabulary,
            math.log(vocabulary),
        )


def check_audio(loudness: Sequence[float], transcripts: Sequence[Sequence[int]]) -> None:
    """Warn of recordings that are silent, or in which the model hears no words.

    Args:
        loudness: of each file, the root mean square of its samples in [-1, 1].
        transcripts: of each file, the tokens that the model writes; none for an encoder alone.
    """
    silent = int((np.array(loudness) < SILENT).sum())
    if silent > MANY * len(loudness):
        message = "%d of the %d recordings are silent (below %.3f of the full range)."
        logger.warning(message, silent, len(loudness), SILENT)
    empty = sum(not tokens for tokens in transcripts)
    if empty > MANY * len(loudness):
        logger.warning("the model hears no words in %d of the %d recordings: is it speech?", empty, len(loudness))


# Tokens of the shortest passage; single texts are shorter.
SHORTEST = 16
GOLDEN_RATIO = (1 + 5**0.5) / 2
# Below this there is nothing to fit to; how many are wanted, `calibration_checks.check_amount` says.
MIN_TOKENS = 100
# A text is much shorter than what the model reads where it has less than its positions by this.
FEW_POSITIONS = 4
# Tokens that are read at once while new heads are fitted, and, with the logits of a vocabulary, when a model is
# measured.
BATCH_TOKENS, MEASURED_BATCH_TOKENS = 8192, 4096
# No text has as many tokens.
UNCUT = 2**30
# In a generation configuration: what an output begins with that the model has no choice about. Whisper's are the last.
PROMPT_TOKENS = ("decoder_start_token_id", "forced_bos_token_id", "no_timestamps_token_id", "lang_to_id", "task_to_id")
# In a batch: what the encoder made of it, [b, m, D], where that is known already.
ENCODER_OUTPUTS = "encoder_outputs"
# In labels: nothing is to be predicted.
IGNORED = -100
# What an encoder reads that is as large as what it makes of it.
FEATURES = "input_features"
Batch = dict[str, torch.Tensor]
Parts = tuple[list[int], list[int]]


def reads_passages(model_class: type[PreTrainedModel], config: PreTrainedConfig, calibration: Calibration) -> bool:
    """Return whether half of a calibration's texts go on with those after them.

    Raises:
        ValueError: if that is asked for, and the model has a decoder beside its encoder.
    """
    has_both = decoder_input(model_class, config) is not DecoderInput.NOTHING
    if calibration.passages and has_both:
        raise ValueError(
            f"`passages` are for encoders; {model_class.__name__} has a decoder too, which would have to answer them."
        )
    return calibration.can_be_passages and not has_both and calibration.passages is not False


def passages(texts: Sequence[str], counts: Sequence[int], longest: int) -> dict[int, tuple[str, int]]:
    """Return what every second text becomes: itself with the texts after it, and the tokens at which that is cut.

    The logarithms of these lengths are spread evenly between those of `SHORTEST` and `longest`. A text that is as long
    as its passage would be stays as it is.

    Args:
        texts: the texts.
        counts: the tokens of each, without special ones. Words would not do: Chinese and chemical formulas have none.
        longest: the tokens of the longest passage.
    """
    shortest = min(SHORTEST, longest)
    joined = {}
    for i in range(0, len(texts), 2):
        # Multiples of the golden ratio, modulo 1, are even over any stretch of texts, and nothing is drawn.
        length = round(shortest * (longest / shortest) ** (i // 2 * GOLDEN_RATIO % 1))
        parts, tokens = [texts[i]], counts[i]
        # After the last text comes the first, and none comes twice.
        for following in range(1, len(texts)):
            if tokens >= length:
                break
            parts.append(texts[(i + following) % len(texts)])
            tokens += max(1, counts[(i + following) % len(texts)])
        if len(parts) > 1:
            joined[i] = (" ".join(parts), length)
    return joined


def with_lengths(calibration: Calibration, tokenizer: Any, config: Any) -> Calibration:
    """Return a calibration that knows how long its texts are; warn of those that are cut.

    Args:
        calibration: of texts; one of audio is returned as it is.
        tokenizer: the model's.
        config: of the model that reads the texts.
    """
    if calibration.audio is not None or calibration.whole_length is not None:
        return calibration
    counts = list(map(len, tokens_of(config, tokenizer, calibration.texts, UNCUT)[0]))
    if calibration.target_texts is not None:
        targets = tokenizer(text_target=list(calibration.target_texts), truncation=True, max_length=UNCUT)
        counts = [max(count, len(ids)) for count, ids in zip(counts, targets["input_ids"], strict=True)]
    limit: Any = longest_input(config) or getattr(tokenizer, "model_max_length", UNCUT)
    whole = min(max(counts), limit if limit < UNCUT else LONGEST)
    length: int = whole if calibration.max_length is None else calibration.max_length
    share = sum(count > length for count in counts) / len(counts)
    if share:
        why = "--max_length" if length < whole else "the most that the model reads"
        message = "%.1f %% of the calibration's examples are cut at %d tokens (%s); the longest has %d."
        logger.warning(message, 100 * share, length, why, max(counts))
    return replace(calibration, whole_length=whole, cut_share=share)


def make_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration, generator: torch.Generator
) -> tuple[list[Batch], list[Batch]]:
    """Make batches of texts of similar length: of those to fit to, and of those that are held out.

    Args:
        generator: draws the texts that are held out.
    """
    calibration = with_lengths(calibration, tokenizer, model.config)
    used, held_out = drawn_parts(calibration, generator)
    encoded, segments, targets = _tokenized(model, tokenizer, calibration, (used, held_out))
    if calibration.max_length is None:
        share = FIT_TOKENS * len(held_out) // len(encoded)
        used, held_out = _within(used, encoded, FIT_TOKENS - share), _within(held_out, encoded, share)
    chunks: Any = chunks_of(calibration, list(map(len, encoded)), (used, held_out))
    if decoder_input(type(model), model.config) is DecoderInput.OWN_TARGETS and targets is None:
        chunks = progress_bar(chunks, desc="generating targets", unit="batch", leave=False)
    batches: tuple[list[Batch], list[Batch]] = ([], [])
    for part, rows in chunks:
        length = calibration.max_length or calibration.written_length
        batches[part].append(_batch(model, tokenizer, rows, (encoded, segments, targets), length))
    return batches


def _within(rows: list[int], encoded: Sequence[Sequence[int]], most: int) -> list[int]:
    """Return the first of these examples that have at most so many tokens together, but one at least."""
    total, count = 0, 0
    while count < len(rows) and (not count or total + len(encoded[rows[count]]) <= most):
        total, count = total + len(encoded[rows[count]]), count + 1
    return rows[:count]


def whole_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration, generator: torch.Generator
) -> list[Batch]:
    """Make batches of the held-out examples as users give them: each alone, whole up to the model's positions.

    They have the targets that are given, and no others.

    Args:
        generator: draws the examples that are held out, as that of `make_batches`.
    """
    calibration = with_lengths(calibration, tokenizer, model.config)
    rows = drawn_parts(calibration, generator)[1]
    texts, length = [calibration.texts[row] for row in rows], calibration.measured_length
    encoded, segments = tokens_of(model.config, tokenizer, texts, length)
    targets = None
    if calibration.target_texts is not None:
        chosen = [calibration.target_texts[row] for row in rows]
        targets = tokenizer(text_target=chosen, truncation=True, max_length=length)["input_ids"]
    parts: Parts = ([], list(range(len(rows))))
    chunks = chunks_of(calibration, list(map(len, encoded)), parts, MEASURED_BATCH_TOKENS)
    return [_batch(model, tokenizer, chunk, (encoded, segments, targets), None) for _, chunk in chunks]


def drawn_parts(calibration: Calibration, generator: torch.Generator) -> Parts:
    """Draw the examples that are held out, and return the numbers of those to fit to and of these."""
    drawn = torch.randperm(len(calibration.examples), generator=generator).tolist()
    return drawn[calibration.held_out_count :], drawn[: calibration.held_out_count]


def chunks_of(
    calibration: Calibration, lengths: list[int], parts: Parts, most: int = BATCH_TOKENS
) -> list[tuple[int, list[int]]]:
    """Return which examples go together: 0 or 1 = held out, and their numbers.

    Args:
        lengths: those of similar length are together.
        parts: as `drawn_parts` returned them.
        most: tokens of a batch, with its padding.
    """
    chunks = []
    for part, rows in enumerate(parts):
        chunk: list[int] = []
        for row in sorted(rows, key=lambda i: (lengths[i], i)):
            if chunk and (len(chunk) == calibration.batch_rows or (len(chunk) + 1) * lengths[row] > most):
                chunks.append((part, chunk))
                chunk = []
            chunk.append(row)
        chunks += [(part, chunk)] if chunk else []
    return chunks


def from_generated(generated: torch.Tensor, pad_token_id: int) -> Batch:
    """Return a decoder's arguments that lead to what was generated [b, t], which begins with the start token."""
    ids = generated[:, :-1].cpu()
    mask = torch.cat([torch.ones_like(ids[:, :1]), (ids[:, 1:] != pad_token_id).long()], dim=1)
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


def written_tokens(batch: Batch, generation: GenerationConfig | None) -> list[list[int]]:
    """Return what a model wrote of each example: a decoder's tokens without those that it began with.

    Args:
        batch: a decoder's arguments, as `from_generated` makes them.
        generation: how the model generates; it names the start, the languages and the tasks of a prompt.
    """
    begun = _prompt_tokens(generation)
    rows = zip(batch["decoder_input_ids"].tolist(), batch["decoder_attention_mask"].tolist(), strict=True)
    return [[token for token, is_there in zip(*row, strict=True) if is_there and token not in begun] for row in rows]


def continuations(ids: torch.Tensor, mask: torch.Tensor, generation: GenerationConfig | None = None) -> torch.Tensor:
    """Return the next token at each place of a decoder's inputs, -100 where there is none.

    Args:
        ids: the inputs, [b, t].
        mask: which of them are tokens, [b, t].
        generation: how the model generates, whose prompt is not predicted; None = its tokens count as any other.
    """
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = ids[:, 1:].masked_fill(~mask[:, 1:].bool(), IGNORED)
    begun = sorted(_prompt_tokens(generation)) if generation is not None else []
    return labels.masked_fill(torch.isin(labels, torch.tensor(begun, dtype=ids.dtype, device=ids.device)), IGNORED)


def _prompt_tokens(generation: GenerationConfig | None) -> set[int]:
    begun: set[int] = set()
    for name in PROMPT_TOKENS:
        value = getattr(generation, name, None)
        begun |= set(value.values()) if isinstance(value, dict) else set() if value is None else {value}
    return begun


def read_by_decoder(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model whose encoder has nothing to do where what it makes of the batch is known."""
    arguments = dict(batch)
    if (states := arguments.pop(ENCODER_OUTPUTS, None)) is not None:
        arguments.pop(FEATURES)
        arguments[ENCODER_OUTPUTS] = BaseModelOutput(last_hidden_state=states)
    return arguments


def read_by_encoder(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model that begins with its encoder."""
    return {name: value for name, value in batch.items() if name != ENCODER_OUTPUTS}


def padded(rows: list[list[int]], pad_token_id: int) -> Batch:
    """Return tokens of several lengths as a batch, padded on the right, with the mask that says so."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, pad_token_id)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


def tokens_of(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Any], length: int
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Return the numbers of each text's tokens, cut at `length`, and which text of a pair each is of.

    Args:
        config: of the model that is to read them, which says whether it tells the texts of a pair apart.
        texts: or pairs of texts.

    Raises:
        ValueError: for a tokenizer without padding, or with more tokens than the model has.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError("the calibration's tokenizer has no padding token; texts cannot be batched without one.")
    columns = [texts] if isinstance(texts[0], str) else zip(*texts, strict=True)
    has_types = getattr(config, "type_vocab_size", 0) > 1
    # ALBERT's tokenizer tells the texts of a pair apart only when asked.
    options = {"return_token_type_ids": True} if has_types else {}
    arguments = tokenizer(*map(list, columns), **options, truncation=True, max_length=length)
    encoded, segments = arguments["input_ids"], arguments.get("token_type_ids") if has_types else None
    if max(map(max, encoded)) >= config.vocab_size:
        raise ValueError(f"the calibration's tokenizer has more tokens than the model ({config.vocab_size}).")
    return encoded, segments


def _tokenized(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration, parts: Parts
) -> tuple[list[list[int]], list[list[int]] | None, list[list[int]] | None]:
    """Return the numbers of each example's tokens, which text of a pair each is of, and those of its target."""
    texts: Any = calibration.texts  # where passages are read, no pairs
    config = model.config
    encoded, segments = tokens_of(config, tokenizer, texts, calibration.length)
    check_texts(tokenizer, texts, encoded, config.vocab_size)
    positions = longest_input(config)
    if reads_passages(type(model), config, calibration):
        longest = min(calibration.passage_length, positions or calibration.passage_length)
        special = set(tokenizer.all_special_ids) - {getattr(tokenizer, "unk_token_id", None)}
        counts = [sum(token not in special for token in row) for row in encoded]
        for rows in map(sorted, parts):  # each part's own: what is held out is in no passage to fit to
            every = [texts[row] for row in rows], [counts[row] for row in rows]
            for i, (passage, length) in passages(*every, longest).items():
                (encoded[rows[i]],), types = tokens_of(config, tokenizer, [passage], length)
                if segments is not None and types is not None:
                    segments[rows[i]] = types[0]
    targets = None
    if calibration.target_texts is not None:
        limit = {"truncation": True, "max_length": calibration.length}
        targets = tokenizer(text_target=list(calibration.target_texts), **limit)["input_ids"]
    longest = max(map(len, [*encoded, *(targets or [])]))
    if positions is not None and longest > positions:
        raise ValueError(
            f"a calibration text has {longest} tokens and the model {positions} positions: give a `max_length` of at "
            f"most {positions}."
        )
    if positions is not None and longest * FEW_POSITIONS < positions:
        logger.warning(
            "the longest calibration example has %d tokens, and the model reads up to %d: what it makes of longer "
            "text is kept less. Give longer examples, or lines of documents (and no small --max_length).",
            longest,
            positions,
        )
    tokens = sum(map(len, encoded))
    if tokens < MIN_TOKENS:
        raise ValueError(
            f"the calibration text has {tokens} tokens in {len(encoded)} lines: {MIN_TOKENS} are the least, a "
            "thousand lines of the model's own kind of text are enough."
        )
    return encoded, segments, targets


def check_targets(model_class: type[PreTrainedModel], config: PreTrainedConfig, calibration: Calibration) -> None:
    """Raise ValueError unless a calibration has target texts where the model's decoder needs or takes some."""
    reads, name = decoder_input(model_class, config), model_class.__name__
    if calibration.target_texts is None and reads is DecoderInput.TARGETS:
        raise ValueError(
            f"{name} has no head to write targets of its own: give the calibration `target_texts` "
            "(--calibration_target_file)."
        )
    if calibration.target_texts is not None and reads is DecoderInput.SOURCE:
        raise ValueError(f"the calibration has target texts; the decoder of {name} reads the text itself.")
    if calibration.target_texts is not None and reads is DecoderInput.NOTHING:
        raise ValueError("the calibration has target texts; the model has no decoder to read them.")


def own_targets(model: PreTrainedModel, batch: Batch, length: int) -> Batch:
    """Return a decoder's arguments that lead to what the model itself writes, greedily, of a batch of texts."""
    device, positions = next(model.parameters()).device, longest_input(model.config)
    length = length if positions is None else min(length, positions - 1)  # the start token takes one
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    with ignore_saved_length_limits(model):
        generate: Any = model.generate
        generated = generate(**on_device, do_sample=False, num_beams=1, max_new_tokens=length)
    return from_generated(generated, model.config.pad_token_id)


def _batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[int],
    every: tuple[list[list[int]], list[list[int]] | None, list[list[int]] | None],
    length: int | None,
) -> Batch:
    """Return a model's arguments for some examples.

    Args:
        rows: their numbers.
        every: of all examples the tokens, which text of a pair each is of, and those of the targets.
        length: tokens that the model writes at most where there are no targets; None = it writes nothing.
    """
    encoded, segments, targets = every
    batch = padded([encoded[i] for i in rows], tokenizer.pad_token_id)
    if segments is not None:
        batch["token_type_ids"] = padded([segments[i] for i in rows], 0)["input_ids"]
    if not decoder_input(type(model), model.config).is_target:
        return batch
    if targets is None:
        return batch if length is None else batch | own_targets(model, batch, length)
    config = model.config
    written = padded([[config.decoder_start_token_id, *targets[i][:-1]] for i in rows], config.pad_token_id)
    return batch | {f"decoder_{name}": tensor for name, tensor in written.items()}
