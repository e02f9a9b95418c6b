"""Losses shared by several tasks, the optimizer with its parameter groups, and the learning-rate schedule.

In shapes, b is the number of examples, n is the number of target tokens, and V is the vocabulary size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from transformers import Adafactor, get_scheduler
from transformers.optimization import AdafactorSchedule

from ...modeling.mechanisms.attention_extension import AttentionExtension
from ...modeling.mechanisms.kernels.kernel_table import get_learned_parameter_names
from ...modeling.mechanisms.talking_heads import HEAD_PROJECTIONS
from .dataloaders import IGNORED_LABEL
from .settings import OptimizationSettings, get_warmup_steps
from .weighted_heads import KEY_WEIGHTS, VALUE_WEIGHTS

# The sum [b] of a loss over the items in each example, and the number of items [b]. The quotient of their totals is
# the mean loss.
LossTerm = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Objective:
    """A training loss, which is averaged over all items in an optimizer step.

    An optimizer step consists of the accumulated batches on all processes.

    Attributes:
        loss_sum: A function that maps a model and a batch to the loss, summed (not averaged) over the items in the
            batch. The loss is a scalar tensor with a gradient.
        count: A function that maps a batch to its number of items (examples or target tokens).
        examples: A function that maps a batch to its number of examples, which is used to report the throughput. By
            default, it returns the length of the first tensor.
        applies_head_to_items_only: Whether the layers after the base model process only the counted items (such as
            masked tokens), which affects the number of FLOPs.
    """

    loss_sum: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    count: Callable[[dict[str, Tensor]], int]
    examples: Callable[[dict[str, Tensor]], int] = lambda batch: len(next(iter(batch.values())))
    applies_head_to_items_only: bool = False


def make_cross_entropy_objective(
    compute_logits_fn: Callable[[nn.Module, dict[str, Tensor]], Tensor], label_smoothing: float = 0.0
) -> Objective:
    """Create an objective that sums the cross-entropy over all "labels" [b, n] in a batch that are not -100.

    Args:
        compute_logits_fn: A function that maps a model and a batch to logits [b, n, V].
        label_smoothing: The share of each label's probability that is distributed evenly over all V classes.
    """

    def compute_loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(
            compute_logits_fn(model, batch).flatten(0, 1).float(),
            batch["labels"].flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
            label_smoothing=label_smoothing,
        )

    return Objective(loss_sum=compute_loss_sum, count=count_labels)


def count_labels(batch: dict[str, Tensor]) -> int:
    """Return the number of "labels" in a batch that are not -100."""
    return int((batch["labels"] != IGNORED_LABEL).sum())


def compute_label_statistics(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the summed loss, the number of correct predictions and the number of labels for each example.

    Args:
        logits: The logits [b, n, V].
        labels: The labels [b, n], with -100 at positions without a label.

    Returns:
        A tensor [b, 3] with these three values.
    """
    losses = functional.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED_LABEL, reduction="none"
    )  # [b, n]
    correct = logits.argmax(-1) == labels
    return torch.stack([part.float().sum(-1) for part in (losses, correct, labels != IGNORED_LABEL)], dim=-1)


def compute_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Compute the logits for a batch without passing the labels, so that Transformers does not compute a loss."""
    return model(**{key: value for key, value in batch.items() if key != "labels"}).logits


def compute_target_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Compute the logits [b, n, V] of an encoder-decoder model for a batch, using teacher forcing."""
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "decoder_input_ids")}
    return model(**inputs, use_cache=False).logits


def compute_token_cross_entropy(logits: Tensor, labels: Tensor) -> LossTerm:
    """Compute the cross-entropy in nats for all labels that are not -100.

    Args:
        logits: The logits [b, n, V].
        labels: The labels [b, n].

    Returns:
        The sum [b] over the tokens in each example, and the number of tokens [b].
    """
    is_labeled = labels >= 0
    losses = functional.cross_entropy(logits[is_labeled].float(), labels[is_labeled], reduction="none")
    return sum_values_per_example(losses, is_labeled), is_labeled.sum(-1)


def sum_values_per_example(values: Tensor, mask: Tensor) -> Tensor:
    """Sum the values of each example and return the sums [b].

    Args:
        values: One value per chosen item, ordered by example.
        mask: A boolean mask [b, n] that is True for the chosen items.
    """
    return torch.zeros(mask.shape, device=values.device, dtype=values.dtype).masked_scatter(mask, values).sum(-1)


NO_DECAY_PARAMETERS = ("bias", *HEAD_PROJECTIONS, *get_learned_parameter_names(), KEY_WEIGHTS, VALUE_WEIGHTS)


def get_no_decay_parameter_names(model: nn.Module) -> set[str]:
    """Find the names of the parameters without weight decay: biases, norms, and special attention parameters.

    Norms are recognized by the class name (LayerNorm, T5LayerNorm, RMSNorm, ...), and attention extensions by their
    base class. Biases, talking-heads projections and learned kernel parameters are recognized by the parameter name.
    T5's `relative_attention_bias.weight` is an embedding, so weight decay applies to it.
    """
    return {
        f"{module_name}.{name}".removeprefix(".")
        for module_name, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if name in NO_DECAY_PARAMETERS
        or "norm" in type(module).__name__.lower()
        or isinstance(module, AttentionExtension)
    }


def make_parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Split the trainable parameters of a model into a group with weight decay and a group without it."""
    no_decay_names = get_no_decay_parameter_names(model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [parameter for name, parameter in named if name not in no_decay_names]
    others = [parameter for name, parameter in named if name in no_decay_names]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def create_optimizer(model: nn.Module, settings: OptimizationSettings) -> torch.optim.Optimizer:
    """Create an AdamW (arXiv:1711.05101) or Adafactor (arXiv:1804.04235) optimizer for the trainable parameters."""
    if settings.optim == "adafactor":
        relative = settings.adafactor_relative_step
        return Adafactor(
            make_parameter_groups(model, settings.weight_decay),
            lr=None if relative else settings.learning_rate,
            scale_parameter=settings.adafactor_scale_parameter,
            relative_step=relative,
            warmup_init=relative,
        )
    return torch.optim.AdamW(
        make_parameter_groups(model, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        # The fused kernel makes a single pass over the parameters instead of about a dozen passes.
        fused=all(parameter.device.type in ("cpu", "cuda") for parameter in model.parameters()),
    )


def create_scheduler(
    optimizer: torch.optim.Optimizer, settings: OptimizationSettings, total_steps: int
) -> LRScheduler:
    """Create the learning-rate schedule.

    Raises:
        ValueError: If the warm-up is longer than the run, if it leaves no steps for a polynomial schedule, or if the
            schedule does not support one of the arguments.
    """
    if settings.optim == "adafactor" and settings.adafactor_relative_step:
        return AdafactorSchedule(optimizer)
    warmup = get_warmup_steps(settings, total_steps)
    # A run that only evaluates does not need a schedule, and a polynomial schedule would divide by zero.
    kind = settings.lr_scheduler_type if total_steps else "constant"
    if kind == "polynomial" and warmup == total_steps:  # the schedule would divide by zero at the last step
        raise ValueError(
            "--num_warmup_steps must be less than the number of training steps for a polynomial schedule, got "
            f"{warmup} warmup steps and {total_steps} training steps."
        )
    try:
        return get_scheduler(kind, optimizer, warmup, total_steps, dict(settings.lr_scheduler_kwargs))
    except TypeError as error:
        raise ValueError(f"--lr_scheduler_kwargs is not valid for {settings.lr_scheduler_type}: {error}.") from error


def prepare_training(
    settings: OptimizationSettings, accelerator: Accelerator, model: nn.Module, total_steps: int
) -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
    """Create the optimizer and the learning-rate schedule, and prepare them and the model with Accelerate.

    Raises:
        ValueError: If the schedule settings are not valid for the run.
    """
    optimizer = create_optimizer(model, settings)
    scheduler = create_scheduler(optimizer, settings, total_steps)
    if accelerator.is_fsdp2:
        _merge_tied_embeddings(model)
        plugin = accelerator.state.fsdp_plugin
        if plugin.transformer_cls_names_to_wrap is None:
            plugin.transformer_cls_names_to_wrap = sorted(list_fsdp_layer_class_names(model))
    return accelerator.prepare(model, optimizer, scheduler)


def _merge_tied_embeddings(model: Any) -> None:
    # PyTorch shards a parameter in only one group, so T5's three embedding modules, which share a weight, are merged.
    embeddings = model.get_input_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is type(embeddings) and child.weight is embeddings.weight:
                setattr(parent, name, embeddings)


def list_fsdp_layer_class_names(model: Any) -> set[str]:
    """List the class names of the layers that FSDP2 shards individually.

    Layers that contain the input embeddings, such as `BertEmbeddings`, are excluded. Accelerate shards the embeddings
    separately, which PyTorch does not support inside a sharded layer.
    """
    embeddings = model.get_input_embeddings()
    holders = {type(module).__name__ for module in model.modules() if embeddings in module.modules()}
    return set(model._no_split_modules or ()) - holders
