"""Looking at a model: what it costs, how fast it is, how good it is without training, what its heads attend to."""

import importlib
from typing import TYPE_CHECKING, Any

# Imported when it is first used: embeddings need scipy, which counting does without.
_PLACES = {
    "attention_projection_flops": "counting",
    "cosine_similarities": "sentence_similarity",
    "mean_pooled": "sentence_similarity",
    "sentence_embeddings": "sentence_similarity",
    "similarity_spearman": "sentence_similarity",
}
__all__ = [
    "attention_projection_flops",
    "cosine_similarities",
    "mean_pooled",
    "sentence_embeddings",
    "similarity_spearman",
]


def _found(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)


# A type checker that saw it would take any name for one that is here.
if TYPE_CHECKING:
    from .counting import attention_projection_flops
    from .sentence_similarity import cosine_similarities, mean_pooled, sentence_embeddings, similarity_spearman
else:
    __getattr__ = _found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
