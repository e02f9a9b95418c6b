"""Fine-tune and evaluate a checkpoint on SQuAD. Usage: `python scripts/run_squad.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("squad"))
