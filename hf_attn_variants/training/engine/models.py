"""Loading the model to train from a checkpoint, building a new one, and choosing the parameters that are trained."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ...command_line import nearest_name
from ...conversion.checkpoint.models import reading_checkpoint
from ...conversion.checkpoint.source import check_source
from ...modeling.attention import attention_sites
from ...modeling.attention.attention_sites import AttentionSite
from ...modeling.fields.field_checks import check_buckets
from ...modeling.fields.given_fields import wrong_name
from ...registration import FORMER_NAMES, PREFIX, variant_config_class, variant_model_class
from .settings import ModelSettings, NewModelSettings, OutputSettings, TrainingSettings, collect_variant_fields
from .tokenizers import get_vocabulary_size, load_tokenizer

__all__ = [
    "LabelMap",
    "add_lora",
    "check_end_token",
    "check_new_model",
    "check_trained_head",
    "enable_gradient_checkpointing",
    "freeze_unused",
    "get_model_name",
    "iterate_attentions",
    "load_classifier",
    "load_config",
    "load_model",
    "load_model_and_unexpected_keys",
    "load_or_make_config",
    "load_or_make_model",
    "load_seq2seq_config",
    "make_new_config",
    "parse_overrides",
    "resolve_architecture",
    "select_trainable",
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
        _warn_about_label_names(settings, had, names)
    config.id2label = {i: names[task_id] for i, task_id in enumerate(order)}
    config.label2id = {name: i for i, name in config.id2label.items()}
    if model_class is AutoModelForSequenceClassification:
        config.problem_type = problem_type
    return load_model(settings, config, model_class, ignore_mismatched_sizes=replaced), LabelMap(order)


def _warn_about_label_names(settings: ModelSettings, had: Sequence[str], names: Sequence[str]) -> None:
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
    """Load a checkpoint in float32; arguments and errors as for `load_model_and_unexpected_keys`."""
    return load_model_and_unexpected_keys(settings, config, model_class, **options)[0]


def load_model_and_unexpected_keys(
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
    with _silence_loading_report(settings), reading_checkpoint(settings.source) as source:
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
def _silence_loading_report(settings: ModelSettings) -> Iterator[None]:
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


def get_model_name(settings: ModelSettings) -> str:
    """Return what the model that a run begins with is called above its curves."""
    if settings.model_name_or_path is not None:
        return Path(settings.model_name_or_path).name
    return f"new {settings.model_type}" if isinstance(settings, NewModelSettings) else "new"


# In `--config_overrides`, a comma before the next field or at the end.
OVERRIDE_SEPARATOR = re.compile(r",(?=[\s,]*(?:\w+\s*=|$))")
# As plain text these would be true in a condition.
PYTHON_CONSTANTS = ("True", "False", "None")


def load_or_make_config(settings: NewModelSettings) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Return the config of the checkpoint, or of the model from scratch that the settings describe; and the tokenizer.

    Raises:
        OSError: if the checkpoint or the tokenizer is not there.
        ValueError: if one cannot be used, they do not fit, or a field of the new config is wrong.
    """
    if settings.model_name_or_path is not None:
        config = load_config(settings)
        return config, load_tokenizer(settings, config)
    tokenizer = load_tokenizer(settings, None)
    return make_new_config(settings, tokenizer), tokenizer


def load_seq2seq_config(settings: NewModelSettings) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Do as `load_or_make_config`, with errors as there; a new model gets the special tokens of an encoder-decoder."""
    if settings.model_name_or_path is not None:
        return load_or_make_config(settings)
    tokenizer = load_tokenizer(settings, None)
    return make_new_config(settings, tokenizer, _make_seq2seq_tokens(settings, tokenizer)), tokenizer


def _make_seq2seq_tokens(settings: NewModelSettings, tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the special tokens of an encoder-decoder's config: no [CLS] and [SEP], and what its decoder starts with.

    That is the end token, where the architecture's own checkpoints start so (BART), else padding (T5, Marian).
    """
    model_type: Any = settings.model_type
    default, end = AutoConfig.for_model(model_type), tokenizer.eos_token_id
    starts_with_end = getattr(default, "decoder_start_token_id", None) == default.eos_token_id
    tokens = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end,
        "decoder_start_token_id": end if starts_with_end else tokenizer.pad_token_id,
    }
    # What generation ends with where a text would be too long.
    return tokens | ({"forced_eos_token_id": end} if getattr(default, "forced_eos_token_id", None) is not None else {})


def check_end_token(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError unless a tokenizer, its languages set, closes each target by its end token."""
    end = tokenizer.eos_token_id
    # mBART's first version puts the language behind it.
    if end is None or end not in tokenizer(text_target="a")["input_ids"][-2:]:
        raise ValueError(
            f"the tokenizer of {settings.tokenizer_name or settings.model_name_or_path} ends no text in an end token "
            f"({'it has none' if end is None else repr(tokenizer.eos_token)}): generation would not learn to stop. "
            "Give one that does with --tokenizer_name, or set its eos_token and a post-processor that appends it"
        )


def make_new_config(
    settings: NewModelSettings, tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """Make the config of a model from scratch: upstream's class, or ours where a variant is asked for.

    Args:
        settings: which; its `config_overrides` are the last word.
        tokenizer: the model's.
        tokens: special tokens that are others than an encoder's.

    Raises:
        ValueError: if a field is unknown, or a value breaks a rule.
    """
    model_type: Any = settings.model_type  # given, where there is no checkpoint
    variant_class = variant_config_class(model_type)
    variant, overrides = collect_variant_fields(settings), parse_overrides(settings.config_overrides or "")
    known = variant_class.variant_fields()
    if unknown := [name for name in variant if name not in known]:
        raise ValueError(f"--{unknown[0]} is of encoder-decoders, or of cross-attention; {model_type} has none")
    if twice := [name for name in variant if name in overrides]:
        raise ValueError(f"`{twice[0]}` is given by --{twice[0]} and by --config_overrides: leave one out")
    is_variant = variant or known.keys() & overrides.keys()
    default = variant_class() if is_variant else AutoConfig.for_model(model_type)
    _check_override_names(overrides, default, variant_class)
    fields = {
        "vocab_size": get_vocabulary_size(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        **(tokens or {}),
        **overrides,
    }
    try:
        config = type(default)(**fields, **variant)
    except ValueError:
        raise
    except Exception as error:  # the configs' own checks have error classes of their own
        raise ValueError(f"--config_overrides {settings.config_overrides}: {' '.join(str(error).split())}") from error
    if config.vocab_size < (size := get_vocabulary_size(tokenizer)):
        raise ValueError(
            f"--config_overrides vocab_size={config.vocab_size}: the tokenizer of {settings.tokenizer_name} has "
            f"{size} tokens, and each needs a row: leave vocab_size out, or give as many"
        )
    if hasattr(config, "relative_attention_max_distance"):
        check_buckets(config)
    if settings.dropout_rate is not None:
        set_dropout(config, settings.dropout_rate)
    return config


def _check_override_names(overrides: dict[str, Any], default: PreTrainedConfig, variant_class: Any) -> None:
    """Raise ValueError for the name of an override that is no field of the configuration."""
    for name in overrides:
        if name not in default.to_dict() and name not in variant_class.variant_fields():
            reason = wrong_name(variant_class, name)
            if reason is None:
                near = nearest_name(name, default.to_dict())
                reason = f"`{name}` is not a field of {type(default).__name__}"
                reason += "" if near is None else f"; did you mean {near}?"
            raise ValueError(f"--config_overrides: {reason}")


def parse_overrides(text: str) -> dict[str, Any]:
    """Return the fields of `--config_overrides` with their values.

    A value is JSON if it can be read as such, otherwise plain text without a comma.

    Args:
        text: "num_layers=2,feed_forward_proj=gated-gelu", 'talking_heads_dynamic=["x2l", "m2l"],num_layers=2' or
            '{"num_layers": 2}'.

    Raises:
        ValueError: if an item is not FIELD=VALUE, a field is given twice, or a value is neither JSON nor plain text.
    """
    if text.lstrip().startswith("{"):
        return _parse_json("the text", text)
    pairs = []
    for item in filter(None, (item.strip(", \n\t") for item in OVERRIDE_SEPARATOR.split(text))):
        name, _, value = (part.strip() for part in item.partition("="))
        if not name or not value:
            raise ValueError(f"--config_overrides: {item!r} is not FIELD=VALUE")
        pairs.append((name, _parse_override(name, value)))
    return _reject_duplicates(pairs)


def _parse_override(name: str, text: str) -> Any:
    if text[0] in '[{"':
        return _parse_json(f"the value of `{name}`", text)
    if "," in text or text in PYTHON_CONSTANTS:
        raise ValueError(f"--config_overrides: `{name}` must be JSON or text without commas, got {text!r}")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parse_json(what: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_reject_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"--config_overrides: {what} is not JSON, as it begins: {error}") from None


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"--config_overrides gives `{twice}` twice")
    return values


def check_new_model(settings: NewModelSettings) -> None:
    """Make the model from scratch that settings describe, without its weights.

    Raises:
        OSError: if the tokenizer is not there.
        ValueError: if the tokenizer cannot be used, or there is no such model.
    """
    config = make_new_config(settings, load_tokenizer(settings, None))
    with torch.device("meta"), _building_model(settings):
        AutoModel.from_config(config)


@contextmanager
def _building_model(settings: NewModelSettings) -> Iterator[None]:
    """Raise ValueError for whatever a model's constructor raises about its configuration."""
    try:
        yield
    except Exception as error:  # an unknown activation is a KeyError, no heads are a ZeroDivisionError
        reason = str(error) if isinstance(error, ValueError | ImportError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot build a new {settings.model_type} model: {reason}") from error


def load_or_make_model(
    settings: NewModelSettings, config: PreTrainedConfig, auto_class: Any, needs_all: bool = False
) -> PreTrainedModel:
    """Load the checkpoint, or make a new model with weights drawn at random, in float32.

    Raises:
        OSError, ValueError: as for `load_model_and_unexpected_keys`, or if the config describes no model.
    """
    if settings.model_name_or_path is not None:
        return load_model(settings, config, auto_class, needs_all=needs_all)
    with _building_model(settings):
        model = auto_class.from_config(config, dtype=torch.float32, attn_implementation=settings.attn_implementation)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def iterate_attentions(model: PreTrainedModel) -> Iterator[tuple[AttentionSite, str, nn.Module]]:
    """Return each attention of a model, ours or upstream's, with its site and its path inside the base model.

    Raises:
        ValueError: if the architecture is none of this package's.
    """
    # FSDP2 makes a class of this prefix for a model it shards.
    variant_class = variant_model_class(type(model).__name__.removeprefix("FSDP"))
    return attention_sites.named_attentions(model, variant_class.attention_sites)


def select_trainable(model: PreTrainedModel, trainable: str) -> None:
    """Give only some parameters `requires_grad`: "attention" those of the attention modules, "lora" none, or "all"."""
    for parameter in model.parameters():
        parameter.requires_grad_(trainable == "all")
    if trainable == "attention":
        for site, path, module in iterate_attentions(model):
            latent = site.latent_map(model.base_model, path)  # one that all layers share is in none of them
            for parameter in (*module.parameters(), *(latent.parameters() if latent is not None else ())):
                parameter.requires_grad_(True)


def add_lora(model: PreTrainedModel, rank: int, alpha: float) -> Any:
    """Add trainable low-rank updates (arXiv:2106.09685) to all projections of every attention, in place.

    The model's parameters are frozen; updates are scaled by alpha / rank. Return peft's model around it, whose
    `merge_and_unload` adds them to the weights.
    """
    from peft import LoraConfig, get_peft_model

    names = {id(module): name for name, module in model.named_modules()}
    maps = []
    for site, path, module in iterate_attentions(model):
        maps += [module.get_submodule(linear) for linear in site.projections.values()]
        latent = site.latent_map(model.base_model, path)
        maps += [] if latent is None else [latent]
    targets = list(dict.fromkeys(names[id(each)] for each in maps))
    factor: Any = alpha  # any number, whatever peft's annotation says
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=factor, target_modules=targets, lora_dropout=0.0))


def freeze_unused(model: nn.Module, loss: Callable[[], Tensor]) -> list[str]:
    """Freeze the trainable parameters that a loss does not depend on (a pooler, a head), and return their names.

    Data-parallel training would wait for their gradients. The model is in evaluation mode: nothing random is drawn.
    """
    loss().backward()
    unused = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    for name in unused:
        model.get_parameter(name).requires_grad_(False)
    model.zero_grad(set_to_none=True)
    return unused
