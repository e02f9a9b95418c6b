"""Pretraining of a T5 by span corruption (arXiv 1910.10683, section 3.1.4)."""

from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedTokenizerBase

from ..engine.dataloaders import IGNORED_LABEL
from ..engine.losses import compute_label_sums, compute_target_logits, make_label_objective
from ..engine.models import check_end_token, load_or_make_model, load_seq2seq_config
from ..engine.session import open_session
from ..engine.settings import ModelSettings
from ..engine.tokenizers import check_max_length
from .settings import SpanCorruptionSettings
from .task import PretrainingTask, pretrain
from .text_stream import open_text_sources

__all__ = [
    "SpanCorruption",
    "block_length",
    "check_span_corruption",
    "corrupted_lengths",
    "noise_counts",
    "noise_spans",
    "pretrain_span_corruption",
    "sentinel_ids",
    "target_sums",
]

# What its random numbers are for; see `masking`.
SPANS = 4
# How vocabularies spell a sentinel: T5's and UMT5's as a token of its own, mT5's as a word's beginning (U+2581).
SENTINELS = ("<extra_id_{}>", "\u2581<extra_id_{}>")


def check_span_corruption(
    settings: ModelSettings, max_length: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that a model and its tokenizer can learn by span corruption.

    Raises:
        ValueError: if the model is no encoder-decoder that starts with its padding token, the tokenizer has no
            sentinels or ends no text in an end token, or `max_length` does not fit.
    """
    name = settings.model_name_or_path or "the new model"
    if not config.is_encoder_decoder or config.decoder_start_token_id != tokenizer.pad_token_id:
        raise ValueError(
            f"{name} ({config.model_type}) is no T5: span corruption needs an encoder-decoder that starts with its "
            "padding token"
        )
    if sentinel_ids(tokenizer, 1) == [None]:
        raise ValueError(
            f"the tokenizer of {settings.tokenizer_name or name} has no sentinels (<extra_id_0>, <extra_id_1>, ...), "
            "which span corruption puts in the place of text: it is for checkpoints that were pretrained so, such as "
            "T5, mT5 and UMT5"
        )
    check_end_token(settings, tokenizer)
    check_max_length(max_length, config, tokenizer)


def sentinel_ids(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int | None]:
    """Return the token ids of the first sentinels; None of each that the tokenizer lacks."""
    vocabulary = tokenizer.get_vocab()
    spelled = next((each for each in SENTINELS if each.format(0) in vocabulary), SENTINELS[0])
    return [vocabulary.get(spelled.format(number)) for number in range(count)]


def noise_counts(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """Return how many tokens of a block are left out (a share of `density`), and in how many spans."""
    noise = min(max(round(length * density), 1), max(length - 1, 1))
    # Text stands before each span, so that no two touch.
    return noise, min(max(round(noise / mean_span), 1), max(length - noise, 1))


def corrupted_lengths(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """Return the tokens of the inputs and targets that a block becomes, sentinels and end tokens included."""
    noise, spans = noise_counts(length, density, mean_span)
    return length - noise + spans + 1, noise + spans + 1


def block_length(max_length: int, density: float, mean_span: float) -> int:
    """Return the longest block whose inputs have at most `max_length` tokens: 568 for 512 inputs, with 114 targets.

    Raises:
        ValueError: if no block has so few.
    """
    length = 1
    if corrupted_lengths(length, density, mean_span)[0] > max_length:
        raise ValueError(f"--max_length {max_length} is too short for a sentinel, an end token and text")
    while corrupted_lengths(length + 1, density, mean_span)[0] <= max_length:
        length += 1
    return length


def noise_spans(length: int, density: float, mean_span: float, generator: np.random.Generator) -> np.ndarray:
    """Draw the beginning and the end of each span of a block [spans, 2].

    Text and spans alternate, text first; every division of either is as likely as another.
    """
    noise, spans = noise_counts(length, density, mean_span)
    lengths = np.stack([_divide(length - noise, spans, generator), _divide(noise, spans, generator)], axis=-1)
    return lengths.ravel().cumsum().reshape(-1, 2)


def _divide(items: int, parts: int, generator: np.random.Generator) -> np.ndarray:
    """Return the sizes of parts of at least one item each (none, where there is no item)."""
    cuts = np.sort(generator.choice(max(items - 1, 0), parts - 1, replace=False)) + 1
    return np.diff([0, *cuts, items])


class SpanCorruption:
    """Makes an example of a block of tokens, padded to one length of inputs (n, `max_length`) and one of targets (t).

    Raises:
        ValueError: if the tokenizer lacks a token, has too few sentinels, or `max_length` is too short.
    """

    takes_other_block = False

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        seed: int,
        density: float = 0.15,
        mean_span: float = 3.0,
    ):
        self.eos_id, self.pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        if self.eos_id is None or self.pad_id is None:
            raise ValueError("the tokenizer has no end or no padding token: span corruption needs both")
        self.separator = self.eos_id
        self.density, self.mean_span, self.seed = density, mean_span, seed
        self.block_length = block_length(max_length, density, mean_span)
        self.input_length, self.target_length = corrupted_lengths(self.block_length, density, mean_span)
        needed = noise_counts(self.block_length, density, mean_span)[1]
        sentinels = sentinel_ids(tokenizer, needed)
        if None in sentinels:
            raise ValueError(
                f"the tokenizer has {sentinels.index(None)} sentinels (<extra_id_0>, ...); --max_length {max_length} "
                f"needs {needed}"
            )
        self.sentinels = np.array(sentinels, dtype=np.int64)

    def __call__(self, block: np.ndarray, key: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Corrupt a block of at most `block_length` tokens; its key (epoch, number) and the seed decide the spans.

        Return "input_ids" and "attention_mask" [n], "decoder_input_ids" and "labels" (-100 at padding) [t].
        """
        generator = np.random.default_rng((self.seed, SPANS, *key))
        inputs, targets, behind = [], [], 0
        spans = noise_spans(len(block), self.density, self.mean_span, generator)
        for sentinel, (begin, end) in zip(self.sentinels, spans, strict=False):
            inputs += [block[behind:begin], [sentinel]]
            targets += [[sentinel], block[begin:end]]
            behind = end
        ids = np.concatenate([*inputs, block[behind:], [self.eos_id]]).astype(np.int64)
        labels = np.concatenate([*targets, [self.eos_id]]).astype(np.int64)
        return {
            "input_ids": _padded(ids, self.input_length, self.pad_id),
            "attention_mask": (np.arange(self.input_length) < len(ids)).astype(np.int64),
            # T5's decoder starts with padding.
            "decoder_input_ids": _padded(
                np.concatenate([[self.pad_id], labels[:-1]]), self.target_length, self.pad_id
            ),
            "labels": _padded(labels, self.target_length, IGNORED_LABEL),
        }

    def shuffle_text(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put the inputs' words into another order, always the same; sentinels, the end and padding stay."""
        ids = batch["input_ids"].clone()
        special = torch.tensor([*self.sentinels, self.eos_id, self.pad_id], device=ids.device)
        for row in ids:
            words = (~torch.isin(row, special)).nonzero()[:, 0]
            generator = torch.Generator().manual_seed(int(row.sum()))
            row[words] = row[words[torch.randperm(len(words), generator=generator).to(words.device)]]
        return batch | {"input_ids": ids}


def _padded(ids: np.ndarray, length: int, value: int) -> np.ndarray:
    return np.concatenate([ids, np.full(length - len(ids), value, dtype=np.int64)])


def target_sums(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sums of `PretrainingTask.row_sums`, of the target tokens."""
    return compute_label_sums(compute_target_logits(model, batch), batch["labels"])


def pretrain_span_corruption(settings: SpanCorruptionSettings) -> dict[str, Any]:
    """Train, evaluate, try whether the model reads its context, and save.

    Returns:
        The results that `all_results.json` begins with: `eval_loss` (nats a target token), `eval_perplexity`,
        `eval_accuracy`, `gate_passed` and what it saw, and those of `TrainingLoop.results`; its tokens are those of
        inputs and targets.

    Raises:
        ValueError, OSError: if a setting, the text or the checkpoint is wrong; said before training where it can be.
        NonFiniteLossError: if training diverged.
    """
    with open_session(settings) as accelerator:
        config, tokenizer = load_seq2seq_config(settings)
        check_span_corruption(settings, settings.max_length, config, tokenizer)
        text = open_text_sources(settings)
        prepare = SpanCorruption(
            tokenizer, settings.max_length, settings.seed, settings.noise_density, settings.mean_noise_span_length
        )
        set_seed(settings.seed)
        model = load_or_make_model(settings, config, AutoModelForSeq2SeqLM)
        task = PretrainingTask(
            "span corruption",
            prepare,
            make_label_objective(compute_target_logits),
            target_sums,
            "target_tokens",
            prepare.shuffle_text,
            {"block_length": prepare.block_length, "target_length": prepare.target_length},
        )
        return pretrain(settings, accelerator, model, tokenizer, text, task)
