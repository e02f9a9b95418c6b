"""Pretrains a BERT or ALBERT as a masked language model: `python scripts/pretrain_mlm.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("pretrain"))
