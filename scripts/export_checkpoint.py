"""Export a variant for use without this package. Usage: `python scripts/export_checkpoint.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("export"))
