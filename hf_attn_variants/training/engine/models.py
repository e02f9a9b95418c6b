"""Loads or creates the model to train and its tokenizer, and selects the trainable parameters."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.processors import TemplateProcessing
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

from ...conversion.checkpoint.models import convert_loading_errors, load_checkpoint_tokenizer
from ...conversion.checkpoint.source import check_source
from ...errors import convert_to_value_error
from ...files import parse_json
from ...model_properties import TargetStartTokens, ignore_saved_length_limits, set_languages
from ...modeling.attention import attention_sites
from ...modeling.attention.attention_sites import AttentionSite
from ...modeling.attention.model_mixin import AttnVariantModelMixin
from ...modeling.fields.field_checks import check_relative_position_buckets
from ...modeling.fields.saving_and_loading import describe_misspelled_field
from ...modeling.fields.variant_config import supports_decoder_cache
from ...registration import (
    FORMER_CLASS_NAMES,
    PREFIX,
    get_max_input_length,
    get_variant_config_class,
    get_variant_model_class,
    is_native,
)
from .settings import (
    LanguageSettings,
    ModelSettings,
    NewModelSettings,
    OutputSettings,
    TrainingSettings,
    collect_variant_fields,
)

logger = logging.getLogger(__name__)
# The number of rows that are tokenized to estimate how many rows are truncated.
COUNTED_ROWS = 10_000


def load_tokenizer(
    settings: ModelSettings, config: PreTrainedConfig | None, is_split_into_words: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer from `--tokenizer_name` or from the checkpoint.

    The tokenizer pads and truncates on the right, regardless of the saved setting.

    Args:
        settings: The settings of the run.
        config: The configuration of the model, or None for a new model, which is built to match the tokenizer.
        is_split_into_words: Whether the tokenizer is used on lists of words. A tokenizer that recognizes words by a
            leading space, such as RoBERTa's, is then configured to add a space before each word in the list.

    Raises:
        OSError: If there is no tokenizer.
        ValueError: If the tokenizer cannot be used or has more tokens than the model.
    """
    source = settings.tokenizer_name or settings.source
    advice = ". Set --tokenizer_name to a folder or Hub id that contains them."
    options = {"trust_remote_code": settings.trust_remote_code}
    tokenizer = load_checkpoint_tokenizer(source, advice, **options)
    if is_split_into_words and _needs_leading_space(tokenizer):
        tokenizer = load_checkpoint_tokenizer(source, advice, add_prefix_space=True, **options)
    if config is not None and (size := get_vocabulary_size(tokenizer)) > config.vocab_size:
        raise ValueError(
            f"The tokenizer of {source} has {size} tokens, but the model has only {config.vocab_size}. Set "
            "--tokenizer_name to the model's tokenizer."
        )
    # Positions are counted from the first token, and the code that splits texts into windows and pads labels assumes
    # that padding is on the right.
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return tokenizer


def _needs_leading_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer treats a word without a leading space as the continuation of another word."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    pre_tokenizer = json.loads(backend.to_str())["pre_tokenizer"] if backend is not None else None
    parts = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    return any(part.get("type") == "ByteLevel" and not part["add_prefix_space"] for part in parts)


def get_vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of embedding rows that the tokenizer requires.

    This exceeds the number of tokens if the token ids have gaps.
    """
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def configure_token_types(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, pairs: bool = True) -> bool:
    """Make a tokenizer return token types if and only if the model uses them. The change is saved with the tokenizer.

    In Transformers v5, ALBERT's tokenizer only returns token types on request. DistilBERT models use BERT's tokenizer,
    which returns token types although the models do not accept this input.

    Args:
        tokenizer: The tokenizer, which is modified in place.
        config: The configuration of the model.
        pairs: Whether the inputs are text pairs. For single texts, token types are not added because they would all be
            the same.

    Returns:
        True if the tokenizer was changed.
    """
    has_types, names = getattr(config, "type_vocab_size", 0) > 1, tokenizer.model_input_names
    if ("token_type_ids" in names) == has_types or (has_types and not pairs):
        return False
    other_names = [name for name in names if name != "token_type_ids"]
    tokenizer.model_input_names = [*other_names, "token_type_ids"] if has_types else other_names
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # this attribute is saved
    return True


def configure_eos_token(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, pair: bool) -> None:
    """Make a tokenizer append the end-of-sequence token to each text if the model's classifier requires it.

    The classifiers of encoder-decoder models read the output at the end-of-sequence token. T5's tokenizer appends this
    token to every text, but translation tokenizers may not append it to both texts of a pair. The change is saved with
    the tokenizer.

    Args:
        tokenizer: The tokenizer, which is modified in place.
        config: The configuration of the model.
        pair: Whether the inputs are text pairs.

    Raises:
        ValueError: If the tokenizer does not append the end-of-sequence token and cannot be changed, for example
            because it adds other special tokens, which would be lost.
    """
    if not config.is_encoder_decoder or tokenizer(*("a", "a")[: 1 + pair])["input_ids"].count(config.eos_token_id):
        return
    end = tokenizer.eos_token
    processor = getattr(getattr(tokenizer, "backend_tokenizer", None), "post_processor", None)
    is_template = isinstance(processor, TemplateProcessing | None)
    if tokenizer.eos_token_id != config.eos_token_id or not is_template or _find_template_tokens(tokenizer) - {end}:
        raise ValueError(
            f"The tokenizer does not append the model's end-of-sequence token (id {config.eos_token_id}) to "
            f"{'the texts of a pair' if pair else 'a text'}, where the classifier reads it. Choose another tokenizer "
            "with --tokenizer_name, or set its eos_token and a post-processor that appends it."
        )
    logger.info("The tokenizer now appends %s to each text because the model's classifier reads it.", end)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )


def _find_template_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the special tokens in the tokenizer's template, or an empty set if the tokenizer has no template."""
    template = json.loads(tokenizer.backend_tokenizer.to_str())["post_processor"] or {}
    pieces = [*template.get("single", []), *template.get("pair", [])]
    return {piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece}


def check_max_length(
    max_length: int,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    pair: bool = False,
    flag: str = "max_length",
    pad_to_multiple_of: int | None = None,
) -> None:
    """Check that the model has a position for every token, and that texts can have at least one token.

    Args:
        max_length: The number of tokens to which texts are truncated.
        config: The configuration of the model.
        tokenizer: The tokenizer of the model.
        pair: Whether the inputs are text pairs.
        flag: The name of the flag for `max_length` in messages.
        pad_to_multiple_of: If set, batches are padded to a multiple of this number of tokens.

    Raises:
        ValueError: If the padded length exceeds the number of positions, or if no token is left for text.
    """
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_length < special + 1:
        raise ValueError(f"--{flag} must be at least {special + 1} ({special} special tokens), got {max_length}.")
    positions = get_max_input_length(config)
    if positions is None:  # T5 has no limit, and its tokenizer's limit is only the pretraining length
        return
    if (padded := -(-max_length // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)) > positions:
        padding = f" (padded to {padded} by --pad_to_multiple_of)" if padded > max_length else ""
        raise ValueError(
            f"--{flag} must be at most {positions}, the number of positions in the model, got {max_length}{padding}."
        )


def warn_about_truncation(
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    row_noun: str,
    columns: dict[str, list[str]],
    flag: str,
    max_length: int,
) -> None:
    """Warn if any of the first 10,000 rows of a split are truncated.

    Args:
        tokenizer: The tokenizer of the model.
        split: The name of the split in the message, such as "train".
        row_noun: The plural noun for the rows in the message, such as "sources".
        columns: Maps tokenizer arguments ("text", "text_pair" or "text_target") to the texts of all rows.
        flag: The flag that sets the limit, for the message.
        max_length: The maximum number of tokens per row, including special tokens.
    """
    columns = {name: list(texts[:COUNTED_ROWS]) for name, texts in columns.items()}
    ids = tokenizer(**columns, return_attention_mask=False, verbose=False)["input_ids"]
    lengths = [len(row) for row in ids]
    if num_truncated := sum(length > max_length for length in lengths):
        message = "%s: %d of %d %s have more than --%s %d tokens and are truncated (the longest has %d)."
        logger.warning(message, split, num_truncated, len(lengths), row_noun, flag, max_length, max(lengths))


def tokenize_words(
    tokenizer: PreTrainedTokenizerBase, words: list[str], max_length: int
) -> tuple[dict[str, list[int]], dict[int, int]]:
    """Tokenize a sentence that has been split into words.

    Returns:
        The tokenizer outputs, and a mapping from each word's index to the position of its first token. Words that
        are cut off at `max_length` and words without tokens are not included.
    """
    row = tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
    first_tokens: dict[int, int] = {}
    for position, word in enumerate(row.word_ids()):
        if word is not None:
            first_tokens.setdefault(word, position)
    return dict(row), first_tokens


# The dropout fields of all supported architectures. If the classifier's dropout probability is None, Transformers uses
# that of the hidden layers.
DROPOUT_FIELDS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "classifier_dropout_prob",
    "dropout_rate",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "embedding_dropout",
    "mlp_dropout",
    "qa_dropout",
    "seq_classif_dropout",
    "summary_last_dropout",
    "classifier_dropout_rate",
)


@dataclass(frozen=True)
class LabelMap:
    """The mapping between the model's outputs and the task's classes. Output i belongs to class `to_task[i]`."""

    to_task: tuple[int, ...]

    @property
    def to_model(self) -> tuple[int, ...]:
        """The index of the model output for each class in the task."""
        return tuple(self.to_task.index(i) for i in range(len(self.to_task)))


def set_dropout(config: PreTrainedConfig, rate: float) -> None:
    """Set every dropout probability in a configuration, and in those of its encoder and decoder (T5Gemma)."""
    parts = (part for part in vars(config).values() if isinstance(part, PreTrainedConfig))
    for part in (config, *parts):
        for name in DROPOUT_FIELDS:
            if hasattr(part, name):
                setattr(part, name, rate)


def load_config(settings: ModelSettings) -> PreTrainedConfig:
    """Load the configuration of a checkpoint and apply `dropout_rate`.

    Raises:
        OSError: If there is no configuration.
        ValueError: If the checkpoint cannot be used, is an adapter, or stores its weights in pickle files.
    """
    with convert_loading_errors(settings.source) as source:
        check_source(source)
        config = AutoConfig.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
    return _finish_config(settings, config)


def _finish_config(settings: ModelSettings, config: PreTrainedConfig) -> PreTrainedConfig:
    """Check the buckets of relative positions, apply `dropout_rate`, and return the configuration."""
    if hasattr(config, "relative_attention_max_distance"):
        check_relative_position_buckets(config)
    if settings.dropout_rate is not None:
        set_dropout(config, settings.dropout_rate)
    return config


def check_trained_head(settings: TrainingSettings, config: PreTrainedConfig, head: str, ability: str) -> None:
    """Check that the model's head has been trained if the run only evaluates.

    Args:
        settings: The settings of the run.
        config: The configuration of the model.
        head: The suffix of the class name, such as "ForTokenClassification".
        ability: A phrase for the message that describes a model with this head, such as "classifies texts".

    Raises:
        ValueError: If the checkpoint was saved from a class without this head, so that the head would be randomly
            initialized.
    """
    if settings.only_evaluates and not any(head in name for name in config.architectures or []):
        saved = ", ".join(config.architectures or []) or "no class"
        name = settings.model_name_or_path
        raise ValueError(f"--num_train_epochs 0 requires a model that {ability}, but {name} was saved as {saved}.")


def load_classifier(
    settings: ModelSettings,
    config: PreTrainedConfig,
    labels: Sequence[str] | None,
    model_class: type[Any],
    problem_type: Any = None,
) -> tuple[PreTrainedModel, LabelMap]:
    """Load a checkpoint in float32 as a text classifier, a token classifier or a regressor.

    The label names are added to the configuration. For text classifiers, the problem type is also added.

    Args:
        settings: The settings of the run.
        config: The configuration of the checkpoint, which is modified in place.
        labels: The labels of the task in order, or None for regression.
        model_class: The auto class of the model.
        problem_type: The problem type of a text classifier.

    Returns:
        The model, and the mapping between its outputs and the labels. If the checkpoint was trained with the same
        labels in a different order, the order of its outputs is preserved.

    Raises:
        OSError: If the checkpoint cannot be read.
        ValueError: If the checkpoint does not match its configuration, or if `attn_implementation` is not available.
    """
    names = list(labels) if labels is not None else ["score"]
    id2label: Any = config.id2label or {}
    old_names = [str(id2label[i]) for i in sorted(id2label)]
    kind = model_class.__name__.removeprefix("AutoModel")
    is_classifier = any(kind in name for name in config.architectures or [])
    is_replaced = is_classifier and len(old_names) != len(names)
    if is_replaced and isinstance(settings, TrainingSettings) and settings.only_evaluates:
        raise ValueError(
            f"--num_train_epochs 0 requires a model with the {len(names)} labels of the task, but "
            f"{settings.model_name_or_path} has {len(old_names)} ({', '.join(old_names).lower()}). Its output layer "
            "would be randomly initialized."
        )
    if is_replaced and not _is_resumed(settings):
        name_list = ", ".join(old_names).lower()
        message = "The output layer of %s is replaced by a new one because it has %d labels (%s) and the task has %d."
        logger.warning(message, settings.model_name_or_path, len(old_names), name_list, len(names))
    order = tuple(range(len(names)))
    # Case is ignored, unless some labels in the task differ only in case.
    case = str.lower if len({name.lower() for name in names}) == len(names) else str
    if is_classifier and not is_replaced and sorted(map(case, old_names)) == sorted(map(case, names)):
        order = tuple([case(name) for name in names].index(case(name)) for name in old_names)
    elif is_classifier and not is_replaced and labels is not None and not _is_resumed(settings):
        _warn_about_label_names(settings, old_names, names)
    config.id2label = {i: names[task_id] for i, task_id in enumerate(order)}
    config.label2id = {name: i for i, name in config.id2label.items()}
    if model_class is AutoModelForSequenceClassification:
        config.problem_type = problem_type
    return load_model(settings, config, model_class, ignore_mismatched_sizes=is_replaced), LabelMap(order)


def _warn_about_label_names(settings: ModelSettings, old_names: Sequence[str], names: Sequence[str]) -> None:
    """Warn that a classifier's label names differ from those of the task, unless it has only default names."""
    if [*old_names] == [f"LABEL_{i}" for i in range(len(old_names))]:
        return
    pairs = [f"{old!r:.40} as {new!r:.40}" for old, new in zip(old_names, names, strict=True)]
    more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
    message = "The label names of %s differ from those of the task. They are matched by order: %s%s."
    logger.warning(message, settings.model_name_or_path, ", ".join(pairs[:8]), more)


def load_model(
    settings: ModelSettings, config: PreTrainedConfig, model_class: type[Any], **options: Any
) -> PreTrainedModel:
    """Load a checkpoint in float32. Takes the same arguments as `load_model_and_unexpected_keys`."""
    return load_model_and_unexpected_keys(settings, config, model_class, **options)[0]


def load_model_and_unexpected_keys(
    settings: ModelSettings,
    config: PreTrainedConfig,
    model_class: type[Any],
    requires_all_weights: bool = False,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a checkpoint in float32.

    Args:
        settings: The settings of the run.
        config: The configuration of the model.
        model_class: The class or auto class of the model.
        requires_all_weights: Whether the checkpoint must contain all weights. For language models, all weights are
            always required.
        **options: Additional arguments for `from_pretrained`.

    Returns:
        The model, and the names of the tensors in the checkpoint that the model does not use.

    Raises:
        OSError: If the checkpoint cannot be read.
        ValueError: If the checkpoint does not match its configuration, `attn_implementation` is not available, or
            weights are missing.
    """
    with _silence_loading_report(settings), convert_loading_errors(settings.source) as source:
        model, report = model_class.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,  # required by the optimizer, because --mixed_precision only casts the forward pass
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
            output_loading_info=True,
            use_safetensors=True,
            **options,
        )
    missing = sorted(report["missing_keys"])
    if missing and (requires_all_weights or model_class in (AutoModelForMaskedLM, AutoModelForSeq2SeqLM)):
        saved = ", ".join(config.architectures or []) or "no class"
        raise ValueError(
            f"{settings.model_name_or_path} cannot be loaded as {type(model).__name__} because {len(missing)} tensors "
            f"are missing, such as {missing[0]}. Its config.json names {saved}. To train the model with that head, "
            "use `attn-variants uptrain --objective distill`."
        )
    _check_no_nan_weights(model, settings.model_name_or_path)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model, sorted(report["unexpected_keys"])


def _check_no_nan_weights(model: PreTrainedModel, name: str | None) -> None:
    """Check that no weight is NaN. Otherwise, the predictions would be arbitrary, but could still be scored."""
    # The sum is fast to compute, and is NaN if any weight is NaN. It can also be NaN for huge weights, so the weights
    # of these tensors are checked individually.
    with torch.no_grad():
        suspect_parameters = {key: tensor for key, tensor in model.named_parameters() if tensor.sum().isnan()}
        invalid_names = [key for key, tensor in suspect_parameters.items() if tensor.isnan().any()]
    if invalid_names:
        raise ValueError(
            f"{name} contains NaN values in {len(invalid_names)} of its tensors, such as {invalid_names[0]}. The file "
            "is damaged, or the training diverged."
        )


def _is_resumed(settings: ModelSettings) -> bool:
    """Return whether the run resumes from one of its own checkpoints."""
    return isinstance(settings, OutputSettings) and bool(settings.resume_from_checkpoint)


@contextmanager
def _silence_loading_report(settings: ModelSettings) -> Iterator[None]:
    """Suppress the loading report of Transformers if the run resumes from a training checkpoint.

    The report would list newly initialized weights, but the training checkpoint contains all weights.
    """
    log = logging.getLogger("transformers.modeling_utils")
    level = log.level
    if _is_resumed(settings):
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Make a model recompute activations in the backward pass to save memory."""
    # Transformers 5.23 renamed the method. Version 5.15 only has the old name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def get_saved_model_class(source: str, config: PreTrainedConfig) -> type:
    """Return the model class, from this package or from Transformers, from which a checkpoint was saved.

    Args:
        source: The name of the checkpoint, for the message.
        config: The configuration of the checkpoint.

    Raises:
        ValueError: If the class in the configuration is unknown.
    """
    names = config.architectures or []
    if not names:
        return AutoModel
    if names[0].startswith(PREFIX):
        return get_variant_model_class(names[0])
    architecture = getattr(transformers, FORMER_CLASS_NAMES.get(names[0], names[0]), None)
    if architecture is None:
        raise ValueError(f"{source} has an unknown architecture ({names[0]!r} in its config.json).")
    return architecture


def get_model_name(settings: ModelSettings) -> str:
    """Return the name of the initial model of a run, for plot titles."""
    if settings.model_name_or_path is not None:
        return Path(settings.model_name_or_path).name
    return f"new {settings.model_type}" if isinstance(settings, NewModelSettings) else "new"


# The comma in `--config_overrides` that precedes the next field or the end of the text.
OVERRIDE_SEPARATOR = re.compile(r",(?=[\s,]*(?:\w+\s*=|$))")
# If these values were read as plain text, each of them would be true in a condition.
PYTHON_CONSTANTS = ("True", "False", "None")


def load_or_make_config(
    settings: NewModelSettings, seq2seq: bool = False
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Load the checkpoint's configuration and tokenizer, or create the configuration of a model from scratch.

    Args:
        settings: The settings of the run.
        seq2seq: Whether to configure the special tokens of a new model for an encoder-decoder architecture.

    Raises:
        OSError: If the checkpoint or the tokenizer does not exist.
        ValueError: If the checkpoint or the tokenizer cannot be used, if they do not match, or if a field of the new
            configuration is invalid.
    """
    if settings.model_name_or_path is not None:
        config = load_config(settings)
        return config, load_tokenizer(settings, config)
    tokenizer = load_tokenizer(settings, None)
    tokens = _get_seq2seq_special_tokens(settings, tokenizer) if seq2seq else {}
    return make_new_config(settings, tokenizer, tokens), tokenizer


def _get_seq2seq_special_tokens(
    settings: NewModelSettings, tokenizer: PreTrainedTokenizerBase
) -> dict[str, int | None]:
    """Return the special tokens in the configuration of a new encoder-decoder model, without [CLS] and [SEP].

    The decoder starts with the end-of-sequence token if this is the default of the architecture (BART), and with the
    padding token otherwise (T5, Marian).
    """
    model_type: Any = settings.model_type
    default, end = AutoConfig.for_model(model_type), tokenizer.eos_token_id
    starts_with_end = getattr(default, "decoder_start_token_id", None) == default.eos_token_id
    tokens = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end,
        "decoder_start_token_id": end if starts_with_end else tokenizer.pad_token_id,
    }
    # In architectures with a forced end-of-sequence token, generation ends with this token at the maximum length.
    return tokens | ({"forced_eos_token_id": end} if getattr(default, "forced_eos_token_id", None) is not None else {})


def check_appends_eos_token(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer ends each target with its end-of-sequence token. The languages must already be set.

    Raises:
        ValueError: If the tokenizer has no end-of-sequence token or does not append it.
    """
    end = tokenizer.eos_token_id
    # The tokenizer of the first mBART version puts the language token after the end-of-sequence token.
    if end is None or end not in tokenizer(text_target="a")["input_ids"][-2:]:
        problem = "has no end-of-sequence token" if end is None else f"does not end texts with {tokenizer.eos_token!r}"
        raise ValueError(
            f"The tokenizer of {settings.tokenizer_name or settings.model_name_or_path} {problem}, so the model would "
            "not learn when to stop. Choose another one with --tokenizer_name, or set its eos_token and a "
            "post-processor that appends it."
        )


def make_new_config(
    settings: NewModelSettings, tokenizer: PreTrainedTokenizerBase, special_token_ids: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """Create the configuration of a model that is trained from scratch.

    The configuration class comes from this package if variant fields are set, and otherwise from Transformers.

    Args:
        settings: The settings of the run. Its `config_overrides` take precedence over other settings.
        tokenizer: The tokenizer of the model.
        special_token_ids: The ids of special tokens that differ from those of an encoder-only model.

    Raises:
        ValueError: If a field is unknown or has an invalid value.
    """
    model_type: Any = settings.model_type  # always set for a model from scratch
    variant_class = get_variant_config_class(model_type)
    variant, overrides = collect_variant_fields(settings), parse_config_overrides(settings.config_overrides or "")
    supported_fields = variant_class.get_variant_fields()
    if unknown := [name for name in variant if name not in supported_fields]:
        raise ValueError(f"--{unknown[0]} is not supported for {model_type}, which does not have this attention.")
    is_variant = (variant or {*supported_fields} & overrides.keys()) and not is_native(model_type)
    default = variant_class() if is_variant else AutoConfig.for_model(model_type)
    _check_override_names(overrides, default, variant_class)
    fields = {
        "vocab_size": get_vocabulary_size(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        **{
            name: getattr(tokenizer, name)
            for name in ("cls_token_id", "sep_token_id", "mask_token_id")
            if hasattr(default, name)
        },
        **(special_token_ids or {}),
        **overrides,
    }
    with _convert_build_errors(settings):
        config = type(default)(**fields, **variant)
    if is_native(model_type):
        variant_class.from_upstream(config)  # Transformers does not check the number of key/value heads
    return _finish_config(settings, config)


def _check_override_names(overrides: dict[str, Any], default: PreTrainedConfig, variant_class: Any) -> None:
    """Check that each override is a field of the configuration, because Transformers would accept any name."""
    for name in overrides:
        if name not in default.to_dict() and name not in variant_class.get_variant_fields():
            unknown = f"`{name}` is not a field of {type(default).__name__}."
            raise ValueError(f"--config_overrides: {describe_misspelled_field(variant_class, name) or unknown}")


def parse_config_overrides(text: str) -> dict[str, Any]:
    """Parse the value of `--config_overrides`.

    The value of a field is parsed as JSON if possible. Otherwise, it is plain text without commas.

    Args:
        text: The fields and values, such as "num_layers=2,feed_forward_proj=gated-gelu",
            'talking_heads_dynamic=["x2l","m2l"],num_layers=2' or '{"num_layers": 2}'.

    Returns:
        A dictionary from field names to values.

    Raises:
        ValueError: If an item does not have the form FIELD=VALUE, or if a value is neither JSON nor plain text.

    Example:
        >>> parse_config_overrides("num_layers=2,feed_forward_proj=gated-gelu")
        {'num_layers': 2, 'feed_forward_proj': 'gated-gelu'}
    """
    if text.lstrip().startswith("{"):
        return parse_json(text, unique_keys=True)
    values = {}
    for item in filter(None, (item.strip(", \n\t") for item in OVERRIDE_SEPARATOR.split(text))):
        name, _, value = (part.strip() for part in item.partition("="))
        if not name or not value:
            raise ValueError(f"--config_overrides must consist of FIELD=VALUE items, got {item!r}.")
        values[name] = _parse_override(name, value)
    return values


def _parse_override(name: str, text: str) -> Any:
    """Parse the value of a single field, which is JSON or plain text without commas."""
    try:
        return parse_json(text)
    except ValueError:
        if "," in text or text[0] in '[{"' or text in PYTHON_CONSTANTS:
            raise ValueError(
                f"--config_overrides: `{name}` must be JSON or text without commas, got {text!r}."
            ) from None
        return text


def check_new_model(settings: NewModelSettings) -> None:
    """Check the settings of a model from scratch by building the model on the meta device.

    Raises:
        OSError: If the tokenizer does not exist.
        ValueError: If the tokenizer cannot be used or the model cannot be built.
    """
    config = make_new_config(settings, load_tokenizer(settings, None))
    with torch.device("meta"), _convert_build_errors(settings):
        AutoModel.from_config(config)


def _convert_build_errors(settings: NewModelSettings) -> AbstractContextManager[None]:
    """Convert errors from the constructors of configurations and models to `ValueError`.

    The errors can be of any type, such as KeyError (unknown activation) or ZeroDivisionError (no heads).
    """
    return convert_to_value_error(f"The new {settings.model_type} model cannot be built", ValueError, ImportError)


def load_or_make_model(
    settings: NewModelSettings, config: PreTrainedConfig, auto_class: Any, requires_all_weights: bool = False
) -> PreTrainedModel:
    """Load the checkpoint or create a new model with random weights, in float32.

    Raises:
        OSError, ValueError: For the same reasons as in `load_model_and_unexpected_keys`, or if the new model cannot be
            built.
    """
    if settings.model_name_or_path is not None:
        return load_model(settings, config, auto_class, requires_all_weights=requires_all_weights)
    with _convert_build_errors(settings):
        model = auto_class.from_config(config, dtype=torch.float32, attn_implementation=settings.attn_implementation)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def find_variant_class(model: nn.Module) -> type[AttnVariantModelMixin]:
    """Return the class in this package that corresponds to a model from this package or from Transformers.

    Raises:
        ValueError: If this package has no corresponding class.
    """
    # FSDP2 adds this prefix to the class name of a sharded model.
    return get_variant_model_class(type(model).__name__.removeprefix("FSDP"))


def set_target_language(
    settings: LanguageSettings, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> TargetStartTokens | None:
    """Set the languages of the tokenizer and the decoder's start token (see `set_languages`)."""
    languages = settings.source_lang, settings.target_lang, settings.forced_bos_token
    target_start = set_languages(tokenizer, config, *languages)
    if target_start is not None:
        config.decoder_start_token_id = target_start.decoder_start_token_id
    return target_start


def generate_ids(
    model: Any, batch: dict[str, Tensor], max_new_tokens: int | None, num_beams: int = 1, **options: Any
) -> Tensor:
    """Generate token ids [b, n], including the start token, with greedy search or beam search.

    Args:
        model: An encoder-decoder model without wrappers.
        batch: A batch with "input_ids" and "attention_mask".
        max_new_tokens: The maximum number of generated tokens.
        num_beams: The number of beams.
        **options: Additional arguments for `generate`.
    """
    if not supports_decoder_cache(model.config):
        options["use_cache"] = False
    with ignore_saved_length_limits(model):
        return model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=max_new_tokens,
            num_beams=num_beams,
            do_sample=False,
            **options,
        )


def iterate_attention_modules(model: PreTrainedModel) -> Iterator[tuple[AttentionSite, str, nn.Module]]:
    """Iterate over the attention modules of a model.

    Args:
        model: A model from this package or from Transformers.

    Yields:
        The `AttentionSite`, the path of the module inside the base model, and the module.

    Raises:
        ValueError: If this package does not support the architecture.
    """
    return attention_sites.named_attention_modules(model, find_variant_class(model).attention_sites)
