"""Sentence embeddings and semantic textual similarity: the quality of an encoder without any training."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["cosine_similarities", "mean_pooled", "sentence_embeddings", "similarity_spearman"]


def mean_pooled(hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of the hidden states of the tokens that are not padding.

    Args:
        hidden_states: The hidden states [b, n, D].
        attention_mask: The mask [b, n], 1 for a token and 0 for padding.

    Returns:
        The sentence embeddings [b, D].

    Example:
        >>> mean_pooled(model(**batch).last_hidden_state, batch["attention_mask"])
    """
    weights = attention_mask.to(hidden_states.dtype).unsqueeze(-1)  # [b, n, 1]
    return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


@torch.inference_mode()
def sentence_embeddings(
    model: nn.Module, tokenizer: Any, sentences: Sequence[str], batch_size: int = 64, max_length: int = 256
) -> torch.Tensor:
    """Return the embeddings of sentences: the means of the last hidden states of their tokens.

    Args:
        model: An encoder whose output has `last_hidden_state`. Its training mode is restored afterwards.
        tokenizer: The tokenizer of the model.
        sentences: The sentences.
        batch_size: The number of sentences per batch. Sentences of similar length are in the same batch.
        max_length: The number of tokens at which a sentence is truncated.

    Returns:
        The float32 embeddings [sentences, D] on the CPU, in the order of `sentences`.

    Example:
        >>> embeddings = sentence_embeddings(model, tokenizer, ["A cat sleeps.", "A dog barks."])
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
    complete: Any = embeddings  # no entry is None here
    config: Any = model.config
    return torch.stack(complete) if complete else torch.empty(0, config.hidden_size)


def cosine_similarities(
    model: nn.Module, tokenizer: Any, pairs: Sequence[tuple[str, str]], batch_size: int = 64, max_length: int = 256
) -> torch.Tensor:
    """Return the cosine similarity of the embeddings of each pair of sentences.

    Args:
        model, tokenizer, batch_size, max_length: See `sentence_embeddings`.
        pairs: The pairs of sentences.

    Returns:
        The similarities [pairs].

    Example:
        >>> cosine_similarities(model, tokenizer, [("A cat sleeps.", "A cat is asleep.")])
    """
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
    """Return the Spearman rank correlation between cosine similarities and human similarity scores.

    Args:
        model, tokenizer, batch_size, max_length: See `sentence_embeddings`.
        pairs: The pairs of sentences.
        scores: The human score of each pair, on any scale.

    Returns:
        The correlation, from -1 to 1.

    Raises:
        ValueError: If there are fewer than two pairs, or `pairs` and `scores` differ in length.

    Example:
        >>> similarity_spearman(model, tokenizer, data["pairs"], data["scores"])
    """
    from scipy.stats import spearmanr  # scipy is installed by the extra `train`

    if len(pairs) != len(scores) or len(pairs) < 2:
        raise ValueError(
            f"`scores` must have one score per pair for at least two pairs, got {len(pairs)} pairs and {len(scores)} "
            "scores."
        )
    cosines = cosine_similarities(model, tokenizer, pairs, batch_size, max_length)
    return float(spearmanr(cosines.numpy(), list(scores)).statistic)
