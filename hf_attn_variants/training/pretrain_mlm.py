"""Pretrains a BERT or ALBERT as a masked language model; the body of `scripts/pretrain_mlm.py`."""

import argparse
import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import hf_attn_variants  # noqa: F401  (registers our architectures with the Auto classes)
from hf_attn_variants.training import arguments, outputs
from hf_attn_variants.training.checkpoints import LOG_FILE, find_checkpoint
from hf_attn_variants.training.data import create_eval_dataloader, create_stream_dataloader
from hf_attn_variants.training.loop import LoopSettings, TrainingLoop, total_training_steps
from hf_attn_variants.training.masked_lm import (
    GATE_COST,
    MaskedBlocks,
    MaskedLMEvaluator,
    MaskedLMPreparation,
    find_head,
    masked_lm_objective,
)
from hf_attn_variants.training.models import (
    check_max_length,
    enable_gradient_checkpointing,
    load_config,
    load_model,
    load_tokenizer,
)
from hf_attn_variants.training.new_model import new_config, new_masked_lm
from hf_attn_variants.training.optimization import create_optimizer, create_scheduler, warmup_steps
from hf_attn_variants.training.session import open_accelerator, start_trackers
from hf_attn_variants.training.text_data import TextSource, TextStream, read_blocks, stack_rows
from hf_attn_variants.training.text_sources import add_text_arguments, check_text_arguments, open_text_sources
from hf_attn_variants.training.tracking import plot_curves, read_log, save_results

__all__ = ["main", "parse_args"]

logger = logging.getLogger(__name__)
MODEL_TYPES = ("albert", "bert")
METRICS = ("loss", "perplexity", "accuracy")
# What decides the weights a run ends with, beyond `arguments.RESUME_ARGUMENTS`.
RESUME_ARGUMENTS = (
    "model_type",
    "config_overrides",
    "num_key_value_heads",
    "talking_heads",
    "mlm_probability",
    "whole_word_mask",
    "shuffle_buffer_size",
)

EPILOG = """example (a small ALBERT from scratch, on gzip shards of text whose articles an empty line separates):
  python scripts/pretrain_mlm.py --model_type albert --tokenizer_name albert/albert-base-v2 \\
      --config_overrides hidden_size=256,num_hidden_layers=4,num_attention_heads=8,intermediate_size=1024 \\
      --train_file wikipedia/train-*.txt.gz --validation_file wikipedia/valid.txt.gz --max_eval_samples 500 \\
      --max_train_steps 10000 --learning_rate 1e-3 --num_warmup_steps 500 --eval_steps 1000 --output_dir runs/albert

Text is read as a stream, tokenised and packed into blocks of --max_length as training goes; --max_train_steps says how
long. With --num_key_value_heads or --talking_heads the new model is an attention variant. --output_dir gets the model
with its tokenizer, all_results.json, train_log.jsonl and training_curves.png. eval_loss is the mean over the masked
tokens in nats, the logarithm of eval_perplexity. At the end a gate says whether the model reads its context at all:
the dev loss with the words shuffled, and with attention zeroed, must each be 0.3 nats worse; a young model that only
knows how frequent tokens are fails it. One that passes within minutes on a CPU core: benchmarks/albert_mlm.py.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (`sys.argv` without an argument)."""
    parser = argparse.ArgumentParser(
        description="Pretrain a BERT or ALBERT as a masked language model, from scratch or from a checkpoint.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_text_arguments(parser)
    masking = parser.add_argument_group("masking")
    masking.add_argument(
        "--mlm_probability", type=float, default=0.15, help="Chance of a token to be masked; anew in every epoch."
    )
    masking.add_argument("--whole_word_mask", action="store_true", help="Mask words instead of tokens.")
    scratch = parser.add_argument_group("from scratch (without --model_name_or_path)")
    scratch.add_argument("--model_type", choices=MODEL_TYPES, help="The architecture.")
    scratch.add_argument(
        "--config_overrides",
        metavar="FIELD=VALUE,...",
        help="Config fields that differ from the architecture's defaults.",
    )
    scratch.add_argument("--num_key_value_heads", type=int, help="Key/value heads of a layer; 1: multi-query.")
    scratch.add_argument("--talking_heads", choices=["logits", "weights", "both"], help="Projections across heads.")
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
        The results that `all_results.json` begins with: `eval_loss` (nats a masked token), `eval_perplexity`,
        `eval_accuracy`, `gate_passed` and what it saw, `train_loss` (the mean over all steps), `train_tokens`,
        `train_runtime` (seconds in training steps, without evaluation and checkpoints), ...

    Raises:
        ValueError, OSError: An argument, the text or the checkpoint is wrong; found before training where it can be.
        NonFiniteLossError: Training diverged.
    """
    arguments.check_arguments(args)
    _check_own_arguments(args)
    if args.resume_from_checkpoint:
        find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    arguments.prepare_output_dir(args, write=False)
    outputs.check_hub_access(args)
    with open_accelerator(args) as accelerator:
        return _run(args, accelerator)


def _check_own_arguments(args: argparse.Namespace) -> None:
    check_text_arguments(args, METRICS)
    if not 0 < args.mlm_probability < 1:
        raise ValueError(f"--mlm_probability must be in (0, 1), got {args.mlm_probability}")
    if args.model_name_or_path is None:
        if args.model_type is None or args.tokenizer_name is None:
            raise ValueError(
                "give --model_name_or_path, or --model_type and --tokenizer_name for a model from scratch"
            )
        return
    for name in ("model_type", "config_overrides", "num_key_value_heads", "talking_heads"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name} is for a model from scratch; --model_name_or_path {args.model_name_or_path} has its own "
                "(scripts/convert_checkpoint.py makes variants of it)"
            )


def _run(args: argparse.Namespace, accelerator: Accelerator) -> dict[str, Any]:
    config = load_config(args) if args.model_name_or_path is not None else None
    tokenizer = load_tokenizer(args, config)
    config = config if config is not None else new_config(args, tokenizer)
    check_max_length(args.max_length, config, tokenizer)
    train, dev, data_fingerprint = open_text_sources(args)
    prepare = MaskedLMPreparation(
        tokenizer, args.max_length, args.mlm_probability, args.seed, whole_words=args.whole_word_mask
    )
    set_seed(args.seed)
    model = _model(args, config)
    head = find_head(model)
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
        masked_lm_objective(head),
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
    results = _results(args, accelerator.unwrap_model(model), loop)
    if evaluator is not None:
        if not evaluator.metrics or (loop.settings.keep_best and state.best_step != state.step):
            evaluator()
        results = {**_dev_results(evaluator), **results}
    outputs.save_model(accelerator, model, tokenizer, args.output_dir)
    if accelerator.is_main_process:
        _write_outputs(args, results)
    accelerator.wait_for_everyone()
    return results


def _model(args: argparse.Namespace, config: PreTrainedConfig) -> PreTrainedModel:
    if args.model_name_or_path is None:
        model = new_masked_lm(args, config)
    else:
        model = load_model(args, args.model_name_or_path, config, AutoModelForMaskedLM)
    if args.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def _train_loader(
    args: argparse.Namespace,
    accelerator: Accelerator,
    sources: list[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    prepare: MaskedLMPreparation,
) -> tuple[TextStream, DataLoader]:
    stream = TextStream(
        sources,
        tokenizer,
        args.max_length - prepare.num_special,
        prepare.sep_id,
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
    prepare: MaskedLMPreparation,
) -> MaskedLMEvaluator | None:
    if not sources:
        return None
    blocks = read_blocks(
        sources, tokenizer, args.max_length - prepare.num_special, prepare.sep_id, args.max_eval_samples
    )
    loader = create_eval_dataloader(
        MaskedBlocks(blocks, prepare), args.per_device_eval_batch_size, stack_rows, args.dataloader_num_workers
    )
    return MaskedLMEvaluator(accelerator, model, accelerator.prepare(loader), args.disable_tqdm)


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


def _results(args: argparse.Namespace, model: nn.Module, loop: TrainingLoop) -> dict[str, Any]:
    state = loop.state
    tokens = state.examples * args.max_length
    return {
        "train_loss": state.loss_total / state.step if state.step else None,
        "epoch": state.epoch,
        "steps": state.step,
        "train_samples": state.examples,
        "train_tokens": tokens,
        "train_runtime": round(state.train_seconds, 3),
        "train_tokens_per_second": round(tokens / state.train_seconds, 1) if state.train_seconds else None,
        "best_step": state.best_step,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seed": args.seed,
    }


def _dev_results(evaluator: MaskedLMEvaluator) -> dict[str, Any]:
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
        read_log(folder / LOG_FILE), ["accuracy"], folder / outputs.CURVES_FILE, f"masked LM: {name}, seed {args.seed}"
    )
    if args.push_to_hub:
        print(f"pushed to {outputs.push_folder(args)}")
    scores = "no held-out text"
    if "eval_loss" in results:
        scores = f"dev loss {results['eval_loss']:.4f} (perplexity {results['eval_perplexity']:.2f}), "
        scores += f"accuracy {results['eval_accuracy']:.4f}"
    print(f"{scores}; {results['steps']} steps in {results['train_runtime']:.0f} s; results in {folder}")
    if "gate_passed" in results:
        _print_gate(results)


def _print_gate(results: dict[str, Any]) -> None:
    print(
        f"gate {'passed' if results['gate_passed'] else 'FAILED'}: shuffled words cost "
        f"{results['gate_shuffled_cost']:+.3f} nats, zeroed attention {results['gate_zeroed_attention_cost']:+.3f}; "
        f"both must be at least {GATE_COST}"
    )
    if not results["gate_passed"]:
        logger.warning(
            "this is still a unigram model: it does not read its context, and no experiment on its attention shows "
            "anything. Train it longer, or with a higher --learning_rate, longer warm-up, shorter --max_length or a "
            "smaller vocabulary"
        )
