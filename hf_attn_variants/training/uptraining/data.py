"""Rows of text for uptraining, from files, `datasets` sources or a stream."""

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
from ..pretraining.task import PreparedBlocks, stream_batches
from ..pretraining.text_stream import open_text, read_blocks, stack_rows
from .settings import UptrainingSettings

__all__ = ["Pieces", "UptrainingData", "UptrainingStream", "hold_out", "in_pieces", "load_uptraining_data"]

logger = logging.getLogger(__name__)


class Pieces(NamedTuple):
    """Where the pieces of some texts were.

    Attributes:
        real: which pieces have a token, [b * p]; the others are not read.
        texts: b, how many texts there are.
        length: n, the tokens of a text.
    """

    real: Tensor
    texts: int
    length: int

    def in_a_row(self, states: Tensor) -> Tensor:
        """Return what was made of pieces, [pieces, l, ...], as if of whole texts [b, n, ...]; for padding zeros."""
        whole = states.new_zeros(len(self.real), *states.shape[1:])
        whole[self.real] = states
        return whole.unflatten(0, (self.texts, -1)).flatten(1, 2)[:, : self.length]


def in_pieces(inputs: Mapping[str, Tensor], length: int) -> tuple[dict[str, Tensor], Pieces]:
    """Cut texts into pieces of equal length; each is a text of its own to the model, without special tokens around it.

    Args:
        inputs: arguments of the model, [b, n] each, padded on the right; `attention_mask` among them.
        length: l, the tokens of a piece.

    Returns:
        The same arguments of all pieces that have a token, [pieces, l], and where these were.
    """
    texts, tokens = inputs["attention_mask"].shape
    filled = -tokens % length
    cut = {name: functional.pad(tensor, (0, filled)).reshape(-1, length) for name, tensor in inputs.items()}
    real = cut["attention_mask"].any(1)
    return {name: tensor[real] for name, tensor in cut.items()}, Pieces(real, texts, tokens)


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


PARALLEL_FLAGS = ("source_file", "target_file", "validation_source_file", "validation_target_file")
# Held out of the training text where no validation file is given: this share, and no more than that many.
HELD_OUT_SHARE, MAX_HELD_OUT = 0.05, 512


def hold_out(texts: list[Any], max_rows: int | None = None) -> tuple[list[Any], list[Any]]:
    """Split off the last rows, since neighbours often come from one article; return rows to train on and held out.

    Held out are 5 % of the rows, no more than `max_rows` or, without it, 512.

    Raises:
        ValueError: if there are fewer than two.
    """
    if len(texts) < 2:
        raise ValueError("the training text has one row, so none can be held out: give a validation file")
    count = min(max_rows or MAX_HELD_OUT, max(1, int(HELD_OUT_SHARE * len(texts))))
    return texts[:-count], texts[-count:]


@dataclass(frozen=True)
class UptrainingData:
    """Rows to train on, rows to evaluate, and how they become batches."""

    train: TextRows
    held_out: TextRows
    collate: Collator

    @property
    def pairs(self) -> bool:
        """Whether a row is a pair of texts."""
        return isinstance(self.train.texts[0], tuple)

    def first(self, count: int) -> list[Any]:
        """Return the first training rows, no more than `count`."""
        return [self.train[i] for i in range(min(count, len(self.train)))]

    def fingerprint(self) -> dict[str, Any]:
        """Return what tells the training rows from others."""
        return {"training examples": len(self.train), "hash of the training data": hash_texts(self.train.texts)}

    def dev_fingerprint(self) -> dict[str, Any]:
        """Return what tells the held-out rows from others."""
        return {"hash of the held-out data": hash_texts(self.held_out.texts)}


def load_uptraining_data(
    settings: UptrainingSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, reads: DecoderInput
) -> UptrainingData:
    """Read what the flags of `scripts/uptrain.py` name: sources and targets, or else texts or pairs to read as one.

    Args:
        settings: of the run.
        config, tokenizer: of the model.
        reads: what its decoder reads.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file holds something else, a flag is missing, targets are longer than the model's positions,
            or the tokenizer ends none.
    """
    if reads.is_target:
        multiple = settings.pad_to_multiple_of
        check_max_length(_target_length(settings), config, tokenizer, flag="max_target_length", multiple=multiple)
    if reads is DecoderInput.OWN_TARGETS:
        check_end_token(settings, tokenizer)
    collate = _collator(settings, config, tokenizer, reads.is_target)
    train, held_out = (_read_pairs if reads.is_target else _read_texts)(settings)
    if not held_out:
        train, held_out = hold_out(train, settings.max_eval_samples)
    train, held_out = train[: settings.max_train_samples], held_out[: settings.max_eval_samples]
    for split, rows in (("train", train), ("held out", held_out)):
        _warn_of_long_rows(settings, tokenizer, split, rows, reads.is_target)
    return UptrainingData(TextRows(train), TextRows(held_out).longest_first(), collate)


def _target_length(settings: UptrainingSettings) -> int:
    return settings.max_target_length or settings.max_length


def _warn_of_long_rows(
    settings: UptrainingSettings, tokenizer: PreTrainedTokenizerBase, split: str, rows: list[Any], has_targets: bool
) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)] if isinstance(rows[0], tuple) else [rows]
    if has_targets:
        sources, targets = [settings.source_prefix + source for source in columns[0]], columns[1]
        warn_about_truncation(tokenizer, split, "sources", {"text": sources}, "max_length", settings.max_length)
        limit = _target_length(settings)
        warn_about_truncation(tokenizer, split, "targets", {"text_target": targets}, "max_target_length", limit)
        return
    texts = dict(zip(("text", "text_pair"), columns, strict=False))
    warn_about_truncation(
        tokenizer, split, "texts" if len(columns) == 1 else "pairs", texts, "max_length", settings.max_length
    )


def _read_texts(settings: UptrainingSettings) -> tuple[list[Any], list[Any]]:
    _refuse(settings, PARALLEL_FLAGS, "is for a decoder that reads targets; this model reads --train_file")
    if not settings.train_file:
        raise ValueError(f"--objective {settings.objective} of this model needs --train_file")
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
    _refuse(settings, ("text_columns",), "is for an encoder; a table of pairs has --source_column and --target_column")
    sources = (settings.source_file, settings.validation_source_file)
    targets = (settings.target_file, settings.validation_target_file)
    if any((source is None) != (target is None) for source, target in zip(sources, targets, strict=True)):
        raise ValueError("--source_file and --target_file belong together, and so do their validation twins")
    if (settings.source_file is None) == (settings.train_file is None):
        raise ValueError("an encoder-decoder needs --source_file and --target_file, or else a table as --train_file")
    if sources[1] and settings.validation_file:
        raise ValueError("give --validation_source_file and --validation_target_file or --validation_file, not both")
    columns = (settings.source_column, settings.target_column), "--source_column and --target_column"
    train, held_out = (
        read_pairs(source, target) if source and target else read_columns(table or [], *columns)
        for source, target, table in zip(
            sources, targets, (settings.train_file, settings.validation_file), strict=True
        )
    )
    return train, held_out


def _refuse(settings: UptrainingSettings, names: Sequence[str], reason: str) -> None:
    for name in names:
        if getattr(settings, name) is not None:
            raise ValueError(f"--{name} {reason}")


def _collator(
    settings: UptrainingSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, has_targets: bool
) -> Collator:
    shape = settings.max_length, settings.pad_to_multiple_of
    if settings.objective == "mlm":
        return make_masked_text_collator(tokenizer, *shape, settings.mlm_probability, settings.seed)
    if not has_targets:
        return make_text_collator(tokenizer, *shape)
    start = config.decoder_start_token_id
    if start is None:
        raise ValueError(f"{settings.model_name_or_path} has no decoder_start_token_id: its decoder could not begin")
    return make_pair_collator(tokenizer, *shape, _target_length(settings), start, settings.source_prefix)
