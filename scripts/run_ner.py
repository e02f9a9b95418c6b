"""Fine-tunes and evaluates a token classifier: `python scripts/run_ner.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("ner"))
