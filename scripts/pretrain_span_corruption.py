"""Pretrain a T5 model with span corruption. Usage: `python scripts/pretrain_span_corruption.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("pretrain-t5"))
