"""The command `attn-variants benchmark`."""

import argparse
import importlib.util
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_line import CommandParser, add_checkpoint_argument, parse_with_checkpoint
from ..modeling.mechanisms.kernels.kernel_table import KERNELS
from ..training.engine.options import parse_json_flag

__all__ = ["main", "parse_args"]

EXAMPLE = """\
examples:
  attn-variants benchmark ./t5-small --batch_size 32 --length 1024 \\
      --num_key_value_heads 8 2 1 --json
  attn-variants benchmark ./t5-small --batch_size 8 --length 1024 \\
      --num_beams 4 --max_new_tokens 64
  attn-variants benchmark ./t5-small --serving --batch_size 4 --length 512 \\
      --num_beams 4 --plot t5-serving.png

Reads only config.json: weights are random, because speed does not depend on them. An encoder-decoder generates from
encoder outputs of the given length, without the time of the encoder. The first row is the class of Transformers (for a
checkpoint of this package, its multi-head variant). All models are in memory at once. Before they are timed, our
multi-head model with the weights of the Transformers model must decode the same eight tokens, and each model must
decode the same with and without its cache.

--serving compares the ways to serve a model on this CPU, encoders included: the class of Transformers as it is, with
`share_memory`, in int8 (`quantize`), with fewer key/value heads or other --variants, and CTranslate2 if it
supports the model. All are in memory at once. It measures the peak memory of each in a process of its own, and
recommends one."""

PEAK = (
    "peak MiB: of a process with this engine alone, its libraries included, from when the model is loaded; in int8 "
    "within torch it has what quantising the float32 weights left behind."
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = CommandParser(
        prog="attn-variants benchmark",
        description="Time how an encoder-decoder generates on this machine with fewer key/value heads, latents, "
        "talking heads, windows and kernels, compared with the class of Transformers; or what to serve a model with.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    parser.add_argument("--num_key_value_heads", type=int, nargs="+", help="default: all heads, 4, 2 and 1")
    parser.add_argument("--no_talking_heads", action="store_true", help="do not time talking heads")
    parser.add_argument("--no_latents", action="store_true", help="do not time latents")
    parser.add_argument(
        "--attention_window", type=int, nargs="+", default=[], help="time sliding windows of these sizes"
    )
    parser.add_argument(
        "--attention_kernel",
        choices=KERNELS,
        nargs="+",
        default=[],
        help="time these kernels; hybrid with each window",
    )
    parser.add_argument("--batch_size", type=int, default=8, help="sequences at once (default: %(default)s)")
    parser.add_argument("--length", type=int, help="tokens of each source (128; Whisper: its window)")
    parser.add_argument(
        "--max_new_tokens", type=int, default=32, help="encoder-decoders: tokens to generate (%(default)s)"
    )
    parser.add_argument("--num_beams", type=int, help="encoder-decoders: beams of the search (default: 1, greedy)")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each; medians count (%(default)s)")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of weights and cache"
    )
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    _add_serving_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--token", help="Hub token (default: the stored login)")
    args = parse_with_checkpoint(parser, argv)
    _check_serving(parser, args)
    return args


def _add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    serving = parser.add_argument_group("what to serve the model with")
    serving.add_argument(
        "--serving",
        action="store_true",
        help="time transformers, share_memory, int8, CTranslate2 and --num_key_value_heads (default: a quarter, with "
        "--variants none)",
    )
    serving.add_argument(
        "--variants",
        nargs="+",
        type=_fields,
        default=[],
        metavar="JSON",
        help="conversions to time, too: configuration fields of each, as "
        """'{"cross_kv_lora_rank": 128, "kv_lora_rank": 32}'""",
    )
    serving.add_argument(
        "--engines",
        nargs="+",
        metavar="NAME",
        help="time these alone, beside transformers: as the table names them, 'share_memory, int8' in quotes",
    )
    serving.add_argument(
        "--compile",
        action="store_true",
        help="time torch's engines compiled, too (`model.compile()`, static cache): a minute more for each",
    )
    serving.add_argument("--no_peak_memory", action="store_true", help="start no process for each one's peak memory")
    serving.add_argument("--plot", metavar="PNG", help="draw tokens a second and peak memory")


def _fields(text: str) -> dict[str, Any]:
    """Return the fields of a conversion, as JSON has them."""
    fields = parse_json_flag(text)
    if not isinstance(fields, dict) or not fields:
        raise argparse.ArgumentTypeError(f"""an object is needed, as '{{"kv_lora_rank": 32}}'; got {text}""")
    return fields


def _check_serving(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the process with a line where a flag is of the other question."""
    others = ["attention_window", "attention_kernel", "no_talking_heads", "no_latents"]
    others = [name for name in others if getattr(args, name)]
    if args.serving and others:
        parser.error(f"--{others[0]} is not timed with --serving: leave one of the two out")
    if args.serving and (args.dtype != "float32" or args.device not in (None, "cpu")):
        parser.error("--serving compares engines of a CPU in float32 and int8: leave --dtype and --device out")
    for name in ("no_peak_memory", "plot", "compile", "variants", "engines"):
        if getattr(args, name) and not args.serving:
            parser.error(f"--{name} is for --serving: add that, or leave it out")
    if args.compile and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        parser.error("--compile needs a C++ compiler: install g++, or leave it out")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: `pip install matplotlib`, or leave it out")
    if args.plot is not None and (not Path(args.plot).parent.is_dir() or Path(args.plot).is_dir()):
        parser.error(f"--plot must name a file in a folder that is there; got {args.plot}")
    if args.plot is not None and Path(args.plot).suffix.lower() != ".png":
        parser.error(f"--plot writes a PNG: give it that ending; got {args.plot}")


def main(args: argparse.Namespace) -> Any:
    """Measure, print the table and return it (a `SpeedTable`; with --serving a `ServingTable`).

    Raises:
        ValueError, OSError: for a checkpoint that cannot be read, or numbers that do not fit it.
    """
    import torch
    import transformers

    from ..inspection.costs import read_checkpoint_config
    from ..inspection.tables import print_text

    config = read_checkpoint_config(args.model_name_or_path, args.revision, args.token)
    transformers.logging.set_verbosity_error()
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads must be at least 1; got {args.threads}.")
        torch.set_num_threads(args.threads)
    if args.serving:
        return _serving(args, config)
    table = _measured(args, config)
    if args.json:
        print(json.dumps(table.to_dict(), indent=2))
        return table
    _print_rows(table)
    _print_conditions(args, table)
    if table.break_even is not None:
        print_text(_break_even(table))
    return table


def _print_conditions(args: argparse.Namespace, table: Any) -> None:
    from ..inspection.tables import print_text

    threads, load = table.machine["threads"], table.machine["load_average"]
    ended = f", load {load[0]:.1f} at the end" if load else ""
    print_text(
        f"Medians of {args.rounds} round{'s' * (args.rounds != 1)}; {threads} thread{'s' * (threads != 1)}{ended}."
    )


def _serving(args: argparse.Namespace, config: Any) -> Any:
    from ..errors import as_value_error
    from ..inspection.tables import print_text
    from ..serving.measure import advice, measure_serving

    with as_value_error(f"{args.model_name_or_path} cannot be built and run: its configuration is wrong"):
        table = measure_serving(
            config,
            checkpoint=args.model_name_or_path,
            kv_heads=args.num_key_value_heads,
            batch_size=args.batch_size,
            length=args.length,
            max_new_tokens=args.max_new_tokens,
            num_beams=args.num_beams,
            rounds=args.rounds,
            peak_memory=not args.no_peak_memory,
            compiles=args.compile,
            variants=args.variants,
            engines=args.engines,
        )
    if args.plot is not None:
        from ..files import write_picture
        from ..serving.measure import draw_serving

        write_picture(Path(args.plot), lambda: draw_serving(table), dpi=150)
    if args.json:
        print(json.dumps(table.to_dict(), indent=2))
        return table
    _print_serving(table)
    if any(row.peak_bytes is not None for row in table.rows):
        print_text(PEAK)
    _print_conditions(args, table)
    for name, reason in table.left_out.items():
        print_text(f"Without {name}: {reason}")
    for name, reason in table.without_peak.items():
        print_text(f"No peak memory of {name}: {reason}")
    print_text(advice(table))
    return table


def _print_serving(table: Any) -> None:
    from ..inspection.tables import print_table

    load, decodes = table.load, table.load.max_new_tokens is not None
    header = ["engine", "ms a batch", "tokens/s", "speed", *["ms to the first token"] * decodes, "peak MiB"]
    rows = []
    for row in table.rows:
        cells = [row.engine.name, f"{row.milliseconds:,.1f}", f"{row.tokens_per_second:,.0f}", f"{row.speedup:.2f}x"]
        if decodes:
            cells.append(f"{row.first_milliseconds:,.1f}")
        cells.append("" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}")
        rows.append(cells)
    search = f", {load.max_new_tokens} new tokens, {_search(load.num_beams)}" if decodes else ""
    print_table(f"{table.checkpoint}, batch {load.batch_size}, length {load.length:,}{search}", header, rows)


def _search(num_beams: int) -> str:
    return "greedy" if num_beams == 1 else f"{num_beams} beams"


def _print_rows(table: Any) -> None:
    from ..inspection.tables import print_table

    header = ["variant", "ms a generation", "tokens/s", "speed"]
    rows = [
        [row.name, f"{row.milliseconds:,.1f}", f"{row.tokens_per_second:,.0f}", f"{row.speedup:.2f}x"]
        for row in table.rows
    ]
    if table.rows[0].step_milliseconds is not None:
        header += ["ms to the first token", "ms a further one"]
        for cells, row in zip(rows, table.rows, strict=True):
            cells += [f"{row.first_milliseconds:,.1f}", f"{row.step_milliseconds:,.2f}"]
    what = f"{table.checkpoint} ({table.architecture}), {table.dtype} on {table.device}, batch {table.batch_size}"
    of = f"source {table.length:,}, {table.max_new_tokens} new tokens, {_search(table.num_beams)}"
    print_table(f"{what}, {of}", header, rows)


def _measured(args: argparse.Namespace, config: Any) -> Any:
    import torch

    from ..errors import as_value_error
    from ..inspection.speed import measure_speed

    with as_value_error(f"{args.model_name_or_path} cannot be built and run: its configuration is wrong"):
        return measure_speed(
            config,
            checkpoint=args.model_name_or_path,
            kv_heads=args.num_key_value_heads,
            talking_heads=not args.no_talking_heads,
            latents=not args.no_latents,
            windows=args.attention_window,
            kernels=args.attention_kernel,
            batch_size=args.batch_size,
            length=args.length,
            max_new_tokens=args.max_new_tokens,
            num_beams=1 if args.num_beams is None else args.num_beams,
            rounds=args.rounds,
            dtype=args.dtype,
            device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )


def _break_even(table: Any) -> str:
    found, what = table.break_even, f"at batch {table.batch_size} and a source of {table.length:,}"
    if found.new_tokens is None:
        return f"A step of {found.exact} is not slower than one of {found.multi_head}, {what}."
    if found.new_tokens == 1:
        return f"{found.exact} is slower than {found.multi_head} from the first token on, {what}."
    return (
        f"{found.exact} is slower than {found.multi_head} from {found.new_tokens:,} new tokens on, {what}: it saves "
        "the projection of the source and takes longer for a step."
    )
