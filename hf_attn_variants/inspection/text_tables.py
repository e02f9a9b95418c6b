"""Prints text tables that fit the terminal, and describes a configuration's talking-heads projections."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ..modeling.fields.field_table import PLACE_WORDINGS
from ..modeling.mechanisms.head_sharing import get_kv_heads_field
from ..modeling.mechanisms.talking_heads import KIND, TalkingHeadsSettings, get_talking_heads_prefixes

COLUMN_SEPARATOR = "  "


def get_output_width() -> int | None:
    """Return the width of the output in characters, or None if it is not a terminal and COLUMNS is not set."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        return None
    return shutil.get_terminal_size().columns


def print_text(text: str) -> None:
    """Print text, wrapped at the width of the output."""
    for line in _wrap(text, get_output_width()):
        print(line)


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], split_before: int | None = None
) -> None:
    """Print a table with a title.

    If lines are too long, the column names are wrapped first. If this is not enough, the columns are split into
    several tables, and each of them repeats the first column.

    Args:
        title: The text above the table.
        header: The names of the columns.
        rows: The cells of each row. The first column is left-aligned, and all other columns are right-aligned.
        split_before: The index of the column before which the table is split first, if it must be split.
    """
    limit = get_output_width()
    print_text(title)
    cells = [[row[i] for row in rows] for i in range(len(header))]
    headers = [[name] for name in header]
    if limit is not None and _compute_line_width(_compute_column_widths(headers, cells)) > limit:
        # Each column becomes as narrow as its cells and the longest word in its header allow.
        headers = [
            _wrap(name, max(map(len, [*column, *name.split()]))) for name, column in zip(header, cells, strict=True)
        ]
    widths = _compute_column_widths(headers, cells)
    for number, columns in enumerate(_split_columns(widths, limit, split_before)):
        if number:
            print()
        _print_columns([headers[i] for i in columns], [cells[i] for i in columns], [widths[i] for i in columns])


def _print_columns(headers: Sequence[Sequence[str]], cells: Sequence[Sequence[str]], widths: Sequence[int]) -> None:
    """Print one table. Each header is a list of lines, and the cells are given by column."""
    lines = max(map(len, headers))
    for line in range(lines):
        words = [([""] * (lines - len(header)) + list(header))[line] for header in headers]
        print(COLUMN_SEPARATOR.join(word.ljust(width) for word, width in zip(words, widths, strict=True)).rstrip())
    print(COLUMN_SEPARATOR.join("-" * width for width in widths))
    for row in zip(*cells, strict=True):
        first, *other_cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print(COLUMN_SEPARATOR.join([first.strip().ljust(widths[0]), *other_cells]))


def _split_columns(widths: Sequence[int], limit: int | None, split_before: int | None) -> Iterator[list[int]]:
    """Yield the column indices of each table. Every table has the first column."""
    if limit is None or _compute_line_width(widths) <= limit:
        yield list(range(len(widths)))
        return
    columns = [0]
    for i in range(1, len(widths)):
        is_too_wide = _compute_line_width([widths[j] for j in (*columns, i)]) > limit
        if (is_too_wide or i == split_before) and len(columns) > 1:
            yield columns
            columns = [0]
        columns.append(i)
    yield columns


def _compute_column_widths(headers: Sequence[Sequence[str]], cells: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column in characters."""
    return [max(map(len, (*header, *column))) for header, column in zip(headers, cells, strict=True)]


def _compute_line_width(widths: Sequence[int]) -> int:
    """Return the width of a line with columns of these widths."""
    return sum(widths) + len(COLUMN_SEPARATOR) * (len(widths) - 1)


def _wrap(text: str, width: int | None) -> list[str]:
    """Wrap a text and return its lines. If the width is None, the line length is not limited."""
    if width is None:
        return [text]
    return textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False) or [text]


def select_place_prefixes(config: Any, fields: Sequence[str]) -> tuple[str, ...]:
    """Return the prefixes of the places in the encoder or decoder to which the given key/value head fields belong.

    The cross-attention prefix is only returned for a decoder with cross-attention.

    Args:
        config: A variant configuration.
        fields: Key/value head fields, for example `("encoder_num_key_value_heads",)`.
    """
    has_cross = hasattr(config, "encoder_decoder_layers") or getattr(config, "add_cross_attention", False)
    return tuple(
        prefix
        for prefix in get_talking_heads_prefixes(config)
        if get_kv_heads_field(prefix) in fields and (prefix != "cross_" or has_cross)
    )


def get_talking_heads_by_prefix(config: Any, fields: Sequence[str]) -> dict[str, list[TalkingHeadsSettings]]:
    """Return {prefix: talking-heads settings of each layer} for the places that `select_place_prefixes` returns."""
    return {
        prefix: [config.get_talking_heads(prefix, layer) for layer in range(config.get_num_layers(prefix + KIND))]
        for prefix in select_place_prefixes(config, fields)
    }


def format_layers(values: Sequence[Any], value: Any) -> str:
    """List the layers with a value, for example "layers 0, 2". Layers are counted from 0."""
    layers = [str(layer) for layer, layer_value in enumerate(values) if layer_value == value]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(layers)}"


def describe_talking_projections(config: Any, fields: Sequence[str]) -> list[tuple[str, str]]:
    """Return the types of talking-heads projections in a configuration, with descriptions of their places.

    An example result is [("logits", " in cross-attention")]. The description is empty if the projections are used in
    all places.

    Args:
        config: A variant configuration.
        fields: The key/value head fields of the encoder or decoder to describe.
    """
    settings_by_place = get_talking_heads_by_prefix(config, fields)
    kinds = [talking.kind for layers in settings_by_place.values() for talking in layers]
    if len({*kinds}) == 1:
        return [] if kinds[0] is None else [(kinds[0], "")]
    places_by_kind: dict[str, list[str]] = {}
    for prefix, layers in settings_by_place.items():
        kinds_by_layer = [talking.kind for talking in layers]
        for kind in dict.fromkeys(filter(None, kinds_by_layer)):
            layer_note = f" ({format_layers(kinds_by_layer, kind)})" if len({*kinds_by_layer}) > 1 else ""
            places_by_kind.setdefault(kind, []).append(PLACE_WORDINGS[prefix].place + layer_note)
    return [(kind, f" in {' and '.join(places)}") for kind, places in places_by_kind.items()]
