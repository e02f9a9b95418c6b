"""Reads SQuAD v1.1 (arXiv:1606.05250) and v2.0 (arXiv:1806.03822) from its JSON files or from the Hub."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import load_dataset

from ...open_files import read_file
from ...table_files import RepeatingObject, parse_rows, repeated_name
from ...text_lines import is_unicode

__all__ = ["Answer", "Question", "check_unanswerable", "hash_questions", "load_squad", "load_squad_hub", "read_squad"]

HUB_DATASETS = {False: "rajpurkar/squad", True: "rajpurkar/squad_v2"}


@dataclass(frozen=True)
class Answer:
    """A span of the context, and the character of the context that it begins at."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a context, with the spans that are right."""

    id: str  # unique in its file
    question: str
    context: str
    answers: tuple[Answer, ...]  # none: the context does not answer it (or, in a test file, unknown)


def read_squad(path: str | Path, has_answers: bool = True) -> list[Question]:
    """Read a file of SQuAD's own JSON layout: {"data": [{"paragraphs": [{"context", "qas": [...]}]}]}, plain or .gz.

    The answers of a test file are neither needed nor read (`has_answers` false).

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it has another layout or no question, or an answer is not in the context; the message names the
            file and the question.
    """
    path = Path(path)
    questions = list(_questions(path, _load_json(path), has_answers))
    if not questions:
        raise ValueError(f"{path} is empty: it has no question")
    _check_ids(str(path), questions)
    return questions


def _load_json(path: Path) -> Any:
    if not path.is_file():
        raise OSError(f"{path}: no such file")
    try:
        content = read_file(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise OSError(f"{path} is no whole gzip file ({error})") from error
    if not content.strip():
        raise ValueError(f"{path} is empty")
    try:
        return parse_rows(content)
    except ValueError as error:  # a UnicodeDecodeError as well
        raise ValueError(f"{path} is not JSON: {error}") from error


def _questions(path: Path, content: Any, has_answers: bool) -> Iterator[Question]:
    for at_article, article in enumerate(_items(content, "data", f"{path}: the file")):
        for at_paragraph, paragraph in enumerate(_items(article, "paragraphs", f"{path}: data[{at_article}]")):
            where = f"{path}: data[{at_article}].paragraphs[{at_paragraph}]"
            context = _text(paragraph, "context", where)
            for at_qa, qa in enumerate(_items(paragraph, "qas", where)):
                where_qa = f"{where}.qas[{at_qa}]"
                question = _text(qa, "question", where_qa), context
                if (twice := repeated_name(qa)) is not None:
                    raise ValueError(f"{where_qa} has the name {twice!r} twice; rename one")
                found = _answers(qa, context, where_qa) if has_answers else ()
                given = qa.get("id")
                own = f"{at_article}-{at_paragraph}-{at_qa}" if given is None else str(given)
                yield Question(own, *question, found)


def _items(holder: Any, key: str, where: str) -> list[Any]:
    if isinstance(holder, RepeatingObject):
        raise ValueError(f"{where} has the name {holder.name!r} twice; rename one")
    values = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(values, list):
        has = f"its keys are {', '.join(map(str, holder))}" if isinstance(holder, dict) else "it is no JSON object"
        raise ValueError(f'{where} has no list "{key}"; {has}: this is not the layout of SQuAD')
    return values


def _text(holder: Any, key: str, where: str) -> str:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, str):
        has = f"; its keys are {', '.join(map(str, holder))}" if isinstance(holder, dict) else ""
        raise ValueError(f'{where} has no text "{key}"{has}')
    if not is_unicode(value):
        raise ValueError(f'{where} has half a surrogate pair in its "{key}", which is no text')
    return value


def _answers(qa: dict[str, Any], context: str, where: str) -> tuple[Answer, ...]:
    impossible = qa.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise ValueError(f"{where}: is_impossible must be true or false, got {impossible!r:.60}")
    where_id = f"{where} (id {qa.get('id')})"
    if impossible:
        if qa.get("answers"):
            raise ValueError(f"{where_id} is_impossible and has answers; plausible ones are plausible_answers")
        return ()
    answers = []
    for number, answer in enumerate(_items(qa, "answers", where)):
        text = _text(answer, "text", f"{where}.answers[{number}]")
        answers.append(Answer(text, _checked_start(text, answer.get("answer_start"), context, where_id)))
    if not answers and "is_impossible" not in qa:
        raise ValueError(f"{where_id} has no answer and no is_impossible")
    return tuple(answers)


def _checked_start(text: str, start: Any, context: str, where: str) -> int:
    """Return where an answer begins in its context; a whole number that was written as a string is taken."""
    if isinstance(start, str) and start.isascii() and start.isdecimal():
        start = int(start)
    if not isinstance(start, int) or isinstance(start, bool):
        raise ValueError(f"{where}: answer_start must be a whole number, got {start!r:.60}")
    if not 0 <= start <= len(context) - len(text) or not text:
        raise ValueError(
            f"{where}: the answer {text[:60]!r} at character {start} does not lie in its context of "
            f"{len(context)} characters"
        )
    if context[start : start + len(text)] != text:
        raise ValueError(
            f"{where}: the answer {text[:60]!r} is not what stands at character {start} of its context, "
            f"{context[start : start + len(text)][:60]!r}"
        )
    return start


def load_squad(
    files: Mapping[str, Any], from_hub: bool, version_2: bool = False, with_train: bool = True
) -> dict[str, list[Question]]:
    """Read SQuAD's splits that there are of "train", "dev" and "test", from the files or, `from_hub`, the Hub.

    `files` has "train_file", "validation_file" and "test_file", a path or None each.

    Raises:
        OSError: if a file or the Hub's dataset cannot be read.
        ValueError: if it holds something else, or questions have no answer.
    """
    splits = {}
    for name, split in (("train", "train"), ("dev", "validation"), ("test", "test"))[0 if with_train else 1 :]:
        path = files[f"{split}_file"]
        if path is not None:
            splits[name] = read_squad(path, has_answers=name != "test")
        elif from_hub and name != "test":
            splits[name] = load_squad_hub(split, version_2)
        if name != "test" and name in splits:
            check_unanswerable(path or f"the Hub's {split} split", splits[name], version_2)
    return splits


def load_squad_hub(split: str, version_2: bool) -> list[Question]:
    """Load a split ("train", "validation") of SQuAD v1.1 or v2.0 from the Hub.

    Raises:
        OSError: if it cannot be loaded.
        ValueError: if an answer is not in its context.
    """
    name = HUB_DATASETS[version_2]
    try:
        rows = load_dataset(name, split=split)
    except Exception as error:  # the Hub's many ways to fail are one thing to the user
        raise OSError(
            f"cannot load {name} ({split}) from the Hub ({type(error).__name__}: {error}); "
            "give --train_file and --validation_file"
        ) from error
    questions = []
    for row in rows:
        answers = tuple(map(Answer, row["answers"]["text"], row["answers"]["answer_start"]))
        for answer in answers:
            _checked_start(answer.text, answer.start, row["context"], f"{name} ({split}), id {row['id']}")
        questions.append(Question(row["id"], row["question"], row["context"], answers))
    _check_ids(f"{name} ({split})", questions)
    return questions


def _check_ids(source: str, questions: list[Question]) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise ValueError(
                f"{source}: two questions have the id {question.id}; predictions could not tell them apart"
            )
        seen.add(question.id)


def check_unanswerable(source: str, questions: Iterable[Question], version_2: bool) -> None:
    """Check that questions without an answer are expected.

    Raises:
        ValueError: if there are some, and `version_2` is False.
    """
    found = [question.id for question in questions if not question.answers]
    if found and not version_2:
        raise ValueError(
            f"{source}: {len(found)} questions have no answer in their context (the first is {found[0]}): for SQuAD "
            "v2.0 give --version_2_with_negative"
        )


def hash_questions(questions: Iterable[Question]) -> str:
    """Return the hash of all questions, by which a resumed run knows that they are the same."""
    digest = hashlib.blake2b(digest_size=8)
    for item in questions:
        digest.update(json.dumps([item.id, item.question, item.context, [vars(a) for a in item.answers]]).encode())
    return digest.hexdigest()
