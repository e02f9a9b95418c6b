"""Which caches an attention can use, and what it keeps in them."""

from typing import Any

import torch
from torch import nn

from .attention_patterns import MAX_SIZE
from .sliding_window_attention import keep_window

__all__ = ["prepare_cache"]


def prepare_cache(module: nn.Module, cache: Any, memory: torch.Tensor | None) -> None:
    """Check that a variant attention can use a cache, and have it keep what the attention's window reads.

    Args:
        module: the attention.
        cache: the cache that its call reads and writes.
        memory: the memory-side inputs [b, m, memory size]; None for self-attention.

    Raises:
        ValueError: for a static cache of unequal heads or of a window, and for self-attention that keeps no cache.
    """
    heads, is_static = module.heads, getattr(cache, "is_compileable", False)
    if heads.rank is None and heads.key != heads.value and is_static:
        raise ValueError(
            "A static cache needs as many key heads as value heads; this attention has "
            f"{heads.key} and {heads.value} (`num_value_heads`). Use a dynamic cache."
        )
    if memory is not None:
        return
    if not module.keeps_cache:
        raise ValueError(
            "`talking_heads_dynamic` m2l and m2w need the inputs of all past tokens, which a key/value cache does "
            "not keep: pass `use_cache=False`."
        )
    reach = module.reach
    if reach is None:
        return
    if is_static:
        raise ValueError(
            f"`attention_pattern` needs a dynamic cache, as long as what is read; got {type(cache).__name__}."
        )
    if reach.before < MAX_SIZE:
        keep_window(cache, module.layer_idx, reach)
