"""Converts a multi-head checkpoint into an attention variant: `python scripts/convert_checkpoint.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("convert"))
