"""The `attn-variants frontier` command."""

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_parser import (
    CommandParser,
    Flag,
    add_checkpoint_argument,
    add_flags,
    get_package_version,
    parse_with_checkpoint,
)
from .convert import CALIBRATION_OPTIONS, add_calibration_arguments, read_calibration_from_args
from .inspect import SOURCE_LENGTH_FLAG

# The flags that set the variants to measure.
VARIANT_FLAGS = {
    Flag("num_key_value_heads", int, nargs="+"): "numbers of key/value heads to try (default: several)",
    Flag("kv_lora_rank", int, nargs="+"): "ranks to try for self-attention",
    Flag("cross_kv_lora_rank", int, nargs="+"): "for encoder-decoder models: ranks to try for the cross-attention",
    Flag("encoder_num_key_value_heads", int, nargs="+"): "for encoder-decoder models: numbers of key/value heads to "
    "try for the encoder",
    Flag("encoder_kv_lora_rank", int, nargs="+"): "for encoder-decoder models: ranks to try for the encoder",
}

# The default number of held-out texts and recordings.
HELD_OUT_SIZE, HELD_OUT_AUDIO_SIZE = 512, 32

FLAGS = {
    Flag("loss", float): "maximum increase in loss compared with the checkpoint, in nats per token or, for an encoder "
    "without a head, in 1 - cosine of the embeddings. The command for the smallest such variant is printed",
    Flag("held_out_file"): "text to measure on, in the format of --calibration_file (default: the remaining examples "
    "in that file)",
    Flag("held_out_target_file"): "for encoder-decoder models: file with the target for each line in --held_out_file",
    Flag("held_out_audio_dir", metavar="FOLDER"): "folder with recordings to measure on (default: the remaining "
    "recordings in --calibration_audio_dir)",
    Flag("held_out_size", int): f"number of texts or recordings to measure on (default: {HELD_OUT_SIZE} texts or "
    f"{HELD_OUT_AUDIO_SIZE} recordings)",
    **VARIANT_FLAGS,
    Flag("length", int, 512): "number of tokens in the cache of a decoder or in the input of an encoder",
    **SOURCE_LENGTH_FLAG,
}
FRONTIER_JSON, FRONTIER_PNG = "frontier.json", "frontier.png"

EXAMPLE = """\
examples (a T5 model for translation with text pairs, an encoder with lines of
text, and a Whisper model with recordings):
  attn-variants frontier ./t5-en-de --calibration_file train.en.gz \\
      --calibration_target_file train.de.gz --loss 0.02 \\
      --output_dir t5-frontier
  attn-variants frontier google-bert/bert-base-uncased \\
      --calibration_file wikipedia.txt --output_dir bert-frontier
  attn-variants frontier ./t5-en-de --calibration_file train.en.gz \\
      --cross_kv_lora_rank 128 64 --kv_lora_rank 64 32 \\
      --num_key_value_heads 2 1 --output_dir t5-frontier
  attn-variants frontier openai/whisper-base \\
      --calibration_audio_dir recordings --output_dir whisper-frontier

No checkpoint is written. The command converts each attention module in memory, using only the closed form unless
--fit_steps is set. It measures the variants on text (or recordings) from the same file that was not drawn for
calibration. If too little text is left, it uses the tenth of the examples that was held out from fitting.
If the checkpoint was trained on this text, the loss increases more than on new text, which can be specified with
--held_out_file. The last line of the output is the command that creates the selected variant. If you remove
`--fit_steps 0` from this command, it also runs fitting steps, which take longer but reduce the loss."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = CommandParser(
        prog="attn-variants frontier",
        description="Measure the cache size of variants with fewer key/value heads or with latents of several ranks, "
        "and their quality on text or audio. The result is a table, a plot, and the command that creates the selected "
        "variant.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    parser.add_argument(
        "--output_dir",
        required=True,
        help=f"new or empty folder for {FRONTIER_PNG} and {FRONTIER_JSON}, or the folder of an interrupted run with "
        "the same arguments, which is then continued",
    )
    examples = parser.add_argument_group("text or audio", "examples of the kind that the model is used for")
    add_calibration_arguments(examples, fit_steps=0)
    add_flags(parser, FLAGS, "seed", "json", "revision", "token", "disable_tqdm")
    parser.set_defaults(method=None, fit_steps=0)
    args = parse_with_checkpoint(parser, argv)
    if args.calibration_file is None and args.calibration_audio_dir is None:
        parser.error("--calibration_file is required (for Whisper, --calibration_audio_dir).")
    return args


def main(args: argparse.Namespace) -> Any:
    """Measure the variants, save the plot and the JSON file, print the table and return the `Frontier`.

    Raises:
        ValueError: if an option is not valid for the checkpoint, or a file contains invalid data.
        OSError: if a file cannot be read or written.
    """
    from dataclasses import replace

    from ..errors import INTERRUPTED_MESSAGE
    from ..files import save_plot
    from ..inspection.frontier import FrontierFile, load_source_model, measure_frontier, select_variants
    from ..model_properties import set_languages
    from ..progress import disable_progress_bars

    output_dir = Path(args.output_dir).expanduser()
    saved = FrontierFile(output_dir / FRONTIER_JSON)
    calibration, held_out = _read_calibration_and_held_out(args)
    model, processor = load_source_model(args.model_name_or_path, calibration, args.revision, args.token)
    options = select_variants(model, {flag.name: getattr(args, flag.name) for flag in VARIANT_FLAGS})
    is_audio = calibration.audio is not None
    start = None if is_audio else set_languages(processor, model.config, args.source_lang, args.target_lang)
    if start is not None:
        start.apply_to(model)
    known = saved.load_rows(_make_run_key(args, options, calibration, held_out))
    try:
        with disable_progress_bars(args.disable_tqdm):
            frontier = measure_frontier(
                model,
                options,
                replace(calibration, **{"feature_extractor" if is_audio else "tokenizer": processor}),
                held_out,
                checkpoint=args.model_name_or_path,
                length=args.length,
                source_length=args.source_length,
                seed=args.seed,
                saved_rows=known,
                on_row=saved.save,
            )
    except KeyboardInterrupt:
        advice = ""
        if saved.path.exists():
            advice = f" {saved.path} contains the finished measurements. Repeat the command to continue."
        raise KeyboardInterrupt(f"{INTERRUPTED_MESSAGE}.{advice}") from None
    chosen = None if args.loss is None else frontier.find_smallest_variant(args.loss)
    command = chosen and _format_convert_command(chosen, args)
    results = frontier.to_dict() | {"chosen": chosen and {"name": chosen.name, "command": command}}
    picture = output_dir / FRONTIER_PNG
    is_drawn = save_plot(picture, lambda: _plot_frontier(frontier, args.loss), dpi=130)
    saved.finish(results)
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        files = f"Plot and numbers: {picture}, " if is_drawn else "Numbers: "
        _print_frontier(frontier, chosen, args, f"{files}{saved.path}.")
    return frontier


def _plot_frontier(frontier: Any, loss_limit: float | None) -> Any:
    """Return the plot as a figure. The import raises `ModuleNotFoundError` if Matplotlib is not installed."""
    from ..inspection.frontier_plot import plot_frontier

    return plot_frontier(frontier, loss_limit)


def _read_calibration_and_held_out(args: argparse.Namespace) -> tuple[Any, Any]:
    """Read the calibration examples and the held-out examples (texts or recordings)."""
    import sys

    from ..conversion.calibration.examples import read_audio_calibration, read_calibration
    from ..inspection.frontier import select_held_out_examples

    calibration: Any = read_calibration_from_args(args)  # not None, because `parse_args` requires one of the flags
    if calibration.audio is not None:
        all_examples = read_audio_calibration(args.held_out_audio_dir or args.calibration_audio_dir, size=sys.maxsize)
    else:
        file, target_file = args.calibration_file, args.calibration_target_file
        if args.held_out_file is not None:
            file, target_file = args.held_out_file, args.held_out_target_file
        texts = {"columns": args.calibration_columns, "target_column": args.calibration_target_column}
        all_examples = read_calibration(file, target_file=target_file, size=sys.maxsize, **texts)
    default_size = HELD_OUT_SIZE if calibration.audio is None else HELD_OUT_AUDIO_SIZE
    size = default_size if args.held_out_size is None else args.held_out_size
    return calibration, select_held_out_examples(calibration, all_examples, size, args.seed)


def _make_run_key(args: argparse.Namespace, options: Any, calibration: Any, held_out: Any) -> dict[str, Any]:
    """Return all values that affect the results. Saved results are reused if these values have not changed."""
    from ..inspection.frontier import hash_examples

    names = ["model_name_or_path", "revision", "length", "source_length", "seed"]
    names += [name for name in CALIBRATION_OPTIONS if not name.endswith(("_file", "_dir"))]
    texts = {"calibration text": hash_examples(calibration), "held-out text": hash_examples(held_out)}
    key = {name: getattr(args, name) for name in names} | texts
    return key | {"options": options, "version": get_package_version()}


def _print_frontier(frontier: Any, chosen: Any, args: argparse.Namespace, files: str) -> None:
    from ..inspection.held_out import MEASURES
    from ..inspection.text_tables import print_table, print_text

    has_cross_cache = "cross" in (frontier.source.kv_cache_bytes_per_token or {})
    size = f"{frontier.length:,} tokens" + (f", source {frontier.source_length:,}" if has_cross_cache else "")
    title = f"{frontier.checkpoint} ({frontier.architecture}), {size}; loss: {MEASURES[frontier.measure]}"
    header, rows = format_frontier_table(frontier)
    print_table(title, header, rows)
    print_text(
        f"* on the frontier: no other variant is smaller and also has a lower loss. The loss is measured on "
        f"{frontier.held_out_texts} held-out {'texts' if args.calibration_audio_dir is None else 'recordings'}. The "
        "`above` column shows the difference from the checkpoint and its standard error."
    )
    print(files)
    if chosen is not None:
        print_text(f"The smallest variant whose loss is at most {args.loss:g} higher is {chosen.name}.")
        print(f"  {_format_convert_command(chosen, args)}")
    elif args.loss is not None:
        print_text(f"The loss of all variants exceeds the loss of the checkpoint by more than {args.loss:g}.")


def format_frontier_table(frontier: Any) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the table for a `Frontier`."""
    cache = frontier.source.kv_cache_bytes_per_token
    header = ["variant"]
    if cache is not None:
        header += [f"cache bytes per token ({part})" for part in cache] + ["of the cache"]
    header += ["loss", "above", "attention error", "parameters", "ms per " + ("token" if cache else "batch")]
    rows = []
    for row in frontier.rows:
        cells = [row.name + (" *" if row.on_frontier else "")]
        if cache is not None:
            cells += [f"{row.kv_cache_bytes_per_token[part]:,}" for part in cache]
            cells.append(f"{row.kv_cache_bytes / frontier.source.kv_cache_bytes:.1%}")
        above = "" if not row.fields else f"{row.loss_above:+.4f} ± {row.loss_above_error:.4f}"
        error = "not defined" if row.attention_error is None else f"{row.attention_error:.1%}"
        cells += [f"{row.loss:.4f}", above, error if row.fields else ""]
        rows.append([*cells, f"{row.parameters:,}", f"{row.milliseconds:,.2f}"])
    return header, rows


def _format_convert_command(row: Any, args: argparse.Namespace) -> str:
    """Return the command that creates the variant in a row."""
    words = ["attn-variants", "convert", "--model_name_or_path", args.model_name_or_path]
    for name, value in row.fields.items():
        words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    if row.attention_error != 0:  # otherwise, the conversion is exact and does not need calibration
        for name in CALIBRATION_OPTIONS:
            value = getattr(args, name)
            if value is not None:
                words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        words += ["--seed", str(args.seed)] if args.seed else []
    words += ["--revision", args.revision] if args.revision else []
    slug = re.sub(r"[^a-z0-9]+", "-", row.name.lower().replace("mha + ", "")).strip("-")
    return shlex.join([*words, "--output_dir", f"{Path(args.model_name_or_path).name}-{slug}"])
