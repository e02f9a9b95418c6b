"""Settings that the training commands share: frozen dataclasses with one field per flag.

A class is a group of flags, and the settings of a command inherit from the groups that it needs. Names follow
`transformers.TrainingArguments` where it has a counterpart. This file imports neither torch nor transformers, so that
`--help` is fast.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ...modeling.fields.field_table import FIELDS, Field
from .options import (
    ABOVE_0,
    ALWAYS,
    AT_LEAST_0,
    AT_LEAST_1,
    FROM_0_BELOW_1,
    WITH_BEST_WEIGHTS,
    Settings,
    option,
    parse_json_flag,
    redefault,
)

__all__ = [
    "FROM_SCRATCH",
    "DataSettings",
    "EncoderDecoderVariantSettings",
    "FineTuningSettings",
    "HubSettings",
    "LanguageSettings",
    "LoopSettings",
    "ModelSettings",
    "NewModelSettings",
    "OptimizationSettings",
    "OutputSettings",
    "RowSettings",
    "TableSettings",
    "TrainingSettings",
    "VariantSettings",
    "collect_variant_fields",
    "count_training_steps",
    "get_warmup_steps",
    "is_greater_better",
]

FROM_SCRATCH = "from scratch (without --model_name_or_path)"
# The type of a setting for the kind of its field. A setting that is not given is None.
SETTING_TYPES: dict[type, Any] = {list: tuple[str, ...] | None, dict: dict[str, Any] | None}
SettingsClass = TypeVar("SettingsClass", bound=Settings)


def _add_variant_fields(prefixes: tuple[str, ...]) -> Callable[[type[SettingsClass]], type[SettingsClass]]:
    """Give a settings class an option for each field of the table that has one of the prefixes."""

    def add_fields(settings: type[SettingsClass]) -> type[SettingsClass]:
        found = [(prefix, row) for row in FIELDS for prefix in prefixes if prefix in row.prefixes]
        types = {prefix + row.name: SETTING_TYPES.get(row.kind, row.kind | None) for prefix, row in found}
        settings.__annotations__ = {**settings.__annotations__, **types}
        for prefix, row in found:
            setattr(settings, prefix + row.name, _make_option(prefix, row))
        return dataclass(frozen=True, kw_only=True)(settings)

    return add_fields


def _make_option(prefix: str, row: Field) -> Any:
    """Return the option of a field. Its default is None, because the configuration has the field's own default."""
    text = row.described(prefix)
    if "_" not in text.split(":")[0]:  # the name of a pattern stays unchanged
        text = f"{text[0].upper()}{text[1:]}"
    default = row.default_of(prefix)
    shown = "" if default in (None, (), False) else f" (default: {default})"
    flag: dict[str, Any] = {"choices": row.choices_of(prefix)} if row.choices_of(prefix) else {}
    if row.kind is dict:
        flag |= {"metavar": "JSON", "type": parse_json_flag}
    if row.kind is list and prefix and row.inherits:
        flag |= {"nargs": "*"}
    return option(f"{text}{shown}.", None, resume=ALWAYS, **flag)


def collect_variant_fields(settings: Any) -> dict[str, Any]:
    """Return the fields of the table that the settings give, as a dictionary."""
    values = {name: getattr(settings, name, None) for row in FIELDS for name in row.names}
    return {name: value for name, value in values.items() if value is not None}


@_add_variant_fields(("",))
class VariantSettings(Settings):
    """The fields of every new model."""

    title: ClassVar[str] = FROM_SCRATCH


@_add_variant_fields(("encoder_", "cross_"))
class EncoderDecoderVariantSettings(Settings):
    """The fields of an encoder-decoder's encoder and cross-attention."""

    title: ClassVar[str] = FROM_SCRATCH


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Which checkpoint is trained, and how it is built."""

    title: ClassVar[str] = "model"

    model_name_or_path: str | None = option(
        "Folder or Hub id of the checkpoint, ours or upstream's.", None, resume=ALWAYS
    )
    tokenizer_name: str | None = option(
        "Folder or Hub id of the tokenizer, where it is not the checkpoint's.", None, resume=ALWAYS
    )
    attn_implementation: str | None = option(
        "eager, sdpa, ...: what the model computes attention with.",
        None,
        resume=ALWAYS,  # where there is dropout, each draws its own
    )
    dropout_rate: float | None = option(
        "Replaces every dropout probability of the checkpoint's config.", None, range=FROM_0_BELOW_1, resume=ALWAYS
    )
    gradient_checkpointing: bool = option("Recompute activations to save memory.", False)
    trust_remote_code: bool = option("Run the model code that a Hub repository holds.", False)

    @property
    def source(self) -> str:
        """`model_name_or_path`, of a model that is not from scratch."""
        source: Any = self.model_name_or_path
        return source

    def check(self) -> None:
        super().check()
        if self.model_name_or_path is None and not isinstance(self, NewModelSettings):
            raise ValueError("--model_name_or_path must be given: the folder or Hub id of a checkpoint")


@dataclass(frozen=True, kw_only=True)
class NewModelSettings(VariantSettings, ModelSettings):
    """What a model from scratch is like; see `new_model.new_config`."""

    title: ClassVar[str] = FROM_SCRATCH

    model_type: str | None = option("The architecture.", None, resume=ALWAYS)
    config_overrides: str | None = option(
        "Config fields that differ from the architecture's defaults; values are JSON or plain text, and those with "
        "commas JSON. A JSON object says the same.",
        None,
        resume=ALWAYS,
        metavar="FIELD=VALUE,...",
    )

    def check(self) -> None:
        super().check()
        if self.model_name_or_path is None:
            if self.model_type is None or self.tokenizer_name is None:
                raise ValueError(
                    "give --model_name_or_path, or --model_type and --tokenizer_name for a model from scratch"
                )
            return
        own = [name for name in ("model_type", "config_overrides") if getattr(self, name) is not None]
        if given := [*own, *collect_variant_fields(self)]:
            raise ValueError(
                f"--{given[0]} is for a model from scratch; --model_name_or_path {self.model_name_or_path} has its "
                "own (`attn-variants convert` makes variants of it)"
            )


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(Settings):
    """Which languages an encoder-decoder of several reads and writes; see `languages.set_languages`."""

    title: ClassVar[str] = "languages (mBART, M2M100, NLLB)"

    source_lang: str | None = option(
        "The sources' language, as the tokenizer calls it (en_XX, en, eng_Latn).", None, resume=ALWAYS
    )
    target_lang: str | None = option("The targets' language.", None, resume=ALWAYS)
    forced_bos_token: str | None = option(
        "The language that generation begins with (default: the targets', where their texts begin with it).",
        None,
        resume=ALWAYS,
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """How examples become batches."""

    title: ClassVar[str] = "data"

    max_length: int = option("Tokens per example, special tokens included.", 128, range=AT_LEAST_1, resume=ALWAYS)
    max_eval_samples: int | None = option(
        "Use only the first N rows of each dev split.", None, range=AT_LEAST_1, resume=WITH_BEST_WEIGHTS
    )
    per_device_train_batch_size: int = option(
        "Examples per device and forward pass.", 32, range=AT_LEAST_1, resume=ALWAYS
    )
    per_device_eval_batch_size: int = option("The same, in evaluation.", 64, range=AT_LEAST_1)
    dataloader_num_workers: int = option("Processes that prepare batches; 0: the main one.", 0, range=AT_LEAST_0)


@dataclass(frozen=True, kw_only=True)
class RowSettings(DataSettings):
    """The same, where an example is a row of its own length, and not a block of a stream of text."""

    max_length: int = redefault(help="Tokens per example, special tokens included; longer ones are cut.")
    max_train_samples: int | None = option("Use only the first N training rows.", None, range=AT_LEAST_1)
    group_by_length: bool = option(
        "Batches of examples of like length, in random order: less padding.", False, resume=ALWAYS
    )
    pad_to_multiple_of: int | None = option(
        "Pad each batch to a multiple of N tokens (8 suits tensor cores).", None, range=AT_LEAST_1, resume=ALWAYS
    )


# transformers' schedules, but for those that need the metric at every step.
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)


def _parse_steps_or_epoch(text: str) -> int | str:
    return int(text) if text.isdigit() else text


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings(Settings):
    """The optimiser, its schedule and the length of training."""

    title: ClassVar[str] = "training"

    optim: str = option(
        "Adafactor keeps no moments of whole matrices.", "adamw", resume=ALWAYS, choices=("adamw", "adafactor")
    )
    learning_rate: float = option("Peak learning rate.", 5e-5, range=AT_LEAST_0, resume=ALWAYS)
    weight_decay: float = option(
        "Decoupled weight decay; biases, norms, logits_proj and weights_proj are exempt.",
        0.0,
        range=AT_LEAST_0,
        resume=ALWAYS,
    )
    adam_beta1: float = option("Decay of AdamW's mean of gradients.", 0.9, range=FROM_0_BELOW_1, resume=ALWAYS)
    adam_beta2: float = option("Decay of its mean of squares.", 0.999, range=FROM_0_BELOW_1, resume=ALWAYS)
    adam_epsilon: float = option("Added to its denominator.", 1e-8, range=AT_LEAST_0, resume=ALWAYS)
    adafactor_scale_parameter: bool = option(
        "Steps in proportion to each parameter's root mean square (T5's pretraining, rate 1e-2).",
        False,
        resume=ALWAYS,
    )
    adafactor_relative_step: bool = option(
        "Adafactor's own schedule, min(1e-6 step, 1/sqrt(step)), instead of a rate, a schedule and warm-up.",
        False,
        resume=ALWAYS,
    )
    max_grad_norm: float = option("Clip the gradient norm to this; 0: never clip.", 1.0, range=AT_LEAST_0)
    num_train_epochs: float | None = option("Epochs (0: only evaluate).", 3.0, range=AT_LEAST_0)
    max_train_steps: int | None = option(
        "Optimiser steps in all; overrides --num_train_epochs.", None, range=AT_LEAST_1
    )
    max_train_minutes: float | None = option(
        "Stop after N minutes of this process's training, with a checkpoint to go on from.", None, range=ABOVE_0
    )
    gradient_accumulation_steps: int = option(
        "Forward passes per optimiser step; the loss is the mean over all their examples.", 1, range=AT_LEAST_1
    )
    lr_scheduler_type: str = option(
        f"One of {', '.join(SCHEDULES)}.", "linear", resume=ALWAYS, choices=SCHEDULES, metavar="NAME"
    )
    lr_scheduler_kwargs: dict[str, Any] = option(  # noqa: RUF009 (each gets a dictionary of its own)
        "Further settings of the schedule, such as '{\"num_decay_steps\": 100}'.",
        {},
        resume=ALWAYS,
        metavar="JSON",
        type=parse_json_flag,
    )
    num_warmup_steps: int | None = option("Steps over which the learning rate rises from 0.", None, range=AT_LEAST_0)
    warmup_ratio: float = option("The same as a share of all steps.", 0.0, range=FROM_0_BELOW_1)
    seed: int = option(
        "Seeds the head's weights, dropout and the order of examples.", 42, range=AT_LEAST_0, resume=ALWAYS
    )
    mixed_precision: str | None = option(
        "Autocast of the forward pass, on CPUs faster (bf16) only where they have bfloat16 instructions; default: as "
        "`accelerate launch` says, or no.",
        None,
        choices=("no", "bf16", "fp16"),
    )
    cpu: bool = option("Train on the CPU even where an accelerator is present.", False)
    eval_steps: int | None = option(
        "Evaluate every N optimiser steps (default: after every epoch).",
        None,
        range=AT_LEAST_1,
        resume=WITH_BEST_WEIGHTS,
    )
    metric_for_best_model: str | None = option(
        "Keep the weights of the best evaluation by this dev metric instead of the last ones.", None
    )
    greater_is_better: bool | None = option(
        "Whether that metric rises as the model gets better (default: unless its name is that of a loss or an error).",
        None,
        resume=WITH_BEST_WEIGHTS,
        action=argparse.BooleanOptionalAction,
    )
    early_stopping_patience: int | None = option(
        "Stop after N evaluations without a better dev metric; keeps the best weights.", None, range=AT_LEAST_1
    )

    @property
    def only_evaluates(self) -> bool:
        """Whether the run has no training step: `num_train_epochs` 0 without `max_train_steps`."""
        return self.max_train_steps is None and self.num_train_epochs == 0

    @property
    def keeps_best_weights(self) -> bool:
        """Whether the run ends with the weights of its best evaluation."""
        return self.metric_for_best_model is not None or self.early_stopping_patience is not None

    def check(self) -> None:
        super().check()
        has_warmup = bool(self.num_warmup_steps or self.warmup_ratio)
        if self.greater_is_better is not None and not self.keeps_best_weights:
            raise ValueError("--greater_is_better needs --metric_for_best_model or --early_stopping_patience")
        if self.num_warmup_steps is not None and self.warmup_ratio:
            raise ValueError("give --num_warmup_steps or --warmup_ratio, not both")
        if (self.adafactor_scale_parameter or self.adafactor_relative_step) and self.optim != "adafactor":
            raise ValueError("--adafactor_scale_parameter and --adafactor_relative_step need --optim adafactor")
        if self.adafactor_relative_step and (has_warmup or self.lr_scheduler_kwargs):
            raise ValueError("--adafactor_relative_step is a schedule with a warm-up of its own: give no other")
        if not isinstance(self.lr_scheduler_kwargs, dict):
            raise ValueError(f"--lr_scheduler_kwargs must be a JSON object, got {self.lr_scheduler_kwargs!r}")
        # transformers would pass over both without a word.
        if self.lr_scheduler_type == "constant" and has_warmup:
            raise ValueError("--lr_scheduler_type constant has no warm-up: give constant_with_warmup")
        if self.lr_scheduler_type in ("constant", "constant_with_warmup") and self.lr_scheduler_kwargs:
            raise ValueError(f"--lr_scheduler_type {self.lr_scheduler_type} takes no --lr_scheduler_kwargs")


@dataclass(frozen=True, kw_only=True)
class OutputSettings(Settings):
    """Where results go, what is logged and how a run resumes."""

    title: ClassVar[str] = "output"

    output_dir: str = option("Folder for the model, its results and the checkpoints.")
    overwrite_output_dir: bool = option(
        "Accept a folder that is not empty; an earlier run's checkpoints, log and results in it, and the README.md of "
        "a model that the run does not begin with, are removed once the new run's data and model are loaded.",
        False,
    )
    logging_steps: int = option("Log the mean loss of every N steps.", 10, range=AT_LEAST_1)
    peak_tflops: float | None = option(
        "What one device could do in this precision, from its data sheet (an H100 in bf16: 989); "
        "the results then have train_mfu.",
        None,
        range=ABOVE_0,
    )
    checkpointing_steps: int | str | None = option(
        "Save a checkpoint every N steps or after every epoch.", None, metavar="N|epoch", type=_parse_steps_or_epoch
    )
    save_total_limit: int | None = option(
        "Keep only the last N checkpoints (default: all; each has the weights and the optimiser's state).",
        None,
        range=AT_LEAST_1,
    )
    resume_from_checkpoint: str | None = option(
        "Go on exactly where a checkpoint left off; latest: the newest complete one in --output_dir. One from "
        "elsewhere needs an empty --output_dir.",
        None,
        metavar="PATH|latest",
    )
    with_tracking: bool = option("Log to tensorboard, or to the trackers of --report_to.", False)
    report_to: str | None = option(
        "Log to tensorboard, wandb, trackio, ... or all; none: to none (default: to none without --with_tracking).",
        None,
    )
    disable_tqdm: bool = option("No progress bars.", False)

    @property
    def tracker(self) -> str | None:
        """What the run logs to: one tracker, "all", or None."""
        if self.report_to is None:
            return "tensorboard" if self.with_tracking else None
        return None if self.report_to == "none" else self.report_to

    def check(self) -> None:
        super().check()
        every = self.checkpointing_steps
        if every not in (None, "epoch") and not (isinstance(every, int) and every >= 1):
            raise ValueError(f"--checkpointing_steps must be a positive number or 'epoch', got {every!r}")
        if self.save_total_limit is not None and every is None:
            raise ValueError("--save_total_limit needs --checkpointing_steps: no checkpoint is saved without it")
        if self.resume_from_checkpoint and self.overwrite_output_dir:
            raise ValueError(
                "--resume_from_checkpoint goes on with what --overwrite_output_dir removes from --output_dir: give one"
            )
        if self.with_tracking and self.report_to == "none":
            raise ValueError("--with_tracking logs, and --report_to none does not: give one")


@dataclass(frozen=True, kw_only=True)
class HubSettings(Settings):
    """Where a command pushes the model that it trained; a training that is called from Python pushes nothing."""

    title: ClassVar[str] = "hub"

    push_to_hub: bool = option("Push the final model.", False)
    hub_model_id: str | None = option("user/name; default: the name of --output_dir under your account.", None)
    hub_private_repo: bool = option("Make the repository private.", False)
    hub_token: str | None = option("Token to use instead of the one `hf auth login` stored.", None)

    def check(self) -> None:
        super().check()
        if (self.hub_model_id or self.hub_private_repo) and not self.push_to_hub:
            raise ValueError("--hub_model_id and --hub_private_repo need --push_to_hub")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ModelSettings, DataSettings, OptimizationSettings, OutputSettings, HubSettings):
    """What every training has."""


@dataclass(frozen=True, kw_only=True)
class FineTuningSettings(TrainingSettings, RowSettings):
    """What every training on rows has."""

    max_length: int = redefault()  # a dataclass takes that of its first base otherwise


def get_warmup_steps(settings: OptimizationSettings, total_steps: int) -> int:
    """Return the steps of warm-up: `--num_warmup_steps`, or `--warmup_ratio` of all steps, rounded up.

    Raises:
        ValueError: if they are more than the run has.
    """
    warmup = settings.num_warmup_steps
    if warmup is None:
        warmup = math.ceil(settings.warmup_ratio * total_steps)
    if total_steps == 0:  # a run that only evaluates
        return 0
    if warmup > total_steps:
        raise ValueError(f"--num_warmup_steps {warmup} is more than the {total_steps} steps of the run")
    return warmup


# The dev metrics that fall as a model gets better; all others rise.
FALLING_METRICS = re.compile(
    r"(\w+_)?(loss|perplexity|ppl|nll|cross_entropy|brier|[wctm]er|wil|r?mse|s?mape|mae|mase|error|distance|divergence)"
    r"(_mm|_rate|_score)?",
    re.IGNORECASE,
)


def is_greater_better(metric: str) -> bool:
    """Return whether a dev metric, named without "eval_", is to be raised."""
    return FALLING_METRICS.fullmatch(metric) is None


@dataclass(frozen=True)
class LoopSettings:
    """How long and in what rhythm a run trains; a field that a setting is named like has its value.

    Attributes:
        total_steps: optimiser steps.
        metric_for_best_model: the dev metric that tells the best weights, without "eval_".
        greater_is_better: whether it rises as the model gets better.
        keep_best: whether the weights of the best evaluation are kept, and the run ends with them.
        fingerprint: what a resumed run must share beyond what the loop knows (see `TrainState`).
    """

    output_dir: str
    total_steps: int
    max_train_minutes: float | None = None
    gradient_accumulation_steps: int = 1
    max_grad_norm: float = 1.0
    logging_steps: int = 10
    eval_steps: int | None = None
    checkpointing_steps: int | str | None = None
    save_total_limit: int | None = None
    resume_from_checkpoint: str | None = None
    early_stopping_patience: int | None = None
    metric_for_best_model: str | None = None
    greater_is_better: bool = True
    keep_best: bool = False
    peak_tflops: float | None = None
    disable_tqdm: bool = False
    fingerprint: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_settings(
        cls,
        settings: TrainingSettings,
        total_steps: int,
        default_metric: str,
        fingerprint: dict[str, Any],
        dev_fingerprint: dict[str, Any],
        **others: Any,
    ) -> "LoopSettings":
        """Make the loop's settings of a run's.

        Args:
            settings: of the run.
            total_steps: optimiser steps.
            default_metric: the dev metric that tells the best weights where the settings name none.
            fingerprint: what tells this run's training data from others.
            dev_fingerprint: what tells its dev data and their scoring from others; a resumed run must share it where
                the best weights are kept.
            **others: fields that are not as the settings have them.

        Raises:
            ValueError: if the warm-up is longer than the run.
        """
        keep_best = settings.keeps_best_weights
        metric = (settings.metric_for_best_model or default_metric).removeprefix("eval_")
        rises = settings.greater_is_better
        own = {
            "total_steps": total_steps,
            "metric_for_best_model": metric,
            "greater_is_better": is_greater_better(metric) if rises is None else rises,
            "keep_best": keep_best,
            "fingerprint": {
                **fingerprint,
                **(dev_fingerprint if keep_best else {}),
                **settings.resume_values(with_best_weights=keep_best),
                "warm-up steps": get_warmup_steps(settings, total_steps),
            },
            **others,
        }
        names = {each.name for each in dataclasses.fields(cls)} - own.keys()
        return cls(**{name: getattr(settings, name) for name in names}, **own)


def count_training_steps(
    batches_per_epoch: int | None, accumulation: int, epochs: float | None, max_steps: int | None
) -> int:
    """Return the optimiser steps of a run.

    Args:
        batches_per_epoch: batches that each process sees in an epoch; None for a stream of unknown length.
        accumulation: batches a step; the last step of an epoch may have fewer.
        epochs: epochs, a fraction allowed.
        max_steps: overrides `epochs`.

    Raises:
        ValueError: if the length is unknown and no maximum is given.
    """
    if max_steps is not None:
        return max_steps
    if epochs == 0:
        return 0
    if batches_per_epoch is None or epochs is None:
        raise ValueError("a stream has no length: give --max_train_steps")
    return math.ceil(epochs * math.ceil(batches_per_epoch / accumulation))


DEV_SETTINGS = ("metric_for_best_model", "early_stopping_patience", "eval_steps")


@dataclass(frozen=True, kw_only=True)
class TableSettings(FineTuningSettings):
    """Which tables."""

    title: ClassVar[str] = "tables"

    train_file: tuple[str, ...] | None = option("Training tables: .csv, .tsv, .json, .jsonl, each also .gz.", None)
    validation_file: tuple[str, ...] | None = option("Dev tables, likewise.", None, resume=WITH_BEST_WEIGHTS)
    test_file: tuple[str, ...] | None = option("Tables to predict, with or without labels.", None)
    dataset_name: str | None = option("Folder or Hub id of a `datasets` source instead of files.", None)
    dataset_config_name: str | None = option("Its configuration.", None)
    train_split_name: str = option("Its training split (default: %(default)s).", "train")
    validation_split_name: str | None = option(
        "Its dev split (default: validation, where there is one).", None, resume=WITH_BEST_WEIGHTS
    )
    test_split_name: str | None = option("Its test split (default: test, where there is one).", None)
    skip_predict: bool = option("Do not predict the test rows.", False)

    def check(self) -> None:
        super().check()
        files = {split: getattr(self, f"{split}_file") for split in ("train", "validation", "test")}
        if any(files.values()) == (self.dataset_name is not None):
            got = "; got both" if self.dataset_name is not None else ""
            raise ValueError(f"give --train_file (and --validation_file, --test_file), or --dataset_name{got}")
        if self.dataset_name is not None:
            return
        if self.dataset_config_name is not None:
            raise ValueError("--dataset_config_name needs --dataset_name")
        for split, default in (("train", "train"), ("validation", None), ("test", None)):
            if getattr(self, f"{split}_split_name") != default:
                raise ValueError(f"--{split}_split_name needs --dataset_name; of files give --{split}_file")
        if not self.only_evaluates and not files["train"]:
            raise ValueError("training needs --train_file (or --num_train_epochs 0, to evaluate or predict only)")
        if self.only_evaluates and not (files["validation"] or files["test"]):
            raise ValueError("--num_train_epochs 0 only evaluates: give --validation_file or --test_file")
        self.check_dev(bool(files["validation"]))

    def check_dev(self, is_there: bool) -> None:
        """Raise ValueError where a setting asks for dev rows that are not there."""
        for name in DEV_SETTINGS if not is_there else ():
            if getattr(self, name) is not None:
                raise ValueError(f"--{name} needs dev rows: --validation_file, or a dev split of --dataset_name")
