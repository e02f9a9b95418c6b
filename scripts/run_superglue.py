"""Fine-tunes and evaluates on a SuperGLUE task: `python scripts/run_superglue.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("superglue"))
