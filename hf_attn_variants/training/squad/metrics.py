"""Answers to SQuAD questions from start and end logits, and their exact match and F1."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .data import NO_ANSWER, Question, Window

__all__ = [
    "Prediction",
    "Span",
    "compute_exact_match",
    "compute_squad",
    "compute_token_f1",
    "find_best_threshold",
    "find_predictions",
    "make_nbest_entries",
    "normalize_answer",
    "score_answer",
]


@dataclass(frozen=True)
class Span:
    """A span of the context with the logits of its first and last token."""

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        """The sum of the logits."""
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class Prediction:
    """The prediction of a model for a question.

    Attributes:
        id: The id of the question.
        spans: The best spans, best first. Empty if the context has no tokens.
        null: The span of "no answer" from the window where its score is lowest. An answer in one window suffices, so
            that the other windows do not count.
    """

    id: str
    spans: tuple[Span, ...]
    null: Span

    @property
    def text(self) -> str:
        """The text of the best span, or "" without spans."""
        return self.spans[0].text if self.spans else ""

    @property
    def null_odds(self) -> float:
        """The difference between the score of "no answer" and the score of the best span."""
        return self.null.score - self.spans[0].score if self.spans else 1e9  # JSON needs a finite number

    def answer(self, null_threshold: float | None) -> str:
        """Return the text, or "" if `null_odds` is above a threshold. None: always return the text."""
        return "" if null_threshold is not None and self.null_odds > null_threshold else self.text


def find_predictions(
    questions: Sequence[Question],
    windows: Sequence[Window],
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    n_best: int = 20,
    max_answer_length: int = 30,
) -> list[Prediction]:
    """Find the best spans of each question in all its windows.

    Args:
        questions: The questions.
        windows: Their windows.
        start_logits: [windows, tokens].
        end_logits: [windows, tokens].
        n_best: The number of starts and ends that are combined per window, and the number of spans per question.
        max_answer_length: The maximum length of an answer in tokens.

    Returns:
        The predictions in the order of the questions.
    """
    spans: list[dict[tuple[int, int], Span]] = [{} for _ in questions]
    nulls: list[Span | None] = [None] * len(questions)
    for window, starts, ends in zip(windows, start_logits, end_logits, strict=True):
        null = Span("", float(starts[NO_ANSWER]), float(ends[NO_ANSWER]))
        earlier = nulls[window.question]
        nulls[window.question] = null if earlier is None or null.score < earlier.score else earlier
        context, question_spans = questions[window.question].context, spans[window.question]
        inside = slice(window.context_begin, window.context_begin + len(window.offsets))
        for characters, span in _find_window_spans(
            window.offsets, starts[inside], ends[inside], context, n_best, max_answer_length
        ):
            # Windows overlap. If two of them have the same span, the higher score counts.
            if characters not in question_spans or span.score > question_spans[characters].score:
                question_spans[characters] = span
    missing = Span("", 0.0, 0.0)
    return [
        Prediction(
            question.id,
            tuple(sorted(question_spans.values(), key=lambda span: -span.score)[:n_best]),
            null or missing,
        )
        for question, question_spans, null in zip(questions, spans, nulls, strict=True)
    ]


def _find_window_spans(
    offsets: np.ndarray, starts: np.ndarray, ends: np.ndarray, context: str, n_best: int, max_answer_length: int
) -> list[tuple[tuple[int, int], Span]]:
    """Return the best spans of a window, each with its first and last character (exclusive) in the context."""
    usable = offsets[:, 1] > offsets[:, 0]
    first = np.argsort(-np.where(usable, starts, -np.inf), kind="stable")[:n_best]
    last = np.argsort(-np.where(usable, ends, -np.inf), kind="stable")[:n_best]
    length = last[None, :] - first[:, None] + 1
    valid = (length >= 1) & (length <= max_answer_length) & usable[first][:, None] & usable[last][None, :]
    rows, columns = np.nonzero(valid)
    order = np.argsort(-(starts[first[rows]] + ends[last[columns]]), kind="stable")[:n_best]
    spans = []
    for i in order:
        a, b = first[rows[i]], last[columns[i]]
        characters = int(offsets[a, 0]), int(offsets[b, 1])
        text = context[slice(*characters)].strip()
        if text:
            spans.append((characters, Span(text, float(starts[a]), float(ends[b]))))
    return spans


def make_nbest_entries(prediction: Prediction, with_null: bool, n_best: int = 20) -> list[dict[str, Any]]:
    """Return the entries of the n-best file for a question, best first.

    Args:
        prediction: The prediction.
        with_null: Whether "no answer" is an entry (v2.0).
        n_best: The maximum number of spans.

    Returns:
        The text, the probability and the logits of each entry.
    """
    spans = [*prediction.spans[:n_best], *([prediction.null] if with_null or not prediction.spans else [])]
    spans.sort(key=lambda span: -span.score)
    scores = np.array([span.score for span in spans])
    shares = np.exp(scores - scores.max())
    return [
        {"text": span.text, "probability": float(share), "start_logit": span.start_logit, "end_logit": span.end_logit}
        for span, share in zip(spans, shares / shares.sum(), strict=True)
    ]


ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = frozenset(string.punctuation)


def normalize_answer(text: str) -> str:
    """Return a text in lowercase, without punctuation and English articles, with single spaces between words.

    Example:
        ```python
        normalize_answer("The  Cat!")  # "cat"
        ```
    """
    without_punctuation = "".join(character for character in text.lower() if character not in PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", without_punctuation).split())


def compute_exact_match(prediction: str, truth: str) -> float:
    """Return 1.0 if two answers are equal after normalization, otherwise 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(truth))


def compute_token_f1(prediction: str, truth: str, both_empty: float = 0.0) -> float:
    """Return the harmonic mean of precision and recall of the words of a normalized answer, from 0 to 1.

    Args:
        prediction: The predicted answer.
        truth: The correct answer.
        both_empty: The value if neither answer has words: 0 in the official script of v1.1, and 1 in that of v2.0.
    """
    predicted_words, true_words = normalize_answer(prediction).split(), normalize_answer(truth).split()
    if not predicted_words or not true_words:
        return both_empty if predicted_words == true_words else 0.0
    common = sum((Counter(predicted_words) & Counter(true_words)).values())
    return 2 * common / (len(predicted_words) + len(true_words))


def score_answer(prediction: str, truths: Sequence[str], both_empty: float = 0.0) -> tuple[float, float]:
    """Return the best exact match and F1 over the correct answers. Without any, the empty text is correct."""
    truths = truths or [""]
    return (
        max(compute_exact_match(prediction, truth) for truth in truths),
        max(compute_token_f1(prediction, truth, both_empty) for truth in truths),
    )


def _compute_mean(values: Sequence[float]) -> float:
    """Return the mean of some numbers."""
    return sum(values) / len(values)


def _compute_split_means(
    scores: Mapping[str, tuple[float, float]], prefix: str, chosen: Callable[[str], bool]
) -> dict[str, float]:
    """Return the metrics of the questions that `chosen` selects. Return an empty dictionary without questions."""
    rows = [row for key, row in scores.items() if chosen(key)]
    if not rows:
        return {}
    exact, f1 = zip(*rows, strict=True)
    return {
        f"{prefix}exact": 100 * _compute_mean(exact),
        f"{prefix}f1": 100 * _compute_mean(f1),
        f"{prefix}total": len(rows),
    }


def find_best_threshold(
    scores: Mapping[str, float], odds: Mapping[str, float], texts: Mapping[str, str], has_answer: Mapping[str, bool]
) -> tuple[float, float]:
    """Find the threshold of `odds` above which "no answer" should be predicted, for the best mean score.

    Args:
        scores: The score of each answer by question id.
        odds: The odds of "no answer" by question id.
        texts: The predicted answers by question id.
        has_answer: Whether each question has an answer.

    Returns:
        The best mean score from 0 to 100, and the largest value of `odds` up to which answers are predicted (0 if no
        answer is predicted).
    """
    current = best = float(sum(not has_answer[key] for key in scores))
    threshold = 0.0
    for key in sorted(scores, key=odds.__getitem__):
        # Predict one more answer. It adds its score, or an unanswerable question loses its point.
        current += scores[key] if has_answer[key] else (-1.0 if texts[key] else 0.0)
        if current > best:
            best, threshold = current, odds[key]
    return 100 * best / len(scores), threshold


def compute_squad(
    questions: Sequence[Question],
    texts: Mapping[str, str],
    odds: Mapping[str, float] | None = None,
    no_answer_threshold: float = math.inf,
) -> dict[str, float]:
    """Compute exact match and F1 from 0 to 100, like the official scripts.

    Args:
        questions: The questions.
        texts: The predicted answers by question id.
        odds: For v2.0: a score by question id that is larger if an answer is less likely. None: v1.1.
        no_answer_threshold: If `odds` is above this value, the prediction counts as "no answer".

    Returns:
        For v1.1: "exact_match" and "f1". For v2.0: "exact", "f1" and "total" over all questions, over those with an
        answer ("HasAns_") and over those without ("NoAns_"), "best_exact" and "best_f1" with the best threshold for
        each, and these thresholds ("best_exact_thresh", "best_f1_thresh"). The best values are optimistic, because the
        threshold is chosen on the same questions.

    Raises:
        ValueError: If there are no questions, or if a question has no prediction.

    Example:
        ```python
        question = Question("1", "Who?", "It was Ada.", (Answer("Ada", 7),))
        compute_squad([question], {"1": "Ada"})  # {"exact_match": 100.0, "f1": 100.0}
        ```
    """
    missing = [q.id for q in questions if q.id not in texts]
    if missing or not questions:
        got = f"{len(missing)} questions without one, such as {missing[0]}" if missing else "no questions"
        raise ValueError(f"Each question must have a prediction, and there must be questions, got {got}.")
    truths = {q.id: [answer.text for answer in q.answers] for q in questions}
    if odds is not None:
        return _compute_v2_metrics(truths, texts, odds, no_answer_threshold)
    exact, f1 = zip(*(score_answer(texts[key], right) for key, right in truths.items()), strict=True)
    return {"exact_match": 100 * _compute_mean(exact), "f1": 100 * _compute_mean(f1)}


def _compute_v2_metrics(
    truths: Mapping[str, list[str]], texts: Mapping[str, str], odds: Mapping[str, float], no_answer_threshold: float
) -> dict[str, float]:
    """Return the metrics of v2.0."""
    # Like the official script, leave out correct answers that are empty after normalization.
    raw = {
        key: score_answer(texts[key], [text for text in right if normalize_answer(text)], both_empty=1.0)
        for key, right in truths.items()
    }
    has_answer = {key: bool(right) for key, right in truths.items()}
    no_answer = {key: (float(not answered),) * 2 for key, answered in has_answer.items()}
    scores = {key: no_answer[key] if odds[key] > no_answer_threshold else raw[key] for key in raw}
    values = _compute_split_means(scores, "", lambda key: True)
    values |= _compute_split_means(scores, "HasAns_", lambda key: has_answer[key])
    values |= _compute_split_means(scores, "NoAns_", lambda key: not has_answer[key])
    for position, name in enumerate(("exact", "f1")):
        raw_scores = {key: row[position] for key, row in raw.items()}
        best, threshold = find_best_threshold(raw_scores, odds, texts, has_answer)
        values |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return values
