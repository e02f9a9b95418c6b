"""Draws the attention maps and head projections of a checkpoint: `python scripts/visualize_attention.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("visualize"))
