"""Beam search in which the beams of a sentence share the sentence's keys and values.

In beam search, a decoder has B consecutive rows per sentence, so that row i belongs to sentence i // B:

    decoder rows     0    1    2    3    4    5        B = 3 beams, b = 2 sentences
    sentence         0    0    0    1    1    1
    encoder rows     0              1

Keys and values are stored once per sentence and are not repeated for attention. The queries of all beams of a sentence
attend to the same keys, so the beams are moved to the axis of the query rows. The query heads in a group share a
key/value head, so they are moved to this axis as well:

    queries    [b B, k g, n, d]
    folded     [b, k, B g n, d]     one product with the keys [b, k, m, d], which are read once
    outputs    [b, k, B g n, d_v]   unfolded to [b B, n, k g, d_v]

All code that depends on the order of these rows is in this module. The symbols are defined in `softmax_attention`.
"""

from torch import Tensor

from .variant_attention import is_exporting, is_traced

__all__ = [
    "QueryFolder",
    "count_beams",
    "count_beams_in_cache",
    "get_sentence_indices",
    "repeat_for_beams",
    "select_first_beams",
]


def count_beams(query: Tensor, key: Tensor) -> int:
    """Return B, the number of query rows [b B, ...] per row of keys [b, ...].

    The result is 1 during export, because batch sizes are symbolic in an exported graph and must not affect control
    flow.
    """
    return 1 if is_exporting() else query.shape[0] // key.shape[0]


def count_beams_in_cache(states: Tensor, encoder_outputs: Tensor) -> int:
    """Return the number of beams to store in a cache layer, which is B for states [b B, n, D], or 1 during tracing."""
    return 1 if is_traced() or not len(encoder_outputs) else max(count_beams(states, encoder_outputs), 1)


def get_sentence_indices(row_indices: Tensor, beams: int) -> Tensor:
    """Return the index of the sentence that each decoder row belongs to."""
    return row_indices // beams


def select_first_beams(tensor: Tensor, beams: int) -> Tensor:
    """Select the first beam of each sentence: [b B, ...] -> [b, ...]."""
    return tensor[::beams] if beams > 1 else tensor


def repeat_for_beams(tensor: Tensor, num_rows: int) -> Tensor:
    """Repeat each row of a tensor [b, ...] for the beams of its sentence, and return a tensor [rows, ...]."""
    return tensor.repeat_interleave(num_rows // tensor.shape[0], dim=0)


class QueryFolder:
    """Folds the queries of all beams and of all heads in a group into rows that share a key/value head."""

    def __init__(self, query: Tensor, key: Tensor, beams: int):
        (_, heads, self.length, _), (self.sentences, self.kv_heads, *_) = query.shape, key.shape
        self.beams, self.groups = beams, heads // self.kv_heads

    def fold_queries(self, query: Tensor) -> Tensor:
        """Fold queries [b B, k g, n, d] into rows [b, k, B g n, d]."""
        if self.beams * self.length == 1:
            return query.reshape(self.sentences, self.kv_heads, self.groups, query.shape[-1])
        query = query.reshape(self.sentences, self.beams, self.kv_heads, self.groups * self.length, query.shape[-1])
        return query.transpose(1, 2).flatten(2, 3)

    def fold_mask(self, mask: Tensor | None) -> Tensor | None:
        """Fold a mask or bias that is broadcastable to [b B, k g, n, m] into one broadcastable to [b, k, B g n, m]."""
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

    def unfold(self, states: Tensor) -> Tensor:
        """Unfold states [b, k, B g n, x] to [b B, n, k g, x]."""
        size = states.shape[-1]
        if self.beams * self.length == 1:
            return states.reshape(self.sentences, 1, self.kv_heads * self.groups, size)
        states = states.unflatten(2, (self.beams, self.groups, self.length)).permute(0, 2, 4, 1, 3, 5)
        return states.reshape(self.sentences * self.beams, self.length, self.kv_heads * self.groups, size)
