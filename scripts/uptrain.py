"""Train a converted checkpoint to restore its quality. Usage: `python scripts/uptrain.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("uptrain"))
