"""Fine-tune and evaluate an encoder-decoder on text pairs. Usage: `python scripts/run_seq2seq.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("seq2seq"))
