"""The official metrics of SuperGLUE (arXiv 1905.00537, section 3.1), from 0 to 1, and the files of a submission."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from superglue_data import Example
from superglue_tasks import SuperGlueTask

from hf_attn_variants.training.squad.metrics import score_answer


def compute_metrics(task: SuperGlueTask, examples: Sequence[Example], logits: np.ndarray) -> dict[str, float]:
    """Return the metrics of a task; `combined_score` is the mean of two.

    f1_macro: the mean of the F1 of the classes that are true or predicted. f1a: F1 over all answers. exact_match of
    MultiRC: the share of questions with all answers right. f1 and exact_match of ReCoRD: those of SQuAD.

    Args:
        examples: with their labels.
        logits: those of all texts of the examples [texts, labels], of COPA of all questions [questions, choices].
    """
    if task.name == "record":
        texts = chosen_candidates(examples, logits)
        found = [score_answer(text, example.truths) for text, example in zip(texts, examples, strict=True)]
        exact, f1 = np.mean(found, axis=0).tolist()
        values = {"f1": f1, "exact_match": exact}
    else:
        labels = np.array([label for example in examples for label in example.labels or ()])
        predicted = logits.argmax(-1)
        every = {
            "accuracy": lambda: accuracy_score(labels, predicted),
            "f1_macro": lambda: f1_score(labels, predicted, average="macro", zero_division=0.0),
            "f1a": lambda: f1_score(labels, predicted, zero_division=0.0),
            "exact_match": lambda: np.mean([each.all() for each in _by_example(examples, labels == predicted)]),
        }
        values = {name: float(every[name]()) for name in task.metrics}
    return values | ({"combined_score": float(np.mean([*values.values()]))} if len(values) > 1 else {})


def diagnostic_scores(name: str, examples: Sequence[Example], predicted: np.ndarray) -> dict[str, float]:
    """Return the scores of AX-b (Matthews correlation) or AX-g (accuracy, and the share of pairs with equal labels).

    The rows of AX-g are pairs that follow each other and differ in the gender of a pronoun.
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


def chosen_candidates(examples: Sequence[Example], logits: np.ndarray) -> list[str]:
    """Return the candidate of each query of ReCoRD that is most likely right; `logits` are [candidates, 2]."""
    likely = _by_example(examples, logits[:, 1] - logits[:, 0])
    return [example.choices[int(each.argmax())] for example, each in zip(examples, likely, strict=True)]


def _by_example(examples: Sequence[Example], values: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum([len(example.texts) for example in examples])[:-1])


def submission(task: SuperGlueTask, examples: Sequence[Example], logits: np.ndarray) -> str:
    """Return the file that the server of SuperGLUE expects: a JSON object per line; arguments as above."""
    if task.name == "multirc":
        passages: dict[int, list[dict[str, Any]]] = {}
        for example, found in zip(examples, _by_example(examples, logits.argmax(-1)), strict=True):
            answers = [{"idx": i, "label": int(label)} for i, label in zip(example.choices, found, strict=True)]
            passages.setdefault(example.index[0], []).append({"idx": example.index[1], "answers": answers})
        records: list[Any] = [{"idx": i, "passage": {"questions": each}} for i, each in passages.items()]
    else:
        labels: list[Any] = [task.submitted[i] for i in logits.argmax(-1)]
        labels = chosen_candidates(examples, logits) if task.name == "record" else labels
        records = [{"idx": each.index[0], "label": label} for each, label in zip(examples, labels, strict=True)]
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
