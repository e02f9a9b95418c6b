"""Linformer, which projects keys and values along the sequence to r rows before a softmax (arXiv 2006.04768).

    o_i = softmax(q_i (E K)^T) E V

This is the "key-value sharing" variant in section 4 of the paper, in which the keys and values of all heads in a layer
share the matrix E [r, n_max]. A text with m tokens uses the first m columns of E.
Padding counts as zeros and therefore has no effect. Time and memory are proportional to n r. The formula is
implemented in `reference.linear.linformer_attention`. The symbols are defined in `softmax_attention`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.beams import QueryFolder
from ...ops.variant_attention import AttentionHeads, is_exporting
from ..sinusoidal_positions import has_sinusoids
from .attention_kernel import AttentionKernel, KernelTensorSpec

__all__ = ["LinformerKernel", "create_segment_means"]


@dataclass(frozen=True)
class LinformerKernel(AttentionKernel):
    """The Linformer kernel, a softmax over r rows of projected keys and values.

    Args:
        length: n_max, the maximum number of tokens.
    """

    length: int

    name = "linformer"
    paper = ("Linformer: self-attention with linear complexity", "2006.04768")
    features_per_dimension = 4
    learned_parameters = ("length_proj",)
    depends_on_positions = True

    @classmethod
    def from_config(
        cls, config: Any, prefix: str, head_dim: int, path: str, is_causal: bool, layer: int
    ) -> "LinformerKernel":
        """Create the kernel of the attention module at a path. See `AttentionKernel.from_config` for the arguments.

        The number of rows is limited to the number of positions.
        """
        length: Any = get_max_tokens(config)  # `check` requires a value
        rows = config.attention_kernel_features or cls.features_per_dimension * head_dim
        return cls(min(rows, length), is_causal, 0, length)

    @classmethod
    def check(cls, config: Any, field: str) -> None:
        """Check that the kernel is used in an encoder that has a maximum number of tokens.

        Raises:
            ValueError: if it is not, or if there are more rows than positions.
        """
        prefix = field.removesuffix("attention_kernel")
        is_decoder = not prefix and (
            getattr(config, "is_decoder", False) or hasattr(config, "encoder_attention_kernel")
        )
        if prefix == "cross_" or is_decoder:
            raise ValueError(
                f'`{field}="linformer"` is not supported in a decoder, because the kernel combines all tokens of '
                "a text. Choose another kernel."
            )
        length, rows = get_max_tokens(config), config.attention_kernel_features
        if length is None or has_sinusoids(config):
            raise ValueError(
                f'`{field}="linformer"` is only supported for encoders with learned positions, because it requires '
                "a maximum number of tokens. Choose another kernel."
            )
        if rows is not None and rows > length:
            raise ValueError(
                f'`attention_kernel_features` must be at most {length} with `{field}="linformer"`, the number of '
                f"positions, got {rows}."
            )

    def get_tensor_specs(self, heads: AttentionHeads) -> dict[str, KernelTensorSpec]:
        """Return the specification of the projection E [r, n_max], which shortens the keys and values."""
        shape = (self.features, self.length)
        return {"length_proj": KernelTensorSpec(shape, partial(create_segment_means, *shape))}

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        scaling: float,
        state: Any = None,
    ) -> tuple[Tensor, None]:
        """Attend to the projected rows. See `AttentionKernel.attend` for the arguments. There is no state."""
        return attend_to_projected(module.length_proj, query, key, value, key_mask, scaling), None

    def compute_weights(
        self, module: Any, query: Tensor, key: Tensor, key_mask: Tensor | None, scaling: float
    ) -> Tensor:
        """Return the weights of the values [b, h, n, m]. See `AttentionKernel.compute_weights` for the arguments."""
        return compute_projected_weights(module.length_proj, query, key, key_mask, scaling)

    def count_flops(self, heads: AttentionHeads, num_keys: int) -> tuple[int, int]:
        """Return the operation counts per key (projection to rows) and per query (attention to the rows)."""
        count = 2 * self.features * (heads.head_dim + heads.value_dim)
        return count, count


def get_max_tokens(config: Any) -> int | None:
    """Return the maximum number of tokens or audio positions in an encoder, or None if there is no limit."""
    return getattr(config, "max_source_positions", getattr(config, "max_position_embeddings", None))


def create_segment_means(rows: int, length: int) -> Tensor:
    """Return the initial E [rows, length], whose rows compute the means of segments of similar size."""
    segment = torch.arange(length) * rows // length
    means = nn.functional.one_hot(segment, rows).T.float()
    return means / means.sum(1, keepdim=True)


def attend_to_projected(
    length_proj: Tensor, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scaling: float
) -> Tensor:
    """Attend to projected keys and values and return the outputs [b, n, h, d_v].

    Args:
        length_proj: E [r, n_max].
        query: [b, h, n, d].
        key, value: [b, k, m, d] and [b, k, m, d_v].
        key_mask: a boolean mask [b or 1, 1, m, 1] that is False for padding, or None if there is no padding.
        scaling: the factor by which the dot products are multiplied.

    Raises:
        ValueError: if there are more tokens than columns of E.
    """
    projection, fold = _select_columns(length_proj, key), QueryFolder(query, key, 1)
    if key_mask is not None:
        key, value = (states * key_mask for states in (key, value))
    attend = nn.functional.scaled_dot_product_attention
    return fold.unfold(attend(fold.fold_queries(query), projection @ key, projection @ value, scale=scaling))


def compute_projected_weights(
    length_proj: Tensor, query: Tensor, key: Tensor, key_mask: Tensor | None, scaling: float
) -> Tensor:
    """Return the weights of the values, softmax(q (E K)^T) E, [b, h, n, m]. Their rows do not necessarily sum to one.

    Takes the same arguments and raises the same errors as `attend_to_projected`.
    """
    projection, fold = _select_columns(length_proj, key), QueryFolder(query, key, 1)
    key = key if key_mask is None else key * key_mask
    logits = fold.fold_queries(query) @ (projection @ key).mT * scaling
    exact = torch.promote_types(key.dtype, torch.float32)
    weights = fold.unfold(logits.softmax(-1, dtype=exact) @ projection.to(exact)).transpose(1, 2)
    return weights if key_mask is None else weights * key_mask.mT


def _select_columns(length_proj: Tensor, key: Tensor) -> Tensor:
    if is_exporting():  # a slice would make the graph depend on the length
        return length_proj.index_select(1, torch.arange(key.shape[2], device=key.device)).to(key.dtype)
    if key.shape[2] > length_proj.shape[1]:
        raise ValueError(
            f"The inputs must have at most {length_proj.shape[1]} tokens with "
            f'`attention_kernel="linformer"`, got {key.shape[2]}. Truncate them.'
        )
    return length_proj[:, : key.shape[2]].to(key.dtype)
