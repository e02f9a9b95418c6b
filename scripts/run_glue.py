"""Fine-tune and evaluate a checkpoint on a GLUE task. Usage: `python scripts/run_glue.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("glue"))
