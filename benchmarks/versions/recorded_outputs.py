"""Record the outputs of the package, and compare them bit by bit with an earlier record.

The comparison checks that a refactoring does not change any output. The parts are:

- `models`: outputs, gradients, attentions and generated tokens of every architecture with every mechanism.
- `shared_memory`: generation after `share_memory`, with each form of its cache.
- `quantized`: `quantize` with each backend for int8 products, and in bfloat16.
- `conversions`: the folders that `convert` writes, for each method.
- `trainings`: two steps of each training command, a resume from the first step, and the card of the result.
- `exports`: checkpoints that do not need this package, CTranslate2 models, and outputs of ONNX graphs.
- `cards`: generated model cards for many histories of checkpoints. `--cards_dir` also writes their texts.
- `tables` and `helps`: the output of `inspect`, and the help texts of all commands.

The recording uses console commands and public names, so that a record stays valid if modules change. The models, data
and tables come from the `tests` folder of this checkout. If they have changed, run this file from a checkout of the
commit that made the record, and pass the checkout with the new code as `--tree`.

Digests depend on the order in which a processor adds numbers. Two runs have equal digests on the same type of
processor, with the same versions of torch and Transformers, and with one thread. The record contains these settings.

Example:
    python -m benchmarks.versions.recorded_outputs --output build/after.json \\
        --compare benchmarks/versions/results/recorded_outputs.json
"""

import argparse
import importlib
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The module in `recorded` and the function of each part.
PARTS = {
    "models": ("inference", "models"),
    "shared_memory": ("inference", "shared_memory"),
    "quantized": ("inference", "quantized"),
    "conversions": ("commands", "conversions"),
    "trainings": ("commands", "trainings"),
    "exports": ("commands", "exports"),
    "cards": ("cards", "cards"),
    "tables": ("commands", "tables"),
    "helps": ("commands", "helps"),
}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file with the record")
    parser.add_argument("--compare", type=Path, help="an earlier record; the exit status is 1 if an item differs")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose package is recorded")
    parser.add_argument("--cards_dir", type=Path, help="a folder for the texts of the cards")
    return parser.parse_args()


def prepare_process(tree: Path) -> dict[str, Any]:
    """Import the package of a checkout, offline and with one thread, and return the settings that affect digests."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100"}
    sys.path.insert(0, str(tree.resolve()))
    sys.path.append(str(ROOT / "tests"))
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    package = Path(importlib.import_module("hf_attn_variants").__file__ or "").parent
    if package.parent != tree.resolve():
        raise ImportError(f"Python imports the package from {package}, not from {tree}. Start in another directory.")
    command = ["git", "log", "-1", "--format=%h", "--", "hf_attn_variants"]
    code = subprocess.run(command, cwd=tree, capture_output=True, text=True).stdout.strip()
    rounding = importlib.import_module("fixtures.golden").describe_machine()["rounding"]
    return rounding | {"transformers": transformers.__version__, "code": code}


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print the items of each part that differ, and return their number."""
    number = 0
    for part, records in after.items():
        old = before.get(part, {})
        for name in sorted({*old, *records}):
            if (old_value := old.get(name, "missing")) != (new_value := records.get(name, "missing")):
                print(f"{part}: {name}: {old_value} -> {new_value}")
                number += 1
        num_equal = sum(records.get(name) == value for name, value in old.items())
        print(
            f"{part}: {num_equal} of {len(old)} items are equal, {len(old.keys() - records)} are missing", flush=True
        )
    return number


def main(args: argparse.Namespace) -> None:
    """Record the selected parts, and compare them with an earlier record if there is one."""
    made_by, records = prepare_process(args.tree), dict[str, Any]()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        module, name = PARTS[part]
        print(part, flush=True)
        start = time.perf_counter()
        try:
            function = getattr(importlib.import_module(f"benchmarks.versions.recorded.{module}"), name)
            records[part] = function(args.cards_dir) if inspect.signature(function).parameters else function()
        except (ImportError, AttributeError) as error:  # the checkout does not have this name
            records[part] = {"error": f"{type(error).__name__}: {error}"}
            print(f"  {records[part]['error']}", flush=True)
        print(f"{part}: {len(records[part])} items, {time.perf_counter() - start:.0f} s", flush=True)
        args.output.write_text(json.dumps({"made by": made_by, **records}, indent=0) + "\n", encoding="utf-8")
    if args.compare is not None:
        before = json.loads(args.compare.read_text(encoding="utf-8"))
        other_trees = {
            name: value
            for name, value in before["made by"].items()
            if name in made_by and name != "code" and made_by[name] != value
        }
        if other_trees:
            print(f"The earlier record was made with {other_trees}. Digests may differ for this reason.")
        sys.exit(bool(compare(before, records)))


if __name__ == "__main__":
    main(parse_args())
