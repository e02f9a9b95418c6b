"""The command `attn-variants frontier`."""

import argparse
import importlib.util
import json
import logging
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_line import CommandParser, add_checkpoint_argument, package_version, parse_with_checkpoint
from .convert import (
    CALIBRATION_OPTIONS,
    add_audio_argument,
    add_calibration_arguments,
    read_calibration_arguments,
)

__all__ = ["JSON_FILE", "PNG_FILE", "main", "parse_args"]

logger = logging.getLogger(__name__)

OPTIONS = (
    "num_key_value_heads",
    "kv_lora_rank",
    "cross_kv_lora_rank",
    "encoder_num_key_value_heads",
    "encoder_kv_lora_rank",
)

# Examples to measure on where nobody says how many.
HELD_OUT_SIZE, HELD_OUT_AUDIO_SIZE = 512, 32

JSON_FILE, PNG_FILE = "frontier.json", "frontier.png"

EXAMPLE = """\
examples (a T5 that translates, on its pairs; an encoder on lines of text; a
Whisper on recordings):
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

No checkpoint is written: variants are made in memory, each attention once, by the closed form alone unless --fit_steps
says more, and tried on text of the file (or recordings of the folder) that was not drawn for the calibration; on its
held-out tenth where nothing is left. Text that the checkpoint was trained on shows larger losses than new text does:
--held_out_file takes such. The command that is named at the end makes the variant that was measured; without its
--fit_steps 0 it is fitted as well, which takes longer and loses less."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = CommandParser(
        prog="attn-variants frontier",
        description="Try fewer key/value heads and latents of several ranks on a checkpoint, and show what each takes "
        "and what it loses on text or audio: a table, a picture, and the command that makes the one to have.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    parser.add_argument(
        "--output_dir",
        required=True,
        help=f"a new or empty folder, for {PNG_FILE} and {JSON_FILE}, or that "
        "of a call like this one that was stopped, which goes on",
    )
    examples = parser.add_argument_group("text or audio", "of the kind that the model is for")
    add_calibration_arguments(examples, fit_steps=0)
    add_audio_argument(examples)
    _add_measuring_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--token", help="Hub token, for private and gated repositories (default: the stored login)")
    parser.add_argument("--disable_tqdm", action="store_true", help="no progress bars")
    parser.set_defaults(method=None, fit_steps=0)
    args = parse_with_checkpoint(parser, argv)
    _check(parser, args)
    return args


def _add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--loss",
        type=float,
        help="name the command of the smallest variant that loses at most so much more than the checkpoint (nats a "
        "token; an encoder without a head: 1 - cosine of embeddings)",
    )
    parser.add_argument(
        "--held_out_file", help="text to measure on, as --calibration_file (default: what is left of that file)"
    )
    parser.add_argument("--held_out_target_file", help="encoder-decoders: the target of each of its lines")
    parser.add_argument(
        "--held_out_audio_dir",
        metavar="FOLDER",
        help="recordings to measure on (default: what is left of --calibration_audio_dir)",
    )
    parser.add_argument(
        "--held_out_size",
        type=int,
        help=f"texts to measure on, or recordings (default: {HELD_OUT_SIZE}, of recordings {HELD_OUT_AUDIO_SIZE})",
    )
    parser.add_argument("--num_key_value_heads", type=int, nargs="+", help="heads to try (default: several)")
    parser.add_argument("--kv_lora_rank", type=int, nargs="+", help="ranks of self-attention to try")
    parser.add_argument(
        "--cross_kv_lora_rank", type=int, nargs="+", help="encoder-decoders: ranks of cross-attention to try"
    )
    parser.add_argument(
        "--encoder_num_key_value_heads", type=int, nargs="+", help="encoder-decoders: the encoder's heads to try"
    )
    parser.add_argument(
        "--encoder_kv_lora_rank", type=int, nargs="+", help="encoder-decoders: the encoder's ranks to try"
    )
    parser.add_argument(
        "--length", type=int, default=512, help="tokens in a decoder's cache, or of an encoder's text (%(default)s)"
    )
    parser.add_argument(
        "--source_length",
        type=int,
        help="encoder-decoders: tokens that the encoder reads (default: --length; a Whisper's window has its own)",
    )


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop the command with its usage where flags do not go together."""
    if args.calibration_file is None and args.calibration_audio_dir is None:
        parser.error("--calibration_file (of a Whisper: --calibration_audio_dir) is needed: what is lost is measured")
    for kind in ("file", "audio_dir"):
        if getattr(args, f"held_out_{kind}") is not None and getattr(args, f"calibration_{kind}") is None:
            parser.error(f"--held_out_{kind} needs --calibration_{kind}")
    if args.held_out_target_file is not None and args.held_out_file is None:
        parser.error("--held_out_target_file needs --held_out_file")
    if args.loss is not None and not args.loss >= 0:
        parser.error(f"--loss must be at least 0; got {args.loss}")


def main(args: argparse.Namespace) -> Any:
    """Measure, write the picture and the JSON, print the table, and return it (a `Frontier`).

    Raises:
        ValueError, OSError: for a checkpoint or text that cannot be read, or options that do not fit it.
    """
    from dataclasses import replace

    from ..errors import INTERRUPTED
    from ..inspection.frontier.measure import SavedFrontier, load_source, measure_frontier, variants_to_try
    from ..languages import set_languages
    from ..progress import no_progress_bars

    output_dir = Path(args.output_dir).expanduser()
    saved = SavedFrontier(output_dir / JSON_FILE)
    calibration, held_out = _read_texts(args)
    model, processor = load_source(args.model_name_or_path, calibration, args.revision, args.token)
    options = variants_to_try(model, {name: getattr(args, name) for name in OPTIONS})
    hears = calibration.audio is not None
    start = None if hears else set_languages(processor, model.config, args.source_lang, args.target_lang)
    if start is not None:
        start.give(model)
    known = saved.rows(_call(args, options, calibration, held_out))
    try:
        with no_progress_bars(args.disable_tqdm):
            frontier = measure_frontier(
                model,
                options,
                replace(calibration, **{"feature_extractor" if hears else "tokenizer": processor}),
                held_out,
                checkpoint=args.model_name_or_path,
                length=args.length,
                source_length=args.source_length,
                seed=args.seed,
                known=known,
                on_row=saved.save,
            )
    except KeyboardInterrupt:
        there = f"; {saved.path} has what was measured, and the same command goes on" if saved.path.exists() else ""
        raise KeyboardInterrupt(f"{INTERRUPTED}{there}") from None
    chosen = None if args.loss is None else frontier.cheapest(args.loss)
    found = frontier.to_dict() | {"chosen": chosen and {"name": chosen.name, "command": _command(chosen, args)}}
    is_drawn = _draw(frontier, args.loss, output_dir / PNG_FILE)
    saved.finish(found)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        picture = f"Picture and numbers: {output_dir / PNG_FILE}, " if is_drawn else "Numbers: "
        _print(frontier, chosen, args, f"{picture}{output_dir / JSON_FILE}.")
    return frontier


def _draw(frontier: Any, loss: float | None, path: Path) -> bool:
    """Write the picture, where matplotlib is there; say whether it is."""
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("no %s is drawn, for matplotlib is not there: `pip install matplotlib` before", path.name)
        return False
    from ..files import write_picture
    from ..inspection.frontier.drawing import draw_frontier

    write_picture(path, lambda: draw_frontier(frontier, loss), dpi=130)
    return True


def _read_texts(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the text to fit to and the text to measure on; or the recordings."""
    import sys

    from ..conversion.calibration.examples import read_audio_calibration, read_calibration
    from ..inspection.frontier.measure import split_text

    calibration: Any = read_calibration_arguments(args)  # there is one: it is a flag that must be given
    if calibration.audio is not None:
        everything = read_audio_calibration(args.held_out_audio_dir or args.calibration_audio_dir, size=sys.maxsize)
        size = HELD_OUT_AUDIO_SIZE if args.held_out_size is None else args.held_out_size
        return calibration, split_text(calibration, everything, size, args.seed)
    files = (args.calibration_file, args.calibration_target_file)
    if args.held_out_file is not None:
        files = (args.held_out_file, args.held_out_target_file)
    texts = {"columns": args.calibration_columns, "target_column": args.calibration_target_column}
    everything = read_calibration(files[0], target_file=files[1], size=sys.maxsize, **texts)
    size = HELD_OUT_SIZE if args.held_out_size is None else args.held_out_size
    return calibration, split_text(calibration, everything, size, args.seed)


def _call(args: argparse.Namespace, options: Any, calibration: Any, held_out: Any) -> dict[str, Any]:
    """Return all that a row depends on, by which a second call knows the rows of the first."""
    from ..inspection.frontier.measure import hash_examples

    names = ["model_name_or_path", "revision", "length", "source_length", "seed"]
    names += [name for name in CALIBRATION_OPTIONS if not name.endswith(("_file", "_dir"))]
    texts = {"calibration text": hash_examples(calibration), "held-out text": hash_examples(held_out)}
    return {name: getattr(args, name) for name in names} | texts | {"options": options, "version": package_version()}


def _print(frontier: Any, chosen: Any, args: argparse.Namespace, files: str) -> None:
    from ..inspection.frontier.held_out import MEASURES
    from ..inspection.tables import print_table, print_text

    size = f"{frontier.length:,} tokens" + (f", source {frontier.source_length:,}" if _has_source(frontier) else "")
    title = f"{frontier.checkpoint} ({frontier.architecture}), {size}; loss: {MEASURES[frontier.measure]}"
    header, rows = table_cells(frontier)
    print_table(title, header, rows)
    print_text(
        f"* on the frontier: no other is smaller and better. Loss on {frontier.held_out_texts} held-out "
        f"{'texts' if args.calibration_audio_dir is None else 'recordings'}; above: "
        "the source's subtracted, with its standard error."
    )
    print(files)
    if chosen is not None:
        print_text(f"The smallest that loses at most {args.loss:g} more: {chosen.name}.")
        print(f"  {_command(chosen, args)}")
    elif args.loss is not None:
        print_text(f"None loses at most {args.loss:g} more than the checkpoint.")


def table_cells(frontier: Any) -> tuple[list[str], list[list[str]]]:
    """Return a `Frontier` as text: the header, and the cells of each row."""
    cache = frontier.source.kv_cache_bytes_per_token
    header = ["variant"]
    if cache is not None:
        header += [f"cache bytes a token ({site})" for site in cache] + ["of the cache"]
    header += ["loss", "above", "attention error", "parameters", "ms a " + ("token" if cache else "batch")]
    rows = []
    for row in frontier.rows:
        cells = [row.name + (" *" if row.on_frontier else "")]
        if cache is not None:
            cells += [f"{row.kv_cache_bytes_per_token[site]:,}" for site in cache]
            cells.append(f"{row.kv_cache_bytes / frontier.source.kv_cache_bytes:.1%}")
        above = "" if not row.fields else f"{row.loss_above:+.4f} ± {row.loss_above_error:.4f}"
        error = "not defined" if row.attention_error is None else f"{row.attention_error:.1%}"
        cells += [f"{row.loss:.4f}", above, error if row.fields else ""]
        rows.append([*cells, f"{row.parameters:,}", f"{row.milliseconds:,.2f}"])
    return header, rows


def _has_source(frontier: Any) -> bool:
    return "cross" in (frontier.source.kv_cache_bytes_per_token or {})


def _command(row: Any, args: argparse.Namespace) -> str:
    """Return the command that makes what a row measured."""
    words = ["attn-variants", "convert", "--model_name_or_path", args.model_name_or_path]
    for name, value in row.fields.items():
        words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    if row.attention_error != 0:  # else nothing is fitted: the source computes the same so
        for name in CALIBRATION_OPTIONS:
            value = getattr(args, name)
            if value is not None:
                words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        words += ["--seed", str(args.seed)] if args.seed else []
    words += ["--revision", args.revision] if args.revision else []
    slug = re.sub(r"[^a-z0-9]+", "-", row.name.lower().replace("mha + ", "")).strip("-")
    return shlex.join([*words, "--output_dir", f"{Path(args.model_name_or_path).name}-{slug}"])
