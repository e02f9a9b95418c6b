"""Compare every attention mechanism of the package on one BERT and one T5 model, with the same data and budget.

The command writes a sweep file per series of trainings, runs them with `attn-variants sweep`, and collects the results
in one JSON report. Repeat it to continue after an interruption: finished runs are skipped. If the work folder does not
contain the runs of a series, an existing report keeps their results. The tables of the page show missing rows.
"""

import argparse
import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.comparison.picture import draw
from benchmarks.comparison.report import RESULTS, collect, write_report
from benchmarks.comparison.stages import BUDGETS, Budget, get_vocabulary, iterate_stages
from benchmarks.run_records import check_data_dir
from benchmarks.train.small_pretraining import make_vocabulary
from hf_attn_variants import load_plugin
from hf_attn_variants.commands import load_command
from hf_attn_variants.files import atomic_write
from hf_attn_variants.registration import register

EPILOG = """examples:
  python -m benchmarks.comparison.compare --data_dir DATA --work_dir WORK --size small
  python -m benchmarks.comparison.compare --data_dir DATA --work_dir WORK --size small --plugin my_attention.py"""
VOCABULARY_SIZE = 100


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", type=Path, required=True, help="wikipedia/, multi30k/, glue/, ... (see README)")
    parser.add_argument("--work_dir", type=Path, required=True, help="folder of all runs, new or from an earlier call")
    parser.add_argument("--size", choices=list(BUDGETS), default="full", help="budget of the runs (default: full)")
    parser.add_argument("--plugin", help="Python file that registers further mechanisms")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="run only these series of trainings")
    parser.add_argument("--output", type=Path, help="report (default: results/SIZE.json in this folder)")
    args = parser.parse_args(argv)
    args.data_dir, args.work_dir = args.data_dir.resolve(), args.work_dir.resolve()
    args.output = args.output or RESULTS / f"{args.size}.json"
    return args


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Run what has not run yet, write the report after each series of trainings, and return it."""
    check_data_dir(args.data_dir, "wikipedia", "multi30k", "glue", "tokenizers", "checkpoints")
    if args.plugin:
        load_plugin(args.plugin)
    budget = BUDGETS[args.size]
    _make_vocabularies(args.data_dir, args.work_dir, budget)
    report: dict[str, Any] = {}
    earlier = json.loads(args.output.read_text(encoding="utf-8"))["stages"] if args.output.is_file() else {}
    for stage in iterate_stages(args.data_dir, args.work_dir, budget, args.plugin):
        folder = args.work_dir / stage.name
        if args.only is None or stage.name in args.only:
            print(f"{time.strftime('%H:%M:%S')} {stage.name}", flush=True)
            _run(args.work_dir / f"{stage.name}.json", stage.content, folder)
        report = collect(report, stage, folder, earlier)
        write_report(args.output, report, args.size)
    if args.output.parent == RESULTS:
        draw()
    return report


def _make_vocabularies(data: Path, work: Path, budget: Budget) -> None:
    """Learn the vocabularies, of Wikipedia for BERT and, if the budget has a size for it, of both languages for T5."""
    bert, t5 = (Path(get_vocabulary(name, data, work, budget)) for name in ("bert", "t5"))
    if not bert.is_dir():
        shard = data / "wikipedia/train-00000.txt.gz"
        make_vocabulary(str(data / "tokenizers/bert-base-uncased"), shard, bert, VOCABULARY_SIZE)
    if not t5.is_dir():
        texts = [gzip.decompress((data / f"multi30k/train.{side}.gz").read_bytes()).decode() for side in ("en", "de")]
        original = AutoTokenizer.from_pretrained(data / "checkpoints/t5-mini-multi30k-en-de")
        lines = (line for text in texts for line in text.splitlines())
        original.train_new_from_iterator(lines, vocab_size=budget.t5_vocabulary).save_pretrained(t5)


def _run(file: Path, content: dict[str, Any], folder: Path) -> None:
    atomic_write(file, json.dumps(content, indent=1) + "\n")
    sweep = load_command("sweep")
    try:
        sweep.main(sweep.parse_args([str(file), "--output_dir", str(folder), "--disable_tqdm"]))
    except ValueError as error:  # the message lists the runs that failed, which are shown as missing
        print(error, flush=True)


if __name__ == "__main__":
    register()
    main(parse_args())
