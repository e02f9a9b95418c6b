"""The `attn-variants export` command, which `scripts/export_checkpoint.py` also runs."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from ..command_line import CommandParser, add_checkpoint_argument, parse_with_checkpoint, program_name
from ..files import check_output_dir
from .convert import DTYPE_NAMES

# Options that are not supported for all export formats.
FORMAT_OPTIONS = {
    "dtype": ("transformers",),
    "opset": ("onnx",),
    "pooling": ("onnx",),
    "normalize": ("onnx",),
    "calibration_file": ("onnx",),
    "validation_file": ("onnx",),
    "quantization": ("ctranslate2", "onnx"),
}
# The names used by CTranslate2. They are repeated here because importing its specifications would import torch.
CTRANSLATE2_QUANTIZATIONS = (
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
examples (a folder that Transformers loads without custom code, graphs for ONNX
Runtime, int8 graphs of a sentence encoder, and a model for CTranslate2):
  %(prog)s t5-gqa2 --to transformers \\
      --output_dir t5-plain
  %(prog)s t5-gqa2 --to onnx --output_dir t5-onnx
  %(prog)s sentence-transformers/all-MiniLM-L6-v2 \\
      --to onnx --pooling mean --normalize \\
      --quantization int8 --output_dir minilm-onnx
  %(prog)s t5-gqa2 --to ctranslate2 \\
      --quantization int8 --output_dir t5-int8
  %(prog)s --to custom_generate \\
      --output_dir share-memory
"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments.

    Raises:
        OSError: if the output folder cannot be created. This is checked before slow imports.
    """
    parser = CommandParser(
        prog=program_name("export_checkpoint.py"),
        description="Export a variant for use without this package. `--to transformers` writes a plain checkpoint "
        "with the same outputs and all key/value heads. `--to onnx` writes ONNX graphs, whose weights and cache keep "
        "the reduced number of heads and the latents. `--to ctranslate2` writes a CTranslate2 model with fewer heads "
        "in the weights and all heads in the cache. `--to custom_generate` writes `share_memory` as a generation "
        "method for models of Transformers, without a checkpoint.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    parser.add_argument(
        "--to", required=True, choices=("transformers", "onnx", "ctranslate2", "custom_generate"), help="export format"
    )
    parser.add_argument("--output_dir", required=True, help="new or empty output folder")
    parser.add_argument(
        "--dtype",
        choices=DTYPE_NAMES,
        help="for transformers: data type of the tensors (default: as in the checkpoint)",
    )
    _add_onnx_options(parser)
    parser.add_argument(
        "--allow_pickle", action="store_true", help="allow reading pytorch_model.bin (with weights_only=True)"
    )
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--token", help="Hub token, for private and gated repositories (default: the stored login)")
    parser.add_argument("--disable_tqdm", action="store_true", help="disable the progress bars")
    args = parse_with_checkpoint(parser, argv, required=False)
    if (args.to == "custom_generate") != (args.model_name_or_path is None):
        parser.error(
            "CHECKPOINT is not supported with --to custom_generate. Remove it."
            if args.to == "custom_generate"
            else "CHECKPOINT is required."
        )
    for name, formats in FORMAT_OPTIONS.items():
        if getattr(args, name) is not None and args.to not in formats:
            parser.error(f"--{name} is only supported with --to {' or '.join(formats)}. Remove --{name}.")
    if args.to == "onnx" and args.quantization not in (None, "int8"):
        parser.error(f"--quantization must be int8 with --to onnx, got {args.quantization}.")
    if args.to == "onnx" and args.quantization is None and (args.calibration_file or args.validation_file):
        parser.error("--calibration_file and --validation_file require --quantization int8.")
    if args.normalize and args.pooling is None:
        parser.error("--normalize requires --pooling.")
    check_output_dir(args.output_dir)
    return args


def _add_onnx_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ONNX graphs, and `--quantization`, which CTranslate2 has too."""
    parser.add_argument(
        "--opset",
        type=int,
        help="for onnx: opset version, which is 18, 20, or 23 with an attention operator (default: 18)",
    )
    parser.add_argument(
        "--pooling",
        choices=("mean", "cls"),
        help="for onnx: add the output sentence_embedding to the graph of an encoder",
    )
    parser.add_argument(
        "--normalize", action="store_true", default=None, help="for onnx: scale the embeddings to unit length"
    )
    parser.add_argument(
        "--quantization",
        choices=CTRANSLATE2_QUANTIZATIONS,
        help="for ctranslate2: data type of the weights (default: float32); for onnx: int8 to write quantized graphs "
        "next to the float32 graphs",
    )
    parser.add_argument(
        "--calibration_file",
        help="for onnx and an encoder: text file with one text per line. The int8 graph is then quantized statically "
        "for OpenVINO instead of dynamically for ONNX Runtime.",
    )
    parser.add_argument(
        "--validation_file",
        help="for onnx: text file with texts on which int8 and float32 graphs are compared (default: a tenth of the "
        "calibration file, or random tokens)",
    )


def main(args: argparse.Namespace) -> Any:
    """Export the checkpoint, print a summary and return an object that describes the exported model.

    Raises:
        ValueError: if the model cannot be exported (see `export_transformers`, `export_onnx` and
            `export_ctranslate2`).
        OSError: if a file cannot be read or written.
    """
    from ..progress import disable_progress_bars

    if args.to == "custom_generate":
        from ..export.custom_generate import export_custom_generate

        written = export_custom_generate(args.output_dir)
        print(written)
        return written
    options = {name: value for name, value in vars(args).items() if name not in ("to", "disable_tqdm")}
    for name in FORMAT_OPTIONS:
        if options[name] is None:
            del options[name]
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
    with disable_progress_bars(args.disable_tqdm):
        result = export(**options)
    print(result.summary())
    return result
