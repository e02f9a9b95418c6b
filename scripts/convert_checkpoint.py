"""Converts a multi-head checkpoint into an attention variant: `python scripts/convert_checkpoint.py --help`."""

import sys

from hf_attn_variants.commands.convert import main, parse_args
from hf_attn_variants.errors import run_script

if __name__ == "__main__":
    args = parse_args()
    sys.exit(run_script(lambda: main(args)))
