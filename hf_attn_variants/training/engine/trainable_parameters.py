"""Selects the parameters of a model to train: all, only those of the attention, or LoRA adapters."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .models import iterate_attention_modules


def select_trainable_parameters(model: PreTrainedModel, trainable: str) -> None:
    """Set `requires_grad` for the parameters to train.

    Args:
        model: The model.
        trainable: "all", "attention" (only the parameters of the attention modules) or "lora" (no parameters, because
            LoRA adds its own).
    """
    for parameter in model.parameters():
        parameter.requires_grad_(trainable == "all")
    if trainable == "attention":
        for site, path, module in iterate_attention_modules(model):
            # The latent projection can be shared by all layers, in which case it is outside the module.
            latent = site.get_latent_projection(model.base_model, path)
            for parameter in (*module.parameters(), *(latent.parameters() if latent is not None else ())):
                parameter.requires_grad_(True)


def add_lora(model: PreTrainedModel, rank: int, alpha: float) -> Any:
    """Add trainable low-rank updates (LoRA, arXiv:2106.09685) to the projections in all attention modules.

    The model is modified in place, and all other parameters are frozen.

    Args:
        model: The model.
        rank: The rank of the updates.
        alpha: The scaling parameter. The updates are multiplied by alpha / rank.

    Returns:
        The model wrapped as a PEFT model. Its `merge_and_unload` method adds the updates to the weights.
    """
    from peft import LoraConfig, get_peft_model

    names = {id(module): name for name, module in model.named_modules()}
    layers = []
    for site, path, module in iterate_attention_modules(model):
        layers += [module.get_submodule(linear) for linear in site.projections.values()]
        latent = site.get_latent_projection(model.base_model, path)
        layers += [] if latent is None else [latent]
    targets = list(dict.fromkeys(names[id(layer)] for layer in layers))
    lora_alpha: Any = alpha  # annotated as int in PEFT, which accepts any number
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=lora_alpha, target_modules=targets, lora_dropout=0.0))


def freeze_unused_parameters(model: nn.Module, loss: Callable[[], Tensor]) -> list[str]:
    """Freeze trainable parameters that do not affect the loss, such as those of a pooler, and return their names.

    Data-parallel training would otherwise wait for the gradients of these parameters.

    Args:
        model: The model, which must be in evaluation mode so that no random numbers are used.
        loss: A function that computes the loss.
    """
    loss().backward()
    unused = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    for name in unused:
        model.get_parameter(name).requires_grad_(False)
    model.zero_grad(set_to_none=True)
    return unused
