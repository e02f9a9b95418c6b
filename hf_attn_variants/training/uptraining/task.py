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
    TERMS,
    Teacher,
    UptrainingEvaluator,
    UptrainingObjective,
    check_architecture,
    check_teacher,
    check_teacher_length,
    check_teacher_types,
    held_out_gain,
    model_inputs,
    term_weights,
)
from .settings import SPAN_CORRUPTION, UptrainingSettings

__all__ = ["Uptraining", "fit_batch_size", "mean_step", "sequences_per_step", "step_size"]

logger = logging.getLogger(__name__)


def fit_batch_size(settings: UptrainingSettings, accelerator: Accelerator) -> UptrainingSettings:
    """Return the settings with the accumulation steps by which a step has `total_train_batch_size` examples.

    Raises:
        ValueError: if that is no multiple of what all processes read at once, or DeepSpeed would have to accumulate.
    """
    total, processes = settings.total_train_batch_size, accelerator.num_processes
    if total is None:
        return settings
    at_once = settings.per_device_train_batch_size * processes
    if total % at_once:
        raise ValueError(
            f"--total_train_batch_size {total} is no multiple of the {at_once} examples that {processes} process(es) "
            f"with --per_device_train_batch_size {settings.per_device_train_batch_size} read at once: change one"
        )
    fitted = replace(settings, total_train_batch_size=None, gradient_accumulation_steps=total // at_once)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        configure_deepspeed(fitted, accelerator.state.deepspeed_plugin.deepspeed_config)
    return fitted


def sequences_per_step(settings: UptrainingSettings, accelerator: Accelerator) -> int:
    """Return the examples of a step on all processes."""
    of_a_device = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    return of_a_device * accelerator.num_processes


def mean_step(examples: int, steps: int) -> int | float:
    """Return the examples that a step read on average: fewer than asked for, where the text ended within steps."""
    return examples // steps if examples % steps == 0 else round(examples / steps, 2)


def step_size(settings: UptrainingSettings, accelerator: Accelerator, prepare: SpanCorruption) -> str:
    """Say how many sequences a step reads, and how many tokens, where none is padding."""
    sequences = sequences_per_step(settings, accelerator)
    return (
        f"a step reads {sequences} sequences ({accelerator.num_processes} process(es), "
        f"{settings.per_device_train_batch_size} at a time, accumulated {settings.gradient_accumulation_steps} "
        f"time(s)): {sequences * prepare.input_length} tokens of inputs and {sequences * prepare.target_length} of "
        "targets"
    )


DEFAULT_STEPS = 300
# Of a task's own head; the other objectives take the class that the checkpoint was saved from.
AUTO_CLASSES: dict[str, Any] = {
    "mlm": AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    SPAN_CORRUPTION: AutoModelForSeq2SeqLM,
}
# Rows of the training text whose activations say what variance an error is divided by.
VARIANCE_ROWS = 256
EVALUATIONS = 5
RISING_METRICS = ("embedding_cosine", "bleu")
# A teacher drops nothing, and what a student drops it could only answer with noise. T5's released checkpoints (1.1)
# were pretrained without.
WITHOUT_DROPOUT = ("distill", "embedding", SPAN_CORRUPTION)


class Uptraining(FineTuningTask[UptrainingSettings, UptrainingEvaluator]):
    """Training on of a converted checkpoint (arXiv:2305.13245, section 2.1), with or without a teacher.

    The results have `eval_loss`, each term of the loss and other dev metrics after training, and the same as
    `initial_eval_<metric>` before it.
    """

    rows: TextRows

    # Of the merged model, where updates were trained beside the weights.
    num_parameters: int | None = None
    main_metric = "loss"
    shown_metrics: Sequence[str] = ()

    def __init__(self, settings: UptrainingSettings, accelerator: Accelerator):
        super().__init__(fit_batch_size(settings, accelerator), accelerator)
        self.name, settings = settings.objective, self.settings
        self._load_config()
        self.reads = self._decoder_input(settings, self.config)
        self.weights = term_weights(settings, self.reads)
        self._load_teacher_config()
        self.tokenizer = load_tokenizer(settings, self.config)
        self._check_teacher_tokenizer()
        languages = settings.source_lang, settings.target_lang, settings.forced_bos_token
        self.target_start = set_languages(self.tokenizer, self.config, *languages)
        if self.target_start is not None:
            self.config.decoder_start_token_id = self.target_start.decoder_start_token_id
        self.data = self._load_data()
        self.collate = self.data.collate
        pairs = not self.reads.is_target and self.data.pairs
        if self.reads is DecoderInput.SOURCE:
            append_end_tokens(self.tokenizer, self.config, pairs)
        check_max_length(settings.max_length, self.config, self.tokenizer, pairs, multiple=settings.pad_to_multiple_of)
        self.fits_tokenizer = fit_token_types(self.tokenizer, self.config, pairs)
        if self.teacher_config is not None:
            check_teacher_length(settings, self.teacher_config, self.reads, self.weights)
            check_teacher_types(settings, self.teacher_config, self.tokenizer, pairs)

    def _load_data(self) -> UptrainingData | UptrainingStream:
        settings = self.settings
        if settings.is_stream:
            return UptrainingStream(settings, self.config, self.tokenizer)
        data = load_uptraining_data(settings, self.config, self.tokenizer, self.reads)
        self.rows = data.train
        return data

    def _load_config(self) -> None:
        """Load the config to train with, and note the dropout probabilities that the saved one gets back."""
        settings = self.settings
        self.config = load_config(settings)
        check_architecture(settings, self.config)
        self.own_dropout = {name: getattr(self.config, name) for name in DROPOUT_FIELDS if hasattr(self.config, name)}
        if settings.dropout_rate is None and settings.objective in WITHOUT_DROPOUT and self.own_dropout:
            set_dropout(self.config, 0.0)

    def _decoder_input(self, source: ModelSettings, config: PreTrainedConfig) -> DecoderInput:
        found = self._model_class(source, config)
        if not issubclass(found, PreTrainedModel):  # an Auto class; upstream's and ours read the same
            found = variant_model_class(variant_config_class(config.model_type).auto_classes[found.__name__])
        return decoder_input(found, config)

    def _load_teacher_config(self) -> None:
        settings, weights = self.settings, self.weights
        self.of_teacher = self.teacher_config = None
        if settings.teacher is None:
            return
        self.of_teacher = ModelSettings(
            model_name_or_path=settings.teacher,
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
        )
        self.teacher_config = load_config(self.of_teacher)
        compared = (weights.hidden_states > 0, weights.attention_outputs > 0, weights.embedding_distance > 0)
        check_teacher(self.config, self.teacher_config, *compared)
        reads = self._decoder_input(self.of_teacher, self.teacher_config)
        if reads is not self.reads and not (reads.is_target and self.reads.is_target):
            raise ValueError(
                f"both get the same inputs: the decoder of --teacher {settings.teacher} reads {reads.value}; that of "
                f"{settings.model_name_or_path} {self.reads.value}"
            )

    def _check_teacher_tokenizer(self) -> None:
        if self.of_teacher is None:
            return
        try:
            others = load_tokenizer(self.of_teacher, None)
        except OSError:  # a folder with weights alone is a teacher too
            return
        if others.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                f"--teacher {self.settings.teacher} has another vocabulary than "
                f"{self.settings.model_name_or_path}: it would see other words"
            )

    def _model_class(self, source: ModelSettings, config: PreTrainedConfig) -> type:
        return AUTO_CLASSES.get(self.settings.objective) or resolve_architecture(source.source, config)

    def load_model(self) -> PreTrainedModel:
        settings = self.settings
        model, rest = load_model_and_unexpected_keys(settings, self.config, self._model_class(settings, self.config))
        if self.target_start is not None:
            self.target_start.apply_to(model)
        self.model, self.carried = model, _read_tensors(settings.source, rest)
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
        if self.of_teacher is None or self.teacher_config is None:
            return None
        model_class = self._model_class(self.of_teacher, self.teacher_config)
        model = load_model(self.of_teacher, self.teacher_config, model_class)
        return Teacher(
            model.to(self.accelerator.device),
            hidden_states=self.weights.need_hidden_states,
            attention_outputs=self.weights.attention_outputs > 0,
            autocast=self.accelerator.autocast,
            max_length=self.settings.teacher_max_length,
        )

    def _first_batches(self, count: int, size: int) -> Iterator[dict[str, Tensor]]:
        rows = self.data.first(count)
        for start in range(0, len(rows), size):
            yield send_to_device(self.collate(rows[start : start + size]), self.accelerator.device)

    def _measure_variances(self) -> None:
        objective, weights = self.uptraining_objective, self.weights
        of_scores = weights.logits > 0 and objective.recorder.answer is LogitsKind.SCORES
        if not (weights.hidden_states or weights.attention_outputs or of_scores):
            return
        teacher: Any = objective.teacher  # whose layers and scores the terms compare
        teacher.measure_variances(
            (model_inputs(batch), objective.masks(batch))
            for batch in self._first_batches(VARIANCE_ROWS, self.settings.per_device_eval_batch_size)
        )

    def _freeze_unused(self) -> None:
        objective, model = self.uptraining_objective, self.model
        batch = next(self._first_batches(2, 2))
        unused = freeze_unused(model.eval(), lambda: objective.total(objective.terms(model, batch)))
        if unused:
            logger.info("frozen, because the loss does not depend on them: %s", ", ".join(unused))

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
        if (of_alpha := settings.alpha_steps) is not None:
            steps = of_alpha
        elif steps is None and settings.num_train_epochs is None:
            steps = DEFAULT_STEPS
        total = count_training_steps(
            batches_per_epoch, settings.gradient_accumulation_steps, settings.num_train_epochs or 0, steps
        )
        if self.accelerator.is_main_process:
            self._say_length(total)
        return total

    def _say_length(self, steps: int) -> None:
        settings = self.settings
        if settings.alpha is not None:
            logger.info("%d steps: %s of %d, rounded up", steps, settings.alpha, settings.pretraining_steps)
        if steps and isinstance(self.data, UptrainingStream):
            logger.info("%s", step_size(settings, self.accelerator, self.data.prepare))
            self.data.warn_of_short_steps(sequences_per_step(settings, self.accelerator))

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
            "held-out rows": len(self.data.held_out),  # always: the scores before and after are of the same rows
            **self.dev_fingerprint(),
        }

    def dev_fingerprint(self) -> dict[str, Any]:
        return self.data.dev_fingerprint()

    def before_training(self, loop: TrainingLoop, evaluator: Any) -> None:
        metrics = evaluator()
        wanted = loop.settings.metric_for_best_model
        if loop.settings.keep_best and wanted not in metrics:
            raise ValueError(f"--metric_for_best_model {wanted!r}: the dev metrics are {', '.join(metrics)}")
        if not math.isfinite(metrics["loss"]):
            raise NonFiniteLossError(
                f"the held-out loss is {metrics['loss']} before training: the checkpoint or its teacher gives no "
                "numbers"
            )
        loop.evaluated_step = 0
        loop.log.write({"step": 0, "epoch": 0.0, **{f"eval_{key}": value for key, value in metrics.items()}})

    def after_training(self, loop: TrainingLoop, evaluator: Any, model: nn.Module) -> nn.Module:
        # Scored before the updates are merged into the weights, which rounds in another way.
        super().last_evaluation(loop, evaluator)
        self.log_path = loop.log.path
        for name, value in self.own_dropout.items():
            setattr(self.model.config, name, value)
        rising = [name for name in RISING_METRICS if name in evaluator.metrics]
        self.shown_metrics = rising or [name for name in TERMS if name in evaluator.metrics]
        self.read = loop.state.examples, loop.state.step
        if self.peft_model is None:
            return model
        merged = self.peft_model.merge_and_unload()
        self.num_parameters = sum(parameter.numel() for parameter in merged.parameters())
        return merged

    def save(self, model: nn.Module, history: ModelHistory) -> None:
        own = [TOKENIZER_CONFIG_FILE] if self.fits_tokenizer or self.target_start is not None else []
        own += [GENERATION_CONFIG_NAME] if self.target_start is not None else []
        add_files = partial(_copy_side_files, self.settings, own)
        outputs.save_model(
            self.accelerator, model, self.tokenizer, self.settings, history, self.carried, add_files=add_files
        )

    def last_evaluation(self, loop: TrainingLoop, evaluator: UptrainingEvaluator) -> None:
        """Nothing more: `after_training` did it."""

    def dev_results(self, evaluator: UptrainingEvaluator) -> dict[str, Any]:
        before = next((record for record in read_log(self.log_path) if record["step"] == 0), {})
        initial = {f"initial_{key}": value for key, value in before.items() if key.startswith("eval_")}
        gain = held_out_gain(before, evaluator.metrics, self.read[1])
        return {**initial, **gain, **evaluator.metric_options, "eval_samples": len(self.data.held_out)}

    def results(self) -> dict[str, Any]:
        settings = self.settings
        found = {"num_trainable_parameters": self.trainable_parameters, "objective": settings.objective}
        if self.num_parameters is not None:
            found["num_parameters"] = self.num_parameters
        if isinstance(self.data, UptrainingStream):
            read = mean_step(*self.read) if self.read[1] else sequences_per_step(settings, self.accelerator)
            found |= self.data.results() | {"sequences_per_step": read}
        return found

    def summary(self, results: dict[str, Any]) -> str:
        scores = ", ".join(
            f"{name} {results.get(f'initial_eval_{name}', math.nan):.4f} -> {results[f'eval_{name}']:.4f}"
            for name in ("loss", *self.shown_metrics)
        )
        return f"{self.name} on {results['eval_samples']} held-out rows: {scores}; "


def _read_tensors(source: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Read what the trained model has no place for, such as the pooler of a BERT that was saved with it.

    A head that is put on the result wants them: it would begin with weights drawn anew.
    """
    if not names:
        return {}
    try:
        with open_checkpoint(resolve_source(source)) as reader:
            found = {name: reader.read(name) for name in names if name in reader.entries}
    except ValueError as error:  # a pickle
        logger.warning("not carried over: %s (%s)", ", ".join(names), error)
        return {}
    # In float32, as the trained weights; old checkpoints also hold numbers of positions.
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def _copy_side_files(settings: UptrainingSettings, own: Sequence[str], output: Path) -> None:
    """Copy what lies beside the source's weights, the files named `own` aside: the result is as whole.

    A card is of the source; its terms are in the history.
    """
    if outputs.is_trained_in_place(settings):
        return
    folder = resolve_source(settings.source, weights=False)
    copied, _ = side_files(folder, [])
    # The code is the one that the model was saved with, and a tokenizer from elsewhere stays.
    kept = [
        name
        for name in copied
        if not (output / name).exists() or not (name in own or name.endswith(".py") or settings.tokenizer_name)
    ]
    kept = [name for name in kept if name != CARD_NAME]
    copy_side_files(folder, output, kept)
