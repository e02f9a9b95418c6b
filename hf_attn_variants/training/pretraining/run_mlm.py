"""Pretrains a language model: an encoder on masked tokens, or, as `run_clm` does, a decoder on each next token."""

import inspect
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, PreTrainedConfig

from ..engine.masking import MaskedLMPreparation
from ..engine.new_model import load_or_make_config, load_or_make_model
from ..engine.session import open_session
from ..engine.tokenizers import check_max_length
from .context_check import shuffle_positions
from .masked_lm import masked_lm_objective, masked_lm_sums
from .run import pretrain
from .run_clm import pretrain_causal_lm
from .settings import MaskedLMSettings
from .task import PretrainingTask
from .text_sources import open_text_sources

__all__ = ["pretrain_masked_lm"]


def pretrain_masked_lm(settings: MaskedLMSettings) -> dict[str, Any]:
    """Train, evaluate, try whether the model reads its context, and save; with the objective "clm" a causal one.

    Returns:
        The results that `all_results.json` begins with: `eval_loss` (nats a masked token), `eval_perplexity`,
        `eval_accuracy`, `gate_passed` and what it saw, and those of `TrainingLoop.results`.

    Raises:
        ValueError, OSError: if a setting, the text or the checkpoint is wrong; said before training where it can be.
        NonFiniteLossError: if training diverged.
    """
    if settings.is_causal:
        return pretrain_causal_lm(settings)
    with open_session(settings) as accelerator:
        config, tokenizer = load_or_make_config(settings)
        _check_encoder(settings, config)
        check_max_length(settings.max_length, config, tokenizer)
        _check_pairs(settings, config)
        text = open_text_sources(settings)
        masking = settings.mlm_probability, settings.seed, settings.whole_word_mask, settings.sentence_task
        prepare = MaskedLMPreparation(tokenizer, settings.max_length, *masking)
        set_seed(settings.seed)
        auto_class = AutoModelForMaskedLM if settings.sentence_task is None else AutoModelForPreTraining
        # A sentence task's head may be new, but not where it is only evaluated.
        model = load_or_make_model(settings, config, auto_class, needs_all=settings.only_evaluates)
        base_model = model.base_model
        task = PretrainingTask(
            "masked LM",
            prepare,
            masked_lm_objective(model, sentence_weight=settings.mlm_probability * prepare.block_length),
            lambda model, batch: masked_lm_sums(model, base_model, batch),
            "masked_tokens",
            shuffle_positions,
        )
        return pretrain(settings, accelerator, model, tokenizer, text, task)


def _check_encoder(settings: MaskedLMSettings, config: PreTrainedConfig) -> None:
    # Auto classes make a masked-LM model of a BART too, whose decoder would read the words that it is to find.
    name = settings.model_name_or_path or f"--model_type {settings.model_type}"
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} ({config.model_type}) is an encoder-decoder, masked-LM pretraining is for encoders: a T5 is "
            "pretrained by `attn-variants pretrain-t5`, others are trained by `attn-variants seq2seq`"
        )
    if getattr(config, "is_decoder", False):
        raise ValueError(
            f"{name} is a decoder (is_decoder), masked-LM pretraining is for encoders: give --objective clm"
        )


def _check_pairs(settings: MaskedLMSettings, config: PreTrainedConfig) -> None:
    task = settings.sentence_task
    if task is None:
        return
    if settings.max_length < 5:
        raise ValueError(f"--sentence_task {task}: --max_length {settings.max_length} has no room for a pair")
    if task == "nsp" and settings.shuffle_buffer_size < 2:
        raise ValueError(
            "--sentence_task nsp draws other text from a buffer: --shuffle_buffer_size must be at least 2"
        )
    with torch.device("meta"):
        made = AutoModelForPreTraining.from_config(config)
    if not {"next_sentence_label", "sentence_order_label"} & inspect.signature(made.forward).parameters.keys():
        raise ValueError(
            f"--sentence_task {task}: {type(made).__name__} learns no task of pairs; a BERT or an ALBERT does"
        )
    token_types = getattr(config, "type_vocab_size", 0)
    if token_types < 2:
        raise ValueError(
            f"--sentence_task {task}: the model has {token_types} token type(s), and tells the two segments of a pair "
            "apart by two (type_vocab_size)"
        )
