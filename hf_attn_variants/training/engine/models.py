"""Builds the model and tokenizer to train from any checkpoint, ours or upstream's."""

import argparse
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ...conversion.checkpoint.source import learned_tokens, local_folder
from ...registration import FORMER_NAMES, PREFIX, variant_model_class
from .arguments import only_evaluates

__all__ = [
    "LabelMap",
    "check_max_length",
    "close_texts",
    "enable_gradient_checkpointing",
    "load_classifier",
    "load_config",
    "load_model",
    "load_model_and_rest",
    "load_tokenizer",
    "resolve_architecture",
    "set_dropout",
    "too_long",
    "vocabulary_size",
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
    """Sets every dropout probability of a config.

    Raises:
        ValueError: The config has none.
    """
    present = [name for name in DROPOUT_FIELDS if hasattr(config, name)]
    if not present:
        raise ValueError(f"--dropout_rate: {type(config).__name__} has no dropout to set")
    for name in present:
        setattr(config, name, rate)


@contextmanager
def _reading_checkpoint(source: str) -> Iterator[str]:
    """Gives what to load from; an error about a file the user gave us is an OSError or a ValueError."""
    local_folder(source)  # of a path at which there is nothing, transformers says that it is no Hub id
    # transformers, huggingface_hub and safetensors each have errors of their own.
    try:
        yield os.path.expanduser(source)
    except (ValueError, OSError):
        raise
    except Exception as error:
        # Two lines: huggingface_hub's first one names the field and its second one the value.
        text = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        raise ValueError(f"{source}: {type(error).__name__}: {text}") from error


def load_config(args: argparse.Namespace) -> PreTrainedConfig:
    """Reads a checkpoint's config and applies `--dropout_rate` (`args`: see `arguments.add_shared_arguments`).

    Raises:
        OSError: There is none.
        ValueError: It cannot be used, or has no dropout to set.
    """
    with _reading_checkpoint(args.model_name_or_path) as source:
        config = AutoConfig.from_pretrained(source, trust_remote_code=args.trust_remote_code)
    if args.dropout_rate is not None:
        set_dropout(config, args.dropout_rate)
    return config


def load_tokenizer(args: argparse.Namespace, config: PreTrainedConfig | None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of `--tokenizer_name` or of the checkpoint; without a config the model is made to fit it.

    It pads and cuts on the right, whatever side it was saved with.

    Raises:
        OSError: There is none.
        ValueError: It cannot be used, has no padding token, or more tokens than the model.
    """
    source = args.tokenizer_name or args.model_name_or_path
    with _reading_checkpoint(source) as found:
        tokenizer = AutoTokenizer.from_pretrained(found, trust_remote_code=args.trust_remote_code)
    # From a folder without tokenizer files, transformers v5 makes a tokenizer to which every word is unknown.
    if not learned_tokens(tokenizer):
        raise OSError(f"{source} has no tokenizer files; give a folder or Hub id that has them with --tokenizer_name")
    if tokenizer.pad_token is None:
        raise ValueError(f"the tokenizer of {source} has no padding token; batches cannot be padded without one")
    if config is not None and (size := vocabulary_size(tokenizer)) > config.vocab_size:
        raise ValueError(
            f"the tokenizer of {source} has {size} tokens and the model only {config.vocab_size}; "
            "give its own with --tokenizer_name"
        )
    # Positions count from the first token, windows are cut at the end, and labels are padded there.
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns how many rows an embedding of its tokens needs: more than tokens where their numbers have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def give_token_types(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> bool:
    """Lets a tokenizer, also once saved, say which text of a pair a token is of, where the model can tell.

    ALBERT's of transformers v5 does so only where asked.

    Returns:
        Whether it did not do so before.
    """
    if getattr(config, "type_vocab_size", 0) < 2 or "token_type_ids" in tokenizer.model_input_names:
        return False
    tokenizer.model_input_names = [*tokenizer.model_input_names, "token_type_ids"]
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # this is what is saved
    return True


def close_texts(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, pair: bool) -> None:
    """Lets a tokenizer, also once saved, put the end token behind each text, where a classifier reads it there.

    That of an encoder-decoder does. T5's own tokenizer closes every text; one made for translation need not close the
    two texts of a pair.

    Args:
        tokenizer: Of `load_tokenizer`.
        config: The model's.
        pair: Whether an example is a pair of texts.

    Raises:
        ValueError: It does not, and cannot be made to, or it puts other tokens around texts, which would be lost.
    """
    if not config.is_encoder_decoder or tokenizer(*("a", "a")[: 1 + pair])["input_ids"].count(config.eos_token_id):
        return
    end = tokenizer.eos_token
    processor = getattr(getattr(tokenizer, "backend_tokenizer", None), "post_processor", None)
    if tokenizer.eos_token_id != config.eos_token_id or not isinstance(processor, TemplateProcessing | None):
        raise ValueError(
            f"the tokenizer does not put the model's end token (number {config.eos_token_id}) behind "
            f"{'the texts of a pair' if pair else 'a text'}, where its classifier reads: give one that does with "
            "--tokenizer_name, or set its eos_token and a post-processor that appends it"
        )
    if others := sorted(_template_tokens(tokenizer) - {end}):
        raise ValueError(
            f"the tokenizer puts {', '.join(others)} around texts, and the model's end token ({end}) not behind "
            f"{'those of a pair' if pair else 'them'}, where its classifier reads: give one that does with "
            f"--tokenizer_name, or put {end} into the template of its post-processor"
        )
    logger.info("the tokenizer now puts %s behind each text, where the model's classifier reads", end)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )


def _template_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Returns the special tokens that the tokenizer's template, if it has one, puts around texts."""
    template = json.loads(tokenizer.backend_tokenizer.to_str())["post_processor"] or {}
    pieces = [*template.get("single", []), *template.get("pair", [])]
    return {piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece}


def check_max_length(
    max_length: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, pair: bool = False
) -> None:
    """Checks that the model has a position for every token, and that text fits beside the special tokens.

    Args:
        max_length: Of `--max_length`.
        config: The model's.
        tokenizer: Its tokenizer.
        pair: Whether an example is a pair of texts.

    Raises:
        ValueError: `max_length` is more than the model's or the tokenizer's maximum, or leaves no token for text.
    """
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_length < special + 1:
        raise ValueError(f"--max_length must be at least {special + 1} ({special} special tokens), got {max_length}")
    if message := too_long(max_length, config, tokenizer):
        raise ValueError(f"--max_length {max_length} is too long: {message}")


def too_long(length: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Says what a text of `length` tokens does not fit into; None: it fits.

    T5 has no positions to run out of: its tokenizer's limit is the length that it was pretrained with.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return None
    if length > positions:
        return f"the model has {positions} positions"
    return f"the tokenizer allows {tokenizer.model_max_length} tokens" if length > tokenizer.model_max_length else None


def load_classifier(
    args: argparse.Namespace, config: PreTrainedConfig, labels: tuple[str, ...] | None
) -> tuple[PreTrainedModel, LabelMap]:
    """Loads a checkpoint as a sequence classifier (or, without labels, a regressor) in float32.

    Args:
        args: Reads `model_name_or_path`, `attn_implementation`, `gradient_checkpointing`, `trust_remote_code`.
        config: Of `load_config`; gets the labels' names.
        labels: Class names in the task's order; None for regression.

    Returns:
        The model, and how its outputs are numbered: a checkpoint trained on the same class names in another order
        keeps its own.

    Raises:
        OSError: The checkpoint cannot be read.
        ValueError: The checkpoint does not fit its config, or the machine not `attn_implementation`.
    """
    num_labels = 1 if labels is None else len(labels)
    had = [str(config.id2label[i]).lower() for i in sorted(config.id2label)] if config.id2label else []
    is_classifier = any("ForSequenceClassification" in name for name in config.architectures or [])
    names = list(labels) if labels is not None else ["score"]
    replaced = is_classifier and len(had) != num_labels
    if replaced:
        logger.warning(
            "%s classifies %d labels (%s) and the task has %d: its output layer is replaced by a new one",
            args.model_name_or_path,
            len(had),
            ", ".join(had),
            num_labels,
        )
    order = tuple(range(num_labels))
    if is_classifier and not replaced and sorted(had) == sorted(names):
        order = tuple(names.index(name) for name in had)
    config.id2label = {i: names[task_id] for i, task_id in enumerate(order)}
    config.label2id = {name: i for i, name in config.id2label.items()}
    config.problem_type = "regression" if labels is None else "single_label_classification"
    with _reading_checkpoint(args.model_name_or_path) as source:
        model = AutoModelForSequenceClassification.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,  # the optimiser's master weights; --mixed_precision casts for the forward pass
            attn_implementation=args.attn_implementation,
            trust_remote_code=args.trust_remote_code,
            ignore_mismatched_sizes=replaced,
        )
    if args.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model, LabelMap(order)


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Makes a model recompute activations in the backward pass."""
    # 5.23 renamed it; the old name is all that 5.15 has.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def load_model(args: argparse.Namespace, source: str, config: PreTrainedConfig, model_class: type) -> PreTrainedModel:
    """Loads a checkpoint in float32; arguments and errors as for `load_model_and_rest`."""
    return load_model_and_rest(args, source, config, model_class)[0]


def load_model_and_rest(
    args: argparse.Namespace, source: str, config: PreTrainedConfig, model_class: type
) -> tuple[PreTrainedModel, list[str]]:
    """Loads a checkpoint in float32.

    Args:
        args: Reads `attn_implementation`, `trust_remote_code`.
        source: Folder or Hub id.
        config: Of `load_config`.
        model_class: A model or Auto class.

    Returns:
        The model, and the names of the checkpoint's tensors for which it has no place.

    Raises:
        OSError: The checkpoint cannot be read.
        ValueError: It does not fit its config, the machine not `attn_implementation`, or it lacks weights of the
            language model that is asked for.
    """
    with _reading_checkpoint(source) as found:
        model, report = model_class.from_pretrained(
            found,
            config=config,
            dtype=torch.float32,  # the optimiser's master weights; --mixed_precision casts for the forward pass
            attn_implementation=args.attn_implementation,
            trust_remote_code=args.trust_remote_code,
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    # A sentence task's head may be new, but not where it is only evaluated.
    whole = model_class in (AutoModelForMaskedLM, AutoModelForSeq2SeqLM) or (
        model_class is AutoModelForPreTraining and only_evaluates(args)
    )
    if missing and whole:
        raise ValueError(
            f"{source} is no {type(model).__name__}: it lacks {len(missing)} of its tensors, such as {missing[0]}"
        )
    return model, sorted(report["unexpected_keys"])


def resolve_architecture(source: str, config: PreTrainedConfig) -> type:
    """Finds the class that a checkpoint was saved from, ours or upstream's.

    Raises:
        ValueError: Its config names none that is known.
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
