"""Folding of queries that share keys and values into the rows of one attention call.

Such queries belong to the heads of a group or to the beams of a sentence. The letters are defined in
`softmax_attention`; there are B beams for each of b sentences.
"""

import torch

__all__ = ["QueryFold", "beams_of", "is_exporting", "is_traced", "repeated_for_beams"]


def beams_of(query: torch.Tensor, key: torch.Tensor) -> int:
    """Return B, the number of query batch rows [b B, ...] per batch row of keys [b, ...].

    The result is 1 during export, because the batch sizes of an exported graph are symbols that must not affect
    control flow.
    """
    return 1 if is_exporting() else query.shape[0] // key.shape[0]


def is_exporting() -> bool:
    """Return True during torch.export."""
    # This reads the flag behind the function of torch. torch 2.6 has neither of them. In torch 2.7 to 2.11, the
    # function returns True in every compiled graph.
    return getattr(torch.compiler, "_is_exporting_flag", False)


def is_traced() -> bool:
    """Return True while a graph is traced, in which tensor values must not affect control flow."""
    return torch.compiler.is_compiling() or is_exporting() or torch.jit.is_tracing()


class QueryFold:
    """A fold of the queries of a key/value head, over all heads of a group and all beams, into rows."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, beams: int):
        (_, heads, self.length, _), (self.memories, self.kv_heads, *_) = query.shape, key.shape
        self.beams, self.groups = beams, heads // self.kv_heads

    def rows(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries [b B, k g, n, d] as [b, k, B g n, d]."""
        if self.beams * self.length == 1:
            return query.reshape(self.memories, self.kv_heads, self.groups, query.shape[-1])
        query = query.reshape(self.memories, self.beams, self.kv_heads, self.groups * self.length, query.shape[-1])
        return query.transpose(1, 2).flatten(2, 3)

    def mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return a mask or bias that broadcasts to [b B, k g, n, m] as one that broadcasts to [b, k, B g n, m]."""
        if mask is None:
            return None
        mask = mask[(None,) * (4 - mask.dim())]
        batch, heads, length, memory_length = mask.shape
        beams = self.beams if batch > self.memories else 1
        kv_heads, groups = (self.kv_heads, self.groups) if heads > 1 else (1, 1)
        mask = mask.reshape(batch // beams, beams, kv_heads, groups, length, memory_length).transpose(1, 2)
        if beams * groups * length > 1:
            sizes = (self.beams, self.groups, self.length, memory_length)
            mask = mask.expand(mask.shape[0], kv_heads, *sizes)
        return mask.flatten(2, 4)

    def unfolded(self, states: torch.Tensor) -> torch.Tensor:
        """Return the folded states [b, k, B g n, x] as [b B, n, k g, x]."""
        size = states.shape[-1]
        if self.beams * self.length == 1:
            return states.reshape(self.memories, 1, self.kv_heads * self.groups, size)
        states = states.unflatten(2, (self.beams, self.groups, self.length)).permute(0, 2, 4, 1, 3, 5)
        return states.reshape(self.memories * self.beams, self.length, self.kv_heads * self.groups, size)


def repeated_for_beams(mask: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Repeat a mask that has one row per sentence, so that it has one row per beam."""
    if mask is None or mask.dim() < 4 or mask.shape[0] in (1, batch):
        return mask
    return mask.repeat_interleave(batch // mask.shape[0], dim=0)
