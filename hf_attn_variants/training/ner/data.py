"""Reading of tagged sentences from CoNLL files or from a `datasets` source with "tokens" and "ner_tags"."""

import logging
from pathlib import Path
from typing import Any

from datasets import load_dataset

from ...input_files import BLANKS, is_blank
from ...text_files import read_lines, read_records
from ..engine.tables import find_split_files
from .settings import NerSettings

__all__ = ["Sentence", "load_sentences", "read_conll"]

logger = logging.getLogger(__name__)
# The words of a sentence and their tags: "O", or "B-" or "I-" with the type of the entity. Without tags: unknown.
Sentence = tuple[list[str], list[str]]
# The placeholder for the tag of a word without a tag.
UNTAGGED = ""


def read_conll(path: str, needs_tags: bool = True) -> list[Sentence]:
    """Read a file in the CoNLL format.

    Each line holds a word in its first column and the tag in its last column. Blank lines separate sentences. Columns
    are separated by tabs if the line has one, otherwise by spaces. Other whitespace, such as the no-break space in
    "2\u00a0000", is part of the word.

    Args:
        path: The file.
        needs_tags: Whether a line without a tag is an error. If false, the sentences get tags only if every line has a
            tag and not all tags are "O", which means unknown tags.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is not text, or if a line has no tag or an invalid one. Also if two lines have
            different numbers of columns separated by spaces. The message names the file and the line.
    """
    sentences: list[Sentence] = [([], [])]
    # The first line with columns separated by spaces, and the first line with another number of such columns.
    first: tuple[int, int] | None = None
    uneven: tuple[int, str, int] | None = None
    untagged = 0  # the number of the first line without a tag
    for number, line in enumerate(read_lines([path], keep_blank=True), start=1):
        cells = _split_columns(line)
        words, tags = sentences[-1]
        if not cells or cells[0] == "-DOCSTART-":
            if words:
                sentences.append(([], []))
            continue
        if not cells[0]:
            raise ValueError(f"{path}, line {number}: A line must begin with a word, got a tab in {line!r}.")
        is_tagged = len(cells) > 1 and _is_tag(cells[-1])
        if needs_tags and not is_tagged:
            raise ValueError(
                f"{path}, line {number}: A line must hold a word and, last, its tag (O, B-... or I-...), got {line!r}."
            )
        if "\r" in line.strip(BLANKS):
            raise ValueError(
                f"{path}, line {number}: There is a carriage return inside {line!r:.60}. End every line with \\n or "
                "\\r\\n."
            )
        untagged = untagged or (0 if is_tagged else number)
        if "\t" not in line:
            first = first or (number, len(cells))
            uneven = uneven or ((number, line, len(cells)) if len(cells) != first[1] else None)
            if uneven and needs_tags:
                raise ValueError(f"{path}, line {number}: {_describe_uneven_line(line, len(cells), *first)}")
        words.append(cells[0])
        tags.append(cells[-1] if is_tagged else UNTAGGED)
    if uneven and first:
        number, line, count = uneven
        problem = _describe_uneven_line(line, count, *first)
        logger.warning("%s, line %d: %s The word is read as %r.", path, number, problem, _split_columns(line)[0])
    if not (sentences := [sentence for sentence in sentences if sentence[0]]):
        raise ValueError(f"{path} must have at least one sentence, but has none.")
    return (
        sentences
        if needs_tags
        else _drop_unknown_tags(sentences, path, f"Line {untagged} has no tag" if untagged else None)
    )


def _drop_unknown_tags(sentences: list[Sentence], place: str, reason: str | None) -> list[Sentence]:
    """Return test sentences, and remove their tags if these are unknown.

    Args:
        sentences: The sentences.
        place: The description of the file for messages.
        reason: The reason why the tags are unknown, or None.
    """
    has_entities = any(tag not in ("O", UNTAGGED) for _, tags in sentences for tag in tags)
    if reason is None and has_entities:
        return sentences
    # A file with some tags may have a mistake. A file without tags is normal.
    level = logging.WARNING if has_entities else logging.INFO
    message = "%s: %s. The sentences are tagged and not scored."
    logger.log(level, message, place, reason or "Every tag is O")
    return [(words, []) for words, _ in sentences]


def _is_tag(tag: str) -> bool:
    """Return whether a text is a tag of an entity or "O"."""
    return tag == "O" or tag[:2] in ("B-", "I-")


def _split_columns(line: str) -> list[str]:
    """Return the columns of a line. Blank lines have none."""
    if is_blank(line):
        return []
    if "\t" in line:
        return [cell.strip(BLANKS) for cell in line.rstrip(BLANKS).split("\t")]
    return [cell for cell in line.strip(BLANKS).split(" ") if cell]


def _describe_uneven_line(line: str, count: int, first_line: int, first_count: int) -> str:
    """Return the message about a line with another number of columns than the first one."""
    return (
        f"{line!r} must have {first_count} columns separated by spaces as line {first_line}, got {count}. If words "
        "contain spaces, separate the columns with tabs."
    )


def load_sentences(settings: NerSettings) -> dict[str, list[Sentence]]:
    """Read the sentences of a run by split. There may be "train", "validation" and "test".

    Raises:
        OSError: If a file or a dataset of the Hub cannot be read.
        ValueError: If a file or a dataset has invalid content.
    """
    splits = ["validation", "test"] if settings.only_evaluates else ["train", "validation", "test"]
    if settings.dataset_name is None:
        files = {split: getattr(settings, f"{split}_file") for split in splits}
        return {split: read_conll(path, split != "test") for split, path in files.items() if path is not None}
    name, names = settings.dataset_name, None
    try:
        source: Any = _read_folder_rows(settings) or load_dataset(name, settings.dataset_config_name)
        if hasattr(source["validation"], "features"):
            names = getattr(source["validation"].features["ner_tags"].feature, "names", None)  # None: tags are names
        read_splits = {split: source[split] for split in splits if split != "test" or split in source}
        loaded = {
            split: [(row["tokens"], list(row.get("ner_tags") or ())) for row in rows if row["tokens"]]
            for split, rows in read_splits.items()
        }
    except Exception as error:  # `datasets` and the Hub raise many types of errors
        raise OSError(
            f"--dataset_name {name} cannot be loaded with splits train and validation and columns tokens and ner_tags "
            f"({type(error).__name__}: {error}). Use files instead."
        ) from error
    return {split: _name_tags(rows, names, f"{name} ({split})", split != "test") for split, rows in loaded.items()}


def _read_folder_rows(settings: NerSettings) -> dict[str, list[dict[str, Any]]] | None:
    """Return the rows of a local folder by split, or None if the source is not such a folder."""
    files = find_split_files(settings)
    if files is None:
        return None
    return {
        split: [record.values for path in paths for record in read_records(Path(path))]
        for split, paths in files.items()
    }


def _name_tags(
    sentences: list[tuple[list[str], list[Any]]], names: list[str] | None, place: str, needs_tags: bool
) -> list[Sentence]:
    """Return the sentences of a split of a `datasets` source with the names of their tags.

    Args:
        sentences: The words and the tags, which are names or numbers.
        names: The names of the numbers, or None.
        place: The description of the split for messages.
        needs_tags: Whether unknown tags are an error.
    """
    if not sentences:
        raise ValueError(f"{place} must have at least one sentence with words, but has none.")
    reason = _describe_unreadable_tags(sentences, names)
    if reason is None and names:
        sentences = [(words, [names[tag] for tag in tags]) for words, tags in sentences]
    reason = reason or _describe_invalid_tag(sentences)
    if reason is not None and needs_tags:
        raise ValueError(f"{place}: {reason}. Correct the tags.")
    if reason is not None:
        sentences = [(words, []) for words, _ in sentences]
    return sentences if needs_tags else _drop_unknown_tags(sentences, place, reason)


def _describe_invalid_tag(sentences: list[tuple[list[str], list[Any]]]) -> str | None:
    """Describe the first invalid tag, or return None."""
    tagged = ((word, tag) for words, tags in sentences for word, tag in zip(words, tags, strict=True))
    wrong = next(((word, tag) for word, tag in tagged if not _is_tag(tag)), None)
    return None if wrong is None else f"Tags must be O, B-... or I-..., got {wrong[1]!r} for {wrong[0]!r}"


def _describe_unreadable_tags(sentences: list[tuple[list[str], list[Any]]], names: list[str] | None) -> str | None:
    """Describe why the tags of a `datasets` source cannot be read, or return None."""
    if wrong := [words for words, tags in sentences if len(words) != len(tags)]:
        return f"There must be one tag per word in {' '.join(wrong[0])[:60]!r}"
    if names is None and not all(isinstance(tag, str) for _, tags in sentences for tag in tags):
        return "Tags must be names, or the column must have names for its numbers"
    if names and not all(0 <= tag < len(names) for _, tags in sentences for tag in tags):
        return f"Tags must be numbers from 0 to {len(names) - 1}"
    return None
