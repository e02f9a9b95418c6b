"""The official metrics of SuperGLUE (arXiv 1905.00537, section 3.1), from 0 to 1, and the submission files."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from superglue_data import Example
from superglue_tasks import SuperGlueTask

from hf_attn_variants.training.squad.data import score_answer


def compute_superglue_metrics(
    task: SuperGlueTask, examples: Sequence[Example], logits: np.ndarray
) -> dict[str, float]:
    """Compute the metrics for a task.

    `f1_macro` is the mean F1 over the classes that occur in the labels or predictions. `f1a` is the F1 over all
    answers. For MultiRC, `exact_match` is the share of questions for which all answers are classified correctly. For
    ReCoRD, `f1` and `exact_match` are the SQuAD metrics. `combined_score` is the mean of two metrics.

    Args:
        task: The task.
        examples: The examples with their labels.
        logits: The logits for all texts in the examples [texts, labels] or, for COPA, [questions, choices].
    """
    if task.name == "record":
        texts = choose_candidates(examples, logits)
        scores = [score_answer(text, example.truths) for text, example in zip(texts, examples, strict=True)]
        exact, f1 = np.mean(scores, axis=0).tolist()
        values = {"f1": f1, "exact_match": exact}
    else:
        labels = np.array([label for example in examples for label in example.labels or ()])
        predicted = logits.argmax(-1)
        functions = {
            "accuracy": lambda: accuracy_score(labels, predicted),
            "f1_macro": lambda: f1_score(labels, predicted, average="macro", zero_division=0.0),
            "f1a": lambda: f1_score(labels, predicted, zero_division=0.0),
            "exact_match": lambda: np.mean(
                [right.all() for right in _split_by_example(examples, labels == predicted)]
            ),
        }
        values = {name: float(functions[name]()) for name in task.metrics}
    return values | ({"combined_score": float(np.mean([*values.values()]))} if len(values) > 1 else {})


def compute_diagnostic_scores(name: str, examples: Sequence[Example], predicted: np.ndarray) -> dict[str, float]:
    """Compute the metrics for AX-b (Matthews correlation) or AX-g (accuracy and gender parity).

    Consecutive rows of AX-g form pairs that differ in the gender of a pronoun. The gender parity is the share of pairs
    with equal predictions.
    """
    labels = np.array([label for example in examples for label in example.labels or ()])
    scores: dict[str, float] = {}
    if len(labels) and name == "axb":
        scores["axb_matthews_correlation"] = float(matthews_corrcoef(labels, predicted))
    if name == "axg":
        scores |= {"axg_accuracy": float(accuracy_score(labels, predicted))} if len(labels) else {}
        hypotheses = [example.texts[0][1] for example in examples]
        if hypotheses[::2] == hypotheses[1::2]:
            scores["axg_gender_parity"] = float((predicted[::2] == predicted[1::2]).mean())
    return scores


def choose_candidates(examples: Sequence[Example], logits: np.ndarray) -> list[str]:
    """Return the most probable candidate for each ReCoRD query, based on the logits [candidates, 2]."""
    likely = _split_by_example(examples, logits[:, 1] - logits[:, 0])
    return [example.choices[int(values.argmax())] for example, values in zip(examples, likely, strict=True)]


def _split_by_example(examples: Sequence[Example], values: np.ndarray) -> list[np.ndarray]:
    """Split the values for all texts by example."""
    return np.split(values, np.cumsum([len(example.texts) for example in examples])[:-1])


def format_submission(task: SuperGlueTask, examples: Sequence[Example], logits: np.ndarray) -> str:
    """Return the content of a submission file with one JSON object per line, as in `compute_superglue_metrics`."""
    if task.name == "multirc":
        passages: dict[int, list[dict[str, Any]]] = {}
        for example, predicted in zip(examples, _split_by_example(examples, logits.argmax(-1)), strict=True):
            answers = [{"idx": i, "label": int(label)} for i, label in zip(example.choices, predicted, strict=True)]
            passages.setdefault(example.index[0], []).append({"idx": example.index[1], "answers": answers})
        records: list[Any] = [{"idx": i, "passage": {"questions": questions}} for i, questions in passages.items()]
    else:
        labels: list[Any] = [task.submitted[i] for i in logits.argmax(-1)]
        labels = choose_candidates(examples, logits) if task.name == "record" else labels
        records = [{"idx": example.index[0], "label": label} for example, label in zip(examples, labels, strict=True)]
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
