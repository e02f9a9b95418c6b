"""Reading SuperGLUE from the official JSONL files or the Hub, and converting it to texts for encoders and T5."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import load_dataset
from superglue_tasks import DATASET, SuperGlueTask

from hf_attn_variants.text_files import read_table_rows

FILES = {"train": "train.jsonl", "validation": "val.jsonl", "test": "test.jsonl"}
# The diagnostic sets, which models trained on RTE predict.
DIAGNOSTICS = {"axb": "AX-b", "axg": "AX-g"}
# The COPA questions, as worded by its authors.
COPA_QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
# ReCoRD passages end with bullet points, each of which follows a line with "@highlight".
HIGHLIGHT = re.compile(r"""([.?!"'])?\s*\n@highlight\n""")
NamedRows = Iterable[tuple[str, Mapping[str, Any]]]  # the location of each row for error messages, and the row


@dataclass(frozen=True)
class Example:
    """A row from a file or, for MultiRC and ReCoRD, a question.

    Attributes:
        index: The official number or, for MultiRC, the numbers of the passage and the question.
        texts: The texts or text pairs for an encoder, one per row, choice, answer or candidate.
        labels: The class id of each text (for COPA, only the correct choice), or None if they are unknown.
        t5_texts: The texts for T5 (arXiv 1910.10683, appendix D). For COPA and ReCoRD, one text covers all choices.
        choices: The answer numbers for MultiRC, or the candidates for ReCoRD.
        truths: The correct answers for ReCoRD.
    """

    index: tuple[int, ...]
    texts: tuple[tuple[str, ...], ...]
    labels: tuple[int, ...] | None
    t5_texts: tuple[str, ...]
    choices: tuple[Any, ...] = ()
    truths: tuple[str, ...] = ()


def load_examples(settings: Any, task: SuperGlueTask) -> dict[str, list[Example]]:
    """Read the required splits ("train", "validation" and "test") and, for RTE, the diagnostic sets.

    Raises:
        OSError: If the train or validation file is missing, or if the Hub cannot be reached.
        ValueError: If a row is not valid. The message contains its location.
    """
    unread = {"train": settings.only_evaluates, "test": settings.skip_predict}
    limits = {"train": settings.max_train_samples, "validation": settings.max_eval_samples}
    splits = [(name, task.name, name, file) for name, file in FILES.items() if not unread.get(name)]
    if task.name == "rte" and not settings.skip_predict:
        splits += [(name, name, "test", f"../{folder}/{folder}.jsonl") for name, folder in DIAGNOSTICS.items()]
    examples = {}
    for name, config, split, file in splits:
        if settings.data_dir is None or split != "test" or Path(settings.data_dir, file).is_file():
            rows = _load_rows(settings.data_dir, config, split, file)
            is_known = split != "test" or all(row.get("label", -1) != -1 for _, row in rows)
            examples[name] = make_examples(task, rows, is_known and name != "test")[: limits.get(name)]
    return examples


def _load_rows(data_dir: str | None, config: str, split: str, file: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Read the rows in a split from the folder or the Hub."""
    if data_dir is not None:
        return [(record.place, record.values) for record in read_table_rows(Path(data_dir, file))]
    data: Any = load_dataset(DATASET, config, split=split)
    return [(f"{DATASET}, {config} ({split}), row {i}", row) for i, row in enumerate(data, start=1)]


def make_examples(task: SuperGlueTask, rows: NamedRows, has_labels: bool = True) -> list[Example]:
    """Convert rows from the official files or the Hub to examples.

    Raises:
        ValueError: If a row lacks a field, or its label is not a label of the task. The message contains its location.
    """
    examples: list[Example] = []
    answers: dict[tuple[int, int], list[Mapping[str, Any]]] = {}  # the answers to each MultiRC question
    for place, row in rows:
        try:
            for flat in _flatten_row(task, row):
                labels = (_get_class_id(task, flat),) if has_labels and task.name != "record" else None
                if task.name == "multirc":
                    index = flat["idx"]["paragraph"], flat["idx"]["question"]
                    answers.setdefault(index, []).append({**flat, "labels": labels})
                else:
                    examples.append(
                        _convert_record(flat, has_labels)
                        if task.name == "record"
                        else _convert_row(task, flat, labels)
                    )
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ValueError(
                f"{place}: The row must be a valid {task.folder} row, got {type(error).__name__}: {error}."
            ) from error
    return examples + [_convert_multirc(index, question_answers) for index, question_answers in answers.items()]


def _flatten_row(task: SuperGlueTask, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Convert an official row to rows as on the Hub, with one row per MultiRC answer or ReCoRD query."""
    passage = row.get("passage")
    if not isinstance(passage, Mapping):
        yield {**row, **row.get("target", {})}
    elif task.name == "multirc":
        for question in passage["questions"]:
            for answer in question["answers"]:
                index = {"paragraph": row["idx"], "question": question["idx"], "answer": answer["idx"]}
                texts = {"paragraph": passage["text"], "question": question["question"], "answer": answer["text"]}
                yield {**texts, "idx": index, "label": answer.get("label")}
    else:
        spans = [passage["text"][entity["start"] : entity["end"] + 1] for entity in passage["entities"]]
        for query in row["qas"]:
            texts = {"passage": passage["text"], "query": query["query"], "idx": {"query": query["idx"]}}
            yield {**texts, "entities": spans, "answers": [answer["text"] for answer in query.get("answers", ())]}


def _get_class_id(task: SuperGlueTask, row: Mapping[str, Any]) -> int:
    """Return the class id for a label, which may be a class name (ignoring case), a Boolean or a class id."""
    value, names = row["label"], [label.lower() for label in task.labels]
    if isinstance(value, str | bool) and str(value).lower() in names:
        return names.index(str(value).lower())
    if isinstance(value, bool) or value not in range(len(names)):
        raise ValueError(f"label must be one of {', '.join(task.labels)}, got {value!r}")
    return value


def _convert_row(task: SuperGlueTask, row: Mapping[str, Any], labels: tuple[int, ...] | None) -> Example:
    """Convert a row for tasks other than MultiRC and ReCoRD."""
    names: Sequence[str] = sorted(task.fields)
    texts: tuple[Any, ...]
    if task.name == "copa":
        texts = tuple((row["premise"], f"{COPA_QUESTIONS[row['question']]} {row[name]}") for name in task.labels)
        names = (*task.labels, "premise", "question")
    elif task.name == "wic":
        texts = ((_mark_word(row, "1"), _mark_word(row, "2")),)
        names = ("sentence1", "sentence2", "word")
    elif task.name == "wsc":
        row = {**row, "text": _mark_spans(row)}
        texts = ((row["text"],),)
    else:
        if "sentence1" in row:  # AX-b
            row = {**row, "premise": row["sentence1"], "hypothesis": row["sentence2"]}
        texts = (tuple(row[name] for name in task.fields),)
    return Example((row["idx"],), texts, labels, (_format_text(task.name, row, names),))


def _format_text(task: str, row: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the text for T5, which contains the task name and the fields with their names."""
    return " ".join([task, *(f"{name}: {row[name]}" for name in names)])


def _convert_multirc(index: tuple[int, int], answers: list[Mapping[str, Any]]) -> Example:
    """Convert a MultiRC question with its answers."""
    texts = tuple((answer["paragraph"], f"{answer['question']} {answer['answer']}") for answer in answers)
    t5_texts = (_format_text("multirc", answer, ("question", "answer", "paragraph")) for answer in answers)
    # The paragraphs contain HTML tags that number their sentences.
    plain = tuple(re.sub("</?b>", "", text.replace("<br>", " ")) for text in t5_texts)
    labels = tuple(answer["labels"][0] for answer in answers) if answers[0]["labels"] else None
    return Example(index, texts, labels, plain, tuple(answer["idx"]["answer"] for answer in answers))


def _convert_record(row: Mapping[str, Any], has_labels: bool) -> Example:
    """Convert a ReCoRD query. Entities replace "@placeholder", and bullet points become sentences."""
    names, query = tuple(dict.fromkeys(row["entities"])), row["query"]
    truths = tuple(dict.fromkeys(row["answers"])) if has_labels else ()
    if "@placeholder" not in query or not names or not all(names):
        raise ValueError("the query must contain @placeholder, and the passage must contain entities")
    passage = HIGHLIGHT.sub(lambda match: f"{match[1] or '.'} ", row["passage"])
    texts = tuple((passage, query.replace("@placeholder", name)) for name in names)
    fields = {"query": query, "entities": ", ".join(names), "passage": passage}
    labels = tuple(int(name in truths) for name in names) if has_labels else None
    return Example((row["idx"]["query"],), texts, labels, (_format_text("record", fields, fields),), names, truths)


def _mark_word(row: Mapping[str, Any], side: str) -> str:
    """Return a WiC sentence with asterisks around the word."""
    sentence, start, end = (row[f"{name}{side}"] for name in ("sentence", "start", "end"))
    if not 0 <= start < end <= len(sentence):
        raise ValueError(f"start{side} {start} and end{side} {end} must be inside the sentence")
    return f"{sentence[:start]}* {sentence[start:end]} *{sentence[end:]}"


def _mark_spans(row: Mapping[str, Any]) -> str:
    """Return a WSC text with asterisks around the noun and hash signs around the pronoun."""
    text, marks = row["text"], []
    for side, mark in (("1", "*"), ("2", "#")):
        start, end = _find_span(text, row[f"span{side}_index"], row[f"span{side}_text"])
        marks += [(start, f"{mark} "), (end, f" {mark}")]
    for position, mark in sorted(marks, reverse=True):
        text = text[:position] + mark + text[position:]
    return text


def _find_span(text: str, number: int, span: str) -> tuple[int, int]:
    """Return the occurrence of a span closest to the given word number, because some official numbers are wrong."""
    pattern = r"\s+".join(map(re.escape, span.strip().rstrip('.,"').split()))
    matches = [match.span() for match in re.finditer(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE)]
    if not matches or not pattern:
        raise ValueError(f"the text must contain {span!r}")
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    return min(matches, key=lambda match: abs(bisect_right(starts, match[0]) - 1 - number))
