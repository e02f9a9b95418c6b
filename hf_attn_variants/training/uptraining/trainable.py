"""Which parameters of a model are trained: its attention's, all, or low-rank updates of its attention."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...modeling.attention import attention_sites
from ...modeling.attention.attention_sites import AttentionSite
from ...registration import variant_model_class

__all__ = ["add_lora", "freeze_unused", "named_attentions", "select_trainable"]


def named_attentions(model: PreTrainedModel) -> Iterator[tuple[AttentionSite, str, nn.Module]]:
    """Return each attention of a model, ours or upstream's, with its site and its path inside the base model.

    Raises:
        ValueError: if the architecture is none of this package's.
    """
    # FSDP2 makes a class of this prefix for a model it shards.
    variant_class = variant_model_class(type(model).__name__.removeprefix("FSDP"))
    return attention_sites.named_attentions(model, variant_class.attention_sites)


def select_trainable(model: PreTrainedModel, trainable: str) -> None:
    """Give only some parameters `requires_grad`: "attention" those of the attention modules, "lora" none, or "all"."""
    for parameter in model.parameters():
        parameter.requires_grad_(trainable == "all")
    if trainable == "attention":
        for site, path, module in named_attentions(model):
            latent = site.latent_map(model.base_model, path)  # one that all layers share is in none of them
            for parameter in (*module.parameters(), *(latent.parameters() if latent is not None else ())):
                parameter.requires_grad_(True)


def add_lora(model: PreTrainedModel, rank: int, alpha: float) -> Any:
    """Add trainable low-rank updates (arXiv:2106.09685) to all projections of every attention, in place.

    The model's parameters are frozen; updates are scaled by alpha / rank. Return peft's model around it, whose
    `merge_and_unload` adds them to the weights.
    """
    from peft import LoraConfig, get_peft_model

    names = {id(module): name for name, module in model.named_modules()}
    maps = []
    for site, path, module in named_attentions(model):
        maps += [module.get_submodule(linear) for linear in site.projections.values()]
        latent = site.latent_map(model.base_model, path)
        maps += [] if latent is None else [latent]
    targets = list(dict.fromkeys(names[id(each)] for each in maps))
    factor: Any = alpha  # any number, whatever peft's annotation says
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=factor, target_modules=targets, lora_dropout=0.0))


def freeze_unused(model: nn.Module, loss: Callable[[], Tensor]) -> list[str]:
    """Freeze the trainable parameters that a loss does not depend on (a pooler, a head), and return their names.

    Data-parallel training would wait for their gradients. The model is in evaluation mode: nothing random is drawn.
    """
    loss().backward()
    unused = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    for name in unused:
        model.get_parameter(name).requires_grad_(False)
    model.zero_grad(set_to_none=True)
    return unused
