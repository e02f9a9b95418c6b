"""Fine-tune and evaluate a classifier on your own tables. Usage: `python scripts/run_classification.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("classify"))
