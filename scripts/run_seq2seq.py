"""Trains and evaluates an encoder-decoder on text to text: `python scripts/run_seq2seq.py --help`."""

import logging
import sys

from hf_attn_variants.errors import run_script
from hf_attn_variants.training.seq2seq.task import main, parse_args

if __name__ == "__main__":
    args = parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("hf_attn_variants").setLevel(logging.INFO)
    sys.exit(run_script(lambda: main(args)))
