"""The `attn-variants benchmark` command."""

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_parser import CommandParser, Flag, add_checkpoint_argument, add_flags, parse_with_checkpoint
from ..modeling.mechanisms.kernels.kernel_table import KERNELS
from ..training.engine.settings import parse_json_flag

EXAMPLE = """\
examples:
  attn-variants benchmark ./t5-small --batch_size 32 --length 1024 \\
      --num_key_value_heads 8 2 1 --json
  attn-variants benchmark ./t5-small --batch_size 8 --length 1024 \\
      --num_beams 4 --max_new_tokens 64
  attn-variants benchmark ./t5-small --serving --batch_size 4 --length 512 \\
      --num_beams 4 --plot t5-serving.png

The command reads only config.json and uses random weights, because the weights do not affect the speed. An
encoder-decoder generates from encoder outputs of the specified length. The time of the encoder is not included. The
first row is the Transformers class or, for a checkpoint from this package, its multi-head variant. All models are
in memory at the same time. Before timing, the command checks that the multi-head model from this package generates the
same eight tokens as the Transformers model with the same weights, and that each model generates the same tokens with
and without its cache.

With --serving, the command compares several ways to serve the model on this CPU and recommends one of them. The model
may also be an encoder. The candidates are the Transformers class, the same class with `share_memory` or in int8
(`quantize`), variants with fewer key/value heads or other --variants, and CTranslate2 if it supports the model. All
models are in memory at the same time. The peak memory of each is measured in a separate process."""

PEAK_NOTE = (
    "peak MiB: peak memory of a process that runs only this engine, including its libraries, after the model is "
    "loaded. For int8 in torch, it includes memory that was used to quantize the float32 weights and not released."
)


def _parse_fields(text: str) -> dict[str, Any]:
    """Parse a JSON object that contains the configuration fields of a conversion."""
    fields = parse_json_flag(text)
    if not isinstance(fields, dict) or not fields:
        raise argparse.ArgumentTypeError(
            f"""each value must be a JSON object, such as '{{"kv_lora_rank": 32}}', got {text}."""
        )
    return fields


FLAGS = {
    Flag("num_key_value_heads", int, nargs="+"): "numbers of key/value heads to time (default: all heads, 4, 2 and 1)",
    Flag("no_talking_heads", bool): "do not time talking heads",
    Flag("no_latents", bool): "do not time latents",
    Flag("attention_window", int, (), nargs="+"): "sizes of sliding windows to time",
    Flag("attention_kernel", tuple(KERNELS), (), nargs="+"): "kernels to time. hybrid is timed with each window",
    Flag("batch_size", int, 8): "number of sequences per batch",
    Flag("length", int): "number of source tokens (default: 128; for Whisper, its window)",
    Flag("max_new_tokens", int, 32): "for encoder-decoder models: number of tokens to generate",
    Flag("num_beams", int): "for encoder-decoder models: number of beams (default: 1, greedy)",
    Flag("rounds", int, 5): "number of timings per model, of which the median is reported",
    Flag("dtype", ("float32", "float16", "bfloat16"), "float32"): "data type of the weights and the cache",
    Flag("device"): "cpu or cuda (default: the GPU if there is one)",
    Flag("threads", int): "number of CPU threads (default: the torch default)",
}
SERVING_FLAGS = {
    Flag("serving", bool): "compare the speed of transformers, share_memory, int8, CTranslate2 and models with "
    "--num_key_value_heads (default: a quarter of the heads, or no such conversion with --variants)",
    Flag("variants", _parse_fields, (), nargs="+", metavar="JSON"): "additional conversions to time, each as a JSON "
    """object with configuration fields, such as '{"cross_kv_lora_rank": 128, "kv_lora_rank": 32}'""",
    Flag("engines", nargs="+", metavar="NAME"): "engines to time in addition to transformers, named as in the table, "
    "such as 'share_memory, int8' (default: all)",
    Flag("compile", bool): "also time compiled torch engines (`model.compile()`, static cache), which takes a minute "
    "per engine",
    Flag("no_peak_memory", bool): "do not measure the peak memory",
    Flag("plot", metavar="PNG"): "output file for a plot of the tokens per second and the peak memory",
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = CommandParser(
        prog="attn-variants benchmark",
        description="Compare the generation speed of encoder-decoder variants (with fewer key/value heads, latents, "
        "talking heads, windows or kernels) with the speed of the Transformers class on this machine. With --serving, "
        "compare several ways to serve a model.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    add_flags(parser, FLAGS)
    add_flags(parser.add_argument_group("serving", "comparison of several ways to serve the model"), SERVING_FLAGS)
    add_flags(parser, {}, "json", "revision", "token")
    args = parse_with_checkpoint(parser, argv)
    _check_plot(parser, args.plot)
    return args


def _check_plot(parser: argparse.ArgumentParser, plot: str | None) -> None:
    """Check in advance that the plot can be written after the measurement, and exit with an error message if not."""
    if plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot requires matplotlib. Run `pip install matplotlib`, or omit --plot.")
    if not Path(plot).parent.is_dir() or Path(plot).is_dir():
        parser.error(f"--plot must be a file in an existing folder, got {plot}.")


def main(args: argparse.Namespace) -> Any:
    """Run the benchmark, print the table and return it as a `SpeedTable` or, with --serving, a `ServingTable`.

    Raises:
        ValueError: if an option is not valid for the checkpoint.
        OSError: if the configuration cannot be read.
    """
    import torch
    import transformers

    from ..errors import convert_to_value_error
    from ..inspection.costs import read_checkpoint_config
    from ..inspection.text_tables import print_text

    config = read_checkpoint_config(args.model_name_or_path, args.revision, args.token)
    transformers.logging.set_verbosity_error()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with convert_to_value_error(
        f"{args.model_name_or_path} cannot be built and run because its configuration is not valid"
    ):
        table = _measure_serving(args, config) if args.serving else _measure_speed(args, config)
    if args.serving:
        _report_serving(args, table)
        return table
    if args.json:
        print(json.dumps(table.to_dict(), indent=2))
        return table
    _print_speed_table(table)
    _print_conditions(args, table)
    if table.break_even is not None:
        print_text(_format_break_even(table))
    return table


def _print_conditions(args: argparse.Namespace, table: Any) -> None:
    from ..inspection.text_tables import print_text

    threads, load = table.machine["threads"], table.machine["load_average"]
    load_text = f", load {load[0]:.1f} at the end" if load else ""
    print_text(
        f"Medians of {args.rounds} round{'s' * (args.rounds != 1)} with {threads} "
        f"thread{'s' * (threads != 1)}{load_text}."
    )


def _get_common_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("batch_size", "length", "max_new_tokens", "rounds")
    options = {name: getattr(args, name) for name in names}
    return {"checkpoint": args.model_name_or_path, "kv_heads": args.num_key_value_heads, **options}


def _measure_serving(args: argparse.Namespace, config: Any) -> Any:
    from ..serving.measure import measure_serving

    return measure_serving(
        config,
        **_get_common_options(args),
        num_beams=args.num_beams,
        peak_memory=not args.no_peak_memory,
        compiles=args.compile,
        variants=args.variants,
        engines=args.engines,
    )


def _report_serving(args: argparse.Namespace, table: Any) -> None:
    from ..files import save_plot
    from ..inspection.text_tables import print_text
    from ..serving.measure import plot_serving, recommend_engine

    if args.plot is not None:
        save_plot(Path(args.plot), lambda: plot_serving(table), dpi=150)
    if args.json:
        print(json.dumps(table.to_dict(), indent=2))
        return
    _print_serving(table)
    if any(row.peak_bytes is not None for row in table.rows):
        print_text(PEAK_NOTE)
    _print_conditions(args, table)
    for name, reason in table.left_out.items():
        print_text(f"{name} was skipped: {reason}")
    for name, reason in table.without_peak.items():
        print_text(f"The peak memory of {name} could not be measured: {reason}")
    print_text(recommend_engine(table))


def _print_serving(table: Any) -> None:
    from ..inspection.text_tables import print_table

    workload, decodes = table.load, table.load.max_new_tokens is not None
    header = ["engine", "ms per batch", "tokens/s", "speed", *["ms to the first token"] * decodes, "peak MiB"]
    rows = []
    for row in table.rows:
        cells = [row.engine.name, f"{row.milliseconds:,.1f}", f"{row.tokens_per_second:,.0f}", f"{row.speedup:.2f}x"]
        if decodes:
            cells.append(f"{row.first_milliseconds:,.1f}")
        cells.append("" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}")
        rows.append(cells)
    search = f", {workload.max_new_tokens} new tokens, {_format_num_beams(workload.num_beams)}" if decodes else ""
    print_table(f"{table.checkpoint}, batch {workload.batch_size}, length {workload.length:,}{search}", header, rows)


def _format_num_beams(num_beams: int) -> str:
    return "greedy" if num_beams == 1 else f"{num_beams} beams"


def _print_speed_table(table: Any) -> None:
    from ..inspection.text_tables import print_table

    header = ["variant", "ms per generation", "tokens/s", "speed"]
    rows = [
        [row.name, f"{row.milliseconds:,.1f}", f"{row.tokens_per_second:,.0f}", f"{row.speedup:.2f}x"]
        for row in table.rows
    ]
    if table.rows[0].step_milliseconds is not None:
        header += ["ms to the first token", "ms per further token"]
        for cells, row in zip(rows, table.rows, strict=True):
            cells += [f"{row.first_milliseconds:,.1f}", f"{row.step_milliseconds:,.2f}"]
    model = f"{table.checkpoint} ({table.architecture}), {table.dtype} on {table.device}, batch {table.batch_size}"
    work = f"source {table.length:,}, {table.max_new_tokens} new tokens, {_format_num_beams(table.num_beams)}"
    print_table(f"{model}, {work}", header, rows)


def _measure_speed(args: argparse.Namespace, config: Any) -> Any:
    import torch

    from ..inspection.speed import measure_speed

    return measure_speed(
        config,
        **_get_common_options(args),
        talking_heads=not args.no_talking_heads,
        latents=not args.no_latents,
        windows=args.attention_window,
        kernels=args.attention_kernel,
        num_beams=1 if args.num_beams is None else args.num_beams,
        dtype=args.dtype,
        device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )


def _format_break_even(table: Any) -> str:
    point, sizes = table.break_even, f"at batch {table.batch_size} and source length {table.length:,}"
    if point.new_tokens is None:
        return f"{point.exact} is not slower than {point.multi_head} {sizes}, even for long outputs."
    if point.new_tokens == 1:
        return f"{point.exact} is slower than {point.multi_head} for any number of new tokens {sizes}."
    return (
        f"{point.exact} is slower than {point.multi_head} for {point.new_tokens:,} or more new tokens {sizes}. It "
        "does not project the source, but each step takes longer."
    )
