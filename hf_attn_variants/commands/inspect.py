"""Command `attn-variants inspect`."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..command_line import MODEL_NAMES, CommandParser, add_checkpoint_argument, parse_with_checkpoint

EXAMPLE = """\
examples:
  attn-variants inspect google-t5/t5-small --batch_size 32 --length 1024
  attn-variants inspect ./t5-small --length 64 --source_length 1024 \\
      --num_beams 4 --memory 4GiB
  attn-variants inspect ./bert-gqa4 --details

The command reads only config.json. A row with * is the unchanged checkpoint. A row with - cannot be reached by a
conversion, because neither number of heads divides the other, or because heads have parameters of their own."""

CACHE_DTYPES = ("float64", "float32", "float16", "bfloat16")
SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of the command."""
    parser = CommandParser(
        prog="attn-variants inspect",
        description="Show the parameters, FLOPs and cache of a checkpoint for each possible number of key/value heads "
        f"and with talking heads, without loading weights. Checkpoints: {MODEL_NAMES}.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    parser.add_argument("--batch_size", type=int, default=1, help="sequences per batch (default: %(default)s)")
    parser.add_argument(
        "--length",
        type=int,
        default=512,
        help="number of tokens that are attended to: the sequence of an encoder, the cache of a decoder (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--source_length",
        type=int,
        help="encoder-decoders: number of tokens that the encoder reads (default: --length; Whisper: its window)",
    )
    parser.add_argument(
        "--num_beams",
        type=int,
        default=1,
        help="beams per sequence, for a model with a cache. The first row is then the class of Transformers, which "
        "stores the encoder keys and values for each beam (default: %(default)s)",
    )
    parser.add_argument(
        "--memory",
        type=_parse_memory,
        metavar="SIZE",
        help="for a model with a cache: show the largest batch that fits into this memory together with the weights "
        "(for example 4GiB or 800MiB)",
    )
    parser.add_argument(
        "--dtype", choices=CACHE_DTYPES, help="type of weights and cache (default: as in the checkpoint)"
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="also show the attention parameters, the FLOPs per token, and the size of each cache per token",
    )
    parser.add_argument("--json", action="store_true", help="print JSON with all values instead of a table")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--token", help="Hub token, for private and gated repositories (default: the stored login)")
    return parse_with_checkpoint(parser, argv)


def main(args: argparse.Namespace) -> Any:
    """Print the table and return the `CostTable`.

    Raises:
        ValueError: if the architecture is not supported.
        OSError: if the configuration cannot be read.
    """
    from ..inspection.costs import cost_table, read_checkpoint_config
    from ..inspection.tables import print_table, print_text

    config = read_checkpoint_config(args.model_name_or_path, args.revision, args.token)
    table = cost_table(
        config,
        checkpoint=args.model_name_or_path,
        batch_size=args.batch_size,
        length=args.length,
        source_length=args.source_length,
        dtype=args.dtype,
        num_beams=args.num_beams,
        memory=args.memory,
    )
    if args.json:
        print(json.dumps(table.to_dict(), indent=2))
        return table
    header, rows = format_cost_table(table, args.details)
    title = f"{table.checkpoint} ({table.architecture}), {table.dtype}, {_format_sizes(table)}"
    cache_columns = (i for i, name in enumerate(header) if "cache" in name)
    print_table(title, header, rows, cut=next(cache_columns, None) if args.details else None)
    for note in _list_notes(table, args.details):
        print_text(note)
    return table


def format_cost_table(table: Any, details: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a `CostTable` as text.

    If the number of beams is larger than one, the first row is the class of Transformers, because its cache is larger.

    Args:
        table: the table.
        details: whether to show all values. Otherwise the columns are the parameters, the cache and the saved cache
            (for models without a cache, the saved weights).
    """
    current, current_cache = table.current, table.current_kv_cache_bytes
    parts = list(current.flops_per_token) if details else []
    caches = list(current.kv_cache_bytes_per_token or ()) if details else []
    has_cache = current.kv_cache_bytes is not None
    header = ["variant", "parameters"] + ["in attention"] * details
    header += ["saved weights"] * (details or not has_cache)
    header += [f"MFLOP per token{f' ({part})' if len(parts) > 1 else ''}" for part in parts]
    header += [f"cache per token ({name})" for name in caches] + ["cache", "saved cache"] * has_cache
    header += ["largest batch"] * (has_cache and table.memory is not None)
    rows, upstream = [], _make_upstream_row(table)
    for row in table.rows if upstream is None else (upstream, *table.rows):
        saved, is_unchanged = table.savings(row), row.current if upstream is None else row is upstream
        cells = [f"{row.name}{' *' if is_unchanged else '' if row.convertible else ' -'}", f"{row.parameters:,}"]
        if details:
            cells.append(f"{row.attention_parameters:,}")
        if details or not has_cache:
            cells.append(_format_saving(saved["weight_bytes"]))
        cells += [f"{row.flops_per_token[part] / 1e6:,.2f}" for part in parts]
        cells += [_format_bytes(row.kv_cache_bytes_per_token[name]) for name in caches]
        if has_cache:
            cells += [_format_bytes(row.kv_cache_bytes), _format_saving(saved["kv_cache_bytes"], current_cache)]
            cells += [] if table.memory is None else [f"{row.largest_batch:,}"]
        rows.append(cells)
    return header, rows


def _make_upstream_row(table: Any) -> Any:
    """Return the row of the class of Transformers if its cache is larger than the cache of this package, or None."""
    if table.upstream_kv_cache_bytes is None:
        return None
    cache, largest = table.upstream_kv_cache_bytes, table.upstream_largest_batch
    return replace(table.current, name="transformers", kv_cache_bytes=cache, largest_batch=largest)


def _format_sizes(table: Any) -> str:
    text = f"batch {table.batch_size}, {table.length:,} tokens attended to"
    text += f", source {table.source_length:,}" if len(table.current.flops_per_token) > 1 else ""
    return text + (f", {table.num_beams} beams" if table.num_beams > 1 else "")


def _list_notes(table: Any, details: bool) -> list[str]:
    notes = ["* the unchanged checkpoint"] if any(row.current for row in table.rows) else []
    if not all(row.convertible for row in table.rows):
        notes.append(
            "- cannot be reached by a conversion: neither number divides the other, or heads have parameters of their "
            "own"
        )
    if details:
        notes.append(
            "Parameters are those of the model, with tied parameters counted once. Files may contain more or fewer, "
            "which `convert` counts."
        )
    if table.upstream_kv_cache_bytes is not None:
        notes.append(
            "The class of Transformers stores the encoder keys and values for each beam, the class of this package "
            "only once (except with talking heads in the cross-attention). `share_memory` gives the class of "
            f"Transformers the cache of {table.current.name} without a conversion."
        )
    if table.memory is not None:
        notes.append(
            f"largest batch: number of sequences whose cache fits into {_format_bytes(table.memory)} together with "
            "the weights. Activations need additional memory."
        )
        notes += _explain_zero_batch(table)
    if table.current.kv_cache_bytes_per_token is None and "decoder" in table.current.flops_per_token:
        notes.append("There is no key/value cache, because memory-side dynamic projections need all past inputs.")
    elif table.current.kv_cache_bytes_per_token is None:
        notes.append("There is no key/value cache. A conversion saves parameters of an encoder, but hardly any time.")
    return notes


def _explain_zero_batch(table: Any) -> list[str]:
    """Return a note that explains why the largest batch is 0 in a row, if there is one."""
    weights = table.weight_bytes(table.current)
    if all(table.weight_bytes(row) > table.memory for row in table.rows):
        return [f"The weights ({_format_bytes(weights)}) do not fit into {_format_bytes(table.memory)}."]
    if any(row.largest_batch == 0 for row in table.rows):
        weights_text = _format_bytes(weights)
        return [f"0: the weights ({weights_text} unchanged) leave too little memory for the cache of one sequence."]
    return []


def _parse_memory(text: str) -> int:
    """Return the number of bytes of a text such as "800MiB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"the size must be a number with a unit (4GiB, 800MiB, 4GB), got {text!r}.")
    number, unit = match.groups(default="B")
    base = 1024 if "i" in unit else 1000
    return int(float(number) * base ** "BKMGT".index(unit[0]))


def _format_bytes(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1024 and unit < len(SIZE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.{0 if unit == 0 else 1}f} {SIZE_UNITS[unit]}"


def _format_saving(saved: int, current: int = 0) -> str:
    share = f" ({abs(saved) / current:.0%})" if current else ""
    return f"{_format_bytes(abs(saved))}{' more' if saved < 0 else ''}{share}"
