"""The command `attn-variants export`, which `scripts/export_checkpoint.py` is too."""

import argparse
from collections.abc import Sequence
from typing import Any

from ..command_line import HelpFormatter, add_checkpoint_argument, parse_with_checkpoint, program_name
from .convert import DTYPES

__all__ = ["main", "parse_args"]

EXAMPLE = """\
examples (a folder that transformers loads without code of ours):
  %(prog)s t5-gqa2 --to transformers --output_dir t5-plain
"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(
        prog=program_name("export_checkpoint.py"),
        description="Write a variant checkpoint for those who run no code of ours: as a plain one of transformers, "
        "grouped heads repeated and latents multiplied in, with the same outputs.",
        epilog=EXAMPLE,
        formatter_class=HelpFormatter,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    parser.add_argument("--to", required=True, choices=("transformers",), help="the form")
    parser.add_argument("--output_dir", required=True, help="a new or empty folder")
    parser.add_argument("--dtype", choices=DTYPES, help="of the floating-point tensors (default: as stored)")
    parser.add_argument("--allow_pickle", action="store_true", help="read pytorch_model.bin, with weights_only=True")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--token", help="Hub token, for private and gated repositories (default: the stored login)")
    parser.add_argument("--disable_tqdm", action="store_true", help="no progress bars")
    return parse_with_checkpoint(parser, argv)


def main(args: argparse.Namespace) -> Any:
    """Export, print a summary and return what was written.

    Raises:
        ValueError, OSError: as for `export_transformers`.
    """
    from ..export.plain import export_transformers
    from ..progress import no_progress_bars

    options = vars(args).copy()
    for name in ("to", "disable_tqdm"):
        options.pop(name)
    with no_progress_bars(args.disable_tqdm):
        written = export_transformers(**options)
    print(written.summary())
    return written
