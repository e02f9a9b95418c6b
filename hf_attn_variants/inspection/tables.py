"""Text tables as wide as the terminal, and descriptions of the places with talking heads."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ..modeling.fields.field_texts import PLACES
from ..modeling.mechanisms.head_sharing import key_value_field
from ..modeling.mechanisms.talking_heads import KIND, TalkingHeads, talking_places

__all__ = ["output_width", "places_of_stacks", "print_table", "print_text", "talking_by_place", "talking_parts"]

GAP = "  "


def output_width() -> int | None:
    """Return the characters that a line may have: COLUMNS where it is set, or the terminal's; None for a file."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        return None
    return shutil.get_terminal_size().columns


def print_text(text: str) -> None:
    """Print text, in as many lines as it takes."""
    for line in _wrapped(text, output_width()):
        print(line)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], cut: int | None = None) -> None:
    """Print a title, a header and rows of cells; the first column is a name, the others are numbers.

    Where a line would be too long, the header takes more lines; where that does not do, the columns go into several
    tables, each with the names. `cut` is the column at which another subject begins: there the first cut is made.
    """
    limit = output_width()
    print_text(title)
    cells = [[row[i] for row in rows] for i in range(len(header))]
    headers = [[name] for name in header]
    if limit is not None and _line_width(_widths(headers, cells)) > limit:
        # As narrow as the cells, but for longer words.
        headers = [
            _wrapped(name, max(map(len, [*found, *name.split()]))) for name, found in zip(header, cells, strict=True)
        ]
    widths = _widths(headers, cells)
    for number, columns in enumerate(_tables(widths, limit, cut)):
        if number:
            print()
        _print_columns([headers[i] for i in columns], [cells[i] for i in columns], [widths[i] for i in columns])


def _print_columns(headers: Sequence[Sequence[str]], cells: Sequence[Sequence[str]], widths: Sequence[int]) -> None:
    lines = max(map(len, headers))
    for line in range(lines):
        words = [([""] * (lines - len(header)) + list(header))[line] for header in headers]
        print(GAP.join(word.ljust(width) for word, width in zip(words, widths, strict=True)).rstrip())
    print(GAP.join("-" * width for width in widths))
    for row in zip(*cells, strict=True):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print(GAP.join([first.strip().ljust(widths[0]), *others]))


def _tables(widths: Sequence[int], limit: int | None, cut: int | None) -> Iterator[list[int]]:
    """The columns of each table, the first one in each."""
    if limit is None or _line_width(widths) <= limit:
        yield list(range(len(widths)))
        return
    columns = [0]
    for i in range(1, len(widths)):
        is_too_wide = _line_width([widths[j] for j in (*columns, i)]) > limit
        if (is_too_wide or i == cut) and len(columns) > 1:
            yield columns
            columns = [0]
        columns.append(i)
    yield columns


def _widths(headers: Sequence[Sequence[str]], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, (*header, *found))) for header, found in zip(headers, cells, strict=True)]


def _line_width(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False) or [text]


def places_of_stacks(config: Any, fields: Sequence[str]) -> tuple[str, ...]:
    """Return the prefixes of the places that are in the stacks of some fields of key/value heads.

    Cross-attention is in the decoder's; a model that is an encoder, or a decoder without one, has none.
    """
    has_cross = hasattr(config, "encoder_decoder_layers") or getattr(config, "add_cross_attention", False)
    return tuple(
        prefix
        for prefix in talking_places(config)
        if key_value_field(prefix) in fields and (prefix != "cross_" or has_cross)
    )


def talking_by_place(config: Any, fields: Sequence[str]) -> dict[str, list[TalkingHeads]]:
    """Return how heads talk in each layer of each place in these stacks, {prefix: [of each layer]}."""
    return {
        prefix: [config.talking_heads_of(prefix, layer) for layer in range(config.layer_count(prefix + KIND))]
        for prefix in places_of_stacks(config, fields)
    }


def talking_parts(config: Any, fields: Sequence[str]) -> list[tuple[str, str]]:
    """Return which projections there are, and where: ("both", ""), or ("logits", " in cross-attention").

    Nothing is said of where, if it is everywhere in these stacks.

    Args:
        config: a variant configuration.
        fields: of key/value heads, of the stacks that are looked at.
    """
    by_place = talking_by_place(config, fields)
    kinds = [each.kind for layers in by_place.values() for each in layers]
    if len({*kinds}) == 1:
        return [] if kinds[0] is None else [(kinds[0], "")]
    found: dict[str, list[str]] = {}
    for prefix, layers in by_place.items():
        for kind in dict.fromkeys(each.kind for each in layers if each.kind is not None):
            having = [str(layer) for layer, each in enumerate(layers) if each.kind == kind]
            some = f" (layer{'s' * (len(having) > 1)} {', '.join(having)})" if len(having) < len(layers) else ""
            found.setdefault(kind, []).append(PLACES[prefix].here + some)
    return [(kind, f" in {' and '.join(places)}") for kind, places in found.items()]
