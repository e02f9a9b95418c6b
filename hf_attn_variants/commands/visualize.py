"""The `attn-variants visualize` command, which `scripts/visualize_attention.py` also runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..command_parser import CommandParser, add_checkpoint_argument, get_program_name, parse_with_checkpoint
from ..files import check_output_dir

HTML_FILE = "attention_maps.html"
MAX_PLOTTED_TOKENS = 64  # with more tokens, the labels would not be readable

EXAMPLE = """\
example:
  %(prog)s google-t5/t5-small \\
      --output_dir t5-maps --target_text "Das Haus ist klein." \\
      --text "translate English to German: The house is small."
"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments.

    Raises:
        OSError: if the output folder cannot be created.
    """
    parser = CommandParser(
        prog=get_program_name("visualize_attention.py"),
        description=f"Plot the attention of each head for a text on a web page, {HTML_FILE}. The page shows the "
        "attention weights before and after the talking-heads projections, and the projections themselves.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "folder or Hub id of a variant or a Transformers model")
    parser.add_argument("--text", required=True, help="input text")
    parser.add_argument(
        "--target_text",
        help="for encoder-decoder models: input of the decoder (default: the greedy output of the model)",
    )
    parser.add_argument("--output_dir", required=True, help="new or empty output folder")
    parser.add_argument("--tokenizer_name", help="folder or Hub id of the tokenizer (default: the checkpoint)")
    parser.add_argument(
        "--max_length", type=int, default=32, help=f"maximum number of tokens, at most {MAX_PLOTTED_TOKENS}"
    )
    parser.add_argument("--layers", type=int, nargs="+", help="layers to plot, counted from 0 (default: all)")
    args = parse_with_checkpoint(parser, argv)
    if not 3 <= args.max_length <= MAX_PLOTTED_TOKENS:
        parser.error(f"--max_length must be between 3 and {MAX_PLOTTED_TOKENS}, got {args.max_length}.")
    check_output_dir(args.output_dir)
    return args


def main(args: argparse.Namespace) -> Path:
    """Write the page and return its path.

    Raises:
        ValueError: if the model is not supported, or a layer does not exist.
        OSError: if a file cannot be read or written.
    """
    from ..files import staged_folder
    from ..inspection.attention_maps import attention_maps, render_attention_page

    output_dir = check_output_dir(args.output_dir)
    maps = attention_maps(*_load(args), args.text, args.target_text, args.max_length)
    numbers = {attention.layer for attention in maps.attentions}
    if missing := sorted(set(args.layers or ()) - numbers):
        raise ValueError(f"--layers must be between 0 and {max(numbers)}, got {', '.join(map(str, missing))}.")
    shown_attentions = tuple(attention for attention in maps.attentions if attention.layer in (args.layers or numbers))
    with staged_folder(output_dir) as stage:
        page = render_attention_page(replace(maps, attentions=shown_attentions), Path(args.model_name_or_path).name)
        (stage / HTML_FILE).write_text(page, encoding="utf-8")
    if maps.is_cut:
        print(f"The text was truncated to {args.max_length} tokens (--max_length).")
    print(f"Plotted {len(shown_attentions)} attention modules. Open {output_dir / HTML_FILE} in a browser.")
    return output_dir / HTML_FILE


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    from transformers.utils import logging

    from ..registration import get_variant_config_class, get_variant_model_class
    from ..training.engine.models import check_max_length, load_config, load_model, load_tokenizer
    from ..training.engine.settings import ModelSettings

    logging.set_verbosity_error()  # modules that do not affect the attention, such as the pooler, may be missing
    settings = ModelSettings(model_name_or_path=args.model_name_or_path, tokenizer_name=args.tokenizer_name)
    config = load_config(settings)
    config_class = get_variant_config_class(config.model_type)
    model_class = get_variant_model_class((config.architectures or [config_class.auto_classes["AutoModel"]])[0])
    config = config_class.from_upstream(config)
    tokenizer = load_tokenizer(settings, config)
    check_max_length(args.max_length, config, tokenizer)
    return load_model(settings, config, model_class), tokenizer
