"""The command behind `scripts/convert_checkpoint.py`."""

import argparse
import random
from collections.abc import Sequence
from typing import Any

from ..cli import HelpFormatter, add_checkpoint_argument, parse_with_checkpoint, program_name
from ..text_files import read_columns, read_lines, read_pairs, text_columns
from .calibration import Calibration
from .convert import DTYPES, convert_checkpoint
from .methods import METHODS
from .report import ConversionReport

__all__ = ["main", "parse_args"]

EXAMPLE = """\
examples (a BERT calibrated on lines of text; one that was fine-tuned to answer questions, on its pairs):
  %(prog)s --model_name_or_path google-bert/bert-base-uncased \\
      --num_key_value_heads 4 --calibration_file wikipedia.txt --output_dir bert-base-gqa4
  %(prog)s --model_name_or_path runs/squad --num_key_value_heads 4 --max_length 256 \\
      --calibration_file pairs.jsonl --calibration_columns question context --output_dir squad-gqa4
"""

# What a model with such a head is for; any other is fine-tuned, as most are, on sentences.
NEXT_COMMANDS = {"ForConditionalGeneration": "seq2seq", "ForQuestionAnswering": "squad"}
CALIBRATION_SIZE = 2048
CALIBRATION_OPTIONS = (
    "calibration_file",
    "calibration_columns",
    "calibration_target_file",
    "calibration_target_column",
    "calibration_size",
    "max_length",
    "fit_steps",
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(
        prog=program_name("convert_checkpoint.py"),
        description="Convert a multi-head checkpoint into a grouped-query, multi-query or talking-heads one, in "
        "little memory. A grouped checkpoint can be grouped further, or expanded back without loss.",
        epilog=EXAMPLE,
        formatter_class=HelpFormatter,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    parser.add_argument("--output_dir", required=True, help="a new or empty folder")
    parser.add_argument("--num_key_value_heads", type=int, help="key/value heads afterwards; 1 = multi-query")
    parser.add_argument("--encoder_num_key_value_heads", type=int, help="T5: the same for the encoder")
    parser.add_argument(
        "--method",
        choices=sorted(METHODS),
        help="how heads are merged (default: calibrated with --calibration_file, else mean)",
    )
    calibration = parser.add_argument_group("calibration", "text for the methods that fit new heads to it")
    calibration.add_argument(
        "--calibration_file",
        help="examples of the kind of text the model is for: one a line, or a table (.csv, .tsv, .json, .jsonl); "
        ".gz too",
    )
    calibration.add_argument(
        "--calibration_columns",
        nargs="+",
        metavar="COLUMN",
        help="the table's column of texts, or two columns of texts that the model reads as pairs (default: text)",
    )
    calibration.add_argument(
        "--calibration_target_file", help="T5: the target of each line (default: the model's own greedy outputs)"
    )
    calibration.add_argument("--calibration_target_column", help="T5: the table's column of targets")
    calibration.add_argument(
        "--calibration_size",
        type=int,
        help=f"examples drawn from the file by --seed (default: {CALIBRATION_SIZE})",
    )
    calibration.add_argument(
        "--max_length", type=int, help=f"tokens at which an example is cut (default: {Calibration.max_length})"
    )
    calibration.add_argument(
        "--fit_steps",
        type=int,
        help="Adam steps for each attention after the closed form; 0 = the closed form alone (default: "
        f"{Calibration.fit_steps})",
    )
    parser.add_argument(
        "--talking_heads",
        choices=["logits", "weights", "both"],
        help="add projections across heads to a plain source",
    )
    parser.add_argument("--num_softmax_heads", type=int, help="talking heads: heads of the softmax")
    parser.add_argument("--num_value_heads", type=int, help="talking heads: heads of the values")
    parser.add_argument(
        "--talking_heads_dynamic",
        nargs="+",
        choices=["x2l", "m2l", "x2w", "m2w"],
        help="talking heads: input-dependent terms to add",
    )
    parser.add_argument(
        "--talking_heads_init",
        choices=["identity", "random"],
        help="what new projections hold (default: identity, which changes no output)",
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of the floating-point tensors (default: as stored)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--allow_pickle", action="store_true", help="read pytorch_model.bin, with weights_only=True")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--token", help="Hub token, for private and gated repositories (default: the stored login)")
    return parse_with_checkpoint(parser, argv)


def main(args: argparse.Namespace) -> ConversionReport:
    """Convert, and print a summary and what to do next.

    Raises:
        ValueError, OSError: as for `convert_checkpoint`.
    """
    options = vars(args).copy()
    for name in CALIBRATION_OPTIONS:
        options.pop(name)
    report = convert_checkpoint(calibration=_calibration(args), **options)
    print(report.summary())
    task = next((task for head, task in NEXT_COMMANDS.items() if report.architecture.endswith(head)), "glue")
    print(f'Next: attn-variants {task} --model_name_or_path "{report.output_dir}" ...')
    return report


def _calibration(args: argparse.Namespace) -> Calibration | None:
    """Read the calibration text and draw its examples."""
    if args.calibration_file is None:
        for name in CALIBRATION_OPTIONS:
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} needs --calibration_file.")
        return None
    size = CALIBRATION_SIZE if args.calibration_size is None else args.calibration_size
    if size < 1:
        raise ValueError(f"--calibration_size must be at least 1; got {size}.")
    texts, targets = _read_examples(args)
    if len(texts) > size:
        chosen = sorted(random.Random(args.seed).sample(range(len(texts)), size))
        texts, targets = [texts[i] for i in chosen], targets and [targets[i] for i in chosen]
    settings = {name: getattr(args, name) for name in ("max_length", "fit_steps") if getattr(args, name) is not None}
    return Calibration(texts, targets, **settings)


def _read_examples(args: argparse.Namespace) -> tuple[list[Any], list[str] | None]:
    """Read texts, or pairs of them, and the targets, if any."""
    path, target = args.calibration_file, args.calibration_target_column
    columns = text_columns([path], args.calibration_columns, "--calibration_columns")
    if columns:
        if args.calibration_target_file is not None:
            raise ValueError(
                "--calibration_target_file is for lines of text; a table takes --calibration_target_column."
            )
        flags = "--calibration_columns" + (" and --calibration_target_column" if target else "")
        rows = read_columns([path], [*columns, *([target] if target else [])], flags)
        texts = [row[: len(columns)] if len(columns) == 2 else row[0] for row in rows]
        return texts, [row[-1] for row in rows] if target else None
    if target is not None:
        raise ValueError(f"--calibration_target_column is for a table; {path} is none.")
    if args.calibration_target_file is None:
        return read_lines([path]), None
    pairs = read_pairs(path, args.calibration_target_file)
    return [source for source, _ in pairs], [target for _, target in pairs]
