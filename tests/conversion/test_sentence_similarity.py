"""Check the scorer of sentence embeddings, and the score of a real checkpoint after conversion."""

import csv

import pytest
import torch
from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer

from hf_attn_variants import convert
from hf_attn_variants.inspection.scores import mean_pooled, sentence_embeddings, similarity_spearman

# The zero-shot Spearman correlation on the STS-B dev set by the number of mean-pooled key/value heads. It was measured
# with independent code.
EXPECTED = {12: 0.867, 6: 0.824, 4: 0.804, 2: 0.773, 1: 0.770}

PAIRS = [
    ("A man is playing a guitar.", "Someone plays a guitar."),
    ("A man is playing a guitar.", "The stock market fell sharply on Monday, analysts said."),
    ("Two dogs run in the snow.", "Dogs are running outside."),
    ("Two dogs run in the snow.", "A woman slices an onion."),
]


def test_padding_does_not_affect_embeddings():
    states = torch.tensor([[[1.0], [3.0], [100.0]]])
    assert mean_pooled(states, torch.tensor([[1, 1, 0]])).item() == 2.0
    assert mean_pooled(states, torch.tensor([[0, 0, 0]])).item() == 0.0


def test_score_without_pairs_raises_an_error():
    with pytest.raises(ValueError, match=r"`scores`.*1 pairs and 2 scores"):
        similarity_spearman(None, None, [("a", "b")], [1.0, 2.0])


def test_embeddings_keep_their_order_for_every_batch_size(minilm):
    model, tokenizer = AutoModel.from_pretrained(minilm).train(), AutoTokenizer.from_pretrained(minilm)
    sentences = [sentence for pair in PAIRS for sentence in pair]
    together = sentence_embeddings(model, tokenizer, sentences)
    alone = torch.cat([sentence_embeddings(model, tokenizer, [sentence]) for sentence in sentences])
    for other in (alone, sentence_embeddings(model, tokenizer, sentences, batch_size=2)):
        torch.testing.assert_close(other, together, atol=1e-5, rtol=0)
    assert model.training
    similarities = torch.nn.functional.cosine_similarity(together[0::2], together[1::2])
    scores = [5.0, 0.0, 4.0, 0.5]
    expected = pytest.approx(spearmanr(similarities, scores).statistic)
    assert similarity_spearman(model, tokenizer, PAIRS, scores) == expected
    assert similarities[0] > similarities[1] and similarities[2] > similarities[3]


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", EXPECTED)
def test_mean_pooled_minilm_reaches_the_recorded_score(minilm, shared_data, kv_heads):
    with open(shared_data / "glue" / "STS-B" / "dev.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    pairs, scores = [(row["sentence1"], row["sentence2"]) for row in rows], [float(row["score"]) for row in rows]
    assert len(rows) == 1500
    spearman = similarity_spearman(convert(minilm, kv_heads), AutoTokenizer.from_pretrained(minilm), pairs, scores)
    assert spearman == pytest.approx(EXPECTED[kv_heads], abs=0.003)
