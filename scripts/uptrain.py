"""Continues training a converted checkpoint to restore its quality: `python scripts/uptrain.py --help`."""

import logging
import sys

from hf_attn_variants.commands.uptrain import main, parse_args
from hf_attn_variants.errors import run_script

if __name__ == "__main__":
    args = parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("hf_attn_variants").setLevel(logging.INFO)
    sys.exit(run_script(lambda: main(args)))
