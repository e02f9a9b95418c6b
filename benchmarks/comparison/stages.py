"""The series of trainings of the comparison, as files for `attn-variants sweep`, in the order of their priority."""

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.comparison.rows import (
    HEADS,
    MODELS,
    BaseModel,
    Row,
    list_head_rows,
    list_mechanism_rows,
    match_parameters,
)
from hf_attn_variants.commands import load_command
from hf_attn_variants.sweep.plan import SweepRun

__all__ = ["BUDGETS", "CURVE_METHODS", "Budget", "Stage", "get_vocabulary", "iterate_stages"]

SEEDS = [0, 1]  # of the mechanisms with different numbers of heads; the others have the first seed
SHARE = 0.05  # of the steps from scratch, for which a converted model is trained
TASKS = {"stsb": "STS-B", "qnli": "QNLI"}
# The original steps of the T5 model of the curve (see the README of its checkpoint).
CURVE_STEPS = 7543
# The methods of the curve, with the flags of the conversion. Weighted grouping also trains the original's heads.
CURVE_METHODS: dict[str, dict[str, Any]] = {
    "mean pooling": {"method": "mean"},
    "similarity grouping (aligned)": {"method": "aligned"},
    "weighted grouping": {"method": "mean"},
    "calibrated": {"method": "calibrated", "fit_steps": 0},
}


@dataclass(frozen=True)
class Budget:
    """The sizes of the runs.

    Args:
        bert_steps, t5_steps, task_steps: the optimizer steps from scratch, and of the fine-tuning on a task.
        bert_batch, t5_batch: the number of blocks of 32 tokens, and of text pairs, per step.
        t5_vocabulary: the size of the vocabulary of T5, or None for that of the trained T5. With a small vocabulary,
            the loss depends on the context after few steps, but the translations are useless and not made.
        max_eval_samples: the number of dev examples.
        alphas: the shares of the original steps in the curve, in addition to 0.
    """

    bert_steps: int
    t5_steps: int
    task_steps: int
    bert_batch: int
    t5_batch: int
    t5_vocabulary: int | None
    max_eval_samples: int
    alphas: tuple[float, ...]


BUDGETS = {
    # At most 10 minutes per run on two cores, and 16 hours in total.
    "full": Budget(3000, 1500, 500, 32, 64, None, 4096, (0.01, 0.025, 0.05, 0.1)),
    # About three hours of one idle core. The models are far from trained.
    "small": Budget(1500, 150, 100, 32, 16, 512, 512, (0.01, 0.025)),
}


@dataclass(frozen=True)
class Stage:
    """A sweep of the comparison.

    Args:
        name: the name of its folder in the work folder.
        content: the sweep file.
        unsupported: the reason for each row that the model does not support.
    """

    name: str
    content: dict[str, Any]
    unsupported: dict[str, str]


def iterate_stages(data: Path, work: Path, budget: Budget, plugin: str | None) -> Iterator[Stage]:
    """Yield the stages. Later stages read the checkpoints of earlier ones, so run each before the next is requested.

    Args:
        data: the folder with `wikipedia/`, `multi30k/`, `glue/` and `checkpoints/`.
        work: the folder of all runs, which contains the vocabularies (see `get_vocabulary`).
        budget: the sizes of the runs.
        plugin: the file of a plugin, or None.
    """
    common = {"plugin": plugin} if plugin else {}
    recipes = {"bert": _bert_recipe(data, budget) | common, "t5": _t5_recipe(data, budget) | common}
    for kind, head_counts, seeds in (
        ("heads", HEADS[:1], SEEDS),
        ("mechanisms", (), SEEDS[:1]),
        ("head-counts", HEADS[1:], SEEDS),
    ):
        for name, base in MODELS.items():
            rows = list_head_rows(head_counts) if head_counts else list_mechanism_rows(base)
            recipe = recipes[name] | {
                "model_type": base.model_type,
                "tokenizer_name": get_vocabulary(name, data, work, budget),
            }
            # Only the mechanisms with two seeds translate the test set.
            translates = bool(head_counts) and budget.t5_vocabulary is None
            recipe |= {"eval_loss_only": True, "skip_predict": not translates} if name == "t5" else {}
            variants = {
                row.name: {"config_overrides": match_parameters(base, row)} for row in rows if row.unsupported is None
            }
            yield _stage(f"{name}-{kind}", name, recipe, seeds, variants, rows)
    yield from _task_stages(data, work, budget, common)
    for name, base in MODELS.items():
        original = str(_trained(work, f"{name}-heads", list_head_rows()[0].name, SEEDS[0]))
        yield _conversion_stage(base, name, original, recipes[name], data, common)
    yield _curve_stage(data, budget)


def get_vocabulary(model: str, data: Path, work: Path, budget: Budget) -> str:
    """Return the folder of the tokenizer of a model. If it is in the work folder, it must be created first."""
    return _curve_model(data) if model == "t5" and budget.t5_vocabulary is None else str(work / f"vocabulary-{model}")


def _stage(
    name: str, model: str, flags: dict[str, Any], seeds: list[int], variants: dict[str, Any], rows: list[Row] = ()
) -> Stage:
    command = {"bert": "pretrain", "t5": "seq2seq"}[model]
    content = {"title": name, "command": command, "seeds": seeds, "flags": flags, "variants": variants}
    return Stage(name, content, {row.name: row.unsupported for row in rows if row.unsupported})


def _bert_recipe(data: Path, budget: Budget) -> dict[str, Any]:
    """Return the flags of masked language modeling, as in `sweeps/talking_heads_albert.yaml`.

    After few steps, the models do not use their context yet, so their attention cannot be compared.
    """
    return {
        "train_file": [str(data / "wikipedia/train-*.txt.gz")],
        "validation_file": [str(data / "wikipedia/valid.txt.gz")],
        "max_length": 32,
        "mlm_probability": 0.3,
        "dropout_rate": 0,
        "learning_rate": 2e-3,
        "adam_beta2": 0.98,
        "weight_decay": 0.01,
        "per_device_train_batch_size": budget.bert_batch,
        **_run_flags(budget.bert_steps, budget.max_eval_samples),
    }


def _t5_recipe(data: Path, budget: Budget) -> dict[str, Any]:
    """Return the flags of translation, which are those of `benchmarks.train.t5_multi30k`."""
    files = {"": "train", "validation_": "val", "test_": "test_2016_flickr"}
    return {
        **{f"{p}source_file": str(data / f"multi30k/{split}.en.gz") for p, split in files.items()},
        **{f"{p}target_file": str(data / f"multi30k/{split}.de.gz") for p, split in files.items()},
        "max_length": 64,
        "group_by_length": True,
        "label_smoothing_factor": 0.1,
        "optim": "adafactor",
        "adafactor_scale_parameter": True,
        "learning_rate": 2e-2,
        "per_device_train_batch_size": budget.t5_batch,
        **_run_flags(budget.t5_steps, budget.max_eval_samples),
    }


def _run_flags(steps: int, max_eval_samples: int) -> dict[str, Any]:
    return {
        "max_eval_samples": max_eval_samples,
        "max_train_steps": steps,
        "num_warmup_steps": steps // 6,
        "eval_steps": steps,
        "checkpointing_steps": max(1, steps // 4),
        "save_total_limit": 1,
        "cpu": True,
    }


def _task_stages(data: Path, work: Path, budget: Budget, common: Mapping[str, Any]) -> Iterator[Stage]:
    """Yield the fine-tuning of the pretrained BERT models, with a sweep per task and seed."""
    for seed in SEEDS:
        for task, folder in TASKS.items():
            flags = {
                "task_name": task,
                "data_dir": str(data / "glue" / folder),
                "max_length": 128,
                "per_device_train_batch_size": 16,
                "learning_rate": 5e-4,
                "skip_predict": True,
                **_run_flags(budget.task_steps, budget.max_eval_samples),
                **common,
            }
            variants = {
                row.name: {"model_name_or_path": str(_trained(work, "bert-heads", row.name, seed))}
                for row in list_head_rows(HEADS[:1])
            }
            content = {"title": task, "command": "glue", "seeds": [seed], "flags": flags, "variants": variants}
            yield Stage(f"bert-{task}-{seed}", content, {})


def _conversion_stage(
    base: BaseModel, name: str, original: str, recipe: dict[str, Any], data: Path, common: dict[str, str]
) -> Stage:
    """Return the conversions of the multi-head model, each followed by a share of its training steps."""
    steps = round(SHARE * recipe["max_train_steps"])
    flags = recipe | {
        "max_train_steps": steps,
        "eval_steps": steps,
        "num_warmup_steps": 0,
        "checkpointing_steps": steps,
    }
    flags |= {"learning_rate": recipe["learning_rate"] / 4}
    flags |= {"eval_loss_only": True, "skip_predict": True} if name == "t5" else {}
    text = {"calibration_file": str(data / "wikipedia/valid.txt.gz")}
    if name == "t5":
        files = (f"calibration{side}_file" for side in ("", "_target"))
        text = dict(zip(files, (recipe["source_file"], recipe["target_file"]), strict=True))
    text |= {"method": "calibrated", "calibration_size": 256, "max_length": 64, "fit_steps": 0}
    variants: dict[str, Any] = {"MHA": {"model_name_or_path": original}}
    unsupported = {}
    for row in (*list_head_rows(HEADS[:1])[1:], *list_mechanism_rows(base, from_scratch=False)):
        fields = {key: value for key, value in row.fields.items() if not key.endswith("talking_heads_init")}
        reason = row.unsupported
        for options in () if reason else (text, {}):
            convert = {"model_name_or_path": original, **fields, **options, **common}
            if (reason := _find_problem(convert)) is None:
                variants[row.name] = {"convert": convert}
                break
        if reason is not None:
            unsupported[row.name] = reason
    stage = _stage(f"{name}-converted", name, flags, SEEDS[:1], variants)
    return Stage(stage.name, stage.content, unsupported)


def _find_problem(convert: Mapping[str, Any]) -> str | None:
    """Return the reason why `convert` does not accept its flags, or None, also if the original is not trained yet."""
    if not Path(convert["model_name_or_path"]).is_dir():
        return None
    words = ["--output_dir", "converted"]
    for name, value in convert.items():
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        words += [f"--{name}", *map(str, values)]
    command = load_command("convert")
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # argparse prints its errors
            args = command.parse_args(words)
        command.check_convertible(args)
    except (ValueError, OSError) as error:
        return str(error)
    except SystemExit:
        return "`convert` has no flag for this field."
    return None


def _curve_stage(data: Path, budget: Budget) -> Stage:
    """Return the curve of the small T5, with the recipe of `sweeps/alpha.yaml`."""
    recipe = _t5_recipe(data, budget)
    dropped = {"label_smoothing_factor", "test_source_file", "test_target_file", "max_train_steps", "num_warmup_steps"}
    flags = {name: value for name, value in recipe.items() if name not in dropped} | {
        "objective": "seq2seq",
        "trainable": "all",
        "pretraining_steps": CURVE_STEPS,
        "predict_with_generate": True,
        "max_eval_samples": 1014,
        "per_device_train_batch_size": 64,
        "learning_rate": 5e-3,
        "eval_steps": 1000,
        "checkpointing_steps": 100,
    }
    text = {
        f"calibration{side}_file": recipe[f"{place}_file"] for side, place in (("", "source"), ("_target", "target"))
    }
    variants: dict[str, dict[str, Any]] = {}
    for name, method in CURVE_METHODS.items():
        variants[name] = {"convert": method | (text if method["method"] != "mean" else {})}
    variants["weighted grouping"]["multi_head_model"] = _curve_model(data)
    content = {
        "title": "curve",
        "command": "uptrain",
        "seeds": SEEDS[:1],
        "convert": {"model_name_or_path": _curve_model(data), "num_key_value_heads": 1},
        "flags": flags,
        "variants": variants,
        "grid": {"alpha": list(budget.alphas)},
    }
    return Stage("curve", content, {})


def _curve_model(data: Path) -> str:
    return str(data / "checkpoints/t5-mini-multi30k-en-de")


def _trained(work: Path, stage: str, name: str, seed: int) -> Path:
    """Return the folder of a trained model."""
    run = SweepRun(name, name, {}, seed, [], [], None)
    return work / stage / run.folder / "trained"
