"""Pushes a checkpoint folder to the Hub, with its code and model card: `python scripts/push_to_hub.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("push"))
