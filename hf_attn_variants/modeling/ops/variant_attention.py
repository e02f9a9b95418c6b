"""What our functions read of an attention: its heads, and its attributes with their types."""

from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["AttentionHeads", "VariantAttention", "call_options", "check_mask", "implementation_of", "wants_weights"]


class AttentionHeads(NamedTuple):
    """The head counts of one attention, their sizes, the rank of its latent, and how its heads talk."""

    query: int  # h_k
    key: int  # k
    value: int  # of the value projection: k, or h_v where each query head has a key head of its own
    softmax: int  # h
    output: int  # h_v, which the output projection reads
    head_dim: int  # d, of queries and keys
    value_dim: int  # d_v, of values
    rank: int | None = None  # r of the latent that keys and values are made from; None: they are kept themselves
    talking: str | None = None  # the projections across heads: None, "logits", "weights", "both"
    talking_init: str = "identity"  # what these begin as
    dynamic: tuple[str, ...] = ()  # the input-dependent terms that are added to them


class VariantAttention(nn.Module):
    """An attention of upstream's with `AttentionVariantMixin`; nothing is made of this class, which says types alone.

    What upstream's constructors set is `Any`: each host's is another.
    """

    config: Any
    dropout: Any
    is_causal: Any
    layer_idx: Any
    num_key_value_groups: Any
    scaling: Any
    _is_hf_initialized: bool

    heads: AttentionHeads
    projection_names: tuple[str, ...]
    dynamic_names: tuple[str, ...]
    projects_itself: bool  # whether our forward makes queries, keys and values, and not upstream's
    keeps_cache: bool
    implementation: str
    is_own: bool
    kv_a_proj: nn.Module  # where the latent is smaller than the input
    reach: Any  # a `Reach`, `BlockPattern` or `TransientGlobal`; None: all is read
    score: Any  # an `AdditiveScore`; None: the dot product
    compression: Any  # a `MemoryCompression`; None: keys and values are a token's
    padding_rule: int
    is_plain: bool  # whether it has no mechanism but grouped heads and a latent
    kernel: Any  # an `AttentionKernel`; None: a softmax


def wants_weights(module: VariantAttention, kwargs: dict[str, Any]) -> bool:
    """Say whether a call of `module` asks for its attention weights, by itself or by the configuration."""
    asked = kwargs.get("output_attentions")
    # The field behind the property, here and below: properties of a configuration cost microseconds a layer and step.
    return bool(module.config._output_attentions if asked is None else asked)


def implementation_of(module: VariantAttention) -> str:
    """Return the registered name of the attention implementation that `module` is configured for."""
    return module.config._attn_implementation_internal


def call_options(
    module: VariantAttention,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    is_causal: bool | None,
) -> dict[str, Any]:
    """Return the scaling, causality and dropout of a call of Transformers' attention interface."""
    asked = getattr(module, "is_causal", False) if is_causal is None else is_causal
    return {
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        # A mask decides by itself what is causal, and a single query is the last token and reads the whole cache.
        # `torch.jit.trace` makes sizes tensors, and torch's kernels require a bool.
        "is_causal": bool(mask is None and asked and query.shape[2] > 1),
        "dropout": dropout,
    }


def check_mask(mask: torch.Tensor | None) -> None:
    """Check that a mask is boolean or additive.

    Raises:
        ValueError: for whole numbers, of which it is unclear whether they are to be added.
    """
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"An attention mask of four dimensions must be boolean (True = attend) or numbers to add, got "
            f"{mask.dtype}: make it `mask.bool()`."
        )
