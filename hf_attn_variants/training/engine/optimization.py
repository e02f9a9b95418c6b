"""The optimizer, its parameter groups and the learning-rate schedule."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import Adafactor, get_scheduler
from transformers.optimization import AdafactorSchedule

from ...modeling.mechanisms.kernels.kernel_table import get_learned_parameter_names
from ...modeling.mechanisms.talking_heads import PROJECTIONS
from .settings import OptimizationSettings, get_warmup_steps

__all__ = [
    "create_optimizer",
    "create_scheduler",
    "find_no_decay_parameters",
    "list_sharded_layers",
    "make_parameter_groups",
    "prepare_training",
]

NO_DECAY_PARAMETERS = ("bias", *PROJECTIONS, *get_learned_parameter_names())


def find_no_decay_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters without weight decay: biases, norms and talking-heads projections.

    Norms are recognized by their class name (LayerNorm, T5LayerNorm, RMSNorm, ...), biases by their parameter name.
    T5's `relative_attention_bias.weight` is an embedding and has weight decay like one.
    """
    names = set()
    for module_name, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False):
            if is_norm or name in NO_DECAY_PARAMETERS:
                names.add(f"{module_name}.{name}" if module_name else name)
    return names


def make_parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Split the trainable parameters of a model into one group with and one without weight decay."""
    exempt = find_no_decay_parameters(model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for name, parameter in named if name not in exempt], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in named if name in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def create_optimizer(model: nn.Module, settings: OptimizationSettings) -> torch.optim.Optimizer:
    """Create AdamW (arXiv:1711.05101) or Adafactor (arXiv:1804.04235) with `make_parameter_groups`."""
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
        # The fused kernel makes one pass over the parameters instead of a dozen.
        fused=all(parameter.device.type in ("cpu", "cuda") for parameter in model.parameters()),
    )


def create_scheduler(
    optimizer: torch.optim.Optimizer, settings: OptimizationSettings, total_steps: int
) -> LRScheduler:
    """Create the learning-rate schedule.

    Raises:
        ValueError: If the warm-up is longer than the run, if it leaves no steps for a polynomial schedule, or if the
            schedule does not have one of the settings.
    """
    if settings.optim == "adafactor" and settings.adafactor_relative_step:
        return AdafactorSchedule(optimizer)
    warmup = get_warmup_steps(settings, total_steps)
    # A run that only evaluates needs no schedule, and a polynomial would divide by zero steps.
    kind = settings.lr_scheduler_type if total_steps else "constant"
    if kind == "polynomial" and warmup == total_steps:
        raise ValueError(
            f"--lr_scheduler_type polynomial needs steps after the warm-up, got a warm-up of all {total_steps} steps. "
            "Use a shorter warm-up."
        )
    try:
        return get_scheduler(kind, optimizer, warmup, total_steps, dict(settings.lr_scheduler_kwargs))
    except TypeError as error:
        raise ValueError(
            f"--lr_scheduler_kwargs {settings.lr_scheduler_kwargs} does not fit --lr_scheduler_type "
            f"{settings.lr_scheduler_type}: {error}."
        ) from error


def prepare_training(
    settings: OptimizationSettings, accelerator: Accelerator, model: nn.Module, total_steps: int
) -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
    """Create the optimizer and the schedule, and prepare them and the model with Accelerate for `TrainingLoop`.

    Raises:
        ValueError: If the settings of the schedule do not fit the run.
    """
    optimizer = create_optimizer(model, settings)
    scheduler = create_scheduler(optimizer, settings, total_steps)
    if accelerator.is_fsdp2:
        _unite_tied_embeddings(model)
        plugin = accelerator.state.fsdp_plugin
        if plugin.transformer_cls_names_to_wrap is None:
            plugin.transformer_cls_names_to_wrap = sorted(list_sharded_layers(model))
    return accelerator.prepare(model, optimizer, scheduler)


def _unite_tied_embeddings(model: Any) -> None:
    # PyTorch shards a parameter in only one group, so T5's three embedding modules with one weight become one module.
    embeddings = model.get_input_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is type(embeddings) and child.weight is embeddings.weight:
                setattr(parent, name, embeddings)


def list_sharded_layers(model: Any) -> set[str]:
    """Return the class names of the layers that FSDP2 shards one by one.

    Layers that contain the input embeddings, such as BertEmbeddings, are left out: Accelerate shards the embeddings
    separately, and PyTorch cannot do that inside a layer that is already sharded.
    """
    embeddings = model.get_input_embeddings()
    holders = {type(module).__name__ for module in model.modules() if embeddings in module.modules()}
    return set(model._no_split_modules or ()) - holders
