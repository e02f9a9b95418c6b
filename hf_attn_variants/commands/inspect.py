"""The command `attn-variants inspect`."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..command_line import HOSTS, CommandParser, add_checkpoint_argument, parse_with_checkpoint

__all__ = ["main", "parse_args", "table_cells"]

EXAMPLE = """\
examples:
  attn-variants inspect google-t5/t5-small --batch_size 32 --length 1024
  attn-variants inspect ./t5-small --length 64 --source_length 1024 \\
      --num_beams 4 --memory 4GiB
  attn-variants inspect ./bert-gqa4 --details

Reads config.json alone. A row marked * is the checkpoint as it is; one marked - is no conversion of it, because
neither number of heads divides the other, or heads have parameters of their own."""

DTYPES = ("float64", "float32", "float16", "bfloat16")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = CommandParser(
        prog="attn-variants inspect",
        description="Show what a checkpoint costs with each possible number of key/value heads and with talking "
        f"heads, and what a conversion would save, without loading weights. Checkpoints: {HOSTS}.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    parser.add_argument("--batch_size", type=int, default=1, help="sequences at once (default: %(default)s)")
    parser.add_argument(
        "--length",
        type=int,
        default=512,
        help="tokens attended to: an encoder's sequence, a decoder's cache (default: %(default)s)",
    )
    parser.add_argument(
        "--source_length",
        type=int,
        help="encoder-decoders: tokens that the encoder reads (default: --length; Whisper: its window)",
    )
    parser.add_argument(
        "--num_beams",
        type=int,
        default=1,
        help="of a model with a cache: beams of each sequence's search; the first row is transformers' own class then "
        "and keeps the source for each beam (default: %(default)s)",
    )
    parser.add_argument(
        "--memory",
        type=_memory,
        metavar="SIZE",
        help="of a model with a cache: show the largest batch that fits into this beside the weights: 4GiB, 800MiB",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache (default: the checkpoint's)")
    parser.add_argument(
        "--details",
        action="store_true",
        help="also show the parameters in attention, FLOPs a token, and what a token costs in each cache",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, which has all of it")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--token", help="Hub token, for private and gated repositories (default: the stored login)")
    return parse_with_checkpoint(parser, argv)


def main(args: argparse.Namespace) -> Any:
    """Print the table and return it (a `CostTable`).

    Raises:
        ValueError, OSError: for a checkpoint that cannot be read or is of no supported architecture.
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
    header, rows = table_cells(table, args.details)
    title = f"{table.checkpoint} ({table.architecture}), {table.dtype}, {_sizes(table)}"
    cache_columns = (i for i, name in enumerate(header) if "cache" in name)
    print_table(title, header, rows, cut=next(cache_columns, None) if args.details else None)
    for note in _notes(table, args.details):
        print_text(note)
    return table


def table_cells(table: Any, details: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return a `CostTable` as text: the header, and the cells of each row.

    Args:
        table: the table.
        details: all that was counted; without it the parameters, the whole cache, and what is saved of that (of the
            weights where there is no cache).

    With beams transformers' own class has the first row, for it keeps more.
    """
    now, kept = table.current, table.current_kv_cache_bytes
    stacks = list(now.flops_per_token) if details else []
    sites = list(now.kv_cache_bytes_per_token or ()) if details else []
    has_cache = now.kv_cache_bytes is not None
    header = ["variant", "parameters"] + ["in attention"] * details
    header += ["saved weights"] * (details or not has_cache)
    header += [f"MFLOP a token{f' ({stack})' if len(stacks) > 1 else ''}" for stack in stacks]
    header += [f"cache a token ({site})" for site in sites] + ["cache", "saved cache"] * has_cache
    header += ["largest batch"] * (has_cache and table.memory is not None)
    rows, upstreams = [], _upstream_row(table)
    for row in table.rows if upstreams is None else (upstreams, *table.rows):
        saved, is_as_it_is = table.savings(row), row.current if upstreams is None else row is upstreams
        cells = [f"{row.name}{' *' if is_as_it_is else '' if row.convertible else ' -'}", f"{row.parameters:,}"]
        if details:
            cells.append(f"{row.attention_parameters:,}")
        if details or not has_cache:
            cells.append(_saved(saved["weight_bytes"]))
        cells += [f"{row.flops_per_token[stack] / 1e6:,.2f}" for stack in stacks]
        cells += [_bytes(row.kv_cache_bytes_per_token[site]) for site in sites]
        if has_cache:
            cells += [_bytes(row.kv_cache_bytes), _saved(saved["kv_cache_bytes"], kept)]
            cells += [] if table.memory is None else [f"{row.largest_batch:,}"]
        rows.append(cells)
    return header, rows


def _upstream_row(table: Any) -> Any:
    """Return the row of transformers' own class, where it keeps more than this package's; else None."""
    if table.upstream_kv_cache_bytes is None:
        return None
    kept, largest = table.upstream_kv_cache_bytes, table.upstream_largest_batch
    return replace(table.current, name="transformers", kv_cache_bytes=kept, largest_batch=largest)


def _sizes(table: Any) -> str:
    text = f"batch {table.batch_size}, {table.length:,} tokens attended to"
    text += f", source {table.source_length:,}" if len(table.current.flops_per_token) > 1 else ""
    return text + (f", {table.num_beams} beams" if table.num_beams > 1 else "")


def _notes(table: Any, details: bool) -> list[str]:
    notes = ["* the checkpoint as it is"] if any(row.current for row in table.rows) else []
    if not all(row.convertible for row in table.rows):
        notes.append(
            "- no conversion leads there: neither number divides the other, or heads have parameters of their own"
        )
    if details:
        notes.append(
            "Parameters are the model's, tied ones once; files may hold more or fewer, which `convert` counts."
        )
    if table.upstream_kv_cache_bytes is not None:
        notes.append(
            "transformers' own class keeps the source for each beam, this package's once (but where heads talk in "
            f"cross-attention). `share_memory` gives transformers' class the cache of {table.current.name}, without a "
            "conversion."
        )
    if table.memory is not None:
        notes.append(
            f"largest batch: sequences whose cache fits into {_bytes(table.memory)} beside the weights; what a call "
            "computes besides comes on top."
        )
        notes += _nothing_fits(table)
    if table.current.kv_cache_bytes_per_token is None and "decoder" in table.current.flops_per_token:
        notes.append("No key/value cache: memory-side dynamic projections need all past inputs at each token.")
    elif table.current.kv_cache_bytes_per_token is None:
        notes.append("No key/value cache: an encoder gains parameters and projection work, hardly any attention time.")
    return notes


def _nothing_fits(table: Any) -> list[str]:
    """Say why a largest batch is 0, where one is."""
    weights = table.weight_bytes(table.current)
    if all(table.weight_bytes(row) > table.memory for row in table.rows):
        return [f"The weights alone ({_bytes(weights)}) do not fit into {_bytes(table.memory)}."]
    if any(row.largest_batch == 0 for row in table.rows):
        return [f"0: the weights ({_bytes(weights)} as it is) leave too little for the cache of one sequence."]
    return []


def _memory(text: str) -> int:
    """Return the bytes that a size says: a number, or one with a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"write a size as 4GiB, 800MiB or 4GB; got {text!r}")
    number, unit = found.groups(default="B")
    base = 1024 if "i" in unit else 1000
    return int(float(number) * base ** "BKMGT".index(unit[0]))


def _bytes(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.{0 if unit == 0 else 1}f} {UNITS[unit]}"


def _saved(saved: int, now: int = 0) -> str:
    share = f" ({abs(saved) / now:.0%})" if now else ""
    return f"{_bytes(abs(saved))}{' more' if saved < 0 else ''}{share}"
