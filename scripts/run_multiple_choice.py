"""Fine-tunes and evaluates an encoder on questions with choices: `python scripts/run_multiple_choice.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("multiple-choice"))
