"""Tagged sentences, from files in CoNLL's format or a `datasets` source with "tokens" and "ner_tags"."""

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
# Words, and the tag of each: "O", or "B-" or "I-" and the kind of entity; no tags: not known.
Sentence = tuple[list[str], list[str]]
# What stands for the tag of a word without one.
UNTAGGED = ""


def read_conll(path: str, needs_tags: bool = True) -> list[Sentence]:
    """Read a file of CoNLL's format: a word first in its line and its tag last, a blank line behind each sentence.

    Tabs divide the columns of a line that has one, else spaces do. Any other white space, as the no-break space in
    "2\u00a0000", belongs to its word.

    Args:
        path: of the file.
        needs_tags: whether a line without a tag is an error. Else the sentences have tags if each line has one and
            not all are "O", which stands for tags that are not known.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no text, or a line has no tag, one that is none, or more columns than the first one where
            spaces divide both; the message names file and line.
    """
    sentences: list[Sentence] = [([], [])]
    # The first line of columns divided by spaces, and the first that has another number.
    first: tuple[int, int] | None = None
    parted: tuple[int, str, int] | None = None
    untagged = 0  # the first line without a tag
    for number, line in enumerate(read_lines([path], keep_blank=True), start=1):
        cells = _columns(line)
        words, tags = sentences[-1]
        if not cells or cells[0] == "-DOCSTART-":
            if words:
                sentences.append(([], []))
            continue
        if not cells[0]:
            raise ValueError(f"{path}, line {number}: {line!r} begins with a tab: there is no word before it")
        is_tagged = len(cells) > 1 and _is_tag(cells[-1])
        if needs_tags and not is_tagged:
            raise ValueError(f"{path}, line {number}: {line!r} is no word and, last, its tag: O, B-... or I-...")
        if "\r" in line.strip(BLANKS):
            raise ValueError(
                f"{path}, line {number}: a carriage return divides {line!r:.60}: end every line with \\n or \\r\\n"
            )
        untagged = untagged or (0 if is_tagged else number)
        if "\t" not in line:
            first = first or (number, len(cells))
            parted = parted or ((number, line, len(cells)) if len(cells) != first[1] else None)
            if parted and needs_tags:
                raise ValueError(f"{path}, line {number}: {_parted(line, len(cells), *first)}")
        words.append(cells[0])
        tags.append(cells[-1] if is_tagged else UNTAGGED)
    if parted and first:
        number, line, count = parted
        logger.warning(
            "%s, line %d: %s; its word is %r", path, number, _parted(line, count, *first), _columns(line)[0]
        )
    if not (found := [sentence for sentence in sentences if sentence[0]]):
        raise ValueError(f"{path} has no sentence")
    return found if needs_tags else _known(found, path, f"line {untagged} has no tag" if untagged else None)


def _known(sentences: list[Sentence], place: str, reason: str | None) -> list[Sentence]:
    """Return test sentences, with tags if these are known; `reason` is why they are not."""
    some = any(tag not in ("O", UNTAGGED) for _, tags in sentences for tag in tags)
    if reason is None and some:
        return sentences
    level = logging.WARNING if some else logging.INFO  # then it has tags, and not everywhere
    logger.log(level, "%s: %s: its sentences are tagged and not scored", place, reason or "every tag is O")
    return [(words, []) for words, _ in sentences]


def _is_tag(tag: str) -> bool:
    return tag == "O" or tag[:2] in ("B-", "I-")


def _columns(line: str) -> list[str]:
    if is_blank(line):
        return []
    if "\t" in line:
        return [cell.strip(BLANKS) for cell in line.rstrip(BLANKS).split("\t")]
    return [cell for cell in line.strip(BLANKS).split(" ") if cell]


def _parted(line: str, count: int, first_line: int, first_count: int) -> str:
    return (
        f"spaces part {line!r} into {count} columns, and line {first_line} into {first_count}: give each as many, "
        "or divide columns by tabs, where words hold spaces"
    )


def load_sentences(settings: NerSettings) -> dict[str, list[Sentence]]:
    """Read the sentences that the settings name, by split: those that there are of "train", "validation" and "test".

    Raises:
        OSError: if a file or the Hub's dataset cannot be read.
        ValueError: if it holds something else.
    """
    splits = ["validation", "test"] if settings.only_evaluates else ["train", "validation", "test"]
    if settings.dataset_name is None:
        files = {split: getattr(settings, f"{split}_file") for split in splits}
        return {split: read_conll(path, split != "test") for split, path in files.items() if path is not None}
    name, names = settings.dataset_name, None
    try:
        found: Any = _folder_rows(settings) or load_dataset(name, settings.dataset_config_name)
        if hasattr(found["validation"], "features"):
            names = getattr(found["validation"].features["ner_tags"].feature, "names", None)  # None: tags are names
        wanted = {split: found[split] for split in splits if split != "test" or split in found}
        loaded = {
            split: [(row["tokens"], list(row.get("ner_tags") or ())) for row in rows if row["tokens"]]
            for split, rows in wanted.items()
        }
    except Exception as error:  # the Hub's many ways to fail are one thing to the user
        raise OSError(
            f"cannot load --dataset_name {name} with splits train and validation and columns tokens "
            f"and ner_tags ({type(error).__name__}: {error}); give files instead"
        ) from error
    return {split: _sentences(rows, names, f"{name} ({split})", split != "test") for split, rows in loaded.items()}


def _folder_rows(settings: NerSettings) -> dict[str, list[dict[str, Any]]] | None:
    files = find_split_files(settings)
    if files is None:
        return None
    return {
        split: [record.values for path in paths for record in read_records(Path(path))]
        for split, paths in files.items()
    }


def _sentences(
    found: list[tuple[list[str], list[Any]]], names: list[str] | None, place: str, needs_tags: bool
) -> list[Sentence]:
    if not found:
        raise ValueError(f"{place} has no sentence: a split without a word")
    reason = _unreadable(found, names)
    if reason is None and names:
        found = [(words, [names[tag] for tag in tags]) for words, tags in found]
    reason = reason or _unknown_tag(found)
    if reason is not None and needs_tags:
        raise ValueError(f"{place}: {reason}")
    if reason is not None:
        found = [(words, []) for words, _ in found]
    return found if needs_tags else _known(found, place, reason)


def _unknown_tag(sentences: list[tuple[list[str], list[Any]]]) -> str | None:
    tagged = ((word, tag) for words, tags in sentences for word, tag in zip(words, tags, strict=True))
    wrong = next(((word, tag) for word, tag in tagged if not _is_tag(tag)), None)
    return None if wrong is None else f"the tag {wrong[1]!r} of {wrong[0]!r} is not O, B-... or I-..."


def _unreadable(sentences: list[tuple[list[str], list[Any]]], names: list[str] | None) -> str | None:
    """Return what is wrong with the tags of a `datasets` source; None: nothing."""
    if wrong := [words for words, tags in sentences if len(words) != len(tags)]:
        return f"as many tags as words are needed: {' '.join(wrong[0])[:60]!r}"
    if names is None and not all(isinstance(tag, str) for _, tags in sentences for tag in tags):
        return "numbers as tags, and no names of them"
    if names and not all(0 <= tag < len(names) for _, tags in sentences for tag in tags):
        return "a tag that is the number of no name"
    return None
