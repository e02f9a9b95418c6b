"""Measures the costs, speed and quality of models without training, and computes attention maps."""

import importlib
from typing import TYPE_CHECKING, Any

# The submodule that defines each public name. Submodules are imported when they are first used so that importing this
# package is fast.
_SUBMODULES = {
    "attention_projection_flops": "costs",
    "cosine_similarities": "scores",
    "mean_pooled": "scores",
    "sentence_embeddings": "scores",
    "similarity_spearman": "scores",
}
__all__ = list(_SUBMODULES)


def _import_attribute(name: str) -> Any:
    """Import the submodule that defines a public name, and return the named object."""
    if name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_SUBMODULES[name]}", __name__), name)


# `__getattr__` is hidden from type checkers because they would otherwise accept any attribute name.
if TYPE_CHECKING:
    from .costs import attention_projection_flops as attention_projection_flops
    from .scores import cosine_similarities as cosine_similarities
    from .scores import mean_pooled as mean_pooled
    from .scores import sentence_embeddings as sentence_embeddings
    from .scores import similarity_spearman as similarity_spearman
else:
    __getattr__ = _import_attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
