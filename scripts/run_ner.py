"""Fine-tune and evaluate a token classifier. Usage: `python scripts/run_ner.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("ner"))
