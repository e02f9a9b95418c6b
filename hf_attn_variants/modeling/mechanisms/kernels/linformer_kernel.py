"""Keys and values projected along the length to r rows, and a softmax over these (Linformer, arXiv 2006.04768).

    o_i = softmax(q_i (E K)^T) E V,  E [r, n_max], one for keys and values of all heads of a layer

That is the paper's "key-value sharing" (section 4). A text of m tokens has the first m columns of E, and tokens that
are padding count as zeros, so that they change nothing. Time and memory are n r. The formula is the package's
`reference.linear.linformer_attention`. Letters as in `softmax_attention`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...ops.query_folding import QueryFold, is_exporting
from ...ops.variant_attention import AttentionHeads
from ..sinusoidal_positions import has_sinusoids
from .attention_kernel import AttentionKernel, KernelTensor

__all__ = ["Linformer", "attend_to_projected", "projected_weights", "segment_means"]


@dataclass(frozen=True)
class Linformer(AttentionKernel):
    """A softmax over r rows of projected keys and values.

    Args:
        length: n_max, the most tokens.
    """

    length: int

    name = "linformer"
    paper = ("Linformer: self-attention with linear complexity", "2006.04768")
    features_a_number = 4
    learned = ("length_proj",)
    counts_tokens = True

    @classmethod
    def of(cls, config: Any, prefix: str, head_dim: int, path: str, is_causal: bool, layer: int) -> "Linformer":
        """Return the kernel of the attention at a path; no more rows than positions. See `AttentionKernel.of`."""
        length: Any = most_tokens(config)  # which `check` asks for
        rows = config.attention_kernel_features or cls.features_a_number * head_dim
        return cls(min(rows, length), is_causal, 0, length)

    @classmethod
    def check(cls, config: Any, field: str) -> None:
        """Check that the kernel is of an encoder that reads a largest number of tokens.

        Raises:
            ValueError: if it is not, or there are more rows than positions.
        """
        prefix = field.removesuffix("attention_kernel")
        is_decoder = not prefix and (
            getattr(config, "is_decoder", False) or hasattr(config, "encoder_attention_kernel")
        )
        if prefix == "cross_" or is_decoder:
            raise ValueError(
                f'`{field}="linformer"` is of encoders: its rows are sums over all tokens, and those of a decoder '
                "grow."
            )
        length, rows = most_tokens(config), config.attention_kernel_features
        if length is None or has_sinusoids(config):
            raise ValueError(
                f'`{field}="linformer"` needs a largest number of tokens: `max_position_embeddings`, of learned '
                "positions."
            )
        if rows is not None and rows > length:
            raise ValueError(
                f"`attention_kernel_features` of linformer is at most the number of positions, {length}; got {rows}."
            )

    def tensors(self, heads: AttentionHeads) -> dict[str, KernelTensor]:
        """Return E [r, n_max]."""
        shape = (self.features, self.length)
        return {"length_proj": KernelTensor(shape, partial(segment_means, *shape))}

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        read: torch.Tensor | None,
        scaling: float,
        state: Any = None,
    ) -> tuple[torch.Tensor, None]:
        """Attend to the rows; see `AttentionKernel.attend`. There is no state."""
        return attend_to_projected(module.length_proj, query, key, value, read, scaling), None

    def weights(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, read: torch.Tensor | None, scaling: float
    ) -> torch.Tensor:
        """Return what each value is multiplied by; see `AttentionKernel.weights`."""
        return projected_weights(module.length_proj, query, key, read, scaling)

    def flops(self, heads: AttentionHeads, attended: int) -> tuple[int, int]:
        """Return what it takes to sum a key and its value into each row, and what a query reads of these."""
        count = 2 * self.features * (heads.head_dim + heads.value_dim)
        return count, count


def most_tokens(config: Any) -> int | None:
    """Return how many tokens (of audio: positions) an encoder of this configuration reads; None: any number."""
    return getattr(config, "max_source_positions", getattr(config, "max_position_embeddings", None))


def segment_means(rows: int, length: int) -> torch.Tensor:
    """Return what E [rows, length] begins as: each row is the mean of a segment, the segments are of like sizes."""
    segment = torch.arange(length) * rows // length
    means = nn.functional.one_hot(segment, rows).T.float()
    return means / means.sum(1, keepdim=True)


def attend_to_projected(
    length_proj: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    read: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Return the outputs [b, n, h, d_v].

    Args:
        length_proj: E [r, n_max].
        query: [b, h, n, d].
        key, value: [b, k, m, d] and [b, k, m, d_v].
        read: which keys are tokens, [b or 1, 1, m, 1]; None = all.
        scaling: the factor of the dot products.

    Raises:
        ValueError: for more tokens than E has columns.
    """
    along, fold = _columns(length_proj, key), QueryFold(query, key, 1)
    if read is not None:
        key, value = (states * read for states in (key, value))
    attend = nn.functional.scaled_dot_product_attention
    return fold.unfolded(attend(fold.rows(query), along @ key, along @ value, scale=scaling))


def projected_weights(
    length_proj: torch.Tensor, query: torch.Tensor, key: torch.Tensor, read: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Return what each value is multiplied by, softmax(q (E K)^T) E, [b, h, n, m]; its rows need not sum to one.

    Arguments and errors as for `attend_to_projected`.
    """
    along, fold = _columns(length_proj, key), QueryFold(query, key, 1)
    key = key if read is None else key * read
    logits = fold.rows(query) @ (along @ key).mT * scaling
    exact = torch.promote_types(key.dtype, torch.float32)
    weights = fold.unfolded(logits.softmax(-1, dtype=exact) @ along.to(exact)).transpose(1, 2)
    return weights if read is None else weights * read.mT


def _columns(length_proj: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    if is_exporting():  # a slice's graph would know whether it is the whole
        return length_proj.index_select(1, torch.arange(key.shape[2], device=key.device)).to(key.dtype)
    if key.shape[2] > length_proj.shape[1]:
        raise ValueError(
            f'`attention_kernel="linformer"` reads {length_proj.shape[1]} tokens at most, for which it has learned '
            f"projections; got {key.shape[2]}."
        )
    return length_proj[:, : key.shape[2]].to(key.dtype)
