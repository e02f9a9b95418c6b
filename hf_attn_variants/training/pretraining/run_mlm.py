"""Pretrains a BERT or ALBERT as a masked language model; the body of `scripts/pretrain_mlm.py`."""

import argparse
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, PreTrainedConfig, PreTrainedModel

import hf_attn_variants  # noqa: F401  (registers our architectures with the Auto classes)

from ...command_line import HelpFormatter, parse_with_checkpoint, program_name
from ..engine import arguments
from ..engine.models import (
    check_max_length,
    enable_gradient_checkpointing,
    load_config,
    load_model,
    load_tokenizer,
)
from ..engine.new_model import (
    add_scratch_arguments,
    check_scratch_arguments,
    new_config,
    new_model,
)
from ..engine.session import open_session
from .masked_lm import (
    SENTENCE_TASKS,
    MaskedLMEvaluator,
    MaskedLMPreparation,
    find_head,
    masked_lm_objective,
)
from .run import METRICS, PretrainingTask, pretrain
from .text_sources import add_text_arguments, check_text_arguments, open_text_sources

__all__ = ["main", "parse_args"]

MODEL_TYPES = ("albert", "bert")
# What decides the weights a run ends with, beyond what does so in any pretraining.
RESUME_ARGUMENTS = ("mlm_probability", "whole_word_mask", "sentence_task")

EPILOG = """example (a small ALBERT from scratch, on gzip shards of text whose articles an empty line separates):
  %(prog)s --model_type albert --tokenizer_name albert/albert-base-v2 \\
      --config_overrides hidden_size=256,num_hidden_layers=4,num_attention_heads=8,intermediate_size=1024 \\
      --train_file wikipedia/train-*.txt.gz --validation_file wikipedia/valid.txt.gz --max_eval_samples 500 \\
      --max_train_steps 10000 --learning_rate 1e-3 --num_warmup_steps 500 --eval_steps 1000 --output_dir runs/albert

Text is read as a stream, tokenised and packed into blocks of --max_length as training goes; --max_train_steps says how
long. With --num_key_value_heads or --talking_heads the new model is an attention variant. --output_dir gets the model
with its tokenizer, all_results.json, train_log.jsonl and training_curves.png. eval_loss is the mean over the masked
tokens in nats, the logarithm of eval_perplexity. At the end a gate says whether the model reads its context at all:
the dev loss with the words shuffled, and with attention zeroed, must each be 0.3 nats worse; a young model that only
knows how frequent tokens are fails it. A small model and a small vocabulary that passed, in 51 minutes on one CPU
core: benchmarks/albert_mlm.py; the example above is for a GPU, and was not run to its end.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (`sys.argv` without an argument)."""
    parser = argparse.ArgumentParser(
        prog=program_name("pretrain_mlm.py"),
        description="Pretrain a BERT or ALBERT as a masked language model, from scratch or from a checkpoint.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    add_text_arguments(parser)
    masking = parser.add_argument_group("masking")
    masking.add_argument(
        "--mlm_probability", type=float, default=0.15, help="Chance of a token to be masked; anew in every epoch."
    )
    masking.add_argument("--whole_word_mask", action="store_true", help="Mask words instead of tokens.")
    masking.add_argument(
        "--sentence_task",
        choices=SENTENCE_TASKS,
        help="Cut each block in two and learn from the pair as well. nsp, as BERT: does the second segment follow, or "
        "is it of other text? sop, as ALBERT: are the two in order? The model then is a ...ForPreTraining, and "
        "eval_sentence_accuracy says how often it is right (0.5: guessing).",
    )
    add_scratch_arguments(parser, MODEL_TYPES)
    arguments.add_shared_arguments(parser, packed=True)
    return parse_with_checkpoint(parser, argv, required=False)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, evaluates, tries the gate and saves.

    Args:
        args: Of `parse_args`.

    Returns:
        The results that `all_results.json` begins with: `eval_loss` (nats a masked token), `eval_perplexity`,
        `eval_accuracy`, `gate_passed` and what it saw, `train_loss` (the mean over all steps), `train_tokens`,
        `train_runtime` (seconds in training steps, without evaluation and checkpoints), ...

    Raises:
        ValueError, OSError: An argument, the text or the checkpoint is wrong; found before training where it can be.
        NonFiniteLossError: Training diverged.
    """
    arguments.check_arguments(args)
    _check_own_arguments(args)
    with open_session(args) as accelerator:
        return _run(args, accelerator)


def _check_own_arguments(args: argparse.Namespace) -> None:
    check_text_arguments(args, METRICS)
    if not 0 < args.mlm_probability < 1:
        raise ValueError(f"--mlm_probability must be in (0, 1), got {args.mlm_probability}")
    check_scratch_arguments(args)


def _run(args: argparse.Namespace, accelerator: Accelerator) -> dict[str, Any]:
    config = load_config(args) if args.model_name_or_path is not None else None
    tokenizer = load_tokenizer(args, config)
    config = config if config is not None else new_config(args, tokenizer)
    check_max_length(args.max_length, config, tokenizer)
    _check_pairs(args, config)
    text = open_text_sources(args)
    prepare = MaskedLMPreparation(
        tokenizer, args.max_length, args.mlm_probability, args.seed, args.whole_word_mask, args.sentence_task
    )
    set_seed(args.seed)
    model = _model(args, config)
    task = PretrainingTask(
        "masked LM",
        prepare,
        masked_lm_objective(find_head(model), sentence_weight=args.mlm_probability * prepare.block_length),
        lambda model, loader: MaskedLMEvaluator(accelerator, model, loader, args.disable_tqdm),
        resume_arguments=RESUME_ARGUMENTS,
    )
    return pretrain(args, accelerator, model, tokenizer, text, task)


def _check_pairs(args: argparse.Namespace, config: PreTrainedConfig) -> None:
    if args.sentence_task is None:
        return
    if args.max_length < 5:
        raise ValueError(
            f"--sentence_task {args.sentence_task}: --max_length {args.max_length} has no room for a pair"
        )
    if args.sentence_task == "nsp" and args.shuffle_buffer_size < 2:
        raise ValueError(
            "--sentence_task nsp draws other text from a buffer: --shuffle_buffer_size must be at least 2"
        )
    token_types = getattr(config, "type_vocab_size", 0)
    if token_types < 2:
        raise ValueError(
            f"--sentence_task {args.sentence_task}: the model has {token_types} token type(s), and tells the "
            "two segments of a pair apart by two (type_vocab_size)"
        )


def _model(args: argparse.Namespace, config: PreTrainedConfig) -> PreTrainedModel:
    auto_class = AutoModelForMaskedLM if args.sentence_task is None else AutoModelForPreTraining
    if args.model_name_or_path is None:
        model = new_model(args, config, auto_class)
    else:
        model = load_model(args, args.model_name_or_path, config, auto_class)
    if args.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model
