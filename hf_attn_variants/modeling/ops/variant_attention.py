"""Types and helper functions that the attention functions in this package share."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..transformers_internals import check_known_arguments

__all__ = [
    "AttentionHeads",
    "VariantAttention",
    "check_mask",
    "get_attention_kwargs",
    "get_attn_implementation",
    "is_exporting",
    "is_traced",
    "should_return_weights",
]


class AttentionHeads(NamedTuple):
    """The head counts and head sizes of an attention module, with its latent rank and talking-heads settings."""

    query: int  # h_k
    key: int  # k
    value: int  # number of heads in the value projection: k, or h_v if each query head has its own key head
    softmax: int  # h
    output: int  # h_v, the number of heads that the output projection combines
    head_dim: int  # d, the size of a query or key head
    value_dim: int  # d_v, the size of a value head
    rank: int | None = None  # r, the rank of the latent, or None if keys and values are cached directly
    talking: str | None = None  # the talking-heads projections: None, "logits", "weights" or "both"
    talking_init: str = "identity"  # the initialization of these projections
    dynamic: tuple[str, ...] = ()  # the input-dependent terms that are added to these projections

    @property
    def fused_rows(self) -> tuple[int, int, int]:
        """The numbers of rows that compute the queries, keys and values in a fused projection."""
        return self.query * self.head_dim, self.key * self.head_dim, self.value * self.value_dim


if TYPE_CHECKING:

    class VariantAttention(nn.Module):
        """The type of a Transformers attention module that also inherits from `AttentionVariantMixin`.

        Only type checkers need this class. Attributes that are set by Transformers
        constructors have the type `Any`, because their types differ between architectures.
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
        key_range: (
            Any  # a `KeyRange`, `BlockPattern` or `TransientGlobalKeyRange`, or None if queries attend to all keys
        )
        score: Any  # a `ScoreFunction`, or None for dot products
        compression: Any  # a `MemoryCompression`, or None if each token has its own key and value
        extensions: dict[str, tuple[str, ...]]  # the attributes with `AttentionExtension`s for each stage
        padding_rule: int
        is_plain: bool  # True if its attention function only needs to support grouped heads
        kernel: Any  # an `AttentionKernel`, or None for a softmax
else:
    VariantAttention = nn.Module


def should_return_weights(module: VariantAttention, kwargs: dict[str, Any]) -> bool:
    """Return True if the call or the module's configuration requests the attention weights."""
    requested = kwargs.get("output_attentions")
    # This function and the next one read private fields. The public properties would add microseconds per layer and
    # step.
    return bool(module.config._output_attentions if requested is None else requested)


def get_attn_implementation(module: VariantAttention) -> str:
    """Return the registered name of the attention implementation in the module's configuration."""
    return module.config._attn_implementation_internal


def get_attention_kwargs(
    module: VariantAttention, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the `scaling`, `is_causal`, `dropout` and `position_bias` arguments for an attention function.

    Args:
        module, query, mask: the arguments of the call.
        kwargs: the keyword arguments of the call (see `eager_attention_forward`).

    Raises:
        ValueError: if `kwargs` contains an unknown argument, which would be ignored.
    """
    check_known_arguments(kwargs)
    scaling, causal = kwargs.get("scaling"), kwargs.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    return {
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        # If there is a mask, it is already causal. A single query is the last token and attends to the whole cache.
        # `torch.jit.trace` turns sizes into tensors, but torch kernels require a bool.
        "is_causal": bool(mask is None and causal and query.shape[2] > 1),
        "dropout": kwargs.get("dropout", 0.0),
        "position_bias": kwargs.get("position_bias"),
    }


def check_mask(mask: Tensor | None) -> None:
    """Check that a mask is boolean or additive.

    Raises:
        ValueError: if the mask contains integers, because it is then unclear whether they should be added to the
            logits.
    """
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            "A four-dimensional attention mask must be boolean (True = attend) or contain floating-point "
            f"numbers to add to the logits, got {mask.dtype}. Use `mask.bool()`."
        )


def is_exporting() -> bool:
    """Return True during `torch.export`."""
    # `torch.compiler.is_exporting` returns True in every compiled graph in torch 2.7 to 2.11, so this function reads
    # the underlying flag instead. torch 2.6 has neither.
    return getattr(torch.compiler, "_is_exporting_flag", False)


def is_traced() -> bool:
    """Return True while a graph is being traced. Tensor values must then not affect control flow."""
    return torch.compiler.is_compiling() or is_exporting() or torch.jit.is_tracing()
