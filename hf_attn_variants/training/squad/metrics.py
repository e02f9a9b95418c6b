"""SQuAD's official exact match and F1, v1.1 and v2.0, as `evaluate.Metric`s that need no network."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets

from ..glue.metrics import OfflineMetric

__all__ = [
    "METRIC_NAMES",
    "Squad",
    "SquadV2",
    "best_threshold",
    "compute_squad",
    "exact_match",
    "normalize_answer",
    "score_answer",
    "squad_references",
    "token_f1",
]

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = frozenset(string.punctuation)
# The metrics of v1.1 (False) and v2.0 (True) that weights can be chosen by.
METRIC_NAMES: dict[bool, tuple[str, ...]] = {
    False: ("exact_match", "f1"),
    True: ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1", "best_exact", "best_f1"),
}
_ANSWERS = {"text": datasets.List(datasets.Value("string")), "answer_start": datasets.List(datasets.Value("int32"))}


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and English articles, one space between words."""
    kept = "".join(character for character in text.lower() if character not in PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", kept).split())


def exact_match(prediction: str, truth: str) -> float:
    """1.0 where two answers are the same once normalised."""
    return float(normalize_answer(prediction) == normalize_answer(truth))


def token_f1(prediction: str, truth: str, both_empty: float = 0.0) -> float:
    """Harmonic mean of precision and recall of the normalised answer's words, in [0, 1].

    Args:
        prediction, truth: Answers.
        both_empty: Its value where neither has a word: 0 in the official script of v1.1, 1 in that of v2.0.
    """
    found, right = normalize_answer(prediction).split(), normalize_answer(truth).split()
    if not found or not right:
        return both_empty if found == right else 0.0
    common = sum((Counter(found) & Counter(right)).values())
    return 2 * common / (len(found) + len(right))


def score_answer(prediction: str, truths: Sequence[str], both_empty: float = 0.0) -> tuple[float, float]:
    """Exact match and F1 with whichever true answer is nearest; no true answer: the right one is the empty text."""
    truths = truths or [""]
    return (
        max(exact_match(prediction, truth) for truth in truths),
        max(token_f1(prediction, truth, both_empty) for truth in truths),
    )


def squad_references(questions: Sequence[Any]) -> list[dict[str, Any]]:
    """What the metrics take as references of `squad_data.Question`s."""
    return [
        {"id": q.id, "answers": {"text": [a.text for a in q.answers], "answer_start": [a.start for a in q.answers]}}
        for q in questions
    ]


def _check_ids(predictions: Sequence[Mapping], references: Sequence[Mapping]) -> dict[str, Mapping]:
    by_id = {prediction["id"]: prediction for prediction in predictions}
    missing = [reference["id"] for reference in references if reference["id"] not in by_id]
    if missing or not references:
        what = f"{len(missing)} questions have no prediction, such as {missing[0]}" if missing else "no question"
        raise ValueError(f"SQuAD's metric: {what}")
    return by_id


class Squad(OfflineMetric):
    """Exact match and F1 of SQuAD v1.1, from 0 to 100.

    Predictions are {"id", "prediction_text"}, references {"id", "answers": {"text", "answer_start"}}, as those of the
    Hub's metric "squad".
    """

    description = "exact match and F1 of SQuAD v1.1, from 0 to 100"

    def _features(self) -> datasets.Features:
        return datasets.Features({"predictions": self._prediction(), "references": self._reference()})

    def _prediction(self) -> dict[str, Any]:
        return {"id": datasets.Value("string"), "prediction_text": datasets.Value("string")}

    def _reference(self) -> dict[str, Any]:
        return {"id": datasets.Value("string"), "answers": _ANSWERS}

    def _compute(self, predictions: Sequence[Mapping], references: Sequence[Mapping]) -> dict[str, float]:
        by_id = _check_ids(predictions, references)
        scores = [score_answer(by_id[r["id"]]["prediction_text"], r["answers"]["text"]) for r in references]
        return {
            name: 100 * _mean(values)
            for name, values in zip(("exact_match", "f1"), zip(*scores, strict=True), strict=True)
        }


class SquadV2(Squad):
    """Exact match and F1 of SQuAD v2.0, from 0 to 100: overall, and of questions with and without an answer.

    Predictions have "no_answer_probability" besides: any score that is larger where an answer is less likely. Where it
    is more than `no_answer_threshold`, a setting of `compute`, no answer is what counts as predicted. "best_exact" and
    "best_f1" are those of the threshold that is best for each, "best_exact_thresh" and "best_f1_thresh"; they flatter
    a model, since the threshold is chosen on the questions that they are computed from.
    """

    description = "exact match and F1 of SQuAD v2.0, from 0 to 100"

    def _prediction(self) -> dict[str, Any]:
        return {**super()._prediction(), "no_answer_probability": datasets.Value("float32")}

    def _compute(
        self, predictions: Sequence[Mapping], references: Sequence[Mapping], no_answer_threshold: float = math.inf
    ) -> dict[str, float]:
        by_id = _check_ids(predictions, references)
        # The official script leaves out true answers of which normalising leaves nothing.
        truths = {r["id"]: [text for text in r["answers"]["text"] if normalize_answer(text)] for r in references}
        raw = {
            key: score_answer(by_id[key]["prediction_text"], texts, both_empty=1.0) for key, texts in truths.items()
        }
        has_answer = {r["id"]: bool(r["answers"]["text"]) for r in references}
        odds = {key: float(by_id[key]["no_answer_probability"]) for key in raw}
        no_answer = {key: (float(not answered),) * 2 for key, answered in has_answer.items()}
        scores = {key: no_answer[key] if odds[key] > no_answer_threshold else raw[key] for key in raw}
        values = _split_means(scores, "", lambda key: True)
        values |= _split_means(scores, "HasAns_", lambda key: has_answer[key])
        values |= _split_means(scores, "NoAns_", lambda key: not has_answer[key])
        for at, name in enumerate(("exact", "f1")):
            best, threshold = best_threshold({k: s[at] for k, s in raw.items()}, odds, by_id, has_answer)
            values |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
        return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _split_means(
    scores: Mapping[str, tuple[float, float]], prefix: str, chosen: Callable[[str], bool]
) -> dict[str, float]:
    rows = [row for key, row in scores.items() if chosen(key)]
    if not rows:
        return {}
    exact, f1 = zip(*rows, strict=True)
    return {f"{prefix}exact": 100 * _mean(exact), f"{prefix}f1": 100 * _mean(f1), f"{prefix}total": len(rows)}


def best_threshold(
    scores: Mapping[str, float],
    odds: Mapping[str, float],
    predictions: Mapping[str, Mapping],
    has_answer: Mapping[str, bool],
) -> tuple[float, float]:
    """Finds the threshold above which "no answer" is best predicted.

    Args:
        scores: Exact match or F1 of each question's answer.
        odds: How little an answer is to be expected.
        predictions: With "prediction_text".
        has_answer: Whether there is one.

    Returns:
        The best mean from 0 to 100, and the largest value of `odds` up to which answers are kept (0 where none is).
    """
    current = best = float(sum(not has_answer[key] for key in scores))
    threshold = 0.0
    for key in sorted(odds, key=odds.get):
        # Keeping one more answer: it gains its score, or an unanswerable question loses its point.
        gain = scores[key] if has_answer[key] else (-1.0 if predictions[key]["prediction_text"] else 0.0)
        current += gain
        if current > best:
            best, threshold = current, odds[key]
    return 100 * best / len(scores), threshold


def compute_squad(
    questions: Sequence[Any],
    texts: Mapping[str, str],
    odds: Mapping[str, float] | None = None,
    no_answer_threshold: float = math.inf,
) -> dict[str, float]:
    """Scores predictions.

    Args:
        questions: `squad_data.Question`s.
        texts: Each one's predicted answer by id.
        odds: For v2.0: each one's no-answer score; None: v1.1.
        no_answer_threshold: No answer is predicted where the score is more.
    """
    rows = [{"id": q.id, "prediction_text": texts[q.id]} for q in questions]
    references = squad_references(questions)
    if odds is None:
        return Squad().compute(predictions=rows, references=references)
    rows = [{**row, "no_answer_probability": odds[row["id"]]} for row in rows]
    return SquadV2().compute(predictions=rows, references=references, no_answer_threshold=no_answer_threshold)
