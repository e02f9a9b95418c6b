"""Continues training a converted checkpoint to restore its quality; the body of `scripts/uptrain.py`."""

import argparse
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from torch import Tensor, nn
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

import hf_attn_variants  # noqa: F401  (registers our architectures with the Auto classes)

from ...conversion.checkpoint.reading import open_checkpoint
from ...conversion.checkpoint.source import copy_side_files, resolve_source, side_files
from ...errors import NonFiniteLossError
from ..engine import arguments, outputs
from ..engine.dataloaders import create_eval_dataloader, prepare_train_dataloader
from ..engine.loop import TrainingLoop
from ..engine.loop_settings import LoopSettings, total_training_steps
from ..engine.models import (
    DROPOUT_FIELDS,
    check_max_length,
    enable_gradient_checkpointing,
    give_token_types,
    load_config,
    load_model,
    load_model_and_rest,
    load_tokenizer,
    resolve_architecture,
    set_dropout,
)
from ..engine.optimization import prepare_training
from ..engine.session import open_session, start_run
from ..engine.tracking import read_log
from .data import UptrainingData, hash_texts, load_uptraining_data
from .distillation import Teacher, check_teacher
from .objective import TERMS, TermWeights, UptrainingEvaluator, UptrainingObjective
from .settings import (
    check_architecture,
    check_uptraining_arguments,
    parse_args,
    term_weights,
)
from .trainable import add_lora, freeze_unused, merge_lora, select_trainable

__all__ = ["main", "parse_args"]

logger = logging.getLogger(__name__)

DEFAULT_STEPS = 300
# Rows of the training text whose activations say what variance an error is divided by.
VARIANCE_ROWS = 256
GREATER_IS_BETTER = ("embedding_cosine", "bleu")
EVALUATIONS = 5


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Uptrains, evaluates and saves.

    Args:
        args: Of `parse_args`.

    Returns:
        The results that `all_results.json` begins with: `eval_loss`, each term of the loss and other dev metrics after
        training, the same as `initial_eval_<metric>` before it, `train_loss` (the mean over all steps), `steps`,
        `train_runtime` (seconds in training steps, without evaluation and checkpoints), ...

    Raises:
        ValueError, OSError: An argument, the data or a checkpoint is wrong; found before training where it can be.
        NonFiniteLossError: The loss is not finite, before or in training.
    """
    arguments.check_arguments(args)
    check_uptraining_arguments(args)
    with open_session(args) as accelerator:
        return _run(args, accelerator)


def _run(args: argparse.Namespace, accelerator: Accelerator) -> dict[str, Any]:
    config, own_dropout = _load_config(args)
    weights = term_weights(args, config)
    teacher_config = _load_teacher_config(args, config, weights)
    tokenizer = load_tokenizer(args, config)
    _check_teacher_tokenizer(args, tokenizer)
    data = load_uptraining_data(args, config, tokenizer)
    pairs = not config.is_encoder_decoder and isinstance(data.train.texts[0], tuple)
    check_max_length(args.max_length, config, tokenizer, pairs)
    tells_pairs = pairs and give_token_types(tokenizer, config)
    set_seed(args.seed)
    model_class = _model_class(args, args.model_name_or_path, config)
    model, rest = load_model_and_rest(args, args.model_name_or_path, config, model_class)
    carried = _read_tensors(args.model_name_or_path, rest)
    if args.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    select_trainable(model, args.trainable)
    peft_model = add_lora(model, args.lora_rank, args.lora_alpha) if args.trainable == "lora" else None
    teacher = _load_teacher(args, accelerator, weights, teacher_config)
    objective = UptrainingObjective(model, weights, teacher)
    model.to(accelerator.device)
    _look_at_data(args, accelerator, model, objective, data)
    set_seed(args.seed, device_specific=True)  # processes drop out different units
    loader, sampler = prepare_train_dataloader(args, accelerator, data.train, data.collate, data.train.lengths)
    total_steps = _total_steps(args, len(loader))
    wrapped, optimizer, scheduler = prepare_training(args, accelerator, model, total_steps)
    evaluator = _evaluator(args, accelerator, wrapped, objective, data, tokenizer)
    settings = _loop_settings(args, total_steps, data, weights)
    loop = TrainingLoop(
        accelerator,
        wrapped,
        optimizer,
        scheduler,
        loader,
        objective.as_objective(),
        settings,
        evaluate=evaluator,
        start_epoch=lambda epoch: (sampler.start_epoch(epoch), data.train.start_epoch(epoch)),
    )
    history = start_run(args, accelerator)
    if not args.resume_from_checkpoint:
        _evaluate_before(evaluator, loop)
    loop.run()
    if not loop.scores_are_current():
        evaluator()
    results = _results(args, model, evaluator, loop, data)
    for name, value in own_dropout.items():
        setattr(model.config, name, value)
    trained = wrapped if peft_model is None else merge_lora(peft_model)
    outputs.save_model(accelerator, trained, tokenizer, args.output_dir, history, carried)
    if accelerator.is_main_process:
        _copy_side_files(args, [TOKENIZER_CONFIG_FILE] if tells_pairs else [])
        _write_outputs(args, results)
        outputs.push_folder(args)
    return results


def _load_config(args: argparse.Namespace) -> tuple[PreTrainedConfig, dict[str, float]]:
    """The config to train with, and the dropout probabilities that the saved one gets back."""
    config = load_config(args)
    check_architecture(args, config)
    own = {name: getattr(config, name) for name in DROPOUT_FIELDS if hasattr(config, name)}
    if args.dropout_rate is None and args.objective in ("distill", "embedding") and own:
        # The teacher drops nothing; what a student drops it could only answer with noise.
        set_dropout(config, 0.0)
    return config, own


def _model_class(args: argparse.Namespace, source: str, config: PreTrainedConfig) -> type:
    auto_class = {"mlm": AutoModelForMaskedLM, "seq2seq": AutoModelForSeq2SeqLM}.get(args.objective)
    return auto_class or resolve_architecture(source, config)


def _load_teacher_config(
    args: argparse.Namespace, config: PreTrainedConfig, weights: TermWeights
) -> PreTrainedConfig | None:
    if args.teacher is None:
        return None
    found = load_config(_of_teacher(args))
    check_teacher(
        config, found, weights.hidden_states > 0, weights.attention_outputs > 0, weights.embedding_distance > 0
    )
    return found


def _of_teacher(args: argparse.Namespace) -> argparse.Namespace:
    own = {"model_name_or_path": args.teacher, "tokenizer_name": None, "dropout_rate": None}
    return argparse.Namespace(**vars(args) | own)


def _check_teacher_tokenizer(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
    if args.teacher is None:
        return
    try:
        others = load_tokenizer(_of_teacher(args), None)
    except OSError:  # a folder with weights alone is a teacher too
        return
    if others.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"--teacher {args.teacher} has another vocabulary than {args.model_name_or_path}: it would see other words"
        )


def _load_teacher(
    args: argparse.Namespace, accelerator: Accelerator, weights: TermWeights, config: PreTrainedConfig | None
) -> Teacher | None:
    if config is None:
        return None
    model = load_model(args, args.teacher, config, _model_class(args, args.teacher, config))
    return Teacher(
        model.to(accelerator.device),
        hidden_states=weights.need_hidden_states,
        attention_outputs=weights.attention_outputs > 0,
        autocast=accelerator.autocast,
    )


def _look_at_data(
    args: argparse.Namespace,
    accelerator: Accelerator,
    model: PreTrainedModel,
    objective: UptrainingObjective,
    data: UptrainingData,
) -> None:
    """Measures the teacher's variances and freezes parameters that the loss does not depend on."""

    def batches(count: int, size: int) -> Iterator[dict[str, Tensor]]:
        rows = [data.train[i] for i in range(min(count, len(data.train)))]
        for start in range(0, len(rows), size):
            yield send_to_device(data.collate(rows[start : start + size]), accelerator.device)

    if objective.weights.hidden_states or objective.weights.attention_outputs:
        found = batches(VARIANCE_ROWS, args.per_device_eval_batch_size)
        objective.teacher.measure_variances(
            ({key: value for key, value in batch.items() if key != "labels"}, objective.masks(batch))
            for batch in found
        )
    batch = next(batches(2, 2))
    unused = freeze_unused(model.eval(), lambda: objective.total(objective.terms(model, batch)))
    if unused:
        logger.info("frozen, because the loss does not depend on them: %s", ", ".join(unused))


def _total_steps(args: argparse.Namespace, batches_per_epoch: int) -> int:
    steps = args.max_train_steps
    if args.alpha is not None:
        steps = math.ceil(args.alpha * args.pretraining_steps)
    elif steps is None and args.num_train_epochs is None:
        steps = DEFAULT_STEPS
    return total_training_steps(batches_per_epoch, args.gradient_accumulation_steps, args.num_train_epochs or 0, steps)


def _evaluator(
    args: argparse.Namespace,
    accelerator: Accelerator,
    model: nn.Module,
    objective: UptrainingObjective,
    data: UptrainingData,
    tokenizer: PreTrainedTokenizerBase,
) -> UptrainingEvaluator:
    loader = create_eval_dataloader(
        data.held_out, args.per_device_eval_batch_size, data.collate, args.dataloader_num_workers
    )
    return UptrainingEvaluator(
        accelerator,
        model,
        objective,
        accelerator.prepare(loader),
        args.disable_tqdm,
        tokenizer,
        [target for _, target in data.held_out.texts] if args.predict_with_generate else None,
        args.max_target_length or args.max_length,
    )


def _loop_settings(
    args: argparse.Namespace, total_steps: int, data: UptrainingData, weights: TermWeights
) -> LoopSettings:
    return LoopSettings.from_args(
        args,
        total_steps,
        default_metric="loss",
        greater_is_better=lambda metric: metric in GREATER_IS_BETTER,
        eval_steps=args.eval_steps or max(1, math.ceil(total_steps / EVALUATIONS)),
        data={
            "objective": args.objective,
            "teacher": args.teacher,
            "weights of the terms": asdict(weights),
            "trainable": [args.trainable, args.lora_rank, args.lora_alpha],
            "mlm_probability": args.mlm_probability,
            "lengths of targets": args.max_target_length,
            "source_prefix": args.source_prefix,
            "training examples": len(data.train),
            "hash of the training data": hash_texts(data.train.texts),
        },
        evaluation={"hash of the held-out data": hash_texts(data.held_out.texts)},
    )


def _evaluate_before(evaluator: UptrainingEvaluator, loop: TrainingLoop) -> None:
    metrics = evaluator()
    wanted = loop.settings.metric_for_best_model
    if loop.settings.keep_best and wanted not in metrics:
        raise ValueError(f"--metric_for_best_model {wanted!r}: the dev metrics are {', '.join(metrics)}")
    if not math.isfinite(metrics["loss"]):
        raise NonFiniteLossError(
            f"the held-out loss is {metrics['loss']} before training: the checkpoint or its teacher gives no numbers"
        )
    loop.evaluated_step = 0
    loop.log.write({"step": 0, "epoch": 0.0, **{f"eval_{key}": value for key, value in metrics.items()}})


def _results(
    args: argparse.Namespace,
    model: nn.Module,
    evaluator: UptrainingEvaluator,
    loop: TrainingLoop,
    data: UptrainingData,
) -> dict[str, Any]:
    before = next((record for record in read_log(loop.log.path) if record["step"] == 0), {})
    return {
        **{f"eval_{key}": value for key, value in evaluator.metrics.items()},
        **{f"initial_{key}": value for key, value in before.items() if key.startswith("eval_")},
        "eval_samples": len(data.held_out),
        "eval_runtime": round(evaluator.seconds, 3),
        **loop.results(len(data.train)),
        "num_trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "objective": args.objective,
        "seed": args.seed,
    }


def _read_tensors(source: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Reads what the trained model has no place for, such as the pooler of a BERT that was saved with it.

    A head that is put on the result wants them: it would begin with weights drawn anew.
    """
    if not names:
        return {}
    try:
        with open_checkpoint(resolve_source(source)) as reader:
            found = {name: reader.read(name) for name in names if name in reader.entries}
    except ValueError as error:  # a pickle
        logger.warning("not carried over: %s (%s)", ", ".join(names), error)
        return {}
    # In float32, as the trained weights; old checkpoints also hold numbers of positions.
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def _copy_side_files(args: argparse.Namespace, own: Sequence[str]) -> None:
    """Copies what lies beside the source's weights, so that the result is as whole a checkpoint as the source.

    Args:
        args: The run's.
        own: Names of files that are not to be the source's.
    """
    folder, output = resolve_source(args.model_name_or_path, weights=False), Path(args.output_dir)
    if folder.resolve() == output.resolve():
        return
    copied, _ = side_files(folder, [])
    # The code is the one that the model was saved with, and a tokenizer from elsewhere stays.
    kept = [
        name
        for name in copied
        if not (output / name).exists() or not (name in own or name.endswith(".py") or args.tokenizer_name)
    ]
    copy_side_files(folder, output, kept)


def _write_outputs(args: argparse.Namespace, results: dict[str, Any]) -> None:
    names = [name for name in (*GREATER_IS_BETTER, *TERMS) if f"eval_{name}" in results]
    shown = [name for name in names if name in GREATER_IS_BETTER] or names
    outputs.write_results(args, results, shown, f"{args.objective}: {Path(args.model_name_or_path).name}")
    scores = ", ".join(
        f"{name} {results.get(f'initial_eval_{name}', math.nan):.4f} -> {results[f'eval_{name}']:.4f}"
        for name in ("loss", *shown)
    )
    print(
        f"{args.objective} on {results['eval_samples']} held-out rows: {scores}; {results['steps']} steps in "
        f"{results['train_runtime']:.0f} s; results in {args.output_dir}"
    )
