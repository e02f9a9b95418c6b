"""Continues training a converted checkpoint to restore its quality: `python scripts/uptrain.py --help`."""

import logging
import sys

from hf_attn_variants.errors import run_script
from hf_attn_variants.training.uptraining.task import main, parse_args

if __name__ == "__main__":
    args = parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("hf_attn_variants").setLevel(logging.INFO)
    sys.exit(run_script(lambda: main(args)))
