"""The command line of `scripts/run_squad.py`: its own flags and their checks."""

import argparse
import math

from ...command_line import HelpFormatter, parse_with_checkpoint, program_name
from ..engine import arguments
from .metrics import METRIC_NAMES

__all__ = ["check_squad_arguments", "parse_args"]

EPILOG = """example (SQuAD v1.1 from its JSON files, on the CPU):
  %(prog)s --model_name_or_path ./minilm-gqa4 --train_file squad/train-v1.1.json \\
      --validation_file squad/dev-v1.1.json --max_length 256 --num_train_epochs 1 --group_by_length \\
      --output_dir runs/squad --cpu

Without --train_file and --validation_file SQuAD is read from the Hub (rajpurkar/squad, with --version_2_with_negative
rajpurkar/squad_v2). A context that is longer than --max_length is cut into windows, which share --doc_stride tokens.
"No answer" is the first token's place: [CLS] in BERT and ALBERT. --output_dir gets the model, all_results.json (exact
match and F1 as the official scripts compute them), train_log.jsonl, training_curves.png, predictions_dev.json (for
the official scripts), predictions_nbest_dev.json and, for v2.0, predictions_null_odds_dev.json; with --test_file the
same of the test split. v2.0: eval_best_f1 is that of the threshold which is best on the dev set itself.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (`sys.argv` without an argument)."""
    parser = argparse.ArgumentParser(
        prog=program_name("run_squad.py"),
        description="Fine-tune and evaluate extractive question answering on SQuAD v1.1 or v2.0.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    task = parser.add_argument_group("task")
    task.add_argument("--train_file", help="Training questions: SQuAD's JSON, plain or .gz; default: the Hub.")
    task.add_argument("--validation_file", help="Dev questions, likewise.")
    task.add_argument("--test_file", help="Questions to predict; their answers are not read.")
    task.add_argument(
        "--version_2_with_negative", action="store_true", help="SQuAD v2.0: some questions have no answer."
    )
    task.add_argument(
        "--null_score_diff_threshold",
        type=float,
        default=0.0,
        help="v2.0: no answer where its score exceeds the best answer's by more than this (default: %(default)s).",
    )
    task.add_argument(
        "--doc_stride",
        type=int,
        default=128,
        help="Tokens that two windows of a context share (default: %(default)s).",
    )
    task.add_argument(
        "--max_query_length", type=int, default=64, help="Tokens of a question; longer ones are cut (%(default)s)."
    )
    task.add_argument("--n_best_size", type=int, default=20, help="Answers in the n-best file (default: %(default)s).")
    task.add_argument("--max_answer_length", type=int, default=30, help="Tokens of an answer (default: %(default)s).")
    arguments.add_shared_arguments(parser)
    parser.set_defaults(max_length=384)
    return parse_with_checkpoint(parser, argv)


def check_squad_arguments(args: argparse.Namespace) -> None:
    """Checks this script's own arguments.

    Raises:
        ValueError: A value is outside its range, or a flag lacks another one.
    """
    for name in ("max_query_length", "n_best_size", "max_answer_length"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.doc_stride < 0:
        raise ValueError(f"--doc_stride must be at least 0, got {args.doc_stride}")
    if not math.isfinite(args.null_score_diff_threshold):
        raise ValueError(f"--null_score_diff_threshold must be a number, got {args.null_score_diff_threshold}")
    if args.train_file is not None and args.validation_file is None:
        raise ValueError("--train_file needs --validation_file")
    if args.validation_file is not None and args.train_file is None and not arguments.only_evaluates(args):
        raise ValueError("--validation_file needs --train_file (or --num_train_epochs 0, to evaluate only)")
    known = ("loss", *METRIC_NAMES[args.version_2_with_negative])
    metric = args.metric_for_best_model
    if metric is not None and metric.removeprefix("eval_") not in known:
        raise ValueError(f"--metric_for_best_model {metric!r}: there are {', '.join(known)}")
