"""Continues training a converted checkpoint to restore its quality: `python scripts/uptrain.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("uptrain"))
