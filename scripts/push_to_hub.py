"""Push a checkpoint, its code and its model card to the Hub. Usage: `python scripts/push_to_hub.py --help`."""

import sys

from attn_variants import run

if __name__ == "__main__":
    sys.exit(run("push"))
