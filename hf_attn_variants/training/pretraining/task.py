"""Pretraining of masked and causal language models, and the base class for all pretraining objectives."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ModelOutput

from ...registration import get_variant_config_class
from ..engine import models
from ..engine.dataloaders import IGNORED_LABEL, MaskedLMPreparer, TrainingBatchSource, create_stream_dataloader
from ..engine.finetune import FineTuningTask, fine_tune
from ..engine.loop import TrainingLoop
from ..engine.optimization import Objective, compute_label_statistics, count_labels, make_cross_entropy_objective
from ..engine.settings import check_dev_settings
from . import CAUSAL_LM_TYPES, MaskedLMSettings, PretrainingSettings
from .text_stream import (
    BlockPreparer,
    PretrainingText,
    TextSource,
    TextStream,
    open_text_splits,
    read_blocks,
    stack_examples,
)

logger = logging.getLogger(__name__)


class HeldOutBlockDataset(Dataset):
    """A dataset of held-out blocks. In runs with the same seed, all evaluations prepare the blocks identically."""

    def __init__(self, blocks: Sequence[np.ndarray], prepare: BlockPreparer):
        self.blocks, self.prepare = blocks, prepare

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        # The other block is far away because neighboring blocks may come from the same article.
        other_block = self.blocks[(index + len(self) // 2) % len(self)] if len(self) > 1 else None
        return self.prepare(self.blocks[index], (0, index), other_block)


def make_stream_batches(
    settings: Any,
    accelerator: Accelerator,
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    prepare: BlockPreparer,
) -> TrainingBatchSource:
    """Create the training batches from a text stream.

    Args:
        settings: The settings of the run, with the fields of `TextSettings`.
        accelerator: The accelerator of the run.
        sources: The shards of text.
        tokenizer: The tokenizer.
        prepare: Prepares examples from blocks.
    """
    shape = settings.per_device_train_batch_size, settings.seed, settings.shuffle_buffer_size
    processes = accelerator.process_index, accelerator.num_processes
    stream = TextStream(sources, tokenizer, prepare, *shape, *processes)
    loader = create_stream_dataloader(accelerator, stream, settings.seed, settings.dataloader_num_workers)
    return TrainingBatchSource(loader, stream.start_epoch, seek=stream.seek)


# A model uses context if removing the word order or the attention increases its loss by at least this many nats.
MIN_COST = 0.3


def compute_context_results(loss: float, shuffled_loss: float, zeroed_loss: float) -> dict[str, Any]:
    """Determine whether a model uses context, based on its losses without word order and without attention.

    Args:
        loss: The loss in nats per token.
        shuffled_loss: The loss for shuffled words.
        zeroed_loss: The loss with zeroed attention outputs.

    Returns:
        A dictionary with the losses "gate_shuffled_loss" and "gate_zeroed_attention_loss", their increases
        "gate_shuffled_cost" and "gate_zeroed_attention_cost" over `loss`, and "gate_passed", which is True if both
        increases are at least `MIN_COST`.
    """
    costs = {"gate_shuffled_cost": shuffled_loss - loss, "gate_zeroed_attention_cost": zeroed_loss - loss}
    return {
        "gate_shuffled_loss": shuffled_loss,
        "gate_zeroed_attention_loss": zeroed_loss,
        **costs,
        "gate_passed": all(cost >= MIN_COST for cost in costs.values()),
    }


def shuffle_positions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Shuffle the tokens and labels of each example with a fixed permutation.

    The first token, the last token and the padding are not moved.

    Args:
        batch: A batch with "input_ids", "attention_mask" and "labels" [b, n].
    """
    lengths = batch["attention_mask"].sum(-1).tolist()
    order = torch.arange(batch["input_ids"].shape[1]).repeat(len(lengths), 1)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(int(batch["input_ids"][row].sum()))
        order[row, 1 : length - 1] = 1 + torch.randperm(max(length - 2, 0), generator=generator)
    order = order.to(batch["input_ids"].device)
    return batch | {key: batch[key].gather(1, order) for key in ("input_ids", "labels")}


@contextmanager
def zero_attention(model: PreTrainedModel) -> Iterator[None]:
    """Replace the inputs of a model's attention output projections with zeros while the `with` block runs.

    Raises:
        ValueError: If this package does not support the architecture.
    """
    outputs = [module.get_submodule(site.output) for site, _, module in models.iterate_attention_modules(model)]
    hooks = [
        output.register_forward_pre_hook(lambda _, inputs: (torch.zeros_like(inputs[0]), *inputs[1:]))
        for output in outputs
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


PretrainingT = TypeVar("PretrainingT", bound=PretrainingSettings)


class Pretraining(FineTuningTask[PretrainingT]):
    """Base class for pretraining on a text stream, including a check that the model uses context.

    The results contain `eval_loss` (in nats per item), `eval_perplexity`, `eval_accuracy`, the number of items, and
    the results of the context check (see `compute_context_results`). The `__init__` method of a subclass must set the
    attributes below.

    Attributes:
        config: The configuration of the model.
        prepare: Prepares examples from blocks.
        items: The name of the metric that counts the predicted items, such as "masked_tokens".
        context_free_model_name: The name for a language model that does not use context, such as "unigram".
    """

    config: PreTrainedConfig
    prepare: BlockPreparer
    items: str
    main_metric, shown_metrics, context_free_model_name = "loss", ("accuracy", "sentence_accuracy"), "unigram"

    def __init__(self, settings: PretrainingT, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.text, self.collate = self.open_text(settings), stack_examples

    @staticmethod
    def open_text(settings: PretrainingSettings) -> PretrainingText:
        """Open the text, and check that there is held-out text if a flag requires it."""
        text = open_text_splits(settings)
        check_dev_settings(settings, bool(text.dev))
        return text

    @abstractmethod
    def compute_example_statistics(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Compute the summed loss, the number of correct items and the number of items for each example [b, 3].

        With a sentence task, the result also contains these three values for the sentence labels [b, 6].
        """

    def shuffle(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Shuffle the words of each example in a batch with a fixed permutation."""
        return shuffle_positions(batch)

    def read_blocks(self, sources: Sequence[TextSource], limit: int | None) -> list[np.ndarray]:
        """Read the first `limit` blocks of a text, or all blocks if `limit` is None.

        Raises:
            ValueError: If the text contains no tokens.
        """
        return read_blocks(sources, self.tokenizer, self.prepare.block_length, self.prepare.separator, limit)

    def make_training_batches(self) -> TrainingBatchSource:
        if self.text.train:
            self.read_blocks(self.text.train, 1)
        return make_stream_batches(self.settings, self.accelerator, self.text.train, self.tokenizer, self.prepare)

    def prepare_evaluation(self) -> bool:
        if not self.text.dev:
            return False
        rows = HeldOutBlockDataset(self.read_blocks(self.text.dev, self.settings.max_eval_samples), self.prepare)
        if not any((rows[i]["labels"] != IGNORED_LABEL).any() for i in range(len(rows))):
            raise ValueError(f"{self.text.dev[0].name} must contain a masked token for evaluation. Use a longer text.")
        self.dev_batches = self.make_eval_batches(rows, [0] * len(rows))
        return True

    def evaluate(self) -> dict[str, float]:
        """Compute the metrics for the held-out text.

        Returns:
            A dictionary with "loss" (in nats per item), "perplexity", "accuracy" and the number of items. With a
            sentence task, it also contains "sentence_loss" and "sentence_accuracy".
        """
        (loss, accuracy, items), *pairs = self._compute_mean_metrics()
        perplexity = float(np.exp(min(loss, 700.0)))  # larger values would overflow
        metrics = {"loss": loss, "perplexity": perplexity, "accuracy": accuracy, self.items: items}
        if pairs and pairs[0][2]:
            metrics["sentence_loss"], metrics["sentence_accuracy"], _ = pairs[0]
        return metrics

    def _compute_mean_metrics(
        self, transform: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda batch: batch
    ) -> list[tuple[float, float, int]]:
        """Compute the mean loss, the accuracy and the number of items for the held-out text.

        Args:
            transform: A function that modifies a batch before it is passed to the model.

        Returns:
            A list with one tuple of these values, and with a second tuple for the sentence labels if there is a
            sentence task.
        """

        def compute_outputs(batch: dict[str, Tensor]) -> tuple[Tensor]:
            return (self.compute_example_statistics(self.model, transform(batch)),)

        rows = self.run_model_on_rows(self.dev_batches, compute_outputs, "dev")[0]
        sums = torch.from_numpy(rows).double().sum(0).tolist()  # on the CPU because not every device supports float64
        triples = [sums[i : i + 3] for i in range(0, len(sums), 3)]
        return [(loss / max(number, 1), right / max(number, 1), int(number)) for loss, right, number in triples]

    def get_fingerprint(self) -> dict[str, Any]:
        return self.text.train_fingerprint

    def get_dev_fingerprint(self) -> dict[str, Any]:
        return self.text.dev_fingerprint

    def after_training(self, loop: TrainingLoop, model: nn.Module) -> nn.Module:
        self.epoch = loop.state.epoch
        return model

    def get_dev_results(self) -> dict[str, Any]:
        # Evaluate the model without word order and without attention.
        shuffled = self._compute_mean_metrics(self.shuffle)[0][0]
        with zero_attention(self.accelerator.unwrap_model(self.model)):
            zeroed = self._compute_mean_metrics()[0][0]
        context_results = compute_context_results(self.metrics["loss"], shuffled, zeroed)
        return {"eval_samples": len(self.dev_batches[1]), **context_results}

    def get_results(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def format_summary(self, results: dict[str, Any]) -> str:
        if "eval_loss" not in results:
            return "no held-out text; "
        if not results["gate_passed"]:
            logger.warning(
                "The model still behaves like a %s model. It does not use context, so experiments with its attention "
                "are not meaningful. Train it for longer, or with a higher --learning_rate, a longer warm-up, a "
                "shorter --max_length or a smaller vocabulary.", self.context_free_model_name
            )  # fmt: skip
        scores = f"dev loss {results['eval_loss']:.4f} (perplexity {results['eval_perplexity']:.2f}), "
        scores += f"accuracy {results['eval_accuracy']:.4f}"
        if "eval_sentence_accuracy" in results:
            scores += f", accuracy of pairs {results['eval_sentence_accuracy']:.4f}"
        return (
            f"context check {'passed' if results['gate_passed'] else 'FAILED'}: shuffled words increase the loss by "
            f"{results['gate_shuffled_cost']:+.3f} nats, zeroed attention by "
            f"{results['gate_zeroed_attention_cost']:+.3f}; both must be at least {MIN_COST}\n{scores}; "
        )


class CausalLMPreparer:
    """Prepares blocks of tokens for causal language modeling.

    The inputs are the beginning-of-sequence token and the block without its last token. Each token in the text is
    predicted once. The first token in a block is predicted only from the beginning-of-sequence token, and the other
    tokens are predicted from all earlier tokens in the block.

    Args:
        tokenizer: A tokenizer with a beginning-of-sequence token ([CLS], `<s>`), an end-of-sequence token ([SEP],
            `</s>`) and a padding token.
        length: The length n of inputs and blocks in tokens.

    Raises:
        ValueError: If the tokenizer lacks one of these tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int):
        self.begin_id, self.separator, self.pad_id = *get_boundary_token_ids(tokenizer), tokenizer.pad_token_id
        self.length = self.block_length = length

    def __call__(
        self, block: np.ndarray, key: tuple[int, ...], other_block: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Prepare an example with "input_ids", "attention_mask" and "labels" [n].

        The label at each position is the next token, or -100 for padding. There are no random choices, so `key` and
        `other_block` are not used.
        """
        ids = np.full(self.length, self.pad_id, dtype=np.int64)
        labels = np.full(self.length, IGNORED_LABEL, dtype=np.int64)
        ids[: len(block)] = [self.begin_id, *block[:-1]]
        labels[: len(block)] = block
        attention_mask = (np.arange(self.length) < len(block)).astype(np.int64)
        return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def get_boundary_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the ids of the tokens that start and end a text.

    Raises:
        ValueError: If the tokenizer lacks one of these tokens.
    """
    begin = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    end = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
    if begin is None or end is None:
        raise ValueError(
            "The tokenizer must have a token that starts a text ([CLS] or bos_token) and a token that ends it ([SEP] "
            "or eos_token). Use another --tokenizer_name."
        )
    return begin, end


def compute_causal_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Compute the logits [b, n, V] for the next token at each position."""
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits


class CausalLMPretraining(Pretraining[MaskedLMSettings]):
    """Pretraining for causal language modeling with a BERT, RoBERTa or ELECTRA model."""

    name, items, context_free_model_name = "causal LM", "predicted_tokens", "bigram"

    def __init__(self, settings: MaskedLMSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.config, self.tokenizer = models.load_or_make_config(settings)
        convert_to_decoder_config(settings, self.config, self.tokenizer)
        models.check_max_length(settings.max_length, self.config, self.tokenizer)
        self.prepare = CausalLMPreparer(self.tokenizer, settings.max_length)

    def load_model(self) -> PreTrainedModel:
        return models.load_or_make_model(self.settings, self.config, AutoModelForCausalLM, requires_all_weights=True)

    def make_objective(self) -> Objective:
        return make_cross_entropy_objective(compute_causal_logits)

    def compute_example_statistics(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return compute_label_statistics(compute_causal_logits(model, batch), batch["labels"])


def convert_to_decoder_config(
    settings: MaskedLMSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Change a configuration to that of a causal language model, and set the tokens that start and end a text.

    Raises:
        ValueError: If Transformers has no causal class for the architecture, or if the attention variant does not
            support causal attention.
    """
    name = f"{settings.model_name_or_path or 'The new model'} ({config.model_type})"
    if (
        config.is_encoder_decoder
        or "AutoModelForCausalLM" not in get_variant_config_class(config.model_type).auto_classes
    ):
        raise ValueError(
            f"{name} does not support causal language modeling. Use --objective clm with one of these model types: "
            f"{', '.join(CAUSAL_LM_TYPES)}."
        )
    if settings.model_name_or_path is not None and not getattr(config, "is_decoder", False):
        logger.info(
            "%s was an encoder. It is converted to a decoder, in which tokens attend only to earlier tokens.", name
        )
    config.is_decoder = True
    config.bos_token_id, config.eos_token_id = get_boundary_token_ids(tokenizer)
    check = getattr(config, "check_variant", None)  # only exists in configurations from this package
    if check is not None:
        check()  # raise an error early if the attention does not support causal masking


# The model types whose `...ForPreTraining` class has a head for the sentence task.
PAIR_TYPES = ("albert", "bert")
MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def make_masked_lm_objective(model: PreTrainedModel, sentence_weight: float = 0.0) -> Objective:
    """Create an objective that sums the cross-entropies of the masked tokens and, with a sentence task, of the pairs.

    Args:
        model: A masked language model that has not been wrapped yet. The layers after its base model process only the
            masked positions, which results in the same loss but reduces their computation to about a seventh.
        sentence_weight: The weight of a sentence label relative to a masked token. If it is the expected number of
            masked tokens per example, both tasks have the same weight, as in BERT.
    """

    base_model = model.base_model

    def compute_loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels, sentence_logits = _compute_masked_lm_logits(model, base_model, batch)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        if sentence_logits is None:
            return loss
        return loss + sentence_weight * functional.cross_entropy(
            sentence_logits, batch["sentence_labels"], ignore_index=IGNORED_LABEL, reduction="sum"
        )

    return Objective(loss_sum=compute_loss_sum, count=count_labels, applies_head_to_items_only=True)


def _compute_masked_lm_logits(
    model: nn.Module, base_model: nn.Module, batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the logits [m, V] and labels [m] of the masked tokens, and the sentence logits [b, 2].

    The sentence logits are None if there is no sentence task.
    """
    is_labeled = batch["labels"] != IGNORED_LABEL  # [b, n]

    def keep_labeled_positions(_: nn.Module, inputs: tuple, output: ModelOutput) -> ModelOutput:
        output["last_hidden_state"] = output["last_hidden_state"][is_labeled]  # [m, hidden size]
        return output

    # The whole model is called because DDP and FSDP add hooks to its forward method.
    hook = base_model.register_forward_hook(keep_labeled_positions)
    try:
        output = model(**{name: batch[name] for name in MODEL_INPUTS if name in batch})
    finally:
        hook.remove()
    labels = batch["labels"][is_labeled]
    if "sentence_labels" not in batch:
        return output.logits.float(), labels, None
    sentence = output.sop_logits if "sop_logits" in output else output.seq_relationship_logits
    return output.prediction_logits.float(), labels, sentence.float()


def compute_masked_lm_statistics(model: nn.Module, base_model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Compute the result of `Pretraining.compute_example_statistics` for a masked language model.

    Args:
        model: The model, which may be wrapped.
        base_model: The base model inside `model`.
        batch: The batch.
    """
    logits, labels, sentence_logits = _compute_masked_lm_logits(model, base_model, batch)
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


class MaskedLMPretraining(Pretraining[MaskedLMSettings]):
    """Pretraining for masked language modeling with an encoder, optionally with a sentence task."""

    name, items = "masked LM", "masked_tokens"

    def __init__(self, settings: MaskedLMSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.config, self.tokenizer = models.load_or_make_config(settings)
        _check_encoder(settings, self.config)
        models.check_max_length(settings.max_length, self.config, self.tokenizer)
        _check_sentence_task(settings, self.config)
        masking = settings.mlm_probability, settings.seed, settings.whole_word_mask, settings.sentence_task
        self.prepare = MaskedLMPreparer(self.tokenizer, settings.max_length, *masking)

    def load_model(self) -> PreTrainedModel:
        settings = self.settings
        auto_class = AutoModelForMaskedLM if settings.sentence_task is None else AutoModelForPreTraining
        # The head for the sentence task may be randomly initialized, unless the model is only evaluated.
        model = models.load_or_make_model(
            settings, self.config, auto_class, requires_all_weights=settings.only_evaluates
        )
        self.unwrapped_model = model
        return model

    def make_objective(self) -> Objective:
        sentence_weight = self.settings.mlm_probability * self.prepare.block_length
        return make_masked_lm_objective(self.unwrapped_model, sentence_weight)

    def compute_example_statistics(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return compute_masked_lm_statistics(model, self.unwrapped_model.base_model, batch)


def pretrain_masked_lm(settings: MaskedLMSettings) -> dict[str, Any]:
    """Train a masked language model, evaluate it, check whether it uses context, and save it.

    With the objective "clm", a causal language model is trained instead. This function returns the same results and
    raises the same errors as `fine_tune`.

    Example:
        ```python
        settings = MaskedLMSettings(
            model_type="bert", tokenizer_name="bert-base-uncased", train_file=("text.txt",), max_train_steps=1000,
            output_dir="out",
        )
        results = pretrain_masked_lm(settings)
        ```
    """
    return fine_tune(CausalLMPretraining if settings.is_causal else MaskedLMPretraining, settings)


def _check_encoder(settings: MaskedLMSettings, config: PreTrainedConfig) -> None:
    """Check that the model is an encoder.

    This is necessary because the auto classes also create masked language models for encoder-decoder architectures
    such as BART, whose decoder would read the masked text.
    """
    name = settings.model_name_or_path or f"--model_type {settings.model_type}"
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} ({config.model_type}) must be an encoder, but is an encoder-decoder. Use `attn-variants "
            "pretrain-t5` for T5 models, or `attn-variants seq2seq` for others."
        )
    if getattr(config, "is_decoder", False):
        raise ValueError(f"{name} must be an encoder, but is a decoder (is_decoder). Set --objective clm.")


def _check_sentence_task(settings: MaskedLMSettings, config: PreTrainedConfig) -> None:
    """Check that the settings and the model support the sentence task."""
    task = settings.sentence_task
    if task is None:
        return
    if task == "nsp" and settings.shuffle_buffer_size < 2:
        raise ValueError(
            f"--shuffle_buffer_size must be at least 2 with --sentence_task nsp, got {settings.shuffle_buffer_size}. "
            "The task samples the other text from the buffer."
        )
    if config.model_type.removeprefix("attn_variant_") not in PAIR_TYPES:
        raise ValueError(
            f"--sentence_task {task} requires a model with a head for pairs ({', '.join(PAIR_TYPES)}), got "
            f"{config.model_type}."
        )
