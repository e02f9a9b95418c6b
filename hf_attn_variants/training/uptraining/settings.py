"""The command line of `scripts/uptrain.py`: its own flags, their checks, and the loss that they ask for."""

import argparse
import importlib.util
import math
from dataclasses import asdict

from transformers import PreTrainedConfig

from ...command_line import HelpFormatter, parse_with_checkpoint, program_name
from ..engine import arguments
from .objective import TermWeights
from .trainable import TRAINABLE, check_trainable

__all__ = ["check_architecture", "check_uptraining_arguments", "parse_args", "term_weights"]

OBJECTIVES = ("distill", "mlm", "seq2seq", "embedding")
TERM_FLAGS = ("hidden_states_weight", "attention_outputs_weight", "logits_weight")
WARMUP_RATIO = 0.05
EPILOG = """examples (4 key/value heads, drawn towards the model they come from: a BERT on lines, one on pairs, a T5):
  %(prog)s --model_name_or_path ./minilm-gqa4 --teacher ./minilm --objective distill \\
      --train_file wikipedia/train-00000.txt.gz --output_dir runs/minilm-gqa4 --group_by_length --cpu
  %(prog)s --model_name_or_path ./squad-gqa4 --teacher ./squad --objective distill --logits_weight 1 \\
      --attention_outputs_weight 0 --trainable all --learning_rate 2e-5 --train_file pairs.jsonl \\
      --text_columns question context --max_length 256 --output_dir runs/squad-gqa4 --cpu
  %(prog)s --model_name_or_path ./t5-gqa4 --teacher ./t5 --objective seq2seq \\
      --source_file train.en.gz --target_file train.de.gz --validation_source_file val.en.gz \\
      --validation_target_file val.de.gz --predict_with_generate --output_dir runs/t5-gqa4 --cpu

distill: the teacher alone says what is right: the output of each layer and attention and, for an encoder-decoder, its
distribution over the targets (with --logits_weight 1 an encoder's over classes or answers, too). mlm, seq2seq: the
task itself, and the teacher where one is given. embedding: the teacher's sentence embeddings. For a classification
task, use `attn-variants glue`.
Without --max_train_steps, --num_train_epochs or --alpha a run has 300 steps; without validation files the last 5 %% of
the rows (at most 512) are held out. Dev metrics are computed before, during (--eval_steps) and after training.
--output_dir gets the whole checkpoint (model, code, tokenizer, the source's side files), all_results.json,
train_log.jsonl and training_curves.png.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (`sys.argv` without an argument)."""
    parser = argparse.ArgumentParser(
        prog=program_name("uptrain.py"),
        description="Continue training a converted checkpoint to restore its quality.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    _add_objective_arguments(parser)
    _add_text_arguments(parser)
    arguments.add_shared_arguments(parser)
    parser.set_defaults(max_length=64, learning_rate=1e-3, num_train_epochs=None, warmup_ratio=None)
    # What is told here, as these defaults depend on other flags.
    told = {
        "num_train_epochs": "Epochs (0: only evaluate; default: --max_train_steps, or 300 steps).",
        "warmup_ratio": f"Warm-up steps as a share of all (default: {WARMUP_RATIO}, without --num_warmup_steps).",
        "eval_steps": "Evaluate every N optimiser steps (default: five times in the run).",
    }
    for action in parser._actions:
        action.help = told.get(action.dest, action.help)
    args = parse_with_checkpoint(parser, argv)
    if args.warmup_ratio is None:
        takes_none = args.lr_scheduler_type == "constant" or args.adafactor_relative_step
        args.warmup_ratio = 0.0 if takes_none or args.num_warmup_steps is not None else WARMUP_RATIO
    return args


def _add_objective_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("objective")
    group.add_argument("--objective", required=True, choices=OBJECTIVES, help="What is learned; see below.")
    group.add_argument(
        "--teacher", help="Folder or Hub id of the checkpoint to come close to; usually the one that was converted."
    )
    group.add_argument(
        "--hidden_states_weight",
        type=float,
        help="Weight of the error of each layer's output, as a share of its variance (default with a teacher: 1; with "
        "--objective embedding: 0).",
    )
    group.add_argument(
        "--attention_outputs_weight",
        type=float,
        help="Weight of the same error of each attention's output (default: as the one before).",
    )
    group.add_argument(
        "--logits_weight",
        type=float,
        help="Weight of the divergence of the output distribution, in nats (default with a teacher: 1 for mlm, "
        "seq2seq and an encoder-decoder; otherwise 0).",
    )
    group.add_argument("--temperature", type=float, default=1.0, help="Divides the logits of that divergence.")
    group.add_argument(
        "--trainable",
        choices=TRAINABLE,
        default="attention",
        help="Which parameters are trained: those of the attention modules, all, or low-rank updates of the attention "
        "projections that are merged at the end (default: %(default)s).",
    )
    group.add_argument("--lora_rank", type=int, default=32, help="Rank of these updates (default: %(default)s).")
    group.add_argument(
        "--lora_alpha",
        type=float,
        default=32.0,
        help="They are scaled by this over their rank (default: %(default)s).",
    )
    group.add_argument(
        "--alpha", type=float, help="Train for this share of --pretraining_steps (arXiv:2305.13245 takes 0.05)."
    )
    group.add_argument("--pretraining_steps", type=int, help="Steps that the checkpoint was pretrained for.")


def _add_text_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text")
    group.add_argument(
        "--train_file",
        nargs="+",
        help="Text, one example a line (.txt, .gz), or tables (.csv, .tsv, .json, .jsonl); for an encoder-decoder "
        "tables with two columns, unless --source_file is given.",
    )
    group.add_argument("--validation_file", nargs="+", help="Held-out text of the same kind; see --max_eval_samples.")
    group.add_argument(
        "--text_columns",
        nargs="+",
        metavar="COLUMN",
        help="An encoder's table: the column of texts, or two columns of texts to read as pairs (default: text).",
    )
    for name in ("source", "target"):
        group.add_argument(f"--{name}_file", help=f"The {name} side of parallel text, one example a line (.txt, .gz).")
        group.add_argument(f"--validation_{name}_file", help="Its held-out twin.")
        group.add_argument(
            f"--{name}_column",
            default=name,
            help="Its column in an encoder-decoder's table (default: %(default)s).",
        )
    group.add_argument("--source_prefix", default="", help="Text put before each source.")
    group.add_argument("--max_target_length", type=int, help="Tokens of a target (default: --max_length).")
    group.add_argument(
        "--mlm_probability", type=float, default=0.15, help="Chance of a token to be masked; anew in every epoch."
    )
    group.add_argument(
        "--predict_with_generate",
        action="store_true",
        help="Generate greedily in every evaluation, and report BLEU (sacrebleu).",
    )


def check_uptraining_arguments(args: argparse.Namespace) -> None:
    """Checks this script's own arguments against each other and the installed packages.

    Raises:
        ValueError: A value is outside its range, or a flag lacks another one.
    """
    for name in (*TERM_FLAGS, "alpha", "lora_alpha", "temperature"):
        value = getattr(args, name)
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"--{name} must be at least 0, got {value}")
    for name in ("lora_rank", "pretraining_steps", "max_target_length"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if not 0 < args.mlm_probability < 1:
        raise ValueError(f"--mlm_probability must be in (0, 1), got {args.mlm_probability}")
    if args.temperature == 0:
        raise ValueError("--temperature must be more than 0, got 0.0")
    if args.teacher is None:
        needing = [f"--objective {args.objective}"] if args.objective in ("distill", "embedding") else []
        needing += [f"--{name}" for name in TERM_FLAGS if getattr(args, name)]
        if needing:
            raise ValueError(f"{needing[0]} needs --teacher")
    if (args.alpha is None) != (args.pretraining_steps is None):
        raise ValueError("--alpha and --pretraining_steps belong together: give both or neither")
    if args.alpha is not None and args.max_train_steps is not None:
        raise ValueError("give --max_train_steps, or --alpha and --pretraining_steps, not both")
    if args.predict_with_generate and importlib.util.find_spec("sacrebleu") is None:
        raise ValueError("--predict_with_generate needs sacrebleu: `pip install sacrebleu`")
    check_trainable(args.trainable)


def check_architecture(args: argparse.Namespace, config: PreTrainedConfig) -> None:
    """Checks that the checkpoint is of the kind that the flags are for.

    Raises:
        ValueError: It is not.
    """
    pairs = {"mlm": False, "embedding": False, "seq2seq": True}
    wanted = [(f"--objective {args.objective}", pairs[args.objective])] if args.objective in pairs else []
    wanted += [("--predict_with_generate", True)] if args.predict_with_generate else []
    for flag, is_encoder_decoder in wanted:
        if config.is_encoder_decoder != is_encoder_decoder:
            kinds = (
                ("an encoder-decoder", "an encoder") if is_encoder_decoder else ("an encoder", "an encoder-decoder")
            )
            raise ValueError(
                f"{flag} is for {kinds[0]}; {args.model_name_or_path} ({config.model_type}) is {kinds[1]}"
            )


def term_weights(args: argparse.Namespace, config: PreTrainedConfig) -> TermWeights:
    """The weights of the loss's terms, defaults filled in.

    Args:
        args: Checked arguments.
        config: The student's.

    Raises:
        ValueError: There is a teacher, and no term looks at it.
    """
    has_task, embeds = args.objective in ("mlm", "seq2seq"), args.objective == "embedding"
    if args.teacher is None:
        return TermWeights(cross_entropy=1.0)
    weights = TermWeights(
        cross_entropy=float(has_task),
        embedding_distance=float(embeds),
        hidden_states=_given(args.hidden_states_weight, float(not embeds)),
        attention_outputs=_given(args.attention_outputs_weight, float(not embeds)),
        logits=_given(args.logits_weight, float(has_task or config.is_encoder_decoder)),
        temperature=args.temperature,
    )
    of_teacher = asdict(weights) | {"cross_entropy": 0.0, "temperature": 0.0}
    if not any(of_teacher.values()):
        raise ValueError("--teacher would not be looked at: each of --hidden_states_weight, --logits_weight, ... is 0")
    return weights


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
