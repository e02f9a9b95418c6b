"""The files of a SuperGLUE submission: a JSON object a line, as the benchmark's server reads them."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...superglue_tasks import SuperGlueTask
from .examples import Example
from .metrics import chosen_candidates, starts_of

__all__ = ["submission"]


def submission(task: SuperGlueTask, examples: Sequence[Example], scores: np.ndarray) -> str:
    """Return the content of a task's file.

    Args:
        task: the task.
        examples: those that are predicted.
        scores: the model's logits of all their rows [rows, labels], in the order of the task's labels; of COPA of all
            questions [questions, choices].
    """
    if task.name == "multirc":
        records = _passages(examples, scores.argmax(-1))
    else:
        labels: list[Any] = (
            chosen_candidates(examples, scores)
            if task.name == "record"
            else [task.submitted[i] for i in scores.argmax(-1)]
        )
        records = [{"idx": each.index[0], "label": label} for each, label in zip(examples, labels, strict=True)]
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _passages(examples: Sequence[Example], predicted: np.ndarray) -> list[dict[str, Any]]:
    passages: dict[int, list[dict[str, Any]]] = {}
    for example, labels in zip(examples, np.split(predicted, starts_of(examples)), strict=True):
        passage, question = example.index
        numbered = zip(example.answers, labels.tolist(), strict=True)
        answers = [{"idx": number, "label": label} for number, label in numbered]
        passages.setdefault(passage, []).append({"idx": question, "answers": answers})
    return [{"idx": index, "passage": {"questions": questions}} for index, questions in passages.items()]
