"""Reads SuperGLUE from a folder of its official JSONL files, or from the Hub."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import load_dataset

from ...superglue_tasks import SUPERGLUE_DATASET, SuperGlueTask
from ...table_files import read_records
from .examples import Example, label_of, make_example, multirc_example, number_of, record_example, text_in
from .settings import SuperGlueSettings

__all__ = ["load_examples", "load_superglue", "read_superglue"]

FILES = {"train": "train.jsonl", "validation": "val.jsonl", "test": "test.jsonl"}
# (where it is, its fields), one after the other.
Rows = Iterable[tuple[str, Mapping[str, Any]]]


def load_examples(settings: SuperGlueSettings, task: SuperGlueTask) -> dict[str, list[Example]]:
    """Read the splits that a run reads, as far as it reads them; errors as of `load_superglue`."""
    with_train, with_test = not settings.only_evaluates, not settings.skip_predict
    found = load_superglue(task, settings.data_dir, settings.values(), with_train, with_test)
    limits = {"train": settings.max_train_samples, "validation": settings.max_eval_samples}
    return {name: examples[: limits.get(name)] for name, examples in found.items()}


def load_superglue(
    task: SuperGlueTask, data_dir: str | None, files: Mapping[str, Any], with_train: bool, with_test: bool
) -> dict[str, list[Example]]:
    """Read the splits that there are of "train", "validation" and "test": files where one is named, else the Hub's.

    Args:
        task: the task.
        data_dir: the folder of train.jsonl, val.jsonl and test.jsonl, each also .gz; the last may be missing.
        files: "train_file", "validation_file" and "test_file", which go before the folder's.
        with_train, with_test: whether these two are read.

    Raises:
        OSError: if the train or validation file is missing, or the Hub cannot be reached.
        ValueError: if a file is wrong; the message names it, the line and the row.
    """
    wanted = [name for name, read in (("train", with_train), ("validation", True), ("test", with_test)) if read]
    if data_dir is None and not any(files.get(f"{name}_file") for name in FILES):
        return _load_hub(task, wanted)
    return {name: read_superglue(path, task, name != "test") for name, path in _paths(task, data_dir, files, wanted)}


def _paths(
    task: SuperGlueTask, data_dir: str | None, files: Mapping[str, Any], wanted: Iterable[str]
) -> Iterator[tuple[str, Path]]:
    folder = None if data_dir is None else Path(data_dir)
    if folder is not None and not folder.is_dir():
        raise OSError(f"--data_dir {folder}: no such folder")
    for name in wanted:
        given = files.get(f"{name}_file")
        choices = [] if folder is None else [folder / FILES[name], folder / f"{FILES[name]}.gz"]
        path = Path(given) if given else next((path for path in choices if path.is_file()), None)
        if path is not None:
            yield name, path
        elif name != "test":
            inside = folder is not None and (folder / task.folder).is_dir()
            hint = f"; did you mean --data_dir {folder}/{task.folder}?" if inside else ""
            raise OSError(f"{choices[0] if choices else f'--{name}_file'}: no such file{hint}")


def read_superglue(path: str | Path, task: SuperGlueTask, has_labels: bool = True) -> list[Example]:
    """Read an official file, plain or .gz; the labels of a test file are neither needed nor read.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no JSONL, has no row, or one whose fields are not the task's; the message names the file,
            the line and the row.
    """
    rows = [(record.place, record.values) for record in read_records(Path(path))]
    examples = list(_examples(task, rows, has_labels))
    if not examples:
        raise ValueError(f"{path} is empty: it has no row")
    return examples


def _examples(task: SuperGlueTask, rows: Rows, has_labels: bool) -> Iterator[Example]:
    for place, row in rows:
        if task.name == "multirc":
            yield from _multirc(task, row, place, has_labels)
        elif task.name == "record":
            yield from _record(row, place, has_labels)
        else:
            yield make_example(task, row, place, has_labels)


def _multirc(task: SuperGlueTask, row: Mapping[str, Any], place: str, has_labels: bool) -> Iterator[Example]:
    passage = _object(row, "passage", place)
    text, index = text_in(passage, "text", f"{place}, passage"), number_of(row, "idx", place)
    for question in _objects(passage, "questions", f"{place}, passage"):
        number = number_of(question, "idx", f"{place}, a question")
        where = f"{place}, question {number}"
        answers = [
            (
                number_of(answer, "idx", f"{where}, an answer"),
                text_in(answer, "text", f"{where}, an answer"),
                label_of(task, answer, f"{where}, an answer") if has_labels else None,
            )
            for answer in _objects(question, "answers", where)
        ]
        yield multirc_example((index, number), text, text_in(question, "question", where), answers)


def _record(row: Mapping[str, Any], place: str, has_labels: bool) -> Iterator[Example]:
    passage = _object(row, "passage", place)
    text = text_in(passage, "text", f"{place}, passage")
    candidates = []
    for entity in _objects(passage, "entities", f"{place}, passage"):
        start, end = (number_of(entity, name, f"{place}, an entity") for name in ("start", "end"))
        if not 0 <= start <= end < len(text):
            raise ValueError(f"{place}: an entity from {start} to {end} lies outside of its passage")
        candidates.append(text[start : end + 1])  # the last character is one of it
    for query in _objects(row, "qas", place):
        number = number_of(query, "idx", f"{place}, a query")
        where = f"{place}, query {number}"
        truths = None
        if has_labels:
            truths = [text_in(answer, "text", f"{where}, an answer") for answer in _objects(query, "answers", where)]
        yield record_example(number, text, text_in(query, "query", where), candidates, truths, where)


def _object(row: Mapping[str, Any], name: str, place: str) -> Mapping[str, Any]:
    value = row.get(name)
    if isinstance(value, Mapping):
        return value
    raise ValueError(
        f"{place}: {name} must be an object, got {value!r:.60}; its fields are {', '.join(map(str, row))}"
    )


def _objects(row: Mapping[str, Any], name: str, place: str) -> list[Mapping[str, Any]]:
    values = row.get(name)
    if isinstance(values, list) and values and all(isinstance(value, Mapping) for value in values):
        return values
    raise ValueError(f"{place}: {name} must be a list of objects, got {values!r:.60}")


def _load_hub(task: SuperGlueTask, wanted: list[str]) -> dict[str, list[Example]]:
    try:
        loaded = load_dataset(SUPERGLUE_DATASET, task.name)
        found = {name: loaded[name] for name in wanted if name != "test" or name in loaded}
    except Exception as error:  # the Hub's many ways to fail are one thing to the user
        raise OSError(
            f"cannot load {task.name} of {SUPERGLUE_DATASET} from the Hub ({type(error).__name__}: {error}); "
            "give a folder of SuperGLUE's official files with --data_dir"
        ) from error
    splits = {}
    for name, data in found.items():
        rows = [(f"{SUPERGLUE_DATASET}, {task.name} ({name}), row {i}", row) for i, row in enumerate(data, start=1)]
        splits[name] = list(_hub_examples(task, rows, name != "test"))
    return splits


def _hub_examples(task: SuperGlueTask, rows: Rows, has_labels: bool) -> Iterator[Example]:
    """Return the examples of the Hub's rows, which are flat: a query of ReCoRD each, an answer of MultiRC each."""
    if task.name == "multirc":
        yield from _hub_questions(task, rows, has_labels)
        return
    for place, row in rows:
        if task.name == "record":
            number = number_of(_object(row, "idx", place), "query", place)
            passage, query = text_in(row, "passage", place), text_in(row, "query", place)
            truths = list(row["answers"]) if has_labels else None
            yield record_example(number, passage, query, list(row["entities"]), truths, place)
        else:
            yield make_example(task, row, place, has_labels)


def _hub_questions(task: SuperGlueTask, rows: Rows, has_labels: bool) -> Iterator[Example]:
    texts: dict[tuple[int, int], tuple[str, str]] = {}
    answers: dict[tuple[int, int], list[tuple[int, str, int | None]]] = {}
    for place, row in rows:
        numbers = _object(row, "idx", place)
        index = number_of(numbers, "paragraph", place), number_of(numbers, "question", place)
        texts[index] = text_in(row, "paragraph", place), text_in(row, "question", place)
        label = label_of(task, row, place) if has_labels else None
        answer = number_of(numbers, "answer", place), text_in(row, "answer", place), label
        answers.setdefault(index, []).append(answer)
    for index, (passage, question) in texts.items():
        yield multirc_example(index, passage, question, answers[index])
