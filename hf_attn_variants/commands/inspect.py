"""The `attn-variants inspect` command."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..command_parser import (
    MODEL_NAMES,
    CommandParser,
    Flag,
    add_checkpoint_argument,
    add_flags,
    parse_with_checkpoint,
)

EXAMPLE = """\
examples:
  attn-variants inspect google-t5/t5-small --batch_size 32 --length 1024
  attn-variants inspect ./t5-small --length 64 --source_length 1024 \\
      --num_beams 4 --memory 4GiB
  attn-variants inspect ./bert-gqa4 --details

The command reads only config.json. * marks the unchanged checkpoint. - marks variants that the checkpoint cannot be
converted to, because neither number of heads divides the other, or because each head has its own parameters."""

SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
COST_DTYPES = ("float64", "float32", "float16", "bfloat16")


def _parse_memory(text: str) -> int:
    """Parse a size such as "800MiB" and return the number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"the size must be a number with a unit, such as 4GiB, 800MiB or 4GB, got {text!r}."
        )
    number, unit = match.groups(default="B")
    base = 1024 if "i" in unit else 1000
    return int(float(number) * base ** "BKMGT".index(unit[0]))


SOURCE_LENGTH_FLAG = {
    Flag("source_length", int): "for encoder-decoder models: number of tokens that the encoder reads (default: "
    "--length; for Whisper, its window)"
}
FLAGS = {
    Flag("batch_size", int, 1): "number of sequences per batch",
    Flag("length", int, 512): "number of tokens in the input of an encoder or the cache of a decoder",
    **SOURCE_LENGTH_FLAG,
    Flag("num_beams", int, 1): "number of beams per sequence for models with a cache. With several beams, the first "
    "row is the Transformers class, which stores the encoder keys and values for each beam",
    Flag("memory", _parse_memory, metavar="SIZE"): "amount of memory, such as 4GiB or 800MiB. For models with a "
    "cache, shows the largest batch that fits into it together with the weights",
    Flag("dtype", COST_DTYPES): "data type of the weights and the cache (default: as in the checkpoint)",
    Flag("details", bool): "also show the number of attention parameters, the FLOPs per token, and the size of each "
    "cache per token",
    Flag("json", bool): "print JSON with all values instead of a table",
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = CommandParser(
        prog="attn-variants inspect",
        description="Show the parameters, FLOPs and cache size of a checkpoint for each possible number of key/value "
        f"heads and with talking heads, without loading the weights. Supported models: {MODEL_NAMES}.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    add_flags(parser, FLAGS, "revision", "token")
    return parse_with_checkpoint(parser, argv)


def main(args: argparse.Namespace) -> Any:
    """Print the table and return the `CostTable`.

    Raises:
        ValueError: if the architecture is not supported.
        OSError: if the configuration cannot be read.
    """
    from ..inspection.costs import compute_cost_table, read_checkpoint_config
    from ..inspection.text_tables import print_table, print_text

    config = read_checkpoint_config(args.model_name_or_path, args.revision, args.token)
    names = ("batch_size", "length", "source_length", "dtype", "num_beams", "memory")
    table = compute_cost_table(config, args.model_name_or_path, **{name: getattr(args, name) for name in names})
    if args.json:
        print(json.dumps(table.to_dict(), indent=2))
        return table
    header, rows = format_cost_table(table, args.details)
    title = f"{table.checkpoint} ({table.architecture}), {table.dtype}, {_format_sizes(table)}"
    cache_columns = (i for i, name in enumerate(header) if "cache" in name)
    print_table(title, header, rows, split_before=next(cache_columns, None) if args.details else None)
    for note in _list_notes(table, args.details):
        print_text(note)
    return table


def format_cost_table(table: Any, details: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of a `CostTable` as strings.

    With several beams, the first row shows the Transformers class, because the cache of this class is larger.

    Args:
        table: the table.
        details: whether to include all values. Otherwise, the columns are the parameters, the cache size and the cache
            saving (for models without a cache, the weight saving).
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
        saved, is_unchanged = table.compute_savings(row), row.current if upstream is None else row is upstream
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
    """Return the row for the Transformers class, or None if its cache is not larger than that of this package."""
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
            "- not available by conversion: neither number of heads divides the other, or each head has its own "
            "parameters"
        )
    if details:
        notes.append(
            "Tied parameters are counted once. The files may contain more or fewer parameters, which `convert` counts."
        )
    if table.upstream_kv_cache_bytes is not None:
        notes.append(
            "The Transformers class stores the encoder keys and values for each beam. The class from this package "
            "stores them only once (except with talking heads in the cross-attention). With `share_memory`, the "
            f"Transformers class has the same cache size as {table.current.name} without conversion."
        )
    if table.memory is not None:
        notes.append(
            f"largest batch: the number of sequences whose cache fits into {_format_bytes(table.memory)} together "
            "with the weights. Activations require additional memory."
        )
        notes += _explain_zero_batch(table)
    if table.current.kv_cache_bytes_per_token is None and "decoder" in table.current.flops_per_token:
        notes.append("There is no key/value cache because memory-side dynamic projections require all past inputs.")
    elif table.current.kv_cache_bytes_per_token is None:
        notes.append(
            "There is no key/value cache. Conversion reduces the parameters of an encoder, but hardly its runtime."
        )
    return notes


def _explain_zero_batch(table: Any) -> list[str]:
    """Return a note that explains why the largest batch is 0 in some rows, or an empty list if it is never 0."""
    weights = table.get_weight_bytes(table.current)
    if all(table.get_weight_bytes(row) > table.memory for row in table.rows):
        return [f"The weights ({_format_bytes(weights)}) do not fit into {_format_bytes(table.memory)}."]
    if any(row.largest_batch == 0 for row in table.rows):
        weights_text = _format_bytes(weights)
        return [f"0: the weights ({weights_text} unchanged) do not leave enough memory for the cache of one sequence."]
    return []


def _format_bytes(count: int) -> str:
    unit = min(max(count.bit_length() - 1, 0) // 10, len(SIZE_UNITS) - 1)
    return f"{count / 1024**unit:,.{min(unit, 1)}f} {SIZE_UNITS[unit]}"


def _format_saving(saved: int, current: int = 0) -> str:
    share = f" ({abs(saved) / current:.0%})" if current else ""
    return f"{_format_bytes(abs(saved))}{' more' if saved < 0 else ''}{share}"
