"""Pretraining of a BERT, RoBERTa or ELECTRA as a causal language model."""

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

__all__ = ["CausalLMPreparation", "causal_lm_sums", "causal_logits", "make_decoder", "pretrain_causal_lm", "text_ends"]

logger = logging.getLogger(__name__)


class CausalLMPreparation:
    """Makes an example of a block of tokens: it reads the begin token and the block without its last one.

    So each token of a text is predicted once: the first of a block from the begin token alone, the others from all
    before them in the block.

    Args:
        tokenizer: has a token that begins a text ([CLS], `<s>`), one that ends it ([SEP], `</s>`), and padding.
        length: n, which is also the block's.

    Raises:
        ValueError: if the tokenizer lacks a token.
    """

    takes_other_block = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int):
        self.begin_id, self.separator, self.pad_id = *text_ends(tokenizer), tokenizer.pad_token_id
        if self.pad_id is None:
            raise ValueError("the tokenizer has no padding token: causal language modelling needs one")
        self.length = self.block_length = length

    def __call__(self, block: np.ndarray, key: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return "input_ids", "attention_mask" and "labels" [n]: at each place the token behind it, -100 at padding.

        Nothing is random about it, whatever the key is.
        """
        ids = np.full(self.length, self.pad_id, dtype=np.int64)
        labels = np.full(self.length, IGNORED_LABEL, dtype=np.int64)
        ids[: len(block)] = [self.begin_id, *block[:-1]]
        labels[: len(block)] = block
        attention_mask = (np.arange(self.length) < len(block)).astype(np.int64)
        return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def text_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the tokens that begin and end a text.

    Raises:
        ValueError: if the tokenizer has none.
    """
    begin = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    end = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
    if begin is None or end is None:
        raise ValueError(
            "the tokenizer has no token that begins a text ([CLS] or a bos_token) or none that ends it ([SEP] or an "
            "eos_token): causal language modelling needs both"
        )
    return begin, end


def causal_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits [b, n, V] of the token behind each."""
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits


def causal_lm_sums(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sums of `PretrainingTask.row_sums`, of all tokens."""
    return compute_label_sums(causal_logits(model, batch), batch["labels"])


def pretrain_causal_lm(settings: MaskedLMSettings) -> dict[str, Any]:
    """Train, evaluate, try whether the model reads its context, and save.

    Returns:
        The results that `all_results.json` begins with: `eval_loss` (nats a token), `eval_perplexity`,
        `eval_accuracy`, `eval_predicted_tokens`, `gate_passed` and what it saw, and those of `TrainingLoop.results`.

    Raises:
        ValueError, OSError: if a setting, the text or the checkpoint is wrong; said before training where it can be.
        NonFiniteLossError: if training diverged.
    """
    with open_session(settings) as accelerator:
        config, tokenizer = load_or_make_config(settings)
        make_decoder(settings, config, tokenizer)
        check_max_length(settings.max_length, config, tokenizer)
        text = open_text_sources(settings)
        prepare = CausalLMPreparation(tokenizer, settings.max_length)
        set_seed(settings.seed)
        model = load_or_make_model(settings, config, AutoModelForCausalLM, needs_all=True)
        task = PretrainingTask(
            "causal LM",
            prepare,
            make_label_objective(causal_logits),
            causal_lm_sums,
            "predicted_tokens",
            # Each token keeps the one behind it: what is lost is the order of those before.
            shuffle_positions,
            without_context="bigram",
        )
        return pretrain(settings, accelerator, model, tokenizer, text, task)


def make_decoder(settings: MaskedLMSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a configuration that of a causal language model, and say which tokens generation begins and ends with.

    Raises:
        ValueError: if transformers has no causal class for it, it reads an encoder, or its variant of attention
            cannot be causal.
    """
    name = f"{settings.model_name_or_path or 'the new model'} ({config.model_type})"
    known = ", ".join(CAUSAL_LM_TYPES)
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder, --objective clm is for a decoder alone: {known}")
    if "AutoModelForCausalLM" not in variant_config_class(config.model_type).auto_classes:
        raise ValueError(
            f"{name}: transformers has no causal language model of this architecture; --objective clm is for {known}"
        )
    if getattr(config, "add_cross_attention", False):
        raise ValueError(f"{name} reads an encoder (add_cross_attention), --objective clm is for a decoder alone")
    if settings.model_name_or_path is not None and not getattr(config, "is_decoder", False):
        logger.info("%s was an encoder: from here on it is a decoder, whose tokens see those before them alone", name)
    config.is_decoder = True
    config.bos_token_id, config.eos_token_id = text_ends(tokenizer)
    check = getattr(config, "check_variant", None)  # of this package's configurations
    if check is not None:
        check()  # attention that has no causal form is an error now
