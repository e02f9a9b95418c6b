"""The command behind `scripts/convert_checkpoint.py`."""

import argparse
from collections.abc import Sequence

from .convert import DTYPES, convert_checkpoint
from .methods import METHODS
from .report import ConversionReport

__all__ = ["main", "parse_args"]

EXAMPLE = """\
example:
  python scripts/convert_checkpoint.py --model_name_or_path google-bert/bert-base-uncased \\
      --num_key_value_heads 4 --method mean --output_dir bert-base-gqa4
  python scripts/run_glue.py --model_name_or_path bert-base-gqa4 --task_name sst2 --output_dir bert-base-gqa4-sst2
"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(
        description="Convert a multi-head checkpoint into a grouped-query, multi-query or talking-heads one, in "
        "little memory. A grouped checkpoint can be grouped further, or expanded back without loss.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model_name_or_path", required=True, help="checkpoint folder or Hub id")
    parser.add_argument("--output_dir", required=True, help="a new or empty folder")
    parser.add_argument("--num_key_value_heads", type=int, help="key/value heads afterwards; 1 = multi-query")
    parser.add_argument("--encoder_num_key_value_heads", type=int, help="T5: the same for the encoder")
    parser.add_argument(
        "--method", default="mean", choices=sorted(METHODS), help="how heads are merged (default: %(default)s)"
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
    report = convert_checkpoint(**vars(args))
    print(report.summary())
    print(f'Next: fine-tune it with scripts/run_glue.py --model_name_or_path "{report.output_dir}" ...')
    return report
