"""What a model card says of the steps that made a model, each from the values of `model_history.ModelHistory`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from ..conversion.quality import Quality
from ..glue_tasks import TASKS, GlueTask
from .card_escapes import code, plain

__all__ = [
    "begins_with_model",
    "chain_sentence",
    "data_name",
    "hub_source",
    "is_only_converted",
    "last_training",
    "quality_sentence",
    "reads_pairs",
    "step_lines",
    "step_sections",
    "task_of",
]

# Arguments that say how a model was trained; paths and the like stay at home.
TRAINING_ARGUMENTS = """task_name dataset_name objective teacher num_train_epochs max_train_steps pretraining_steps
alpha class_weights per_device_train_batch_size gradient_accumulation_steps learning_rate optim lr_scheduler_type
num_warmup_steps warmup_ratio weight_decay max_grad_norm label_smoothing_factor dropout_rate max_length
max_target_length mixed_precision trainable seed""".split()
# Of a run that only evaluates.
EVALUATION_ARGUMENTS = ("task_name", "dataset_name", "max_length", "max_target_length", "num_beams", "seed")
EVALUATED = "evaluated"
TRAINING_FILES = ("train_file", "source_file")
PRETRAINING = ("mlm_probability", "noise_density")
Step = Mapping[str, Any]
# What a classifier of a user's own tables does, by transformers' name of the problem.
PROBLEMS = {
    "single_label_classification": "It gives each text one of {} labels",
    "multi_label_classification": "It gives each text any of {} labels",
    "regression": "It gives each text a number",
}
MOST_LABELS = 30


def last_training(steps: Sequence[Step]) -> Step | None:
    """Return the training whose weights, and so whose scores, the model has: none where a conversion followed."""
    return steps[-1] if steps and steps[-1]["kind"] == "training" else None


def begins_with_model(step: Step) -> bool:
    """Say whether a step was made of a model, and not from scratch."""
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


def task_of(steps: Sequence[Step]) -> GlueTask | None:
    """Return the GLUE task that the model was last trained on; None where a user's own came after."""
    last = _last_with_task(steps)
    return TASKS.get(_glue_task(last) or "") if last is not None else None


def reads_pairs(steps: Sequence[Step]) -> bool:
    """Say whether the model was last trained on two columns of text of a user's own."""
    last = _last_with_task(steps)
    return last is not None and len(last.get("text_columns", ())) == 2


def _last_with_task(steps: Sequence[Step]) -> Step | None:
    trainings = [step for step in reversed(steps) if step["kind"] == "training"]
    return next((step for step in trainings if "problem_type" in step or _glue_task(step) in TASKS), None)


def data_name(training: Step, file_arguments: Sequence[str]) -> dict[str, str] | None:
    """Return what a training's data is called, as the fields of `huggingface_hub.EvalResult`.

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
    files = [PurePath(each).name for each in paths]
    named = arguments.get("dataset_name") or next(iter(files), None)
    if named is None and (task == "squad" or "version_2_with_negative" in arguments):
        second = bool(arguments.get("version_2_with_negative"))
        return {
            "dataset_type": "rajpurkar/squad_v2" if second else "rajpurkar/squad",
            "dataset_name": "SQuAD 2.0" if second else "SQuAD 1.1",
        }
    return {"dataset_type": re.sub(r"[^\w./-]+", "-", named), "dataset_name": named} if named else None


def is_only_converted(steps: Sequence[Step]) -> bool:
    """Say whether the model has the weights of a conversion: no training followed, though an evaluation may have."""
    return bool(changed := _changes(steps)) and changed[-1]["kind"] == "conversion"


def _changes(steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if _verb(step) != EVALUATED]


def quality_sentence(steps: Sequence[Step]) -> str:
    """Return how near the model is to its source; "" where a training followed the conversion, or nobody measured."""
    found = Quality.of(_changes(steps)[-1].get("quality") or {}) if is_only_converted(steps) else None
    if found is None:
        return ""
    least = "at least" if found.measure == "embeddings" else "at most"
    who = "these examples are" if found.verdict == "inconclusive" else "the model is"
    return (
        f"On {found.examples:,} held-out examples of its calibration {found}. "
        f"The tolerance of `convert` is {least} {found.shown_bound}: {who} {found.verdict}."
    )


def chain_sentence(steps: Sequence[Step]) -> str:
    """Return what was done to the model in one sentence; "" where there is one training or nothing to tell."""
    steps = _changes(steps)
    if len(steps) < 2:
        return "".join(" It was converted and not trained afterwards." for s in steps if s["kind"] == "conversion")
    verbs = [_verb(step) + _extent(step) for step in steps]
    end = ", and not trained afterwards" if is_only_converted(steps) else ""
    return f" It was {', then '.join(verbs)}{end}."


def step_lines(steps: Sequence[Step], base_model: str | None) -> list[str]:
    """Return a line for each step, the first one first; none where there is only one."""
    return [_line(step, _source_name(step, index, base_model)) for index, step in enumerate(steps)] * (len(steps) > 1)


def step_sections(steps: Sequence[Step], base_model: str | None, has_report: bool = False) -> list[dict[str, Any]]:
    """Return the details of each step.

    Args:
        steps: of `ModelHistory`, without the folders of this machine.
        base_model: the Hub id of what the first step began with, where it has one.
        has_report: whether the report of the last conversion lies beside the card.

    Returns:
        For each step "kind", "title", "sentence", "rows", "versions"; of the last conversion also "in_report".
    """
    titles = [_title(step) for step in steps]
    sections: list[dict[str, Any]] = []
    for index, (step, title) in enumerate(zip(steps, titles, strict=True)):
        title += f" (step {index + 1})" if titles.count(title) > 1 else ""
        is_conversion = step["kind"] == "conversion"
        made = _conversion(step, _source_name(step, index, base_model)) if is_conversion else _training(step)
        # That of the weights which the model has stands above.
        if is_conversion and _changes(steps)[-1] is not step and (quality := quality_sentence([step])):
            made["sentence"] += f" {quality}"
        made["rows"] = [tuple(map(plain, row)) for row in made["rows"]]
        sections.append({"kind": step["kind"], "title": title, "versions": plain(_versions(step)), **made})
    conversions = [section for section in sections if section["kind"] == "conversion"]
    for section in conversions[-1:]:
        section["in_report"] = has_report
    return sections


def _conversion(step: Step, source: str) -> dict[str, Any]:
    """Return a sentence, and rows of before and after."""
    method, seed = step.get("method", "a method that is not recorded"), step.get("seed", "not recorded")
    sentence = f"{code(source)} was converted by {code(f'--method {method}')}, seed {seed}."
    if calibration := step.get("calibration"):
        targets = " with their targets" if calibration["targets"] else ""
        passages = ""
        share = calibration.get("cut_share") or 0.0
        cut = f" ({share:.1%} of them are cut)" if share else ""
        if length := calibration.get("passage_length"):
            passages = f", half of them continued to passages of at most {length}"
        sentence += (
            f" Calibration: {calibration['count']:,} {plain(calibration['kind'])}{targets} of at most "
            f"{calibration['max_length']} tokens{cut}{passages}."
        )
    heads = step.get("heads", {})
    changed = {name: pair for name, pair in heads.items() if pair[0] != pair[1]}
    rows = [(name, *map(_shown, pair)) for name, pair in (changed or heads).items()]
    if parameters := step.get("parameters"):
        rows.append(("parameters stored", f"{parameters['before']:,}", f"{parameters['after']:,}"))
    for site, cache in step.get("kv_cache_bytes_per_token", {}).items():
        rows.append((f"cache bytes a token ({site})", f"{cache['before']:,}", f"{cache['after']:,}"))
    if step.get("talking_heads"):
        rows.append(("talking-heads projections", "none", ", ".join(step["talking_heads"])))
    return {"sentence": sentence, "rows": rows}


def _shown(count: int | list[int | None] | None) -> str:
    """Return a number of heads or a rank; of layers that differ all of them."""
    if isinstance(count, list):
        return ", ".join(map(_shown, count))
    return "none" if count is None else str(count)


def _training(step: Step) -> dict[str, Any]:
    """Return a sentence and the arguments that matter."""
    if _verb(step) == EVALUATED:
        names = [name for name in EVALUATION_ARGUMENTS if step["arguments"].get(name) not in (None, "")]
        return {"sentence": _problem(step).strip(), "rows": [(name, step["arguments"][name]) for name in names]}
    parts = [f"{step['steps']:,} optimiser steps"] if "steps" in step else []
    parts += [f"{step['train_samples']:,} training examples"] if "train_samples" in step else []
    parts += [f"{step['epoch']:g} epochs"] if "epoch" in step else []
    parts += [f"{step['train_runtime']:,.0f} s"] if step.get("train_runtime") else []
    sentence = f"{', '.join(parts)}." if parts else ""
    if {"initial_eval_loss", "eval_loss"} <= step.keys():
        sentence += f" Loss on held-out text: {step['initial_eval_loss']:.4f} before, {step['eval_loss']:.4f} after."
        sentence += _no_gain(step)
    sentence += _problem(step)
    arguments = step["arguments"]
    if arguments.get("max_train_steps") is not None:
        arguments = {name: value for name, value in arguments.items() if name != "num_train_epochs"}
    rows = [(name, arguments[name]) for name in TRAINING_ARGUMENTS if arguments.get(name) not in (None, "")]
    return {"sentence": sentence, "rows": rows}


def _problem(step: Step) -> str:
    """Return what a classifier of a user's own tables does, with its labels; "" for others."""
    if step.get("problem_type") not in PROBLEMS:
        return ""
    names, what = step.get("labels", []), PROBLEMS[step["problem_type"]]
    if reads_pairs([step]):
        what = what.replace("each text", "each pair of texts")
    shown = ", ".join(code(name) for name in names[:MOST_LABELS])
    more = f" and {len(names) - MOST_LABELS} more" if len(names) > MOST_LABELS else ""
    return f" {what.format(len(names))}{f': {shown}{more}' if names else ''}."


def _line(step: Step, source: str) -> str:
    if step["kind"] == "conversion":
        calibration = step.get("calibration")
        text = f", calibrated on {calibration['count']:,} {plain(calibration['kind'])}" if calibration else ""
        return f"{code(source)} was converted by {code('--method ' + step.get('method', 'not recorded'))}{text}."
    line, data = _verb(step).capitalize(), data_name(step, TRAINING_FILES)
    if teacher := step["arguments"].get("teacher"):
        line += f" with the teacher {code(teacher)}"
    line += f" on {plain(data['dataset_name'])}" if data else ""
    units = (("steps", "steps"), ("train_samples", "examples"))
    counts = [f"{step[name]:,} {unit}" for name, unit in units if step.get(name)]
    return f"{line}: {', '.join(counts)}.{_no_gain(step)}" if counts else f"{line}."


def _extent(step: Step) -> str:
    without = ", without a lower held-out loss" if _no_gain(step) else ""
    return f" ({step['steps']:,} steps{without})" if _has_trained(step) else ""


def _no_gain(step: Step) -> str:
    """Return a sentence if an uptraining did not lower the loss on its held-out text; "" for others."""
    before, after = step.get("initial_eval_loss"), step.get("eval_loss")
    is_worse = bool(step.get("steps")) and before is not None and after is not None and after >= before
    return " The held-out loss did not improve." if is_worse else ""


def _verb(step: Step) -> str:
    if step["kind"] == "conversion":
        return "converted"
    if step.get("steps") == 0:
        return EVALUATED
    if _title(step) == "Uptraining":
        return "distilled" if step["arguments"].get("teacher") else "uptrained"
    return "pretrained" if any(name in step["arguments"] for name in PRETRAINING) else "fine-tuned"


def _has_trained(step: Step) -> bool:
    return _verb(step) not in ("converted", EVALUATED) and bool(step.get("steps"))


def _title(step: Step) -> str:
    if step["kind"] == "conversion":
        return "Conversion"
    if step.get("steps") == 0:
        return "Evaluation"
    # Pretraining has an objective among its arguments, too.
    of_uptraining = "objective" in step["arguments"] and "whole_word_mask" not in step["arguments"]
    return "Uptraining" if "objective" in step or of_uptraining else "Training"


def _source_name(step: Step, index: int, base_model: str | None) -> str:
    """Return what a conversion began with: the base model's Hub id for the first step, else the name recorded."""
    return base_model if index == 0 and base_model else step.get("source", "a checkpoint")


def _glue_task(training: Step) -> str | None:
    return None if "dataset" in training else _task_name(training)


def _task_name(training: Step) -> str | None:
    # What was asked for may be written in another way ("STS-B") than the results write it.
    return training.get("task_name") or training["arguments"].get("task_name")


def _versions(step: Step) -> str:
    return ", ".join(f"{name} {number}" for name, number in step.get("versions", {}).items()) or "not recorded"
