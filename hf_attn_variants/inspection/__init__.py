"""Looking at a model: what it costs and how good it is without training."""

from .costs.projections import attention_projection_flops
from .sentence_similarity import cosine_similarities, mean_pooled, sentence_embeddings, similarity_spearman

__all__ = [
    "attention_projection_flops",
    "cosine_similarities",
    "mean_pooled",
    "sentence_embeddings",
    "similarity_spearman",
]
