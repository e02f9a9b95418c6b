"""The `attn-variants export` command, which `scripts/export_checkpoint.py` also runs."""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from ..command_parser import (
    CommandParser,
    Flag,
    add_checkpoint_argument,
    add_flags,
    get_program_name,
    parse_with_checkpoint,
)
from ..files import check_output_dir
from .convert import DTYPE_NAMES

# The module in `export` and its function for each format.
EXPORTERS = {
    "transformers": ("plain", "export_transformers"),
    "onnx": ("onnx", "export_onnx"),
    "ctranslate2": ("ctranslate2", "export_ctranslate2"),
    "custom_generate": ("custom_generate", "export_custom_generate"),
}
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
CTRANSLATE2_QUANTIZATIONS = tuple(
    "float32 float16 bfloat16 int16 int8 int8_float32 int8_float16 int8_bfloat16".split()
)
FLAGS = {
    Flag("dtype", DTYPE_NAMES): "for transformers: data type of the tensors (default: as in the checkpoint)",
    Flag("opset", int): "for onnx: opset version, which is 18, 20, or 23 with an attention operator (default: 18)",
    Flag("pooling", ("mean", "cls")): "for onnx: add the output sentence_embedding to the graph of an encoder",
}
NORMALIZE_HELP = "for onnx: scale the embeddings to unit length"
INT8_FLAGS = {
    Flag("quantization", CTRANSLATE2_QUANTIZATIONS): "for ctranslate2: data type of the weights (default: float32); "
    "for onnx: int8 to write quantized graphs next to the float32 graphs",
    Flag("calibration_file"): "for onnx and an encoder: text file with one text per line. The int8 graph is then "
    "quantized statically for OpenVINO instead of dynamically for ONNX Runtime.",
    Flag("validation_file"): "for onnx: text file with texts on which int8 and float32 graphs are compared (default: "
    "a tenth of the calibration file, or random tokens)",
}
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
        prog=get_program_name("export_checkpoint.py"),
        description="Export a variant for use without this package. `--to transformers` writes a plain checkpoint "
        "with the same outputs and all key/value heads. `--to onnx` writes ONNX graphs, whose weights and cache keep "
        "the reduced number of heads and the latents. `--to ctranslate2` writes a CTranslate2 model with fewer heads "
        "in the weights and all heads in the cache. `--to custom_generate` writes `share_memory` as a generation "
        "method for models of Transformers, without a checkpoint.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    parser.add_argument("--to", required=True, choices=EXPORTERS, help="export format")
    parser.add_argument("--output_dir", required=True, help="new or empty output folder")
    add_flags(parser, FLAGS)
    parser.add_argument("--normalize", action="store_true", default=None, help=NORMALIZE_HELP)
    add_flags(parser, INT8_FLAGS, "allow_pickle", "revision", "token", "disable_tqdm")
    args = parse_with_checkpoint(parser, argv, required=False)
    if args.to != "custom_generate" and args.model_name_or_path is None:
        parser.error("CHECKPOINT is required.")
    if args.to == "custom_generate" and args.model_name_or_path is not None:
        parser.error("CHECKPOINT is not supported with --to custom_generate. Remove it.")
    for name, formats in FORMAT_OPTIONS.items():
        if getattr(args, name) is not None and args.to not in formats:
            parser.error(f"--{name} is only supported with --to {' or '.join(formats)}. Remove --{name}.")
    check_output_dir(args.output_dir)
    return args


def main(args: argparse.Namespace) -> Any:
    """Export the checkpoint, print a summary and return an object that describes the exported model.

    Raises:
        ValueError: if the model cannot be exported (see `export_transformers`, `export_onnx` and
            `export_ctranslate2`).
        OSError: if a file cannot be read or written.
    """
    from ..progress import disable_progress_bars

    options = {name: value for name, value in vars(args).items() if name not in ("to", "disable_tqdm")}
    options = {name: value for name, value in options.items() if name not in FORMAT_OPTIONS or value is not None}
    if args.to == "custom_generate":
        options = {"output_dir": args.output_dir}
    module, name = EXPORTERS[args.to]
    export = getattr(importlib.import_module(f"..export.{module}", __package__), name)
    with disable_progress_bars(args.disable_tqdm):
        result = export(**options)
    print(result if isinstance(result, str) else result.summary())
    return result
