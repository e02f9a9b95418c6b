"""SuperGLUE's rows as texts that a model reads: the official fields, marked words, candidates in the query.

Official files and the Hub write two of the tasks, MultiRC and ReCoRD, in other forms; `data` reads both.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...superglue_tasks import SuperGlueTask
from ...text_lines import is_unicode

__all__ = ["Example", "label_of", "make_example", "multirc_example", "number_of", "record_example", "text_in"]

# COPA's questions, as its authors' test words them.
COPA_QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
PLACEHOLDER = "@placeholder"
# ReCoRD's passages end in bullet points, each behind a line "@highlight".
HIGHLIGHT = re.compile(r"""([.?!"'])?\s*\n@highlight\n""")


@dataclass(frozen=True)
class Example:
    """What is scored as one: a row of a file, or of MultiRC and ReCoRD a question.

    Attributes:
        index: the official number; of MultiRC those of the passage and of the question.
        texts: what a model reads, one or two texts each: one such row, or one a choice, an answer or a candidate.
        labels: a class id each, of COPA that of the choice alone; None where they are not known.
        answers: of MultiRC the official numbers of the answers.
        candidates: of ReCoRD the entities that may be the answer.
        truths: of ReCoRD those that are, as texts.
        fields: what `wording` makes a text of, one each: (name, text) of the official fields, in T5's order; of COPA
            and ReCoRD one for all choices or candidates.
    """

    index: tuple[int, ...]
    texts: tuple[tuple[str, ...], ...]
    labels: tuple[int, ...] | None
    answers: tuple[int, ...] = ()
    candidates: tuple[str, ...] = ()
    truths: tuple[str, ...] = ()
    fields: tuple[tuple[tuple[str, str], ...], ...] = ()


def make_example(task: SuperGlueTask, row: Mapping[str, Any], place: str, has_label: bool) -> Example:
    """Return a row of a task that has one row an example: all but MultiRC and ReCoRD.

    Raises:
        ValueError: if a field is missing or of another kind; the message begins with `place`.
    """

    def text(name: str) -> str:
        return text_in(row, name, place)

    index = (number_of(row, "idx", place),)
    labels = (label_of(task, row, place),) if has_label else None
    if task.name == "copa":
        question = text("question")
        if question not in COPA_QUESTIONS:
            raise ValueError(f"{place}: question is {question!r:.40}, and must be cause or effect")
        fields = _named(row, ("choice1", "choice2", "premise", "question"), place)
        choices = [f"{COPA_QUESTIONS[question]} {text(name)}" for name in ("choice1", "choice2")]
        texts = tuple((text("premise"), choice) for choice in choices)
        return Example(index, texts, labels, fields=(fields,))
    if task.name == "wic":
        marked = _marked_word(row, "1", place), _marked_word(row, "2", place)
        return Example(index, (marked,), labels, fields=(_named(row, ("sentence1", "sentence2", "word"), place),))
    if task.name == "wsc":
        spans = _marked_spans(row, place)
        return Example(index, ((spans,),), labels, fields=((("text", spans),),))
    own = tuple(text(name) for name in task.fields)
    return Example(index, (own,), labels, fields=(_named(row, sorted(task.fields), place),))


def _named(row: Mapping[str, Any], names: Sequence[str], place: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, text_in(row, name, place)) for name in names)


def multirc_example(
    index: tuple[int, int], passage: str, question: str, answers: list[tuple[int, str, int | None]]
) -> Example:
    """Return a question of MultiRC, whose answers are read each by itself, behind the passage and the question.

    Args:
        index: the numbers of the passage and the question.
        passage, question: the texts.
        answers: number, text and label (None: not known) of each.
    """
    numbers, texts, labels = zip(*answers, strict=True)
    pairs = tuple((passage, f"{question} {answer}") for answer in texts)
    fields = tuple((("question", question), ("answer", answer), ("paragraph", passage)) for answer in texts)
    return Example(index, pairs, None if None in labels else labels, answers=numbers, fields=fields)


def record_example(
    index: int, passage: str, query: str, candidates: list[str], truths: list[str] | None, place: str
) -> Example:
    """Return a query of ReCoRD: each candidate takes the place of "@placeholder", and is right or wrong.

    A candidate that stands twice in the passage is read once. Bullet points of the passage become sentences.

    Raises:
        ValueError: if the query has no placeholder, or there is no candidate.
    """
    if PLACEHOLDER not in query:
        raise ValueError(f"{place}: the query has no {PLACEHOLDER}: {query[:80]!r}")
    names = tuple(dict.fromkeys(candidates))
    if not names:
        raise ValueError(f"{place}: its passage has no entity to choose from")
    passage = HIGHLIGHT.sub(lambda match: f"{match[1] or '.'} ", passage)
    pairs = tuple((passage, query.replace(PLACEHOLDER, name)) for name in names)
    labels = None if truths is None else tuple(int(name in truths) for name in names)
    fields = ((("query", query), ("entities", ", ".join(names)), ("passage", passage)),)
    right = tuple(dict.fromkeys(truths or ()))
    return Example((index,), pairs, labels, candidates=names, truths=right, fields=fields)


def _marked_word(row: Mapping[str, Any], side: str, place: str) -> str:
    """Return a sentence of WiC with its word between asterisks, at the characters that the row names."""
    sentence = text_in(row, f"sentence{side}", place)
    start, end = (number_of(row, f"{name}{side}", place) for name in ("start", "end"))
    if not 0 <= start < end <= len(sentence):
        raise ValueError(f"{place}: start{side} {start} and end{side} {end} lie outside of {sentence[:60]!r}")
    return f"{sentence[:start]}* {sentence[start:end]} *{sentence[end:]}"


def _marked_spans(row: Mapping[str, Any], place: str) -> str:
    """Return a text of WSC: "* " and " *" around the noun, "# " and " #" around the pronoun, as T5's code has it."""
    text = text_in(row, "text", place)
    target = row.get("target", row)  # the Hub's rows have its fields beside the text
    if not isinstance(target, Mapping):
        raise ValueError(f"{place}: target must be an object, got {target!r:.60}")
    marks = []
    for side, mark in (("1", "*"), ("2", "#")):
        number, span = number_of(target, f"span{side}_index", place), text_in(target, f"span{side}_text", place)
        start, end = _find_span(text, number, span, place)
        marks += [(start, f"{mark} "), (end, f" {mark}")]
    for at, mark in sorted(marks, reverse=True):  # the last one first: the others' places do not move
        text = text[:at] + mark + text[at:]
    return text


def _find_span(text: str, number: int, span: str, place: str) -> tuple[int, int]:
    """Return where a span stands: nearest to the word of this number, from 0, for some official numbers are off."""
    words = span.strip().rstrip('.,"').split()
    pattern = r"(?<!\w)" + r"\s+".join(map(re.escape, words)) + r"(?!\w)"
    found = [match.span() for match in re.finditer(pattern, text, re.IGNORECASE)] if words else []
    if not found:
        raise ValueError(f"{place}: {span!r:.60} does not stand in the text {text[:80]!r}")
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    return min(found, key=lambda each: abs(bisect_right(starts, each[0]) - 1 - number))


def text_in(row: Mapping[str, Any], name: str, place: str) -> str:
    """Return a text of a row; raise ValueError where it has none of this name."""
    value = row.get(name)
    if isinstance(value, str) and is_unicode(value):
        return value
    raise ValueError(f"{place}: {name} must be a text, got {value!r:.60}{_fields(row) if name not in row else ''}")


def number_of(row: Mapping[str, Any], name: str, place: str) -> int:
    """Return a whole number of a row; raise ValueError where it has none of this name."""
    value = row.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(
        f"{place}: {name} must be a whole number, got {value!r:.60}{_fields(row) if name not in row else ''}"
    )


def _fields(row: Mapping[str, Any]) -> str:
    return f"; its fields are {', '.join(map(str, row)) or 'none'}"


def label_of(task: SuperGlueTask, row: Mapping[str, Any], place: str) -> int:
    """Return a row's label as a class id; it is written as true or false, as a name, or as an id.

    Raises:
        ValueError: if it is none of these.
    """
    value = row.get("label")
    if isinstance(value, bool):
        value = str(value) if task.labels == ("False", "True") else None
    if isinstance(value, str):
        by_case = {label.lower(): i for i, label in enumerate(task.labels)}
        value = by_case.get(value.lower())
    if isinstance(value, int) and 0 <= value < len(task.labels):
        return value
    shown = f"got {row['label']!r:.40}" if "label" in row else f"it has none{_fields(row)}"
    raise ValueError(f"{place}: label must be one of {', '.join(task.labels)}; {shown}")
