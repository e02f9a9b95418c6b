"""Answers of SQuAD from start and end logits, and their exact match and F1."""

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
    "best_threshold",
    "compute_squad",
    "exact_match",
    "find_predictions",
    "nbest_entries",
    "normalize_answer",
    "score_answer",
    "token_f1",
]


@dataclass(frozen=True)
class Span:
    """A stretch of the context, and the logits of its first and last token."""

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class Prediction:
    """What a model answers to a question."""

    id: str  # the question's
    spans: tuple[Span, ...]  # the best ones, best first; none where the context has no token
    null: Span  # "no answer", of the window that scores it least: an answer in one of them is an answer

    @property
    def text(self) -> str:
        return self.spans[0].text if self.spans else ""

    @property
    def null_odds(self) -> float:
        """By how much the score of "no answer" is above that of the best span."""
        return self.null.score - self.spans[0].score if self.spans else 1e9  # finite: for JSON

    def answer(self, null_threshold: float | None) -> str:
        """Return the text, or the empty one where `null_odds` is above a threshold (None: never)."""
        return "" if null_threshold is not None and self.null_odds > null_threshold else self.text


def find_predictions(
    questions: Sequence[Question],
    windows: Sequence[Window],
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    n_best: int = 20,
    max_answer_length: int = 30,
) -> list[Prediction]:
    """Find the best spans of every question in all its windows.

    Args:
        start_logits, end_logits: [windows, tokens].
        n_best: starts and ends that are combined in a window, and spans that are kept of a question.
        max_answer_length: in tokens.
    """
    spans: list[dict[tuple[int, int], Span]] = [{} for _ in questions]
    nulls: list[Span | None] = [None] * len(questions)
    for window, starts, ends in zip(windows, start_logits, end_logits, strict=True):
        null = Span("", float(starts[NO_ANSWER]), float(ends[NO_ANSWER]))
        earlier = nulls[window.question]
        nulls[window.question] = null if earlier is None or null.score < earlier.score else earlier
        context, found = questions[window.question].context, spans[window.question]
        inside = slice(window.context_begin, window.context_begin + len(window.offsets))
        for place, span in _window_spans(
            window.offsets, starts[inside], ends[inside], context, n_best, max_answer_length
        ):
            # Windows overlap: of a span in two of them the better score counts.
            if place not in found or span.score > found[place].score:
                found[place] = span
    missing = Span("", 0.0, 0.0)
    return [
        Prediction(question.id, tuple(sorted(found.values(), key=lambda span: -span.score)[:n_best]), null or missing)
        for question, found, null in zip(questions, spans, nulls, strict=True)
    ]


def _window_spans(
    offsets: np.ndarray, starts: np.ndarray, ends: np.ndarray, context: str, n_best: int, max_answer_length: int
) -> list[tuple[tuple[int, int], Span]]:
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
        place = int(offsets[a, 0]), int(offsets[b, 1])
        text = context[slice(*place)].strip()
        if text:
            spans.append((place, Span(text, float(starts[a]), float(ends[b]))))
    return spans


def nbest_entries(prediction: Prediction, with_null: bool, n_best: int = 20) -> list[dict[str, Any]]:
    """Return what the n-best file holds of a question: text, logits and probability of each entry, best first.

    With `with_null` (v2.0) "no answer" is an entry.
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
    """Return a text in lower case, without punctuation and English articles, one space between words."""
    kept = "".join(character for character in text.lower() if character not in PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", kept).split())


def exact_match(prediction: str, truth: str) -> float:
    """Return 1.0 where two answers are the same once normalised, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(truth))


def token_f1(prediction: str, truth: str, both_empty: float = 0.0) -> float:
    """Return the harmonic mean of precision and recall of the normalised answer's words, in [0, 1].

    Where neither has a word it is `both_empty`: 0 in the official script of v1.1, 1 in that of v2.0.
    """
    found, right = normalize_answer(prediction).split(), normalize_answer(truth).split()
    if not found or not right:
        return both_empty if found == right else 0.0
    common = sum((Counter(found) & Counter(right)).values())
    return 2 * common / (len(found) + len(right))


def score_answer(prediction: str, truths: Sequence[str], both_empty: float = 0.0) -> tuple[float, float]:
    """Return exact match and F1 with the nearest true answer; without any, the empty text is right."""
    truths = truths or [""]
    return (
        max(exact_match(prediction, truth) for truth in truths),
        max(token_f1(prediction, truth, both_empty) for truth in truths),
    )


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
    scores: Mapping[str, float], odds: Mapping[str, float], texts: Mapping[str, str], has_answer: Mapping[str, bool]
) -> tuple[float, float]:
    """Find the threshold of `odds`, how little an answer is to be expected, above which "no answer" is best predicted.

    Return the best mean from 0 to 100, and the largest value of `odds` up to which answers are kept (0 where none is).
    """
    current = best = float(sum(not has_answer[key] for key in scores))
    threshold = 0.0
    for key in sorted(scores, key=odds.__getitem__):
        # Keeping one more answer: it gains its score, or an unanswerable question loses its point.
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
    """Compute exact match and F1, from 0 to 100, as the official scripts do.

    Args:
        texts: the predicted answer of each by id.
        odds: for v2.0: by id, any score that is larger where an answer is less likely; None: v1.1.
        no_answer_threshold: where the score is more than this, no answer is what counts as predicted.

    Returns:
        v1.1: "exact_match", "f1". v2.0: "exact", "f1" and "total", overall and of questions with ("HasAns_") and
        without ("NoAns_") an answer; "best_exact" and "best_f1", those of the threshold that is best for each, and
        these thresholds, "best_exact_thresh" and "best_f1_thresh". They flatter a model: the threshold is chosen on
        the questions that they are computed from.

    Raises:
        ValueError: if there is no question, or one has no prediction.
    """
    missing = [q.id for q in questions if q.id not in texts]
    if missing or not questions:
        what = f"{len(missing)} questions have no prediction, such as {missing[0]}" if missing else "no question"
        raise ValueError(f"SQuAD's metric: {what}")
    truths = {q.id: [answer.text for answer in q.answers] for q in questions}
    if odds is not None:
        return _scores_v2(truths, texts, odds, no_answer_threshold)
    exact, f1 = zip(*(score_answer(texts[key], right) for key, right in truths.items()), strict=True)
    return {"exact_match": 100 * _mean(exact), "f1": 100 * _mean(f1)}


def _scores_v2(
    truths: Mapping[str, list[str]], texts: Mapping[str, str], odds: Mapping[str, float], no_answer_threshold: float
) -> dict[str, float]:
    # The official script leaves out true answers of which normalising leaves nothing.
    raw = {
        key: score_answer(texts[key], [text for text in right if normalize_answer(text)], both_empty=1.0)
        for key, right in truths.items()
    }
    has_answer = {key: bool(right) for key, right in truths.items()}
    no_answer = {key: (float(not answered),) * 2 for key, answered in has_answer.items()}
    scores = {key: no_answer[key] if odds[key] > no_answer_threshold else raw[key] for key in raw}
    values = _split_means(scores, "", lambda key: True)
    values |= _split_means(scores, "HasAns_", lambda key: has_answer[key])
    values |= _split_means(scores, "NoAns_", lambda key: not has_answer[key])
    for at, name in enumerate(("exact", "f1")):
        best, threshold = best_threshold({key: row[at] for key, row in raw.items()}, odds, texts, has_answer)
        values |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return values
