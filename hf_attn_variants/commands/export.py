"""The command `attn-variants export`, and `scripts/export_checkpoint.py`."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from ..command_line import CommandParser, add_checkpoint_argument, parse_with_checkpoint, program_name
from ..files import check_output_dir
from .convert import DTYPES

__all__ = ["main", "parse_args"]

# Options that one form has alone.
OWN_OPTIONS = {"dtype": "transformers", "opset": "onnx", "quantization": "ctranslate2"}
# As CTranslate2 names them, whose specifications import torch.
QUANTIZATIONS = (
    "float32",
    "float16",
    "bfloat16",
    "int16",
    "int8",
    "int8_float32",
    "int8_float16",
    "int8_bfloat16",
)
EXAMPLE = """\
examples (a folder that transformers loads without code of ours; graphs for
ONNX Runtime; a model for CTranslate2):
  %(prog)s t5-gqa2 --to transformers \\
      --output_dir t5-plain
  %(prog)s t5-gqa2 --to onnx --output_dir t5-onnx
  %(prog)s t5-gqa2 --to ctranslate2 \\
      --quantization int8 --output_dir t5-int8
"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`.

    Raises:
        OSError: where the output folder cannot be made; before imports that take seconds.
    """
    parser = CommandParser(
        prog=program_name("export_checkpoint.py"),
        description="Write a variant checkpoint for use without this package: as a plain checkpoint of Transformers, "
        "whose outputs are the same and which has all heads again; as ONNX graphs, whose files and caches keep fewer "
        "heads and latents; or for CTranslate2, whose file keeps fewer heads and whose cache has all heads.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    parser.add_argument("--to", required=True, choices=("transformers", "onnx", "ctranslate2"), help="the form")
    parser.add_argument("--output_dir", required=True, help="a new or empty folder")
    parser.add_argument("--dtype", choices=DTYPES, help="transformers: of the tensors (default: as stored)")
    parser.add_argument("--opset", type=int, help="onnx: 18, 20 or 23, which has an attention operator (default: 18)")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="ctranslate2: of the weights (default: float32)")
    parser.add_argument("--allow_pickle", action="store_true", help="read pytorch_model.bin, with weights_only=True")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--token", help="Hub token, for private and gated repositories (default: the stored login)")
    parser.add_argument("--disable_tqdm", action="store_true", help="no progress bars")
    args = parse_with_checkpoint(parser, argv)
    for name, form in OWN_OPTIONS.items():
        if getattr(args, name) is not None and args.to != form:
            parser.error(f"--{name} is of --to {form}, not of --to {args.to}")
    check_output_dir(args.output_dir)
    return args


def main(args: argparse.Namespace) -> Any:
    """Export, print a summary and return what was written.

    Raises:
        ValueError, OSError: as for `export_transformers`, `export_onnx` and `export_ctranslate2`.
    """
    from ..progress import no_progress_bars

    options = {name: value for name, value in vars(args).items() if name not in ("to", "disable_tqdm")}
    options = {name: value for name, value in options.items() if name not in OWN_OPTIONS or value is not None}
    export: Callable[..., Any]
    if args.to == "onnx":
        from ..export.onnx import export_onnx

        export = export_onnx
    elif args.to == "ctranslate2":
        from ..export.ctranslate2 import export_ctranslate2

        export = export_ctranslate2
    else:
        from ..export.plain import export_transformers

        export = export_transformers
    with no_progress_bars(args.disable_tqdm):
        written = export(**options)
    print(written.summary())
    return written
