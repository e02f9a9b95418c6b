"""SuperGLUE's official metrics (arXiv:1905.00537, section 3.1), all from 0 to 1."""

from collections.abc import Sequence

import numpy as np
from sklearn.metrics import accuracy_score, f1_score

from ...superglue_tasks import SuperGlueTask
from ..squad.metrics import score_answer
from .examples import Example

__all__ = ["chosen_candidates", "compute_superglue", "starts_of"]


def compute_superglue(task: SuperGlueTask, examples: Sequence[Example], scores: np.ndarray) -> dict[str, float]:
    """Compute a task's metrics; with two there is also `combined_score`, their mean, by which the leaderboard ranks.

    accuracy: of rows. f1_macro: the mean of the classes' F1, of those that are true or predicted in some row. f1a: F1
    of the right answers among all answers to all questions. exact_match of MultiRC: the share of questions of which
    each answer is told rightly. f1 and exact_match of ReCoRD: SQuAD's, of the candidate that is chosen, with the
    nearest of the right answers.

    Args:
        task: the task.
        examples: with their labels, or right answers.
        scores: the model's logits of all their rows [rows, labels], in the order of the task's labels.
    """
    if task.name == "record":
        texts = chosen_candidates(examples, scores)
        found = [score_answer(text, example.truths) for text, example in zip(texts, examples, strict=True)]
        exact, f1 = np.mean(found, axis=0).tolist()
        values = {"f1": f1, "exact_match": exact}
    else:
        labels = np.array([label for example in examples for label in example.labels or ()])
        predicted = scores.argmax(-1)
        values = {name: float(_value(name, labels, predicted, examples)) for name in task.metrics}
    if len(values) > 1:
        values["combined_score"] = float(np.mean([*values.values()]))
    return values


def _value(name: str, labels: np.ndarray, predicted: np.ndarray, examples: Sequence[Example]) -> float:
    if name == "accuracy":
        return accuracy_score(labels, predicted)
    if name == "f1_macro":
        return f1_score(labels, predicted, average="macro", zero_division=0.0)
    if name == "f1a":
        return f1_score(labels, predicted, zero_division=0.0)
    right = np.split(labels == predicted, starts_of(examples))
    return float(np.mean([each.all() for each in right]))


def starts_of(examples: Sequence[Example]) -> np.ndarray:
    """Return the numbers of the rows at which the second example and those after it begin."""
    return np.cumsum([len(example.texts) for example in examples])[:-1]


def chosen_candidates(examples: Sequence[Example], scores: np.ndarray) -> list[str]:
    """Return of each query the candidate that is most likely to be right, each by itself.

    Args:
        examples: of ReCoRD.
        scores: logits [rows, 2]: of a candidate that is wrong, and that is right.
    """
    likely = np.split(scores[:, 1] - scores[:, 0], starts_of(examples))
    return [example.candidates[int(each.argmax())] for example, each in zip(examples, likely, strict=True)]
