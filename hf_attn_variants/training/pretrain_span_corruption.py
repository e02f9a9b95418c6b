"""Pretrains a T5 by span corruption; the body of `scripts/pretrain_span_corruption.py`."""

import argparse
import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

import hf_attn_variants  # noqa: F401  (registers our architectures with the Auto classes)
from hf_attn_variants.training import arguments, outputs
from hf_attn_variants.training.checkpoints import LOG_FILE, find_checkpoint
from hf_attn_variants.training.data import create_eval_dataloader, create_stream_dataloader
from hf_attn_variants.training.loop import LoopSettings, TrainingLoop, total_training_steps
from hf_attn_variants.training.masked_lm import GATE_COST
from hf_attn_variants.training.models import check_max_length
from hf_attn_variants.training.optimization import create_optimizer, create_scheduler, warmup_steps
from hf_attn_variants.training.seq2seq import seq2seq_objective
from hf_attn_variants.training.seq2seq_arguments import add_scratch_arguments, check_scratch_arguments
from hf_attn_variants.training.seq2seq_model import load_seq2seq_config, load_seq2seq_model
from hf_attn_variants.training.session import open_accelerator, start_trackers
from hf_attn_variants.training.span_corruption import CorruptedBlocks, SpanCorruption, SpanCorruptionEvaluator
from hf_attn_variants.training.text_data import TextSource, TextStream, read_blocks, stack_rows
from hf_attn_variants.training.text_sources import add_text_arguments, check_text_arguments, open_text_sources
from hf_attn_variants.training.tracking import plot_curves, read_log, save_results

__all__ = ["main", "parse_args"]

logger = logging.getLogger(__name__)
METRICS = ("loss", "perplexity", "accuracy")
# What decides the weights a run ends with, beyond `arguments.RESUME_ARGUMENTS`.
RESUME_ARGUMENTS = (
    "model_type",
    "config_overrides",
    "num_key_value_heads",
    "talking_heads",
    "noise_density",
    "mean_noise_span_length",
    "shuffle_buffer_size",
)

EPILOG = """example (a small multi-query T5 from scratch, on gzip shards; an empty line separates their articles):
  python scripts/pretrain_span_corruption.py --model_type t5 --tokenizer_name google-t5/t5-small \\
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
        description="Pretrain a T5 by span corruption, from scratch or from a checkpoint.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    add_scratch_arguments(parser)
    arguments.add_model_arguments(parser, required=False)
    arguments.add_data_arguments(parser, packed=True)
    arguments.add_training_arguments(parser)
    arguments.add_output_arguments(parser)
    arguments.add_hub_arguments(parser)
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, evaluates, tries the gate and saves.

    Args:
        args: Of `parse_args`.

    Returns:
        The results that `all_results.json` begins with: `eval_loss` (nats a target token), `eval_perplexity`,
        `eval_accuracy`, `gate_passed` and what it saw, `train_loss` (the mean over all steps), `train_tokens` (of
        text), `train_runtime` (seconds in training steps, without evaluation and checkpoints), ...

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
    if args.resume_from_checkpoint:
        find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    arguments.prepare_output_dir(args, write=False)
    outputs.check_hub_access(args)
    with open_accelerator(args) as accelerator:
        return _run(args, accelerator)


def _run(args: argparse.Namespace, accelerator: Accelerator) -> dict[str, Any]:
    config, tokenizer = load_seq2seq_config(args)
    _check_config(args, config, tokenizer)
    train, dev, data_fingerprint = open_text_sources(args)
    prepare = SpanCorruption(tokenizer, args.max_length, args.seed, args.noise_density, args.mean_noise_span_length)
    set_seed(args.seed)
    model = load_seq2seq_model(args, config)
    set_seed(args.seed, device_specific=True)  # processes drop out different units
    stream, train_loader = _train_loader(args, accelerator, train, tokenizer, prepare)
    total_steps = total_training_steps(
        None, args.gradient_accumulation_steps, args.num_train_epochs, args.max_train_steps
    )
    optimizer = create_optimizer(model, args)
    scheduler = create_scheduler(optimizer, args, total_steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    evaluator = _evaluator(args, accelerator, model, dev, tokenizer, prepare)
    loop = TrainingLoop(
        accelerator,
        model,
        optimizer,
        scheduler,
        train_loader,
        seq2seq_objective(),
        _loop_settings(args, total_steps, data_fingerprint),
        evaluate=evaluator,
        start_epoch=stream.start_epoch,
        seek=stream.seek,
    )
    if args.overwrite_output_dir and accelerator.is_main_process:  # only now: all that the new run needs was loaded
        outputs.remove_earlier_run(args.output_dir)
    accelerator.wait_for_everyone()
    start_trackers(args, accelerator)
    state = loop.run()
    results = _results(args, accelerator.unwrap_model(model), loop, prepare)
    if evaluator is not None:
        if not evaluator.metrics or (loop.settings.keep_best and state.best_step != state.step):
            evaluator()
        results = {**_dev_results(evaluator), **results}
    outputs.save_model(accelerator, model, tokenizer, args.output_dir)
    if accelerator.is_main_process:
        _write_outputs(args, results)
    accelerator.wait_for_everyone()
    return results


def _check_config(args: argparse.Namespace, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if not config.is_encoder_decoder or config.decoder_start_token_id != tokenizer.pad_token_id:
        raise ValueError(
            f"{args.model_name_or_path} ({config.model_type}) is no T5: span corruption needs an encoder-decoder that "
            "starts with its padding token"
        )
    check_max_length(args.max_length, config, tokenizer)


def _train_loader(
    args: argparse.Namespace,
    accelerator: Accelerator,
    sources: list[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    prepare: SpanCorruption,
) -> tuple[TextStream, DataLoader]:
    stream = TextStream(
        sources,
        tokenizer,
        prepare.block_length,
        prepare.eos_id,
        prepare,
        args.per_device_train_batch_size,
        args.seed,
        args.shuffle_buffer_size,
        accelerator.process_index,
        accelerator.num_processes,
    )
    return stream, create_stream_dataloader(accelerator, stream, args.seed, args.dataloader_num_workers)


def _evaluator(
    args: argparse.Namespace,
    accelerator: Accelerator,
    model: nn.Module,
    sources: list[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    prepare: SpanCorruption,
) -> SpanCorruptionEvaluator | None:
    if not sources:
        return None
    blocks = read_blocks(sources, tokenizer, prepare.block_length, prepare.eos_id, args.max_eval_samples)
    loader = create_eval_dataloader(
        CorruptedBlocks(blocks, prepare), args.per_device_eval_batch_size, stack_rows, args.dataloader_num_workers
    )
    return SpanCorruptionEvaluator(accelerator, model, accelerator.prepare(loader), prepare, args.disable_tqdm)


def _loop_settings(args: argparse.Namespace, total_steps: int, data_fingerprint: dict[str, Any]) -> LoopSettings:
    metric = (args.metric_for_best_model or "loss").removeprefix("eval_")
    return LoopSettings.from_args(
        args,
        total_steps=total_steps,
        metric_for_best_model=metric,
        greater_is_better=metric == "accuracy",
        keep_best=args.metric_for_best_model is not None or args.early_stopping_patience is not None,
        fingerprint={
            **data_fingerprint,
            **{name: getattr(args, name) for name in RESUME_ARGUMENTS},
            **arguments.resume_fingerprint(args),
            "warm-up steps": warmup_steps(args, total_steps),
        },
    )


def _results(
    args: argparse.Namespace, model: nn.Module, loop: TrainingLoop, prepare: SpanCorruption
) -> dict[str, Any]:
    state = loop.state
    tokens = state.examples * prepare.block_length
    return {
        "train_loss": state.loss_total / state.step if state.step else None,
        "epoch": state.epoch,
        "steps": state.step,
        "train_samples": state.examples,
        "train_tokens": tokens,
        "train_runtime": round(state.train_seconds, 3),
        "train_tokens_per_second": round(tokens / state.train_seconds, 1) if state.train_seconds else None,
        "block_length": prepare.block_length,
        "target_length": prepare.target_length,
        "best_step": state.best_step,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seed": args.seed,
    }


def _dev_results(evaluator: SpanCorruptionEvaluator) -> dict[str, Any]:
    return {
        **{f"eval_{key}": value for key, value in evaluator.metrics.items()},
        "eval_samples": len(evaluator.loader.dataset),
        "eval_runtime": round(evaluator.seconds, 3),
        **evaluator.gate(),
    }


def _write_outputs(args: argparse.Namespace, results: dict[str, Any]) -> None:
    folder = Path(args.output_dir)
    save_results(folder / outputs.RESULTS_FILE, results, args)
    name = Path(args.model_name_or_path).name if args.model_name_or_path else f"new {args.model_type}"
    plot_curves(
        read_log(folder / LOG_FILE),
        ["accuracy"],
        folder / outputs.CURVES_FILE,
        f"span corruption: {name}, seed {args.seed}",
    )
    if args.push_to_hub:
        print(f"pushed to {outputs.push_folder(args)}")
    scores = "no held-out text"
    if "eval_loss" in results:
        scores = f"dev loss {results['eval_loss']:.4f} (perplexity {results['eval_perplexity']:.2f}), "
        scores += f"accuracy {results['eval_accuracy']:.4f}"
    print(f"{scores}; {results['steps']} steps in {results['train_runtime']:.0f} s; results in {folder}")
    if "gate_passed" in results:
        costs = [results[f"gate_{name}_cost"] for name in ("shuffled", "zeroed_attention")]
        print(
            f"gate {'passed' if results['gate_passed'] else 'FAILED'}: shuffled words cost {costs[0]:+.3f} nats, "
            f"zeroed attention {costs[1]:+.3f}; both must be at least {GATE_COST}"
        )
