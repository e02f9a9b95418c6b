"""The optimiser, its parameter groups and its schedule."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import Adafactor, get_scheduler
from transformers.optimization import AdafactorSchedule

from ...modeling.mechanisms.kernels.kernel_table import learned_names
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

NO_DECAY_PARAMETERS = ("bias", *PROJECTIONS, *learned_names())


def find_no_decay_parameters(model: nn.Module) -> set[str]:
    """Return the names of parameters that must not decay: biases, norms, talking-heads projections.

    Norms are known by their class (LayerNorm, T5LayerNorm, RMSNorm, ...), biases by their own name: T5's
    `relative_attention_bias.weight` is an embedding and decays like one.
    """
    names = set()
    for module_name, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False):
            if is_norm or name in NO_DECAY_PARAMETERS:
                names.add(f"{module_name}.{name}" if module_name else name)
    return names


def make_parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Split a model's trainable parameters into those that decay and those that do not."""
    exempt = find_no_decay_parameters(model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for name, parameter in named if name not in exempt], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in named if name in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def create_optimizer(model: nn.Module, settings: OptimizationSettings) -> torch.optim.Optimizer:
    """Make AdamW (arXiv:1711.05101) or Adafactor (arXiv:1804.04235) over `make_parameter_groups`."""
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
        # One pass over the parameters instead of a dozen.
        fused=all(parameter.device.type in ("cpu", "cuda") for parameter in model.parameters()),
    )


def create_scheduler(
    optimizer: torch.optim.Optimizer, settings: OptimizationSettings, total_steps: int
) -> LRScheduler:
    """Make the learning-rate schedule.

    Raises:
        ValueError: if the warm-up is longer than the run, or leaves a polynomial no step; the schedule does not know a
            setting.
    """
    if settings.optim == "adafactor" and settings.adafactor_relative_step:
        return AdafactorSchedule(optimizer)
    warmup = get_warmup_steps(settings, total_steps)
    # A run that only evaluates needs none, and a polynomial would divide by its steps.
    kind = settings.lr_scheduler_type if total_steps else "constant"
    if kind == "polynomial" and warmup == total_steps:
        raise ValueError(f"a warm-up of all {total_steps} steps leaves --lr_scheduler_type polynomial none to fall in")
    try:
        return get_scheduler(kind, optimizer, warmup, total_steps, dict(settings.lr_scheduler_kwargs))
    except TypeError as error:
        raise ValueError(
            f"--lr_scheduler_kwargs {settings.lr_scheduler_kwargs} do not fit {settings.lr_scheduler_type}: {error}"
        ) from error


def prepare_training(
    settings: OptimizationSettings, accelerator: Accelerator, model: nn.Module, total_steps: int
) -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
    """Make the optimiser and the schedule, and prepare both with the model, as `TrainingLoop` takes them.

    Raises:
        ValueError: if the schedule's settings do not fit the run.
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
    # torch shards a parameter in one group only: T5's three embeddings of one weight become one module.
    embeddings = model.get_input_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is type(embeddings) and child.weight is embeddings.weight:
                setattr(parent, name, embeddings)


def list_sharded_layers(model: Any) -> set[str]:
    """Return the classes of the layers that FSDP2 shards one by one, less those that hold the input embeddings.

    accelerate shards the embeddings by themselves, and torch refuses that inside of a layer that is already sharded,
    as BertEmbeddings would be.
    """
    embeddings = model.get_input_embeddings()
    holders = {type(module).__name__ for module in model.modules() if embeddings in module.modules()}
    return set(model._no_split_modules or ()) - holders
