"""Pretraining of encoders as masked language models."""

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

__all__ = ["compute_masked_lm_sums", "make_masked_lm_objective", "pretrain_masked_lm"]

MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def make_masked_lm_objective(model: PreTrainedModel, sentence_weight: float = 0.0) -> Objective:
    """Return the objective that sums the cross-entropy of the masked tokens, and of the sentence task if there is one.

    Args:
        model: A masked-LM model that is not wrapped yet. The layers after its base model process only the masked
            positions. The loss is the same, for about a seventh of their work.
        sentence_weight: The weight of a sentence label, in masked tokens. With the expected number of masked tokens
            per example, both tasks have the same weight, as in BERT.
    """

    base_model = model.base_model

    def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels, sentence_logits = _compute_logits(model, base_model, batch)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        if sentence_logits is None:
            return loss
        return loss + sentence_weight * functional.cross_entropy(
            sentence_logits, batch["sentence_labels"], ignore_index=IGNORED_LABEL, reduction="sum"
        )

    def count(batch: dict[str, Tensor]) -> int:
        return int((batch["labels"] != IGNORED_LABEL).sum())

    return Objective(loss_sum=loss_sum, count=count, head_of_items=True)


def _compute_logits(
    model: nn.Module, base_model: nn.Module, batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the logits [m, V] and labels [m] of masked tokens, and the sentence logits [b, 2] or None."""
    chosen = batch["labels"] != IGNORED_LABEL  # [b, n]

    def keep_chosen(_: nn.Module, inputs: tuple, output: ModelOutput) -> ModelOutput:
        output["last_hidden_state"] = output["last_hidden_state"][chosen]  # [m, hidden size]
        return output

    # Call the whole model, because DDP and FSDP hook into its forward.
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


def compute_masked_lm_sums(model: nn.Module, base_model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sums of `PretrainingTask.row_sums` over masked tokens, and over pairs if there is a sentence task."""
    logits, labels, sentence_logits = _compute_logits(model, base_model, batch)
    losses = functional.cross_entropy(logits, labels, reduction="none")  # [m]
    right = (logits.argmax(-1) == labels).float()
    sums = torch.zeros(len(batch["labels"]), 3, device=losses.device)
    rows = (batch["labels"] != IGNORED_LABEL).nonzero()[:, 0]
    sums.index_add_(0, rows, torch.stack([losses, right, torch.ones_like(losses)], dim=-1).float())
    if sentence_logits is None:
        return sums
    sentence_labels = batch["sentence_labels"]
    pair_losses = functional.cross_entropy(
        sentence_logits, sentence_labels, ignore_index=IGNORED_LABEL, reduction="none"
    )
    right = sentence_logits.argmax(-1) == sentence_labels
    pair_sums = torch.stack([pair_losses, right, sentence_labels != IGNORED_LABEL], dim=-1)
    return torch.cat([sums, pair_sums], dim=-1)


def pretrain_masked_lm(settings: MaskedLMSettings) -> dict[str, Any]:
    """Train a masked language model, evaluate it, check whether it uses its context, and save it.

    With the objective "clm", train a causal language model instead.

    Returns:
        The first results of `all_results.json`: `eval_loss` (nats per masked token), `eval_perplexity`,
        `eval_accuracy`, `gate_passed` with the losses and costs behind it, and `TrainingLoop.results`.

    Raises:
        ValueError, OSError: If a setting, the text or the checkpoint is wrong. Most errors come before training.
        NonFiniteLossError: If training diverges.

    Example:
        ```python
        settings = MaskedLMSettings(
            model_type="bert", tokenizer_name="bert-base-uncased", train_file=("text.txt",), max_train_steps=1000,
            output_dir="out",
        )
        results = pretrain_masked_lm(settings)
        ```
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
        # The head of a sentence task may be new, except if the model is only evaluated.
        model = load_or_make_model(settings, config, auto_class, needs_all=settings.only_evaluates)
        base_model = model.base_model
        task = PretrainingTask(
            "masked LM",
            prepare,
            make_masked_lm_objective(model, sentence_weight=settings.mlm_probability * prepare.block_length),
            lambda model, batch: compute_masked_lm_sums(model, base_model, batch),
            "masked_tokens",
            shuffle_positions,
        )
        return pretrain(settings, accelerator, model, tokenizer, text, task)


def _check_encoder(settings: MaskedLMSettings, config: PreTrainedConfig) -> None:
    """Raise ValueError if the model is not an encoder.

    Auto classes also make masked-LM models of encoder-decoders such as BART, whose decoder would read the masked
    words.
    """
    name = settings.model_name_or_path or f"--model_type {settings.model_type}"
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} ({config.model_type}) must be an encoder, but is an encoder-decoder. Use `attn-variants "
            "pretrain-t5` for a T5, or `attn-variants seq2seq` for others."
        )
    if getattr(config, "is_decoder", False):
        raise ValueError(f"{name} must be an encoder, but is a decoder (is_decoder). Set --objective clm.")


def _check_pairs(settings: MaskedLMSettings, config: PreTrainedConfig) -> None:
    """Raise ValueError if the settings or the model do not allow the sentence task."""
    task = settings.sentence_task
    if task is None:
        return
    if settings.max_length < 5:
        raise ValueError(f"--max_length must be at least 5 with --sentence_task {task}, got {settings.max_length}.")
    if task == "nsp" and settings.shuffle_buffer_size < 2:
        raise ValueError(
            f"--shuffle_buffer_size must be at least 2 with --sentence_task nsp, got {settings.shuffle_buffer_size}. "
            "The task draws the other text from the buffer."
        )
    with torch.device("meta"):
        model = AutoModelForPreTraining.from_config(config)
    if not {"next_sentence_label", "sentence_order_label"} & inspect.signature(model.forward).parameters.keys():
        raise ValueError(
            f"--sentence_task {task} needs a model with a head for pairs, got {type(model).__name__}. Use a BERT or "
            "an ALBERT."
        )
    token_types = getattr(config, "type_vocab_size", 0)
    if token_types < 2:
        raise ValueError(
            f"--sentence_task {task} needs a model with at least 2 token types (type_vocab_size), got {token_types}. "
            "They distinguish the two segments of a pair."
        )
