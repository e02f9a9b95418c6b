"""Convert a checkpoint to a variant. Usage: `python scripts/convert_checkpoint.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("convert"))
