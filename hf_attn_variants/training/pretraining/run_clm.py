"""Pretrains a decoder alone as a causal language model: BERT, RoBERTa and ELECTRA with `is_decoder`."""

import logging
from typing import Any

from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from ...registration import variant_config_class
from ..engine.losses import label_objective
from ..engine.new_model import load_or_make_config, load_or_make_model
from ..engine.session import open_session
from ..engine.tokenizers import check_max_length
from .causal_lm import CausalLMPreparation, causal_lm_sums, causal_logits, text_ends
from .context_check import shuffle_positions
from .run import pretrain
from .settings import CAUSAL_LM_TYPES, MaskedLMSettings
from .task import PretrainingTask
from .text_sources import open_text_sources

__all__ = ["make_decoder", "pretrain_causal_lm"]

logger = logging.getLogger(__name__)


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
            label_objective(causal_logits),
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
