"""How well an encoder's sentence embeddings rank pairs by similarity: a conversion's quality without any training."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["cosine_similarities", "mean_pooled", "sentence_embeddings", "similarity_spearman"]


def mean_pooled(hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Average the hidden states of real tokens.

    Args:
        hidden_states: [b, n, D].
        attention_mask: [b, n], 1 for a real token, 0 for padding.

    Returns:
        [b, D].
    """
    weights = attention_mask.to(hidden_states.dtype).unsqueeze(-1)  # [b, n, 1]
    return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


@torch.inference_mode()
def sentence_embeddings(
    model: nn.Module, tokenizer: Any, sentences: Sequence[str], batch_size: int = 64, max_length: int = 256
) -> torch.Tensor:
    """Embed sentences by the mean of their tokens' last hidden states.

    Args:
        model: an encoder whose output has `last_hidden_state`; it runs in evaluation mode and is left in its own.
        tokenizer: its tokenizer.
        sentences: the texts.
        batch_size: sentences a batch; sentences of similar length go together.
        max_length: longer sentences are cut to this many tokens.

    Returns:
        Embeddings [sentences, D], float32, on the CPU, in the order of `sentences`.
    """
    device = next(model.parameters()).device
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    embeddings: list[torch.Tensor | None] = [None] * len(sentences)
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            texts = [sentences[i] for i in indices]
            batch = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt").to(
                device
            )
            pooled = mean_pooled(model(**batch).last_hidden_state.float(), batch["attention_mask"]).cpu()
            for i, embedding in zip(indices, pooled, strict=True):
                embeddings[i] = embedding
    finally:
        model.train(was_training)
    made: Any = embeddings  # all of them by now
    config: Any = model.config
    return torch.stack(made) if made else torch.empty(0, config.hidden_size)


def cosine_similarities(
    model: nn.Module, tokenizer: Any, pairs: Sequence[tuple[str, str]], batch_size: int = 64, max_length: int = 256
) -> torch.Tensor:
    """Return the cosine of each pair's embeddings, [pairs]; arguments as for `sentence_embeddings`."""
    sentences = [sentence for pair in pairs for sentence in pair]
    embeddings = sentence_embeddings(model, tokenizer, sentences, batch_size, max_length)
    return nn.functional.cosine_similarity(embeddings[0::2], embeddings[1::2])


def similarity_spearman(
    model: nn.Module,
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    scores: Sequence[float],
    batch_size: int = 64,
    max_length: int = 256,
) -> float:
    """Return Spearman's rank correlation between the pairs' cosines and their gold scores.

    Args:
        model, tokenizer, batch_size, max_length: as for `sentence_embeddings`.
        pairs: two sentences each.
        scores: how similar people found them, any scale.

    Raises:
        ValueError: if there are fewer than two pairs, or not one score for each.
    """
    from scipy.stats import spearmanr  # of the extra `train`

    if len(pairs) != len(scores) or len(pairs) < 2:
        raise ValueError(
            f"needs a score for each pair, and at least two: got {len(pairs)} pairs, {len(scores)} scores."
        )
    cosines = cosine_similarities(model, tokenizer, pairs, batch_size, max_length)
    return float(spearmanr(cosines.numpy(), list(scores)).statistic)
