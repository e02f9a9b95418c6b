"""The rows of beams: how the beams of a sentence share the keys and values of the sentence.

In beam search, a decoder has B rows per sentence. They follow each other, so that row i belongs to sentence i // B:

    decoder rows     0    1    2    3    4    5        B = 3 beams, b = 2 sentences
    sentence         0    0    0    1    1    1
    encoder rows     0              1

Keys and values are stored once per sentence. Attention does not repeat them. It moves the beams to the axis of the
query rows instead, because the queries of all beams of a sentence attend to the same keys. The query heads of a group
share a key/value head for the same reason, so they move to this axis too:

    queries    [b B, k g, n, d]
    folded     [b, k, B g n, d]     one product with the keys [b, k, m, d], which are read once
    outputs    [b, k, B g n, d_v]   unfolded to [b B, n, k g, d_v]

This module contains all rules about the order of these rows. The letters are defined in `softmax_attention`.
"""

import torch

from .variant_attention import is_exporting, is_traced

__all__ = [
    "QueryFold",
    "count_beams",
    "count_beams_in_cache",
    "get_sentence_indices",
    "repeat_for_beams",
    "select_first_beams",
]


def count_beams(query: torch.Tensor, key: torch.Tensor) -> int:
    """Return B, the number of query rows [b B, ...] per row of keys [b, ...].

    The result is 1 during export, because the batch sizes of an exported graph are symbols that must not affect
    control flow.
    """
    return 1 if is_exporting() else query.shape[0] // key.shape[0]


def count_beams_in_cache(states: torch.Tensor, encoder_outputs: torch.Tensor) -> int:
    """Return the number of beams that a cache layer stores: B for states [b B, n, D], or 1 while a graph is traced."""
    return 1 if is_traced() or not len(encoder_outputs) else max(count_beams(states, encoder_outputs), 1)


def get_sentence_indices(rows: torch.Tensor, beams: int) -> torch.Tensor:
    """Return the index of the sentence of each decoder row."""
    return rows // beams


def select_first_beams(tensor: torch.Tensor, beams: int) -> torch.Tensor:
    """Return the row of the first beam of each sentence, [b, ...], from one row per beam, [b B, ...]."""
    return tensor[::beams] if beams > 1 else tensor


def repeat_for_beams(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor [b, ...] with each row repeated for the beams of its sentence, [rows, ...]."""
    return tensor.repeat_interleave(rows // tensor.shape[0], dim=0)


class QueryFold:
    """A fold of the queries of a key/value head, over all heads of a group and all beams, into rows."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, beams: int):
        (_, heads, self.length, _), (self.sentences, self.kv_heads, *_) = query.shape, key.shape
        self.beams, self.groups = beams, heads // self.kv_heads

    def fold_queries(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries [b B, k g, n, d] as [b, k, B g n, d]."""
        if self.beams * self.length == 1:
            return query.reshape(self.sentences, self.kv_heads, self.groups, query.shape[-1])
        query = query.reshape(self.sentences, self.beams, self.kv_heads, self.groups * self.length, query.shape[-1])
        return query.transpose(1, 2).flatten(2, 3)

    def fold_mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return a mask or bias that broadcasts to [b B, k g, n, m] as one that broadcasts to [b, k, B g n, m]."""
        if mask is None:
            return None
        mask = mask[(None,) * (4 - mask.dim())]
        batch, heads, length, key_length = mask.shape
        beams = self.beams if batch > self.sentences else 1
        kv_heads, groups = (self.kv_heads, self.groups) if heads > 1 else (1, 1)
        mask = mask.reshape(batch // beams, beams, kv_heads, groups, length, key_length).transpose(1, 2)
        if beams * groups * length > 1:
            sizes = (self.beams, self.groups, self.length, key_length)
            mask = mask.expand(mask.shape[0], kv_heads, *sizes)
        return mask.flatten(2, 4)

    def unfold(self, states: torch.Tensor) -> torch.Tensor:
        """Return the folded states [b, k, B g n, x] as [b B, n, k g, x]."""
        size = states.shape[-1]
        if self.beams * self.length == 1:
            return states.reshape(self.sentences, 1, self.kv_heads * self.groups, size)
        states = states.unflatten(2, (self.beams, self.groups, self.length)).permute(0, 2, 4, 1, 3, 5)
        return states.reshape(self.sentences * self.beams, self.length, self.kv_heads * self.groups, size)
