"""The command line of `scripts/run_seq2seq.py`: its own flags and their checks."""

import argparse

from ...command_line import HelpFormatter, parse_with_checkpoint, program_name
from ..engine import arguments
from ..engine.new_model import add_scratch_arguments, check_scratch_arguments
from .metrics import TEXT_METRICS, check_text_metrics
from .worded_tasks import TEXT_TASKS

__all__ = ["MODEL_TYPES", "check_seq2seq_arguments", "parse_args"]

# Model types that can be trained from scratch.
MODEL_TYPES = ("t5",)
SPLITS = ("train", "validation", "test")
EPILOG = """examples (translation decoded greedily and with 4 beams; STS-B as text; a checkpoint's score):
  %(prog)s --model_name_or_path ./t5-gqa2 --source_file train.en.gz --target_file train.de.gz \\
      --validation_source_file val.en.gz --validation_target_file val.de.gz --max_length 64 --num_beams 1 4 \\
      --group_by_length --output_dir runs/en-de
  %(prog)s --model_name_or_path google-t5/t5-small --task_name stsb --data_dir glue/STS-B \\
      --max_target_length 8 --output_dir runs/t5-stsb
  %(prog)s --model_name_or_path runs/en-de --validation_source_file val.en.gz \\
      --validation_target_file val.de.gz --num_train_epochs 0 --output_dir runs/en-de-scores

Rows come from parallel text (--source_file and --target_file, line by line), from tables (--train_file with
--source_column and --target_column; a nested column is written translation.en), from a `datasets` source
(--dataset_name), or from --task_name, which words GLUE and SQuAD as T5 (arXiv:1910.10683) does. Rows with a blank side
are left out, but of a test split without targets none. --output_dir gets the model, all_results.json,
train_log.jsonl, training_curves.png and predictions_<split>.jsonl with the source, references and prediction of each
row. decode_tokens_per_second counts the generated tokens over the time in generation. T5 wants larger learning rates
than BERT: here the default is 3e-4.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (`sys.argv` without an argument)."""
    parser = argparse.ArgumentParser(
        prog=program_name("run_seq2seq.py"),
        description="Train and evaluate an encoder-decoder on text to text: translation, summarisation, GLUE, SQuAD.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    _add_text_arguments(parser)
    _add_decoding_arguments(parser)
    add_scratch_arguments(parser, MODEL_TYPES)
    arguments.add_shared_arguments(parser)
    parser.set_defaults(learning_rate=3e-4)
    return parse_with_checkpoint(parser, argv, required=False)


def _add_text_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text")
    for split, prefix in (("training", ""), ("dev", "validation_"), ("test", "test_")):
        for side in ("source", "target"):
            optional = "; without it the split is only predicted" if (split, side) == ("test", "target") else ""
            group.add_argument(
                f"--{prefix}{side}_file",
                help=f"The {side} side of the {split} text, a row a line (.txt, .gz){optional}.",
            )
    for split in SPLITS:
        group.add_argument(
            f"--{split}_file",
            nargs="+",
            help=f"{split.capitalize()} tables instead (.csv, .tsv, .json, .jsonl; with --task_name its own format).",
        )
    group.add_argument("--source_column", default="source", help="A table's source (default: %(default)s).")
    group.add_argument("--target_column", default="target", help="A table's target (default: %(default)s).")
    group.add_argument("--dataset_name", help="Folder or Hub id of a `datasets` source instead of files.")
    group.add_argument("--dataset_config_name", help="Its configuration.")
    group.add_argument(
        "--task_name", help=f"A task that is worded as text: {', '.join(TEXT_TASKS)}; without files: from the Hub."
    )
    group.add_argument("--data_dir", help="Folder with the TSVs of a GLUE --task_name.")
    group.add_argument("--source_prefix", default="", help="Text put before each source ('summarize: ').")
    group.add_argument("--max_target_length", type=int, help="Tokens of a target (default: --max_length).")
    group.add_argument(
        "--label_smoothing_factor", type=float, default=0.0, help="Share of a label that is spread over all tokens."
    )


def _add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--num_beams",
        type=int,
        nargs="+",
        default=[1],
        help="Beams (default: 1, greedy). With several numbers the last evaluation decodes with each; others with the "
        "first.",
    )
    group.add_argument("--length_penalty", type=float, default=1.0, help="Beam search's; more favours longer texts.")
    group.add_argument("--no_repeat_ngram_size", type=int, help="No N tokens twice in a text (summaries).")
    group.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help=f"Of {', '.join(TEXT_METRICS)} (default: bleu; with --task_name the task's own).",
    )
    group.add_argument(
        "--eval_loss_only", action="store_true", help="Decode only at the end; evaluate the loss while training."
    )
    group.add_argument("--skip_predict", action="store_true", help="Do not predict the test split.")


def check_seq2seq_arguments(args: argparse.Namespace) -> None:
    """Checks this script's own arguments, and fills in the defaults that depend on others.

    Args:
        args: Of `parse_args`. `max_target_length` and `metrics` become what they are by default.

    Raises:
        ValueError: A value is outside its range, or a flag excludes or lacks another one.
    """
    if args.max_target_length is None:
        args.max_target_length = args.max_length
    if args.max_target_length < 1:
        raise ValueError(f"--max_target_length must be at least 1, got {args.max_target_length}")
    if not 0 <= args.label_smoothing_factor < 1:
        raise ValueError(f"--label_smoothing_factor must be in [0, 1), got {args.label_smoothing_factor}")
    if min(args.num_beams) < 1 or len(set(args.num_beams)) < len(args.num_beams):
        raise ValueError(f"--num_beams must be different numbers of at least 1, got {args.num_beams}")
    if args.no_repeat_ngram_size is not None and args.no_repeat_ngram_size < 1:
        raise ValueError(f"--no_repeat_ngram_size must be at least 1, got {args.no_repeat_ngram_size}")
    _check_data_flags(args)
    if args.task_name is None:
        args.metrics = args.metrics or ["bleu"]
        check_text_metrics(args.metrics)
    elif args.metrics is not None:
        raise ValueError(f"--metrics: --task_name {args.task_name} has its own")
    check_scratch_arguments(args)


def _check_data_flags(args: argparse.Namespace) -> None:
    parallel = {"train": "", "validation": "validation_", "test": "test_"}
    has_parallel = {split: getattr(args, f"{prefix}source_file") is not None for split, prefix in parallel.items()}
    has_table = {split: getattr(args, f"{split}_file") is not None for split in SPLITS}
    for split, prefix in parallel.items():
        has_target = getattr(args, f"{prefix}target_file") is not None
        if has_target != has_parallel[split] and not (split == "test" and has_parallel[split]):
            raise ValueError(f"--{prefix}source_file and --{prefix}target_file belong together: give both")
        if has_parallel[split] and has_table[split]:
            raise ValueError(f"give --{prefix}source_file or --{split}_file, not both")
    kinds = {
        "parallel text (--source_file, ...) or tables (--train_file, ...)": any(has_parallel.values())
        or (any(has_table.values()) and args.task_name is None),
        "--dataset_name": args.dataset_name is not None,
        "--task_name": args.task_name is not None,
    }
    given = [kind for kind, there in kinds.items() if there]
    if len(given) != 1:
        raise ValueError(
            f"give one source of text: {'; or '.join(kinds)}" + (f"; got {' and '.join(given)}" if given else "")
        )
    if args.data_dir is not None and args.task_name is None:
        raise ValueError("--data_dir needs --task_name")
    only_evaluates = arguments.only_evaluates(args)
    from_files = args.dataset_name is None and args.task_name is None
    if from_files and not only_evaluates and not (has_parallel["train"] or has_table["train"]):
        raise ValueError("training needs --source_file and --target_file, or --train_file (or --num_train_epochs 0)")
    if from_files and only_evaluates and not any(d[s] for d in (has_parallel, has_table) for s in SPLITS[1:]):
        raise ValueError("--num_train_epochs 0 only evaluates: give --validation_source_file or --validation_file")
