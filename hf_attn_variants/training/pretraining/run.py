"""The course of pretraining: a stream of text in; a model and its dev scores out."""

import logging
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..engine import outputs
from ..engine.dataloaders import IGNORED_LABEL, create_eval_dataloader
from ..engine.loop import TrainingLoop
from ..engine.loop_settings import LoopSettings, total_training_steps
from ..engine.models import model_name
from ..engine.optimization import prepare_training
from ..engine.session import start_run
from .context_check import MIN_COST
from .evaluation import TextEvaluator
from .settings import PretrainingSettings
from .task import PreparedBlocks, PretrainingTask, stream_batches
from .text_sources import PretrainingText
from .text_stream import read_blocks, stack_rows

__all__ = ["pretrain"]

logger = logging.getLogger(__name__)


def pretrain(
    settings: PretrainingSettings,
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: PretrainingText,
    task: PretrainingTask,
) -> dict[str, Any]:
    """Train, save, evaluate, and try whether the model reads its context.

    The model was made or loaded with the run's seed set. Return the results that `all_results.json` begins with.

    Raises:
        ValueError, OSError: if the text is wrong, or something cannot be written.
        NonFiniteLossError: if training diverged.
    """
    packing = tokenizer, task.prepare.block_length, task.prepare.separator
    if text.train:  # text without a token is an error now
        read_blocks(text.train, *packing, limit=1)
    set_seed(settings.seed, device_specific=True)  # processes drop out different units
    batches = stream_batches(settings, accelerator, text.train, tokenizer, task.prepare, settings.shuffle_buffer_size)
    total_steps = total_training_steps(
        None, settings.gradient_accumulation_steps, settings.num_train_epochs, settings.max_train_steps
    )
    model, optimizer, scheduler = prepare_training(settings, accelerator, model, total_steps)
    evaluator = None
    if text.dev:
        rows = PreparedBlocks(read_blocks(text.dev, *packing, settings.max_eval_samples), task.prepare)
        if not any((rows[i]["labels"] != IGNORED_LABEL).any() for i in range(len(rows))):
            raise ValueError(
                f"{text.dev[0].name} is too short: no token of the held-out text is masked, so nothing would be scored"
            )
        workers = settings.dataloader_num_workers
        loader = create_eval_dataloader(rows, settings.per_device_eval_batch_size, stack_rows, workers)
        evaluator = TextEvaluator(accelerator, model, accelerator.prepare(loader), task, settings)
    loop = TrainingLoop(
        accelerator,
        model,
        optimizer,
        scheduler,
        batches.loader,
        replace(task.objective, examples=lambda batch: int(batch["examples"])),
        LoopSettings.from_settings(settings, total_steps, "loss", text.train_fingerprint, text.dev_fingerprint),
        evaluate=evaluator,
        start_epoch=batches.start_epoch,
        seek=batches.seek,
    )
    history = start_run(settings, accelerator)
    state = loop.run()
    outputs.save_model(accelerator, model, tokenizer, settings, history)
    results = {**loop.results(state.examples), **task.results, "epoch": state.epoch, "seed": settings.seed}
    if evaluator is not None:
        if not loop.scores_are_current():
            evaluator()
        dev = {f"eval_{key}": value for key, value in evaluator.metrics.items()}
        dev |= {"eval_samples": len(rows), "eval_runtime": round(evaluator.seconds, 3), **evaluator.check_context()}
        results = dev | results
    if accelerator.is_main_process:
        _write_outputs(settings, results, task)
    return results


def _write_outputs(settings: PretrainingSettings, results: dict[str, Any], task: PretrainingTask) -> None:
    shown = ["accuracy", *(["sentence_accuracy"] if "eval_sentence_accuracy" in results else [])]
    outputs.write_results(settings, results, shown, f"{task.name}: {model_name(settings)}")
    scores = "no held-out text"
    if "eval_loss" in results:
        scores = f"dev loss {results['eval_loss']:.4f} (perplexity {results['eval_perplexity']:.2f}), "
        scores += f"accuracy {results['eval_accuracy']:.4f}"
    if "eval_sentence_accuracy" in results:
        scores += f", of pairs {results['eval_sentence_accuracy']:.4f}"
    print(f"{scores}; {results['steps']} steps in {results['train_runtime']:.0f} s; results in {settings.output_dir}")
    if "gate_passed" in results:
        _print_context_check(results, task)


def _print_context_check(results: dict[str, Any], task: PretrainingTask) -> None:
    print(
        f"gate {'passed' if results['gate_passed'] else 'FAILED'}: shuffled words cost "
        f"{results['gate_shuffled_cost']:+.3f} nats, zeroed attention {results['gate_zeroed_attention_cost']:+.3f}; "
        f"both must be at least {MIN_COST}"
    )
    if not results["gate_passed"]:
        logger.warning(
            "this is still a %s model: it does not read its context, and no experiment on its attention shows "
            "anything. Train it longer, or with a higher --learning_rate, longer warm-up, shorter --max_length or a "
            "smaller vocabulary",
            task.without_context,
        )
