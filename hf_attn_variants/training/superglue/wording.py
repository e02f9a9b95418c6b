"""SuperGLUE as text to text, worded as T5's code does (arXiv:1910.10683, appendix D): a text to read, texts to choose.

WSC is the wording of T5's code in which a row is told right or wrong; T5's own checkpoints were trained to write the
noun. WiC has no part of speech, as in T5's code; COPA is answered by the name of a choice.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...superglue_tasks import SuperGlueTask
from ..classification.splits import make_rows
from ..multiple_choice.choices import ChoiceSplit
from .examples import Example

__all__ = ["as_logits", "right_answers", "word_example", "worded_split"]

logger = logging.getLogger(__name__)


def word_example(task: SuperGlueTask, example: Example) -> list[str]:
    """Return the texts to read, one each of an example's `fields`: "boolq passage: ... question: ..."."""
    return [_word(task, fields) for fields in example.fields]


def _word(task: SuperGlueTask, fields: Sequence[tuple[str, str]]) -> str:
    text = " ".join([task.name, *(f"{name}: {value}" for name, value in fields)])
    # Paragraphs of MultiRC have their sentences numbered in HTML.
    return re.sub("</?b>", "", text.replace("<br>", " ")) if task.name == "multirc" else text


def worded_split(task: SuperGlueTask, name: str, examples: Sequence[Example]) -> ChoiceSplit:
    """Return examples as questions: those of "train" with the right answer of each, the others without.

    A query of ReCoRD is trained on once for each of its right answers, as T5 is; one that has none among its
    candidates is left out, and counted.
    """
    columns: dict[str, list] = {"text1": [], "text2": [], "choices": [], "index": []}
    labels: list[int] = []
    left_out = 0
    for example in examples:
        for text, choices, right in _questions(task, example):
            repeats: list[Any] = [None] if name != "train" else right
            left_out += not repeats
            for label in repeats:
                columns["text1"].append(text)
                columns["text2"].append(choices)
                columns["index"].append(example.index[-1])
                labels += [] if label is None else [label]
    if left_out:
        logger.warning("%s: %d queries have no right answer among their candidates, and are left out", name, left_out)
    columns["choices"] = columns["text2"]
    return ChoiceSplit(name, make_rows(columns | ({"label": labels} if name == "train" else {})))


def _questions(task: SuperGlueTask, example: Example) -> Iterator[tuple[str, list[str], list[int]]]:
    """Return each of an example's texts with its choices, and the places of those that are right."""
    texts = word_example(task, example)
    if task.name == "record":
        yield texts[0], list(example.candidates), [i for i, label in enumerate(example.labels or ()) if label]
        return
    for i, text in enumerate(texts):
        yield text, list(task.labels), [] if example.labels is None else [example.labels[i]]


def right_answers(task: SuperGlueTask, examples: Sequence[Example]) -> list[list[int]]:
    """Return the places of the right choices of each of the examples' texts, in their order."""
    return [right for example in examples for _, _, right in _questions(task, example)]


def as_logits(task: SuperGlueTask, examples: Sequence[Example], log_shares: np.ndarray) -> np.ndarray:
    """Return log-probabilities of choices as `metrics` and `submission` take logits.

    Args:
        task, examples: what is scored.
        log_shares: of each text's choices [texts, most choices].
    """
    if task.name != "record":
        return log_shares
    each = [log_shares[i, : len(example.candidates)] for i, example in enumerate(examples)]
    right = np.concatenate(each)
    return np.stack([np.zeros_like(right), right], axis=1)
