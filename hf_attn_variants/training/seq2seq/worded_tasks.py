"""GLUE and SQuAD as text to text, worded as T5 does (arXiv:1910.10683, appendix D)."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...glue_tasks import GlueTask, get_task
from ..classification.splits import ClassificationSplit
from ..glue.data import load_glue
from ..glue.metrics import compute_metrics
from ..squad.data import Question, load_squad
from ..squad.metrics import score_answer
from ..squad.settings import METRIC_NAMES
from .data import Seq2SeqData, Seq2SeqSplit
from .settings import SQUAD, Seq2SeqSettings

__all__ = ["format_glue", "format_label", "format_squad", "load_task", "parse_texts"]

# What T5 calls a task's texts, in its order (the second text first in MNLI); elsewhere the column's name.
WORDS: dict[str, tuple[tuple[int, str], ...]] = {
    "mnli": ((1, "hypothesis"), (0, "premise")),
    "mrpc": ((0, "sentence1"), (1, "sentence2")),
}
# T5 rounds scores to fifths, so that they are texts which occur often enough to be learned.
SCORE_STEPS = 5


def format_glue(task: GlueTask, texts: Sequence[str]) -> str:
    """Word an example: "qnli question: ... sentence: ..."."""
    words = WORDS.get(task.name) or tuple((i, names[0]) for i, names in enumerate(task.text_columns))
    return " ".join([task.name, *(f"{word}: {texts[i]}" for i, word in words)])


def format_label(task: GlueTask, label: float) -> str:
    """Word a label: a class name, or a score rounded to 0.2."""
    if task.labels is None:
        return f"{round(label * SCORE_STEPS) / SCORE_STEPS:.1f}"
    return task.labels[int(label)]


def parse_texts(task: GlueTask, texts: Sequence[str], labels: np.ndarray) -> np.ndarray:
    """Read generated texts as class ids, or scores (-1 where a text is no number).

    A text that is no class name counts as another class than the true one, of `labels`.
    """
    if task.labels is None:
        return np.array([_parse_score(text) for text in texts])
    names = {name: i for i, name in enumerate(task.labels)}
    wrong = (np.asarray(labels) + 1) % len(names)
    return np.array([names.get(text.strip(), other) for text, other in zip(texts, wrong, strict=True)])


def _parse_score(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0


def format_squad(question: Question) -> str:
    """Word an example: "question: ... context: ..."."""
    return f"question: {question.question} context: {question.context}"


def load_task(settings: Seq2SeqSettings) -> Seq2SeqData:
    """Read the task that `--task_name` names.

    Raises:
        OSError: if a file or the Hub's dataset cannot be read.
        ValueError: if there is no such task, or a file is wrong.
    """
    files = {f"{name}_file": _one_file(settings, name) for name in ("train", "validation", "test")}
    data = _load_squad(settings, files) if (settings.task_name or "").lower() == SQUAD else _load_glue(settings, files)
    if settings.source_prefix:
        data.results["source_prefix"] = settings.source_prefix
        for name, split in data.splits.items():
            data.splits[name] = replace(split, sources=[settings.source_prefix + source for source in split.sources])
    return data


def _one_file(settings: Seq2SeqSettings, name: str) -> str | None:
    given = getattr(settings, f"{name}_file")
    if given is not None and len(given) > 1:
        raise ValueError(f"--{name}_file: --task_name {settings.task_name} has one file, got {len(given)}")
    return given[0] if given else None


def _load_glue(settings: Seq2SeqSettings, files: dict[str, str | None]) -> Seq2SeqData:
    task = get_task(settings.task_name or "")
    loaded = load_glue(task, settings.data_dir, files, with_train=not settings.only_evaluates)
    dev, test = next(iter(task.eval_splits)), next(iter(task.test_splits))
    sources = {"train": "train", "dev": dev, "test": test}
    splits = {name: _glue_split(task, name, loaded[split]) for name, split in sources.items() if split in loaded}
    labels = np.asarray(loaded[dev].data["label"])

    def score(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        # A score's own value, and not the one it is worded as, is what it is compared with.
        true = labels[: len(texts)]
        return compute_metrics(task.metrics, parse_texts(task, texts, true), true)

    names = (*task.metrics, *(["combined_score"] if len(task.metrics) > 1 else []))
    return Seq2SeqData(splits, score, names, task.main_metric, {"task_name": task.name})


def _glue_split(task: GlueTask, name: str, split: ClassificationSplit) -> Seq2SeqSplit:
    columns = [split.data[f"text{i + 1}"] for i in range(len(task.text_columns))]
    sources = [format_glue(task, texts) for texts in zip(*columns, strict=True)]
    keys = [] if name == "train" else [{"index": index} for index in split.data["index"]]
    if "label" not in split.data.column_names:
        return Seq2SeqSplit(name, sources, None, keys)
    return Seq2SeqSplit(name, sources, [(format_label(task, label),) for label in split.data["label"]], keys)


def _load_squad(settings: Seq2SeqSettings, files: dict[str, str | None]) -> Seq2SeqData:
    if settings.data_dir is not None:
        raise ValueError("--data_dir is for GLUE; --task_name squad reads --train_file and --validation_file")
    splits = {}
    found = load_squad(files, from_hub=not any(files.values()), with_train=not settings.only_evaluates)
    for name, questions in found.items():
        sources = list(map(format_squad, questions))
        answers = [tuple(answer.text for answer in question.answers) for question in questions]
        keys = [] if name == "train" else [{"id": question.id} for question in questions]
        splits[name] = Seq2SeqSplit(name, sources, answers if name != "test" else None, keys)

    def score(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        scores = np.array([score_answer(text, row) for text, row in zip(texts, references, strict=True)])
        return dict(zip(METRIC_NAMES[False], (100 * scores.mean(0)).tolist(), strict=True))

    return Seq2SeqData(splits, score, METRIC_NAMES[False], "f1", {"task_name": SQUAD})
