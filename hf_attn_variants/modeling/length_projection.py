"""Keys and values projected along the length to r rows, and a softmax over these (Linformer, arXiv 2006.04768).

    o_i = softmax(q_i (E K)^T) E V,  E [r, n_max], one for keys and values of all heads of a layer

That is the paper's "key-value sharing" (section 4). A text of m tokens has the first m columns of E, and tokens that
are padding count as zeros, so that they change nothing. Time and memory are n r. The formula is the package's
`reference_linear.linformer_attention`. Letters as in `attention_variants`.
"""

import torch
from torch import nn

from .query_folding import QueryFold, is_exporting

__all__ = ["attend_to_projected", "projected_weights", "segment_means"]


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
    """Return the outputs [b, n, h, d].

    Args:
        length_proj: E [r, n_max].
        query: [b, h, n, d].
        key, value: [b, k, m, d].
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
