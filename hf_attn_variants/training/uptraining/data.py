"""Text for uptraining: rows from files, or blocks of a text stream."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...model_properties import DecoderInput
from ...text_files import is_table, read_columns, read_lines, read_pairs, text_columns
from ..engine.dataloaders import TrainingBatches
from ..engine.models import check_end_token
from ..engine.text_rows import (
    Collator,
    TextRows,
    hash_texts,
    make_masked_text_collator,
    make_pair_collator,
    make_text_collator,
)
from ..engine.tokenizers import check_max_length, warn_about_truncation
from ..pretraining.settings import TextSettings
from ..pretraining.span_corruption import SpanCorruption, check_span_corruption
from ..pretraining.task import PreparedBlocks, make_stream_batches
from ..pretraining.text_stream import open_text, read_blocks, stack_rows
from .settings import UptrainingSettings

__all__ = ["TextPieces", "UptrainingData", "UptrainingStream", "cut_into_pieces", "hold_out", "load_uptraining_data"]

logger = logging.getLogger(__name__)


class TextPieces(NamedTuple):
    """The origin of the pieces of a batch of texts.

    Attributes:
        real: Whether each piece has a token [b * p]. Pieces without tokens are not read.
        texts: The number b of texts.
        length: The number n of tokens per text.
    """

    real: Tensor
    texts: int
    length: int

    def join(self, states: Tensor) -> Tensor:
        """Join the results of the pieces [pieces, l, ...] to those of the texts [b, n, ...], with zeros at padding."""
        whole = states.new_zeros(len(self.real), *states.shape[1:])
        whole[self.real] = states
        return whole.unflatten(0, (self.texts, -1)).flatten(1, 2)[:, : self.length]


def cut_into_pieces(inputs: Mapping[str, Tensor], length: int) -> tuple[dict[str, Tensor], TextPieces]:
    """Cut texts into pieces of equal length. The model reads each piece as a text without special tokens around it.

    Args:
        inputs: The inputs of the model [b, n], padded on the right, including `attention_mask`.
        length: The length l of a piece in tokens.

    Returns:
        The inputs of all pieces that have a token [pieces, l], and their origin.
    """
    texts, tokens = inputs["attention_mask"].shape
    filled = -tokens % length
    cut = {name: functional.pad(tensor, (0, filled)).reshape(-1, length) for name, tensor in inputs.items()}
    real = cut["attention_mask"].any(1)
    return {name: tensor[real] for name, tensor in cut.items()}, TextPieces(real, texts, tokens)


class UptrainingStream:
    """Blocks of text for span corruption (arXiv 1910.10683, section 3.1.4), to train on and to evaluate.

    With the same text, seed and noise, the batches are those of `pretrain-t5`.

    Args:
        settings: The settings of the run.
        config: The configuration of the model.
        tokenizer: The tokenizer.

    Attributes:
        held_out: The prepared blocks for the evaluation.
        collate: Maps a list of prepared blocks to a batch.

    Raises:
        OSError, ValueError: If the text cannot be read or has no held-out part, or if the model or its tokenizer does
            not support span corruption.
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
                    f"--objective {settings.objective} needs text files in which empty lines separate articles, but "
                    f"{path} is a table. Give the folder of such tables to --dataset_name."
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
                f"--dataset_name must have a split 'validation', but {settings.dataset_name} has none. Set "
                "--validation_file."
            )
        self.get_first(1)  # raises an error now if the text has no tokens
        self.held_out = PreparedBlocks(
            read_blocks(self.text.dev, *self.packing, settings.max_eval_samples), self.prepare
        )

    def get_first(self, count: int) -> list[Any]:
        """Return the first training examples, at most `count`."""
        blocks = read_blocks(self.text.train, *self.packing, count)
        return [self.prepare(block, (0, i)) for i, block in enumerate(blocks)]

    def warn_about_short_steps(self, sequences: int) -> None:
        """Warn if the text has fewer sequences than a step. A step ends at the end of the text."""
        count = len(read_blocks(self.text.train, *self.packing, sequences)) if self.text.train else sequences
        if count < sequences:
            logger.warning(
                "The text has only %d sequences, but a step needs %d. Each step reads only those. Use more text or a "
                "smaller --total_train_batch_size.", count, sequences,
            )  # fmt: skip

    def training_batches(self, accelerator: Accelerator) -> TrainingBatches:
        """Return the training batches."""
        settings = self.settings
        return make_stream_batches(
            settings, accelerator, self.text.train, self.tokenizer, self.prepare, settings.shuffle_buffer_size
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return values that identify the training text and its preparation."""
        settings = self.settings
        noise = {"noise": [settings.noise_density, settings.mean_noise_span_length]}
        return {**self.text.train_fingerprint, **noise, "shuffle_buffer_size": settings.shuffle_buffer_size}

    def dev_fingerprint(self) -> dict[str, Any]:
        """Return values that identify the held-out text."""
        return self.text.dev_fingerprint

    def results(self) -> dict[str, Any]:
        """Return the numbers of tokens of a block and of its targets."""
        return {"block_length": self.prepare.block_length, "target_length": self.prepare.target_length}


PARALLEL_FLAGS = ("source_file", "target_file", "validation_source_file", "validation_target_file")
# The share of the training text that is held out if there is no validation file, and the maximum number of rows.
HELD_OUT_SHARE, MAX_HELD_OUT = 0.05, 512


def hold_out(texts: list[Any], max_rows: int | None = None) -> tuple[list[Any], list[Any]]:
    """Split off the last rows for the evaluation, because neighboring rows often come from the same article.

    Args:
        texts: The rows.
        max_rows: The maximum number of held-out rows. None: 512.

    Returns:
        The training rows, and the held-out rows (5 % of all rows, but at least one).

    Raises:
        ValueError: If there are fewer than two rows.
    """
    if len(texts) < 2:
        raise ValueError(
            f"The training text must have at least 2 rows to hold one out, got {len(texts)}. Give a validation file."
        )
    count = min(max_rows or MAX_HELD_OUT, max(1, int(HELD_OUT_SHARE * len(texts))))
    return texts[:-count], texts[-count:]


@dataclass(frozen=True)
class UptrainingData:
    """Rows for training and evaluation, and their collator.

    Attributes:
        train: The training rows.
        held_out: The rows for the evaluation.
        collate: Maps a list of rows to a batch.
    """

    train: TextRows
    held_out: TextRows
    collate: Collator

    @property
    def pairs(self) -> bool:
        """Whether a row is a pair of texts."""
        return isinstance(self.train.texts[0], tuple)

    def get_first(self, count: int) -> list[Any]:
        """Return the first training rows, at most `count`."""
        return [self.train[i] for i in range(min(count, len(self.train)))]

    def fingerprint(self) -> dict[str, Any]:
        """Return values that identify the training rows."""
        return {"training examples": len(self.train), "hash of the training data": hash_texts(self.train.texts)}

    def dev_fingerprint(self) -> dict[str, Any]:
        """Return values that identify the held-out rows."""
        return {"hash of the held-out data": hash_texts(self.held_out.texts)}


def load_uptraining_data(
    settings: UptrainingSettings,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    input_kind: DecoderInput,
) -> UptrainingData:
    """Read the text of the run: sources and targets, or texts or pairs of texts that the model reads as one input.

    Args:
        settings: The settings of the run.
        config: The configuration of the model.
        tokenizer: The tokenizer.
        input_kind: The kind of input of the decoder of the model.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a file has invalid content, if a flag is missing, if targets are longer than the model allows,
            or if the tokenizer appends no end token to targets.
    """
    if input_kind.is_target:
        multiple = settings.pad_to_multiple_of
        check_max_length(_get_target_length(settings), config, tokenizer, flag="max_target_length", multiple=multiple)
    if input_kind is DecoderInput.OWN_TARGETS:
        check_end_token(settings, tokenizer)
    collate = _make_collator(settings, config, tokenizer, input_kind.is_target)
    train, held_out = (_read_pairs if input_kind.is_target else _read_texts)(settings)
    if not held_out:
        train, held_out = hold_out(train, settings.max_eval_samples)
    train, held_out = train[: settings.max_train_samples], held_out[: settings.max_eval_samples]
    for split, rows in (("train", train), ("held out", held_out)):
        _warn_about_long_rows(settings, tokenizer, split, rows, input_kind.is_target)
    return UptrainingData(TextRows(train), TextRows(held_out).longest_first(), collate)


def _get_target_length(settings: UptrainingSettings) -> int:
    """Return the maximum length of targets in tokens."""
    return settings.max_target_length or settings.max_length


def _warn_about_long_rows(
    settings: UptrainingSettings, tokenizer: PreTrainedTokenizerBase, split: str, rows: list[Any], has_targets: bool
) -> None:
    """Warn about rows that are longer than the maximum lengths."""
    columns = [list(column) for column in zip(*rows, strict=True)] if isinstance(rows[0], tuple) else [rows]
    if has_targets:
        sources, targets = [settings.source_prefix + source for source in columns[0]], columns[1]
        warn_about_truncation(tokenizer, split, "sources", {"text": sources}, "max_length", settings.max_length)
        limit = _get_target_length(settings)
        warn_about_truncation(tokenizer, split, "targets", {"text_target": targets}, "max_target_length", limit)
        return
    texts = dict(zip(("text", "text_pair"), columns, strict=False))
    warn_about_truncation(
        tokenizer, split, "texts" if len(columns) == 1 else "pairs", texts, "max_length", settings.max_length
    )


def _read_texts(settings: UptrainingSettings) -> tuple[list[Any], list[Any]]:
    """Read the training and held-out rows of a model without targets."""
    _check_unset(
        settings, PARALLEL_FLAGS, "needs a model with a decoder that reads targets. Use --train_file instead."
    )
    if not settings.train_file:
        raise ValueError(f"--objective {settings.objective} needs --train_file for this model. Set it.")
    columns = text_columns(
        [*settings.train_file, *(settings.validation_file or [])], settings.text_columns, "--text_columns"
    )
    if not columns:
        return read_lines(settings.train_file), read_lines(settings.validation_file or [])
    train, held_out = (
        read_columns(paths or [], columns, "--text_columns")
        for paths in (settings.train_file, settings.validation_file)
    )
    if len(columns) == 1:
        return [text for (text,) in train], [text for (text,) in held_out]
    return train, held_out


def _read_pairs(settings: UptrainingSettings) -> tuple[list[Any], list[Any]]:
    """Read the training and held-out pairs of a model with targets."""
    reason = "needs an encoder. Use --source_column and --target_column for a table of pairs."
    _check_unset(settings, ("text_columns",), reason)
    sources = (settings.source_file, settings.validation_source_file)
    targets = (settings.target_file, settings.validation_target_file)
    if any((source is None) != (target is None) for source, target in zip(sources, targets, strict=True)):
        raise ValueError(
            "--source_file and --target_file must be set together, and so must --validation_source_file and "
            "--validation_target_file."
        )
    if (settings.source_file is None) == (settings.train_file is None):
        raise ValueError("Set either --source_file and --target_file, or a table as --train_file.")
    if sources[1] and settings.validation_file:
        raise ValueError("Set either --validation_source_file and --validation_target_file, or --validation_file.")
    columns = (settings.source_column, settings.target_column), "--source_column and --target_column"
    train, held_out = (
        read_pairs(source, target) if source and target else read_columns(table or [], *columns)
        for source, target, table in zip(
            sources, targets, (settings.train_file, settings.validation_file), strict=True
        )
    )
    return train, held_out


def _check_unset(settings: UptrainingSettings, names: Sequence[str], reason: str) -> None:
    """Raise ValueError if one of these settings is set. `reason` completes the message."""
    for name in names:
        if getattr(settings, name) is not None:
            raise ValueError(f"--{name} {reason}")


def _make_collator(
    settings: UptrainingSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, has_targets: bool
) -> Collator:
    """Return the function that makes batches of rows."""
    shape = settings.max_length, settings.pad_to_multiple_of
    if settings.objective == "mlm":
        return make_masked_text_collator(tokenizer, *shape, settings.mlm_probability, settings.seed)
    if not has_targets:
        return make_text_collator(tokenizer, *shape)
    start = config.decoder_start_token_id
    if start is None:
        raise ValueError(
            f"{settings.model_name_or_path} must have a decoder_start_token_id. Add it to its configuration."
        )
    return make_pair_collator(tokenizer, *shape, _get_target_length(settings), start, settings.source_prefix)
