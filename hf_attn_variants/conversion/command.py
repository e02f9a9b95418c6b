"""The command behind `scripts/convert_checkpoint.py`."""

import argparse
import random
from collections.abc import Sequence

from ..cli import HelpFormatter, program_name
from .calibration import Calibration, read_lines
from .convert import DTYPES, convert_checkpoint
from .methods import METHODS
from .report import ConversionReport

__all__ = ["main", "parse_args"]

EXAMPLE = """\
example:
  %(prog)s --model_name_or_path google-bert/bert-base-uncased \\
      --num_key_value_heads 4 --calibration_file wikipedia.txt --output_dir bert-base-gqa4
"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(
        prog=program_name("convert_checkpoint.py"),
        description="Convert a multi-head checkpoint into a grouped-query, multi-query or talking-heads one, in "
        "little memory. A grouped checkpoint can be grouped further, or expanded back without loss.",
        epilog=EXAMPLE,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--model_name_or_path", required=True, help="checkpoint folder or Hub id")
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
        "--calibration_file", help="one example a line, of the kind of text the model is for; .gz too"
    )
    calibration.add_argument(
        "--calibration_target_file", help="T5: the target of each line (default: the model's own greedy outputs)"
    )
    calibration.add_argument(
        "--calibration_size", type=int, default=2048, help="lines drawn from the file by --seed (default: %(default)s)"
    )
    calibration.add_argument(
        "--max_length", type=int, default=64, help="tokens at which a line is cut (default: %(default)s)"
    )
    calibration.add_argument(
        "--fit_steps",
        type=int,
        default=Calibration.fit_steps,
        help="Adam steps for each attention after the closed form; 0 = the closed form alone (default: %(default)s)",
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
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> ConversionReport:
    """Convert, and print a summary and what to do next.

    Raises:
        ValueError, OSError: as for `convert_checkpoint`.
    """
    options = vars(args).copy()
    names = ("calibration_file", "calibration_target_file", "calibration_size", "max_length", "fit_steps")
    text = {name: options.pop(name) for name in names}
    report = convert_checkpoint(calibration=_calibration(seed=args.seed, **text), **options)
    print(report.summary())
    task = "seq2seq" if report.architecture.endswith("ForConditionalGeneration") else "glue"
    print(f'Next: attn-variants {task} --model_name_or_path "{report.output_dir}" ...')
    return report


def _calibration(
    calibration_file: str | None,
    calibration_target_file: str | None,
    calibration_size: int,
    max_length: int,
    fit_steps: int,
    seed: int,
) -> Calibration | None:
    """Read the calibration text and draw its lines.

    Raises:
        ValueError: for targets without sources, or another number of them.
    """
    if calibration_file is None:
        if calibration_target_file is not None:
            raise ValueError("--calibration_target_file needs --calibration_file, the sources of its lines.")
        return None
    if calibration_size < 1:
        raise ValueError(f"--calibration_size must be at least 1; got {calibration_size}.")
    texts = read_lines(calibration_file)
    targets = None if calibration_target_file is None else read_lines(calibration_target_file)
    if targets is not None and len(targets) != len(texts):
        raise ValueError(
            f"{calibration_target_file} has {len(targets)} lines and {calibration_file} {len(texts)}: line i of one "
            "must be the target of line i of the other."
        )
    usable = [i for i, text in enumerate(texts) if text and (targets is None or targets[i])]
    if len(usable) > calibration_size:
        usable = sorted(random.Random(seed).sample(usable, calibration_size))
    return Calibration(
        [texts[i] for i in usable],
        None if targets is None else [targets[i] for i in usable],
        max_length=max_length,
        fit_steps=fit_steps,
    )
