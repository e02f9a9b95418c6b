"""Pretrain an encoder as a language model. Usage: `python scripts/pretrain_mlm.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("pretrain"))
