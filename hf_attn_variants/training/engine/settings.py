"""Settings shared by the training commands, as frozen dataclasses with one field per flag.

Each class is a group of flags, and the settings of a command inherit from the groups that the command supports. The
names are the same as in `transformers.TrainingArguments` if it has a corresponding argument. `commands.training` turns
each field into a flag. This module does not import torch or Transformers, so that `--help` is fast.
"""

import argparse
import dataclasses
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field
from functools import partial
from os import PathLike, fspath
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from ...files import parse_json
from ...modeling.fields.field_table import VARIANT_FIELDS, VariantField, describe_field

SPLITS = ("train", "validation", "test")
# The valid values of a number, as the phrase that follows "must be" in messages and as a function that checks a value.
Range = tuple[str, Callable[[float], bool]]
AT_LEAST_1: Range = ("at least 1", lambda value: value >= 1)
AT_LEAST_0: Range = ("at least 0", lambda value: 0 <= value < math.inf)
ABOVE_0: Range = ("more than 0", lambda value: 0 < value < math.inf)
FROM_0_BELOW_1: Range = ("in [0, 1)", lambda value: 0 <= value < 1)
BETWEEN_0_AND_1: Range = ("in (0, 1)", lambda value: 0 < value < 1)
FINITE_NUMBER: Range = ("a number", math.isfinite)
SEED: Range = ("from 0 to 4294967295 (2**32 - 1)", lambda value: 0 <= value < 2**32)  # as required by NumPy

# When a resumed run must use the same value as before: always, or only if the run keeps its best weights.
ALWAYS_COMPARED, WITH_BEST_WEIGHTS = "always", "with best weights"


def option(
    help: str, default: Any = MISSING, *, range: Range | None = None, resume: str | None = None, **argparse_kwargs: Any
) -> Any:
    """Define a field of a settings class.

    Args:
        help: The text for `--help`.
        default: The default value. Settings without a default are required.
        range: The valid values of a number.
        resume: `ALWAYS_COMPARED` or `WITH_BEST_WEIGHTS` if a resumed run must use the same value, or None if it may
            differ.
        **argparse_kwargs: Additional arguments for argparse's `add_argument`, such as `choices`, `metavar`, `type` and
            `nargs`. By default, `type`, `nargs` and `action` are inferred from the type of the field. `choices` can be
            a function that returns the choices.

    Example:
        ```python
        @dataclass(frozen=True, kw_only=True)
        class BatchSettings(Settings):
            batch_size: int = option("Examples per batch.", 32, range=AT_LEAST_1)
        ```
    """
    metadata = {"help": help, "range": range, "resume": resume, **argparse_kwargs}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def fixed_option(help: str, default: Any = MISSING, **arguments: Any) -> Any:
    """Define a field whose value must not change when a run is resumed. See `option` for the arguments."""
    return option(help, default, resume=ALWAYS_COMPARED, **arguments)


def dev_option(help: str, default: Any = MISSING, **arguments: Any) -> Any:
    """Define a field that affects the dev scores.

    Its value must not change when a run that keeps the best weights is resumed. See `option` for the arguments.
    """
    return option(help, default, resume=WITH_BEST_WEIGHTS, **arguments)


def parse_json_flag(text: str) -> Any:
    """Parse the value of a flag as JSON.

    Raises:
        ArgumentTypeError: If the text is not valid JSON, or if it contains a repeated key.
    """
    try:
        return parse_json(text, unique_keys=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"The value is not valid JSON: {error}") from None


class _OptionChange(NamedTuple):
    default: Any
    owner: "type[Settings] | None"
    metadata: dict[str, Any]


def override_option(default: Any = MISSING, *, owner: "type[Settings] | None" = None, **changed: Any) -> Any:
    """Change an inherited field of a settings class.

    Args:
        default: The new default value. If not set, the default is left unchanged.
        owner: The class from which to copy the field if the settings class does not inherit it.
        **changed: Other arguments of `option` to replace.

    Example:
        ```python
        @dataclass(frozen=True, kw_only=True)
        class LongTextSettings(FineTuningSettings):
            max_length: int = override_option(512)
        ```
    """
    return _OptionChange(default, owner, changed)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class for groups of settings. The values of the fields are checked when an object is created."""

    title: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        for name, change in vars(cls).copy().items():
            if isinstance(change, _OptionChange):
                bases: Any = [change.owner] if change.owner else cls.__mro__[1:]
                owner = next(base for base in bases if name in inspect.get_annotations(base))
                old = owner.__dataclass_fields__[name]
                default = old.default if change.default is MISSING else change.default
                setattr(cls, name, field(default=default, metadata={**old.metadata, **change.metadata}))

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = _convert_type(getattr(self, item.name), types[item.name])
            object.__setattr__(self, item.name, value)  # the type that parsing a command line would produce
            if value is not None:
                _check_value(item.name, value, **item.metadata)
        self.check()

    def check(self) -> None:
        """Check that the settings are valid in combination. Subclasses extend this method with their own checks.

        Raises:
            ValueError: If a setting is not valid. The message names the flag.
        """

    def values(self) -> dict[str, Any]:
        """Return all settings as a dictionary."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    def get_resume_fingerprint(self, with_best_weights: bool) -> dict[str, Any]:
        """Return the settings that must not change when a run resumes, as JSON values.

        Args:
            with_best_weights: Whether the run keeps its best weights.
        """
        kinds = {ALWAYS_COMPARED, WITH_BEST_WEIGHTS} if with_best_weights else {ALWAYS_COMPARED}
        shared = [item.name for item in dataclasses.fields(self) if item.metadata.get("resume") in kinds]
        return {name: json.loads(json.dumps(getattr(self, name))) for name in shared}


def get_field_types(annotation: Any) -> list[Any]:
    """List the types in a type annotation, without None."""
    types = get_args(annotation) if get_origin(annotation) in (UnionType, Union) else (annotation,)
    return [kind for kind in types if kind is not NoneType]


def _check_value(
    name: str,
    value: Any,
    range: Range | None = None,
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None,
    **metadata: Any,
) -> None:
    """Check that a value is within the range and the choices of its field."""
    if range is not None and not range[1](value):
        raise ValueError(f"--{name} must be {range[0]}, got {value}.")
    known = choices() if callable(choices) else choices
    for item in value if isinstance(value, tuple) else (value,):
        if known is not None and item not in known:
            raise ValueError(f"--{name} must be one of {', '.join(known)}, got {item!r}.")


def _convert_type(value: Any, annotation: Any) -> Any:
    """Convert a value to the type of its field.

    Paths are converted to text. If the field is a tuple, text and lists are converted to tuples.
    """
    if isinstance(value, PathLike):
        value = fspath(value)
    if any(get_origin(kind) is tuple for kind in get_field_types(annotation)) and isinstance(value, list | str):
        return (value,) if isinstance(value, str) else tuple(value)
    return value


def group_fields(settings_class: type[Settings]) -> Iterator[tuple[str, list[dataclasses.Field]]]:
    """Yield the title and the fields of each group of settings, starting with the group of the class itself.

    A field belongs to the most general class that declares it, which is the last such class in the method resolution
    order.
    """
    fields = {item.name: item for item in dataclasses.fields(settings_class)}
    classes = [base for base in settings_class.__mro__ if issubclass(base, Settings)]
    owners = {name: base for base in classes for name in inspect.get_annotations(base)}
    groups: dict[str, list[dataclasses.Field]] = {}
    for base in classes:
        for name in inspect.get_annotations(base):
            if owners[name] is base and name in fields:
                groups.setdefault(base.title, []).append(fields[name])
    yield from groups.items()


def check_metric_for_best_model(name: str | None, known_metrics: Sequence[str]) -> None:
    """Check that `--metric_for_best_model`, if set, is a dev metric of the task.

    Args:
        name: The metric, with or without the "eval_" prefix, or None.
        known_metrics: The dev metrics, without the "eval_" prefix.

    Raises:
        ValueError: If the metric is unknown.
    """
    if name is not None and name.removeprefix("eval_") not in known_metrics:
        raise ValueError(f"--metric_for_best_model must be one of {', '.join(known_metrics)}, got {name!r}.")


FROM_SCRATCH = "from scratch (without --model_name_or_path)"
# The types of settings for variant fields that are lists or dictionaries. Settings that are not set are None.
SETTING_TYPES: Any = {list: tuple[str, ...] | None, tuple: tuple[float, ...] | None, dict: dict[str, Any] | None}
SettingsClass = TypeVar("SettingsClass", bound=Settings)


def _add_variant_fields(prefixes: tuple[str, ...]) -> Callable[[type[SettingsClass]], type[SettingsClass]]:
    """Return a class decorator that adds an option for each combination of a variant field and a supported prefix."""

    def add_fields(settings: type[SettingsClass]) -> type[SettingsClass]:
        fields = [(prefix, row) for row in VARIANT_FIELDS for prefix in prefixes if prefix in row.prefixes]
        types = {prefix + row.name: SETTING_TYPES.get(row.kind, row.kind | None) for prefix, row in fields}
        settings.__annotations__ = {**settings.__annotations__, **types}
        for prefix, row in fields:
            setattr(settings, prefix + row.name, _make_variant_option(prefix, row))
        return dataclass(frozen=True, kw_only=True)(settings)

    return add_fields


def _make_variant_option(prefix: str, variant_field: VariantField) -> Any:
    """Create the option for a variant field. It defaults to None, so that the default of the configuration is used."""
    text = describe_field(prefix + variant_field.name)
    if "_" not in text.split(":")[0]:  # a text that starts with the name of a pattern is not capitalized
        text = f"{text[0].upper()}{text[1:]}"
    default = variant_field.get_default(prefix)
    default_text = "" if default in (None, (), False) else f" (default: {default})"
    # Plugins add choices after this module is imported.
    flag: dict[str, Any] = {"choices": partial(variant_field.get_choices, prefix)} if variant_field.choices else {}
    if variant_field.kind is dict:
        flag |= {"metavar": "JSON", "type": parse_json_flag}
    if variant_field.kind is list and prefix and variant_field.inherits:
        flag |= {"nargs": "*"}
    return fixed_option(f"{text}{default_text}.", None, **flag)


def collect_variant_fields(settings: Any) -> dict[str, Any]:
    """Collect the variant fields that are set in the settings, as a dictionary from names to values."""
    values = {name: getattr(settings, name, None) for row in VARIANT_FIELDS for name in row.names}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}


@_add_variant_fields(("",))
class VariantSettings(Settings):
    """Settings for the variant fields that all new models support."""

    title: ClassVar[str] = FROM_SCRATCH


@_add_variant_fields(("encoder_", "cross_"))
class EncoderDecoderVariantSettings(Settings):
    """Settings for the variant fields of the encoder and the cross-attention in an encoder-decoder model."""

    title: ClassVar[str] = FROM_SCRATCH


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Settings for the checkpoint to train and the way in which it is loaded."""

    title: ClassVar[str] = "model"

    model_name_or_path: str | None = fixed_option(
        "Folder or Hub id of a checkpoint from this package or from Transformers.", None
    )
    tokenizer_name: str | None = fixed_option(
        "Folder or Hub id of the tokenizer, if it is not in the checkpoint.", None
    )
    # Each implementation uses random numbers for dropout differently.
    attn_implementation: str | None = fixed_option("Attention implementation (eager, sdpa, ...).", None)
    dropout_rate: float | None = fixed_option(
        "Replace every dropout probability in the checkpoint's configuration.", None, range=FROM_0_BELOW_1
    )
    gradient_checkpointing: bool = option("Recompute activations in the backward pass to save memory.", False)
    trust_remote_code: bool = option("Allow model code from the Hub repository to run.", False)

    @property
    def source(self) -> str:
        """The folder or Hub id of the checkpoint. It must not be used if the model is trained from scratch."""
        source: Any = self.model_name_or_path
        return source

    def check(self) -> None:
        super().check()
        if self.model_name_or_path is None and not isinstance(self, NewModelSettings):
            raise ValueError("--model_name_or_path is required. Set it to the folder or Hub id of a checkpoint.")


@dataclass(frozen=True, kw_only=True)
class NewModelSettings(VariantSettings, ModelSettings):
    """Settings for a checkpoint or for a model that is trained from scratch (see `models.make_new_config`)."""

    title: ClassVar[str] = FROM_SCRATCH

    model_type: str | None = fixed_option("Model type of the architecture.", None)
    config_overrides: str | None = fixed_option(
        "Configuration fields that differ from the architecture's defaults. Values are JSON or plain text. Values "
        "with commas must be JSON. The whole argument can also be a JSON object.",
        None,
        metavar="FIELD=VALUE,...",
    )

    def check(self) -> None:
        super().check()
        if self.model_name_or_path is None:
            if self.model_type is None or self.tokenizer_name is None:
                raise ValueError(
                    "Pass either --model_name_or_path or both --model_type and --tokenizer_name for a new model."
                )
            return
        model_flags = [name for name in ("model_type", "config_overrides") if getattr(self, name) is not None]
        if flags := [*model_flags, *collect_variant_fields(self)]:
            raise ValueError(
                f"--{flags[0]} is only supported for a model from scratch, got --model_name_or_path "
                f"{self.model_name_or_path}. Use `attn-variants convert` to convert a checkpoint to a variant."
            )


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(Settings):
    """Settings for the languages of a multilingual encoder-decoder model (see `model_properties.set_languages`)."""

    title: ClassVar[str] = "languages (mBART, M2M100, NLLB)"

    source_lang: str | None = fixed_option(
        "Language of the source texts, in the tokenizer's notation (en_XX, en, eng_Latn).", None
    )
    target_lang: str | None = fixed_option("Language of the target texts.", None)
    forced_bos_token: str | None = fixed_option(
        "Language token that generation starts with (default: the target language, if target texts start with it).",
        None,
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """Settings for creating batches from examples."""

    title: ClassVar[str] = "data"

    max_length: int = fixed_option("Number of tokens per example, including special tokens.", 128, range=AT_LEAST_1)
    max_eval_samples: int | None = dev_option("Use only the first N rows of each dev split.", None, range=AT_LEAST_1)
    per_device_train_batch_size: int = fixed_option(
        "Number of examples per device and forward pass in training.", 32, range=AT_LEAST_1
    )
    per_device_eval_batch_size: int = option(
        "Number of examples per device and forward pass in evaluation.", 64, range=AT_LEAST_1
    )
    dataloader_num_workers: int = option(
        "Number of processes that prepare batches (0: only the main process).", 0, range=AT_LEAST_0
    )


@dataclass(frozen=True, kw_only=True)
class RowSettings(DataSettings):
    """Data settings for examples that are rows with different lengths instead of blocks from a text stream."""

    max_length: int = override_option(
        help="Maximum number of tokens per example, including special tokens. Longer examples are truncated."
    )
    max_train_samples: int | None = option("Use only the first N training rows.", None, range=AT_LEAST_1)
    group_by_length: bool = fixed_option(
        "Group examples of similar length into batches to reduce padding. The batches are still shuffled.", False
    )
    pad_to_multiple_of: int | None = fixed_option(
        "Pad each batch to a multiple of N tokens (8 is efficient on tensor cores).", None, range=AT_LEAST_1
    )


# The schedules in Transformers, except those that require a metric at every step.
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
    """Parse the value of `--checkpointing_steps`, which `OutputSettings.check` validates later."""
    return int(text) if text.isdigit() else text


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings(Settings):
    """Settings for the optimizer, the schedule and the length of training."""

    title: ClassVar[str] = "training"

    optim: str = fixed_option(
        "Optimizer to use. Adafactor stores row and column statistics instead of two moments per weight.",
        "adamw",
        choices=("adamw", "adafactor"),
    )
    learning_rate: float = fixed_option("Peak learning rate.", 5e-5, range=AT_LEAST_0)
    weight_decay: float = fixed_option(
        "Decoupled weight decay. It is not applied to biases, norms, logits_proj and weights_proj.",
        0.0,
        range=AT_LEAST_0,
    )
    adam_beta1: float = fixed_option("AdamW's decay rate for the mean of the gradients.", 0.9, range=FROM_0_BELOW_1)
    adam_beta2: float = fixed_option(
        "AdamW's decay rate for the mean of the squared gradients.", 0.999, range=FROM_0_BELOW_1
    )
    adam_epsilon: float = fixed_option("Constant in AdamW's denominator.", 1e-8, range=AT_LEAST_0)
    adafactor_scale_parameter: bool = fixed_option(
        "Scale Adafactor's steps by the root mean square of each parameter (as in T5's pretraining, with rate 1e-2).",
        False,
    )
    adafactor_relative_step: bool = fixed_option(
        "Use Adafactor's schedule, min(1e-6 step, 1/sqrt(step)), instead of a learning rate, schedule and warm-up.",
        False,
    )
    max_grad_norm: float = option(
        "Maximum gradient norm, above which gradients are clipped (0: no clipping).", 1.0, range=AT_LEAST_0
    )
    num_train_epochs: float | None = option("Number of training epochs (0: only evaluate).", 3.0, range=AT_LEAST_0)
    max_train_steps: int | None = option(
        "Total number of optimizer steps. Overrides --num_train_epochs.", None, range=AT_LEAST_1
    )
    max_train_minutes: float | None = option(
        "Stop training after N minutes and save a checkpoint. A resumed run has the full time again.",
        None,
        range=ABOVE_0,
    )
    gradient_accumulation_steps: int = option(
        "Number of forward passes per optimizer step. The loss is averaged over all their examples.",
        1,
        range=AT_LEAST_1,
    )
    lr_scheduler_type: str = fixed_option(
        f"Learning-rate schedule: one of {', '.join(SCHEDULES)}.", "linear", choices=SCHEDULES, metavar="NAME"
    )
    lr_scheduler_kwargs: dict[str, Any] = fixed_option(  # noqa: RUF009 (each object gets its own dictionary)
        "Additional arguments for the schedule, such as '{\"num_decay_steps\": 100}'.",
        {},
        metavar="JSON",
        type=parse_json_flag,
    )
    num_warmup_steps: int | None = option(
        "Number of steps over which the learning rate increases from 0.", None, range=AT_LEAST_0
    )
    warmup_ratio: float = option("Share of all steps that is used for warm-up.", 0.0, range=FROM_0_BELOW_1)
    clipping_ratio: float | None = fixed_option(
        "Share of all steps over which a clipped softmax is introduced.", None, range=BETWEEN_0_AND_1
    )
    seed: int = fixed_option("Random seed for new weights, dropout and the order of examples.", 42, range=SEED)
    mixed_precision: str | None = option(
        "Precision of the forward pass (autocast). On CPUs, bf16 is only faster if the CPU has bfloat16 instructions. "
        "Defaults to the setting of `accelerate launch`, or no.",
        None,
        choices=("no", "bf16", "fp16"),
    )
    cpu: bool = option("Train on the CPU even if an accelerator is available.", False)
    eval_steps: int | None = dev_option(
        "Evaluate every N optimizer steps (default: after every epoch).", None, range=AT_LEAST_1
    )
    metric_for_best_model: str | None = option(
        "Dev metric that selects the best evaluation. Its weights are kept instead of the last ones.", None
    )
    greater_is_better: bool | None = dev_option(
        "True if higher values of that metric are better (default: yes, unless the metric is a loss or an error).",
        None,
        action=argparse.BooleanOptionalAction,
    )
    early_stopping_patience: int | None = option(
        "Stop after N evaluations without an improvement in the dev metric, and keep the best weights.",
        None,
        range=AT_LEAST_1,
    )

    @property
    def only_evaluates(self) -> bool:
        """True if the run has no training steps (`num_train_epochs` is 0 and `max_train_steps` is not set)."""
        return self.max_train_steps is None and self.num_train_epochs == 0

    @property
    def keeps_best_weights(self) -> bool:
        """True if the run ends with the weights of its best evaluation."""
        return self.metric_for_best_model is not None or self.early_stopping_patience is not None

    def check(self) -> None:
        super().check()
        has_warmup = bool(self.num_warmup_steps or self.warmup_ratio)
        # Transformers would silently ignore the warm-up and the arguments.
        if self.lr_scheduler_type == "constant" and has_warmup:
            raise ValueError(
                "--lr_scheduler_type constant does not support warm-up. Use constant_with_warmup instead."
            )
        if self.lr_scheduler_type in ("constant", "constant_with_warmup") and self.lr_scheduler_kwargs:
            raise ValueError(
                f"--lr_scheduler_type {self.lr_scheduler_type} does not support --lr_scheduler_kwargs. Remove it."
            )


@dataclass(frozen=True, kw_only=True)
class OutputSettings(Settings):
    """Settings for the output folder, logging and resuming."""

    title: ClassVar[str] = "output"

    output_dir: str = option("Folder for the model, the results and the checkpoints.")
    overwrite_output_dir: bool = option(
        "Use the output folder even if it is not empty. Checkpoints, the log and the results of an earlier run are "
        "removed once the data and the model of the new run have been loaded. README.md is also removed, unless the "
        "run starts from the model in this folder.",
        False,
    )
    logging_steps: int = option("Log the mean loss every N steps.", 10, range=AT_LEAST_1)
    peak_tflops: float | None = option(
        "Peak TFLOPS of a device in this precision, from its data sheet (H100 with bf16: 989). If set, the results "
        "contain train_mfu.",
        None,
        range=ABOVE_0,
    )
    checkpointing_steps: int | str | None = option(
        "Save a checkpoint every N steps or after every epoch.", None, metavar="N|epoch", type=_parse_steps_or_epoch
    )
    save_total_limit: int | None = option(
        "Keep only the last N checkpoints (default: all). Each of them contains the weights and the optimizer state.",
        None,
        range=AT_LEAST_1,
    )
    resume_from_checkpoint: str | None = option(
        "Continue exactly from a checkpoint. The value latest selects the newest complete one in --output_dir. A "
        "checkpoint from another folder requires an empty --output_dir.",
        None,
        metavar="PATH|latest",
    )
    with_tracking: bool = option("Log to TensorBoard, or to the trackers set with --report_to.", False)
    report_to: str | None = option(
        "Tracker to log to: tensorboard, wandb, trackio, ..., all or none (default: none, unless --with_tracking).",
        None,
    )
    disable_tqdm: bool = option("Do not show progress bars.", False)

    @property
    def tracker(self) -> str | None:
        """The name of the tracker that the run logs to, "all", or None."""
        if self.report_to is None:
            return "tensorboard" if self.with_tracking else None
        return None if self.report_to == "none" else self.report_to

    def check(self) -> None:
        super().check()
        steps = self.checkpointing_steps
        if steps not in (None, "epoch") and not (isinstance(steps, int) and steps >= 1):
            raise ValueError(f"--checkpointing_steps must be a positive number or 'epoch', got {steps!r}.")
        if self.resume_from_checkpoint and self.overwrite_output_dir:
            raise ValueError(
                "--resume_from_checkpoint and --overwrite_output_dir cannot be combined. Remove one of them."
            )


@dataclass(frozen=True, kw_only=True)
class HubSettings(Settings):
    """Settings for pushing the trained model to the Hub. They do not apply to functions such as `fine_tune`."""

    title: ClassVar[str] = "hub"

    push_to_hub: bool = option("Push the final model to the Hub.", False)
    hub_model_id: str | None = option(
        "Name of the repository, as user/name (default: your account and the name of --output_dir).", None
    )
    hub_private_repo: bool = option("Make the repository private.", False)
    hub_token: str | None = option("Access token to use instead of the one stored by `hf auth login`.", None)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ModelSettings, DataSettings, OptimizationSettings, OutputSettings, HubSettings):
    """Settings shared by all training commands."""


@dataclass(frozen=True, kw_only=True)
class FineTuningSettings(TrainingSettings, RowSettings):
    """Settings shared by all training commands whose examples are rows."""

    max_length: int = override_option()  # without this, the dataclass would use the field from its first base class


def get_warmup_steps(settings: OptimizationSettings, total_steps: int) -> int:
    """Return the number of warm-up steps.

    This is the value of `--num_warmup_steps` if it is set. Otherwise, it is the number of steps multiplied by
    `--warmup_ratio`, rounded up.

    Raises:
        ValueError: If the number of warm-up steps exceeds the number of steps in the run.
    """
    warmup = settings.num_warmup_steps
    if warmup is None:
        warmup = math.ceil(settings.warmup_ratio * total_steps)
    if total_steps == 0:  # a run that only evaluates
        return 0
    if warmup > total_steps:
        raise ValueError(
            f"--num_warmup_steps must be at most {total_steps}, the number of steps in the run, got {warmup}."
        )
    return warmup


# Dev metrics that decrease as a model improves. All other metrics increase.
DECREASING_METRICS = re.compile(
    r"(\w+_)?(loss|perplexity|ppl|nll|cross_entropy|brier|[wctm]er|wil|r?mse|s?mape|mae|mase|error|distance|divergence)"
    r"(_mm|_rate|_score)?",
    re.IGNORECASE,
)


def is_greater_better(metric: str) -> bool:
    """Return whether higher values of a dev metric are better. The name must not contain the "eval_" prefix."""
    return DECREASING_METRICS.fullmatch(metric) is None


def count_training_steps(
    batches_per_epoch: int | None, gradient_accumulation_steps: int, epochs: float | None, max_steps: int | None
) -> int:
    """Return the number of optimizer steps in a run.

    Args:
        batches_per_epoch: The number of batches per process and epoch, or None for a stream of unknown length.
        gradient_accumulation_steps: The number of batches per step. The last step in an epoch can have fewer batches.
        epochs: The number of epochs, which can be a fraction.
        max_steps: The number of steps, which takes precedence over `epochs`.

    Raises:
        ValueError: If the length of an epoch is unknown and `max_steps` is None.
    """
    if max_steps is not None:
        return max_steps
    if epochs == 0:
        return 0
    if batches_per_epoch is None or epochs is None:
        raise ValueError("--max_train_steps is required because the length of the training data is unknown.")
    return math.ceil(epochs * math.ceil(batches_per_epoch / gradient_accumulation_steps))


def check_dev_settings(settings: TrainingSettings, has_dev_rows: bool) -> None:
    """Check that dev rows exist if a setting requires them.

    Raises:
        ValueError: If a setting requires dev rows that do not exist.
    """
    for name in ("metric_for_best_model", "early_stopping_patience", "eval_steps") if not has_dev_rows else ():
        if getattr(settings, name) is not None:
            raise ValueError(f"--{name} requires dev rows. Set --validation_file, or use a dataset with a dev split.")


@dataclass(frozen=True, kw_only=True)
class TableSettings(FineTuningSettings):
    """Settings for training on tables or on a dataset from the `datasets` library."""

    title: ClassVar[str] = "tables"

    train_file: tuple[str, ...] | None = option(
        "Training tables (.csv, .tsv, .json or .jsonl, with or without .gz).", None
    )
    validation_file: tuple[str, ...] | None = dev_option("Dev tables, in the formats of --train_file.", None)
    test_file: tuple[str, ...] | None = option("Tables with test rows to predict, with or without labels.", None)
    dataset_name: str | None = option("Folder or Hub id of a `datasets` source to use instead of files.", None)
    dataset_config_name: str | None = option("Configuration of the `datasets` source.", None)
    train_split_name: str = option("Training split of the `datasets` source (default: %(default)s).", "train")
    validation_split_name: str | None = dev_option(
        "Dev split of the `datasets` source (default: validation, if it exists).", None
    )
    test_split_name: str | None = option("Test split of the `datasets` source (default: test, if it exists).", None)
    skip_predict: bool = option("Skip the predictions for the test rows.", False)

    def check(self) -> None:
        super().check()
        files = {split: getattr(self, f"{split}_file") for split in ("train", "validation", "test")}
        if any(files.values()) == (self.dataset_name is not None):
            invalid_value = "both" if self.dataset_name is not None else "neither"
            raise ValueError(
                f"Set either table files (--train_file, --validation_file, --test_file) or --dataset_name, "
                f"got {invalid_value}."
            )
        if self.dataset_name is None:
            if not self.only_evaluates and not files["train"]:
                raise ValueError("--train_file is required for training. To only evaluate, set --num_train_epochs 0.")
            check_dev_settings(self, bool(files["validation"]))
