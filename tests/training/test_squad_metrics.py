"""Compare SQuAD's metrics with scores that are computed by hand with the official rules."""

import pytest

from hf_attn_variants.training.squad.data import (
    Answer,
    Question,
    compute_exact_match,
    compute_squad_metrics,
    compute_token_f1,
    normalize_answer,
    score_answer,
)


def make_question(key, *answers):
    return Question(key, "?", "", tuple(Answer(text, 0) for text in answers))


def test_normalization_removes_case_punctuation_articles_and_spaces():
    assert normalize_answer("  The  Denver-Broncos!, an  apple\tof A.") == "denverbroncos apple of"
    assert normalize_answer("theatre") == "theatre"  # an article inside a word stays


@pytest.mark.parametrize(
    ("prediction", "truth", "exact", "f1"),
    [
        ("the Denver Broncos", "Denver Broncos.", 1, 1),
        ("Denver Broncos of Denver", "Denver", 0, 2 * (1 / 4) * 1 / (1 / 4 + 1)),
        ("in 1990 and 1991", "1990", 0, 0.4),
        ("dog dog", "dog dog cat", 0, 0.8),  # words are counted
        ("cat", "dog", 0, 0),
        ("", "dog", 0, 0),
    ],
)
def test_answer_scores_equal_hand_computed_values(prediction, truth, exact, f1):
    assert compute_exact_match(prediction, truth) == exact
    assert compute_token_f1(prediction, truth) == pytest.approx(f1)


def test_empty_normalized_answers_follow_the_official_scripts():
    assert score_answer("the", ["a"]) == (1.0, 0.0)
    assert score_answer("the", ["a"], score_if_both_empty=1.0) == (1.0, 1.0)


def test_best_of_several_answers_counts():
    questions = [make_question("a", "a dog", "the big dog"), make_question("b", "Wales")]
    result = compute_squad_metrics(questions, {"a": "big dog", "b": "south Wales"})
    assert result == pytest.approx({"exact_match": 50.0, "f1": 100 * (1 + 2 / 3) / 2})


@pytest.mark.parametrize(
    ("prediction", "truth", "exact", "f1"),
    [
        ("《三国演义》。", "三国演义", 1, 1),
        ("北京大学", "北京大学的学生", 0, 8 / 11),
        ("東京 タワー", "東京タワー", 1, 1),
        ("ภาษา", "ภาษาไทย", 0, 8 / 11),
        ("维生素A型", "维生素 Vitamin a", 0, 8 / 10),  # words in other scripts are compared as a whole
    ],
)
def test_scores_for_scripts_without_spaces_compare_characters(prediction, truth, exact, f1):
    question = [make_question("a", truth)]
    expected = pytest.approx([100 * exact, 100 * f1])
    result = compute_squad_metrics(question, {"a": prediction})
    assert [result["exact_match"], result["f1"]] == expected
    result = compute_squad_metrics(question, {"a": prediction}, {"a": 0.0})
    assert [result["exact"], result["f1"]] == [result["best_exact"], result["best_f1"]] == expected


def test_version_2_scores_empty_answers_and_the_best_threshold():
    questions = [make_question("a", "Tom"), make_question("b", "red house"), make_question("c"), make_question("d")]
    texts = {"a": "Tom", "b": "house", "c": "Mary", "d": "Tom"}
    odds = {"a": -3.0, "b": 1.0, "c": -1.0, "d": 2.0}
    result = compute_squad_metrics(questions, texts, odds, no_answer_threshold=0.0)
    # At the threshold 0, a (right) and c (wrong) are answered. b (wrong) and d (right) are not.
    assert result["exact"] == result["f1"] == 50.0 and result["total"] == 4
    assert result["HasAns_exact"] == result["HasAns_f1"] == 50.0 and result["NoAns_exact"] == 50.0
    # Without answers, c and d are right. Answering a adds 1, answering c subtracts 1, and answering b adds F1 2/3.
    assert result["best_exact"] == result["best_f1"] == 75.0
    assert result["best_exact_thresh"] == result["best_f1_thresh"] == -3.0
    everything = compute_squad_metrics(questions, texts, odds)
    assert everything["exact"] == 25.0 and everything["f1"] == pytest.approx(100 * (1 + 2 / 3) / 4)
