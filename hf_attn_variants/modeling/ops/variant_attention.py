"""The type of an attention module with a variant, its head counts, its call arguments, and the state of tracing."""

from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = [
    "AttentionHeads",
    "VariantAttention",
    "check_mask",
    "get_attn_implementation",
    "get_call_options",
    "is_exporting",
    "is_traced",
    "should_return_weights",
]


class AttentionHeads(NamedTuple):
    """The head counts of an attention module, the sizes of its heads, its latent rank and its talking-heads mode."""

    query: int  # h_k
    key: int  # k
    value: int  # heads of the value projection: k, or h_v if each query head has its own key head
    softmax: int  # h
    output: int  # h_v, the heads that the output projection reads
    head_dim: int  # d, the size of a query or key head
    value_dim: int  # d_v, the size of a value head
    rank: int | None = None  # r, the rank of the latent; None if keys and values are cached directly
    talking: str | None = None  # the talking-heads projections: None, "logits", "weights" or "both"
    talking_init: str = "identity"  # the initialization of these projections
    dynamic: tuple[str, ...] = ()  # the input-dependent terms that are added to these projections


class VariantAttention(nn.Module):
    """The type of a Transformers attention module that also inherits from `AttentionVariantMixin`.

    The class is used only in type annotations and is never instantiated. The attributes that the constructors of
    Transformers set are `Any`, because their types differ between architectures.
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
    owns_projections: bool  # True if this package, not Transformers, computes queries, keys and values
    supports_cache: bool
    implementation: str
    is_own: bool
    kv_a_proj: nn.Module  # present if the latent is smaller than the input
    key_range: Any  # a `KeyRange`, `BlockPattern` or `TransientGlobal`; None if queries attend to all keys
    score: Any  # an `AdditiveScore`; None for the dot product
    compression: Any  # a `MemoryCompression`; None if there is one key and one value per token
    padding_rule: int
    is_plain: bool  # True if grouped heads and a latent are the only mechanisms
    kernel: Any  # an `AttentionKernel`; None for a softmax


def should_return_weights(module: VariantAttention, kwargs: dict[str, Any]) -> bool:
    """Return True if the call arguments or the configuration request the attention weights of `module`."""
    requested = kwargs.get("output_attentions")
    # This function and the next one read the private field. The property of the configuration would cost microseconds
    # per layer and step.
    return bool(module.config._output_attentions if requested is None else requested)


def get_attn_implementation(module: VariantAttention) -> str:
    """Return the registered name of the attention implementation that `module` is configured for."""
    return module.config._attn_implementation_internal


def get_call_options(
    module: VariantAttention,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    is_causal: bool | None,
) -> dict[str, Any]:
    """Return the scaling, the causality and the dropout for a call of the attention interface of Transformers."""
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    return {
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        # A mask already contains the causal structure. A single query is the last token and attends to the whole
        # cache.
        # `torch.jit.trace` turns sizes into tensors, but the kernels of torch require a bool.
        "is_causal": bool(mask is None and causal and query.shape[2] > 1),
        "dropout": dropout,
    }


def check_mask(mask: torch.Tensor | None) -> None:
    """Check that a mask is boolean or additive.

    Raises:
        ValueError: if the mask contains integers. It is then unclear if they should be added to the logits.
    """
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            "An attention mask of four dimensions must be boolean (True = attend) or floating-point "
            f"numbers to add, got {mask.dtype}. Use `mask.bool()`."
        )


def is_exporting() -> bool:
    """Return True during torch.export."""
    # This reads the flag behind the function of torch. torch 2.6 has neither of them. In torch 2.7 to 2.11, the
    # function returns True in every compiled graph.
    return getattr(torch.compiler, "_is_exporting_flag", False)


def is_traced() -> bool:
    """Return True while a graph is traced, in which tensor values must not affect control flow."""
    return torch.compiler.is_compiling() or is_exporting() or torch.jit.is_tracing()
