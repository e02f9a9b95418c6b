"""Pretrains a T5 by span corruption; the body of `scripts/pretrain_span_corruption.py`."""

import argparse
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

import hf_attn_variants  # noqa: F401  (registers our architectures with the Auto classes)

from ...command_line import HelpFormatter, parse_with_checkpoint, program_name
from ..engine import arguments
from ..engine.models import check_max_length
from ..engine.new_model import add_scratch_arguments, check_scratch_arguments
from ..engine.seq2seq_model import load_seq2seq_config, load_seq2seq_model
from ..engine.session import open_session
from ..seq2seq.evaluation import seq2seq_objective
from ..seq2seq.settings import MODEL_TYPES
from .run import METRICS, PretrainingTask, pretrain
from .span_corruption import SpanCorruption, SpanCorruptionEvaluator
from .text_sources import add_text_arguments, check_text_arguments, open_text_sources

__all__ = ["main", "parse_args"]

# What decides the weights a run ends with, beyond what does so in any pretraining.
RESUME_ARGUMENTS = ("noise_density", "mean_noise_span_length")

EPILOG = """example (a small multi-query T5 from scratch, on gzip shards; an empty line separates their articles):
  %(prog)s --model_type t5 --tokenizer_name google-t5/t5-small \\
      --config_overrides d_model=256,d_kv=32,d_ff=1024,num_layers=4,num_heads=8 --num_key_value_heads 1 \\
      --train_file wikipedia/train-*.txt.gz --validation_file wikipedia/valid.txt.gz --max_eval_samples 500 \\
      --optim adafactor --adafactor_scale_parameter --learning_rate 1e-2 --lr_scheduler_type inverse_sqrt \\
      --num_warmup_steps 500 --max_train_steps 10000 --eval_steps 1000 --dropout_rate 0 --output_dir runs/t5

Text is read as a stream, tokenised and packed into blocks as training goes; a block becomes --max_length input tokens
and, at the default noise, a quarter as many target tokens or fewer. Adafactor with steps in proportion to each
parameter is T5's own optimiser: AdamW at one rate for all stays long at the frequencies of tokens, since T5's
embeddings are large. --output_dir gets the model with its tokenizer, all_results.json, train_log.jsonl and
training_curves.png. eval_loss is the mean over the target tokens in nats. At the end a gate says whether the model
reads its context at all: the dev loss with the words of the inputs shuffled, and with attention zeroed, must each be
0.3 nats worse; a young model that only knows how frequent tokens are fails it.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (`sys.argv` without an argument)."""
    parser = argparse.ArgumentParser(
        prog=program_name("pretrain_span_corruption.py"),
        description="Pretrain a T5 by span corruption, from scratch or from a checkpoint.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    add_text_arguments(parser)
    noise = parser.add_argument_group("noise")
    noise.add_argument(
        "--noise_density", type=float, default=0.15, help="Share of tokens that is left out (default: %(default)s)."
    )
    noise.add_argument(
        "--mean_noise_span_length",
        type=float,
        default=3.0,
        help="Mean length of the spans that are left out, in tokens (default: %(default)s).",
    )
    add_scratch_arguments(parser, MODEL_TYPES)
    arguments.add_shared_arguments(parser, packed=True)
    return parse_with_checkpoint(parser, argv, required=False)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, evaluates, tries the gate and saves.

    Args:
        args: Of `parse_args`.

    Returns:
        The results that `all_results.json` begins with: `eval_loss` (nats a target token), `eval_perplexity`,
        `eval_accuracy`, `gate_passed` and what it saw, `train_loss` (the mean over all steps), `train_tokens` (of
        inputs and targets), `train_runtime` (seconds in training steps, without evaluation and checkpoints), ...

    Raises:
        ValueError, OSError: An argument, the text or the checkpoint is wrong; found before training where it can be.
        NonFiniteLossError: Training diverged.
    """
    arguments.check_arguments(args)
    check_text_arguments(args, METRICS)
    check_scratch_arguments(args)
    if not 0 < args.noise_density < 1:
        raise ValueError(f"--noise_density must be in (0, 1), got {args.noise_density}")
    if not args.mean_noise_span_length >= 1:
        raise ValueError(f"--mean_noise_span_length must be at least 1, got {args.mean_noise_span_length}")
    with open_session(args) as accelerator:
        return _run(args, accelerator)


def _run(args: argparse.Namespace, accelerator: Accelerator) -> dict[str, Any]:
    config, tokenizer = load_seq2seq_config(args)
    _check_config(args, config, tokenizer)
    text = open_text_sources(args)
    prepare = SpanCorruption(tokenizer, args.max_length, args.seed, args.noise_density, args.mean_noise_span_length)
    set_seed(args.seed)
    model = load_seq2seq_model(args, config)
    task = PretrainingTask(
        "span corruption",
        prepare,
        seq2seq_objective(),
        lambda model, loader: SpanCorruptionEvaluator(accelerator, model, loader, prepare, args.disable_tqdm),
        resume_arguments=RESUME_ARGUMENTS,
        results={"block_length": prepare.block_length, "target_length": prepare.target_length},
    )
    return pretrain(args, accelerator, model, tokenizer, text, task)


def _check_config(args: argparse.Namespace, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if not config.is_encoder_decoder or config.decoder_start_token_id != tokenizer.pad_token_id:
        raise ValueError(
            f"{args.model_name_or_path} ({config.model_type}) is no T5: span corruption needs an encoder-decoder that "
            "starts with its padding token"
        )
    check_max_length(args.max_length, config, tokenizer)
