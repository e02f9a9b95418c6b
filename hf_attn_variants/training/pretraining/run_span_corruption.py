"""Pretrains a T5 by span corruption."""

from typing import Any

from accelerate.utils import set_seed
from transformers import AutoModelForSeq2SeqLM

from ..engine.losses import label_objective, target_logits
from ..engine.new_model import load_or_make_model, load_seq2seq_config
from ..engine.session import open_session
from .run import pretrain
from .settings import SpanCorruptionSettings
from .span_corruption import SpanCorruption, check_span_corruption, target_sums
from .task import PretrainingTask
from .text_sources import open_text_sources

__all__ = ["pretrain_span_corruption"]


def pretrain_span_corruption(settings: SpanCorruptionSettings) -> dict[str, Any]:
    """Train, evaluate, try whether the model reads its context, and save.

    Returns:
        The results that `all_results.json` begins with: `eval_loss` (nats a target token), `eval_perplexity`,
        `eval_accuracy`, `gate_passed` and what it saw, and those of `TrainingLoop.results`; its tokens are those of
        inputs and targets.

    Raises:
        ValueError, OSError: if a setting, the text or the checkpoint is wrong; said before training where it can be.
        NonFiniteLossError: if training diverged.
    """
    with open_session(settings) as accelerator:
        config, tokenizer = load_seq2seq_config(settings)
        check_span_corruption(settings, settings.max_length, config, tokenizer)
        text = open_text_sources(settings)
        prepare = SpanCorruption(
            tokenizer, settings.max_length, settings.seed, settings.noise_density, settings.mean_noise_span_length
        )
        set_seed(settings.seed)
        model = load_or_make_model(settings, config, AutoModelForSeq2SeqLM)
        task = PretrainingTask(
            "span corruption",
            prepare,
            label_objective(target_logits),
            target_sums,
            "target_tokens",
            prepare.shuffle_text,
            {"block_length": prepare.block_length, "target_length": prepare.target_length},
        )
        return pretrain(settings, accelerator, model, tokenizer, text, task)
