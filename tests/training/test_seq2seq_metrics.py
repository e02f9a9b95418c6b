"""Metrics of texts against sacrebleu called directly and values worked out by hand."""

import pytest
import sacrebleu

from hf_attn_variants.training.seq2seq.metrics import TEXT_METRICS, score_texts
from hf_attn_variants.training.seq2seq.settings import METRIC_PACKAGES, check_text_metrics

TEXTS = ["The dog sits on the red mat.", "A man sees a house in the garden .", "big dogs"]
RIGHT = ["The dog sat on the red mat.", "A man sees a house in his garden.", "Big dogs run."]


def test_bleu_and_chrf_are_sacrebleus():
    found = score_texts(["bleu", "chrf"], TEXTS, [(text,) for text in RIGHT])
    assert found == {
        "bleu": sacrebleu.corpus_bleu(TEXTS, [RIGHT]).score,
        "chrf": sacrebleu.corpus_chrf(TEXTS, [RIGHT]).score,
    }
    assert 10 < found["bleu"] < 90
    assert score_texts(["bleu"], RIGHT, [(text,) for text in RIGHT]) == {"bleu": pytest.approx(100.0)}


def test_rows_may_have_unequal_numbers_of_references():
    references = [(RIGHT[0], TEXTS[0]), (RIGHT[1],), (RIGHT[2], "something else", TEXTS[2])]
    more = score_texts(["bleu", "accuracy"], TEXTS, references)
    fewer = score_texts(["bleu", "accuracy"], TEXTS, [(text,) for text in RIGHT])
    assert more["bleu"] > fewer["bleu"] and fewer["accuracy"] == 0.0 and more["accuracy"] == pytest.approx(2 / 3)


def test_rouge_by_hand():
    pytest.importorskip("rouge_score")
    found = score_texts(["rouge"], ["the cat sat", "x"], [("the cats sat down",), ("y", "x")])
    # First row: 3 words against 4, the cat(s) by its stem: rouge-1 and -L 6/7, rouge-2 2 * 2 / (2 + 3); second: 1.
    expected = {"rouge1": 6 / 7, "rouge2": 4 / 5, "rougeL": 6 / 7, "rougeLsum": 6 / 7}
    for name, value in expected.items():
        second = 0.0 if name == "rouge2" else 1.0  # a single word has no pair
        assert found[name] == pytest.approx(100 * (value + second) / 2)


def test_rouge_lsum_compares_sentence_by_sentence():
    pytest.importorskip("rouge_score")
    found = score_texts(["rouge"], ["The cat sat. A dog ran!"], [("A dog ran! The cat sat.",)])
    assert found["rougeL"] == pytest.approx(50) and found["rougeLsum"] == pytest.approx(100)


def test_each_metric_has_its_package():
    assert TEXT_METRICS.keys() == METRIC_PACKAGES.keys()


def test_unknown_and_missing_metrics_are_named(monkeypatch):
    with pytest.raises(ValueError, match="unknown metric 'meteor': choose from bleu, chrf, rouge, accuracy"):
        check_text_metrics(["bleu", "meteor"])
    monkeypatch.setitem(METRIC_PACKAGES, "other", "no_such_package")
    with pytest.raises(ValueError, match="--metrics other needs no_such_package: `pip install no-such-package`"):
        check_text_metrics(["other"])


@pytest.mark.parametrize("references", [[("a",)], [("a",), ()]])
def test_every_row_needs_a_reference(references):
    with pytest.raises(ValueError, match="as many rows of references"):
        score_texts(["accuracy"], ["a", "b"], references)
