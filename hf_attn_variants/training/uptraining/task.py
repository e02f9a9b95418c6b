"""Uptraining of a converted model (GQA, arXiv 2305.13245, section 2.2), optionally by distillation."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import GENERATION_CONFIG_NAME

from ...conversion.checkpoint.source import copy_side_files, resolve_source, side_files
from ...conversion.checkpoint.tensor_files import open_checkpoint
from ...errors import NonFiniteLossError
from ...files import CARD_NAME
from ...languages import set_languages
from ...model_history import ModelHistory
from ...model_properties import DecoderInput, LogitsKind, decoder_input
from ...registration import variant_config_class, variant_model_class
from ..engine import outputs
from ..engine.dataloaders import TrainingBatches, create_eval_dataloader
from ..engine.finetune import FineTuningTask
from ..engine.loop import TrainingLoop
from ..engine.losses import Objective
from ..engine.models import (
    DROPOUT_FIELDS,
    add_lora,
    freeze_unused,
    load_config,
    load_model,
    load_model_and_unexpected_keys,
    resolve_architecture,
    select_trainable,
    set_dropout,
)
from ..engine.outputs import read_log
from ..engine.session import configure_deepspeed
from ..engine.settings import ModelSettings, count_training_steps
from ..engine.text_rows import TextRows
from ..engine.tokenizers import append_end_tokens, check_max_length, fit_token_types, load_tokenizer
from ..pretraining.span_corruption import SpanCorruption
from .data import UptrainingData, UptrainingStream, load_uptraining_data
from .objective import (
    WEIGHT_BY_TERM,
    Teacher,
    UptrainingEvaluator,
    UptrainingObjective,
    check_architecture,
    check_teacher,
    check_teacher_length,
    check_teacher_types,
    compute_held_out_gain,
    get_model_inputs,
    resolve_term_weights,
)
from .settings import SPAN_CORRUPTION, UptrainingSettings

__all__ = ["Uptraining", "compute_mean_step_size", "count_sequences_per_step", "describe_step_size", "fit_batch_size"]

logger = logging.getLogger(__name__)


def fit_batch_size(settings: UptrainingSettings, accelerator: Accelerator) -> UptrainingSettings:
    """Return the settings with the number of accumulation steps for `total_train_batch_size` examples per step.

    Raises:
        ValueError: If `total_train_batch_size` is not a multiple of the examples that all processes read at once.
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


def compute_mean_step_size(examples: int, steps: int) -> int | float:
    """Return the mean number of examples per step. It is less than the batch size if the text ended within steps."""
    return examples // steps if examples % steps == 0 else round(examples / steps, 2)


def describe_step_size(settings: UptrainingSettings, accelerator: Accelerator, prepare: SpanCorruption) -> str:
    """Describe the numbers of sequences and tokens per step, without padding."""
    sequences = count_sequences_per_step(settings, accelerator)
    return (
        f"A step reads {sequences} sequences (processes: {accelerator.num_processes}, batch size per device: "
        f"{settings.per_device_train_batch_size}, accumulation steps: {settings.gradient_accumulation_steps}). These "
        f"are {sequences * prepare.input_length} input tokens and {sequences * prepare.target_length} target tokens."
    )


DEFAULT_STEPS = 300
# The classes of objectives with their own head. Other objectives use the class that the checkpoint was saved from.
AUTO_CLASSES: dict[str, Any] = {
    "mlm": AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    SPAN_CORRUPTION: AutoModelForSeq2SeqLM,
}
# The number of training rows for measuring the variances that errors are divided by.
VARIANCE_ROWS = 256
EVALUATIONS = 5
RISING_METRIC_NAMES = ("embedding_cosine", "bleu")
# Objectives without dropout. A teacher has no dropout, so the student could reproduce its outputs only with noise. The
# released checkpoints of T5 1.1 were pretrained without dropout.
WITHOUT_DROPOUT = ("distill", "embedding", SPAN_CORRUPTION)


class Uptraining(FineTuningTask[UptrainingSettings, UptrainingEvaluator]):
    """Uptraining of a converted checkpoint (arXiv 2305.13245, section 2.1), with or without a teacher.

    The results contain `eval_loss`, the terms of the loss and other dev metrics after training. The metrics before
    training are called `initial_eval_<metric>`.

    Example:
        ```python
        settings = UptrainingSettings(
            model_name_or_path="bert-gqa4", objective="mlm", train_file=("text.txt",), output_dir="out"
        )
        results = fine_tune(Uptraining, settings)
        ```
    """

    rows: TextRows

    # The number of parameters of the merged model after LoRA.
    num_parameters: int | None = None
    main_metric = "loss"
    shown_metrics: Sequence[str] = ()

    def __init__(self, settings: UptrainingSettings, accelerator: Accelerator):
        super().__init__(fit_batch_size(settings, accelerator), accelerator)
        self.name, settings = settings.objective, self.settings
        self._load_config()
        self.input_kind = self._get_decoder_input(settings, self.config)
        self.weights = resolve_term_weights(settings, self.input_kind)
        self._load_teacher_config()
        self.tokenizer = load_tokenizer(settings, self.config)
        self._check_teacher_tokenizer()
        languages = settings.source_lang, settings.target_lang, settings.forced_bos_token
        self.target_start = set_languages(self.tokenizer, self.config, *languages)
        if self.target_start is not None:
            self.config.decoder_start_token_id = self.target_start.decoder_start_token_id
        self.data = self._load_data()
        self.collate = self.data.collate
        pairs = not self.input_kind.is_target and self.data.pairs
        if self.input_kind is DecoderInput.SOURCE:
            append_end_tokens(self.tokenizer, self.config, pairs)
        check_max_length(settings.max_length, self.config, self.tokenizer, pairs, multiple=settings.pad_to_multiple_of)
        self.fits_tokenizer = fit_token_types(self.tokenizer, self.config, pairs)
        if self.teacher_config is not None:
            check_teacher_length(settings, self.teacher_config, self.input_kind, self.weights)
            check_teacher_types(settings, self.teacher_config, self.tokenizer, pairs)

    def _load_data(self) -> UptrainingData | UptrainingStream:
        """Read the text of the run."""
        settings = self.settings
        if settings.is_stream:
            return UptrainingStream(settings, self.config, self.tokenizer)
        data = load_uptraining_data(settings, self.config, self.tokenizer, self.input_kind)
        self.rows = data.train
        return data

    def _load_config(self) -> None:
        """Load the configuration for training, and remember its dropout probabilities for the saved one."""
        settings = self.settings
        self.config = load_config(settings)
        check_architecture(settings, self.config)
        self.saved_dropout = {
            name: getattr(self.config, name) for name in DROPOUT_FIELDS if hasattr(self.config, name)
        }
        if settings.dropout_rate is None and settings.objective in WITHOUT_DROPOUT and self.saved_dropout:
            set_dropout(self.config, 0.0)

    def _get_decoder_input(self, source: ModelSettings, config: PreTrainedConfig) -> DecoderInput:
        """Return the kind of input of the decoder of a model."""
        model_class = self._get_model_class(source, config)
        # The variant of an Auto class reads the same input as the class of Transformers.
        if not issubclass(model_class, PreTrainedModel):
            auto_classes = variant_config_class(config.model_type).auto_classes
            model_class = variant_model_class(auto_classes[model_class.__name__])
        return decoder_input(model_class, config)

    def _load_teacher_config(self) -> None:
        """Load the configuration of the teacher, and check that it can be compared with that of the model."""
        settings, weights = self.settings, self.weights
        self.teacher_settings = self.teacher_config = None
        if settings.teacher is None:
            return
        self.teacher_settings = ModelSettings(
            model_name_or_path=settings.teacher,
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
        )
        self.teacher_config = load_config(self.teacher_settings)
        compared = (weights.hidden_states > 0, weights.attention_outputs > 0, weights.embedding_distance > 0)
        check_teacher(self.config, self.teacher_config, *compared)
        input_kind = self._get_decoder_input(self.teacher_settings, self.teacher_config)
        if input_kind is not self.input_kind and not (input_kind.is_target and self.input_kind.is_target):
            raise ValueError(
                f"--teacher {settings.teacher} must have a decoder that reads {self.input_kind.value}, as "
                f"{settings.model_name_or_path}, but it reads {input_kind.value}. Use another teacher."
            )

    def _check_teacher_tokenizer(self) -> None:
        """Check that the teacher has the vocabulary of the model."""
        if self.teacher_settings is None:
            return
        try:
            teacher_tokenizer = load_tokenizer(self.teacher_settings, None)
        except OSError:  # a teacher may have no tokenizer
            return
        if teacher_tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                f"--teacher {self.settings.teacher} must have the same vocabulary as "
                f"{self.settings.model_name_or_path}, because both read the same token ids. Use another teacher."
            )

    def _get_model_class(self, source: ModelSettings, config: PreTrainedConfig) -> type:
        """Return the class of a model for the objective."""
        return AUTO_CLASSES.get(self.settings.objective) or resolve_architecture(source.source, config)

    def load_model(self) -> PreTrainedModel:
        settings = self.settings
        model, rest = load_model_and_unexpected_keys(
            settings, self.config, self._get_model_class(settings, self.config)
        )
        if self.target_start is not None:
            self.target_start.apply_to(model)
        self.model, self.extra_tensors = model, _read_tensors(settings.source, rest)
        select_trainable(model, settings.trainable)
        lora = settings.trainable == "lora"
        self.peft_model = add_lora(model, settings.lora_rank, settings.lora_alpha) if lora else None
        self.uptraining_objective = UptrainingObjective(model, self.weights, self._load_teacher())
        model.to(self.accelerator.device)
        self._measure_variances()
        self._freeze_unused()
        self.trainable_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return model

    def _load_teacher(self) -> Teacher | None:
        """Load the teacher, or return None."""
        if self.teacher_settings is None or self.teacher_config is None:
            return None
        model_class = self._get_model_class(self.teacher_settings, self.teacher_config)
        model = load_model(self.teacher_settings, self.teacher_config, model_class)
        return Teacher(
            model.to(self.accelerator.device),
            hidden_states=self.weights.needs_hidden_states,
            attention_outputs=self.weights.attention_outputs > 0,
            autocast=self.accelerator.autocast,
            max_length=self.settings.teacher_max_length,
        )

    def _make_first_batches(self, count: int, size: int) -> Iterator[dict[str, Tensor]]:
        """Yield batches of the first `count` training rows on the device."""
        rows = self.data.get_first(count)
        for start in range(0, len(rows), size):
            yield send_to_device(self.collate(rows[start : start + size]), self.accelerator.device)

    def _measure_variances(self) -> None:
        """Measure the variances of the teacher if a term needs them."""
        objective, weights = self.uptraining_objective, self.weights
        of_scores = weights.logits > 0 and objective.recorder.answer is LogitsKind.SCORES
        if not (weights.hidden_states or weights.attention_outputs or of_scores):
            return
        teacher: Any = objective.teacher  # it exists, because these terms need it
        teacher.measure_variances(
            (get_model_inputs(batch), objective.get_masks(batch))
            for batch in self._make_first_batches(VARIANCE_ROWS, self.settings.per_device_eval_batch_size)
        )

    def _freeze_unused(self) -> None:
        """Freeze the parameters that the loss does not depend on."""
        objective, model = self.uptraining_objective, self.model
        batch = next(self._make_first_batches(2, 2))
        unused = freeze_unused(model.eval(), lambda: objective.sum_terms(objective.compute_terms(model, batch)))
        if unused:
            message = "These parameters are frozen, because the loss does not depend on them: %s."
            logger.info(message, ", ".join(unused))

    def objective(self) -> Objective:
        uptraining = self.uptraining_objective
        if isinstance(self.data, UptrainingStream):
            return Objective(uptraining.loss_sum, uptraining.count, lambda batch: int(batch["examples"]))
        return Objective(uptraining.loss_sum, uptraining.count)

    def lengths(self) -> list[int]:
        return self.rows.lengths()

    def start_epoch(self, epoch: int) -> None:
        self.rows.start_epoch(epoch)

    def training_batches(self) -> TrainingBatches:
        if isinstance(self.data, UptrainingStream):
            return self.data.training_batches(self.accelerator)
        return super().training_batches()

    def total_steps(self, batches_per_epoch: int | None) -> int:
        settings, steps = self.settings, self.settings.max_train_steps
        if (alpha_steps := settings.alpha_steps) is not None:
            steps = alpha_steps
        elif steps is None and settings.num_train_epochs is None:
            steps = DEFAULT_STEPS
        total = count_training_steps(
            batches_per_epoch, settings.gradient_accumulation_steps, settings.num_train_epochs or 0, steps
        )
        if self.accelerator.is_main_process:
            self._log_length(total)
        return total

    def _log_length(self, steps: int) -> None:
        """Log the length of the training."""
        settings = self.settings
        if settings.alpha is not None:
            message = "Training takes %d steps, which is %s of %d, rounded up."
            logger.info(message, steps, settings.alpha, settings.pretraining_steps)
        if steps and isinstance(self.data, UptrainingStream):
            logger.info("%s", describe_step_size(settings, self.accelerator, self.data.prepare))
            self.data.warn_about_short_steps(count_sequences_per_step(settings, self.accelerator))

    def loop_options(self, total_steps: int) -> dict[str, Any]:
        return {"eval_steps": self.settings.eval_steps or max(1, math.ceil(total_steps / EVALUATIONS))}

    def make_evaluator(self, model: nn.Module) -> UptrainingEvaluator:
        settings, held_out = self.settings, self.data.held_out
        loader = create_eval_dataloader(
            held_out, settings.per_device_eval_batch_size, self.collate, settings.dataloader_num_workers
        )
        loader = self.accelerator.prepare(loader)
        references = None
        if settings.predict_with_generate and isinstance(held_out, TextRows):
            references = [target for _, target in held_out.texts]
        objective = self.uptraining_objective
        return UptrainingEvaluator(self.accelerator, model, objective, loader, self.tokenizer, references, settings)

    def fingerprint(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "objective": settings.objective,
            "teacher": settings.teacher,
            "tokens that the teacher reads at once": settings.teacher_max_length,
            "weights of the terms": asdict(self.weights),
            "trainable": [settings.trainable, settings.lora_rank, settings.lora_alpha],
            "mlm_probability": settings.mlm_probability,
            "lengths of targets": settings.max_target_length,
            "source_prefix": settings.source_prefix,
            **self.data.fingerprint(),
            # The metrics before and after training must come from the same rows.
            "held-out rows": len(self.data.held_out),
            **self.dev_fingerprint(),
        }

    def dev_fingerprint(self) -> dict[str, Any]:
        return self.data.dev_fingerprint()

    def before_training(self, loop: TrainingLoop, evaluator: Any) -> None:
        metrics = evaluator()
        best_metric = loop.settings.metric_for_best_model
        if loop.settings.keep_best and best_metric not in metrics:
            raise ValueError(f"--metric_for_best_model must be one of {', '.join(metrics)}, got {best_metric!r}.")
        if not math.isfinite(metrics["loss"]):
            raise NonFiniteLossError(
                f"The held-out loss must be finite before training, got {metrics['loss']}. Check the outputs of the "
                "checkpoint and of its teacher."
            )
        loop.evaluated_step = 0
        loop.log.write({"step": 0, "epoch": 0.0, **{f"eval_{key}": value for key, value in metrics.items()}})

    def after_training(self, loop: TrainingLoop, evaluator: Any, model: nn.Module) -> nn.Module:
        # Evaluate before the low-rank updates are merged into the weights, because merging rounds differently.
        super().last_evaluation(loop, evaluator)
        self.log_path = loop.log.path
        for name, value in self.saved_dropout.items():
            setattr(self.model.config, name, value)
        rising = [name for name in RISING_METRIC_NAMES if name in evaluator.metrics]
        self.shown_metrics = rising or [name for name in WEIGHT_BY_TERM if name in evaluator.metrics]
        self.examples_and_steps = loop.state.examples, loop.state.step
        if self.peft_model is None:
            return model
        merged = self.peft_model.merge_and_unload()
        self.num_parameters = sum(parameter.numel() for parameter in merged.parameters())
        return merged

    def save(self, model: nn.Module, history: ModelHistory) -> None:
        """Save the model with the other files of the original model."""
        new_files = [TOKENIZER_CONFIG_FILE] if self.fits_tokenizer or self.target_start is not None else []
        new_files += [GENERATION_CONFIG_NAME] if self.target_start is not None else []
        add_files = partial(_copy_side_files, self.settings, new_files)
        outputs.save_model(
            self.accelerator, model, self.tokenizer, self.settings, history, self.extra_tensors, add_files=add_files
        )

    def last_evaluation(self, loop: TrainingLoop, evaluator: UptrainingEvaluator) -> None:
        """Do nothing, because `after_training` has evaluated the model."""

    def dev_results(self, evaluator: UptrainingEvaluator) -> dict[str, Any]:
        before = next((record for record in read_log(self.log_path) if record["step"] == 0), {})
        initial = {f"initial_{key}": value for key, value in before.items() if key.startswith("eval_")}
        gain = compute_held_out_gain(before, evaluator.metrics, self.examples_and_steps[1])
        return {**initial, **gain, **evaluator.metric_options, "eval_samples": len(self.data.held_out)}

    def results(self) -> dict[str, Any]:
        settings = self.settings
        results = {"num_trainable_parameters": self.trainable_parameters, "objective": settings.objective}
        if self.num_parameters is not None:
            results["num_parameters"] = self.num_parameters
        if isinstance(self.data, UptrainingStream):
            sequences = (
                compute_mean_step_size(*self.examples_and_steps)
                if self.examples_and_steps[1]
                else count_sequences_per_step(settings, self.accelerator)
            )
            results |= self.data.results() | {"sequences_per_step": sequences}
        return results

    def summary(self, results: dict[str, Any]) -> str:
        scores = ", ".join(
            f"{name} {results.get(f'initial_eval_{name}', math.nan):.4f} -> {results[f'eval_{name}']:.4f}"
            for name in ("loss", *self.shown_metrics)
        )
        return f"{self.name} on {results['eval_samples']} held-out rows: {scores}; "


def _read_tensors(source: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint that the trained model does not have, such as the pooler of a BERT model.

    They are saved with the model. A head that needs them would otherwise start with random weights.
    """
    if not names:
        return {}
    try:
        with open_checkpoint(resolve_source(source)) as reader:
            tensors = {name: reader.read(name) for name in names if name in reader.entries}
    except ValueError as error:  # the checkpoint is a pickle file
        logger.warning(
            "These tensors are not saved with the model: %s. They cannot be read (%s).", ", ".join(names), error
        )
        return {}
    # Use float32 like the trained weights, except for integers such as the position ids of old checkpoints.
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _copy_side_files(settings: UptrainingSettings, new_files: Sequence[str], output: Path) -> None:
    """Copy the other files of the original model to the output folder.

    Files that the training has written are not copied: `new_files`, code, and the files of another tokenizer. The
    model card is not copied either, because it describes the original model. The history contains its license.
    """
    if outputs.is_trained_in_place(settings):
        return
    folder = resolve_source(settings.source, weights=False)
    copied, _ = side_files(folder, [])
    # The model was saved with its code, and another tokenizer must not be overwritten.
    names = [
        name
        for name in copied
        if not (output / name).exists() or not (name in new_files or name.endswith(".py") or settings.tokenizer_name)
    ]
    names = [name for name in names if name != CARD_NAME]
    copy_side_files(folder, output, names)
