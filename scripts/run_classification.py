"""Fine-tunes and evaluates a classifier on your own tables: `python scripts/run_classification.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("classify"))
