"""From the logits of windows to SQuAD's answers: the n best spans of a question, and whether to answer it at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .data import Question
from .windows import NO_ANSWER, Window

__all__ = ["Prediction", "Span", "find_predictions", "nbest_entries"]


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
