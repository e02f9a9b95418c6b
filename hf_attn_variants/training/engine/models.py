"""Loads the configuration and the model to train from any checkpoint, ours or upstream's."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from ...conversion.checkpoint.models import reading_checkpoint
from ...conversion.checkpoint.source import check_source
from ...modeling.fields.field_checks import check_buckets
from ...registration import FORMER_NAMES, PREFIX, variant_model_class
from .settings import ModelSettings, NewModelSettings, OutputSettings, TrainingSettings

__all__ = [
    "LabelMap",
    "check_trained_head",
    "enable_gradient_checkpointing",
    "load_classifier",
    "load_config",
    "load_model",
    "load_model_and_rest",
    "model_name",
    "resolve_architecture",
    "set_dropout",
]

logger = logging.getLogger(__name__)
# Every dropout probability of the architectures here; a classifier's None means "as the hidden layers".
DROPOUT_FIELDS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "classifier_dropout_prob",
    "dropout_rate",
    "dropout",
    "attention_dropout",
    "activation_dropout",
)


@dataclass(frozen=True)
class LabelMap:
    """How a model's outputs are numbered: output i is the task's class `to_task[i]`."""

    to_task: tuple[int, ...]

    @property
    def to_model(self) -> tuple[int, ...]:
        return tuple(self.to_task.index(i) for i in range(len(self.to_task)))


def set_dropout(config: PreTrainedConfig, rate: float) -> None:
    """Set every dropout probability of a config.

    Raises:
        ValueError: if the config has none.
    """
    present = [name for name in DROPOUT_FIELDS if hasattr(config, name)]
    if not present:
        raise ValueError(f"--dropout_rate: {type(config).__name__} has no dropout to set")
    for name in present:
        setattr(config, name, rate)


def load_config(settings: ModelSettings) -> PreTrainedConfig:
    """Read a checkpoint's config and apply `dropout_rate`.

    Raises:
        OSError: if there is none.
        ValueError: if it cannot be used, is an adapter or has its weights in pickles, or has no dropout to set.
    """
    with reading_checkpoint(settings.source) as source:
        check_source(source)
        config = AutoConfig.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
    if hasattr(config, "num_mel_bins"):
        raise ValueError(f"{settings.model_name_or_path} ({config.model_type}) reads audio; this command reads text.")
    if hasattr(config, "relative_attention_max_distance"):
        check_buckets(config)
    if settings.dropout_rate is not None:
        set_dropout(config, settings.dropout_rate)
    return config


def check_trained_head(settings: TrainingSettings, config: PreTrainedConfig, head: str, does: str) -> None:
    """Check that a run which only evaluates has a model whose head was trained.

    Args:
        settings: of the run.
        config: of the model.
        head: how its class is called: "ForTokenClassification".
        does: what such a model does, for the message.

    Raises:
        ValueError: if the checkpoint was saved as another class: its head would be random.
    """
    if settings.only_evaluates and not any(head in each for each in config.architectures or []):
        saved = ", ".join(config.architectures or []) or "no class"
        name = settings.model_name_or_path
        raise ValueError(f"--num_train_epochs 0 needs a model that {does}; {name} was saved as {saved}")


def load_classifier(
    settings: ModelSettings,
    config: PreTrainedConfig,
    labels: Sequence[str] | None,
    model_class: type[Any],
    problem_type: Any = None,
) -> tuple[PreTrainedModel, LabelMap]:
    """Load a checkpoint as a classifier of texts or of tokens (or, without labels, as a regressor) in float32.

    The config gets the labels' names and, for texts, the problem type. Return the model, and how its outputs are
    numbered: a checkpoint trained on the same class names in another order keeps its own.

    Raises:
        OSError: if the checkpoint cannot be read.
        ValueError: if it does not fit its config, or the machine not `attn_implementation`.
    """
    names = list(labels) if labels is not None else ["score"]
    numbered: Any = config.id2label or {}
    had = [str(numbered[i]) for i in sorted(numbered)]
    kind = model_class.__name__.removeprefix("AutoModel")
    is_classifier = any(kind in name for name in config.architectures or [])
    replaced = is_classifier and len(had) != len(names)
    if replaced and isinstance(settings, TrainingSettings) and settings.only_evaluates:
        raise ValueError(
            f"--num_train_epochs 0: {settings.model_name_or_path} classifies {len(had)} labels "
            f"({', '.join(had).lower()}) and the task has {len(names)}: its output layer would be a new, random one"
        )
    if replaced and not _is_resumed(settings):
        logger.warning(
            "%s classifies %d labels (%s) and the task has %d: its output layer is replaced by a new one",
            settings.model_name_or_path,
            len(had),
            ", ".join(had).lower(),
            len(names),
        )
    order = tuple(range(len(names)))
    # Case counts where it tells labels apart.
    case = str.lower if len({name.lower() for name in names}) == len(names) else str
    if is_classifier and not replaced and sorted(map(case, had)) == sorted(map(case, names)):
        order = tuple([case(name) for name in names].index(case(name)) for name in had)
    elif is_classifier and not replaced and labels is not None and not _is_resumed(settings):
        _warn_of_other_names(settings, had, names)
    config.id2label = {i: names[task_id] for i, task_id in enumerate(order)}
    config.label2id = {name: i for i, name in config.id2label.items()}
    if model_class is AutoModelForSequenceClassification:
        config.problem_type = problem_type
    return load_model(settings, config, model_class, ignore_mismatched_sizes=replaced), LabelMap(order)


def _warn_of_other_names(settings: ModelSettings, had: Sequence[str], names: Sequence[str]) -> None:
    """Say that a classifier's labels are not called as the task's, unless they have no names but transformers' own."""
    if [*had] == [f"LABEL_{i}" for i in range(len(had))]:
        return
    pairs = [f"{one!r:.40} as {other!r:.40}" for one, other in zip(had, names, strict=True)]
    more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
    message = "%s has other names for its labels than the task, and they are taken in their order: %s%s"
    logger.warning(message, settings.model_name_or_path, ", ".join(pairs[:8]), more)


def load_model(
    settings: ModelSettings, config: PreTrainedConfig, model_class: type[Any], **options: Any
) -> PreTrainedModel:
    """Load a checkpoint in float32; arguments and errors as for `load_model_and_rest`."""
    return load_model_and_rest(settings, config, model_class, **options)[0]


def load_model_and_rest(
    settings: ModelSettings, config: PreTrainedConfig, model_class: type[Any], needs_all: bool = False, **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """Load a checkpoint in float32, with `options` of `from_pretrained`.

    Return the model, and the names of the checkpoint's tensors for which it has no place.

    Args:
        needs_all: whether the checkpoint must have every weight, as that of a language model must in any case.

    Raises:
        OSError: if the checkpoint cannot be read.
        ValueError: if it does not fit its config, the machine not `attn_implementation`, or it lacks weights.
    """
    with _quiet_report(settings), reading_checkpoint(settings.source) as source:
        model, report = model_class.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,  # the optimiser's master weights; --mixed_precision casts for the forward pass
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
            output_loading_info=True,
            use_safetensors=True,
            **options,
        )
    missing = sorted(report["missing_keys"])
    if missing and (needs_all or model_class in (AutoModelForMaskedLM, AutoModelForSeq2SeqLM)):
        saved = ", ".join(config.architectures or []) or "no class"
        raise ValueError(
            f"{settings.model_name_or_path} is no {type(model).__name__}: it lacks {len(missing)} of its tensors, "
            f"such as {missing[0]} (its config.json names {saved}; whatever the head, `attn-variants uptrain "
            "--objective distill` trains it on)"
        )
    _check_weights(model, settings.model_name_or_path)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model, sorted(report["unexpected_keys"])


def _check_weights(model: PreTrainedModel, name: str | None) -> None:
    """Check that no weight is NaN: a search would write the vocabulary's first words, and score them."""
    # A sum is fast, and NaN where a term is; of huge numbers it may be NaN, too.
    with torch.no_grad():
        suspects = {key: tensor for key, tensor in model.named_parameters() if tensor.sum().isnan()}
        bad = [key for key, tensor in suspects.items() if tensor.isnan().any()]
    if bad:
        raise ValueError(f"{name} has NaN in {len(bad)} of its tensors, such as {bad[0]}: it was damaged, or diverged")


def _is_resumed(settings: ModelSettings) -> bool:
    return isinstance(settings, OutputSettings) and bool(settings.resume_from_checkpoint)


@contextmanager
def _quiet_report(settings: ModelSettings) -> Iterator[None]:
    # Of a run that goes on, the training's checkpoint has every weight: what the model lacks is not new.
    log = logging.getLogger("transformers.modeling_utils")
    level = log.level
    if _is_resumed(settings):
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Make a model recompute activations in the backward pass."""
    # 5.23 renamed it; the old name is all that 5.15 has.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def resolve_architecture(source: str, config: PreTrainedConfig) -> type:
    """Find the class that a checkpoint was saved from, ours or upstream's.

    Raises:
        ValueError: if its config names none that is known.
    """
    names = config.architectures or []
    if not names:
        return AutoModel
    if names[0].startswith(PREFIX):
        return variant_model_class(names[0])
    found = getattr(transformers, FORMER_NAMES.get(names[0], names[0]), None)
    if found is None:
        raise ValueError(f"{source}: transformers has no architecture {names[0]!r}, which its config.json names")
    return found


def model_name(settings: ModelSettings) -> str:
    """Return what the model that a run begins with is called above its curves."""
    if settings.model_name_or_path is not None:
        return Path(settings.model_name_or_path).name
    return f"new {settings.model_type}" if isinstance(settings, NewModelSettings) else "new"
