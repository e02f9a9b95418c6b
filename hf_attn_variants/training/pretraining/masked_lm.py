"""Pretraining of an encoder as a masked language model."""

import inspect
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ..engine.dataloaders import IGNORED_LABEL
from ..engine.losses import Objective
from ..engine.models import load_or_make_config, load_or_make_model
from ..engine.session import open_session
from ..engine.text_rows import MaskedLMPreparation
from ..engine.tokenizers import check_max_length
from .causal_lm import pretrain_causal_lm
from .settings import MaskedLMSettings
from .task import PretrainingTask, pretrain, shuffle_positions
from .text_stream import open_text_sources

__all__ = ["masked_lm_objective", "masked_lm_sums", "pretrain_masked_lm"]

MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def masked_lm_objective(model: PreTrainedModel, sentence_weight: float = 0.0) -> Objective:
    """Return the cross-entropy of the masked tokens, summed, and that of the sentence task, where batches have one.

    Args:
        model: a masked-LM model, not yet wrapped. What follows its base model, whatever it is called, computes the
            masked positions alone, which gives the same loss for a seventh of its work.
        sentence_weight: masked tokens that an example's sentence label counts as; with their expected number both
            tasks have the same weight, as in BERT.
    """

    base_model = model.base_model

    def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels, sentence_logits = _logits(model, base_model, batch)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        if sentence_logits is None:
            return loss
        return loss + sentence_weight * functional.cross_entropy(
            sentence_logits, batch["sentence_labels"], ignore_index=IGNORED_LABEL, reduction="sum"
        )

    def count(batch: dict[str, Tensor]) -> int:
        return int((batch["labels"] != IGNORED_LABEL).sum())

    return Objective(loss_sum=loss_sum, count=count, head_of_items=True)


def _logits(model: nn.Module, base_model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the masked tokens' logits [m, V], their labels [m], and the sentence task's logits [b, 2] or None."""
    chosen = batch["labels"] != IGNORED_LABEL  # [b, n]

    def keep_chosen(_: nn.Module, inputs: tuple, output: ModelOutput) -> ModelOutput:
        output["last_hidden_state"] = output["last_hidden_state"][chosen]  # [m, hidden size]
        return output

    # The whole model is called, since DDP and FSDP work through its forward.
    hook = base_model.register_forward_hook(keep_chosen)
    try:
        output = model(**{name: batch[name] for name in MODEL_INPUTS if name in batch})
    finally:
        hook.remove()
    labels = batch["labels"][chosen]
    if "sentence_labels" not in batch:
        return output.logits.float(), labels, None
    sentence = output.sop_logits if "sop_logits" in output else output.seq_relationship_logits
    return output.prediction_logits.float(), labels, sentence.float()


def masked_lm_sums(model: nn.Module, base_model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sums of `PretrainingTask.row_sums`: of the masked tokens and, with a sentence task, of the pairs."""
    logits, labels, sentence_logits = _logits(model, base_model, batch)
    losses = functional.cross_entropy(logits, labels, reduction="none")  # [m]
    right = (logits.argmax(-1) == labels).float()
    sums = torch.zeros(len(batch["labels"]), 3, device=losses.device)
    rows = (batch["labels"] != IGNORED_LABEL).nonzero()[:, 0]
    sums.index_add_(0, rows, torch.stack([losses, right, torch.ones_like(losses)], dim=-1).float())
    if sentence_logits is None:
        return sums
    wanted = batch["sentence_labels"]
    of_pairs = functional.cross_entropy(sentence_logits, wanted, ignore_index=IGNORED_LABEL, reduction="none")
    right = sentence_logits.argmax(-1) == wanted
    return torch.cat([sums, torch.stack([of_pairs, right, wanted != IGNORED_LABEL], dim=-1)], dim=-1)


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
