"""Pretraining of T5 models with span corruption (arXiv 1910.10683, section 3.1.4).

Spans of text are replaced by sentinel tokens. The targets consist of the sentinels, each followed by its span:

    text     the cat sat on the mat
    inputs   the <extra_id_0> on the <extra_id_1> </s>
    targets  <extra_id_0> cat sat <extra_id_1> mat </s>
"""

from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...model_properties import get_decoder_start_token
from ..engine import models, optimization
from ..engine.dataloaders import IGNORED_LABEL
from ..engine.finetune import fine_tune
from ..engine.settings import ModelSettings
from . import SpanCorruptionSettings
from .task import Pretraining

# The key of the random generator in this module. No other generator uses this key (see `dataloaders`).
SPANS_KEY = 4
# The spellings of sentinels in vocabularies, as separate tokens (T5, UMT5) or as word starts (mT5, U+2581).
SENTINELS = ("<extra_id_{}>", "\u2581<extra_id_{}>")


def check_span_corruption(
    settings: ModelSettings, max_length: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that a model and its tokenizer support span corruption.

    Args:
        settings: The settings of the run.
        max_length: The maximum length of the inputs in tokens.
        config: The configuration of the model.
        tokenizer: The tokenizer.

    Raises:
        ValueError: If the model is not an encoder-decoder whose decoder starts with the padding token, if the
            tokenizer does not append an end-of-sequence token, or if `max_length` is not valid for the model.
    """
    name = settings.model_name_or_path or "the new model"
    if not config.is_encoder_decoder or get_decoder_start_token(config) != tokenizer.pad_token_id:
        raise ValueError(
            f"{name} ({config.model_type}) must be an encoder-decoder whose decoder starts with the padding token, "
            "such as T5. Use another model for span corruption."
        )
    models.check_appends_eos_token(settings, tokenizer)
    models.check_max_length(max_length, config, tokenizer)


def get_sentinel_ids(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int | None]:
    """Return the token ids of the first `count` sentinels, with None for sentinels that the tokenizer lacks."""
    vocabulary = tokenizer.get_vocab()
    spelling = next((form for form in SENTINELS if form.format(0) in vocabulary), SENTINELS[0])
    return [vocabulary.get(spelling.format(number)) for number in range(count)]


def count_noise_tokens_and_spans(length: int, noise_density: float, mean_span_length: float) -> tuple[int, int]:
    """Compute the number of tokens to remove from a block and the number of spans that they form.

    Args:
        length: The length of the block in tokens.
        noise_density: The share of tokens to remove.
        mean_span_length: The mean length of the spans in tokens.
    """
    noise = min(max(round(length * noise_density), 1), max(length - 1, 1))
    # Each span is preceded by at least one token of text, so that spans are not adjacent.
    return noise, min(max(round(noise / mean_span_length), 1), max(length - noise, 1))


def compute_corrupted_lengths(length: int, noise_density: float, mean_span_length: float) -> tuple[int, int]:
    """Compute the numbers of input and target tokens for a block, including sentinels and end-of-sequence tokens."""
    noise, spans = count_noise_tokens_and_spans(length, noise_density, mean_span_length)
    return length - noise + spans + 1, noise + spans + 1


def compute_block_length(max_length: int, noise_density: float, mean_span_length: float) -> int:
    """Compute the length of the longest block whose inputs have at most `max_length` tokens.

    With the default noise, a block of 568 tokens results in 512 input tokens and 114 target tokens.
    """
    length = 1
    while compute_corrupted_lengths(length + 1, noise_density, mean_span_length)[0] <= max_length:
        length += 1
    return length


def sample_noise_spans(
    length: int, noise_density: float, mean_span_length: float, generator: np.random.Generator
) -> np.ndarray:
    """Sample the spans to remove from a block.

    Text and spans alternate, starting with text. All ways of dividing the text and the removed tokens are equally
    likely.

    Returns:
        The start and the end (exclusive) of each span [spans, 2].
    """
    noise, spans = count_noise_tokens_and_spans(length, noise_density, mean_span_length)
    lengths = np.stack(
        [_sample_segment_lengths(length - noise, spans, generator), _sample_segment_lengths(noise, spans, generator)],
        axis=-1,
    )
    return lengths.ravel().cumsum().reshape(-1, 2)


def _sample_segment_lengths(num_items: int, num_segments: int, generator: np.random.Generator) -> np.ndarray:
    """Randomly divide items into parts of at least one item, and return the sizes. Without items, all sizes are 0."""
    cuts = np.sort(generator.choice(max(num_items - 1, 0), num_segments - 1, replace=False)) + 1
    return np.diff([0, *cuts, num_items])


class SpanCorruptionPreparer:
    """Prepares blocks of tokens for span corruption. Inputs and targets are padded to fixed lengths.

    Args:
        tokenizer: A tokenizer with sentinel tokens.
        max_length: The maximum length n of the inputs in tokens.
        seed: The random seed of the run.
        density: The share of tokens to remove.
        mean_span: The mean length of the removed spans in tokens.

    Raises:
        ValueError: If the tokenizer has too few sentinels.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        seed: int,
        density: float = 0.15,
        mean_span: float = 3.0,
    ):
        self.eos_id, self.pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        self.separator = self.eos_id
        self.density, self.mean_span, self.seed = density, mean_span, seed
        self.block_length = compute_block_length(max_length, density, mean_span)
        self.input_length, self.target_length = compute_corrupted_lengths(self.block_length, density, mean_span)
        num_spans = count_noise_tokens_and_spans(self.block_length, density, mean_span)[1]
        sentinels = get_sentinel_ids(tokenizer, num_spans)
        if None in sentinels:
            raise ValueError(
                f"The tokenizer must have {num_spans} sentinels (<extra_id_0>, ...) for --max_length {max_length}, "
                f"got {sentinels.index(None)}. Reduce --max_length, or use a model such as T5, mT5 or UMT5."
            )
        self.sentinels = np.array(sentinels, dtype=np.int64)

    def __call__(
        self, block: np.ndarray, key: tuple[int, ...], other_block: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Replace spans of a block by sentinels, and create the model inputs and targets.

        Args:
            block: The token ids of a block with at most `block_length` tokens.
            key: The epoch and the block number. Together with the seed, they determine the spans.
            other_block: Not used.

        Returns:
            A dictionary with "input_ids" and "attention_mask" [n], and with "decoder_input_ids" and "labels" (-100 for
            padding) [t].
        """
        generator = np.random.default_rng((self.seed, SPANS_KEY, *key))
        inputs, targets, previous_end = [], [], 0
        spans = sample_noise_spans(len(block), self.density, self.mean_span, generator)
        for sentinel, (begin, end) in zip(self.sentinels, spans, strict=False):
            inputs += [block[previous_end:begin], [sentinel]]
            targets += [[sentinel], block[begin:end]]
            previous_end = end
        ids = np.concatenate([*inputs, block[previous_end:], [self.eos_id]]).astype(np.int64)
        labels = np.concatenate([*targets, [self.eos_id]]).astype(np.int64)
        return {
            "input_ids": _pad(ids, self.input_length, self.pad_id),
            "attention_mask": (np.arange(self.input_length) < len(ids)).astype(np.int64),
            # T5's decoder starts with the padding token.
            "decoder_input_ids": _pad(np.concatenate([[self.pad_id], labels[:-1]]), self.target_length, self.pad_id),
            "labels": _pad(labels, self.target_length, IGNORED_LABEL),
        }

    def shuffle_input_tokens(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Shuffle the input tokens with a fixed permutation, except sentinels, end-of-sequence tokens and padding."""
        ids = batch["input_ids"].clone()
        special = torch.tensor([*self.sentinels, self.eos_id, self.pad_id], device=ids.device)
        for row in ids:
            words = (~torch.isin(row, special)).nonzero()[:, 0]
            generator = torch.Generator().manual_seed(int(row.sum()))
            row[words] = row[words[torch.randperm(len(words), generator=generator).to(words.device)]]
        return batch | {"input_ids": ids}


def _pad(ids: np.ndarray, length: int, value: int) -> np.ndarray:
    """Pad token ids on the right to a fixed length."""
    return np.concatenate([ids, np.full(length - len(ids), value, dtype=np.int64)])


class SpanCorruptionPretraining(Pretraining[SpanCorruptionSettings]):
    """Pretraining of a T5 model with span corruption. Token counts in the results include inputs and targets."""

    name, items = "span corruption", "target_tokens"
    prepare: SpanCorruptionPreparer

    def __init__(self, settings: SpanCorruptionSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.config, self.tokenizer = models.load_or_make_config(settings, seq2seq=True)
        check_span_corruption(settings, settings.max_length, self.config, self.tokenizer)
        noise = settings.noise_density, settings.mean_noise_span_length
        self.prepare = SpanCorruptionPreparer(self.tokenizer, settings.max_length, settings.seed, *noise)

    def load_model(self) -> PreTrainedModel:
        return models.load_or_make_model(self.settings, self.config, AutoModelForSeq2SeqLM)

    def make_objective(self) -> optimization.Objective:
        return optimization.make_cross_entropy_objective(optimization.compute_target_logits)

    def compute_example_statistics(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return optimization.compute_label_statistics(optimization.compute_target_logits(model, batch), batch["labels"])

    def shuffle(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.prepare.shuffle_input_tokens(batch)

    def get_results(self) -> dict[str, Any]:
        lengths = {"block_length": self.prepare.block_length, "target_length": self.prepare.target_length}
        return {**lengths, **super().get_results()}


def pretrain_span_corruption(settings: SpanCorruptionSettings) -> dict[str, Any]:
    """Train a T5 model with span corruption, evaluate it, check whether it uses context, and save it.

    Returns the same results and raises the same errors as `fine_tune`.

    Example:
        ```python
        settings = SpanCorruptionSettings(
            model_name_or_path="t5-gqa4", train_file=("text.txt",), max_train_steps=1000, output_dir="out"
        )
        results = pretrain_span_corruption(settings)
        ```
    """
    return fine_tune(SpanCorruptionPretraining, settings)
