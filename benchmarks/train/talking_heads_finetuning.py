"""Fine-tune one checkpoint with multi-head attention and with every kind of talking heads.

All variants are trained for the same number of steps, with two seeds. The runs, the flags and the table are those of
`finetuned_variants.py`. Finished runs in the work folder are reused, so that an interrupted comparison can continue.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.train import finetuned_variants
from benchmarks.train.compared_variants import Variant

PLACES = ("both", "logits", "weights")
VARIANTS = {
    "MHA": Variant(),
    **{
        f"{place}, {init}": Variant({"talking_heads": place, "talking_heads_init": init})
        for init in ("identity", "random")
        for place in PLACES
    },
    "both, identity, dynamic": Variant(
        {"talking_heads": "both", "talking_heads_dynamic": ["x2l", "m2l", "x2w", "m2w"]}
    ),
}
DEFAULTS = ["--tasks", "sst2", "cola", "stsb", "--seeds", "42", "43"]
OUTPUT = str(finetuned_variants.ROOT / "benchmarks/train/results/talking_heads_finetuning.json")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None, like `finetuned_variants.py` but with other defaults."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    return finetuned_variants.parse_args([*DEFAULTS, "--output", OUTPUT, *arguments], VARIANTS)


def main(args: argparse.Namespace) -> None:
    """Execute the missing runs, write the JSON file and print the table."""
    finetuned_variants.main(args, VARIANTS)


if __name__ == "__main__":
    main(parse_args())
