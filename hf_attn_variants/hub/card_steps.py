"""The facts about the steps that made a model on its card; `templates/model_card.md` has the sentences."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from ..conversion.quality import Quality
from ..glue_tasks import TASKS

__all__ = ["begins_with_model", "data_name", "hub_source", "last_training", "step_facts", "text_columns"]

Step = Mapping[str, Any]
# The arguments that describe a training, and those that describe an evaluation.
TRAINING_ARGUMENTS = """task_name dataset_name objective teacher num_train_epochs max_train_steps pretraining_steps
alpha class_weights per_device_train_batch_size gradient_accumulation_steps learning_rate optim lr_scheduler_type
num_warmup_steps warmup_ratio weight_decay max_grad_norm label_smoothing_factor dropout_rate max_length
max_target_length mixed_precision trainable seed""".split()
EVALUATION_ARGUMENTS = ("task_name", "dataset_name", "max_length", "max_target_length", "num_beams", "seed")


def step_facts(steps: Sequence[Step], base_model: str | None) -> list[dict[str, Any]]:
    """Return the steps with what the template needs besides.

    Args:
        steps: of `ModelHistory`, without local paths.
        base_model: Hub id of the model that the first step started from.

    Returns:
        For each step its fields, "verb" and "title". For a conversion also "origin", and "heads" holds those that it
        changed. For a training also "data", "no_gain" and "rows".
    """
    found = []
    for index, step in enumerate(steps):
        verb, title = _verb_and_title(step)
        facts: dict[str, Any] = {**step, "verb": verb, "title": title}
        if step["kind"] == "conversion":
            heads = step.get("heads", {})
            facts["heads"] = {name: pair for name, pair in heads.items() if pair[0] != pair[1]} or heads
            facts["origin"] = base_model if index == 0 and base_model else step.get("source", "a checkpoint")
            facts["quality"] = Quality.of(step.get("quality", {}))
        else:
            before, after = step.get("initial_eval_loss"), step.get("eval_loss")
            facts["no_gain"] = bool(step.get("steps")) and before is not None and after is not None and after >= before
            facts["data"] = (data_name(step, ("train_file", "source_file")) or {}).get("dataset_name")
            facts["rows"] = _argument_rows(step["arguments"], verb == "evaluated")
        found.append(facts)
    return found


def last_training(steps: Sequence[Step]) -> Step | None:
    """Return the training whose scores the model has; None if a conversion followed it."""
    return steps[-1] if steps and steps[-1]["kind"] == "training" else None


def begins_with_model(step: Step) -> bool:
    """Return whether a step started from a model, and not from scratch."""
    return step["kind"] == "conversion" or step["arguments"].get("model_name_or_path") is not None


def hub_source(steps: Sequence[Step]) -> str | None:
    """Return the Hub id that the latest step names; a folder's name would mean nothing to others."""
    for step in reversed(steps):
        name = step["arguments"].get("model_name_or_path") if step["kind"] == "training" else None
        if step["kind"] == "conversion" and step.get("source_revision"):
            name = step.get("source")
        if isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not Path(name).exists():
            return name
    return None


def text_columns(steps: Sequence[Step]) -> Sequence[str]:
    """Return the columns of text that the model was last trained on; () if no step names them."""
    for step in reversed(steps):
        if step["kind"] == "training" and ("problem_type" in step or _glue_task(step) in TASKS):
            task = TASKS.get(_glue_task(step) or "")
            return [names[0] for names in task.text_columns] if task is not None else step.get("text_columns", ())
    return ()


def data_name(training: Step, file_arguments: Sequence[str]) -> dict[str, str] | None:
    """Return the name of a training's data, as the fields of `huggingface_hub.EvalResult`.

    Args:
        training: the step.
        file_arguments: the arguments that name the split's files.
    """
    arguments, task = training["arguments"], _task_name(training)
    if "dataset" in training:
        return training["dataset"]
    if task in TASKS:
        return {"dataset_type": "nyu-mll/glue", "dataset_name": f"GLUE {task.upper()}", "dataset_config": task}
    given = [arguments.get(name) for name in file_arguments]
    paths = [each for value in given for each in (value if isinstance(value, list) else [value]) if each]
    named = arguments.get("dataset_name") or next((PurePath(each).name for each in paths), None)
    if named is None and (task == "squad" or "version_2_with_negative" in arguments):
        if arguments.get("version_2_with_negative"):
            return {"dataset_type": "rajpurkar/squad_v2", "dataset_name": "SQuAD 2.0"}
        return {"dataset_type": "rajpurkar/squad", "dataset_name": "SQuAD 1.1"}
    return {"dataset_type": re.sub(r"[^\w./-]+", "-", named), "dataset_name": named} if named else None


def _argument_rows(arguments: Mapping[str, Any], is_evaluation: bool) -> list[tuple[str, Any]]:
    names = EVALUATION_ARGUMENTS if is_evaluation else TRAINING_ARGUMENTS
    without = "num_train_epochs" if not is_evaluation and arguments.get("max_train_steps") is not None else None
    return [(name, arguments[name]) for name in names if arguments.get(name) not in (None, "") and name != without]


def _verb_and_title(step: Step) -> tuple[str, str]:
    if step["kind"] == "conversion":
        return "converted", "Conversion"
    arguments = step["arguments"]
    if step.get("steps") == 0:
        return "evaluated", "Evaluation"
    # Pretraining has an objective among its arguments, too.
    if "objective" in step or ("objective" in arguments and "whole_word_mask" not in arguments):
        return "distilled" if arguments.get("teacher") else "uptrained", "Uptraining"
    is_pretraining = "mlm_probability" in arguments or "noise_density" in arguments
    return "pretrained" if is_pretraining else "fine-tuned", "Training"


def _glue_task(training: Step) -> str | None:
    return None if "dataset" in training else _task_name(training)


def _task_name(training: Step) -> str | None:
    # What was asked for may be written in another way ("STS-B") than the results write it.
    return training.get("task_name") or training["arguments"].get("task_name")
