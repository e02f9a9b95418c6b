"""Which columns of a table hold texts and labels: those that a user names, or the common names."""

from collections.abc import Sequence
from typing import Any

from ...text_files import column_names

__all__ = ["find_label_column", "find_text_columns"]

# Of pairs, of single texts, and of labels; what stands in an earlier row of LABELS goes before the later ones.
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("text", "text_pair"),
    ("question", "sentence"),
)
TEXTS = ("text", "sentence", "content", "document", "review", "comment", "tweet", "body")
LABELS = (
    ("label", "labels"),
    ("class", "category", "target", "score", "rating", "stars", "sentiment", "intent", "topic"),
)


def find_text_columns(record: dict[str, Any], place: str, but: str | None = None) -> tuple[str, ...]:
    """Return the columns of a row that are called as texts often are, one or the two of pairs; case does not count.

    Args:
        record: the row.
        place: where it is.
        but: the column of labels, which is none of texts.

    Raises:
        ValueError: if there are none, or more than one choice; the message lists the columns that are there.
    """
    there = _by_lower_name(record, but)
    pairs = [pair for pair in PAIRS if all(name in there for name in pair)]
    in_pairs = {name for pair in pairs for name in pair}
    singles = [(name,) for name in TEXTS if name in there and name not in in_pairs]
    found = [*pairs, *singles]
    if len(found) != 1:
        choices = " or ".join(" and ".join(there[name] for name in names) for names in found)
        what = f"the texts may be in {choices}" if found else "no column is called as texts often are"
        raise ValueError(f"{place}: {what}; {_listed(record)}: name one, or two of pairs, with --text_columns")
    return tuple(there[name] for name in found[0])


def find_label_column(record: dict[str, Any], place: str, but: Sequence[str], needed: bool = True) -> str | None:
    """Return the column of a row that is called as labels often are; errors as of `find_text_columns`.

    Args:
        record, place: the row, and where it is.
        but: the columns of texts, which are none of labels.
        needed: False: None where there is no such column.
    """
    there = _by_lower_name(record, *but)
    for names in LABELS:
        found = [there[name] for name in names if name in there]
        if len(found) > 1:
            raise ValueError(
                f"{place}: the labels may be in {' or '.join(found)}; {_listed(record)}: name one with --label_column"
            )
        if found:
            return found[0]
    if needed:
        raise ValueError(
            f"{place}: no column is called as labels often are; {_listed(record)}: name one with --label_column"
        )
    return None


def _by_lower_name(record: dict[str, Any], *but: str | None) -> dict[str, str]:
    """Return the columns by their names in small letters; of two that differ in case alone, the one so written."""
    names = [str(name) for name in record if name not in but]
    lowered = [name.strip().lower() for name in names]
    return {low: name for low, name in zip(lowered, names, strict=True) if lowered.count(low) == 1 or name == low}


def _listed(record: dict[str, Any]) -> str:
    return f"its columns are {' '.join(', '.join(column_names(record)).split()) or 'none'}"
