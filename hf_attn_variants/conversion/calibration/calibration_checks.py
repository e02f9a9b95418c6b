"""Whether a calibration is enough, and of the kind that the model reads: warnings before the work.

Nothing here can know what a model is for. What it can see are signs of another language, of random tokens, of silence;
the bounds were set where English, German, code and chemical formulas lie for tokenizers of each.
"""

import logging
import math
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["check_amount", "check_audio", "check_source_loss", "check_texts"]

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

logger = logging.getLogger(__name__)


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
