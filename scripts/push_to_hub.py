"""Pushes a checkpoint folder to the Hub, with its code and model card: `python scripts/push_to_hub.py --help`."""

import sys

from hf_attn_variants.commands.push import main, parse_args
from hf_attn_variants.errors import run_script

if __name__ == "__main__":
    args = parse_args()
    sys.exit(run_script(lambda: main(args)))
