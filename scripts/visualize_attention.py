"""Plot the attention of a checkpoint. Usage: `python scripts/visualize_attention.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("visualize"))
