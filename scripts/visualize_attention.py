"""Draws the attention maps and head projections of a checkpoint: `python scripts/visualize_attention.py --help`."""

import sys

from hf_attn_variants.commands.visualize import main, parse_args
from hf_attn_variants.errors import run_script

if __name__ == "__main__":
    args = parse_args()
    sys.exit(run_script(lambda: main(args)))
