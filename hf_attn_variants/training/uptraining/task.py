"""Uptraining of a converted model (arXiv 2305.13245, section 2.1), optionally with distillation from a teacher."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor, nn
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import GENERATION_CONFIG_NAME

from ...conversion.checkpoint.source import copy_auxiliary_files, list_auxiliary_files, resolve_checkpoint_folder
from ...conversion.checkpoint.tensor_files import open_checkpoint
from ...errors import NonFiniteLossError
from ...files import CARD_NAME
from ...model_folder import ModelHistory
from ...model_properties import DecoderInput, LogitsKind, get_decoder_input, get_decoder_start_token
from ...registration import get_variant_config_class, get_variant_model_class
from ...text_files import read_columns, read_lines, read_pairs, resolve_text_columns
from ..engine import dataloaders, models
from ..engine.finetune import FineTuningTask
from ..engine.loop import TrainingLoop
from ..engine.optimization import Objective
from ..engine.session import configure_deepspeed, is_trained_in_place, read_log, save_model, show_progress
from ..engine.settings import ModelSettings, check_metric_for_best_model, count_training_steps
from ..engine.trainable_parameters import add_lora, freeze_unused_parameters, select_trainable_parameters
from ..engine.weighted_heads import add_weighted_heads, merge_weighted_heads
from ..pretraining.span_corruption import SpanCorruptionPreparer, check_span_corruption
from ..pretraining.task import HeldOutBlockDataset, make_stream_batches
from ..pretraining.text_stream import open_text_splits, read_blocks, stack_examples
from ..seq2seq.metrics import resolve_bleu_tokenizer, score_texts
from . import SPAN_CORRUPTION, UptrainingSettings
from .objective import (
    WEIGHT_BY_TERM,
    Teacher,
    UptrainingObjective,
    check_architecture,
    check_teacher_config,
    check_teacher_length,
    compare_held_out_losses,
    get_model_inputs,
    resolve_term_weights,
)

logger = logging.getLogger(__name__)


class UptrainingStream:
    """Blocks from a text stream for training and evaluation with span corruption (arXiv 1910.10683, section 3.1.4).

    With the same text, seed and noise, the batches are identical to those in `pretrain-t5`.

    Args:
        settings: The settings of the run.
        config: The configuration of the model.
        tokenizer: The tokenizer.

    Attributes:
        held_out: The prepared blocks for evaluation.
        collate: A function that combines a list of prepared blocks into a batch.

    Raises:
        OSError, ValueError: If the text cannot be read, if there is no held-out text, or if the model or its tokenizer
            does not support span corruption.
    """

    pairs = False

    def __init__(self, settings: UptrainingSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase):
        check_span_corruption(settings, settings.max_length, config, tokenizer)
        self.settings, self.tokenizer, self.collate = settings, tokenizer, stack_examples
        self.prepare = SpanCorruptionPreparer(
            tokenizer, settings.max_length, settings.seed, settings.noise_density, settings.mean_noise_span_length
        )
        self.packing = tokenizer, self.prepare.block_length, self.prepare.separator
        self.text = open_text_splits(settings)
        if not self.text.dev:
            raise ValueError(
                f"--dataset_name must have a 'validation' split, but {settings.dataset_name} has none. Set "
                "--validation_file."
            )
        self.get_first_examples(1)  # raise an error early if the text has no tokens
        blocks = read_blocks(self.text.dev, *self.packing, settings.max_eval_samples)
        self.held_out = HeldOutBlockDataset(blocks, self.prepare)

    def get_first_examples(self, count: int) -> list[Any]:
        """Return at most `count` training examples from the start of the text."""
        blocks = read_blocks(self.text.train, *self.packing, count)
        return [self.prepare(block, (0, i)) for i, block in enumerate(blocks)]

    def warn_about_short_steps(self, sequences_per_step: int) -> None:
        """Warn if the text has fewer sequences than a training step requires.

        A step ends at the end of the text, so all steps would be smaller than requested.
        """
        count = len(read_blocks(self.text.train, *self.packing, sequences_per_step))
        if count < sequences_per_step:
            logger.warning(
                "The text has only %d sequences, but a step requires %d, so the steps are smaller than requested. Use "
                "more text or a smaller --total_train_batch_size.", count, sequences_per_step,
            )  # fmt: skip

    def make_training_batches(self, accelerator: Accelerator) -> dataloaders.TrainingBatchSource:
        """Create the training batches from the text stream."""
        return make_stream_batches(self.settings, accelerator, self.text.train, self.tokenizer, self.prepare)

    def get_fingerprint(self) -> dict[str, Any]:
        """Return values that identify the training text and its preparation."""
        settings = self.settings
        noise = {"noise": [settings.noise_density, settings.mean_noise_span_length]}
        return {**self.text.train_fingerprint, **noise, "shuffle_buffer_size": settings.shuffle_buffer_size}

    def get_dev_fingerprint(self) -> dict[str, Any]:
        """Return values that identify the held-out text."""
        return self.text.dev_fingerprint


# The share of the training text to hold out if there is no validation file, and the maximum number of held-out rows.
HELD_OUT_SHARE, MAX_HELD_OUT = 0.05, 512


def split_off_held_out_rows(texts: list[Any], max_rows: int | None = None) -> tuple[list[Any], list[Any]]:
    """Hold out the last rows for evaluation.

    The held-out rows are not chosen randomly because neighboring rows often come from the same article.

    Args:
        texts: The rows.
        max_rows: The maximum number of held-out rows. Defaults to 512.

    Returns:
        The training rows and the held-out rows (5% of all rows, but at least one row).

    Raises:
        ValueError: If there are fewer than two rows.
    """
    if len(texts) < 2:
        raise ValueError(
            f"The training text must have at least 2 rows to hold one out, got {len(texts)}. Provide a validation "
            "file."
        )
    count = min(max_rows or MAX_HELD_OUT, max(1, int(HELD_OUT_SHARE * len(texts))))
    return texts[:-count], texts[-count:]


@dataclass(frozen=True)
class UptrainingData:
    """The rows for training and evaluation, and their collator.

    Attributes:
        train: The training rows.
        held_out: The rows for evaluation.
        collate: A function that combines a list of rows into a batch.
    """

    train: dataloaders.TextDataset
    held_out: dataloaders.TextDataset
    collate: dataloaders.Collator

    @property
    def pairs(self) -> bool:
        """True if each row is a pair of texts."""
        return isinstance(self.train.texts[0], tuple)

    def get_first_examples(self, count: int) -> list[Any]:
        """Return at most `count` training rows from the start of the data."""
        return [self.train[i] for i in range(min(count, len(self.train)))]

    def get_fingerprint(self) -> dict[str, Any]:
        """Return values that identify the training rows."""
        return {
            "training examples": len(self.train),
            "hash of the training data": dataloaders.hash_texts(self.train.texts),
        }

    def get_dev_fingerprint(self) -> dict[str, Any]:
        """Return values that identify the held-out rows."""
        return {"hash of the held-out data": dataloaders.hash_texts(self.held_out.texts)}


def load_uptraining_data(
    settings: UptrainingSettings,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    input_kind: DecoderInput,
) -> UptrainingData:
    """Read the rows for training and evaluation.

    For models with targets, the rows are pairs of a source and a target. Otherwise, they are texts or text pairs.

    Args:
        settings: The settings of the run.
        config: The configuration of the model.
        tokenizer: The tokenizer.
        input_kind: The type of input that the model's decoder reads.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a file has invalid content, if a flag is missing, if the maximum length of targets is not valid
            for the model, or if the tokenizer does not append an end-of-sequence token to targets.
    """
    if input_kind.is_target:
        multiple = settings.pad_to_multiple_of
        models.check_max_length(
            _get_target_length(settings), config, tokenizer, flag="max_target_length", pad_to_multiple_of=multiple
        )
    if input_kind is DecoderInput.OWN_TARGETS:
        models.check_appends_eos_token(settings, tokenizer)
    collate = _make_collator(settings, config, tokenizer, input_kind.is_target)
    train, held_out = (_read_pairs if input_kind.is_target else _read_texts)(settings)
    if not held_out:
        train, held_out = split_off_held_out_rows(train, settings.max_eval_samples)
    train, held_out = train[: settings.max_train_samples], held_out[: settings.max_eval_samples]
    for split, rows in (("train", train), ("held out", held_out)):
        _warn_about_long_rows(settings, tokenizer, split, rows, input_kind.is_target)
    return UptrainingData(
        dataloaders.TextDataset(train), dataloaders.TextDataset(held_out).sort_longest_first(), collate
    )


def _get_target_length(settings: UptrainingSettings) -> int:
    """Return the maximum length of a target in tokens."""
    return settings.max_target_length or settings.max_length


def _warn_about_long_rows(
    settings: UptrainingSettings, tokenizer: PreTrainedTokenizerBase, split: str, rows: list[Any], has_targets: bool
) -> None:
    """Warn about rows that are longer than the maximum lengths."""
    columns = [list(column) for column in zip(*rows, strict=True)] if isinstance(rows[0], tuple) else [rows]
    warn = partial(models.warn_about_truncation, tokenizer, split)
    if has_targets:
        sources = [settings.source_prefix + source for source in columns[0]]
        warn("sources", {"text": sources}, "max_length", settings.max_length)
        warn("targets", {"text_target": columns[1]}, "max_target_length", _get_target_length(settings))
        return
    texts = dict(zip(("text", "text_pair"), columns, strict=False))
    warn("texts" if len(columns) == 1 else "pairs", texts, "max_length", settings.max_length)


def _read_texts(settings: UptrainingSettings) -> tuple[list[Any], list[Any]]:
    """Read the training and held-out rows for a model without targets."""
    if settings.source_file or settings.target_file:
        raise ValueError("--source_file and --target_file require a model with targets. Use --train_file.")
    if not settings.train_file:
        raise ValueError(f"--train_file is required for --objective {settings.objective} with this model.")
    columns = resolve_text_columns(
        [*settings.train_file, *(settings.validation_file or [])], settings.text_columns, "--text_columns"
    )
    if not columns:
        return read_lines(settings.train_file), read_lines(settings.validation_file or [])
    train, held_out = (
        read_columns(paths or [], columns, "--text_columns").texts
        for paths in (settings.train_file, settings.validation_file)
    )
    if len(columns) == 1:
        return [text for (text,) in train], [text for (text,) in held_out]
    return train, held_out


def _read_pairs(settings: UptrainingSettings) -> tuple[list[Any], list[Any]]:
    """Read the training and held-out pairs for a model with targets."""
    sources = (settings.source_file, settings.validation_source_file)
    targets = (settings.target_file, settings.validation_target_file)
    if any((source is None) != (target is None) for source, target in zip(sources, targets, strict=True)):
        raise ValueError("Set both --source_file and --target_file, and both or none of the validation files.")
    if (settings.source_file is None) == (settings.train_file is None):
        raise ValueError("Pass either --source_file and --target_file, or a single table with --train_file.")
    columns = (settings.source_column, settings.target_column), "--source_column and --target_column"
    tables = settings.train_file, settings.validation_file
    train, held_out = (
        (read_pairs(source, target) if source and target else read_columns(table or [], *columns)).texts
        for source, target, table in zip(sources, targets, tables, strict=True)
    )
    return train, held_out


def _make_collator(
    settings: UptrainingSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, has_targets: bool
) -> dataloaders.Collator:
    """Create the collator that combines rows into batches for the objective."""
    shape = settings.max_length, settings.pad_to_multiple_of
    if settings.objective == "mlm":
        return dataloaders.make_masked_text_collator(tokenizer, *shape, settings.mlm_probability, settings.seed)
    if not has_targets:
        return dataloaders.make_text_collator(tokenizer, *shape)
    start: Any = get_decoder_start_token(config)
    return dataloaders.make_source_target_collator(
        tokenizer, *shape, _get_target_length(settings), start, settings.source_prefix
    )


def set_accumulation_steps(settings: UptrainingSettings, accelerator: Accelerator) -> UptrainingSettings:
    """Set the number of accumulation steps so that each step has `total_train_batch_size` examples.

    Raises:
        ValueError: If `total_train_batch_size` is not a multiple of the number of examples in one batch on all
            processes.
    """
    total, processes = settings.total_train_batch_size, accelerator.num_processes
    if total is None:
        return settings
    at_once = settings.per_device_train_batch_size * processes
    if total % at_once:
        raise ValueError(
            f"--total_train_batch_size must be a multiple of {at_once}, the number of processes ({processes}) times "
            f"--per_device_train_batch_size ({settings.per_device_train_batch_size}), got {total}. Change one of them."
        )
    fitted = replace(settings, total_train_batch_size=None, gradient_accumulation_steps=total // at_once)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        configure_deepspeed(fitted, accelerator.state.deepspeed_plugin.deepspeed_config)
    return fitted


def count_sequences_per_step(settings: UptrainingSettings, accelerator: Accelerator) -> int:
    """Return the number of examples per step on all processes."""
    per_device = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    return per_device * accelerator.num_processes


DEFAULT_STEPS = 300
# The classes for objectives with a specific head. Other objectives use the class from which the checkpoint was saved.
AUTO_CLASSES: dict[str, Any] = {
    "mlm": AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    SPAN_CORRUPTION: AutoModelForSeq2SeqLM,
}
# The number of training rows used to measure the variances by which errors are divided.
VARIANCE_ROWS = 256
EVALUATIONS = 5
RISING_METRIC_NAMES = ("embedding_cosine", "bleu")
# The objectives without dropout. A teacher has no dropout, so dropout in the student would only add noise to the
# comparison. The released T5 1.1 checkpoints were pretrained without dropout.
WITHOUT_DROPOUT = ("distill", "embedding", SPAN_CORRUPTION)


class Uptraining(FineTuningTask[UptrainingSettings]):
    """Uptraining of a converted checkpoint (arXiv 2305.13245, section 2.1), with or without a teacher.

    The results contain `eval_loss`, the loss terms and other dev metrics after training. The metrics before training
    are called `initial_eval_<metric>`.

    Example:
        ```python
        settings = UptrainingSettings(
            model_name_or_path="bert-gqa4", objective="mlm", train_file=("text.txt",), output_dir="out"
        )
        results = fine_tune(Uptraining, settings)
        ```
    """

    rows: dataloaders.TextDataset

    # The number of parameters after LoRA updates or weighted heads are merged, or None if nothing is merged.
    num_parameters: int | None = None
    # The target texts of the held-out rows if texts are generated, and None otherwise.
    references: list[tuple[str]] | None = None
    main_metric = "loss"
    shown_metrics: Sequence[str] = ()

    def __init__(self, settings: UptrainingSettings, accelerator: Accelerator):
        super().__init__(set_accumulation_steps(settings, accelerator), accelerator)
        self.name, settings = settings.objective, self.settings
        self._load_config()
        self.input_kind = self._get_decoder_input(settings, self.config)
        self.weights = resolve_term_weights(settings, self.input_kind)
        self._load_teacher_config()
        self.tokenizer = models.load_tokenizer(settings, self.config)
        self._check_teacher_tokenizer()
        self.target_start = models.set_target_language(settings, self.tokenizer, self.config)
        self.data: UptrainingData | UptrainingStream
        if settings.is_stream:
            self.data = UptrainingStream(settings, self.config, self.tokenizer)
        else:
            self.data = load_uptraining_data(settings, self.config, self.tokenizer, self.input_kind)
            self.rows = self.data.train
        self.collate = self.data.collate
        pairs = not self.input_kind.is_target and self.data.pairs
        if self.input_kind is DecoderInput.SOURCE:
            models.configure_eos_token(self.tokenizer, self.config, pairs)
        models.check_max_length(
            settings.max_length, self.config, self.tokenizer, pairs, pad_to_multiple_of=settings.pad_to_multiple_of
        )
        self.tokenizer_changed = models.configure_token_types(self.tokenizer, self.config, pairs)
        if self.teacher_config is not None:
            check_teacher_length(settings, self.teacher_config, self.input_kind, self.weights)

    def _load_config(self) -> None:
        """Load the configuration for training, and store its dropout probabilities so that they can be restored."""
        settings = self.settings
        self.config = models.load_config(settings)
        check_architecture(settings, self.config)
        self.saved_dropout = {
            name: getattr(self.config, name) for name in models.DROPOUT_FIELDS if hasattr(self.config, name)
        }
        if settings.dropout_rate is None and settings.objective in WITHOUT_DROPOUT and self.saved_dropout:
            models.set_dropout(self.config, 0.0)

    def _get_decoder_input(self, model_settings: ModelSettings, config: PreTrainedConfig) -> DecoderInput:
        """Return the type of input that a model's decoder reads."""
        model_class = self._get_model_class(model_settings, config)
        # The variant class for an auto class reads the same input as the Transformers class.
        if not issubclass(model_class, PreTrainedModel):
            auto_classes = get_variant_config_class(config.model_type).auto_classes
            model_class = get_variant_model_class(auto_classes[model_class.__name__])
        return get_decoder_input(model_class, config)

    def _load_teacher_config(self) -> None:
        """Load the teacher's configuration, and check that the teacher can be compared with the model."""
        settings, weights = self.settings, self.weights
        self.teacher_settings = self.teacher_config = None
        if settings.teacher is None:
            return
        self.teacher_settings = self._make_model_settings(settings.teacher)
        self.teacher_config = models.load_config(self.teacher_settings)
        compared = (weights.hidden_states > 0, weights.attention_outputs > 0, weights.embedding_distance > 0)
        check_teacher_config(self.config, self.teacher_config, *compared)
        input_kind = self._get_decoder_input(self.teacher_settings, self.teacher_config)
        if input_kind is not self.input_kind and not (input_kind.is_target and self.input_kind.is_target):
            raise ValueError(
                f"--teacher {settings.teacher} must have a decoder that reads {self.input_kind.value}, like "
                f"{settings.model_name_or_path}, but it reads {input_kind.value}. Use another teacher."
            )

    def _make_model_settings(self, name: str) -> ModelSettings:
        """Return the settings for loading another model for the run."""
        settings = self.settings
        return ModelSettings(
            model_name_or_path=name,
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
        )

    def _check_teacher_tokenizer(self) -> None:
        """Check that the teacher and the model have the same vocabulary."""
        if self.teacher_settings is None:
            return
        try:
            teacher_tokenizer = models.load_tokenizer(self.teacher_settings, None)
        except OSError:  # a teacher may not have a tokenizer
            return
        if teacher_tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                f"--teacher {self.settings.teacher} must have the same vocabulary as "
                f"{self.settings.model_name_or_path} because both read the same token ids. Use another teacher."
            )

    def _get_model_class(self, model_settings: ModelSettings, config: PreTrainedConfig) -> type:
        """Return the model class for the objective, which may be an auto class."""
        return AUTO_CLASSES.get(self.settings.objective) or models.get_saved_model_class(model_settings.source, config)

    def load_model(self) -> PreTrainedModel:
        settings = self.settings
        model, unexpected_keys = models.load_model_and_unexpected_keys(
            settings, self.config, self._get_model_class(settings, self.config)
        )
        if self.target_start is not None:
            self.target_start.apply_to(model)
        self.student, self.extra_tensors = model, _read_unused_tensors(settings.source, unexpected_keys)
        if settings.multi_head_model is not None:
            self._add_weighted_heads(model, settings.multi_head_model)
        select_trainable_parameters(model, settings.trainable)
        lora = settings.trainable == "lora"
        self.peft_model = add_lora(model, settings.lora_rank, settings.lora_alpha) if lora else None
        self.uptraining_objective = UptrainingObjective(model, self.weights, self._load_teacher())
        model.to(self.accelerator.device)
        self._measure_variances()
        self._freeze_unused_parameters()
        self.trainable_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return model

    def _add_weighted_heads(self, model: PreTrainedModel, name: str) -> None:
        """Replace the heads of the model by weighted sums of the heads of the multi-head model with this name."""
        if self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise ValueError("--multi_head_model does not support FSDP and DeepSpeed. Use data parallelism instead.")
        settings = self._make_model_settings(name)
        config = models.load_config(settings)
        model_class = models.get_saved_model_class(settings.source, config)
        add_weighted_heads(model, models.load_model(settings, config, model_class))

    def _load_teacher(self) -> Teacher | None:
        """Load the teacher, or return None if there is no teacher."""
        if self.teacher_settings is None or self.teacher_config is None:
            return None
        model_class = self._get_model_class(self.teacher_settings, self.teacher_config)
        model = models.load_model(self.teacher_settings, self.teacher_config, model_class)
        return Teacher(
            model.to(self.accelerator.device),
            hidden_states=self.weights.needs_hidden_states,
            attention_outputs=self.weights.attention_outputs > 0,
            autocast=self.accelerator.autocast,
            max_length=self.settings.teacher_max_length,
        )

    def _iterate_first_batches(self, count: int, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Yield the first `count` training rows in batches of `batch_size` on the accelerator's device."""
        rows = self.data.get_first_examples(count)
        for start in range(0, len(rows), batch_size):
            yield send_to_device(self.collate(rows[start : start + batch_size]), self.accelerator.device)

    def _measure_variances(self) -> None:
        """Measure the teacher's variances if a term requires them."""
        objective, weights = self.uptraining_objective, self.weights
        compares_scores = weights.logits > 0 and objective.recorder.answer is LogitsKind.SCORES
        if not (weights.hidden_states or weights.attention_outputs or compares_scores):
            return
        teacher: Any = objective.teacher  # not None, because these terms require a teacher
        teacher.measure_variances(
            (get_model_inputs(batch), objective.get_masks(batch))
            for batch in self._iterate_first_batches(VARIANCE_ROWS, self.settings.per_device_eval_batch_size)
        )

    def _freeze_unused_parameters(self) -> None:
        """Freeze the parameters that do not affect the loss."""
        objective, model = self.uptraining_objective, self.student
        batch = next(self._iterate_first_batches(2, 2))
        unused = freeze_unused_parameters(
            model.eval(), lambda: objective.sum_terms(objective.compute_terms(model, batch))
        )
        if unused:
            message = "These parameters are frozen because they do not affect the loss: %s."
            logger.info(message, ", ".join(unused))

    def make_objective(self) -> Objective:
        return Objective(self.uptraining_objective.loss_sum, self.uptraining_objective.count)

    def make_training_batches(self) -> dataloaders.TrainingBatchSource:
        if isinstance(self.data, UptrainingStream):
            return self.data.make_training_batches(self.accelerator)
        return super().make_training_batches()

    def compute_total_steps(self, batches_per_epoch: int | None) -> int:
        settings, steps = self.settings, self.settings.max_train_steps
        if (alpha_steps := settings.alpha_steps) is not None:
            steps = alpha_steps
        elif steps is None and settings.num_train_epochs is None:
            steps = DEFAULT_STEPS
        total = count_training_steps(
            batches_per_epoch, settings.gradient_accumulation_steps, settings.num_train_epochs or 0, steps
        )
        if self.accelerator.is_main_process:
            self._log_training_length(total)
        return total

    def _log_training_length(self, steps: int) -> None:
        """Log the number of training steps."""
        settings = self.settings
        if settings.alpha is not None:
            message = "Training takes %d steps, which is %s of %d pretraining steps, rounded up."
            logger.info(message, steps, settings.alpha, settings.pretraining_steps)
        if steps and isinstance(self.data, UptrainingStream):
            sequences, prepare = count_sequences_per_step(settings, self.accelerator), self.data.prepare
            logger.info(
                "A step reads %d sequences (processes: %d, batch size per device: %d, accumulation steps: %d). These "
                "are %d input tokens and %d target tokens.",
                sequences, self.accelerator.num_processes, settings.per_device_train_batch_size,
                settings.gradient_accumulation_steps, sequences * prepare.input_length,
                sequences * prepare.target_length,
            )  # fmt: skip
            self.data.warn_about_short_steps(sequences)

    def compute_eval_steps(self, total_steps: int) -> int:
        return self.settings.eval_steps or max(1, math.ceil(total_steps / EVALUATIONS))

    def prepare_evaluation(self) -> bool:
        held_out = self.data.held_out
        self.loader, _ = self.make_eval_batches(held_out, [0] * len(held_out))  # rows are already sorted by length
        if self.settings.predict_with_generate and isinstance(held_out, dataloaders.TextDataset):
            self.references = [(target,) for _, target in held_out.texts]
            self.bleu_tokenizer = resolve_bleu_tokenizer(self.settings, (target for (target,) in self.references))
        return True

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Compute "loss", the loss terms, "embedding_cosine" and, with references, "bleu" for the held-out rows."""
        model, objective = self.model.eval(), self.uptraining_objective
        sums: dict[str, list[Tensor]] = {}
        generated: list[str] = []
        for batch in show_progress(self.accelerator, self.loader, "Evaluating"):
            terms = objective.compute_terms(model, batch, evaluating=True)
            # `gather_for_metrics` drops the rows that were repeated to fill the last batch on each process.
            for name, pair in self.accelerator.gather_for_metrics(terms).items():
                sums.setdefault(name, []).append(torch.stack([part.cpu().double() for part in pair]).sum(-1))
            if self.references is not None:
                generated += self._generate(batch)
        totals: dict[str, Any] = {name: torch.stack(parts).sum(0).unbind() for name, parts in sums.items()}
        if not all(items for _, items in totals.values()):
            raise ValueError(
                "The held-out text must contain tokens that contribute to the loss, but no token is masked or all "
                "rows are empty. Provide more text with --validation_file."
            )
        metrics = {"loss": float(objective.sum_terms(totals))}
        for name, (total, items) in totals.items():
            value = float(total / items)
            metrics |= {"embedding_cosine": 1 - value} if name == "embedding_distance" else {name: value}
        if self.references is not None:
            metrics |= score_texts(["bleu"], generated, self.references, tokenize=self.bleu_tokenizer)
        return metrics

    def _generate(self, batch: dict[str, Tensor]) -> list[str]:
        """Generate texts for a batch with greedy search."""
        model = self.accelerator.unwrap_model(self.model)
        ids = models.generate_ids(model, batch, _get_target_length(self.settings))
        ids = self.accelerator.pad_across_processes(ids, dim=1, pad_index=self.tokenizer.pad_token_id)
        ids = self.accelerator.gather_for_metrics(ids)
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def get_fingerprint(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "objective": settings.objective,
            "teacher": settings.teacher,
            "tokens that the teacher reads at once": settings.teacher_max_length,
            "weights of the terms": asdict(self.weights),
            "trainable": [settings.trainable, settings.lora_rank, settings.lora_alpha],
            **({} if settings.multi_head_model is None else {"multi-head model": settings.multi_head_model}),
            "mlm_probability": settings.mlm_probability,
            "lengths of targets": settings.max_target_length,
            "source_prefix": settings.source_prefix,
            **self.data.get_fingerprint(),
            # The metrics before and after training must come from the same rows.
            "held-out rows": len(self.data.held_out),
            **self.get_dev_fingerprint(),
        }

    def get_dev_fingerprint(self) -> dict[str, Any]:
        return self.data.get_dev_fingerprint()

    def before_training(self, loop: TrainingLoop) -> None:
        metrics = self.run_evaluation()
        if self.settings.keeps_best_weights:
            check_metric_for_best_model(loop.best_metric, list(metrics))
        if not math.isfinite(metrics["loss"]):
            raise NonFiniteLossError(
                f"The held-out loss must be finite before training, got {metrics['loss']}. Check the outputs of the "
                "checkpoint and the teacher."
            )
        loop.evaluated_step = 0
        loop.log.write({"step": 0, "epoch": 0.0, **{f"eval_{key}": value for key, value in metrics.items()}})

    def after_training(self, loop: TrainingLoop, model: nn.Module) -> nn.Module:
        # Evaluate before low-rank updates or weighted heads are merged because merging changes the rounding.
        super().evaluate_final_weights(loop)
        self.log_path = loop.log.path
        for name, value in self.saved_dropout.items():
            setattr(self.student.config, name, value)
        rising = [name for name in RISING_METRIC_NAMES if name in self.metrics]
        self.shown_metrics = rising or [name for name in WEIGHT_BY_TERM if name in self.metrics]
        self.examples_and_steps = loop.state.examples, loop.state.step
        if self.peft_model is not None:
            merged = self.peft_model.merge_and_unload()
        elif self.settings.multi_head_model is not None:
            merged = merge_weighted_heads(self.student)
        else:
            return model
        self.num_parameters = sum(parameter.numel() for parameter in merged.parameters())
        return merged

    def save(self, model: nn.Module, history: ModelHistory) -> None:
        """Save the model, and copy the other files of the original model."""
        new_files = [TOKENIZER_CONFIG_FILE] if self.tokenizer_changed or self.target_start is not None else []
        new_files += [GENERATION_CONFIG_NAME] if self.target_start is not None else []
        add_files = partial(_copy_extra_files, self.settings, new_files)
        save_model(
            self.accelerator, model, self.tokenizer, self.settings, history, self.extra_tensors, add_files=add_files
        )

    def evaluate_final_weights(self, loop: TrainingLoop) -> None:
        """Do nothing because `after_training` has already evaluated the model."""

    def get_dev_results(self) -> dict[str, Any]:
        initial_record = next((record for record in read_log(self.log_path) if record["step"] == 0), {})
        initial = {f"initial_{key}": value for key, value in initial_record.items() if key.startswith("eval_")}
        gain = compare_held_out_losses(initial_record, self.metrics, self.examples_and_steps[1])
        tokenizer = {} if self.references is None else {"bleu_tokenizer": self.bleu_tokenizer}
        return {**initial, **gain, **tokenizer, "eval_samples": len(self.data.held_out)}

    def get_results(self) -> dict[str, Any]:
        settings = self.settings
        results = {"num_trainable_parameters": self.trainable_parameters, "objective": settings.objective}
        if self.num_parameters is not None:
            results["num_parameters"] = self.num_parameters
        if isinstance(self.data, UptrainingStream):
            examples, steps = self.examples_and_steps
            # The mean is smaller than the requested number if a step contains the end of the text.
            mean = round(examples / steps, 2) if steps else count_sequences_per_step(settings, self.accelerator)
            prepare = self.data.prepare
            results |= {"block_length": prepare.block_length, "target_length": prepare.target_length}
            results["sequences_per_step"] = int(mean) if mean == int(mean) else mean
        return results

    def format_summary(self, results: dict[str, Any]) -> str:
        scores = ", ".join(
            f"{name} {results.get(f'initial_eval_{name}', math.nan):.4f} -> {results[f'eval_{name}']:.4f}"
            for name in ("loss", *self.shown_metrics)
        )
        return f"{self.name} on {results['eval_samples']} held-out rows: {scores}; "


def _read_unused_tensors(source: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Read the tensors in a checkpoint that the trained model does not use, such as the pooler of a BERT model.

    These tensors are saved with the model. Otherwise, a head that requires them would start with random weights.
    """
    if not names:
        return {}
    try:
        with open_checkpoint(resolve_checkpoint_folder(source)) as reader:
            tensors = {name: reader.read(name) for name in names if name in reader.entries}
    except ValueError as error:  # the checkpoint is stored as a pickle file
        logger.warning(
            "These tensors are not saved with the model because they cannot be read: %s (%s).", ", ".join(names), error
        )
        return {}
    # Tensors are converted to float32, like the trained weights, except for integers, such as position ids in old
    # checkpoints.
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _copy_extra_files(settings: UptrainingSettings, new_files: Sequence[str], output: Path) -> None:
    """Copy the other files of the original model to the output folder.

    Files that training has written (`new_files`, code, and the files of a different tokenizer) are not overwritten.
    The model card is not copied because it describes the original model. Its license is recorded in the history.
    """
    if is_trained_in_place(settings):
        return
    folder = resolve_checkpoint_folder(settings.source, with_weights=False)
    copied, _ = list_auxiliary_files(folder, [])
    # The model has been saved with its code, and the files of a different tokenizer must not be overwritten.
    names = [
        name
        for name in copied
        if not (output / name).exists() or not (name in new_files or name.endswith(".py") or settings.tokenizer_name)
    ]
    names = [name for name in names if name != CARD_NAME]
    copy_auxiliary_files(folder, output, names)
