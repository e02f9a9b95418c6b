"""Pretraining of BERT, RoBERTa or ELECTRA models as causal language models."""

import logging
from typing import Any

import numpy as np
from accelerate.utils import set_seed
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from ...registration import variant_config_class
from ..engine.dataloaders import IGNORED_LABEL
from ..engine.losses import compute_label_sums, make_label_objective
from ..engine.models import load_or_make_config, load_or_make_model
from ..engine.session import open_session
from ..engine.tokenizers import check_max_length
from .settings import CAUSAL_LM_TYPES, MaskedLMSettings
from .task import PretrainingTask, pretrain, shuffle_positions
from .text_stream import open_text_sources

__all__ = [
    "CausalLMPreparation",
    "compute_causal_lm_sums",
    "compute_causal_logits",
    "convert_to_decoder",
    "get_boundary_tokens",
    "pretrain_causal_lm",
]

logger = logging.getLogger(__name__)


class CausalLMPreparation:
    """Preparation of a block of tokens for causal language modeling.

    The inputs are the begin token and the block without its last token. Each token of the text is predicted once: the
    first token of a block only from the begin token, and the others from all earlier tokens of the block.

    Args:
        tokenizer: A tokenizer with a token that begins a text ([CLS], `<s>`), one that ends it ([SEP], `</s>`), and a
            padding token.
        length: The length n of inputs and blocks in tokens.

    Raises:
        ValueError: If the tokenizer lacks a token.
    """

    takes_other_block = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int):
        self.begin_id, self.separator, self.pad_id = *get_boundary_tokens(tokenizer), tokenizer.pad_token_id
        if self.pad_id is None:
            raise ValueError("The tokenizer must have a padding token, but has none. Use another --tokenizer_name.")
        self.length = self.block_length = length

    def __call__(self, block: np.ndarray, key: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return "input_ids", "attention_mask" and "labels" [n].

        The label of a position is the next token, or -100 at padding. Nothing is random, so `key` is not used.
        """
        ids = np.full(self.length, self.pad_id, dtype=np.int64)
        labels = np.full(self.length, IGNORED_LABEL, dtype=np.int64)
        ids[: len(block)] = [self.begin_id, *block[:-1]]
        labels[: len(block)] = block
        attention_mask = (np.arange(self.length) < len(block)).astype(np.int64)
        return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def get_boundary_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the tokens that begin and end a text.

    Raises:
        ValueError: If the tokenizer lacks one of them.
    """
    begin = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    end = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
    if begin is None or end is None:
        raise ValueError(
            "The tokenizer must have a token that begins a text ([CLS] or bos_token) and one that ends it ([SEP] or "
            "eos_token). Use another --tokenizer_name."
        )
    return begin, end


def compute_causal_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits [b, n, V] of the next token at each position."""
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits


def compute_causal_lm_sums(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sums of `PretrainingTask.row_sums` over all tokens of each example."""
    return compute_label_sums(compute_causal_logits(model, batch), batch["labels"])


def pretrain_causal_lm(settings: MaskedLMSettings) -> dict[str, Any]:
    """Train a causal language model, evaluate it, check whether it uses its context, and save it.

    Returns:
        The first results of `all_results.json`: `eval_loss` (nats per token), `eval_perplexity`, `eval_accuracy`,
        `eval_predicted_tokens`, `gate_passed` with the losses and costs behind it, and `TrainingLoop.results`.

    Raises:
        ValueError, OSError: If a setting, the text or the checkpoint is wrong. Most errors come before training.
        NonFiniteLossError: If training diverges.
    """
    with open_session(settings) as accelerator:
        config, tokenizer = load_or_make_config(settings)
        convert_to_decoder(settings, config, tokenizer)
        check_max_length(settings.max_length, config, tokenizer)
        text = open_text_sources(settings)
        prepare = CausalLMPreparation(tokenizer, settings.max_length)
        set_seed(settings.seed)
        model = load_or_make_model(settings, config, AutoModelForCausalLM, needs_all=True)
        task = PretrainingTask(
            "causal LM",
            prepare,
            make_label_objective(compute_causal_logits),
            compute_causal_lm_sums,
            "predicted_tokens",
            # A token keeps its label, the next token. Only the order of the earlier tokens is lost.
            shuffle_positions,
            without_context="bigram",
        )
        return pretrain(settings, accelerator, model, tokenizer, text, task)


def convert_to_decoder(
    settings: MaskedLMSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Change a configuration to a causal language model, with the tokens that begin and end a generated text.

    Raises:
        ValueError: If Transformers has no causal class for the architecture, if the model has cross-attention, or if
            its attention variant cannot be causal.
    """
    name = f"{settings.model_name_or_path or 'The new model'} ({config.model_type})"
    known = ", ".join(CAUSAL_LM_TYPES)
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder. Use --objective clm with one of these model types: {known}.")
    if "AutoModelForCausalLM" not in variant_config_class(config.model_type).auto_classes:
        raise ValueError(
            f"{name} has no causal language model in Transformers. Use --objective clm with one of these model types: "
            f"{known}."
        )
    if getattr(config, "add_cross_attention", False):
        raise ValueError(f"{name} reads an encoder (add_cross_attention). Use --objective clm with a decoder only.")
    if settings.model_name_or_path is not None and not getattr(config, "is_decoder", False):
        logger.info("%s was an encoder. It becomes a decoder, in which tokens attend only to earlier tokens.", name)
    config.is_decoder = True
    config.bos_token_id, config.eos_token_id = get_boundary_tokens(tokenizer)
    check = getattr(config, "check_variant", None)  # only configurations of this package have it
    if check is not None:
        check()  # raises an error now if the attention has no causal form
