"""A stream of text to uptrain on by T5's pretraining objective: what `pretrain-t5` makes of the same text."""

import logging
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...text_files import is_table
from ..engine.dataloaders import TrainingBatches
from ..pretraining.settings import TextSettings
from ..pretraining.span_corruption import SpanCorruption, check_span_corruption
from ..pretraining.task import PreparedBlocks, stream_batches
from ..pretraining.text_sources import open_text
from ..pretraining.text_stream import read_blocks, stack_rows
from .settings import UptrainingSettings

__all__ = ["UptrainingStream"]

logger = logging.getLogger(__name__)


class UptrainingStream:
    """Blocks of text with spans left out (arXiv:1910.10683, section 3.1.4), to train on and to evaluate.

    With one text, seed and noise its batches are those of `pretrain-t5`.

    Attributes:
        held_out: the blocks to evaluate, prepared.
        collate: a list of prepared blocks -> a batch.

    Raises:
        OSError, ValueError: if the text cannot be read or has no held-out part, or the model or its tokenizer cannot
            learn so.
    """

    pairs = False

    def __init__(self, settings: UptrainingSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase):
        check_span_corruption(settings, settings.max_length, config, tokenizer)
        self.settings, self.tokenizer, self.collate = settings, tokenizer, stack_rows
        self.prepare = SpanCorruption(
            tokenizer, settings.max_length, settings.seed, settings.noise_density, settings.mean_noise_span_length
        )
        self.packing = tokenizer, self.prepare.block_length, self.prepare.separator
        for path in (*(settings.train_file or ()), *(settings.validation_file or ())):
            if is_table(path):
                raise ValueError(
                    f"--objective {settings.objective} reads articles that empty lines separate, and {path} is a "
                    "table: name the folder of such files as --dataset_name"
                )
        self.text = open_text(
            TextSettings(
                train_file=settings.train_file,
                validation_file=settings.validation_file,
                dataset_name=settings.dataset_name,
                dataset_config_name=settings.dataset_config_name,
                keep_whitespace=settings.keep_whitespace,
                text_column=(settings.text_columns or (TextSettings.text_column,))[0],
            )
        )
        if not self.text.dev:
            raise ValueError(
                f"--dataset_name {settings.dataset_name} has no split 'validation', and of a stream no rows are held "
                "out: give --validation_file"
            )
        self.first(1)  # text without a token is an error now
        self.held_out = PreparedBlocks(
            read_blocks(self.text.dev, *self.packing, settings.max_eval_samples), self.prepare
        )

    def first(self, count: int) -> list[Any]:
        """Return the first training examples, no more than `count`."""
        blocks = read_blocks(self.text.train, *self.packing, count)
        return [self.prepare(block, (0, i)) for i, block in enumerate(blocks)]

    def warn_of_short_steps(self, sequences: int) -> None:
        """Say if the text is over before a step has so many sequences: a step ends with it."""
        count = len(read_blocks(self.text.train, *self.packing, sequences)) if self.text.train else sequences
        if count < sequences:
            logger.warning(
                "the text makes %d sequences, fewer than the %d of a step: each step reads those alone. Give more "
                "text, or a smaller --total_train_batch_size", count, sequences,
            )  # fmt: skip

    def training_batches(self, accelerator: Accelerator) -> TrainingBatches:
        """Return the training batches."""
        settings = self.settings
        return stream_batches(
            settings, accelerator, self.text.train, self.tokenizer, self.prepare, settings.shuffle_buffer_size
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return what tells the training text, and what is made of it, from others."""
        settings = self.settings
        noise = {"noise": [settings.noise_density, settings.mean_noise_span_length]}
        return {**self.text.train_fingerprint, **noise, "shuffle_buffer_size": settings.shuffle_buffer_size}

    def dev_fingerprint(self) -> dict[str, Any]:
        """Return what tells the held-out text from others."""
        return self.text.dev_fingerprint

    def results(self) -> dict[str, Any]:
        """Return the tokens of a block of text, and of the targets that it becomes."""
        return {"block_length": self.prepare.block_length, "target_length": self.prepare.target_length}
