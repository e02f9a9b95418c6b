"""The command `attn-variants visualize`, and `scripts/visualize_attention.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..command_line import CommandParser, add_checkpoint_argument, parse_with_checkpoint, program_name
from ..files import check_output_dir

if TYPE_CHECKING:
    from ..inspection.attention_maps.maps import TextMaps

__all__ = ["HTML_FILE", "main", "parse_args"]

HTML_FILE = "attention_maps.html"
# The labels of more tokens could not be read in a picture.
MOST_TOKENS = 64

EXAMPLE = """\
examples:
  %(prog)s bert-talking-sst2 --output_dir maps \\
      --text "The plot is thin, but the actors carry it."
  %(prog)s google-t5/t5-small \\
      --output_dir t5-maps --target_text "Das Haus ist klein." \\
      --text "translate English to German: The house is small."
"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`.

    Raises:
        OSError: where the output folder cannot be made; before imports that take seconds.
    """
    parser = CommandParser(
        prog=program_name("visualize_attention.py"),
        description="Draw what every head of a checkpoint attends to in one text, before and after the talking-heads "
        f"projections, and the projections themselves: one page, {HTML_FILE}.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "folder or Hub id, a variant or upstream's own")
    parser.add_argument("--text", required=True, help="what the model reads")
    parser.add_argument(
        "--target_text", help="encoder-decoders: what the decoder reads (default: its own greedy output)"
    )
    parser.add_argument("--output_dir", required=True, help="a new or empty folder")
    parser.add_argument("--tokenizer_name", help="folder or Hub id of the tokenizer (default: the checkpoint's)")
    parser.add_argument(
        "--max_length", type=int, default=32, help=f"tokens shown, at most {MOST_TOKENS} (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, nargs="+", help="only these, counted from 0 (default: all)")
    args = parse_with_checkpoint(parser, argv)
    if not 3 <= args.max_length <= MOST_TOKENS:
        parser.error(f"--max_length must be between 3 and {MOST_TOKENS}, got {args.max_length}")
    check_output_dir(args.output_dir)
    return args


def main(args: argparse.Namespace) -> Path:
    """Draw everything, and say where it is.

    Returns:
        The HTML file.

    Raises:
        ValueError, OSError: for a checkpoint or text that cannot be shown, or a folder that cannot be written.
    """
    from ..files import staged_folder
    from ..inspection.attention_maps.maps import attention_maps
    from ..inspection.attention_maps.page import attention_page

    output_dir = check_output_dir(args.output_dir)
    model, tokenizer = _load(args)
    maps = attention_maps(model, tokenizer, args.text, args.target_text, args.max_length)
    maps = _of_layers(maps, args.layers)
    name = Path(args.model_name_or_path).name
    with staged_folder(output_dir) as stage:
        (stage / HTML_FILE).write_text(attention_page(maps, name), encoding="utf-8")
    if maps.is_cut:
        print(f"The text was cut at {args.max_length} tokens (--max_length).")
    print(f"{len(maps.attentions)} attentions drawn: open {output_dir / HTML_FILE} in a browser.")
    return output_dir / HTML_FILE


def _of_layers(maps: TextMaps, layers: Sequence[int] | None) -> TextMaps:
    from dataclasses import replace

    if layers is None:
        return maps
    found = tuple(attention for attention in maps.attentions if attention.layer in layers)
    missing = sorted(set(layers) - {attention.layer for attention in maps.attentions})
    if missing:
        last = max(attention.layer for attention in maps.attentions)
        raise ValueError(f"--layers: the model has layers 0 to {last}, got {', '.join(map(str, missing))}.")
    return replace(maps, attentions=found)


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    from transformers.utils import logging

    from ..registration import variant_config_class, variant_model_class
    from ..training.engine.models import load_config, load_model
    from ..training.engine.settings import ModelSettings
    from ..training.engine.tokenizers import check_max_length, load_tokenizer

    # Parts that attention does not need (a pooler, for one) may be missing.
    logging.set_verbosity_error()
    settings = ModelSettings(
        model_name_or_path=args.model_name_or_path, tokenizer_name=args.tokenizer_name, attn_implementation="eager"
    )
    config = load_config(settings)
    config_class = variant_config_class(config.model_type)
    architectures = config.architectures or [config_class.auto_classes["AutoModel"]]
    model_class = variant_model_class(architectures[0])
    config = config_class.from_upstream(config)
    tokenizer = load_tokenizer(settings, config)
    check_max_length(args.max_length, config, tokenizer)
    return load_model(settings, config, model_class), tokenizer
