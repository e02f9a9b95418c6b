"""Fine-tunes one checkpoint with multi-head attention and with every kind of talking heads, equal steps, two seeds.

The runs, their flags and the table are those of `finetuned_variants.py`; a run that is finished in the work folder is
kept, so that the comparison can be made in pieces.
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
    """Read the command line, or `argv`: the flags of `finetuned_variants.py` with this comparison's defaults."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    return finetuned_variants.parse_args([*DEFAULTS, "--output", OUTPUT, *arguments], VARIANTS)


def main(args: argparse.Namespace) -> None:
    """Run what is not there yet, write the JSON and print the table."""
    finetuned_variants.main(args, VARIANTS)


if __name__ == "__main__":
    main(parse_args())
